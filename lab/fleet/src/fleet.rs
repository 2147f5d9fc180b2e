//! Running fleet: each agent listens on a separate port.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{OwnStanding, OwnVm, ReleasedVm, VmInfo};
use godwit_ha::Timing;
use godwit_qemu::Uuid;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::plan::SHARED_DATASTORE;
use crate::server::{Shared, router, unix_ms};
use crate::world::World;
use crate::{Counts, FleetPlan, HeldClock, InjectedFault, churn};

/// Interval of the migrations' progress.
const STEP_INTERVAL: Duration = Duration::from_millis(20);

/// Running simulated agents. They end when this is dropped.
#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    agents: BTreeMap<String, String>,
    tasks: JoinSet<()>,
}

impl Fleet {
    /// Starts a fleet on free ports.
    ///
    /// # Errors
    /// There are too few ports or file descriptors.
    pub async fn begin(plan: FleetPlan) -> io::Result<Fleet> {
        let names: Vec<String> = (0..plan.hosts).map(|number| plan.host_name(number)).collect();
        let shared = Arc::new(Shared::new(World::new(plan).map_err(io::Error::other)?));
        let (mut agents, mut tasks) = (BTreeMap::new(), JoinSet::new());
        for (at, name) in names.into_iter().enumerate() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            agents.insert(name, format!("http://{}", listener.local_addr()?));
            let app = router(Arc::clone(&shared), at);
            tasks.spawn(async move {
                // The server does not end by itself.
                let _ = axum::serve(listener, app).await;
            });
        }
        let steps = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut ticks = interval(STEP_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let now_ms = steps.now_ms();
                let mut world = steps.world();
                world.step(now_ms);
                world.report_loads(now_ms, unix_ms());
            }
        });
        Ok(Fleet { shared, agents, tasks })
    }

    /// Returns the agents' addresses, by host.
    #[must_use]
    pub fn agents(&self) -> &BTreeMap<String, String> {
        &self.agents
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.world().counts.clone()
    }

    /// Returns the VMs of a host, as its agent reports them.
    #[must_use]
    pub fn vms_of(&self, host: &str) -> Vec<VmInfo> {
        let world = self.shared.world();
        let found = world.find(host).and_then(|at| world.host(at));
        found.map(|host| host.vms.values().cloned().collect()).unwrap_or_default()
    }

    /// Returns the latest list of revoked certificates at a host's agent, as PEM.
    #[must_use]
    pub fn revoked_at(&self, host: &str) -> Option<String> {
        let world = self.shared.world();
        world.find(host).and_then(|at| world.host(at)).and_then(|host| host.revoked.clone())
    }

    /// Injects a fault into the next `times` migrations of a VM.
    pub fn fault(&self, vm: &str, fault: InjectedFault, times: u32) {
        self.shared.world().fault(vm, fault, times);
    }

    /// Makes a host's agent hang (connections stay open without data) or continue.
    pub fn silence(&self, host: &str, silent: bool) {
        let at = self.shared.world().find(host);
        if let Some(at) = at {
            self.shared.silence(at, silent);
        }
    }

    /// Keeps the disks that move to other datastores from arriving, or lets them arrive.
    pub fn hold_disk_moves(&self, held: bool) {
        self.shared.hold_disk_moves(held);
    }

    /// Sets the durations and the clock of all guards; call it once, before the first term.
    pub fn set_ha_timing(&self, timing: Timing, clock: HeldClock) {
        self.shared.set_clock_of_guards(clock);
        self.shared.guards().set_timing(timing);
    }

    /// Sets whether a host has a watchdog; it has one by default.
    pub fn set_watchdog(&self, host: &str, has_watchdog: bool) {
        if let Some(at) = self.at(host) {
            self.shared.guards().set_watchdog(at, has_watchdog);
        }
    }

    /// Cuts a host's management network, or connects it again: the manager does not reach its
    /// agent, but other hosts do, and it writes its heartbeats.
    pub fn cut_off(&self, host: &str, is_cut_off: bool) {
        if let Some(at) = self.at(host) {
            self.shared.guards().cut_off(at, is_cut_off);
            self.shared.silence(at, is_cut_off);
        }
    }

    /// Has a host's renewals name VMs whose protection is about to end.
    pub fn end_protection(&self, host: &str, vms: Vec<Uuid>) {
        if let Some(at) = self.at(host) {
            self.shared.guards().end_protection(at, vms);
        }
    }

    /// Returns whether the manager has answered a renewal of a host that names these VMs.
    #[must_use]
    pub fn is_ending_confirmed(&self, host: &str) -> bool {
        self.at(host).is_some_and(|at| self.shared.guards().is_ending_confirmed(at))
    }

    /// Sets what a host shows of VMs that agents restart among themselves, and its problems with
    /// them.
    pub fn set_own(&self, host: &str, own: Vec<OwnVm>, problems: Vec<String>) {
        if let Some(at) = self.at(host) {
            self.shared.guards().set_own(at, own, problems);
        }
    }

    /// Has all hosts show a VM of a host as one that agents restart: that host holds its term, the
    /// others watch it.
    pub fn protect_by_agents(&self, host: &str, vm: &str) {
        let uuid = self.vms_of(host).into_iter().find(|info| info.name == vm);
        let Some(uuid) = uuid.and_then(|info| info.spec.uuid) else { return };
        for other in self.agents.keys() {
            let standing = if other == host { OwnStanding::Held } else { OwnStanding::Watched };
            let own = OwnVm {
                vm: vm.to_owned(),
                uuid,
                datastore: SHARED_DATASTORE,
                term: 1,
                standing,
                holder: Some(Uuid::from_u128(1)),
                host: Some(host.to_owned()),
                problem: None,
            };
            self.set_own(other, vec![own], Vec::new());
        }
    }

    /// Returns the VMs that a host had to give up: they were started elsewhere.
    #[must_use]
    pub fn released_at(&self, host: &str) -> Vec<ReleasedVm> {
        let at = self.at(host);
        at.map(|at| self.shared.guards().released(at)).unwrap_or_default()
    }

    fn at(&self, host: &str) -> Option<usize> {
        self.shared.world().find(host)
    }

    /// Kills and restarts a host's agent: it has forgotten its migrations, and those in progress
    /// from it have ended.
    pub fn restart(&self, host: &str) {
        let mut world = self.shared.world();
        if let Some(at) = world.find(host) {
            world.restart(at);
        }
    }

    /// Makes this many changes per second from now on: loads of hosts, states of VMs.
    pub fn churn(&mut self, changes_per_s: u32) {
        self.tasks.spawn(churn::churn(Arc::clone(&self.shared), changes_per_s));
    }
}

/// Raises this process's limit of open files to the maximum. A fleet of 1,000 hosts needs more than
/// 2,000.
///
/// # Errors
/// The kernel refuses the limit.
pub fn allow_many_files() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}
