//! Implements `godwit disk move`: a job of the VM's host.

use std::path::{Path, PathBuf};

use godwit_api::{JobKind, JobStatus, MoveDisk};

use crate::args::{ManagerPlace, MoveDiskArgs};
use crate::exit::{Exit, Failure};
use crate::follow::Follower;
use crate::hosts::{Hosts, manager_of};
use crate::manager;
use crate::output::Output;
use crate::target::{HostTarget, absolute};
use crate::vm::imports::finish;

/// Moves a disk through the manager if one is known and no host is named, otherwise at the agent of
/// the VM's host.
pub(super) async fn run(
    args: &MoveDiskArgs,
    place: &ManagerPlace,
    hosts_file: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let request = request(args)?;
    let follower = Follower::new(JobKind::DiskMove, output)?;
    // Errors in the hosts file are reported when it is loaded.
    let is_in_file = || manager_of(hosts_file).is_ok_and(|manager| manager.is_some());
    let (target, job) = if place.is_named() || only.is_none() && is_in_file() {
        let manager = manager::client(place, hosts_file)?;
        let host = manager.vm(&args.vm).await?.summary.host;
        let job = manager.move_disk(&args.vm, &request).await?;
        (HostTarget::Manager(manager, host), job)
    } else {
        let hosts = Hosts::load(hosts_file)?;
        let found = hosts.find(&args.vm, only, output).await?;
        let job = found.client.move_disk(&args.vm, &request).await?;
        (HostTarget::Agent(found.client.clone()), job)
    };
    let job = follower.wait_for(&target, job).await?;
    finish(&job, output, || text(&job, args))
}

fn request(args: &MoveDiskArgs) -> Result<MoveDisk, Failure> {
    let disk = absolute(&args.disk)?;
    let to = match &args.to {
        Some(to) => absolute(to)?,
        None => disk.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned),
    };
    Ok(MoveDisk {
        disk,
        to,
        format: args.format.map(Into::into),
        flatten: args.flatten,
        bandwidth_limit: args.bandwidth_limit,
        delete_source: args.delete_source,
    })
}

fn text(job: &JobStatus, args: &MoveDiskArgs) -> String {
    let mut text = String::new();
    for file in &job.files {
        text.push_str(&format!("disk of VM {} is now {}\n", args.vm, file.display()));
    }
    let kept = !args.delete_source || !job.findings.is_empty();
    if kept {
        text.push_str(&format!("kept {}, which the VM no longer uses\n", args.disk.display()));
    }
    for found in &job.findings {
        text.push_str(&format!("{}: {}\n", found.what, found.why));
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, DiskCommand};

    fn args(line: &str) -> MoveDiskArgs {
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        match cli.command {
            Command::Disk { command: DiskCommand::Move(args), .. } => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_new_format_alone_stays_in_the_directory() {
        let made = request(&args("godwit disk move web /srv/a/web.raw --format qcow2")).unwrap();
        assert_eq!((made.to, made.format), ("/srv/a".into(), Some(godwit_qemu::DiskFormat::Qcow2)));
        let line = "godwit disk move web /srv/web.raw --to /ssd --flatten --delete-source \
                    --bandwidth-limit 2gbit";
        let made = request(&args(line)).unwrap();
        assert!(made.flatten && made.delete_source && made.format.is_none());
        assert_eq!(made.bandwidth_limit.unwrap().to_string(), "2gbit");
        assert!(Cli::try_parse_from(["godwit", "disk", "move", "web", "/srv/web.raw"]).is_err());
        let made = request(&args("godwit disk move web /srv/web.raw --to rbd:vms")).unwrap();
        assert_eq!(made.to, Path::new("rbd:vms"));
        let made = request(&args("godwit disk move web rbd:vms/web --to /srv")).unwrap();
        assert_eq!((made.disk, made.to), ("rbd:vms/web".into(), "/srv".into()));
    }
}
