//! Drains of datastores: `godwit datastore drain`, `godwit datastore drains`.

use godwit_api::control::{
    CreateDatastoreDrain, DatastoreDrain, DrainDisk, DrainDiskState, DrainState, ManagerClient,
};

use crate::args::DrainDatastoreArgs;
use crate::exit::{Exit, Failure};
use crate::output::{Output, spinner, table};
use crate::units::byte_count;
use crate::waiting::{Reply, Waiting};

pub(super) async fn list(manager: &ManagerClient, output: Output) -> Result<Exit, Failure> {
    let drains = manager.datastore_drains().await?;
    output.result(&drains, || {
        let rows: Vec<_> = drains.iter().map(row).collect();
        table(&["drain", "datastore", "state", "disks", "by"], &rows)
    })?;
    Ok(Exit::Ok)
}

fn row(drain: &DatastoreDrain) -> Vec<String> {
    let is_there =
        |disk: &&DrainDisk| matches!(disk.state, DrainDiskState::Moved | DrainDiskState::Back);
    let moved = drain.disks.iter().filter(is_there).count();
    vec![
        drain.id.clone(),
        drain.name.clone(),
        godwit_api::json_name(&drain.state),
        format!("{moved} of {} moved", drain.disks.len()),
        drain.asked_by.clone(),
    ]
}

pub(super) async fn run(
    args: DrainDatastoreArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    let mut waiting = Waiting::begin(output)?;
    let begun = match waiting.ask(begin(&args, manager)).await? {
        Reply::Answer(begun) => begun,
        Reply::Interrupted => {
            output.note(
                "it is unknown whether the manager has accepted the request (see `godwit \
                 datastore drains`)",
            );
            return Ok(Exit::Interrupted);
        }
    };
    if args.dry_run || args.detach || args.cancel {
        output.result(&begun, || text(&begun))?;
        return Ok(Exit::Ok);
    }
    let (over, was_interrupted) = follow(manager, begun, &mut waiting).await?;
    output.result(&over, || text(&over))?;
    if was_interrupted {
        output.note("the drain continues (cancel it with `godwit datastore drain … --cancel`)");
        return Ok(Exit::Interrupted);
    }
    // After an undo, disks that never left stay.
    let (wanted, left) = match args.undo {
        true => (DrainState::Undone, DrainDiskState::Moved),
        false => (DrainState::Done, DrainDiskState::Stays),
    };
    Ok(match over.disks.iter().any(|disk| disk.state == left) {
        _ if over.state != wanted => Exit::Cancelled,
        true => Exit::Failure,
        false => Exit::Ok,
    })
}

async fn begin(
    args: &DrainDatastoreArgs,
    manager: &ManagerClient,
) -> Result<DatastoreDrain, Failure> {
    if args.cancel || args.undo {
        let id = manager.datastore(&args.datastore).await?.datastore.id;
        let drains = manager.datastore_drains().await?;
        let drain = last(&drains, &id, args)?;
        return Ok(match args.cancel {
            true => manager.cancel_datastore_drain(&drain.id).await?,
            // A repeated undo only follows the drain.
            false if drain.state == DrainState::Undoing => drain.clone(),
            false => manager.undo_datastore_drain(&drain.id).await?,
        });
    }
    let request = CreateDatastoreDrain {
        plan_only: args.dry_run,
        to: args.to.clone(),
        flatten: args.flatten,
        bandwidth_limit: args.bandwidth_limit,
    };
    Ok(manager.create_datastore_drain(&args.datastore, &request).await?)
}

/// Returns the newest drain of a datastore; to be undone, one that has moved a disk.
fn last<'a>(
    drains: &'a [DatastoreDrain],
    id: &str,
    args: &DrainDatastoreArgs,
) -> Result<&'a DatastoreDrain, Failure> {
    let has_moved = |one: &DatastoreDrain| {
        let state = |disk: &DrainDisk| disk.state == DrainDiskState::Moved;
        one.disks.iter().any(state) || matches!(one.state, DrainState::Running)
    };
    let is_it = |one: &&DatastoreDrain| one.datastore == id && (args.cancel || has_moved(one));
    let newest = drains.iter().filter(is_it).max_by_key(|one| one.asked_unix_ms);
    newest.ok_or_else(|| {
        let message = format!("cannot find a drain of datastore {}", args.datastore);
        Failure::new(Exit::NotFound, message, "list the drains with `godwit datastore drains`")
    })
}

async fn follow(
    manager: &ManagerClient,
    begun: DatastoreDrain,
    waiting: &mut Waiting,
) -> Result<(DatastoreDrain, bool), Failure> {
    let bar = spinner();
    let mut now = begun;
    while matches!(now.state, DrainState::Running | DrainState::Undoing) {
        if let Some(bar) = &bar {
            bar.set_message(headline(&now));
            bar.tick();
        }
        let poll = || manager.datastore_drain(&now.id);
        let what = format!("the drain of datastore {}", now.name);
        match waiting.poll(poll, &what, "godwit datastore drains").await? {
            Reply::Answer(latest) => now = latest,
            Reply::Interrupted => return Ok((now, true)),
        }
    }
    Ok((now, false))
}

fn headline(drain: &DatastoreDrain) -> String {
    let count = |state| drain.disks.iter().filter(|disk| disk.state == state).count();
    let done: u64 = drain.disks.iter().map(|disk| disk.done_bytes).sum();
    let moving = count(DrainDiskState::Moving);
    let left = count(DrainDiskState::Waiting);
    format!("{}: {moving} moving, {left} waiting, {} copied", drain.name, byte_count(done))
}

fn text(drain: &DatastoreDrain) -> String {
    let rows: Vec<_> = drain.disks.iter().map(disk_row).collect();
    let head = match drain.state {
        DrainState::Planned => format!("plan for datastore {}; nothing moves", drain.name),
        state => format!(
            "drain {} of datastore {} is {}",
            drain.id,
            drain.name,
            godwit_api::json_name(&state)
        ),
    };
    if rows.is_empty() {
        return format!("{head}\nno VM has a disk in it");
    }
    format!("{head}\n{}", table(&["vm", "host", "disk", "state", "to", "reason"], &rows))
}

fn disk_row(disk: &DrainDisk) -> Vec<String> {
    vec![
        disk.vm.clone(),
        disk.host.clone(),
        disk.path.clone(),
        godwit_api::json_name(&disk.state),
        disk.to.clone().unwrap_or_else(|| "-".to_owned()),
        disk.reason.clone(),
    ]
}
