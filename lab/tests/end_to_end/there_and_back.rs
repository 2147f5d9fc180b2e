//! Moves to the other host and back, idle and under load, over IPv4 and over IPv6. The guest's
//! memory is checked after each move.

use anyhow::{Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial};

use crate::{BUSY, move_and_check};

#[test]
fn a_guest_moves_there_and_back_idle_and_busy() -> Result<()> {
    let Some(trial) = Trial::begin("there-and-back")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    for workload in ["idle", BUSY] {
        guest.workload(workload)?;
        move_and_check(&trial, &mut guest)?;
        trial.expect_traces("a", &clean[0])?;
        move_and_check(&trial, &mut guest)?;
        trial.expect_traces("b", &clean[1])?;
    }
    let epoch = trial.vm("a", "web")?.epoch;
    ensure!(epoch == 5, "four moves of a VM of epoch 1 make epoch {epoch}");
    trial.delete("a", "web")?;
    trial.expect_traces("a", &clean[0])?;
    trial.finish()
}

#[test]
fn the_migration_network_may_be_ipv6_only() -> Result<()> {
    let Some(trial) = Trial::begin("ipv6")? else { return Ok(()) };
    for (host, own, other, peer) in
        [("a", "fd77::11", "b", "fd77::12"), ("b", "fd77::12", "a", "fd77::11")]
    {
        trial.reconfigure(host, |config| {
            config.insert("listen".to_owned(), vec![format!("[{own}]:7700")].into());
            config.insert("migration_addresses".to_owned(), vec![own.to_owned()].into());
            let peers: toml::Table =
                [(other.to_owned(), format!("https://[{peer}]:7700").into())].into_iter().collect();
            config.insert("peers".to_owned(), peers.into());
        })?;
    }
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    move_and_check(&trial, &mut guest)?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
