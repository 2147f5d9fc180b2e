//! Fields of a frame that the emulator reads: its destination, its TCP flow, and its number of
//! bytes on the wire.
//!
//! Frames come from TAP devices with offloads on. So a `virtio_net_hdr` precedes each frame, and a
//! frame may be a train of up to 64 KiB that the kernel would cut into packets of the MTU on a real
//! NIC. No I/O.

/// Length of `struct virtio_net_hdr` (Linux uapi/linux/virtio_net.h) before each frame of a device
/// with `IFF_VNET_HDR`.
pub const VNET_HEADER_BYTES: usize = 10;
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: `csum_start` points at the transport header.
const NEEDS_CHECKSUM: u8 = 1;
const GSO_TYPE: usize = 1;
const GSO_SIZE: usize = 4;
const CHECKSUM_START: usize = 6;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
/// Set in addition to a TCP type if the packets carry ECN's CWR.
const GSO_ECN: u8 = 0x80;
const ETHERNET_HEADER_BYTES: usize = 14;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const PROTOCOL_TCP: u8 = 6;
/// Offset of the checksum in a TCP header.
const TCP_CHECKSUM: usize = 16;
/// Offset bits of IPv4's fragment field: only the first fragment has ports.
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// One direction of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Source and destination addresses; those of IPv4 fill the first 8 bytes.
    addresses: [u8; 32],
    /// Source and destination ports.
    ports: [u8; 4],
}

/// Fields of a frame that the switch needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    pub destination: Mac,
    pub source: Mac,
    /// TCP flow of the frame; `None` for all others.
    pub flow: Option<Flow>,
    /// Bytes on the wire, with the headers of all packets of a train.
    pub wire_bytes: u64,
}

/// Parses the header of `bytes` as a TAP device delivers them. Returns `None` if it is too short
/// for a frame.
///
/// `vnet_header`: whether a `virtio_net_hdr` comes first.
#[must_use]
pub fn parse(bytes: &[u8], vnet_header: bool) -> Option<FrameHeader> {
    let (vnet, frame) =
        if vnet_header { bytes.split_at_checked(VNET_HEADER_BYTES)? } else { (&[][..], bytes) };
    let destination: Mac = frame.get(0..6)?.try_into().ok()?;
    let source: Mac = frame.get(6..12)?.try_into().ok()?;
    if frame.len() < ETHERNET_HEADER_BYTES {
        return None;
    }
    Some(FrameHeader {
        destination,
        source,
        flow: flow(frame),
        wire_bytes: wire_bytes(vnet, frame),
    })
}

/// Returns the TCP flow of an Ethernet frame. IPv6 with extension headers, which hosts do not put
/// before TCP, has none.
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

/// Changes a byte in the middle of the payload of a TCP frame with at least `least` bytes of
/// payload, and adapts the checksum. Returns false if the frame is not such a frame.
pub fn corrupt(bytes: &mut [u8], vnet_header: bool, least: usize) -> bool {
    let start = if vnet_header { VNET_HEADER_BYTES } else { 0 };
    // The kernel that sent the frame has left the checksum to a later stage: it is not verified.
    let is_checked = !vnet_header || bytes.first().is_none_or(|flags| flags & NEEDS_CHECKSUM == 0);
    let Some(frame) = bytes.get_mut(start..) else { return false };
    let Some((transport, payload)) = tcp_parts(frame) else { return false };
    if frame.len() < payload + least.max(2) {
        return false;
    }
    // The byte's word is one that the checksum covers, counted from the transport header.
    let middle = payload + (frame.len() - payload) / 2;
    let word = middle - (middle - transport) % 2;
    let checksum = transport + TCP_CHECKSUM;
    // A header that claims to be shorter than TCP's is invalid.
    if payload < transport + 20 {
        return false;
    }
    let Some(&[high, low]) = frame.get(word..word + 2) else { return false };
    frame[middle] ^= 0x55;
    if is_checked {
        let (old, new) = ([high, low], [frame[word], frame[word + 1]]);
        let stored = u16::from_be_bytes([frame[checksum], frame[checksum + 1]]);
        // RFC 1624: HC' = ~(~HC + ~m + m').
        let sum = u32::from(!stored)
            + u32::from(!u16::from_be_bytes(old))
            + u32::from(u16::from_be_bytes(new));
        frame[checksum..checksum + 2].copy_from_slice(&(!folded(sum)).to_be_bytes());
    }
    true
}

/// Folds a sum of 16-bit words in ones' complement.
fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

/// Returns the offsets of the TCP header and its payload in an Ethernet frame, or `None` without
/// TCP.
fn tcp_parts(frame: &[u8]) -> Option<(usize, usize)> {
    flow(frame)?;
    let is_ipv4 = frame.get(12..14)? == ETHERTYPE_IPV4;
    let header_bytes =
        if is_ipv4 { usize::from(frame.get(ETHERNET_HEADER_BYTES)? & 0xf) * 4 } else { 40 };
    let transport = ETHERNET_HEADER_BYTES + header_bytes;
    Some((transport, transport + usize::from(frame.get(transport + 12)? >> 4) * 4))
}

/// Returns whether the address is a group address: broadcast or multicast.
#[must_use]
pub fn is_group(mac: Mac) -> bool {
    mac[0] & 1 == 1
}

/// Returns the bytes on the wire of `frame`, counted as the kernel's `qdisc_pkt_len_init` does.
///
/// The headers' length comes from the transport header itself: the virtio header's `hdr_len` is
/// only a hint.
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

/// Returns the length of the headers that each packet of a train repeats, or `None` if the frame is
/// not a train.
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

/// Reads a number in the host's byte order, which the header has (no `TUNSETVNETBE`, and x86 and
/// ARM hosts are little-endian).
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
        /// Returns a flow, a different one for each number.
        pub(crate) fn numbered(number: u8) -> Flow {
            Flow { addresses: [0; 32], ports: [0, number, 0, 7] }
        }
    }

    /// Returns a frame of `payload` bytes of TCP over IPv4 with timestamps, as a train of `segment`
    /// bytes per packet.
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

    /// Returns a packet of TCP over IPv4 or IPv6 between fixed addresses, from port `from` to
    /// port 7.
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
    fn flows_are_distinguished() {
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

    /// Sums all words from the transport header on; the pseudo header adds a constant.
    fn sum_of_words(frame: &[u8], transport: usize) -> u16 {
        let words = frame[transport..].chunks(2).map(|word| {
            u32::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]))
        });
        folded(words.sum())
    }

    #[test]
    fn a_byte_is_changed_and_the_checksum_fits() {
        for (ipv6, length) in [(false, 100), (false, 101), (true, 100), (true, 103)] {
            let mut frame = tcp_packet(ipv6, 1000);
            let transport = if ipv6 { 54 } else { 34 };
            frame[transport + 12] = 5 << 4;
            frame.extend((0..length).map(|index| u8::try_from(index * 7 % 251).unwrap()));
            let before = frame.clone();
            assert!(!corrupt(&mut frame, false, 200));
            assert_eq!(frame, before);
            assert!(corrupt(&mut frame, false, 50));
            let changed = |at: &usize| frame[*at] != before[*at];
            let payload: Vec<usize> = (transport + 20..frame.len()).filter(changed).collect();
            assert_eq!(payload.len(), 1);
            assert_eq!(sum_of_words(&frame, transport), sum_of_words(&before, transport));
        }
        // Left to the receiver's kernel, which does not verify it: the frame's own checksum stays
        // unchanged.
        let mut train = tcp_train(3000, 1448);
        train[VNET_HEADER_BYTES + 12..VNET_HEADER_BYTES + 15].copy_from_slice(&[8, 0, 0x45]);
        train[VNET_HEADER_BYTES + 23] = PROTOCOL_TCP;
        let before = train.clone();
        assert!(corrupt(&mut train, true, 1000));
        assert_eq!(train.iter().zip(&before).filter(|(now, before)| now != before).count(), 1);
    }

    proptest! {
        #[test]
        fn any_bytes_are_changed_without_harm(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200), vnet in any::<bool>()
        ) {
            let length = bytes.len();
            corrupt(&mut bytes, vnet, 0);
            prop_assert_eq!(bytes.len(), length);
        }

        #[test]
        fn any_bytes_are_read_without_harm(
            bytes in prop::collection::vec(any::<u8>(), 0..200), vnet in any::<bool>()
        ) {
            if let Some(header) = parse(&bytes, vnet) {
                prop_assert!(header.wire_bytes >= 14);
                // At worst each payload byte is a packet of its own.
                prop_assert!(header.wire_bytes <= 200 * 70_000);
            }
        }
    }
}
