//! The lab's manager: a process beside the agent of the first host, which knows all hosts of the
//! lab.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use godwit_pki::{Grant, Role};
use serde::Serialize;

use crate::agents::{Tls, authority, url};
use crate::door::DoorConfig;
use crate::options::LabOptions;
use crate::state::write_whole;
use crate::topology::{Host, LabPaths, Topology};
use crate::trial::until;

/// The manager's name, also in its certificate.
const NAME: &str = "manager";
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
}

#[derive(Serialize)]
struct AuthorityFiles {
    certificate: PathBuf,
    key: PathBuf,
}

/// Writes the manager's configuration, and creates its certificate if that is missing.
pub(crate) fn write_config(options: &LabOptions, paths: &LabPaths) -> Result<()> {
    let tls = if options.insecure { None } else { Some(certificate(paths)?) };
    let text = toml::to_string(&ManagerConfig {
        name: NAME,
        listen: vec![DoorConfig::to_manager().to],
        socket: paths.manager_socket(),
        state_dir: paths.manager_state(),
        insecure: options.insecure,
        authority: tls.as_ref().map(|tls| AuthorityFiles {
            certificate: tls.authority.clone(),
            key: tls.authority.with_extension("key"),
        }),
        tls,
    })?;
    let text = format!("{text}\n{}", options.hooks.manager_settings);
    write_whole(&paths.manager_config(), &text)
}

/// Creates an operator's certificate: agents obey it.
fn certificate(paths: &LabPaths) -> Result<Tls> {
    let (dir, authority) = (paths.pki(), authority(paths)?);
    let (certificate, key) = (dir.join(format!("{NAME}.pem")), dir.join(format!("{NAME}.key")));
    if !certificate.exists() {
        let days = crate::agents::CERTIFICATE_DAYS;
        let grant = Grant {
            name: NAME.to_owned(),
            role: Role::Operator,
            addresses: vec![Ipv4Addr::LOCALHOST.into()],
            days,
        };
        authority.issue(&grant).context("the manager's certificate")?;
    }
    Ok(Tls { authority: authority.certificate(), certificate, key })
}

/// Returns the command that runs the manager.
pub(crate) fn command(godwit: &Path, options: &LabOptions, paths: &LabPaths) -> Result<Command> {
    let mut command = Command::new(godwit);
    command.args(["control", "run", "--config"]).arg(paths.manager_config());
    if let Some(folder) = &options.hooks.manager_programs {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let all = [folder.clone()].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(all).context("the manager's PATH")?);
    }
    Ok(command)
}

/// Adds every host that the manager does not know yet, and waits until it reaches all of them.
pub(crate) fn add_hosts(
    godwit: &Path,
    topology: &Topology,
    options: &LabOptions,
    paths: &LabPaths,
) -> Result<()> {
    for host in &topology.hosts {
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
    wait_until_up(godwit, topology.hosts.iter().filter(has_power).count() as u64, paths)
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
