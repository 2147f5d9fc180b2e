//! The lab's manager: a process beside the agent of the first host, which knows all hosts of the
//! lab. A lab may have two, which share an etcd there.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use godwit_pki::{Grant, Role};
use serde::Serialize;

use crate::agents::{Tls, authority, url};
use crate::door::MANAGER_PORT;
use crate::options::{LabOptions, SecondManager};
use crate::state::{self, write_whole};
use crate::topology::{Host, LabPaths, Topology};
use crate::trial::until;

/// Manager of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seat {
    First,
    /// Of two.
    Second,
}

/// Address of etcd in the namespace of the managers.
const ETCD: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 2379);
/// Address at which etcd's only member expects others.
const ETCD_PEERS: &str = "http://127.0.0.1:2380";
/// Exit code of `godwit` if the object exists already (docs/cli.md).
const CONFLICT: i32 = 4;

/// Time limit for the manager to reach all agents.
const UP_LIMIT: Duration = Duration::from_secs(30);

/// Configuration for `godwit control run --config`.
#[derive(Serialize)]
struct ManagerConfig {
    name: &'static str,
    listen: Vec<SocketAddr>,
    socket: PathBuf,
    state_dir: PathBuf,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    insecure: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Tls>,
    /// Files of the authority, for hosts that join.
    #[serde(skip_serializing_if = "Option::is_none")]
    authority: Option<AuthorityFiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd: Option<EtcdEntry>,
}

#[derive(Serialize)]
struct EtcdEntry {
    endpoints: [String; 1],
}

#[derive(Serialize)]
struct AuthorityFiles {
    certificate: PathBuf,
    key: PathBuf,
}

impl Seat {
    /// Returns the managers of a lab.
    pub(crate) fn all(options: &LabOptions) -> &'static [Seat] {
        match options.hooks.second_manager {
            Some(_) => &[Seat::First, Seat::Second],
            None => &[Seat::First],
        }
    }

    /// Returns its name, also in its certificate.
    fn name(self) -> &'static str {
        match self {
            Seat::First => "manager",
            Seat::Second => "second",
        }
    }

    fn port(self) -> u16 {
        match self {
            Seat::First => MANAGER_PORT,
            Seat::Second => MANAGER_PORT + 1,
        }
    }

    /// Returns its purpose among the processes of the lab.
    pub(crate) fn role(self) -> state::Role {
        match self {
            Seat::First => state::Role::Manager,
            Seat::Second => state::Role::SecondManager,
        }
    }

    /// Returns the paths of its own files.
    pub(crate) fn paths(self, lab: &LabPaths) -> LabPaths {
        match self {
            Seat::First => lab.clone(),
            Seat::Second => LabPaths::new(&lab.root().join(self.name())),
        }
    }
}

/// Returns whether the managers share an etcd.
pub(crate) fn share_etcd(options: &LabOptions) -> bool {
    options.hooks.second_manager == Some(SecondManager::OfSameCluster)
}

/// Returns the hosts of the first manager.
fn hosts_of_first<'a>(topology: &'a Topology, options: &LabOptions) -> &'a [Host] {
    let hosts = topology.hosts.as_slice();
    match options.hooks.second_manager {
        Some(SecondManager::OfOtherCluster) => hosts.get(..hosts.len() / 2).unwrap_or_default(),
        Some(SecondManager::OfSameCluster) | None => hosts,
    }
}

/// Returns the command that runs etcd.
pub(crate) fn etcd(paths: &LabPaths) -> Command {
    let clients = etcd_url();
    let mut command = Command::new("etcd");
    command.args(["--name", "lab", "--data-dir"]).arg(paths.root().join("etcd"));
    command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
    command.args(["--listen-peer-urls", ETCD_PEERS]);
    command.args(["--initial-advertise-peer-urls", ETCD_PEERS]);
    command.args(["--initial-cluster", &format!("lab={ETCD_PEERS}")]);
    command
}

/// Returns whether etcd accepts connections. The caller is in its namespace.
pub(crate) fn etcd_answers() -> bool {
    TcpStream::connect(ETCD).is_ok()
}

fn etcd_url() -> String {
    format!("http://{}", SocketAddr::from(ETCD))
}

/// Writes a manager's configuration, and creates its certificate if that is missing.
pub(crate) fn write_config(seat: Seat, options: &LabOptions, paths: &LabPaths) -> Result<()> {
    let tls = if options.insecure { None } else { Some(certificate(seat, paths)?) };
    let own = seat.paths(paths);
    let etcd = share_etcd(options).then(|| EtcdEntry { endpoints: [etcd_url()] });
    let text = toml::to_string(&ManagerConfig {
        name: seat.name(),
        listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, seat.port()))],
        socket: own.manager_socket(),
        state_dir: own.manager_state(),
        insecure: options.insecure,
        authority: tls.as_ref().map(|tls| AuthorityFiles {
            certificate: tls.authority.clone(),
            key: tls.authority.with_extension("key"),
        }),
        tls,
        etcd,
    })?;
    let text = format!("{text}\n{}", options.hooks.manager_settings);
    std::fs::create_dir_all(own.root())
        .with_context(|| format!("cannot make {}", own.root().display()))?;
    write_whole(&own.manager_config(), &text)
}

/// Creates an operator's certificate: agents obey it.
fn certificate(seat: Seat, paths: &LabPaths) -> Result<Tls> {
    let (dir, authority, name) = (paths.pki(), authority(paths)?, seat.name());
    let (certificate, key) = (dir.join(format!("{name}.pem")), dir.join(format!("{name}.key")));
    if !certificate.exists() {
        let days = crate::agents::CERTIFICATE_DAYS;
        let grant = Grant {
            name: name.to_owned(),
            role: Role::Operator,
            addresses: vec![Ipv4Addr::LOCALHOST.into()],
            days,
        };
        authority.issue(&grant).context("the manager's certificate")?;
    }
    Ok(Tls { authority: authority.certificate(), certificate, key })
}

/// Returns the command that runs a manager, with its own paths.
pub(crate) fn command(godwit: &Path, options: &LabOptions, own: &LabPaths) -> Result<Command> {
    let mut command = Command::new(godwit);
    command.args(["control", "run", "--config"]).arg(own.manager_config());
    if let Some(folder) = &options.hooks.manager_programs {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let all = [folder.clone()].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(all).context("the manager's PATH")?);
    }
    Ok(command)
}

/// Adds the hosts of the first manager that it does not know yet, and waits until it reaches all of
/// them.
pub(crate) fn add_hosts(
    godwit: &Path,
    topology: &Topology,
    options: &LabOptions,
    paths: &LabPaths,
) -> Result<()> {
    let hosts = hosts_of_first(topology, options);
    for host in hosts {
        let address = url(host, options).context("the lab has no migration network")?;
        let mut command = Command::new(godwit);
        command.args(["control", "host", "add", &host.name, "--address", &address, "--manager"]);
        command.arg(format!("unix:{}", paths.manager_socket().display()));
        if let Some(rate) = options.first_rate() {
            command.args(["--link", &rate.to_string()]);
        }
        let output =
            command.output().with_context(|| format!("cannot run {}", godwit.display()))?;
        if !output.status.success() && output.status.code() != Some(CONFLICT) {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("the manager does not take host {} in: {}", host.name, stderr.trim());
        }
    }
    let has_power = |host: &&Host| !paths.no_power(&host.name).exists();
    wait_until_up(godwit, hosts.iter().filter(has_power).count() as u64, paths)
}

fn wait_until_up(godwit: &Path, hosts: u64, paths: &LabPaths) -> Result<()> {
    until("the manager reaches all hosts with power", UP_LIMIT, || {
        let mut command = Command::new(godwit);
        command.args(["--json", "control", "status", "--manager"]);
        command.arg(format!("unix:{}", paths.manager_socket().display()));
        let output =
            command.output().with_context(|| format!("cannot run {}", godwit.display()))?;
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Ok((status["hosts_up"].as_u64() == Some(hosts)).then_some(()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Hooks;

    fn config(seat: Seat, options: &LabOptions, paths: &LabPaths) -> toml::Table {
        write_config(seat, options, paths).unwrap();
        let file = seat.paths(paths).manager_config();
        std::fs::read_to_string(file).unwrap().parse().unwrap()
    }

    #[test]
    fn two_managers_share_an_etcd_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        let second_manager = Some(SecondManager::OfSameCluster);
        let hooks = Hooks { second_manager, ..Hooks::default() };
        let options = LabOptions { insecure: true, hooks, ..LabOptions::default() };
        let [one, other] = Seat::all(&options) else { panic!("not two") };
        let (one, other) = (config(*one, &options, &paths), config(*other, &options, &paths));
        assert_eq!(one["etcd"]["endpoints"][0].as_str(), Some("http://127.0.0.1:2379"));
        assert_eq!(one["etcd"], other["etcd"]);
        for key in ["name", "listen", "socket", "state_dir"] {
            assert_ne!(one[key], other[key], "{key}");
        }
        let second_manager = Some(SecondManager::OfOtherCluster);
        let hooks = Hooks { second_manager, ..Hooks::default() };
        let apart = LabOptions { hooks, ..options };
        assert!(!config(Seat::Second, &apart, &paths).contains_key("etcd"));
        let topology = Topology::new("godwit", 4);
        let names = |options: &LabOptions| -> Vec<String> {
            hosts_of_first(&topology, options).iter().map(|host| host.name.clone()).collect()
        };
        assert_eq!(names(&apart), ["a", "b"]);
        let alone = LabOptions { insecure: true, ..LabOptions::default() };
        assert_eq!((Seat::all(&alone), names(&alone).len()), (&[Seat::First][..], 4));
        assert!(!config(Seat::First, &alone, &paths).contains_key("etcd"));
    }
}
