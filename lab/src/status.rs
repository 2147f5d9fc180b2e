//! State of a lab as seen from outside.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::agents;
use crate::down::LabName;
use crate::emulator::{self, LinkCounters};
use crate::links::LinkEngine;
use crate::options::LabOptions;
use crate::process::ProcessId;
use crate::state::{LabProcess, LabState, Role};
use crate::topology::{CLIENT_IPV4, CLIENT_IPV6, Host, LabPaths, Topology};

/// Status of a lab, including that there is none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LabStatus {
    /// Whether it is up and all its processes run.
    pub up: bool,
    /// The options that it was made with; `None` if there is no lab.
    pub options: Option<LabOptions>,
    /// Engine that switches the migration networks.
    pub engine: Option<LinkEngine>,
    pub hosts: Vec<HostStatus>,
    pub client: Option<ClientStatus>,
    /// Address of the manager's console on this machine.
    #[serde(default)]
    pub console: Option<String>,
    #[serde(default)]
    pub manager: Option<PathBuf>,
    /// The hosts file for the CLI.
    pub hosts_file: Option<PathBuf>,
    /// Counters of the emulator, if it switches.
    pub links: Vec<LinkCounters>,
    /// Problems and their remedies.
    pub problems: Vec<String>,
}

/// A host of the lab.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostStatus {
    /// `a`, `b`, …
    pub name: String,
    pub namespace: String,
    /// Its addresses on the migration networks, in the order of the lanes.
    pub migration_addresses: Vec<String>,
    /// Address of its agent, in the CLI's form.
    pub api: String,
    /// Its agent, if it runs.
    pub agent: Option<ProcessId>,
}

/// The client of the lab.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientStatus {
    pub namespace: String,
    /// Its addresses on the guest LAN.
    pub addresses: Vec<String>,
    pub socket: PathBuf,
    /// The prober, if it runs.
    pub prober: Option<ProcessId>,
}

/// Examines the lab.
///
/// # Errors
/// None at present; the absence of a lab is a status.
pub fn status(name: &LabName) -> Result<LabStatus> {
    match LabState::load(&LabPaths::new(&name.state_dir)) {
        Some(state) => status_of(name, &state),
        None => Ok(LabStatus {
            up: false,
            options: None,
            engine: None,
            hosts: Vec::new(),
            client: None,
            console: None,
            manager: None,
            hosts_file: None,
            links: Vec::new(),
            problems: Vec::new(),
        }),
    }
}

pub(crate) fn status_of(name: &LabName, state: &LabState) -> Result<LabStatus> {
    let paths = LabPaths::new(&name.state_dir);
    let topology = Topology::new(&state.options.prefix, state.options.hosts);
    let running = |role: &Role| state.process(role).filter(|id| id.is_alive());
    let mut problems = Vec::new();
    if !state.complete {
        problems.push("it came up only in part; `godwit-lab up` starts over".to_owned());
    }
    let has_power = |role: &Role| match role {
        Role::Agent(host) | Role::Watchdog(host) => !paths.no_power(host).exists(),
        Role::Emulator
        | Role::Client
        | Role::Manager
        | Role::SecondManager
        | Role::Etcd
        | Role::Door => true,
    };
    let ended = |process: &&LabProcess| !process.id.is_alive() && has_power(&process.role);
    for process in state.processes.iter().filter(ended) {
        let what = match &process.role {
            Role::Emulator => "the link emulator".to_owned(),
            Role::Client => "the client prober".to_owned(),
            Role::Manager => "the manager".to_owned(),
            Role::SecondManager => "the second manager".to_owned(),
            Role::Etcd => "etcd".to_owned(),
            Role::Door => "the way to the manager's console".to_owned(),
            Role::Agent(host) => format!("the agent of host {host}"),
            Role::Watchdog(host) => format!("the watchdog process of host {host}"),
        };
        problems.push(format!(
            "{what} (process {}) has ended; `godwit-lab up` starts it again",
            process.id.pid
        ));
    }
    let (lanes, family) = (state.options.lanes(), state.options.family);
    let addresses = |host: &Host| {
        host.migration_addresses(&lanes, family).iter().map(IpAddr::to_string).collect()
    };
    let host = |host: &Host| HostStatus {
        name: host.name.clone(),
        namespace: host.namespace.clone(),
        migration_addresses: addresses(host),
        api: format!("unix:{}", agents::socket(&paths, &host.name).display()),
        agent: running(&Role::Agent(host.name.clone())),
    };
    let links = match running(&Role::Emulator) {
        Some(_) => emulator::counters(&paths.emulator_socket()).unwrap_or_default(),
        None => Vec::new(),
    };
    Ok(LabStatus {
        up: problems.is_empty(),
        options: Some(state.options.clone()),
        engine: state.engine,
        hosts: topology.hosts.iter().map(host).collect(),
        client: Some(ClientStatus {
            namespace: topology.client_namespace,
            addresses: vec![CLIENT_IPV4.to_string(), CLIENT_IPV6.to_string()],
            socket: paths.client_socket(),
            prober: running(&Role::Client),
        }),
        console: state.console.clone().filter(|_| running(&Role::Door).is_some()),
        manager: running(&Role::Manager).map(|_| paths.manager_socket()),
        hosts_file: Some(paths.hosts_file()),
        links,
        problems,
    })
}

impl fmt::Display for LabStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(options) = &self.options else {
            return writeln!(f, "no lab is up; `godwit-lab up` brings one");
        };
        let state = if self.up { "up" } else { "in trouble" };
        let engine =
            self.engine.map(|engine| format!(", switched by {engine}")).unwrap_or_default();
        writeln!(f, "the lab is {state}: {options}{engine}")?;
        for host in &self.hosts {
            let agent =
                host.agent.map_or_else(|| "no agent".to_owned(), |id| format!("agent {}", id.pid));
            writeln!(
                f,
                "  host {}  namespace {}  {}  {agent}",
                host.name,
                host.namespace,
                host.migration_addresses.join(" ")
            )?;
        }
        if let Some(client) = &self.client {
            let prober = client
                .prober
                .map_or_else(|| "no prober".to_owned(), |id| format!("prober {}", id.pid));
            writeln!(
                f,
                "  client  namespace {}  {}  {prober}",
                client.namespace,
                client.addresses.join(" ")
            )?;
        }
        if let Some(manager) = &self.manager {
            let console =
                self.console.as_deref().map(|at| format!("  console {at}/")).unwrap_or_default();
            writeln!(f, "  manager  unix:{}{console}", manager.display())?;
        }
        for link in &self.links {
            let LinkCounters { namespace, device, frames, wire_bytes, dropped, lost, .. } = link;
            writeln!(
                f,
                "  link to {device} of {namespace}  {frames} frames, {wire_bytes} bytes, \
                 {dropped} dropped, {lost} lost"
            )?;
        }
        for problem in &self.problems {
            writeln!(f, "  problem: {problem}")?;
        }
        Ok(())
    }
}
