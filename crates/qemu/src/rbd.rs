//! Images in pools of Ceph: their names, and how QEMU reaches their cluster.
//!
//! A disk names such an image as `rbd:POOL/IMAGE` or `rbd:POOL/NAMESPACE/IMAGE` where others have a
//! path. QEMU's own driver opens it. What librados must know (addresses, user, key) is a file in
//! memory that QEMU gets open ([`CephAccess::file`]). So the key is in no argument, in no command
//! to QEMU, in no log and in no answer of QEMU.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use serde_json::{Value, json};
use uuid::Uuid;

/// Begin of the name of an image in a pool of Ceph.
const PREFIX: &str = "rbd:";
/// Longest name of a pool, a namespace or an image (`RBD_MAX_IMAGE_NAME_SIZE`, Ceph 16).
const MOST_NAME_BYTES: usize = 96;
/// Longest part of a new image's name that comes from the old one.
const MOST_STEM: usize = 80;
/// Longest key: Ceph's has 40 characters (Ceph 16).
const MOST_KEY_BYTES: usize = 256;
/// Time in which librados must have reached the cluster, in seconds. QEMU answers nothing meanwhile
/// (its default, 300 s, is longer than an agent waits).
const CONNECT_S: u32 = 10;

/// Whether the name of a disk's image is that of an image in a pool of Ceph, well formed or not. A
/// path of a file is absolute.
#[must_use]
pub fn is_rbd(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

/// Whether a text in place of a directory names a pool of Ceph or a namespace of one, well formed:
/// `rbd:POOL` or `rbd:POOL/NAMESPACE`.
#[must_use]
pub fn is_pool(dir: &Path) -> bool {
    let any = dir.to_str().map(|dir| PathBuf::from(format!("{dir}/image")));
    any.is_some_and(|any| RbdImage::of(&any).is_some())
}

/// Returns what a new image in a pool is named after one with this name, without its ending.
#[must_use]
pub fn pool_stem(stem: &str) -> String {
    let good = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let stem: String = stem.chars().map(good).take(MOST_STEM).collect();
    let stem = stem.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    if stem.is_empty() { "disk".to_owned() } else { stem.to_owned() }
}

/// An image in a pool of Ceph.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RbdImage {
    pub pool: String,
    pub namespace: Option<String>,
    pub image: String,
}

impl RbdImage {
    /// Returns the image that a disk's path names; `None` for the path of a file, and for a name
    /// that is not well formed. Each image has one name.
    #[must_use]
    pub fn of(path: &Path) -> Option<RbdImage> {
        let names = path.to_str()?.strip_prefix(PREFIX)?;
        let names: Vec<&str> = names.split('/').collect();
        if !names.iter().all(|name| is_name(name)) {
            return None;
        }
        let (pool, namespace, image) = match names[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace.to_owned()), image),
            _ => return None,
        };
        Some(RbdImage { pool: pool.to_owned(), namespace, image: image.to_owned() })
    }

    /// Returns the name of the image, as a disk has it in place of a path.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.to_string().into()
    }

    /// Whether the file of a block node, as QEMU names it, is this image. Such a name is `json:`
    /// with the options of the node.
    pub(crate) fn is_file(&self, file: &str) -> bool {
        let file: String = file.chars().filter(|c| !c.is_whitespace()).collect();
        let has = |key: &str, value: &str| file.contains(&format!("\"{key}\":\"{value}\""));
        let RbdImage { pool, namespace, image } = self;
        has("image", image) && has("pool", pool) && namespace.iter().all(|n| has("namespace", n))
    }

    /// Returns what is before the image's own name: `POOL` or `POOL/NAMESPACE`.
    #[must_use]
    pub fn place(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{}/{namespace}", self.pool),
            None => self.pool.clone(),
        }
    }
}

impl fmt::Display for RbdImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}/{}", self.place(), self.image)
    }
}

/// Whether a text can be the name of a pool, a namespace or an image here. Ceph allows more; what
/// is allowed here needs no quotes anywhere.
fn is_name(text: &str) -> bool {
    let is_good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.len() <= MOST_NAME_BYTES
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(is_good)
}

/// Reads the key of a user from a file with nothing else, or from a keyring.
///
/// # Errors
/// What is wrong with the text, without any part of it.
pub fn read_ceph_key(text: &str, user: &str) -> Result<String, String> {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let key = if text.contains('[') {
        let section = format!("[client.{user}]");
        let own = lines().skip_while(|line| *line != section).skip(1);
        let mut own = own.take_while(|line| !line.starts_with('['));
        own.find_map(|line| {
            let (name, value) = line.split_once('=')?;
            (name.trim() == "key").then(|| value.trim().to_owned())
        })
        .ok_or_else(|| format!("the keyring has no key for client.{user}"))?
    } else {
        let mut all = lines();
        let key = all.next().filter(|_| all.next().is_none());
        key.ok_or_else(|| "it is not one line with a key".to_owned())?.to_owned()
    };
    let is_base64 = |c: char| c.is_ascii_alphanumeric() || "+/=".contains(c);
    match key.len() <= MOST_KEY_BYTES && !key.is_empty() && key.chars().all(is_base64) {
        true => Ok(key),
        false => Err("it has no key of Ceph, a text in Base64".to_owned()),
    }
}

/// How a cluster of Ceph is reached: its addresses, a user, and the user's key.
#[derive(Clone)]
pub struct CephAccess {
    /// Identity of the cluster.
    pub fsid: Uuid,
    /// Name of the user, without `client.`.
    pub user: String,
    /// Configuration for librados, with the key.
    conf: String,
}

impl fmt::Debug for CephAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("CephAccess");
        all.field("fsid", &self.fsid).field("user", &self.user).finish_non_exhaustive()
    }
}

impl CephAccess {
    /// Returns the access to a cluster. `settings`: text of a configuration for librados, with the
    /// addresses. `key`: what [`read_ceph_key`] returns.
    #[must_use]
    pub fn new(fsid: Uuid, user: &str, settings: &str, key: &str) -> CephAccess {
        // A section of a user is stronger than the general one.
        let conf = format!(
            "{settings}\n[client.{user}]\nkey = {key}\nclient mount timeout = {CONNECT_S}\n"
        );
        CephAccess { fsid, user: user.to_owned(), conf }
    }

    /// Returns the configuration as a file in memory, which nobody can change. It has no name: only
    /// who has it open, or may examine such a process, can read it.
    ///
    /// # Errors
    /// The kernel gives no memory or no descriptor.
    pub fn file(&self) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(rustix::fs::memfd_create("ceph", flags)?);
        file.write_all(self.conf.as_bytes())?;
        // QEMU has another user, and opens its own descriptor once more.
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::RGRP | Mode::ROTH)?;
        let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok(file.into())
    }

    /// Returns what QEMU is given beside the open configuration.
    #[must_use]
    pub fn to(&self, image: &RbdImage) -> RbdAccess {
        RbdAccess { image: image.clone(), fsid: self.fsid, user: self.user.clone() }
    }
}

/// An image in a pool and how it is reached, without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdAccess {
    pub image: RbdImage,
    /// Identity of the cluster.
    pub fsid: Uuid,
    /// Name of the user, without `client.`.
    pub user: String,
}

impl RbdAccess {
    /// Returns where the image is, in QEMU's words. `conf`: number of the open configuration in
    /// QEMU.
    pub(crate) fn location(&self, conf: i64) -> Value {
        let mut location = json!({"pool": self.image.pool, "image": self.image.image,
            "user": self.user, "conf": format!("/proc/self/fd/{conf}")});
        if let Some(namespace) = &self.image.namespace {
            location["namespace"] = namespace.as_str().into();
        }
        location
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;
    use crate::spec::{Disk, DiskFormat, VmSpec};

    const KEY: &str = "AQBhR2dlAAAAABAAm1Yv8pIB3tG0H0Qa4V9zAg==";

    fn image(text: &str) -> Option<RbdImage> {
        RbdImage::of(Path::new(text))
    }

    #[test]
    fn a_new_image_has_the_good_part_of_a_name() {
        assert_eq!(pool_stem("web.v2"), "web.v2");
        assert_eq!(pool_stem("we b\u{e9}"), "we-b-");
        for odd in ["", "..", "\u{e9}"] {
            assert_eq!(pool_stem(odd), "disk", "{odd}");
        }
        assert!(image(&format!("rbd:vms/{}-99", pool_stem(&".x".repeat(200)))).is_some());
    }

    #[test]
    fn a_name_has_a_pool_an_image_and_perhaps_a_namespace() {
        let found = image("rbd:vms/web-0.raw").unwrap();
        assert_eq!((&*found.pool, found.namespace.as_deref()), ("vms", None));
        assert_eq!((&*found.image, &*found.place()), ("web-0.raw", "vms"));
        let found = image("rbd:vms/shop/web").unwrap();
        assert_eq!((&*found.place(), &*found.image), ("vms/shop", "web"));
        assert_eq!(found.path(), Path::new("rbd:vms/shop/web"));
        let long = format!("rbd:vms/{}", "x".repeat(97));
        for wrong in [
            "",
            "rbd:",
            "rbd:vms",
            "rbd:vms/",
            "rbd:/web",
            "rbd:vms//web",
            "rbd:vms/web/",
            "rbd:vms/a/b/c",
            "rbd:vms/we b",
            "rbd:vms/web@snap",
            "rbd:vms/web:conf=x",
            "RBD:vms/web",
            "rbd:vms/../web",
            "rbd:.mgr/web",
            "rbd:vms/wéb",
            "rbd:vms/web\n",
            "/rbd:vms/web",
            &long,
        ] {
            assert_eq!(image(wrong), None, "{wrong}");
        }
        assert!(is_rbd(Path::new("rbd:")) && !is_rbd(Path::new("/rbd:vms/web")));
    }

    #[test]
    fn a_pool_or_a_namespace_stands_in_place_of_a_directory() {
        let is = |text: &str| is_pool(Path::new(text));
        assert!(is("rbd:vms") && is("rbd:vms/shop"));
        for wrong in
            ["", "rbd:", "/rbd:vms", "rbd:vms/", "rbd:vms/a/b", "rbd:..", "rbd:vms/..", "/srv"]
        {
            assert!(!is(wrong), "{wrong}");
        }
    }

    #[test]
    fn a_specification_takes_a_well_formed_name_of_format_raw() {
        let why = |path: &str, format| {
            let disks = vec![Disk::new(path, format)];
            let spec = VmSpec { disks, ..VmSpec::new("web") };
            spec.validate().err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(why("rbd:vms/web", DiskFormat::Raw), "");
        assert!(why("rbd:vms/web", DiskFormat::Qcow2).contains("has format raw"));
        assert!(why("rbd:vms", DiskFormat::Raw).contains("its name is not rbd:POOL/IMAGE"));
        assert!(why("rbdvms/web", DiskFormat::Raw).contains("not an absolute path"));
    }

    #[test]
    fn a_key_is_alone_or_in_a_keyring() {
        let ring = format!(
            "[client.other]\n\tkey = AAAA\n[client.vms]\n\tcaps mon = \"profile rbd\"\n\tkey = \
             {KEY}\n"
        );
        for text in [KEY.to_owned(), format!("\n {KEY} \n"), ring.clone()] {
            assert_eq!(read_ceph_key(&text, "vms").as_deref(), Ok(KEY));
        }
        let many = "A".repeat(MOST_KEY_BYTES + 1);
        for (text, user) in
            [("", "vms"), ("a b", "vms"), ("a\nb", "vms"), (&*ring, "admin"), (&*many, "vms")]
        {
            let why = read_ceph_key(text, user).unwrap_err();
            assert!(!why.contains(KEY) && !why.is_empty());
        }
    }

    #[test]
    fn the_key_is_in_a_sealed_file_and_in_no_text() {
        let fsid = Uuid::from_u128(9);
        let access = CephAccess::new(fsid, "vms", "[global]\nmon host = 10.0.0.1", KEY);
        let shown = format!("{access:?} {:?}", access.to(&image("rbd:vms/web").unwrap()));
        assert!(!shown.contains(KEY) && !shown.contains("10.0.0.1"), "{shown}");
        let file = File::from(access.file().unwrap());
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o444);
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let mut text = String::new();
        File::open(&name).unwrap().read_to_string(&mut text).unwrap();
        let wanted = format!(
            "[global]\nmon host = 10.0.0.1\n[client.vms]\nkey = {KEY}\nclient mount timeout = 10\n"
        );
        assert_eq!(text, wanted);
        assert!((&file).write_all(b"x").is_err());
    }

    #[test]
    fn qemu_names_an_image_by_its_options() {
        let of = |name: &str| image(name).unwrap();
        let file = "json:{\"driver\": \"throttle\", \"file\": {\"driver\": \"raw\", \"file\": \
                    {\"pool\": \"vms\", \"image\": \"web\", \"driver\": \"rbd\"}}}";
        assert!(of("rbd:vms/web").is_file(file));
        for other in ["rbd:vms/web2", "rbd:vm/web", "rbd:vms/shop/web"] {
            assert!(!of(other).is_file(file), "{other}");
        }
        assert!(!of("rbd:vms/web").is_file("/dev/fdset/3"));
        let access = CephAccess::new(Uuid::nil(), "vms", "", KEY);
        let location = access.to(&of("rbd:vms/shop/web")).location(9);
        assert_eq!(
            location,
            json!({"pool": "vms", "namespace": "shop", "image": "web", "user": "vms",
                "conf": "/proc/self/fd/9"})
        );
    }

    proptest! {
        #[test]
        fn any_text_is_one_image_or_none(text in "(rbd:)?[ -~/é]{0,40}") {
            if let Some(found) = image(&text) {
                prop_assert_eq!(found.to_string(), text.clone());
                let disk = Disk::new(text, DiskFormat::Raw);
                let spec = VmSpec { disks: vec![disk], ..VmSpec::new("web") };
                prop_assert!(spec.validate().is_ok());
            }
        }

        #[test]
        fn an_image_is_read_as_it_is_written(
            pool in "[a-zA-Z0-9][a-zA-Z0-9._-]{0,95}",
            namespace in proptest::option::of("[a-zA-Z0-9][a-zA-Z0-9._-]{0,95}"),
            name in "[a-zA-Z0-9][a-zA-Z0-9._-]{0,95}",
        ) {
            let written = RbdImage { pool, namespace, image: name };
            prop_assert_eq!(image(&written.to_string()), Some(written));
        }

        #[test]
        fn a_key_file_yields_a_key_or_an_error(text in "[\\[\\]a-z.=\n \t]{0,80}") {
            if let Ok(key) = read_ceph_key(&text, "a") {
                prop_assert!(!key.contains(['\n', '[', ' ']));
            }
        }
    }
}
