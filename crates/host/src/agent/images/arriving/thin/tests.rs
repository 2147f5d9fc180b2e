//! Thin pools as targets of disks that arrive. A script stands in for LVM: its volumes are loop
//! devices over sparse files.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use godwit_api::{ArrivingDisk, ArrivingDisks, CreateVm, ErrorCode, OntoDevice};
use godwit_qemu::{Disk, DiskFormat, ThinPool, Uuid, VmName, VmSpec};

use super::lacking;
use crate::agent::Agent;
use crate::agent::images::arriving::tests::prepare;
use crate::agent::images::in_work::{self, is_being_made};
use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::{TestHost, until};
use crate::block_devices::bytes_of;
use crate::block_devices::tests::LoopDevice;
use crate::disk_arrivals::OpenedContent;
use crate::store::{SavedArrival, SavedArrivingDisk, SavedThinVolume};
use crate::thin_pools::{ARRIVING_TAG, Lvm, PoolState};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 5 * MIB;
/// Size of a stand-in's volume: LVM's default extent has 4 MiB.
const VOLUME_BYTES: u64 = 8 * MIB;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Stands in for the program `lvm`. `STATE` has a directory for each volume, `GROUP` is the name of
/// the volume group. A file `fail-VERB` makes a verb fail.
const SCRIPT: &str = r#"#!/bin/sh
exec 9>STATE/lock
flock 9
refuse() { echo "  $1" >&2; exit 5; }
[ ! -e "STATE/fail-$1" ] || refuse "$1 fails"
find() { volume="STATE/volumes/${1#GROUP/}"; [ -d "$volume" ] || refuse "Failed to find $1"; }
case "$1" in
lvs)
  printf '{"report":[{"lv":[{"vg_uuid":"G-1","lv_name":"thin0","lv_uuid":"P-1"'
  printf ',"lv_attr":"%s","lv_size":"1073741824","pool_lv":""' "$(cat STATE/attributes)"
  printf ',"lv_tags":"","data_percent":"%s","metadata_percent":"10.00"}' "$(cat STATE/percent)"
  for volume in STATE/volumes/*; do
    [ -d "$volume" ] || continue
    printf ',{"vg_uuid":"G-1","lv_name":"%s","lv_uuid":"%s"' \
      "${volume##*/}" "$(cat "$volume/uuid")"
    printf ',"lv_attr":"Vwi-a-tz--","lv_size":"%s","pool_lv":"thin0"' "$(cat "$volume/bytes")"
    printf ',"lv_tags":"%s","data_percent":"","metadata_percent":""}' "$(cat "$volume/tag")"
  done
  printf ']}]}\n' ;;
lvcreate)
  [ "$*" = "lvcreate --yes --wipesignatures n --addtag $6 --virtualsize $8 --name ${10} --thin \
GROUP/thin0" ] || refuse "unknown arguments: $*"
  volume="STATE/volumes/${10}"
  [ ! -e "$volume" ] || refuse "Logical Volume \"${10}\" already exists"
  mkdir "$volume"
  bytes=$(( (${8%b} + 4194303) / 4194304 * 4194304 ))
  echo "$bytes" > "$volume/bytes"
  echo "$6" > "$volume/tag"
  count=$(( $(cat STATE/count) + 1 ))
  echo "$count" > STATE/count
  echo "V-$count" > "$volume/uuid"
  truncate --size "$bytes" "$volume/content"
  losetup --find --show "$volume/content" > "$volume/device" || refuse "no loop device"
  ln -s "$(cat "$volume/device")" "/dev/GROUP/${10}" ;;
lvchange)
  find "$6"
  [ "$4 $5" = "--select lv_uuid=\"$(cat "$volume/uuid")\"" ] || exit 0
  case "$2" in
  --addtag) echo "$3" > "$volume/tag" ;;
  --deltag) : > "$volume/tag" ;;
  esac ;;
lvremove)
  find "$5"
  selected="lv_uuid=\"$(cat "$volume/uuid")\" && lv_tags={\"$(cat "$volume/tag")\"}"
  [ "$2 $3 $4" = "--yes --select $selected" ] || exit 0
  losetup --detach "$(cat "$volume/device")"
  rm -r "$volume" "/dev/GROUP/${volume##*/}" ;;
*) refuse "unknown verb $1" ;;
esac
"#;

/// A host with a thin pool, removed when it is dropped.
struct ThinHost {
    host: TestHost,
    pool: ThinPool,
    state: PathBuf,
}

impl ThinHost {
    fn new() -> Option<ThinHost> {
        // Without loop devices there are no volumes.
        LoopDevice::new(MIB)?;
        let mut host = TestHost::new()?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let group = format!("gwthin{}-{count}", std::process::id());
        let state = host.path().join("lvm");
        fs::create_dir_all(state.join("volumes")).unwrap();
        fs::write(state.join("count"), "0").unwrap();
        fs::write(state.join("attributes"), "twi-aotz--").unwrap();
        fs::write(state.join("percent"), "50.00").unwrap();
        let program = state.join("program");
        let script = SCRIPT.replace("GROUP", &group);
        fs::write(&program, script.replace("STATE", &state.display().to_string())).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let devices = Path::new("/dev").join(&group);
        fs::create_dir(&devices).unwrap();
        let pool = ThinPool::of(Path::new(&format!("lvm:{group}/thin0"))).unwrap();
        host.config.lvm = program;
        host.config.block_devices = vec![devices];
        host.config.thin_pools = vec![pool.clone()];
        Some(ThinHost { host, pool, state })
    }

    fn request(&self, names: &[&str]) -> ArrivingDisks {
        let disk = |name: &&str| ArrivingDisk {
            path: Path::new("/srv/source").join(name),
            format: DiskFormat::Raw,
            virtual_bytes: DISK_BYTES,
            used_bytes: 4096,
            base: Vec::new(),
            onto: None,
        };
        ArrivingDisks {
            transfer: format!("{:032x}", 7),
            vm: web(),
            uuid: Uuid::from_u128(0x5eed),
            from: "b".to_owned(),
            to: Some(self.pool.place()),
            disks: names.iter().map(disk).collect(),
        }
    }

    /// Returns the volumes, each with its tag.
    fn volumes(&self) -> Vec<(String, String)> {
        let entries = fs::read_dir(self.state.join("volumes")).unwrap().flatten();
        let volume = |entry: fs::DirEntry| {
            let tag = fs::read_to_string(entry.path().join("tag")).unwrap_or_default();
            (entry.file_name().to_string_lossy().into_owned(), tag.trim().to_owned())
        };
        let mut all: Vec<_> = entries.map(volume).collect();
        all.sort();
        all
    }

    fn lvm(&self) -> Lvm {
        Lvm::new(&self.host.config.lvm)
    }

    fn fail(&self, verb: &str, fails: bool) {
        let file = self.state.join(format!("fail-{verb}"));
        match fails {
            true => fs::write(file, "").unwrap(),
            false => fs::remove_file(file).unwrap(),
        }
    }

    /// Records a transfer whose agent ended while it made this volume.
    fn record(&self, agent: &Agent, number: u8, name: &str, uuid: Option<&str>) {
        let id = format!("{number:032x}");
        let disk = SavedArrivingDisk {
            source: "/srv/source/web.raw".into(),
            path: self.pool.device(name),
            format: DiskFormat::Raw,
            virtual_bytes: DISK_BYTES,
            inode: 0,
            born_unix_ns: 0,
            backing: Vec::new(),
            unnamed: None,
            device: None,
            thin: Some(SavedThinVolume {
                pool: self.pool.clone(),
                name: name.to_owned(),
                tag: format!("{ARRIVING_TAG}{id}"),
                uuid: uuid.map(str::to_owned),
            }),
        };
        let vm = (web(), Uuid::from_u128(0x5eed));
        let id = id.parse().unwrap();
        let record = SavedArrival::new(id, vm, "b".to_owned(), 5, vec![disk]);
        agent.store.save_arrival(&record).unwrap();
    }
}

impl Drop for ThinHost {
    fn drop(&mut self) {
        for (name, _) in self.volumes() {
            let device = fs::read_to_string(self.state.join("volumes").join(name).join("device"));
            let device = device.unwrap_or_default();
            let _ = Command::new("losetup").args(["--detach", device.trim()]).status();
        }
        let _ = fs::remove_dir_all(Path::new("/dev").join(self.pool.group()));
    }
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn tag(number: u8) -> String {
    format!("{ARRIVING_TAG}{number:032x}")
}

fn named(name: &str, tag: &str) -> (String, String) {
    (name.to_owned(), tag.to_owned())
}

#[test]
fn a_volume_is_made_filled_found_again_and_removed() {
    let Some(thin) = ThinHost::new() else { return };
    thin.host.run(async {
        let mut agent = opened(&thin.host).await;
        let asked = thin.request(&["web.raw", "da ta.raw"]);
        let checked = agent.check_arriving_disks(&asked).await.unwrap();
        let paths = ["web", "da-ta"].map(|name| thin.pool.device(name));
        assert_eq!(checked.iter().map(|image| image.path.clone()).collect::<Vec<_>>(), paths);
        assert_eq!(thin.volumes(), []);
        let (arrival, is_new) = prepare(&agent, &asked).await.unwrap();
        assert!(is_new);
        assert_eq!(thin.volumes(), [named("da-ta", ""), named("web", "")]);
        for disk in &arrival.record.disks {
            let (device, volume) = (disk.device.as_ref().unwrap(), disk.thin.as_ref().unwrap());
            assert!(disk.inode == device.number && volume.uuid.is_some(), "{disk:?}");
        }
        let mut images = agent.open_arrival(&arrival).await.unwrap();
        let OpenedContent::Raw(file) = images.remove(0).content else { panic!("it is a device") };
        assert_eq!(bytes_of(&file).unwrap(), VOLUME_BYTES);
        file.write_all_at(&[9; 4096], 2 * MIB).unwrap();
        drop((file, images));
        arrival.present.lock().mark(vec![(0, 2 * MIB, MIB)]);
        drop((arrival, agent));
        // The next agent finds them, and its search for left volumes spares them.
        agent = opened(&thin.host).await;
        agent.sweep_volumes().await;
        let other =
            VmSpec { disks: vec![Disk::new(&paths[0], DiskFormat::Raw)], ..thin.host.spec("db") };
        let refused = agent.create(CreateVm::new(other, false)).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        let (arrival, is_new) = prepare(&agent, &asked).await.unwrap();
        assert!(!is_new);
        assert_eq!(arrival.present.lock().runs(), [vec![(2 * MIB, MIB)], vec![]]);
        drop(agent.open_arrival(&arrival).await.unwrap());
        agent.remove_disk_arrival(&arrival).unwrap();
        assert!(agent.arrivals.all().is_empty() && agent.store.arrivals().is_empty());
        let images = arrival.images.clone();
        drop(arrival);
        let is_gone = async || {
            let are_claimed = images.iter().any(|image| is_being_made(image, "none"));
            thin.volumes().is_empty() && !are_claimed
        };
        until("the volumes are removed", is_gone).await;
        // Their names are free again.
        let (again, is_new) = prepare(&agent, &asked).await.unwrap();
        assert!(is_new && again.record.disks[0].path == paths[0]);
    });
}

#[test]
fn what_an_agent_left_is_removed_and_nothing_else() {
    let Some(thin) = ThinHost::new() else { return };
    thin.host.run(async {
        let agent = opened(&thin.host).await;
        let (lvm, pool) = (thin.lvm(), &thin.pool);
        let make = async |name: &str, tag: &str| {
            lvm.create(pool, (name, DISK_BYTES), tag).await.unwrap();
            let seen = lvm.look(pool).await.unwrap();
            seen.volumes.into_iter().find(|volume| volume.name == name).unwrap()
        };
        // A VM has it, whatever its tag says.
        let kept = make("kept", "none").await;
        let disks = vec![Disk::new(pool.device("kept"), DiskFormat::Raw)];
        let spec = VmSpec { disks, ..thin.host.spec("db") };
        agent.create(CreateVm::new(spec, false)).await.unwrap();
        lvm.tag(pool, &kept, &tag(1)).await.unwrap();
        // Nothing is recorded of it.
        make("lost", &tag(2)).await;
        make("others", "backup").await;
        // Recorded: without its UUID, with it and without its tag, and of another volume by now.
        make("begun", &tag(3)).await;
        thin.record(&agent, 3, "begun", None);
        let noted = make("noted", &tag(4)).await;
        lvm.untag(pool, &noted, &tag(4)).await.unwrap();
        thin.record(&agent, 4, "noted", Some(&noted.uuid));
        make("taken", "").await;
        thin.record(&agent, 5, "taken", Some("V-99"));
        thin.record(&agent, 6, "taken", None);
        drop(agent);
        let agent = opened(&thin.host).await;
        let left = [named("kept", &tag(1)), named("others", "backup"), named("taken", "")];
        let are_removed = async || {
            agent.sweep_volumes().await;
            thin.volumes() == left && agent.store.arrivals().is_empty()
        };
        until("the left volumes are removed", are_removed).await;
        assert!(agent.arrivals.all().is_empty());
        agent.sweep_volumes().await;
        assert_eq!(thin.volumes(), left);
        // Another host may have the pool active, and make volumes in it.
        fs::write(thin.state.join("percent"), "").unwrap();
        make("theirs", &tag(7)).await;
        agent.sweep_volumes().await;
        assert_eq!(thin.volumes().last(), Some(&named("theirs", &tag(7))));
        fs::write(thin.state.join("percent"), "50.00").unwrap();
        let is_removed = async || {
            agent.sweep_volumes().await;
            thin.volumes() == left
        };
        until("the volume is removed", is_removed).await;
    });
}

#[test]
fn a_volume_that_is_being_made_is_no_device_for_others() {
    let Some(thin) = ThinHost::new() else { return };
    thin.host.run(async {
        let agent = opened(&thin.host).await;
        thin.lvm().create(&thin.pool, ("web", DISK_BYTES), "none").await.unwrap();
        let path = thin.pool.device("web");
        let claim = in_work::claim(&path).unwrap();
        let mut asked = thin.request(&["web.raw"]);
        asked.to = path.parent().map(Path::to_owned);
        asked.disks[0].onto = Some(OntoDevice { overwrite: false, source: None });
        let refused = prepare(&agent, &asked).await.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        drop(claim);
        prepare(&agent, &asked).await.unwrap();
    });
}

#[test]
fn a_pool_that_takes_no_writes_is_refused() {
    let pool = ThinPool::of(Path::new("lvm:vg0/thin0")).unwrap();
    let good = PoolState {
        group_uuid: "G".into(),
        uuid: "P".into(),
        total_bytes: 4 * MIB,
        used_bytes: Some(MIB),
        metadata_used: Some(9_000),
        zeroes: true,
        takes_writes: true,
    };
    assert_eq!(lacking(&pool, &good, 3 * MIB), None);
    let much = PoolState { metadata_used: Some(9_100), ..good.clone() };
    let stuck = PoolState { takes_writes: false, ..good.clone() };
    for (bad, why) in [(much, "91 % of its metadata"), (stuck, "takes no writes")] {
        assert!(lacking(&pool, &bad, MIB).unwrap().0.contains(why));
    }
    assert!(lacking(&pool, &good, 3 * MIB + 1).unwrap().0.contains("has room for 3MiB"));
}

#[test]
fn what_cannot_be_made_leaves_nothing() {
    let Some(thin) = ThinHost::new() else { return };
    thin.host.run(async {
        let agent = opened(&thin.host).await;
        let good = thin.request(&["web.raw", "data.raw"]);
        let disk = &good.disks[0];
        let with = |disk: ArrivingDisk| ArrivingDisks { disks: vec![disk], ..good.clone() };
        let bad = ErrorCode::InvalidRequest;
        let much =
            ArrivingDisk { virtual_bytes: 2048 * MIB, used_bytes: 513 * MIB, ..disk.clone() };
        let qcow2 = ArrivingDisk { format: DiskFormat::Qcow2, ..disk.clone() };
        let elsewhere = ArrivingDisks { to: Some("lvm:vg9/thin0".into()), ..good.clone() };
        let unnamed = ArrivingDisks { to: Some("lvm:vg9".into()), ..good.clone() };
        for (request, code, why) in [
            (with(much), ErrorCode::HostFailed, "has room for 512MiB"),
            (with(qcow2), bad, "not raw"),
            (elsewhere, bad, "has no thin pool vg9/thin0"),
            (unnamed, bad, "lvm:GROUP/POOL"),
        ] {
            for refused in [
                prepare(&agent, &request).await.map(drop).unwrap_err(),
                agent.check_arriving_disks(&request).await.map(drop).unwrap_err(),
            ] {
                assert_eq!(refused.code, code, "{refused}");
                assert!(refused.message.contains(why), "{refused} is not {why}");
            }
        }
        // Blocks with what earlier volumes had.
        fs::write(thin.state.join("attributes"), "twi-aot---").unwrap();
        let refused = prepare(&agent, &good).await.map(drop).unwrap_err();
        assert!(refused.remedy.contains("lvchange --zero y"), "{refused}");
        fs::write(thin.state.join("attributes"), "twi-aotz--").unwrap();
        // LVM fails at each step.
        for (verb, word) in
            [("lvs", "lvs fails"), ("lvcreate", "lvcreate fails"), ("lvchange", "lvchange fails")]
        {
            thin.fail(verb, true);
            let refused = prepare(&agent, &good).await.map(drop).unwrap_err();
            assert!(refused.message.contains(word), "{refused}");
            assert!(agent.arrivals.all().is_empty() && agent.store.arrivals().is_empty());
            thin.fail(verb, false);
            until("the volumes are removed", async || thin.volumes().is_empty()).await;
        }
        let (arrival, is_new) = prepare(&agent, &good).await.unwrap();
        assert!(is_new && arrival.record.disks.iter().all(|disk| disk.device.is_some()));
    });
}

#[test]
fn volumes_that_lvm_does_not_mark_stay_recorded_until_it_does() {
    let Some(thin) = ThinHost::new() else { return };
    thin.host.run(async {
        let mut agent = opened(&thin.host).await;
        let asked = thin.request(&["web.raw"]);
        let (arrival, _) = prepare(&agent, &asked).await.unwrap();
        thin.fail("lvchange", true);
        let refused = agent.remove_disk_arrival(&arrival).unwrap_err();
        assert!(refused.message.contains("lvchange fails"), "{refused}");
        // It does not go on: some of its volumes may be marked.
        let refused = prepare(&agent, &asked).await.map(drop).unwrap_err();
        assert!(refused.message.contains("lvchange fails"), "{refused}");
        drop((arrival, agent));
        agent = opened(&thin.host).await;
        agent.sweep_volumes().await;
        assert!(agent.arrivals.all().is_empty());
        assert_eq!((thin.volumes(), agent.store.arrivals().len()), (vec![named("web", "")], 1));
        let refused = prepare(&agent, &asked).await.map(drop).unwrap_err();
        assert!(refused.message.contains("has not removed"), "{refused}");
        thin.fail("lvchange", false);
        let is_removed = async || {
            agent.sweep_volumes().await;
            thin.volumes().is_empty() && agent.store.arrivals().is_empty()
        };
        until("the volume is removed", is_removed).await;
    });
}
