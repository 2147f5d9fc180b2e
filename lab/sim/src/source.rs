//! What the source's driver and hypervisor do with the state machine's decisions.

use std::collections::BTreeSet;
use std::time::Duration;

use godwit_migration::handover::{KeptPagesFate, Role, Standing, fate_of_kept_pages};
use godwit_migration::source::{Action, Counted, Event, NotServed, Plan, Source, State, Verdict};
use godwit_migration::{Failure, SentTotals};
use godwit_types::{FailureCode, Outcome, Ownership};
use godwit_wire::Running;

use crate::world::{
    Answer, Fate, HostId, Machine, Process, Receiving, Record, Sending, Stage, Step, Word, Work,
    World,
};

/// Time that an event takes on the state machine's clock: rounds become long enough that the policy
/// needs several.
const EVENT_TIME: Duration = Duration::from_millis(3);
/// Bytes that a sweep sends in addition to its pages, so that a rate can be computed.
const SWEEP_BYTES: u64 = 2_000_000;

pub(crate) fn failure(what: &str) -> Failure {
    Failure::new(FailureCode::HypervisorFailed, what)
}

pub(crate) fn lost() -> Failure {
    Failure::new(FailureCode::LaneLost, "cut")
}

impl World {
    /// Connects the lane after the destination has made a shadow.
    pub(crate) fn begin(&mut self, from: HostId, to: HostId) {
        let (ownership, life) = (self.hosts[from].ownership.offered(), self.life);
        let pages = self.options.pages;
        // Each host first records that the guest may be there.
        if !self.hosts[from].disk.writes() || !self.hosts[to].disk.writes() {
            return;
        }
        let there = &mut self.hosts[to];
        let standing = Standing { role: Role::Shadow, ownership };
        there.disk.record = Some(Record { standing, other: Some(from), needs_pages: false });
        there.process = Some(Process::shadow(life, pages));
        there.was_started = Some(false);
        self.open_lane(from, to, ownership, None);
    }

    /// Connects a lane: the first one, or one in place of a lane that was cut. In the latter case
    /// the destination lacks the pages in `unsent`.
    fn open_lane(
        &mut self,
        from: HostId,
        to: HostId,
        ownership: Ownership,
        unsent: Option<BTreeSet<usize>>,
    ) {
        self.attempts += 1;
        let (attempt, pages) = (self.attempts, self.options.pages);
        let machine =
            godwit_migration::destination::Destination::new(vec![pages as u64], ownership);
        let there = &mut self.hosts[to];
        there.fates.insert(attempt, Fate::Receiving);
        there.work = Work::Receiving(Box::new(Receiving {
            attempt,
            from,
            machine: Machine(machine),
            pages_applied: 0,
            noting: false,
            missing: BTreeSet::new(),
        }));
        let resumes = unsent.is_some();
        let (policy, settles) = (self.policy(), self.options.moves_disks);
        let plan = Plan { policy, preflight: Duration::ZERO, resumes, settles };
        let machine = Machine(Source::new(&plan));
        let unsent = match unsent {
            Some(unsent) => {
                // The next sweep finds them.
                if let Some(process) = &mut self.hosts[from].process {
                    process.dirty.extend(unsent);
                }
                BTreeSet::new()
            }
            None => (0..pages).collect(),
        };
        let sending =
            Sending { attempt, to, machine, pages_sent: 0, unsent, resumes, asks: None, events: 0 };
        self.hosts[from].work = Work::Sending(Box::new(sending));
        self.source_takes(from, Event::Connected);
    }

    /// Connects the source to its destination again.
    pub(crate) fn resume(&mut self, from: HostId) {
        let Work::Cut { to, unsent, .. } = self.hosts[from].work.clone() else { return };
        self.resumed += 1;
        let ownership = self.hosts[from].ownership.offered();
        self.open_lane(from, to, ownership, Some(unsent));
    }

    /// Returns whether the other end has state with which to continue.
    pub(crate) fn may_resume(&self, from: HostId) -> bool {
        let Work::Cut { to, attempt, .. } = self.hosts[from].work else { return false };
        let there = &self.hosts[to];
        there.work == Work::Waiting { from, attempt }
            && there.steps.is_empty()
            && there.process.is_some()
    }

    pub(crate) fn source_takes(&mut self, host: HostId, event: Event) {
        let here = &mut self.hosts[host];
        let Work::Sending(sending) = &mut here.work else { return };
        sending.events += 1;
        let now = EVENT_TIME * sending.events;
        let actions = sending.machine.0.on(now, event);
        // The next event waits until all of them are carried out.
        let waits = here.steps.iter().position(|step| matches!(step, Step::SourceTakes(_)));
        let waiting = here.steps.split_off(waits.unwrap_or(here.steps.len()));
        here.steps.extend(actions.into_iter().map(Step::Source));
        here.steps.extend(waiting);
        self.goes_on(host);
    }

    /// Queues an event that occurs beside the driver, which takes it after its present actions.
    pub(crate) fn source_notices(&mut self, host: HostId, event: Event) {
        let steps = &mut self.hosts[host].steps;
        if steps.iter().any(|step| matches!(step, Step::Source(_))) {
            steps.push_back(Step::SourceTakes(event));
        } else {
            self.source_takes(host, event);
        }
    }

    /// Sends dirty pages (or, in round 0, the others).
    fn sweep(&mut self, host: HostId, untouched: bool) -> SentTotals {
        let Some(process) = &mut self.hosts[host].process else { return SentTotals::default() };
        let pages: Vec<usize> = if untouched {
            (0..process.memory.len()).filter(|page| !process.dirty.contains(page)).collect()
        } else {
            std::mem::take(&mut process.dirty).into_iter().collect()
        };
        let content: Vec<_> = pages.iter().map(|&page| (page, process.memory[page])).collect();
        let count = content.len() as u64;
        if let Work::Sending(sending) = &mut self.hosts[host].work {
            sending.pages_sent += count;
            sending.unsent.extend(&pages);
        }
        if count > 0 {
            // A data stream: the driver learns of its end from the control stream.
            let _ = self.send_peer(host, Word::Pages(content));
        }
        SentTotals { pages: count, bytes: count * 4128 + SWEEP_BYTES, ..SentTotals::default() }
    }

    fn send_peer(&mut self, host: HostId, word: Word) -> Result<(), NotSent> {
        let Work::Sending(sending) = &self.hosts[host].work else { return Ok(()) };
        let (to, attempt) = (sending.to, sending.attempt);
        if self.broken.contains(&attempt) {
            return Err(NotSent);
        }
        self.send(host, to, attempt, word);
        Ok(())
    }

    /// Carries out one action.
    pub(crate) fn source_acts(&mut self, host: HostId, action: &Action) -> Result<(), NotSent> {
        let Work::Sending(sending) = &self.hosts[host].work else { return Ok(()) };
        let (pages_sent, round, resumes) =
            (sending.pages_sent, sending.machine.0.round(), sending.resumes);
        let ownership = self.hosts[host].ownership.offered();
        let scans = matches!(
            action,
            Action::SendRound { .. } | Action::SendLastPages { .. } | Action::AnnounceRemaining
        );
        if scans && self.hosts[host].process.is_none() {
            self.source_takes(host, Event::Failed(failure("QEMU is gone")));
            return Ok(());
        }
        match *action {
            Action::SendBegin => self.send_peer(host, Word::Begin { ownership })?,
            Action::StartTracking => {
                if let Some(process) = &mut self.hosts[host].process {
                    process.tracked = true;
                    process.dirty.clear();
                }
            }
            Action::SendRound { round, .. } => {
                let sent = self.sweep(host, round == 0 && !resumes);
                self.source_takes(host, Event::RoundSent(sent));
            }
            Action::Drain => self.send_peer(host, Word::RoundEnd(round))?,
            Action::CountRemaining => {
                let dirty =
                    self.hosts[host].process.as_ref().map_or(0, |process| process.dirty.len());
                self.source_takes(host, remaining(dirty as u64));
            }
            Action::Throttle { .. } => self.source_takes(host, Event::CannotThrottle),
            Action::LetWritersGo | Action::StopTracking | Action::ServePages => {}
            Action::PreparePageIn => self.send_peer(host, Word::PreparePageIn)?,
            Action::AnnounceRemaining => {
                let Some(process) = &mut self.hosts[host].process else { return Ok(()) };
                let missing = std::mem::take(&mut process.dirty);
                let pages = missing.len() as u64;
                self.send_peer(host, Word::Remaining(missing))?;
                self.source_takes(host, Event::RemainingAnnounced { pages });
            }
            Action::Settle => self.settle(host),
            Action::BeginSwitchover { page_in } => self.begin_switchover(host, page_in),
            Action::WriteDeviceState => self.write_device_state(host),
            Action::SendLastPages { .. } => {
                let sent = self.sweep(host, false);
                self.source_takes(host, Event::LastPagesSent(sent));
            }
            // All of the state is in one message, which `SendDeviceState` sends.
            Action::PassDeviceState => {}
            Action::SendDeviceState => {
                self.send_peer(host, Word::StateFed)?;
                self.send_peer(host, Word::StateEnd)?;
            }
            Action::EndPages => self.send_peer(host, Word::PagesEnd { sent: pages_sent })?,
            Action::SendCommit => {
                self.send_peer(host, Word::Commit { ownership })?;
                self.source_takes(host, Event::CommitSent);
            }
            Action::AbortPeer(_) => drop(self.send_peer(host, Word::Abort)),
            Action::ResumeGuest => {
                let resumed = self.let_go(host);
                self.source_takes(host, Event::GuestResumed(resumed));
            }
            Action::AskVerdict => {
                if let Work::Sending(sending) = &mut self.hosts[host].work {
                    sending.asks = Some(false);
                }
            }
            Action::ReleaseGuest => self.release_guest(host),
            Action::Finish => self.source_ends(host),
        }
        Ok(())
    }

    fn release_guest(&mut self, host: HostId) {
        let steps = [Step::NoteGone, Step::RemoveRecord, Step::Kill, Step::NotifyReleased];
        steps.into_iter().rev().for_each(|step| self.hosts[host].steps.push_front(step));
    }

    /// Settles disks. Some stops are put off. Whatever happens meanwhile comes before the answer.
    fn settle(&mut self, host: HostId) {
        let Work::Sending(sending) = &self.hosts[host].work else { return };
        let is_put_off = sending.events.is_multiple_of(3) && sending.machine.0.round() < 4;
        let event = if is_put_off { Event::PutOff } else { Event::Settled };
        self.hosts[host].steps.push_back(Step::SourceTakes(event));
    }

    fn begin_switchover(&mut self, host: HostId, page_in: bool) {
        let Work::Sending(sending) = &self.hosts[host].work else { return };
        let (to, ownership) = (sending.to, self.hosts[host].ownership);
        if !self.hosts[host].disk.writes() {
            return self.source_takes(host, Event::Failed(failure("the disk is full")));
        }
        if self.options.rules.notes_hand_over {
            let standing = Standing { role: Role::HandingOver, ownership };
            self.hosts[host].disk.record =
                Some(Record { standing, other: Some(to), needs_pages: page_in });
            self.hosts[host].unsaved = None;
        }
        self.hosts[host].steps.push_front(Step::StopGuest);
    }

    pub(crate) fn stop_guest(&mut self, host: HostId) {
        match &mut self.hosts[host].process {
            Some(process) => {
                process.runs = false;
                process.stage = Stage::Stopped;
                self.source_takes(host, Event::GuestStopped);
            }
            None => self.source_takes(host, Event::Failed(failure("QEMU is gone"))),
        }
    }

    fn write_device_state(&mut self, host: HostId) {
        // A device's last write comes while its state is written.
        self.writes(host, 0);
        match &mut self.hosts[host].process {
            Some(process) => {
                process.stage = Stage::Written;
                self.source_takes(host, Event::DeviceStateEnded);
            }
            None => self.source_takes(host, Event::Failed(failure("QEMU is gone"))),
        }
    }

    /// Undoes QEMU's migration and resumes the guest.
    pub(crate) fn let_go(&mut self, host: HostId) -> Result<(), Failure> {
        let Some(process) = &mut self.hosts[host].process else {
            return Err(failure("QEMU is gone"));
        };
        process.stage = Stage::Plain;
        process.tracked = false;
        if !process.runs {
            self.runs(host);
        }
        Ok(())
    }

    /// Handles the engine's end in the agent.
    fn source_ends(&mut self, host: HostId) {
        let Work::Sending(sending) = &self.hosts[host].work else { return };
        let outcome = sending.machine.0.ending().map_or(Outcome::Failed, |(outcome, _)| outcome);
        let offered = self.hosts[host].role() == Some(Role::HandingOver);
        if sending.machine.0.is_cut() {
            let mut unsent = sending.unsent.clone();
            if !sending.resumes && sending.machine.0.rounds().is_empty() {
                unsent.extend(0..self.options.pages);
            }
            self.hosts[host].work = Work::Cut { to: sending.to, attempt: sending.attempt, unsent };
            return;
        }
        if let Some(process) = &mut self.hosts[host].process {
            process.tracked = false;
        }
        let steps = &mut self.hosts[host].steps;
        match outcome {
            Outcome::Completed => {
                self.completed += 1;
                steps.push_back(Step::BeIdle);
            }
            Outcome::InDoubt if offered => steps.push_back(Step::BeInDoubt),
            _ if offered => {
                let ownership = self.hosts[host].ownership.taken_back();
                let steps = &mut self.hosts[host].steps;
                steps.push_back(Step::SaveOwner(ownership));
                steps.push_back(Step::BeIdle);
            }
            _ => steps.push_back(Step::BeIdle),
        }
    }

    /// Handles a message of the destination.
    pub(crate) fn source_receives(&mut self, host: HostId, word: &Word) {
        let event = match *word {
            Word::Ready => Event::PeerReady,
            Word::RoundApplied(round) => {
                if let Work::Sending(sending) = &mut self.hosts[host].work {
                    sending.unsent.clear();
                }
                Event::RoundApplied { round, padding_bytes: 0 }
            }
            Word::PageInReady => Event::PageInReady { able: true },
            Word::Running => {
                Event::PeerRunning(Running { commit_ns: 0, loaded_ns: 0, running_ns: 0 })
            }
            Word::Refused => Event::PeerRefused(failure("refused")),
            _ => return,
        };
        self.source_notices(host, event);
    }

    /// Handles the destination's answer to the query for a verdict.
    pub(crate) fn verdict(&mut self, host: HostId, offered: Ownership, answer: Answer) {
        use godwit_migration::handover::OfDestination;
        let taken = match answer {
            Answer::Fate(Fate::Receiving) => OfDestination::Open,
            Answer::Fate(Fate::Runs) => OfDestination::Took,
            Answer::Fate(Fate::Refused) => OfDestination::Refused,
            Answer::Known(known) => (self.options.rules.of_destination)(known, offered),
        };
        let Work::Sending(sending) = &mut self.hosts[host].work else { return };
        if sending.asks.is_none() {
            return;
        }
        sending.asks = Some(false);
        let verdict = match taken {
            OfDestination::Open => return,
            OfDestination::Took => Verdict::Runs,
            OfDestination::Refused => Verdict::Refused(failure("not taken")),
        };
        sending.asks = None;
        self.source_takes(host, Event::Verdict(verdict));
    }

    /// Returns what becomes of the pages that a source keeps, as far as its destination can send
    /// now; `None`: nothing yet.
    pub(crate) fn serving(&self, host: HostId) -> Option<Served> {
        let (to, offered) = match &self.hosts[host].work {
            Work::Serving { to } => (*to, self.hosts[host].ownership.offered()),
            Work::Sending(sending) if sending.machine.0.state() == State::PagingIn => {
                (sending.to, self.hosts[host].ownership.offered())
            }
            _ => return None,
        };
        let there = &self.hosts[to];
        if !there.is_up() || self.hosts[host].process.is_none() {
            return None;
        }
        match fate_of_kept_pages(there.known(offered.incarnation), offered) {
            KeptPagesFate::NotNeeded => Some(Served::NotNeeded),
            KeptPagesFate::Refused => Some(Served::Refused),
            KeptPagesFate::AskAgain => {
                let record = there.disk.record.as_ref()?;
                if record.standing != (Standing { role: Role::Owner, ownership: offered }) {
                    return None;
                }
                let lacks =
                    there.process.as_ref().is_some_and(|process| !process.missing.is_empty());
                Some(if lacks { Served::Pages(to) } else { Served::NotNeeded })
            }
        }
    }

    pub(crate) fn serve(&mut self, host: HostId) {
        let Some(served) = self.serving(host) else { return };
        let is_sending = matches!(self.hosts[host].work, Work::Sending(_));
        match (served, is_sending) {
            // Their arrival is reported in a separate step: a cut may come between.
            (Served::Pages(to), _) => {
                let kept = self.hosts[host].process.as_ref().map(|process| process.memory.clone());
                if let (Some(kept), Some(process)) = (kept, &mut self.hosts[to].process) {
                    for page in std::mem::take(&mut process.missing) {
                        process.memory[page] = kept[page];
                    }
                }
            }
            (Served::NotNeeded, true) => self.source_takes(host, Event::PagedIn(Ok(()))),
            (Served::Refused, true) => {
                let refused = NotServed::Refused(failure("the destination has no such guest"));
                self.source_takes(host, Event::PagedIn(Err(refused)));
            }
            (Served::NotNeeded, false) => {
                let steps = [Step::NoteGone, Step::RemoveRecord, Step::Kill, Step::BeIdle];
                self.hosts[host].steps.extend(steps);
            }
            (Served::Refused, false) => self.hosts[host].steps.push_back(Step::BeInDoubt),
        }
    }
}

/// The source's socket has not accepted a message.
#[derive(Debug)]
pub(crate) struct NotSent;

/// Fate of kept pages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Served {
    /// The guest at that host receives them.
    Pages(HostId),
    /// The guest has them all, or has moved on.
    NotNeeded,
    /// The guest never ran at the destination.
    Refused,
}

fn remaining(pages: u64) -> Event {
    let round_trip = Duration::from_millis(1);
    Event::RemainingCounted(Counted {
        pages,
        filled_pages: 0,
        round_trip,
        limit_bytes_per_s: None,
        scan: Duration::ZERO,
        search: Duration::ZERO,
    })
}
