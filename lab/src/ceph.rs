//! A cluster of Ceph on one machine, for trials with disks in a pool: a monitor, a manager and one
//! daemon with the data. They run in the namespace of one of the lab's hosts, and their files are
//! below one directory. Dropping the cluster ends them.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::namespace::in_namespace;
use crate::trial::until;

/// Pool with the VMs' disks.
pub const POOL: &str = "vms";
/// Port of the monitor (protocol 2).
const PORT: u16 = 3300;
/// Programs, each with its package on Debian 12.
const PROGRAMS: [(&str, &str); 7] = [
    ("ceph-mon", "ceph-mon"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("rbd", "ceph-common"),
    ("ceph-authtool", "ceph-common"),
    ("monmaptool", "ceph-common"),
];
/// QEMU's driver for images in pools.
const DRIVER: &str = "/usr/lib/x86_64-linux-gnu/qemu/block-rbd.so";
/// Size of the file with the data, which has holes.
const DATA_BYTES: u64 = 4 << 30;
/// Longest time until all data are available.
const START_LIMIT: Duration = Duration::from_secs(90);
/// Longest time of a command, in seconds.
const COMMAND_S: &str = "40";

/// A running cluster.
#[derive(Debug)]
pub struct CephCluster {
    namespace: String,
    folder: PathBuf,
    address: Ipv4Addr,
    fsid: String,
    daemons: Vec<Child>,
}

impl CephCluster {
    /// Returns why there can be no cluster on this machine; `None` if there can.
    #[must_use]
    pub fn missing() -> Option<String> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_there =
            |program: &str| std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
        let absent = PROGRAMS.iter().find(|(program, _)| !is_there(program));
        if let Some((program, package)) = absent {
            return Some(format!("{program} is not in PATH ({package}: scripts/deps --ceph)"));
        }
        let has_driver = Path::new(DRIVER).is_file();
        (!has_driver).then(|| format!("no {DRIVER} (qemu-block-extra: scripts/deps --ceph)"))
    }

    /// Starts a cluster in a namespace with this address. `folder`: an empty directory on a disk.
    ///
    /// # Errors
    /// A program fails, or the cluster is not usable in time.
    pub fn start(namespace: &str, address: Ipv4Addr, folder: &Path) -> Result<CephCluster> {
        for dir in ["mon", "mgr", "osd", "run", "log"] {
            fs::create_dir_all(folder.join(dir))?;
        }
        let mut cluster = CephCluster {
            namespace: namespace.to_owned(),
            folder: folder.to_owned(),
            address,
            fsid: new_uuid()?,
            daemons: Vec::new(),
        };
        fs::write(cluster.conf(), cluster.conf_text())?;
        cluster.make_keys()?;
        let monitor = format!("[v2:{address}:{PORT}]");
        let fsid = cluster.fsid.clone();
        cluster
            .run("monmaptool", &["--create", "--fsid", &fsid, "--addv", "a", &monitor, "monmap"])?;
        let made = ["--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring"];
        cluster.run("ceph-mon", &made)?;
        cluster.begin("ceph-mon", "a")?;
        cluster.run("ceph", &["auth", "import", "-i", "keyring"])?;
        cluster.begin("ceph-mgr", "x")?;
        let data = new_uuid()?;
        cluster.run("ceph", &["osd", "new", &data])?;
        cluster.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &data])?;
        cluster.begin("ceph-osd", "0")?;
        cluster.run("ceph", &["osd", "pool", "create", POOL, "8", "8"])?;
        until("all data of the cluster are available", START_LIMIT, || {
            let state = cluster.run("ceph", &["pg", "stat"])?;
            Ok(state.contains("active+clean;").then_some(()))
        })?;
        cluster.run("rbd", &["pool", "init", POOL])?;
        Ok(cluster)
    }

    /// Makes a user with these rights to the data; returns the file with its keyring.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn user(&self, name: &str, rights: &str) -> Result<PathBuf> {
        let (user, file) = (format!("client.{name}"), self.folder.join(format!("{name}.keyring")));
        let ring = self
            .run("ceph", &["auth", "get-or-create", &user, "mon", "profile rbd", "osd", rights])?;
        fs::write(&file, ring)?;
        fs::set_permissions(&file, Permissions::from_mode(0o600))?;
        Ok(file)
    }

    /// Returns `ceph` of an agent's configuration, for a user that [`CephCluster::user`] made.
    #[must_use]
    pub fn setting(&self, user: &str, key: &Path) -> toml::Value {
        let mut entry = toml::Table::new();
        entry.insert("pools".to_owned(), vec![POOL.to_owned()].into());
        let monitor = format!("v2:{}:{PORT}", self.address);
        entry.insert("monitors".to_owned(), vec![monitor].into());
        entry.insert("fsid".to_owned(), self.fsid.clone().into());
        entry.insert("user".to_owned(), user.into());
        entry.insert("key".to_owned(), key.display().to_string().into());
        toml::Value::Array(vec![toml::Value::Table(entry)])
    }

    /// Runs a program of Ceph; returns its output.
    ///
    /// # Errors
    /// It cannot be started, takes too long, or fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("timeout");
        command.args([COMMAND_S, program, "-c"]).arg(self.conf()).args(arguments);
        if program == "monmaptool" {
            command = Command::new(program);
            command.args(arguments);
        }
        command.current_dir(&self.folder).stdin(Stdio::null());
        let output = in_namespace(&self.namespace, move || command.output())?
            .with_context(|| format!("cannot start {program}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            output.status.success(),
            "{program} {} failed ({}): {}",
            arguments.join(" "),
            output.status,
            text(&output.stderr)
        );
        Ok(text(&output.stdout))
    }

    /// Starts a daemon.
    fn begin(&mut self, program: &str, id: &str) -> Result<()> {
        let log = self.folder.join("log").join(format!("{program}.out"));
        let log = fs::File::create(log)?;
        let mut command = Command::new(program);
        command.args(["-f", "-i", id, "-c"]).arg(self.conf());
        command.args(["--setuser", "root", "--setgroup", "root"]).current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = in_namespace(&self.namespace, move || command.spawn())?;
        self.daemons.push(child.with_context(|| format!("cannot start {program}"))?);
        Ok(())
    }

    fn make_keys(&self) -> Result<()> {
        let ring = self.folder.join("keyring");
        for (name, rights) in [
            ("client.admin", &["mon", "allow *", "osd", "allow *", "mgr", "allow *"][..]),
            ("mon.", &["mon", "allow *"]),
            ("mgr.x", &["mon", "allow profile mgr", "osd", "allow *", "mds", "allow *"]),
            ("osd.0", &["mon", "allow profile osd", "mgr", "allow profile osd", "osd", "allow *"]),
        ] {
            let mut command = Command::new("ceph-authtool");
            if !ring.exists() {
                command.arg("--create-keyring");
            }
            command.arg(&ring).args(["--gen-key", "-n", name]);
            for right in rights.chunks_exact(2) {
                command.arg("--cap").args(right);
            }
            let made = command.output().context("cannot start ceph-authtool")?;
            let why = String::from_utf8_lossy(&made.stderr);
            if !made.status.success() {
                bail!("ceph-authtool failed: {why}");
            }
        }
        Ok(())
    }

    fn conf(&self) -> PathBuf {
        self.folder.join("ceph.conf")
    }

    fn conf_text(&self) -> String {
        let (folder, address, fsid) = (self.folder.display(), self.address, &self.fsid);
        format!(
            "[global]
fsid = {fsid}
mon host = v2:{address}:{PORT}
mon initial members = a
public network = {address}/16
ms bind ipv4 = true
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}/run
admin socket = {folder}/run/$cluster-$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/log/$name.log
mon cluster log file = {folder}/log/cluster.log
crash dir = {folder}/run
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {DATA_BYTES}
bluestore block create = true
osd memory target = 939524096
osd max object name len = 256
mgr initial modules =
mgr disabled modules = dashboard restful
"
        )
    }
}

impl Drop for CephCluster {
    fn drop(&mut self) {
        // Nothing of it is needed any more.
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn new_uuid() -> Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned())
}
