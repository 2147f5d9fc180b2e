//! Record of a VM that agents restart among themselves, `vm.json` in its folder: what another host
//! needs to start it.
//!
//! Everyone who may write to the datastore as root may put something else there. So a record is
//! bounded, strict, and of this VM; its files are on the datastore, and its start uses nothing
//! outside of `vm_dirs`.

use std::path::{Component, Path};

use godwit_qemu::{Uuid, VmSpec};
use godwit_types::Incarnation;
use serde::{Deserialize, Serialize};

/// Format version.
const FORMAT: u32 = 1;
/// Longest record.
pub(super) const MOST_RECORD_BYTES: u64 = 1 << 20;
/// Longest name of a host.
const MOST_NAME_BYTES: usize = 255;
/// Longest problem.
const MOST_PROBLEM_BYTES: usize = 4096;

/// What another host needs to start the VM. The holder of its newest term writes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OwnRecord {
    format: u32,
    pub(crate) spec: VmSpec,
    /// Incarnation of the VM in this term; absent before its first start there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) incarnation: Option<Incarnation>,
    /// Newest term in which this was written.
    pub(crate) term: u64,
    /// Name of the host that holds the term.
    pub(crate) host: String,
    /// Why the VM did not start in that term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

impl OwnRecord {
    pub(crate) fn new(spec: VmSpec, term: u64, host: &str) -> OwnRecord {
        let host = host.to_owned();
        OwnRecord { format: FORMAT, spec, incarnation: None, term, host, problem: None }
    }

    /// Returns it with the reason why the VM did not start, as far as there is room for it.
    pub(crate) fn failed(self, why: &str) -> OwnRecord {
        let mut problem = String::new();
        for part in why.chars().filter(|part| !part.is_control()) {
            if problem.len() + part.len_utf8() > MOST_PROBLEM_BYTES {
                break;
            }
            problem.push(part);
        }
        OwnRecord { problem: Some(problem), ..self }
    }

    /// Reads a record of a VM.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn decode(bytes: &[u8], vm: Uuid) -> Result<OwnRecord, String> {
        let record: OwnRecord = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let OwnRecord { format, spec, host, problem, .. } = &record;
        if *format != FORMAT {
            return Err(format!("it has format {format}"));
        }
        spec.validate().map_err(|error| error.to_string())?;
        if spec.uuid != Some(vm) || !spec.protect_by_agents {
            return Err("it is of another VM".to_owned());
        }
        let is_text = |text: &str| !text.chars().any(char::is_control);
        let problem = problem.as_deref().unwrap_or_default();
        if !is_text(host) || host.is_empty() || host.len() > MOST_NAME_BYTES {
            return Err("its host has no name".to_owned());
        }
        if !is_text(problem) || problem.len() > MOST_PROBLEM_BYTES {
            return Err("its problem is no short text".to_owned());
        }
        Ok(record)
    }
}

/// Checks that all disks and CD-ROM images of a VM are below the directory of one datastore.
///
/// # Errors
/// Why other hosts could not start it.
pub(crate) fn check_images(spec: &VmSpec, directory: &Path) -> Result<(), String> {
    if spec.disks.is_empty() {
        return Err("it has no disk".to_owned());
    }
    let is_below = |image: &Path| {
        let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        image.starts_with(directory) && image != directory && image.components().all(is_plain)
    };
    match spec.images().find(|image| !is_below(image)) {
        None => Ok(()),
        Some(image) => Err(format!("{} is not below {}", image.display(), directory.display())),
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{Disk, DiskFormat};

    use super::*;

    const VM: Uuid = Uuid::from_u128(7);

    fn spec() -> VmSpec {
        VmSpec {
            disks: vec![Disk::new("/shared/web.raw", DiskFormat::Raw)],
            protect_by_agents: true,
            uuid: Some(VM),
            ..VmSpec::new("web")
        }
    }

    fn encoded(record: &OwnRecord) -> Vec<u8> {
        serde_json::to_vec(record).unwrap()
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = OwnRecord::new(spec(), 3, "a");
        assert_eq!(OwnRecord::decode(&encoded(&record), VM), Ok(record.clone()));
        let failed = record.failed(&format!("no\nroom{}", "é".repeat(MOST_PROBLEM_BYTES)));
        assert!(failed.problem.as_ref().unwrap().starts_with("noroom"));
        assert_eq!(OwnRecord::decode(&encoded(&failed), VM), Ok(failed));
    }

    #[test]
    fn a_record_of_another_form_or_vm_is_refused() {
        let good = OwnRecord::new(spec(), 3, "a");
        let with = |spec: VmSpec| OwnRecord { spec, ..good.clone() };
        for bad in [
            OwnRecord { format: 2, ..good.clone() },
            OwnRecord { host: String::new(), ..good.clone() },
            OwnRecord { host: "a\n".into(), ..good.clone() },
            OwnRecord { problem: Some("x".repeat(5000)), ..good.clone() },
            with(VmSpec { uuid: None, ..spec() }),
            with(VmSpec { uuid: Some(Uuid::from_u128(8)), ..spec() }),
            with(VmSpec { protect_by_agents: false, ..spec() }),
            with(VmSpec { qemu: Some("/tmp/qemu".into()), ..spec() }),
            with(VmSpec { vcpus: 0, ..spec() }),
        ] {
            assert!(OwnRecord::decode(&encoded(&bad), VM).is_err(), "{bad:?}");
        }
        let more = String::from_utf8(encoded(&good)).unwrap().replacen('{', "{\"more\":1,", 1);
        assert!(OwnRecord::decode(more.as_bytes(), VM).is_err());
        assert!(OwnRecord::decode(b"", VM).is_err());
    }

    #[test]
    fn images_outside_of_the_datastore_are_found() {
        let with = |path: &str| {
            check_images(
                &VmSpec { disks: vec![Disk::new(path, DiskFormat::Raw)], ..spec() },
                Path::new("/shared"),
            )
        };
        assert_eq!(with("/shared/deep/web.raw"), Ok(()));
        for bad in ["/shared", "/shared/../etc/passwd", "/sharedweb", "/etc/passwd", "rbd:a/b"] {
            assert!(with(bad).is_err(), "{bad}");
        }
        let bare = VmSpec { disks: Vec::new(), ..spec() };
        assert!(check_images(&bare, Path::new("/shared")).is_err());
    }
}
