//! The lanes of a trial's lab, from outside: their addresses, the traffic of their NICs, and cuts.

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::emulator::{Order, give};
use crate::links::{LinkEngine, change_rate, choose_engine};
use crate::namespace::in_namespace;
use crate::tools::Batch;
use crate::trial::Trial;
use crate::units::BitRate;

impl Trial {
    /// Returns a host's addresses on the lanes, one each: IPv4 if there is one.
    ///
    /// # Errors
    /// The host is unknown.
    pub fn lane_addresses(&self, host: &str) -> Result<Vec<IpAddr>> {
        let hosts = self.topology().hosts;
        let host = hosts.iter().find(|found| found.name == host).context("unknown host")?;
        let lanes = self.options.lanes().into_iter();
        Ok(lanes
            .filter_map(|lane| host.lane_addresses(lane, self.options.family).into_iter().next())
            .collect())
    }

    /// Returns the bytes that each lane's NIC of a host has sent since the lab came up.
    ///
    /// # Errors
    /// The host cannot be examined, or lacks a NIC.
    pub fn lane_sent_bytes(&self, host: &str) -> Result<Vec<u64>> {
        let read = || std::fs::read_to_string("/proc/thread-self/net/dev");
        let table = in_namespace(&self.namespace(host), read)??;
        let sent = |nic: &str| {
            sent_bytes(&table, nic).with_context(|| format!("host {host} has no NIC {nic}"))
        };
        self.options.lanes().iter().map(|lane| sent(&lane.nic())).collect()
    }

    /// Disconnects a host from the migration networks, or reconnects it, without a signal to the
    /// hosts, as when a switch in between is cut off: its NICs keep their carriers and addresses,
    /// and what is sent vanishes.
    ///
    /// # Errors
    /// The host is unknown, or the lab's switch is not the kernel's.
    pub fn cut_lanes(&self, host: &str, is_cut: bool) -> Result<()> {
        let topology = self.topology();
        let engine = choose_engine(&topology, &self.options);
        ensure!(
            engine != LinkEngine::Emulator,
            "cannot disconnect a host: the emulator's ports are fixed"
        );
        let host =
            topology.hosts.iter().find(|found| found.name == host).context("unknown host")?;
        let mut batch = Batch::ip_in(&topology.link_namespace);
        for lane in self.options.lanes() {
            let port = host.migration_port(lane);
            let to =
                if is_cut { "nomaster".to_owned() } else { format!("master {}", lane.bridge()) };
            batch.line(format!("link set {port} {to}"));
        }
        batch.run()
    }

    /// Returns whether a host is disconnected from all migration networks, from the kernel's state
    /// of the switch's ports.
    ///
    /// # Errors
    /// The host is unknown, or the kernel knows no such ports.
    pub fn are_lanes_cut(&self, host: &str) -> Result<bool> {
        let topology = self.topology();
        let host =
            topology.hosts.iter().find(|found| found.name == host).context("unknown host")?;
        let mut is_cut = true;
        for lane in self.options.lanes() {
            let port = host.migration_port(lane);
            let show = || Command::new("ip").args(["-o", "link", "show", "dev", &port]).output();
            let shown = in_namespace(&topology.link_namespace, show)??;
            ensure!(shown.status.success(), "ip: {}", String::from_utf8_lossy(&shown.stderr));
            is_cut &= !String::from_utf8_lossy(&shown.stdout).contains(" master ");
        }
        Ok(is_cut)
    }
}

impl Trial {
    /// Sends an order to the lab's link emulator.
    ///
    /// # Errors
    /// The lab has none.
    pub fn order_links(&self, order: &Order) -> Result<()> {
        give(&self.paths.emulator_orders(), order)
    }

    /// Changes the rate at which a host sends on all lanes. The lab must have been created with a
    /// rate.
    ///
    /// # Errors
    /// The host is unknown, or its links have no rate.
    pub fn set_sending_rate(&self, host: &str, rate: BitRate) -> Result<()> {
        let mut batch = Batch::tc_in(&self.namespace(host));
        for lane in self.options.lanes() {
            change_rate(&mut batch, &lane.nic(), rate);
        }
        batch.run()
    }

    /// Returns the rates at which the kernel lets a host send on the lanes.
    ///
    /// # Errors
    /// The host is unknown, or its links have no rate.
    pub fn sending_rates(&self, host: &str) -> Result<Vec<BitRate>> {
        let of_lane = |nic: String| {
            let show = || Command::new("tc").args(["class", "show", "dev", &nic]).output();
            let shown = in_namespace(&self.namespace(host), show)??;
            let text = String::from_utf8_lossy(&shown.stdout);
            let word = text.split_ascii_whitespace().skip_while(|word| *word != "rate").nth(1);
            let rate = word.with_context(|| format!("{nic} of host {host} has no rate: {text}"))?;
            rate.to_ascii_lowercase().parse::<BitRate>().with_context(|| format!("tc says {text}"))
        };
        self.options.lanes().iter().map(|lane| of_lane(lane.nic())).collect()
    }
}

/// Reads the bytes sent from /proc/net/dev: a NIC, a colon, eight counters of what it received,
/// eight of what it sent, bytes first.
fn sent_bytes(table: &str, nic: &str) -> Option<u64> {
    let counters =
        table.lines().find_map(|line| line.trim().strip_prefix(nic)?.strip_prefix(':'))?;
    counters.split_ascii_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_nic_has_sent() {
        let table = "Inter-|   Receive                        |  Transmit\n \
                     face |bytes    packets errs drop fifo frame compressed multicast|bytes    \
                     packets\n \
                     mig10: 1 2 3 4 5 6 7 8 90 10 11 12 13 14 15 16\n  \
                     mig1:  1 2 3 4 5 6 7 8  9 10 11 12 13 14 15 16\n";
        assert_eq!(sent_bytes(table, "mig1"), Some(9));
        assert_eq!(sent_bytes(table, "mig10"), Some(90));
        assert_eq!(sent_bytes(table, "mig0"), None);
    }
}
