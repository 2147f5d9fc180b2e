//! Disks of a trial's guests with content that can be checked: their first content, the rate of
//! their writers, the longest write, and the check.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use godwit_guest::control::{Answer, DiskFill, Request};
use godwit_guest::disks::{BASE_VERSION, WrittenDisk, disk_seed};

pub use godwit_guest::control::DiskFigures;

use crate::trial::Guest;

/// Name of the file by which agents recognise a directory for VMs.
pub const MARK: &str = ".godwit-datastore";

/// Writes a raw image that is the base of a guest's disk with this number, counted from 0. Guests
/// take its first `bytes` for content of their own. Only root can read it: the base of one host of
/// this machine is none of another's.
///
/// # Errors
/// The file exists or cannot be written.
pub fn write_base(path: &Path, number: usize, bytes: u64, virtual_bytes: u64) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(virtual_bytes)?;
        WrittenDisk::new(file, disk_seed(number)).fill(bytes, BASE_VERSION)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

impl Guest {
    /// Makes the guest fill the beginning of its disks, each by the name of its device, as far as
    /// their images do not hold that content.
    ///
    /// # Errors
    /// The guest does not answer, or a disk is too small.
    pub fn fill_disks(&self, disks: &[(&str, u64)]) -> Result<DiskFigures> {
        let fill =
            |(name, bytes): &(&str, u64)| DiskFill { name: (*name).to_owned(), bytes: *bytes };
        let disks = disks.iter().map(fill).collect();
        // Guests differ by their address.
        let version = BASE_VERSION + u64::from(self.ipv4.octets()[3]);
        figures(&self.ask_disks(&Request::FillDisks { disks, version })?)
    }

    /// Makes the guest rewrite the last part of what was filled at a rate, all disks together, and
    /// measure its longest write anew. With 0 it stops, and has flushed when this returns.
    ///
    /// # Errors
    /// The guest does not answer, or cannot flush.
    pub fn write_disks(&self, bytes_per_s: u64, region_bytes: u64) -> Result<DiskFigures> {
        figures(&self.ask_disks(&Request::WriteDisks { bytes_per_s, region_bytes })?)
    }

    /// Returns the figures since [`Guest::write_disks`] set a rate.
    ///
    /// # Errors
    /// The guest does not answer, or has filled no disk.
    pub fn disk_figures(&self) -> Result<DiskFigures> {
        figures(&self.status()?)
    }

    /// Makes the guest check every page of its disks, while it goes on writing them.
    ///
    /// # Errors
    /// A page is wrong, a write failed, or the guest does not answer.
    pub fn verify_disks(&self) -> Result<Answer> {
        let verdict = self.ask_disks(&Request::VerifyDisks {})?;
        let failed = verdict.disks.map_or(0, |disks| disks.failed_writes);
        let is_right = verdict.wrong == Some(0) && verdict.pages > 0 && failed == 0;
        ensure!(is_right, "the guest's disks are not right: {verdict:?}");
        Ok(verdict)
    }

    fn ask_disks(&self, request: &Request) -> Result<Answer> {
        let answer = self.ask_at(self.address(), request)?;
        ensure!(answer.ok, "the guest's disks: {answer:?}");
        Ok(answer)
    }
}

fn figures(answer: &Answer) -> Result<DiskFigures> {
    answer.disks.with_context(|| format!("the guest has filled no disk: {answer:?}"))
}
