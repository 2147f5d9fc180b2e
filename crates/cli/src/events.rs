//! Implements `godwit control events`: changes of the cluster, one per line.

use std::io::{self, Write};
use std::time::Duration;

use godwit_api::control::{
    Alarm, Change, ClusterEvent, Drain, DrainVmState, HostSummary, ManagerClient, ManagerError,
    ManagerEvent, Move, NameConflict, VmSummary,
};
use serde::Serialize;
use serde_json::json;

use crate::drains::drain_state;
use crate::exit::{Exit, Failure};
use crate::moves::{because, move_state};
use crate::output::Output;
use crate::units::byte_count;

/// Delay before the command reconnects.
const PAUSE: Duration = Duration::from_secs(1);

/// Prints events until Ctrl-C, or until nobody reads the output. Reconnects if the manager becomes
/// silent.
pub(crate) async fn follow(
    manager: &ManagerClient,
    behind: Option<u64>,
    output: Output,
) -> Result<Exit, Failure> {
    tokio::select! {
        result = print_events(manager, behind, output) => result,
        _ = tokio::signal::ctrl_c() => Ok(Exit::Ok),
    }
}

async fn print_events(
    manager: &ManagerClient,
    mut behind: Option<u64>,
    output: Output,
) -> Result<Exit, Failure> {
    let mut was_connected = false;
    loop {
        let why = match print_connection(manager, &mut behind, &mut was_connected, output).await {
            Ok(true) => return Ok(Exit::Ok),
            Ok(false) => "the manager has closed the connection".to_owned(),
            Err(Cut::Manager(error @ ManagerError::Unreachable { .. })) if was_connected => {
                error.detail()
            }
            Err(Cut::Manager(error)) => return Err(error.into()),
            Err(Cut::Failed(failure)) => return Err(failure),
        };
        output.note(&format!("note: {why}; reconnecting"));
        tokio::time::sleep(PAUSE).await;
    }
}

/// Reason why a stream of events ended.
pub(crate) enum Cut {
    Manager(ManagerError),
    Failed(Failure),
}

/// Prints the events of one connection until it ends. Returns true if nobody reads the output any
/// more.
async fn print_connection(
    manager: &ManagerClient,
    behind: &mut Option<u64>,
    was_connected: &mut bool,
    output: Output,
) -> Result<bool, Cut> {
    let mut events = manager.events(*behind).await.map_err(Cut::Manager)?;
    *was_connected = true;
    while let Some(event) = events.next().await.map_err(Cut::Manager)? {
        let goes_on = match &event {
            ManagerEvent::Change(change) => {
                *behind = Some(change.number);
                print(&**change, output, || line(change))
            }
            // The following events have new numbers.
            ManagerEvent::Missed => {
                *behind = None;
                let missed = json!({ "kind": "missed", "data": null });
                print(&missed, output, || {
                    "some changes were missed: query the current state".to_owned()
                })
            }
        };
        if !goes_on.map_err(Cut::Failed)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes a line. Returns false if nobody reads the output any more.
pub(crate) fn print(
    event: &impl Serialize,
    output: Output,
    text: impl FnOnce() -> String,
) -> Result<bool, Failure> {
    let line =
        if output.is_json() { serde_json::to_string(event).unwrap_or_default() } else { text() };
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

fn line(event: &ClusterEvent) -> String {
    let what = match &event.change {
        Change::Host(host) => host_text(host),
        Change::HostGone(name) => format!("host {name}: forgotten"),
        Change::Vm(vm) => vm_text(vm),
        Change::VmGone(name) => format!("vm {name}: removed"),
        Change::NameConflict(conflict) => conflict_text(conflict),
        Change::NameConflictGone(name) => {
            format!("vm {name}: no other host claims its name any more")
        }
        Change::Move(one) => move_text(one),
        Change::Drain(drain) => drain_text(drain),
        Change::Rule(rule) => {
            format!("rule {}: created, broken by {} VMs", rule.name, rule.broken_by_count)
        }
        Change::RuleGone(name) => format!("rule {name}: deleted"),
        Change::CpuBaseline(_) => "cpu baseline: set (godwit control cpu-baseline show)".to_owned(),
        Change::CpuBaselineGone => "cpu baseline: cleared".to_owned(),
        Change::Limits(_) => "limits: changed (godwit control limits show)".to_owned(),
        Change::Alarm(alarm) => alarm_text(alarm),
        Change::Journal(entry) => format!("journal: {}", entry.text),
    };
    format!("{} {what}", time_of_day(event.unix_ms))
}

/// Formats hours, minutes, seconds and milliseconds, UTC.
fn time_of_day(unix_ms: u64) -> String {
    let (seconds, ms) = (unix_ms / 1000, unix_ms % 1000);
    format!("{:02}:{:02}:{:02}.{ms:03}Z", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

fn host_text(host: &HostSummary) -> String {
    let HostSummary { name, state, vms, memory_available_bytes, moves_out, moves_in, .. } = host;
    let maintenance = if host.maintenance { ", in maintenance" } else { "" };
    let fault = host.fault.as_ref().map(|fault| format!(", FAULTY: {fault}")).unwrap_or_default();
    let why = host.reason.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let left = byte_count(*memory_available_bytes);
    format!(
        "host {name}: {}{why}{fault}{maintenance}, {vms} VMs, {left} left, {moves_out} moves out, \
         {moves_in} in",
        state.name()
    )
}

fn vm_text(vm: &VmSummary) -> String {
    let doubt = if vm.in_doubt { "in doubt, " } else { "" };
    let why = vm.reason.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let on_way = vm.r#move.as_ref().map(|id| format!(", move {id}")).unwrap_or_default();
    format!("vm {} on {}: {doubt}{}{why}{on_way}", vm.name, vm.host, vm.state)
}

fn alarm_text(alarm: &Alarm) -> String {
    let Alarm { id, object, severity, text, .. } = alarm;
    match (alarm.cleared_unix_ms, &alarm.acknowledged) {
        (Some(_), _) => format!("alarm {id} of {object}: cleared"),
        (None, Some(by)) => format!("alarm {id} of {object}: acknowledged by {}", by.by),
        (None, None) => format!("alarm {id} of {object}: {}: {text}", severity.name()),
    }
}

fn conflict_text(conflict: &NameConflict) -> String {
    let claims: Vec<&str> = conflict.claims.iter().map(|claim| claim.host.as_str()).collect();
    let (vm, holder) = (&conflict.vm, &conflict.holder.host);
    format!("vm {vm} on {holder}: claimed by {} too (godwit control conflicts)", claims.join(", "))
}

fn move_text(one: &Move) -> String {
    let to = one.to.as_deref().unwrap_or("a host not chosen yet");
    let why = because(one);
    let why = if why.is_empty() { why } else { format!(": {why}") };
    format!(
        "move {} of {} from {} to {to}: {}{why}",
        one.id,
        one.vm,
        one.from,
        move_state(one.state)
    )
}

fn drain_text(drain: &Drain) -> String {
    let gone = drain.vms.iter().filter(|vm| vm.state == DrainVmState::Gone).count();
    let state = drain_state(drain.state);
    format!(
        "drain {} of {}: {state}, {gone} of {} VMs moved",
        drain.id,
        drain.host,
        drain.vms.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_a_line() {
        let vm = json!({
            "number": 3, "unix_ms": 1_795_444_970_253_u64, "kind": "vm",
            "data": {
                "name": "web", "host": "a", "state": "running", "memory_bytes": 1, "vcpus": 1,
                "is_current": true, "move": "v1"
            }
        });
        let event: ClusterEvent = serde_json::from_value(vm).unwrap();
        assert_eq!(line(&event), "14:42:50.253Z vm web on a: running, move v1");
        let gone = ClusterEvent { number: 4, unix_ms: 0, change: Change::HostGone("a".into()) };
        assert_eq!(line(&gone), "00:00:00.000Z host a: forgotten");
    }
}
