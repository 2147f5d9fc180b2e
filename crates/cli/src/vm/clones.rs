//! Implements `godwit vm clone`, and what `vm delete --delete-disks` asks and tells.

use std::io::{self, BufRead, IsTerminal, Write};

use godwit_api::control::{CloneManagedVm, HostedVm, ManagerClient};
use godwit_api::{CloneMode, CloneVm, VmImages, VmInfo};

use super::asked::AskError;
use super::managed;
use super::{print, refuse_second};
use crate::args::CloneArgs;
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::Output;

fn mode(args: &CloneArgs) -> Option<CloneMode> {
    match (args.linked, args.full) {
        (true, _) => Some(CloneMode::Linked),
        (_, true) => Some(CloneMode::Full),
        _ => None,
    }
}

/// Clones a VM at its host.
pub(super) async fn at_host(
    args: &CloneArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    args.refuse_labels()?;
    let found = hosts.find(&args.source, only, output).await?;
    let mut made: Vec<VmInfo> = Vec::new();
    for name in args.names() {
        refuse_second(&name, hosts, output).await?;
        let request = CloneVm {
            name,
            mode: mode(args),
            addresses: args.addresses.clone(),
            start: args.start,
            uuid: None,
            vm_dirs_only: false,
        };
        let clone = found.client.clone_vm(&args.source, &request).await?;
        match args.count {
            // With several, each is shown when it is there; JSON is one list.
            Some(_) if output.is_json() => made.push(clone),
            _ => drop(print(&clone, output)?),
        }
    }
    if args.count.is_some() && output.is_json() {
        output.result(&made, String::new)?;
    }
    Ok(Exit::Ok)
}

/// Clones a VM through the manager.
pub(super) async fn at_manager(
    args: &CloneArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), AskError> {
    let mut made: Vec<HostedVm> = Vec::new();
    for name in args.names() {
        let request = CloneManagedVm {
            name,
            mode: mode(args),
            addresses: args.addresses.clone(),
            labels: args.labels.iter().cloned().collect(),
            start: args.start,
        };
        let clone = manager.clone_vm(&args.source, &request).await?;
        match args.count {
            Some(_) if output.is_json() => made.push(clone),
            _ => managed::print(&clone, output)?,
        }
    }
    if args.count.is_some() && output.is_json() {
        output.result(&made, String::new)?;
    }
    Ok(())
}

/// Shows which images a deletion would delete, and asks. Without a terminal, nothing is deleted.
pub(super) fn confirm(vm: &str, images: &VmImages, output: Output) -> Result<(), Failure> {
    let mut text = format!("Delete VM {vm}");
    if images.deleted.is_empty() {
        text.push_str("? None of its images is its own.");
    } else {
        text.push_str(" and these images?");
    }
    for path in &images.deleted {
        text.push_str(&format!("\n  {}", path.display()));
    }
    for kept in &images.kept {
        text.push_str(&format!("\n  {} stays: {}", kept.path.display(), kept.why));
    }
    output.note(&text);
    if !io::stdin().is_terminal() {
        return Err(Failure::usage("nothing was deleted: this is not a terminal", "add --yes"));
    }
    let _ = write!(io::stderr().lock(), "Type \"yes\" to delete: ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim() {
        "yes" => Ok(()),
        _ => Err(Failure::usage("nothing was deleted", "type \"yes\", or add --yes")),
    }
}

/// Adds to a result what became of a VM's images.
pub(super) fn with_images(mut text: String, images: Option<&VmImages>) -> String {
    let Some(images) = images else { return text };
    for path in &images.deleted {
        text.push_str(&format!("\ndisk {} is deleted", path.display()));
    }
    for kept in &images.kept {
        text.push_str(&format!("\ndisk {} stays: {}", kept.path.display(), kept.why));
    }
    text
}
