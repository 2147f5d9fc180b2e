//! The agents: their steps, their starts, and how they resolve doubt.

use godwit_migration::handover::{Found, OfDestination, OfSource, Recovery, Role};
use godwit_migration::source::Action;
use godwit_types::Ownership;

use crate::world::{Answer, HostId, Letter, Process, Record, Stage, Step, Word, Work, World};

/// Life of another VM with the same name and uuid.
const STRANGER: u32 = 1_000;
/// Epoch that is later than any offer of the guest's first moves.
const STRANGERS_EPOCH: u64 = 9;

impl World {
    /// Performs at once the steps whose timing is not visible outside this host, up to the next
    /// step that matters.
    pub(crate) fn goes_on(&mut self, host: HostId) {
        while let Some(Step::Source(action)) = self.hosts[host].steps.front() {
            let is_light = matches!(
                action,
                Action::StartTracking
                    | Action::StopTracking
                    | Action::CountRemaining
                    | Action::LetWritersGo
                    | Action::Throttle { .. }
                    | Action::ServePages
            );
            if !is_light {
                return;
            }
            self.step(host);
        }
    }

    /// Carries out an agent's next step.
    pub(crate) fn step(&mut self, host: HostId) {
        let Some(step) = self.hosts[host].steps.pop_front() else { return };
        match step {
            Step::Source(action) => {
                if self.source_acts(host, &action).is_err() {
                    self.hosts[host].steps.retain(|step| !matches!(step, Step::Source(_)));
                    self.source_takes(
                        host,
                        godwit_migration::source::Event::LaneLost(crate::source::lost()),
                    );
                }
            }
            Step::SourceTakes(event) => self.source_takes(host, event),
            Step::Destination(action) => self.destination_acts(host, action),
            Step::StopGuest => self.stop_guest(host),
            Step::NotifyReleased => {
                self.source_takes(host, godwit_migration::source::Event::Released);
            }
            Step::NoteGone => self.note_gone(host),
            Step::RemoveRecord => {
                self.remove_record(host, Step::RemoveRecord);
            }
            Step::Kill => self.kill(host, false),
            Step::EndGuest => {
                self.hosts[host].process = None;
                self.dead = true;
            }
            Step::RemoveDeleted => self.deleted |= self.remove_record(host, Step::RemoveDeleted),
            Step::LetGo => {
                // If it has ended meanwhile, it can be started again.
                let _ = self.let_go(host);
            }
            Step::SaveOwner(ownership) => self.hosts[host].save_owner(ownership),
            Step::BeIdle => self.hosts[host].work = Work::Idle,
            Step::BeInDoubt => self.hosts[host].work = Work::Doubt { asked: false },
        }
    }

    /// Records that the guest is gone from here. If that fails, nothing is removed: a deletion is
    /// refused, and a source asks again.
    fn note_gone(&mut self, host: HostId) {
        let heeds = self.options.rules.heeds_failed_writes;
        let here = &mut self.hosts[host];
        let Ownership { incarnation, epoch } = here.ownership;
        if here.disk.writes() {
            here.disk.gone.insert(incarnation, epoch);
        } else if heeds {
            here.steps.clear();
            let is_offered = here.role() == Some(Role::HandingOver);
            here.work = if is_offered { Work::Doubt { asked: false } } else { Work::Idle };
        }
    }

    /// Removes the record. If that fails, retries as `again` later. Returns whether the record is
    /// gone.
    fn remove_record(&mut self, host: HostId, again: Step) -> bool {
        let heeds = self.options.rules.heeds_failed_writes;
        let here = &mut self.hosts[host];
        let removed = here.disk.removes();
        if removed {
            here.disk.record = None;
            here.unsaved = None;
        } else if heeds {
            here.steps.push_front(again);
        }
        removed
    }

    /// Has an operator delete the VM where it is.
    pub(crate) fn delete(&mut self, host: HostId) {
        self.hosts[host].steps.extend([Step::NoteGone, Step::EndGuest, Step::RemoveDeleted]);
    }

    /// Has an operator create the VM again with the same specification: another guest with the same
    /// name and uuid.
    pub(crate) fn create(&mut self, host: HostId) {
        let here = &mut self.hosts[host];
        if !here.disk.writes() {
            return;
        }
        self.life += 1;
        self.writes += 1;
        self.truth = vec![self.writes; self.options.pages];
        here.ownership =
            Ownership { incarnation: self.options.rules.incarnation(self.life), epoch: 1 };
        here.disk.record = Some(Record::owner(here.ownership));
        here.process = Some(Process::guest(self.life, self.truth.clone()));
        here.was_started = None;
        (self.deleted, self.dead) = (false, false);
    }

    /// Brings another VM of the same name and uuid to a host that has neither, after a life of its
    /// own elsewhere.
    pub(crate) fn occupy(&mut self, host: HostId) {
        let incarnation = self.options.rules.incarnation(STRANGER);
        let disk = &mut self.hosts[host].disk;
        disk.stranger = disk.writes().then_some(Ownership { incarnation, epoch: STRANGERS_EPOCH });
    }

    /// Removes that VM from the host.
    pub(crate) fn vacate(&mut self, host: HostId) {
        let disk = &mut self.hosts[host].disk;
        let Some(Ownership { incarnation, epoch }) = disk.stranger else { return };
        if disk.writes() {
            disk.gone.insert(incarnation, epoch);
            disk.stranger = None;
        }
    }

    pub(crate) fn start(&mut self, host: HostId) {
        let here = &mut self.hosts[host];
        here.work = Work::Idle;
        let Some(record) = here.disk.record.clone() else {
            // A process without a record is ended.
            return self.kill(host, false);
        };
        here.ownership = record.standing.ownership;
        let found = match &here.process {
            None if here.was_started == Some(false) => Found::GoneUnrun,
            None => Found::Gone,
            Some(process) if process.runs => Found::Ran,
            Some(_) => Found::Still,
        };
        let ownership = record.standing.ownership;
        let steps = &mut here.steps;
        match (self.options.rules.recover)(record.standing.role, found) {
            Recovery::Keep => {}
            Recovery::TakeOver => steps.push_back(Step::SaveOwner(ownership)),
            Recovery::TakeBack => {
                steps.extend([Step::LetGo, Step::SaveOwner(ownership.taken_back())]);
            }
            Recovery::Discard => steps.extend([Step::Kill, Step::RemoveRecord]),
            Recovery::AskDestination if record.needs_pages && here.process.is_some() => {
                here.work = Work::Serving { to: record.other.unwrap_or(host) };
            }
            Recovery::AskDestination | Recovery::AskSource => {
                here.work = Work::Doubt { asked: false }
            }
        }
    }

    /// Returns the host to which a waiting host sends its question, and the ownership that was
    /// offered.
    pub(crate) fn asks(&self, host: HostId) -> Option<(HostId, Ownership)> {
        let here = &self.hosts[host];
        match &here.work {
            Work::Sending(sending) if sending.asks == Some(false) => {
                Some((sending.to, here.ownership.offered()))
            }
            Work::Doubt { asked: false } if here.steps.is_empty() => {
                let record = here.disk.record.as_ref()?;
                let ownership = record.standing.ownership;
                let is_source = record.standing.role == Role::HandingOver;
                let offered = if is_source { ownership.offered() } else { ownership };
                Some((record.other?, offered))
            }
            _ => None,
        }
    }

    pub(crate) fn ask(&mut self, host: HostId) {
        let Some((to, offered)) = self.asks(host) else { return };
        let attempt = match &mut self.hosts[host].work {
            Work::Sending(sending) => {
                sending.asks = Some(true);
                sending.attempt
            }
            Work::Doubt { asked } => {
                *asked = true;
                0
            }
            _ => return,
        };
        self.send(host, to, attempt, Word::Ask { offered });
    }

    /// Loses a question or its answer: it is asked again.
    pub(crate) fn question_lost(&mut self, asker: HostId) {
        match &mut self.hosts[asker].work {
            Work::Doubt { asked } => *asked = false,
            Work::Sending(sending) if sending.asks == Some(true) => sending.asks = Some(false),
            _ => {}
        }
    }

    pub(crate) fn deliver(&mut self, letter: Letter) {
        let Letter { from, to, attempt, word, .. } = letter;
        if !self.hosts[to].is_up() {
            if matches!(word, Word::Ask { .. }) {
                // No agent listens: the one that asked knows, and asks again.
                self.question_lost(from);
            }
            return;
        }
        match word {
            Word::Ask { offered } => {
                let fate = self.hosts[to].fates.get(&attempt).copied();
                let answer = fate.map_or_else(
                    || Answer::Known(self.hosts[to].known(offered.incarnation)),
                    Answer::Fate,
                );
                self.send(to, from, attempt, Word::Answer { offered, answer });
            }
            Word::Answer { offered, answer } => self.receives_answer(to, attempt, offered, answer),
            word => match &self.hosts[to].work {
                Work::Sending(sending) if sending.attempt == attempt => {
                    self.source_receives(to, &word);
                }
                Work::Receiving(receiving) if receiving.attempt == attempt => {
                    self.destination_receives(to, word);
                }
                _ => {}
            },
        }
    }

    fn receives_answer(&mut self, host: HostId, attempt: u32, offered: Ownership, answer: Answer) {
        match (&mut self.hosts[host].work, answer) {
            (Work::Sending(sending), _) if sending.attempt == attempt => {
                self.verdict(host, offered, answer);
            }
            (Work::Doubt { asked }, Answer::Known(known)) if attempt == 0 => {
                *asked = false;
                let Some(record) = self.hosts[host].disk.record.clone() else { return };
                let standing = record.standing;
                let rules = self.options.rules;
                let steps = match standing.role {
                    Role::HandingOver if standing.ownership.offered() == offered => {
                        match (rules.of_destination)(known, offered) {
                            OfDestination::Open => return,
                            OfDestination::Took
                                if record.needs_pages && self.hosts[host].process.is_some() =>
                            {
                                let to = record.other.unwrap_or(host);
                                self.hosts[host].work = Work::Serving { to };
                                return;
                            }
                            OfDestination::Took => {
                                vec![Step::NoteGone, Step::RemoveRecord, Step::Kill]
                            }
                            OfDestination::Refused => {
                                vec![Step::LetGo, Step::SaveOwner(standing.ownership.taken_back())]
                            }
                        }
                    }
                    Role::TakingOver if standing.ownership == offered => {
                        match (rules.of_source)(known, offered) {
                            OfSource::Open => return,
                            OfSource::TookBack => vec![Step::Kill, Step::RemoveRecord],
                            OfSource::LetGo => vec![Step::SaveOwner(standing.ownership)],
                        }
                    }
                    _ => return,
                };
                self.settled += 1;
                self.hosts[host].steps.extend(steps);
                self.hosts[host].steps.push_back(Step::BeIdle);
            }
            _ => {}
        }
    }

    /// Has an operator, who has powered the destination off or inspected it, take the guest back:
    /// unchanged if it certainly never ran there, and otherwise to be started anew.
    pub(crate) fn resolve(&mut self, host: HostId) {
        if !self.is_true(host) {
            self.kill(host, true);
        }
        let Some(record) = self.hosts[host].disk.record.clone() else { return };
        let ownership = record.standing.ownership.taken_back();
        self.hosts[host].steps.extend([Step::LetGo, Step::SaveOwner(ownership), Step::BeIdle]);
        while !self.hosts[host].steps.is_empty() {
            self.step(host);
        }
    }

    /// Simulates what QEMU does by itself when its agent is gone in the middle of a migration.
    pub(crate) fn qemu_is_left(&mut self, host: HostId, does: bool) {
        let Some(process) = &mut self.hosts[host].process else { return };
        match process.stage {
            // Its migration has failed: it resumes the guest.
            Stage::Stopped if does => {
                process.stage = Stage::Plain;
                self.runs(host);
            }
            // A stream that ends early ends it.
            Stage::Shadow if does => self.kill(host, true),
            _ => {}
        }
    }
}
