//! A network that silently drops packets of the interfaces' full size: a migration detects that,
//! reports it and continues with small packets.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial};

use crate::{BUSY, move_and_check, slow_link};

#[test]
fn vanishing_packets_are_reported_and_the_guest_arrives() -> Result<()> {
    let Some(trial) = Trial::begin_with("vanishing", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    // The switch between the hosts accepts 1500 bytes, and a veth pair four more for a VLAN tag.
    set_mtu(&trial, 9000)?;
    let report = move_and_check(&trial, &mut guest)?.report;
    ensure!(!report.lanes.is_empty(), "{report:#?}");
    for lane in &report.lanes {
        ensure!(lane.vanishing_mtu == Some(9000) && lane.bytes > 0, "{lane:#?}");
        let why = lane.broken.first().context("no stream was replaced")?;
        ensure!(
            why.contains("9000") && why.contains("MTU") && why.contains("godwit probe"),
            "{why}"
        );
    }
    eprintln!("  reported: {}", report.lanes[0].broken[0]);
    set_mtu(&trial, 1500)?;
    let report = move_and_check(&trial, &mut guest)?.report;
    for lane in &report.lanes {
        ensure!(lane.vanishing_mtu.is_none() && lane.broken.is_empty(), "{lane:#?}");
    }
    // The guest is back at the first host.
    trial.expect_traces("b", &clean)?;
    trial.finish()
}

/// Sets the MTU of both hosts' interfaces on the migration network. One packet at a time, because
/// the switch cannot know the packet size within a train.
fn set_mtu(trial: &Trial, mtu: u32) -> Result<()> {
    for host in ["a", "b"] {
        let (namespace, mtu) = (trial.namespace(host), mtu.to_string());
        let set = ["-n", &namespace, "link", "set", "mig0", "mtu", &mtu, "gso_max_segs", "1"];
        let set = Command::new("ip").args(set).output()?;
        ensure!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    }
    Ok(())
}
