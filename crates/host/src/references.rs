//! Content that sources of arriving guests may refer to in place of sending pages: the RAM of VMs
//! that left (bases, for their return), the RAM of VMs that are arriving or have arrived and run
//! here, and the images of the arriving VM's disks ([`disks`]).
//!
//! The memory of all bases together is limited. Of a larger guest the part that fits is retained,
//! and the rest moves to a file on a disk ([`spill`]), as does what the VM would displace itself if
//! it came back.
//! Memory that a VM needs is freed piece by piece, so that a returning guest finds the rest.
//!
//! A base is memory without a name: its files are removed like those of any VM that leaves, and
//! stay open here. So nothing of it outlives the agent, and nothing can run on it. It is only read,
//! and a page of it is used only if its BLAKE3 digest is that of the guest's page.

mod disks;
mod spill;

use std::cmp::Reverse;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::ReferencesInfo;
use godwit_migration::drive::{Beside, Offer};
use godwit_migration::reference::{Arrivals, Content};
use godwit_ram::{RamError, Region};
use godwit_wire::BlockRun;
use parking_lot::{Mutex, MutexGuard};

use crate::config::ReferencesConfig;
use crate::vm::Vm;
use disks::Disks;
pub(crate) use disks::Image;
use spill::{Spill, Spilled};

/// Limit on the pages offered to the source of a small guest: 16 MiB of digests. A larger guest is
/// offered as many pages as it has.
const MOST_PAGES: u64 = 2 << 20;
/// Limit on the pages of images that are offered: 32 MiB of digests, 16 GiB of data.
const MOST_DISK_PAGES: u64 = 4 << 20;
/// Limit on the pages offered before the migration begins: 2 MiB of digests.
const FIRST_PAGES: u64 = 256 << 10;
/// Poll interval for the end of running migrations.
const BUSY_INTERVAL: Duration = Duration::from_millis(200);
/// Step in which a base is freed.
const FREE_STEP_BYTES: u64 = 32 << 20;

/// Retained and offered memory.
#[derive(Debug)]
pub(crate) struct References {
    most_base_bytes: u64,
    base_time: Duration,
    most_digest_bytes: u64,
    arrivals: Arc<Arrivals>,
    disks: Arc<Disks>,
    spill: Arc<Spill>,
    state: Mutex<State>,
}

/// Memory of a VM that left.
#[derive(Clone, Debug)]
pub struct Departed {
    /// Its files, with the hashes of pages that are known already.
    pub(crate) content: Arc<Content>,
    /// What the guest wrote again and again. It is retained last.
    pub(crate) hot: Vec<BlockRun>,
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
    /// Memory that it may hold. What it holds beyond that is being freed.
    most_bytes: u64,
    /// Memory that it holds when it has moved to a disk what should.
    stays_bytes: u64,
    spilled: Spilled,
    since: Instant,
}

/// Memory that must not occupy more than so many bytes.
struct Shrinking {
    vm: String,
    content: Arc<Content>,
    most_bytes: u64,
    stays_bytes: u64,
    spilled: Spilled,
}

/// Sorts contents by the share of their pages that other guests took. Most of a later clone's
/// content is in the first ones that arrived; what is in the others was mostly taken from these.
/// Those with equal shares keep their order.
fn most_used_first(mut contents: Vec<Arc<Content>>) -> Vec<Arc<Content>> {
    const PARTS: u64 = 1000;
    contents.sort_by_cached_key(|content| {
        let (taken, pages) = (content.taken_pages(), content.pages());
        // The same page may be taken many times.
        Reverse(taken.min(pages) * PARTS / pages.max(1))
    });
    contents
}

impl References {
    /// Creates an empty set; `host_bytes`: the host's RAM, `state_dir`: where retained pages move
    /// to if the configuration does not say.
    pub(crate) fn new(config: &ReferencesConfig, host_bytes: u64, state_dir: &Path) -> Self {
        let spill_dir = config.spill_dir.clone().unwrap_or_else(|| state_dir.to_owned());
        References {
            most_base_bytes: config.base_memory.bytes(host_bytes),
            base_time: Duration::from_secs(60 * u64::from(config.base_minutes)),
            most_digest_bytes: config.digest_memory.bytes(),
            arrivals: Arc::default(),
            disks: Arc::new(Disks::new(config.disk_digest_memory.bytes())),
            spill: Arc::new(Spill::new(spill_dir, config.spill_size)),
            state: Mutex::default(),
        }
    }

    /// Returns whether memory of VMs that left is retained.
    fn retains(&self) -> bool {
        self.most_base_bytes > 0 && !self.base_time.is_zero()
    }

    /// Describes the memory of a VM that is about to leave. `None`: nothing is to be retained.
    pub(crate) fn departing(&self, vm: &Vm) -> Option<Arc<Content>> {
        if !self.retains() {
            return None;
        }
        let warn = |error: &RamError| {
            let vm = vm.name.as_str();
            tracing::warn!(vm, %error, "memory not retained for the VM's return");
        };
        Content::of(&vm.regions()).inspect_err(warn).ok().map(Arc::new)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Holds lists, each changed by one call.
        self.state.lock()
    }

    /// Retains the memory of a VM that left, before its files' names are removed: as much of it as
    /// fits. Returns false if the memory is to be freed with its files. `returning_bytes`: memory
    /// that has to be freed for the VM if it comes back. `is_busy` reports whether a migration is
    /// running.
    pub(crate) fn keep(
        self: &Arc<Self>,
        vm: &str,
        departed: &Departed,
        returning_bytes: u64,
        is_busy: impl Fn() -> bool + Send + Sync + 'static,
    ) -> bool {
        if !self.retains() {
            return false;
        }
        let Departed { content, hot } = departed;
        if let Err(error) = content.mark_departed(hot) {
            tracing::warn!(vm, %error, "memory not retained for the VM's return");
            return false;
        }
        let digest_bytes = self.most_digest_bytes.saturating_sub(self.arrived_digest_bytes());
        content.shrink_digests(digest_bytes);
        // The VM's own earlier base is worth nothing any more.
        let own = self.take_bases(|base| base.vm == vm);
        if content.pages() == 0 {
            free_later(own);
            tracing::info!(vm, "memory not retained: there is none, or none for its digests");
            return false;
        }
        let taken_bytes = content.taken_bytes();
        let most_bytes = taken_bytes.min(self.most_base_bytes);
        let base = Base {
            vm: vm.to_owned(),
            content: Arc::clone(content),
            most_bytes,
            stays_bytes: most_bytes.min(taken_bytes.saturating_sub(returning_bytes)),
            spilled: Spilled::default(),
            since: Instant::now(),
        };
        tracing::info!(
            vm,
            bytes = base.most_bytes,
            of_bytes = taken_bytes,
            "memory retained for the VM's return"
        );
        let (dropped, shrunk) = self.add(base, digest_bytes);
        free_later(own.into_iter().chain(dropped).collect());
        let is_busy = Arc::new(is_busy);
        let busy = Arc::clone(&is_busy);
        shrink_later(&self.spill, shrunk, move || busy());
        work_out_later(content, Work::Departed, move || is_busy());
        let (references, limit) = (Arc::downgrade(self), self.base_time);
        tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            if let Some(references) = references.upgrade() {
                references.expire();
            }
        });
        true
    }

    /// Adds a base. The others keep what fits beside it, the newest first, with at most so many
    /// bytes of digests in total. Returns the bases of which nothing fits, and those that must
    /// shrink, the new one included.
    fn add(&self, base: Base, digest_bytes: u64) -> (Vec<Base>, Vec<Shrinking>) {
        let mut state = self.state();
        state.bases.push(base);
        let (mut bytes_left, mut digests_left) = (self.most_base_bytes, digest_bytes);
        for base in state.bases.iter_mut().rev() {
            base.most_bytes = base.most_bytes.min(bytes_left);
            base.stays_bytes = base.stays_bytes.min(base.most_bytes);
            base.content.shrink_digests(digests_left);
            bytes_left -= base.most_bytes;
            digests_left = digests_left.saturating_sub(base.content.digest_bytes());
        }
        let is_empty = |base: &mut Base| base.most_bytes == 0 || base.content.pages() == 0;
        let dropped = state.bases.extract_if(.., is_empty).collect();
        (dropped, state.bases.iter().map(Base::shrinking).collect())
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
            work_out_later(&content, Work::Present, is_busy);
        }
    }

    /// Opens the VM's memory as a source of pages; `None` if it cannot be offered.
    fn content_of(
        &self,
        vm: &Vm,
        of: impl FnOnce(&[Arc<Region>]) -> Result<Content, RamError>,
    ) -> Option<Arc<Content>> {
        let pages: u64 = vm.regions().iter().map(|region| region.pages()).sum();
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
        of(&vm.regions()).inspect_err(warn).ok().map(Arc::new)
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

    /// Returns what a source of this VM may refer to: first the VM's own base, then `images` of its
    /// disks, memory of VMs that arrived, bases of others, and what arrives at the same time.
    pub(crate) fn offer(&self, vm: &Vm, images: Vec<Image>) -> Offer {
        let mut offer = self.offer_here(&vm.name, images);
        let pages = vm.regions().iter().map(|region| region.pages()).sum();
        offer.most_pages = offer.most_pages.max(pages);
        offer.beside = self.arriving(vm);
        offer
    }

    fn offer_here(&self, vm: &str, images: Vec<Image>) -> Offer {
        self.expire();
        let images = self.disks.offer(images);
        let arrived =
            self.arrivals.all().into_iter().filter(|content| !content.is_arriving()).rev();
        let arrived = most_used_first(arrived.collect());
        let state = self.state();
        let is_own = |base: &&Base| base.vm == vm;
        let own = state.bases.iter().rev().filter(is_own);
        let others = state.bases.iter().rev().filter(|base| !is_own(base));
        own.clone().for_each(|base| base.spilled.stop());
        let bases = |base: &Base| [Some(Arc::clone(&base.content)), base.spilled.content()];
        let contents = own
            .flat_map(bases)
            .flatten()
            .chain(images)
            .chain(arrived)
            .chain(others.flat_map(bases).flatten())
            .collect();
        Offer {
            contents,
            most_pages: MOST_PAGES,
            most_disk_pages: MOST_DISK_PAGES,
            first_pages: FIRST_PAGES,
            beside: None,
        }
    }

    /// Computes the digests of the images of a VM that has left, when there is time. `images` opens
    /// them.
    pub(crate) fn index_images(
        &self,
        images: impl FnOnce() -> Vec<Image> + Send + 'static,
        is_busy: impl Fn() -> bool + Send + 'static,
    ) {
        self.disks.left(images, is_busy);
    }

    /// Leaves disks and CPUs to a guest that is being handed over, for a moment: no image is read.
    pub(crate) fn give_way(&self) {
        self.disks.give_way();
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
            spilled_bytes: self.spill.taken_bytes(),
            disk_pages: self.disks.pages(),
            pages: contents.iter().map(|content| content.pages()).sum(),
            digested_pages: contents.iter().map(|content| content.worked_out()).sum(),
        }
    }

    /// Frees `bytes` of bases, or all that there are, before it returns: first the oldest, and that
    /// of `vm`, which needs the memory, last. A base that holds more than that keeps the rest.
    pub(crate) fn free(&self, bytes: u64, vm: &str) {
        let (own, mut bases): (Vec<_>, Vec<_>) =
            self.state().bases.iter().map(Base::shrinking).partition(|base| base.vm == vm);
        bases.extend(own);
        let mut freed = 0;
        for mut base in bases {
            if freed >= bytes {
                break;
            }
            let before = base.content.taken_bytes();
            base.most_bytes = before.saturating_sub(bytes - freed);
            base.shrink();
            let given = before.saturating_sub(base.content.taken_bytes());
            freed += given;
            tracing::info!(vm = base.vm, bytes = given, for_vm = vm, "retained memory freed");
        }
        drop(self.take_bases(|base| {
            let is_empty = base.content.pages() == 0 || base.content.taken_bytes() == 0;
            is_empty && base.spilled.pages() == 0
        }));
    }

    /// Returns the memory that the digests of all offered memory take.
    fn digest_bytes(&self) -> u64 {
        let bytes = |base: &Base| base.content.digest_bytes() + 8 * base.spilled.pages();
        let bases: u64 = self.state().bases.iter().map(bytes).sum();
        bases + self.arrived_digest_bytes()
    }

    /// Returns the part of the digests' memory that dropping bases does not free.
    fn arrived_digest_bytes(&self) -> u64 {
        self.arrivals.all().iter().map(|content| content.digest_bytes()).sum()
    }

    /// Drops bases past their retention time.
    fn expire(&self) {
        free_later(self.take_bases(|base| base.since.elapsed() >= self.base_time));
    }

    fn take_bases(&self, which: impl Fn(&Base) -> bool) -> Vec<Base> {
        self.state().bases.extract_if(.., |base| which(base)).collect()
    }
}

impl Base {
    fn shrinking(&self) -> Shrinking {
        Shrinking {
            vm: self.vm.clone(),
            content: Arc::clone(&self.content),
            most_bytes: self.most_bytes,
            stays_bytes: self.stays_bytes,
            spilled: self.spilled.clone(),
        }
    }
}

impl Shrinking {
    fn shrink(&self) {
        if let Err(error) = self.content.shrink(self.most_bytes) {
            tracing::warn!(vm = self.vm, %error, "retained memory freed as a whole");
            // Nothing of it is offered any more.
            self.content.shrink_digests(0);
            empty(&self.vm, &self.content);
        }
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

/// Frees what bases hold beyond their limit, at the lowest priority, and moves it to a disk before,
/// while no migration is running.
fn shrink_later(
    spill: &Arc<Spill>,
    bases: Vec<Shrinking>,
    is_busy: impl Fn() -> bool + Send + 'static,
) {
    let spill = Arc::clone(spill);
    in_the_background("shrink-bases", move || {
        for base in &bases {
            spill.spill(&base.vm, &base.content, base.stays_bytes, &base.spilled, &is_busy);
            base.shrink();
        }
    });
}

/// Memory whose digests are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Memory of a guest that left. Its way back may begin at any time, and the CPU time that the
    /// guest used here is free.
    Departed,
    /// Memory of a guest that runs here.
    Present,
}

/// Computes digests when a core is idle, and never while a migration is running. A migration that
/// begins earlier computes the digests that it needs itself.
fn work_out_later(content: &Arc<Content>, work: Work, is_busy: impl Fn() -> bool + Send + 'static) {
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
            let Ok(digests) = content.digests(block, pages) else { return };
            if work == Work::Present {
                drop(content);
                pause(begun.elapsed());
            } else if digests.is_empty() && content.drop_piece(block, pages).is_err() {
                // Zeros need no memory.
                return;
            }
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
    use crate::config::{BaseMemory, SpillSize};

    const PAGES: u64 = 64;
    const BYTES: u64 = PAGES * 4096;

    fn references(config: &ReferencesConfig) -> Arc<References> {
        // What moves to a disk in the background would change what is offered.
        let spill_size = SpillSize::Size(ByteSize::from_bytes(0));
        let config = ReferencesConfig { spill_size, ..config.clone() };
        Arc::new(References::new(&config, 1 << 30, &std::env::temp_dir()))
    }

    /// Creates a VM's memory whose files are already removed.
    fn memory(byte: u8) -> [Arc<Region>; 1] {
        let folder = tempfile::tempdir().unwrap();
        let region = Region::create(&folder.path().join("ram"), BYTES, None).unwrap();
        region.copy_in(0, &vec![byte; usize::try_from(BYTES).unwrap()]).unwrap();
        [Arc::new(region)]
    }

    fn departed(regions: &[Arc<Region>], hot: &[BlockRun]) -> Departed {
        Departed { content: Arc::new(Content::of(regions).unwrap()), hot: hot.to_vec() }
    }

    #[test]
    fn what_others_took_most_of_is_offered_first() {
        let all = [1, 2, 3, 4].map(|byte| Arc::new(Content::of(&memory(byte)).unwrap()));
        all[1].note_taken(PAGES / 2);
        all[2].note_taken(PAGES * 9);
        let sorted = most_used_first(all.to_vec());
        let bytes: Vec<_> = sorted.iter().map(|content| first_byte(content)).collect();
        assert_eq!(bytes, [3, 2, 1, 4].map(Some));
        // No content counts for more than all of its pages.
        all[1].note_taken(PAGES / 2);
        assert_eq!(first_byte(&most_used_first(all.to_vec())[0]), Some(2));
    }

    fn byte_at(content: &Content, block: u16) -> Option<u8> {
        let mut page = [0; 4096];
        let place = godwit_wire::Place { content: 1, block, page: 0 };
        content.copy_out(place, &mut page).ok().map(|()| page[0])
    }

    fn first_byte(content: &Content) -> Option<u8> {
        byte_at(content, 0)
    }

    /// Returns the bases with the memory that each may hold, the oldest first.
    fn limits(references: &References) -> Vec<(String, u64)> {
        let state = references.state();
        state.bases.iter().map(|base| (base.vm.clone(), base.most_bytes)).collect()
    }

    fn offered(references: &References, vm: &str) -> Vec<Option<u8>> {
        references
            .offer_here(vm, Vec::new())
            .contents
            .iter()
            .map(|content| first_byte(content))
            .collect()
    }

    #[tokio::test]
    async fn the_vms_own_base_comes_first_and_the_oldest_goes_first() {
        let size = ByteSize::from_bytes(2 * BYTES);
        let config =
            ReferencesConfig { base_memory: BaseMemory::Size(size), ..ReferencesConfig::default() };
        let references = references(&config);
        for (vm, byte) in [("web", 1), ("api", 2)] {
            assert!(references.keep(vm, &departed(&memory(byte), &[]), 0, || false));
        }
        assert_eq!(offered(&references, "web"), [Some(1), Some(2)]);
        assert_eq!(offered(&references, "api"), [Some(2), Some(1)]);
        assert_eq!(offered(&references, "new"), [Some(2), Some(1)]);
        // A VM's later base replaces its earlier one; the base of a third VM replaces the oldest.
        assert!(
            references.keep("web", &departed(&memory(3), &[]), 0, || false)
                && references.keep("db", &departed(&memory(4), &[]), 0, || false)
        );
        assert_eq!(offered(&references, "web"), [Some(3), Some(4)]);
    }

    #[tokio::test]
    async fn the_part_that_fits_is_retained() {
        let size = ByteSize::from_bytes(2 * BYTES);
        let config =
            ReferencesConfig { base_memory: BaseMemory::Size(size), ..ReferencesConfig::default() };
        let references = references(&config);
        assert!(references.keep("web", &departed(&memory(1), &[]), 0, || false));
        let huge = [memory(5), memory(6), memory(7)].concat();
        // The guest wrote the second block again and again.
        let hot = [BlockRun { block: 1, first: 3, count: 1 }];
        assert!(references.keep("huge", &departed(&huge, &hot), 0, || false));
        assert_eq!(limits(&references), [("huge".to_owned(), 2 * BYTES)]);
        let content = Arc::clone(&references.offer_here("huge", Vec::new()).contents[0]);
        // The background does the same.
        content.shrink(2 * BYTES).unwrap();
        assert!(references.base_bytes() <= 2 * BYTES);
        let found: Vec<_> = (0..3).map(|block| byte_at(&content, block)).collect();
        assert_eq!(found, [Some(5), None, Some(7)]);
    }

    #[tokio::test]
    async fn needed_memory_is_freed_at_once_even_while_it_is_offered() {
        let references = references(&ReferencesConfig::default());
        for (vm, byte) in [("web", 1), ("api", 2), ("db", 3)] {
            assert!(references.keep(vm, &departed(&memory(byte), &[]), 0, || false));
        }
        let offer = references.offer_here("web", Vec::new());
        assert!(references.base_bytes() >= 3 * BYTES);
        references.free(BYTES + 1, "new");
        assert_eq!(offered(&references, "web"), [Some(3)]);
        assert_eq!(
            offer.contents.iter().filter(|content| first_byte(content).is_some()).count(),
            1
        );
        references.free(u64::MAX, "new");
        assert_eq!((references.base_bytes(), offered(&references, "web").len()), (0, 0));
    }

    #[tokio::test]
    async fn a_returning_vm_keeps_what_of_its_base_it_can() {
        let references = references(&ReferencesConfig::default());
        let large = [memory(1), memory(2), memory(3)].concat();
        assert!(
            references.keep("web", &departed(&large, &[]), 0, || false)
                && references.keep("api", &departed(&memory(4), &[]), 0, || false)
        );
        references.free(BYTES + 1, "web");
        assert_eq!(offered(&references, "web"), [Some(1)], "the other VM's is gone");
        let content = &references.offer_here("web", Vec::new()).contents[0];
        let found: Vec<_> = (0..3).map(|block| byte_at(content, block)).collect();
        assert_eq!(found, [Some(1), Some(2), None]);
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
            assert!(!references.keep("web", &departed(&memory(1), &[]), 0, || false));
            assert!(references.offer_here("web", Vec::new()).contents.is_empty());
        }
    }

    #[tokio::test]
    async fn memory_that_cannot_be_retained_displaces_nothing() {
        let references = references(&ReferencesConfig::default());
        assert!(references.keep("web", &departed(&memory(1), &[]), 0, || false));
        let folder = tempfile::tempdir().unwrap();
        let untouched = Region::create(&folder.path().join("ram"), BYTES, None).unwrap();
        assert!(!references.keep("new", &departed(&[Arc::new(untouched)], &[]), 0, || false));
        assert_eq!(offered(&references, "web"), [Some(1)]);
    }

    #[tokio::test]
    async fn the_part_whose_digests_fit_is_retained() {
        let digest_memory = ByteSize::from_bytes(8 * PAGES * 3);
        let references =
            references(&ReferencesConfig { digest_memory, ..ReferencesConfig::default() });
        assert!(references.keep("web", &departed(&memory(1), &[]), 0, || false));
        let two = [memory(2), memory(3)].concat();
        assert!(references.keep("api", &departed(&two, &[]), 0, || false));
        assert_eq!(offered(&references, "web"), [Some(1), Some(2)]);
        let four = [memory(4), memory(5), memory(6), memory(7)].concat();
        assert!(references.keep("big", &departed(&four, &[]), 0, || false));
        assert_eq!(offered(&references, "web"), [Some(4)]);
        let content = &references.offer_here("big", Vec::new()).contents[0];
        assert_eq!((byte_at(content, 2), byte_at(content, 3)), (Some(6), None));
        assert_eq!(references.digest_bytes(), 8 * PAGES * 3);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]

        #[test]
        fn bases_never_exceed_their_limits(
            sizes in proptest::collection::vec(1_usize..5, 1..8),
            most_blocks in 1_u64..8,
            most_digests in 1_u64..8,
        ) {
            let config = ReferencesConfig {
                base_memory: BaseMemory::Size(ByteSize::from_bytes(most_blocks * BYTES)),
                digest_memory: ByteSize::from_bytes(most_digests * 8 * PAGES),
                ..ReferencesConfig::default()
            };
            let references = references(&config);
            for (number, blocks) in sizes.into_iter().enumerate() {
                let memory: Vec<_> = (0..blocks).flat_map(|_| memory(9)).collect();
                let content = departed(&memory, &[]).content;
                content.mark_departed(&[]).unwrap();
                content.shrink_digests(references.most_digest_bytes);
                let most_bytes = content.taken_bytes().min(references.most_base_bytes);
                let vm = number.to_string();
                let base = Base {
                    vm: vm.clone(),
                    content,
                    most_bytes,
                    stays_bytes: most_bytes,
                    spilled: Spilled::default(),
                    since: Instant::now(),
                };
                let (dropped, shrunk) = references.add(base, references.most_digest_bytes);
                proptest::prop_assert!(dropped.iter().all(|base| base.vm != vm));
                shrunk.iter().for_each(Shrinking::shrink);
                proptest::prop_assert!(references.base_bytes() <= most_blocks * BYTES);
                proptest::prop_assert!(references.digest_bytes() <= most_digests * 8 * PAGES);
                let limits = limits(&references);
                let total: u64 = limits.iter().map(|(_, bytes)| bytes).sum();
                proptest::prop_assert!(total <= most_blocks * BYTES);
                let newest = limits.last().map(|(vm, bytes)| (vm.clone(), *bytes));
                proptest::prop_assert_eq!(newest, Some((vm, most_bytes)));
            }
        }
    }
}
