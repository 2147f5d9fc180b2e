//! What the emulator reads of a frame: who it is for, and how many bytes it takes on the wire.
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

/// An Ethernet address.
pub type Mac = [u8; 6];

/// What the switch needs to know of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Whom it is for.
    pub destination: Mac,
    /// Who sent it.
    pub source: Mac,
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
    Some(FrameHeader { destination, source, wire_bytes: wire_bytes(vnet, frame) })
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
