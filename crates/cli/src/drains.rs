//! Drains through the manager: `godwit host drain`, `godwit host drains`.

use std::path::Path;

use godwit_api::control::{
    CreateDrain, Drain, DrainState, DrainVm, DrainVmState, ManagerClient, Move,
};

use crate::args::DrainArgs;
use crate::exit::{Exit, Failure};
use crate::manager::client;
use crate::moves::move_exit;
use crate::output::{Output, spinner, table};
use crate::waiting::{Reply, Waiting};

pub(crate) async fn run(
    args: DrainArgs,
    hosts: Option<&Path>,
    output: Output,
) -> Result<Exit, Failure> {
    let manager = client(&args.place, hosts)?;
    let mut waiting = Waiting::begin(output)?;
    let begun = match waiting.ask(begin(&args, &manager)).await? {
        Reply::Answer(begun) => begun,
        Reply::Interrupted => {
            output.note(
                "it is unknown whether the manager has accepted the request (see `godwit host \
                 drains`)",
            );
            return Ok(Exit::Interrupted);
        }
    };
    if args.plan || args.detach || args.cancel {
        output.result(&begun, || drain_text(&begun))?;
        return Ok(Exit::Ok);
    }
    let (over, was_interrupted) = follow(&manager, begun, &mut waiting).await?;
    output.result(&over, || drain_text(&over))?;
    if was_interrupted {
        let host = &over.host;
        output.note(&format!(
            "the drain continues (cancel it with `godwit host drain {host} --cancel`)"
        ));
        return Ok(Exit::Interrupted);
    }
    let wanted = if args.undo { DrainState::Undone } else { DrainState::Done };
    let failed = failed_moves(&manager, &over, &mut waiting).await;
    Ok(drain_exit(&over, wanted, &failed))
}

/// Sends the first request to the manager.
async fn begin(args: &DrainArgs, manager: &ManagerClient) -> Result<Drain, Failure> {
    let host = &args.of;
    if args.cancel {
        let drains = manager.drains().await?;
        return Ok(manager.cancel_drain(&to_cancel(&drains, host)?.id).await?);
    }
    if args.undo {
        let drains = manager.drains().await?;
        let drain = to_undo(&drains, host)?;
        // A repeated undo only follows the drain.
        let is_asked = drain.state == DrainState::Undoing;
        return Ok(if is_asked { drain.clone() } else { manager.undo_drain(&drain.id).await? });
    }
    let request = CreateDrain {
        plan_only: args.plan,
        priority: args.priority,
        engine: args.engine,
        disks: args.disks.request(),
        ..CreateDrain::default()
    };
    Ok(manager.create_drain(host, &request).await?)
}

/// Returns the running drain of a host; there is at most one.
fn open<'a>(drains: &'a [Drain], host: &str) -> Option<&'a Drain> {
    drains.iter().find(|drain| drain.host == host && !is_over(drain))
}

/// Returns the most recent drain of a host.
fn last<'a>(drains: &'a [Drain], host: &str) -> Result<&'a Drain, Failure> {
    let of_host = drains.iter().filter(|drain| drain.host == host);
    of_host.max_by_key(|drain| drain.asked_unix_ms).ok_or_else(|| {
        let message = format!("cannot find a drain of host {host}");
        Failure::new(Exit::NotFound, message, "list the drains with `godwit host drains`")
    })
}

fn to_cancel<'a>(drains: &'a [Drain], host: &str) -> Result<&'a Drain, Failure> {
    if let Some(drain) = open(drains, host) {
        return Ok(drain);
    }
    let Drain { id, state, .. } = last(drains, host)?;
    let message = format!(
        "cannot cancel a drain of host {host}: none is running; the last one, {id}, is {}",
        drain_state(*state)
    );
    let remedy = format!("to move its VMs back, run `godwit host drain {host} --undo`");
    Err(Failure::new(Exit::Conflict, message, remedy))
}

fn to_undo<'a>(drains: &'a [Drain], host: &str) -> Result<&'a Drain, Failure> {
    if let Some(drain) = open(drains, host) {
        return Ok(drain);
    }
    // A later drain that moved nothing has nothing to return.
    let moved = |drain: &&Drain| drain.host == host && count(drain, DrainVmState::Gone) > 0;
    let newest = drains.iter().filter(moved).max_by_key(|drain| drain.asked_unix_ms);
    newest.map_or_else(|| last(drains, host), Ok)
}

/// Follows a drain until it ends or until Ctrl-C. In the latter case the drain continues, and the
/// second value is true.
async fn follow(
    manager: &ManagerClient,
    begun: Drain,
    waiting: &mut Waiting,
) -> Result<(Drain, bool), Failure> {
    let bar = spinner();
    let mut now = begun;
    while !is_over(&now) {
        if let Some(bar) = &bar {
            bar.set_message(headline(&now));
            bar.tick();
        }
        let poll = || manager.drain(&now.id);
        match waiting
            .poll(poll, &format!("the drain of host {}", now.host), "godwit host drains")
            .await?
        {
            Reply::Answer(latest) => now = latest,
            Reply::Interrupted => return Ok((now, true)),
        }
    }
    Ok((now, false))
}

/// Returns the available moves of the VMs that are not where the drain was to move them.
async fn failed_moves(manager: &ManagerClient, drain: &Drain, waiting: &mut Waiting) -> Vec<Move> {
    let mut found = Vec::new();
    let is_there = |state| matches!(state, DrainVmState::Gone | DrainVmState::Back);
    for id in drain.vms.iter().filter(|vm| !is_there(vm.state)).filter_map(|vm| vm.r#move.as_ref())
    {
        match waiting.ask(manager.find_move(id)).await {
            Ok(Reply::Answer(one)) => found.push(one),
            Ok(Reply::Interrupted) => break,
            // The manager deletes moves earlier than drains.
            Err(_) => {}
        }
    }
    found
}

/// Returns 0 if every VM has reached its target.
fn drain_exit(over: &Drain, wanted: DrainState, failed: &[Move]) -> Exit {
    if failed.iter().any(|one| move_exit(one) == Exit::InDoubt) {
        return Exit::InDoubt;
    }
    if over.state != wanted {
        return Exit::Cancelled;
    }
    let is_there = |state| match wanted {
        // VMs that never left are at their target as well.
        DrainState::Undone => matches!(state, DrainVmState::Back | DrainVmState::Stays),
        _ => state == DrainVmState::Gone,
    };
    if over.vms.iter().all(|vm| is_there(vm.state)) { Exit::Ok } else { Exit::Failure }
}

pub(crate) async fn list(manager: &ManagerClient, output: Output) -> Result<Exit, Failure> {
    let drains = manager.drains().await?;
    let row = |drain: &Drain| {
        let gone = count(drain, DrainVmState::Gone);
        let stays = count(drain, DrainVmState::Stays);
        vec![
            drain.id.clone(),
            drain.host.clone(),
            outcome(drain).to_owned(),
            format!("{gone} of {}", drain.vms.len()),
            stays.to_string(),
            drain.asked_by.clone(),
        ]
    };
    let rows: Vec<_> = drains.iter().map(row).collect();
    output.result(&drains, || {
        table(&["id", "host", "state", "moved", "stay", "requested by"], &rows)
    })?;
    Ok(Exit::Ok)
}

fn is_over(drain: &Drain) -> bool {
    matches!(
        drain.state,
        DrainState::Done | DrainState::Cancelled | DrainState::Undone | DrainState::Planned
    )
}

fn count(drain: &Drain, state: DrainVmState) -> usize {
    drain.vms.iter().filter(|vm| vm.state == state).count()
}

pub(crate) fn drain_state(of: DrainState) -> &'static str {
    match of {
        DrainState::Planned => "planned",
        DrainState::Running => "running",
        DrainState::Done => "done",
        DrainState::Cancelled => "cancelled",
        DrainState::Undoing => "undoing",
        DrainState::Undone => "undone",
    }
}

/// Formats the state of a drain, and whether a finished drain has left VMs on its host.
fn outcome(drain: &Drain) -> &'static str {
    let is_left = drain.state == DrainState::Done && count(drain, DrainVmState::Stays) > 0;
    if is_left { "not empty" } else { drain_state(drain.state) }
}

fn vm_state(of: DrainVmState) -> &'static str {
    match of {
        DrainVmState::Going => "moving",
        DrainVmState::Gone => "moved",
        DrainVmState::Stays => "stays",
        DrainVmState::Back => "moved back",
    }
}

/// Formats the state of a drain that was only planned.
fn planned_state(of: DrainVmState) -> &'static str {
    if of == DrainVmState::Going { "will move" } else { vm_state(of) }
}

/// Formats the progress and the predicted end.
fn headline(drain: &Drain) -> String {
    let (gone, back) = (count(drain, DrainVmState::Gone), count(drain, DrainVmState::Back));
    let stays = count(drain, DrainVmState::Stays);
    let mut text =
        format!("host {}: {}, {gone} of {} moved", drain.host, outcome(drain), drain.vms.len());
    if back > 0 {
        text += &format!(", {back} moved back");
    }
    if stays > 0 {
        text += &format!(", {stays} stay");
    }
    let from =
        if drain.state == DrainState::Planned { Some(drain.asked_unix_ms) } else { now_unix_ms() };
    if let (Some(eta), Some(from)) = (drain.eta_unix_ms, from) {
        text += &format!(", about {} s", eta.saturating_sub(from).div_ceil(1000));
    }
    text
}

fn now_unix_ms() -> Option<u64> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(now.as_millis()).ok()
}

fn drain_text(drain: &Drain) -> String {
    let is_plan = drain.state == DrainState::Planned;
    let word = if is_plan { planned_state } else { vm_state };
    let row = |vm: &DrainVm| {
        let host = at(vm, &drain.host).unwrap_or("-").to_owned();
        let after = vm
            .gone_unix_ms
            .filter(|_| matches!(vm.state, DrainVmState::Going | DrainVmState::Gone));
        let after =
            after.map_or_else(|| "-".to_owned(), |gone| seconds_after(drain.asked_unix_ms, gone));
        vec![vm.vm.clone(), word(vm.state).to_owned(), host, after, vm.reason.clone()]
    };
    let rows: Vec<_> = drain.vms.iter().map(row).collect();
    format!("{}\n{}", headline(drain), table(&["vm", "state", "host", "after", "reason"], &rows))
}

/// Formats the target of a VM, or its current host.
fn at<'a>(vm: &'a DrainVm, drained: &'a str) -> Option<&'a str> {
    match vm.state {
        DrainVmState::Going | DrainVmState::Gone => vm.to.as_deref(),
        DrainVmState::Stays | DrainVmState::Back => Some(drained),
    }
}

/// Formats the actual or predicted time since the request of the drain.
fn seconds_after(asked_unix_ms: u64, gone_unix_ms: u64) -> String {
    format!("{} s", gone_unix_ms.saturating_sub(asked_unix_ms).div_ceil(1000))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn drain(id: &str, state: &str, asked_unix_ms: u64, vms: &[&str]) -> Drain {
        let vms: Vec<_> =
            vms.iter().map(|state| json!({ "vm": "web", "state": state, "reason": "" })).collect();
        let drain = json!({
            "id": id, "host": "a", "state": state, "asked_by": "root",
            "asked_unix_ms": asked_unix_ms, "vms": vms
        });
        from_value(drain).unwrap()
    }

    #[test]
    fn the_drain_under_way_is_meant_and_else_the_last() {
        // Within one second, the order of IDs has no meaning.
        let drains = [drain("d1-0", "running", 1_002, &[]), drain("d1-f", "cancelled", 1_001, &[])];
        assert_eq!(to_cancel(&drains, "a").unwrap().id, "d1-0");
        assert_eq!(to_undo(&drains, "a").unwrap().id, "d1-0");
        let empty_again =
            [drain("d1-0", "done", 1_002, &[]), drain("d1-f", "done", 1_001, &["gone"])];
        assert_eq!(to_undo(&empty_again, "a").unwrap().id, "d1-f");
        let over = [drain("d1-0", "done", 1_002, &[]), drain("d1-f", "cancelled", 1_001, &[])];
        assert_eq!(to_undo(&over, "a").unwrap().id, "d1-0");
        let failure = to_cancel(&over, "a").unwrap_err();
        assert!(
            failure.exit == Exit::Conflict && failure.fault.message.contains("d1-0, is done"),
            "{failure}"
        );
        assert_eq!(to_cancel(&over, "b").unwrap_err().exit, Exit::NotFound);
        assert_eq!(to_undo(&[], "a").unwrap_err().exit, Exit::NotFound);
    }

    #[test]
    fn a_host_that_is_left_with_vms_is_not_called_done() {
        assert_eq!(outcome(&drain("d", "done", 1, &["gone", "stays"])), "not empty");
        assert_eq!(outcome(&drain("d", "done", 1, &["gone"])), "done");
        assert_eq!(outcome(&drain("d", "running", 1, &["stays"])), "running");
    }

    #[test]
    fn it_ends_well_where_each_vm_is_where_it_was_to_be() {
        for (state, wanted, vms, exit) in [
            ("done", DrainState::Done, &["gone", "gone"][..], Exit::Ok),
            ("done", DrainState::Done, &["gone", "stays"], Exit::Failure),
            ("cancelled", DrainState::Done, &["gone", "stays"], Exit::Cancelled),
            ("undone", DrainState::Done, &["back"], Exit::Cancelled),
            ("undone", DrainState::Undone, &["back", "stays"], Exit::Ok),
            ("undone", DrainState::Undone, &["back", "gone"], Exit::Failure),
            ("cancelled", DrainState::Undone, &["gone"], Exit::Cancelled),
        ] {
            assert_eq!(
                drain_exit(&drain("d", state, 1, vms), wanted, &[]),
                exit,
                "{state} {vms:?}"
            );
        }
        let in_doubt = json!({
            "id": "v", "vm": "web", "from": "a", "state": "failed", "priority": "normal",
            "asked_by": "root", "asked_unix_ms": 1,
            "attempts": 1, "failure": { "code": "in-doubt", "message": "", "remedy": "" }
        });
        let over = drain("d", "done", 1, &["stays"]);
        assert_eq!(
            drain_exit(&over, DrainState::Done, &[from_value(in_doubt).unwrap()]),
            Exit::InDoubt
        );
    }
}
