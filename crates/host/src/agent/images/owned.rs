//! The images that belong to one VM alone, and go with it if that is requested.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, DiskList, KeptImage, VmImages};
use godwit_qemu::VmName;
use rustix::fs::OFlags;

use super::MOST_DEEP;
use crate::agent::Agent;

impl Agent {
    /// Returns what `delete_disks` would delete of a VM's images, and what it would keep.
    pub fn images_of_vm(&self, name: &VmName) -> Result<VmImages, ApiError> {
        let (spec, in_doubt) = {
            let table = self.table();
            let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
            (slot.spec.clone(), slot.condition.is_in_doubt())
        };
        let layered = self.layered_images();
        let mut images = VmImages::default();
        for disk in &spec.disks {
            let reason = match (in_doubt, disk.readonly) {
                (true, _) => Some("another host may run the VM".to_owned()),
                (_, true) => Some("the VM only reads it".to_owned()),
                _ => self.other_use(name, &disk.path, &layered),
            };
            match reason {
                None => images.deleted.push(disk.path.clone()),
                Some(why) => images.kept.push(KeptImage { path: disk.path.clone(), why }),
            }
            let bases = disk.backing.iter().flatten().map(|file| file.path.clone());
            images.keep(bases, "it is a base of another image");
        }
        images.keep(spec.cdroms.iter().filter_map(|drive| drive.image.clone()), "it is a CD image");
        Ok(images)
    }

    /// Returns why an image of a VM is not the VM's alone; `None` if it is.
    fn other_use(
        &self,
        name: &VmName,
        path: &Path,
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
        let (_, above) = layered.iter().find(|(base, _)| *base == place.real)?;
        Some(format!("image {} is a layer on it", above.display()))
    }

    /// Returns an image in the host's directories for VMs whose header names this one as its
    /// backing file, also if no VM here uses it.
    pub(in crate::agent) fn layer_on(&self, path: &Path) -> Option<PathBuf> {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let layered = self.layered_images();
        layered.into_iter().find(|(base, _)| *base == real).map(|(_, above)| above)
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
