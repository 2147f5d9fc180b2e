//! Implements `godwit vm import` and `godwit vm export`: jobs of a host's agent.

mod plan;

use std::io::Read;
use std::path::Path;

use godwit_api::control::ManagerClient;
use godwit_api::{
    ExportFormat, ExportVm, ImportFinding, ImportFrom, ImportVm, JobKind, JobStatus, WarmImport,
    WarmStep,
};

use crate::args::{ExportArgs, ImportArgs};
use crate::exit::{Exit, Failure};
use crate::follow::Follower;
use crate::hosts::Hosts;
use crate::output::Output;
use crate::target::{HostTarget, absolute};
use crate::units::byte_count;

/// Longest text that is sent.
const MOST_TEXT_BYTES: u64 = 1 << 20;
impl HostTarget {
    async fn import(&self, request: &ImportVm) -> Result<JobStatus, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.import_vm(request).await?,
            HostTarget::Manager(manager, host) => manager.import_vm(host, request).await?,
        })
    }
}

/// Who begins imports: the agents of hosts, or the manager; and the host that is named.
#[derive(Clone, Copy)]
enum Target<'a> {
    Hosts(&'a Hosts, Option<&'a str>),
    Manager(&'a ManagerClient, Option<&'a str>),
}

impl<'a> Target<'a> {
    /// Returns the name of a host, and where its requests go. Default: the host that is named.
    fn of_host(self, host: Option<&'a str>) -> Result<(String, HostTarget), Failure> {
        match self {
            Target::Hosts(hosts, only) => {
                let (host, client) = hosts.one(host.or(only))?;
                Ok((host.to_owned(), HostTarget::Agent(client.clone())))
            }
            Target::Manager(manager, only) => match host.or(only) {
                Some(host) => {
                    let target = HostTarget::Manager(manager.clone(), host.to_owned());
                    Ok((host.to_owned(), target))
                }
                None => Err(Failure::usage("the host is missing", "name it with --host")),
            },
        }
    }
}

/// Imports a VM at a host.
pub(super) async fn import(
    args: &ImportArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    if let Some(file) = &args.plan {
        return plan::run(args, file, Target::Hosts(hosts, only), output).await;
    }
    let (_, client) = hosts.one(only)?;
    import_one(args, &HostTarget::Agent(client.clone()), output).await
}

async fn import_one(
    args: &ImportArgs,
    target: &HostTarget,
    output: Output,
) -> Result<Exit, Failure> {
    let request = import_request(args)?;
    let follower = Follower::new(import_kind(args), output)?;
    let job = target.import(&request).await?;
    let job = follower.wait_for(target, job).await?;
    finish(&job, output, || import_text(&job, args.dry_run))
}

/// Exports a VM at its host.
pub(super) async fn export(
    args: &ExportArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let found = hosts.find(&args.name, only, output).await?;
    let request = export_request(args)?;
    let follower = Follower::new(export_kind(args), output)?;
    let job = found.client.export_vm(&args.name, &request).await?;
    let job = follower.wait_for(&HostTarget::Agent(found.client.clone()), job).await?;
    finish(&job, output, || export_text(&job, args))
}

fn export_request(args: &ExportArgs) -> Result<ExportVm, Failure> {
    Ok(ExportVm {
        to: args.to.as_deref().map(absolute).transpose()?.unwrap_or_default(),
        format: args.format.map_or(ExportFormat::Libvirt, ExportFormat::from),
        live: args.live,
    })
}

/// Returns the kind of an import's job.
fn import_kind(args: &ImportArgs) -> JobKind {
    match args.warm.is_empty() {
        _ if args.dry_run => JobKind::ImportCheck,
        true => JobKind::Import,
        false => JobKind::WarmImport,
    }
}

fn export_kind(args: &ExportArgs) -> JobKind {
    if args.live { JobKind::LiveExport } else { JobKind::Export }
}

fn import_request(args: &ImportArgs) -> Result<ImportVm, Failure> {
    Ok(ImportVm {
        from: source(args)?,
        name: args.name.clone(),
        networks: args.networks.iter().cloned().collect(),
        disks_in: args.disks_in.as_deref().map(absolute).transpose()?,
        take_disks: args.take_disks,
        warm: warm(args)?,
        datastore: args.datastore.clone(),
        dry_run: args.dry_run,
        start: args.start,
        vm_dirs_only: false,
    })
}

/// Returns the pass that is requested, with the paths of files on the host made absolute.
fn warm(args: &ImportArgs) -> Result<Option<WarmImport>, Failure> {
    if args.warm.is_empty() {
        return match args.again || args.cut_over {
            true => Err(Failure::usage("there is no disk to copy again", "name it with --warm")),
            false => Ok(None),
        };
    }
    let source = |source: &String| match source.contains("://") {
        true => Ok(source.clone()),
        false => on_host(Path::new(source)),
    };
    let step = match (args.again, args.cut_over) {
        (true, _) => WarmStep::Again,
        (_, true) => WarmStep::CutOver,
        _ => WarmStep::Copy,
    };
    let sources = args.warm.iter().map(source).collect::<Result<_, _>>()?;
    Ok(Some(WarmImport { sources, step }))
}

/// Imports a VM through the manager, at the host that is named.
pub(super) async fn import_at_manager(
    args: &ImportArgs,
    manager: &ManagerClient,
    only: Option<&str>,
    output: Output,
) -> Result<(), Failure> {
    let target = Target::Manager(manager, only);
    if let Some(file) = &args.plan {
        return match plan::run(args, file, target, output).await? {
            Exit::Ok => Ok(()),
            exit => {
                let message = "not every VM of the plan was imported";
                Err(Failure::new(exit, message, "see the report, then run a plan of the rest"))
            }
        };
    }
    let (_, target) = target.of_host(None)?;
    import_one(args, &target, output).await?;
    Ok(())
}

/// Exports a VM through the manager.
pub(super) async fn export_at_manager(
    args: &ExportArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    let host = manager.vm(&args.name).await?.summary.host;
    let request = export_request(args)?;
    let follower = Follower::new(export_kind(args), output)?;
    let job = manager.export_vm(&args.name, &request).await?;
    let job = follower.wait_for(&HostTarget::Manager(manager.clone(), host), job).await?;
    finish(&job, output, || export_text(&job, args))?;
    Ok(())
}

fn export_text(job: &JobStatus, args: &ExportArgs) -> String {
    if args.live {
        let line = |found: &ImportFinding| format!("{}: {}\n", found.what, found.why);
        return job.findings.iter().map(line).collect();
    }
    let mut text = findings(&job.findings);
    for file in &job.files {
        text.push_str(&format!("wrote {}\n", file.display()));
    }
    text
}

/// Decides what of the named file goes to the host: the text, or the path. An OVF descriptor has
/// its disks beside it, so it is read on the host, too.
fn source(args: &ImportArgs) -> Result<ImportFrom, Failure> {
    let Some(path) = &args.file else {
        return Ok(ImportFrom::Libvirt(args.libvirt.clone().unwrap_or_default()));
    };
    let Ok(file) = std::fs::File::open(path) else {
        return Ok(ImportFrom::File(on_host(path)?));
    };
    let mut bytes = Vec::new();
    file.take(MOST_TEXT_BYTES + 1).read_to_end(&mut bytes)?;
    let is_archive = bytes.get(257..262) == Some(b"ustar");
    if is_archive {
        return Ok(ImportFrom::File(on_host(path)?));
    }
    let text = String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= MOST_TEXT_BYTES);
    let text = text.ok_or_else(|| {
        let message = format!("cannot import {}: not a VM definition", path.display());
        Failure::usage(message, "give a libvirt domain, a Proxmox VE configuration, an OVF or OVA")
    })?;
    let is_ovf = text.contains("<Envelope") || text.contains(":Envelope");
    match is_ovf && args.disks_in.is_none() {
        true => Ok(ImportFrom::File(on_host(path)?)),
        false => Ok(ImportFrom::Text(text)),
    }
}

/// Returns the path of a file on the host.
fn on_host(path: &Path) -> Result<String, Failure> {
    Ok(absolute(path)?.display().to_string())
}

pub(crate) fn finish(
    job: &JobStatus,
    output: Output,
    text: impl FnOnce() -> String,
) -> Result<Exit, Failure> {
    match &job.error {
        Some(error) => {
            if !output.is_json() && !job.findings.is_empty() {
                output.note(findings(&job.findings).trim_end());
            }
            Err(error.clone().into())
        }
        None => {
            output.result(job, text)?;
            Ok(Exit::Ok)
        }
    }
}

fn findings(all: &[ImportFinding]) -> String {
    let line = |found: &ImportFinding| {
        let kind = if found.refuses { "refused" } else { "changes" };
        format!("{kind}  {}: {}\n", found.what, found.why)
    };
    all.iter().map(line).collect()
}

fn import_text(job: &JobStatus, dry_run: bool) -> String {
    let mut text = findings(&job.findings);
    if let Some(plan) = job.plan.as_ref().filter(|_| dry_run) {
        for disk in &plan.disks {
            let from = disk
                .source
                .as_ref()
                .map_or("empty".to_owned(), |path| format!("{} ({})", path.display(), disk.format));
            text.push_str(&format!("disk {}: {}, {from}\n", disk.name, byte_count(disk.bytes)));
        }
        text.push_str(&format!("VM {} could be imported\n", plan.spec.name));
    }
    if job.written_bytes > 0 || job.plan.is_some() && job.vm.is_none() && !dry_run {
        let (read, written) = (byte_count(job.done_bytes), byte_count(job.written_bytes));
        text.push_str(&format!("read {read}, wrote {written} that differed\n"));
    }
    if let Some(vm) = &job.vm {
        text.push_str(&format!("VM {} on host {} is {}\n", vm.name, vm.host, vm.state));
    }
    text
}
