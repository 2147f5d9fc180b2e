//! Filters of what guests send, by nftables at the ingress of each tap: a frame is judged before
//! its bridge sees it. Each tap has a table of its own, with the tap's name, which is made before
//! the tap is up.
//!
//! A tap ends with its QEMU, its table does not. Linux 6.16 and later even apply it to a new tap of
//! that name, so a new tap without a filter loses the table of the one before. Tables without a tap
//! are removed when the agent starts and when a QEMU ends. The kernel keeps a table while no agent
//! runs.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use godwit_qemu::{MacAddress, NicFilter, ResolvedNic, find_program};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::MutexGuard;

use super::{NetworkError, link_exists};

/// Longest run of nft.
const LIMIT: Duration = Duration::from_secs(10);

/// Returns the program that sets filters, if it is installed.
fn nft() -> Option<PathBuf> {
    let usual = || Some(PathBuf::from("/usr/sbin/nft")).filter(|path| path.is_file());
    find_program(Path::new("nft")).ok().or_else(usual)
}

/// Whether this host has the program that filters what guests send.
pub(crate) fn is_available() -> bool {
    nft().is_some()
}

/// Tables of this host's taps.
#[derive(Debug, Default)]
pub(crate) struct Filters {
    /// Held by the one that changes tables.
    turn: tokio::sync::Mutex<()>,
    /// Names of those that may exist.
    names: Mutex<Tables>,
}

type Tables = BTreeSet<String>;

/// Right to change tables.
pub(super) type Turn<'a> = MutexGuard<'a, ()>;

impl Filters {
    /// Prevents a sweep until the tap of a new table exists; `None` if the tap has no filter and no
    /// table of an earlier one, and so need not wait.
    pub(super) async fn hold(&self, tap: &str, nic: &ResolvedNic) -> Option<Turn<'_>> {
        if nic.filter.is_none() && !self.names.lock().contains(tap) {
            return None;
        }
        Some(self.turn.lock().await)
    }

    /// Whether there may be tables.
    pub(crate) fn may_exist(&self) -> bool {
        !self.names.lock().is_empty()
    }

    /// Sets the filter of a tap that exists again.
    pub(crate) async fn renew(&self, tap: &str, nic: &ResolvedNic) -> Result<(), NetworkError> {
        match self.hold(tap, nic).await {
            Some(turn) => self.set(&turn, tap, nic).await,
            None => Ok(()),
        }
    }

    /// Sets those filters of taps again that are missing, as after a flush of nftables' rules.
    /// Returns the taps that missed theirs, each with the outcome.
    pub(crate) async fn restore(
        &self,
        wanted: &[(String, ResolvedNic)],
    ) -> Vec<(String, Result<(), NetworkError>)> {
        let turn = self.turn.lock().await;
        // Without the family there are no tables either.
        let listed = run(&["-j", "list", "tables", "netdev"], "").await.unwrap_or_default();
        let there = tables_of_taps(&listed);
        let mut missed = Vec::new();
        for (tap, nic) in wanted.iter().filter(|(tap, _)| !there.contains(tap)) {
            // The tap of a guest that has just ended is gone.
            if !matches!(link_exists(tap).await, Ok(false)) {
                missed.push((tap.clone(), self.set(&turn, tap, nic).await));
            }
        }
        missed
    }

    /// Removes the tables of taps that no longer exist.
    pub(crate) async fn sweep(&self) {
        if !is_available() {
            return;
        }
        let _turn = self.turn.lock().await;
        let listed = match run(&["-j", "list", "tables", "netdev"], "").await {
            Ok(listed) => tables_of_taps(&listed),
            // Without the family there are no tables either.
            Err(why) => return tracing::debug!(why, "filters of taps not listed"),
        };
        self.names.lock().clone_from(&listed);
        for tap in listed {
            if matches!(link_exists(&tap).await, Ok(false)) {
                match run(&["-f", "-"], &removal(&tap)).await {
                    Ok(_) => drop(self.names.lock().remove(&tap)),
                    Err(why) => tracing::warn!(tap, why, "cannot remove the filter of a tap"),
                }
            }
        }
    }

    /// Sets the filter of a tap, in place of any earlier one of that name. Returns when the kernel
    /// applies it.
    pub(super) async fn set(
        &self,
        _turn: &Turn<'_>,
        tap: &str,
        nic: &ResolvedNic,
    ) -> Result<(), NetworkError> {
        let rules = rules(tap, nic);
        self.names.lock().insert(tap.to_owned());
        let input = rules.as_deref().map_or_else(|| removal(tap), str::to_owned);
        run(&["-f", "-"], &input).await.map_err(|why| NetworkError::Filter {
            tap: tap.to_owned(),
            network: nic.network.clone(),
            why,
        })?;
        if rules.is_none() {
            self.names.lock().remove(tap);
        }
        Ok(())
    }
}

/// Returns the input of nft that removes a table, which need not exist.
fn removal(tap: &str) -> String {
    format!("add table netdev {tap}\ndelete table netdev {tap}\n")
}

/// Returns the tables in nft's answer that have the name of a tap.
fn tables_of_taps(listed: &str) -> Tables {
    let listed: Value = serde_json::from_str(listed).unwrap_or_default();
    let entries = listed["nftables"].as_array().into_iter().flatten();
    let names = entries.filter_map(|entry| entry["table"]["name"].as_str());
    names.filter(|name| super::is_tap_name(name)).map(str::to_owned).collect()
}

/// Runs nft, and returns what it prints or why it failed.
async fn run(arguments: &[&str], input: &str) -> Result<String, String> {
    let program = nft().ok_or("nft is not installed")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let run = async {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).await?;
        }
        child.wait_with_output().await
    };
    let output = tokio::time::timeout(LIMIT, run)
        .await
        .map_err(|_| format!("nft did not end within {LIMIT:?}"))?
        .map_err(|error| format!("cannot run nft: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(format!("nft: {}", complaint.lines().next().unwrap_or("no reason given").trim()))
}

/// Returns the input of nft that sets the filter of a tap at once; `None` if it has none.
fn rules(tap: &str, nic: &ResolvedNic) -> Option<String> {
    let filter = nic.filter?;
    let policy = match filter {
        NicFilter::Mac => "accept",
        NicFilter::MacIp => "drop",
    };
    let mut text = format!(
        "{}table netdev {tap} {{\n\
         chain guest {{\n\
         type filter hook ingress device \"{tap}\" priority 0; policy {policy};\n\
         ether saddr != {} drop\n",
        removal(tap),
        nic.mac
    );
    if filter == NicFilter::MacIp {
        let all = nic.addresses.iter().chain(&nic.address);
        let (mut v4, mut v6) = (BTreeSet::new(), BTreeSet::from([link_local(nic.mac)]));
        for address in all {
            match address {
                IpAddr::V4(address) => drop(v4.insert(*address)),
                IpAddr::V6(address) => drop(v6.insert(*address)),
            }
        }
        allow_v4(&mut text, nic.mac, &v4);
        allow_v6(&mut text, &v6);
    }
    text.push_str("}\n}\n");
    Some(text)
}

fn allow_v4(text: &mut String, mac: MacAddress, addresses: &BTreeSet<Ipv4Addr>) {
    // QEMU announces a guest that has moved by RARP; DHCP and ARP probes have no address yet.
    let mut of_arp = addresses.clone();
    of_arp.insert(Ipv4Addr::UNSPECIFIED);
    let _ = write!(
        text,
        "ether type 0x8035 accept\n\
         ether type arp arp saddr ether {mac} arp saddr ip {{ {} }} accept\n\
         ether type ip udp sport 67 drop\n\
         ether type ip ip saddr 0.0.0.0 udp sport 68 udp dport 67 accept\n",
        list(&of_arp)
    );
    if !addresses.is_empty() {
        let _ = writeln!(text, "ether type ip ip saddr {{ {} }} accept", list(addresses));
    }
}

fn allow_v6(text: &mut String, addresses: &BTreeSet<Ipv6Addr>) {
    // The address that a solicitation asks for or an advertisement offers is behind 8 bytes of
    // ICMPv6 (RFC 4861, 4.3 and 4.4). nft 1.0.6 has no name for it. A guest is neither a router nor
    // a DHCP server: it could make itself that of its neighbours.
    let targets: Vec<String> =
        addresses.iter().map(|address| format!("0x{:032x}", address.to_bits())).collect();
    let targets = targets.join(", ");
    let _ = write!(
        text,
        "ether type ip6 icmpv6 type {{ nd-router-advert, nd-redirect }} drop\n\
         ether type ip6 udp sport 547 drop\n\
         ether type ip6 ip6 saddr :: icmpv6 type {{ nd-router-solicit, mld2-listener-report }} \
         accept\n\
         ether type ip6 ip6 saddr :: icmpv6 type nd-neighbor-solicit @th,64,128 {{ {targets} }} \
         accept\n\
         ether type ip6 icmpv6 type nd-neighbor-advert @th,64,128 != {{ {targets} }} drop\n\
         ether type ip6 ip6 saddr {{ {} }} accept\n",
        list(addresses)
    );
}

fn list<T: ToString>(addresses: &BTreeSet<T>) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns the link-local address that a guest derives from its hardware address (RFC 4291, A).
fn link_local(mac: MacAddress) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.bytes();
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&[0xfe, 0x80]);
    bytes[8..].copy_from_slice(&[a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    bytes.into()
}

#[cfg(test)]
mod tests;
