//! Tests with groups in trees of ordinary files, and in this machine's own hierarchy.

use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;

// Above the largest process number (PID_MAX_LIMIT).
const PID: i32 = 4_194_400;
const VCPUS: [u32; 3] = [4_194_401, 4_194_402, 4_194_403];
const MAIN: u32 = 4_194_400;

/// A /proc and a hierarchy with the group `/vms`, which has the threads.
struct Fake {
    folder: tempfile::TempDir,
    kind: Kind,
}

impl Fake {
    fn new(kind: Kind) -> Fake {
        let fake = Fake { folder: tempfile::tempdir().unwrap(), kind };
        let mount = fake.root().join("cg");
        fs::create_dir_all(mount.join("vms")).unwrap();
        let (type_, options) = match kind {
            Kind::V1 => ("cgroup", "rw,cpu"),
            Kind::V2 => ("cgroup2", "rw"),
        };
        fs::create_dir_all(fake.root().join("proc/self")).unwrap();
        let line = format!("30 23 0:26 / {} rw - {type_} none {options}\n", mount.display());
        fs::write(fake.root().join("proc/self/mountinfo"), line).unwrap();
        for thread in VCPUS.into_iter().chain([MAIN]) {
            fake.put(thread, "/vms");
        }
        fs::write(fake.vms().join("cgroup.controllers"), "cpuset cpu io").unwrap();
        fs::write(fake.vms().join("cgroup.subtree_control"), "").unwrap();
        fake
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    fn vms(&self) -> PathBuf {
        self.root().join("cg/vms")
    }

    fn group(&self) -> PathBuf {
        self.vms().join(format!("godwit.web.{PID}"))
    }

    fn put(&self, thread: u32, group: &str) {
        let task = self.root().join(format!("proc/{PID}/task/{thread}"));
        fs::create_dir_all(&task).unwrap();
        let line = if self.kind == Kind::V1 {
            format!("1:cpu:{group}\n")
        } else {
            format!("0::{group}\n")
        };
        fs::write(task.join("cgroup"), line).unwrap();
    }

    fn tree(&self) -> Tree {
        // The kernel removes directories together with the control files in them.
        Tree {
            proc: self.root().join("proc"),
            make: |path| fs::create_dir(path),
            remove: |path| fs::remove_dir_all(path),
        }
    }

    fn vcpu_group(&self) -> VcpuGroup {
        VcpuGroup::in_tree(self.tree(), &VmName::new("web").unwrap(), PID, VCPUS.to_vec())
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.group().join(file)).unwrap()
    }
}

#[test]
fn threads_get_a_share_and_are_released_in_v1() {
    let fake = Fake::new(Kind::V1);
    let mut group = fake.vcpu_group();
    group.set_share(None).unwrap();
    assert!(!fake.group().exists(), "nothing is created before it is needed");
    group.set_share(Some(0.5)).unwrap();
    // An ordinary file keeps only the last write.
    assert_eq!(fake.read("tasks"), "4194403");
    assert_eq!(
        (fake.read("cpu.cfs_quota_us").as_str(), fake.read("cpu.cfs_period_us").as_str()),
        ("15000", "10000")
    );
    assert_eq!(fake.read("cpu.shares"), "3072");
    group.set_share(Some(0.01)).unwrap();
    assert_eq!(
        (fake.read("cpu.cfs_quota_us").as_str(), fake.read("cpu.cfs_period_us").as_str()),
        ("1000", "33333")
    );
    for free in [Some(1.0), None] {
        group.set_share(Some(0.2)).unwrap();
        group.set_share(free).unwrap();
        assert_eq!(fake.read("cpu.cfs_quota_us"), "-1");
    }
    drop(group);
    assert!(!fake.group().exists());
    assert_eq!(fs::read_to_string(fake.vms().join("tasks")).unwrap(), "4194403");
}

#[test]
fn threads_get_a_share_and_are_released_in_v2() {
    let fake = Fake::new(Kind::V2);
    let mut group = fake.vcpu_group();
    group.set_share(Some(0.1)).unwrap();
    assert_eq!(fake.read("cgroup.type"), "threaded");
    let control = || fs::read_to_string(fake.vms().join("cgroup.subtree_control")).unwrap();
    assert_eq!(control(), "+cpu");
    assert_eq!(fake.read("cgroup.threads"), "4194403");
    assert_eq!(
        (fake.read("cpu.max").as_str(), fake.read("cpu.weight").as_str()),
        ("3000 10000", "300")
    );
    group.set_share(None).unwrap();
    assert_eq!(fake.read("cpu.max"), "max");
    drop(group);
    assert!(!fake.group().exists());
    assert_eq!(fs::read_to_string(fake.vms().join("cgroup.threads")).unwrap(), "4194403");
    assert_eq!(control(), "-cpu");
}

#[test]
fn an_enabled_controller_stays_enabled() {
    let fake = Fake::new(Kind::V2);
    fs::write(fake.vms().join("cgroup.subtree_control"), "io cpu").unwrap();
    fake.vcpu_group().set_share(Some(0.1)).unwrap();
    assert_eq!(fs::read_to_string(fake.vms().join("cgroup.subtree_control")).unwrap(), "io cpu");
}

#[test]
fn a_group_left_by_an_agent_is_found_by_name() {
    for kind in [Kind::V1, Kind::V2] {
        let fake = Fake::new(kind);
        assert!(!put_back(&fake.tree(), PID).unwrap());
        let mut group = fake.vcpu_group();
        group.set_share(Some(0.05)).unwrap();
        VCPUS.iter().for_each(|vcpu| fake.put(*vcpu, &format!("/vms/godwit.web.{PID}")));
        // The agent dies.
        std::mem::forget(group);
        assert!(put_back(&fake.tree(), PID).unwrap());
        assert!(!fake.group().exists());
    }
}

#[test]
fn another_process_group_is_left_alone() {
    let fake = Fake::new(Kind::V1);
    let other = format!("godwit.web.{}", PID + 1);
    fs::create_dir(fake.vms().join(&other)).unwrap();
    fake.put(VCPUS[0], &format!("/vms/{other}"));
    assert!(!put_back(&fake.tree(), PID).unwrap());
    assert!(fake.vms().join(&other).exists());
    let scattered = fake.vcpu_group().set_share(Some(0.5)).unwrap_err();
    assert!(matches!(scattered, VcpuGroupError::Scattered { .. }), "{scattered}");
}

#[test]
fn groups_of_ended_processes_are_removed() {
    let fake = Fake::new(Kind::V1);
    let own = std::process::id();
    let task = fake.root().join(format!("proc/{own}/task/{own}"));
    fs::create_dir_all(&task).unwrap();
    fs::write(task.join("cgroup"), "1:cpu:/vms\n").unwrap();
    let names = [
        format!("godwit.web.{PID}"),
        format!("godwit.old.one.{}", PID + 9),
        "vms.7".into(),
        "godwit.7x".into(),
    ];
    names.iter().for_each(|name| fs::create_dir(fake.vms().join(name)).unwrap());
    remove_ended(&fake.tree());
    let left = names.map(|name| fake.vms().join(name).exists());
    assert_eq!(left, [true, false, true, true]);
}

#[test]
fn without_a_usable_group_nothing_is_left_behind() {
    let fake = Fake::new(Kind::V2);
    fs::write(fake.vms().join("cgroup.controllers"), "cpuset io").unwrap();
    let error = fake.vcpu_group().set_share(Some(0.5)).unwrap_err();
    assert!(matches!(error, VcpuGroupError::NoController { .. }), "{error}");
    // A group that accepts no thread is removed again.
    let fake = Fake::new(Kind::V1);
    let closed = Tree {
        make: |path| {
            fs::create_dir(path).and_then(|()| symlink("/nonexistent/x", path.join("tasks")))
        },
        ..fake.tree()
    };
    let mut group = VcpuGroup::in_tree(closed, &VmName::new("web").unwrap(), PID, VCPUS.to_vec());
    group.set_share(Some(0.5)).unwrap_err();
    assert!(!fake.group().exists());
}

proptest! {
    #[test]
    fn every_share_is_a_quota_that_the_kernel_takes(share in 0.0..1.0f64, vcpus in 1usize..300) {
        let Quota { quota_us, period_us } = Quota::of(share, vcpus);
        prop_assert!(quota_us >= 1000 && (10_000..=100_000).contains(&period_us));
        let given = quota_us as f64 / period_us as f64;
        let wanted = (share * vcpus as f64).max(0.01);
        prop_assert!((given / wanted - 1.0).abs() < 0.01, "{given} of {wanted}");
    }
}
