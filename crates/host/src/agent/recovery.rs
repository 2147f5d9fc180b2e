//! The agent's start: finds the VMs again that earlier agents left, running or dead, and removes what belongs to
//! nobody.

use std::sync::{Arc, Mutex};

use godwit_api::ApiError;
use godwit_ram::RamDir;

use crate::agent::{Agent, Slot};
use crate::config::Config;
use crate::failure::{host_failed, ram_failed};
use crate::lanes_seen::LanesSeen;
use crate::limits::HostLimits;
use crate::migration::{IncomingMigrations, PageIns, serve_again, take_up};
use crate::migrations::Migrations;
use crate::probe::Probes;
use crate::protection::Protection;
use crate::references::References;
use crate::store::{Desired, Role, SavedVm, Store};
use crate::vm::{Condition, Places, Vm};

impl Agent {
    /// An agent with the VMs of its predecessors.
    pub async fn open(config: Config) -> Result<Arc<Agent>, ApiError> {
        let owner = match &config.qemu_user {
            None => None,
            Some(user) => Some(crate::user::look_up(user).map_err(|why| {
                let mend = "correct qemu_user in the configuration";
                ApiError::new(godwit_api::ErrorCode::InvalidRequest, format!("qemu_user: {why}"), mend)
            })?),
        };
        let protection = config.tls.as_ref().map(Protection::load).transpose().map_err(|error| {
            let mend = "correct [tls] in the configuration; `godwit pki` makes certificates";
            ApiError::new(godwit_api::ErrorCode::InvalidRequest, error.to_string(), mend)
        })?;
        let store = Store::open(&config.state_dir)?;
        let ram = RamDir::open(&config.ram_dir()).map_err(|error| ram_failed(&error))?;
        let places = Places { run_dir: config.run_dir.clone(), ram_dir: config.ram_dir(), owner };
        places.prepare().map_err(|error| host_failed("run_dir can't be prepared", &error))?;
        let limits = HostLimits::new(&config);
        let host_bytes = crate::memory::total_bytes()
            .map_err(|error| host_failed("/proc/meminfo can't be read", &error))?;
        let references = Arc::new(References::new(&config.references, host_bytes));
        let agent = Arc::new(Agent {
            config,
            store,
            ram,
            places,
            slots: Mutex::default(),
            migrations: Migrations::default(),
            incoming: IncomingMigrations::default(),
            page_ins: PageIns::default(),
            probes: Probes::default(),
            limits,
            lanes_seen: LanesSeen::default(),
            protection,
            references,
            qemus: tokio::sync::Mutex::default(),
            accels: tokio::sync::Mutex::default(),
        });
        agent.adopt_all().await?;
        Ok(agent)
    }

    async fn adopt_all(self: &Arc<Self>) -> Result<(), ApiError> {
        let (records, problems) = self.store.load_all()?;
        for problem in problems {
            tracing::error!(%problem, "a VM is left alone");
        }
        // Also those whose record can't be read: what runs of them is not touched.
        let known = self.store.names()?;
        for record in records {
            let name = record.spec.name.clone();
            let found = Vm::adopt(self.places.vm(&name), &record.spec, record.epoch).await;
            self.take_in(record, found).await?;
        }
        self.remove_orphans(&known).await.map_err(|error| host_failed("run_dir can't be cleaned", &error))
    }

    async fn take_in(
        self: &Arc<Self>,
        record: SavedVm,
        found: Result<Option<Vm>, ApiError>,
    ) -> Result<(), ApiError> {
        let name = record.spec.name.clone();
        let files = self.places.vm(&name);
        let vm = match found {
            Ok(Some(vm)) => vm,
            Ok(None) if record.role == Role::Shadow => {
                files.remove_all();
                return Ok(self.store.remove(&name)?);
            }
            Ok(None) => {
                let words =
                    files.last_words().map_or(String::new(), |words| format!("; its last words: {words}"));
                let failed = record.desired == Desired::Running && record.role != Role::InDoubt;
                let mut slot = Slot::new(record.spec, record.epoch, Condition::Stopped);
                if record.role == Role::InDoubt {
                    // Its process is gone, the doubt is not: the other host may have run the guest all the while.
                    slot.condition = Condition::InDoubt;
                    slot.reason = Some("it was being handed over when this host or its agent stopped; another host may run it".into());
                }
                if failed {
                    slot.condition = Condition::Failed;
                    slot.reason =
                        Some(format!("QEMU had ended when the agent started (did the host restart?){words}"));
                }
                files.remove_runtime();
                return self.insert(slot);
            }
            Err(error) => return self.take_in_unknown(record, error.to_string()),
        };
        match vm.is_running().await {
            Some(running) => self.take_in_running(record, Arc::new(vm), running).await,
            // It may run the guest: nothing is ended or let go on a guess.
            None => {
                let pid = vm.process.pid;
                let why = format!("its QEMU (process {pid}) does not say whether the guest runs");
                self.take_in_unknown(record, why)
            }
        }
    }

    /// A VM whose QEMU can't be spoken to. What the record says of other hosts stays true.
    fn take_in_unknown(&self, record: SavedVm, why: String) -> Result<(), ApiError> {
        let condition = match record.role {
            Role::Owner => Condition::Failed,
            Role::Shadow | Role::InDoubt => Condition::InDoubt,
        };
        let mut slot = Slot::new(record.spec, record.epoch, condition);
        slot.reason = Some(why);
        self.insert(slot)
    }

    async fn take_in_running(
        self: &Arc<Self>,
        record: SavedVm,
        vm: Arc<Vm>,
        running: bool,
    ) -> Result<(), ApiError> {
        let name = record.spec.name.clone();
        let (condition, reason) = match (record.role, running) {
            // The hand-over had been announced, and the guest had not been stopped for it: it never left.
            (Role::InDoubt, true) => {
                self.save(&record.spec, Role::Owner, Desired::Running, record.epoch).await?;
                (Condition::Running, None)
            }
            (Role::InDoubt, false) if record.pages_kept_for.is_some() => (
                Condition::InDoubt,
                record
                    .pages_kept_for
                    .as_ref()
                    .map(|host| format!("host {host} runs it, or may, and fetches pages of it from here")),
            ),
            (Role::InDoubt, false) => (
                Condition::InDoubt,
                Some("another host may run it: the link broke at the hand-over".to_owned()),
            ),
            (Role::Owner, true) => (Condition::Running, None),
            (Role::Owner, false) => (Condition::Paused, Some("it was paused when the agent started".into())),
            // It was told to run, so the guest is this host's: only the record came too late.
            (Role::Shadow, true) => {
                self.save(&record.spec, Role::Owner, Desired::Running, record.epoch).await?;
                (Condition::Running, None)
            }
            // Its source runs the guest, or waits to be told that this host does not.
            (Role::Shadow, false) => {
                tracing::warn!(vm = name, "a shadow is left from before the agent's start: it is removed");
                self.store.remove(&name)?;
                vm.process.kill().await;
                vm.files.remove_all();
                return Ok(());
            }
        };
        tracing::info!(vm = name, pid = vm.process.pid, state = %condition.state(), "adopted");
        let in_doubt = condition == Condition::InDoubt;
        let mut slot = Slot::new(record.spec, record.epoch, condition);
        slot.reason = reason;
        slot.vm = Some(vm.clone());
        self.insert(slot)?;
        self.watch(&vm);
        if vm.files.missing().exists() {
            self.page_in_further(&vm).await;
        }
        if let Some(host) = record.pages_kept_for.filter(|_| in_doubt) {
            serve_again(self, &vm, host);
        }
        Ok(())
    }

    /// A guest that lacks pages waits for this agent. One that nobody holds back from what is missing must not run on.
    async fn page_in_further(self: &Arc<Self>, vm: &Arc<Vm>) {
        let Err(failure) = take_up(self, vm).await else { return };
        tracing::error!(vm = vm.name, %failure, "pages of it are missing and can't be fetched: it is paused");
        if let Err(error) = vm.process.qmp.stop().await {
            tracing::error!(vm = vm.name, %error, "it could not be paused");
        }
        let reason = format!("pages of it are missing and can't be fetched: {failure}");
        self.settle(&vm.name, Condition::InDoubt, Some(vm.clone()), Some(reason));
    }

    /// Ends processes and removes files that no record speaks of: an agent crashed between making them and saying so.
    async fn remove_orphans(&self, known: &[String]) -> std::io::Result<()> {
        for name in self.places.vm_names()? {
            if known.contains(&name) {
                continue;
            }
            let files = self.places.vm(&name);
            if let Some((pid, start_time)) = files.living_process() {
                tracing::warn!(vm = name, pid, "a QEMU without a record is ended");
                match godwit_qemu::QemuProcess::adopt(files.dir.clone(), pid, start_time).await {
                    Ok(process) => process.quit().await,
                    Err(_) => godwit_qemu::end_process(pid, start_time).await?,
                }
            }
            files.remove_all();
        }
        for path in self.places.orphaned_memory(known)? {
            tracing::warn!(path = %path.display(), "guest memory without a VM is removed");
            std::fs::remove_file(&path)?;
        }
        Ok(())
    }
}
