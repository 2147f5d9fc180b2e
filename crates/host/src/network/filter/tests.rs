//! Filters: their rules, and what passes them in a network namespace.

use std::os::fd::AsFd;

use godwit_qemu::Nic;
use serde_json::json;

use super::*;
use crate::config::NetworkConfig;

const TAP: &str = "gw0123456789.0";

fn nic(filter: Option<NicFilter>, addresses: &[&str]) -> ResolvedNic {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    let nic = Nic { network: "lan".into(), filter, addresses, ..Nic::default() };
    let spec = godwit_qemu::VmSpec {
        nics: vec![Nic { mac: Some("52:54:00:00:00:01".into()), ..nic }],
        ..godwit_qemu::VmSpec::new("web")
    };
    spec.resolved_nics().unwrap().remove(0)
}

#[test]
fn only_a_nic_with_a_filter_has_rules() {
    assert_eq!(rules(TAP, &nic(None, &[])), None);
    let rules = rules(TAP, &nic(Some(NicFilter::Mac), &[])).unwrap();
    assert!(rules.contains("policy accept;\nether saddr != 52:54:00:00:00:01 drop\n}"));
}

#[test]
fn addresses_of_both_families_are_let_through() {
    let rules = rules(TAP, &nic(Some(NicFilter::MacIp), &["10.0.0.5", "fd00::5"])).unwrap();
    for rule in [
        "add table netdev gw0123456789.0\ndelete table netdev gw0123456789.0\n",
        "device \"gw0123456789.0\" priority 0; policy drop;\n",
        "ether type 0x8035 accept\n",
        "arp saddr ether 52:54:00:00:00:01 arp saddr ip { 0.0.0.0, 10.0.0.5 } accept\n",
        "ip saddr { 10.0.0.5 } accept\n",
        "ether type ip udp sport 67 drop\n",
        "ether type ip6 icmpv6 type { nd-router-advert, nd-redirect } drop\n",
        "ether type ip6 udp sport 547 drop\n",
        "ip6 saddr :: icmpv6 type { nd-router-solicit, mld2-listener-report } accept\n",
        "ip6 saddr :: icmpv6 type nd-neighbor-solicit @th,64,128 \
         { 0xfd000000000000000000000000000005, 0xfe80000000000000505400fffe000001 } accept\n",
        "ip6 saddr { fd00::5, fe80::5054:ff:fe00:1 } accept\n",
        "@th,64,128 != { 0xfd000000000000000000000000000005, \
         0xfe80000000000000505400fffe000001 } drop\n",
    ] {
        assert!(rules.contains(rule), "{rule}: {rules}");
    }
    let only_v6 = super::rules(TAP, &nic(Some(NicFilter::MacIp), &["fd00::5"])).unwrap();
    assert!(!only_v6.contains("ip saddr {  }"), "{only_v6}");
    for (drop, accept) in [
        ("nd-redirect } drop", "ip6 saddr { fd00::5"),
        ("sport 547 drop", "ip6 saddr { fd00::5"),
        ("ip udp sport 67 drop", "ip saddr { 10.0.0.5"),
    ] {
        assert!(rules.find(drop) < rules.find(accept), "{rules}");
    }
}

#[test]
fn only_tables_of_taps_are_swept() {
    let listed = json!({ "nftables": [
        { "metainfo": {} }, { "table": { "family": "netdev", "name": TAP } },
        { "table": { "name": "gw-of-the-operator" } }, { "table": { "name": "gw01234567.x" } },
        { "table": {} },
    ]});
    assert_eq!(tables_of_taps(&listed.to_string()), [TAP.to_owned()].into());
    assert!(tables_of_taps("nonsense").is_empty());
}

/// A network namespace for one test, which the test's thread enters. Removed when dropped.
struct Namespace(String);

impl Namespace {
    /// Returns a namespace with the bridge `br0`; `None`, with a printed reason, if the machine
    /// cannot have one or has no nft.
    fn enter() -> Option<Namespace> {
        let name = format!("gwfilter-{}", std::process::id());
        let made = std::process::Command::new("ip").args(["netns", "add", &name]).output();
        let root = rustix::process::geteuid().is_root();
        if !is_available() || !root || made.is_ok_and(|output| !output.status.success()) {
            eprintln!("skipped: this needs root, ip and nft");
            return None;
        }
        let namespace = Namespace(name);
        let file = std::fs::File::open(Path::new("/run/netns").join(&namespace.0)).unwrap();
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(file.as_fd(), kind).unwrap();
        for arguments in ["link add br0 type bridge", "link set br0 up"] {
            let arguments = arguments.split(' ');
            assert!(std::process::Command::new("ip").args(arguments).status().unwrap().success());
        }
        Some(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

const OWN: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

fn frame(source: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [0xff; 6].to_vec();
    frame.extend(source);
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    frame.resize(frame.len().max(60), 0);
    frame
}

fn arp(hardware: [u8; 6], address: [u8; 4]) -> Vec<u8> {
    let mut payload = vec![0, 1, 8, 0, 6, 4, 0, 1];
    payload.extend(hardware);
    payload.extend(address);
    payload.extend([0; 10]);
    payload
}

/// Returns an IPv4 packet of 46 bytes, with the padding of its frame. Its length and its checksum
/// are right: a bridge with br_netfilter checks them.
fn v4(source: [u8; 4]) -> Vec<u8> {
    let mut payload = vec![0x45, 0, 0, 46, 0, 0, 0, 0, 64, 253, 0, 0];
    payload.extend(source);
    payload.extend([10, 0, 0, 99]);
    let words = payload.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let sum = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    payload[10..12].copy_from_slice(&(!sum).to_be_bytes());
    payload
}

fn advertisement(source: &str, target: &str) -> Vec<u8> {
    discovery(136, source, target)
}

/// Returns a message of neighbour discovery (RFC 4861) with a target.
fn discovery(kind: u8, source: &str, target: &str) -> Vec<u8> {
    let bytes = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
    let mut payload = vec![0x60, 0, 0, 0, 0, 24, 58, 255];
    payload.extend(bytes(source));
    payload.extend(bytes("ff02::1"));
    payload.extend([kind, 0, 0, 0, 0x20, 0, 0, 0]);
    payload.extend(bytes(target));
    payload
}

/// Sends frames through a tap as QEMU does, and returns those that its bridge passes on. The last
/// one must pass. Each `vm` has a tap of its own: a child that another test has just forked may
/// still hold one that was closed.
async fn passed(
    filters: &Filters,
    (vm, nic): (&str, &ResolvedNic),
    frames: &[Vec<u8>],
) -> Vec<usize> {
    let network = NetworkConfig { bridge: "br0".into(), vhost: false };
    let guest = crate::network::attach_tap("a", vm, 0, nic, &network, filters).await.unwrap();
    let watcher = crate::network::attach_watcher("a", vm, nic, &network).await.unwrap();
    for frame in frames {
        // Behind struct virtio_net_hdr, which asks for nothing.
        let mut whole = vec![0; 10];
        whole.extend(frame);
        assert_eq!(rustix::io::write(&guest.files[0], &whole).unwrap(), whole.len());
    }
    let mut found = Vec::new();
    let mut buffer = [0; 2048];
    while !found.contains(&(frames.len() - 1)) {
        let mut waited = [rustix::event::PollFd::new(&watcher, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut waited, Some(&limit)).unwrap(), 1, "{found:?}");
        let length = rustix::io::read(&watcher, &mut buffer).unwrap();
        found.extend(frames.iter().position(|frame| *frame == buffer[..length]));
    }
    found
}

#[test]
fn a_guest_sends_from_its_own_addresses_only() {
    let Some(_namespace) = Namespace::enter() else { return };
    // One thread: it stays in the namespace.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let filters = Filters::default();
        let (own, other) = ([10, 0, 0, 5], [10, 0, 0, 6]);
        let frames = [
            frame(OTHER, 0x0800, &v4(own)),
            frame(OWN, 0x0800, &v4(other)),
            frame(OWN, 0x0806, &arp(OWN, other)),
            frame(OWN, 0x0806, &arp(OTHER, own)),
            frame(OWN, 0x86dd, &advertisement("fd00::5", "fd00::6")),
            frame(OWN, 0x86dd, &advertisement("fd00::6", "fd00::6")),
            frame(OWN, 0x88cc, &[1; 46]),
            // An advertisement of a router, a redirect, and a query for another's address.
            frame(OWN, 0x86dd, &discovery(134, "fe80::5054:ff:fe00:1", "::")),
            frame(OWN, 0x86dd, &discovery(137, "fe80::5054:ff:fe00:1", "fd00::5")),
            frame(OWN, 0x86dd, &discovery(135, "::", "fd00::6")),
            // QEMU announces a guest that has moved by RARP, the guest itself by ARP and ND.
            frame(OWN, 0x8035, &arp(OWN, [0; 4])),
            frame(OWN, 0x0806, &arp(OWN, own)),
            frame(OWN, 0x0806, &arp(OWN, [0; 4])),
            frame(OWN, 0x86dd, &advertisement("fd00::5", "fd00::5")),
            frame(OWN, 0x86dd, &advertisement("fe80::5054:ff:fe00:1", "fe80::5054:ff:fe00:1")),
            frame(OWN, 0x86dd, &discovery(135, "::", "fd00::5")),
            frame(OWN, 0x0800, &v4(own)),
        ];
        let filter = Some(NicFilter::MacIp);
        let filtered =
            passed(&filters, ("web", &nic(filter, &["10.0.0.5", "fd00::5"])), &frames).await;
        assert_eq!(filtered, [10, 11, 12, 13, 14, 15, 16]);
        let by_mac = passed(&filters, ("db", &nic(Some(NicFilter::Mac), &[])), &frames).await;
        assert_eq!(by_mac, (1..frames.len()).collect::<Vec<_>>());
        // A tap of that name without a filter: the table of the one before must not apply.
        let free = passed(&filters, ("web", &nic(None, &[])), &frames).await;
        assert_eq!(free, (0..frames.len()).collect::<Vec<_>>());
        filters.sweep().await;
        assert!(!filters.may_exist());
        let listed = run(&["-j", "list", "tables", "netdev"], "").await.unwrap();
        assert!(tables_of_taps(&listed).is_empty(), "{listed}");
    });
}
