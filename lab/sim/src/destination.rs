//! What the destination's driver and hypervisor do with the state machine's decisions.

use godwit_migration::destination::{Action, Ending, Event};
use godwit_migration::handover::Role;
use godwit_wire::Begin;

use crate::source::failure;
use crate::world::{Fate, HostId, Stage, Step, Word, Work, World};

/// Length of the device state.
const STATE_BYTES: u64 = 100;

impl World {
    pub(crate) fn destination_takes(&mut self, host: HostId, event: Event) {
        let here = &mut self.hosts[host];
        let Work::Receiving(receiving) = &mut here.work else { return };
        let actions = receiving.machine.0.on(event);
        here.steps.extend(actions.into_iter().map(Step::Destination));
        self.goes_on(host);
    }

    fn send_source(&mut self, host: HostId, word: Word) {
        if let Work::Receiving(receiving) = &self.hosts[host].work {
            let (from, attempt) = (receiving.from, receiving.attempt);
            self.send(host, from, attempt, word);
        }
    }

    pub(crate) fn destination_acts(&mut self, host: HostId, action: Action) {
        match action {
            Action::SendReady => self.send_source(host, Word::Ready),
            Action::NoteTakeOver => {
                let Work::Receiving(receiving) = &mut self.hosts[host].work else { return };
                receiving.noting = true;
                if !self.options.rules.notes_take_over {
                    receiving.noting = false;
                    self.destination_takes(host, Event::Noted);
                }
            }
            Action::FinishLoad => {
                let event = match &mut self.hosts[host].process {
                    Some(process) => {
                        process.stage = Stage::Loaded;
                        Event::Loaded
                    }
                    None => Event::Failed(failure("QEMU is gone")),
                };
                self.destination_takes(host, event);
            }
            Action::RunGuest { .. } => {
                if self.hosts[host].process.is_none() {
                    return self.destination_takes(host, Event::Failed(failure("QEMU is gone")));
                }
                if let Work::Receiving(receiving) = &mut self.hosts[host].work {
                    let missing = std::mem::take(&mut receiving.missing);
                    if let Some(process) = &mut self.hosts[host].process {
                        process.missing = missing;
                    }
                }
                self.hosts[host].was_started = Some(true);
                self.runs(host);
                self.destination_takes(host, Event::GuestRuns);
            }
            Action::SendRunning => self.send_source(host, Word::Running),
            Action::Refuse(_) => self.send_source(host, Word::Refused),
            Action::Discard(_) => {
                // Wait for the record in progress.
                self.noted(host, false);
                [Step::RemoveRecord, Step::Kill].into_iter().for_each(|step| {
                    self.hosts[host].steps.push_front(step);
                });
            }
            Action::Promote => {
                let here = &mut self.hosts[host];
                let record = here.disk.record.as_ref();
                let ownership = record.map_or(here.ownership, |record| record.standing.ownership);
                here.save_owner(ownership);
            }
            Action::Finish(Ending::Cut(_)) => {
                let Work::Receiving(receiving) = &self.hosts[host].work else { return };
                let (from, attempt) = (receiving.from, receiving.attempt);
                self.hosts[host].work = Work::Waiting { from, attempt };
            }
            Action::Finish(ending) => {
                let fate = if ending == Ending::Runs { Fate::Runs } else { Fate::Refused };
                let here = &mut self.hosts[host];
                if let Work::Receiving(receiving) = &here.work {
                    here.fates.insert(receiving.attempt, fate);
                }
                here.work = Work::Idle;
            }
        }
    }

    /// Completes the record in progress, or fails it.
    pub(crate) fn noted(&mut self, host: HostId, notifies: bool) {
        let here = &mut self.hosts[host];
        let Work::Receiving(receiving) = &mut here.work else { return };
        if !std::mem::replace(&mut receiving.noting, false) {
            return;
        }
        let written = here.disk.writes();
        let event = match &mut here.disk.record {
            Some(record) if written => {
                record.standing.role = Role::TakingOver;
                Event::Noted
            }
            _ => Event::Failed(failure("the disk is full")),
        };
        if notifies {
            self.destination_takes(host, event);
        }
    }

    /// Handles a message of the source.
    pub(crate) fn destination_receives(&mut self, host: HostId, word: Word) {
        let pages = self.options.pages as u64;
        let Work::Receiving(receiving) = &mut self.hosts[host].work else { return };
        let event = match word {
            Word::Begin { ownership } => {
                let incarnation = ownership.incarnation.bits();
                let (epoch, run) = (ownership.epoch, true);
                Event::Begin(Begin { epoch, incarnation, run, block_pages: vec![pages] })
            }
            Word::Pages(content) => {
                receiving.pages_applied += content.len() as u64;
                if let Some(process) = &mut self.hosts[host].process {
                    content.into_iter().for_each(|(page, value)| process.memory[page] = value);
                }
                return;
            }
            Word::RoundEnd(round) => return self.send_source(host, Word::RoundApplied(round)),
            Word::PreparePageIn => return self.send_source(host, Word::PageInReady),
            Word::Remaining(missing) => {
                receiving.missing = missing;
                return;
            }
            Word::PagesEnd { sent } => {
                Event::PagesComplete { sent, applied: receiving.pages_applied }
            }
            Word::StateFed => Event::DeviceStateFed { bytes: STATE_BYTES },
            Word::StateEnd => Event::DeviceStateEnd { bytes: STATE_BYTES },
            Word::Commit { ownership } => Event::Commit { ownership },
            Word::Abort => Event::Aborted(failure("the source gives up").to_reason()),
            _ => return,
        };
        self.destination_takes(host, event);
    }
}
