//! A VM that agents restart among themselves, on a host with an agent and QEMU; the test plays
//! another host on the datastore.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::path::PathBuf;

use godwit_api::{
    ChangeDrive, ChangeVm, Client, CreateVm, DriveChange, OwnStanding, OwnVm, StopVm, VmState,
};
use godwit_ha::Term;
use godwit_ha::heartbeat::Slot;
use godwit_ha::own::{End, OwnBlock};
use godwit_qemu::{Disk, DiskBus, DiskFormat, Uuid, VmSpec};
use serde_json::{Value, json};
use support::{TestHost, until};

const FORCE: StopVm = StopVm { force: true, grace_ms: None };
const UUID: Uuid = Uuid::from_u128(0x5eed);

fn spec(host: &TestHost) -> VmSpec {
    let path = host.path().join("web.raw");
    fs::write(&path, [0; 1 << 16]).unwrap();
    VmSpec {
        disks: vec![Disk::new(path, DiskFormat::Raw)],
        protect_by_agents: true,
        scsi_controller: true,
        uuid: Some(UUID),
        ..host.spec("web")
    }
}

fn folder(host: &TestHost) -> PathBuf {
    host.path().join(".godwit/protected").join(UUID.to_string())
}

fn change(is_own: bool) -> ChangeVm {
    let spec: Value = json!({ "protect_by_agents": is_own });
    ChangeVm { spec: serde_json::from_value(spec).unwrap(), ..ChangeVm::default() }
}

async fn set(client: &Client, is_own: bool) {
    client.change_vm("web", &change(is_own)).await.unwrap();
}

async fn own(client: &Client) -> Option<OwnVm> {
    client.ha().await.unwrap().own.into_iter().next()
}

async fn until_stands(client: &Client, term: u64, standing: OwnStanding) {
    until("the VM's term stands so", async || {
        own(client).await.is_some_and(|own| (own.term, own.standing) == (term, standing))
    })
    .await;
}

/// Creates and starts the VM. The agent does not know its datastore at once.
async fn create(client: &Client, host: &TestHost) {
    let request = CreateVm::new(spec(host), true);
    until("the VM starts", async || client.create_vm(&request).await.is_ok()).await;
    until_stands(client, 1, OwnStanding::Held).await;
    until("the record is there", async || folder(host).join("vm.json").exists()).await;
}

/// Claims a term as another host does.
fn claim_elsewhere(host: &TestHost, datastore: Uuid, term: u64) {
    let slot =
        Slot { cluster: UUID.into_bytes(), host: [9; 16], datastore: datastore.into_bytes() };
    let mut page = OwnBlock::claim(slot, Term(term), true).encode().to_vec();
    page.resize(4096, 0);
    let staged = folder(host).join(".new");
    fs::write(&staged, page).unwrap();
    fs::rename(staged, folder(host).join(format!("term-{term}"))).unwrap();
}

#[test]
fn a_vm_has_a_term_while_it_runs_and_ends_when_another_host_claims_it() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        create(&client, &host).await;
        client.stop_vm("web", FORCE).await.unwrap();
        until_stands(&client, 1, OwnStanding::Stopped).await;
        client.start_vm("web").await.unwrap();
        until_stands(&client, 2, OwnStanding::Held).await;

        let pid = client.vm("web").await.unwrap().pid;
        set(&client, false).await;
        until("the folder is gone", async || !folder(&host).exists()).await;
        until("the VM is watched no more", async || own(&client).await.is_none()).await;
        set(&client, true).await;
        until_stands(&client, 1, OwnStanding::Held).await;
        until("the record is there", async || folder(&host).join("vm.json").exists()).await;
        assert_eq!(client.vm("web").await.unwrap().pid, pid, "it ran all the time");

        let datastore = own(&client).await.unwrap().datastore;
        claim_elsewhere(&host, datastore, 2);
        until("the VM has left", async || client.vm("web").await.is_err()).await;
        assert!(host.qemus().is_empty());
        until_stands(&client, 2, OwnStanding::Watched).await;
        assert!(host.path().join("web.raw").exists());
    });
}

#[test]
fn a_vm_that_is_deleted_as_soon_as_it_has_stopped_is_started_by_nobody() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        create(&client, &host).await;
        client.stop_vm("web", FORCE).await.unwrap();
        client.delete_vm("web").await.unwrap();
        until("the folder is gone", async || !folder(&host).exists()).await;
        until("the VM is watched no more", async || own(&client).await.is_none()).await;
        assert!(client.vm("web").await.is_err(), "it was started again");
        assert!(host.qemus().is_empty());
        assert!(host.path().join("web.raw").exists());
    });
}

#[test]
fn a_vm_whose_creation_failed_is_started_by_nobody() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let broken = host.path().join("broken");
        fs::write(&broken, "no kernel").unwrap();
        let request = CreateVm::new(VmSpec { kernel: Some(broken), ..spec(&host) }, true);
        until("its term is claimed", async || {
            client.create_vm(&request).await.unwrap_err();
            folder(&host).exists()
        })
        .await;
        until("the folder is gone", async || !folder(&host).exists()).await;
        until("the VM is watched no more", async || own(&client).await.is_none()).await;
        assert!(client.vm("web").await.is_err(), "it was started again");
    });
}

#[test]
fn a_vm_is_stopped_for_all_hosts_when_the_answer_is_there() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        create(&client, &host).await;
        client.stop_vm("web", FORCE).await.unwrap();
        let page = fs::read(folder(&host).join("term-1")).unwrap();
        let block = OwnBlock::decode(&page[..512]).unwrap().unwrap();
        assert_eq!(block.end, End::Stopped);
    });
}

#[test]
fn the_protection_of_a_stopped_vm_does_not_end_where_another_host_may_run_it() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        create(&client, &host).await;
        let datastore = own(&client).await.unwrap().datastore;
        client.stop_vm("web", FORCE).await.unwrap();
        until_stands(&client, 1, OwnStanding::Stopped).await;
        claim_elsewhere(&host, datastore, 2);
        let ended = client.change_vm("web", &change(false)).await;
        assert!(ended.is_err(), "it could start here, too");
        until("the VM has left", async || client.vm("web").await.is_err()).await;
    });
}

#[test]
fn a_running_vm_gets_no_medium_that_other_hosts_lack() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        create(&client, &host).await;
        let outside = tempfile::tempdir().unwrap();
        let path = outside.path().join("data.raw");
        fs::write(&path, [0; 1 << 16]).unwrap();
        let disk = Disk { bus: DiskBus::Scsi, ..Disk::new(path, DiskFormat::Raw) };
        let change = DriveChange::Attach { disk: Box::new(disk) };
        let request = ChangeDrive { change, vm_dirs_only: false };
        let refused = client.change_drive("web", &request).await.unwrap_err();
        assert!(refused.to_string().contains("is not below"), "{refused}");
        assert_eq!(client.vm("web").await.unwrap().spec.disks.len(), 1);
    });
}

#[test]
fn what_an_ended_protection_has_left_behind_deletes_no_vm() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        create(&client, &host).await;
        let datastore = own(&client).await.unwrap().datastore;
        let record = fs::read(folder(&host).join("vm.json")).unwrap();
        client.stop_vm("web", FORCE).await.unwrap();
        until_stands(&client, 1, OwnStanding::Stopped).await;
        set(&client, false).await;
        until("the folder is gone", async || !folder(&host).exists()).await;
        until("the VM is watched no more", async || own(&client).await.is_none()).await;
        // As a host that was cut off leaves it.
        fs::create_dir(folder(&host)).unwrap();
        fs::write(folder(&host).join("vm.json"), record).unwrap();
        claim_elsewhere(&host, datastore, 4);
        until_stands(&client, 4, OwnStanding::Watched).await;
        set(&client, true).await;
        // What follows from a look is done before the next one.
        for term in 5..8 {
            claim_elsewhere(&host, datastore, term);
            until_stands(&client, term, OwnStanding::Watched).await;
        }
        assert!(client.vm("web").await.is_ok(), "its only definition was deleted");
    });
}

#[test]
fn a_restarted_agent_goes_on_and_after_a_boot_the_host_starts_its_vm() {
    let Some(host) = TestHost::new() else { return };
    let pid = host.with_agent(async |client| {
        create(&client, &host).await;
        client.vm("web").await.unwrap().pid
    });
    host.with_agent(async |client| {
        until_stands(&client, 1, OwnStanding::Held).await;
        assert_eq!(client.vm("web").await.unwrap().pid, pid);
    });
    // As after a boot: nothing says that the term is held.
    fs::remove_dir_all(host.path().join("run/own")).unwrap();
    host.with_agent(async |client| {
        until_stands(&client, 2, OwnStanding::Held).await;
        until("the VM runs again", async || {
            client.vm("web").await.is_ok_and(|vm| vm.state == VmState::Running)
        })
        .await;
        assert_ne!(client.vm("web").await.unwrap().pid, pid);
        assert_eq!(host.qemus().len(), 1);
    });
}
