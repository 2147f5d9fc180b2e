//! Writers of the guest's disks, at a rate that is set, and the check of what they wrote.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use godwit_guest::{
    control::{DiskFigures, DiskFill},
    disks::{BASE_VERSION, PIECE_BYTES, WrittenDisk, disk_seed},
    memory::Verdict,
    pattern,
};
use rustix::fs::OFlags;

use crate::guest::{Guest, lock};

/// Names of the writers, one for each disk that can be filled.
pub(crate) const WRITERS: [&str; 4] = ["disk0", "disk1", "disk2", "disk3"];
/// Most that a writer makes up for after falling behind (the VM was paused, or the disk is slow).
const LARGEST_DEBT: Duration = Duration::from_millis(500);
/// Delay after a write that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Bytes of a sector in /sys/block.
const SECTOR_BYTES: u64 = 512;

/// Disks that were filled.
#[derive(Default)]
pub(crate) struct Disks {
    filled: Mutex<Vec<Arc<Mutex<WrittenDisk>>>>,
    pace: Mutex<Pace>,
    pace_changed: Condvar,
    /// Bytes that can be checked.
    bytes: AtomicU64,
    written_bytes: AtomicU64,
    longest_ns: AtomicU64,
    failed: AtomicU64,
}

/// Rate of all writers together, and where they write.
#[derive(Clone, Copy, Default)]
struct Pace {
    bytes_per_s: u64,
    region_bytes: u64,
    /// Changes with the pace.
    epoch: u64,
}

impl Disks {
    /// Opens and fills disks, in the place of those that were filled before.
    pub(crate) fn fill(&self, fills: &[DiskFill], version: u64) -> anyhow::Result<()> {
        let most = WRITERS.len();
        ensure!((1..=most).contains(&fills.len()), "{} disks: give 1 to {most}", fills.len());
        ensure!(version > BASE_VERSION, "version {version} is that of bases");
        self.set_pace(0, 0)?;
        let mut filled = Vec::new();
        for (number, DiskFill { name, bytes }) in fills.iter().enumerate() {
            let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase());
            ensure!(is_name && !name.is_empty(), "{name:?} is no disk");
            let sectors = fs::read_to_string(format!("/sys/block/{name}/size"))
                .with_context(|| format!("there is no disk {name}"))?;
            let size = sectors.trim().parse::<u64>()?.saturating_mul(SECTOR_BYTES);
            ensure!(
                (PIECE_BYTES as u64..=size).contains(bytes),
                "disk {name} has {size} bytes, and {bytes} cannot be filled"
            );
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(OFlags::DIRECT.bits().cast_signed())
                .open(format!("/dev/{name}"))
                .with_context(|| format!("cannot open disk {name}"))?;
            let mut disk = WrittenDisk::new(file, disk_seed(number));
            disk.fill(*bytes, version).with_context(|| format!("cannot fill disk {name}"))?;
            filled.push(Arc::new(Mutex::new(disk)));
        }
        let pieces: u64 = filled.iter().map(|disk| lock(disk).pieces()).sum();
        self.bytes.store(pieces * PIECE_BYTES as u64, Ordering::Relaxed);
        *lock(&self.filled) = filled;
        Ok(())
    }

    /// Changes the rate. When this returns, no writer works at the former rate.
    pub(crate) fn set_pace(&self, bytes_per_s: u64, region_bytes: u64) -> anyhow::Result<()> {
        {
            let mut pace = lock(&self.pace);
            *pace = Pace { bytes_per_s, region_bytes, epoch: pace.epoch + 1 };
        }
        self.pace_changed.notify_all();
        for disk in self.filled() {
            // The writer holds the lock during a write.
            let disk = lock(&disk);
            if bytes_per_s == 0 {
                disk.flush().context("cannot flush a disk")?;
            }
        }
        // Without a rate the figures of the last one stay.
        if bytes_per_s > 0 {
            self.longest_ns.store(0, Ordering::Relaxed);
            self.written_bytes.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Checks all disks piece by piece, while they are written.
    pub(crate) fn verify(&self) -> anyhow::Result<Verdict> {
        let mut verdict = Verdict::default();
        for disk in self.filled() {
            let pieces = lock(&disk).pieces();
            for piece in 0..pieces {
                lock(&disk).verify(piece, &mut verdict).context("cannot read a disk")?;
            }
        }
        ensure!(verdict.pages > 0, "no disk was filled");
        Ok(verdict)
    }

    /// Returns the figures, also while a write waits; `None` if no disk was filled.
    pub(crate) fn figures(&self) -> Option<DiskFigures> {
        let disks = self.filled().len();
        (disks > 0).then(|| DiskFigures {
            disks: disks as u64,
            bytes: self.bytes.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
            longest_write_ms: self.longest_ns.load(Ordering::Relaxed) as f64 / 1e6,
            failed_writes: self.failed.load(Ordering::Relaxed),
        })
    }

    fn filled(&self) -> Vec<Arc<Mutex<WrittenDisk>>> {
        lock(&self.filled).clone()
    }

    fn pace(&self) -> Pace {
        *lock(&self.pace)
    }

    /// Waits until the pace changes, at most for a time.
    fn wait_for_pace(&self, epoch: u64, limit: Duration) {
        let pace = lock(&self.pace);
        let _ = self.pace_changed.wait_timeout_while(pace, limit, |pace| pace.epoch == epoch);
    }

    /// Writes the next piece of a disk. Returns false if the pace has changed.
    fn write_piece(
        &self,
        disk: &Mutex<WrittenDisk>,
        pace: Pace,
        draw: u64,
    ) -> Result<bool, String> {
        let mut disk = lock(disk);
        if self.pace().epoch != pace.epoch {
            return Ok(false);
        }
        let pieces = disk.pieces();
        let region = (pace.region_bytes / PIECE_BYTES as u64).min(pieces).max(1);
        let piece = pieces.saturating_sub(region) + pattern::below(region, draw);
        match disk.rewrite(piece) {
            Ok(took) => {
                let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                self.longest_ns.fetch_max(took_ns, Ordering::Relaxed);
                self.written_bytes.fetch_add(PIECE_BYTES as u64, Ordering::Relaxed);
                Ok(true)
            }
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                Err(format!("cannot write piece {piece} of a disk: {error}"))
            }
        }
    }
}

/// Writes the disk with this number, if there is one, for ever.
pub(crate) fn write(guest: &Arc<Guest>, number: usize) -> anyhow::Result<()> {
    let disks = &guest.disks;
    let mut draw = pattern::mix(number as u64 + 1) | 1;
    loop {
        let (pace, filled) = (disks.pace(), disks.filled());
        match filled.get(number) {
            Some(disk) if pace.bytes_per_s > 0 => {
                let bytes_per_s = pace.bytes_per_s as f64 / filled.len() as f64;
                write_paced(guest, disk, pace, bytes_per_s, &mut draw);
            }
            _ => disks.wait_for_pace(pace.epoch, Duration::from_secs(3600)),
        }
    }
}

/// Writes a disk at a rate until the pace changes.
fn write_paced(
    guest: &Guest,
    disk: &Mutex<WrittenDisk>,
    pace: Pace,
    bytes_per_s: f64,
    draw: &mut u64,
) {
    let interval = Duration::from_secs_f64(PIECE_BYTES as f64 / bytes_per_s.max(1.0));
    let mut next = Instant::now();
    loop {
        // xorshift64.
        *draw ^= *draw << 13;
        *draw ^= *draw >> 7;
        *draw ^= *draw << 17;
        match guest.disks.write_piece(disk, pace, *draw) {
            Ok(true) => {}
            Ok(false) => return,
            Err(problem) => {
                guest.report(&problem);
                guest.disks.wait_for_pace(pace.epoch, AFTER_FAILURE);
            }
        }
        let now = Instant::now();
        next = (next + interval).max(now.checked_sub(LARGEST_DEBT).unwrap_or(now));
        if let Some(early) = next.checked_duration_since(now).filter(|early| !early.is_zero()) {
            guest.disks.wait_for_pace(pace.epoch, early);
        }
    }
}
