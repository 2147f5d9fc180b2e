//! Limits on simultaneous migrations: by host in each direction, by datastore, and in total.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

const GBIT: u64 = 1_000_000_000;
/// Migrations that a host sends, or receives, over 1 Gb/s, as in vSphere.
const AT_1_GBIT: u32 = 4;
/// Migrations over 10 Gb/s or more.
const AT_10_GBIT: u32 = 8;
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
    /// Migrations in total; `None` for no limit. The API calls it `in_all`; configurations of
    /// earlier versions have `total`.
    #[serde(default, rename = "in_all", alias = "total")]
    pub total: Option<u32>,
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
            total: None,
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

/// Returns the limit for a link: 4 at 1 Gb/s, 8 at 10 Gb/s or more, and in between in proportion to
/// the logarithm of the speed (5 at 2.5, 6 at 5 Gb/s). Below 1 Gb/s one per quarter of a gigabit,
/// at least one. `None`: the speed is unknown.
#[must_use]
pub fn moves_at_once(link_bits_per_s: Option<u64>) -> u32 {
    match link_bits_per_s {
        None => AT_UNKNOWN_SPEED,
        Some(speed) if speed >= 10 * GBIT => AT_10_GBIT,
        Some(speed) if speed >= GBIT => {
            // One more migration for each quarter of a decade: 1, 1.78, 3.16, 5.62, 10 Gb/s.
            let steps =
                [178, 317, 563].into_iter().filter(|hundredths| speed >= GBIT / 100 * hundredths);
            steps.fold(AT_1_GBIT, |moves, _| moves + 1)
        }
        Some(speed) => {
            let quarter = GBIT / u64::from(AT_1_GBIT);
            u32::try_from(speed / quarter).unwrap_or(AT_1_GBIT).max(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
