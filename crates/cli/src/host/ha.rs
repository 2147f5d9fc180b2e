//! Implements `godwit host ha`: the guard of hosts, and the VMs that agents protect by themselves.

use godwit_api::{Client, HaHost, HeartbeatState, OwnStanding, OwnVm, json_name};
use serde::Serialize;

use crate::args::HostHaCommand;
use crate::exit::{Exit, Failure};
use crate::ha::ago;
use crate::hosts::Hosts;
use crate::output::{Output, fields, table};

/// Guard of a host as JSON.
#[derive(Debug, Serialize)]
struct GuardedHost {
    host: String,
    #[serde(flatten)]
    guard: HaHost,
}

pub(super) async fn show(
    hosts: &Hosts,
    name: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let (answers, silent) = hosts.ask_all(name, output, Client::ha).await?;
    let all: Vec<GuardedHost> = answers
        .into_iter()
        .map(|(host, guard)| GuardedHost { host: host.to_owned(), guard })
        .collect();
    output.result(&all, || all.iter().map(shown).collect::<Vec<_>>().join("\n"))?;
    Ok(if silent.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

pub(super) async fn run(
    command: HostHaCommand,
    hosts: &Hosts,
    output: Output,
) -> Result<Exit, Failure> {
    let HostHaCommand::ConfirmOff { host, vm, term } = command;
    let (host, client) = hosts.one(Some(&host))?;
    let guard = client.ha_confirm_own_off(&vm, term).await?;
    let guarded = GuardedHost { host: host.to_owned(), guard };
    output.result(&guarded, || {
        format!("term {term} of VM {vm} has ended: host {host} may start it\n\n{}", shown(&guarded))
    })?;
    Ok(Exit::Ok)
}

fn shown(GuardedHost { host, guard }: &GuardedHost) -> String {
    let term = match guard.term {
        0 => "none yet".to_owned(),
        term => format!("{term}, {}", json_name(&guard.standing)),
    };
    let mut rows = vec![("host", host.clone()), ("term", term)];
    let left = guard.lease_left_ms;
    rows.extend(left.map(|ms| ("lease left", format!("{}.{} s", ms / 1000, ms % 1000 / 100))));
    rows.extend(guard.answered_ms_ago.map(|ms| ("last answer", ago(ms))));
    let armed = if guard.watchdog { "armed" } else { "not armed" };
    rows.push(("watchdog", armed.to_owned()));
    let process = if guard.watchdog_process { "answers" } else { "does not answer" };
    rows.push(("watchdog process", process.to_owned()));
    rows.extend(guard.datastores.iter().map(|state| ("heartbeat", heartbeat(state))));
    let vms = if guard.vms.is_empty() { "none".to_owned() } else { guard.vms.join(", ") };
    rows.push(("protected vms", vms));
    if !guard.ending.is_empty() {
        rows.push(("protection ends", guard.ending.join(", ")));
    }
    rows.extend(guard.own_problems.iter().map(|why| ("problem", printable(why))));
    let mut text = fields(&rows);
    let doubtful = guard.own.iter().filter(|vm| vm.standing == OwnStanding::Doubtful);
    for OwnVm { vm, term, host: former, .. } in doubtful {
        let former =
            former.as_ref().map_or_else(String::new, |name| format!(" {}", printable(name)));
        text.push_str(&format!(
            "\nthe host{former} of VM {vm} does not respond. Make sure that it has no power, then \
             run:\n  godwit host ha confirm-off {host} {vm} --term {term}\n"
        ));
    }
    if !guard.own.is_empty() {
        let heads = ["vm of agents", "term", "standing", "holder", "datastore", "problem"];
        let rows: Vec<_> = guard.own.iter().map(own_row).collect();
        text = format!("{text}\n{}", table(&heads, &rows));
    }
    text
}

fn own_row(own: &OwnVm) -> Vec<String> {
    let holder = match (&own.host, own.holder) {
        (Some(name), _) => printable(name),
        (None, Some(id)) => id.to_string(),
        (None, None) => "-".to_owned(),
    };
    vec![
        own.vm.clone(),
        own.term.to_string(),
        json_name(&own.standing),
        holder,
        own.datastore.to_string(),
        own.problem.as_deref().map_or_else(|| "-".to_owned(), printable),
    ]
}

/// Returns a text of a host or of a file on shared storage, which may contain anything.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}

fn heartbeat(state: &HeartbeatState) -> String {
    let written = state.written_ms_ago.map_or_else(|| "never".to_owned(), ago);
    let why = state.problem.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    format!("datastore {}, written {written}{why}", state.datastore)
}

#[cfg(test)]
mod tests {
    use godwit_api::HaStanding;
    use godwit_qemu::Uuid;

    use super::*;

    #[test]
    fn a_guard_shows_its_term_lease_heartbeats_and_vms_of_agents() {
        let written =
            HeartbeatState { datastore: Uuid::nil(), written_ms_ago: Some(740), problem: None };
        let failed = HeartbeatState {
            datastore: Uuid::nil(),
            written_ms_ago: None,
            problem: Some("no such file".to_owned()),
        };
        let own = OwnVm {
            vm: "manager".to_owned(),
            uuid: Uuid::nil(),
            datastore: Uuid::nil(),
            term: 7,
            standing: OwnStanding::Doubtful,
            holder: None,
            host: Some("b\u{1b}".to_owned()),
            problem: Some("no kernel watchdog".to_owned()),
        };
        let guard = HaHost {
            standing: HaStanding::Held,
            term: 3,
            lease_left_ms: Some(7_260),
            watchdog: true,
            watchdog_process: false,
            answered_ms_ago: None,
            heartbeat_failures: 0,
            ending: Vec::new(),
            datastores: vec![written, failed],
            vms: vec!["db".to_owned(), "web".to_owned()],
            own: vec![own],
            own_problems: vec!["fast: 9 VMs".to_owned()],
        };
        let text = shown(&GuardedHost { host: "a".to_owned(), guard });
        for part in [
            "3, held",
            "7.2 s",
            "armed",
            "does not answer",
            "written 0.7 s ago",
            "written never: no such file",
            "db, web",
            "fast: 9 VMs",
            "the host b  of VM manager does not respond",
            "godwit host ha confirm-off a manager --term 7",
            "doubtful",
            "no kernel watchdog",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
