//! Backing files of disks: which ones a VM may have, and that the chain stays the recorded one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use godwit_api::{ApiError, CreateVm, ErrorCode, VmInfo, VmState};
use godwit_host::Agent;
use godwit_qemu::{BackingFile, Disk, DiskFormat, ResolvedSpec, VmName, VmSpec};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use support::{TestHost, arriving, until};

fn web() -> VmName {
    VmName::new("web").unwrap()
}

/// A host with one directory for VMs, which holds the disk "top.qcow2", and one other directory.
struct Images {
    host: TestHost,
    images: PathBuf,
    elsewhere: PathBuf,
}

impl Images {
    fn new() -> Option<Images> {
        let mut host = TestHost::new()?;
        if !Path::new("/usr/bin/qemu-img").exists() {
            eprintln!("skipped: qemu-img is missing (apt-get install qemu-utils)");
            return None;
        }
        let root = host.path().canonicalize().unwrap();
        let (images, elsewhere) = (root.join("images"), root.join("elsewhere"));
        for dir in [&images, &elsewhere] {
            fs::create_dir(dir).unwrap();
            for file in ["base.img", "other.img"] {
                fs::write(dir.join(file), vec![0x5a; 1 << 20]).unwrap();
                fs::set_permissions(dir.join(file), Permissions::from_mode(0o600)).unwrap();
            }
        }
        fs::copy(root.join("guest"), images.join("guest")).unwrap();
        host.config.vm_dirs = vec![images.clone()];
        Some(Images { host, images, elsewhere })
    }

    fn disk(&self) -> PathBuf {
        self.images.join("top.qcow2")
    }

    /// Creates the disk on top of a raw file, which need not exist.
    fn make_on(&self, base: &Path) {
        qemu_img(
            &["create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b"],
            &[base, &self.disk()],
            &["1M"],
        );
    }

    /// Puts the name of another file into the disk's header.
    fn rename_in_header(&self, base: &Path) {
        qemu_img(&["rebase", "-q", "-u", "-F", "raw", "-b"], &[base, &self.disk()], &[]);
    }

    fn spec(&self) -> VmSpec {
        let disk = Disk::new(self.disk(), DiskFormat::Qcow2);
        VmSpec {
            kernel: Some(self.images.join("guest")),
            disks: vec![disk],
            nics: Vec::new(),
            ..self.host.spec("web")
        }
    }

    async fn create(&self, agent: &Arc<Agent>, vm_dirs_only: bool) -> Result<VmInfo, ApiError> {
        agent
            .create(CreateVm {
                spec: self.spec(),
                start: false,
                vm_dirs_only,
                new_disks: Vec::new(),
            })
            .await
    }

    /// Returns the VM as another host sends it, with these recorded backing files.
    async fn sent(&self, agent: &Arc<Agent>, recorded: Option<&[PathBuf]>) -> ResolvedSpec {
        let mut spec = agent.resolve(self.spec()).await.unwrap();
        let file = |path: &PathBuf| BackingFile { path: path.clone(), format: DiskFormat::Raw };
        spec.disks[0].backing = recorded.map(|files| files.iter().map(file).collect());
        spec
    }

    /// Makes a file readable by every user of the host.
    fn open_to_all(&self, file: &Path) {
        for path in [self.host.path(), file.parent().unwrap(), file] {
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        }
    }

    fn record(&self) -> PathBuf {
        self.host.path().join("state/vms/web/vm.json")
    }

    fn recorded(&self) -> serde_json::Value {
        let record: serde_json::Value =
            serde_json::from_slice(&fs::read(self.record()).unwrap()).unwrap();
        record["spec"]["disks"][0]["backing"].clone()
    }

    /// Rewrites the record in the form of a release that recorded no chains.
    fn forget_chain(&self) {
        let mut record: serde_json::Value =
            serde_json::from_slice(&fs::read(self.record()).unwrap()).unwrap();
        record["spec"]["disks"][0].as_object_mut().unwrap().remove("backing").unwrap();
        fs::write(self.record(), record.to_string()).unwrap();
    }
}

fn qemu_img(before: &[&str], files: &[&Path], after: &[&str]) {
    let made = Command::new("qemu-img").args(before).args(files).args(after).status().unwrap();
    assert!(made.success(), "qemu-img {before:?}");
}

/// Opens an agent once the previous one has released the state.
async fn opened(host: &TestHost) -> Arc<Agent> {
    let mut opened = None;
    until("the lock is free", async || {
        opened = Agent::open(host.config.clone()).await.ok();
        opened.is_some()
    })
    .await;
    opened.unwrap()
}

#[track_caller]
fn assert_refused(refused: Result<impl Sized, ApiError>, text: &str) {
    let Err(error) = refused else { panic!("not refused") };
    assert_eq!(error.code, ErrorCode::Preflight, "{error}");
    assert!(error.message.contains(text) && !error.remedy.is_empty(), "{error}");
}

#[test]
fn an_image_that_names_a_file_that_is_not_for_vms_is_refused_at_creation() {
    let Some(all) = Images::new() else { return };
    all.host.run(async {
        let agent = opened(&all.host).await;
        let (secret, link) = (all.elsewhere.join("base.img"), all.images.join("link"));
        symlink(&secret, &link).unwrap();
        for named in [&secret, &link, Path::new("/etc/shadow")] {
            all.make_on(named);
            for vm_dirs_only in [true, false] {
                let refused = all.create(&agent, vm_dirs_only).await;
                assert_refused(refused, &format!("cannot open backing file {}", named.display()));
            }
        }
        // A file that every user can read is permitted; VMs of the manager's operators stay below
        // vm_dirs.
        all.open_to_all(&secret);
        all.make_on(&secret);
        assert_refused(all.create(&agent, true).await, "it is not below vm_dirs");
        all.create(&agent, false).await.unwrap();
        agent.delete(&web(), false).await.unwrap();
        all.make_on(Path::new("base.img"));
        all.create(&agent, true).await.unwrap();
        agent.delete(&web(), false).await.unwrap();
        assert_eq!(all.host.remains(), Vec::<String>::new());
    });
}

#[test]
fn links_below_vm_dirs_lead_an_operator_of_the_manager_nowhere_else() {
    let Some(all) = Images::new() else { return };
    all.host.run(async {
        let agent = opened(&all.host).await;
        symlink(all.elsewhere.join("base.img"), all.images.join("link")).unwrap();
        let disk = Disk::new(all.images.join("link"), DiskFormat::Raw).readonly();
        let spec = VmSpec { disks: vec![disk], ..all.spec() };
        let ask = |vm_dirs_only| CreateVm {
            spec: spec.clone(),
            start: false,
            vm_dirs_only,
            new_disks: Vec::new(),
        };
        assert_refused(agent.create(ask(true)).await, "cannot open disk");
        agent.create(ask(false)).await.unwrap();
    });
}

#[test]
fn a_header_that_changed_between_creation_and_start_is_refused() {
    let Some(all) = Images::new() else { return };
    let (base, other) = (all.images.join("base.img"), all.images.join("other.img"));
    let changed = format!(
        "cannot open disk {}: its backing chain changed: recorded {} (raw), found {} (raw)",
        all.disk().display(),
        base.display(),
        other.display()
    );
    all.make_on(Path::new("base.img"));
    all.host.run(async {
        let agent = opened(&all.host).await;
        all.create(&agent, false).await.unwrap();
        // The other file is also for VMs: the disk of another VM.
        all.rename_in_header(&other);
        assert_refused(agent.start(&web()).await, &changed);
        assert_eq!(agent.vm_info("web").unwrap().state, VmState::Stopped);
    });
    // The record outlives the agent.
    all.host.run(async {
        let agent = opened(&all.host).await;
        assert_refused(agent.start(&web()).await, &changed);
        // The same file under another name in the header is the recorded chain.
        all.rename_in_header(&base);
        assert_eq!(agent.start(&web()).await.unwrap().state, VmState::Running);
        agent.delete(&web(), true).await.unwrap_err();
        agent.stop(&web(), serde_json::from_str(r#"{"force": true}"#).unwrap()).await.unwrap();
        // An operator accepts another chain by creating the VM again.
        all.rename_in_header(&other);
        agent.delete(&web(), false).await.unwrap();
        all.create(&agent, false).await.unwrap();
        agent.start(&web()).await.unwrap();
    });
}

#[test]
fn another_host_sends_no_vm_with_another_chain_or_one_that_is_not_for_vms() {
    let Some(all) = Images::new() else { return };
    all.host.run(async {
        let agent = opened(&all.host).await;
        let (base, other) = (all.images.join("base.img"), all.images.join("other.img"));
        let secret = all.elsewhere.join("base.img");
        let arrive = async |recorded: Option<&[PathBuf]>| {
            let spec = all.sent(&agent, recorded).await;
            let shadow = agent.prepare_incoming(spec, arriving(2), "b", false, None).await?;
            agent.discard(&shadow).await;
            Ok(())
        };
        all.make_on(&base);
        let changed = "its backing chain changed: recorded";
        assert_refused(arrive(Some(std::slice::from_ref(&other))).await, changed);
        assert_refused(arrive(Some(&[])).await, changed);
        assert_refused(arrive(Some(&[base.clone(), other.clone()])).await, changed);
        arrive(Some(std::slice::from_ref(&base))).await.unwrap();
        // A release that recorded no chains: only the rule decides.
        arrive(None).await.unwrap();
        all.make_on(&secret);
        let not_for_vms = "does not open it for a guest of another host";
        assert_refused(arrive(Some(std::slice::from_ref(&secret))).await, not_for_vms);
        assert_refused(arrive(None).await, not_for_vms);
        assert_eq!(all.host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_block_device_is_no_backing_file_unless_it_is_below_vm_dirs() {
    let Some(mut all) = Images::new() else { return };
    let device = all.elsewhere.join("device");
    let mode = Mode::from_raw_mode(0o644);
    if let Err(error) = mknodat(CWD, &device, FileType::BlockDevice, mode, makedev(120, 1)) {
        return eprintln!("skipped: cannot create a block device: {error}");
    }
    all.open_to_all(&device);
    all.make_on(&device);
    let recorded = [device.clone()];
    all.host.run(async {
        let agent = opened(&all.host).await;
        // Every user can read it, but it is still not for VMs.
        for vm_dirs_only in [false, true] {
            assert_refused(all.create(&agent, vm_dirs_only).await, "cannot open backing file");
        }
        let spec = all.sent(&agent, Some(&recorded)).await;
        let refused = agent.prepare_incoming(spec, arriving(2), "b", false, None).await;
        assert_refused(refused, "does not open it for a guest of another host");
    });
    all.host.config.vm_dirs.push(all.elsewhere.clone());
    all.host.run(async {
        let agent = opened(&all.host).await;
        // The rule permits it; no driver has that number (120 is for experiments).
        let refused = all.create(&agent, false).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotFound, "{refused}");
    });
}

#[test]
fn a_definition_without_a_chain_gets_it_at_the_first_start_if_its_files_are_for_vms() {
    let Some(all) = Images::new() else { return };
    let base = all.images.join("base.img");
    all.make_on(&base);
    all.host.run(async {
        let agent = opened(&all.host).await;
        all.create(&agent, false).await.unwrap();
        assert_eq!(all.recorded(), serde_json::json!([{ "path": base, "format": "raw" }]));
    });
    all.forget_chain();
    all.rename_in_header(&all.elsewhere.join("base.img"));
    all.host.run(async {
        let agent = opened(&all.host).await;
        assert_refused(agent.start(&web()).await, "cannot open backing file");
        assert!(all.recorded().is_null());
        all.rename_in_header(&base);
        agent.start(&web()).await.unwrap();
        assert_eq!(all.recorded(), serde_json::json!([{ "path": base, "format": "raw" }]));
        agent.stop(&web(), serde_json::from_str(r#"{"force": true}"#).unwrap()).await.unwrap();
        assert_eq!(all.recorded(), serde_json::json!([{ "path": base, "format": "raw" }]));
        all.rename_in_header(&all.images.join("other.img"));
        assert_refused(agent.start(&web()).await, "its backing chain changed");
    });
}
