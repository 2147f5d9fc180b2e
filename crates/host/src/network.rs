//! Taps for NICs: created here, attached to their network's bridge, and passed to QEMU as an open
//! file. A tap lives as long as a process holds that file. It ends with QEMU, and nothing but its
//! filter ([`filter`]) has to be removed.

pub(crate) mod filter;
mod vlans;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use futures::TryStreamExt;
use godwit_lanes::Near;
use godwit_qemu::{ResolvedNic, Tap};
use rtnetlink::packet_route::address::AddressHeader;
use rtnetlink::packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::{Handle, LinkUnspec, new_connection};
use tun_rs::{DeviceBuilder, Layer};

use crate::config::NetworkConfig;
use filter::Filters;
use vlans::{Bridge, PortVlans};

/// Failure to connect a NIC to its network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    /// The kernel refuses the tap.
    #[error("cannot create the tap {tap}: {source} ({})", tap_remedy(.source))]
    Tap { tap: String, source: std::io::Error },
    /// The bridge does not exist.
    #[error(
        "cannot use bridge {bridge} of network \"{network}\": it does not exist (create it with \
         `ip link add {bridge} type bridge`, or correct networks.{network}.bridge in the \
         configuration)"
    )]
    NoBridge { network: String, bridge: String },
    /// vhost-net is configured for the network but unavailable.
    #[error(
        "cannot open {VHOST_NET} for network \"{network}\": {source} (load the kernel module \
         vhost_net, or set networks.{network}.vhost = false in the configuration)"
    )]
    NoVhost { network: String, source: std::io::Error },
    /// The bridge does not keep VLANs apart.
    #[error(
        "cannot give a NIC of network \"{network}\" its VLANs: bridge {bridge} does not filter \
         VLANs (turn that on with `ip link set {bridge} type bridge vlan_filtering 1` after a look \
         at its other ports, or omit `vlan` and `trunk`)"
    )]
    NoVlans { network: String, bridge: String },
    /// nftables is missing.
    #[error(
        "cannot filter what a NIC of network \"{network}\" sends: nft is not installed (install \
         nftables, or omit `filter`)"
    )]
    NoFilters { network: String },
    /// nftables refuses the filter.
    #[error(
        "cannot filter what a NIC of network \"{network}\" sends through {tap}: {why} (the kernel \
         needs nf_tables with the family netdev)"
    )]
    Filter { tap: String, network: String, why: String },
    /// A netlink request failed.
    #[error("cannot {what}: {why} (the agent needs CAP_NET_ADMIN in its network namespace)")]
    Netlink {
        /// Verb phrase of the failed action.
        what: String,
        why: String,
    },
}

fn tap_remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        // EBUSY
        Some(16) => {
            "another process holds a tap of that name: check whether a QEMU of an earlier VM of \
             that name still runs"
        }
        // EPERM
        Some(1) => "the agent needs CAP_NET_ADMIN",
        _ => "load the kernel module tun if it is missing",
    }
}

/// Device of the kernel's NIC back end.
const VHOST_NET: &str = "/dev/vhost-net";

/// Opens the kernel's back end for the NICs of a network; `None` if QEMU serves them.
pub(crate) fn open_vhost(
    name: &str,
    network: &NetworkConfig,
) -> Result<Option<OwnedFd>, NetworkError> {
    if !network.vhost {
        return Ok(None);
    }
    match File::options().read(true).write(true).open(VHOST_NET) {
        Ok(file) => Ok(Some(file.into())),
        Err(source) => Err(NetworkError::NoVhost { network: name.to_owned(), source }),
    }
}

/// Returns the name of a VM's tap: at most 15 bytes (IFNAMSIZ), the same at every start, and
/// different for every host, VM and NIC. It has 40 bits of FNV-1a: among a thousand taps, two share
/// a name with a probability of 1 in 2 million, which the kernel reports as a tap in use.
#[must_use]
pub(crate) fn tap_name(host: &str, vm: &str, nic: usize) -> String {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = format!("{host}\0{vm}").bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    format!("gw{:010x}.{}", (hash ^ (hash >> 24)) & 0xff_ffff_ffff, nic % 100)
}

/// Whether a name is one that [`tap_name`] returns.
pub(crate) fn is_tap_name(name: &str) -> bool {
    let parts = name.strip_prefix("gw").and_then(|rest| rest.split_once('.'));
    parts.is_some_and(|(hash, nic)| {
        hash.len() == 10
            && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
            && !nic.is_empty()
            && nic.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Creates a tap, attaches it to its network's bridge and brings it up. Dropping the result removes
/// it.
pub(crate) async fn attach_tap(
    host: &str,
    vm: &str,
    index: usize,
    nic: &ResolvedNic,
    network: &NetworkConfig,
    filters: &Filters,
) -> Result<Tap, NetworkError> {
    let queues = nic.queues();
    let vhosts = (0..queues).filter_map(|_| open_vhost(&nic.network, network).transpose());
    let vhosts = vhosts.collect::<Result<_, _>>()?;
    let (vlans, filters) = (PortVlans::of_guest(nic), Some(filters));
    let kind = TapKind { offload: true, queues, mtu: nic.mtu, vlans, filters };
    let files = join_bridge(&tap_name(host, vm, index), nic, network, &kind).await?;
    Ok(Tap { files, vhosts })
}

/// Creates a tap for the host itself, on which it measures the guest's response time.
pub(crate) async fn attach_watcher(
    host: &str,
    vm: &str,
    nic: &ResolvedNic,
    network: &NetworkConfig,
) -> Result<OwnedFd, NetworkError> {
    // A VM's name cannot contain this character.
    let name = tap_name(host, &format!("{vm}\0watched"), 0);
    let vlans = PortVlans::of_watcher(nic);
    let kind = TapKind { offload: false, queues: 1, mtu: None, vlans, filters: None };
    let mut files = join_bridge(&name, nic, network, &kind).await?;
    files
        .pop()
        .ok_or_else(|| NetworkError::Tap { tap: name, source: std::io::ErrorKind::NotFound.into() })
}

/// Properties of a tap.
#[derive(Clone, Debug)]
struct TapKind<'a> {
    /// IFF_VNET_HDR: QEMU then passes checksums and segments through without computing them.
    offload: bool,
    queues: u32,
    /// `None`: the kernel's default.
    mtu: Option<u16>,
    /// `None`: what the bridge gives its ports.
    vlans: Option<PortVlans>,
    /// Filters, if that of the NIC applies.
    filters: Option<&'a Filters>,
}

/// Creates a tap of that name, attached to its network's bridge and up. Returns its queues.
async fn join_bridge(
    name: &str,
    nic: &ResolvedNic,
    network: &NetworkConfig,
    kind: &TapKind<'_>,
) -> Result<Vec<OwnedFd>, NetworkError> {
    let netlink = netlink()?;
    let bridge = find_bridge(&netlink, nic, network, kind.vlans.is_some()).await?;
    let turn = match kind.filters {
        Some(filters) => filters.hold(name, nic).await.map(|turn| (filters, turn)),
        None => None,
    };
    let files = open_tap(name, kind)
        .map_err(|source| NetworkError::Tap { tap: name.to_owned(), source })?;
    let tap_index = link_index(&netlink, name).await?.ok_or_else(|| NetworkError::Netlink {
        what: format!("find the tap {name}"),
        why: "it does not exist any longer".into(),
    })?;
    if let Some((filters, turn)) = turn {
        filters.set(&turn, name, nic).await?;
    }
    // The host itself does not use this interface: no address, no neighbour discovery.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    // A bridge takes the lowest hardware address of its ports. With fe, the tap never has the
    // lowest one, so the bridge's address does not change when a VM comes or goes.
    let [_, b1, b2, b3, b4, b5] = nic.mac.bytes();
    let mut link = LinkUnspec::new_with_index(tap_index)
        .address(vec![0xfe, b1, b2, b3, b4, b5])
        .controller(bridge.index);
    if let Some(mtu) = kind.mtu {
        link = link.mtu(mtu.into());
    }
    let failed = |what: String| {
        move |error: rtnetlink::Error| NetworkError::Netlink { what, why: error.to_string() }
    };
    let what = format!("attach the tap {name} to the bridge {}", network.bridge);
    netlink.link().set(link.build()).execute().await.map_err(failed(what))?;
    if let Some(vlans) = &kind.vlans {
        let what = format!("give the tap {name} its VLANs on the bridge {}", network.bridge);
        vlans.set(&netlink, tap_index, &bridge).await.map_err(failed(what))?;
    }
    // Only now: no frame passes before its VLANs and its filter hold.
    let up = LinkUnspec::new_with_index(tap_index).up().build();
    netlink.link().set(up).execute().await.map_err(failed(format!("bring up the tap {name}")))?;
    Ok(files)
}

/// Returns the bridge of a NIC's network.
async fn find_bridge(
    netlink: &Handle,
    nic: &ResolvedNic,
    network: &NetworkConfig,
    has_vlans: bool,
) -> Result<Bridge, NetworkError> {
    let (name, bridge) = (nic.network.clone(), network.bridge.clone());
    match link(netlink, &bridge).await?.as_ref().map(Bridge::of) {
        None => Err(NetworkError::NoBridge { network: name, bridge }),
        Some(found) if has_vlans && !found.filters_vlans => {
            Err(NetworkError::NoVlans { network: name, bridge })
        }
        Some(found) => Ok(found),
    }
}

/// Checks that a NIC could join its network here, with its VLANs and its filter.
pub(crate) async fn check_nic(
    nic: &ResolvedNic,
    network: &NetworkConfig,
) -> Result<(), NetworkError> {
    find_bridge(&netlink()?, nic, network, nic.has_vlans()).await?;
    if nic.filter.is_some() && !filter::is_available() {
        return Err(NetworkError::NoFilters { network: nic.network.clone() });
    }
    open_vhost(&nic.network, network).map(drop)
}

/// Returns for each network whether its bridge filters VLANs. A network that cannot be queried is
/// left out.
pub(crate) async fn filtering_networks(
    networks: &BTreeMap<String, NetworkConfig>,
) -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    let Ok(netlink) = netlink() else { return found };
    for (name, network) in networks {
        if let Ok(link) = link(&netlink, &network.bridge).await {
            let filters = link.is_some_and(|link| Bridge::of(&link).filters_vlans);
            found.insert(name.clone(), filters);
        }
    }
    found
}

/// Whether an interface of that name exists in the agent's network namespace.
pub(crate) async fn link_exists(name: &str) -> Result<bool, NetworkError> {
    Ok(link_index(&netlink()?, name).await?.is_some())
}

/// Returns the bridge that an interface of that name is on; `None` if it is on none.
pub(crate) async fn bridge_of(name: &str) -> Result<Option<String>, NetworkError> {
    let netlink = netlink()?;
    let Some(port) = link(&netlink, name).await? else { return Ok(None) };
    let controller = port.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Controller(index) => Some(*index),
        _ => None,
    });
    let Some(index) = controller else { return Ok(None) };
    let mut links = netlink.link().get().match_index(index).execute();
    let bridge = links.try_next().await.map_err(|error| NetworkError::Netlink {
        what: format!("find the bridge of {name}"),
        why: error.to_string(),
    })?;
    Ok(bridge.and_then(|bridge| {
        bridge.attributes.into_iter().find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        })
    }))
}

/// Returns addresses of this host, each with its network.
pub(crate) async fn near(addresses: &[IpAddr]) -> Vec<Near> {
    let mut all = Vec::with_capacity(addresses.len());
    for &address in addresses {
        let found = match netlink() {
            Ok(netlink) => interface_of(&netlink, address).await,
            Err(error) => Err(error),
        };
        let found = found
            .inspect_err(|error| tracing::warn!(%address, %error, "network of an address unknown"));
        let prefix = found.ok().flatten().map(|found| found.prefix_len);
        all.push(Near { address, prefix });
    }
    all
}

/// Returns the MTU of the interface with an address; `None` if no interface of this host has it.
pub(crate) async fn mtu_of(address: IpAddr) -> Result<Option<u32>, NetworkError> {
    let netlink = netlink()?;
    let Some(found) = interface_of(&netlink, address).await? else {
        return Ok(None);
    };
    let mut links = netlink.link().get().match_index(found.index).execute();
    let link = links.try_next().await.map_err(|error| not_found("MTU", address, &error))?;
    Ok(link.and_then(|link| {
        link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Mtu(mtu) => Some(*mtu),
            _ => None,
        })
    }))
}

/// Returns the interface with an address.
async fn interface_of(
    netlink: &Handle,
    address: IpAddr,
) -> Result<Option<AddressHeader>, NetworkError> {
    let mut addresses = netlink.address().get().set_address_filter(address).execute();
    let found =
        addresses.try_next().await.map_err(|error| not_found("interface", address, &error))?;
    Ok(found.map(|found| found.header))
}

fn not_found(what: &str, address: IpAddr, error: &rtnetlink::Error) -> NetworkError {
    NetworkError::Netlink { what: format!("find the {what} of {address}"), why: error.to_string() }
}

/// Opens a new tap: a descriptor for each queue.
fn open_tap(name: &str, kind: &TapKind<'_>) -> std::io::Result<Vec<OwnedFd>> {
    let device = DeviceBuilder::new().name(name).layer(Layer::L2).enable(false).with(|tap| {
        tap.offload(kind.offload).multi_queue(kind.queues > 1);
    });
    let first = device.build_sync()?;
    let mut files = vec![first.as_fd().try_clone_to_owned()?];
    for _ in 1..kind.queues {
        files.push(first.try_clone()?.as_fd().try_clone_to_owned()?);
    }
    Ok(files)
}

fn netlink() -> Result<Handle, NetworkError> {
    let (connection, handle, _) = new_connection().map_err(|error| NetworkError::Netlink {
        what: "open netlink".into(),
        why: error.to_string(),
    })?;
    // Ends when the last handle is dropped.
    tokio::spawn(connection);
    Ok(handle)
}

async fn link_index(netlink: &Handle, name: &str) -> Result<Option<u32>, NetworkError> {
    Ok(link(netlink, name).await?.map(|link| link.header.index))
}

/// Returns an interface by its name.
async fn link(netlink: &Handle, name: &str) -> Result<Option<LinkMessage>, NetworkError> {
    let mut links = netlink.link().get().match_name(name.to_owned()).execute();
    loop {
        match links.try_next().await {
            Ok(Some(link)) => {
                // Older kernels ignore the filter and list every interface.
                if link
                    .attributes
                    .iter()
                    .any(|a| matches!(a, LinkAttribute::IfName(found) if found == name))
                {
                    return Ok(Some(link));
                }
            }
            Ok(None) => return Ok(None),
            // ENODEV
            Err(rtnetlink::Error::NetlinkError(message)) if message.raw_code() == -19 => {
                return Ok(None);
            }
            Err(error) => {
                return Err(NetworkError::Netlink {
                    what: format!("find {name}"),
                    why: error.to_string(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_served_as_configured() {
        let network = |vhost| NetworkConfig { bridge: "br0".into(), vhost };
        assert!(open_vhost("lan", &network(false)).unwrap().is_none());
        match open_vhost("lan", &network(true)) {
            Ok(vhost) => assert!(vhost.is_some(), "this kernel supports it"),
            Err(error) => {
                assert!(error.to_string().contains("networks.lan.vhost = false"), "{error}");
            }
        }
    }

    #[test]
    fn tap_names_fit_and_differ() {
        let name = tap_name("a", "web", 0);
        assert!(name.len() <= 15, "{name}");
        assert_eq!(name, tap_name("a", "web", 0));
        for other in [tap_name("a", "web", 1), tap_name("b", "web", 0), tap_name("a", "web2", 0)] {
            assert_ne!(name, other);
        }
        assert!(tap_name(&"h".repeat(60), &"v".repeat(60), 99).len() <= 15);
        assert!(is_tap_name(&name) && is_tap_name(&tap_name("a", "web", 42)));
        for other in ["gw0", "gw0123456789", "gw0123456789.", "gw012345678z.0", "br0"] {
            assert!(!is_tap_name(other), "{other}");
        }
    }
}
