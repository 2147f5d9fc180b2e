//! Images that moves have left, as destinations that lie, operators and VMs see them.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use godwit_api::{CreateDisk, CreateVm};
use godwit_migration::handover::{Role, Standing};
use godwit_qemu::{Disk, DiskFormat, VmSpec};
use godwit_types::{Incarnation, Ownership};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::agent::images::in_work;
use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::{TestHost, until};
use crate::store::{Desired, SavedVm};

const UUID: Uuid = Uuid::from_u128(0x5eed);
const OFFERED: Ownership = Ownership { incarnation: Incarnation::new(7), epoch: 4 };

/// Opens an agent that knows the datastore of its images; `None`: other hosts may have that.
async fn begin(host: &TestHost) -> Option<Arc<Agent>> {
    let agent = opened(host).await;
    let is_known = async || {
        agent.query_datastores();
        !agent.datastores.last(&agent.config.vm_dirs).is_empty()
    };
    until("the datastore is known", is_known).await;
    match agent.own_storage(&host.path().join("web.raw")) {
        Ok(_) => Some(agent),
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}

/// Writes an image and records that it stays.
fn keep(agent: &Agent, path: &Path) -> SavedKeptDisk {
    fs::write(path, [7; 4096]).unwrap();
    let left_by = LeftBy {
        vm: VmName::new("web").unwrap(),
        uuid: UUID,
        offered: OFFERED,
        to: "b".to_owned(),
        since_unix_s: 100,
        until_unix_s: Some(200),
    };
    let moved_to = "/elsewhere/web.raw".to_owned();
    let from = path.to_str().unwrap().to_owned();
    let disk = DiskReport { from, to: moved_to, ..DiskReport::default() };
    agent.keep_one(&left_by, &disk).unwrap()
}

fn raw(path: &Path) -> Vec<Disk> {
    vec![Disk::new(path, DiskFormat::Raw)]
}

#[test]
fn an_image_goes_after_its_time_and_the_word_of_its_destination() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let path = host.path().join("web.raw");
        let kept = keep(&agent, &path);
        assert_eq!(agent.look_here(&kept, false), Look::Stays(None));
        assert_eq!(agent.look_here(&kept, true), Look::Ask);
        let honest = There::honest(&kept);
        let owner = |ownership| Known::Has(Standing { role: Role::Owner, ownership });
        let with = |known| There { known, ..honest.clone() };
        let (older, other) = (
            Ownership { epoch: 3, ..OFFERED },
            Ownership { incarnation: Incarnation::new(8), ..OFFERED },
        );
        let own = agent.own_storage(&path).unwrap();
        let lies = [
            Err("host b cannot be asked: it lies".to_owned()),
            Ok(with(Known::Never)),
            Ok(with(Known::Gone(older))),
            Ok(with(Known::Gone(other))),
            Ok(with(owner(older))),
            Ok(with(owner(other))),
            // Not the ownership of the VM that it shows.
            Ok(with(owner(Ownership { epoch: 5, ..OFFERED }))),
            Ok(with(Known::Has(Standing { role: Role::Shadow, ownership: OFFERED }))),
            Ok(with(Known::Has(Standing { role: Role::HandingOver, ownership: OFFERED }))),
            Ok(There { vm: None, ..honest.clone() }),
            Ok(There { datastores: Vec::new(), ..honest.clone() }),
            Ok(There {
                datastores: vec![("/ssd".into(), Some(own.identity.clone()))],
                ..honest.clone()
            }),
        ];
        for lie in lies {
            let settled = agent.remove_if_moved(&kept, lie.clone());
            assert!(matches!(settled, Settled::Stays(Some(_))), "{lie:?}: {settled:?}");
            assert!(path.exists() && agent.kept_disks().disks.len() == 1, "{lie:?}");
        }
        assert_eq!(agent.remove_if_moved(&kept, Ok(honest)), Settled::Removed);
        assert!(!path.exists() && agent.kept_disks().disks.is_empty());
    });
}

#[test]
fn an_image_that_something_here_needs_stays() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let path = host.path().join("web.raw");
        let kept = keep(&agent, &path);
        let try_it = || agent.remove_if_moved(&kept, Ok(There::honest(&kept)));
        let stays = |why: &str| {
            let settled = try_it();
            assert!(matches!(settled, Settled::Stays(Some(_))), "{why}: {settled:?}");
            assert!(path.exists(), "{why}");
        };
        // A QEMU, also one that only reads.
        let locked = File::options().write(true).open(&path).unwrap();
        assert!(lock_image(&locked).unwrap());
        stays("a QEMU has it open");
        drop(locked);
        let layer = host.path().join("layer.qcow2");
        let create = CreateDisk {
            path: layer.clone(),
            size: None,
            format: None,
            base: Some(path.clone()),
            base_format: Some(DiskFormat::Raw),
            full_copy: false,
        };
        agent.create_disk(create).await.unwrap();
        stays("an image is a layer on it");
        fs::remove_file(&layer).unwrap();
        // A record that is not in the table, such as one that an agent could not adopt.
        let spec = VmSpec { disks: raw(&path), ..host.spec("db") };
        let spec = agent.resolve(spec).await.unwrap();
        let record = SavedVm::new(spec, Role::Owner, Desired::Stopped, OFFERED);
        agent.save_record(&record).unwrap();
        stays("a record names it");
        agent.store.remove(&record.spec.name).unwrap();
        // The operator was faster than the sweep that had found its time to be over.
        agent.keep_disk(&path).unwrap();
        assert_eq!(try_it(), Settled::Stays(None));
        assert!(path.exists());
    });
}

#[test]
fn a_record_ends_if_the_image_is_used_again_or_is_another_file() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let [used, replaced, gone] =
            ["used.raw", "replaced.raw", "gone.raw"].map(|name| host.path().join(name));
        for path in [&used, &replaced, &gone] {
            keep(&agent, path);
        }
        let spec = VmSpec { disks: raw(&used), ..host.spec("web") };
        agent.create(CreateVm::new(spec, false)).await.unwrap();
        fs::rename(&replaced, host.path().join("aside.raw")).unwrap();
        fs::write(&replaced, "new").unwrap();
        fs::remove_file(&gone).unwrap();
        // Another file system is there, or none is mounted.
        let mut unmounted = keep(&agent, &host.path().join("unmounted.raw"));
        fs::remove_file(&unmounted.path).unwrap();
        unmounted.datastore = Some("another".to_owned());
        agent.store.save_kept_disk(&unmounted).unwrap();
        // None of them is due: the records end all the same.
        agent.sweep_kept_disks(0).await;
        let left = agent.kept_disks().disks;
        assert!(left.len() == 1 && left[0].path == unmounted.path, "{left:?}");
        assert!(used.exists() && fs::read(&replaced).unwrap() == b"new");
    });
}

#[test]
fn an_image_that_a_vm_had_for_a_moment_stays() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let [path, other] = ["web.raw", "other.raw"].map(|name| host.path().join(name));
        let kept = keep(&agent, &path);
        keep(&agent, &other);
        let spec = VmSpec { disks: raw(&path), ..host.spec("db") };
        agent.create(CreateVm::new(spec, false)).await.unwrap();
        agent.delete(&VmName::new("db").unwrap(), false).await.unwrap();
        // Nothing has looked at the images meanwhile.
        assert_eq!(agent.remove_if_moved(&kept, Ok(There::honest(&kept))), Settled::Stays(None));
        let left = agent.kept_disks().disks;
        assert!(path.exists() && left.len() == 1 && left[0].path == other, "{left:?}");
    });
}

#[test]
fn a_vm_does_not_come_back_to_an_image_that_it_has_left() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let path = host.path().join("web.raw");
        let kept = keep(&agent, &path);
        let spec = VmSpec { disks: raw(&path), uuid: Some(UUID), ..host.spec("web") };
        let spec = agent.resolve(spec).await.unwrap();
        let later = Ownership { epoch: 6, ..OFFERED };
        let refused = agent.prepare_incoming(spec.clone(), later, "b", false, None).await;
        let refused = refused.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Preflight, "{refused}");
        assert!(refused.message.contains("what an earlier move has left"), "{refused}");
        assert!(agent.vm_info("web").is_err());
        // Not what it has left: of another VM, and another file.
        let of_uuid = |uuid| agent.refuse_left("web", uuid, &[path.as_path()]);
        of_uuid(UUID).unwrap_err();
        of_uuid(Uuid::from_u128(9)).unwrap();
        fs::rename(&path, host.path().join("aside.raw")).unwrap();
        fs::write(&path, [7; 4096]).unwrap();
        of_uuid(UUID).unwrap();
        // One that is just being removed, or written for another VM.
        agent.store.remove_kept_disk(kept.id).unwrap();
        let claimed = in_work::claim(&path.canonicalize().unwrap()).unwrap();
        let refused = agent.prepare_incoming(spec.clone(), later, "b", false, None).await;
        let refused = refused.map(drop).unwrap_err();
        assert!(refused.message.contains("being written or deleted"), "{refused}");
        claimed.reserve_for("web");
        agent.refuse_claimed(&spec).unwrap();
    });
}

#[test]
fn a_destination_that_does_not_answer_keeps_images_and_is_named() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let path: PathBuf = host.path().join("web.raw");
        keep(&agent, &path);
        agent.sweep_kept_disks(199).await;
        let shown = || agent.kept_disks().disks.remove(0);
        assert_eq!((shown().waits, shown().until_unix_ms), (None, Some(200_000)));
        agent.sweep_kept_disks(200).await;
        let why = shown().waits.unwrap();
        assert!(why.starts_with("host b cannot be asked: "), "{why}");
        let refused = agent.remove_kept_disk(&path).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.message.contains("host b cannot be asked"), "{refused}");
        assert!(path.exists());
        // It stays now, whatever the time.
        let kept = agent.keep_disk(&path).unwrap();
        assert_eq!((kept.until_unix_ms, kept.waits), (None, None));
        agent.sweep_kept_disks(u64::MAX).await;
        assert_eq!((shown().waits, shown().until_unix_ms), (None, None));
        // A later move of the VM replaces the record.
        assert_eq!(keep(&agent, &path).until_unix_s, Some(200));
        assert_eq!(agent.kept_disks().disks.len(), 1);
        let unknown = Path::new("/elsewhere/web.raw");
        for refused in [
            agent.keep_disk(unknown).unwrap_err(),
            agent.remove_kept_disk(unknown).await.unwrap_err(),
        ] {
            assert_eq!(refused.code, ErrorCode::NotFound, "{refused}");
        }
    });
}

/// Answers of host `b`, by path.
type Answers = Arc<Mutex<BTreeMap<&'static str, String>>>;

/// Answers each request to host `b` with the text for its path; others get an error.
async fn answer(listener: tokio::net::TcpListener, answers: Answers) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => break,
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let path = head.split([' ', '?']).nth(1).unwrap_or_default();
        let found = answers.lock().get(path).cloned();
        let (status, text) =
            found.map_or(("500 Internal Server Error", String::new()), |text| ("200 OK", text));
        let length = text.len();
        let close = "connection: close";
        let reply =
            format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{close}\r\n\r\n{text}");
        let _ = stream.write_all(reply.as_bytes()).await;
    }
}

/// Returns the answers of a host `b` whose VM has its new disk.
async fn honest_answers(host: &TestHost, agent: &Arc<Agent>) -> BTreeMap<&'static str, String> {
    let spec = VmSpec { uuid: Some(UUID), ..host.spec("web") };
    agent.create(CreateVm::new(spec, false)).await.unwrap();
    let mut vm = agent.vm_info("web").unwrap();
    agent.delete(&VmName::new("web").unwrap(), false).await.unwrap();
    (vm.incarnation, vm.epoch) = (OFFERED.incarnation, OFFERED.epoch);
    vm.spec.disks = raw(Path::new("/elsewhere/web.raw"));
    let mut there = agent.host_info().await.unwrap();
    there.name = "b".to_owned();
    let store = DatastoreInfo { identity: Some("theirs".to_owned()), ..DatastoreInfo::default() };
    there.datastores = BTreeMap::from([("/elsewhere".into(), store)]);
    let known = Known::Has(Standing { role: Role::Owner, ownership: OFFERED });
    BTreeMap::from([
        ("/v1/hand-overs/web", serde_json::to_string(&known).unwrap()),
        ("/v1/host", serde_json::to_string(&there).unwrap()),
        ("/v1/vms/web", serde_json::to_string(&vm).unwrap()),
    ])
}

#[test]
fn a_destination_that_lies_on_the_wire_removes_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let Some(agent) = begin(&host).await else { return };
        let honest = honest_answers(&host, &agent).await;
        let path = host.path().join("web.raw");
        keep(&agent, &path);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:9").await.unwrap();
        let answers: Answers = Arc::default();
        tokio::spawn(answer(listener, Arc::clone(&answers)));
        let elsewhere = honest["/v1/host"].replace("\"name\":\"b\"", "\"name\":\"c\"");
        assert_ne!(elsewhere, honest["/v1/host"]);
        let other = honest["/v1/vms/web"].replace("/elsewhere/web.raw", "/elsewhere/db.raw");
        assert_ne!(other, honest["/v1/vms/web"]);
        for (path_there, lie) in [
            ("/v1/hand-overs/web", "{".to_owned()),
            ("/v1/hand-overs/web", "\"never\"".to_owned()),
            ("/v1/hand-overs/web", "x".repeat(2 << 20)),
            ("/v1/host", "{}".to_owned()),
            ("/v1/host", elsewhere),
            ("/v1/vms/web", "null".to_owned()),
            ("/v1/vms/web", other),
        ] {
            let mut lies = honest.clone();
            lies.insert(path_there, lie);
            *answers.lock() = lies;
            agent.sweep_kept_disks(200).await;
            let waits = agent.kept_disks().disks.remove(0).waits.unwrap();
            assert!(waits.chars().count() <= MOST_REASON_CHARS, "{waits}");
            assert!(path.exists(), "{path_there}: {waits}");
        }
        *answers.lock() = honest;
        agent.sweep_kept_disks(199).await;
        assert!(path.exists());
        agent.sweep_kept_disks(200).await;
        assert!(!path.exists() && agent.kept_disks().disks.is_empty());
    });
}
