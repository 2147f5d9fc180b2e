//! Alarms: what needs an operator's attention, until it is over. `godwit_planner::alarms` decides
//! what is raised, changed and cleared; `facts` collects what it needs; this module records each
//! change, publishes it and hands it to the receivers.
//!
//! The leader evaluates when hosts, VMs or rules change, and at least every ten seconds. An alarm
//! is in the store as long as it is raised, so acknowledgements survive the leader. Notices wait in
//! memory: a new leader repeats those of alarms that were raised shortly before it.

mod facts;
pub(crate) mod http;
mod noted;
pub(crate) mod receivers;
mod record;
mod setup;
#[cfg(test)]
mod tests;

pub(crate) use setup::{AlarmSetup, OwnCertificate};
pub use setup::{AlarmSetupError, AlarmsConfig, MailConfig, MailTls, WebhookConfig};

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::join_all;
use godwit_api::control::{
    Acknowledgement, Alarm, AlarmChange, AlarmKind, AlarmNotice, AlarmSeverity, AlarmTest, Change,
    Problem, ProblemCode,
};
use godwit_planner::alarms::{
    AlarmKey, AlarmVerdict, AlarmWatch, CertificateFacts, Symptom, judge,
};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::clock::now_unix_ms;
use crate::cluster::names::is_unseen;
use crate::cluster::state::State;
use crate::ha::troubles::Troubles;
use crate::journal::events::Next;
use crate::moves::{Moves, fresh_id};
use crate::storage::keeper::{Keeper, Writes};
use crate::storage::planning::whole;
use receivers::Outbox;
use record::{ALARMS, SavedAlarm};

/// Longest interval between two evaluations.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// Shortest interval between two evaluations: reports arrive all the time in a large cluster.
const LEAST_BETWEEN: Duration = Duration::from_secs(3);
/// Interval at which certificates are read again. They end by the day.
const CERTIFICATES_MS: u64 = 600_000;
/// Age up to which a new leader repeats the notice of an alarm: the old one may have died with it.
const REPEATED_MS: u64 = 600_000;
/// Longest note of an acknowledgement, characters.
const MOST_NOTE_CHARS: usize = 500;

/// What alarms are made of, and where notices go.
pub(crate) struct Means {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) state: Arc<State>,
    pub(crate) moves: Arc<Moves>,
    /// What is wrong with the high availability.
    pub(crate) troubles: Arc<Troubles>,
    /// Configuration; empty in tests that set none.
    pub(crate) setup: Arc<OnceLock<AlarmSetup>>,
}

/// The alarms of one leadership.
pub(crate) struct Alarms {
    means: Means,
    /// Raised alarms, by ID. Changed only by who holds `watched`.
    shown: RwLock<BTreeMap<String, Alarm>>,
    watched: tokio::sync::Mutex<Watched>,
    /// Hosts whose reports have raised alarms about VMs, by the alarm's ID.
    reporters: Mutex<BTreeMap<String, String>>,
    outbox: Outbox,
}

/// What lasts from one evaluation to the next.
#[derive(Default)]
struct Watched {
    watch: AlarmWatch,
    certificates: Vec<CertificateFacts>,
    certificates_unix_ms: u64,
    left_out: usize,
}

impl Alarms {
    /// Loads the alarms from the store.
    pub(crate) async fn begin(means: Means) -> Result<Alarms, Problem> {
        let saved = means.keeper.read_all(ALARMS).await?;
        let shown: BTreeMap<String, Alarm> =
            saved.into_iter().map(|(id, saved)| (id.clone(), saved.alarm(id))).collect();
        let receivers = means.setup.get().map(AlarmSetup::receivers).unwrap_or_default();
        let outbox = Outbox::begin(receivers.to_vec());
        let alarms = Alarms {
            means,
            shown: RwLock::new(shown),
            watched: tokio::sync::Mutex::default(),
            reporters: Mutex::default(),
            outbox,
        };
        let now_ms = now_unix_ms();
        for alarm in alarms.all().values() {
            let is_recent = alarm.raised_unix_ms.saturating_add(REPEATED_MS) >= now_ms;
            if is_recent && alarm.acknowledged.is_none() {
                alarms.outbox.push(&alarms.notice(AlarmChange::Raised, alarm.clone(), now_ms));
            }
        }
        Ok(alarms)
    }

    /// Returns the raised alarms, by ID: the oldest first.
    pub(crate) fn all(&self) -> RwLockReadGuard<'_, BTreeMap<String, Alarm>> {
        self.shown.read()
    }

    /// Compares the cluster with the alarms, and raises, changes and clears what is due.
    pub(crate) async fn evaluate(&self, now_unix_ms: u64) {
        let mut watched = self.watched.lock().await;
        let age_ms = now_unix_ms.saturating_sub(watched.certificates_unix_ms);
        if watched.certificates_unix_ms > now_unix_ms || age_ms >= CERTIFICATES_MS {
            match facts::certificates(&self.means).await {
                Ok(certificates) => {
                    watched.certificates = certificates;
                    watched.certificates_unix_ms = now_unix_ms;
                }
                Err(problem) => tracing::warn!(%problem, "cannot read the certificates' ends"),
            }
        }
        let facts = facts::collect(&self.means, &watched.certificates);
        let raised: BTreeMap<AlarmKey, AlarmSeverity> =
            self.all().values().map(|alarm| (key(alarm), alarm.severity)).collect();
        let judged = judge(&watched.watch, &raised, &facts, now_unix_ms);
        watched.watch = judged.watch;
        if judged.left_out > watched.left_out {
            tracing::warn!(left_out = judged.left_out, "there are too many alarms");
        }
        watched.left_out = judged.left_out;
        for verdict in judged.verdicts {
            if let Err(problem) = self.carry_out(verdict, now_unix_ms).await {
                // The next evaluation returns it again.
                tracing::warn!(%problem, "cannot record an alarm; retrying");
                return;
            }
        }
    }

    async fn carry_out(&self, verdict: AlarmVerdict, now_unix_ms: u64) -> Result<(), Problem> {
        match verdict {
            AlarmVerdict::Raise(Symptom { key, severity, text, remedy }) => {
                let alarm = Alarm {
                    id: fresh_id('a', now_unix_ms)?,
                    kind: key.kind,
                    severity,
                    object: key.object,
                    text,
                    remedy,
                    raised_unix_ms: now_unix_ms,
                    cleared_unix_ms: None,
                    acknowledged: None,
                };
                self.save(AlarmChange::Raised, alarm, now_unix_ms).await
            }
            AlarmVerdict::Change(Symptom { key, severity, text, remedy }) => {
                let Some(before) = self.of_key(&key) else { return Ok(()) };
                let is_worse = severity > before.severity;
                let acknowledged = before.acknowledged.clone().filter(|_| !is_worse);
                let alarm = Alarm { severity, text, remedy, acknowledged, ..before };
                self.save(AlarmChange::Changed, alarm, now_unix_ms).await
            }
            AlarmVerdict::Clear(key) => {
                let Some(alarm) = self.of_key(&key) else { return Ok(()) };
                let alarm = Alarm { cleared_unix_ms: Some(now_unix_ms), ..alarm };
                let writes = self.noting(AlarmChange::Cleared, &alarm)?;
                self.means.keeper.remove_with(writes, ALARMS, &alarm.id).await?;
                self.shown.write().remove(&alarm.id);
                self.reporters.lock().remove(&alarm.id);
                self.tell(AlarmChange::Cleared, alarm, now_unix_ms);
                Ok(())
            }
        }
    }

    /// Records that somebody attends to an alarm.
    pub(crate) async fn acknowledge(
        self: &Arc<Self>,
        id: &str,
        note: &str,
        by: &str,
    ) -> Result<Alarm, Problem> {
        if note.chars().count() > MOST_NOTE_CHARS {
            let detail = format!("the note is longer than {MOST_NOTE_CHARS} characters");
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, "shorten it"));
        }
        let at_unix_ms = now_unix_ms();
        let acknowledged = Acknowledgement { by: by.to_owned(), at_unix_ms, note: one_line(note) };
        let (alarms, id) = (Arc::clone(self), id.to_owned());
        whole(async move {
            let _turn = alarms.watched.lock().await;
            let found = alarms.all().get(&id).cloned();
            let alarm = found.ok_or_else(|| no_alarm(&id))?;
            let alarm = Alarm { acknowledged: Some(acknowledged), ..alarm };
            alarms.save(AlarmChange::Acknowledged, alarm.clone(), at_unix_ms).await?;
            Ok(alarm)
        })
        .await
    }

    /// Sends each receiver a notice once, and returns what became of it.
    pub(crate) async fn test(&self, asked_by: &str) -> AlarmTest {
        let now_ms = now_unix_ms();
        let alarm = Alarm {
            id: "test".to_owned(),
            kind: AlarmKind::Test,
            severity: AlarmSeverity::Warning,
            object: format!("manager:{}", self.manager()),
            text: format!("this is a test, which {} asked for", one_line(asked_by)),
            remedy: "nothing is wrong".to_owned(),
            raised_unix_ms: now_ms,
            cleared_unix_ms: None,
            acknowledged: None,
        };
        let notice = self.notice(AlarmChange::Test, alarm, now_ms);
        let tests = self.outbox.receivers().iter().map(|receiver| receiver.test(&notice));
        AlarmTest { receivers: join_all(tests).await }
    }

    async fn save(
        &self,
        change: AlarmChange,
        alarm: Alarm,
        now_unix_ms: u64,
    ) -> Result<(), Problem> {
        let keeper = &self.means.keeper;
        let saved = SavedAlarm::of(&alarm);
        let writes = self.noting(change, &alarm)?;
        let writes = keeper.put(writes, ALARMS, &alarm.id, &saved).await?;
        keeper.write(writes).await?;
        if let Some(host) = self.reporter(&alarm) {
            self.reporters.lock().insert(alarm.id.clone(), host);
        }
        self.shown.write().insert(alarm.id.clone(), alarm.clone());
        self.tell(change, alarm, now_unix_ms);
        Ok(())
    }

    /// Returns writes that begin with the journal's entry about a change of an alarm. The entries
    /// that one host's reports cause are limited: its VMs may fail again and again.
    fn noting(&self, change: AlarmChange, alarm: &Alarm) -> Result<Writes, Problem> {
        let keeper = &self.means.keeper;
        let entry = noted::of(change, alarm);
        let reporter = self.reporter(alarm).filter(|_| change != AlarmChange::Acknowledged);
        let entry = match reporter {
            Some(host) => keeper.admitted(&entry.reported_by(&host)),
            None => Some(entry),
        };
        entry.map_or_else(|| Ok(Writes::default()), |entry| keeper.noting(entry))
    }

    /// Returns the host whose reports raise an alarm about a VM. `None`: it is another alarm, or no
    /// host has the VM.
    fn reporter(&self, alarm: &Alarm) -> Option<String> {
        let vm = alarm.object.strip_prefix("vm:").filter(|_| alarm.kind == AlarmKind::VmDown)?;
        let noted = self.reporters.lock().get(&alarm.id).cloned();
        noted.or_else(|| {
            let inventory = self.means.state.inventory();
            inventory.vm_info(vm).map(|info| info.host.clone())
        })
    }

    /// Publishes and logs a recorded change of an alarm, and queues its notices.
    fn tell(&self, change: AlarmChange, alarm: Alarm, now_unix_ms: u64) {
        let (id, what, text) = (&alarm.id, change.name(), &alarm.text);
        match change {
            AlarmChange::Raised | AlarmChange::Changed => {
                tracing::warn!(id, severity = alarm.severity.name(), text, "alarm {what}");
            }
            _ => tracing::info!(id, text, "alarm {what}"),
        }
        self.means.state.change(|_| Some(Change::Alarm(Box::new(alarm.clone()))));
        self.outbox.push(&self.notice(change, alarm, now_unix_ms));
    }

    fn notice(&self, change: AlarmChange, alarm: Alarm, unix_ms: u64) -> AlarmNotice {
        AlarmNotice { change, manager: self.manager().to_owned(), unix_ms, alarm }
    }

    fn manager(&self) -> &str {
        &self.means.keeper.candidate().name
    }

    fn of_key(&self, wanted: &AlarmKey) -> Option<Alarm> {
        self.all().values().find(|alarm| key(alarm) == *wanted).cloned()
    }
}

/// Evaluates the alarms when the cluster changes, and at least every [`LOOK_INTERVAL`].
pub(crate) async fn watch(alarms: Arc<Alarms>) {
    let mut news = alarms.means.state.events().listen(None);
    let mut ticks = interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            next = news.next() => match next {
                Some(next) if may_matter(&next) => {}
                Some(_) => continue,
                None => return,
            },
        }
        alarms.evaluate(now_unix_ms()).await;
        sleep(LEAST_BETWEEN).await;
    }
}

/// Returns whether changes may raise or clear an alarm.
fn may_matter(next: &Next) -> bool {
    let Next::Events(events) = next else { return true };
    events.iter().any(|event| {
        matches!(
            event.change,
            Change::Host(_)
                | Change::HostGone(_)
                | Change::Vm(_)
                | Change::VmGone(_)
                | Change::Rule(_)
                | Change::RuleGone(_)
        )
    })
}

fn key(alarm: &Alarm) -> AlarmKey {
    AlarmKey { kind: alarm.kind, object: alarm.object.clone() }
}

/// Replaces control characters, which could end a line of a mail or of a terminal, and marks that
/// could show a text in another order.
fn one_line(text: &str) -> String {
    text.replace(is_unseen, " ")
}

fn no_alarm(id: &str) -> Problem {
    let detail = format!("no alarm \"{id}\" is raised");
    Problem::new(ProblemCode::NotFound, detail, "see `godwit control alarm list`")
}
