//! Implements `godwit vm adopt`, and the guests of other programs in `vm list --all`: at a host
//! through its agent, or through the manager.

use godwit_api::control::ManagerClient;
use godwit_api::{
    AdoptGuest, Adoption, AdoptionState, ErrorCode, ForeignGuest, ForeignPlace, JobKind,
};
use godwit_types::Fault;

use super::asked::AskError;
use crate::args::AdoptArgs;
use crate::exit::{Exit, Failure};
use crate::follow::Follower;
use crate::hosts::Hosts;
use crate::output::{Output, fields, table};
use crate::target::{HostTarget, absolute};
use crate::units::byte_count;

/// Adopts a guest of a host, without a manager.
pub(super) async fn at_host(
    args: &AdoptArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let (_, client) = hosts.one(only)?;
    run(args, &HostTarget::Agent(client.clone()), output).await
}

/// Adopts a guest through the manager: of the host that is named, or of the one that has it.
pub(super) async fn at_manager(
    args: &AdoptArgs,
    manager: &ManagerClient,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, AskError> {
    let host = match only {
        Some(host) => host.to_owned(),
        None => host_with(args, manager, output).await?,
    };
    Ok(run(args, &HostTarget::Manager(manager.clone(), host), output).await?)
}

/// Finds the host whose libvirt runs the guest.
async fn host_with(
    args: &AdoptArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<String, AskError> {
    let Some(domain) = &args.libvirt else {
        return Err(Failure::usage("the host is missing", "name it with --host").into());
    };
    let from = ForeignPlace::Libvirt(domain.clone());
    let mut found = Vec::new();
    for host in manager.hosts().await? {
        match manager.foreign_guests(&host.name).await {
            Ok(guests) if guests.iter().any(|guest| guest.from == from) => found.push(host.name),
            Ok(_) => {}
            // An agent that is away, or of an older release, lists none.
            Err(error) => {
                let name = &host.name;
                output.note(&format!("note: cannot list the guests of host {name}: {error}"));
            }
        }
    }
    match &found[..] {
        [host] => Ok(host.clone()),
        [] => {
            let message = format!("cannot find {from} on any host that responds");
            let remedy = "list the guests with `godwit vm list --all`";
            Err(Failure::new(Exit::NotFound, message, remedy).into())
        }
        several => {
            let message = format!("cannot choose a host: {} have {from}", several.join(", "));
            Err(Failure::usage(message, "select one with --host").into())
        }
    }
}

async fn run(args: &AdoptArgs, target: &HostTarget, output: Output) -> Result<Exit, Failure> {
    let from = match (&args.libvirt, &args.qmp) {
        (Some(name), _) => ForeignPlace::Libvirt(name.clone()),
        (None, Some(socket)) => ForeignPlace::Qmp(absolute(socket)?.display().to_string()),
        (None, None) => return Err(Failure::usage("no guest is named", "add --libvirt or --qmp")),
    };
    let (name, to) = (args.name.clone(), args.to.clone());
    let request = AdoptGuest { from, name, undefine: args.undefine, to };
    if args.dry_run {
        let guest = target.check(&request).await?;
        output.result(&guest, || describe(&guest))?;
        return Ok(if guest.findings.is_empty() { Exit::Ok } else { Exit::Preflight });
    }
    let follower = Follower::new(JobKind::Adoption, output)?;
    let begun = target.adopt(&request).await?;
    let adoption = follower.wait_for(target, begun).await?;
    if let Some(error) = adoption.error.clone() {
        for finding in adoption.findings.iter().skip(1) {
            output.note(&format!("also: {finding}"));
        }
        let exit = match adoption.state {
            AdoptionState::Cancelled => Exit::Cancelled,
            _ => Exit::of_code(ErrorCode::from_name(&error.code)),
        };
        return Err(Failure { exit, fault: error });
    }
    output.result(&adoption, || outcome(&adoption))?;
    Ok(Exit::Ok)
}

impl HostTarget {
    async fn check(&self, request: &AdoptGuest) -> Result<ForeignGuest, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.check_adoption(request).await?,
            HostTarget::Manager(manager, host) => manager.check_adoption(host, request).await?,
        })
    }

    async fn adopt(&self, request: &AdoptGuest) -> Result<Adoption, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.adopt(request).await?,
            HostTarget::Manager(manager, host) => manager.adopt(host, request).await?,
        })
    }
}

fn outcome(adoption: &Adoption) -> String {
    let pause = adoption.pause_ms.map_or_else(String::new, |ms| format!(", paused for {ms:.0} ms"));
    let mut text =
        format!("VM {} was adopted in {:.1} s{pause}", adoption.vm, adoption.elapsed_ms / 1e3);
    for note in &adoption.notes {
        text.push_str(&format!("\n{note}"));
    }
    text
}

fn describe(guest: &ForeignGuest) -> String {
    let mut lines = vec![
        ("guest", guest.name.clone()),
        ("state", guest.state.clone()),
        ("memory", guest.memory_bytes.map_or_else(String::new, byte_count)),
        ("vcpus", guest.vcpus.map_or_else(String::new, |vcpus| vcpus.to_string())),
    ];
    if guest.findings.is_empty() {
        lines.push(("adoption", "nothing prevents it".to_owned()));
    }
    lines.extend(guest.findings.iter().map(|finding| ("finding", finding.to_string())));
    fields(&lines)
}

/// Returns the guests of several hosts, each with its host.
pub(super) fn by_host(
    answers: Vec<(impl ToString, Vec<ForeignGuest>)>,
) -> Vec<(String, ForeignGuest)> {
    let mut all = Vec::new();
    for (host, guests) in answers {
        let host = host.to_string();
        all.extend(guests.into_iter().map(|guest| (host.clone(), guest)));
    }
    all
}

/// Formats the guests that other programs run, each with its host.
pub(super) fn foreign_table(guests: &[(String, ForeignGuest)]) -> String {
    let why = |findings: &[Fault]| match findings {
        [] => "possible".to_owned(),
        [only] => only.message.clone(),
        [first, more @ ..] => format!("{} (and {} more)", first.message, more.len()),
    };
    let rows: Vec<Vec<String>> = guests
        .iter()
        .map(|(host, guest)| {
            vec![
                guest.name.clone(),
                host.clone(),
                guest.state.clone(),
                guest.memory_bytes.map_or_else(String::new, byte_count),
                guest.vcpus.map_or_else(String::new, |vcpus| vcpus.to_string()),
                why(&guest.findings),
            ]
        })
        .collect();
    table(&["libvirt guest", "host", "state", "memory", "vcpus", "adoption"], &rows)
}
