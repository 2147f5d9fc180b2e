//! The disks of a definition: where their images are on this host, and whether they can be used.

use std::io;
use std::path::{Path, PathBuf};

use godwit_api::{ImportDisk, ImportFinding, ImportVm, WarmImport};
use godwit_import::{
    DiskSource, SourceDisk, SourceFormat, VHD_FOOTER_BYTES, VmdkImage, check_vhd, read_vmdk,
};
use godwit_qemu::{Disk, DiskFormat, FoundFile, NewDrive, OpenFile, OpenFiles, VmSpec};

use super::archive::{Archive, open_member};
use super::fits::{check_size, take};
use super::loaded::Loaded;
use super::opened::Opened;
use crate::agent::Agent;
use crate::agent::images::foreign::{format_of, length_of, read_bytes};
use crate::agent::images::warm::WarmSource;
use crate::agent::vm_files::FileRule;
use crate::jobs::Job;

/// Directory of the storage `local` of Proxmox VE.
const PROXMOX_LOCAL: &str = "/var/lib/vz/images";

impl Agent {
    /// Opens all disks that can be opened; the others are findings.
    pub(super) async fn open_all(
        &self,
        disks: &[SourceDisk],
        (loaded, request, rule): (&Loaded, &ImportVm, FileRule),
        spec: &mut VmSpec,
        findings: &mut Vec<ImportFinding>,
    ) -> Vec<(ImportDisk, Opened)> {
        let mut opened = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let path = match (&loaded.archive, &disk.source) {
                (Some(archive), DiskSource::Member(_)) => Ok(Some(archive.path.clone())),
                _ => path_of(disk, request, loaded.beside.as_deref()),
            };
            let found = match path {
                Ok(path) => self.open_source(disk, path, loaded.archive.as_ref(), rule).await,
                Err(why) => Err(why),
            };
            match found {
                Ok((found, open)) => {
                    check_size(disk, &found, findings);
                    if request.take_disks {
                        take(&mut spec.disks[index], disk, &found, &open, findings);
                    }
                    opened.push((found, open));
                }
                Err(why) => findings.push(ImportFinding::refusal(&disk.name, why)),
            }
        }
        opened
    }

    /// Opens the sources of a warm import, in the order of the disks.
    pub(super) fn open_all_warm(
        &self,
        job: &Job,
        (disks, warm): (&[SourceDisk], &WarmImport),
        rule: FileRule,
        findings: &mut Vec<ImportFinding>,
    ) -> (Vec<(ImportDisk, Opened)>, Vec<WarmSource>) {
        if warm.sources.len() != disks.len() {
            let (disks, sources) = (disks.len(), warm.sources.len());
            let why = format!("the definition has {disks}, and {sources} are given (--warm)");
            findings.push(ImportFinding::refusal("disks", why));
        }
        let (mut found, mut sources) = (Vec::new(), Vec::new());
        for (disk, source) in disks.iter().zip(&warm.sources) {
            match self.open_warm(job, source, rule) {
                Ok(open) => {
                    let described = ImportDisk {
                        name: disk.name.clone(),
                        source: Some(PathBuf::from(source)),
                        format: "raw".to_owned(),
                        bytes: open.bytes(),
                    };
                    found.push((described, Opened::Empty));
                    sources.push(open);
                }
                Err(error) => findings.push(ImportFinding::refusal(&disk.name, error.message)),
            }
        }
        (found, sources)
    }

    /// Opens a disk, and finds its size. The error is the reason.
    async fn open_source(
        &self,
        disk: &SourceDisk,
        path: Option<PathBuf>,
        archive: Option<&Archive>,
        rule: FileRule,
    ) -> Result<(ImportDisk, Opened), String> {
        let described = |source, format: &str, bytes| ImportDisk {
            name: disk.name.clone(),
            source,
            format: format.to_owned(),
            bytes,
        };
        let Some(path) = path else {
            let bytes = disk.bytes.unwrap_or(0);
            return Ok((described(None, "empty", bytes), Opened::Empty));
        };
        let opened = match (archive, &disk.source) {
            (Some(archive), DiskSource::Member(name)) => open_member(archive, name)?,
            _ => self.open_file(&path, disk.format, rule)?,
        };
        let tool = self.image_tool().await.map_err(|error| error.message)?;
        let source = opened.open_in(&tool).await.map_err(|error| error.to_string())?;
        let bytes = source.map_or(0, |source| source.bytes);
        godwit_qemu::check_image_bytes(bytes)?;
        Ok((described(Some(path), opened.format(), bytes), opened))
    }

    /// Opens an image of a known or of its own format. The error is the reason.
    fn open_file(
        &self,
        path: &Path,
        named: Option<SourceFormat>,
        rule: FileRule,
    ) -> Result<Opened, String> {
        let file = self.open_any(path, rule).map_err(|error| error.message)?;
        let format = match named {
            Some(format) => format,
            None => format_of(&file)?,
        };
        let native = match format {
            SourceFormat::Raw => DiskFormat::Raw,
            SourceFormat::Qcow2 => DiskFormat::Qcow2,
            SourceFormat::Vmdk => return self.open_vmdk(file, path, rule),
            other => {
                if other == SourceFormat::Vpc {
                    check_parentless(&file)
                        .map_err(|why| format!("cannot use {}: {why}", path.display()))?;
                }
                return Ok(Opened::Foreign { file, driver: other.name(), window: None });
            }
        };
        let may_open = |file: &FoundFile| rule.allows(file, &self.config().vm_dirs);
        let disk = Disk::new(path, native).readonly().into();
        let layers = OpenFiles::open_drive(&NewDrive::Disk(&disk), &may_open);
        layers.map(Opened::Layers).map_err(|error| error.to_string())
    }

    /// Opens a VMDK image: a sparse one itself, or its flat extent.
    fn open_vmdk(&self, file: OpenFile, path: &Path, rule: FileRule) -> Result<Opened, String> {
        let length = length_of(&file).map_err(|error| error.to_string())?;
        let read = |at: u64, buffer: &mut [u8]| -> io::Result<usize> {
            Ok(rustix::io::pread(&file, buffer, at)?)
        };
        let image = read_vmdk(&read, length);
        match image.map_err(|error| format!("cannot use {}: {error}", path.display()))? {
            VmdkImage::Sparse { .. } => Ok(Opened::Foreign { file, driver: "vmdk", window: None }),
            VmdkImage::Flat { file: name, offset, bytes } => {
                let extent = path.with_file_name(&name);
                let file = self.open_any(&extent, rule).map_err(|error| error.message)?;
                let length = length_of(&file).map_err(|error| error.to_string())?;
                if offset.checked_add(bytes).is_none_or(|end| end > length) {
                    return Err(format!("{} is shorter than it claims", extent.display()));
                }
                Ok(Opened::Foreign { file, driver: "raw", window: Some((offset, bytes)) })
            }
        }
    }
}

/// Finds the path of a disk on this host; `None` if it is empty. The error is the reason.
fn path_of(
    disk: &SourceDisk,
    request: &ImportVm,
    beside: Option<&Path>,
) -> Result<Option<PathBuf>, String> {
    let given = request.disks_in.as_deref();
    Ok(Some(match &disk.source {
        DiskSource::Empty => return Ok(None),
        DiskSource::Path(path) => match (given, path.file_name()) {
            (Some(dir), Some(file)) => dir.join(file),
            _ => path.clone(),
        },
        DiskSource::Volume { storage, name } => {
            let file = name.rsplit('/').next().unwrap_or(name);
            let is_plain = !file.is_empty() && !file.starts_with('.');
            match given {
                Some(dir) if is_plain => dir.join(file),
                None if storage == "local" && is_plain && !name.contains("..") => {
                    Path::new(PROXMOX_LOCAL).join(name)
                }
                _ => {
                    return Err(format!(
                        "the path of volume {storage}:{name} on this host is unknown: give the \
                         directory with --disks-in"
                    ));
                }
            }
        }
        DiskSource::Member(name) => match given.or(beside) {
            Some(dir) => dir.join(name),
            None => {
                return Err(format!("the path of {name} on this host is unknown: give --disks-in"));
            }
        },
    }))
}

/// Checks that a VHD image has no parent.
fn check_parentless(file: &OpenFile) -> Result<(), String> {
    let footer = |at| read_bytes(file, at, VHD_FOOTER_BYTES).map_err(|error| error.to_string());
    let length = length_of(file).map_err(|error| error.to_string())?;
    check_vhd(&footer(0)?, &footer(length.saturating_sub(VHD_FOOTER_BYTES))?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use godwit_api::ImportFrom;

    use super::*;

    fn request(disks_in: Option<&str>) -> ImportVm {
        ImportVm {
            from: ImportFrom::Text(String::new()),
            name: None,
            networks: BTreeMap::new(),
            disks_in: disks_in.map(PathBuf::from),
            take_disks: false,
            warm: None,
            datastore: None,
            dry_run: false,
            start: false,
            vm_dirs_only: false,
        }
    }

    fn disk(source: DiskSource) -> SourceDisk {
        SourceDisk { name: "vda".to_owned(), source, format: None, bytes: None }
    }

    fn volume(storage: &str, name: &str) -> SourceDisk {
        disk(DiskSource::Volume { storage: storage.to_owned(), name: name.to_owned() })
    }

    #[test]
    fn disks_are_found_where_the_caller_or_the_definition_says() {
        let found = |disk: &SourceDisk, dir: Option<&str>| {
            path_of(disk, &request(dir), Some(Path::new("/beside")))
                .map(|path| path.unwrap_or_default().display().to_string())
        };
        let plain = disk(DiskSource::Path("/var/images/a.img".into()));
        assert_eq!(found(&plain, None).unwrap(), "/var/images/a.img");
        assert_eq!(found(&plain, Some("/srv/in")).unwrap(), "/srv/in/a.img");
        let member = disk(DiskSource::Member("a.vmdk".to_owned()));
        assert_eq!(found(&member, None).unwrap(), "/beside/a.vmdk");
        assert_eq!(found(&member, Some("/srv/in")).unwrap(), "/srv/in/a.vmdk");
        let local = volume("local", "101/vm-101-disk-0.qcow2");
        assert_eq!(found(&local, None).unwrap(), "/var/lib/vz/images/101/vm-101-disk-0.qcow2");
        assert_eq!(found(&local, Some("/srv/in")).unwrap(), "/srv/in/vm-101-disk-0.qcow2");
        assert_eq!(
            found(&volume("lvm", "vm-1-disk-0"), Some("/dev/pve")).unwrap(),
            "/dev/pve/vm-1-disk-0"
        );
        assert!(found(&volume("lvm", "vm-1-disk-0"), None).unwrap_err().contains("--disks-in"));
        assert!(found(&volume("local", "../../../etc/shadow"), None).is_err());
        assert!(found(&volume("local", "101/.."), Some("/srv/in")).is_err());
    }
}
