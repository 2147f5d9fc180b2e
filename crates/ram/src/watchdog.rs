//! Watchdogs of the kernel: a device whose timer resets the host unless a program resets the timer
//! before (Documentation/watchdog/watchdog-api.rst of Linux).

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use linux_raw_sys::ioctl::{WDIOC_KEEPALIVE, WDIOC_SETOPTIONS, WDIOC_SETTIMEOUT};
use rustix::io::Errno;
use rustix::ioctl::{NoArg, Setter, Updater, ioctl};

/// Stops the timer, and starts it (`WDIOS_DISABLECARD` and `WDIOS_ENABLECARD` of linux/watchdog.h).
const DISABLE: libc::c_int = 1;
const ENABLE: libc::c_int = 2;
/// Written before the device is closed: the timer stops (the "magic close").
const MAGIC: &[u8] = b"V";

/// An open watchdog. Only one program can have it open. The timer goes on when it is dropped.
#[derive(Debug)]
pub struct KernelWatchdog {
    device: File,
}

impl KernelWatchdog {
    /// Opens a watchdog and sets its timeout. That starts the timer, or resets one that a former
    /// program left running.
    ///
    /// # Errors
    /// There is no such device, another program has it open, or its timeout cannot be that short.
    pub fn open(path: &Path, timeout_seconds: u16) -> io::Result<KernelWatchdog> {
        // A path that is a FIFO does not block.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let device = File::options().write(true).custom_flags(flags).open(path)?;
        if !device.metadata()?.file_type().is_char_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no device"));
        }
        let mut watchdog = KernelWatchdog { device };
        match watchdog.set_timeout(timeout_seconds) {
            Ok(()) => Ok(watchdog),
            // It does not run with a timeout that nobody keeps.
            Err(error) => {
                let _ = watchdog.close();
                Err(error)
            }
        }
    }

    fn set_timeout(&mut self, seconds: u16) -> io::Result<()> {
        let mut timeout = libc::c_int::from(seconds);
        // SAFETY: the kernel reads and writes one int, which outlives the call.
        unsafe {
            ioctl(&self.device, Updater::<WDIOC_SETTIMEOUT, libc::c_int>::new(&mut timeout))?;
        }
        if (1..=libc::c_int::from(seconds)).contains(&timeout) {
            return Ok(());
        }
        let why = format!("its timeout is {timeout} s and not {seconds} s");
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }

    /// Resets the timer.
    ///
    /// # Errors
    /// The kernel's error; the timer may go on.
    pub fn pet(&mut self) -> io::Result<()> {
        // SAFETY: the request has no argument; the kernel touches no memory of this process.
        unsafe { ioctl(&self.device, NoArg::<WDIOC_KEEPALIVE>::new())? };
        Ok(())
    }

    /// Starts the timer if it is stopped, and resets it.
    ///
    /// # Errors
    /// The kernel's error; the timer may be stopped.
    pub fn arm(&mut self) -> io::Result<()> {
        self.set_options(ENABLE)?;
        self.pet()
    }

    /// Stops the timer; the device stays open.
    ///
    /// # Errors
    /// The timer cannot be stopped, for example because the module was loaded with `nowayout`.
    pub fn disarm(&mut self) -> io::Result<()> {
        Ok(self.set_options(DISABLE)?)
    }

    /// Stops the timer and closes the device.
    ///
    /// # Errors
    /// The kernel's error. If the module was loaded with `nowayout`, the timer goes on without one.
    pub fn close(mut self) -> io::Result<()> {
        self.device.write_all(MAGIC)
    }

    fn set_options(&mut self, options: libc::c_int) -> Result<(), Errno> {
        // SAFETY: the kernel reads one int, which outlives the call.
        unsafe { ioctl(&self.device, Setter::<WDIOC_SETOPTIONS, libc::c_int>::new(options)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A real watchdog would reset the machine if a test were killed.
    #[test]
    fn what_is_no_watchdog_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "unchanged").unwrap();
        let refused = |path: &Path| KernelWatchdog::open(path, 5).unwrap_err();
        assert_eq!(refused(&file).kind(), io::ErrorKind::InvalidInput);
        assert_eq!(std::fs::read(&file).unwrap(), b"unchanged");
        assert_eq!(refused(&folder.path().join("none")).kind(), io::ErrorKind::NotFound);
        let null = refused(Path::new("/dev/null"));
        assert_eq!(null.raw_os_error(), Some(libc::ENOTTY));
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).unwrap();
        assert_eq!(refused(&fifo).raw_os_error(), Some(libc::ENXIO));
    }
}
