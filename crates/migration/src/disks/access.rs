//! How the engine reaches disks.

use crate::failure::Failure;

/// Reads the disks of a guest. Each stream has one.
pub trait DiskReader: Send {
    /// Fills the buffer with the present content of a disk from an offset on.
    ///
    /// # Errors
    /// The reason, which ends the round.
    fn read_at(&mut self, disk: usize, at: u64, buffer: &mut [u8]) -> Result<(), Failure>;
}

/// Writes a disk that arrives. All streams share it. Ranges are within the size of the disk.
pub trait DiskWriter: Send + Sync {
    /// Writes bytes from an offset on.
    ///
    /// # Errors
    /// The reason, which the source receives.
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), Failure>;

    /// Makes bytes from an offset on zero.
    ///
    /// # Errors
    /// The reason, which the source receives.
    fn write_zeros(&self, at: u64, bytes: u64) -> Result<(), Failure>;

    /// Makes durable what was written before the call, by any thread.
    ///
    /// # Errors
    /// The reason, which the source receives.
    fn flush(&self) -> Result<(), Failure>;
}

/// Reads an image of a destination, which may hold content that arrives. All streams share it.
pub trait ImageReader: Send + Sync {
    /// Fills the buffer with the present content of the image's disk from an offset on.
    ///
    /// # Errors
    /// The reason: the source is then asked for the content.
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure>;
}
