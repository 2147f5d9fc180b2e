//! Faults, and how they are noticed.

use godwit_migration::{destination, source};

use crate::choices::Choice;
use crate::source::{failure, lost};
use crate::world::{Fate, HostId, Step, Work, World};

impl World {
    pub(crate) fn fault(&mut self, fault: Choice) {
        let limits = &mut self.limits;
        match fault {
            Choice::CrashAgent(host, written, does) => {
                limits.agent_crashes -= 1;
                self.crash_agent(host, written);
                self.qemu_is_left(host, does);
            }
            Choice::CrashHost(host, written) => {
                limits.host_crashes -= 1;
                self.crash_agent(host, written);
                self.kill(host, true);
                self.hosts[host].was_started = None;
            }
            Choice::CrashQemu(host) => {
                limits.qemu_crashes -= 1;
                self.crash_qemu(host);
            }
            Choice::Cut(attempt, to_destination, to_source) => {
                limits.cuts -= 1;
                self.cut.insert(attempt);
                let receives = |host: HostId| match &self.hosts[host].work {
                    Work::Receiving(receiving) => receiving.attempt == attempt,
                    _ => false,
                };
                let receivers: Vec<bool> = (0..self.hosts.len()).map(receives).collect();
                self.letters.retain(|letter| {
                    let is_lost = if receivers[letter.to] { to_destination } else { to_source };
                    letter.attempt != attempt || !letter.word.is_of_lane() || !is_lost
                });
            }
            Choice::Break(attempt, lost) => {
                limits.cuts -= 1;
                self.cut.insert(attempt);
                self.broken.insert(attempt);
                self.letters.retain(|letter| {
                    letter.attempt != attempt || !letter.word.is_of_lane() || !lost
                });
            }
            Choice::Lose(place) => {
                limits.losses -= 1;
                let letter = self.letters.remove(place);
                // The asking host asks again when no answer comes.
                let asker = if matches!(letter.word, crate::world::Word::Ask { .. }) {
                    letter.from
                } else {
                    letter.to
                };
                self.question_lost(asker);
            }
            Choice::Double(place) => {
                limits.losses -= 1;
                let letter = self.letters[place].clone();
                self.letters.push(letter);
            }
            Choice::FillDisk(host) => {
                limits.full_disks -= 1;
                self.hosts[host].disk.full = true;
            }
            Choice::ClearDisk(host) => self.hosts[host].disk.full = false,
            Choice::FailWrite(host) => {
                limits.failed_writes -= 1;
                self.hosts[host].disk.fails = true;
            }
            Choice::Cancel(host) => {
                limits.cancels -= 1;
                self.source_takes(host, source::Event::CancelRequested);
            }
            _ => {}
        }
    }

    /// Kills a host's QEMU; its migration, if it has one, notices.
    fn crash_qemu(&mut self, host: HostId) {
        self.kill(host, true);
        let gone = failure("QEMU is gone");
        match &self.hosts[host].work {
            Work::Sending(_) => self.source_notices(host, source::Event::Failed(gone)),
            Work::Receiving(_) => {
                self.destination_takes(host, destination::Event::Failed(gone));
            }
            Work::Cut { .. } => self.hosts[host].work = Work::Idle,
            Work::Waiting { .. } => self.expire(host),
            // Nothing is kept there any more.
            Work::Serving { .. } => self.hosts[host].work = Work::Doubt { asked: false },
            _ => {}
        }
    }

    /// Gives up at a limit, or if the other end is known not to wait: the source's guest stays
    /// where it is, and the shadow is discarded.
    pub(crate) fn expire(&mut self, host: HostId) {
        let here = &mut self.hosts[host];
        match here.work {
            Work::Cut { .. } => {
                if let Some(process) = &mut here.process {
                    process.tracked = false;
                }
                here.work = Work::Idle;
            }
            Work::Waiting { attempt, .. } => {
                here.fates.insert(attempt, Fate::Refused);
                here.work = Work::Idle;
                here.steps.extend([Step::Kill, Step::RemoveRecord]);
            }
            _ => {}
        }
    }

    fn crash_agent(&mut self, host: HostId, written: bool) {
        if written {
            self.noted(host, false);
        }
        let here = &mut self.hosts[host];
        here.work = Work::Down;
        here.steps.clear();
        here.fates.clear();
        here.unsaved = None;
        // A question of another host dies with the connection that carried it.
        let asking: Vec<HostId> = (0..self.hosts.len())
            .filter(|&other| {
                self.letters.iter().any(|letter| {
                    (letter.from, letter.to) == (other, host) && !letter.word.is_of_lane()
                })
            })
            .collect();
        self.letters.retain(|letter| letter.to != host || letter.word.is_of_lane());
        asking.into_iter().for_each(|other| self.question_lost(other));
    }

    pub(crate) fn notice(&mut self, host: HostId) {
        match &self.hosts[host].work {
            Work::Sending(_) => self.source_takes(host, source::Event::LaneLost(lost())),
            Work::Receiving(_) => {
                self.destination_takes(host, destination::Event::LaneLost(lost()));
            }
            _ => {}
        }
    }
}
