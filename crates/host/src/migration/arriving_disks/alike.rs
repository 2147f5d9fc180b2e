//! Readers of images that disks which arrive are probably like. An image is opened when the source
//! refers to content for the first time. Content that cannot be read in time counts as missing.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use godwit_migration::Failure;
use godwit_migration::disks::{BoundedReader, ImageReader};
use godwit_nbd::NbdExport;
use godwit_qemu::{DiskFormat, ImageTool};
use godwit_types::FailureCode;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::writers::connect;
use crate::agent::Agent;
use crate::disk_arrivals::{AlikeImage, OpenedContent};

/// Most QEMUs that read such images, for all transfers together.
const MOST_EXPORTED: usize = 32;
/// Longest time for which a stream waits for a read of such an image; the first read may have to
/// start a QEMU. Then it goes on without the image.
const READ_LIMIT: Duration = Duration::from_secs(10);

static EXPORTED: Semaphore = Semaphore::const_new(MOST_EXPORTED);

/// Returns readers of the images of each disk. Must be called in the runtime.
pub(super) fn readers(
    agent: &Arc<Agent>,
    images: Vec<Vec<AlikeImage>>,
) -> Vec<Vec<Arc<dyn ImageReader>>> {
    let reader = |image: AlikeImage| {
        let (agent, runtime) = (Arc::clone(agent), Handle::current());
        let alike = Alike { agent, runtime, image, content: OnceLock::new() };
        Arc::new(BoundedReader::new(Arc::new(alike), READ_LIMIT)) as Arc<dyn ImageReader>
    };
    images.into_iter().map(|images| images.into_iter().map(&reader).collect()).collect()
}

/// An image that may have content which arrives.
struct Alike {
    agent: Arc<Agent>,
    runtime: Handle,
    image: AlikeImage,
    content: OnceLock<Content>,
}

/// How it is read.
enum Content {
    Raw(File),
    /// `None`: it cannot be read, or not any more.
    Exported(Mutex<Option<Export>>),
}

/// The connection to the export of a QEMU, the QEMU, and its place among all of them.
type Export = (Box<NbdExport<UnixStream>>, Box<ImageTool>, Option<SemaphorePermit<'static>>);

impl Alike {
    /// Opens the image. Must not be called in the runtime.
    fn open(&self) -> Content {
        let path = self.image.path.display();
        let place = match self.image.format {
            DiskFormat::Raw => None,
            DiskFormat::Qcow2 => {
                let Ok(place) = EXPORTED.try_acquire() else {
                    tracing::info!(%path, "too many images are open to refer to this one");
                    return Content::Exported(Mutex::new(None));
                };
                Some(place)
            }
        };
        let opened = self.runtime.block_on(self.agent.open_alike(&self.image));
        let export = match opened {
            Ok(OpenedContent::Raw(file)) => return Content::Raw(file),
            Ok(OpenedContent::Exported(stream, tool)) => {
                let connected = connect(stream);
                let failed = |error: &std::io::Error| {
                    tracing::info!(%path, %error, "disks that arrive do not refer to an image");
                };
                // The runtime ends the QEMU of one that fails.
                let _entered = self.runtime.enter();
                connected.inspect_err(failed).ok().map(|export| (export, tool, place))
            }
            Err(error) => {
                tracing::info!(%path, %error, "disks that arrive do not refer to an image");
                None
            }
        };
        Content::Exported(Mutex::new(export))
    }

    fn failed(&self, why: &dyn std::fmt::Display) -> Failure {
        let detail = format!("cannot read disk {}: {why}", self.image.path.display());
        Failure::new(FailureCode::DiskFailed, detail)
    }
}

impl ImageReader for Alike {
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let export = match self.content.get_or_init(|| self.open()) {
            Content::Raw(file) => {
                return file.read_exact_at(buffer, at).map_err(|error| self.failed(&error));
            }
            Content::Exported(export) => export,
        };
        let mut export = export.lock();
        let (connection, ..) = export.as_mut().ok_or_else(|| self.failed(&"it is closed"))?;
        let end = at.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > connection.bytes()) {
            return Err(self.failed(&"it is smaller"));
        }
        let read = connection.read_at(at, buffer).map_err(|error| self.failed(&error));
        if read.is_err() {
            // Nothing more comes over this connection.
            let _entered = self.runtime.enter();
            *export = None;
        }
        read
    }
}

impl Drop for Alike {
    /// The runtime ends the QEMU.
    fn drop(&mut self) {
        let _entered = self.runtime.enter();
        drop(self.content.take());
    }
}
