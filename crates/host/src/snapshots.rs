//! Snapshots of a VM, as its host records them beside the VM's own record: `snapshots.json`.
//!
//! A snapshot freezes the VM's images: from then on the VM writes to a layer on each of them. The
//! snapshot's specification names the frozen images. The file is written after the VM's record: a
//! crash in between leaves a layer more, and no snapshot that names an image which is written.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ErrorCode, SnapshotInfo};
use godwit_qemu::{ResolvedSpec, Uuid, VmName};
use serde::{Deserialize, Serialize};

/// Format version that this agent writes, and the only one it reads.
const FORMAT: u32 = 1;
/// Most snapshots of a VM.
pub(crate) const MOST_SNAPSHOTS: usize = 16;

/// Every snapshot of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Snapshots {
    format: u32,
    /// The oldest first.
    pub(crate) all: Vec<Snapshot>,
    /// Images that snapshots have created as layers, and that belong to the VM alone.
    pub(crate) layers: BTreeSet<PathBuf>,
    /// Why the file cannot be used, if it cannot. There may be snapshots then.
    #[serde(skip)]
    unreadable: Option<String>,
}

/// One snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Snapshot {
    /// Part of the names of its files.
    pub(crate) id: Uuid,
    pub(crate) name: VmName,
    pub(crate) created_unix_ms: u64,
    /// Specification of the VM then, with the frozen images.
    pub(crate) spec: ResolvedSpec,
    /// Whether it has the guest's memory.
    pub(crate) memory: bool,
    /// Whether it has the variables of the VM's firmware.
    #[serde(default)]
    pub(crate) variables: bool,
}

impl Default for Snapshots {
    fn default() -> Snapshots {
        Snapshots { format: FORMAT, all: Vec::new(), layers: BTreeSet::new(), unreadable: None }
    }
}

impl Snapshots {
    /// Parses the content of a file.
    ///
    /// # Errors
    /// Why it is not one of this version.
    pub(crate) fn parse(text: &[u8]) -> Result<Snapshots, String> {
        let found: Snapshots = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if found.format != FORMAT {
            return Err(format!("format {} instead of {FORMAT}", found.format));
        }
        let mut specs = found.all.iter().map(|snapshot| &snapshot.spec);
        specs.try_for_each(ResolvedSpec::validate).map_err(|error| error.to_string())?;
        Ok(found)
    }

    /// Returns what is known of snapshots whose file cannot be used.
    pub(crate) fn unreadable(why: String) -> Snapshots {
        Snapshots { unreadable: Some(why), ..Snapshots::default() }
    }

    /// Refuses an operation that depends on snapshots whose file cannot be used.
    pub(crate) fn check_readable(&self, vm: &VmName) -> Result<(), ApiError> {
        let Some(why) = &self.unreadable else { return Ok(()) };
        let message = format!("cannot read the snapshots of VM \"{vm}\": {why}");
        let remedy = "restore the file and restart the agent; `godwit vm delete --force` deletes \
                      the VM in spite of it, and leaves all images";
        Err(ApiError::new(ErrorCode::HostFailed, message, remedy))
    }

    /// Whether there is neither a snapshot nor a layer of one.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.layers.is_empty() && self.unreadable.is_none()
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Snapshot> {
        self.all.iter().find(|snapshot| snapshot.name.as_str() == name)
    }

    /// Returns the same snapshot as it is now; `None` if it is deleted, also if another one has its
    /// name.
    pub(crate) fn find_again(&self, found: &Snapshot) -> Option<&Snapshot> {
        self.all.iter().find(|snapshot| snapshot.id == found.id)
    }

    /// Returns the images that the snapshots need: the frozen ones and their backing files.
    pub(crate) fn images(&self) -> impl Iterator<Item = &Path> {
        self.all.iter().flat_map(|snapshot| images_of(&snapshot.spec))
    }

    /// Returns those of the images that are layers which neither a snapshot nor the VM needs. A
    /// layer that nothing names may be a detached disk, so only images that an operation has just
    /// given up are asked about.
    pub(crate) fn unused(&self, spec: &ResolvedSpec, given_up: &[PathBuf]) -> Vec<PathBuf> {
        let needed: BTreeSet<&Path> = self.images().chain(images_of(spec)).collect();
        let unused =
            |path: &&PathBuf| self.layers.contains(*path) && !needed.contains(path.as_path());
        given_up.iter().filter(unused).cloned().collect()
    }

    /// Returns the position of a disk whose layer can be merged into the image below it: no
    /// snapshot needs that one.
    pub(crate) fn mergeable(&self, spec: &ResolvedSpec) -> Option<usize> {
        let needed: BTreeSet<&Path> = self.images().collect();
        spec.disks.iter().position(|disk| {
            let below = disk.backing.as_ref().and_then(|backing| backing.first());
            self.layers.contains(&disk.path)
                && !needed.contains(disk.path.as_path())
                && below.is_some_and(|below| !needed.contains(below.path.as_path()))
        })
    }
}

/// Returns the images of a VM's disks, each followed by its backing files.
pub(crate) fn images_of(spec: &ResolvedSpec) -> impl Iterator<Item = &Path> {
    spec.disks.iter().flat_map(|disk| {
        let backing = disk.backing.iter().flatten().map(|file| file.path.as_path());
        std::iter::once(disk.path.as_path()).chain(backing)
    })
}

impl Snapshot {
    pub(crate) fn info(&self) -> SnapshotInfo {
        SnapshotInfo {
            name: self.name.to_string(),
            created_unix_ms: self.created_unix_ms,
            memory: self.memory,
            disks: self.spec.disks.iter().filter(|disk| !disk.readonly).count(),
            spec: Some(Box::new(self.spec.to_vm_spec().without_secrets())),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{
        AccelProbe, BackingFile, Disk, DiskFormat, MachineType, QemuInfo, ResolvedDisk, VmSpec,
    };

    use super::*;

    /// A VM with one disk: its image, and the backing files below it.
    fn spec(chain: &[&str]) -> ResolvedSpec {
        let machine =
            MachineType { name: "pc-q35-7.2".into(), alias: Some("q35".into()), is_default: true };
        let cpu_models = vec!["Westmere-v1".into()];
        let (path, machines) = ("/q".into(), vec![machine]);
        let qemu = QemuInfo { path, version: (7, 2, 22), machines, cpu_models };
        let disk = Disk::new(chain[0], DiskFormat::Qcow2);
        let spec = VmSpec { disks: vec![disk], ..VmSpec::new("web") };
        let accel = AccelProbe { kvm: false, reason: String::new() };
        let mut spec = spec.resolve(&qemu, &accel).unwrap();
        let below = chain[1..].iter();
        let below = below.map(|path| BackingFile { path: path.into(), format: DiskFormat::Qcow2 });
        let disk = ResolvedDisk { backing: Some(below.collect()), ..spec.disks[0].clone() };
        spec.disks = vec![disk];
        spec
    }

    fn snapshots(all: &[&[&str]], layers: &[&str]) -> Snapshots {
        let of = |(index, chain): (usize, &&[&str])| Snapshot {
            id: Uuid::new_v4(),
            name: VmName::new(format!("s{index}")).unwrap(),
            created_unix_ms: 0,
            spec: spec(chain),
            memory: false,
            variables: false,
        };
        Snapshots {
            all: all.iter().enumerate().map(of).collect(),
            layers: layers.iter().map(PathBuf::from).collect(),
            ..Snapshots::default()
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let written = snapshots(&[&["/web", "/base"]], &["/web.1"]);
        let text = serde_json::to_vec(&written).unwrap();
        assert_eq!(Snapshots::parse(&text).unwrap(), written);
        let later = Snapshots { format: 2, ..written };
        assert!(Snapshots::parse(&serde_json::to_vec(&later).unwrap()).is_err());
        assert!(Snapshots::parse(b"{}").is_err());
    }

    #[test]
    fn a_snapshot_without_a_word_of_variables_is_read() {
        let written = snapshots(&[&["/web"]], &[]);
        let mut text = serde_json::to_value(&written).unwrap();
        text["all"][0].as_object_mut().unwrap().remove("variables").unwrap();
        assert_eq!(Snapshots::parse(text.to_string().as_bytes()).unwrap(), written);
    }

    #[test]
    fn a_snapshot_is_not_taken_for_a_later_one_of_its_name() {
        let of = snapshots(&[&["/web"]], &[]);
        let found = of.find("s0").unwrap().clone();
        assert_eq!(of.find_again(&found), Some(&found));
        let later = snapshots(&[&["/web"]], &[]);
        assert!(later.find("s0").is_some() && later.find_again(&found).is_none());
    }

    #[test]
    fn nothing_is_known_of_snapshots_that_cannot_be_read() {
        let web = VmName::new("web").unwrap();
        let unreadable = Snapshots::unreadable("/snapshots.json: format 2".to_owned());
        assert!(!unreadable.is_empty());
        let error = unreadable.check_readable(&web).unwrap_err();
        assert!(error.message.contains("format 2") && !error.remedy.is_empty(), "{error}");
        Snapshots::default().check_readable(&web).unwrap();
    }

    #[test]
    fn only_layers_that_nothing_needs_are_removed() {
        let all = ["/web.3", "/web.2", "/web.1", "/web", "/base"].map(PathBuf::from);
        // Reverted to the first of two snapshots: the second still needs its layers.
        let of = snapshots(&[&["/web"], &["/web.1", "/web"]], &["/web.1", "/web.2", "/web.3"]);
        assert_eq!(of.unused(&spec(&["/web.3", "/web"]), &all), [PathBuf::from("/web.2")]);
        assert!(of.unused(&spec(&["/web.3", "/web.2"]), &all).is_empty());
        // The VM's first image and its base are never among them.
        let none = snapshots(&[], &["/web.1"]);
        assert!(none.unused(&spec(&["/web.1", "/web", "/base"]), &all).is_empty());
        assert_eq!(none.unused(&spec(&["/other"]), &all), [PathBuf::from("/web.1")]);
    }

    #[test]
    fn a_detached_disk_stays() {
        // Its layer was detached; then its snapshot is deleted, or the VM is reverted.
        let detached = snapshots(&[], &["/web.1"]);
        let (now, frozen) = (spec(&["/other"]), spec(&["/web", "/base"]));
        let given_up =
            |spec: &ResolvedSpec| -> Vec<PathBuf> { images_of(spec).map(Path::to_owned).collect() };
        assert!(detached.unused(&now, &given_up(&frozen)).is_empty());
        assert!(detached.unused(&frozen, &given_up(&now)).is_empty());
        // The layer on top is given up before the one below it.
        let both = snapshots(&[], &["/web.1", "/web.2"]);
        let reverted = given_up(&spec(&["/web.2", "/web.1", "/web"]));
        assert_eq!(both.unused(&frozen, &reverted), ["/web.2", "/web.1"].map(PathBuf::from));
    }

    #[test]
    fn a_layer_is_merged_only_into_an_image_that_no_snapshot_needs() {
        let now = spec(&["/web.1", "/web", "/base"]);
        assert_eq!(snapshots(&[], &["/web.1"]).mergeable(&now), Some(0));
        assert_eq!(snapshots(&[&["/web", "/base"]], &["/web.1"]).mergeable(&now), None);
        let above = snapshots(&[&["/web.2", "/web"]], &["/web.1", "/web.2"]);
        assert_eq!(above.mergeable(&now), None);
        // The VM's own first image stays a layer on the shared base.
        assert_eq!(snapshots(&[], &["/web.1"]).mergeable(&spec(&["/web", "/base"])), None);
    }
}
