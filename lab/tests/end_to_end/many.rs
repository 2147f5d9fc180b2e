//! Eight guests move at once, and one of the agents is killed and restarted: each guest arrives or
//! stays, without an operator.

use anyhow::{Context, Result, ensure};
use godwit_api::LimitOf;
use godwit_lab::faults::settled;
use godwit_lab::trial::{Guest, GuestPlan, Migration, Traces, Trial, VcpuWatch, other_host};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, Phase, RateLimit};
use rustix::process::Signal;

/// Number of guests.
const GUESTS: u8 = 8;

fn plan(number: u8) -> GuestPlan {
    GuestPlan {
        number: 21 + number,
        memory: vec![ByteSize::from_bytes((128 << 20) + (64 << 10))],
        fill: ByteSize::from_mib(8),
        workload: "dirty:rate=200,ws=4M,order=random".to_owned(),
        ..GuestPlan::new(&format!("web{number}"))
    }
}

/// Starts to move all guests to the other host, slowly enough for a fault.
fn begin<'a>(trial: &'a Trial, guests: &[Guest]) -> Result<Vec<Migration<'a>>> {
    let begun = guests.iter().map(|guest| {
        let request = guest.to_other_host();
        Ok(trial.begin_migration(&guest.name, &guest.host, &request)?)
    });
    begun.collect()
}

/// Kills and restarts the agent of `host` while all guests leave host a.
fn strike(trial: &Trial, guests: &mut [Guest], host: &str, clean: &[Traces; 2]) -> Result<()> {
    let limit: RateLimit = "40mbit".parse()?;
    let from = guests[0].host.clone();
    trial.ask(trial.agent(&from).set_limit(LimitOf::Host, limit))?;
    let watches: Vec<VcpuWatch> =
        guests.iter().map(|guest| trial.watch_vcpus(&guest.name)).collect();
    guests.iter().zip(&watches).try_for_each(|(guest, watch)| watch.until_seen(&guest.host))?;
    let mut migrations = begin(trial, guests)?;
    for migration in &mut migrations {
        migration
            .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?
            .context("the migration was over too early")?;
    }
    trial.end_agent(host, Signal::KILL)?;
    trial.start_missing()?;
    drop(migrations);
    let (mut moved, mut stayed) = (0, 0);
    for (guest, watch) in guests.iter_mut().zip(watches) {
        let mut reasons = Vec::new();
        let now = settled(trial, &guest.name, &mut reasons)?
            .with_context(|| format!("{}: {reasons:?}", guest.name))?;
        watch.until_seen(&now)?;
        watch.end()?;
        *(if now == guest.host { &mut stayed } else { &mut moved }) += 1;
        guest.host = now;
        trial.expect_whole(guest)?;
    }
    eprintln!("  the agent of host {host} killed: {moved} arrived, {stayed} stayed");
    trial.ask(trial.agent(&from).set_limit(LimitOf::Host, RateLimit::NONE))?;
    // No further disturbance.
    guests
        .iter_mut()
        .filter(|guest| guest.host != from)
        .try_for_each(|guest| move_one(trial, guest))?;
    let other = other_host(&from);
    trial.expect_traces(other, &clean[usize::from(other == "b")])
}

fn move_one(trial: &Trial, guest: &mut Guest) -> Result<()> {
    let request = guest.to_other_host();
    let report = trial.begin_migration(&guest.name, &guest.host, &request)?.report()?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    guest.host = request.to;
    trial.expect_whole(guest).map(drop)
}

#[test]
fn eight_migrations_survive_the_end_of_either_agent() -> Result<()> {
    let Some(trial) = Trial::begin("many")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let plans: Vec<GuestPlan> = (0..GUESTS).map(plan).collect();
    let mut guests = trial.guests("a", &plans)?;
    strike(&trial, &mut guests, "a", &clean).context("the source's agent")?;
    strike(&trial, &mut guests, "b", &clean).context("the destination's agent")?;
    for migration in begin(&trial, &guests)? {
        let report = migration.report()?;
        ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    }
    for guest in &mut guests {
        other_host(&guest.host).clone_into(&mut guest.host);
        trial.expect_whole(guest)?;
    }
    trial.expect_traces("a", &clean[0])?;
    trial.finish()
}
