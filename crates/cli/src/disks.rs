//! Implements `godwit disk`: images at a host, through its agent or, with `--manager`, through the
//! manager.

mod kept;
mod moved;

use std::path::{Path, PathBuf};

use godwit_api::{CreateDisk, DiskInfo, ResizeDisk};
use godwit_qemu::is_rbd;
use serde_json::json;

use crate::args::{CreateDiskArgs, DiskCommand, ManagerPlace};
use crate::exit::{Exit, Failure};
use crate::output::{Output, fields, table};
use crate::target::{HostTarget, absolute};
use crate::units::byte_count;

pub(crate) async fn run(
    command: DiskCommand,
    place: &ManagerPlace,
    hosts_file: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    if let DiskCommand::Move(args) = &command {
        return moved::run(args, place, hosts_file, only, output).await;
    }
    let target = HostTarget::choose(place, hosts_file, only)?;
    match command {
        DiskCommand::Move(_) => {}
        DiskCommand::Create(options) => {
            let path = path_of(&options, &target).await?;
            print(&target.create(&request(path, &options)?).await?, output)?;
        }
        DiskCommand::List => {
            let list = target.list().await?;
            if list.is_cut {
                output.note("note: there are more images than are listed");
            }
            output.result(&list, || {
                let rows: Vec<_> = list.disks.iter().map(row).collect();
                table(&["path", "format", "size", "used", "vms"], &rows)
            })?;
        }
        DiskCommand::Info { path } => print(&target.info(&absolute(&path)?).await?, output)?,
        DiskCommand::Resize { path, size } => {
            let request = ResizeDisk { path: absolute(&path)?, size };
            print(&target.resize(&request).await?, output)?;
        }
        DiskCommand::Kept { command } => kept::run(command, &target, output).await?,
        DiskCommand::Delete { path } => {
            let path = absolute(&path)?;
            target.delete(&path).await?;
            output.result(&json!({ "deleted": path }), || {
                format!("disk {} is deleted", path.display())
            })?;
        }
    }
    Ok(Exit::Ok)
}

impl HostTarget {
    async fn create(&self, request: &CreateDisk) -> Result<DiskInfo, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.create_disk(request).await?,
            HostTarget::Manager(manager, host) => manager.create_disk(host, request).await?,
        })
    }

    /// Returns the directory or the pool of a datastore at the host.
    async fn datastore_dir(&self, wanted: &str) -> Result<PathBuf, Failure> {
        if Path::new(wanted).is_absolute() || is_rbd(Path::new(wanted)) {
            return Ok(wanted.into());
        }
        let HostTarget::Manager(manager, host) = self else {
            let message = format!("cannot use datastore {wanted}: only the manager knows names");
            return Err(Failure::usage(message, "give its directory, or name a manager"));
        };
        let found = manager.datastore(wanted).await?.datastore;
        let at = found.hosts.iter().find(|at| at.host == *host);
        at.map(|at| PathBuf::from(&at.path)).ok_or_else(|| {
            let message = format!("host {host} does not have datastore {}", found.name);
            let remedy = format!("list its own with `godwit datastore list --host {host}`");
            Failure::new(Exit::NotFound, message, remedy)
        })
    }

    async fn list(&self) -> Result<godwit_api::DiskList, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.disks().await?,
            HostTarget::Manager(manager, host) => manager.disks(host).await?,
        })
    }

    async fn info(&self, path: &Path) -> Result<DiskInfo, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.disk(path).await?,
            HostTarget::Manager(manager, host) => manager.disk(host, path).await?,
        })
    }

    async fn resize(&self, request: &ResizeDisk) -> Result<DiskInfo, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.resize_disk(request).await?,
            HostTarget::Manager(manager, host) => manager.resize_disk(host, request).await?,
        })
    }

    async fn delete(&self, path: &Path) -> Result<(), Failure> {
        match self {
            HostTarget::Agent(agent) => agent.delete_disk(path).await?,
            HostTarget::Manager(manager, host) => manager.delete_disk(host, path).await?,
        }
        Ok(())
    }
}

/// Returns the path of a new image, or only its name if its datastore is to be chosen.
async fn path_of(options: &CreateDiskArgs, target: &HostTarget) -> Result<PathBuf, Failure> {
    let is_bare = options.path.file_name().is_some_and(|name| name == options.path.as_os_str());
    match &options.datastore {
        Some(_) if !is_bare => {
            let message = format!("{} names a directory already", options.path.display());
            Err(Failure::usage(message, "give only the image's name with --datastore"))
        }
        Some(wanted) if wanted != "auto" => {
            Ok(target.datastore_dir(wanted).await?.join(&options.path))
        }
        _ if is_bare => Ok(options.path.clone()),
        _ => absolute(&options.path),
    }
}

fn request(path: PathBuf, options: &CreateDiskArgs) -> Result<CreateDisk, Failure> {
    Ok(CreateDisk {
        path,
        size: options.size,
        format: options.format.map(Into::into),
        base: options.base.as_deref().map(absolute).transpose()?,
        base_format: options.base_format.map(Into::into),
        full_copy: options.full_copy,
    })
}

fn print(disk: &DiskInfo, output: Output) -> Result<(), Failure> {
    output.result(disk, || {
        let mut lines = vec![
            ("disk", disk.path.display().to_string()),
            ("format", format_of(disk)),
            ("size", byte_count(disk.virtual_bytes)),
            ("used", byte_count(disk.used_bytes)),
        ];
        lines.extend(disk.backing.clone().map(|backing| ("backing file", backing)));
        lines.push(("vms", vms_of(disk)));
        lines.extend(disk.placed.clone().map(|why| ("datastore", why)));
        fields(&lines)
    })
}

fn row(disk: &DiskInfo) -> Vec<String> {
    vec![
        disk.path.display().to_string(),
        format_of(disk),
        byte_count(disk.virtual_bytes),
        byte_count(disk.used_bytes),
        vms_of(disk),
    ]
}

fn format_of(disk: &DiskInfo) -> String {
    disk.format.map_or("unusable", godwit_qemu::DiskFormat::name).to_owned()
}

fn vms_of(disk: &DiskInfo) -> String {
    if disk.vms.is_empty() { "none".to_owned() } else { disk.vms.join(", ") }
}
