//! What the watchdog does about the newest message: [`step`] decides, [`Keeper`] carries out.

use std::time::Duration;

use super::processes::Processes;
use super::timer::{Device, Timer};
use crate::ha::Guarded;

/// What to do now. The greatest step of all groups decides about the timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// None runs: the timer is stopped.
    Rest,
    /// The processes may run: the timer of the kernel's watchdog is reset.
    Guard,
    /// They must end. The timer is not reset until they have.
    End,
}

/// Decides about a group by the newest message, the boot clock and whether a listed process lives.
fn step(deadline: Option<Duration>, now: Duration, live: bool) -> Step {
    match deadline {
        Some(deadline) if now < deadline => Step::Guard,
        _ if live => Step::End,
        _ => Step::Rest,
    }
}

/// Processes with one deadline.
#[derive(Default)]
struct Group<P> {
    deadline: Option<Duration>,
    processes: P,
    is_ending: bool,
}

impl<P: Processes> Group<P> {
    fn take(&mut self, guarded: &Guarded) {
        self.processes.list(&guarded.pids);
        self.deadline = guarded.deadline;
    }

    /// Ends the processes if that is due.
    fn keep(&mut self, now: Duration) -> Step {
        let former = self.is_ending;
        let step = step(self.deadline, now, self.processes.live());
        self.is_ending = step == Step::End;
        if self.is_ending {
            let processes = self.processes.end();
            if !former {
                tracing::error!(processes, "no lease: the QEMUs of protected VMs are killed");
            }
        } else if former {
            tracing::info!("the QEMUs of protected VMs have ended");
        }
        step
    }

    /// Returns what this process is needed for.
    fn need(&mut self, now: Duration) -> Step {
        let live = self.processes.live();
        if live { step(self.deadline, now, live) } else { Step::Rest }
    }
}

/// The watchdog between two messages.
pub(super) struct Keeper<P, D> {
    /// Groups of the newest message, in its order. Before the first one there is none, and the
    /// device is not opened: a timer that a former process of this program left running goes on.
    groups: Vec<Group<P>>,
    timer: Timer<D>,
}

/// How the process may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Something is guarded, and only this process ends it in time.
    Stay,
    /// Something is guarded. The agent is there and will find the next process of this program,
    /// which has the device's timeout to start.
    HandOver,
    /// Nothing is guarded.
    Close,
}

impl<P: Processes + Default, D: Device> Keeper<P, D> {
    pub(super) fn new(timer: Timer<D>) -> Self {
        Keeper { groups: Vec::new(), timer }
    }

    /// Takes a message in place of the former one.
    pub(super) fn take(&mut self, groups: &[Guarded]) {
        self.groups.resize_with(groups.len(), Group::default);
        for (group, guarded) in self.groups.iter_mut().zip(groups) {
            group.take(guarded);
        }
    }

    /// Whether the kernel's watchdog works.
    pub(super) fn has_kernel(&self) -> bool {
        self.timer.works()
    }

    /// Does what is due.
    pub(super) fn keep(&mut self, now: Duration) {
        match self.groups.iter_mut().map(|group| group.keep(now)).max() {
            Some(Step::Guard) => self.timer.pet(now),
            Some(Step::Rest) => self.timer.rest(now),
            Some(Step::End) | None => {}
        }
    }

    /// Decides whether this process may end. `has_agent`: the agent is connected.
    pub(super) fn leave(&mut self, now: Duration, has_agent: bool) -> Leave {
        match self.groups.iter_mut().map(|group| group.need(now)).max() {
            None | Some(Step::Rest) => Leave::Close,
            Some(Step::Guard) if has_agent => Leave::HandOver,
            Some(Step::Guard | Step::End) => Leave::Stay,
        }
    }

    /// Stops the timer for good.
    pub(super) fn close(self) {
        self.timer.close();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::process::{Child, Command};
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::super::processes::ByPidfd;
    use super::super::timer::fake::{Fake, FakeDevice, TIMEOUT, opens};
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A guarded process, which ends with the test.
    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Sleeper(Command::new("sleep").arg("1000").spawn().unwrap())
        }

        fn identity(&self) -> (i32, u64) {
            let pid = i32::try_from(self.0.id()).unwrap();
            (pid, godwit_qemu::start_time_of(pid).unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = (self.0.kill(), self.0.wait());
        }
    }

    struct Scene {
        fake: Rc<RefCell<Fake>>,
        keeper: Keeper<ByPidfd, FakeDevice>,
    }

    impl Scene {
        fn new() -> Self {
            let fake = Rc::<RefCell<Fake>>::default();
            let timer = Timer::new(Some(opens(&fake)));
            Scene { fake, keeper: Keeper::new(timer) }
        }

        fn keep(&mut self, now: Duration) {
            self.fake.borrow_mut().now = now;
            self.keeper.keep(now);
        }

        fn reset_at(&self) -> Option<Duration> {
            self.fake.borrow().reset_at
        }
    }

    fn guarded(deadline: u64, pids: &[(i32, u64)]) -> Guarded {
        Guarded { deadline: Some(at(deadline)), pids: pids.to_vec() }
    }

    #[test]
    fn at_the_deadline_the_processes_end_and_the_timer_is_left_alone_until_they_have() {
        let mut vm = Sleeper::start();
        let mut scene = Scene::new();
        scene.keep(at(0));
        assert!(!scene.keeper.has_kernel(), "opened before the first message");
        scene.keeper.take(&[guarded(8, &[vm.identity()])]);
        scene.keep(at(0));
        scene.keep(at(7));
        assert_eq!(scene.reset_at(), Some(at(12)));
        assert!(vm.0.try_wait().unwrap().is_none());
        scene.keeper.take(&[guarded(10, &[vm.identity()])]);
        scene.keep(at(9));
        scene.keep(at(10));
        assert_eq!(scene.reset_at(), Some(at(14)), "reset at or after the deadline");
        vm.0.wait().unwrap();
        scene.keep(at(10));
        assert_eq!(scene.reset_at(), None);
        assert!(scene.keeper.has_kernel());
    }

    #[test]
    fn a_process_without_a_deadline_ends() {
        let mut vm = Sleeper::start();
        let mut scene = Scene::new();
        scene.keeper.take(&[Guarded { deadline: None, pids: vec![vm.identity()] }]);
        scene.keep(at(0));
        assert_eq!(scene.reset_at(), None, "a timer was started that nobody guards");
        vm.0.wait().unwrap();
    }

    #[test]
    fn each_group_ends_at_its_own_deadline_and_the_timer_waits_for_all_of_them() {
        let (mut early, mut late) = (Sleeper::start(), Sleeper::start());
        let mut scene = Scene::new();
        let groups =
            [Guarded::default(), guarded(4, &[early.identity()]), guarded(8, &[late.identity()])];
        scene.keeper.take(&groups);
        scene.keep(at(3));
        assert_eq!(scene.reset_at(), Some(at(3) + TIMEOUT));
        scene.keep(at(4));
        assert_eq!(scene.reset_at(), Some(at(3) + TIMEOUT), "reset before the group has ended");
        early.0.wait().unwrap();
        scene.keep(at(5));
        assert_eq!(scene.reset_at(), Some(at(5) + TIMEOUT));
        assert!(late.0.try_wait().unwrap().is_none(), "ended with another group");
        assert_eq!(scene.keeper.leave(at(5), false), Leave::Stay);
        // Another order of the groups changes nothing.
        scene.keeper.take(&[guarded(9, &[late.identity()]), Guarded::default()]);
        scene.keep(at(6));
        assert!(late.0.try_wait().unwrap().is_none());
        scene.keep(at(9));
        late.0.wait().unwrap();
        scene.keep(at(9));
        assert_eq!(scene.reset_at(), None);
        assert_eq!(scene.keeper.leave(at(9), false), Leave::Close);
    }

    #[test]
    fn a_stop_never_leaves_a_guarded_process_alone() {
        let mut vm = Sleeper::start();
        let mut scene = Scene::new();
        assert_eq!(scene.keeper.leave(at(0), true), Leave::Close, "nothing is known");
        scene.keeper.take(&[guarded(8, &[vm.identity()])]);
        assert_eq!(scene.keeper.leave(at(0), false), Leave::Stay);
        assert_eq!(scene.keeper.leave(at(0), true), Leave::HandOver);
        assert_eq!(scene.keeper.leave(at(8), true), Leave::Stay);
        vm.0.kill().unwrap();
        vm.0.wait().unwrap();
        for has_agent in [false, true] {
            assert_eq!(scene.keeper.leave(at(0), has_agent), Leave::Close);
        }
        scene.keep(at(1));
        let Scene { fake, keeper } = scene;
        keeper.close();
        assert_eq!(fake.borrow().reset_at, None);
    }

    /// A QEMU that hangs in the kernel: a signal does not end it.
    #[derive(Default)]
    struct Hanging {
        is_listed: bool,
    }

    impl Processes for Hanging {
        fn list(&mut self, pids: &[(i32, u64)]) {
            self.is_listed = !pids.is_empty();
        }

        fn live(&mut self) -> bool {
            self.is_listed
        }

        fn end(&mut self) -> usize {
            1
        }
    }

    #[derive(Clone, Debug)]
    enum Event {
        /// Seconds from now to the deadline of each group, if it has one.
        Message(Vec<Option<u64>>),
        Passed(u64),
        /// The process is killed and started again.
        Restarted,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => prop::collection::vec(prop::option::weighted(0.9, 0_u64..9), 1..4)
                .prop_map(Event::Message),
            5 => (0_u64..3).prop_map(Event::Passed),
            1 => Just(Event::Restarted),
        ]
    }

    proptest! {
        /// In any order of messages and restarts: with QEMUs that do not end, the host is reset
        /// within the timeout after the earliest deadline of the groups.
        #[test]
        fn a_host_whose_processes_do_not_end_is_reset_in_time(
            events in prop::collection::vec(event(), 1..40),
        ) {
            let fake = Rc::<RefCell<Fake>>::default();
            let start = || Keeper::<Hanging, _>::new(Timer::new(Some(opens(&fake))));
            let (mut keeper, mut now, mut newest) = (start(), at(0), None);
            for event in events {
                match event {
                    Event::Message(left) => {
                        let deadlines = left.iter().map(|left| left.map(|left| now + at(left)));
                        let groups: Vec<Guarded> = deadlines
                            .map(|deadline| Guarded { deadline, pids: vec![(1, 1)] })
                            .collect();
                        // `None` is the least.
                        let earliest = groups.iter().map(|group| group.deadline).min().flatten();
                        if earliest.is_some_and(|earliest| earliest > now) {
                            newest = newest.max(earliest);
                        }
                        keeper.take(&groups);
                    }
                    Event::Passed(seconds) => now += at(seconds),
                    Event::Restarted => {
                        drop(keeper);
                        keeper = start();
                    }
                }
                if fake.borrow().reset_at.is_some_and(|reset_at| now >= reset_at) {
                    break;
                }
                fake.borrow_mut().now = now;
                keeper.keep(now);
                if let Some(newest) = newest {
                    let reset_at = fake.borrow().reset_at.unwrap_or(Duration::MAX);
                    prop_assert!(reset_at <= newest + TIMEOUT, "{reset_at:?} after {newest:?}");
                    let leave = keeper.leave(now, false);
                    prop_assert!(leave == Leave::Stay || keeper.groups.is_empty());
                }
            }
        }
    }
}
