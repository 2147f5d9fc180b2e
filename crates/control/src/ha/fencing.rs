//! Fencing: cuts the power of hosts through their management controllers (BMCs), and checks that
//! these devices work before they are needed.
//!
//! A device is not trusted. A host counts as off only after two answers in a row that say so, with
//! time between them; anything else is a failure with its reason ([`Fault`]). A device that lies
//! costs nothing while the host's guard or its watchdog works: docs/ha.md. This module decides
//! nothing about terms.

mod ipmitool;
mod setup;
#[cfg(test)]
mod simulator_tests;
#[cfg(test)]
pub(super) mod tests;
mod watch;

pub use setup::{FencingConfig, FencingSetupError, HaConfig};
pub(crate) use watch::watch;

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt, stream};
use godwit_api::control::{AlarmKind, FencingTest};
use godwit_ha::Fencing;
use godwit_planner::alarms::HaFacts;
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use crate::metrics::METRICS;
use ipmitool::Device;

/// Number of answers in a row that have to say that a host is off.
const NEEDED_ANSWERS: u32 = 2;
/// Most devices that are asked at once, except to cut power.
const MOST_AT_ONCE: usize = 8;

/// State of a host's power, as its device reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    On,
    Off,
}

impl Power {
    fn name(self) -> &'static str {
        match self {
            Power::On => "on",
            Power::Off => "off",
        }
    }
}

/// Why a device did not do what was asked, or is not believed. Texts of the device are one short
/// line without the password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("the host has no fencing device")]
    NoDevice,
    #[error("cannot run ipmitool: {0}")]
    NotRun(String),
    #[error("the fencing device did not answer in time")]
    NoAnswer,
    #[error("the fencing device refused: {0}")]
    Refused(String),
    #[error("the fencing device's answer is no state of power: {0}")]
    Unclear(String),
    #[error("the fencing device reports that the host is still on")]
    StillOn,
    #[error("the fencing device reports that the host is off, but the host responds")]
    Contradicted,
}

impl Fault {
    /// Returns what to do about it.
    #[must_use]
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Fault::NoDevice => "configure one under [ha.fencing] of each manager: docs/ha.md",
            Fault::NotRun(_) => "install the package ipmitool on each manager's machine",
            Fault::NoAnswer => "check the BMC's address and port, and the network to it",
            Fault::Refused(_) => "check the BMC's user, its privilege (operator) and the password",
            Fault::Unclear(_) | Fault::StillOn => {
                "check the BMC with `ipmitool`; renew its firmware"
            }
            Fault::Contradicted => "check that the address is that of this host's own BMC",
        }
    }
}

/// Time limits and pauses; tests have shorter ones.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Longest run of one command.
    command: Duration,
    /// Longest time until a host's power is cut.
    cut: Duration,
    /// Time between two questions.
    between: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            command: Duration::from_secs(8),
            cut: Duration::from_secs(20),
            between: Duration::from_secs(2),
        }
    }
}

/// Fencing devices of all hosts that have one.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    devices: BTreeMap<String, Device>,
    /// Newest fault of each device, until it works.
    faults: Mutex<BTreeMap<String, Fault>>,
    pace: Pace,
}

impl Devices {
    /// Reads the passwords of a checked configuration.
    pub(crate) fn open(config: &HaConfig) -> Result<Devices, FencingSetupError> {
        Ok(Devices { devices: setup::open(config)?, ..Devices::default() })
    }

    /// Returns whether a host has a fencing device.
    pub(crate) fn has(&self, host: &str) -> bool {
        self.devices.contains_key(host)
    }

    /// Returns the newest fault of a host's device; `None`: it worked when it was last asked.
    pub(crate) fn fault(&self, host: &str) -> Option<Fault> {
        self.faults.lock().get(host).cloned()
    }

    /// Returns the faults that raise an alarm.
    pub(crate) fn troubles(&self) -> Vec<HaFacts> {
        let faults = self.faults.lock();
        let of = |(host, fault): (&String, &Fault)| HaFacts {
            kind: AlarmKind::HaTrouble,
            object: format!("host:{host}"),
            text: format!("{fault}; {}", fault.remedy()),
            remedy: None,
        };
        faults.iter().map(of).collect()
    }

    /// Cuts a host's power, and verifies that it is off. A failure is in [`Devices::fault`]
    /// afterwards. The result comes in 20 seconds. A caller that drops this ends the command.
    pub(crate) async fn cut(&self, host: &str) -> Fencing {
        tracing::warn!(host, "cutting the host's power");
        let result = self.try_cut(host).await;
        match &result {
            Ok(()) => tracing::warn!(host, "the host's power is off"),
            Err(fault) => tracing::error!(host, %fault, "cannot cut the host's power"),
        }
        let is_off = result.is_ok();
        METRICS.fenced(is_off);
        self.note(host, result.err());
        if is_off { Fencing::Off } else { Fencing::Failed }
    }

    async fn try_cut(&self, host: &str) -> Result<(), Fault> {
        let device = self.devices.get(host).ok_or(Fault::NoDevice)?;
        let mut last = Fault::NoAnswer;
        let cut = timeout(self.pace.cut, self.cut_until_off(device, &mut last)).await;
        cut.map_err(|_| last)
    }

    /// Ends only when the host is off. Notes why it is not off so far.
    async fn cut_until_off(&self, device: &Device, last: &mut Fault) {
        let (mut is_accepted, mut answers) = (false, 0);
        loop {
            if !is_accepted {
                // A device may refuse this because the host is off already.
                match device.power_off(self.pace.command).await {
                    Ok(()) => is_accepted = true,
                    Err(fault) => *last = fault,
                }
            }
            match device.status(self.pace.command).await {
                Ok(Power::Off) => answers += 1,
                Ok(Power::On) => {
                    answers = 0;
                    // Why the command was refused says more.
                    if is_accepted {
                        *last = Fault::StillOn;
                    }
                }
                Err(fault) => {
                    answers = 0;
                    *last = fault;
                }
            }
            if answers == NEEDED_ANSWERS {
                return;
            }
            sleep(self.pace.between).await;
        }
    }

    /// Asks a host's device for the state of its power. Nothing is switched.
    pub(crate) async fn status(&self, host: &str) -> Result<Power, Fault> {
        let device = self.devices.get(host).ok_or(Fault::NoDevice)?;
        // BMCs have few sessions: only a cut does not wait for its turn.
        let _turn = device.turn.lock().await;
        device.status(self.pace.command).await
    }

    /// Asks all devices, as `POST /api/v1/ha/fencing/test` does.
    pub(crate) async fn test(&self) -> FencingTest {
        let asked = self.devices.keys().map(|host| async move {
            let shown = match self.status(host).await {
                Ok(power) => power.name().to_owned(),
                Err(fault) => format!("{fault} ({})", fault.remedy()),
            };
            (host.clone(), shown)
        });
        let asked: Vec<_> = asked.collect();
        FencingTest { hosts: stream::iter(asked).buffer_unordered(MOST_AT_ONCE).collect().await }
    }

    fn note(&self, host: &str, fault: Option<Fault>) {
        let mut faults = self.faults.lock();
        match fault {
            Some(fault) => faults.insert(host.to_owned(), fault),
            None => faults.remove(host),
        };
    }
}
