//! Addresses that only one VM of a network may have. Pure.

use std::net::IpAddr;

use crate::mac::MacAddress;
use crate::spec::nic::ResolvedNic;

/// An address that another VM of the same network has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressConflict<'a> {
    /// Frames for one of the two VMs reach the other, or neither.
    Mac { mac: MacAddress, network: &'a str },
    /// Monitoring would take one VM for the other.
    Ip { address: IpAddr, network: &'a str },
}

impl AddressConflict<'_> {
    /// Describes the conflict with `other`, which has the address.
    #[must_use]
    pub fn message(&self, other: &str) -> String {
        match self {
            AddressConflict::Mac { mac, network } => {
                format!("VM \"{other}\" has the hardware address {mac} on network \"{network}\"")
            }
            AddressConflict::Ip { address, network } => {
                format!("VM \"{other}\" has the address {address} on network \"{network}\"")
            }
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            AddressConflict::Mac { .. } => "omit `mac`: it is then derived from the VM's name",
            AddressConflict::Ip { .. } => "give the VM another `address`, or omit it",
        }
    }
}

/// Returns the first address of `new` that `others` has on the same network.
#[must_use]
pub fn address_conflict<'a>(
    new: &'a [ResolvedNic],
    others: &[ResolvedNic],
) -> Option<AddressConflict<'a>> {
    new.iter().find_map(|nic| {
        let network = nic.network.as_str();
        let mut same_network = others.iter().filter(|other| other.network == network);
        same_network.find_map(|other| match nic.address {
            _ if other.mac == nic.mac => Some(AddressConflict::Mac { mac: nic.mac, network }),
            Some(address) if other.address == Some(address) => {
                Some(AddressConflict::Ip { address, network })
            }
            _ => None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(network: &str, mac: &str, address: Option<&str>) -> ResolvedNic {
        let nic = crate::spec::Nic {
            network: network.to_owned(),
            address: address.map(|text| text.parse().unwrap()),
            ..crate::spec::Nic::default()
        };
        nic.resolved(mac.parse().unwrap())
    }

    #[test]
    fn one_vm_of_a_network_has_an_address() {
        let new = [
            nic("lan", "52:54:00:00:00:01", Some("10.0.0.1")),
            nic("wan", "52:54:00:00:00:02", None),
        ];
        let with = |other: ResolvedNic| {
            address_conflict(&new, &[other]).map(|conflict| conflict.message("web"))
        };
        let mac = with(nic("wan", "52:54:00:00:00:02", None)).unwrap();
        assert_eq!(mac, "VM \"web\" has the hardware address 52:54:00:00:00:02 on network \"wan\"");
        let ip = with(nic("lan", "52:54:00:00:00:09", Some("10.0.0.1"))).unwrap();
        assert_eq!(ip, "VM \"web\" has the address 10.0.0.1 on network \"lan\"");
        // Other networks are separate, and interfaces without an address have none in common.
        assert_eq!(with(nic("lan", "52:54:00:00:00:02", None)), None);
        assert_eq!(with(nic("wan", "52:54:00:00:00:09", Some("10.0.0.1"))), None);
    }
}
