//! Implements `godwit vm adopt`, and the guests of other programs in `vm list --all`: at a host
//! through its agent or, with `--manager`, through the manager.

use std::path::Path;
use std::time::Duration;

use godwit_api::{AdoptGuest, Adoption, AdoptionState, ErrorCode, ForeignGuest, ForeignPlace};
use godwit_types::Fault;

use crate::args::{AdoptArgs, ManagerPlace};
use crate::exit::{Exit, Failure};
use crate::output::{Output, fields, spinner, table};
use crate::target::{HostTarget, absolute};
use crate::units::byte_count;

/// Interval between two questions about the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(crate) async fn run(
    args: &AdoptArgs,
    place: &ManagerPlace,
    hosts_file: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let target = HostTarget::choose(place, hosts_file, only)?;
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
    let begun = target.adopt(&request).await?;
    let adoption = follow(&target, begun, output).await?;
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

    async fn show(&self, id: &str) -> Result<Adoption, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.adoption(id).await?,
            HostTarget::Manager(manager, host) => manager.adoption(host, id).await?,
        })
    }

    async fn cancel(&self, id: &str) -> Result<(), Failure> {
        match self {
            HostTarget::Agent(agent) => agent.cancel_adoption(id).await?,
            HostTarget::Manager(manager, host) => manager.cancel_adoption(host, id).await?,
        }
        Ok(())
    }
}

/// Follows an adoption to its end. Ctrl-C cancels it.
async fn follow(target: &HostTarget, begun: Adoption, output: Output) -> Result<Adoption, Failure> {
    let line = spinner().filter(|_| !output.is_json());
    let mut adoption = begun;
    let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
    let mut interrupted = false;
    while !adoption.state.is_over() {
        if let Some(line) = &line {
            line.set_message(progress(&adoption));
        }
        tokio::select! {
            _ = &mut interrupt, if !interrupted => {
                interrupted = true;
                output.note("cancelling: the guest runs on where it was");
                target.cancel(&adoption.id).await?;
            }
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        adoption = target.show(&adoption.id).await?;
    }
    if let Some(line) = line {
        line.finish_and_clear();
    }
    Ok(adoption)
}

fn progress(adoption: &Adoption) -> String {
    let done = adoption.total_bytes.saturating_sub(adoption.remaining_bytes);
    format!(
        "adopting {}: {}, {} of {}",
        adoption.from,
        adoption.phase,
        byte_count(done),
        byte_count(adoption.total_bytes)
    )
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
