//! What is tried: a fault, with the datastores and the means that are there.

use serde::{Deserialize, Serialize};

/// A fault of the host with the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The agent and its QEMUs are killed, and no agent starts again.
    KillAll,
    /// The agent is killed, and none starts again.
    KillAgent,
    /// The agent is killed and starts again at once.
    RestartAgent,
    PowerOff,
    /// The networks of manager and agents are cut.
    CutManagement,
    /// The datastores are gone for the host, except what its QEMUs have open.
    CutStorage,
    /// Both.
    CutBoth,
    /// The power is cut, and the leading manager is killed at once; another leads.
    KillLeader,
    /// Everything is stopped for a minute and then goes on.
    Freeze,
    /// The datastores hang for the host: whatever it reads or writes there waits.
    HangStorage,
    /// They hang, and the networks of manager and agents are cut.
    HangBoth,
    /// The power is cut, and the leading one of two managers is killed at once.
    KillLeaderOfTwo,
}

/// Parts of a lab that only some faults need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Parts {
    #[default]
    Usual,
    /// Datastores that can hang for one host.
    HangingStorage,
    /// Two managers on an etcd.
    TwoManagers,
}

/// Means that guarantee that a silent host does not run its VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    /// A hardware watchdog.
    Watchdog,
    /// The watchdog process without a device, and a BMC that works.
    Bmc,
    /// A hardware watchdog, and a BMC that works.
    Both,
    /// A hardware watchdog, and a BMC that says "off" and cuts nothing.
    LyingBmc,
    /// A hardware watchdog, and a BMC that does not answer.
    FailingBmc,
    /// The watchdog process without a device; an operator confirms that the host is off.
    Operator,
    /// A hardware watchdog, and no manager: the agents protect the VM by themselves.
    Agents,
}

/// Where the guest must be in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Expected {
    /// At another host, started there.
    Elsewhere,
    /// At its host, never stopped.
    Stays,
}

/// Lab that a cell needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Setting {
    /// Number of shared datastores.
    pub datastores: usize,
    pub means: Means,
}

/// A fault in a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cell {
    pub setting: Setting,
    pub fault: Fault,
}

impl Fault {
    pub const ALL: [Fault; 12] = [
        Fault::RestartAgent,
        Fault::CutManagement,
        Fault::CutStorage,
        Fault::KillAgent,
        Fault::KillAll,
        Fault::PowerOff,
        Fault::KillLeader,
        Fault::CutBoth,
        Fault::Freeze,
        Fault::HangStorage,
        Fault::HangBoth,
        Fault::KillLeaderOfTwo,
    ];

    /// Returns its name for options and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::KillAll => "kill-all",
            Fault::KillAgent => "kill-agent",
            Fault::RestartAgent => "restart-agent",
            Fault::PowerOff => "power-off",
            Fault::CutManagement => "cut-management",
            Fault::CutStorage => "cut-storage",
            Fault::CutBoth => "cut-both",
            Fault::KillLeader => "kill-leader",
            Fault::Freeze => "freeze",
            Fault::HangStorage => "hang-storage",
            Fault::HangBoth => "hang-both",
            Fault::KillLeaderOfTwo => "kill-leader-of-two",
        }
    }

    /// Returns the parts that the lab must have.
    #[must_use]
    pub fn parts(self) -> Parts {
        match self {
            Fault::HangStorage | Fault::HangBoth => Parts::HangingStorage,
            Fault::KillLeaderOfTwo => Parts::TwoManagers,
            _ => Parts::Usual,
        }
    }
}

impl Means {
    pub const ALL: [Means; 7] = [
        Means::Watchdog,
        Means::Bmc,
        Means::Both,
        Means::LyingBmc,
        Means::FailingBmc,
        Means::Operator,
        Means::Agents,
    ];

    /// Returns its name for options and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Means::Watchdog => "watchdog",
            Means::Bmc => "bmc",
            Means::Both => "both",
            Means::LyingBmc => "lying-bmc",
            Means::FailingBmc => "failing-bmc",
            Means::Operator => "operator",
            Means::Agents => "agents",
        }
    }

    pub(super) fn has_bmc(self) -> bool {
        !matches!(self, Means::Watchdog | Means::Operator | Means::Agents)
    }

    pub(super) fn has_watchdog(self) -> bool {
        !matches!(self, Means::Bmc | Means::Operator)
    }

    /// Returns what the BMC does.
    pub(super) fn mode(self) -> &'static str {
        match self {
            Means::LyingBmc => "lies",
            Means::FailingBmc => "fails",
            Means::Watchdog | Means::Bmc | Means::Both | Means::Operator | Means::Agents => "works",
        }
    }

    pub(super) fn has_manager(self) -> bool {
        self != Means::Agents
    }
}

impl Cell {
    /// Returns its name for reports.
    #[must_use]
    pub fn name(self) -> String {
        let Cell { fault, setting } = self;
        format!("{}, {} datastores, {}", fault.name(), setting.datastores, setting.means.name())
    }

    /// Returns where the guest must be afterwards.
    #[must_use]
    pub fn expected(self) -> Expected {
        match self.fault {
            // Without a manager, the datastore is the only witness.
            Fault::CutStorage | Fault::HangStorage if !self.setting.means.has_manager() => {
                Expected::Elsewhere
            }
            Fault::RestartAgent | Fault::CutManagement | Fault::CutStorage | Fault::HangStorage => {
                Expected::Stays
            }
            Fault::KillAll
            | Fault::KillAgent
            | Fault::PowerOff
            | Fault::CutBoth
            | Fault::KillLeader
            | Fault::Freeze
            | Fault::HangBoth
            | Fault::KillLeaderOfTwo => Expected::Elsewhere,
        }
    }
}

/// Returns all cells: each fault of the usual lab in three settings, the settings in which
/// something else must not be believed or somebody has to confirm, the faults that need more of a
/// lab, and those without a manager.
#[must_use]
pub fn cells() -> Vec<Cell> {
    let usual = [(1, Means::Watchdog), (2, Means::Bmc), (3, Means::Both)];
    let of_setting = |(datastores, means)| {
        let setting = Setting { datastores, means };
        let faults = Fault::ALL.into_iter().filter(|fault| fault.parts() == Parts::Usual);
        faults.map(move |fault| Cell { setting, fault })
    };
    let more = [
        (Fault::PowerOff, 1, Means::Operator),
        (Fault::CutBoth, 1, Means::LyingBmc),
        (Fault::Freeze, 1, Means::FailingBmc),
        (Fault::HangStorage, 1, Means::Watchdog),
        (Fault::HangStorage, 2, Means::Bmc),
        (Fault::HangBoth, 1, Means::Watchdog),
        (Fault::HangBoth, 2, Means::Bmc),
        (Fault::KillLeaderOfTwo, 1, Means::Watchdog),
        (Fault::KillAll, 1, Means::Agents),
        (Fault::PowerOff, 1, Means::Agents),
        (Fault::CutStorage, 1, Means::Agents),
        (Fault::Freeze, 1, Means::Agents),
        (Fault::HangStorage, 1, Means::Agents),
    ];
    let one = |(fault, datastores, means)| Cell { setting: Setting { datastores, means }, fault };
    usual.into_iter().flat_map(of_setting).chain(more.into_iter().map(one)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cells_differ() {
        let mut all = cells();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 40);
        assert!(all.iter().all(|cell| (1..=3).contains(&cell.setting.datastores)));
        for fault in Fault::ALL {
            let least = if fault.parts() == Parts::Usual { 3 } else { 1 };
            assert!(all.iter().filter(|cell| cell.fault == fault).count() >= least);
        }
    }

    #[test]
    fn names_are_those_of_the_results() {
        for fault in Fault::ALL {
            assert_eq!(serde_json::to_value(fault).unwrap(), fault.name());
        }
        for means in Means::ALL {
            assert_eq!(serde_json::to_value(means).unwrap(), means.name());
        }
    }
}
