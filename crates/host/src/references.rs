//! Memory that sources of arriving guests may refer to in place of sending pages: the RAM of VMs
//! that left (bases, for their return), and the RAM of VMs that are arriving or have arrived and
//! run here.
//!
//! A base is memory without a name: its files are removed like those of any VM that leaves, and
//! stay open here. So nothing of it outlives the agent, and nothing can run on it. It is only read,
//! and a page of it is used only if its BLAKE3 digest is that of the guest's page.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::ReferencesInfo;
use godwit_migration::drive::{Beside, Offer};
use godwit_migration::reference::{Arrivals, Content};
use godwit_ram::{RamError, Region};
use parking_lot::{Mutex, MutexGuard};

use crate::config::ReferencesConfig;
use crate::vm::Vm;

/// Limit on the pages offered to a source: 16 MiB of digests.
const MOST_PAGES: u64 = 2 << 20;
/// Limit on the pages offered before the migration begins: 2 MiB of digests.
const FIRST_PAGES: u64 = 256 << 10;
/// Poll interval for the end of running migrations.
const BUSY_INTERVAL: Duration = Duration::from_millis(500);
/// Step in which a base is freed.
const FREE_STEP_BYTES: u64 = 32 << 20;

/// Retained and offered memory.
#[derive(Debug)]
pub(crate) struct References {
    most_base_bytes: u64,
    base_time: Duration,
    most_digest_bytes: u64,
    arrivals: Arc<Arrivals>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Oldest first.
    bases: Vec<Base>,
}

#[derive(Debug)]
struct Base {
    vm: String,
    content: Arc<Content>,
    since: Instant,
}

impl References {
    /// Creates an empty set; `host_bytes`: the host's RAM.
    pub(crate) fn new(config: &ReferencesConfig, host_bytes: u64) -> Self {
        References {
            most_base_bytes: config.base_memory.bytes(host_bytes),
            base_time: Duration::from_secs(60 * u64::from(config.base_minutes)),
            most_digest_bytes: config.digest_memory.bytes(),
            arrivals: Arc::default(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Holds lists, each changed by one call.
        self.state.lock()
    }

    /// Retains the memory of a VM that left, before its files' names are removed. Returns false if
    /// the memory is to be freed with them. `is_busy` reports whether a migration is running.
    pub(crate) fn keep(
        self: &Arc<Self>,
        vm: &str,
        regions: &[Arc<Region>],
        taken_bytes: u64,
        is_busy: impl Fn() -> bool + Send + 'static,
    ) -> bool {
        if taken_bytes == 0 || taken_bytes > self.most_base_bytes || self.base_time.is_zero() {
            return false;
        }
        let digest_bytes = 8 * regions.iter().map(|region| region.pages()).sum::<u64>();
        // The VM's own earlier base is dropped first.
        let mut dropped = self.take_bases(|base| base.vm == vm);
        if self.arrived_digest_bytes() + digest_bytes > self.most_digest_bytes {
            free_later(dropped);
            tracing::info!(vm, "memory not retained: its digests would exceed digest_memory");
            return false;
        }
        dropped.extend(self.make_room(taken_bytes, digest_bytes));
        free_later(dropped);
        let content = match Content::of(regions) {
            Ok(content) => Arc::new(content),
            Err(error) => {
                tracing::warn!(vm, %error, "memory not retained for the VM's return");
                return false;
            }
        };
        let base = Base { vm: vm.to_owned(), content: Arc::clone(&content), since: Instant::now() };
        self.state().bases.push(base);
        tracing::info!(vm, bytes = taken_bytes, "memory retained for the VM's return");
        work_out_later(&content, is_busy);
        let (references, limit) = (Arc::downgrade(self), self.base_time);
        tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            if let Some(references) = references.upgrade() {
                references.expire();
            }
        });
        true
    }

    /// Offers the memory of an arriving VM, as it arrives and while the VM exists, to VMs that
    /// arrive at the same time.
    pub(crate) fn arriving(&self, vm: &Vm) -> Option<Beside> {
        let content = self.content_of(vm, Content::of_arriving)?;
        vm.offers(Arc::clone(&content));
        Some(Beside::begin(&self.arrivals, content))
    }

    /// Offers the memory of a VM that has arrived, while the VM exists. `is_busy` reports whether a
    /// migration is running.
    pub(crate) fn arrived(&self, vm: &Vm, is_busy: impl Fn() -> bool + Send + 'static) {
        let content = vm.offered().or_else(|| {
            let content = self.content_of(vm, Content::of)?;
            self.arrivals.begin(&content);
            vm.offers(Arc::clone(&content));
            Some(content)
        });
        if let Some(content) = content {
            content.mark_arrived();
            work_out_later(&content, is_busy);
        }
    }

    /// Opens the VM's memory as a source of pages; `None` if it cannot be offered.
    fn content_of(
        &self,
        vm: &Vm,
        of: impl FnOnce(&[Arc<Region>]) -> Result<Content, RamError>,
    ) -> Option<Arc<Content>> {
        let pages: u64 = vm.regions.iter().map(|region| region.pages()).sum();
        if self.digest_bytes() + 8 * pages > self.most_digest_bytes {
            tracing::debug!(
                vm = vm.name.as_str(),
                "memory not offered: no memory is left for its digests"
            );
            return None;
        }
        let warn = |error: &RamError| {
            tracing::warn!(vm = vm.name.as_str(), %error, "memory not offered to other guests");
        };
        of(&vm.regions).inspect_err(warn).ok().map(Arc::new)
    }

    /// Withdraws the memory of a VM whose QEMU has ended, and frees it. Sources that received its
    /// digests send those pages in full.
    pub(crate) fn withdraw(vm: &Vm) {
        let Some(content) = vm.withdraws() else { return };
        let vm = vm.name.clone();
        in_the_background("free-offers", move || empty(&vm, &content));
    }

    /// Drops the retained memory of a VM that is deleted, or whose operator wants none of it
    /// retained.
    pub(crate) fn drop_bases_of(&self, vm: &str) {
        free_later(self.take_bases(|base| base.vm == vm));
    }

    /// Returns the memory that a source of this VM may refer to: first the VM's own base, then the
    /// newest memory, and what arrives at the same time.
    pub(crate) fn offer(&self, vm: &Vm) -> Offer {
        let mut offer = self.offer_here(&vm.name);
        offer.beside = self.arriving(vm);
        offer
    }

    fn offer_here(&self, vm: &str) -> Offer {
        self.expire();
        let arrived =
            self.arrivals.all().into_iter().filter(|content| !content.is_arriving()).rev();
        let state = self.state();
        let is_own = |base: &&Base| base.vm == vm;
        let own = state.bases.iter().rev().filter(is_own);
        let others = state.bases.iter().rev().filter(|base| !is_own(base));
        let bases = |base: &Base| Arc::clone(&base.content);
        let contents = own.map(bases).chain(arrived).chain(others.map(bases)).collect();
        Offer { contents, most_pages: MOST_PAGES, first_pages: FIRST_PAGES, beside: None }
    }

    /// Returns the memory that bases hold, in bytes. It is available to other VMs.
    pub(crate) fn base_bytes(&self) -> u64 {
        self.state().bases.iter().map(|base| base.content.taken_bytes()).sum()
    }

    /// Returns the figures that users see.
    pub(crate) fn info(&self) -> ReferencesInfo {
        let state = self.state();
        let contents: Vec<_> = state
            .bases
            .iter()
            .map(|base| Arc::clone(&base.content))
            .chain(self.arrivals.all())
            .collect();
        ReferencesInfo {
            bases: state.bases.len(),
            base_bytes: state.bases.iter().map(|base| base.content.taken_bytes()).sum(),
            pages: contents.iter().map(|content| content.pages()).sum(),
            digested_pages: contents.iter().map(|content| content.worked_out()).sum(),
        }
    }

    /// Frees at least `bytes` of bases, if there are that many, before it returns.
    pub(crate) fn free(&self, bytes: u64) {
        let mut freed = 0;
        while freed < bytes {
            let oldest = {
                let mut state = self.state();
                if state.bases.is_empty() {
                    return;
                }
                state.bases.remove(0)
            };
            freed += oldest.content.taken_bytes();
            tracing::info!(vm = oldest.vm, "retained memory freed for another VM");
            empty(&oldest.vm, &oldest.content);
        }
    }

    /// Returns the memory that the digests of all offered memory take.
    fn digest_bytes(&self) -> u64 {
        let bases: u64 = self.state().bases.iter().map(|base| base.content.digest_bytes()).sum();
        bases + self.arrived_digest_bytes()
    }

    /// Returns the part of the digests' memory that dropping bases does not free.
    fn arrived_digest_bytes(&self) -> u64 {
        self.arrivals.all().iter().map(|content| content.digest_bytes()).sum()
    }

    /// Drops the oldest bases until a base of `bytes`, with `digest_bytes` of digests, fits beside
    /// the others.
    fn make_room(&self, bytes: u64, digest_bytes: u64) -> Vec<Base> {
        let mut dropped = Vec::new();
        while self.base_bytes() + bytes > self.most_base_bytes
            || self.digest_bytes() + digest_bytes > self.most_digest_bytes
        {
            let mut state = self.state();
            if state.bases.is_empty() {
                break;
            }
            dropped.push(state.bases.remove(0));
        }
        dropped
    }

    /// Drops bases past their retention time.
    fn expire(&self) {
        free_later(self.take_bases(|base| base.since.elapsed() >= self.base_time));
    }

    fn take_bases(&self, which: impl Fn(&Base) -> bool) -> Vec<Base> {
        self.state().bases.extract_if(.., |base| which(base)).collect()
    }
}

fn empty(vm: &str, content: &Content) {
    if let Err(error) = content.empty(FREE_STEP_BYTES) {
        tracing::warn!(vm, %error, "retained memory freed in one step");
    }
}

/// Frees bases at the lowest priority.
fn free_later(bases: Vec<Base>) {
    if bases.is_empty() {
        return;
    }
    in_the_background("free-bases", move || {
        bases.iter().for_each(|base| empty(&base.vm, &base.content));
    });
}

/// Computes digests with at most half of an idle core, and never while a migration is running. A
/// migration that begins earlier computes the digests that it needs itself.
fn work_out_later(content: &Arc<Content>, is_busy: impl Fn() -> bool + Send + 'static) {
    let content = Arc::downgrade(content);
    in_the_background("digests", move || {
        let pieces: Vec<_> =
            content.upgrade().map_or_else(Vec::new, |content| content.pieces().collect());
        for (block, pages) in pieces {
            while is_busy() && content.strong_count() > 0 {
                pause(BUSY_INTERVAL);
            }
            let begun = Instant::now();
            // The content may be gone by now.
            let Some(content) = content.upgrade() else { return };
            if content.digests(block, pages).is_err() {
                return;
            }
            drop(content);
            pause(begun.elapsed());
        }
    });
}

#[expect(clippy::disallowed_methods, reason = "its purpose is to leave time to others")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn in_the_background(name: &str, body: impl FnOnce() + Send + 'static) {
    let body = move || {
        // Applies to this thread alone (Linux). If refused, the ordinary priority stays.
        let _ = rustix::process::nice(19);
        body();
    };
    if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(body) {
        tracing::debug!(%error, name, "cannot start a thread");
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::ByteSize;

    use super::*;
    use crate::config::BaseMemory;

    const PAGES: u64 = 64;
    const BYTES: u64 = PAGES * 4096;

    fn references(config: &ReferencesConfig) -> Arc<References> {
        Arc::new(References::new(config, 1 << 30))
    }

    /// Creates a VM's memory whose files are already removed.
    fn memory(byte: u8) -> [Arc<Region>; 1] {
        let folder = tempfile::tempdir().unwrap();
        let region = Region::create(&folder.path().join("ram"), BYTES, None).unwrap();
        region.copy_in(0, &vec![byte; usize::try_from(BYTES).unwrap()]).unwrap();
        [Arc::new(region)]
    }

    fn first_byte(content: &Content) -> Option<u8> {
        let mut page = [0; 4096];
        let place = godwit_wire::Place { content: 1, block: 0, page: 0 };
        content.copy_out(place, &mut page).ok().map(|()| page[0])
    }

    fn offered(references: &References, vm: &str) -> Vec<Option<u8>> {
        references.offer_here(vm).contents.iter().map(|content| first_byte(content)).collect()
    }

    #[tokio::test]
    async fn the_vms_own_base_comes_first_and_the_oldest_goes_first() {
        let size = ByteSize::from_bytes(2 * BYTES);
        let config =
            ReferencesConfig { base_memory: BaseMemory::Size(size), ..ReferencesConfig::default() };
        let references = references(&config);
        for (vm, byte) in [("web", 1), ("api", 2)] {
            assert!(references.keep(vm, &memory(byte), BYTES, || false));
        }
        assert_eq!(offered(&references, "web"), [Some(1), Some(2)]);
        assert_eq!(offered(&references, "api"), [Some(2), Some(1)]);
        assert_eq!(offered(&references, "new"), [Some(2), Some(1)]);
        // A VM's later base replaces its earlier one; the base of a third VM replaces the oldest.
        assert!(
            references.keep("web", &memory(3), BYTES, || false)
                && references.keep("db", &memory(4), BYTES, || false)
        );
        assert_eq!(offered(&references, "web"), [Some(3), Some(4)]);
        assert!(
            !references.keep("huge", &memory(5), 3 * BYTES, || false),
            "larger than base_memory"
        );
    }

    #[tokio::test]
    async fn needed_memory_is_freed_at_once_even_while_it_is_offered() {
        let references = references(&ReferencesConfig::default());
        for (vm, byte) in [("web", 1), ("api", 2), ("db", 3)] {
            assert!(references.keep(vm, &memory(byte), BYTES, || false));
        }
        let offer = references.offer_here("web");
        assert!(references.base_bytes() >= 3 * BYTES);
        references.free(BYTES + 1);
        assert_eq!(offered(&references, "web"), [Some(3)]);
        assert_eq!(
            offer.contents.iter().filter(|content| first_byte(content).is_some()).count(),
            1
        );
        references.free(u64::MAX);
        assert_eq!((references.base_bytes(), offered(&references, "web").len()), (0, 0));
    }

    #[tokio::test]
    async fn nothing_is_retained_if_a_limit_is_zero() {
        let none = BaseMemory::Size(ByteSize::from_bytes(0));
        for config in [
            ReferencesConfig { base_memory: none, ..ReferencesConfig::default() },
            ReferencesConfig { base_minutes: 0, ..ReferencesConfig::default() },
            ReferencesConfig {
                digest_memory: ByteSize::from_bytes(8 * PAGES - 1),
                ..ReferencesConfig::default()
            },
        ] {
            let references = references(&config);
            assert!(!references.keep("web", &memory(1), BYTES, || false));
            assert!(references.offer_here("web").contents.is_empty());
        }
    }

    #[tokio::test]
    async fn memory_that_cannot_be_retained_displaces_nothing() {
        let digest_memory = ByteSize::from_bytes(8 * PAGES * 3);
        let references =
            references(&ReferencesConfig { digest_memory, ..ReferencesConfig::default() });
        assert!(references.keep("web", &memory(1), BYTES, || false));
        // The digests of this guest exceed the limit, whatever is dropped.
        let big = [memory(2), memory(2), memory(2), memory(2)].concat();
        assert!(!references.keep("big", &big, 4 * BYTES, || false));
        assert_eq!(offered(&references, "web"), [Some(1)]);
    }
}
