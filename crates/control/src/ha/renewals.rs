//! Renewals of a host's lease: fetched from its agent, or through another host, and answered.
//!
//! A peer may prolong a term, but only the host's own agent may report that it is over: a peer that
//! is wrong must not start VMs twice.

use std::sync::Arc;
use std::time::Duration;

use futures::future::select_ok;
use godwit_api::control::Problem;
use godwit_api::{
    ClientError, HaAnswer, HaForward, HaRenewal, HaVerdict, MOST_RELEASED, ReleaseVms,
};
use godwit_ha::{Answer, Facts, Judge, Phase, Record, Renewal, Term, Timing};
use godwit_qemu::Uuid;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use super::heartbeats;
use super::seat::{Judged, Judging, Seat};
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::text::beginning;

/// Intervals that one request may take.
const ASK_INTERVALS: u32 = 2;
/// Most hosts that are asked at once to forward a renewal.
const MOST_FORWARDERS: usize = 2;
/// Intervals that a new leader waits for the first reports of hosts before it opens a term, whose
/// heartbeat datastores depend on them.
const SETTLING_INTERVALS: u32 = 20;
/// Intervals that a host which asks for a term is given to report its datastores and its watchdog:
/// its agent may have just begun.
const REPORTING_INTERVALS: u32 = 15;
/// Intervals without a request for a term after which the host begins anew.
const PAUSE_INTERVALS: u32 = 5;

/// A renewal, and the host through which it came.
struct Heard {
    renewal: HaRenewal,
    through: Option<String>,
}

/// Fetches and answers the renewals of a host.
pub(super) async fn run(judging: Arc<Judging>, judged: Arc<Judged>) {
    let step = judging.timing.interval;
    // Hosts have their turns one after the other, not all at the same moment.
    let (random, _) = judged.holder.host.as_u64_pair();
    let share = u32::try_from(random % 100).unwrap_or_default();
    let mut ticks = interval_at(Instant::now() + step * share / 100, step);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut number = 0;
    loop {
        ticks.tick().await;
        turn(&judging, &judged, number).await;
        number = number.wrapping_add(1);
    }
}

async fn turn(judging: &Judging, judged: &Judged, number: usize) {
    let heard = match fetch(judging, judged, number).await {
        Ok(heard) => heard,
        Err(why) => {
            let why = beginning(&why, MOST_REASON_BYTES);
            let is_worked_on = judging.is_worked_on(&judged.host);
            judged.note(|shown| {
                (shown.unheard, shown.unanswered) = (Some(why), None);
                shown.rests &= is_worked_on;
            });
            return;
        }
    };
    let now = judging.now();
    let verdict = match answer(judging, judged, now, &heard).await {
        Ok(Some(verdict)) => verdict,
        Ok(None) => return,
        Err(why) => {
            let why = beginning(&why, MOST_REASON_BYTES);
            // The reason may be the same in each turn.
            if judged.shown().unanswered.as_ref() != Some(&why) {
                tracing::warn!(host = judged.host, why, "cannot answer a renewal");
            }
            judged.note(|shown| shown.unanswered = Some(why));
            return;
        }
    };
    let older = "it has a term that this manager never opened: the manager's store is older";
    let is_unknown = verdict == HaVerdict::Unknown;
    judged.note(|shown| shown.unanswered = is_unknown.then(|| older.to_owned()));
    // A host that holds its term already may have to give up VMs, too.
    let is_direct = heard.through.is_none();
    let must_deliver = is_direct
        && matches!(verdict, HaVerdict::Granted { .. } | HaVerdict::Rest { .. })
        && judging.means.restarts.has_releases(&judged.host);
    let Heard { renewal: HaRenewal { nonce, ending, .. }, through } = heard;
    let answer = HaAnswer { nonce, holder: judged.holder, verdict };
    if let Err(why) = bring(judging, judged, through, answer).await {
        tracing::debug!(host = judged.host, why, "cannot bring an answer");
    } else if must_deliver && let Err(why) = deliver_releases(judging, &judged.host).await {
        tracing::warn!(host = judged.host, why, "cannot release VMs that run elsewhere");
    }
    // No other renewal of the host is answered meanwhile.
    let step = judging.timing.interval;
    let settled = judging.means.restarts.settle_endings(&judged.host, &ending, step);
    if is_direct && let Err(problem) = settled.await {
        tracing::warn!(host = judged.host, %problem, "cannot save that a VM stays protected");
    }
}

/// Returns the time that one request may take.
fn limit(judging: &Judging) -> Duration {
    judging.timing.interval * ASK_INTERVALS
}

async fn fetch(judging: &Judging, judged: &Judged, turn: usize) -> Result<Heard, String> {
    let host = judged.host.as_str();
    let client = judging.means.agents.client_of(host).map_err(|problem| problem.to_string())?;
    let client = client.keeping(&judged.connections);
    let why = match timeout(limit(judging), client.ha_renewal()).await {
        Ok(Ok(renewal)) => return Ok(Heard { renewal, through: None }),
        Ok(Err(ClientError::Refused(error))) => return Err(error.to_string()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "its agent does not respond".to_owned(),
    };
    let peers: Vec<String> = {
        let inventory = judging.means.state.inventory();
        let others = inventory.plans().map(|(name, _)| name);
        let up = others.filter(|other| *other != host && inventory.is_up(other));
        forwarders(&up.collect::<Vec<_>>(), turn)
    };
    if peers.is_empty() {
        return Err(why);
    }
    let asked = peers.into_iter().map(|peer| Box::pin(fetch_through(judging, host, peer)));
    select_ok(asked).await.map(|(heard, _)| heard).map_err(|()| why)
}

/// Returns the hosts that are asked in a turn: other ones than in the turn before, as far as there
/// are others. Some may not reach the host either.
fn forwarders(up: &[&str], turn: usize) -> Vec<String> {
    let most = MOST_FORWARDERS.min(up.len());
    let first = turn.wrapping_mul(most).checked_rem(up.len()).unwrap_or_default();
    up.iter().cycle().skip(first).take(most).map(|host| (*host).to_owned()).collect()
}

async fn fetch_through(judging: &Judging, host: &str, peer: String) -> Result<Heard, ()> {
    let forward = HaForward { host: host.to_owned(), answer: None };
    let client = judging.means.agents.client_of(&peer).map_err(|_| ())?;
    match timeout(limit(judging), client.ha_forward(&forward)).await {
        Ok(Ok(forwarded)) => {
            let renewal = forwarded.renewal.ok_or(())?;
            Ok(Heard { renewal, through: Some(peer) })
        }
        Ok(Err(error)) => {
            tracing::debug!(host, peer, %error, "no renewal through a peer");
            Err(())
        }
        Err(_) => Err(()),
    }
}

async fn bring(
    judging: &Judging,
    judged: &Judged,
    through: Option<String>,
    answer: HaAnswer,
) -> Result<(), String> {
    let host = &judged.host;
    let to = through.as_deref().unwrap_or(host);
    let client = judging.means.agents.client_of(to).map_err(|problem| problem.to_string())?;
    let brought = async {
        if through.is_none() {
            return client.keeping(&judged.connections).ha_answer(&answer).await;
        }
        let forward = HaForward { host: host.clone(), answer: Some(answer) };
        client.ha_forward(&forward).await.map(drop)
    };
    match timeout(limit(judging), brought).await {
        Ok(brought) => brought.map_err(|error| error.to_string()),
        Err(_) => Err(format!("{to} does not respond")),
    }
}

/// Returns the answer to a renewal that arrived at `now`; `None`: it gets none.
async fn answer(
    judging: &Judging,
    judged: &Judged,
    now: Duration,
    heard: &Heard,
) -> Result<Option<HaVerdict>, String> {
    let mut seat = judged.seat.lock().await;
    // After the renewal arrived: what this manager grants counts from before that.
    if !judged.still_leads(judging, &seat).await {
        return Ok(None);
    }
    let HaRenewal { watchdog, .. } = heard.renewal;
    let renewal = of_judge(judged, &seat, &heard.renewal);
    let here = heard.renewal.here.as_deref();
    // A peer may have left something out, and another cluster gives answers of its own.
    let here = here.filter(|_| heard.through.is_none() && renewal.is_some());
    judging.means.terms.name(&judged.host, here);
    let Some(renewal) = renewal else { return Ok(None) };
    if renewal.over && heard.through.is_some() {
        // It is not heard then: its heartbeats are read.
        return Err("it gets a new term only if the manager itself reaches it".to_owned());
    }
    let ending = &heard.renewal.ending;
    if !ending.is_empty() {
        let noted = judging.means.restarts.note_endings(&judged.host, ending).await;
        noted.map_err(|problem| problem.to_string())?;
    }
    judged.note(|shown| (shown.heard_at, shown.unheard) = (Some(now), None));
    if renewal.over && renewal.term >= seat.judge().record().term {
        // A term that this manager never opened, because its store is older, ended earlier ones.
        let reported = judged.reported_over(judging, &mut seat, now, renewal.term).await;
        reported.map_err(|error| error.to_string())?;
    }
    if renewal.over {
        // Before a new term: a device that is slow must not cut off the VMs that start in it.
        judged.keep_power().await;
    }
    let rests = may_rest(judging, judged, &mut seat, heard, renewal);
    if rests && renewal.over {
        // Its answer confirms the end of protection, and an unprotected VM starts without a term.
        deliver_releases(judging, &judged.host).await?;
        return Ok(Some(HaVerdict::Rest { term: renewal.term.0 }));
    }
    let (mut datastores, mut facts) = (None, Facts::default());
    if renewal.over && seat.judge().phase() == Phase::Over {
        await_reports(judging, judged, &mut seat, now, watchdog)?;
        let found = prepare(judging, judged, &mut seat).await;
        let found = found.inspect_err(|_| judged.publish(judging))?;
        let fencing = judging.means.devices.has(&judged.host);
        facts = Facts { datastores: found.len(), watchdog, fencing };
        datastores = Some(found);
    }
    // A peer that is wrong must not end a term: it can only say that there is no watchdog.
    let has_watchdog =
        watchdog && (heard.through.is_none() || seat.judge().record().facts.watchdog);
    let timing = judging.timing;
    let take = |judge: &mut Judge| {
        let answer = judge.renewal(now, renewal, facts);
        if matches!(answer, Answer::Granted(_)) {
            follow_watchdog(judge, timing, now, has_watchdog);
        }
        answer
    };
    let answer = judged.change(judging, &mut seat, datastores, "", take).await;
    let answer = answer.map_err(|error| error.to_string())?;
    if matches!(answer, Answer::Granted(_)) {
        judged.keep_power().await;
    }
    seat.is_outdated = answer == Answer::Unknown;
    Ok(Some(verdict(answer, &seat, rests)))
}

fn verdict(answer: Answer, seat: &Seat, rests: bool) -> HaVerdict {
    match answer {
        // To its judge that is a grant: the host may have to keep the term.
        Answer::Granted(grant) if rests => HaVerdict::Rest { term: grant.term.0 },
        Answer::Granted(grant) => {
            HaVerdict::Granted { term: grant.term.0, datastores: seat.datastores().to_vec() }
        }
        Answer::Ended(term) => HaVerdict::Ended { term: term.0 },
        Answer::Unknown => HaVerdict::Unknown,
    }
}

/// Returns whether a host that reports its newest term itself may give it up, and needs no other
/// one. A start that was requested in the term before keeps it, or is refused.
fn may_rest(
    judging: &Judging,
    judged: &Judged,
    seat: &mut Seat,
    heard: &Heard,
    renewal: Renewal,
) -> bool {
    let judge = seat.judge();
    // A host that has not accepted its newest term yet does that first, so that it can end it.
    let is_newest = renewal.term == judge.record().term || judge.phase() == Phase::Over;
    let may_rest = is_newest && heard.through.is_none() && judging.is_worked_on(&judged.host);
    let rests = may_rest && renewal.over;
    seat.is_outdated &= !rests;
    judged.note(|shown| shown.rests = rests);
    may_rest
}

/// Has a judge that was just renewed count with the watchdog of that renewal. The host may have
/// accepted its term in a later boot than the one that asked for it, or have lost its watchdog
/// since.
fn follow_watchdog(judge: &mut Judge, timing: Timing, now: Duration, watchdog: bool) {
    let record = judge.record();
    if record.facts.watchdog != watchdog {
        let facts = Facts { watchdog, ..record.facts };
        *judge = Judge::new(timing, Record { facts, ..record }, now);
    }
}

/// Returns what a renewal means to the host's judge; `None`: it is not for this cluster.
fn of_judge(judged: &Judged, seat: &Seat, renewal: &HaRenewal) -> Option<Renewal> {
    let own = Renewal { term: Term(renewal.term), over: renewal.over };
    let other = match renewal.holder {
        Some(holder) if holder == judged.holder => None,
        // Before its first term.
        None if renewal.over && renewal.term == 0 => None,
        None => Some("its agent reports a term of no cluster".to_owned()),
        // It has another cluster's term behind it: a new host.
        Some(_) if renewal.over && seat.judge().phase() == Phase::Over => {
            judged.note(|shown| shown.held_elsewhere = None);
            return Some(Renewal { term: Term(0), over: true });
        }
        Some(other) => Some(format!("it is held by another cluster, {}", other.cluster)),
    };
    let is_own = other.is_none();
    judged.note(|shown| shown.held_elsewhere = other);
    is_own.then_some(own)
}

/// Prepares a new term of a host whose former one is over: VMs that were started elsewhere are
/// deleted there, and its heartbeats are opened. Returns its heartbeat datastores.
async fn prepare(judging: &Judging, judged: &Judged, seat: &mut Seat) -> Result<Vec<Uuid>, String> {
    if !is_settled(judging) {
        return Err("the manager has just begun to lead, and waits for other hosts".to_owned());
    }
    judged.hand_over(judging, seat).await.map_err(|problem| problem.to_string())?;
    let next = seat.judge().record().term.next();
    // Before the releases are read: a restart that begins now finds the host not over.
    judged.announce(judging, next);
    deliver_releases(judging, &judged.host).await?;
    Ok(heartbeats::open(judging, judged, next, limit(judging)).await)
}

/// Refuses a term to a host that has just begun to ask for one and lacks reports: its heartbeat
/// datastores are fixed for the term, and nobody should have to confirm that it is off because its
/// watchdog began later than its agent.
fn await_reports(
    judging: &Judging,
    judged: &Judged,
    seat: &mut Seat,
    now: Duration,
    watchdog: bool,
) -> Result<(), String> {
    let step = judging.timing.interval;
    let asks_for = seat.asks(now, step * PAUSE_INTERVALS);
    let has_datastores = heartbeats::are_reported(&judging.means.state.inventory(), &judged.host);
    if (watchdog && has_datastores) || asks_for >= step * REPORTING_INTERVALS {
        return Ok(());
    }
    let awaited = if has_datastores { "its watchdog" } else { "a datastore that another host has" };
    Err(format!("it has just begun to respond, and has not reported {awaited} yet"))
}

/// Returns whether the hosts have had time to report to this manager.
fn is_settled(judging: &Judging) -> bool {
    let inventory = judging.means.state.inventory();
    let are_all_up = inventory.plans().all(|(host, _)| inventory.is_up(host));
    are_all_up || judging.began.elapsed() >= judging.timing.interval * SETTLING_INTERVALS
}

/// Has a host delete the definitions of its VMs that were started elsewhere.
async fn deliver_releases(judging: &Judging, host: &str) -> Result<(), String> {
    let restarts = &judging.means.restarts;
    let text = |problem: Problem| problem.to_string();
    let released = restarts.take_releases(host).await.map_err(text)?;
    let client = judging.means.agents.client_of(host).map_err(text)?;
    for some in released.chunks(MOST_RELEASED) {
        let request = ReleaseVms { vms: some.to_vec() };
        match timeout(limit(judging), client.ha_release(&request)).await {
            Ok(delivered) => delivered.map_err(|error| error.to_string())?,
            Err(_) => return Err("its agent does not delete VMs that run elsewhere".to_owned()),
        }
        restarts.delivered(host, some).await.map_err(text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_its_turn_to_forward() {
        assert_eq!(forwarders(&[], 7), [""; 0]);
        assert_eq!(forwarders(&["b"], 7), ["b"]);
        let up = ["b", "c", "d"];
        assert_eq!(forwarders(&up, 0), ["b", "c"]);
        assert_eq!(forwarders(&up, 1), ["d", "b"]);
        assert_eq!(forwarders(&up, 2), ["c", "d"]);
        assert_eq!(forwarders(&up, usize::MAX).len(), 2);
    }
}
