//! The hosts' agents: their configuration files, the hosts file of the CLI, and when they are
//! ready.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use godwit_pki::{Authority, Grant, PkiError, Role};
use rustix::mount::MountFlags;
use serde::Serialize;

use crate::options::LabOptions;
use crate::state::write_whole;
use crate::topology::{AGENT_PORT, Host, LAN_BRIDGE, LAN_NETWORK, LabPaths, Topology};

/// Names the file that the library of stepped clocks reads.
pub(crate) const CLOCK_VARIABLE: &str = "GODWIT_LAB_CLOCK";
/// Size of that file: the step, and the step and process of the last reader (faults/clock_step.c).
const CLOCK_FILE_BYTES: usize = 24;
/// How large a small state folder is, bytes.
const SMALL_STATE_BYTES: u64 = 1 << 20;

/// How long the lab's certificates are good for: longer than a lab stays up.
pub(crate) const CERTIFICATE_DAYS: u32 = 365;

/// An agent's configuration, as `godwit host run --config` reads it.
#[derive(Serialize)]
struct AgentConfig<'a> {
    name: &'a str,
    listen: Vec<String>,
    socket: PathBuf,
    state_dir: PathBuf,
    run_dir: PathBuf,
    ram_dir: PathBuf,
    migration_addresses: Vec<IpAddr>,
    qemu: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    qemu_user: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    qemu_users: Option<String>,
    vm_dirs: [&'a Path; 1],
    tracker: PathBuf,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    insecure: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Tls>,
    networks: BTreeMap<&'a str, Network>,
    /// All other hosts.
    peers: BTreeMap<&'a str, String>,
}

#[derive(Serialize)]
pub(crate) struct Tls {
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

#[derive(Serialize)]
struct Network {
    bridge: &'static str,
}

/// What agents need and the lab must find first.
pub(crate) struct AgentTools {
    qemu: PathBuf,
    tracker: PathBuf,
}

impl AgentTools {
    /// Looks for QEMU and the tracker library.
    pub(crate) fn find(options: &LabOptions, godwit: &Path) -> Result<AgentTools> {
        let qemu = match &options.qemu {
            Some(path) if path.is_file() => path.clone(),
            Some(path) => bail!("there is no QEMU at {}; name another", path.display()),
            None => find_in_path("qemu-system-x86_64").context(
                "cannot find qemu-system-x86_64 in PATH; install it with `apt-get install \
                 qemu-system-x86` or name one",
            )?,
        };
        if !godwit.is_file() {
            bail!(
                "agents need {}; build it with `make programs`, or use --no-agents",
                godwit.display()
            );
        }
        let tracker = match &options.tracker {
            Some(path) if path.is_file() => path.clone(),
            Some(path) => bail!("there is no tracker library at {}", path.display()),
            None => find_tracker(godwit)?,
        };
        Ok(AgentTools { qemu, tracker })
    }
}

fn find_in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
}

fn find_tracker(godwit: &Path) -> Result<PathBuf> {
    const LIBRARY: &str = "libgodwit_tracker.so";
    let beside = godwit.parent().map(|directory| directory.join(LIBRARY));
    let places: Vec<PathBuf> =
        beside.into_iter().chain([Path::new("/usr/lib/godwit").join(LIBRARY)]).collect();
    match places.iter().find(|place| place.is_file()) {
        Some(found) => Ok(found.clone()),
        None => bail!(
            "{LIBRARY} is neither beside {} nor in /usr/lib/godwit; build it with `cargo build \
             --release`",
            godwit.display()
        ),
    }
}

/// Where a host's agent listens for the CLI.
pub(crate) fn socket(paths: &LabPaths, host: &str) -> PathBuf {
    paths.host(host).join("agent.sock")
}

/// Where a host's agent logs.
pub(crate) fn log(paths: &LabPaths, host: &str) -> PathBuf {
    paths.host(host).join("agent.log")
}

/// Where a host's agent keeps what lives as long as its VMs run: `vms/NAME/` each.
pub(crate) fn run_dir(paths: &LabPaths, host: &str) -> PathBuf {
    paths.host(host).join("run")
}

/// What is made of it, below a host's folder.
const FOR_HOLDS: [&str; 4] = ["holds/hold", "holds/reached", "holds/fail", "holds/failed"];

/// Folder with the hold points and failing writes of a host's agent, and its reports of points
/// reached and writes failed.
pub(crate) fn holds(paths: &LabPaths, host: &str) -> PathBuf {
    paths.host(host).join("holds")
}

/// The clock of a host's agent, as far as it differs from the machine's.
pub(crate) fn clock_step(paths: &LabPaths, host: &str) -> PathBuf {
    paths.host(host).join("clock")
}

/// What an agent's environment has for tests of faults.
pub(crate) fn hook_environment(
    options: &LabOptions,
    paths: &LabPaths,
    host: &str,
) -> Vec<(&'static str, PathBuf)> {
    let mut environment = Vec::new();
    if options.hooks.holds {
        environment.push((godwit_migration::hold::VARIABLE, holds(paths, host)));
        environment.push((godwit_migration::fail_writes::VARIABLE, holds(paths, host)));
    }
    if let Some(library) = &options.hooks.clock {
        environment.push(("LD_PRELOAD", library.clone()));
        environment.push((CLOCK_VARIABLE, clock_step(paths, host)));
    }
    environment
}

/// Where a host's agent reads its configuration.
pub(crate) fn config(paths: &LabPaths, host: &str) -> PathBuf {
    paths.host(host).join("agent.toml")
}

/// Writes each host's directories and its agent's configuration.
pub(crate) fn write_configs(
    topology: &Topology,
    options: &LabOptions,
    paths: &LabPaths,
    tools: &AgentTools,
) -> Result<()> {
    for host in &topology.hosts {
        let directory = paths.host(&host.name);
        let text = toml::to_string(&AgentConfig {
            name: &host.name,
            listen: listen(host, options).iter().map(SocketAddr::to_string).collect(),
            socket: socket(paths, &host.name),
            state_dir: directory.join("state"),
            run_dir: run_dir(paths, &host.name),
            ram_dir: directory.join("ram"),
            migration_addresses: host.migration_addresses(&options.lanes(), options.family),
            qemu: tools.qemu.clone(),
            qemu_user: options.qemu_user.as_deref(),
            qemu_users: options.qemu_user.is_none().then(|| host.qemu_users(options.place)),
            // All hosts of the lab are one machine, and its user controls it anyway.
            vm_dirs: [options.vm_dir.as_deref().unwrap_or(Path::new("/"))],
            tracker: tools.tracker.clone(),
            insecure: options.insecure,
            tls: if options.insecure { None } else { Some(certificate(paths, host, options)?) },
            networks: BTreeMap::from([(LAN_NETWORK, Network { bridge: LAN_BRIDGE })]),
            peers: peers_of(host, topology, options),
        })?;
        let text = format!("{text}\n{}", options.hooks.settings);
        write_whole(&config(paths, &host.name), &text)?;
    }
    Ok(())
}

/// Where a host's agent listens for others: on the first migration network.
fn listen(host: &Host, options: &LabOptions) -> Vec<SocketAddr> {
    let first = options.lanes().into_iter().take(1);
    let addresses = first.flat_map(|lane| host.lane_addresses(lane, options.family));
    addresses.map(|address| SocketAddr::new(address, AGENT_PORT)).collect()
}

/// The lab's own authority, made where it is missing.
pub(crate) fn authority(paths: &LabPaths) -> Result<Authority> {
    let dir = paths.pki();
    let authority = match Authority::open(&dir) {
        Err(PkiError::NoAuthority { .. }) => {
            Authority::create(&dir, "godwit lab", CERTIFICATE_DAYS)
        }
        opened => opened,
    };
    authority.context("the lab's authority")
}

/// A certificate of the lab's own authority, made where it is missing.
fn certificate(paths: &LabPaths, host: &Host, options: &LabOptions) -> Result<Tls> {
    let (dir, authority) = (paths.pki(), authority(paths)?);
    let (certificate, key) =
        (dir.join(format!("{}.pem", host.name)), dir.join(format!("{}.key", host.name)));
    if !certificate.exists() {
        let addresses = host.migration_addresses(&options.lanes(), options.family);
        let grant =
            Grant { name: host.name.clone(), role: Role::Host, addresses, days: CERTIFICATE_DAYS };
        authority.issue(&grant).context("a lab host's certificate")?;
    }
    Ok(Tls { authority: authority.certificate(), certificate, key })
}

fn peers_of<'a>(
    host: &Host,
    topology: &'a Topology,
    options: &LabOptions,
) -> BTreeMap<&'a str, String> {
    let others = topology.hosts.iter().filter(|other| other.name != host.name);
    others.filter_map(|other| Some((other.name.as_str(), url(other, options)?))).collect()
}

/// Where others reach a host's agent; none: there is no migration network.
pub(crate) fn url(host: &Host, options: &LabOptions) -> Option<String> {
    let scheme = if options.insecure { "http" } else { "https" };
    Some(format!("{scheme}://{}", listen(host, options).into_iter().next()?))
}

/// Makes each host's directories.
pub(crate) fn make_directories(
    topology: &Topology,
    options: &LabOptions,
    paths: &LabPaths,
) -> Result<()> {
    let for_holds = if options.hooks.holds { &FOR_HOLDS[..] } else { &[] };
    for host in &topology.hosts {
        for name in ["state", "run", "ram"].iter().chain(for_holds) {
            let directory = paths.host(&host.name).join(name);
            std::fs::create_dir_all(&directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        if options.hooks.small_state {
            let directory = paths.host(&host.name).join("state");
            let size = std::ffi::CString::new(format!("mode=0700,size={SMALL_STATE_BYTES}"))?;
            rustix::mount::mount(
                "state",
                &directory,
                "tmpfs",
                MountFlags::empty(),
                size.as_c_str(),
            )
            .with_context(|| format!("cannot mount a tmpfs at {}", directory.display()))?;
        }
        if options.hooks.clock.is_some() {
            std::fs::write(clock_step(paths, &host.name), [0; CLOCK_FILE_BYTES])?;
        }
    }
    Ok(())
}

#[derive(Serialize)]
struct HostsFile<'a> {
    hosts: BTreeMap<&'a str, HostEntry>,
    watch: WatchEntry,
    #[serde(skip_serializing_if = "Option::is_none")]
    manager: Option<HostEntry>,
}

#[derive(Serialize)]
struct HostEntry {
    api: String,
}

#[derive(Serialize)]
struct WatchEntry {
    socket: PathBuf,
    namespace: String,
}

/// The hosts file: where the CLI finds the agents and the client.
pub(crate) fn write_hosts_file(
    topology: &Topology,
    options: &LabOptions,
    paths: &LabPaths,
) -> Result<()> {
    let manager = HostEntry { api: format!("unix:{}", paths.manager_socket().display()) };
    let entry =
        |host: &'_ Host| HostEntry { api: format!("unix:{}", socket(paths, &host.name).display()) };
    let file = HostsFile {
        hosts: topology.hosts.iter().map(|host| (host.name.as_str(), entry(host))).collect(),
        watch: WatchEntry {
            socket: paths.client_socket(),
            namespace: topology.client_namespace.clone(),
        },
        manager: options.manager.then_some(manager),
    };
    write_whole(&paths.hosts_file(), &toml::to_string(&file)?)
}

/// Whether an agent answers `GET /v1/host` on its socket.
pub(crate) fn answers(socket: &Path) -> bool {
    ask(socket).unwrap_or(false)
}

fn ask(socket: &Path) -> std::io::Result<bool> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(b"GET /v1/host HTTP/1.1\r\nHost: godwit\r\nConnection: close\r\n\r\n")?;
    let mut status = String::new();
    BufReader::new(stream).read_line(&mut status)?;
    Ok(status.split_ascii_whitespace().nth(1) == Some("200"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Family;

    #[test]
    fn configurations_name_all_other_hosts() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        let topology = Topology::new("godwit", 3);
        let tools = AgentTools { qemu: "/usr/bin/qemu".into(), tracker: "/usr/lib/t.so".into() };
        make_directories(&topology, &LabOptions::default(), &paths).unwrap();
        write_configs(&topology, &LabOptions::default(), &paths, &tools).unwrap();
        let text = std::fs::read_to_string(config(&paths, "b")).unwrap();
        let value: toml::Table = text.parse().unwrap();
        assert_eq!(value["name"].as_str(), Some("b"));
        assert_eq!(value["listen"][1].as_str(), Some("[fd77::12]:7700"));
        assert_eq!(value["networks"]["lan"]["bridge"].as_str(), Some("br-lan"));
        let peers: Vec<&String> = value["peers"].as_table().unwrap().keys().collect();
        assert_eq!(peers, ["a", "c"]);
        assert_eq!(value["peers"]["a"].as_str(), Some("https://10.77.0.11:7700"));
        assert!(value["tls"]["certificate"].as_str().is_some_and(|path| Path::new(path).exists()));
        assert!(!value.contains_key("qemu_user") && !value.contains_key("insecure"));
        assert_eq!(value["qemu_users"].as_str(), Some("2130710528-2130714623"));
    }

    #[test]
    fn each_lane_has_addresses_and_the_first_is_for_agents() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        let topology = Topology::new("godwit", 2);
        let tools = AgentTools { qemu: "/usr/bin/qemu".into(), tracker: "/usr/lib/t.so".into() };
        let options = LabOptions {
            lanes: vec!["1gbit".parse().unwrap(), "250mbit".parse().unwrap()],
            family: Family::Ipv6,
            insecure: true,
            ..LabOptions::default()
        };
        make_directories(&topology, &options, &paths).unwrap();
        write_configs(&topology, &options, &paths, &tools).unwrap();
        let value: toml::Table =
            std::fs::read_to_string(config(&paths, "a")).unwrap().parse().unwrap();
        let texts = |key: &str| -> Vec<&str> {
            value[key].as_array().unwrap().iter().filter_map(toml::Value::as_str).collect()
        };
        assert_eq!(texts("listen"), ["[fd77::11]:7700"]);
        assert_eq!(texts("migration_addresses"), ["fd77::11", "fd77:0:0:1::11"]);
        assert_eq!(value["peers"]["b"].as_str(), Some("http://[fd77::12]:7700"));
    }

    #[test]
    fn the_hosts_file_names_sockets() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        write_hosts_file(&Topology::new("godwit", 2), &LabOptions::default(), &paths).unwrap();
        let value: toml::Table =
            std::fs::read_to_string(paths.hosts_file()).unwrap().parse().unwrap();
        let api = value["hosts"]["a"]["api"].as_str().unwrap();
        assert!(api.starts_with("unix:/") && api.ends_with("/hosts/a/agent.sock"), "{api}");
        assert!(value["watch"]["socket"].as_str().unwrap().ends_with("/client.sock"));
        assert_eq!(value["watch"]["namespace"].as_str(), Some("godwit-client"));
    }
}
