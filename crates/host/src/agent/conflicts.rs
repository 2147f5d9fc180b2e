//! Refuses a new VM that names what another VM of this host has: a hardware address, an address, or
//! an image that one of the two writes. Refuses also an image that two disks of the new VM use, if
//! one of them writes it, and an image that is being created, or written for another VM.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{OpenFiles, ResolvedSpec, VmName, address_conflict};

use crate::agent::images::is_being_made;
use crate::agent::{Agent, Slot};
use crate::block_devices::{is_device_path, overlapping};
use crate::real_paths::Resolved;
use crate::snapshots::Snapshots;

/// An image of a VM, or a backing file of one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Image {
    /// Real path, with every link resolved.
    real: PathBuf,
    is_written: bool,
}

impl Image {
    fn read(real: PathBuf) -> Image {
        Image { real, is_written: false }
    }
}

/// VMs here that use a file.
#[derive(Debug, Default)]
pub(super) struct FileUsers {
    /// Each with whether it writes it.
    pub(super) users: Vec<(VmName, bool)>,
    /// A VM that may use it, too, and its path whose storage does not answer.
    pub(super) unknown: Option<(VmName, PathBuf)>,
}

impl Agent {
    /// Returns the VMs here that use an image, each with whether it writes it. Opens nothing.
    pub(super) fn users_of_image(&self, real: &Path) -> Vec<(VmName, bool)> {
        self.find_users(real, |_| Vec::new()).users
    }

    /// Returns the VMs here that use a file, also as a kernel or an initrd. Opens nothing.
    pub(super) fn users_of_any_file(&self, real: &Path) -> FileUsers {
        self.find_users(real, |spec| spec.kernel.iter().chain(&spec.initrd).cloned().collect())
    }

    /// Resolves the paths of all VMs: they are known should their storage hang later.
    pub(super) fn learn_real_paths(&self) {
        drop(self.users_of_any_file(Path::new("/")));
    }

    /// Finds the users of a file. `more`: files of a VM that are no images.
    fn find_users(&self, real: &Path, more: impl Fn(&ResolvedSpec) -> Vec<PathBuf>) -> FileUsers {
        let all: Vec<Known> = {
            let table = self.table();
            table.iter().map(|(name, slot)| Known::of(name, slot)).collect()
        };
        let more: Vec<Vec<PathBuf>> = all.iter().map(|vm| more(&vm.spec)).collect();
        let named = all.iter().flat_map(named_images_of).map(Path::to_owned);
        let reals = self.resolve_paths(named.chain(more.iter().flatten().cloned()));
        let mut found = FileUsers::default();
        for (vm, more) in all.iter().zip(&more) {
            let images = known_images_of(vm, &reals);
            let mut same = images.iter().filter(|image| image.real == real).peekable();
            if same.peek().is_some() {
                found.users.push((vm.name.clone(), same.any(|image| image.is_written)));
            } else if more.iter().any(|path| reals.of(path) == real) {
                found.users.push((vm.name.clone(), false));
            }
            let mut named = named_images_of(vm).chain(more.iter().map(PathBuf::as_path));
            if found.unknown.is_none()
                && let Some(path) = named.find(|path| reals.is_unknown(path))
            {
                found.unknown = Some((vm.name.clone(), path.to_owned()));
            }
        }
        found
    }

    fn resolve_paths(&self, paths: impl Iterator<Item = PathBuf>) -> Resolved {
        let paths: BTreeSet<PathBuf> = paths.collect();
        self.real_paths.resolve(paths, &self.config.vm_dirs)
    }

    /// Checks that no other VM here has an address of `spec`, or an image of it that one of the two
    /// VMs writes. `spec` is in the table already: of two VMs that are created at the same time, at
    /// most one passes.
    pub(super) fn check_conflicts(
        &self,
        spec: &ResolvedSpec,
        files: &OpenFiles,
    ) -> Result<(), ApiError> {
        // Paths are resolved without the table's lock.
        let others: Vec<Known> = {
            let table = self.table();
            let others = table.iter().filter(|(name, _)| **name != spec.name);
            others.map(|(name, slot)| Known::of(name, slot)).collect()
        };
        let own = self.table().get(&spec.name).map(|slot| slot.snapshots.clone());
        let own = own.unwrap_or_default();
        let named = others.iter().flat_map(named_images_of).chain(own.images());
        // Its own are known from now on.
        let named = named.chain(drives_of(spec)).chain(spec.kernel.as_deref());
        let named = named.chain(spec.initrd.as_deref()).map(Path::to_owned);
        let reals = self.resolve_paths(named);
        let refuse = |what: String, remedy: &str| {
            let message =
                format!("cannot define VM \"{}\" on host {}: {what}", spec.name, self.config.name);
            Err(ApiError::new(ErrorCode::AlreadyExists, message, remedy))
        };
        let disks = images_of(spec, files);
        if let Some(image) = image_of_two_disks(&disks) {
            let message = format!(
                "cannot define VM \"{}\": two of its disks use image {}, and one of them would \
                 write it",
                spec.name,
                image.display()
            );
            let remedy = "give each disk an image of its own, or make both readonly";
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        }
        let (images, nics) = (disks.concat(), spec.claimed_nics());
        if let Some(image) = images.iter().find(|image| is_claimed(&image.real, &spec.name)) {
            let message = format!(
                "cannot define VM \"{}\": image {} is being written",
                spec.name,
                image.real.display()
            );
            let remedy = "wait until that ends, then try again";
            return Err(ApiError::new(ErrorCode::Busy, message, remedy));
        }
        if let Some(image) = shared_image(&images, &images_of_snapshots(&own, &reals)) {
            let what = format!("a snapshot of this VM needs image {}", image.display());
            return refuse(what, "revert to the snapshot, or give the disk another image");
        }
        for other in &others {
            let name = &other.name;
            if let Some(conflict) = address_conflict(&nics, &other.spec.claimed_nics()) {
                return refuse(conflict.message(name), conflict.remedy());
            }
            if let Some(shared) = shared_image(&images, &known_images_of(other, &reals)) {
                let what = format!(
                    "VM \"{name}\" also uses image {}, and one of them would write it",
                    shared.display()
                );
                let remedy =
                    "give the VM an image of its own, or make the disk readonly in both VMs";
                return refuse(what, remedy);
            }
        }
        let images: BTreeSet<PathBuf> = images.into_iter().map(|image| image.real).collect();
        self.end_kept(&images);
        Ok(())
    }

    /// Refuses a VM of another host that names an image which is being created or deleted here, or
    /// is written for another VM. `spec` is in the table already: a VM and a deletion that begin at
    /// the same time do not both pass.
    pub(super) fn refuse_claimed(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        let reals = self.resolve_paths(drives_of(spec).map(Path::to_owned));
        let backing = spec.disks.iter().flat_map(|disk| disk.backing.iter().flatten());
        let images = drives_of(spec).map(|path| reals.of(path));
        let mut images = images.chain(backing.map(|file| file.path.clone()));
        let Some(image) = images.find(|real| is_claimed(real, &spec.name)) else { return Ok(()) };
        let message = format!(
            "cannot accept VM \"{}\" on host {}: image {} is being written or deleted",
            spec.name,
            self.config.name,
            image.display()
        );
        let remedy = "wait until that ends, then migrate again";
        Err(ApiError::new(ErrorCode::Preflight, message, remedy))
    }
}

/// Whether an image is being created or deleted, or is written for another VM; also whether that
/// holds for another block device that has bytes of it.
fn is_claimed(real: &Path, vm: &str) -> bool {
    let is_made = |node: &Path| is_being_made(node, vm);
    let is_beside = || overlapping(real).is_ok_and(|all| all.iter().any(|node| is_made(node)));
    is_made(real) || (is_device_path(real) && is_beside())
}

/// Returns the images that snapshots need, which nobody may write.
fn images_of_snapshots(snapshots: &Snapshots, reals: &Resolved) -> Vec<Image> {
    snapshots.images().map(|path| Image::read(reals.of(path))).collect()
}

/// Returns for each disk its image and backing files.
fn images_of(spec: &ResolvedSpec, files: &OpenFiles) -> Vec<Vec<Image>> {
    let disks = spec.disks.iter().zip(&files.disks);
    let images = disks.map(|(disk, layers)| {
        let layers = layers.iter().enumerate().map(|(depth, layer)| Image {
            real: layer.file.real.clone(),
            is_written: depth == 0 && !disk.readonly,
        });
        layers.collect()
    });
    let media = files.cdroms.iter().flatten().map(|image| vec![Image::read(image.real.clone())]);
    images.chain(media).collect()
}

/// A VM of the table, with what is needed to know its images.
struct Known {
    name: VmName,
    spec: Arc<ResolvedSpec>,
    snapshots: Arc<Snapshots>,
    is_template: bool,
}

impl Known {
    fn of(name: &VmName, slot: &Slot) -> Known {
        Known {
            name: name.clone(),
            spec: slot.spec.clone(),
            snapshots: slot.snapshots.clone(),
            is_template: slot.condition.is_template(),
        }
    }
}

/// Returns the paths of a VM that have to be resolved to know its images.
fn named_images_of(vm: &Known) -> impl Iterator<Item = &Path> {
    vm.snapshots.images().chain(drives_of(&vm.spec))
}

/// Returns the images of a VM's disks and CDs.
fn drives_of(spec: &ResolvedSpec) -> impl Iterator<Item = &Path> {
    let disks = spec.disks.iter().map(|disk| disk.path.as_path());
    disks.chain(spec.cdroms.iter().filter_map(|drive| drive.image.as_deref()))
}

/// Returns the images of a VM without opening one. A template writes none, and nobody may write
/// what a snapshot needs. `reals`: of [`named_images_of`].
fn known_images_of(vm: &Known, reals: &Resolved) -> Vec<Image> {
    let Known { spec, snapshots, is_template, .. } = vm;
    let mut images = images_of_snapshots(snapshots, reals);
    for disk in &spec.disks {
        let real = reals.of(&disk.path);
        images.push(Image { real, is_written: !disk.readonly && !is_template });
        let backing = disk.backing.iter().flatten();
        images.extend(backing.map(|file| Image::read(file.path.clone())));
    }
    let media = spec.cdroms.iter().filter_map(|drive| drive.image.as_ref());
    images.extend(media.map(|image| Image::read(reals.of(image))));
    images
}

/// Returns the first image of `new` that is also among `others` and that either side writes.
fn shared_image<'a>(new: &'a [Image], others: &[Image]) -> Option<&'a Path> {
    let is_shared = |image: &&Image| {
        let mut same = others.iter().filter(|other| other.real == image.real);
        same.any(|other| other.is_written || image.is_written)
    };
    new.iter().find(is_shared).map(|image| image.real.as_path())
}

/// Returns an image that two disks of a VM use and that one of them writes.
fn image_of_two_disks(disks: &[Vec<Image>]) -> Option<&Path> {
    let mut with_next = disks.iter().zip(1..);
    with_next.find_map(|(disk, next)| shared_image(disk, &disks[next..].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(real: &str, is_written: bool) -> Image {
        Image { real: real.into(), is_written }
    }

    #[test]
    fn images_that_nobody_writes_may_be_shared() {
        let new = [image("/top", true), image("/base", false)];
        let shared = |other: Image| shared_image(&new, &[other]);
        assert_eq!(shared(image("/base", false)), None);
        assert_eq!(shared(image("/other", true)), None);
        // A base that another VM writes, and a disk that is another VM's base.
        assert_eq!(shared(image("/base", true)), Some(Path::new("/base")));
        assert_eq!(shared(image("/top", false)), Some(Path::new("/top")));
        assert_eq!(shared(image("/top", true)), Some(Path::new("/top")));
    }

    #[test]
    fn an_image_that_a_vm_writes_belongs_to_one_of_its_disks() {
        let readonly = || vec![image("/cd", false)];
        let overlay = |name: &str| vec![image(name, true), image("/base", false)];
        assert_eq!(image_of_two_disks(&[readonly(), overlay("/one"), overlay("/two")]), None);
        assert_eq!(image_of_two_disks(&[readonly(), readonly()]), None);
        let base = vec![image("/base", true)];
        for disks in [[overlay("/one"), base.clone()], [base, overlay("/one")]] {
            assert_eq!(image_of_two_disks(&disks), Some(Path::new("/base")));
        }
        let twice = [overlay("/one"), readonly(), overlay("/one")];
        assert_eq!(image_of_two_disks(&twice), Some(Path::new("/one")));
    }
}
