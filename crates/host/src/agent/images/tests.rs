//! Images in work and moves of disks, as requests and the next agent see them.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use godwit_api::{CreateVm, ErrorCode};
use godwit_qemu::{Disk, DiskFormat, VmName, VmSpec};
use rustix::io::Errno;

use crate::agent::Agent;
use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::TestHost;
use crate::store::DiskMoveNote;

#[test]
fn an_image_that_a_warm_import_writes_is_not_deleted_and_goes_to_its_vm_alone() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let path = host.path().join("web.raw");
        std::fs::write(&path, [0; 4096]).unwrap();
        let spec = |name: &str| VmSpec {
            disks: vec![Disk::new(&path, DiskFormat::Raw)],
            ..host.spec(name)
        };
        let create = |name: &str| agent.create(CreateVm::new(spec(name), false));
        let delete = || agent.delete_disk(&path);
        let place = agent.place(&path, "write").unwrap();
        let claim = place.claim().unwrap();
        for refused in [delete().await.unwrap_err(), create("web").await.unwrap_err()] {
            assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        }
        // After the final pass, until the VM runs.
        claim.reserve_for("web");
        for refused in [delete().await.unwrap_err(), create("db").await.unwrap_err()] {
            assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        }
        create("web").await.unwrap();
        drop(claim);
        assert_eq!(delete().await.unwrap_err().code, ErrorCode::WrongState);
        agent.delete(&VmName::new("web").unwrap(), false).await.unwrap();
        delete().await.unwrap();
        assert!(!path.exists());
    });
}

#[test]
fn an_image_that_another_program_writes_is_not_deleted() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let path = host.path().join("web.raw");
        std::fs::write(&path, [0; 4096]).unwrap();
        let disks = vec![Disk::new(&path, DiskFormat::Raw)];
        let spec = VmSpec { disks, ..host.spec("web") };
        agent.create(CreateVm::new(spec, false)).await.unwrap();
        assert_eq!(agent.images_of_vm(&web()).await.unwrap().deleted, std::slice::from_ref(&path));
        let writer = std::fs::File::options().write(true).open(&path).unwrap();
        assert!(godwit_ram::lock_image(&writer).unwrap());
        assert!(agent.images_of_vm(&web()).await.unwrap().deleted.is_empty());
        agent.delete(&web(), false).await.unwrap();
        let refused = agent.delete_disk(&path).await.unwrap_err();
        assert!(refused.message.ends_with("another program has it open for writing"), "{refused}");
        assert!(agent.remove_layer(&path).is_err() && path.exists());
        drop(writer);
        agent.delete_disk(&path).await.unwrap();
        assert!(!path.exists());
    });
}

/// Creates VM `web` with one disk, and returns the note of a move of it.
async fn moving(host: &TestHost, agent: &Arc<Agent>) -> DiskMoveNote {
    let (old, new) = (host.path().join("web.raw"), host.path().join("web.qcow2"));
    std::fs::write(&old, [0; 4096]).unwrap();
    std::fs::write(&new, "new").unwrap();
    let disks = vec![Disk::new(&old, DiskFormat::Raw)];
    let spec = VmSpec { disks, ..host.spec("web") };
    agent.create(CreateVm::new(spec, false)).await.unwrap();
    let record = agent.store.read(&web()).unwrap().unwrap();
    let old = record.spec.disks[0].clone();
    let inode = std::fs::metadata(&new).unwrap().ino();
    let new = old.with_image(new, DiskFormat::Qcow2, Some(Vec::new()));
    DiskMoveNote { old, new, inode, committed: false }
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

#[test]
fn a_new_image_that_was_named_and_not_recorded_goes_with_the_next_agent() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let mut agent = opened(&host).await;
        let note = moving(&host, &agent).await;
        let other = DiskMoveNote { inode: note.inode + 1, ..note.clone() };
        let committed = DiskMoveNote { committed: true, ..note.clone() };
        for (note, stays) in [(other, true), (committed, true), (note, false)] {
            agent.store.save_disk_move(&web(), &note).unwrap();
            drop(agent);
            agent = opened(&host).await;
            assert_eq!(note.new.path.exists(), stays, "{note:?}");
            assert_eq!(agent.store.disk_move(&web()).unwrap(), None);
        }
    });
}

#[test]
fn an_exchange_that_qemu_refuses_is_undone_in_the_record_once_the_disk_accepts_it() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let note = moving(&host, &agent).await;
        let disk = || agent.store.read(&web()).unwrap().unwrap().spec.disks[0].clone();
        let mut record = agent.store.read(&web()).unwrap().unwrap();
        record.spec.disks[0] = note.new.clone();
        agent.save_record(&record).unwrap();
        agent.store.disk.faults.plan(0, Errno::NOSPC.raw_os_error(), true);
        assert!(!agent.record_old(&web(), &note));
        assert_eq!(disk(), note.new);
        agent.store.disk.faults.heal();
        for _ in 0..2 {
            assert!(agent.record_old(&web(), &note));
            assert_eq!(disk(), note.old);
        }
    });
}
