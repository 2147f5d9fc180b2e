//! The lab's networks: the guest LAN, and the migration networks (lanes) with their shaped links.
//!
//! # How links are shaped
//! HTB shapes sending on the host's own NIC. Receiving is shaped on the switch's port towards the
//! host: by HTB if the kernel switches, by the emulator if it switches. So two hosts that send to a
//! third share its link, and a sender is held back by its own kernel as on a real NIC. Rates count
//! Ethernet frames, so TCP carries 95.6 %.
//!
//! Delay and loss are applied on the switch's ports: by netem if the kernel has it, otherwise by
//! the emulator. Only the emulator can cap each TCP flow. The cap represents a network that limits
//! flows somewhere between the hosts, as clouds do, without the sender's kernel knowing.
//!
//! Each lane is a network of its own: a NIC on each host, a bridge or a switch of the emulator, a
//! subnet.
//!
//! # Settings for TCP
//! Only the maxima of `net.ipv4.tcp_rmem` and `tcp_wmem` are set, so that the windows fit the link
//! (see [`tcp_buffer_bytes`]): a host that is meant to fill such a link is configured this way. All
//! other settings are stock, including `tcp_slow_start_after_idle` and the congestion control.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::emulator::frame::Mac;
use crate::emulator::switch::LinkModel;
use crate::emulator::{EmulatorConfig, LaneConfig, PortConfig};
use crate::namespace::{set_sysctls, sysctl};
use crate::options::LabOptions;
use crate::tools::Batch;
use crate::topology::{
    CLIENT_IPV4, CLIENT_IPV6, Host, LAN_BRIDGE, LAN_NIC, LabPaths, Lane, Topology,
};
use crate::units::{BitRate, Loss};

const MTU: u16 = 1500;
/// Rate assumed for an unshaped link when buffers are sized.
const UNSHAPED_BITS_PER_SECOND: u64 = 10_000_000_000;

/// Engine that switches the migration networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkEngine {
    /// Bridge and HTB: no delay, no loss.
    Kernel,
    /// Bridge, HTB and netem.
    Netem,
    /// The project's own emulator.
    Emulator,
}

impl std::fmt::Display for LinkEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LinkEngine::Kernel => "kernel",
            LinkEngine::Netem => "netem",
            LinkEngine::Emulator => "emulator",
        })
    }
}

/// Creates the namespaces, which must not exist, with loopback up and sysctls set.
pub(crate) fn make_namespaces(topology: &Topology, options: &LabOptions) -> Result<()> {
    let mut batch = Batch::ip();
    for namespace in topology.namespaces() {
        batch.line(format!("netns add {namespace}"));
    }
    batch.run()?;
    for namespace in topology.namespaces() {
        // Addresses are usable at once: no duplicate address detection. Set before interfaces
        // exist.
        let ipv6 =
            ["all", "default"].map(|of| (format!("net/ipv6/conf/{of}/accept_dad"), "0".to_owned()));
        set_sysctls(&namespace, &ipv6, true)?;
        // The bridges switch and do not filter, whatever the machine's firewall has loaded.
        let bridge = ["ip", "ip6", "arp"]
            .map(|of| (format!("net/bridge/bridge-nf-call-{of}tables"), "0".to_owned()));
        set_sysctls(&namespace, &bridge, true)?;
        Batch::ip_in(&namespace).line("link set lo up").run()?;
    }
    // One setting for all sockets of a host: the need of the fastest lane.
    let wanted_bytes = options.lanes().iter().map(|lane| tcp_buffer_bytes(&lane.model)).max();
    for host in &topology.hosts {
        raise_tcp_buffers(&host.namespace, wanted_bytes.unwrap_or(0))?;
    }
    Ok(())
}

/// Removes the namespaces with everything in them.
pub(crate) fn remove_namespaces(names: &[String]) -> Result<()> {
    let mut batch = Batch::ip();
    for name in names {
        batch.line(format!("netns delete {name}"));
    }
    batch.run()
}

/// Chooses the engine: the kernel alone without delay and loss; otherwise netem if this kernel has
/// it; the emulator if flows have a cap.
///
/// netem is tried on the link namespace's loopback. That also loads its module, and is more
/// reliable than a list of modules.
pub(crate) fn choose_engine(topology: &Topology, options: &LabOptions) -> LinkEngine {
    if options.force_emulator || options.flow_cap.is_some() {
        return LinkEngine::Emulator;
    }
    if options.rtt.duration().is_zero() && options.loss.is_none() {
        return LinkEngine::Kernel;
    }
    let mut probe = Batch::tc_in(&topology.link_namespace);
    probe.line("qdisc add dev lo root netem delay 1ms").line("qdisc del dev lo root");
    if probe.run().is_ok() { LinkEngine::Netem } else { LinkEngine::Emulator }
}

/// Creates the guest LAN: a bridge on each host, each joined to the client's bridge by a veth pair.
/// Not shaped.
pub(crate) fn make_guest_lan(topology: &Topology) -> Result<()> {
    let client = &topology.client_namespace;
    let mut pairs = Batch::ip();
    for host in &topology.hosts {
        let (inner, outer) = (&host.namespace, host.lan_port());
        pairs.line(format!(
            "link add {LAN_NIC} netns {inner} type veth peer name {outer} netns {client}"
        ));
    }
    pairs.run()?;
    for host in &topology.hosts {
        let mut batch = Batch::ip_in(&host.namespace);
        add_bridge(&mut batch, LAN_BRIDGE);
        // A host must have no address on its guests' network.
        batch.line(format!("link set {LAN_BRIDGE} addrgenmode none"));
        add_port(&mut batch, LAN_NIC, LAN_BRIDGE);
        batch.line(format!("link set {LAN_BRIDGE} up")).run()?;
    }
    let mut batch = Batch::ip_in(client);
    add_bridge(&mut batch, LAN_BRIDGE);
    for host in &topology.hosts {
        add_port(&mut batch, &host.lan_port(), LAN_BRIDGE);
    }
    batch.line(format!("addr add {CLIENT_IPV4}/24 dev {LAN_BRIDGE}"));
    batch.line(format!("addr add {CLIENT_IPV6}/64 dev {LAN_BRIDGE}"));
    batch.line(format!("link set {LAN_BRIDGE} up")).run()
}

/// Creates the migration networks if the kernel switches them. With the emulator the NICs are its
/// TAP devices, and only [`configure_migration_nics`] remains to be done.
pub(crate) fn make_migration_bridges(
    topology: &Topology,
    options: &LabOptions,
    engine: LinkEngine,
) -> Result<()> {
    for lane in options.lanes() {
        make_migration_bridge(topology, lane, engine)?;
    }
    Ok(())
}

fn make_migration_bridge(topology: &Topology, lane: Lane, engine: LinkEngine) -> Result<()> {
    let (link, nic, bridge) = (&topology.link_namespace, lane.nic(), lane.bridge());
    let mut pairs = Batch::ip();
    for host in &topology.hosts {
        let (inner, outer) = (&host.namespace, host.migration_port(lane));
        pairs
            .line(format!("link add {nic} netns {inner} type veth peer name {outer} netns {link}"));
    }
    pairs.run()?;
    let mut batch = Batch::ip_in(link);
    add_bridge(&mut batch, &bridge);
    batch.line(format!("link set {bridge} addrgenmode none"));
    for host in &topology.hosts {
        add_port(&mut batch, &host.migration_port(lane), &bridge);
    }
    batch.line(format!("link set {bridge} up")).run()?;
    let mut shaping = Batch::tc_in(link);
    for host in &topology.hosts {
        shape_switch_port(&mut shaping, &host.migration_port(lane), &lane.model, engine);
    }
    shaping.run()
}

/// Sets addresses, rate and state of each host's migration NICs.
pub(crate) fn configure_migration_nics(
    topology: &Topology,
    options: &LabOptions,
    engine: LinkEngine,
) -> Result<()> {
    let lanes = options.lanes();
    for host in &topology.hosts {
        let mut batch = Batch::ip_in(&host.namespace);
        let mut shaping = Batch::tc_in(&host.namespace);
        for lane in &lanes {
            let nic = lane.nic();
            batch.line(format!("link set {nic} address {}", mac_text(host.migration_mac(*lane))));
            if engine == LinkEngine::Netem && !options.loss.is_none() {
                // netem loses whole units of its input, so it must get packets, not trains.
                batch.line(format!("link set {nic} gso_max_segs 1"));
            }
            for address in host.lane_addresses(*lane, options.family) {
                let prefix_bits = if address.is_ipv4() { 24 } else { 64 };
                batch.line(format!("addr replace {address}/{prefix_bits} dev {nic}"));
            }
            batch.line(format!("link set {nic} up"));
            if let Some(rate) = lane.model.rate {
                add_rate(&mut shaping, &nic, rate);
            }
        }
        batch.run()?;
        shaping.run()?;
    }
    Ok(())
}

/// Returns the emulator's configuration for this lab.
pub(crate) fn emulator_config(
    topology: &Topology,
    options: &LabOptions,
    paths: &LabPaths,
) -> EmulatorConfig {
    let port = |host: &Host, lane: Lane| PortConfig {
        namespace: host.namespace.clone(),
        device: lane.nic(),
        mac: host.migration_mac(lane),
        mtu: MTU,
    };
    let lane = |lane: Lane| LaneConfig {
        ports: topology.hosts.iter().map(|host| port(host, lane)).collect(),
        rate: lane.model.rate,
    };
    EmulatorConfig {
        lanes: options.lanes().into_iter().map(lane).collect(),
        rtt: options.rtt,
        loss: options.loss,
        flow_cap: options.flow_cap,
        socket: paths.emulator_socket(),
        orders: paths.emulator_orders(),
    }
}

/// Returns the maximum size of TCP's buffers: four bandwidth-delay products (Linux counts its own
/// overhead as half of a receive buffer, and a sender keeps retransmitted data beside new data),
/// including the switch's queue of 50 ms if the link has a rate; between 4 and 256 MiB.
pub(crate) fn tcp_buffer_bytes(model: &LinkModel) -> u64 {
    let rate = model.rate.or(BitRate::new(UNSHAPED_BITS_PER_SECOND));
    let time = if model.rate.is_some() { model.queue_limit() } else { model.rtt.duration() };
    let bytes = rate.map_or(0, |rate| rate.bytes_in(time)).saturating_mul(4);
    bytes.clamp(4 << 20, 256 << 20)
}

/// Raises the maxima of TCP's buffers in a namespace; never lowers them.
fn raise_tcp_buffers(namespace: &str, wanted_bytes: u64) -> Result<()> {
    for key in ["net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem"] {
        let text = sysctl(namespace, key)?.with_context(|| format!("this kernel has no {key}"))?;
        let numbers: Vec<u64> =
            text.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [least, start, most] = numbers[..] else {
            continue;
        };
        if most < wanted_bytes {
            set_sysctls(
                namespace,
                &[(key.to_owned(), format!("{least} {start} {wanted_bytes}"))],
                false,
            )?;
        }
    }
    Ok(())
}

fn add_bridge(batch: &mut Batch, name: &str) {
    batch.line(format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"));
}

fn add_port(batch: &mut Batch, device: &str, bridge: &str) {
    batch.line(format!("link set {device} addrgenmode none master {bridge}"));
    batch.line(format!("link set {device} up"));
}

/// Sets the rate of the switch's port towards a host, with delay and loss if netem provides them.
fn shape_switch_port(batch: &mut Batch, port: &str, model: &LinkModel, engine: LinkEngine) {
    let parent = match model.rate {
        Some(rate) => {
            add_rate(batch, port, rate);
            "parent 1:1 handle 10:"
        }
        None => "root",
    };
    if engine == LinkEngine::Netem {
        let delay_us = model.rtt.one_way().as_micros();
        let loss = loss_percent(model.loss);
        let limit = netem_limit_packets(model);
        batch.line(format!(
            "qdisc add dev {port} {parent} netem limit {limit} delay {delay_us}us loss {loss}%"
        ));
    } else if let Some(rate) = model.rate {
        let limit = rate.bytes_in(model.queue_limit()).max(256 << 10);
        batch.line(format!("qdisc add dev {port} {parent} bfifo limit {limit}"));
    }
}

/// Adds one HTB class for all traffic. Its burst is 100 µs of the rate, at least one train of
/// packets. With less, the rate would depend on how late timers are; with more, a burst would pass
/// faster than the link.
fn add_rate(batch: &mut Batch, device: &str, rate: BitRate) {
    batch.line(format!("qdisc replace dev {device} root handle 1: htb default 1"));
    change_rate(batch, device, rate);
}

/// Changes the rate of a device that has one.
pub(crate) fn change_rate(batch: &mut Batch, device: &str, rate: BitRate) {
    let bits = rate.bits_per_second();
    let burst = rate.bytes_in(Duration::from_micros(100)).max(2 * u64::from(MTU));
    batch.line(format!(
        "class replace dev {device} parent 1: classid 1:1 htb rate {bits}bit ceil {bits}bit burst \
         {burst} cburst {burst} quantum 65536"
    ));
}

/// Returns the limit of netem's one queue, which holds both the packets in flight and those that
/// wait, with trains counted as one packet.
fn netem_limit_packets(model: &LinkModel) -> u64 {
    let rate = model.rate.or(BitRate::new(UNSHAPED_BITS_PER_SECOND));
    let time = model.queue_limit() + model.rtt.one_way();
    rate.map_or(0, |rate| rate.bytes_in(time) / u64::from(MTU)).max(1000)
}

fn loss_percent(loss: Loss) -> String {
    loss.to_string().trim_end_matches('%').to_owned()
}

fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(rate: Option<&str>, rtt: &str) -> LinkModel {
        LinkModel {
            rate: rate.map(|rate| rate.parse().unwrap()),
            rtt: rtt.parse().unwrap(),
            loss: Loss::default(),
            flow_cap: None,
        }
    }

    #[test]
    fn tcp_buffers_fit_the_link() {
        // 1 Gb/s for 40 + 50 ms is 11.25 MB.
        assert_eq!(tcp_buffer_bytes(&model(Some("1gbit"), "40ms")), 45_000_000);
        assert_eq!(tcp_buffer_bytes(&model(None, "10ms")), 50_000_000);
        assert_eq!(tcp_buffer_bytes(&model(None, "0")), 4 << 20);
        assert_eq!(tcp_buffer_bytes(&model(None, "10s")), 256 << 20);
    }

    #[test]
    fn netem_goes_below_the_rate() {
        let mut batch = Batch::tc_in("x");
        shape_switch_port(&mut batch, "mig-a", &model(Some("1gbit"), "10ms"), LinkEngine::Netem);
        let text = batch.text();
        assert!(text.contains("htb rate 1000000000bit"), "{text}");
        assert!(
            text.ends_with("parent 1:1 handle 10: netem limit 5416 delay 5000us loss 0%\n"),
            "{text}"
        );
    }

    #[test]
    fn an_unshaped_kernel_link_has_no_discipline() {
        let mut batch = Batch::tc_in("x");
        shape_switch_port(&mut batch, "mig-a", &model(None, "0"), LinkEngine::Kernel);
        assert_eq!(batch.text(), "");
    }
}
