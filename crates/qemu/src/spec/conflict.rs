//! Addresses that only one VM of a network may have. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::mac::MacAddress;
use crate::spec::cloud_init::CloudInit;
use crate::spec::nic::ResolvedNic;

/// Addresses that a network interface claims for its VM alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedNic {
    network: String,
    mac: MacAddress,
    /// Its address, and those that its guest gets from cloud-init. What a filter lets pass is not
    /// claimed: several VMs may take turns with one address.
    addresses: BTreeSet<IpAddr>,
}

impl ClaimedNic {
    /// Returns what the interfaces of a VM claim.
    pub(super) fn all(nics: &[ResolvedNic], settings: Option<&CloudInit>) -> Vec<ClaimedNic> {
        // Settings are for the NICs from the start, in their order.
        let mut networks = settings.into_iter().flat_map(|settings| &settings.network);
        let claim = |nic: &ResolvedNic| {
            let of_guest = if nic.slot.is_none() { networks.next() } else { None };
            let of_guest = of_guest.into_iter().flat_map(|network| &network.addresses);
            let addresses = of_guest.map(|address| address.address).chain(nic.address).collect();
            ClaimedNic { network: nic.network.clone(), mac: nic.mac, addresses }
        };
        nics.iter().map(claim).collect()
    }
}

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
            AddressConflict::Ip { .. } => {
                "give the VM another address (`address` of the interface, or that in cloud_init), \
                 or omit it"
            }
        }
    }
}

/// Returns the first address of `new` that `others` has on the same network.
#[must_use]
pub fn address_conflict<'a>(
    new: &'a [ClaimedNic],
    others: &[ClaimedNic],
) -> Option<AddressConflict<'a>> {
    new.iter().find_map(|nic| {
        let network = nic.network.as_str();
        let mut same_network = others.iter().filter(|other| other.network == network);
        same_network.find_map(|other| match nic.addresses.intersection(&other.addresses).next() {
            _ if other.mac == nic.mac => Some(AddressConflict::Mac { mac: nic.mac, network }),
            Some(&address) => Some(AddressConflict::Ip { address, network }),
            None => None,
        })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nic(network: &str, mac: &str, address: Option<&str>) -> ClaimedNic {
        let nic = crate::spec::Nic {
            network: network.to_owned(),
            address: address.map(|text| text.parse().unwrap()),
            ..crate::spec::Nic::default()
        };
        ClaimedNic::all(&[nic.resolved(mac.parse().unwrap())], None).remove(0)
    }

    #[test]
    fn one_vm_of_a_network_has_an_address() {
        let new = [
            nic("lan", "52:54:00:00:00:01", Some("10.0.0.1")),
            nic("wan", "52:54:00:00:00:02", None),
        ];
        let with = |other: ClaimedNic| {
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

    #[test]
    fn an_address_from_cloud_init_is_claimed() {
        let spec = |address: &str| -> crate::spec::VmSpec {
            serde_json::from_value(json!({
                "name": "web", "kernel": "/k",
                "nics": [{ "network": "wan" }, { "network": "lan" }],
                "cloud_init": { "network": [{}, { "addresses": [address] }] }
            }))
            .unwrap()
        };
        let new = spec("10.0.0.1/24").claimed_nics().unwrap();
        let other = [nic("lan", "52:54:00:00:00:09", Some("10.0.0.1"))];
        let conflict = address_conflict(&new, &other).unwrap();
        assert!(matches!(conflict, AddressConflict::Ip { network: "lan", .. }), "{conflict:?}");
        assert!(conflict.remedy().contains("cloud_init"));
        let free = spec("10.0.0.2/16").claimed_nics().unwrap();
        assert_eq!(address_conflict(&free, &other), None);
    }
}
