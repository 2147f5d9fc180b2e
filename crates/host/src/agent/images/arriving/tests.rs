//! Transfers of disks, as their source, this host's operator and the next agent see them.

mod hung;

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{
    ApiError, ArrivingBase, ArrivingDisk, ArrivingDisks, CreateVm, ErrorCode, IncomingRequest,
    MOST_TRAVELLING_DISKS, ResizeDisk,
};
use godwit_qemu::{ByteSize, Disk, DiskFormat, RbdImage, Uuid, VmName, VmSpec};
use godwit_types::{Incarnation, Lane, Ownership};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::agent::images::in_work::is_being_made;
use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::TestHost;
use crate::disk_arrivals::DiskArrival;
use crate::file_digest::file_digest;
use crate::store::{Desired, Role, SavedArrival, SavedArrivingDisk, SavedVm};

const UUID: Uuid = Uuid::from_u128(0x5eed);
const MIB: u64 = 1 << 20;

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn id(number: u8) -> String {
    format!("{number:032x}")
}

/// Returns the directory for the images.
fn store(host: &TestHost) -> PathBuf {
    let dir = host.path().join("store");
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn files(host: &TestHost) -> Vec<String> {
    let entries = fs::read_dir(store(host)).unwrap().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn disk(name: &str, format: DiskFormat) -> ArrivingDisk {
    let path = Path::new("/srv/source").join(name);
    let (virtual_bytes, used_bytes) = (MIB, 4096);
    ArrivingDisk { path, format, virtual_bytes, used_bytes, base: Vec::new(), onto: None }
}

fn request(host: &TestHost, disks: Vec<ArrivingDisk>) -> ArrivingDisks {
    let (transfer, from, to) = (id(7), "b".to_owned(), Some(store(host)));
    ArrivingDisks { transfer, vm: web(), uuid: UUID, from, to, disks }
}

/// Prepares a transfer. Returns also whether it is new.
pub(super) async fn prepare(
    agent: &Arc<Agent>,
    request: &ArrivingDisks,
) -> Result<(Arc<DiskArrival>, bool), ApiError> {
    let prepared = agent.prepare_arriving_disks(request).await?;
    Ok((prepared.arrival, prepared.is_new))
}

#[test]
fn images_are_for_their_vm_alone_found_by_the_next_agent_and_removed_by_their_files() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let dir = store(&host);
        fs::write(dir.join("web.raw"), "another VM's").unwrap();
        let disks = vec![disk("web.raw", DiskFormat::Raw), disk("data", DiskFormat::Qcow2)];
        let request = request(&host, disks);
        let mut agent = opened(&host).await;
        let checked = agent.check_arriving_disks(&request).await.unwrap();
        assert_eq!(files(&host), ["web.raw"]);
        let (arrival, is_new) = prepare(&agent, &request).await.unwrap();
        assert!(is_new);
        let paths: Vec<_> = arrival.record.disks.iter().map(|disk| disk.path.clone()).collect();
        assert_eq!(paths, [dir.join("web-1.raw"), dir.join("data")]);
        assert_eq!(checked.iter().map(|image| image.path.clone()).collect::<Vec<_>>(), paths);
        assert_eq!(agent.disk(&paths[0]).unwrap().virtual_bytes, MIB);
        arrival.present.lock().mark(vec![(0, 0, MIB / 2)]);
        drop(arrival);
        for _ in 0..2 {
            let resize = ResizeDisk { path: paths[1].clone(), size: ByteSize::from_mib(2) };
            let spec =
                VmSpec { disks: vec![Disk::new(&paths[0], DiskFormat::Raw)], ..host.spec("db") };
            for refused in [
                agent.delete_disk(&paths[0]).await.unwrap_err(),
                agent.resize_disk(resize).await.unwrap_err(),
                agent.create(CreateVm::new(spec, false)).await.unwrap_err(),
            ] {
                assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
            }
            drop(agent);
            agent = opened(&host).await;
        }
        let (arrival, is_new) = prepare(&agent, &request).await.unwrap();
        assert!(!is_new);
        assert_eq!(arrival.present.lock().runs(), [vec![(0, MIB / 2)], vec![]]);
        // An image is gone: so is the transfer. Another file of its name stays.
        drop((arrival, agent));
        fs::remove_file(&paths[1]).unwrap();
        fs::write(&paths[1], "new").unwrap();
        agent = opened(&host).await;
        assert!(agent.arrivals.all().is_empty() && agent.store.arrivals().is_empty());
        assert_eq!(files(&host), ["data", "web.raw"]);
    });
}

#[test]
fn backing_files_must_be_the_same_byte_by_byte() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let base = store(&host).join("base.raw");
        fs::write(&base, vec![7; 8192]).unwrap();
        let (file_bytes, blake3) = file_digest(&File::open(&base).unwrap()).unwrap();
        // The source has it elsewhere.
        let path = PathBuf::from("/srv/source/base.raw");
        let same = ArrivingBase { path, format: DiskFormat::Raw, file_bytes, blake3 };
        let over = |base: &ArrivingBase| {
            let overlay = disk("web.qcow2", DiskFormat::Qcow2);
            request(&host, vec![ArrivingDisk { base: vec![base.clone()], ..overlay }])
        };
        let refused = async |base: &ArrivingBase, why: &str| {
            let error = prepare(&agent, &over(base)).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::Preflight, "{error}");
            assert!(error.message.contains(why), "{error}");
            assert_eq!(files(&host), ["base.raw"]);
        };
        let longer = ArrivingBase { file_bytes: 8191, ..same.clone() };
        refused(&longer, "it has 8192 bytes, and 8191 at the source").await;
        let other = ArrivingBase { blake3: "0".repeat(64), ..same.clone() };
        refused(&other, "its content differs").await;
        let missing = ArrivingBase { path: "/srv/source/none".into(), ..same.clone() };
        refused(&missing, "none").await;
        let disks = vec![Disk::new(&base, DiskFormat::Raw)];
        let spec = VmSpec { disks, nics: Vec::new(), ..host.spec("db") };
        agent.create(CreateVm::new(spec, false)).await.unwrap();
        refused(&same, "VM \"db\" writes it").await;
        agent.delete(&VmName::new("db").unwrap(), false).await.unwrap();
        let (arrival, _) = prepare(&agent, &over(&same)).await.unwrap();
        let image = &arrival.record.disks[0];
        assert_eq!(image.backing[0].path, base.canonicalize().unwrap());
        let named = agent.disk(&image.path).unwrap().backing;
        assert_eq!(named.as_deref(), image.backing[0].path.to_str());
        // It is compared again before the VM arrives.
        agent.compare_bases_again(&arrival).unwrap();
        fs::write(&base, vec![8; 8192]).unwrap();
        let why = agent.compare_bases_again(&arrival).unwrap_err();
        assert!(why.contains("its content differs"), "{why}");
        fs::write(&base, vec![7; 8192]).unwrap();
        // It is read until the VM is here.
        assert_eq!(agent.delete_disk(&base).await.unwrap_err().code, ErrorCode::Busy);
        agent.remove_disk_arrival(&arrival).unwrap();
        drop(arrival);
        agent.delete_disk(&base).await.unwrap();
    });
}

#[test]
fn a_transfer_is_of_one_host_and_a_vm_has_one() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let first = request(&host, vec![disk("web.raw", DiskFormat::Raw)]);
        let (arrival, _) = prepare(&agent, &first).await.unwrap();
        let inode = arrival.record.disks[0].inode;
        let of_c = ArrivingDisks { from: "c".to_owned(), ..first.clone() };
        let of_db = ArrivingDisks { vm: VmName::new("db").unwrap(), ..first.clone() };
        for other in [&of_c, &of_db] {
            let refused = prepare(&agent, other).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest, "{refused}");
        }
        let (again, is_new) = prepare(&agent, &first).await.unwrap();
        assert!(!is_new && again.record.disks[0].inode == inode);
        drop((arrival, again));
        // The disk has grown meanwhile, or the source has begun anew: other images.
        let mut grown = first.clone();
        grown.disks[0].virtual_bytes = 2 * MIB;
        let second = ArrivingDisks { transfer: id(8), ..first.clone() };
        for other in [&grown, &second, &ArrivingDisks { transfer: id(9), ..of_c }] {
            let (arrival, is_new) = prepare(&agent, other).await.unwrap();
            assert!(is_new && arrival.id.to_string() == other.transfer);
            assert_eq!((files(&host), agent.arrivals.all().len()), (vec!["web.raw".into()], 1));
        }
        // The source is connected: another host waits.
        let (arrival, _) = prepare(&agent, &second).await.unwrap();
        let (stream, _listener) = stream();
        arrival.connect().admit(&stream).unwrap();
        let other = ArrivingDisks { transfer: id(9), from: "c".to_owned(), ..first.clone() };
        let refused = prepare(&agent, &other).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
    });
}

#[test]
fn the_disks_that_arrive_at_once_have_a_bound() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let of = |vm: u8, count: usize| {
            let disks = (0..count).map(|n| disk(&format!("{vm}-{n}.raw"), DiskFormat::Raw));
            ArrivingDisks {
                transfer: id(vm),
                vm: VmName::new(format!("vm{vm}")).unwrap(),
                uuid: Uuid::from_u128(vm.into()),
                ..request(&host, disks.collect())
            }
        };
        let mut open = Vec::new();
        for vm in 1..=2 {
            let (arrival, _) = prepare(&agent, &of(vm, MOST_TRAVELLING_DISKS)).await.unwrap();
            open.push(arrival.connect());
        }
        let refused = prepare(&agent, &of(3, 1)).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        open[0].close();
        prepare(&agent, &of(3, 1)).await.unwrap();
    });
}

fn stream() -> (godwit_lanes::Stream, TcpListener) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let lane = Lane { from: None, to: listener.local_addr().unwrap() };
    (godwit_lanes::connect(lane, Duration::from_secs(5)).unwrap(), listener)
}

#[test]
fn what_cannot_arrive_leaves_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let good = request(&host, vec![disk("web.raw", DiskFormat::Raw)]);
        let with = |disk: ArrivingDisk| ArrivingDisks { disks: vec![disk], ..good.clone() };
        let raw = &good.disks[0];
        let base = ArrivingBase {
            path: "/srv/base".into(),
            format: DiskFormat::Raw,
            file_bytes: 1,
            blake3: String::new(),
        };
        let huge = 1 << 45;
        let (bad, none) = (ErrorCode::InvalidRequest, ErrorCode::NotFound);
        for (request, code) in [
            (ArrivingDisks { transfer: "passwd".to_owned(), ..good.clone() }, bad),
            (ArrivingDisks { transfer: id(0xab).to_uppercase(), ..good.clone() }, bad),
            (ArrivingDisks { disks: Vec::new(), ..good.clone() }, bad),
            (ArrivingDisks { disks: vec![raw.clone(); 2], ..good.clone() }, bad),
            (ArrivingDisks { to: Some("/etc".into()), ..good.clone() }, bad),
            (ArrivingDisks { to: Some(store(&host).join("../..")), ..good.clone() }, bad),
            (ArrivingDisks { to: Some(store(&host).join("none")), ..good.clone() }, none),
            (ArrivingDisks { to: None, ..good.clone() }, bad),
            (ArrivingDisks { to: Some("rbd:vms".into()), ..good.clone() }, none),
            (ArrivingDisks { to: Some("rbd:vms/a/b".into()), ..good.clone() }, bad),
            (
                ArrivingDisks {
                    to: Some("rbd:vms".into()),
                    ..with(disk("web.qcow2", DiskFormat::Qcow2))
                },
                bad,
            ),
            (with(disk(".hidden", DiskFormat::Raw)), bad),
            (with(ArrivingDisk { virtual_bytes: 0, ..raw.clone() }), bad),
            (with(ArrivingDisk { virtual_bytes: 513, ..raw.clone() }), bad),
            (with(ArrivingDisk { base: vec![base], ..raw.clone() }), bad),
            (
                with(ArrivingDisk { virtual_bytes: huge, used_bytes: huge, ..raw.clone() }),
                ErrorCode::HostFailed,
            ),
        ] {
            let refused = prepare(&agent, &request).await.unwrap_err();
            assert_eq!(refused.code, code, "{refused}");
            assert!(agent.check_arriving_disks(&request).await.is_err());
        }
        let many = (0..=MOST_TRAVELLING_DISKS).map(|n| disk(&n.to_string(), DiskFormat::Raw));
        let many = ArrivingDisks { disks: many.collect(), ..good.clone() };
        assert_eq!(prepare(&agent, &many).await.unwrap_err().code, bad);
        agent.create(CreateVm::new(host.spec("web"), false)).await.unwrap();
        let taken = prepare(&agent, &good).await.unwrap_err();
        assert_eq!(taken.code, ErrorCode::AlreadyExists, "{taken}");
        agent.delete(&web(), false).await.unwrap();
        let mut failed = 0;
        for step in 0.. {
            assert!(files(&host).is_empty() && agent.store.arrivals().is_empty());
            agent.store.disk.faults.plan(step, Errno::NOSPC.raw_os_error(), true);
            let prepared = prepare(&agent, &good).await;
            agent.store.disk.faults.heal();
            if prepared.is_ok() {
                break;
            }
            failed += 1;
        }
        assert!(failed > 2, "{failed} steps");
        assert_eq!(files(&host), ["web.raw"]);
    });
}

#[test]
fn an_arriving_vm_has_the_images_of_its_own_transfer() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let disks = vec![disk("web.raw", DiskFormat::Raw), disk("data.qcow2", DiskFormat::Qcow2)];
        let (arrival, _) = prepare(&agent, &request(&host, disks)).await.unwrap();
        let images: Vec<_> = arrival.record.disks.iter().map(|disk| disk.path.clone()).collect();
        let disks =
            vec![Disk::new(&images[0], DiskFormat::Raw), Disk::new(&images[1], DiskFormat::Qcow2)];
        let spec = VmSpec { uuid: Some(UUID), disks, ..host.spec("web") };
        let mut spec = serde_json::to_value(agent.resolve(spec).await.unwrap()).unwrap();
        spec["disks"][1]["readonly"] = json!(false);
        spec["disks"][1]["backing"] = json!([]);
        let asked = |change: Option<(&str, Value)>| {
            let mut incoming = json!({
                "spec": spec, "epoch": 2, "from": "b", "qemu_version": "7.2.0",
                "engine": "godwit", "disks": id(7),
            });
            if let Some((at, value)) = change {
                *incoming.pointer_mut(at).unwrap() = value;
            }
            let incoming: IncomingRequest = serde_json::from_value(incoming).unwrap();
            agent.disks_of_arriving(&incoming)
        };
        let (stream, _listener) = stream();
        let unconnected = asked(None).unwrap_err();
        assert!(unconnected.message.contains("are not connected"), "{unconnected}");
        assert_eq!(unconnected.code, ErrorCode::Busy, "its source waits, and asks again");
        let streams = arrival.connect();
        let number = streams.admit(&stream).unwrap();
        assert!(Arc::ptr_eq(&asked(None).unwrap().unwrap(), &arrival));
        for (why, at, value) in [
            ("is being written for another VM", "/disks", Value::Null),
            ("do not arrive here", "/disks", json!(id(8))),
            ("another VM's", "/from", json!("c")),
            ("another VM's", "/spec/name", json!("db")),
            ("the godwit engine alone", "/engine", json!("qemu")),
            ("is not one of its disks", "/spec/disks/0/path", json!("/srv/data.qcow2")),
            ("is not one of its disks", "/spec/disks/0/format", json!("qcow2")),
            ("is not one of its disks", "/spec/disks/1/readonly", json!(true)),
            (
                "is not one of its disks",
                "/spec/disks/1/backing",
                json!([{"path": "/etc/passwd", "format": "raw"}]),
            ),
        ] {
            let refused = asked(Some((at, value))).unwrap_err();
            assert!(refused.message.contains(why), "{why}: {refused}");
        }
        // Everything has arrived: the record is gone, and does not come back.
        assert!(streams.note_end(number, Ok(1)));
        agent.take_disks(&arrival).unwrap();
        agent.note_seen(&arrival);
        assert!(agent.store.arrivals().is_empty());
        streams.close();
        // The VM does not come.
        agent.clone().drop_disks(Arc::clone(&arrival)).await;
        assert!(files(&host).is_empty() && agent.arrivals.all().is_empty());
    });
}

#[test]
fn a_source_that_does_not_return_is_given_up_and_the_images_of_a_vm_stay() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let mut agent = opened(&host).await;
        let request = request(&host, vec![disk("web.raw", DiskFormat::Raw)]);
        for has_vm in [false, true] {
            let (arrival, _) = prepare(&agent, &request).await.unwrap();
            // The agent ends, in one case when the guest has just begun to run.
            if has_vm {
                let disks = vec![Disk::new(&arrival.record.disks[0].path, DiskFormat::Raw)];
                let spec = VmSpec { uuid: Some(UUID), disks, ..host.spec("web") };
                let spec = agent.resolve(spec).await.unwrap();
                let ownership = Ownership { incarnation: Incarnation::new(7), epoch: 2 };
                let record = SavedVm::new(spec, Role::Owner, Desired::Stopped, ownership);
                agent.store.save(&record).unwrap();
            }
            drop((arrival, agent));
            agent = opened(&host).await;
            if !has_vm {
                // The source may return, however long ago it was seen.
                assert_eq!(agent.arrivals.all().len(), 1);
                agent.give_up_unseen(Duration::ZERO);
            }
            assert!(agent.arrivals.all().is_empty() && agent.store.arrivals().is_empty());
            assert_eq!(files(&host).len(), usize::from(has_vm));
        }
        // It is an image as any now.
        agent.delete(&web(), false).await.unwrap();
        agent.delete_disk(&store(&host).join("web.raw")).await.unwrap();
    });
}

/// Gives the host a pool in a cluster that does not answer.
fn give_pool(host: &mut TestHost) {
    let key = host.path().join("key");
    fs::write(&key, "AQBhR2dlAAAAABAAm1Yv8pIB3tG0H0Qa4V9zAg==").unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let cluster = json!({
        "pools": ["vms"], "monitors": ["127.0.0.1:9"], "user": "godwit", "key": key,
        "fsid": Uuid::from_u128(0x1234),
    });
    host.config.ceph = vec![serde_json::from_value(cluster).unwrap()];
}

fn in_pool(path: &str, inode: u64) -> SavedArrivingDisk {
    SavedArrivingDisk {
        source: "/srv/source/web.raw".into(),
        path: path.into(),
        format: DiskFormat::Raw,
        virtual_bytes: MIB,
        inode,
        born_unix_ns: 0,
        backing: Vec::new(),
        unnamed: Some(Uuid::from_u128(8)),
        device: None,
        thin: None,
    }
}

#[test]
fn a_transfer_into_a_pool_is_found_again_if_its_images_have_numbers() {
    let Some(mut host) = TestHost::new() else { return };
    give_pool(&mut host);
    host.run(async {
        let agent = opened(&host).await;
        let record = |number: u8, disk| {
            let id = id(number).parse().unwrap();
            SavedArrival::new(id, (web(), UUID), "b".to_owned(), 5, vec![disk])
        };
        for record in [
            record(7, in_pool("rbd:vms/web", 7)),
            // The agent ended while it made the image.
            record(8, in_pool("rbd:vms/web-1", 0)),
            // The host has that pool no longer.
            record(9, in_pool("rbd:other/web", 9)),
        ] {
            agent.store.save_arrival(&record).unwrap();
        }
        drop(agent);
        let agent = opened(&host).await;
        let found = agent.arrivals.all();
        let [arrival] = &found[..] else { panic!("{found:?}") };
        assert_eq!(arrival.images, [PathBuf::from("rbd:vms/web")]);
        let mut known: Vec<_> =
            agent.store.arrivals().into_iter().map(|(_, record)| record.transfer).collect();
        known.sort();
        assert_eq!(known, [id(7), id(9)]);
        // No other VM gets the image meanwhile.
        assert!(is_being_made(&arrival.images[0], "db"));
        assert!(!is_being_made(&arrival.images[0], "web"));
        assert_eq!(agent.cluster_of_image(&arrival.images[0]), Some(Uuid::from_u128(0x1234)));
        assert_eq!(agent.cluster_of_image(Path::new("/srv/web.raw")), None);
        assert_eq!(agent.cluster_of_image(Path::new("rbd:other/web")), None);
    });
}

#[test]
fn a_transfer_stays_while_its_cluster_does_not_answer() {
    let Some(mut host) = TestHost::new() else { return };
    give_pool(&mut host);
    host.run(async {
        let agent = opened(&host).await;
        let record = SavedArrival::new(
            id(7).parse().unwrap(),
            (web(), UUID),
            "b".to_owned(),
            5,
            vec![in_pool("rbd:vms/web", 7)],
        );
        // Without `rbd`, or with one that reaches no cluster. The room is unknown, too.
        let refused = agent.has_pool_images(&record).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        assert!(!refused.remedy.is_empty());
        let pooled = agent.pooled(RbdImage::of(&record.disks[0].path).unwrap()).unwrap();
        assert_eq!(pooled.lacks_room(u64::MAX).await, None);
        // While it is made, it has a name that no operator can have given to another.
        let unnamed = pooled.unnamed(Uuid::from_u128(7));
        let wanted = "rbd:vms/godwit-new-00000000-0000-0000-0000-000000000007";
        assert_eq!((&*unnamed.path, unnamed.image.to_string()), (Path::new(wanted), wanted.into()));
    });
}
