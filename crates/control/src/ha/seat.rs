//! The judge of one host, its record in the store, and what is shown of both.
//!
//! A change of the record is saved under the leadership before anything acts on it. A change of
//! a judge holds its seat until then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::control::{HaPhase, JournalKind, Problem, ProblemCode};
use godwit_api::{KeptConnections, TermHolder};
use godwit_ha::{Action, Fencing, Judge, Mark, Phase, Record, Term, Timing};
use godwit_qemu::Uuid;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::admission::Admission;
use super::fencing::Devices;
use super::own::OwnVms;
use super::record::{HA_HOSTS, SavedJudge};
use super::restarts::Restarts;
use super::terms::{HostTerm, Terms};
use super::troubles::Troubles;
use crate::agents::AgentClients;
use crate::clock::{Clock, suspended};
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::storage::keeper::{Keeper, Writes};

/// A machine that was suspended for longer than this asks the store whether it leads.
const SUSPENDED: Duration = Duration::from_millis(100);

/// Services that the judges use.
pub(crate) struct Means {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) state: Arc<State>,
    pub(crate) agents: Arc<AgentClients>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) restarts: Arc<Restarts>,
    pub(crate) own: Arc<OwnVms>,
    pub(crate) terms: Arc<Terms>,
    pub(crate) troubles: Arc<Troubles>,
    pub(crate) admission: Admission,
    pub(crate) clock: Clock,
}

/// What all judges of one leadership share.
pub(super) struct Judging {
    pub(super) means: Means,
    pub(super) timing: Timing,
    pub(super) began: Instant,
    /// How long the machine had been suspended when this manager last led for certain.
    suspended: Mutex<Duration>,
}

impl Judging {
    pub(super) fn new(means: Means, timing: Timing) -> Judging {
        let suspended = Mutex::new(suspended());
        Judging { means, timing, began: Instant::now(), suspended }
    }

    /// Returns the time since the machine's boot.
    pub(super) fn now(&self) -> Duration {
        (self.means.clock)()
    }

    /// Returns whether a host is in maintenance and has no protected VM: it needs no term, and
    /// keeps its power. A term that it has ends as without a fencing device.
    pub(super) fn is_worked_on(&self, host: &str) -> bool {
        let is_in_maintenance = {
            let inventory = self.means.state.inventory();
            inventory.host_plan(host).is_some_and(|plan| plan.maintenance)
        };
        is_in_maintenance && !self.means.restarts.may_run_at(host)
    }
}

/// A judge and its record.
pub(super) struct Seat {
    saved: SavedJudge,
    judge: Judge,
    /// Whether the restarts know that the newest term has ended.
    is_handed_over: bool,
    /// Whether the store may have another record: the answer to a change is missing.
    is_unsure: bool,
    /// Whether the host holds a term that this manager's store does not have. What is known of the
    /// host's witnesses is wrong then, and no silence counts.
    pub(super) is_outdated: bool,
    /// First and last of the requests for a term that followed each other.
    asked: Option<(Duration, Duration)>,
}

impl Seat {
    pub(super) fn judge(&self) -> &Judge {
        &self.judge
    }

    pub(super) fn datastores(&self) -> &[Uuid] {
        &self.saved.datastores
    }

    /// Notes that the host asks for a term. Returns for how long it has done so without a `pause`.
    pub(super) fn asks(&mut self, now: Duration, pause: Duration) -> Duration {
        let (first, last) = self.asked.unwrap_or((now, now));
        let first = if now.saturating_sub(last) > pause { now } else { first };
        self.asked = Some((first, now));
        now.saturating_sub(first)
    }
}

/// A successful reading of a heartbeat; times are those since the machine's boot.
pub(super) struct Reading {
    /// Place of the datastore among those of the term.
    pub(super) datastore: usize,
    pub(super) began: Duration,
    pub(super) now: Duration,
    /// What the block has; `None`: it is empty.
    pub(super) mark: Option<Mark>,
}

/// What is shown of a judge.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    pub(super) record: Record,
    pub(super) phase: HaPhase,
    pub(super) datastores: Vec<Uuid>,
    /// When the last renewal arrived, since the machine's boot.
    pub(super) heard_at: Option<Duration>,
    /// Why no renewal arrived.
    pub(super) unheard: Option<String>,
    /// Why a renewal has no answer.
    pub(super) unanswered: Option<String>,
    /// Which other cluster holds the host.
    pub(super) held_elsewhere: Option<String>,
    /// What is wrong with a heartbeat.
    pub(super) heartbeat: Option<String>,
    /// Whether it has no term because it is in maintenance.
    pub(super) rests: bool,
}

/// A host with its judge.
pub(super) struct Judged {
    pub(super) host: String,
    pub(super) holder: TermHolder,
    pub(super) seat: tokio::sync::Mutex<Seat>,
    /// Connections to its agent, for renewals.
    pub(super) connections: KeptConnections,
    /// The cut of its power that was begun last.
    pub(super) cut: Mutex<Option<AbortHandle>>,
    /// Held by a cut of its power for as long as that lasts.
    pub(super) cutting: Arc<tokio::sync::Mutex<()>>,
    shown: Mutex<Shown>,
    /// When this judge began to count, since the machine's boot.
    counts_from: Mutex<Duration>,
}

impl Judged {
    /// Creates the judge of a leadership, which counts from now on.
    pub(super) fn new(host: &str, cluster: Uuid, saved: SavedJudge, judging: &Judging) -> Judged {
        let (now, record) = (judging.now(), saved.record());
        let judge = Judge::new(judging.timing, record, now);
        let shown = Shown {
            record,
            phase: phase_of(judge.phase()),
            datastores: saved.datastores.clone(),
            heard_at: None,
            unheard: None,
            unanswered: None,
            held_elsewhere: None,
            heartbeat: None,
            rests: false,
        };
        let seat = Seat {
            saved,
            judge,
            is_handed_over: false,
            is_unsure: false,
            is_outdated: false,
            asked: None,
        };
        let judged = Judged {
            host: host.to_owned(),
            holder: TermHolder { cluster, host: seat.saved.host },
            seat: tokio::sync::Mutex::new(seat),
            connections: KeptConnections::default(),
            cut: Mutex::default(),
            cutting: Arc::default(),
            shown: Mutex::new(shown),
            counts_from: Mutex::new(now),
        };
        judged.publish(judging);
        judged
    }

    /// Has the judge count from now on, after a time in which it granted nothing.
    pub(super) async fn wake(&self, judging: &Judging) {
        let mut seat = self.seat.lock().await;
        let now = judging.now();
        *self.counts_from.lock() = now;
        judging.means.terms.name(&self.host, None);
        seat.judge = Judge::new(judging.timing, seat.saved.record(), now);
        self.show(judging, &seat);
    }

    pub(super) fn shown(&self) -> Shown {
        self.shown.lock().clone()
    }

    /// Changes what is shown beside the judge.
    pub(super) fn note(&self, note: impl FnOnce(&mut Shown)) {
        note(&mut self.shown.lock());
    }

    /// Returns how long no renewal has arrived.
    pub(super) fn unheard_for(&self, now: Duration) -> Duration {
        let heard_at = self.shown.lock().heard_at.unwrap_or_default();
        now.saturating_sub(heard_at.max(*self.counts_from.lock()))
    }

    /// Ends the cut of the host's power that is in progress, and waits until it has ended: the host
    /// responds, and may run VMs again soon.
    pub(super) async fn keep_power(&self) {
        let cut = self.cut.lock().take();
        if let Some(cut) = cut {
            cut.abort();
            drop(self.cutting.lock().await);
        }
    }

    /// Returns whether this manager leads, at a moment after the call. The leadership's own clock
    /// does not count suspended time, so after a suspension the store is asked.
    pub(super) async fn still_leads(&self, judging: &Judging, seat: &Seat) -> bool {
        if !judging.means.keeper.holds() {
            return false;
        }
        let (now, before) = (suspended(), *judging.suspended.lock());
        if now.saturating_sub(before) <= SUSPENDED {
            return true;
        }
        let is_written = self.save(judging, &seat.saved, Writes::default()).await.is_ok();
        if is_written {
            *judging.suspended.lock() = now;
        }
        is_written
    }

    async fn save(
        &self,
        judging: &Judging,
        saved: &SavedJudge,
        beside: Writes,
    ) -> Result<(), Problem> {
        let keeper = &judging.means.keeper;
        keeper.write(keeper.put(beside, HA_HOSTS, &self.host, saved).await?).await
    }

    /// Changes the judge. `datastores` are those of a term that the change opens, `why` is the
    /// reason of an end.
    ///
    /// # Errors
    /// The record cannot be saved; the judge is then as before.
    pub(super) async fn change<T>(
        &self,
        judging: &Judging,
        seat: &mut Seat,
        datastores: Option<Vec<Uuid>>,
        why: &str,
        change: impl FnOnce(&mut Judge) -> T,
    ) -> Result<T, Problem> {
        let mut judge = seat.judge.clone();
        let outcome = change(&mut judge);
        let (before, after) = (seat.judge.record(), judge.record());
        // An end that is in the store although its answer is missing must not outlive a grant.
        if before != after || seat.is_unsure {
            let datastores = datastores.unwrap_or_else(|| seat.saved.datastores.clone());
            let saved = SavedJudge::of(seat.saved.host, after, datastores);
            let beside = if after.over && !before.over {
                judging.means.keeper.noting(ended(&self.host, after.term, why))?
            } else {
                Writes::default()
            };
            seat.is_unsure = true;
            self.save(judging, &saved, beside).await?;
            seat.saved = saved;
            (seat.is_unsure, seat.is_handed_over) = (false, false);
        }
        seat.judge = judge;
        self.show(judging, seat);
        Ok(outcome)
    }

    fn show(&self, judging: &Judging, seat: &Seat) {
        self.note(|shown| {
            shown.record = seat.judge.record();
            shown.phase = phase_of(seat.judge.phase());
            shown.datastores.clone_from(&seat.saved.datastores);
        });
        self.publish(judging);
    }

    /// Publishes the term for the restarts, before any answer of it is sent. A host without a term
    /// counts as over only when it has said so: it may be held by another cluster.
    pub(super) fn publish(&self, judging: &Judging) {
        let Shown { record, phase, heard_at, .. } = self.shown();
        if record.term > Term(0) || heard_at.is_some() {
            judging.means.terms.set(&self.host, HostTerm { term: record.term.0, phase });
        }
    }

    /// Publishes that a term is about to be opened: from now on the host is not over.
    pub(super) fn announce(&self, judging: &Judging, Term(term): Term) {
        let next = HostTerm { term, phase: HaPhase::Watching };
        judging.means.terms.set(&self.host, next);
    }

    /// Hands the VMs of an ended term to the restarts, unless they know of it.
    ///
    /// # Errors
    /// The restarts could not save them. It has to be done again.
    pub(super) async fn hand_over(
        &self,
        judging: &Judging,
        seat: &mut Seat,
    ) -> Result<(), Problem> {
        let Record { term, over, .. } = seat.judge.record();
        if over && term > Term(0) && !seat.is_handed_over {
            judging.means.restarts.released(&self.host, term.0).await?;
            seat.is_handed_over = true;
        }
        Ok(())
    }

    /// Takes in a successful reading of the host's heartbeat on a datastore of this term.
    pub(super) async fn take_reading(&self, term: Term, reading: Reading) {
        let mut seat = self.seat.lock().await;
        if seat.judge.record().term == term {
            let Reading { datastore, began, now, mark } = reading;
            seat.judge.read(began, now, datastore, mark);
        }
    }

    /// Returns what has to be done now.
    pub(super) async fn check(&self, judging: &Judging) -> Result<Option<Action>, Problem> {
        let mut seat = self.seat.lock().await;
        // A manager that was suspended has not listened.
        if seat.is_outdated || !self.still_leads(judging, &seat).await {
            return Ok(None);
        }
        let now = judging.now();
        let why = "it was silent, and its watchdog has stopped it";
        self.change(judging, &mut seat, None, why, |judge| judge.check(now)).await
    }

    /// Takes the result of a fencing device.
    pub(super) async fn fenced(
        &self,
        judging: &Judging,
        term: Term,
        result: Fencing,
    ) -> Result<Option<Action>, Problem> {
        let mut seat = self.seat.lock().await;
        let why = match result {
            Fencing::Off => "its power was cut",
            Fencing::Failed => "it was silent, and its watchdog has stopped it",
        };
        self.change(judging, &mut seat, None, why, |judge| judge.fenced(term, result)).await
    }

    /// Takes an operator's confirmation that the host has no power.
    ///
    /// # Errors
    /// The term is not doubtful, or its end cannot be saved.
    pub(super) async fn confirmed_off(&self, judging: &Judging, term: Term) -> Result<(), Problem> {
        let mut seat = self.seat.lock().await;
        let why = "an operator confirmed that the host is off";
        let confirm = |judge: &mut Judge| judge.confirmed_off(term);
        if self.change(judging, &mut seat, None, why, confirm).await?.is_some() {
            if let Err(problem) = self.hand_over(judging, &mut seat).await {
                // The judge's task does it again.
                tracing::warn!(host = self.host, %problem, "cannot begin restarts");
            }
            return Ok(());
        }
        let detail = format!("{term} of host {} is not in doubt", self.host);
        let remedy = "see `godwit control ha show`; confirm only a doubtful term, by its number";
        Err(Problem::new(ProblemCode::WrongState, detail, remedy))
    }

    /// Takes the host's own report that its newest term is over. Earlier ones are over then, too.
    pub(super) async fn reported_over(
        &self,
        judging: &Judging,
        seat: &mut Seat,
        now: Duration,
        term: Term,
    ) -> Result<(), Problem> {
        let record = Record { term, over: true, ..seat.judge.record() };
        let timing = judging.timing;
        let end = |judge: &mut Judge| *judge = Judge::new(timing, record, now);
        let is_worked_on = judging.is_worked_on(&self.host);
        let why = if is_worked_on { "it is in maintenance" } else { "the host reported it" };
        self.change(judging, seat, None, why, end).await
    }
}

fn ended(host: &str, term: Term, why: &str) -> NewEntry {
    let text = format!("{term} of host {host} has ended: {why}");
    NewEntry::warning(JournalKind::TermEnded, text).about("host", host)
}

fn phase_of(phase: Phase) -> HaPhase {
    match phase {
        Phase::Watching => HaPhase::Watching,
        Phase::Fencing => HaPhase::Fencing,
        Phase::Doubtful => HaPhase::Doubtful,
        Phase::Over => HaPhase::Over,
    }
}
