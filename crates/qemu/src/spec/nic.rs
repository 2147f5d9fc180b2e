//! Network interfaces of a VM.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::mac::MacAddress;
use crate::spec::error::SpecError;

/// Most queues of an interface. Each has a thread of vhost-net, or a share of QEMU's time.
pub const MOST_QUEUES: u32 = 16;
/// Smallest and largest MTU of an interface (IPv4's minimum; jumbo frames as switches have them).
const MTUS: std::ops::RangeInclusive<u16> = 576..=9216;

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
        Ok(())
    }

    pub(super) fn resolved(&self, mac: MacAddress) -> ResolvedNic {
        let Nic { network, mac: _, address, model, queues, mtu, link, slot } = self.clone();
        ResolvedNic { network, mac, address, model, queues, mtu, link, slot }
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
    /// See [`Nic::slot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
}

impl ResolvedNic {
    /// Returns the interface as its user describes it.
    #[must_use]
    pub fn to_nic(&self) -> Nic {
        let ResolvedNic { network, mac, address, model, queues, mtu, link, slot } = self.clone();
        Nic { network, mac: Some(mac.to_string()), address, model, queues, mtu, link, slot }
    }

    /// Number of queues.
    #[must_use]
    pub fn queues(&self) -> u32 {
        self.queues.unwrap_or(1)
    }
}
