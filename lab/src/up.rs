//! Brings a lab up.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use godwit_prober::server::ServerConfig;
use serde::Serialize;

use crate::agents::{self, AgentTools};
use crate::daemon::{self, DaemonKind};
use crate::door::{self, DoorConfig};
use crate::down::{LabName, leftovers, tear_down};
use crate::kvm_probe;
use crate::links::{self, LinkEngine};
use crate::manager::{self, Seat};
use crate::mounts;
use crate::namespace;
use crate::options::LabOptions;
use crate::process;
use crate::programs::Programs;
use crate::state::{LabLock, LabState, Role, write_whole};
use crate::status::{LabStatus, status_of};
use crate::topology::{Host, LabPaths, Topology};

const DAEMON_LIMIT: Duration = Duration::from_secs(10);
const AGENT_LIMIT: Duration = Duration::from_secs(60);

/// Brings the lab up as `options` say; its processes run `programs`.
///
/// Idempotent: a lab with the same options stays as it is, and processes of it that ended are
/// started again. A lab that only came up halfway is taken down first. What fails is undone.
///
/// # Errors
/// No root, a tool missing, a lab with other options is up (unless `replace`), or a part does not
/// start.
pub fn up(options: &LabOptions, programs: &Programs) -> Result<LabStatus> {
    options.check()?;
    if !rustix::process::geteuid().is_root() {
        bail!("the lab makes network namespaces, which needs root; run it with sudo");
    }
    let name = options.name();
    let paths = LabPaths::new(&options.state_dir);
    let tools =
        if options.agents { Some(AgentTools::find(options, &programs.godwit)?) } else { None };
    let lock = LabLock::take(&paths)?;
    let found = LabState::load(&paths);
    let mut builder = Builder {
        options,
        programs,
        tools,
        topology: Topology::new(&options.prefix, options.hosts),
        state: LabState::new(options),
        paths,
    };
    match found {
        Some(state) if builder.can_keep(&state) => {
            builder.state = state;
            builder.repair()?;
            return status_of(&name, &builder.state);
        }
        Some(state)
            if state.complete && !state.options.is_same_lab(options) && !options.replace =>
        {
            bail!(
                "a lab is up with other options ({}); take it down with `godwit-lab down` or give \
                 --replace",
                state.options
            )
        }
        Some(_) => tear_down(&name)?,
        None => {
            let left = leftovers(&name)?;
            if !left.is_empty() && !options.replace {
                // Succeeds only if our lock created it: a directory that is not empty stays.
                drop(std::fs::remove_dir(&options.state_dir));
                bail!(
                    "{} left from another lab; remove with `godwit-lab down` or give --replace",
                    left.join(", ")
                );
            }
            tear_down(&name)?;
        }
    }
    // The directory was removed with the old lab, and our lock with it.
    drop(lock);
    let _lock = LabLock::take(&builder.paths)?;
    if let Err(error) = builder.build() {
        let undone = tear_down(&name);
        let error = error.context("the lab did not come up");
        return Err(match undone {
            Ok(()) => error,
            Err(undo) => error
                .context(format!("undoing it failed too: {undo:#}; `godwit-lab down` tries again")),
        });
    }
    status_of(&name, &builder.state)
}

impl LabOptions {
    /// Returns the identity of the lab with these options.
    #[must_use]
    pub fn name(&self) -> LabName {
        LabName { prefix: self.prefix.clone(), state_dir: self.state_dir.clone() }
    }
}

struct Builder<'a> {
    options: &'a LabOptions,
    programs: &'a Programs,
    tools: Option<AgentTools>,
    topology: Topology,
    paths: LabPaths,
    state: LabState,
}

impl Builder<'_> {
    fn build(&mut self) -> Result<()> {
        self.state.save(&self.paths)?;
        links::make_namespaces(&self.topology, self.options)?;
        if self.options.hooks.mounts {
            mounts::make(&self.topology, &self.options.hooks, &self.paths)?;
        }
        links::make_guest_lan(&self.topology)?;
        self.make_migration_networks()?;
        agents::make_directories(&self.topology, self.options, &self.paths)?;
        self.start_client()?;
        if let Some(tools) = &self.tools {
            agents::write_configs(&self.topology, self.options, &self.paths, tools)?;
            kvm_probe::give(&self.topology, &self.paths);
        }
        self.start_agents()?;
        agents::write_hosts_file(&self.topology, self.options, &self.paths)?;
        self.start_manager()?;
        self.state.complete = true;
        self.state.save(&self.paths)
    }

    /// Returns whether the existing lab can be kept: same options, complete, and its namespaces
    /// still exist.
    fn can_keep(&self, state: &LabState) -> bool {
        state.complete
            && state.options.is_same_lab(self.options)
            && self.topology.namespaces().iter().all(|name| namespace::exists(name))
    }

    /// Restarts the processes that ended.
    fn repair(&mut self) -> Result<()> {
        if self.state.engine == Some(LinkEngine::Emulator) && !self.runs(&Role::Emulator) {
            self.start_emulator()?;
            links::configure_migration_nics(&self.topology, self.options, LinkEngine::Emulator)?;
        }
        if !self.runs(&Role::Client) {
            self.start_client()?;
        }
        self.start_agents()?;
        self.start_manager()
    }

    fn runs(&self, role: &Role) -> bool {
        self.state.process(role).is_some_and(process::ProcessId::is_alive)
    }

    fn make_migration_networks(&mut self) -> Result<()> {
        let engine = links::choose_engine(&self.topology, self.options);
        self.state.engine = Some(engine);
        match engine {
            LinkEngine::Emulator => self.start_emulator()?,
            LinkEngine::Kernel | LinkEngine::Netem => {
                links::make_migration_bridges(&self.topology, self.options, engine)?;
            }
        }
        links::configure_migration_nics(&self.topology, self.options, engine)
    }

    /// Starts the emulator. It runs in the link namespace, although it needs nothing of it, so that
    /// `down` finds it by its namespace when all else is lost.
    fn start_emulator(&mut self) -> Result<()> {
        let config = links::emulator_config(&self.topology, self.options, &self.paths);
        let namespace = self.topology.link_namespace.clone();
        let (file, log) = (self.paths.emulator_config(), self.paths.emulator_log());
        self.start_daemon(Role::Emulator, DaemonKind::Emulator, &namespace, &config, (&file, &log))
    }

    fn start_client(&mut self) -> Result<()> {
        let config = ServerConfig { socket: self.paths.client_socket() };
        let namespace = self.topology.client_namespace.clone();
        let (file, log) = (self.paths.client_config(), self.paths.client_log());
        self.start_daemon(Role::Client, DaemonKind::Client, &namespace, &config, (&file, &log))
    }

    fn start_daemon(
        &mut self,
        role: Role,
        kind: DaemonKind,
        namespace: &str,
        config: &impl Serialize,
        (config_file, log): (&Path, &Path),
    ) -> Result<()> {
        write_whole(config_file, &serde_json::to_string_pretty(config)?)?;
        let what = match kind {
            DaemonKind::Emulator => "the link emulator",
            DaemonKind::Client => "the client prober",
            DaemonKind::Door => "the way to the manager's console",
        };
        let mut started = process::start(
            namespace,
            daemon::command(&self.programs.lab, kind, config_file),
            log,
            true,
        )?;
        self.state.set_process(role, started.id);
        self.state.save(&self.paths)?;
        started.wait_ready_line(what, log, DAEMON_LIMIT)
    }

    /// Starts the managers that are wanted and do not run, beside the first host's agent, and adds
    /// all hosts to them.
    fn start_manager(&mut self) -> Result<()> {
        let (true, Some(first)) =
            (self.options.manager && self.options.agents, self.topology.hosts.first())
        else {
            return Ok(());
        };
        let namespace = first.namespace.clone();
        if manager::share_etcd(self.options) {
            self.start_etcd(&namespace)?;
        }
        for seat in Seat::all(self.options) {
            self.start_seat(*seat, &namespace)?;
        }
        if !self.runs(&Role::Door) {
            self.open_door(&namespace)?;
        }
        manager::add_hosts(&self.programs.godwit, &self.topology, self.options, &self.paths)
    }

    /// Starts a manager, if it does not run.
    fn start_seat(&mut self, seat: Seat, namespace: &str) -> Result<()> {
        if self.runs(&seat.role()) {
            return Ok(());
        }
        manager::write_config(seat, self.options, &self.paths)?;
        let own = seat.paths(&self.paths);
        let command = manager::command(&self.programs.godwit, self.options, &own)?;
        let log = own.manager_log();
        let started = process::start(namespace, command, &log, false)
            .context("the manager does not start")?;
        self.state.set_process(seat.role(), started.id);
        self.state.save(&self.paths)?;
        let socket = own.manager_socket();
        let is_there = || UnixStream::connect(&socket).is_ok();
        started.wait_until("the manager", &log, AGENT_LIMIT, is_there)
    }

    /// Starts the etcd of two managers, if it does not run.
    fn start_etcd(&mut self, namespace: &str) -> Result<()> {
        if self.runs(&Role::Etcd) {
            return Ok(());
        }
        let log = self.paths.root().join("etcd.log");
        let started = process::start(namespace, manager::etcd(&self.paths), &log, false)
            .context("etcd does not start; remedy: apt-get install etcd-server")?;
        self.state.set_process(Role::Etcd, started.id);
        self.state.save(&self.paths)?;
        let is_there =
            || namespace::in_namespace(namespace, manager::etcd_answers).unwrap_or(false);
        started.wait_until("etcd", &log, AGENT_LIMIT, is_there)
    }

    /// Starts the port forwarder from this machine to the manager's console and API.
    fn open_door(&mut self, namespace: &str) -> Result<()> {
        let (file, log) = (self.paths.door_config(), self.paths.door_log());
        write_whole(&file, &serde_json::to_string_pretty(&DoorConfig::to_manager())?)?;
        let listener = door::listen()?;
        let scheme = if self.options.insecure { "http" } else { "https" };
        let address = format!("{scheme}://{}", listener.local_addr()?);
        let command = daemon::command(&self.programs.lab, DaemonKind::Door, &file);
        let stdin = Stdio::from(OwnedFd::from(listener));
        let mut started = process::start_with(namespace, command, &log, true, stdin)?;
        self.state.set_process(Role::Door, started.id);
        self.state.console = Some(address);
        self.state.save(&self.paths)?;
        started.wait_ready_line("the way to the manager's console", &log, DAEMON_LIMIT)
    }

    /// Returns the command of a host's agent or watchdog.
    fn command_of(&self, host: &Host, what: &str) -> Command {
        let godwit = &self.programs.godwit;
        let mut command = match self.options.hooks.mounts {
            true => mounts::command(&self.paths, &host.name, godwit),
            false => Command::new(godwit),
        };
        command.args(["host", what, "--config"]).arg(agents::config(&self.paths, &host.name));
        command
    }

    /// Starts a host's watchdog process, if it is wanted and does not run.
    fn start_watchdog(&mut self, host: &Host) -> Result<()> {
        let role = Role::Watchdog(host.name.clone());
        if !self.options.hooks.watchdog || self.runs(&role) {
            return Ok(());
        }
        let log = self.paths.host(&host.name).join("watchdog.log");
        let command = self.command_of(host, "watchdog");
        let started = process::start(&host.namespace, command, &log, false)
            .with_context(|| format!("the watchdog of host {} does not start", host.name))?;
        self.state.set_process(role, started.id);
        self.state.save(&self.paths)
    }

    /// Starts all agents that do not run, then waits for them together.
    fn start_agents(&mut self) -> Result<()> {
        if !self.options.agents {
            return Ok(());
        }
        let mut waiting = Vec::new();
        for host in self.topology.hosts.clone() {
            if self.paths.no_power(&host.name).exists() {
                continue;
            }
            self.start_watchdog(&host)?;
            let role = Role::Agent(host.name.clone());
            if self.runs(&role) {
                continue;
            }
            let mut command = self.command_of(&host, "run");
            command.envs(agents::hook_environment(self.options, &self.paths, &host.name));
            let log = agents::log(&self.paths, &host.name);
            let started = process::start(&host.namespace, command, &log, false)
                .with_context(|| format!("the agent of host {} does not start", host.name))?;
            self.state.set_process(role, started.id);
            self.state.save(&self.paths)?;
            waiting.push((host, started, log));
        }
        for (host, started, log) in waiting {
            let socket = agents::socket(&self.paths, &host.name);
            let what = format!("the agent of host {}", host.name);
            started.wait_until(&what, &log, AGENT_LIMIT, || agents::answers(&socket))?;
        }
        Ok(())
    }
}
