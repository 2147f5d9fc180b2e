//! Clusters of Ceph that VMs of this host may have disks in: what the configuration says of them,
//! and how an image in one of their pools is reached.
//!
//! The key of a cluster's user is read from its file whenever an image is opened, and goes to QEMU
//! alone (see [`CephAccess`]). It is in no message: an error names the file.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_qemu::{CephAccess, FileError, RbdImage, Uuid, read_ceph_key};
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;

/// Longest configuration for librados, and longest file with a key.
const MOST_FILE_BYTES: u64 = 64 << 10;
/// Rights to a key's file that others than its owner must not have.
const OTHERS: u32 = 0o077;

/// A cluster of Ceph: an entry of `[[ceph]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CephConfig {
    /// Pools whose images VMs may use: `POOL`, or `POOL/NAMESPACE` for a namespace of it.
    pub pools: Vec<String>,
    /// Addresses of the monitors.
    #[serde(default)]
    pub monitors: Vec<String>,
    /// Configuration of a client of the cluster, in place of `monitors`.
    #[serde(default)]
    pub conf: Option<PathBuf>,
    /// Identity of the cluster, as `ceph fsid` prints it. Default: that of `conf`.
    #[serde(default)]
    pub fsid: Option<Uuid>,
    /// User of the cluster, without `client.`.
    pub user: String,
    /// File with the user's key or keyring, which only root can read.
    pub key: PathBuf,
}

impl CephConfig {
    /// Returns the first invalid setting, with what is wrong and the remedy.
    pub(crate) fn problem(&self) -> Option<(&'static str, String, &'static str)> {
        let is_place = |pool: &&String| {
            let image = RbdImage::of(Path::new(&format!("rbd:{pool}/image")));
            image.is_some_and(|image| image.place() == **pool)
        };
        if let Some(pool) = self.pools.iter().find(|pool| !is_place(pool)) {
            let why = format!("\"{pool}\" is not the name of a pool");
            return Some(("pools", why, "write POOL or POOL/NAMESPACE"));
        }
        if self.pools.is_empty() {
            return Some(("pools", "there are none".into(), "name the pools with VMs' disks"));
        }
        let is_address = |address: &&String| {
            let good = |c: char| c.is_ascii_alphanumeric() || ".:-[],/".contains(c);
            !address.is_empty() && address.chars().all(good)
        };
        if let Some(address) = self.monitors.iter().find(|address| !is_address(address)) {
            let why = format!("\"{address}\" is not an address");
            return Some(("monitors", why, "write addresses like \"10.0.0.1\""));
        }
        if self.conf.is_none() == self.monitors.is_empty() {
            let why = "either monitors or conf says where the cluster is".into();
            return Some(("monitors", why, "set one of the two"));
        }
        if self.conf.is_none() && self.fsid.is_none() {
            let why = "it is not set, and there is no conf that has it".into();
            return Some(("fsid", why, "write what `ceph fsid` prints"));
        }
        let is_good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.user.is_empty() || !self.user.chars().all(is_good) {
            let why = format!("\"{}\" is not the name of a user", self.user);
            return Some(("user", why, "write it without \"client.\""));
        }
        let mut paths =
            std::iter::once(("key", &self.key)).chain(self.conf.iter().map(|p| ("conf", p)));
        let (name, path) = paths.find(|(_, path)| !path.is_absolute())?;
        Some((name, format!("{} is a relative path", path.display()), "write an absolute path"))
    }

    /// Returns the cluster's identity.
    pub(crate) fn cluster(&self) -> Result<Uuid, String> {
        match self.fsid {
            Some(fsid) => Ok(fsid),
            None => self.settings().map(|(fsid, _)| fsid),
        }
    }

    /// Returns the cluster's identity, and its configuration for librados without a key.
    fn settings(&self) -> Result<(Uuid, String), String> {
        let settings = match &self.conf {
            Some(path) => {
                let read = File::open(path).and_then(|file| read_bounded(&file));
                read.map_err(|why| format!("{}: {why}", path.display()))?
            }
            None => format!("[global]\nmon host = {}\n", self.monitors.join(",")),
        };
        let fsid = self.fsid.or_else(|| fsid_in(&settings));
        let fsid = fsid.ok_or_else(|| "the cluster's conf has no fsid".to_owned())?;
        Ok((fsid, settings))
    }

    /// Returns the access to the cluster.
    ///
    /// # Errors
    /// What cannot be read, without any part of the key.
    pub(crate) fn access(&self) -> Result<CephAccess, String> {
        let (fsid, settings) = self.settings()?;
        let read = open_private(&self.key).and_then(|file| read_bounded(&file));
        let text = read.map_err(|why| format!("{}: {why}", self.key.display()))?;
        let key = read_ceph_key(&text, &self.user);
        let key = key.map_err(|why| format!("{}: {why}", self.key.display()))?;
        Ok(CephAccess::new(fsid, &self.user, &settings, &key))
    }
}

/// Returns the first invalid setting of clusters, with what is wrong and the remedy.
pub(crate) fn problem_of(clusters: &[CephConfig]) -> Option<(String, String, &'static str)> {
    let mut pools = BTreeSet::new();
    clusters.iter().enumerate().find_map(|(index, cluster)| {
        let twice = cluster.pools.iter().find(|pool| !pools.insert(pool.as_str()));
        let twice = twice
            .map(|pool| ("pools", format!("pool {pool} is named twice"), "remove one of the two"));
        let (key, why, remedy) = cluster.problem().or(twice)?;
        Some((format!("ceph[{index}].{key}"), why, remedy))
    })
}

/// Returns the pools of clusters as the parents of their images.
pub(crate) fn pools_of(clusters: &[CephConfig]) -> impl Iterator<Item = PathBuf> {
    clusters.iter().flat_map(|cluster| &cluster.pools).map(|pool| path_of(pool))
}

/// Returns a pool or a namespace as the parent of its images.
pub(crate) fn path_of(place: &str) -> PathBuf {
    PathBuf::from(format!("rbd:{place}"))
}

/// Returns the access of host `host` to an image in a pool.
///
/// # Errors
/// The host has no such pool, or its access to the cluster cannot be read.
pub(crate) fn access_to(
    clusters: &[CephConfig],
    host: &str,
    image: &RbdImage,
) -> Result<CephAccess, FileError> {
    let place = image.place();
    let found = clusters.iter().find(|cluster| cluster.pools.contains(&place));
    let Some(cluster) = found else {
        let mut pools = clusters.iter().flat_map(|cluster| &cluster.pools).peekable();
        let remedy = match pools.peek() {
            Some(_) => {
                let pools: Vec<&str> = pools.map(String::as_str).collect();
                format!("use one of its pools: {}", pools.join(", "))
            }
            None => "add [[ceph]] to that host's configuration (docs/ceph.md)".to_owned(),
        };
        let why = format!("host {host} has no pool {place} of Ceph for VMs");
        return Err(FileError::Rbd { path: image.path(), why, remedy });
    };
    cluster.access().map_err(|why| FileError::Rbd {
        path: image.path(),
        why: format!("host {host} has no access to pool {place}: {why}"),
        remedy: "correct [[ceph]] in that host's configuration; the key's file belongs to root, \
                 with mode 0600"
            .to_owned(),
    })
}

/// Opens a file that only its owner can read: the agent's user, as a rule root.
fn open_private(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let data = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    let why = if !data.is_file() {
        "it is no file"
    } else if data.uid() != own && data.uid() != 0 {
        "it belongs to another user"
    } else if data.mode() & OTHERS != 0 {
        "users other than its owner can read or write it"
    } else {
        return Ok(file);
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn read_bounded(file: &File) -> io::Result<String> {
    let mut text = String::new();
    file.take(MOST_FILE_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MOST_FILE_BYTES {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is more than 64 KiB")),
        false => Ok(text),
    }
}

/// Returns the identity of the cluster that a configuration for librados names.
fn fsid_in(conf: &str) -> Option<Uuid> {
    conf.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == "fsid").then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const KEY: &str = "AQBhR2dlAAAAABAAm1Yv8pIB3tG0H0Qa4V9zAg==";
    const FSID: Uuid = Uuid::from_u128(0x1234);

    fn cluster(dir: &Path) -> CephConfig {
        let key = dir.join("key");
        fs::write(&key, format!("{KEY}\n")).unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        CephConfig {
            pools: vec!["vms".into(), "vms/shop".into()],
            monitors: vec!["10.0.0.1".into(), "v2:10.0.0.2:3300".into()],
            conf: None,
            fsid: Some(FSID),
            user: "godwit".into(),
            key,
        }
    }

    fn image(name: &str) -> RbdImage {
        RbdImage::of(Path::new(name)).unwrap()
    }

    fn conf_of(access: &CephAccess) -> String {
        let file: OwnedFd = access.file().unwrap();
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        fs::read_to_string(name).unwrap()
    }

    #[test]
    fn a_pool_leads_to_its_cluster_and_no_error_has_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let known = cluster(dir.path());
        let access = |known: &CephConfig, name: &str| {
            access_to(std::slice::from_ref(known), "a", &image(name))
        };
        for name in ["rbd:vms/web", "rbd:vms/shop/web"] {
            let access = access(&known, name).unwrap();
            assert_eq!((access.fsid, &*access.user), (FSID, "godwit"));
            let conf = conf_of(&access);
            assert!(conf.contains("mon host = 10.0.0.1,v2:10.0.0.2:3300\n"), "{conf}");
            assert!(conf.contains(&format!("[client.godwit]\nkey = {KEY}\n")));
        }
        let error = access(&known, "rbd:other/web").unwrap_err();
        assert!(error.to_string().contains("host a has no pool other of Ceph"), "{error}");
        assert!(error.remedy().contains("vms, vms/shop"), "{}", error.remedy());
        assert!(
            access_to(&[], "a", &image("rbd:vms/web")).unwrap_err().remedy().contains("[[ceph]]")
        );
        for (mode, text) in [(0o640, KEY), (0o604, KEY), (0o600, "no key"), (0o600, "")] {
            fs::write(&known.key, text).unwrap();
            fs::set_permissions(&known.key, Permissions::from_mode(mode)).unwrap();
            let error = access(&known, "rbd:vms/web").unwrap_err();
            let all = format!("{error} {error:?} {}", error.remedy());
            assert!(!all.contains(KEY) && all.contains("0600"), "{all}");
        }
        std::os::unix::fs::symlink(&known.key, dir.path().join("link")).unwrap();
        let linked = CephConfig { key: dir.path().join("link"), ..known.clone() };
        assert!(access(&linked, "rbd:vms/web").is_err());
        fs::remove_file(&known.key).unwrap();
        let error = access(&known, "rbd:vms/web").unwrap_err();
        assert!(error.to_string().contains(&known.key.display().to_string()), "{error}");
    }

    #[test]
    fn a_conf_has_the_addresses_and_the_identity() {
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("ceph.conf");
        let known = CephConfig {
            monitors: Vec::new(),
            fsid: None,
            conf: Some(conf.clone()),
            ..cluster(dir.path())
        };
        let all = [known];
        let access = || access_to(&all, "a", &image("rbd:vms/web"));
        assert!(access().is_err());
        fs::write(&conf, "[global]\nmon host = 10.0.0.9\n").unwrap();
        assert!(access().unwrap_err().to_string().contains("no fsid"));
        assert!(all[0].cluster().unwrap_err().contains("no fsid"));
        fs::write(&conf, format!("[global]\n fsid = {FSID}\nmon host = 10.0.0.9\n")).unwrap();
        let access = access().unwrap();
        assert_eq!((access.fsid, all[0].cluster()), (FSID, Ok(FSID)));
        assert!(conf_of(&access).contains("mon host = 10.0.0.9\n"));
        fs::write(&conf, " ".repeat(70_000)).unwrap();
        assert!(access_to(&all, "a", &image("rbd:vms/web")).is_err());
    }

    #[test]
    fn pools_are_the_parents_of_their_images() {
        let dir = tempfile::tempdir().unwrap();
        let first = cluster(dir.path());
        let second = CephConfig { pools: vec!["archive".into()], ..first.clone() };
        let all = [first, second];
        assert_eq!(problem_of(&all), None);
        let pools: Vec<PathBuf> = pools_of(&all).collect();
        assert_eq!(pools, ["rbd:vms", "rbd:vms/shop", "rbd:archive"].map(PathBuf::from));
        assert_eq!(image("rbd:vms/shop/web").path().parent(), Some(pools[1].as_path()));
        let twice = [all[0].clone(), all[0].clone()];
        assert_eq!(problem_of(&twice).unwrap().0, "ceph[1].pools");
    }

    #[test]
    fn an_invalid_setting_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let problem = |change: &dyn Fn(&mut CephConfig)| {
            let mut changed = cluster(dir.path());
            change(&mut changed);
            changed.problem().map_or("", |(name, ..)| name)
        };
        assert_eq!(problem(&|_| {}), "");
        assert_eq!(problem(&|all| all.pools.clear()), "pools");
        for pool in ["", "a b", "a/b/c", "/a", "a/"] {
            assert_eq!(problem(&|all| all.pools.push(pool.into())), "pools", "{pool}");
        }
        assert_eq!(problem(&|all| all.monitors.clear()), "monitors");
        assert_eq!(problem(&|all| all.monitors.push("a\nkey = b".into())), "monitors");
        assert_eq!(problem(&|all| all.conf = Some("/c".into())), "monitors");
        assert_eq!(problem(&|all| all.fsid = None), "fsid");
        assert_eq!(problem(&|all| all.user = "a]\nb".into()), "user");
        assert_eq!(problem(&|all| all.key = "key".into()), "key");
    }
}
