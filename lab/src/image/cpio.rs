//! Writes the "newc" cpio archive that the kernel unpacks as its initramfs.
//!
//! Format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel. Times and
//! inode numbers are fixed, so that the same content gives the same bytes.

use anyhow::Context;

const FILE: u32 = 0o100_644;
const PROGRAM: u32 = 0o100_755;
const FOLDER: u32 = 0o040_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Archive under construction.
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub(super) fn new() -> Archive {
        Archive { bytes: Vec::new(), entries: 0 }
    }

    pub(super) fn folder(&mut self, path: &str) -> anyhow::Result<()> {
        self.entry(path, FOLDER, (0, 0), &[])
    }

    pub(super) fn file(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        self.entry(path, FILE, (0, 0), content)
    }

    pub(super) fn program(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        self.entry(path, PROGRAM, (0, 0), content)
    }

    pub(super) fn character_device(
        &mut self,
        path: &str,
        major: u32,
        minor: u32,
    ) -> anyhow::Result<()> {
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[])
    }

    /// Returns the archive with its trailer.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<u8>> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn entry(
        &mut self,
        path: &str,
        mode: u32,
        device: (u32, u32),
        content: &[u8],
    ) -> anyhow::Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len())
            .with_context(|| format!("{path} is too large for a newc archive"))?;
        let name_bytes = u32::try_from(path.len() + 1)?;
        // ino, mode, uid, gid, nlink, mtime, filesize, device of the file, device it represents,
        // namesize, check
        let fields =
            [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_bytes, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
        Ok(())
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpio_lists_and_unpacks_what_was_written() {
        let mut archive = Archive::new();
        archive.folder("dev").unwrap();
        archive.character_device("dev/console", 5, 1).unwrap();
        archive.program("init", b"#!/bin/true\n").unwrap();
        archive.file("empty", b"").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let mut cpio = std::process::Command::new("cpio");
        let listing =
            match super::super::run_with_input(cpio.args(["-itv", "--quiet", "-n"]), &bytes) {
                Ok(listing) => String::from_utf8(listing).unwrap(),
                Err(error) => return eprintln!("skipped: {error:#}"),
            };
        let lines: Vec<&str> = listing.lines().collect();
        assert_eq!(lines.len(), 4, "{listing}");
        assert!(lines[0].starts_with("drwxr-xr-x") && lines[0].ends_with(" dev"), "{listing}");
        assert!(lines[1].starts_with("crw-------") && lines[1].contains("5,   1"), "{listing}");
        assert!(lines[2].starts_with("-rwxr-xr-x") && lines[2].contains(" 12 "), "{listing}");
        assert!(lines[3].starts_with("-rw-r--r--") && lines[3].ends_with(" empty"), "{listing}");
    }
}
