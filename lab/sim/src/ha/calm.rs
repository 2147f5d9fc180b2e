//! What happens without faults.

use godwit_ha::{Answer, Standing};

use super::choices::Choice;
use super::world::World;

/// More ticks than any recovery takes.
const MOST_TICKS: u32 = 400;

impl World {
    /// Exchanges everything between a host, the manager and the datastores, as far as they are
    /// connected.
    pub(super) fn exchange(&mut self, host: usize) {
        let of = &self.hosts[host];
        let (acts, is_cut_off, lacks_storage) = (of.acts(), of.is_cut_off, of.lacks_storage);
        if acts && self.hosts[host].is_stopping() {
            self.apply(Choice::EndGuest(host));
        }
        if acts && !is_cut_off {
            self.renew_at_once(host);
        }
        for datastore in 0..self.hosts[host].facts.datastores {
            if self.hosts[host].writes[datastore].is_some() {
                self.apply(Choice::FailWrite(host, datastore));
            }
            if acts && !lacks_storage && self.next_mark(host, datastore).is_some() {
                self.apply(Choice::Write(host, datastore));
                self.apply(Choice::Land(host, datastore));
                self.apply(Choice::Confirm(host, datastore));
            }
            self.read_at_once(host, datastore);
        }
    }

    /// A renewal that reports the end of a term is followed by one for the next.
    fn renew_at_once(&mut self, host: usize) {
        for _ in 0..2 {
            let sent_at = self.hosts[host].clock;
            let renewal = self.hosts[host].renewal(&self.options);
            let answer = self.answer(host, renewal);
            self.hosts[host].answered(&self.options, sent_at, answer);
            if matches!(answer, Answer::Granted(_)) {
                return;
            }
        }
    }

    pub(super) fn read_at_once(&mut self, host: usize, datastore: usize) {
        self.apply(Choice::Read(host, datastore));
        self.apply(Choice::Deliver(self.letters.len() - 1));
    }

    /// Continues without faults until the guest runs on one host that holds its term.
    ///
    /// # Errors
    /// What is wrong, or that the guest does not come back.
    pub fn heals(&self) -> Result<(), String> {
        let mut world = self.clone();
        world.options.calm_from = 0;
        world.options.ticks = u32::MAX;
        for host in 0..world.hosts.len() {
            let of = &mut world.hosts[host];
            (of.is_cut_off, of.lacks_storage) = (false, false);
            if of.is_frozen {
                world.apply(Choice::Release(host));
            } else if !of.is_on {
                world.apply(Choice::PowerOn(host));
            } else if !of.has_agent {
                world.apply(Choice::StartAgent(host));
            }
        }
        while !world.letters.is_empty() {
            world.apply(Choice::Deliver(0));
        }
        for _ in 0..MOST_TICKS {
            if let Some(violation) = world.violation() {
                return Err(violation.to_owned());
            }
            if world.is_settled() {
                return Ok(());
            }
            world.quiet_tick();
        }
        Err("the guest does not come back".to_owned())
    }

    /// Lets time pass; fencing devices work, operators answer, hosts that are off start.
    pub(super) fn quiet_tick(&mut self) {
        self.apply(Choice::Tick);
        for host in 0..self.hosts.len() {
            if self.hosts_being_fenced(host).is_some() {
                self.apply(Choice::Fence(host));
            }
            if self.is_doubtful(host) {
                self.apply(Choice::Confirmed(host));
            }
            if !self.hosts[host].is_on {
                self.apply(Choice::PowerOn(host));
            }
        }
    }

    fn is_settled(&self) -> bool {
        let (host, term) = self.placed;
        let all_hold = self.hosts.iter().all(|of| matches!(of.guard.standing(), Standing::Held(_)));
        self.hosts[host].runs_guest() && self.hosts[host].runs == Some(term) && all_hold
    }
}
