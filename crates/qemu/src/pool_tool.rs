//! Ceph's own programs: `rbd` for images in pools, which does what QEMU's driver cannot (list,
//! rename, delete), and `ceph` for the room in a pool.
//!
//! They run as a user without rights, get the access to the cluster as their standard input, and
//! are ended when they take too long.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::helper::{helper, spawn};
use crate::rbd::{CephAccess, RbdImage};

/// The programs.
const RBD: &str = "rbd";
const CEPH: &str = "ceph";
/// Longest time for an answer. It may wait 30 s for a client that was killed (Ceph 16).
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Longest time for the room in a pool.
const ROOM_LIMIT: Duration = Duration::from_secs(20);
/// Longest time of a deletion, which deletes each part of an image.
const DELETION_LIMIT: Duration = Duration::from_secs(600);
/// Longest answer that is read.
const MOST_ANSWER_BYTES: u64 = 4 << 20;

/// Why `rbd` did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum PoolToolError {
    /// It is not installed, or cannot be started.
    #[error("cannot start rbd: {0}")]
    CannotStart(#[from] io::Error),
    /// It takes too long.
    #[error("rbd did not end within {} s; a deletion may have removed a part", limit.as_secs())]
    Late { limit: Duration },
    /// It refuses.
    #[error("rbd refuses: {0}")]
    Refused(String),
    /// Its answer is not what was asked for.
    #[error("cannot read the answer of rbd: it is not the expected JSON")]
    Answer,
}

impl PoolToolError {
    /// Whether there is no image of that name.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, PoolToolError::Refused(why) if why.contains("No such file or directory"))
    }

    /// Whether there is an image of that name already.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        matches!(self, PoolToolError::Refused(why) if why.contains("File exists"))
    }

    /// Whether the cluster does not answer, or refuses the connection: other pools would fail, too.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        match self {
            PoolToolError::Late { .. } => true,
            PoolToolError::Refused(why) => {
                ["Connection timed out", "couldn't connect"].iter().any(|part| why.contains(part))
            }
            PoolToolError::CannotStart(_) | PoolToolError::Answer => false,
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            PoolToolError::CannotStart(_) => "install ceph-common on that host",
            PoolToolError::Late { .. } => "check the cluster with `ceph status`",
            PoolToolError::Refused(_) | PoolToolError::Answer => {
                "see `rbd status` and `rbd info` of the image"
            }
        }
    }
}

/// An image of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedImage {
    pub image: RbdImage,
    /// Size of the disk.
    pub bytes: u64,
}

/// Lists the images of a pool or a namespace: those with names that disks can have. `user`: that of
/// the program.
///
/// # Errors
/// See [`PoolToolError`].
pub async fn list_pool(
    access: &CephAccess,
    place: &str,
    user: (u32, u32),
) -> Result<Vec<ListedImage>, PoolToolError> {
    let arguments = ["ls", "--long", "--format", "json", place];
    let answer = run(access, user, &arguments, ANSWER_LIMIT).await?;
    let answer: Value = serde_json::from_str(&answer).map_err(|_| PoolToolError::Answer)?;
    Ok(listed(&answer, place))
}

fn listed(answer: &Value, place: &str) -> Vec<ListedImage> {
    let entries = answer.as_array().into_iter().flatten();
    let images = entries.filter(|entry| entry["snapshot"].is_null()).filter_map(|entry| {
        let name = format!("rbd:{place}/{}", entry["image"].as_str()?);
        Some(ListedImage { image: RbdImage::of(name.as_ref())?, bytes: entry["size"].as_u64()? })
    });
    images.collect()
}

/// Returns the number that an image has and no other had in its pool.
///
/// # Errors
/// See [`PoolToolError`].
pub async fn pool_image_id(
    access: &CephAccess,
    image: &RbdImage,
    user: (u32, u32),
) -> Result<u64, PoolToolError> {
    let image = spec_of(image);
    let arguments = ["info", "--format", "json", &image];
    let answer = run(access, user, &arguments, ANSWER_LIMIT).await?;
    let answer: Value = serde_json::from_str(&answer).map_err(|_| PoolToolError::Answer)?;
    let id = answer["id"].as_str().and_then(|id| u64::from_str_radix(id, 16).ok());
    id.ok_or(PoolToolError::Answer)
}

/// Gives an image another name in its pool or namespace. It keeps its number.
///
/// # Errors
/// See [`PoolToolError`]; [`PoolToolError::is_taken`] if an image has that name.
pub async fn rename_pool_image(
    access: &CephAccess,
    (from, to): (&RbdImage, &RbdImage),
    user: (u32, u32),
) -> Result<(), PoolToolError> {
    let (from, to) = (spec_of(from), spec_of(to));
    run(access, user, &["rename", &from, &to], ANSWER_LIMIT).await.map(drop)
}

/// Space of a pool, before replication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSpace {
    pub used_bytes: u64,
    /// Bytes that still fit, also within its quota.
    pub free_bytes: u64,
}

/// Returns the pools of a cluster, with the space of each as far as the cluster knows it.
///
/// # Errors
/// The program cannot be started ([`io::ErrorKind::NotFound`]: it is not installed), takes too
/// long, refuses, or gives another answer.
pub async fn pool_spaces(
    access: &CephAccess,
    user: (u32, u32),
) -> io::Result<BTreeMap<String, Option<PoolSpace>>> {
    let arguments = ["df", "detail", "--format", "json"];
    let answer = answer_of(CEPH, (access, user), &arguments, ROOM_LIMIT).await?;
    let late = || io::Error::new(io::ErrorKind::TimedOut, "ceph does not end");
    let answer = answer.ok_or_else(late)?.map_err(io::Error::other)?;
    let answer: Option<Value> = serde_json::from_str(&answer).ok();
    let pools = answer.as_ref().and_then(spaces_in);
    pools.ok_or_else(|| io::Error::other("the answer of ceph is not the expected JSON"))
}

/// Returns the bytes that fit into a pool, with its quota. `None`: the cluster does not know.
///
/// # Errors
/// As of [`pool_spaces`].
pub async fn pool_room(
    access: &CephAccess,
    pool: &str,
    user: (u32, u32),
) -> io::Result<Option<u64>> {
    let pools = pool_spaces(access, user).await?;
    Ok(pools.get(pool).copied().flatten().map(|space| space.free_bytes))
}

/// Reads an answer; `None`: it has another form.
fn spaces_in(answer: &Value) -> Option<BTreeMap<String, Option<PoolSpace>>> {
    // Without a manager's report, all figures are 0.
    let are_known = answer["stats"]["total_bytes"].as_u64()? > 0;
    let pools = answer["pools"].as_array()?.iter().filter_map(|pool| {
        let space = are_known.then(|| space_in(&pool["stats"])).flatten();
        Some((pool["name"].as_str()?.to_owned(), space))
    });
    Some(pools.collect())
}

fn space_in(stats: &Value) -> Option<PoolSpace> {
    let room = stats["max_avail"].as_u64()?;
    let quota = stats["quota_bytes"].as_u64().filter(|bytes| *bytes > 0);
    let used_bytes = stats["stored"].as_u64().unwrap_or(0);
    let free_bytes = quota.map_or(room, |quota| room.min(quota.saturating_sub(used_bytes)));
    Some(PoolSpace { used_bytes, free_bytes })
}

/// Deletes an image. Ceph refuses one that a client has open, or that has snapshots.
///
/// # Errors
/// See [`PoolToolError`].
pub async fn delete_pool_image(
    access: &CephAccess,
    image: &RbdImage,
    user: (u32, u32),
) -> Result<(), PoolToolError> {
    let image = spec_of(image);
    let arguments = ["rm", "--no-progress", &image];
    run(access, user, &arguments, DELETION_LIMIT).await.map(drop)
}

fn spec_of(image: &RbdImage) -> String {
    format!("{}/{}", image.place(), image.image)
}

async fn run(
    access: &CephAccess,
    user: (u32, u32),
    arguments: &[&str],
    limit: Duration,
) -> Result<String, PoolToolError> {
    let answer = answer_of(RBD, (access, user), arguments, limit).await?;
    answer.ok_or(PoolToolError::Late { limit })?.map_err(PoolToolError::Refused)
}

/// Runs a program; returns its answer, or why it refuses. `None`: it takes too long.
async fn answer_of(
    program: &str,
    (access, user): (&CephAccess, (u32, u32)),
    arguments: &[&str],
    limit: Duration,
) -> io::Result<Option<Result<String, String>>> {
    let mut command = helper(Path::new(program), Some(user));
    // The configuration, with the key.
    command.args(["--conf", "/proc/self/fd/0", "--id", &access.user]).args(arguments);
    command.stdin(Stdio::from(access.file()?));
    let mut child = spawn(command).await?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let done = async {
        let (out, err) = tokio::join!(read(out), read(err));
        (child.wait().await, out, err)
    };
    let Ok((status, out, err)) = tokio::time::timeout(limit, done).await else { return Ok(None) };
    Ok(Some(if status?.success() { Ok(out) } else { Err(reason_of(&err)) }))
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // What cannot be read is not there.
        let _ = from.take(MOST_ANSWER_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the reason in an error: the last line that begins with the program's name, otherwise the
/// last one.
fn reason_of(text: &str) -> String {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let named = lines().filter_map(|line| line.strip_prefix("rbd: ")).next_back();
    let reason = named.or_else(|| lines().next_back()).unwrap_or("no reason");
    reason.chars().filter(|c| !c.is_control()).take(300).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn images_with_good_names_are_listed_and_snapshots_are_not() {
        let answer = json!([
            {"image": "web", "id": "10a6", "size": 1024, "format": 2},
            {"image": "web", "snapshot": "before", "size": 1024, "format": 2},
            {"image": "a b", "size": 1024, "format": 2},
            {"image": "db", "size": "much"},
            7,
        ]);
        let names = |place: &str| -> Vec<String> {
            listed(&answer, place).iter().map(|found| found.image.to_string()).collect()
        };
        assert_eq!(names("vms"), ["rbd:vms/web"]);
        assert_eq!(names("vms/shop"), ["rbd:vms/shop/web"]);
        assert!(listed(&json!({"error": 7}), "vms").is_empty());
    }

    #[test]
    fn the_room_in_a_pool_ends_at_its_quota() {
        let answer = |total: u64, quota: u64, stored: u64| {
            let stats = json!({"stored": stored, "max_avail": 500, "quota_bytes": quota});
            let pools = json!([{"name": "others", "stats": {}}, {"name": "vms", "stats": stats}]);
            json!({"stats": {"total_bytes": total}, "pools": pools})
        };
        let space = |total, quota, stored| spaces_in(&answer(total, quota, stored)).unwrap()["vms"];
        let has = |used_bytes, free_bytes| Some(PoolSpace { used_bytes, free_bytes });
        assert_eq!(space(1000, 0, 100), has(100, 500));
        assert_eq!(space(1000, 300, 100), has(100, 200));
        assert_eq!(space(1000, 300, 400), has(400, 0));
        assert_eq!(space(1000, 900, 100), has(100, 500));
        let all = spaces_in(&answer(1000, 0, 100)).unwrap();
        assert_eq!((all.len(), all["others"]), (2, None));
        // The pools are known, and their space is not.
        assert_eq!(space(0, 0, 0), None);
        let stats = json!({"total_bytes": 7});
        for liar in [json!(7), json!({"stats": stats, "pools": {"vms": 7}}), json!({"pools": []})] {
            assert_eq!(spaces_in(&liar), None, "{liar}");
        }
        let odd = json!([7, {"name": 7}, {"name": "vms", "stats": {"max_avail": -1}}]);
        let odd = spaces_in(&json!({"stats": stats, "pools": odd})).unwrap();
        assert_eq!(odd, BTreeMap::from([("vms".to_owned(), None)]));
    }

    #[test]
    fn an_error_has_a_reason() {
        let text = "Removing image: 0% complete...failed.\nrbd: error: image still has watchers\n\
                    This means the image is still open.\n\n";
        assert_eq!(reason_of(text), "error: image still has watchers");
        assert_eq!(reason_of("one\ntwo\n"), "two");
        assert_eq!(reason_of(""), "no reason");
        let missing = "2026 librbd: failed\nrbd: error opening image web: (2) No such file or \
                       directory\n";
        assert!(PoolToolError::Refused(reason_of(missing)).is_missing());
        assert!(!PoolToolError::Refused(reason_of(text)).is_missing());
        let taken = PoolToolError::Refused("rename error: (17) File exists".to_owned());
        assert!(taken.is_taken() && !taken.is_missing());
        for silent in
            ["rbd: couldn't connect to the cluster!\n", "rbd: error: (110) Connection timed out"]
        {
            assert!(PoolToolError::Refused(reason_of(silent)).is_silent(), "{silent}");
        }
        assert!(!taken.is_silent());
        assert!(PoolToolError::Late { limit: ANSWER_LIMIT }.is_silent());
        assert_eq!(reason_of(&"x".repeat(1000)).len(), 300);
    }
}
