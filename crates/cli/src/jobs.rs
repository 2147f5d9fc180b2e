//! Implements `godwit job`: the long work of all hosts, or of one. The agents have it; the manager
//! passes requests on.

use std::path::Path;

use futures::StreamExt;
use godwit_api::{Client, JobKind, JobState, JobSummary, json_name};
use serde::Serialize;

use crate::args::{JobCommand, ManagerPlace};
use crate::exit::{Exit, Failure};
use crate::follow::Follower;
use crate::hosts::{Hosts, manager_of};
use crate::manager::client;
use crate::output::{Output, table};
use crate::target::HostTarget;
use crate::units::{byte_count, utc};

/// Hosts that are asked at a time.
const AT_ONCE: usize = 8;

/// A job with its host.
#[derive(Debug, Serialize)]
struct HostJob {
    host: String,
    #[serde(flatten)]
    job: JobSummary,
}

pub(crate) async fn run(
    command: JobCommand,
    place: &ManagerPlace,
    hosts_file: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let targets = targets(place, hosts_file, only).await?;
    let mut all = ask_all(&targets, output).await?;
    match command {
        JobCommand::List => {
            let is_worth_it = |job: &JobSummary| {
                job.kind != JobKind::ImportCheck || job.state == JobState::Running
            };
            all.retain(|one| is_worth_it(&one.job));
            output.result(&all, || listed(&all))?;
        }
        JobCommand::Cancel { id } => {
            let found = all.iter().find(|one| one.job.id == id).ok_or_else(|| {
                let message = format!("cannot find job \"{id}\" on any host that responds");
                Failure::new(Exit::NotFound, message, "list the jobs with `godwit job list`")
            })?;
            let target = targets.iter().find(|(host, _)| *host == found.host);
            let Some((_, target)) = target else { return Ok(Exit::NotFound) };
            let ended = cancel(found, target, output).await?;
            let ended = HostJob { host: found.host.clone(), job: ended };
            output.result(&ended, || outcome(&ended))?;
        }
    }
    Ok(Exit::Ok)
}

/// Chooses whom to ask, with the names of the hosts: the manager if it is named, or if the hosts
/// file names it and no host is named.
async fn targets(
    place: &ManagerPlace,
    hosts_file: Option<&Path>,
    only: Option<&str>,
) -> Result<Vec<(String, HostTarget)>, Failure> {
    // Errors in the hosts file are reported when it is loaded.
    let is_in_file = || manager_of(hosts_file).is_ok_and(|manager| manager.is_some());
    if !place.is_named() && (only.is_some() || !is_in_file()) {
        let hosts = Hosts::load(hosts_file)?;
        let agent =
            |(name, client): (&str, &Client)| (name.to_owned(), HostTarget::Agent(client.clone()));
        return Ok(hosts.chosen(only)?.into_iter().map(agent).collect());
    }
    let manager = client(place, hosts_file)?;
    let names = match only {
        Some(host) => vec![host.to_owned()],
        None => manager.hosts().await?.into_iter().map(|host| host.name).collect(),
    };
    let through = |host: String| (host.clone(), HostTarget::Manager(manager.clone(), host));
    Ok(names.into_iter().map(through).collect())
}

/// Asks the hosts. One that does not answer is a note; no answer from any is an error.
async fn ask_all(
    targets: &[(String, HostTarget)],
    output: Output,
) -> Result<Vec<HostJob>, Failure> {
    let asked = targets.iter().map(|(_, target)| target.jobs());
    let answers: Vec<_> = futures::stream::iter(asked).buffered(AT_ONCE).collect().await;
    let (mut all, mut failures) = (Vec::new(), Vec::new());
    for ((host, _), answer) in targets.iter().zip(answers) {
        match answer {
            Ok(jobs) => all.extend(jobs.into_iter().map(|job| HostJob { host: host.clone(), job })),
            Err(failure) => failures.push((host, failure)),
        }
    }
    if failures.len() == targets.len()
        && let Some((_, failure)) = failures.pop()
    {
        return Err(failure);
    }
    for (host, failure) in failures {
        output.note(&format!("note: cannot list the jobs of host {host}: {failure}"));
    }
    all.sort_by_key(|one| one.job.begun_unix_ms);
    Ok(all)
}

/// Cancels a job and waits for its end. Returns it as it is then.
async fn cancel(
    HostJob { host, job }: &HostJob,
    target: &HostTarget,
    output: Output,
) -> Result<JobSummary, Failure> {
    if job.state == JobState::Running {
        match job.kind {
            JobKind::Adoption => {
                target.cancel_adoption(&job.id).await?;
                let adoption = target.adoption(&job.id).await?;
                Follower::silent(job.kind, output)?.wait_for(target, adoption).await?;
            }
            _ => target.cancel_job(&job.id).await?,
        }
    }
    let now = target.jobs().await?.into_iter().find(|now| now.id == job.id);
    let now = now.ok_or_else(|| {
        let message =
            format!("cannot show the end of job {}: host {host} has forgotten it", job.id);
        Failure::new(Exit::NotFound, message, "list the jobs with `godwit job list`")
    })?;
    if now.state == JobState::Done {
        let message =
            format!("cannot cancel {} of VM \"{}\": it is done", now.kind.words(), now.vm);
        return Err(Failure::new(Exit::Conflict, message, what_is_there(&now)));
    }
    Ok(now)
}

/// Returns where the result of a job that is done is.
fn what_is_there(job: &JobSummary) -> String {
    match job.kind {
        JobKind::Export => format!("its files are in {}", job.place),
        JobKind::WarmImport | JobKind::ImportCheck => "see `godwit job list`".to_owned(),
        JobKind::LiveExport => "libvirt runs its guest; see `virsh list`".to_owned(),
        JobKind::Import | JobKind::Adoption | JobKind::DiskMove => {
            format!("see `godwit vm show {}`", job.vm)
        }
    }
}

impl HostTarget {
    async fn jobs(&self) -> Result<Vec<JobSummary>, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.jobs().await?,
            HostTarget::Manager(manager, host) => manager.jobs(host).await?,
        })
    }
}

fn listed(all: &[HostJob]) -> String {
    let rows: Vec<_> = all.iter().map(row).collect();
    table(&["id", "kind", "vm", "host", "state", "progress", "begun", "place"], &rows)
}

fn row(HostJob { host, job }: &HostJob) -> Vec<String> {
    let progress = match job.total_bytes {
        0 => "-".to_owned(),
        total => format!("{} of {}", byte_count(job.done_bytes), byte_count(total)),
    };
    let state = json_name(&job.state);
    let state = match &job.error {
        Some(error) if job.state == JobState::Failed => format!("{state}: {}", error.message),
        _ => state,
    };
    vec![
        job.id.clone(),
        job.kind.words().to_owned(),
        job.vm.clone(),
        host.clone(),
        state,
        progress,
        utc(job.begun_unix_ms),
        job.place.clone(),
    ]
}

fn outcome(HostJob { host, job }: &HostJob) -> String {
    let state = json_name(&job.state);
    format!("{} of VM {} on host {host}: {state}", job.kind.words(), job.vm)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_list_says_what_runs_where_and_what_failed() {
        let job = |kind: &str, state: &str, total: u64, error: Option<&str>| HostJob {
            host: "a".to_owned(),
            job: serde_json::from_value(json!({
                "id": "1", "kind": kind, "vm": "web", "place": "/srv/web.ova", "state": state,
                "done_bytes": total / 2, "total_bytes": total, "begun_unix_ms": 0,
                "error": error.map(|why| json!({ "code": "busy", "message": why })),
            }))
            .unwrap(),
        };
        let all = [
            job("warm-import", "running", 2 << 30, None),
            job("adoption", "failed", 0, Some("no room")),
            job("export", "cancelled", 0, Some("cancelled: nothing of it remains")),
        ];
        let text = listed(&all);
        assert!(text.contains("warm import") && text.contains("1.0 GiB of 2.0 GiB"), "{text}");
        assert!(text.contains("failed: no room") && !text.contains("nothing"), "{text}");
        let shown = serde_json::to_value(&all[0]).unwrap();
        assert_eq!((&shown["host"], &shown["kind"]), (&json!("a"), &json!("warm-import")));
    }
}
