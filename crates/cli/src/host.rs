//! Implements `godwit host`: runs the agent and shows the properties of hosts.

mod ha;
mod load;

use std::path::Path;

use futures::future::join_all;
use godwit_api::{Client, ClientError, HostCpuInfo, HostInfo, LimitOf, Limits, ReferencesInfo};
use godwit_host::{Config, RunError, WatchdogError};
use godwit_qemu::CpuFeatures;
use godwit_types::RateLimit;
use serde::Serialize;

use crate::args::HostCommand;
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, Tone, fields, log_to_stderr, table};
use crate::units::byte_count;

/// Runs the agent in the foreground.
pub(crate) async fn run(config: &Path) -> Result<Exit, Failure> {
    let config = logged(config)?;
    match godwit_host::run(config).await {
        Ok(()) => Ok(Exit::Ok),
        Err(RunError::State(error)) => Err(error.into()),
        Err(error @ RunError::SocketInUse { .. }) => {
            Err(Failure::new(Exit::Conflict, error.to_string(), error.remedy()))
        }
        Err(error) => Err(Failure::new(Exit::Failure, error.to_string(), error.remedy())),
    }
}

/// Runs the watchdog in the foreground.
pub(crate) fn watch(config: &Path) -> Result<Exit, Failure> {
    let config = logged(config)?;
    match godwit_host::run_watchdog(&config) {
        Ok(()) => Ok(Exit::Ok),
        Err(error) => {
            let exit = match error {
                WatchdogError::Runs { .. } => Exit::Conflict,
                _ => Exit::Failure,
            };
            Err(Failure::new(exit, error.to_string(), error.remedy()))
        }
    }
}

/// Reads the configuration of a program that logs.
fn logged(config: &Path) -> Result<Config, Failure> {
    log_to_stderr();
    Config::load_or_alone(config)
        .map_err(|error| Failure::new(Exit::Usage, error.to_string(), error.remedy()))
}

#[derive(Debug, Serialize)]
struct HostLine {
    name: String,
    api: String,
    reachable: bool,
    why: Option<String>,
    info: Option<HostInfo>,
}

pub(crate) async fn ask(
    command: HostCommand,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        HostCommand::List => list(hosts, only, output).await,
        HostCommand::Show { name } => show(hosts, name.as_deref().or(only), output).await,
        HostCommand::Ha { command: Some(command), .. } => ha::run(command, hosts, output).await,
        HostCommand::Ha { name, command: None } => {
            ha::show(hosts, name.as_deref().or(only), output).await
        }
        HostCommand::Load { name } => load::show(hosts, name.as_deref().or(only), output).await,
        HostCommand::Limit { limit: None, .. } => limits(hosts, only, output).await,
        HostCommand::Limit { limit: Some(limit), lane, each_migration } => {
            let of = match lane {
                Some(address) => LimitOf::Lane(address),
                None if each_migration => LimitOf::Migration,
                None => LimitOf::Host,
            };
            set_limit(hosts, only, (of, limit), output).await
        }
        // This sends no request: main has handled it.
        HostCommand::Run { .. }
        | HostCommand::Watchdog { .. }
        | HostCommand::Join(_)
        | HostCommand::Drain(_)
        | HostCommand::Drains { .. } => Ok(Exit::Ok),
    }
}

async fn list(hosts: &Hosts, only: Option<&str>, output: Output) -> Result<Exit, Failure> {
    let chosen = hosts.chosen(only)?;
    let answers = join_all(chosen.iter().map(|(_, client)| client.host())).await;
    let lines: Vec<HostLine> = chosen
        .iter()
        .zip(answers)
        .map(|(&(name, client), answer)| line(name, client.endpoint().to_string(), answer))
        .collect();
    let exit = if lines.iter().all(|line| line.reachable) { Exit::Ok } else { Exit::Unreachable };
    output.result(&lines, || {
        let rows: Vec<Vec<String>> = lines.iter().map(|line| row(line, output)).collect();
        table(&["host", "state", "vms", "memory left", "api"], &rows)
    })?;
    Ok(exit)
}

fn line(name: &str, api: String, answer: Result<HostInfo, ClientError>) -> HostLine {
    let (info, why) = match answer {
        Ok(info) => (Some(info), None),
        Err(error) => (None, Some(error.to_string())),
    };
    HostLine { name: name.to_owned(), api, reachable: info.is_some(), why, info }
}

fn row(line: &HostLine, output: Output) -> Vec<String> {
    let (vms, memory) = match &line.info {
        Some(info) => (info.vms.to_string(), byte_count(info.memory_available_bytes)),
        None => ("-".to_owned(), "-".to_owned()),
    };
    let state = match &line.info {
        Some(info) if info.qemu_problem.is_some() || info.tracking_problem.is_some() => {
            "limited".to_owned()
        }
        Some(_) => "up".to_owned(),
        None => "no answer".to_owned(),
    };
    // Colour codes would count as width. This is the only coloured column, so it is padded here.
    let tone = if state == "up" { Tone::Good } else { Tone::Bad };
    let state = output.paint(tone, &format!("{state:<9}"));
    vec![line.name.clone(), state, vms, memory, line.api.clone()]
}

/// Prints the limits of a host.
#[derive(Debug, Serialize)]
struct LimitedHost {
    host: String,
    #[serde(flatten)]
    limits: Limits,
}

async fn limits(hosts: &Hosts, only: Option<&str>, output: Output) -> Result<Exit, Failure> {
    let (answers, silent) = hosts.ask_all(only, output, Client::limits).await?;
    let all: Vec<LimitedHost> = answers
        .into_iter()
        .map(|(host, limits)| LimitedHost { host: host.to_owned(), limits })
        .collect();
    output.result(&all, || limit_table(&all))?;
    Ok(if silent.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

async fn set_limit(
    hosts: &Hosts,
    only: Option<&str>,
    (of, limit): (LimitOf, RateLimit),
    output: Output,
) -> Result<Exit, Failure> {
    let (host, client) = hosts.one(only)?;
    let limits = client.set_limit(of, limit).await?;
    let limited = LimitedHost { host: host.to_owned(), limits };
    output.result(&limited, || limit_table(std::slice::from_ref(&limited)))?;
    Ok(Exit::Ok)
}

fn limit_table(all: &[LimitedHost]) -> String {
    let rows = all.iter().flat_map(|LimitedHost { host, limits }| {
        let row = |what: String, limit: RateLimit| vec![host.clone(), what, limit.to_string()];
        let lanes = limits
            .lanes
            .iter()
            .map(move |(address, limit)| row(format!("lanes from {address}"), *limit));
        let others = [
            row("all migrations".to_owned(), limits.host),
            row("each migration".to_owned(), limits.migration),
        ];
        others.into_iter().chain(lanes)
    });
    table(&["host", "what", "limit"], &rows.collect::<Vec<_>>())
}

async fn show(hosts: &Hosts, name: Option<&str>, output: Output) -> Result<Exit, Failure> {
    let (answers, silent) = hosts.ask_all(name, output, Client::host).await?;
    let infos: Vec<HostInfo> = answers.into_iter().map(|(_, info)| info).collect();
    output.result(&infos, || infos.iter().map(describe).collect::<Vec<_>>().join("\n"))?;
    Ok(if silent.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

fn describe(info: &HostInfo) -> String {
    let list =
        |items: Vec<String>| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
    let qemu = match (&info.qemu, &info.qemu_version) {
        (Some(path), Some(version)) => format!("{version}, {}", path.display()),
        _ => info.qemu_problem.clone().unwrap_or_else(|| "unknown".to_owned()),
    };
    let kvm = match (info.kvm, &info.kvm_reason) {
        (Some(true), _) => "yes".to_owned(),
        (Some(false), Some(reason)) => format!("no: {reason}"),
        _ => "not probed yet".to_owned(),
    };
    fields(&[
        ("host", info.name.clone()),
        ("agent", info.version.clone()),
        ("kernel", info.kernel.clone()),
        ("qemu", qemu),
        ("kvm", kvm),
        ("processor", processor(info)),
        (
            "cpu of guests",
            info.cpu.as_ref().map_or_else(|| "not queried yet".to_owned(), guests_cpu),
        ),
        (
            "cpu models",
            info.cpu
                .as_ref()
                .map_or_else(|| "not queried yet".to_owned(), |cpu| list(best_models(cpu))),
        ),
        ("cpu features", list(info.cpu.iter().flat_map(|cpu| cpu.features.clone()).collect())),
        ("tracking", info.tracking_problem.clone().unwrap_or_else(|| "yes".to_owned())),
        ("memory left", memory_left(info)),
        ("memory committed", byte_count(info.memory_committed_bytes)),
        ("retained memory", kept(&info.references)),
        ("huge pages", if info.huge_pages { "yes" } else { "no" }.to_owned()),
        (
            "migration addresses",
            list(info.migration_addresses.iter().map(ToString::to_string).collect()),
        ),
        (
            "networks",
            list(
                info.networks
                    .iter()
                    .map(|(name, network)| format!("{name} ({})", network.bridge))
                    .collect(),
            ),
        ),
        ("peers", list(info.peers.keys().cloned().collect())),
        ("vms", info.vms.to_string()),
    ])
}

/// Formats the processor of the host and its load.
fn processor(info: &HostInfo) -> String {
    let name = match &info.cpu {
        Some(cpu) if !cpu.name.is_empty() => format!("{} ({}), ", cpu.name, cpu.vendor),
        _ => String::new(),
    };
    let cores = if info.logical_cores == 1 { "core" } else { "cores" };
    format!("{name}{} logical {cores}, load {:.2}", info.logical_cores, info.load_average_1min)
}

/// Formats the CPU that guests can rely on.
fn guests_cpu(cpu: &HostCpuInfo) -> String {
    let level = cpu.level.as_deref().unwrap_or("less than x86-64-v1");
    format!("{level} under {}, {} features", cpu.accel, cpu.features.len())
}

/// Lists the best model of each CPU generation, followed by the features that must be removed from
/// it.
fn best_models(cpu: &HostCpuInfo) -> Vec<String> {
    let without =
        |missing: &CpuFeatures| missing.iter().map(|name| format!(",-{name}")).collect::<String>();
    cpu.generations.iter().map(|(name, info)| format!("{name}{}", without(&info.missing))).collect()
}

fn memory_left(info: &HostInfo) -> String {
    let left = byte_count(info.memory_available_bytes);
    match info.memory_total_bytes {
        0 => left,
        total => format!("{left} of {}", byte_count(total)),
    }
}

/// Formats the retained memory of VMs that have left, which need not be sent when they return.
fn kept(references: &ReferencesInfo) -> String {
    let memory = byte_count(references.base_bytes);
    let kept = match references.bases {
        0 => return "none".to_owned(),
        1 => format!("1 VM's memory, {memory}"),
        vms => format!("{vms} VMs' memory, {memory}"),
    };
    match references.spilled_bytes {
        0 => kept,
        bytes => format!("{kept}, and {} on a disk", byte_count(bytes)),
    }
}
