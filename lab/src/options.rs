//! Options of a lab.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::emulator::switch::LinkModel;
use crate::topology::{
    DEFAULT_PREFIX, DEFAULT_STATE_DIR, Lane, MAX_HOSTS, MAX_LANES, check_prefix,
};
use crate::units::{BitRate, Family, Loss, Rtt};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabOptions {
    /// Number of hosts, 1 to 16.
    pub hosts: u32,
    /// Rate of each host's link on the migration network, in both directions; `None`: as fast as
    /// the machine.
    pub link: Option<BitRate>,
    /// Rates of the links of several migration networks, each with a NIC on each host; empty: one
    /// network with the rate of `link`.
    #[serde(default)]
    pub lanes: Vec<BitRate>,
    /// Address families of the hosts on the migration networks.
    #[serde(default)]
    pub family: Family,
    /// Maximum rate of each TCP connection in each direction, on every migration network.
    #[serde(default)]
    pub flow_cap: Option<BitRate>,
    /// Round-trip time between two hosts on the migration networks.
    pub rtt: Rtt,
    /// Loss of each direction on the migration networks.
    pub loss: Loss,
    /// Whether to use the project's own emulator even if the kernel could do its work.
    pub force_emulator: bool,
    /// Whether an agent is started on each host.
    pub agents: bool,
    /// Whether a manager is started that knows all hosts.
    #[serde(default)]
    pub manager: bool,
    /// The QEMU of all agents; `None`: `qemu-system-x86_64` of PATH.
    pub qemu: Option<PathBuf>,
    /// The user that all QEMUs run as; `None`: each has its own.
    pub qemu_user: Option<String>,
    /// The directory for VMs of all hosts; `None`: all of the machine's.
    #[serde(default)]
    pub vm_dir: Option<PathBuf>,
    /// The tracker library; `None`: the one beside the `godwit` binary or in /usr/lib/godwit.
    pub tracker: Option<PathBuf>,
    /// Whether agents and migrations are unencrypted.
    #[serde(default)]
    pub insecure: bool,
    /// Hooks for tests of faults.
    #[serde(default)]
    pub hooks: Hooks,
    /// Number of the lab among those that are up on this machine at the same time, from 0. QEMUs of
    /// two labs never share a user.
    #[serde(default)]
    pub place: u32,
    /// Prefix of the namespaces' names.
    pub prefix: String,
    /// Directory of all files of the lab.
    pub state_dir: PathBuf,
    /// Number of trials that may run at the same time, this one included; `None`: as the
    /// environment says. It is not a property of the lab.
    #[serde(skip)]
    pub at_once: Option<u32>,
    /// Whether to take down a lab with other options first. It is not a property of the lab.
    #[serde(skip)]
    pub replace: bool,
}

/// Hooks that only tests of faults use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hooks {
    /// Whether agents have hold points (`godwit_migration::hold`) and injected write failures
    /// (`godwit_migration::fail_writes`).
    pub holds: bool,
    /// Each host's state folder is a tmpfs of its own, of one MiB.
    pub small_state: bool,
    /// Further settings of all agents, as their configuration has them.
    #[serde(default)]
    pub settings: String,
    /// Library preloaded into agents with which their clock can be stepped.
    pub clock: Option<PathBuf>,
    /// Each host has a mount namespace of its own, so that it can lose datastores that the others
    /// keep.
    #[serde(default)]
    pub mounts: bool,
    /// Seconds by which boot clocks of hosts are ahead of the machine's. They need `mounts`.
    #[serde(default)]
    pub boot_clocks_ahead_s: BTreeMap<String, u32>,
    /// Each host runs the watchdog process, which has no watchdog of the kernel.
    #[serde(default)]
    pub watchdog: bool,
    /// Second manager, beside the first.
    #[serde(default)]
    pub second_manager: Option<SecondManager>,
    /// Further settings of the manager, as its configuration has them.
    #[serde(default)]
    pub manager_settings: String,
    /// Folder in which the manager finds programs before those of PATH.
    #[serde(default)]
    pub manager_programs: Option<PathBuf>,
}

/// Second manager of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecondManager {
    /// It shares an etcd with the first.
    OfSameCluster,
    /// It has a cluster of its own, to which no host is added. The first has only the first half of
    /// the hosts.
    OfOtherCluster,
}

impl Default for LabOptions {
    fn default() -> LabOptions {
        LabOptions {
            hosts: 2,
            link: None,
            lanes: Vec::new(),
            family: Family::default(),
            flow_cap: None,
            rtt: Rtt::default(),
            loss: Loss::default(),
            force_emulator: false,
            agents: true,
            manager: false,
            qemu: None,
            qemu_user: None,
            vm_dir: None,
            tracker: None,
            insecure: false,
            hooks: Hooks::default(),
            place: 0,
            prefix: DEFAULT_PREFIX.to_owned(),
            state_dir: PathBuf::from(DEFAULT_STATE_DIR),
            at_once: None,
            replace: false,
        }
    }
}

impl LabOptions {
    /// Changes the options for hosts whose QEMUs are to migrate with QEMU's own post-copy. If the
    /// kernel withholds its own faults from unprivileged users (`vm.unprivileged_userfaultfd`),
    /// only a QEMU that runs as root can do that.
    #[must_use]
    pub fn for_postcopy(self) -> LabOptions {
        let setting =
            std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
        match setting.trim() {
            "1" => self,
            _ => LabOptions { qemu_user: Some("root".to_owned()), ..self },
        }
    }

    /// Returns the migration networks, and how their links behave.
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        let lane = |(index, rate): (u8, Option<BitRate>)| {
            let model = LinkModel { rate, rtt: self.rtt, loss: self.loss, flow_cap: self.flow_cap };
            Lane { index, model }
        };
        (0..).zip(self.rates()).map(lane).collect()
    }

    /// Returns the rates of the migration networks' links.
    fn rates(&self) -> Vec<Option<BitRate>> {
        if self.lanes.is_empty() {
            vec![self.link]
        } else {
            self.lanes.iter().copied().map(Some).collect()
        }
    }

    /// Returns the rate of the first lane's links; `None`: as fast as the machine.
    pub(crate) fn first_rate(&self) -> Option<BitRate> {
        self.rates().into_iter().next().flatten()
    }

    /// Returns whether both describe the same lab.
    pub(crate) fn is_same_lab(&self, other: &LabOptions) -> bool {
        // One lane may be specified in either way.
        let rest = |options: &LabOptions| LabOptions {
            at_once: None,
            replace: false,
            link: None,
            lanes: Vec::new(),
            ..options.clone()
        };
        self.rates() == other.rates() && rest(self) == rest(other)
    }

    /// Refuses options that cannot be built.
    pub(crate) fn check(&self) -> Result<()> {
        check_prefix(&self.prefix)?;
        if !(1..=MAX_HOSTS).contains(&self.hosts) {
            bail!(
                "a lab has 1 to {MAX_HOSTS} hosts, not {}; choose --hosts in that range",
                self.hosts
            );
        }
        if self.lanes.len() > MAX_LANES {
            bail!(
                "a lab has up to {MAX_LANES} lanes, not {}; name fewer with --lane",
                self.lanes.len()
            );
        }
        if self.link.is_some() && !self.lanes.is_empty() {
            bail!("--link is the rate of a single lane; give each lane its own with --lane");
        }
        if !self.state_dir.is_absolute() || self.state_dir.components().count() < 3 {
            bail!(
                "{} cannot hold a lab: `down` removes the whole directory; name one of its own, \
                 such as {DEFAULT_STATE_DIR}",
                self.state_dir.display()
            );
        }
        Ok(())
    }
}

impl std::fmt::Display for LabOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} hosts, ", self.hosts)?;
        if self.lanes.len() > 1 {
            let rates: Vec<String> = self.lanes.iter().map(BitRate::to_string).collect();
            write!(f, "lanes {}", rates.join(" and "))?;
        } else {
            let rate = self.rates().first().copied().flatten();
            write!(
                f,
                "link {}",
                rate.map_or_else(|| "unshaped".to_owned(), |rate| rate.to_string())
            )?;
        }
        if let Some(cap) = self.flow_cap {
            write!(f, ", {cap} a flow")?;
        }
        if self.family != Family::Both {
            write!(f, ", {} alone", self.family)?;
        }
        write!(f, ", round trip {}, loss {}", self.rtt, self.loss)?;
        if self.force_emulator {
            f.write_str(", emulator")?;
        }
        if !self.agents {
            f.write_str(", no agents")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> BitRate {
        text.parse().unwrap()
    }

    #[test]
    fn lanes_have_their_own_rates() {
        let one = LabOptions { link: Some(rate("1gbit")), ..LabOptions::default() };
        let same = LabOptions { lanes: vec![rate("1gbit")], ..LabOptions::default() };
        let two =
            LabOptions { lanes: vec![rate("1gbit"), rate("250mbit")], ..LabOptions::default() };
        assert!(one.is_same_lab(&same) && !one.is_same_lab(&two));
        assert_eq!(one.to_string(), same.to_string());
        assert_eq!(two.to_string(), "2 hosts, lanes 1gbit and 250mbit, round trip 0ms, loss 0%");
        let lanes = two.lanes();
        assert_eq!(
            (lanes.len(), lanes[1].index, lanes[1].model.rate),
            (2, 1, Some(rate("250mbit")))
        );
        assert_eq!(LabOptions::default().lanes()[0].model.rate, None);
    }

    #[test]
    fn what_can_not_be_built_is_refused() {
        assert!(LabOptions::default().check().is_ok());
        for options in [
            LabOptions { hosts: 0, ..LabOptions::default() },
            LabOptions { hosts: 17, ..LabOptions::default() },
            LabOptions { lanes: vec![rate("1gbit"); 17], ..LabOptions::default() },
            LabOptions {
                link: Some(rate("1gbit")),
                lanes: vec![rate("1gbit")],
                ..LabOptions::default()
            },
            LabOptions { prefix: "a b".to_owned(), ..LabOptions::default() },
            LabOptions { state_dir: PathBuf::from("/run"), ..LabOptions::default() },
            LabOptions { state_dir: PathBuf::from("lab"), ..LabOptions::default() },
        ] {
            assert!(options.check().is_err(), "{options:?}");
        }
    }

    #[test]
    fn replacing_is_no_part_of_what_a_lab_is() {
        let lab = LabOptions { link: Some("1gbit".parse().unwrap()), ..LabOptions::default() };
        assert!(lab.is_same_lab(&LabOptions { replace: true, ..lab.clone() }));
        assert!(!lab.is_same_lab(&LabOptions::default()));
        let text = serde_json::to_string(&lab).unwrap();
        assert!(lab.is_same_lab(&serde_json::from_str(&text).unwrap()));
    }
}
