//! Checks that every state has a way out: with no more faults, and with all agents started, the
//! hosts finish by themselves, or by an operator's decision if only that can decide.

use godwit_migration::handover::Role;

use crate::choices::Choice;
use crate::world::{Work, World};

/// More steps than any migration takes.
const MOST_STEPS: usize = 5_000;
/// Number of questions after which no host will learn more.
const MOST_QUESTIONS: usize = 12;

impl World {
    /// Continues without faults until nothing is left to do, and returns what is wrong then.
    ///
    /// # Errors
    /// The guest is nowhere, or in two places, or something is left over.
    pub fn heals(&self) -> Result<(), String> {
        let mut world = self.clone();
        world.be_fair();
        let mut questions = 0;
        for _ in 0..MOST_STEPS {
            if let Some(violation) = world.violation() {
                return Err(violation.to_owned());
            }
            let choices = world.choices();
            let Some(choice) = choices.into_iter().min_by_key(|choice| world.urgency(*choice))
            else {
                return world.is_settled();
            };
            if matches!(choice, Choice::Ask(_)) {
                questions += 1;
                if questions > MOST_QUESTIONS {
                    questions = 0;
                    world.decide()?;
                    continue;
                }
            }
            world.apply(choice);
        }
        Err(format!("it does not come to an end: {:?}", world.hosts))
    }

    pub(crate) fn urgency(&self, choice: Choice) -> usize {
        match choice {
            Choice::Start(_) => 0,
            Choice::Step(_) | Choice::Noted(_) | Choice::Save(_) => 1,
            Choice::Deliver(place) if self.is_question(place) => 3,
            Choice::Deliver(_) => 2,
            Choice::Serve(_) => 4,
            Choice::Notice(_) => 5,
            Choice::Resume(_) => 6,
            Choice::Expire(_) => 7,
            _ => 8,
        }
    }

    /// Has an operator decide if both ends are in doubt and cannot know.
    fn decide(&mut self) -> Result<(), String> {
        // A source's engine asks only for a while; after that its agent does.
        let asking = (0..self.hosts.len()).find(|&host| match &self.hosts[host].work {
            Work::Sending(sending) => sending.asks.is_some(),
            _ => false,
        });
        if let Some(host) = asking {
            self.limits.give_ups = 1;
            self.apply(Choice::GiveUp(host));
            return Ok(());
        }
        let in_doubt = |role| {
            (0..self.hosts.len()).find(|&host| {
                matches!(self.hosts[host].work, Work::Doubt { .. })
                    && self.hosts[host].role() == Some(role)
            })
        };
        let (source, destination) = (in_doubt(Role::HandingOver), in_doubt(Role::TakingOver));
        match (source, destination) {
            // What may have run at the destination is gone there.
            (Some(source), Some(destination)) if self.hosts[destination].process.is_none() => {
                self.resolve(source);
                Ok(())
            }
            _ => Err(format!("nobody comes to know whose the guest is: {:?}", self.hosts)),
        }
    }

    fn is_settled(&self) -> Result<(), String> {
        let running = (0..self.hosts.len()).filter(|&host| self.is_running(host)).count();
        let processes = self.hosts.iter().filter(|host| host.process.is_some()).count();
        let owners = self.hosts.iter().filter(|host| host.role() == Some(Role::Owner)).count();
        let records = self.hosts.iter().filter(|host| host.disk.record.is_some()).count();
        let found = format!(
            "{running} running, {processes} processes, {owners} owners of {records} records: {:?}",
            self.hosts
        );
        let expected = usize::from(!self.deleted);
        if owners != expected || records != expected {
            return Err(format!("not one owner: {found}"));
        }
        if !self.dead && (running != 1 || processes != 1) {
            return Err(format!("not one guest: {found}"));
        }
        if self.deleted && processes > 0 || processes > 1 {
            return Err(format!("something is left of a guest that is gone: {found}"));
        }
        Ok(())
    }
}
