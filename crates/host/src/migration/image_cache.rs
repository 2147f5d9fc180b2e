//! What this host's page cache holds of a VM's images, before the pause of a hand-over.
//!
//! **Why.** In the pause QEMU flushes each image at the source (`do_vm_stop`) and drops each from
//! the page cache at the destination (`raw_co_invalidate_cache`; both QEMU 7.2 to 10.0). The first
//! takes as long as the guest's unflushed writes are many, the second as long as much of the image
//! is cached, which it is where images were read for references. What was done before the pause
//! costs nothing in it. The destination drops images when the first round is over, which takes 10
//! to 30 ms of a CPU, and what has come since right before the stop.
//!
//! **Why it is safe.** QEMU does both again, and nothing depends on what is done here.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::fs::Advice;

use crate::agent::Agent;
use crate::vm::{Begin, Vm};

/// Images of a VM's disks on this host.
pub(super) struct ImageCache {
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    /// Rule by which they are opened.
    begin: Begin,
    /// Whether a thread works on them.
    is_busy: Arc<AtomicBool>,
}

impl ImageCache {
    pub(super) fn new(agent: Arc<Agent>, vm: Arc<Vm>, begin: Begin) -> ImageCache {
        ImageCache { agent, vm, begin, is_busy: Arc::default() }
    }

    /// Brings what is written to the disks. It does not wait.
    pub(super) fn flush(&self) {
        self.each("flush-images", File::sync_data);
    }

    /// Drops what is cached and not written. It does not wait.
    pub(super) fn drop_clean(&self) {
        self.each("drop-images", drop_clean);
    }

    /// Has a thread do `work` on each image, unless one is at work.
    fn each(&self, name: &'static str, work: fn(&File) -> io::Result<()>) {
        if self.is_busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let (agent, vm, begin) = (Arc::clone(&self.agent), Arc::clone(&self.vm), self.begin);
        let is_busy = Arc::clone(&self.is_busy);
        let body = move || {
            let begun = Instant::now();
            for image in agent.images_to_read(&vm.spec(), begin) {
                if let Err(error) = work(&image.file) {
                    let (vm, path) = (vm.name.as_str(), image.path.display());
                    tracing::debug!(vm, name, %path, %error, "left to QEMU");
                }
            }
            is_busy.store(false, Ordering::SeqCst);
            tracing::debug!(vm = vm.name.as_str(), name, took = ?begun.elapsed(), "done");
        };
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        if let Err(error) = spawned {
            self.is_busy.store(false, Ordering::SeqCst);
            tracing::debug!(vm = self.vm.name.as_str(), name, %error, "left to QEMU");
        }
    }
}

fn drop_clean(image: &File) -> io::Result<()> {
    Ok(rustix::fs::fadvise(image, 0, None, Advice::DontNeed)?)
}
