//! A fleet that is served: each agent at a port of its own.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::VmInfo;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::server::{Shared, router};
use crate::world::World;
use crate::{Counts, FleetPlan, InjectedFault, churn};

/// How often migrations go on.
const STEP_INTERVAL: Duration = Duration::from_millis(20);

/// Simulated agents that are served. They end with it.
#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    agents: BTreeMap<String, String>,
    tasks: JoinSet<()>,
}

impl Fleet {
    /// Serves a fleet at ports that are free.
    ///
    /// # Errors
    /// There are too few ports or files.
    pub async fn begin(plan: FleetPlan) -> io::Result<Fleet> {
        let names: Vec<String> = (0..plan.hosts).map(|number| plan.host_name(number)).collect();
        let shared = Arc::new(Shared::new(World::new(plan).map_err(io::Error::other)?));
        let (mut agents, mut tasks) = (BTreeMap::new(), JoinSet::new());
        for (at, name) in names.into_iter().enumerate() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            agents.insert(name, format!("http://{}", listener.local_addr()?));
            let app = router(Arc::clone(&shared), at);
            tasks.spawn(async move {
                // It does not end by itself.
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
                steps.world().step(now_ms);
            }
        });
        Ok(Fleet { shared, agents, tasks })
    }

    /// The agents' addresses, by host.
    #[must_use]
    pub fn agents(&self) -> &BTreeMap<String, String> {
        &self.agents
    }

    /// What it has been asked to do so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.world().counts.clone()
    }

    /// The VMs of a host, as its agent has them.
    #[must_use]
    pub fn vms_of(&self, host: &str) -> Vec<VmInfo> {
        let world = self.shared.world();
        let found = world.find(host).and_then(|at| world.host(at));
        found.map(|host| host.vms.values().cloned().collect()).unwrap_or_default()
    }

    /// The list of revoked certificates that a host's agent got last, PEM.
    #[must_use]
    pub fn revoked_at(&self, host: &str) -> Option<String> {
        let world = self.shared.world();
        world.find(host).and_then(|at| world.host(at)).and_then(|host| host.revoked.clone())
    }

    /// The next migrations of a VM go wrong.
    pub fn fault(&self, vm: &str, fault: InjectedFault, times: u32) {
        self.shared.world().fault(vm, fault, times);
    }

    /// A host's agent hangs: connections to it stay open, and nothing is said. Or it goes on.
    pub fn silence(&self, host: &str, silent: bool) {
        let at = self.shared.world().find(host);
        if let Some(at) = at {
            self.shared.silence(at, silent);
        }
    }

    /// A host's agent is killed and started again: it has forgotten its migrations, and those that were under way from there are over.
    pub fn restart(&self, host: &str) {
        let mut world = self.shared.world();
        if let Some(at) = world.find(host) {
            world.restart(at);
        }
    }

    /// From now on so many things change each second: loads of hosts, states of VMs.
    pub fn churn(&mut self, changes_per_s: u32) {
        self.tasks.spawn(churn::churn(Arc::clone(&self.shared), changes_per_s));
    }
}

/// Allows this process as many open files as it may have: a fleet of 1,000 needs more than 2,000.
///
/// # Errors
/// The kernel says no.
pub fn allow_many_files() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}
