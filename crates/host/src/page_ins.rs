//! Guests that run here while some of their pages are still on the host they came from.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::PageInState;
use godwit_migration::Failure;
use godwit_migration::drive::page_in::PagingIn;
use godwit_qemu::VmName;
use godwit_ram::{MissingPages, PageIn};
use godwit_types::FailureCode;
use parking_lot::{Mutex, MutexGuard};

use crate::vm::UnaskedVm;

/// Time for a QEMU whose memory is gone to end; the kernel frees that memory.
const ENDING_LIMIT: Duration = Duration::from_secs(5);

/// Guests that run here while pages of them are missing.
#[derive(Default)]
pub(crate) struct PageIns {
    all: Mutex<BTreeMap<VmName, Arc<PagingIn>>>,
}

impl std::fmt::Debug for PageIns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.lock().keys()).finish()
    }
}

impl PageIns {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<PagingIn>>> {
        self.all.lock()
    }

    pub(crate) fn of(&self, vm: &str) -> Option<Arc<PagingIn>> {
        self.lock().get(vm).cloned()
    }

    /// Returns the pages that a VM lacks; `None` if it lacks none.
    #[must_use]
    pub(crate) fn state(&self, vm: &str) -> Option<PageInState> {
        let paging_in = self.of(vm)?;
        Some(PageInState {
            missing_pages: paging_in.missing_pages(),
            connected: paging_in.is_connected(),
        })
    }

    /// Lets the source delete its copy once all pages are here: the guest is known to run here.
    pub(crate) fn let_source_go(&self, vm: &str) {
        if let Some(paging_in) = self.of(vm) {
            paging_in.let_source_go();
        }
    }

    /// Follows a guest's page-in until no page is missing or the guest is gone. Blocks; call it on
    /// a thread of its own.
    pub(crate) fn keep(&self, vm: &UnaskedVm, paging_in: &Arc<PagingIn>) {
        self.lock().insert(vm.name.clone(), Arc::clone(paging_in));
        match paging_in.until_complete() {
            Ok(figures) => {
                tracing::info!(
                    vm = vm.name.as_str(),
                    pages = figures.pages,
                    "all memory of the guest has arrived"
                );
            }
            Err(failure) => {
                let name = vm.name.as_str();
                tracing::error!(vm = name, %failure, "page-in ended before all pages arrived");
                // The memory disappears before the process does.
                if !vm.ends_within(ENDING_LIMIT) {
                    // Threads that touch a missing page still wait. The note stays: it says that
                    // this memory is incomplete, so that a restarted agent continues.
                    return;
                }
            }
        }
        {
            let mut all = self.lock();
            if all.get(&vm.name).is_some_and(|known| Arc::ptr_eq(known, paging_in)) {
                // The note goes first: an agent that starts now finds an ordinary guest.
                vm.files.remove_missing();
                all.remove(&vm.name);
            }
        }
        paging_in.close();
    }

    /// At the destination, after a restart of its agent: resumes page-in, which every thread that
    /// touches a missing page waits for. Does not query QEMU, whose main loop may be waiting too.
    /// `runs_here`: this host owns the guest; otherwise the source must keep its copy until that is
    /// certain ([`PageIns::let_source_go`]).
    pub(crate) async fn take_up(
        self: &Arc<Self>,
        vm: &UnaskedVm,
        runs_here: bool,
    ) -> Result<(), Failure> {
        let (page_ins, vm) = (Arc::clone(self), vm.clone());
        let taken_up = tokio::task::spawn_blocking(move || {
            let failed = |why: String| Failure::new(FailureCode::MemoryFailed, why);
            let noted = MissingPages::open(&vm.files.missing())
                .map_err(|error| failed(error.to_string()))?;
            if noted.count() == 0 {
                // All pages arrived just before the other agent ended, or the guest was not
                // handed over yet.
                vm.files.remove_missing();
                return Ok(());
            }
            drop(noted);
            let faults = PageIn::attach_again(&vm.files.tracker_socket, vm.pid, &vm.regions)
                .map_err(|error| failed(error.to_string()))?;
            let paging_in =
                PagingIn::resume(Box::new(faults), vm.regions.clone(), &vm.files.missing())?;
            if !runs_here {
                paging_in.hold_source();
            }
            tracing::warn!(
                vm = vm.name.as_str(),
                missing = paging_in.missing_pages(),
                "page-in resumes when the source asks"
            );
            page_ins.keep_on_a_thread(vm, paging_in)
        });
        taken_up
            .await
            .unwrap_or_else(|error| Err(Failure::new(FailureCode::Internal, error.to_string())))
    }

    fn keep_on_a_thread(
        self: &Arc<Self>,
        vm: UnaskedVm,
        paging_in: Arc<PagingIn>,
    ) -> Result<(), Failure> {
        let name = format!("in-{}", vm.name);
        // Registered now, and not only once the thread runs.
        self.lock().insert(vm.name.clone(), Arc::clone(&paging_in));
        let page_ins = Arc::clone(self);
        let spawned =
            std::thread::Builder::new().name(name).spawn(move || page_ins.keep(&vm, &paging_in));
        spawned.map(drop).map_err(|error| {
            Failure::new(FailureCode::Internal, format!("cannot start a thread: {error}"))
        })
    }
}
