//! Arrivals and removals beside storage that hangs.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{ArrivingDisks, CreateVm, ErrorCode};
use godwit_qemu::{Disk, DiskFormat, Uuid, VmName, VmSpec};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::{disk, files, id, prepare, request, store, web};
use crate::agent::Agent;
use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::{LIMIT, TestHost, until};
use crate::disk_arrivals::Subject;

/// A file system that answers nothing until this is dropped, and then fails: FUSE without a server.
struct Hung {
    device: Option<OwnedFd>,
    dir: PathBuf,
}

impl Hung {
    /// Mounts it over a directory; `None`, with a printed reason, if the machine has no FUSE.
    fn over(dir: &Path) -> Option<Hung> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mounted = rustix::fs::open("/dev/fuse", flags, Mode::empty()).and_then(|device| {
            let number = device.as_raw_fd();
            let options = format!("fd={number},rootmode=40000,user_id=0,group_id=0");
            let options = CString::new(options).unwrap();
            let flags = MountFlags::NOSUID | MountFlags::NODEV;
            mount("hung", dir, "fuse", flags, options.as_c_str()).map(|()| device)
        });
        let skipped = |why: &rustix::io::Errno| eprintln!("skipped: no FUSE here: {why}");
        let device = mounted.inspect_err(skipped).ok()?;
        Some(Hung { device: Some(device), dir: dir.to_owned() })
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // All that waits for it fails.
        drop(self.device.take());
        let _ = unmount(&self.dir, UnmountFlags::DETACH);
    }
}

/// Does work that must not wait for storage that hangs. In a task of its own, since it may block.
async fn soon<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let done = tokio::time::timeout(LIMIT, tokio::spawn(work)).await;
    done.expect("it waits for storage that hangs").unwrap()
}

/// A request of host `b` for one disk of a VM, to this directory.
fn to(host: &TestHost, dir: &Path, number: u8, vm: &str) -> ArrivingDisks {
    let name = format!("{vm}.raw");
    ArrivingDisks {
        transfer: id(number),
        vm: VmName::new(vm).unwrap(),
        uuid: Uuid::from_u128(number.into()),
        to: Some(dir.to_owned()),
        ..request(host, vec![disk(&name, DiskFormat::Raw)])
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    // The marker of a datastore may be there.
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

/// Creates a VM with an image in a directory.
async fn create(host: &TestHost, agent: &Arc<Agent>, vm: &str, dir: &Path) {
    let image = dir.join(format!("{vm}.raw"));
    fs::write(&image, [0; 4096]).unwrap();
    let disks = vec![Disk::new(&image, DiskFormat::Raw)];
    let spec = VmSpec { disks, nics: Vec::new(), ..host.spec(vm) };
    agent.create(CreateVm::new(spec, false)).await.unwrap();
}

#[test]
fn storage_that_hangs_delays_no_arrival_and_no_removal_on_another() {
    let Some(mut host) = TestHost::new() else { return };
    let [hung, well] = ["hung", "well"].map(|name| host.path().join(name));
    for dir in [&hung, &well] {
        fs::create_dir(dir).unwrap();
    }
    host.config.vm_dirs = vec![hung.clone(), well.clone()];
    host.run(async {
        let agent = opened(&host).await;
        create(&host, &agent, "db", &hung).await;
        let spare = well.join("spare.raw");
        fs::write(&spare, [0; 4096]).unwrap();
        let Some(storage) = Hung::over(&hung) else { return };
        let stuck = tokio::spawn({
            let (agent, request) = (Arc::clone(&agent), to(&host, &hung, 7, "stuck"));
            async move { prepare(&agent, &request).await.map(drop) }
        });
        until("it begins", async || agent.arrivals.source_of(id(7).parse().unwrap()).is_some())
            .await;
        for (number, vm) in [(8, "web"), (9, "mail")] {
            let request = to(&host, &well, number, vm);
            for is_first in [true, false] {
                let (agent, request) = (Arc::clone(&agent), request.clone());
                let prepared = soon(async move { prepare(&agent, &request).await }).await;
                assert_eq!(prepared.unwrap().1, is_first);
            }
        }
        assert_eq!(names_in(&well), ["mail.raw", "spare.raw", "web.raw"]);
        soon({
            let agent = Arc::clone(&agent);
            async move { agent.give_up_disks(id(8).parse().unwrap(), "b").await }
        })
        .await
        .unwrap();
        soon({
            let (agent, spare) = (Arc::clone(&agent), spare.clone());
            async move { agent.delete_disk(&spare).await }
        })
        .await
        .unwrap();
        assert_eq!(names_in(&well), ["mail.raw"]);
        assert!(!stuck.is_finished());
        drop(storage);
        stuck.await.unwrap().unwrap_err();
    });
}

#[test]
fn nothing_is_removed_that_a_vm_may_use_whose_storage_has_not_answered_yet() {
    let Some(mut host) = TestHost::new() else { return };
    let [hung, well] = ["hung", "well"].map(|name| host.path().join(name));
    for dir in [&hung, &well] {
        fs::create_dir(dir).unwrap();
    }
    host.config.vm_dirs = vec![hung.clone(), well.clone()];
    host.run(async {
        let agent = opened(&host).await;
        create(&host, &agent, "db", &hung).await;
        let spare = well.join("spare.raw");
        fs::write(&spare, [0; 4096]).unwrap();
        let Some(storage) = Hung::over(&hung) else { return };
        agent.real_paths.forget();
        let delete = || {
            let (agent, spare) = (Arc::clone(&agent), spare.clone());
            soon(async move { agent.delete_disk(&spare).await })
        };
        let refused = delete().await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        assert!(refused.message.contains("whether VM \"db\" uses image"), "{refused}");
        assert!(spare.exists());
        drop(storage);
        until("its storage answers", async || agent.users_of_any_file(&spare).unknown.is_none())
            .await;
        delete().await.unwrap();
        assert!(!spare.exists());
    });
}

#[test]
fn an_image_of_a_vm_stays_if_another_may_use_it_whose_storage_has_not_answered_yet() {
    let Some(mut host) = TestHost::new() else { return };
    let [hung, well] = ["hung", "well"].map(|name| host.path().join(name));
    for dir in [&hung, &well] {
        fs::create_dir(dir).unwrap();
    }
    host.config.vm_dirs = vec![well.clone()];
    host.run(async {
        let agent = opened(&host).await;
        create(&host, &agent, "db", &hung).await;
        create(&host, &agent, "web", &well).await;
        let Some(storage) = Hung::over(&hung) else { return };
        agent.real_paths.forget();
        let images = || {
            let agent = Arc::clone(&agent);
            soon(async move { agent.images_of_vm(&web()).await.unwrap() })
        };
        let found = images().await;
        assert!(found.deleted.is_empty(), "{found:?}");
        assert!(found.kept.iter().any(|kept| kept.why.contains("may use it")), "{found:?}");
        drop(storage);
        let image = well.join("web.raw");
        until("its storage answers", async || images().await.deleted.contains(&image)).await;
    });
}

#[test]
fn a_transfer_that_is_cancelled_before_its_images_are_made_leaves_none() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let request = request(&host, vec![disk("web.raw", DiskFormat::Raw)]);
        store(&host);
        // The only directory for VMs is busy.
        let busy = agent.arrivals.turn([Subject::Storage(host.path().to_owned())]).await.unwrap();
        let waits = tokio::spawn({
            let (agent, request) = (Arc::clone(&agent), request.clone());
            async move { prepare(&agent, &request).await.map(drop) }
        });
        let known = id(7).parse().unwrap();
        until("it begins", async || agent.arrivals.source_of(known).is_some()).await;
        agent.arrivals.give_up_beginning(known, "c");
        agent.arrivals.give_up_beginning(known, "b");
        drop(busy);
        let refused = waits.await.unwrap().unwrap_err();
        assert!(refused.message.ends_with("the move was cancelled"), "{refused}");
        assert!(files(&host).is_empty() && agent.arrivals.all().is_empty());
        assert_eq!(agent.give_up_disks(known, "b").await.unwrap_err().code, ErrorCode::NotFound);
        // Its name is free for the next move.
        assert!(prepare(&agent, &request).await.unwrap().1);
        agent.give_up_disks(known, "c").await.unwrap_err();
        assert_eq!(files(&host), ["web.raw"]);
        agent.give_up_disks(known, "b").await.unwrap();
        assert!(files(&host).is_empty() && agent.check_name(&web()).is_ok());
    });
}

#[test]
fn directories_of_block_devices_have_turns_of_their_own() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let storages = |dir: &Path| agent.storages_of(&to(&host, dir, 7, "web"));
        for dir in ["/dev/vg0", "/dev/vg1"] {
            assert_eq!(storages(Path::new(dir)), [Subject::Storage(dir.into())]);
        }
        let below = host.path().join("below");
        assert_eq!(storages(&below), [Subject::Storage(host.path().to_owned())]);
    });
}
