//! The images that belong to one VM alone, and go with it if that is requested.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, DiskList, VmImages};
use godwit_qemu::{ResolvedSpec, VmName};
use rustix::fs::OFlags;

use super::MOST_DEEP;
use crate::agent::Agent;
use crate::snapshots::Snapshots;

impl Agent {
    /// Returns what `delete_disks` would delete of a VM's images, and what it would keep.
    pub fn images_of_vm(&self, name: &VmName) -> Result<VmImages, ApiError> {
        let (spec, in_doubt) = {
            let table = self.table();
            let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
            (slot.spec.clone(), slot.condition.is_in_doubt())
        };
        let snapshots = self.snapshots_of(name)?;
        let own = own_images(&snapshots, &spec);
        let layered = self.layered_images();
        let mut images = VmImages::default();
        for path in own.iter() {
            let reason = match in_doubt {
                true => Some("another host may run the VM".to_owned()),
                false => self.other_use(name, path, &own, &layered),
            };
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
        let users = self.users_of_file(&place.real);
        if let Some((other, _)) = users.iter().find(|(user, _)| user != name) {
            return Some(format!("VM \"{other}\" uses it"));
        }
        let (_, above) =
            layered.iter().find(|(base, above)| *base == place.real && !own.contains(above))?;
        Some(format!("image {} is a layer on it", above.display()))
    }

    /// Returns the images in the host's directories for VMs whose headers name this one as their
    /// backing file, also if no VM here uses them.
    pub(in crate::agent) fn layers_on(&self, path: &Path) -> Vec<PathBuf> {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let layered = self.layered_images().into_iter();
        layered.filter(|(base, _)| *base == real).map(|(_, above)| above).collect()
    }

    /// Returns the images in the host's directories for VMs that have a backing file: the real
    /// path of that, and the image.
    fn layered_images(&self) -> BTreeSet<(PathBuf, PathBuf)> {
        let mut list = DiskList::default();
        for dir in &self.config().vm_dirs {
            self.list_below(dir, MOST_DEEP, &mut list);
        }
        let named = list.disks.into_iter().filter_map(|disk| {
            let base = disk.path.parent()?.join(disk.backing?);
            Some((base.canonicalize().unwrap_or(base), disk.path))
        });
        named.collect()
    }
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
