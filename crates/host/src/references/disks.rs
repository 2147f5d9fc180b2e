//! Images of disks as a source of arriving guests' pages: most of a guest's page cache is in them.
//!
//! The images of a VM that is about to arrive were opened for it, by the rules for its start. A
//! thread of the lowest priority computes the digests of their pages and announces them to the
//! source as they come; no migration waits for it. What it has computed stays, without an open
//! file, as long as there is memory for it: by the file's device and inode, and as guesses if the
//! file has changed since. When a VM has left, the rest of its images follows.
//!
//! Files are only read, page by page, and not mapped. What the kernel caches of them for that is no
//! danger on storage that hosts share: a QEMU that takes an image over drops its cache first
//! (`raw_co_invalidate_cache`, QEMU 7.2). Neither the content of files nor what is computed of it
//! is written or logged anywhere.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use godwit_migration::reference::{Content, DIGEST_PAGES, Digested};
use godwit_ram::{PageFile, PageRange};
use parking_lot::Mutex;

use super::{BUSY_INTERVAL, in_the_background, pause};

/// Longest time in which the images of a VM that has left are indexed.
const LEFT_LIMIT: Duration = Duration::from_secs(600);
/// Time for which no image is read when a guest is handed over.
const HAND_OVER_TIME: Duration = Duration::from_millis(100);
/// Part of the memory that the pieces of one image may take before anything is known of it.
const PIECES_PART: u64 = 8;

/// An image of a disk, open for reading.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

/// Digests of images.
#[derive(Debug)]
pub(super) struct Disks {
    most_bytes: u64,
    known: Mutex<Vec<Arc<Known>>>,
    /// Held by the thread that reads the images of a VM that has left.
    left_turn: Mutex<()>,
    /// Until when no image is read.
    rests_until: Mutex<Option<Instant>>,
}

/// What is known of an image.
#[derive(Debug)]
struct Known {
    id: FileId,
    digested: Digested,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    version: Version,
    used: Instant,
    /// The image while a migration uses it.
    content: Weak<Content>,
    /// Whether a thread is indexing it.
    is_indexing: bool,
    read_bytes_per_s: u64,
}

/// Identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
    pages: u64,
}

/// Whatever changes when somebody writes to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    /// Nothing changes when somebody writes to a block device.
    is_device: bool,
}

impl Disks {
    pub(super) fn new(most_bytes: u64) -> Disks {
        Disks {
            most_bytes,
            known: Mutex::default(),
            left_turn: Mutex::default(),
            rests_until: Mutex::default(),
        }
    }

    /// Has all threads stop reading images for a moment.
    pub(super) fn give_way(&self) {
        *self.rests_until.lock() = Some(Instant::now() + HAND_OVER_TIME);
    }

    /// Returns how long no image is read from now on, if it is to wait.
    fn rest(&self) -> Option<Duration> {
        let until = *self.rests_until.lock();
        until?.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
    }

    /// Returns images as content for the source of a guest that arrives, and goes on computing
    /// their digests as long as that content exists.
    pub(super) fn offer(self: &Arc<Self>, images: Vec<Image>) -> Vec<Arc<Content>> {
        let open: Vec<_> = images.into_iter().filter_map(|image| self.open(image)).collect();
        let contents = open.iter().map(|(_, content)| Arc::clone(content)).collect();
        let open: Vec<_> =
            open.into_iter().map(|(known, content)| (known, Arc::downgrade(&content))).collect();
        let disks = Arc::clone(self);
        if !open.is_empty() {
            in_the_background("index-disks", move || {
                // The base first: it has most of what the guest has read.
                for (known, content) in open.iter().rev() {
                    disks.index(known, || content.upgrade());
                }
            });
        }
        contents
    }

    /// Computes the digests of the images of a VM that has left, while no migration runs.
    pub(super) fn left(
        self: &Arc<Self>,
        images: impl FnOnce() -> Vec<Image> + Send + 'static,
        is_busy: impl Fn() -> bool + Send + 'static,
    ) {
        if self.most_bytes == 0 {
            return;
        }
        let disks = Arc::clone(self);
        in_the_background("index-disks", move || {
            let end = Instant::now() + LEFT_LIMIT;
            // A host that is drained lets many VMs go: their images are read one after the other.
            let _turn = disks.left_turn.lock();
            let goes_on = || !is_busy() && Instant::now() < end;
            for (known, content) in images().into_iter().rev().filter_map(|image| disks.open(image))
            {
                while Instant::now() < end {
                    // A migration that begins may index the image itself.
                    disks.index(&known, || goes_on().then(|| Arc::clone(&content)));
                    if goes_on() {
                        break;
                    }
                    pause(BUSY_INTERVAL);
                }
            }
        });
    }

    /// Returns the number of pages of images whose digests are known.
    pub(super) fn pages(&self) -> u64 {
        self.known.lock().iter().map(|known| known.digested.known_pages()).sum()
    }

    /// Returns the memory that all digests take.
    fn bytes(&self) -> u64 {
        self.known.lock().iter().map(|known| known.digested.bytes()).sum()
    }

    /// Finds out what is known of an image. Returns `None` if it cannot be used.
    fn open(&self, image: Image) -> Option<(Arc<Known>, Arc<Content>)> {
        let Image { file, path } = image;
        let data = file.metadata().ok().filter(|_| self.most_bytes > 0)?;
        let version = Version {
            bytes: data.size(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
            is_device: data.file_type().is_block_device(),
        };
        let most_pages = Digested::most_pages(self.most_bytes / PIECES_PART);
        let warn = |error| tracing::debug!(path = %path.display(), %error, "image not indexed");
        let file = PageFile::of_file(file, &path, most_pages).map_err(warn).ok()?;
        let id = FileId {
            device: if version.is_device { data.rdev() } else { data.dev() },
            inode: if version.is_device { 0 } else { data.ino() },
            pages: file.pages(),
        };
        let known = self.known(id, version)?;
        let mut state = known.state.lock();
        state.used = Instant::now();
        if state.version != version || version.is_device {
            // A content that exists goes on with what it finds.
            known.digested.outdate();
            state.version = version;
        }
        if let Some(content) = state.content.upgrade() {
            drop(state);
            return Some((known, content));
        }
        let content = Arc::new(Content::of_disk(file, &known.digested));
        content.set_read_bytes_per_s(state.read_bytes_per_s);
        state.content = Arc::downgrade(&content);
        drop(state);
        Some((known, content))
    }

    /// Returns the entry of a file, a new one if there is memory for it.
    fn known(&self, id: FileId, version: Version) -> Option<Arc<Known>> {
        if let Some(known) = self.known.lock().iter().find(|known| known.id == id) {
            return Some(Arc::clone(known));
        }
        let state = State {
            version,
            used: Instant::now(),
            content: Weak::new(),
            is_indexing: false,
            read_bytes_per_s: 0,
        };
        let digested = Digested::new(id.pages);
        let known = Arc::new(Known { id, digested, state: Mutex::new(state) });
        let has_room = id.pages > 0 && self.make_room(known.digested.bytes());
        let mut all = self.known.lock();
        // Another thread may have opened the same file meanwhile.
        if let Some(known) = all.iter().find(|known| known.id == id) {
            return Some(Arc::clone(known));
        }
        // A qcow2 image grows, and most of it stays as it was.
        let is_same = |known: &&Arc<Known>| FileId { pages: id.pages, ..known.id } == id;
        if let Some(earlier) = all.iter().find(is_same).filter(|_| has_room) {
            known.digested.take_from(&earlier.digested);
        }
        has_room.then(|| all.push(Arc::clone(&known)))?;
        Some(known)
    }

    /// Forgets images that nothing uses, the longest unused first, until so many bytes more fit.
    fn make_room(&self, bytes: u64) -> bool {
        while self.bytes().saturating_add(bytes) > self.most_bytes {
            let mut all = self.known.lock();
            let is_unused = |known: &&Arc<Known>| {
                let state = known.state.lock();
                state.content.strong_count() == 0 && !state.is_indexing
            };
            let oldest =
                all.iter().filter(is_unused).min_by_key(|known| known.state.lock().used).cloned();
            let Some(oldest) = oldest else { return false };
            all.retain(|known| !Arc::ptr_eq(known, &oldest));
        }
        true
    }

    /// Computes the digests of an image that are not known, as long as `content` returns it.
    fn index(&self, known: &Known, content: impl Fn() -> Option<Arc<Content>>) {
        if std::mem::replace(&mut known.state.lock().is_indexing, true) {
            return;
        }
        self.index_pieces(known, content);
        known.state.lock().is_indexing = false;
    }

    fn index_pieces(&self, known: &Known, content: impl Fn() -> Option<Arc<Content>>) {
        let pieces: Vec<_> = content().map_or_else(Vec::new, |it| it.pieces().collect());
        let (mut bytes, mut time) = (0, Duration::ZERO);
        // The sum over all images takes a while, and few images are indexed at a time.
        let mut room_pages = 0;
        for (block, piece) in pieces {
            while let Some(rest) = self.rest() {
                pause(rest);
            }
            let Some(content) = content() else { return };
            if content.is_worked_out(block, piece) {
                continue;
            }
            if room_pages < piece.count {
                room_pages = ROOM_PIECES * DIGEST_PAGES;
                if !self.make_room(Digested::most_bytes(room_pages)) {
                    return;
                }
            }
            let piece_pages = PageRange::new(piece.first, piece.count);
            // An image that is shorter than it was, or a disk that fails.
            let Ok(reading) = content.index(piece_pages) else { return };
            room_pages -= piece.count;
            bytes += reading.bytes;
            time += reading.time;
            if bytes >= MEASURED_BYTES {
                let rate = u128::from(bytes) * NS_A_SECOND / time.as_nanos().max(1);
                let rate = u64::try_from(rate).unwrap_or(u64::MAX);
                content.set_read_bytes_per_s(rate);
                known.state.lock().read_bytes_per_s = rate;
                (bytes, time) = (0, Duration::ZERO);
            }
        }
    }
}

/// Pieces for which there is memory before the next look.
const ROOM_PIECES: u64 = 64;
const NS_A_SECOND: u128 = 1_000_000_000;
/// Bytes after which the rate of reading is noted.
const MEASURED_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn image(folder: &tempfile::TempDir, name: &str, pages: usize) -> PathBuf {
        let path = folder.path().join(name);
        let bytes: Vec<u8> =
            (0..pages).flat_map(|page| [u8::try_from(page % 250).unwrap() + 1; 4096]).collect();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn open(path: &PathBuf) -> Image {
        Image { file: File::open(path).unwrap(), path: path.clone() }
    }

    /// Computes all digests at once.
    fn indexed(disks: &Disks, path: &PathBuf) -> Option<Arc<Content>> {
        let (known, content) = disks.open(open(path))?;
        disks.index(&known, || Some(Arc::clone(&content)));
        Some(content)
    }

    #[test]
    fn an_image_stays_known_until_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder, "disk", 1100);
        let disks = Disks::new(1 << 20);
        let content = indexed(&disks, &path).unwrap();
        assert_eq!((content.worked_out(), content.arrived_since(0, 9).len()), (1100, 3));
        drop(content);
        // It is known at once, and nobody holds the file.
        let (_, content) = disks.open(open(&path)).unwrap();
        assert_eq!((content.worked_out(), content.arrived_since(0, 9).len()), (1100, 3));
        drop(content);
        let file = File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[9; 4096], 600 * 4096).unwrap();
        let later = std::time::SystemTime::now() + Duration::from_secs(5);
        file.set_modified(later).unwrap();
        let (known, content) = disks.open(open(&path)).unwrap();
        assert_eq!(content.worked_out(), 0, "guesses");
        assert_eq!(content.arrived_since(0, 9).len(), 3, "that are announced nevertheless");
        disks.index(&known, || Some(Arc::clone(&content)));
        let news = content.arrived_since(3, 9);
        assert_eq!((content.worked_out(), news), (1100, vec![(0, PageRange::new(512, 512))]));
        assert_eq!(disks.known.lock().len(), 1);
    }

    #[test]
    fn an_image_that_has_grown_is_known_by_what_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder, "disk", 1100);
        let disks = Disks::new(1 << 20);
        drop(indexed(&disks, &path).unwrap());
        File::options().write(true).open(&path).unwrap().set_len(2000 * 4096).unwrap();
        let (_, content) = disks.open(open(&path)).unwrap();
        assert_eq!((content.worked_out(), content.arrived_since(0, 9).len()), (0, 3));
    }

    #[test]
    fn no_image_is_read_while_a_guest_is_handed_over() {
        let disks = Disks::new(1 << 20);
        assert_eq!(disks.rest(), None);
        let before = Instant::now();
        disks.give_way();
        assert!(disks.rests_until.lock().is_some_and(|until| until >= before + HAND_OVER_TIME));
        let long = Duration::from_secs(3600);
        *disks.rests_until.lock() = Some(Instant::now() + long);
        assert!(disks.rest().is_some_and(|rest| rest <= long));
        *disks.rests_until.lock() = Some(Instant::now());
        assert_eq!(disks.rest(), None);
    }

    #[test]
    fn holes_and_unused_images_take_no_memory() {
        let folder = tempfile::tempdir().unwrap();
        let sparse = folder.path().join("sparse");
        File::create(&sparse).unwrap().set_len(1 << 30).unwrap();
        let disks = Disks::new(1 << 20);
        let content = indexed(&disks, &sparse).unwrap();
        assert_eq!(content.arrived_since(0, 9).len(), 0);
        assert!(disks.bytes() < 100_000, "{}", disks.bytes());
        drop(content);
        let before = disks.bytes();
        // More than fits beside it.
        for number in 0..40 {
            let path = image(&folder, &number.to_string(), 3000);
            let content = indexed(&disks, &path).unwrap();
            assert!(disks.bytes() <= 1 << 20, "{number}: {}", disks.bytes());
            assert!(content.worked_out() > 0);
        }
        assert!(disks.known.lock().iter().all(|known| known.id.pages == 3000), "{before}");
    }

    #[test]
    fn without_memory_nothing_is_offered() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder, "disk", 10);
        assert!(indexed(&Disks::new(0), &path).is_none());
        assert!(indexed(&Disks::new(100), &path).is_none());
        assert!(indexed(&Disks::new(1 << 20), &image(&folder, "empty", 0)).is_none());
    }

    #[test]
    fn a_file_that_is_truncated_meanwhile_ends_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder, "disk", 2000);
        let disks = Disks::new(1 << 20);
        let (known, content) = disks.open(open(&path)).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(700 * 4096).unwrap();
        disks.index(&known, || Some(Arc::clone(&content)));
        assert_eq!(content.arrived_since(0, 9).len(), 1);
        assert!(!known.state.lock().is_indexing);
    }
}
