//! Names and addresses of a lab. Pure; all of them are defined here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::emulator::frame::Mac;
use crate::emulator::switch::LinkModel;
use crate::units::Family;

/// Default name of the lab, the prefix of its namespaces' names.
pub const DEFAULT_PREFIX: &str = "godwit";
/// Default directory of the lab's state.
pub const DEFAULT_STATE_DIR: &str = "/run/godwit-lab";
/// Maximum hosts of a lab: their addresses end in 11 to 26.
pub const MAX_HOSTS: u32 = 16;
/// Maximum lanes of a lab: each is a migration network of its own.
pub const MAX_LANES: usize = 16;
/// Port on which agents listen on the first migration network.
pub const AGENT_PORT: u16 = 7700;
/// The bridge of the guest LAN on each host.
pub const LAN_BRIDGE: &str = "br-lan";
/// The guest LAN's name in an agent's configuration.
pub const LAN_NETWORK: &str = "lan";
/// The client's IPv4 address on the guest LAN.
pub const CLIENT_IPV4: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
/// The client's IPv6 address on the guest LAN.
pub const CLIENT_IPV6: Ipv6Addr = Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, 1);
/// A host's port of the guest LAN's bridge.
pub(crate) const LAN_NIC: &str = "lan0";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// `a`, `b`, …
    pub(crate) name: String,
    pub(crate) namespace: String,
    index: u16,
}

/// A lane: a migration network, to which each host has a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lane {
    /// Index from 0, used in its names and addresses.
    pub(crate) index: u8,
    pub(crate) model: LinkModel,
}

impl Lane {
    /// Returns the name of each host's NIC on the lane.
    pub(crate) fn nic(&self) -> String {
        format!("mig{}", self.index)
    }

    /// Returns the name of its bridge, if the kernel switches it.
    pub(crate) fn bridge(&self) -> String {
        format!("br-mig{}", self.index)
    }
}

/// A whole lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    pub(crate) hosts: Vec<Host>,
    pub(crate) client_namespace: String,
    /// Namespace in which the migration networks are switched.
    pub(crate) link_namespace: String,
}

impl Topology {
    pub(crate) fn new(prefix: &str, hosts: u32) -> Topology {
        let host = |index: u16| {
            let name = char::from(b'a' + u8::try_from(index % 26).unwrap_or(0)).to_string();
            Host { namespace: format!("{prefix}-{name}"), name, index }
        };
        let count = u16::try_from(hosts.min(MAX_HOSTS)).unwrap_or(0);
        Topology {
            hosts: (0..count).map(host).collect(),
            client_namespace: format!("{prefix}-client"),
            link_namespace: format!("{prefix}-link"),
        }
    }

    /// Returns all namespaces, in the order of their creation.
    pub(crate) fn namespaces(&self) -> Vec<String> {
        let hosts = self.hosts.iter().map(|host| host.namespace.clone());
        hosts.chain([self.client_namespace.clone(), self.link_namespace.clone()]).collect()
    }
}

/// Returns whether a lab with this prefix makes namespaces of that name.
pub(crate) fn is_lab_namespace(prefix: &str, name: &str) -> bool {
    let Some(rest) = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('-')) else {
        return false;
    };
    rest == "client"
        || rest == "link"
        || Topology::new(prefix, MAX_HOSTS).hosts.iter().any(|host| host.name == rest)
}

/// Checks that a prefix yields valid namespace names and no others.
pub(crate) fn check_prefix(prefix: &str) -> Result<()> {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if prefix.is_empty()
        || prefix.len() > 32
        || !prefix.chars().all(good)
        || prefix.starts_with('-')
    {
        bail!(
            "`{prefix}` is no prefix for namespaces: use up to 32 lower-case letters, digits and \
             dashes"
        );
    }
    Ok(())
}

impl Host {
    /// Returns the last number of its addresses.
    fn number(&self) -> u16 {
        11 + self.index
    }

    /// Returns the range of its QEMUs' users. The hosts of all labs are one machine, so each has a
    /// range of its own; those of the lab in place 0 are in the agents' default range.
    pub(crate) fn qemu_users(&self, place: u32) -> String {
        const FIRST: u32 = 0x7f00_0000;
        const EACH: u32 = 0x1000;
        let first = FIRST + (place * MAX_HOSTS + u32::from(self.index)) * EACH;
        format!("{first}-{}", first + EACH - 1)
    }

    /// Returns its addresses on a lane, IPv4 first: `10.77.LANE.11`, and with the same digits
    /// `fd77:0:0:LANE::11`.
    pub(crate) fn lane_addresses(&self, lane: Lane, family: Family) -> Vec<IpAddr> {
        let [_, number] = self.number().to_be_bytes();
        let ipv4 = Ipv4Addr::new(10, 77, lane.index, number);
        let digits = u16::from(number / 10 * 16 + number % 10);
        let ipv6 = Ipv6Addr::new(0xfd77, 0, 0, u16::from(lane.index), 0, 0, 0, digits);
        match family {
            Family::Ipv4 => vec![ipv4.into()],
            Family::Ipv6 => vec![ipv6.into()],
            Family::Both => vec![ipv4.into(), ipv6.into()],
        }
    }

    /// Returns its addresses on all lanes, in their order.
    pub(crate) fn migration_addresses(&self, lanes: &[Lane], family: Family) -> Vec<IpAddr> {
        lanes.iter().flat_map(|lane| self.lane_addresses(*lane, family)).collect()
    }

    pub(crate) fn migration_mac(&self, lane: Lane) -> Mac {
        let [high, low] = self.number().to_be_bytes();
        [0x02, 0x77, 0, lane.index, high, low]
    }

    /// Returns the name of its port on the switch of a lane.
    pub(crate) fn migration_port(&self, lane: Lane) -> String {
        format!("mig{}-{}", lane.index, self.name)
    }

    /// Returns the name of its port on the client's bridge.
    pub(crate) fn lan_port(&self) -> String {
        format!("lan-{}", self.name)
    }
}

/// Paths of a lab's files, all below one directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabPaths {
    root: PathBuf,
}

impl LabPaths {
    /// Creates the paths below `root`.
    #[must_use]
    pub fn new(root: &Path) -> LabPaths {
        LabPaths { root: root.to_owned() }
    }

    /// Returns the directory of all files.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the file that records what was made, for `down` and `status`.
    #[must_use]
    pub fn state_file(&self) -> PathBuf {
        self.root.join("lab.json")
    }

    /// Returns the hosts file for the CLI.
    #[must_use]
    pub fn hosts_file(&self) -> PathBuf {
        self.root.join("hosts.toml")
    }

    /// Returns the folder of the lab's authority and certificates.
    #[must_use]
    pub fn pki(&self) -> PathBuf {
        self.root.join("pki")
    }

    /// Returns the unix socket of the manager.
    #[must_use]
    pub fn manager_socket(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    /// Returns the log of the manager.
    #[must_use]
    pub fn manager_log(&self) -> PathBuf {
        self.root.join("control.log")
    }

    /// Returns the configuration of the port forwarder to the manager.
    pub(crate) fn door_config(&self) -> PathBuf {
        self.root.join("door.json")
    }

    /// Returns the log of the port forwarder.
    pub(crate) fn door_log(&self) -> PathBuf {
        self.root.join("door.log")
    }

    /// Returns the configuration of the manager.
    #[must_use]
    pub fn manager_config(&self) -> PathBuf {
        self.root.join("control.toml")
    }

    /// Returns the folder of the manager's state.
    #[must_use]
    pub fn manager_state(&self) -> PathBuf {
        self.root.join("control")
    }

    /// Returns the unix socket of the client prober.
    #[must_use]
    pub fn client_socket(&self) -> PathBuf {
        self.root.join("client.sock")
    }

    /// Returns the log of the client prober.
    #[must_use]
    pub fn client_log(&self) -> PathBuf {
        self.root.join("client.log")
    }

    /// Returns the configuration of the client prober.
    #[must_use]
    pub fn client_config(&self) -> PathBuf {
        self.root.join("client.json")
    }

    /// Returns the unix socket of the link emulator.
    #[must_use]
    pub fn emulator_socket(&self) -> PathBuf {
        self.root.join("emulator.sock")
    }

    /// Returns the unix socket on which the link emulator accepts orders.
    #[must_use]
    pub fn emulator_orders(&self) -> PathBuf {
        self.root.join("emulator-orders.sock")
    }

    /// Returns the log of the link emulator.
    #[must_use]
    pub fn emulator_log(&self) -> PathBuf {
        self.root.join("emulator.log")
    }

    /// Returns the configuration of the link emulator.
    #[must_use]
    pub fn emulator_config(&self) -> PathBuf {
        self.root.join("emulator.json")
    }

    /// Returns the directory of all hosts.
    #[must_use]
    pub fn hosts(&self) -> PathBuf {
        self.root.join("hosts")
    }

    /// Returns the folder of the hosts' mount namespaces.
    pub(crate) fn mounts(&self) -> PathBuf {
        self.root.join("mounts")
    }

    /// Returns the file that exists while a host has no power.
    pub(crate) fn no_power(&self, name: &str) -> PathBuf {
        self.host(name).join("no-power")
    }

    /// Returns the directory of one host: agent.toml, agent.sock, agent.log, state/, run/, ram/.
    #[must_use]
    pub fn host(&self, name: &str) -> PathBuf {
        self.hosts().join(name)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::units::{Loss, Rtt};

    /// Returns so many lanes without shaping.
    pub(crate) fn lanes(count: u8) -> Vec<Lane> {
        let model =
            LinkModel { rate: None, rtt: Rtt::default(), loss: Loss::default(), flow_cap: None };
        (0..count).map(|index| Lane { index, model }).collect()
    }

    #[test]
    fn hosts_are_named_and_addressed() {
        let lab = Topology::new("godwit", 16);
        let last = &lab.hosts[15];
        let lanes = lanes(2);
        let addresses = |host: &Host, family| {
            let addresses = host.migration_addresses(&lanes, family);
            addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(lab.hosts[0].namespace, "godwit-a");
        assert_eq!(addresses(&lab.hosts[1], Family::Ipv4), ["10.77.0.12", "10.77.1.12"]);
        assert_eq!(
            addresses(&lab.hosts[1], Family::Both)[1..],
            ["fd77::12", "10.77.1.12", "fd77:0:0:1::12"]
        );
        assert_eq!(addresses(last, Family::Ipv6), ["fd77::26", "fd77:0:0:1::26"]);
        assert_eq!((last.name.as_str(), last.migration_port(lanes[1])), ("p", "mig1-p".to_owned()));
        assert_eq!(lab.namespaces().len(), 18);
    }

    #[test]
    fn only_names_of_this_lab_are_its_own() {
        for name in ["godwit-a", "godwit-p", "godwit-client", "godwit-link"] {
            assert!(is_lab_namespace("godwit", name), "{name}");
        }
        for name in
            ["godwit", "godwit-", "godwit-q", "godwit-aa", "godwit-test-a", "other-a", "xgodwit-a"]
        {
            assert!(!is_lab_namespace("godwit", name), "{name}");
        }
    }

    #[test]
    fn prefixes_are_checked() {
        assert!(check_prefix("godwit-2").is_ok());
        for prefix in ["", "-x", "a/b", "..", "A"] {
            assert!(check_prefix(prefix).is_err(), "{prefix}");
        }
    }
}
