//! Implements `godwit vm snapshot`.

use godwit_api::control::ManagerClient;
use godwit_api::{CreateSnapshot, RevertVm, SnapshotInfo};
use serde_json::json;

use super::asked::AskError;
use super::managed;
use super::print;
use crate::args::SnapshotCommand;
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, table};

pub(super) async fn at_host(
    command: &SnapshotCommand,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let client = hosts.find(command.vm(), only, output).await?.client;
    match command {
        SnapshotCommand::Create { vm, name } => {
            let request = CreateSnapshot { name: name.clone() };
            show_taken(vm, &client.create_snapshot(vm, &request).await?, output)?;
        }
        SnapshotCommand::List { vm } => list(&client.snapshots(vm).await?, output)?,
        SnapshotCommand::Revert { vm, name } => {
            let request = RevertVm { name: name.clone(), vm_dirs_only: false };
            print(&client.revert_to_snapshot(vm, &request).await?, output)?;
        }
        SnapshotCommand::Delete { vm, name } => {
            client.delete_snapshot(vm, name).await?;
            show_deleted(name, output)?;
        }
    }
    Ok(Exit::Ok)
}

pub(super) async fn at_manager(
    command: &SnapshotCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), AskError> {
    match command {
        SnapshotCommand::Create { vm, name } => {
            let request = CreateSnapshot { name: name.clone() };
            show_taken(vm, &manager.create_snapshot(vm, &request).await?, output)?;
        }
        SnapshotCommand::List { vm } => list(&manager.snapshots(vm).await?, output)?,
        SnapshotCommand::Revert { vm, name } => {
            managed::print(&manager.revert_to_snapshot(vm, name).await?, output)?;
        }
        SnapshotCommand::Delete { vm, name } => {
            manager.delete_snapshot(vm, name).await?;
            show_deleted(name, output)?;
        }
    }
    Ok(())
}

fn show_taken(vm: &str, taken: &SnapshotInfo, output: Output) -> Result<(), Failure> {
    output.result(taken, || format!("snapshot {} of VM {vm} has {}", taken.name, content(taken)))
}

fn show_deleted(name: &str, output: Output) -> Result<(), Failure> {
    output.result(&json!({ "deleted": name }), || format!("snapshot {name} is deleted"))
}

fn list(all: &Vec<SnapshotInfo>, output: Output) -> Result<(), Failure> {
    output.result(all, || {
        let row = |of: &SnapshotInfo| vec![of.name.clone(), age(of.created_unix_ms), content(of)];
        let rows: Vec<Vec<String>> = all.iter().map(row).collect();
        table(&["name", "age", "content"], &rows)
    })
}

fn content(of: &SnapshotInfo) -> String {
    let disks = if of.disks == 1 { "1 disk".to_owned() } else { format!("{} disks", of.disks) };
    if of.memory { format!("{disks} and memory") } else { disks }
}

/// Returns how long ago a snapshot was taken, in its largest unit.
fn age(created_unix_ms: u64) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_ms = u64::try_from(now.unwrap_or_default().as_millis()).unwrap_or(0);
    let seconds = now_ms.saturating_sub(created_unix_ms) / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}
