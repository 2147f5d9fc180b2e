//! Names of LVM's thin pools: `lvm:GROUP/POOL` where others have a directory. A volume in one is a
//! block device, and has its path as a disk.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Begin of the name of a thin pool.
const PREFIX: &str = "lvm:";
/// Longest name of a volume group or a volume (`NAME_LEN` of LVM 2.03, with the final zero).
const MOST_NAME_BYTES: usize = 127;

/// Whether a text in place of a directory names a thin pool of LVM, well formed or not. A path of a
/// directory is absolute.
#[must_use]
pub fn is_thin_pool(place: &Path) -> bool {
    place.as_os_str().as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

/// A thin pool of LVM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Names")]
pub struct ThinPool {
    /// Its volume group.
    group: String,
    pool: String,
}

/// A thin pool as a configuration or a record has it, before its names are checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Names {
    group: String,
    pool: String,
}

impl TryFrom<Names> for ThinPool {
    type Error = String;

    fn try_from(names: Names) -> Result<ThinPool, String> {
        let Names { group, pool } = names;
        for name in [&group, &pool] {
            if !is_name(name) {
                let why = format!("\"{name}\" is not the name of a volume group or a thin pool");
                return Err(why);
            }
        }
        Ok(ThinPool { group, pool })
    }
}

impl ThinPool {
    /// Returns the pool that a text in place of a directory names; `None` if it names none, or is
    /// not well formed.
    #[must_use]
    pub fn of(place: &Path) -> Option<ThinPool> {
        let (group, pool) = place.to_str()?.strip_prefix(PREFIX)?.split_once('/')?;
        ThinPool::try_from(Names { group: group.to_owned(), pool: pool.to_owned() }).ok()
    }

    /// Returns what names it in place of a directory.
    #[must_use]
    pub fn place(&self) -> PathBuf {
        PathBuf::from(format!("{PREFIX}{self}"))
    }

    /// Returns the name of its volume group.
    #[must_use]
    pub fn group(&self) -> &str {
        &self.group
    }

    /// Returns its name in its volume group.
    #[must_use]
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Returns the path of the device that a volume of its group has.
    #[must_use]
    pub fn device(&self, volume: &str) -> PathBuf {
        Path::new("/dev").join(&self.group).join(volume)
    }
}

/// As LVM's programs name it: `GROUP/POOL`.
impl fmt::Display for ThinPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.pool)
    }
}

/// Whether LVM takes a name (lvm(8), "Valid names"). It would read one with a leading hyphen as an
/// option.
fn is_name(name: &str) -> bool {
    let is_good = |c: char| c.is_ascii_alphanumeric() || "+_.-".contains(c);
    let is_odd = name.is_empty() || name.starts_with('-') || name == "." || name == "..";
    !is_odd && name.len() <= MOST_NAME_BYTES && name.chars().all(is_good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thin_pool_has_one_name_and_no_other_text_is_one() {
        let pool = ThinPool::of(Path::new("lvm:vg0/thin-0")).unwrap();
        assert_eq!(
            (pool.group(), pool.pool(), &*pool.to_string()),
            ("vg0", "thin-0", "vg0/thin-0")
        );
        assert_eq!(pool.place(), Path::new("lvm:vg0/thin-0"));
        assert_eq!(pool.device("web"), Path::new("/dev/vg0/web"));
        let long = format!("lvm:vg0/{}", "x".repeat(128));
        for bad in [
            "lvm:",
            "lvm:vg0",
            "lvm:vg0/",
            "lvm:/thin",
            "lvm:vg0/a/b",
            "lvm:-f/thin",
            "lvm:vg0/-f",
            "lvm:../thin",
            "lvm:vg0/..",
            "lvm:vg0/a b",
            "lvm:vg0/a\nb",
            "lvm:vg0/@tag",
            &long,
        ] {
            assert!(is_thin_pool(Path::new(bad)), "{bad}");
            assert_eq!(ThinPool::of(Path::new(bad)), None, "{bad}");
        }
        for other in ["/dev/vg0", "vg0/thin0", "rbd:vms", "/lvm:vg0/thin0", ""] {
            assert!(!is_thin_pool(Path::new(other)), "{other}");
            assert_eq!(ThinPool::of(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn a_record_of_a_pool_is_checked_when_it_is_read() {
        let read = |text: &str| serde_json::from_str::<ThinPool>(text);
        let pool = ThinPool::of(Path::new("lvm:vg0/thin0")).unwrap();
        assert_eq!(read(&serde_json::to_string(&pool).unwrap()).unwrap(), pool);
        for bad in [
            r#"{"group":"vg0","pool":"-f"}"#,
            r#"{"group":"..","pool":"thin0"}"#,
            r#"{"group":"vg0","pool":"thin0","size":7}"#,
            r#"{"group":"vg0"}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
