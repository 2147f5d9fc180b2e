//! Firmware of VMs: the images of this host, and QEMU's arguments.
//!
//! UEFI has two images: the code, which all VMs share and only read, and a store of variables,
//! which each VM has for itself. QEMU's packages describe the installed images in JSON files
//! (docs/interop/firmware.json of QEMU 7.2). The first file that fits, in the order of the names,
//! is the distribution's choice.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};
use crate::spec::{Firmware, ResolvedSpec};

/// Directories of descriptions, the administrator's first. A file there replaces one of the same
/// name in a later directory.
pub const DESCRIPTION_DIRS: [&str; 2] = ["/etc/qemu/firmware", "/usr/share/qemu/firmware"];
/// Longest description that is read.
const MOST_DESCRIPTION_BYTES: u64 = 64 << 10;
/// Size of a sector of the flash (`FLASH_SECTOR_SIZE`, QEMU 7.2 to 10.0).
pub const FLASH_SECTOR_BYTES: u64 = 4096;

/// The two images of a UEFI firmware.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirmwareImages {
    /// The code, raw.
    pub code: PathBuf,
    /// Template of the variables, raw.
    pub variables: PathBuf,
}

impl FirmwareImages {
    /// Finds the images that descriptions in `dirs` name for this firmware and machine type. A file
    /// that is not a description is passed over.
    #[must_use]
    pub fn find(dirs: &[&Path], firmware: Firmware, machine: &str) -> Option<FirmwareImages> {
        let mut files: BTreeMap<_, PathBuf> = BTreeMap::new();
        for dir in dirs {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().extension() == Some(OsStr::new("json")) {
                    files.entry(entry.file_name()).or_insert_with(|| entry.path());
                }
            }
        }
        files.values().find_map(|file| Description::read(file)?.images(firmware, machine))
    }
}

/// A description of a firmware, as far as it is needed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Description {
    #[serde(default)]
    interface_types: Vec<String>,
    mapping: Mapping,
    #[serde(default)]
    targets: Vec<Target>,
    #[serde(default)]
    features: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mapping {
    device: String,
    executable: Option<ImageFile>,
    nvram_template: Option<ImageFile>,
}

#[derive(Debug, Deserialize)]
struct ImageFile {
    filename: PathBuf,
    format: String,
}

#[derive(Debug, Deserialize)]
struct Target {
    architecture: String,
    #[serde(default)]
    machines: Vec<String>,
}

impl Description {
    /// Reads a description. An empty file, which hides one of the same name, is none.
    fn read(file: &Path) -> Option<Description> {
        let is_short =
            std::fs::metadata(file).is_ok_and(|data| data.len() <= MOST_DESCRIPTION_BYTES);
        let text = is_short.then(|| std::fs::read(file).ok()).flatten()?;
        serde_json::from_slice(&text).ok()
    }

    fn images(self, firmware: Firmware, machine: &str) -> Option<FirmwareImages> {
        let has = |feature: &str| self.features.iter().any(|known| known == feature);
        let fits = match firmware {
            Firmware::Bios => false,
            Firmware::Uefi => !has("requires-smm"),
            Firmware::UefiSecure => {
                has("secure-boot") && has("enrolled-keys") && has("requires-smm")
            }
        };
        let is_uefi = self.interface_types.iter().any(|kind| kind == "uefi");
        let has_target = self.targets.iter().any(|target| {
            target.architecture == "x86_64"
                && target.machines.iter().any(|pattern| matches_machine(pattern, machine))
        });
        if !(fits && is_uefi && has_target && self.mapping.device == "flash") {
            return None;
        }
        let raw = |image: Option<ImageFile>| {
            image.filter(|image| image.format == "raw").map(|image| image.filename)
        };
        Some(FirmwareImages {
            code: raw(self.mapping.executable)?,
            variables: raw(self.mapping.nvram_template)?,
        })
    }
}

/// Whether a machine type matches a pattern, in which a final `*` stands for anything.
fn matches_machine(pattern: &str, machine: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => machine.starts_with(start),
        None => machine == pattern,
    }
}

/// Open images of a VM's firmware.
#[derive(Debug)]
pub struct OpenFirmware {
    /// The code, open for reading.
    pub code: OwnedFd,
    /// The VM's variables, open for reading and writing.
    pub variables: OwnedFd,
}

impl OpenFirmware {
    /// Returns the numbers of the descriptors: code, variables.
    pub(crate) fn numbers(&self) -> (RawFd, RawFd) {
        (self.code.as_raw_fd(), self.variables.as_raw_fd())
    }
}

/// Names of the block nodes, in the order of the flash units.
const NODES: [&str; 2] = ["firmware-code", "firmware-variables"];

/// Returns the options of `-machine` for a firmware in flash.
pub(crate) fn machine_options(firmware: Firmware) -> String {
    let [code, variables] = NODES;
    match firmware {
        Firmware::Bios => String::new(),
        Firmware::Uefi => format!(",pflash0={code},pflash1={variables}"),
        // Only code in system management mode may write the variables.
        Firmware::UefiSecure => format!(",smm=on,pflash0={code},pflash1={variables}"),
    }
}

/// Returns the arguments of a firmware in flash: option and value. `first_set`: number of a
/// descriptor's set, less the number of the descriptor.
pub(crate) fn arguments(
    spec: &ResolvedSpec,
    (code, variables): (RawFd, RawFd),
    first_set: RawFd,
) -> Vec<(&'static str, String)> {
    let mut arguments = Vec::new();
    for (node, number, readonly) in [(NODES[0], code, true), (NODES[1], variables, false)] {
        let set = number + first_set;
        arguments.push(("-add-fd", format!("fd={number},set={set}")));
        // Many QEMUs share the code. The variables are locked as a disk is.
        let locking = if readonly { "off" } else { "on" };
        let file: Value = json!({"driver": "file", "filename": format!("/dev/fdset/{set}"),
            "locking": locking, "read-only": readonly});
        let image =
            json!({"driver": "raw", "node-name": node, "file": file, "read-only": readonly});
        arguments.push(("-blockdev", image.to_string()));
    }
    if spec.firmware == Firmware::UefiSecure {
        let secure = "driver=cfi.pflash01,property=secure,value=on".to_owned();
        arguments.push(("-global", secure));
        // 64-bit OVMF with system management mode does not resume from S3 (OvmfPkg/README, 2022).
        arguments.push(("-global", "driver=ICH9-LPC,property=disable_s3,value=1".to_owned()));
    }
    arguments
}

impl Qmp {
    /// Returns the size of a flash unit of the machine, in bytes.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if the machine has no such unit.
    pub async fn flash_bytes(&self, unit: u32) -> Result<u64, QmpError> {
        let path = format!("/machine/system.flash{unit}");
        let wanted = json!({"path": path, "property": "num-blocks"});
        let sectors = self.execute("qom-get", wanted).await?;
        let sectors = sectors.as_u64().ok_or_else(|| QmpError::Protocol {
            why: "the response to qom-get is not a number".to_owned(),
        })?;
        Ok(sectors.saturating_mul(FLASH_SECTOR_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(dir: &Path, name: &str, features: &[&str], format: &str, machines: &[&str]) {
        let image = |what: &str| json!({"filename": format!("/{name}.{what}"), "format": format});
        let text = json!({
            "description": "UEFI", "interface-types": ["uefi"], "tags": [], "features": features,
            "mapping": {"device": "flash", "executable": image("code"),
                "nvram-template": image("vars")},
            "targets": [{"architecture": "x86_64", "machines": machines}],
        });
        std::fs::write(dir.join(format!("{name}.json")), text.to_string()).unwrap();
    }

    #[test]
    fn the_first_description_that_fits_is_taken() {
        let (etc, usr) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (both, q35) = (["pc-i440fx-*", "pc-q35-*"], ["pc-q35-*"]);
        let enrolled = ["enrolled-keys", "requires-smm", "secure-boot"];
        describe(usr.path(), "40-enrolled", &enrolled, "raw", &q35);
        describe(usr.path(), "50-secure", &["requires-smm", "secure-boot"], "raw", &q35);
        describe(usr.path(), "55-qcow2", &[], "qcow2", &both);
        describe(usr.path(), "60-plain", &["acpi-s3"], "raw", &both);
        std::fs::write(usr.path().join("10-broken.json"), "{").unwrap();
        std::fs::write(usr.path().join("11-empty.json"), "").unwrap();
        let find = |firmware, machine| {
            let found = FirmwareImages::find(&[etc.path(), usr.path()], firmware, machine);
            found.map(|images| images.code.display().to_string())
        };
        assert_eq!(find(Firmware::Uefi, "pc-q35-7.2").as_deref(), Some("/60-plain.code"));
        assert_eq!(find(Firmware::Uefi, "pc-i440fx-7.2").as_deref(), Some("/60-plain.code"));
        assert_eq!(find(Firmware::UefiSecure, "pc-q35-7.2").as_deref(), Some("/40-enrolled.code"));
        assert_eq!(find(Firmware::UefiSecure, "pc-i440fx-7.2"), None);
        assert_eq!(find(Firmware::Bios, "pc-q35-7.2"), None);
        // The administrator's file hides the distribution's.
        describe(etc.path(), "30-own", &[], "raw", &both);
        std::fs::write(etc.path().join("40-enrolled.json"), "").unwrap();
        assert_eq!(find(Firmware::Uefi, "pc-q35-7.2").as_deref(), Some("/30-own.code"));
        assert_eq!(find(Firmware::UefiSecure, "pc-q35-7.2"), None);
        assert_eq!(FirmwareImages::find(&[], Firmware::Uefi, "pc-q35-7.2"), None);
    }

    #[test]
    fn uefi_needs_a_machine_with_flash() {
        use Firmware as F;
        for (firmware, machine, fits) in [
            (F::Bios, "microvm", true),
            (F::Uefi, "pc-q35-7.2", true),
            (F::Uefi, "pc-i440fx-10.0", true),
            (F::Uefi, "microvm", false),
            (F::Uefi, "isapc", false),
            (F::UefiSecure, "pc-q35-10.0", true),
            (F::UefiSecure, "pc-i440fx-7.2", false),
        ] {
            let checked = firmware.check_machine(machine);
            assert_eq!(checked.is_ok(), fits, "{firmware} {machine}");
            if let Err(error) = checked {
                assert!(error.to_string().contains(machine) && error.remedy().contains("q35"));
            }
        }
    }

    #[test]
    fn names_are_those_of_the_specification() {
        for name in Firmware::NAMES {
            let firmware: Firmware = serde_json::from_value(name.into()).unwrap();
            assert_eq!(firmware.name(), name);
        }
    }
}
