//! Limits on simultaneous migrations: by host in each direction, by datastore, and in all.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Speeds of a link from which a host sends, or receives, one more migration at once: 4 at 1 Gb/s
/// and 8 at 10 Gb/s, as in vSphere, with equal ratios in between (docs/queue.md).
pub const LINK_STEPS_BITS_PER_S: [u64; 8] = [
    100_000_000,
    500_000_000,
    750_000_000,
    1_000_000_000,
    1_780_000_000,
    3_170_000_000,
    5_630_000_000,
    10_000_000_000,
];
/// Migrations if the speed is unknown, as a virtual NIC's: few enough for a slow link.
const AT_UNKNOWN_SPEED: u32 = 2;
/// Migrations of VMs on one datastore, as in vSphere. A move leaves the disks where they are and
/// costs a datastore only their opening and locking.
const A_DATASTORE: u32 = 128;

/// Limits set by an operator for one host; `None` derives a limit from the link's speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostLimit {
    /// Outgoing migrations at once.
    #[serde(default)]
    pub out: Option<u32>,
    /// Incoming migrations at once.
    #[serde(default)]
    pub into: Option<u32>,
}

/// All limits. 0 is valid: nothing starts there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Migrations in all; `None` for no limit. Configurations of earlier versions have `total`.
    #[serde(default, alias = "total")]
    pub in_all: Option<u32>,
    /// Migrations at once of VMs with disks on a datastore.
    #[serde(default = "a_datastore")]
    pub per_datastore: u32,
    /// Exceptions for single datastores.
    #[serde(default)]
    pub datastores: BTreeMap<String, u32>,
    /// Exceptions for single hosts.
    #[serde(default)]
    pub hosts: BTreeMap<String, HostLimit>,
    /// Outgoing migrations at once of any other host; `None` derives it from the link's speed.
    #[serde(default)]
    pub out_of_host: Option<u32>,
    /// Incoming migrations at once of any other host; `None` derives it from the link's speed.
    #[serde(default)]
    pub into_host: Option<u32>,
}

fn a_datastore() -> u32 {
    A_DATASTORE
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            in_all: None,
            per_datastore: A_DATASTORE,
            datastores: BTreeMap::new(),
            hosts: BTreeMap::new(),
            out_of_host: None,
            into_host: None,
        }
    }
}

impl Limits {
    /// Returns the limit of outgoing migrations of a host.
    #[must_use]
    pub fn out_of(&self, host: &str, link_bits_per_s: Option<u64>) -> u32 {
        let set = self.hosts.get(host).and_then(|limit| limit.out);
        set.or(self.out_of_host).unwrap_or_else(|| moves_at_once(link_bits_per_s))
    }

    /// Returns the limit of incoming migrations of a host.
    #[must_use]
    pub fn into_host(&self, host: &str, link_bits_per_s: Option<u64>) -> u32 {
        let set = self.hosts.get(host).and_then(|limit| limit.into);
        set.or(self.into_host).unwrap_or_else(|| moves_at_once(link_bits_per_s))
    }

    /// Returns the limit of migrations of VMs with disks on a datastore.
    #[must_use]
    pub fn on_datastore(&self, datastore: &str) -> u32 {
        self.datastores.get(datastore).copied().unwrap_or(self.per_datastore)
    }
}

/// Returns the limit for a link: one for each step that it reaches, at least one. `None`: the speed
/// is unknown.
#[must_use]
pub fn moves_at_once(link_bits_per_s: Option<u64>) -> u32 {
    let Some(speed) = link_bits_per_s else { return AT_UNKNOWN_SPEED };
    LINK_STEPS_BITS_PER_S.map(|step| u32::from(speed >= step)).iter().sum::<u32>().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 1_000_000_000;

    #[test]
    fn more_at_once_over_a_faster_link() {
        let at = |mbit: u64| moves_at_once(Some(mbit * 1_000_000));
        assert_eq!([at(0), at(100), at(500), at(999)], [1, 1, 2, 3]);
        assert_eq!([at(1000), at(2500), at(5000), at(10_000), at(100_000)], [4, 5, 6, 8, 8]);
        assert_eq!(moves_at_once(None), 2);
        let all: Vec<u32> = (0..2000).map(|step| at(step * 10)).collect();
        assert!(all.is_sorted());
    }

    #[test]
    fn a_limit_of_an_operator_applies_in_its_direction() {
        let mut limits = Limits::default();
        limits.hosts.insert("a".into(), HostLimit { out: Some(1), into: None });
        limits.datastores.insert("slow".into(), 2);
        assert_eq!((limits.out_of("a", Some(GBIT)), limits.into_host("a", Some(GBIT))), (1, 4));
        assert_eq!(limits.out_of("b", Some(10 * GBIT)), 8);
        assert_eq!((limits.on_datastore("slow"), limits.on_datastore("fast")), (2, 128));
        let empty: Limits = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, Limits::default());
    }
}
