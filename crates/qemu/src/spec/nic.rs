//! Network interfaces of a VM.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::mac::MacAddress;
use crate::spec::error::SpecError;

/// Most queues of an interface. Each has a thread of vhost-net, or a share of QEMU's time.
pub const MOST_QUEUES: u32 = 16;
/// Smallest and largest MTU of an interface (IPv4's minimum; jumbo frames as switches have them).
const MTUS: std::ops::RangeInclusive<u16> = 576..=9216;

/// Numbers of VLANs (IEEE 802.1Q; 0 and 4095 are reserved).
const VLANS: std::ops::RangeInclusive<u16> = 1..=4094;
/// Most addresses of an interface's filter.
const MOST_ADDRESSES: usize = 64;

/// Device that a guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum NicModel {
    /// virtio-net: fast; guests since 2008 have its driver.
    #[default]
    Virtio,
    /// Intel 82574L, for guests without a driver for virtio.
    E1000e,
}

impl NicModel {
    fn is_virtio(&self) -> bool {
        *self == NicModel::Virtio
    }
}

/// State of an interface's link, as of its cable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum NicLink {
    #[default]
    Up,
    /// The guest sees no carrier and nothing passes.
    Down,
}

impl NicLink {
    #[must_use]
    pub fn is_up(&self) -> bool {
        *self == NicLink::Up
    }
}

impl fmt::Display for NicLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if self.is_up() { "up" } else { "down" })
    }
}

/// Filter of what a guest sends. What fails it is dropped at the tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum NicFilter {
    /// The guest sends from its hardware address only.
    Mac,
    /// And from its IP addresses only, also in ARP and neighbour discovery.
    MacIp,
}

impl fmt::Display for NicFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            NicFilter::Mac => "mac",
            NicFilter::MacIp => "mac-ip",
        })
    }
}

/// A network interface as its user describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Nic {
    /// The network in the host's configuration that it joins.
    pub network: String,
    /// Hardware address. Default: derived from the VM's name and the interface's position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Address of the guest in that network, for external monitoring. It is never given to the
    /// guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub address: Option<IpAddr>,
    /// Device that the guest sees.
    #[serde(default, skip_serializing_if = "NicModel::is_virtio")]
    pub model: NicModel,
    /// Number of queues, up to 16, for guests with several vCPUs; model `virtio`. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 16))]
    pub queues: Option<u32>,
    /// MTU that the guest sets, 576 to 9216; model `virtio`. Default: up to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(minimum = 576, maximum = 9216))]
    pub mtu: Option<u16>,
    /// State of the link.
    #[serde(default, skip_serializing_if = "NicLink::is_up")]
    pub link: NicLink,
    /// VLAN of the guest's untagged frames, 1 to 4094; the bridge must filter VLANs. Default: the
    /// bridge's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 4094))]
    pub vlan: Option<u16>,
    /// VLANs whose frames the guest sends and gets with their tags; the bridge must filter VLANs.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<u16>))]
    pub trunk: BTreeSet<u16>,
    /// Filter of what the guest sends. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<NicFilter>,
    /// IP addresses that filter `mac-ip` lets pass, besides `address`; up to 64.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>, max_items = 64))]
    pub addresses: BTreeSet<IpAddr>,
    /// Position in the order in which the firmware tries to boot, from 1, among disks, CD-ROM
    /// drives and interfaces. The interface then has a boot ROM (PXE). Absent: it has none, and the
    /// firmware does not boot from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    pub boot_order: Option<u32>,
    /// Slot that it was plugged into while the VM ran, of the VM's `hotplug_slots`: its address,
    /// the same on every host. Absent: it is there from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
}

impl Nic {
    /// Checks what does not depend on the VM, beside the names.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        let wrong = |why| Err(SpecError::Nic { why });
        if self.queues.is_some_and(|queues| !(1..=MOST_QUEUES).contains(&queues)) {
            return wrong("it must have 1 to 16 queues");
        }
        if self.mtu.is_some_and(|mtu| !MTUS.contains(&mtu)) {
            return wrong("its MTU must be 576 to 9216");
        }
        if !self.model.is_virtio()
            && (self.queues.is_some_and(|queues| queues > 1) || self.mtu.is_some())
        {
            return wrong("only model virtio has queues and an MTU");
        }
        self.check_vlans().and_then(|()| self.check_filter()).or_else(wrong)
    }

    fn check_vlans(&self) -> Result<(), &'static str> {
        if !self.vlan.iter().chain(&self.trunk).all(|vlan| VLANS.contains(vlan)) {
            return Err("its VLANs must be 1 to 4094");
        }
        if self.vlan.is_some_and(|vlan| self.trunk.contains(&vlan)) {
            return Err("its VLAN is also in its trunk: frames of a VLAN have a tag or not");
        }
        Ok(())
    }

    fn check_filter(&self) -> Result<(), &'static str> {
        if self.addresses.len() > MOST_ADDRESSES {
            return Err("it must have at most 64 addresses");
        }
        let all = || self.addresses.iter().chain(&self.address);
        // Without a filter, `address` is for monitoring alone, and earlier versions took any.
        let has_rules = self.filter.is_some() || !self.addresses.is_empty();
        if has_rules && all().any(|address| address.is_unspecified() || address.is_multicast()) {
            return Err("an address of a guest is neither unspecified nor of a group");
        }
        match self.filter {
            Some(NicFilter::MacIp) if all().next().is_none() => {
                Err("filter mac-ip needs addresses")
            }
            Some(NicFilter::MacIp) if !self.trunk.is_empty() => {
                Err("filter mac-ip does not check frames with VLAN tags: use mac with a trunk")
            }
            Some(NicFilter::MacIp) => Ok(()),
            _ if !self.addresses.is_empty() => Err("only filter mac-ip has addresses"),
            _ => Ok(()),
        }
    }

    pub(super) fn resolved(&self, mac: MacAddress) -> ResolvedNic {
        ResolvedNic {
            mac,
            network: self.network.clone(),
            address: self.address,
            model: self.model,
            queues: self.queues,
            mtu: self.mtu,
            link: self.link,
            vlan: self.vlan,
            trunk: self.trunk.clone(),
            filter: self.filter,
            addresses: self.addresses.clone(),
            boot_order: self.boot_order,
            slot: self.slot,
        }
    }
}

/// A network interface with its hardware address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedNic {
    /// See [`Nic::network`].
    pub network: String,
    /// Hardware address, the same on every host.
    pub mac: MacAddress,
    /// See [`Nic::address`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// See [`Nic::model`].
    #[serde(default, skip_serializing_if = "NicModel::is_virtio")]
    pub model: NicModel,
    /// See [`Nic::queues`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u32>,
    /// See [`Nic::mtu`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// See [`Nic::link`].
    #[serde(default, skip_serializing_if = "NicLink::is_up")]
    pub link: NicLink,
    /// See [`Nic::vlan`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// See [`Nic::trunk`].
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub trunk: BTreeSet<u16>,
    /// See [`Nic::filter`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<NicFilter>,
    /// See [`Nic::addresses`].
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub addresses: BTreeSet<IpAddr>,
    /// See [`Nic::boot_order`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u32>,
    /// See [`Nic::slot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
}

impl ResolvedNic {
    /// Returns the interface as its user describes it.
    #[must_use]
    pub fn to_nic(&self) -> Nic {
        Nic {
            mac: Some(self.mac.to_string()),
            network: self.network.clone(),
            address: self.address,
            model: self.model,
            queues: self.queues,
            mtu: self.mtu,
            link: self.link,
            vlan: self.vlan,
            trunk: self.trunk.clone(),
            filter: self.filter,
            addresses: self.addresses.clone(),
            boot_order: self.boot_order,
            slot: self.slot,
        }
    }

    /// Whether its bridge must filter VLANs.
    #[must_use]
    pub fn has_vlans(&self) -> bool {
        self.vlan.is_some() || !self.trunk.is_empty()
    }

    /// Number of queues.
    #[must_use]
    pub fn queues(&self) -> u32 {
        self.queues.unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic() -> Nic {
        Nic { network: "lan".to_owned(), ..Nic::default() }
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn vlans_and_filters_are_checked() {
        let filter = Some(NicFilter::MacIp);
        let addresses = BTreeSet::from([address("10.0.0.5")]);
        for good in [
            Nic { vlan: Some(4094), trunk: [1, 20].into(), ..nic() },
            Nic { filter: Some(NicFilter::Mac), trunk: [20].into(), ..nic() },
            Nic { filter, vlan: Some(20), addresses: addresses.clone(), ..nic() },
            Nic { filter, address: Some(address("fd00::5")), ..nic() },
            Nic { address: Some(address("0.0.0.0")), ..nic() },
            Nic { address: Some(address("ff02::1")), ..nic() },
        ] {
            good.check().unwrap();
        }
        for (wrong, word) in [
            (Nic { vlan: Some(0), ..nic() }, "1 to 4094"),
            (Nic { trunk: [20, 4095].into(), ..nic() }, "1 to 4094"),
            (Nic { vlan: Some(20), trunk: [20].into(), ..nic() }, "also in its trunk"),
            (Nic { filter, ..nic() }, "needs addresses"),
            (Nic { addresses: addresses.clone(), ..nic() }, "only filter mac-ip"),
            (Nic { filter, trunk: [20].into(), addresses, ..nic() }, "tags"),
            (Nic { filter, address: Some(address("0.0.0.0")), ..nic() }, "unspecified"),
            (Nic { filter, addresses: [address("ff02::1")].into(), ..nic() }, "group"),
            (
                Nic { filter, addresses: (0..65).map(|n| [10, 0, 0, n].into()).collect(), ..nic() },
                "at most 64",
            ),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn an_interface_is_the_same_after_both_conversions() {
        let nic = Nic {
            vlan: Some(20),
            filter: Some(NicFilter::MacIp),
            addresses: [address("10.0.0.5")].into(),
            ..nic()
        };
        let resolved = nic.resolved("52:54:00:00:00:01".parse().unwrap());
        assert!(resolved.has_vlans());
        let again = resolved.to_nic();
        assert_eq!(again.mac.as_deref(), Some("52:54:00:00:00:01"));
        assert_eq!(Nic { mac: None, ..again }, nic);
    }
}
