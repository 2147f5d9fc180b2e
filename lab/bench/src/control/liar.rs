//! A host that lies in every field of every message to a manager. Checks whether each lie is shown,
//! whether anything of other hosts changes, and how much memory it costs.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use godwit_fleet::{Fleet, FleetPlan, Liar, Lied, lie};
use serde::Serialize;

use super::Promise;
use super::managed::{Managed, Usage};
use crate::machine::Machine;
use crate::results;

/// Maximum growth of the manager's memory, MiB.
const MOST_GROWTH_MIB: f64 = 64.0;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Messages of the lying host
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10_000,
        value_parser = clap::value_parser!(u64).range(1..=10_000_000),
    )]
    messages: u64,
    /// Seed of the lies
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Honest simulated hosts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..=64),
    )]
    hosts: u32,
    /// Their VMs
    #[arg(long, value_name = "N", default_value_t = 200)]
    vms: usize,
    /// Path of `godwit` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    godwit: Option<PathBuf>,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

#[derive(Debug, Serialize)]
struct Figures {
    lied: Lied,
    took_s: f64,
    before: Usage,
    after: Usage,
    grown_mib: f64,
    promises: Vec<Promise>,
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::inspect("qemu-system-x86_64".as_ref());
    let figures = tokio::runtime::Runtime::new()?.block_on(measure(settings))?;
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&figures)?);
    } else {
        print!("{machine}");
        print(settings, &figures);
    }
    results::write(&settings.out, "control-liar", &machine, settings, &figures)?;
    Ok(!settings.check || figures.promises.iter().all(Promise::is_kept))
}

async fn measure(settings: &Settings) -> Result<Figures> {
    let hosts = settings.hosts as usize;
    let plan =
        FleetPlan { hosts, vms: settings.vms, hosts_with_vms: hosts, ..FleetPlan::default() };
    let fleet = Fleet::begin(plan.clone()).await?;
    let mut managed = Managed::new(settings.godwit.as_deref())?;
    managed.start().await?;
    managed.add_hosts(&fleet, plan.link_bits_per_s).await?;
    let (up, vms) = (u64::from(settings.hosts), settings.vms as u64);
    managed.until(|cluster| (cluster.hosts_up, cluster.vms) == (up, vms)).await?;
    let before = managed.usage()?;
    let mut liar = Liar::begin("liar", settings.seed, plan).await?;
    let began = Instant::now();
    let lied = lie(&mut managed.asker(), &mut liar, settings.messages).await?;
    let took_s = began.elapsed().as_secs_f64();
    let after = managed.usage()?;
    managed.stop()?;
    // Its peak meanwhile, including the time before the liar.
    let grown_mib = after.hwm_mib.max(after.rss_mib) - before.rss_mib;
    let promises = promises(&lied, grown_mib);
    Ok(Figures { lied, took_s, before, after, grown_mib, promises })
}

fn promises(lied: &Lied, grown_mib: f64) -> Vec<Promise> {
    #[expect(clippy::cast_precision_loss, reason = "counts of messages")]
    let count = |count: u64| count as f64;
    let hidden = (lied.claims + lied.impossible).saturating_sub(lied.shown);
    vec![
        Promise::new("the manager's memory grows by", MOST_GROWTH_MIB, grown_mib, "MiB"),
        Promise::new(
            "changes of other hosts' VMs",
            0.0,
            count(lied.changed.len() as u64),
            "changes",
        ),
        Promise::new("lies that are not shown", 0.0, count(hidden), "lies"),
    ]
}

fn print(settings: &Settings, figures: &Figures) {
    let Figures { lied, took_s, before, after, promises, .. } = figures;
    println!(
        "settings  {} honest hosts with {} VMs (agents' API with simulated QEMU), one that lies, \
         seed {}\n",
        settings.hosts, settings.vms, settings.seed
    );
    println!(
        "{} messages in {took_s:.1} s: {} claims of other hosts' VMs, {} with impossible values; \
         {} of these were shown",
        lied.messages, lied.claims, lied.impossible, lied.shown
    );
    println!(
        "the manager's memory: {:.1} MiB before, {:.1} MiB after, {:.1} MiB at most",
        before.rss_mib, after.rss_mib, after.hwm_mib
    );
    for text in lied.unshown.iter().chain(&lied.changed) {
        println!("  {text}");
    }
    println!();
    promises.iter().for_each(Promise::print);
}
