//! Writers of arriving disks. A raw image is written as a file; a qcow2 image, and an image in a
//! pool of Ceph, by a QEMU without a guest, over NBD.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use godwit_api::ApiError;
use godwit_migration::Failure;
use godwit_migration::disks::{DiskWriter, ImageReader, at_once};
use godwit_nbd::NbdExport;
use godwit_qemu::ImageTool;
use godwit_types::FailureCode;
use parking_lot::{Mutex, RwLock};
use rustix::fs::Advice;
use tokio::runtime::Handle;

use crate::disk_arrivals::{OpenedContent, OpenedImage};
use crate::failure::host_failed;
use crate::zeros::make_zero;

/// Longest time for QEMU to answer: its disk may be slow.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Bytes that are written before what is cached of them is dropped. QEMU drops as much in a
/// fraction of a millisecond.
const MOST_CACHED_BYTES: u64 = 8 << 20;
/// Name of the export of an image.
const EXPORT: &str = "disk";

/// The writers of a transfer.
pub(super) struct Writers {
    all: Vec<Arc<dyn DiskWriter>>,
    images: Vec<Arc<Image>>,
    runtime: Handle,
}

impl Writers {
    /// Takes images that are open, of disks of these sizes. Must be called in the runtime.
    ///
    /// # Errors
    /// A QEMU does not export its image.
    pub(super) fn open(opened: Vec<OpenedImage>, sizes: &[u64]) -> Result<Writers, ApiError> {
        let mut images = Vec::with_capacity(opened.len());
        for (opened, &bytes) in opened.into_iter().zip(sizes) {
            let OpenedImage { path, content, cached, check_growth } = opened;
            let content = match content {
                OpenedContent::Raw(file) => Content::Raw(RwLock::new(Some(file))),
                OpenedContent::Exported(stream, tool) => {
                    let export =
                        tokio::task::block_in_place(|| connect(stream)).map_err(|why| {
                            let what = format!("cannot write disk {}", path.display());
                            host_failed(&what, &why)
                        })?;
                    Content::Exported(Mutex::new(Some(Export { export, tool, cached })))
                }
            };
            let flushes = Flushes::default();
            let cached_bytes = AtomicU64::new(0);
            images.push(Arc::new(Image {
                path,
                bytes,
                content,
                cached_bytes,
                check_growth,
                flushes,
            }));
        }
        let all = images.iter().map(|image| Arc::clone(image) as Arc<dyn DiskWriter>).collect();
        Ok(Writers { all, images, runtime: Handle::current() })
    }

    pub(super) fn all(&self) -> &[Arc<dyn DiskWriter>] {
        &self.all
    }

    /// Returns readers of what has arrived.
    pub(super) fn readers(&self) -> Vec<Arc<dyn ImageReader>> {
        self.images.iter().map(|image| Arc::clone(image) as Arc<dyn ImageReader>).collect()
    }

    /// Closes the images, several at the same time: the guest is paused. Their locks are gone then;
    /// nothing writes them any more. Must not be called in the runtime. An image that is closed
    /// stays so.
    ///
    /// # Errors
    /// QEMU cannot write what it still holds, or does not close an image.
    pub(super) fn close(&self) -> Result<(), Failure> {
        at_once(&self.images, |image| image.close(&self.runtime))
    }
}

/// Connects to the export of an image tool.
pub(super) fn connect(stream: UnixStream) -> io::Result<Box<NbdExport<UnixStream>>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    NbdExport::open(stream, EXPORT).map(Box::new).map_err(io::Error::other)
}

/// An image that is filled.
struct Image {
    path: PathBuf,
    /// Size of its disk.
    bytes: u64,
    content: Content,
    /// Bytes that were written since what is cached was dropped.
    cached_bytes: AtomicU64,
    check_growth: Box<dyn Fn() -> Result<(), ApiError> + Send + Sync>,
    /// Flushes of a raw image. QEMU itself fails all that follow one that failed.
    flushes: Flushes,
}

/// Flushes of an open file by several streams. The kernel reports a failed write to one flush
/// alone, and later ones succeed, although what was written before may be lost.
#[derive(Debug, Default)]
struct Flushes {
    /// Held by each flush for reading.
    under_way: RwLock<()>,
    has_failed: AtomicBool,
}

impl Flushes {
    /// Flushes by `sync`. Fails if another flush has failed, also one at the same time.
    fn run(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        {
            let _one = self.under_way.read();
            sync().inspect_err(|_| self.has_failed.store(true, Ordering::SeqCst))?;
        }
        // One of those that are under way may have got the error.
        drop(self.under_way.write());
        match self.has_failed.load(Ordering::SeqCst) {
            true => Err(io::Error::other("an earlier flush failed")),
            false => Ok(()),
        }
    }
}

/// The export of a QEMU.
struct Export {
    export: Box<NbdExport<UnixStream>>,
    tool: Box<ImageTool>,
    /// The file that it writes, if it is one.
    cached: Option<File>,
}

/// How it is written; `None`: it is closed.
enum Content {
    Raw(RwLock<Option<File>>),
    /// The QEMU ends when it is dropped.
    Exported(Mutex<Option<Export>>),
}

impl Image {
    fn close(&self, runtime: &Handle) -> Result<(), Failure> {
        match &self.content {
            Content::Raw(file) => drop(file.write().take()),
            Content::Exported(export) => {
                let Some(Export { mut export, tool, .. }) = export.lock().take() else {
                    return Ok(());
                };
                let flushed = export.flush().map_err(|error| self.failed("flush", &error));
                drop(export);
                let ended = runtime.block_on(async {
                    let ended = tool.end_export().await;
                    drop(tool);
                    ended
                });
                flushed?;
                ended.map_err(|error| self.failed("close", &error))?;
            }
        }
        Ok(())
    }

    fn failed(&self, verb: &str, error: &dyn std::fmt::Display) -> Failure {
        let detail = format!("cannot {verb} disk {}: {error}", self.path.display());
        Failure::new(FailureCode::DiskFailed, detail)
    }

    /// Drops from the page cache what is on the disk, once it is a good deal. Otherwise QEMU drops
    /// all of it when it runs the guest (`raw_co_invalidate_cache`): 20 ms or more for 1 GiB.
    fn drop_cached(&self, file: &File) {
        if self.cached_bytes.load(Ordering::Relaxed) >= MOST_CACHED_BYTES {
            // What another stream has just counted may be lost: it is little.
            self.cached_bytes.store(0, Ordering::Relaxed);
            // Without it, only the pause is longer.
            let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
        }
    }

    fn is_closed(&self) -> Failure {
        self.failed("use", &"it is closed already")
    }

    /// Refuses what is beyond the disk.
    fn check(&self, at: u64, bytes: u64) -> Result<(), Failure> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => {
                let path = self.path.display();
                let detail = format!("a write at {at} is beyond the end of disk {path}");
                Err(Failure::new(FailureCode::ProtocolBroken, detail))
            }
        }
    }
}

impl ImageReader for Image {
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        self.check(at, buffer.len() as u64)?;
        match &self.content {
            Content::Raw(file) => {
                let file = file.read();
                let file = file.as_ref().ok_or_else(|| self.is_closed())?;
                file.read_exact_at(buffer, at).map_err(|error| self.failed("read", &error))
            }
            Content::Exported(export) => {
                let mut export = export.lock();
                let Export { export, .. } = export.as_mut().ok_or_else(|| self.is_closed())?;
                export.read_at(at, buffer).map_err(|error| self.failed("read", &error))
            }
        }
    }
}

impl DiskWriter for Image {
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.check(at, bytes.len() as u64)?;
        self.cached_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        match &self.content {
            Content::Raw(file) => {
                let file = file.read();
                let file = file.as_ref().ok_or_else(|| self.is_closed())?;
                file.write_all_at(bytes, at).map_err(|error| self.failed("write", &error))
            }
            Content::Exported(export) => {
                let mut export = export.lock();
                let Export { export, .. } = export.as_mut().ok_or_else(|| self.is_closed())?;
                export.write_at(at, bytes).map_err(|error| self.failed("write", &error))
            }
        }
    }

    fn write_zeros(&self, at: u64, bytes: u64) -> Result<(), Failure> {
        self.check(at, bytes)?;
        match &self.content {
            Content::Raw(file) => {
                let file = file.read();
                let file = file.as_ref().ok_or_else(|| self.is_closed())?;
                make_zero(file, at, bytes).map_err(|error| self.failed("write", &error))
            }
            Content::Exported(export) => {
                let mut export = export.lock();
                let Export { export, .. } = export.as_mut().ok_or_else(|| self.is_closed())?;
                export.write_zeroes(at, bytes).map_err(|error| self.failed("write", &error))
            }
        }
    }

    fn flush(&self) -> Result<(), Failure> {
        // Other guests of this host need room, too.
        (self.check_growth)()
            .map_err(|error| Failure::new(FailureCode::DiskFailed, error.message))?;
        match &self.content {
            Content::Raw(file) => {
                let file = file.read();
                let file = file.as_ref().ok_or_else(|| self.is_closed())?;
                let flushed = self.flushes.run(|| file.sync_data());
                flushed.map_err(|error| self.failed("flush", &error))?;
                self.drop_cached(file);
            }
            Content::Exported(export) => {
                let mut export = export.lock();
                let Export { export, cached, .. } =
                    export.as_mut().ok_or_else(|| self.is_closed())?;
                export.flush().map_err(|error| self.failed("flush", &error))?;
                cached.iter().for_each(|file| self.drop_cached(file));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    fn image(bytes: u64) -> Image {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        let content = Content::Raw(RwLock::new(Some(file)));
        Image {
            path: "/srv/web.raw".into(),
            bytes,
            content,
            cached_bytes: AtomicU64::new(0),
            check_growth: Box::new(|| Ok(())),
            flushes: Flushes::default(),
        }
    }

    fn content(image: &Image) -> Vec<u8> {
        let Content::Raw(file) = &image.content else { panic!("raw") };
        let mut found = vec![0; usize::try_from(image.bytes).unwrap()];
        file.read().as_ref().unwrap().read_exact_at(&mut found, 0).unwrap();
        found
    }

    #[test]
    fn a_raw_image_gets_blocks_and_zeros_and_nothing_beyond_its_end() {
        let image = image(4096);
        image.write_at(512, &[7; 1024]).unwrap();
        image.write_zeros(1024, 3072).unwrap();
        image.flush().unwrap();
        let found = content(&image);
        assert!(found[512..1024].iter().all(|byte| *byte == 7));
        assert_eq!(found.iter().filter(|byte| **byte != 0).count(), 512);
        for (at, bytes) in [(4096, 512), (4095, 2), (u64::MAX, 512)] {
            let refused = image.write_at(at, &vec![1; usize::try_from(bytes).unwrap()]);
            assert_eq!(refused.unwrap_err().code, FailureCode::ProtocolBroken);
            assert!(image.write_zeros(at, bytes).is_err());
        }
        assert_eq!(content(&image), found);
        let mut read = [0; 1024];
        image.read_at(512, &mut read).unwrap();
        assert_eq!(read[..], found[512..1536]);
        assert!(image.read_at(4096, &mut read).is_err());
    }

    #[test]
    fn a_closed_image_and_one_without_room_take_nothing() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let full = || Err(ApiError::new(godwit_api::ErrorCode::HostFailed, "only the space", ""));
        let image = Image { check_growth: Box::new(full), ..image(4096) };
        let refused = image.flush().unwrap_err();
        assert_eq!(
            (refused.code, refused.detail.as_str()),
            (FailureCode::DiskFailed, "only the space")
        );
        image.close(runtime.handle()).unwrap();
        image.close(runtime.handle()).unwrap();
        assert_eq!(image.write_at(0, &[1]).unwrap_err().code, FailureCode::DiskFailed);
        assert!(image.write_zeros(0, 512).is_err() && image.read_at(0, &mut [0]).is_err());
    }

    fn full() -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }

    #[test]
    fn no_flush_succeeds_after_one_that_failed() {
        let flushes = Flushes::default();
        flushes.run(|| Ok(())).unwrap();
        assert_eq!(flushes.run(full).unwrap_err().kind(), io::ErrorKind::StorageFull);
        flushes.run(|| Ok(())).unwrap_err();
    }

    #[test]
    fn no_flush_succeeds_while_another_fails() {
        let flushes = &Flushes::default();
        let ((begins, begun), (goes_on, may_fail)) = (sync_channel(1), sync_channel(1));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let failed = flushes.run(|| {
                    begins.send(()).unwrap();
                    may_fail.recv().unwrap();
                    full()
                });
                failed.unwrap_err();
            });
            begun.recv().unwrap();
            let other = flushes.run(|| {
                goes_on.send(()).unwrap();
                Ok(())
            });
            other.unwrap_err();
        });
    }
}
