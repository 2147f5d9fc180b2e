//! Memory that this host lets the sources of arriving guests refer to, so that they need not send it: the RAM of VMs that left
//! (bases, for their way back), and that of VMs which arrive or arrived and run here.
//!
//! A base is memory without a name: its files are removed as those of any VM that leaves, and stay open here. So nothing of it
//! outlives the agent, and nothing can run on it; it is read, and believed only where its BLAKE3 is that of the guest's page.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_api::ReferencesInfo;
use godwit_migration::drive::{Beside, Offer};
use godwit_migration::reference::{Arrivals, Content};
use godwit_ram::{RamError, Region};

use crate::config::ReferencesConfig;
use crate::vm::Vm;

/// The source is told of so many pages at most: 16 MiB of digests.
const MOST_PAGES: u64 = 2 << 20;
/// Of so many before it begins: 2 MiB of digests.
const FIRST_PAGES: u64 = 256 << 10;
/// How often it is looked whether guests are still on their way.
const BUSY_INTERVAL: Duration = Duration::from_millis(500);
/// How much of a base is given back to the kernel at once.
const FREE_STEP_BYTES: u64 = 32 << 20;

/// What is kept and offered.
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
    /// The oldest first.
    bases: Vec<Base>,
}

#[derive(Debug)]
struct Base {
    vm: String,
    content: Arc<Content>,
    since: Instant,
}

impl References {
    /// Nothing kept yet; `host_bytes`: the host's RAM.
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
        // Lists, each changed by one call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the memory of a VM that left, before its files' names go. False: it is to be freed with them.
    /// `is_busy` says whether guests are on their way.
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
        // Its own earlier base makes room first.
        let mut dropped = self.take_bases(|base| base.vm == vm);
        if self.arrived_digest_bytes() + digest_bytes > self.most_digest_bytes {
            free_later(dropped);
            tracing::info!(
                vm,
                "its memory is not kept: its digests would take more than digest_memory"
            );
            return false;
        }
        dropped.extend(self.make_room(taken_bytes, digest_bytes));
        free_later(dropped);
        let content = match Content::of(regions) {
            Ok(content) => Arc::new(content),
            Err(error) => {
                tracing::warn!(vm, %error, "its memory is not kept for its way back");
                return false;
            }
        };
        let base = Base { vm: vm.to_owned(), content: Arc::clone(&content), since: Instant::now() };
        self.state().bases.push(base);
        tracing::info!(vm, bytes = taken_bytes, "its memory is kept for its way back");
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

    /// Offers the memory of a VM that begins to arrive, as it comes and as long as it is there, to those that arrive beside it.
    pub(crate) fn arriving(&self, vm: &Vm) -> Option<Beside> {
        let content = self.content_of(vm, Content::of_arriving)?;
        vm.offers(Arc::clone(&content));
        Some(Beside::begin(&self.arrivals, content))
    }

    /// Offers the memory of a VM that arrived, as long as it is there. `is_busy` says whether guests are on their way.
    pub(crate) fn arrived(&self, vm: &Vm, is_busy: impl Fn() -> bool + Send + 'static) {
        let content = vm.offered().or_else(|| {
            let content = self.content_of(vm, Content::of)?;
            self.arrivals.begin(&content);
            vm.offers(Arc::clone(&content));
            Some(content)
        });
        if let Some(content) = content {
            content.has_arrived();
            work_out_later(&content, is_busy);
        }
    }

    /// None: it is of no use to others here.
    fn content_of(
        &self,
        vm: &Vm,
        of: impl FnOnce(&[Arc<Region>]) -> Result<Content, RamError>,
    ) -> Option<Arc<Content>> {
        let pages: u64 = vm.regions.iter().map(|region| region.pages()).sum();
        if self.digest_bytes() + 8 * pages > self.most_digest_bytes {
            tracing::debug!(
                vm = vm.name.as_str(),
                "no memory is left for the digests of its pages"
            );
            return None;
        }
        let warn = |error: &RamError| {
            tracing::warn!(vm = vm.name.as_str(), %error, "its memory is of no use to other guests");
        };
        of(&vm.regions).inspect_err(warn).ok().map(Arc::new)
    }

    /// The memory of a VM whose QEMU has ended is of no use to others any more, and nobody's any more: sources that were told of it
    /// send those pages after all.
    pub(crate) fn withdraw(vm: &Vm) {
        let Some(content) = vm.withdraws() else { return };
        let vm = vm.name.clone();
        in_the_background("free-offers", move || empty(&vm, &content));
    }

    /// Drops what is kept of a VM: it is deleted, or its operator wants nothing of it kept.
    pub(crate) fn drop_bases_of(&self, vm: &str) {
        free_later(self.take_bases(|base| base.vm == vm));
    }

    /// What a source of this VM may refer to: the VM's own base first, then whatever is newest, and what comes beside.
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

    /// Memory that bases hold, bytes: another VM may have it.
    pub(crate) fn base_bytes(&self) -> u64 {
        self.state().bases.iter().map(|base| base.content.taken_bytes()).sum()
    }

    /// What is here, for people.
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

    /// Gives at least so many bytes of bases back to the kernel, where there are that many, and returns when that is done.
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
            tracing::info!(vm = oldest.vm, "its kept memory is needed by another VM");
            empty(&oldest.vm, &oldest.content);
        }
    }

    /// Memory that the digests of all that is offered take.
    fn digest_bytes(&self) -> u64 {
        let bases: u64 = self.state().bases.iter().map(|base| base.content.digest_bytes()).sum();
        bases + self.arrived_digest_bytes()
    }

    /// The part of that which no base has: to drop bases makes no room in it.
    fn arrived_digest_bytes(&self) -> u64 {
        self.arrivals.all().iter().map(|content| content.digest_bytes()).sum()
    }

    /// Drops the oldest bases until one of so many bytes, with so many bytes of digests, fits beside the others.
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

    /// Drops what is too old.
    fn expire(&self) {
        free_later(self.take_bases(|base| base.since.elapsed() >= self.base_time));
    }

    fn take_bases(&self, which: impl Fn(&Base) -> bool) -> Vec<Base> {
        self.state().bases.extract_if(.., |base| which(base)).collect()
    }
}

fn empty(vm: &str, content: &Content) {
    if let Err(error) = content.empty(FREE_STEP_BYTES) {
        tracing::warn!(vm, %error, "its kept memory is freed in one go");
    }
}

/// Gives bases back at the lowest priority.
fn free_later(bases: Vec<Base>) {
    if bases.is_empty() {
        return;
    }
    in_the_background("free-bases", move || {
        bases.iter().for_each(|base| empty(&base.vm, &base.content))
    });
}

/// Works digests out with at most half of a core that nobody else wants, and not while guests are on their way. A migration that
/// arrives before does it itself, as far as it needs them.
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
            // It may be gone meanwhile.
            let Some(content) = content.upgrade() else { return };
            if content.digests(block, pages).is_err() {
                return;
            }
            drop(content);
            pause(begun.elapsed());
        }
    });
}

#[expect(clippy::disallowed_methods, reason = "time that passes for others is what this is for")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn in_the_background(name: &str, body: impl FnOnce() + Send + 'static) {
    let body = move || {
        // Of this thread alone (Linux). Refused: then it is done at the ordinary priority.
        let _ = rustix::process::nice(19);
        body();
    };
    if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(body) {
        tracing::debug!(%error, name, "no thread can be started");
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

    /// Memory of a VM, whose names are gone.
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
        // A later stay takes the place of the earlier one, a third VM that of the oldest.
        assert!(
            references.keep("web", &memory(3), BYTES, || false)
                && references.keep("db", &memory(4), BYTES, || false)
        );
        assert_eq!(offered(&references, "web"), [Some(3), Some(4)]);
        assert!(
            !references.keep("huge", &memory(5), 3 * BYTES, || false),
            "more than may be kept at all"
        );
    }

    #[tokio::test]
    async fn what_is_needed_is_given_back_at_once_also_while_it_is_offered() {
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
    async fn nothing_is_kept_where_nothing_may_be() {
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
    async fn what_can_not_be_kept_drops_nothing_else() {
        let digest_memory = ByteSize::from_bytes(8 * PAGES * 3);
        let references =
            references(&ReferencesConfig { digest_memory, ..ReferencesConfig::default() });
        assert!(references.keep("web", &memory(1), BYTES, || false));
        // A guest that arrived has so many digests that no other can be kept, whatever is dropped.
        let big = [memory(2), memory(2), memory(2), memory(2)].concat();
        assert!(!references.keep("big", &big, 4 * BYTES, || false));
        assert_eq!(offered(&references, "web"), [Some(1)]);
    }
}
