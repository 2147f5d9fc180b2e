//! The cgroup of a thread and its directory, from /proc.

use std::fs;
use std::path::{Path, PathBuf};

use super::VcpuGroupError;

/// Kind of a cgroup hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The hierarchy of the controller `cpu`.
    V1,
    /// The unified hierarchy.
    V2,
}

/// A group that limits CPUs, or whose children may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) kind: Kind,
    pub(super) directory: PathBuf,
}

impl Place {
    /// Returns the group of a thread of process `pid`; `None` if no group could limit its CPUs.
    ///
    /// # Errors
    /// The thread is gone, or /proc is not a proc file system.
    pub(super) fn of_thread(
        proc: &Path,
        pid: i32,
        thread: u32,
    ) -> Result<Option<Place>, VcpuGroupError> {
        let read =
            |path: PathBuf| fs::read_to_string(&path).map_err(VcpuGroupError::io("read", &path));
        let mounts = read(proc.join("self/mountinfo"))?;
        let groups = read(proc.join(format!("{pid}/task/{thread}/cgroup")))?;
        Ok(in_v1(&mounts, &groups).or_else(|| in_v2(&mounts, &groups)))
    }

    /// Whether the controller is available to its children. In the unified hierarchy, the root has
    /// all controllers that v1 does not use; any other group has those that it was given.
    pub(super) fn has_controller(&self) -> bool {
        if self.kind == Kind::V1 {
            return true;
        }
        let controllers =
            fs::read_to_string(self.directory.join("cgroup.controllers")).unwrap_or_default();
        controllers.split_whitespace().any(|name| name == "cpu")
    }
}

/// Returns the mount of the unified hierarchy; `None` if it is not mounted.
pub(crate) fn unified_mount() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    in_v2(&mounts, "0::/").map(|place| place.directory)
}

fn in_v1(mounts: &str, groups: &str) -> Option<Place> {
    let of_cpu = |names: &str| names.split(',').any(|name| name == "cpu");
    let path = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        fields.next().filter(|names| of_cpu(names))?;
        fields.next()
    })?;
    let mounted = |mount: &Mount<'_>| mount.kind == "cgroup" && of_cpu(mount.options);
    Some(Place { kind: Kind::V1, directory: directory_of(mounts, path, mounted)? })
}

fn in_v2(mounts: &str, groups: &str) -> Option<Place> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mounted = |mount: &Mount<'_>| mount.kind == "cgroup2";
    Some(Place { kind: Kind::V2, directory: directory_of(mounts, path, mounted)? })
}

/// Returns the directory of a group, in the first mount of its hierarchy that shows it.
fn directory_of(mounts: &str, path: &str, mounted: impl Fn(&Mount<'_>) -> bool) -> Option<PathBuf> {
    let mounts = mounts.lines().filter_map(Mount::parse).filter(mounted);
    mounts.into_iter().find_map(|mount| {
        let below = Path::new(path).strip_prefix(unescaped(mount.root)).ok()?;
        // A path that leads out of what this process may see.
        let outside = below.components().any(|part| part.as_os_str() == "..");
        let point = PathBuf::from(unescaped(mount.point));
        (!outside).then(|| if below.as_os_str().is_empty() { point } else { point.join(below) })
    })
}

/// A line of mountinfo (Documentation/filesystems/proc.rst, 3.5).
struct Mount<'a> {
    /// Part of the file system that is mounted.
    root: &'a str,
    point: &'a str,
    kind: &'a str,
    /// Options of the file system itself.
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Mount<'a>> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut file_system = file_system.split(' ');
        let (kind, _source, options) =
            (file_system.next()?, file_system.next()?, file_system.next()?);
        Some(Mount { root, point, kind, options })
    }
}

/// Decodes spaces and similar characters, which are written as three octal digits.
fn unescaped(field: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes
        .into_iter()
        .fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n\
        33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup \
        rw,cpu,cpuacct\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    const UNIFIED: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_controller_is_found_where_it_is_mounted() {
        let groups = "5:cpuset:/\n4:cpuacct,cpu:/machine/web\n0::/machine/web\n";
        let place = in_v1(HYBRID, groups).unwrap();
        assert_eq!(place.directory, Path::new("/sys/fs/cgroup/cpu,cpuacct/machine/web"));
        assert_eq!(in_v1(HYBRID, "5:cpuset:/\n0::/x\n"), None);
        assert_eq!(in_v1(UNIFIED, groups), None, "named, but not mounted");
        let place = in_v2(UNIFIED, "0::/system.slice/godwit.service\n").unwrap();
        assert_eq!(place.directory, Path::new("/sys/fs/cgroup/system.slice/godwit.service"));
        assert_eq!(in_v2(UNIFIED, "0::/\n").unwrap().directory, Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn a_container_sees_a_part_of_the_hierarchy() {
        let mounts = "30 23 0:26 /docker/7 /sys/fs/cgroup\\040x rw - cgroup cgroup rw,cpu\n";
        let place = in_v1(mounts, "1:cpu:/docker/7/web\n").unwrap();
        assert_eq!(place.directory, Path::new("/sys/fs/cgroup x/web"));
        assert_eq!(in_v1(mounts, "1:cpu:/docker/8\n"), None);
        assert_eq!(in_v2(UNIFIED, "0::/../other\n"), None);
    }
}
