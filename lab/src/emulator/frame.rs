//! What the emulator reads of a frame: who it is for, which TCP flow it is of, and how many bytes it takes on the wire.
//!
//! Frames come from TAP devices with offloads on, so each is led by a `virtio_net_hdr` and may be a train of
//! up to 64 KiB that the kernel would cut into packets of the MTU on a real NIC. Knows no I/O.

/// Length of `struct virtio_net_hdr` (Linux uapi/linux/virtio_net.h) before each frame of a device with `IFF_VNET_HDR`.
pub const VNET_HEADER_BYTES: usize = 10;
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: `csum_start` points at the transport header.
const NEEDS_CHECKSUM: u8 = 1;
const GSO_TYPE: usize = 1;
const GSO_SIZE: usize = 4;
const CHECKSUM_START: usize = 6;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
/// Set beside a TCP type where the packets carry ECN's CWR.
const GSO_ECN: u8 = 0x80;
const ETHERNET_HEADER_BYTES: usize = 14;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const PROTOCOL_TCP: u8 = 6;
/// The offset in IPv4's fragment field: but for the first, a fragment has no ports.
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// One direction of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Source and destination address; those of IPv4 fill the first 8 bytes.
    addresses: [u8; 32],
    /// Source and destination port.
    ports: [u8; 4],
}

/// What the switch needs to know of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Whom it is for.
    pub destination: Mac,
    /// Who sent it.
    pub source: Mac,
    /// The TCP flow that it is of; `None` for everything else.
    pub flow: Option<Flow>,
    /// Bytes on the wire, all packets of a train counted with their headers.
    pub wire_bytes: u64,
}

/// Reads the header of `bytes` as a TAP device gives them; `None` when it is too short to be a frame.
///
/// `vnet_header`: whether a `virtio_net_hdr` leads.
#[must_use]
pub fn parse(bytes: &[u8], vnet_header: bool) -> Option<FrameHeader> {
    let (vnet, frame) =
        if vnet_header { bytes.split_at_checked(VNET_HEADER_BYTES)? } else { (&[][..], bytes) };
    let destination: Mac = frame.get(0..6)?.try_into().ok()?;
    let source: Mac = frame.get(6..12)?.try_into().ok()?;
    if frame.len() < ETHERNET_HEADER_BYTES {
        return None;
    }
    Some(FrameHeader { destination, source, flow: flow(frame), wire_bytes: wire_bytes(vnet, frame) })
}

/// The TCP flow of an Ethernet frame. IPv6 with extension headers, which hosts put before no TCP, is of none.
fn flow(frame: &[u8]) -> Option<Flow> {
    let packet = frame.get(ETHERNET_HEADER_BYTES..)?;
    let mut addresses = [0; 32];
    let transport = match frame.get(12..14)?.try_into().ok()? {
        ETHERTYPE_IPV4 => {
            let fragment = u16::from_be_bytes(packet.get(6..8)?.try_into().ok()?) & FRAGMENT_OFFSET;
            if *packet.get(9)? != PROTOCOL_TCP || fragment != 0 {
                return None;
            }
            addresses[..8].copy_from_slice(packet.get(12..20)?);
            usize::from(packet.first()? & 0xf) * 4
        }
        ETHERTYPE_IPV6 if *packet.get(6)? == PROTOCOL_TCP => {
            addresses.copy_from_slice(packet.get(8..40)?);
            40
        }
        _ => return None,
    };
    let ports = packet.get(transport..transport + 4)?.try_into().ok()?;
    Some(Flow { addresses, ports })
}

/// Whether the address is of a group: broadcast or multicast.
#[must_use]
pub fn is_group(mac: Mac) -> bool {
    mac[0] & 1 == 1
}

/// Bytes on the wire of `frame`, as the kernel's `qdisc_pkt_len_init` counts them.
///
/// The headers' length comes from the transport header itself: the header's own `hdr_len` is only a hint.
fn wire_bytes(vnet: &[u8], frame: &[u8]) -> u64 {
    let plain = frame.len() as u64;
    let Some(headers) = train_header_bytes(vnet, frame) else {
        return plain;
    };
    let segment = u64::from(u16_at(vnet, GSO_SIZE));
    let Some(payload) = plain.checked_sub(headers) else {
        return plain;
    };
    if segment == 0 || payload == 0 {
        return plain;
    }
    plain + (payload.div_ceil(segment) - 1) * headers
}

/// Length of the headers that each packet of a train repeats; `None` where the frame is no train.
fn train_header_bytes(vnet: &[u8], frame: &[u8]) -> Option<u64> {
    let kind = *vnet.get(GSO_TYPE)? & !GSO_ECN;
    if vnet.first()? & NEEDS_CHECKSUM == 0 {
        return None;
    }
    let transport = usize::from(u16_at(vnet, CHECKSUM_START));
    let transport_bytes = match kind {
        GSO_TCPV4 | GSO_TCPV6 => usize::from(frame.get(transport.checked_add(12)?)? >> 4) * 4,
        GSO_UDP_L4 => 8,
        _ => return None,
    };
    Some((transport + transport_bytes) as u64)
}

/// The header is in the host's byte order (no `TUNSETVNETBE`, and x86 and ARM hosts are little-endian).
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    match bytes.get(at..at + 2) {
        Some(&[low, high]) => u16::from_ne_bytes([low, high]),
        _ => 0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Flow {
        /// Some flow, another for each number.
        pub(crate) fn numbered(number: u8) -> Flow {
            Flow { addresses: [0; 32], ports: [0, number, 0, 7] }
        }
    }

    /// A frame of `payload` bytes of TCP over IPv4 with timestamps, as a train of `segment` bytes a packet.
    pub(crate) fn tcp_train(payload: usize, segment: u16) -> Vec<u8> {
        let mut bytes = vec![0; VNET_HEADER_BYTES + 66 + payload];
        bytes[0] = NEEDS_CHECKSUM;
        bytes[GSO_TYPE] = GSO_TCPV4;
        bytes[GSO_SIZE..GSO_SIZE + 2].copy_from_slice(&segment.to_ne_bytes());
        bytes[CHECKSUM_START..CHECKSUM_START + 2].copy_from_slice(&34_u16.to_ne_bytes());
        bytes[VNET_HEADER_BYTES + 34 + 12] = 8 << 4;
        bytes
    }

    #[test]
    fn a_train_counts_each_packets_headers() {
        let header = parse(&tcp_train(1448 * 45, 1448), true).unwrap();
        assert_eq!(header.wire_bytes, 1514 * 45);
    }

    #[test]
    fn a_short_last_packet_counts_its_headers_too() {
        let header = parse(&tcp_train(1448 * 2 + 1, 1448), true).unwrap();
        assert_eq!(header.wire_bytes, 1514 * 2 + 67);
    }

    /// A packet of TCP over IPv4 or IPv6 between fixed addresses, from port `from` to port 7.
    fn tcp_packet(ipv6: bool, from: u16) -> Vec<u8> {
        let mut bytes = vec![0; if ipv6 { 14 + 40 + 20 } else { 14 + 20 + 20 }];
        let transport = if ipv6 { 54 } else { 34 };
        bytes[12..14].copy_from_slice(&if ipv6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 });
        bytes[14] = if ipv6 { 0x60 } else { 0x45 };
        bytes[if ipv6 { 20 } else { 23 }] = PROTOCOL_TCP;
        bytes[transport - 1] = 1;
        bytes[transport..transport + 2].copy_from_slice(&from.to_be_bytes());
        bytes[transport + 3] = 7;
        bytes
    }

    #[test]
    fn flows_are_told_apart() {
        let flow = |bytes: &[u8]| parse(bytes, false).unwrap().flow;
        for ipv6 in [false, true] {
            let one = flow(&tcp_packet(ipv6, 1000)).unwrap();
            assert_eq!(one, flow(&tcp_packet(ipv6, 1000)).unwrap());
            assert_ne!(one, flow(&tcp_packet(ipv6, 1001)).unwrap());
            assert_ne!(Some(one), flow(&tcp_packet(!ipv6, 1000)));
            let mut elsewhere = tcp_packet(ipv6, 1000);
            elsewhere[if ipv6 { 53 } else { 33 }] = 2;
            assert_ne!(Some(one), flow(&elsewhere));
        }
        let mut udp = tcp_packet(false, 1000);
        udp[23] = 17;
        assert_eq!(flow(&udp), None);
        let mut fragment = tcp_packet(false, 1000);
        fragment[21] = 1;
        assert_eq!(flow(&fragment), None);
        assert_eq!(flow(&[0; 60]), None);
    }

    #[test]
    fn a_plain_frame_counts_its_length() {
        let mut bytes = vec![0; 60];
        bytes[..6].copy_from_slice(&[0xff; 6]);
        let header = parse(&bytes, false).unwrap();
        assert_eq!(header.wire_bytes, 60);
        assert!(is_group(header.destination));
        assert_eq!(parse(&bytes[..13], false), None);
        assert_eq!(parse(&bytes[..20], true), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..200), vnet in any::<bool>()) {
            if let Some(header) = parse(&bytes, vnet) {
                prop_assert!(header.wire_bytes >= 14);
                // At worst each payload byte is a packet of its own.
                prop_assert!(header.wire_bytes <= 200 * 70_000);
            }
        }
    }
}
