//! The pages that a source retains for the destination that runs the guest: served until that host
//! needs none, again after each cut.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{Client, ClientError, ErrorCode, PageInAnswer, PageInRequest};
use godwit_lanes::pacing::MigrationPace;
use godwit_lanes::{Carries, Interrupt};
use godwit_migration::Failure;
use godwit_migration::drive::page_in::{Again, KeptPages, open_session, serve};
use godwit_migration::drive::{Hello, SessionStream};
use godwit_qemu::Uuid;
use godwit_types::{FailureCode, Ownership};
use godwit_wire::{CONTROL_STREAM, MigrationId, SUPPORTED};
use tokio::runtime::Handle;

use crate::agent::Agent;
use crate::paths::Paths;
use crate::peer_record::without_session;
use crate::vm::Vm;

/// Interval between two attempts to reach the destination.
const AGAIN_INTERVAL: Duration = Duration::from_millis(300);
/// Time limit for an answer: over a cut link it never arrives.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// A guest whose pages are retained here for the destination that runs it.
pub(crate) struct Serving<'a> {
    pub(crate) agent: &'a Arc<Agent>,
    pub(crate) vm: &'a str,
    pub(crate) to: &'a str,
    pub(crate) peer: &'a Client,
    /// The destination's ownership.
    pub(crate) offered: Ownership,
    pub(crate) runtime: &'a Handle,
    /// Bandwidth limits of its pages.
    pub(crate) pace: MigrationPace,
    /// UUID of the VM, since another VM may have its name by now.
    pub(crate) uuid: Uuid,
}

impl Serving<'_> {
    /// Asks for another session until there is one or none is needed.
    pub(crate) fn again(&self, is_over: &dyn Fn() -> bool) -> Again {
        loop {
            if is_over() {
                return Again::Lost(Failure::new(
                    FailureCode::Cancelled,
                    "the pages are no longer needed, or are gone",
                ));
            }
            let answer = self.runtime.block_on(async {
                let Ownership { incarnation, epoch } = self.offered;
                let from = self.agent.config().name.clone();
                let request = PageInRequest { incarnation, epoch, from };
                let path = format!("/v1/page-ins/{}", self.vm);
                tokio::time::timeout(
                    ANSWER_LIMIT,
                    self.peer.post::<_, PageInAnswer>(&path, &request),
                )
                .await
            });
            match answer {
                Ok(Ok(PageInAnswer { complete: true, .. })) => return Again::Complete,
                Ok(Ok(answer)) => match self.open(&answer) {
                    Ok(streams) => return Again::Session(streams),
                    Err(failure) => {
                        tracing::warn!(vm = self.vm, %failure, "no page-in session yet");
                    }
                },
                Ok(Err(ClientError::Refused(error))) if error.code == ErrorCode::NotFound => {
                    let decided = without_session(self.peer, self.vm, self.uuid, self.offered);
                    if let Some(decided) = self.runtime.block_on(decided) {
                        return decided;
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(vm = self.vm, %error, "no page-in session from the destination");
                }
                Err(_) => {
                    tracing::debug!(vm = self.vm, to = self.to, "the destination does not answer");
                }
            }
            self.runtime.block_on(async { tokio::time::sleep(AGAIN_INTERVAL).await });
        }
    }

    fn open(&self, answer: &PageInAnswer) -> Result<Vec<SessionStream>, Failure> {
        let detail = "the destination returned an invalid migration ID";
        let broken = || Failure::new(FailureCode::ProtocolBroken, detail);
        let id: MigrationId =
            answer.id.as_deref().and_then(|id| id.parse().ok()).ok_or_else(broken)?;
        let ours =
            self.runtime.block_on(crate::network::near(&self.agent.config().migration_addresses));
        let lanes = godwit_lanes::pair(&ours, &answer.addresses);
        let count = lanes.len();
        let pace = self.pace.clone();
        let paths =
            Paths { lanes, host: self.to.to_owned(), identity: self.agent.identity(), pace };
        let hello = Hello { migration: id, stream: CONTROL_STREAM, versions: SUPPORTED };
        let connect = |lane: usize, carries: Carries, interrupt: &Interrupt| {
            paths.data(lane, carries, interrupt)
        };
        // Small segments pass, whatever cut the previous session.
        open_session(&connect, count, &Interrupt::default(), hello, Carries::PagesNarrowly)
    }
}

/// At the source, after a restart of its agent: serves the pages of a guest that the destination
/// `to` runs, in its own task, until the destination needs none; then releases the guest.
pub(super) fn serve_again(agent: &Arc<Agent>, vm: &Arc<Vm>, to: String) {
    let (agent, vm) = (Arc::clone(agent), Arc::clone(vm));
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let peer = match agent.peer(&to) {
            Ok(peer) => peer,
            Err(error) => {
                let name = vm.name.as_str();
                return tracing::error!(vm = name, %error, "cannot serve pages of the guest");
            }
        };
        let serving = Serving {
            agent: &agent,
            vm: &vm.name,
            to: &to,
            peer: &peer,
            offered: vm.ownership().offered(),
            runtime: &runtime,
            pace: agent.limits().migration(None),
            uuid: vm.spec().uuid,
        };
        let kept = KeptPages::new(vm.regions());
        let is_gone = || vm.process.exit().is_some() || !agent.keeps_pages(&vm);
        match serve(&kept, None, &|is_over| serving.again(&|| is_over() || is_gone())) {
            Ok(_) => {
                tracing::info!(
                    vm = vm.name.as_str(),
                    to,
                    "the destination has all memory of the guest"
                );
                if let Err(error) = runtime.block_on(agent.release(&vm, None)) {
                    let name = vm.name.as_str();
                    tracing::error!(vm = name, %error, "cannot remove what is left of the VM");
                }
            }
            // An operator has decided meanwhile.
            Err(_) if !agent.keeps_pages(&vm) => {}
            Err(failure) => {
                let name = vm.name.as_str();
                tracing::error!(vm = name, %failure, "retaining pages that nothing fetches");
                runtime.block_on(agent.hold_in_doubt(&vm.name, &to));
                agent.settle_doubt(&vm.name);
            }
        }
    });
}
