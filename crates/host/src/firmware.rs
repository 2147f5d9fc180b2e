//! UEFI firmware on this host: its images, and the variables of each VM.
//!
//! The code is the distribution's file, shared by all VMs. The variables are a file for each VM in
//! the agent's state, which goes with the VM's record. QEMU writes each change of a variable to the
//! file at once.
//!
//! **A move.** The code and the variables are RAM of QEMU that Godwit does not move itself: they
//! are in QEMU's stream. A destination's QEMU writes the variables to its file when the guest
//! begins to run there (`postload_update_cb`, hw/block/pflash_cfi01.c), and not if the guest
//! arrives paused. So the destination begins with a copy of the source's file.
//!
//! **A lost write.** QEMU does not mark a page of flash as dirty when the guest writes a variable
//! (7.2 to 10.0): a write after the page was sent does not arrive, and the destination puts the old
//! content into its file. The source's file has the write. So a source compares its file once the
//! vCPUs have stopped with the content before QEMU's stream began ([`VariablesWatch`]), and keeps
//! the guest if they differ.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use godwit_migration::Failure;
use godwit_qemu::{DESCRIPTION_DIRS, FLASH_SECTOR_BYTES, Firmware, FirmwareImages};
use godwit_types::FailureCode;
use serde::Deserialize;

/// Longest variables. Base64 of them must fit into a request of 1 MiB. Those of OVMF have 528 KiB
/// (or 128 KiB in builds of 2 MiB).
const MOST_VARIABLES_BYTES: u64 = 640 << 10;
/// Start of the names of all versions of machine type q35.
const ANY_Q35: &str = "pc-q35-";
/// Most bytes of both flash units together (`max-fw-size` of QEMU 7.2 to 10.0).
const MOST_FLASH_BYTES: u64 = 8 << 20;

/// Images of UEFI firmware in place of those that QEMU's packages describe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct FirmwareConfig {
    /// Images of firmware `uefi`.
    pub uefi: Option<FirmwareImages>,
    /// Images of firmware `uefi-secure`; their variables have the keys enrolled.
    pub uefi_secure: Option<FirmwareImages>,
}

impl FirmwareConfig {
    fn configured(&self, firmware: Firmware) -> Option<&FirmwareImages> {
        match firmware {
            Firmware::Bios => None,
            Firmware::Uefi => self.uefi.as_ref(),
            Firmware::UefiSecure => self.uefi_secure.as_ref(),
        }
    }

    /// Returns the images of a firmware for a machine type, if this host has any.
    pub(crate) fn images(&self, firmware: Firmware, machine: &str) -> Option<FirmwareImages> {
        let described =
            || FirmwareImages::find(&DESCRIPTION_DIRS.map(Path::new), firmware, machine);
        self.configured(firmware).cloned().or_else(described)
    }

    /// Returns the firmware that VMs of machine type q35 may have on this host.
    pub(crate) fn available(&self) -> Vec<Firmware> {
        let all = [Firmware::Bios, Firmware::Uefi, Firmware::UefiSecure];
        let has =
            |firmware: &Firmware| firmware.is_bios() || self.images(*firmware, ANY_Q35).is_some();
        all.into_iter().filter(has).collect()
    }

    /// Returns the paths of all images, with their keys.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (&'static str, &PathBuf)> {
        let all = [("firmware.uefi", &self.uefi), ("firmware.uefi-secure", &self.uefi_secure)];
        let all = all.into_iter().filter_map(|(key, images)| Some((key, images.as_ref()?)));
        all.flat_map(|(key, images)| [(key, &images.code), (key, &images.variables)])
    }
}

/// Images of a firmware, checked and open.
#[derive(Debug)]
pub(crate) struct OpenImages {
    pub(crate) paths: FirmwareImages,
    pub(crate) code: File,
    pub(crate) code_bytes: u64,
    pub(crate) template: File,
    pub(crate) template_bytes: u64,
}

impl OpenImages {
    /// Opens images for reading.
    ///
    /// # Errors
    /// The image that cannot be used, and why.
    pub(crate) fn open(paths: FirmwareImages) -> Result<OpenImages, (PathBuf, io::Error)> {
        let (code, code_bytes) = open_image(&paths.code)?;
        let (template, template_bytes) = open_image(&paths.variables)?;
        let why = if code_bytes + template_bytes > MOST_FLASH_BYTES {
            format!("with its variables it has more than {} MiB", MOST_FLASH_BYTES >> 20)
        } else if template_bytes > MOST_VARIABLES_BYTES {
            format!("its variables have more than {} KiB", MOST_VARIABLES_BYTES >> 10)
        } else {
            return Ok(OpenImages { paths, code, code_bytes, template, template_bytes });
        };
        Err((paths.code, io::Error::new(io::ErrorKind::InvalidData, why)))
    }

    /// Reads the template of the variables.
    pub(crate) fn template(&self) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        (&self.template).take(MOST_VARIABLES_BYTES + 1).read_to_end(&mut content)?;
        Ok(content)
    }
}

fn open_image(path: &Path) -> Result<(File, u64), (PathBuf, io::Error)> {
    let opened = File::open(path).and_then(|file| {
        let data = file.metadata()?;
        let is_flash = data.is_file() && data.len() > 0 && data.len() % FLASH_SECTOR_BYTES == 0;
        if is_flash {
            return Ok((file, data.len()));
        }
        let why = format!("it is not a flash image of whole sectors of {FLASH_SECTOR_BYTES} bytes");
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    });
    opened.map_err(|why| (path.to_owned(), why))
}

/// Reads a VM's variables. Its QEMU can write the file, also beyond their size.
///
/// # Errors
/// The file cannot be read, or has more bytes than any variables.
pub(crate) fn read_variables(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(MOST_VARIABLES_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MOST_VARIABLES_BYTES {
        let why = format!("it has more than {} KiB", MOST_VARIABLES_BYTES >> 10);
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(content)
}

/// Variables of a running VM since a moment before QEMU's stream begins.
#[derive(Debug)]
pub(crate) struct VariablesWatch {
    path: PathBuf,
    before: Vec<u8>,
}

impl VariablesWatch {
    pub(crate) fn begin(path: PathBuf) -> io::Result<VariablesWatch> {
        let before = read_variables(&path)?;
        Ok(VariablesWatch { path, before })
    }

    /// Checks that the guest has written no variable. Takes 0.1 ms: the file is in the page cache.
    ///
    /// # Errors
    /// It has written one, or the file cannot be read.
    pub(crate) fn unchanged(&self) -> Result<(), Failure> {
        let failed = |detail: String| Err(Failure::new(FailureCode::FirmwareWritten, detail));
        match read_variables(&self.path) {
            Ok(now) if now == self.before => Ok(()),
            Ok(_) => failed(
                "the guest wrote variables of its UEFI firmware while QEMU moved them: they would \
                 be lost at the destination"
                    .to_owned(),
            ),
            Err(error) => failed(format!("cannot read {}: {error}", self.path.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_variable_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("uefi.variables");
        std::fs::write(&path, [0xff; 4096]).unwrap();
        let watch = VariablesWatch::begin(path.clone()).unwrap();
        watch.unchanged().unwrap();
        std::fs::write(&path, [0x7f; 4096]).unwrap();
        assert_eq!(watch.unchanged().unwrap_err().code, FailureCode::FirmwareWritten);
        // A QEMU that its guest controls can make the file as long as it likes.
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(watch.unchanged().unwrap_err().detail.contains("more than 640 KiB"));
        std::fs::remove_file(&path).unwrap();
        watch.unchanged().unwrap_err();
    }

    #[test]
    fn images_are_whole_sectors_and_fit_into_flash() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, bytes: u64| {
            let path = dir.path().join(name);
            File::create(&path).unwrap().set_len(bytes).unwrap();
            path
        };
        let open = |code_bytes, variables_bytes| {
            let (code, variables) = (make("code", code_bytes), make("vars", variables_bytes));
            OpenImages::open(FirmwareImages { code, variables })
        };
        let images = open(3_653_632, 540_672).unwrap();
        assert_eq!((images.code_bytes, images.template().unwrap().len()), (3_653_632, 540_672));
        for (code_bytes, variables_bytes) in
            [(4097, 4096), (4096, 0), (8 << 20, 4096), (4096, 644 << 10)]
        {
            open(code_bytes, variables_bytes).unwrap_err();
        }
    }
}
