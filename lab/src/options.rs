//! What somebody wants of a lab.

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::emulator::switch::LinkModel;
use crate::topology::{DEFAULT_PREFIX, DEFAULT_STATE_DIR, MAX_HOSTS, check_prefix};
use crate::units::{BitRate, Loss, Rtt};

/// A lab as asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabOptions {
    /// How many hosts, 1 to 16.
    pub hosts: u32,
    /// Rate of each host's link on the migration network, both directions; `None` is as fast as the machine.
    pub link: Option<BitRate>,
    /// Round-trip time between two hosts on the migration network.
    pub rtt: Rtt,
    /// Loss of each direction on the migration network.
    pub loss: Loss,
    /// The project's own emulator also where the kernel could do it.
    pub force_emulator: bool,
    /// Whether an agent is started on each host.
    pub agents: bool,
    /// The QEMU of all agents; `None` is `qemu-system-x86_64` of PATH.
    pub qemu: Option<PathBuf>,
    /// The user QEMU runs as; `None` is the agent's own.
    pub qemu_user: Option<String>,
    /// The tracker library; `None` is the one beside the `godwit` binary or in /usr/lib/godwit.
    pub tracker: Option<PathBuf>,
    /// Agents and migrations go unprotected.
    #[serde(default)]
    pub insecure: bool,
    /// Leads the names of the namespaces.
    pub prefix: String,
    /// Where all files of the lab live.
    pub state_dir: PathBuf,
    /// Takes a lab with other options down first. No part of what a lab is.
    #[serde(skip)]
    pub replace: bool,
}

impl Default for LabOptions {
    fn default() -> LabOptions {
        LabOptions {
            hosts: 2,
            link: None,
            rtt: Rtt::default(),
            loss: Loss::default(),
            force_emulator: false,
            agents: true,
            qemu: None,
            qemu_user: None,
            tracker: None,
            insecure: false,
            prefix: DEFAULT_PREFIX.to_owned(),
            state_dir: PathBuf::from(DEFAULT_STATE_DIR),
            replace: false,
        }
    }
}

impl LabOptions {
    /// How the migration network's links behave.
    #[must_use]
    pub fn link_model(&self) -> LinkModel {
        LinkModel { rate: self.link, rtt: self.rtt, loss: self.loss }
    }

    /// Whether both ask for the same lab.
    pub(crate) fn is_same_lab(&self, other: &LabOptions) -> bool {
        LabOptions { replace: false, ..self.clone() } == LabOptions { replace: false, ..other.clone() }
    }

    /// Refuses what can't be built.
    pub(crate) fn check(&self) -> Result<()> {
        check_prefix(&self.prefix)?;
        if !(1..=MAX_HOSTS).contains(&self.hosts) {
            bail!("a lab has 1 to {MAX_HOSTS} hosts, not {}; choose --hosts in that range", self.hosts);
        }
        if !self.state_dir.is_absolute() || self.state_dir.components().count() < 3 {
            bail!(
                "{} can't hold a lab: `down` removes the whole directory; name one of its own, such as {DEFAULT_STATE_DIR}",
                self.state_dir.display()
            );
        }
        Ok(())
    }
}

impl std::fmt::Display for LabOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let link = self.link.map_or_else(|| "unshaped".to_owned(), |rate| rate.to_string());
        write!(f, "{} hosts, link {link}, round trip {}, loss {}", self.hosts, self.rtt, self.loss)?;
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

    #[test]
    fn what_can_not_be_built_is_refused() {
        assert!(LabOptions::default().check().is_ok());
        for options in [
            LabOptions { hosts: 0, ..LabOptions::default() },
            LabOptions { hosts: 17, ..LabOptions::default() },
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
