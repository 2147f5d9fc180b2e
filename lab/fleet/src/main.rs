//! `godwit-fleet`: runs simulated agents until its standard input ends, and prints their addresses.

use std::io::{Read, Write};

use anyhow::Result;
use clap::Parser;
use godwit_fleet::{Fleet, FleetPlan, allow_many_files};

/// Runs simulated agents with simulated QEMU until standard input ends. Prints a request body for
/// each host, as the manager's `POST /api/v1/hosts` expects it.
#[derive(Debug, Parser)]
#[command(name = "godwit-fleet", version)]
struct Options {
    /// Hosts
    #[arg(long, default_value_t = 8)]
    hosts: usize,
    /// VMs of all hosts
    #[arg(long, default_value_t = 200)]
    vms: usize,
    /// Speed of migrations, as a multiple of real time
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Give hosts directories for VMs, of their own and shared
    #[arg(long)]
    datastores: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Options { hosts, vms, speed, datastores } = Options::parse();
    allow_many_files()?;
    let plan =
        FleetPlan { hosts, vms, hosts_with_vms: hosts, speed, datastores, ..FleetPlan::default() };
    let of_agents = (plan.host_name(0), plan.vm_name(0));
    let fleet = Fleet::begin(plan).await?;
    if datastores {
        fleet.protect_by_agents(&of_agents.0, &of_agents.1);
    }
    let mut out = std::io::stdout();
    for (name, address) in fleet.agents() {
        writeln!(out, "{}", serde_json::json!({ "name": name, "address": address }))?;
    }
    out.flush()?;
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}
