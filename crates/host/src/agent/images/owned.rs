//! The images that belong to one VM alone, and go with it if that is requested.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ErrorCode, VmImages};
use godwit_qemu::{ImageError, ResolvedSpec, VmName, image_head};
use rustix::fs::OFlags;

use super::{WRITTEN, walk_permit};
use crate::agent::Agent;
use crate::snapshots::Snapshots;

/// Most entries below `vm_dirs` that are looked at for layers.
const MOST_WALKED: usize = 100_000;
/// Depth of the directories below `vm_dirs` that are looked at for layers.
const MOST_WALKED_DEEP: usize = 16;

impl Agent {
    /// Returns what `delete_disks` would delete of a VM's images, and what it would keep.
    pub async fn images_of_vm(&self, name: &VmName) -> Result<VmImages, ApiError> {
        let _turn = walk_permit().await;
        tokio::task::block_in_place(|| self.images_now(name))
    }

    fn images_now(&self, name: &VmName) -> Result<VmImages, ApiError> {
        let (spec, in_doubt, has_process) = {
            let table = self.table();
            let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
            (slot.spec.clone(), slot.condition.is_in_doubt(), slot.vm.is_some())
        };
        let snapshots = self.snapshots_of(name)?;
        let own = own_images(&snapshots, &spec);
        let layered = self.layered_images()?;
        let mut images = VmImages::default();
        for path in own.iter() {
            let reason = match in_doubt {
                true => Some("another host may run the VM".to_owned()),
                false => self.other_use(name, path, &own, &layered),
            };
            // The VM's own QEMU has locks, too.
            let reason = reason.or_else(|| match has_process {
                true => None,
                false => self.foreign_writer(path),
            });
            match reason {
                None => images.deleted.push(path.clone()),
                Some(why) => images.keep([path.clone()], &why),
            }
        }
        let read = spec.disks.iter().filter(|disk| disk.readonly).map(|disk| disk.path.clone());
        images.keep(read, "the VM only reads it");
        let bases = spec.disks.iter().flat_map(|disk| disk.backing.iter().flatten());
        let bases = bases.map(|file| file.path.clone()).filter(|path| !own.contains(path));
        images.keep(bases, "it is a base of another image");
        images.keep(spec.cdroms.iter().filter_map(|drive| drive.image.clone()), "it is a CD image");
        Ok(images)
    }

    /// Returns why an image of a VM is not the VM's alone; `None` if it is.
    fn other_use(
        &self,
        name: &VmName,
        path: &Path,
        own: &BTreeSet<PathBuf>,
        layered: &BTreeSet<(PathBuf, PathBuf)>,
    ) -> Option<String> {
        let place = match self.place(path, "delete") {
            Ok(place) => place,
            Err(_) => return Some("it is not in the host's directories for VMs".to_owned()),
        };
        if let Err(error) = place.open(OFlags::PATH) {
            return Some(error.to_string());
        }
        let found = self.users_of_any_file(&place.real);
        if let Some((other, _)) = found.users.iter().find(|(user, _)| user != name) {
            return Some(format!("VM \"{other}\" uses it"));
        }
        if let Some((other, file)) = found.unknown {
            let file = file.display();
            return Some(format!(
                "VM \"{other}\" may use it: the storage of {file} hangs or fails"
            ));
        }
        let (_, above) =
            layered.iter().find(|(base, above)| *base == place.real && !own.contains(above))?;
        Some(format!("image {} is a layer on it", above.display()))
    }

    /// Returns why an image without a process here is not to be deleted, if another program's QEMU
    /// writes it.
    fn foreign_writer(&self, path: &Path) -> Option<String> {
        let place = self.place(path, "delete").ok()?;
        place.refuse_writers().err().map(|_| WRITTEN.to_owned())
    }

    /// Returns the images in the host's directories for VMs whose headers name this one as their
    /// backing file, also if no VM here uses them.
    ///
    /// # Errors
    /// Not all images could be looked at.
    pub(in crate::agent) fn layers_on(&self, path: &Path) -> Result<Vec<PathBuf>, ApiError> {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let layered = self.layered_images()?.into_iter();
        Ok(layered.filter(|(base, _)| *base == real).map(|(_, above)| above).collect())
    }

    /// Returns the images in the host's directories for VMs that have a backing file: the real
    /// path of that, and the image.
    fn layered_images(&self) -> Result<BTreeSet<(PathBuf, PathBuf)>, ApiError> {
        let mut walk = Walk::default();
        for dir in &self.config().vm_dirs {
            walk.look_below(dir, 0).map_err(|(path, why)| {
                let path = path.display();
                let message = format!("cannot find out which images are layered on others: {why}");
                let remedy = format!("correct {path}, or move it out of the vm_dirs");
                ApiError::new(ErrorCode::HostFailed, format!("{message} ({path})"), remedy)
            })?;
        }
        Ok(walk.layered)
    }
}

/// A look at the headers of all files below the host's directories for VMs.
#[derive(Default)]
struct Walk {
    entries: usize,
    /// Real path of a backing file, and the image that names it.
    layered: BTreeSet<(PathBuf, PathBuf)>,
}

impl Walk {
    /// Looks at a directory that is `depth` below one of `vm_dirs`. A missing one is empty.
    ///
    /// # Errors
    /// What could not be looked at, and why.
    fn look_below(&mut self, dir: &Path, depth: usize) -> Result<(), (PathBuf, String)> {
        let failed = |error: io::Error| (dir.to_owned(), error.to_string());
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let (path, kind) = (entry.path(), entry.file_type().map_err(failed)?);
            self.entries += 1;
            if self.entries > MOST_WALKED || depth > MOST_WALKED_DEEP {
                return Err((dir.to_owned(), "there are too many files in it".to_owned()));
            }
            if kind.is_dir() {
                self.look_below(&path, depth + 1)?;
            } else if kind.is_file()
                && let Some(base) = backing_of(&path).map_err(|error| (path.clone(), error))?
            {
                self.layered.insert((base, path));
            }
        }
        Ok(())
    }
}

/// Returns the real path of an image's backing file. A file that is gone by now has none, nor has
/// one with the header of another format.
fn backing_of(path: &Path) -> Result<Option<PathBuf>, String> {
    let flags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK);
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let backing = match image_head(&file) {
        Ok(head) => head.backing,
        Err(ImageError::Read(error)) => return Err(error.to_string()),
        Err(ImageError::NoBackingFormat { file } | ImageError::Unsupported { file, .. }) => {
            Some(file)
        }
        Err(_) => None,
    };
    let base = backing.zip(path.parent()).map(|(backing, dir)| dir.join(backing));
    Ok(base.map(|base| base.canonicalize().unwrap_or(base)))
}

/// Returns the images that a VM writes, or has written before a snapshot. A layer that neither the
/// VM nor a snapshot names was detached, and is not the VM's.
fn own_images(snapshots: &Snapshots, spec: &ResolvedSpec) -> BTreeSet<PathBuf> {
    let specs = snapshots.all.iter().map(|snapshot| &snapshot.spec).chain([spec]);
    let mut own = BTreeSet::new();
    for disk in specs.flat_map(|spec| &spec.disks).filter(|disk| !disk.readonly) {
        own.insert(disk.path.clone());
        // The image below a layer of a snapshot was the VM's before.
        let mut above = &disk.path;
        for file in disk.backing.iter().flatten() {
            if !snapshots.layers.contains(above) {
                break;
            }
            own.insert(file.path.clone());
            above = &file.path;
        }
    }
    own
}
