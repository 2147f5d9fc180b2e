//! Disks that arrive with a VM, from a source of the test: over real streams, with a break and a
//! killed agent in the middle, into a raw image and a layer on a base.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use godwit_api::{
    ArrivingBase, ArrivingDisk, ArrivingDisks, ArrivingDisksAccepted, ArrivingDisksChecked,
    ArrivingImage, Client, Endpoint, ErrorCode, OntoDevice,
};
use godwit_migration::Failure;
use godwit_migration::disks::{DiskRange, DiskReader, DiskStreams};
use godwit_qemu::{DiskFormat, Uuid, VmName};
use godwit_types::{Compression, Lane};
use support::{LIMIT, TestHost, until};

const MIB: usize = 1 << 20;
const SIZE: usize = 8 * MIB;
const STREAMS: u16 = 2;
const TRANSFER: &str = "0123456789abcdef0123456789abcdef";

/// The guest's disks at the source.
#[derive(Clone)]
struct Guest(Arc<[Vec<u8>; 2]>);

impl DiskReader for Guest {
    fn read_at(&mut self, disk: usize, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let at = usize::try_from(at).unwrap();
        buffer.copy_from_slice(&self.0[disk][at..at + buffer.len()]);
        Ok(())
    }
}

/// Environment variable with the path of the configuration for
/// [`an_agent_in_a_process_of_its_own`].
const AGENTS_CONFIG: &str = "GODWIT_TEST_AGENT";

/// Not a test by itself: another test starts it as a process, to kill it.
#[test]
fn an_agent_in_a_process_of_its_own() {
    let Some(path) = std::env::var_os(AGENTS_CONFIG).map(PathBuf::from) else { return };
    let config = godwit_host::Config::parse(&fs::read_to_string(&path).unwrap(), &path).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(godwit_host::run(config)).unwrap();
}

/// A process with an agent, killed when it is dropped.
struct AgentProcess(Child);

impl AgentProcess {
    /// Starts an agent with further lines of configuration.
    fn start(host: &TestHost, further: &str) -> AgentProcess {
        let (at, config) = (host.path().display(), host.path().join("agent.toml"));
        let text = format!(
            "name = \"a\"\nsocket = \"{at}/agent.sock\"\nstate_dir = \"{at}/state\"\n\
             run_dir = \"{at}/run\"\nqemu = \"/usr/bin/qemu-system-x86_64\"\n\
             vm_dirs = [\"{at}\"]\ninsecure = true\nmigration_addresses = [\"127.0.0.1\"]\n\
             {further}"
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "an_agent_in_a_process_of_its_own", "--nocapture"]);
        AgentProcess(command.env(AGENTS_CONFIG, &config).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Runs `test` beside an agent, which is killed then.
fn with_killed_agent(host: &TestHost, test: impl AsyncFnOnce(Client)) {
    with_killed_agent_of(host, "", test);
}

/// Runs `test` beside an agent with further lines of configuration, which is killed then.
fn with_killed_agent_of(host: &TestHost, further: &str, test: impl AsyncFnOnce(Client)) {
    let _agent = AgentProcess::start(host, further);
    let client = Client::new(Endpoint::Unix(host.config.socket.clone()));
    host.run(async {
        until("the agent answers", async || client.host().await.is_ok()).await;
        test(client).await;
    });
}

/// Returns bytes that no compression makes shorter, every third block zero.
fn content(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = vec![0; SIZE];
    for (number, block) in bytes.chunks_mut(128 << 10).enumerate().filter(|(n, _)| n % 3 != 2) {
        for byte in block {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number as u64 | 1);
            *byte = state.to_be_bytes()[0];
        }
    }
    bytes
}

fn range(disk: usize, from: usize, to: usize) -> DiskRange {
    DiskRange { disk, offset: from as u64, bytes: (to - from) as u64 }
}

async fn accept(client: &Client, request: &ArrivingDisks) -> ArrivingDisksAccepted {
    client.post("/v1/arriving-disks", request).await.unwrap()
}

/// Returns what is on the host's disk of each image.
fn present_of(accepted: &ArrivingDisksAccepted) -> Vec<Vec<(u64, u64)>> {
    accepted.disks.iter().map(|image| image.present.clone()).collect()
}

fn identities_of(accepted: &ArrivingDisksAccepted) -> Vec<Option<(u64, u64)>> {
    accepted.disks.iter().map(|image| image.identity).collect()
}

/// Connects the streams of a source, and has it send.
async fn send<T: Send + 'static>(
    accepted: &ArrivingDisksAccepted,
    guest: &Guest,
    what: impl FnOnce(&mut DiskStreams) -> T + Send + 'static,
) -> T {
    let (id, to, guest) = (accepted.id.parse().unwrap(), accepted.addresses[0], guest.clone());
    let sending = move || {
        let mut streams = DiskStreams::new(id, Compression::Auto);
        for number in 1..=STREAMS {
            let stream = godwit_lanes::connect(Lane { from: None, to }, LIMIT).unwrap();
            streams.add(stream, number, Box::new(guest.clone())).unwrap();
        }
        what(&mut streams)
    };
    tokio::task::spawn_blocking(sending).await.unwrap()
}

fn round(streams: &mut DiskStreams, ranges: &[DiskRange]) {
    streams.send_round(ranges, &|_| {}, &AtomicBool::new(false)).unwrap();
}

/// Waits until everything has arrived: the record of the transfer is gone, and the images are
/// closed, so that a QEMU can lock them. The agent does both at the same time.
async fn until_arrived(record: &Path, accepted: &ArrivingDisksAccepted) {
    let is_closed = |image: &ArrivingImage| {
        let opened = Command::new("qemu-img").arg("info").arg(&image.path).output();
        opened.map_or(true, |opened| opened.status.success())
    };
    let has_arrived = async || !record.exists() && accepted.disks.iter().all(is_closed);
    until("everything has arrived", has_arrived).await;
}

/// Returns the content of an image as a guest would see it; `None` without qemu-img.
fn seen(image: &Path, format: &str) -> Option<Vec<u8>> {
    let raw = image.with_extension("seen");
    let output = Command::new("qemu-img")
        .args(["convert", "-f", format, "-O", "raw"])
        .args([image, &raw])
        .output()
        .ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = fs::read(&raw).unwrap();
    fs::remove_file(raw).unwrap();
    Some(bytes)
}

fn disk(name: &str, format: DiskFormat) -> ArrivingDisk {
    ArrivingDisk {
        path: Path::new("/srv/source").join(name),
        format,
        virtual_bytes: SIZE as u64,
        used_bytes: SIZE as u64,
        base: Vec::new(),
        onto: None,
    }
}

fn request(dir: &Path, disks: Vec<ArrivingDisk>) -> ArrivingDisks {
    ArrivingDisks {
        transfer: TRANSFER.to_owned(),
        vm: VmName::new("web").unwrap(),
        uuid: Uuid::from_u128(0x5eed),
        from: "b".to_owned(),
        to: Some(dir.to_owned()),
        disks,
    }
}

#[test]
fn content_that_images_of_the_host_have_is_not_sent() {
    let Some(host) = TestHost::new() else { return };
    let dir = host.path().join("images");
    fs::create_dir(&dir).unwrap();
    let guest = Guest(Arc::new([content(5), content(7)]));
    // What an earlier stay of the guest has left here; a byte was written since.
    let mut left = guest.0.to_vec();
    left[0][3 * MIB] ^= 1;
    fs::write(dir.join("web.raw"), &left[0]).unwrap();
    let raw = host.path().join("data");
    fs::write(&raw, &left[1]).unwrap();
    let made = Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([&raw, &dir.join("data.qcow2")])
        .status();
    if !made.is_ok_and(|made| made.success()) {
        return eprintln!("skipped: no qemu-img (apt-get install qemu-utils)");
    }
    let disks = vec![disk("web-3.raw", DiskFormat::Raw), disk("data.qcow2", DiskFormat::Qcow2)];
    let request = request(&dir, disks);
    let record = host.path().join(format!("state/arriving-disks/{TRANSFER}.json"));
    with_killed_agent(&host, async |client| {
        let accepted = accept(&client, &request).await;
        assert!(accepted.references);
        assert_eq!(accepted.disks[1].path, dir.join("data-1.qcow2"));
        let sending = |streams: &mut DiskStreams| {
            streams.refer();
            let all = [range(0, 0, SIZE), range(1, 0, SIZE)];
            let sent = streams.send_round(&all, &|_| {}, &AtomicBool::new(false)).unwrap();
            streams.send_last(&[]).unwrap();
            streams.confirmed().unwrap();
            sent
        };
        let sent = send(&accepted, &guest, sending).await;
        assert_eq!(sent.bytes, 2 * SIZE as u64);
        let [first, second] = [sent.by_disk[0], sent.by_disk[1]];
        assert_eq!(first.bytes - first.zero_bytes - first.referenced_bytes, 64 << 10, "{sent:?}");
        assert_eq!(second.referenced_bytes, second.bytes - second.zero_bytes, "{sent:?}");
        assert!(sent.wire_bytes < 128 << 10, "{sent:?}");
        until_arrived(&record, &accepted).await;
        assert!(fs::read(&accepted.disks[0].path).unwrap() == guest.0[0], "the raw image differs");
        let seen = seen(&accepted.disks[1].path, "qcow2").unwrap();
        assert!(seen == guest.0[1], "the qcow2 image differs");
        assert!(
            fs::read(dir.join("web.raw")).unwrap() == left[0],
            "an image that was read differs"
        );
        client.delete(&format!("/v1/arriving-disks/{TRANSFER}")).await.unwrap();
    });
}

#[test]
fn a_transfer_goes_on_where_it_was_after_a_break_and_with_the_next_agent() {
    let Some(host) = TestHost::new() else { return };
    let dir = host.path().join("images");
    fs::create_dir(&dir).unwrap();
    let base = content(3);
    fs::write(dir.join("base.raw"), &base).unwrap();
    let guest = Guest(Arc::new([content(5), content(7)]));
    let base = ArrivingBase {
        path: "/srv/source/base.raw".into(),
        format: DiskFormat::Raw,
        file_bytes: SIZE as u64,
        blake3: blake3::hash(&base).to_hex().to_string(),
    };
    let layer = ArrivingDisk { base: vec![base], ..disk("data.qcow2", DiskFormat::Qcow2) };
    let request = request(&dir, vec![disk("web.raw", DiskFormat::Raw), layer]);
    let half = SIZE / 2;
    let present = |bytes: usize| vec![vec![(0_u64, bytes as u64)]; 2];
    with_killed_agent(&host, async |client| {
        let checked: ArrivingDisksChecked =
            client.post("/v1/arriving-disks/checks", &request).await.unwrap();
        let first = accept(&client, &request).await;
        let identities = identities_of(&first);
        assert!(identities.iter().all(Option::is_some) && identities[0] != identities[1]);
        let named = checked.disks.into_iter().zip(&identities);
        let named = named.map(|(disk, identity)| ArrivingImage { identity: *identity, ..disk });
        assert_eq!(named.collect::<Vec<_>>(), first.disks);
        assert_eq!(first.disks[0].path, dir.join("web.raw"));
        let sent = [range(0, 0, half), range(1, 0, half)];
        send(&first, &guest, move |streams| round(streams, &sent)).await;
        let again = accept(&client, &request).await;
        assert!(again.id != first.id);
        assert_eq!(present_of(&again), present(half));
        assert_eq!(identities_of(&again), identities);
        // The earlier connection is over.
        let stranger = {
            let (id, to) = (first.id.parse().unwrap(), again.addresses[0]);
            let guest = guest.clone();
            tokio::task::spawn_blocking(move || {
                let stream = godwit_lanes::connect(Lane { from: None, to }, LIMIT).unwrap();
                DiskStreams::new(id, Compression::None).add(stream, 1, Box::new(guest))
            })
        };
        stranger.await.unwrap().unwrap_err();
        let sent = [range(0, half, half + MIB), range(1, half, half + MIB)];
        send(&again, &guest, move |streams| round(streams, &sent)).await;
    });
    let record = host.path().join(format!("state/arriving-disks/{TRANSFER}.json"));
    with_killed_agent(&host, async |client| {
        let accepted = accept(&client, &request).await;
        assert_eq!(present_of(&accepted), present(half + MIB));
        let number = fs::metadata(&accepted.disks[0].path).unwrap().ino();
        assert_eq!(accepted.disks[0].identity.map(|identity| identity.0), Some(number));
        // The guest has written the first half since.
        let rest = [range(0, half + MIB, SIZE), range(1, half + MIB, SIZE)];
        let last = [range(0, 0, MIB), range(1, 3 * MIB, half)];
        let sending = move |streams: &mut DiskStreams| {
            round(streams, &rest);
            streams.send_last(&last).unwrap();
            streams.confirmed().unwrap();
        };
        send(&accepted, &guest, sending).await;
        until_arrived(&record, &accepted).await;
        assert!(fs::read(&accepted.disks[0].path).unwrap() == guest.0[0], "the raw image differs");
        match seen(&accepted.disks[1].path, "qcow2") {
            Some(seen) => assert!(seen == guest.0[1], "the layer differs"),
            None => eprintln!("not compared: no qemu-img (apt-get install qemu-utils)"),
        }
        // They are closed: the VM's QEMU can lock them.
        let image = fs::File::options().write(true).open(&accepted.disks[1].path).unwrap();
        assert!(godwit_ram::lock_image(&image).unwrap());
        drop(image);
        // The VM does not come: its source removes them.
        let path = format!("/v1/arriving-disks/{TRANSFER}");
        client.delete(&path).await.unwrap();
        assert!(accepted.disks.iter().all(|image| !image.path.exists()));
        let gone = client.delete(&path).await.unwrap_err();
        assert_eq!(gone.code(), Some(ErrorCode::NotFound));
    });
}

/// Attaches a loop device over a file; `None`, with a printed reason, if the machine cannot have
/// one.
fn loop_device(file: &Path) -> Option<PathBuf> {
    let attached = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
    match attached {
        Ok(attached) if attached.status.success() => {
            Some(String::from_utf8(attached.stdout).unwrap().trim().into())
        }
        attached => {
            eprintln!("skipped: no loop device: {attached:?}");
            None
        }
    }
}

/// Detaches a loop device when it is dropped.
struct Attached(PathBuf);

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_device_with_other_content_gets_all_of_the_disk_over_a_killed_agent() {
    let Some(host) = TestHost::new() else { return };
    let file = host.path().join("device");
    // It is a little larger than the disk, as a logical volume may be.
    fs::write(&file, vec![0xa5; SIZE + MIB]).unwrap();
    let Some(device) = loop_device(&file).map(Attached) else { return };
    let name = device.0.file_name().unwrap().to_string_lossy().into_owned();
    let guest = Guest(Arc::new([content(5), content(7)]));
    let asked = |overwrite: bool| {
        let onto = OntoDevice { overwrite, source: None };
        let name = format!("{name}.raw");
        let disk = ArrivingDisk { onto: Some(onto), ..disk(&name, DiskFormat::Raw) };
        request(device.0.parent().unwrap(), vec![disk])
    };
    let further = format!("block_devices = [\"{}\"]\n", device.0.display());
    let half = SIZE / 2;
    let mut identity = None;
    with_killed_agent_of(&host, &further, async |client| {
        let refused = client
            .post::<_, serde_json::Value>("/v1/arriving-disks", &asked(false))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::AlreadyExists), "{refused}");
        let accepted = accept(&client, &asked(true)).await;
        assert_eq!(accepted.disks[0].path, device.0);
        identity = accepted.disks[0].identity;
        assert!(identity.is_some());
        let sent = [range(0, 0, half)];
        send(&accepted, &guest, move |streams| round(streams, &sent)).await;
    });
    let record = host.path().join(format!("state/arriving-disks/{TRANSFER}.json"));
    with_killed_agent_of(&host, &further, async |client| {
        let accepted = accept(&client, &asked(true)).await;
        assert_eq!(present_of(&accepted), [vec![(0, half as u64)]]);
        assert_eq!(accepted.disks[0].identity, identity);
        let rest = [range(0, half, SIZE)];
        let sending = move |streams: &mut DiskStreams| {
            round(streams, &rest);
            streams.send_last(&[]).unwrap();
            streams.confirmed().unwrap();
        };
        send(&accepted, &guest, sending).await;
        until_arrived(&record, &accepted).await;
        let found = fs::read(&device.0).unwrap();
        assert!(found[..SIZE] == guest.0[0], "the device differs from the disk");
        assert!(found[SIZE..].iter().all(|byte| *byte == 0), "the guest would see what was there");
        // The VM does not come. Only the ends are cleared, and the device stays.
        client.delete(&format!("/v1/arriving-disks/{TRANSFER}")).await.unwrap();
        let left = fs::read(&device.0).unwrap();
        assert!(left[..MIB].iter().all(|byte| *byte == 0));
        assert!(left[MIB..SIZE] == guest.0[0][MIB..]);
    });
}

#[test]
fn a_host_without_an_address_for_migrations_accepts_no_disks() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let request = serde_json::json!({
            "transfer": TRANSFER, "vm": "web", "uuid": Uuid::from_u128(1), "from": "b",
            "to": host.path(), "disks": [{"path": "/srv/web.raw", "format": "raw",
                "virtual_bytes": MIB, "used_bytes": 0}],
        });
        for path in ["/v1/arriving-disks", "/v1/arriving-disks/checks"] {
            let refused = client.post::<_, serde_json::Value>(path, &request).await.unwrap_err();
            assert_eq!(refused.code(), Some(ErrorCode::Preflight), "{refused}");
        }
        assert!(!host.path().join("web.raw").exists());
    });
}
