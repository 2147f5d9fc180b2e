//! Events that may happen next.

use godwit_migration::source::{Event, State, Verdict};

use crate::world::{HostId, Limits, Word, Work, World};

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// An agent carries out its next step.
    Step(HostId),
    /// A letter arrives, given by its position.
    Deliver(usize),
    /// A destination's record becomes durable, or the disk is full.
    Noted(HostId),
    /// A record that a disk refused is written.
    Save(HostId),
    /// An agent in doubt asks the other host.
    Ask(HostId),
    /// A source's pages arrive at the guest that lacks them.
    Serve(HostId),
    /// An agent notices that its lane is dead.
    Notice(HostId),
    /// A source whose lane was cut reaches its destination again.
    Resume(HostId),
    /// One end of a lane that was cut gives up the other end.
    Expire(HostId),
    /// The guest writes a page.
    Work(HostId, usize),
    /// A migration begins.
    Migrate(HostId, HostId),
    Start(HostId),
    /// A source stops asking for now.
    GiveUp(HostId),
    /// A fault: an agent is killed. The flags: whether the record in progress is written, and
    /// whether its QEMU continues by itself.
    CrashAgent(HostId, bool, bool),
    /// A fault: a host loses power. The flag: whether the record in progress is written.
    CrashHost(HostId, bool),
    /// A fault: a hypervisor is killed.
    CrashQemu(HostId),
    /// A fault: a lane is cut. The flags: whether what is on its way to the destination, and to the
    /// source, is lost.
    Cut(u32, bool, bool),
    /// A fault: the source's socket accepts nothing more, so its next send fails. The flag: whether
    /// what is on its way is lost.
    Break(u32, bool),
    /// A letter outside any lane is lost.
    Lose(usize),
    /// A letter outside any lane arrives twice.
    Double(usize),
    /// A disk becomes full.
    FillDisk(HostId),
    /// A disk has room again.
    ClearDisk(HostId),
    Cancel(HostId),
    /// An operator deletes the VM.
    Delete(HostId),
    /// An operator creates the VM again, with the same name and uuid.
    Create(HostId),
    /// Another VM of the same name and uuid comes to a host.
    Occupy(HostId),
    /// The other VM leaves.
    Vacate(HostId),
    /// A fault: a host's next write fails.
    FailWrite(HostId),
}

impl Choice {
    /// Returns whether the event is a fault.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(
            self,
            Choice::CrashAgent(..)
                | Choice::CrashHost(..)
                | Choice::CrashQemu(..)
                | Choice::Cut(..)
                | Choice::Break(..)
                | Choice::Lose(..)
                | Choice::Double(..)
                | Choice::FillDisk(..)
                | Choice::Cancel(..)
                | Choice::GiveUp(..)
                | Choice::FailWrite(..)
        )
    }

    /// Returns whether a random life contains the event as rarely as a fault.
    #[must_use]
    pub fn is_rare(&self) -> bool {
        self.is_fault() || matches!(self, Choice::Delete(..) | Choice::Occupy(..))
    }
}

impl World {
    /// Returns all events that may happen next.
    #[must_use]
    pub fn choices(&self) -> Vec<Choice> {
        let mut all = Vec::new();
        if self.violation.is_some() {
            return all;
        }
        for host in 0..self.hosts.len() {
            self.choices_of(host, &mut all);
        }
        for place in 0..self.letters.len() {
            if self.may_arrive(place) {
                all.push(Choice::Deliver(place));
            }
            if self.limits.losses > 0 && !self.letters[place].word.is_of_lane() {
                all.extend([Choice::Lose(place), Choice::Double(place)]);
            }
        }
        if self.limits.cuts > 0 {
            for attempt in self.lanes() {
                for lost in 0..4 {
                    all.push(Choice::Cut(attempt, lost & 1 == 1, lost & 2 == 2));
                }
                all.extend([false, true].map(|lost| Choice::Break(attempt, lost)));
            }
        }
        all
    }

    fn choices_of(&self, host: HostId, all: &mut Vec<Choice>) {
        let (here, limits) = (&self.hosts[host], &self.limits);
        if here.disk.full {
            all.push(Choice::ClearDisk(host));
        }
        if !here.is_up() {
            return all.push(Choice::Start(host));
        }
        let is_free = here.steps.is_empty();
        if !is_free {
            all.push(Choice::Step(host));
        }
        if matches!(&here.work, Work::Receiving(receiving) if receiving.noting) {
            all.push(Choice::Noted(host));
        }
        if here.unsaved.is_some() && !here.disk.full {
            all.push(Choice::Save(host));
        }
        if self.asks(host).is_some() {
            all.push(Choice::Ask(host));
        }
        if is_free && self.serving(host).is_some() {
            all.push(Choice::Serve(host));
        }
        if is_free && self.lane_is_dead(host) {
            all.push(Choice::Notice(host));
        }
        if is_free && self.may_resume(host) {
            all.push(Choice::Resume(host));
        }
        if is_free && matches!(here.work, Work::Cut { .. } | Work::Waiting { .. }) {
            all.push(Choice::Expire(host));
        }
        if limits.give_ups > 0
            && matches!(&here.work, Work::Sending(sending) if sending.asks.is_some())
        {
            all.push(Choice::GiveUp(host));
        }
        if limits.migrations > 0 && is_free {
            let to = (0..self.hosts.len()).filter(|&to| self.may_migrate(host, to));
            all.extend(to.map(|to| Choice::Migrate(host, to)));
        }
        self.operators_choices(host, all);
        self.faults_of(host, all);
    }

    fn operators_choices(&self, host: HostId, all: &mut Vec<Choice>) {
        let (here, limits) = (&self.hosts[host], &self.limits);
        if limits.lives > 0 {
            if self.may_be_deleted(host) {
                all.push(Choice::Delete(host));
            }
            if self.deleted && here.is_free() && !here.disk.full {
                all.push(Choice::Create(host));
            }
        }
        if limits.strangers > 0 {
            if here.disk.stranger.is_some() {
                all.push(Choice::Vacate(host));
            } else if here.is_free() && !here.disk.full {
                all.push(Choice::Occupy(host));
            }
        }
    }

    fn may_be_deleted(&self, host: HostId) -> bool {
        use crate::world::Stage;
        let here = &self.hosts[host];
        let is_free = here.work == Work::Idle && here.steps.is_empty() && here.unsaved.is_none();
        let is_plain = here.process.as_ref().is_none_or(|process| process.stage == Stage::Plain);
        is_free && is_plain && here.role() == Some(godwit_migration::handover::Role::Owner)
    }

    fn faults_of(&self, host: HostId, all: &mut Vec<Choice>) {
        let (here, limits) = (&self.hosts[host], &self.limits);
        let both = [false, true];
        let noting = matches!(&here.work, Work::Receiving(receiving) if receiving.noting);
        let written = if noting { &both[..] } else { &both[..1] };
        if limits.agent_crashes > 0 {
            let left = if self.is_left_in_the_middle(host) { &both[..] } else { &both[..1] };
            for &written in written {
                all.extend(left.iter().map(|&does| Choice::CrashAgent(host, written, does)));
            }
        }
        if limits.host_crashes > 0 {
            all.extend(written.iter().map(|&written| Choice::CrashHost(host, written)));
        }
        if limits.qemu_crashes > 0 && here.process.is_some() {
            all.push(Choice::CrashQemu(host));
        }
        if limits.full_disks > 0 && !here.disk.full {
            all.push(Choice::FillDisk(host));
        }
        if limits.failed_writes > 0 && !here.disk.fails {
            all.push(Choice::FailWrite(host));
        }
        if limits.cancels > 0 && here.steps.is_empty() && matches!(here.work, Work::Sending(_)) {
            all.push(Choice::Cancel(host));
        }
    }

    fn is_left_in_the_middle(&self, host: HostId) -> bool {
        use crate::world::Stage;
        let stage = self.hosts[host].process.as_ref().map(|process| process.stage);
        matches!(stage, Some(Stage::Stopped | Stage::Shadow))
    }

    fn may_migrate(&self, from: HostId, to: HostId) -> bool {
        let (here, there) = (&self.hosts[from], &self.hosts[to]);
        let whole =
            here.process.as_ref().is_some_and(|process| process.runs && process.missing.is_empty());
        from != to && whole && here.work == Work::Idle && there.is_free() && !there.disk.full
    }

    /// Returns the migrations whose lane carries messages, or may.
    fn lanes(&self) -> Vec<u32> {
        let of = |host: &crate::world::Host| match &host.work {
            Work::Sending(sending) => Some(sending.attempt),
            Work::Receiving(receiving) => Some(receiving.attempt),
            _ => None,
        };
        let mut all: Vec<u32> =
            self.hosts.iter().filter_map(of).filter(|lane| !self.cut.contains(lane)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns whether the host's lane was cut or has lost its other end.
    fn lane_is_dead(&self, host: HostId) -> bool {
        let (attempt, other) = match &self.hosts[host].work {
            Work::Sending(sending) => {
                let state = sending.machine.0.state();
                if matches!(
                    state,
                    State::PagingIn
                        | State::InDoubt
                        | State::RollingBack
                        | State::Releasing
                        | State::Ended
                ) {
                    return false;
                }
                (sending.attempt, sending.to)
            }
            Work::Receiving(receiving) => (receiving.attempt, receiving.from),
            _ => return false,
        };
        let there = match &self.hosts[other].work {
            Work::Sending(sending) => Some(sending.attempt),
            Work::Receiving(receiving) => Some(receiving.attempt),
            _ => None,
        };
        // Messages sent before the end arrive first.
        let on_its_way = self.letters.iter().any(|letter| {
            letter.to == host && letter.attempt == attempt && letter.word.is_of_lane()
        });
        self.cut.contains(&attempt) || (there != Some(attempt) && !on_its_way)
    }

    fn may_arrive(&self, place: usize) -> bool {
        let letter = &self.letters[place];
        if !letter.word.is_of_lane() || !self.options.ordered {
            return true;
        }
        self.letters.iter().all(|other| {
            (other.attempt, other.to) != (letter.attempt, letter.to)
                || !other.word.is_of_lane()
                || other.number >= letter.number
        })
    }

    /// Applies an event.
    pub fn apply(&mut self, choice: Choice) {
        match choice {
            Choice::Step(host) => self.step(host),
            Choice::Deliver(place) => {
                let letter = self.letters.remove(place);
                self.deliver(letter);
            }
            Choice::Noted(host) => self.noted(host, true),
            Choice::Save(host) => self.hosts[host].save_again(),
            Choice::Ask(host) => self.ask(host),
            Choice::Resume(host) => self.resume(host),
            Choice::Expire(host) => self.expire(host),
            Choice::Serve(host) => self.serve(host),
            Choice::Notice(host) => self.notice(host),
            Choice::Work(host, page) => self.writes(host, page),
            Choice::Migrate(from, to) => {
                self.limits.migrations -= 1;
                self.begin(from, to);
            }
            Choice::Delete(host) => self.delete(host),
            Choice::Create(host) => {
                self.limits.lives -= 1;
                self.create(host);
            }
            Choice::Occupy(host) => self.occupy(host),
            Choice::Vacate(host) => {
                self.limits.strangers -= 1;
                self.vacate(host);
            }
            Choice::Start(host) => self.start(host),
            Choice::GiveUp(host) => {
                self.limits.give_ups -= 1;
                if let Work::Sending(sending) = &mut self.hosts[host].work {
                    sending.asks = None;
                }
                self.source_takes(host, Event::Verdict(Verdict::Unknown));
            }
            fault => self.fault(fault),
        }
    }

    /// Describes an event as text.
    pub(crate) fn describe(&self, choice: Choice) -> String {
        match choice {
            Choice::Deliver(place) | Choice::Lose(place) | Choice::Double(place) => {
                let letter = &self.letters[place];
                format!(
                    "{choice:?} {} → {} of {}: {:?}",
                    letter.from, letter.to, letter.attempt, letter.word
                )
            }
            Choice::Step(host) => format!("{choice:?} {:?}", self.hosts[host].steps.front()),
            _ => format!("{choice:?}"),
        }
    }

    /// Removes all faults that are yet to come.
    pub(crate) fn be_fair(&mut self) {
        self.limits = Limits::default();
        for host in &mut self.hosts {
            (host.disk.full, host.disk.fails) = (false, false);
        }
    }

    pub(crate) fn is_question(&self, place: usize) -> bool {
        matches!(self.letters[place].word, Word::Ask { .. } | Word::Answer { .. })
    }
}
