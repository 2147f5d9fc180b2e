//! Taps for NICs: created here, attached to their network's bridge, and passed to QEMU as an open
//! file. A tap lives as long as a process holds that file. It ends with QEMU, and nothing has to be
//! removed.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use futures::TryStreamExt;
use godwit_lanes::Near;
use godwit_qemu::{ResolvedNic, Tap};
use rtnetlink::packet_route::address::AddressHeader;
use rtnetlink::packet_route::link::LinkAttribute;
use rtnetlink::{Handle, LinkUnspec, new_connection};
use tun_rs::{DeviceBuilder, Layer};

use crate::config::NetworkConfig;

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

/// Creates a tap, attaches it to its network's bridge and brings it up. Dropping the result removes
/// it.
pub(crate) async fn attach_tap(
    host: &str,
    vm: &str,
    index: usize,
    nic: &ResolvedNic,
    network: &NetworkConfig,
) -> Result<Tap, NetworkError> {
    let queues = nic.queues();
    let vhosts = (0..queues).filter_map(|_| open_vhost(&nic.network, network).transpose());
    let vhosts = vhosts.collect::<Result<_, _>>()?;
    let kind = TapKind { offload: true, queues, mtu: nic.mtu };
    let files = join_bridge(&tap_name(host, vm, index), nic, network, kind).await?;
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
    let kind = TapKind { offload: false, queues: 1, mtu: None };
    let mut files = join_bridge(&name, nic, network, kind).await?;
    files
        .pop()
        .ok_or_else(|| NetworkError::Tap { tap: name, source: std::io::ErrorKind::NotFound.into() })
}

/// Properties of a tap.
#[derive(Clone, Copy, Debug)]
struct TapKind {
    /// IFF_VNET_HDR: QEMU then passes checksums and segments through without computing them.
    offload: bool,
    queues: u32,
    /// `None`: the kernel's default.
    mtu: Option<u16>,
}

/// Creates a tap of that name, attached to its network's bridge and up. Returns its queues.
async fn join_bridge(
    name: &str,
    nic: &ResolvedNic,
    network: &NetworkConfig,
    kind: TapKind,
) -> Result<Vec<OwnedFd>, NetworkError> {
    let (netlink, bridge) = (netlink()?, network.bridge.as_str());
    let bridge_index = link_index(&netlink, bridge).await?.ok_or_else(|| {
        NetworkError::NoBridge { network: nic.network.clone(), bridge: bridge.to_owned() }
    })?;
    let files = open_tap(name, kind)
        .map_err(|source| NetworkError::Tap { tap: name.to_owned(), source })?;
    let tap_index = link_index(&netlink, name).await?.ok_or_else(|| NetworkError::Netlink {
        what: format!("find the tap {name}"),
        why: "it does not exist any longer".into(),
    })?;
    // The host itself does not use this interface: no address, no neighbour discovery.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    // A bridge takes the lowest hardware address of its ports. With fe, the tap never has the
    // lowest one, so the bridge's address does not change when a VM comes or goes.
    let [_, b1, b2, b3, b4, b5] = nic.mac.bytes();
    let mut link = LinkUnspec::new_with_index(tap_index)
        .address(vec![0xfe, b1, b2, b3, b4, b5])
        .controller(bridge_index)
        .up();
    if let Some(mtu) = kind.mtu {
        link = link.mtu(mtu.into());
    }
    netlink.link().set(link.build()).execute().await.map_err(|error| NetworkError::Netlink {
        what: format!("attach the tap {name} to the bridge {bridge}"),
        why: error.to_string(),
    })?;
    Ok(files)
}

/// Whether an interface of that name exists in the agent's network namespace.
pub(crate) async fn link_exists(name: &str) -> Result<bool, NetworkError> {
    Ok(link_index(&netlink()?, name).await?.is_some())
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
fn open_tap(name: &str, kind: TapKind) -> std::io::Result<Vec<OwnedFd>> {
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
                    return Ok(Some(link.header.index));
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
    }
}
