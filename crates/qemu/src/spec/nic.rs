//! Network interfaces of a VM.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::mac::MacAddress;

/// A network interface as its user describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
}
