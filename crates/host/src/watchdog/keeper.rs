//! What the watchdog does about the newest message: [`step`] decides, [`Keeper`] carries out.

use std::time::Duration;

use super::processes::Processes;
use super::timer::{Device, Timer};
use crate::ha::Guarded;

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The processes may run: the timer of the kernel's watchdog is reset.
    Guard,
    /// They must end. The timer is not reset until they have.
    End,
    /// None runs: the timer is stopped.
    Rest,
}

/// Decides by the newest message, the boot clock and whether a listed process lives.
fn step(deadline: Option<Duration>, now: Duration, live: bool) -> Step {
    match deadline {
        Some(deadline) if now < deadline => Step::Guard,
        _ if live => Step::End,
        _ => Step::Rest,
    }
}

/// The watchdog between two messages.
pub(super) struct Keeper<P, D> {
    /// The newest message. Before the first one the device is not opened: a timer that a former
    /// process of this program left running goes on.
    newest: Option<Guarded>,
    processes: P,
    timer: Timer<D>,
    is_ending: bool,
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

impl<P: Processes, D: Device> Keeper<P, D> {
    pub(super) fn new(processes: P, timer: Timer<D>) -> Self {
        Keeper { newest: None, processes, timer, is_ending: false }
    }

    /// Takes a message in place of the former one.
    pub(super) fn take(&mut self, guarded: Guarded) {
        self.processes.list(&guarded.pids);
        self.newest = Some(guarded);
    }

    /// Whether the kernel's watchdog works.
    pub(super) fn has_kernel(&self) -> bool {
        self.timer.works()
    }

    /// Does what is due.
    pub(super) fn keep(&mut self, now: Duration) {
        let Some(newest) = &self.newest else { return };
        let former = self.is_ending;
        let step = step(newest.deadline, now, self.processes.live());
        self.is_ending = step == Step::End;
        match step {
            Step::Guard => self.timer.pet(now),
            Step::Rest => self.timer.rest(now),
            Step::End => {
                let processes = self.processes.end();
                if !former {
                    tracing::error!(processes, "no lease: the QEMUs of protected VMs are killed");
                }
            }
        }
        if former && !self.is_ending {
            tracing::info!("the QEMUs of protected VMs have ended");
        }
    }

    /// Decides whether this process may end. `has_agent`: the agent is connected.
    pub(super) fn leave(&mut self, now: Duration, has_agent: bool) -> Leave {
        let live = self.processes.live();
        match self.newest.as_ref().map(|newest| step(newest.deadline, now, live)) {
            None | Some(Step::Rest) => Leave::Close,
            Some(Step::Guard) if !live => Leave::Close,
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
            Scene { fake, keeper: Keeper::new(ByPidfd::default(), timer) }
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
        scene.keeper.take(guarded(8, &[vm.identity()]));
        scene.keep(at(0));
        scene.keep(at(7));
        assert_eq!(scene.reset_at(), Some(at(12)));
        assert!(vm.0.try_wait().unwrap().is_none());
        scene.keeper.take(guarded(10, &[vm.identity()]));
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
        scene.keeper.take(Guarded { deadline: None, pids: vec![vm.identity()] });
        scene.keep(at(0));
        assert_eq!(scene.reset_at(), None, "a timer was started that nobody guards");
        vm.0.wait().unwrap();
    }

    #[test]
    fn a_stop_never_leaves_a_guarded_process_alone() {
        let mut vm = Sleeper::start();
        let mut scene = Scene::new();
        assert_eq!(scene.keeper.leave(at(0), true), Leave::Close, "nothing is known");
        scene.keeper.take(guarded(8, &[vm.identity()]));
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

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// Seconds from now to the deadline, if there is one.
        Message(Option<u64>),
        Passed(u64),
        /// The process is killed and started again.
        Restarted,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => (0_u64..9).prop_map(|seconds| Event::Message(Some(seconds))),
            1 => Just(Event::Message(None)),
            5 => (0_u64..3).prop_map(Event::Passed),
            1 => Just(Event::Restarted),
        ]
    }

    proptest! {
        /// In any order of messages and restarts: with a QEMU that does not end, the host is reset
        /// within the timeout after the newest deadline.
        #[test]
        fn a_host_whose_processes_do_not_end_is_reset_in_time(
            events in prop::collection::vec(event(), 1..40),
        ) {
            let fake = Rc::<RefCell<Fake>>::default();
            let start = || Keeper::new(Hanging::default(), Timer::new(Some(opens(&fake))));
            let (mut keeper, mut now, mut newest) = (start(), at(0), None);
            for event in events {
                match event {
                    Event::Message(left) => {
                        let deadline = left.map(|left| now + at(left));
                        if deadline.is_some_and(|deadline| deadline > now) {
                            newest = newest.max(deadline);
                        }
                        keeper.take(Guarded { deadline, pids: vec![(1, 1)] });
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
                    prop_assert!(leave == Leave::Stay || keeper.newest.is_none());
                }
            }
        }
    }
}
