//! The definition of a VM: a text, a file of the host, or a domain of its libvirtd.

use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ErrorCode, ImportFrom, ImportVm};
use godwit_import::{Imported, Kind, MOST_TEXT_BYTES, kind_of};

use super::archive::{Archive, load_archive};
use crate::agent::Agent;
use crate::agent::images::foreign::read_bytes;
use crate::agent::vm_files::FileRule;
use crate::libvirt;

/// A definition with the archive that it came from.
pub(super) struct Loaded {
    pub(super) imported: Imported,
    /// Directory of the definition.
    pub(super) beside: Option<PathBuf>,
    pub(super) archive: Option<Archive>,
}

impl Agent {
    /// Reads the definition that a request names.
    pub(super) async fn load_definition(
        &self,
        request: &ImportVm,
        rule: FileRule,
    ) -> Result<Loaded, ApiError> {
        let read = |text: &[u8], beside: Option<&Path>| {
            let imported = kind_of(text).and_then(|kind| godwit_import::read(kind, text));
            let imported = imported.map_err(|error| unreadable(&error.to_string()))?;
            Ok(Loaded { imported, beside: beside.map(Path::to_owned), archive: None })
        };
        match &request.from {
            ImportFrom::Text(text) => read(text.as_bytes(), request.disks_in.as_deref()),
            ImportFrom::Libvirt(name) if request.vm_dirs_only => {
                let message = format!("cannot import domain \"{name}\": only an admin may");
                Err(ApiError::new(ErrorCode::Forbidden, message, "send its XML instead"))
            }
            ImportFrom::Libvirt(name) => {
                let text = libvirt::definition_of(&self.config.libvirt, name).await?;
                read(text.as_bytes(), None)
            }
            ImportFrom::File(path) => {
                let path = Path::new(path);
                let file = self.open_any(path, rule)?;
                let text = read_bytes(&file, 0, MOST_TEXT_BYTES as u64 + 1)
                    .map_err(|error| unreadable(&error.to_string()))?;
                match kind_of(&text) {
                    Ok(Kind::Ova) => {
                        let loaded = load_archive(file, path).map_err(|why| unreadable(&why));
                        let (imported, archive) = loaded?;
                        Ok(Loaded { imported, beside: None, archive: Some(archive) })
                    }
                    _ => read(&text, path.parent()),
                }
            }
        }
    }
}

fn unreadable(why: &str) -> ApiError {
    let message = format!("cannot read the definition: {why}");
    let remedy = "give a libvirt domain, a Proxmox VE configuration, an OVF descriptor or an OVA";
    ApiError::new(ErrorCode::InvalidRequest, message, remedy)
}
