//! The watchdog of the kernel as the process uses it: opened when it is needed, armed while
//! something is guarded, opened again after an error.

use std::io;
use std::time::Duration;

use godwit_ram::KernelWatchdog;

/// Time between two attempts to open the device.
const RETRY: Duration = Duration::from_secs(1);

/// A device whose timer resets the host.
pub(super) trait Device: Sized {
    /// Starts the timer if it is stopped, and resets it.
    fn arm(&mut self) -> io::Result<()>;
    /// Resets the timer.
    fn pet(&mut self) -> io::Result<()>;
    /// Stops the timer.
    fn disarm(&mut self) -> io::Result<()>;
    /// Stops the timer and closes the device. Dropped without it, the timer goes on.
    fn close(self) -> io::Result<()>;
}

impl Device for KernelWatchdog {
    fn arm(&mut self) -> io::Result<()> {
        KernelWatchdog::arm(self)
    }

    fn pet(&mut self) -> io::Result<()> {
        KernelWatchdog::pet(self)
    }

    fn disarm(&mut self) -> io::Result<()> {
        KernelWatchdog::disarm(self)
    }

    fn close(self) -> io::Result<()> {
        KernelWatchdog::close(self)
    }
}

/// How a device is opened. An open one has its timer running.
pub(super) type Open<D> = Box<dyn FnMut() -> io::Result<D>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Running {
    Yes,
    No,
    /// The device refused to stop (`nowayout`): it is reset for ever.
    Always,
}

/// The device with its state.
pub(super) struct Timer<D> {
    /// `None`: the configuration names no device.
    open: Option<Open<D>>,
    device: Option<(D, Running)>,
    /// When the next attempt to open it is due.
    open_at: Duration,
    problem: Option<String>,
}

impl<D: Device> Timer<D> {
    pub(super) fn new(open: Option<Open<D>>) -> Self {
        Timer { open, device: None, open_at: Duration::ZERO, problem: None }
    }

    /// Whether the device is open and answered last.
    pub(super) fn works(&self) -> bool {
        self.device.is_some()
    }

    /// Resets the timer while something is guarded.
    pub(super) fn pet(&mut self, now: Duration) {
        self.use_device(now, |device, running| match running {
            Running::No => {
                device.arm()?;
                *running = Running::Yes;
                Ok(())
            }
            Running::Yes | Running::Always => device.pet(),
        });
    }

    /// Stops the timer while nothing is guarded.
    pub(super) fn rest(&mut self, now: Duration) {
        self.use_device(now, |device, running| {
            if *running == Running::Yes {
                *running = match device.disarm() {
                    Ok(()) => Running::No,
                    Err(error) => {
                        tracing::warn!(%error, "the kernel's watchdog cannot be stopped");
                        Running::Always
                    }
                };
            }
            if *running == Running::Always { device.pet() } else { Ok(()) }
        });
    }

    /// Stops the timer for good.
    pub(super) fn close(mut self) {
        if let Some((device, _)) = self.device.take()
            && let Err(error) = device.close()
        {
            tracing::error!(%error, "cannot close the kernel's watchdog: it may reset the host");
        }
    }

    fn use_device(
        &mut self,
        now: Duration,
        using: impl FnOnce(&mut D, &mut Running) -> io::Result<()>,
    ) {
        let Some(open) = &mut self.open else { return };
        if self.device.is_none() && now < self.open_at {
            return;
        }
        let device = match self.device.take() {
            Some(device) => Ok(device),
            None => open().map(|device| (device, Running::Yes)),
        };
        let used = device.and_then(|(mut device, mut running)| {
            using(&mut device, &mut running)?;
            Ok((device, running))
        });
        match used {
            Ok(device) => {
                if self.problem.take().is_some() {
                    tracing::info!("the kernel's watchdog works");
                }
                self.device = Some(device);
            }
            Err(error) => {
                self.open_at = now.saturating_add(RETRY);
                let problem = error.to_string();
                if self.problem.as_ref() != Some(&problem) {
                    tracing::error!(%error, "cannot use the kernel's watchdog");
                    self.problem = Some(problem);
                }
            }
        }
    }
}

#[cfg(test)]
pub(super) mod fake {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// A device whose clock the test moves.
    #[derive(Debug, Default)]
    pub(in crate::watchdog) struct Fake {
        pub(in crate::watchdog) now: Duration,
        /// When the host is reset; `None` while the timer is stopped.
        pub(in crate::watchdog) reset_at: Option<Duration>,
        pub(in crate::watchdog) is_open: bool,
        pub(in crate::watchdog) fails: bool,
        pub(in crate::watchdog) is_unstoppable: bool,
    }

    pub(in crate::watchdog) const TIMEOUT: Duration = Duration::from_secs(5);

    #[derive(Debug)]
    pub(in crate::watchdog) struct FakeDevice(Rc<RefCell<Fake>>);

    /// Returns how a timer opens a fake device.
    pub(in crate::watchdog) fn opens(fake: &Rc<RefCell<Fake>>) -> Open<FakeDevice> {
        let opened = fake.clone();
        Box::new(move || {
            let mut fake = opened.borrow_mut();
            assert!(!fake.is_open, "opened twice");
            fake.starts()?;
            fake.is_open = true;
            Ok(FakeDevice(opened.clone()))
        })
    }

    impl Fake {
        fn starts(&mut self) -> io::Result<()> {
            if self.fails {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            self.reset_at = Some(self.now + TIMEOUT);
            Ok(())
        }

        fn stops(&mut self) -> io::Result<()> {
            if self.fails || self.is_unstoppable {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            self.reset_at = None;
            Ok(())
        }
    }

    impl Device for FakeDevice {
        fn arm(&mut self) -> io::Result<()> {
            self.0.borrow_mut().starts()
        }

        fn pet(&mut self) -> io::Result<()> {
            let mut fake = self.0.borrow_mut();
            assert!(fake.reset_at.is_some(), "a stopped timer is reset");
            fake.starts()
        }

        fn disarm(&mut self) -> io::Result<()> {
            self.0.borrow_mut().stops()
        }

        fn close(self) -> io::Result<()> {
            self.0.borrow_mut().stops()
        }
    }

    impl Drop for FakeDevice {
        fn drop(&mut self) {
            self.0.borrow_mut().is_open = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::fake::{Fake, TIMEOUT, opens};
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_timer_runs_only_while_something_is_guarded() {
        let fake = Rc::<RefCell<Fake>>::default();
        let mut timer = Timer::new(Some(opens(&fake)));
        assert!(!timer.works() && !fake.borrow().is_open);
        timer.rest(at(0));
        assert!(timer.works() && fake.borrow().reset_at.is_none());
        for second in 1..4 {
            fake.borrow_mut().now = at(second);
            timer.pet(at(second));
            assert_eq!(fake.borrow().reset_at, Some(at(second) + TIMEOUT));
        }
        timer.rest(at(4));
        assert_eq!(fake.borrow().reset_at, None);
        timer.pet(at(5));
        timer.close();
        assert!(fake.borrow().reset_at.is_none() && !fake.borrow().is_open);
    }

    #[test]
    fn a_device_that_fails_is_opened_again_and_its_timer_is_not_stopped() {
        let fake = Rc::<RefCell<Fake>>::default();
        let mut timer = Timer::new(Some(opens(&fake)));
        timer.pet(at(0));
        fake.borrow_mut().fails = true;
        timer.pet(at(1));
        assert!(!timer.works());
        fake.borrow_mut().fails = false;
        timer.pet(at(1));
        assert!(!timer.works(), "not at once");
        assert_eq!(fake.borrow().reset_at, Some(TIMEOUT));
        timer.pet(at(2));
        assert!(timer.works());
    }

    #[test]
    fn a_device_that_cannot_be_stopped_is_reset_for_ever() {
        let fake = Rc::<RefCell<Fake>>::default();
        fake.borrow_mut().is_unstoppable = true;
        let mut timer = Timer::new(Some(opens(&fake)));
        for second in 0..20 {
            fake.borrow_mut().now = at(second);
            timer.rest(at(second));
            assert_eq!(fake.borrow().reset_at, Some(at(second) + TIMEOUT));
        }
    }

    #[test]
    fn without_a_device_nothing_is_opened() {
        let mut timer = Timer::<fake::FakeDevice>::new(None);
        timer.pet(at(0));
        timer.rest(at(1));
        assert!(!timer.works());
        timer.close();
    }
}
