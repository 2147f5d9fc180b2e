//! Brings up lo and eth0 with netlink, with the addresses of the kernel command line.

use std::{fs, net::IpAddr};

use anyhow::{Context, bail};
use godwit_guest::options::Options;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{LinkFlags, LinkMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use crate::guest::Guest;

const INTERFACE: &str = "eth0";

/// Sets up the network interfaces that exist.
pub(crate) fn configure(guest: &Guest, options: &Options) {
    if let Err(error) = set_up("lo", &[]) {
        guest.report(&format!("lo: {error:#}"));
    }
    let v4 = options.ip.map(|cidr| (IpAddr::V4(cidr.address), cidr.prefix_bits));
    let v6 = options.ip6.map(|cidr| (IpAddr::V6(cidr.address), cidr.prefix_bits));
    let addresses: Vec<_> = v4.into_iter().chain(v6).collect();
    if addresses.is_empty() && interface_index(INTERFACE).is_err() {
        return;
    }
    quiet_ipv6();
    if let Err(error) = set_up(INTERFACE, &addresses) {
        guest.report(&format!("{INTERFACE}: {error:#}"));
    }
}

/// Disables duplicate address detection, so that the addresses answer at once after a move, and
/// router solicitations.
fn quiet_ipv6() {
    for (name, value) in [("accept_dad", "0"), ("dad_transmits", "0"), ("accept_ra", "0")] {
        for interface in ["all", "default", INTERFACE] {
            // A kernel without IPv6 has none of these files.
            fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/{name}"), value).ok();
        }
    }
}

/// Takes the guest's network interface down, as a distribution does before it powers off.
///
/// Linux before commit 0d0eff39ceb3 (August 2026) can spin for ever in `virtnet_poll_cleantx` if it
/// shuts its devices down while packets are in the transmit queue. This was seen with Debian's
/// 6.1.192. An interface that is down has no such packets.
pub(crate) fn take_down() -> anyhow::Result<()> {
    set_link(&mut Route::open()?, interface_index(INTERFACE)?, LinkFlags::empty())
}

fn set_up(interface: &str, addresses: &[(IpAddr, u8)]) -> anyhow::Result<()> {
    let index = interface_index(interface)?;
    let mut route = Route::open()?;
    set_link(&mut route, index, LinkFlags::Up).context("bringing it up")?;
    for (address, prefix_bits) in addresses {
        let message = address_message(index, *address, *prefix_bits);
        route
            .ask(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_REPLACE)
            .with_context(|| format!("address {address}/{prefix_bits}"))?;
    }
    Ok(())
}

/// Brings an interface up (`Up`) or down (empty flags).
fn set_link(route: &mut Route, index: u32, flags: LinkFlags) -> anyhow::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.flags = flags;
    link.header.change_mask = LinkFlags::Up;
    route.ask(RouteNetlinkMessage::SetLink(link), 0)
}

fn interface_index(name: &str) -> anyhow::Result<u32> {
    let path = format!("/sys/class/net/{name}/ifindex");
    let text = fs::read_to_string(path)
        .with_context(|| format!("no network interface {name}: give the VM a NIC"))?;
    Ok(text.trim().parse()?)
}

fn address_message(index: u32, address: IpAddr, prefix_bits: u8) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = prefix_bits;
    message.header.family =
        if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.attributes.push(AddressAttribute::Local(address));
    message.attributes.push(AddressAttribute::Address(address));
    if address.is_ipv6() {
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    message
}

/// Route netlink socket with one request at a time.
struct Route {
    socket: Socket,
    sequence: u32,
}

impl Route {
    fn open() -> anyhow::Result<Route> {
        let mut socket = Socket::new(NETLINK_ROUTE).context("netlink")?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Route { socket, sequence: 0 })
    }

    /// Sends a request and waits for the kernel's acknowledgement.
    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> anyhow::Result<()> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let (answer, _) = self.socket.recv_from_full()?;
        let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer)
            .map_err(|error| anyhow::anyhow!("the kernel's answer: {error}"))?;
        match answer.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io().into()),
            NetlinkPayload::Error(_) => Ok(()),
            other => bail!("unexpected answer of the kernel: {other:?}"),
        }
    }
}
