//! Two lanes with different rates: both carry pages, and the guest arrives whole.

use anyhow::{Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_lab::{Family, LabOptions};

use crate::{BUSY, move_and_check};

/// More bytes than control messages and responses need in a migration, so pages were sent.
const PAGES_BYTES: u64 = 4 << 20;

#[test]
fn lanes_of_different_rates_both_carry_pages() -> Result<()> {
    for family in [Family::Ipv4, Family::Ipv6] {
        let lanes = vec!["400mbit".parse()?, "100mbit".parse()?];
        let options = LabOptions { lanes, family, ..LabOptions::default() };
        let Some(trial) = Trial::begin_with("two-lanes", options)? else { return Ok(()) };
        let clean = trial.traces("b")?;
        let plan = GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") };
        let mut guest = trial.guest("a", &plan)?;
        for host in ["a", "b"] {
            let before = trial.lane_sent_bytes(host)?;
            move_and_check(&trial, &mut guest)?;
            let after = trial.lane_sent_bytes(host)?;
            let sent: Vec<u64> =
                after.iter().zip(before).map(|(after, before)| after - before).collect();
            eprintln!("  {family}: host {host} sent {sent:?} bytes on its lanes");
            ensure!(
                sent.len() == 2 && sent.iter().all(|bytes| *bytes > PAGES_BYTES),
                "{family}: {sent:?}"
            );
        }
        trial.expect_traces("b", &clean)?;
        trial.finish()?;
    }
    Ok(())
}
