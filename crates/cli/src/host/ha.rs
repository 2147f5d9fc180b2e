//! Implements `godwit host ha`: the guard of hosts.

use godwit_api::{Client, HaHost, HeartbeatState, json_name};
use serde::Serialize;

use crate::exit::{Exit, Failure};
use crate::ha::ago;
use crate::hosts::Hosts;
use crate::output::{Output, fields};

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
    fields(&rows)
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
    fn a_guard_shows_its_term_lease_and_heartbeats() {
        let written =
            HeartbeatState { datastore: Uuid::nil(), written_ms_ago: Some(740), problem: None };
        let failed = HeartbeatState {
            datastore: Uuid::nil(),
            written_ms_ago: None,
            problem: Some("no such file".to_owned()),
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
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
