//! `godwit-fleet`: serves simulated agents until its standard input ends, and says where they are.

use std::io::{Read, Write};

use anyhow::Result;
use clap::Parser;
use godwit_fleet::{Fleet, FleetPlan, allow_many_files};

/// Serves simulated agents with a stand-in for QEMU until its standard input ends; prints the body of a request for each host, as
/// `POST /api/v1/hosts` of the manager takes it.
#[derive(Debug, Parser)]
#[command(name = "godwit-fleet", version)]
struct Options {
    /// Hosts
    #[arg(long, default_value_t = 8)]
    hosts: usize,
    /// VMs of all hosts
    #[arg(long, default_value_t = 200)]
    vms: usize,
    /// So many times faster than real time migrations are
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Options { hosts, vms, speed } = Options::parse();
    allow_many_files()?;
    let plan = FleetPlan { hosts, vms, hosts_with_vms: hosts, speed, ..FleetPlan::default() };
    let fleet = Fleet::begin(plan).await?;
    let mut out = std::io::stdout();
    for (name, address) in fleet.agents() {
        writeln!(out, "{}", serde_json::json!({ "name": name, "address": address }))?;
    }
    out.flush()?;
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}
