//! Service behind the handlers of moves and preflights: it chooses the target, checks that the VM
//! can move there, and submits the move. A preflight uses the manager's state, and asks the hosts
//! if requested.

use std::path::Component;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{
    Check, CreateMove, Move, Preflight, PreflightRanking, PreflightReport, Problem, ProblemCode,
};
use godwit_api::{MigrationRequest, QemuEngineOptions, TravellingDisks};
use godwit_qemu::{ThinPool, is_pool};
use godwit_types::EngineKind;
use tokio::time::timeout;

use super::{Moves, Wanted};
use crate::access::Caller;
use crate::agents::AgentClients;
use crate::cluster::planner_input::{Arriving, placement_hosts};
use crate::cluster::state::State;
use crate::preflight::{Subject, first, travelling, with_dry_run, without_answer};
use crate::problems::{no_host, no_vm};
use crate::storage::term::Term;

/// Longest time of a dry run, which counts the guest's writes for 3 s and tests the lanes.
const DRY_RUN_LIMIT: Duration = Duration::from_secs(30);
/// Longest path of a directory for disks, bytes.
const MOST_DIR_BYTES: usize = 1024;

/// Service for preflights and moves.
#[derive(Clone)]
pub(crate) struct MoveRequests {
    state: Arc<State>,
    agents: Arc<AgentClients>,
    moves: Arc<Term<Moves>>,
}

impl MoveRequests {
    pub(crate) fn new(
        state: Arc<State>,
        agents: Arc<AgentClients>,
        moves: Arc<Term<Moves>>,
    ) -> MoveRequests {
        MoveRequests { state, agents, moves }
    }

    /// Returns the moves, if this manager carries them out.
    ///
    /// # Errors
    /// [`ProblemCode::NoLeader`]: another manager leads, or none.
    pub(crate) fn moves(&self) -> Result<Arc<Moves>, Problem> {
        self.moves.get()
    }

    /// Requests a move of a VM.
    pub(crate) async fn create(
        &self,
        vm: &str,
        mut request: CreateMove,
        caller: &Caller,
    ) -> Result<Move, Problem> {
        check_qemu(&request.qemu)?;
        check_disks(request.disks.as_ref(), request.engine)?;
        let to_reason = self.choose_target(vm, &mut request)?;
        let from = self.check_move(vm, &request)?;
        let target = request.to.as_deref().unwrap_or_default();
        request.disks = self.travelling(vm, target, request.disks.as_ref());
        if request.disks.as_ref().is_some_and(|disks| disks.delete_source) {
            // The source's agent knows the VMs of its own host alone.
            let info = self.state.inventory().vm_info(vm).cloned().ok_or_else(|| no_vm(vm))?;
            self.agents.check_disks_elsewhere(&info).await?;
        }
        let (vm, asked_by) = (vm.to_owned(), caller.name.clone());
        let wanted = Wanted { vm, from, asked_by, request, to_reason, ..Wanted::default() };
        self.moves.get()?.submit(wanted).await
    }

    /// Returns the preflight of a VM, to one target or to all hosts.
    pub(crate) async fn preflight(
        &self,
        vm: &str,
        to: Option<&str>,
        predict: bool,
        disks: Option<&TravellingDisks>,
    ) -> Result<Preflight, Problem> {
        check_disks(disks, EngineKind::default())?;
        if let Some(to) = to {
            return Ok(Preflight::Report(self.preflight_report(vm, to, predict, disks).await?));
        }
        let mut ranking = self.ranking(vm, EngineKind::default(), disks)?;
        if let Some(best) = ranking.fits.first().filter(|_| predict) {
            ranking.best = Some(self.preflight_report(vm, &best.host, true, disks).await?);
        }
        Ok(Preflight::Ranking(ranking))
    }

    /// Ranks all hosts for a VM, from the manager's state alone.
    fn ranking(
        &self,
        vm: &str,
        engine: EngineKind,
        disks: Option<&TravellingDisks>,
    ) -> Result<PreflightRanking, Problem> {
        let arriving = self.arriving();
        let inventory = self.state.inventory();
        let subject = Subject::of(&inventory, vm, engine).ok_or_else(|| no_vm(vm))?;
        let subject = subject.with_disks(disks);
        let hosts = placement_hosts(&arriving, &inventory.limits(), &inventory);
        Ok(subject.ranking(&hosts, &inventory.rules()))
    }

    /// Returns what arrives at each host through running and waiting moves.
    pub(crate) fn arriving(&self) -> Arriving {
        let mut arriving = Arriving::new();
        // Only the leader knows the moves.
        let Ok(moves) = self.moves.get() else { return arriving };
        for one in moves.all().open() {
            if let Some(to) = &one.to {
                arriving.entry(to.clone()).or_default().insert(one.vm.clone());
            }
        }
        arriving
    }

    /// Returns the report on a move to a target, from the manager's state and, if requested, from
    /// the hosts.
    pub(crate) async fn preflight_report(
        &self,
        vm: &str,
        to: &str,
        predict: bool,
        disks: Option<&TravellingDisks>,
    ) -> Result<PreflightReport, Problem> {
        let mut report = self.known_report(vm, to, EngineKind::default(), disks)?;
        if predict {
            let disks = self.travelling(vm, to, disks);
            let request = MigrationRequest { disks, ..MigrationRequest::to(to) };
            match self.dry_run(vm, &report.from, &request).await {
                Ok(dry_run) => with_dry_run(&mut report, dry_run),
                Err(problem) => without_answer(&mut report, &problem),
            }
        }
        Ok(report)
    }

    /// Returns the report on a move to a target, from the manager's state alone.
    pub(crate) fn known_report(
        &self,
        vm: &str,
        to: &str,
        engine: EngineKind,
        disks: Option<&TravellingDisks>,
    ) -> Result<PreflightReport, Problem> {
        let arriving = self.arriving();
        let inventory = self.state.inventory();
        let subject = Subject::of(&inventory, vm, engine).ok_or_else(|| no_vm(vm))?;
        let subject = subject.with_disks(disks);
        let target = inventory.seen_host(to).ok_or_else(|| no_host(to))?;
        let rules = inventory.rules();
        let hosts = match rules.iter().any(|rule| rule.vms.iter().any(|named| named == vm)) {
            true => placement_hosts(&arriving, &inventory.limits(), &inventory),
            false => Vec::new(),
        };
        let rules = subject.rules_check(to, &hosts, &rules);
        Ok(subject.report(target, rules))
    }

    /// Chooses the target of a move that names none. Returns the reason for the choice.
    pub(crate) fn choose_target(
        &self,
        vm: &str,
        request: &mut CreateMove,
    ) -> Result<Option<String>, Problem> {
        if request.to.is_some() {
            return Ok(None);
        }
        let (host, why) = first(self.ranking(vm, request.engine, request.disks.as_ref())?)?;
        request.to = Some(host);
        Ok(Some(why))
    }

    /// Returns the source host of a move, unless the preflight fails.
    pub(crate) fn check_move(&self, vm: &str, request: &CreateMove) -> Result<String, Problem> {
        let to = request.to.as_deref().unwrap_or_default();
        let report = self.known_report(vm, to, request.engine, request.disks.as_ref())?;
        if report.from == to {
            let detail = format!("VM \"{vm}\" is already on host {to}");
            return Err(Problem::new(ProblemCode::WrongState, detail, "name another host"));
        }
        self.agents.check_reachable(&report.from)?;
        match refused(&report).filter(|_| !request.skip_preflight) {
            Some(problem) => Err(problem),
            None => Ok(report.from),
        }
    }

    /// Returns how the disks of a VM travel to a target.
    fn travelling(
        &self,
        vm: &str,
        to: &str,
        wanted: Option<&TravellingDisks>,
    ) -> Option<TravellingDisks> {
        let inventory = self.state.inventory();
        travelling(&inventory, inventory.vm_info(vm)?, to, wanted)
    }

    async fn dry_run(
        &self,
        vm: &str,
        from: &str,
        request: &MigrationRequest,
    ) -> Result<godwit_types::DryRun, Problem> {
        let client = self.agents.reachable(from)?;
        let late = |_| {
            let detail = format!("host {from} did not answer within {} s", DRY_RUN_LIMIT.as_secs());
            let remedy = "check that its agent runs and is reachable";
            Problem::new(ProblemCode::HostAway, detail, remedy)
        };
        Ok(timeout(DRY_RUN_LIMIT, client.dry_run(vm, request)).await.map_err(late)??)
    }
}

/// Checks the settings of QEMU's own engine, before a move or a drain is saved.
///
/// # Errors
/// [`ProblemCode::InvalidRequest`]: a value is invalid.
/// [`ProblemCode::Preflight`]: no QEMU supports this combination.
pub(crate) fn check_qemu(options: &QemuEngineOptions) -> Result<(), Problem> {
    options.check_values()?;
    let together = options.check_together();
    together.map_err(|error| Problem::new(ProblemCode::Preflight, error.message, error.remedy))
}

/// Checks how disks are to travel, before a move or a drain is saved.
///
/// # Errors
/// [`ProblemCode::InvalidRequest`]: the images at the source are to be deleted and to be kept.
/// [`ProblemCode::Preflight`]: the engine moves no disks, or no host has such a directory.
pub(crate) fn check_disks(
    disks: Option<&TravellingDisks>,
    engine: EngineKind,
) -> Result<(), Problem> {
    let Some(disks) = disks else { return Ok(()) };
    disks.check()?;
    if engine == EngineKind::Qemu {
        let detail = "disks do not travel with QEMU's own engine";
        let remedy = "omit disks, or use engine godwit";
        return Err(Problem::new(ProblemCode::Preflight, detail, remedy));
    }
    let Some(dir) = &disks.to else { return Ok(()) };
    if is_pool(dir) || ThinPool::of(dir).is_some() {
        return Ok(());
    }
    let is_plain = dir.is_absolute()
        && dir.as_os_str().len() <= MOST_DIR_BYTES
        && !dir.components().any(|part| part == Component::ParentDir);
    if is_plain {
        return Ok(());
    }
    let detail = "the directory for the disks is not an absolute path of at most 1024 bytes";
    let remedy = "use a directory in the vm_dirs or the block_devices of the target, without `..`, \
                  a pool of Ceph as rbd:POOL, or a thin pool as lvm:GROUP/POOL";
    Err(Problem::new(ProblemCode::Preflight, detail, remedy))
}

/// Returns the problem of a move whose preflight fails.
fn refused(report: &PreflightReport) -> Option<Problem> {
    let failed: Vec<Check> = report.failed().cloned().collect();
    let first = failed.first()?;
    let more = match failed.len() {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    let detail =
        format!("VM \"{}\" cannot move to host {}: {}{more}", report.vm, report.to, first.evidence);
    let remedy = first.remedy.clone();
    Some(Problem { checks: failed.into(), ..Problem::new(ProblemCode::Preflight, detail, remedy) })
}

#[cfg(test)]
mod tests {
    use godwit_api::HostInfo;
    use godwit_store::MemoryStore;
    use serde_json::json;

    use super::*;
    use crate::rig;

    #[tokio::test(flavor = "multi_thread")]
    async fn an_image_that_a_vm_of_another_host_uses_is_not_to_be_deleted() {
        let manager = rig::leader(Arc::new(MemoryStore::new())).await;
        let with_disk = |name: &str, host: &str| {
            let mut vm = rig::vm(name, host, None);
            let disk = json!({ "path": "/srv/web.raw", "format": "raw" });
            vm.spec.disks = vec![serde_json::from_value(disk).unwrap()];
            vm
        };
        let at = |name: &str| HostInfo { vm_dirs: vec!["/srv".into()], ..rig::host(name, None) };
        manager.state.change(|inventory| {
            rig::put_host(inventory, at("a"), &[], vec![with_disk("web", "a")]);
            rig::put_host(inventory, at("b"), &[], vec![]);
            rig::put_host(inventory, at("c"), &[], vec![with_disk("other", "c")]);
            None
        });
        let request = |delete_source| CreateMove {
            to: Some("b".into()),
            skip_preflight: true,
            disks: Some(TravellingDisks {
                to: Some("/srv".into()),
                delete_source,
                ..TravellingDisks::default()
            }),
            ..CreateMove::default()
        };
        let (requests, caller) = (&manager.requests, Caller::root());
        let refused = requests.create("web", request(true), &caller).await.unwrap_err();
        assert!(refused.detail.contains("VM \"other\" on host c uses it"), "{refused}");
        requests.create("web", request(false), &caller).await.unwrap();
    }

    #[test]
    fn disks_travel_to_a_directory_or_a_pool() {
        let to = |dir: &str| TravellingDisks { to: Some(dir.into()), ..TravellingDisks::default() };
        for good in ["/ssd", "/dev/vg0", "rbd:vms", "rbd:vms/shop", "lvm:vg0/thin0"] {
            check_disks(Some(&to(good)), EngineKind::Godwit).unwrap();
        }
        for bad in ["ssd", "/ssd/../etc", "rbd:", "rbd:vms/a/b", "rbd:../vms", "lvm:vg0"] {
            let refused = check_disks(Some(&to(bad)), EngineKind::Godwit).unwrap_err();
            assert!(refused.detail.contains("not an absolute path"), "{bad}: {refused}");
        }
        assert!(check_disks(Some(&to("rbd:vms")), EngineKind::Qemu).is_err());
        let both = TravellingDisks { delete_source: true, keep_source: true, ..to("/ssd") };
        let refused = check_disks(Some(&both), EngineKind::Godwit).unwrap_err();
        assert_eq!(refused.code, ProblemCode::InvalidRequest, "{refused}");
    }
}
