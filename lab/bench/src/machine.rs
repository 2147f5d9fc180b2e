//! Description of the machine on which the figures were measured.

use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};
use godwit_lab::trial::{Needs, missing};
use serde::Serialize;

/// Properties of the machine on which figures depend.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) memory_mib: u64,
    pub(crate) kernel: String,
    pub(crate) qemu: String,
    /// Load in the minute before, in runnable processes: any value except 0 disturbs the figures.
    pub(crate) load_before: String,
}

impl Machine {
    /// Returns the machine on which a scenario begins, and prints it.
    ///
    /// # Errors
    /// No lab can run on it.
    pub(crate) fn ready() -> Result<Machine> {
        if let Some(reason) = missing(&Needs::lab()) {
            bail!("cannot measure on this machine: {reason}");
        }
        let machine = Machine::inspect("qemu-system-x86_64".as_ref());
        print!("{machine}");
        Ok(machine)
    }

    /// Examines the machine; properties that cannot be read are reported as such.
    pub(crate) fn inspect(qemu: &Path) -> Machine {
        let unknown = || "unknown".to_owned();
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let memory_kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        let qemu = Command::new(qemu).arg("--version").output();
        let qemu = qemu.ok().and_then(|output| {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            Some(text.lines().next()?.trim_start_matches("QEMU emulator version ").to_owned())
        });
        Machine {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            memory_mib: memory_kib >> 10,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            qemu: qemu.unwrap_or_else(unknown),
            load_before: read("/proc/loadavg")
                .split_whitespace()
                .next()
                .map_or_else(unknown, str::to_owned),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu, cores, memory_mib, kernel, qemu, load_before } = self;
        writeln!(f, "machine   {cpu}, {cores} cores, {memory_mib} MiB, load {load_before}")?;
        writeln!(f, "software  kernel {kernel}, QEMU {qemu}, godwit {}", env!("CARGO_PKG_VERSION"))
    }
}
