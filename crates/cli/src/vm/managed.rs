//! Implements `godwit vm` through the manager, if one is known and no host is named. The manager
//! knows where each VM is and chooses the host of a new one.

use std::path::Path;

use godwit_api::control::{
    ChangedVm, CreateManagedVm, HostedVm, ManagerClient, ManagerError, ProblemCode, StartManagedVm,
    StopManagedVm, VmSummary,
};
use godwit_api::{RenameVm, SetNicLink, SetTemplate};
use serde_json::json;

use super::asked::AskError;
use super::guest::{freeze_for, is_asked, nic_change, print_frozen, print_link, show};
use super::{
    adopt, clones, console, create, describe, drives, imports, screen, set, settings, snapshots,
};
use crate::args::{CreateArgs, DeleteArgs, ManagerPlace, NicCommand, VmCommand};
use crate::control::claimed;
use crate::exit::{Exit, Failure};
use crate::hosts::manager_of;
use crate::manager::client;
use crate::output::{Output, table};
use crate::units::byte_count;

/// Sends the command to the manager. `None` means that the hosts must be queried: no manager is
/// known, a host is named, or the manager in the hosts file is unreachable.
pub(crate) async fn run(
    command: &VmCommand,
    place: &ManagerPlace,
    hosts: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Option<Exit>, Failure> {
    let is_named = place.is_named();
    // With a named manager, the host option selects the host of the new VM.
    let takes_host =
        matches!(command, VmCommand::Create(_) | VmCommand::Import(_) | VmCommand::Adopt(_));
    let of_host = only.is_some() && !(is_named && takes_host);
    // Errors in the hosts file are reported when the hosts are queried.
    let is_known = || is_named || manager_of(hosts).is_ok_and(|of_file| of_file.is_some());
    if of_host || !is_managed(command) || !is_known() {
        return Ok(None);
    }
    let result = match (client(place, hosts), command) {
        (Ok(manager), VmCommand::Adopt(args)) => {
            adopt::at_manager(args, &manager, only, output).await
        }
        (Ok(manager), _) => ask(command, &manager, only, output).await.map(|()| Exit::Ok),
        (Err(failure), _) => Err(AskError::Failed(failure)),
    };
    match result {
        Ok(exit) => Ok(Some(exit)),
        // Only the manager may change a VM that it manages: it knows of moves and of other hosts.
        Err(AskError::Refused(error)) if !is_named && is_unasked(&error) && reads_only(command) => {
            output.note(&format!("note: {}; asking the hosts instead", error.detail()));
            Ok(None)
        }
        Err(AskError::Refused(error)) if !is_named && is_unasked(&error) => {
            let mut failure = Failure::from(error);
            failure.fault.remedy.push_str("; or name the VM's host: --host HOST");
            Err(failure)
        }
        Err(AskError::Refused(error)) => Err(error.into()),
        Err(AskError::Failed(failure)) => Err(failure),
    }
}

fn is_managed(command: &VmCommand) -> bool {
    match command {
        VmCommand::Create(_)
        | VmCommand::Adopt(_)
        | VmCommand::List { .. }
        | VmCommand::Show { .. }
        | VmCommand::Start { .. }
        | VmCommand::Stop(_)
        | VmCommand::Restart(_)
        | VmCommand::Reset { .. }
        | VmCommand::Suspend { .. }
        | VmCommand::Rename { .. }
        | VmCommand::Freeze { .. }
        | VmCommand::Thaw { .. }
        | VmCommand::Nic(_)
        | VmCommand::Disk { .. }
        | VmCommand::Cdrom { .. }
        | VmCommand::Set(_)
        | VmCommand::Console { .. }
        | VmCommand::Screen(_)
        | VmCommand::Screenshot(_)
        | VmCommand::Clone(_)
        | VmCommand::Import(_)
        | VmCommand::Export(_)
        | VmCommand::Template { .. }
        | VmCommand::Snapshot { .. }
        | VmCommand::Delete(_) => true,
        VmCommand::Preflight(_) | VmCommand::Logs { .. } => false,
    }
}

/// Returns whether a command changes nothing, so that the hosts may answer it.
fn reads_only(command: &VmCommand) -> bool {
    use VmCommand as C;
    matches!(
        command,
        C::List { .. } | C::Show { .. } | C::Console { .. } | C::Screen(_) | C::Screenshot(_)
    )
}

/// Returns whether the manager has not accepted the request.
fn is_unasked(error: &ManagerError) -> bool {
    match error {
        ManagerError::Unreachable { .. } => true,
        ManagerError::Refused(problem) => problem.code == ProblemCode::Unauthenticated,
        ManagerError::Protocol { .. } => false,
    }
}

/// Shows the VMs, and the guests of other programs at the manager's hosts.
async fn list_with_foreign(
    vms: &[VmSummary],
    manager: &ManagerClient,
    output: Output,
    as_table: impl FnOnce() -> String,
) -> Result<(), AskError> {
    let mut answers = Vec::new();
    for host in manager.hosts().await? {
        // An agent that is away, or of an older release, has none.
        answers.extend(manager.foreign_guests(&host.name).await.ok().map(|all| (host.name, all)));
    }
    let foreign = adopt::by_host(answers);
    output.result(&json!({ "vms": vms, "foreign": foreign }), || {
        format!("{}{}", as_table(), adopt::foreign_table(&foreign))
    })?;
    Ok(())
}

async fn ask(
    command: &VmCommand,
    manager: &ManagerClient,
    only: Option<&str>,
    output: Output,
) -> Result<(), AskError> {
    match command {
        VmCommand::Create(options) => {
            let made = manager.create_vm(&request(options, only)?).await?;
            print(&made, output)?;
        }
        VmCommand::List { labels, tags, all } => list(labels, tags, *all, manager, output).await?,
        VmCommand::Show { name } => {
            let vm = manager.vm(name).await?;
            if !vm.summary.is_current {
                output.note(&format!(
                    "note: host {} is unreachable; this is its last report",
                    vm.summary.host
                ));
            }
            let guest = match is_asked(&vm.info) && vm.summary.is_current {
                true => manager.guest(name).await.ok(),
                false => None,
            };
            show(&vm.info, guest.as_ref(), output)?;
        }
        VmCommand::Start { name, skip_preflight } => {
            let request = StartManagedVm { skip_preflight: *skip_preflight };
            print(&manager.start_vm(name, request).await?, output)?;
        }
        VmCommand::Stop(stop) => {
            let request = StopManagedVm { force: stop.force, grace_ms: stop.grace_ms() };
            print(&manager.stop_vm(&stop.name, request).await?, output)?;
        }
        VmCommand::Restart(stop) => {
            let request = StopManagedVm { force: stop.force, grace_ms: stop.grace_ms() };
            print(&manager.restart_vm(&stop.name, request).await?, output)?;
        }
        VmCommand::Reset { name } => print(&manager.reset_vm(name).await?, output)?,
        VmCommand::Rename { name, new_name } => {
            let request = RenameVm { name: new_name.clone() };
            print(&manager.rename_vm(name, &request).await?, output)?;
        }
        VmCommand::Suspend { name } => print(&manager.suspend_vm(name).await?, output)?,
        VmCommand::Disk { .. }
        | VmCommand::Cdrom { .. }
        | VmCommand::Nic(_)
        | VmCommand::Freeze { .. }
        | VmCommand::Thaw { .. } => change_device(command, manager, output).await?,
        VmCommand::Set(options) => {
            let ChangedVm { vm, warning } =
                manager.change_vm(&options.name, &set::managed(options)?).await?;
            let vm = HostedVm { warning, ..HostedVm::from(vm.info) };
            output.result(&vm, || {
                let text = describe(&vm.info);
                format!("{}{}", text.trim_end(), warned(vm.warning.as_deref()))
            })?;
        }
        VmCommand::Clone(args) => clones::at_manager(args, manager, output).await?,
        VmCommand::Import(args) => {
            imports::import_at_manager(args, manager, only, output).await?;
        }
        VmCommand::Export(args) => imports::export_at_manager(args, manager, output).await?,
        VmCommand::Template { name, off } => {
            let request = SetTemplate { template: !off };
            print(&manager.set_template(name, request).await?, output)?;
        }
        VmCommand::Snapshot { command } => {
            snapshots::at_manager(command, manager, output).await?;
        }
        VmCommand::Delete(args) => delete(args, manager, output).await?,
        VmCommand::Screen(args) => {
            screen::show(args, screen::Way::Manager(manager), output).await?;
        }
        VmCommand::Screenshot(args) => {
            screen::picture(args, screen::Way::Manager(manager), output).await?;
        }
        VmCommand::Console { name, port } => {
            let line = manager.console(name, port.unwrap_or(1)).await?;
            console::open(console::Line::OfManager(Box::new(line)), name, output).await?;
        }
        // See `run`, and commands of the hosts themselves.
        VmCommand::Preflight(_) | VmCommand::Adopt(_) | VmCommand::Logs { .. } => {}
    }
    Ok(())
}

async fn list(
    labels: &[(String, String)],
    tags: &[String],
    all: bool,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), AskError> {
    let mut vms = manager.vms().await?;
    let has = |vm: &VmSummary, (key, value): &(String, String)| vm.labels.get(key) == Some(value);
    vms.retain(|vm| labels.iter().all(|label| has(vm, label)));
    vms.retain(|vm| settings::has_tags(&vm.tags, tags));
    let rows: Vec<_> = vms.iter().map(row).collect();
    let as_table = || table(&["name", "host", "state", "memory", "vcpus", "move", "tags"], &rows);
    match all {
        true => list_with_foreign(&vms, manager, output, as_table).await?,
        false => output.result(&vms, as_table)?,
    }
    Ok(())
}

async fn delete(
    args: &DeleteArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), AskError> {
    let DeleteArgs { name, force, delete_disks, yes } = args;
    if *delete_disks && !yes {
        clones::confirm(name, &manager.images_of_vm(name).await?, output)?;
    }
    let images = match delete_disks {
        true => Some(manager.delete_vm_with_disks(name, *force).await?),
        false => manager.delete_vm(name, *force).await.map(|()| None)?,
    };
    output.result(&json!({ "deleted": name, "images": images }), || {
        clones::with_images(format!("VM {name} is deleted"), images.as_ref())
    })?;
    Ok(())
}

/// Changes disks, CDs or links of a VM, or freezes its guest.
async fn change_device(
    command: &VmCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), AskError> {
    match command {
        VmCommand::Disk { command } => {
            let (name, change) = drives::of_disk(command)?;
            let vm = manager.change_drive(name, &change).await?.info;
            output.result(&vm, || describe(&vm))?;
        }
        VmCommand::Freeze { name, time } => {
            let vm = manager.freeze_vm(name, freeze_for(*time)).await?;
            print_frozen(&vm.info, output)?;
        }
        VmCommand::Nic(NicCommand::Link { name, nic, link }) => {
            let request = SetNicLink { nic: *nic, link: *link };
            print_link(&manager.set_link(name, request).await?.info, *nic, output)?;
        }
        VmCommand::Nic(command) => {
            if let Some((name, change)) = nic_change(command)? {
                let vm = manager.change_nic(name, &change).await?.info;
                output.result(&vm, || describe(&vm))?;
            }
        }
        VmCommand::Thaw { name } => {
            print_frozen(&manager.thaw_vm(name).await?.info, output)?;
        }
        VmCommand::Cdrom { command } => {
            let (name, change) = drives::of_cdrom(command)?;
            let vm = manager.change_drive(name, &change).await?.info;
            output.result(&vm, || describe(&vm))?;
        }
        _ => {}
    }
    Ok(())
}

fn request(options: &CreateArgs, host: Option<&str>) -> Result<CreateManagedVm, Failure> {
    let (spec, new_disks) = create::specification(options)?;
    Ok(CreateManagedVm {
        spec,
        new_disks,
        host: host.map(str::to_owned),
        labels: options.labels.iter().cloned().collect(),
        start: options.start,
    })
}

pub(super) fn print(vm: &HostedVm, output: Output) -> Result<(), Failure> {
    let HostedVm { info, host_reason, disk_reasons, warning } = vm;
    output.result(vm, || {
        let why = host_reason.as_ref().map(|why| match why.starts_with("best") {
            true => format!("\nthe host is the {why}"),
            false => format!("\nwarning: the host is {why}"),
        });
        let mut why = why.unwrap_or_default();
        for reason in disk_reasons {
            why = format!("{why}\nits new disk is in {reason}");
        }
        why.push_str(&warned(warning.as_deref()));
        match info.in_doubt {
            true => {
                format!(
                    "VM {} on host {} is still in doubt, and has no process there",
                    info.name, info.host
                )
            }
            false => format!("VM {} on host {} is {}{why}", info.name, info.host, info.state),
        }
    })
}

/// Returns the line of a warning of the admission control.
fn warned(warning: Option<&str>) -> String {
    warning.map_or_else(String::new, |warning| format!("\nwarning: {warning}"))
}

fn row(vm: &VmSummary) -> Vec<String> {
    let twice = vm.also_runs_at.join(", ");
    let state = match (vm.in_doubt, vm.is_current) {
        _ if !twice.is_empty() => format!("{}, ALSO AT {twice}", vm.state),
        _ if !vm.conflicts.is_empty() => format!("{}, {}", vm.state, claimed(vm)),
        (true, _) => format!("in doubt ({})", vm.state),
        (false, true) => vm.state.to_string(),
        (false, false) => format!("unknown (was {})", vm.state),
    };
    let on_way = vm.r#move.clone().unwrap_or_default();
    vec![
        vm.name.clone(),
        vm.host.clone(),
        state,
        byte_count(vm.memory_bytes),
        vm.vcpus.to_string(),
        on_way,
        settings::tags(&vm.tags),
    ]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// Returns whether a command line uses the manager, with a hosts file that names an unreachable
    /// one.
    fn goes(line: &str, file: &str) -> Result<Option<Exit>, Failure> {
        let dir = tempfile::tempdir().unwrap();
        let hosts = dir.path().join("hosts.toml");
        std::fs::write(&hosts, file.replace("DIR", &dir.path().display().to_string())).unwrap();
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Vm { place, command, .. } = &cli.command else { panic!("{line}") };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(run(command, place, Some(&hosts), cli.host.as_deref(), Output::new(true)))
    }

    #[test]
    fn a_warning_has_a_line_of_its_own() {
        assert_eq!(warned(None), "");
        assert_eq!(warned(Some("if a fails")), "\nwarning: if a fails");
    }

    const HOST: &str = "[hosts.a]\napi = \"unix:DIR/a.sock\"\n";
    const MANAGER: &str = "[manager]\napi = \"unix:DIR/control.sock\"\n";

    #[test]
    fn who_is_asked_depends_on_what_is_named() {
        let both = format!("{HOST}{MANAGER}");
        // The hosts are queried if no manager is known, a host is named, or the command is for
        // hosts, and if the manager in the file is unreachable.
        for (line, file) in [
            ("godwit vm list", HOST),
            ("godwit vm list --host a", &both),
            ("godwit vm create web --kernel /k --host a", &both),
            ("godwit vm logs web", &both),
            ("godwit vm adopt --libvirt web --host a", &both),
            ("godwit vm list", &both),
            ("godwit vm console web --port 2", &both),
        ] {
            assert_eq!(goes(line, file).unwrap(), None, "{line}");
        }
        // A manager named explicitly has no fallback, and what changes something has none either.
        for line in [
            "godwit vm list --manager unix:/nonexistent/control.sock",
            "godwit vm --manager unix:/nonexistent/control.sock stop web",
            "godwit vm create web --kernel /k --host a --manager unix:/nonexistent/control.sock",
            "godwit vm adopt --libvirt web",
        ] {
            assert_eq!(goes(line, &both).unwrap_err().exit, Exit::Unreachable, "{line}");
        }
        assert_eq!(goes("godwit vm create web", &both).unwrap_err().exit, Exit::Usage);
    }
}
