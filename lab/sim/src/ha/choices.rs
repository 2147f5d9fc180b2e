//! Events that may happen next.

use godwit_ha::Standing;

use super::rules::Rule;
use super::world::{Word, World};

/// One event. Numbers are of hosts, then of datastores; of letters by their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Time passes. Watchdogs, guards and judges act.
    Tick,
    /// An agent sends a renewal.
    Renew(usize),
    /// An agent begins to write a heartbeat.
    Write(usize, usize),
    /// Readers see the heartbeat from now on.
    Land(usize, usize),
    /// The agent learns that its heartbeat was written.
    Confirm(usize, usize),
    /// The agent learns that the write failed. It may have landed.
    FailWrite(usize, usize),
    /// A reader reads the block of a host.
    Read(usize, usize),
    /// A letter arrives.
    Deliver(usize),
    /// A letter arrives at a manager that no longer leads.
    DeliverToFormer(usize),
    /// A letter is lost.
    Lose(usize),
    /// The guest ends, as the guard ordered.
    EndGuest(usize),
    /// The fencing device cuts the power, and reports it.
    Fence(usize),
    /// The fencing device fails, and reports that.
    FailFencing(usize),
    /// A fault: the fencing device reports that the host is off, and it is not.
    Lie(usize),
    /// An operator switches a doubtful host off and confirms that.
    Confirmed(usize),
    /// A fault: everything on the host stops but the watchdog.
    Freeze(usize),
    /// A frozen host continues.
    Release(usize),
    /// A fault: an agent is killed. The guest continues.
    KillAgent(usize),
    /// An agent starts again.
    StartAgent(usize),
    /// A fault: a host loses power.
    PowerOff(usize),
    /// A host starts.
    PowerOn(usize),
    /// A fault: another manager becomes the leader.
    TakeOver,
    /// A reading fails, and counts as one of an unchanged block.
    MisreadFailure(usize, usize),
}

impl Choice {
    /// Whether the event is a fault.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(
            self,
            Choice::Freeze(_)
                | Choice::KillAgent(_)
                | Choice::PowerOff(_)
                | Choice::TakeOver
                | Choice::Lie(_)
                | Choice::FailFencing(_)
        )
    }
}

impl World {
    /// Returns all events that may happen next.
    #[must_use]
    pub fn choices(&self) -> Vec<Choice> {
        let mut all = Vec::new();
        if self.now < self.options.ticks {
            all.push(Choice::Tick);
        }
        for (place, letter) in self.letters.iter().enumerate() {
            all.extend([Choice::Deliver(place), Choice::Lose(place)]);
            if self.former.is_some() && matches!(letter.word, Word::Renewal { .. }) {
                all.push(Choice::DeliverToFormer(place));
            }
        }
        if self.limits.takeovers > 0 {
            all.push(Choice::TakeOver);
        }
        for host in 0..self.hosts.len() {
            self.of_host(host, &mut all);
        }
        all
    }

    fn of_host(&self, host: usize, all: &mut Vec<Choice>) {
        let of = &self.hosts[host];
        let (limits, is_calm) = (self.limits, host >= self.options.calm_from);
        if let Some(lies) = self.hosts_being_fenced(host) {
            all.extend([Choice::Fence(host), Choice::FailFencing(host)]);
            if lies {
                all.push(Choice::Lie(host));
            }
        }
        if self.is_doubtful(host) {
            all.push(Choice::Confirmed(host));
        }
        if is_calm {
            return;
        }
        if of.acts() {
            if self.may_renew(host) {
                all.push(Choice::Renew(host));
            }
            if of.is_stopping() {
                all.push(Choice::EndGuest(host));
            }
            if limits.agent_kills > 0 && matches!(of.guard.standing(), Standing::Held(_)) {
                all.push(Choice::KillAgent(host));
            }
            if limits.freezes > 0 {
                all.push(Choice::Freeze(host));
            }
        }
        if of.is_frozen {
            all.push(Choice::Release(host));
        }
        if of.is_on && !of.is_frozen && !of.has_agent {
            all.push(Choice::StartAgent(host));
        }
        if of.is_on && limits.power_cuts > 0 {
            all.push(Choice::PowerOff(host));
        }
        if !of.is_on {
            all.push(Choice::PowerOn(host));
        }
        for datastore in 0..of.facts.datastores {
            self.of_datastore(host, datastore, all);
        }
    }

    fn of_datastore(&self, host: usize, datastore: usize, all: &mut Vec<Choice>) {
        let of = &self.hosts[host];
        match of.writes[datastore] {
            Some(write) => {
                if !write.landed {
                    all.push(Choice::Land(host, datastore));
                } else if of.acts() {
                    all.push(Choice::Confirm(host, datastore));
                }
                all.push(Choice::FailWrite(host, datastore));
            }
            None if of.acts() && self.next_mark(host, datastore).is_some() => {
                all.push(Choice::Write(host, datastore));
            }
            None => {}
        }
        let is_being_read = self.letters.iter().any(|letter| {
            letter.host == host
                && matches!(letter.word, Word::Reading { datastore: of, .. } if of == datastore)
        });
        if !is_being_read && self.judges[host].open_term().is_some() {
            all.push(Choice::Read(host, datastore));
            if !self.options.follows(Rule::FailedReadingProvesNothing) {
                all.push(Choice::MisreadFailure(host, datastore));
            }
        }
    }
}
