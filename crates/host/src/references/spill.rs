//! Retained pages that do not fit in memory, in files on a disk of this host.
//!
//! A file has no name, so that it is gone with the agent, and nobody else can open it. What is in
//! it is encrypted with a key that only this process has. There is a limit, and the disk never
//! becomes nearly full by it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_migration::reference::Content;
use parking_lot::Mutex;
use rustix::fs::{FsWord, Mode, OFlags};

use super::{BUSY_INTERVAL, pause};
use crate::config::SpillSize;
use crate::datastores::room;

/// Part of a file system that stays free, and that automatic limits give to retained pages.
const FREE_PART: u64 = 10;
/// Type of file systems in memory (linux/magic.h, `TMPFS_MAGIC`): moving pages there frees none.
const TMPFS: FsWord = 0x0102_1994;
/// Pieces after which the free space is looked at again: 64 MiB.
const LOOK_PIECES: u32 = 32;

/// Where pages of a VM that left may be moved to.
#[derive(Debug)]
pub(super) struct Spill {
    dir: PathBuf,
    size: SpillSize,
    files: Mutex<Vec<std::sync::Weak<Content>>>,
}

/// The part of one VM's pages that was moved.
#[derive(Clone, Debug, Default)]
pub(super) struct Spilled {
    /// Set when the first page moves.
    content: Arc<Mutex<Option<Arc<Content>>>>,
    /// Held while pages move: of two threads, each would move them.
    moving: Arc<Mutex<()>>,
    /// Set when the VM comes back: what was announced to its source stays where it is.
    stopped: Arc<AtomicBool>,
}

impl Spilled {
    pub(super) fn content(&self) -> Option<Arc<Content>> {
        self.content.lock().clone()
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    pub(super) fn pages(&self) -> u64 {
        self.content().map_or(0, |content| content.pages())
    }
}

impl Spill {
    pub(super) fn new(dir: PathBuf, size: SpillSize) -> Spill {
        Spill { dir, size, files: Mutex::default() }
    }

    pub(super) fn is_on(&self) -> bool {
        self.size != SpillSize::Size(godwit_qemu::ByteSize::from_bytes(0))
    }

    /// Returns the bytes that all files take.
    pub(super) fn taken_bytes(&self) -> u64 {
        let mut files = self.files.lock();
        files.retain(|file| file.strong_count() > 0);
        files.iter().filter_map(std::sync::Weak::upgrade).map(|file| file.taken_bytes()).sum()
    }

    /// Returns the bytes that may still be written.
    fn room_bytes(&self) -> u64 {
        let in_memory = rustix::fs::statfs(&self.dir).is_ok_and(|stat| stat.f_type == TMPFS);
        let Some(disk) = room(&self.dir).filter(|_| !in_memory) else { return 0 };
        let part = disk.total_bytes / FREE_PART;
        let limit = match self.size {
            SpillSize::Auto => part,
            SpillSize::Size(size) => size.bytes(),
        };
        limit.saturating_sub(self.taken_bytes()).min(disk.free_bytes.saturating_sub(part))
    }

    /// Moves pages to a file until at most so many bytes are left in memory, as far as the limits
    /// allow. What cannot be moved stays.
    /// Waits while `is_busy`: the records of migrations may be on the same disk.
    pub(super) fn spill(
        &self,
        vm: &str,
        from: &Content,
        most_bytes: u64,
        spilled: &Spilled,
        is_busy: &dyn Fn() -> bool,
    ) {
        let _moving = spilled.moving.lock();
        let has_room = || self.room_bytes() >= u64::from(LOOK_PIECES) << 21;
        if !self.is_on() || from.taken_bytes() <= most_bytes || !has_room() {
            return;
        }
        let to = match spilled.content() {
            Some(content) => content,
            None => match self.create(from) {
                Ok(content) => spilled.content.lock().insert(content).clone(),
                Err(error) => {
                    let dir = self.dir.display();
                    return tracing::warn!(vm, %dir, %error, "retained pages not moved to a disk");
                }
            },
        };
        let looks = std::cell::Cell::new(0_u32);
        let goes_on = || {
            let looks_now = looks.replace(looks.get().wrapping_add(1)).is_multiple_of(LOOK_PIECES);
            let is_stopped = || spilled.stopped.load(Ordering::SeqCst);
            while looks_now && is_busy() && !is_stopped() {
                pause(BUSY_INTERVAL);
            }
            !is_stopped() && (!looks_now || has_room())
        };
        if let Err(error) = from.spill(most_bytes, &to, goes_on) {
            tracing::warn!(vm, %error, "retained pages not moved to a disk");
        }
        tracing::info!(vm, bytes = to.taken_bytes(), "retained pages moved to a disk");
    }

    /// Creates the file for the pages of one VM.
    fn create(&self, from: &Content) -> Result<Arc<Content>, io::Error> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        // Only root, even if it had a name.
        let file: OwnedFd = rustix::fs::open(&self.dir, flags, Mode::RUSR | Mode::WUSR)?;
        let content = Content::for_spilled(from, File::from(file), &self.dir);
        let content = Arc::new(content.map_err(io::Error::other)?);
        self.files.lock().push(Arc::downgrade(&content));
        Ok(content)
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::ByteSize;
    use godwit_ram::Region;

    use super::*;

    const PAGES: u64 = 3 * 512;

    fn memory(folder: &tempfile::TempDir) -> Content {
        let region = Region::create(&folder.path().join("ram"), PAGES * 4096, None).unwrap();
        for page in 0..PAGES {
            region.copy_in(page * 4096, &[u8::try_from(page % 255).unwrap() + 1; 4096]).unwrap();
        }
        let content = Content::of(&[Arc::new(region)]).unwrap();
        content.mark_departed(&[]).unwrap();
        content
    }

    fn spill(size: SpillSize) -> (tempfile::TempDir, Spill) {
        let dir = tempfile::tempdir().unwrap();
        let spill = Spill::new(dir.path().to_owned(), size);
        (dir, spill)
    }

    #[test]
    fn pages_move_to_a_file_without_a_name_until_the_vm_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, spill) = spill(SpillSize::Size(ByteSize::from_mib(256)));
        if spill.room_bytes() < 128 << 20 {
            eprintln!("skipped: the disk of {} is nearly full", dir.path().display());
            return;
        }
        let (content, spilled) = (memory(&folder), Spilled::default());
        spill.spill("web", &content, 2 * 512 * 4096, &spilled, &|| false);
        assert_eq!((content.pages(), spilled.pages()), (2 * 512, 512));
        assert!(spill.taken_bytes() >= 512 * 4096);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        spilled.stop();
        spill.spill("web", &content, 0, &spilled, &|| false);
        assert_eq!((content.pages(), spilled.pages()), (2 * 512, 512));
        drop(spilled);
        assert_eq!(spill.taken_bytes(), 0);
    }

    #[test]
    fn limits_keep_pages_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let content = memory(&folder);
        // No room for a step of 64 MiB, and a folder that does not exist.
        let gone = Spill::new("/nonexistent/folder".into(), SpillSize::Auto);
        let limited = [0, 32].map(|mib| spill(SpillSize::Size(ByteSize::from_mib(mib))));
        for spill in limited.iter().map(|(_, spill)| spill).chain([&gone]) {
            let spilled = Spilled::default();
            spill.spill("web", &content, 0, &spilled, &|| false);
            assert_eq!((content.pages(), spilled.pages()), (PAGES, 0));
        }
    }
}
