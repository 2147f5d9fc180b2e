//! Watch over a host whose renewals are missing: its heartbeats are read, its power is cut, and the
//! end of its term is handed to the restarts.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{HaPhase, JournalKind};
use godwit_ha::{Action, Fencing, Term};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::heartbeats;
use super::seat::{Judged, Judging};
use crate::journal::entries::NewEntry;

/// Longest wait for the fencing device of a host whose watchdog has stopped it anyway.
const PATIENCE_WITH_WATCHDOG: Duration = Duration::from_secs(3);

/// Watches over one host.
pub(super) async fn run(judging: Arc<Judging>, judged: Arc<Judged>) {
    let step = judging.timing.interval;
    let mut ticks = interval(step);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut turn = 0_usize;
    // Cuts of its power that nobody waits for any more; they end on drop.
    let mut cuts = JoinSet::new();
    loop {
        ticks.tick().await;
        while cuts.try_join_next().is_some() {}
        let handed_over = {
            let mut seat = judged.seat.lock().await;
            judged.hand_over(&judging, &mut seat).await
        };
        if let Err(problem) = handed_over {
            tracing::warn!(host = judged.host, %problem, "cannot begin restarts");
        }
        // One late renewal is no silence.
        if judged.unheard_for(judging.now()) > step + step / 2 {
            heartbeats::read(&judging, &judged, turn, 3 * step).await;
            turn = turn.wrapping_add(1);
        } else {
            judged.note(|shown| shown.heartbeat = None);
        }
        match judged.check(&judging).await {
            Ok(Some(action)) => carry_out(&judging, &judged, &mut cuts, action, step).await,
            Ok(None) => {}
            Err(problem) => {
                tracing::warn!(host = judged.host, %problem, "cannot end a host's term");
            }
        }
    }
}

async fn carry_out(
    judging: &Arc<Judging>,
    judged: &Arc<Judged>,
    cuts: &mut JoinSet<Fencing>,
    action: Action,
    step: Duration,
) {
    let host = &judged.host;
    match action {
        Action::Fence(term) => fence(judging, judged, cuts, term, step).await,
        Action::AskOperator(term) => {
            tracing::error!(host, %term, "an operator must confirm that it is off");
        }
        // The next turn hands its VMs over.
        Action::Release(term) => tracing::warn!(host, %term, "a host's term has ended"),
    }
}

/// Cuts a host's power, and reports the result to its judge until that is saved. With a watchdog
/// the silence alone ends the term: a slow device then continues in `cuts`, until the host responds
/// ([`Judged::keep_power`]).
async fn fence(
    judging: &Arc<Judging>,
    judged: &Arc<Judged>,
    cuts: &mut JoinSet<Fencing>,
    term: Term,
    step: Duration,
) {
    let host = &judged.host;
    let result = if judging.is_worked_on(host) {
        tracing::warn!(host, "it is silent in maintenance and has no protected VM: no power cut");
        Fencing::Failed
    } else {
        // Only the result of this cut counts.
        cuts.shutdown().await;
        begin_cut(judging, judged, cuts, term).await;
        let result = async { cuts.join_next().await.and_then(Result::ok) };
        let result = if judged.shown().record.facts.watchdog {
            timeout(PATIENCE_WITH_WATCHDOG, result).await.ok().flatten()
        } else {
            result.await
        };
        result.unwrap_or(Fencing::Failed)
    };
    let mut ticks = interval(step);
    loop {
        ticks.tick().await;
        match judged.fenced(judging, term, result).await {
            Ok(Some(Action::AskOperator(term))) => {
                tracing::error!(host, %term, "an operator must confirm that it is off");
                return;
            }
            Ok(_) => return,
            Err(problem) => tracing::warn!(host, %problem, "cannot end a host's term"),
        }
    }
}

/// Begins to cut a host's power, unless it responds again.
async fn begin_cut(
    judging: &Arc<Judging>,
    judged: &Arc<Judged>,
    cuts: &mut JoinSet<Fencing>,
    term: Term,
) {
    let cutting = Arc::clone(&judged.cutting).lock_owned().await;
    let (of, host) = (Arc::clone(judging), Arc::clone(judged));
    let begun = cuts.spawn(async move {
        let _cutting = cutting;
        cut(of, host, term).await
    });
    *judged.cut.lock() = Some(begun);
    // A renewal from now on ends the cut. One that came before has changed the phase.
    let shown = judged.shown();
    if shown.phase != HaPhase::Fencing || shown.record.term != term {
        judged.keep_power().await;
    }
}

/// Cuts a host's power and notes that in the journal.
async fn cut(judging: Arc<Judging>, judged: Arc<Judged>, term: Term) -> Fencing {
    let host = &judged.host;
    let result = judging.means.devices.cut(host).await;
    if result == Fencing::Off {
        let text = format!("the power of host {host} was cut: it was silent in {term}");
        let entry = NewEntry::warning(JournalKind::HostFenced, text).about("host", host);
        judging.means.keeper.journal(entry);
    }
    result
}
