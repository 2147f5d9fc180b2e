//! Hosts, their disks and hypervisors, and the messages between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use godwit_migration::destination::{Action as DestinationAction, Destination};
use godwit_migration::handover::{Known, Role, Standing};
use godwit_migration::source::{Action as SourceAction, Event as SourceEvent, Source};
use godwit_migration::{PageIn, Policy};
use godwit_types::{Incarnation, Ownership};

use crate::rules::Rules;

pub type HostId = usize;
/// Name of a migration.
pub(crate) type Attempt = u32;

/// Parameters of a world.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub hosts: usize,
    pub pages: usize,
    /// Whether messages on a lane arrive in the order in which they were sent, as over TCP. If not,
    /// all except pages may arrive in any order.
    pub ordered: bool,
    /// When the guest may run while some of its pages are elsewhere.
    pub page_in: PageIn,
    /// Whether disks move with the guest: they are settled before it is stopped.
    pub moves_disks: bool,
    /// Epoch of ownership with which the first host begins.
    pub first_epoch: u64,
    /// Whether the other hosts have records of having had the guest in earlier epochs.
    pub has_history: bool,
    /// Decisions of agents.
    pub rules: Rules,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            hosts: 2,
            pages: 1,
            ordered: true,
            page_in: PageIn::Never,
            moves_disks: false,
            first_epoch: 1,
            has_history: false,
            rules: Rules::default(),
        }
    }
}

/// Number of optional events that may still happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limits {
    pub migrations: u32,
    pub agent_crashes: u32,
    /// Hosts that lose power.
    pub host_crashes: u32,
    /// Hypervisors killed.
    pub qemu_crashes: u32,
    pub cuts: u32,
    /// Letters outside any lane that are lost or duplicated.
    pub losses: u32,
    pub full_disks: u32,
    pub cancels: u32,
    /// Verdicts on which a source gives up.
    pub give_ups: u32,
    /// Deletions of the VM, each with its creation with the same name and uuid.
    pub lives: u32,
    /// Other VMs of the same name and uuid that come to a host and leave it.
    pub strangers: u32,
    /// Writes of any kind that fail.
    pub failed_writes: u32,
}

/// Record that a host has written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Record {
    pub(crate) standing: Standing,
    /// The other host of its hand-over.
    pub(crate) other: Option<HostId>,
    pub(crate) needs_pages: bool,
}

impl Record {
    pub(crate) fn owner(ownership: Ownership) -> Record {
        Record {
            standing: Standing { role: Role::Owner, ownership },
            other: None,
            needs_pages: false,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Disk {
    pub(crate) record: Option<Record>,
    /// Last epoch in which this host owned each life of the VM that is gone from it.
    pub(crate) gone: BTreeMap<Incarnation, u64>,
    /// Another VM of the same name and uuid on this host.
    pub(crate) stranger: Option<Ownership>,
    pub(crate) full: bool,
    /// Whether the next write fails.
    pub(crate) fails: bool,
}

impl Disk {
    /// Tries to write. Returns whether that succeeded.
    pub(crate) fn writes(&mut self) -> bool {
        !self.full && self.removes()
    }

    /// Tries to remove something, which a full disk permits. Returns whether that succeeded.
    pub(crate) fn removes(&mut self) -> bool {
        !std::mem::take(&mut self.fails)
    }
}

/// State of a hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    /// It has the guest and no migration.
    Plain,
    /// It has stopped the guest for the hand-over.
    Stopped,
    /// It has written the device state.
    Written,
    /// It waits for a guest.
    Shadow,
    /// It has loaded a guest.
    Loaded,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    /// The life of the VM that it has.
    pub(crate) life: u32,
    pub(crate) stage: Stage,
    pub(crate) runs: bool,
    pub(crate) memory: Vec<u64>,
    /// Pages written since tracking began, or since they were last taken.
    pub(crate) dirty: BTreeSet<usize>,
    pub(crate) tracked: bool,
    /// Pages that are at the host from which the guest came.
    pub(crate) missing: BTreeSet<usize>,
}

impl Process {
    pub(crate) fn guest(life: u32, memory: Vec<u64>) -> Process {
        Process {
            stage: Stage::Plain,
            runs: true,
            ..Process { memory, ..Process::shadow(life, 0) }
        }
    }

    pub(crate) fn shadow(life: u32, pages: usize) -> Process {
        Process {
            life,
            stage: Stage::Shadow,
            runs: false,
            memory: vec![u64::MAX; pages],
            dirty: BTreeSet::new(),
            tracked: false,
            missing: BTreeSet::new(),
        }
    }
}

/// Production state machine, compared by its whole state.
#[derive(Clone, Debug)]
pub(crate) struct Machine<T>(pub(crate) T);

impl<T: Debug> PartialEq for Machine<T> {
    fn eq(&self, other: &Self) -> bool {
        format!("{:?}", self.0) == format!("{:?}", other.0)
    }
}

impl<T: Debug> Eq for Machine<T> {}

impl<T: Debug> Hash for Machine<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        format!("{:?}", self.0).hash(state);
    }
}

/// The source's end of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sending {
    pub(crate) attempt: Attempt,
    pub(crate) to: HostId,
    pub(crate) machine: Machine<Source>,
    pub(crate) pages_sent: u64,
    /// Pages sent and not known to have arrived; before round 0, all pages.
    pub(crate) unsent: BTreeSet<usize>,
    /// Whether an earlier attempt has brought the rest.
    pub(crate) resumes: bool,
    /// Set while the destination is asked for its verdict; true: the question is on its way.
    pub(crate) asks: Option<bool>,
    /// Number of events taken: its clock.
    pub(crate) events: u32,
}

/// The destination's end of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Receiving {
    pub(crate) attempt: Attempt,
    pub(crate) from: HostId,
    pub(crate) machine: Machine<Destination>,
    pub(crate) pages_applied: u64,
    /// Whether the record that the guest may run is being written.
    pub(crate) noting: bool,
    pub(crate) missing: BTreeSet<usize>,
}

/// Activity of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Work {
    /// The agent does not run.
    Down,
    Idle,
    Sending(Box<Sending>),
    Receiving(Box<Receiving>),
    /// The lane was cut while only memory had been sent.
    Cut {
        to: HostId,
        attempt: Attempt,
        unsent: BTreeSet<usize>,
    },
    /// The lane was cut, at the destination: what has arrived is kept.
    Waiting {
        from: HostId,
        attempt: Attempt,
    },
    /// The agent does not know the owner of the guest. `asked`: the question is on its way.
    Doubt {
        asked: bool,
    },
    /// The agent keeps pages for the guest at another host.
    Serving {
        to: HostId,
    },
}

/// Next step of an agent, carried out whole or not.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Source(SourceAction),
    /// The source's driver takes an event that arrived while it carried out actions.
    SourceTakes(SourceEvent),
    StopGuest,
    /// The source's driver learns that the guest is released.
    NotifyReleased,
    Destination(DestinationAction),
    NoteGone,
    RemoveRecord,
    Kill,
    /// An operator's deletion: the guest ends.
    EndGuest,
    /// An operator's deletion: its record is removed.
    RemoveDeleted,
    /// Undo QEMU's migration and resume the guest.
    LetGo,
    SaveOwner(Ownership),
    BeIdle,
    BeInDoubt,
}

/// Message of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Word {
    Begin {
        ownership: Ownership,
    },
    Pages(Vec<(usize, u64)>),
    RoundEnd(u32),
    PreparePageIn,
    Remaining(BTreeSet<usize>),
    PagesEnd {
        sent: u64,
    },
    StateFed,
    StateEnd,
    Commit {
        ownership: Ownership,
    },
    Abort,
    Ready,
    RoundApplied(u32),
    PageInReady,
    Running,
    Refused,
    /// Outside the lane: a query for the fate of this attempt, or of the offer.
    Ask {
        offered: Ownership,
    },
    Answer {
        offered: Ownership,
        answer: Answer,
    },
}

impl Word {
    pub(crate) fn is_of_lane(&self) -> bool {
        !matches!(self, Word::Ask { .. } | Word::Answer { .. })
    }
}

/// Fate of an incoming migration, while the agent remembers it, and after that what is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Fate(Fate),
    Known(Known),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fate {
    Receiving,
    Runs,
    Refused,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Letter {
    pub(crate) from: HostId,
    pub(crate) to: HostId,
    pub(crate) attempt: Attempt,
    /// Position among the messages of its attempt and direction; 0 if order does not matter.
    pub(crate) number: u32,
    pub(crate) word: Word,
}

#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) disk: Disk,
    pub(crate) process: Option<Process>,
    /// Record that the disk refused and that is retried.
    pub(crate) unsaved: Option<Record>,
    /// Whether an arriving guest has been started since the host booted; `None`: unknown, because
    /// the host has booted since.
    pub(crate) was_started: Option<bool>,
    pub(crate) work: Work,
    pub(crate) steps: VecDeque<Step>,
    /// The agent's memory of migrations that arrived since its start.
    pub(crate) fates: BTreeMap<Attempt, Fate>,
    /// Its ownership, as its agent knows it.
    pub(crate) ownership: Ownership,
}

impl PartialEq for Host {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Host {}

impl Hash for Host {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl Host {
    fn key(&self) -> impl Eq + Hash {
        let Host { disk, process, unsaved, was_started, work, steps, fates, ownership } = self;
        (
            disk.clone(),
            process.clone(),
            unsaved.clone(),
            *was_started,
            work.clone(),
            format!("{steps:?}"),
            fates.clone(),
            *ownership,
        )
    }

    pub(crate) fn is_up(&self) -> bool {
        self.work != Work::Down
    }

    /// Records that the guest belongs to this host, now or as soon as the disk permits.
    pub(crate) fn save_owner(&mut self, ownership: Ownership) {
        self.ownership = ownership;
        self.unsaved = Some(Record::owner(ownership));
        self.save_again();
    }

    pub(crate) fn save_again(&mut self) {
        if let Some(record) = self.unsaved.take_if(|_| self.disk.writes()) {
            self.disk.record = Some(record);
        }
    }

    pub(crate) fn role(&self) -> Option<Role> {
        self.disk.record.as_ref().map(|record| record.standing.role)
    }

    /// Returns what it has recorded about that life of the VM.
    pub(crate) fn known(&self, incarnation: Incarnation) -> Known {
        let of_guest = self.disk.record.as_ref().map(|record| record.standing);
        let of_stranger =
            self.disk.stranger.map(|ownership| Standing { role: Role::Owner, ownership });
        let has = of_guest
            .or(of_stranger)
            .filter(|standing| standing.ownership.incarnation == incarnation);
        match (has, self.disk.gone.get(&incarnation)) {
            (Some(standing), _) => Known::Has(standing),
            (None, Some(&epoch)) => Known::Gone(Ownership { incarnation, epoch }),
            (None, None) => Known::Never,
        }
    }

    /// Returns whether neither the VM, nor another one of its name, nor any activity is here.
    pub(crate) fn is_free(&self) -> bool {
        let has_none =
            self.disk.record.is_none() && self.disk.stranger.is_none() && self.process.is_none();
        has_none && self.work == Work::Idle && self.steps.is_empty() && self.unsaved.is_none()
    }
}

/// State of the whole simulation.
#[derive(Clone, Debug)]
pub struct World {
    pub(crate) options: Options,
    pub(crate) limits: Limits,
    pub(crate) hosts: Vec<Host>,
    pub(crate) letters: Vec<Letter>,
    /// Lanes that carry nothing any more.
    pub(crate) cut: BTreeSet<Attempt>,
    /// Those of them whose source learns it from its next send, which fails.
    pub(crate) broken: BTreeSet<Attempt>,
    /// Number of messages sent on each attempt's lane, by direction.
    pub(crate) sent: BTreeMap<(Attempt, HostId), u32>,
    pub(crate) attempts: Attempt,
    /// Present life of the VM.
    pub(crate) life: u32,
    /// Whether the VM has been deleted and not created again.
    pub(crate) deleted: bool,
    /// The guest's memory where it ran last.
    pub(crate) truth: Vec<u64>,
    pub(crate) writes: u64,
    /// Whether a fault has destroyed the guest with its memory, unless that is just arriving
    /// somewhere.
    pub(crate) dead: bool,
    /// The first violation.
    pub(crate) violation: Option<String>,
    pub(crate) completed: u32,
    /// Doubts settled without an operator.
    pub(crate) settled: u32,
    /// Cuts after which a migration continued where it was.
    pub(crate) resumed: u32,
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for World {}

impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl World {
    fn key(&self) -> impl Eq + Hash {
        let mut letters: Vec<String> =
            self.letters.iter().map(|letter| format!("{letter:?}")).collect();
        letters.sort();
        (
            (self.limits, self.hosts.clone(), letters, self.cut.clone(), self.broken.clone()),
            (self.attempts, self.truth.clone(), self.dead, self.violation.clone()),
            (self.life, self.deleted),
        )
    }

    /// Creates a world in which the guest runs on the first host, without activity.
    #[must_use]
    pub fn new(options: Options, limits: Limits) -> World {
        let incarnation = options.rules.incarnation(0);
        let ownership = Ownership { incarnation, epoch: options.first_epoch };
        let earlier =
            |place: usize| (incarnation, options.first_epoch.saturating_sub(place as u64 + 1));
        let host = |place: usize| Host {
            disk: Disk {
                record: (place == 0).then(|| Record::owner(ownership)),
                gone: options.has_history.then(|| earlier(place)).into_iter().collect(),
                ..Disk::default()
            },
            process: (place == 0).then(|| Process::guest(0, vec![0; options.pages])),
            unsaved: None,
            was_started: None,
            work: Work::Idle,
            steps: VecDeque::new(),
            fates: BTreeMap::new(),
            ownership,
        };
        World {
            options,
            limits,
            hosts: (0..options.hosts).map(host).collect(),
            letters: Vec::new(),
            cut: BTreeSet::new(),
            broken: BTreeSet::new(),
            sent: BTreeMap::new(),
            attempts: 0,
            life: 0,
            deleted: false,
            truth: vec![0; options.pages],
            writes: 0,
            dead: false,
            violation: None,
            completed: 0,
            settled: 0,
            resumed: 0,
        }
    }

    /// Returns the violation, if there is one.
    #[must_use]
    pub fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Returns the number of migrations completed.
    #[must_use]
    pub fn completed(&self) -> u32 {
        self.completed
    }

    /// Returns the number of doubts settled without an operator.
    #[must_use]
    pub fn settled(&self) -> u32 {
        self.settled
    }

    /// Returns the number of cuts after which a migration continued where it was.
    #[must_use]
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    pub(crate) fn policy(&self) -> Policy {
        Policy {
            page_in: self.options.page_in,
            // Below what any switchover costs, so the remainder decides.
            switchover_budget: Duration::from_millis(1),
            ..Policy::default()
        }
    }

    pub(crate) fn violates(&mut self, what: impl Into<String>) {
        self.violation.get_or_insert(what.into());
    }

    pub(crate) fn send(&mut self, from: HostId, to: HostId, attempt: Attempt, word: Word) {
        if word.is_of_lane() && self.cut.contains(&attempt) {
            return;
        }
        if !self.options.ordered && matches!(word, Word::Pages(_) | Word::Remaining(_)) {
            // Which of two writes of a page counts is decided by the board, and tested there.
            return self.deliver(Letter { from, to, attempt, number: 0, word });
        }
        let number = if word.is_of_lane() && self.options.ordered {
            let sent = self.sent.entry((attempt, to)).or_default();
            *sent += 1;
            *sent
        } else {
            0
        };
        self.letters.push(Letter { from, to, attempt, number, word });
    }

    /// Writes a page of the guest where it runs.
    pub(crate) fn writes(&mut self, host: HostId, page: usize) {
        self.writes += 1;
        let value = self.writes;
        let Some(process) = &mut self.hosts[host].process else { return };
        if process.missing.contains(&page) {
            return;
        }
        process.memory[page] = value;
        if process.tracked {
            process.dirty.insert(page);
        }
        self.truth[page] = value;
    }

    /// Returns whether this process has the guest's present memory, or will have it when its
    /// missing pages have arrived.
    pub(crate) fn is_true(&self, host: HostId) -> bool {
        let Some(process) = &self.hosts[host].process else { return false };
        if process.life != self.life {
            return false;
        }
        let keeps = |page: usize| {
            self.hosts.iter().enumerate().any(|(other, kept)| {
                other != host
                    && kept
                        .process
                        .as_ref()
                        .is_some_and(|kept| kept.life == self.life && kept.missing.is_empty())
                    && kept
                        .process
                        .as_ref()
                        .is_some_and(|kept| kept.memory[page] == self.truth[page])
            })
        };
        (0..self.truth.len()).all(|page| {
            if process.missing.contains(&page) {
                keeps(page)
            } else {
                process.memory[page] == self.truth[page]
            }
        })
    }

    /// Starts or resumes a guest.
    pub(crate) fn runs(&mut self, host: HostId) {
        if self.deleted {
            self.violates(format!("the guest runs on host {host} although it was deleted"));
        }
        if self.is_true(host) {
            // It had been on its way when its source was lost.
            self.dead = false;
        } else {
            self.violates(format!(
                "the guest runs on host {host} with memory that is not its newest"
            ));
        }
        let Some(process) = &mut self.hosts[host].process else { return };
        process.runs = true;
        if process.stage == Stage::Loaded || process.stage == Stage::Shadow {
            process.stage = Stage::Plain;
        }
        // From its first moment on it differs from before.
        let first = (0..self.options.pages).find(|page| !process.missing.contains(page));
        if let Some(page) = first {
            self.writes(host, page);
        }
        self.check_one();
    }

    pub(crate) fn check_one(&mut self) {
        let running: Vec<HostId> =
            (0..self.hosts.len()).filter(|&host| self.is_running(host)).collect();
        if running.len() > 1 {
            self.violates(format!("the guest runs on hosts {running:?}"));
        }
    }

    pub(crate) fn is_running(&self, host: HostId) -> bool {
        self.hosts[host].process.as_ref().is_some_and(|process| process.runs)
    }

    /// Ends a process. `by_fault`: no host decided it. A process that waits for a guest holds no
    /// copy of it yet.
    pub(crate) fn kill(&mut self, host: HostId, by_fault: bool) {
        let Some(process) = self.hosts[host].process.take() else { return };
        if process.life != self.life {
            // What is left of a deleted life is not a copy of the guest.
            return;
        }
        let is_copy = |stage: Stage| !matches!(stage, Stage::Shadow | Stage::Loaded);
        let is_left = (0..self.hosts.len()).any(|other| {
            self.hosts[other].process.as_ref().is_some_and(|process| is_copy(process.stage))
                && self.is_true(other)
        });
        if !is_copy(process.stage) || is_left || self.dead {
            return;
        }
        self.dead = true;
        if !by_fault {
            let runs = if process.runs { ", which ran" } else { "" };
            self.violates(format!("host {host} has ended the only copy of the guest{runs}"));
        }
    }
}
