//! Disks that arrive with a VM, from a source of the test: over real streams, with a break and
//! another agent in the middle, into a raw image and a layer on a base.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use godwit_api::{
    ArrivingBase, ArrivingDisk, ArrivingDisks, ArrivingDisksAccepted, ArrivingDisksChecked, Client,
    ErrorCode,
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

#[test]
fn a_transfer_goes_on_where_it_was_after_a_break_and_with_the_next_agent() {
    let Some(mut host) = TestHost::new() else { return };
    host.config.migration_addresses = vec!["127.0.0.1".parse().unwrap()];
    let dir = host.path().join("images");
    fs::create_dir(&dir).unwrap();
    let base = content(3);
    fs::write(dir.join("base.raw"), &base).unwrap();
    let guest = Guest(Arc::new([content(5), content(7)]));
    let disk = |name: &str, format| ArrivingDisk {
        path: Path::new("/srv/source").join(name),
        format,
        virtual_bytes: SIZE as u64,
        used_bytes: SIZE as u64,
        base: Vec::new(),
    };
    let base = ArrivingBase {
        path: "/srv/source/base.raw".into(),
        format: DiskFormat::Raw,
        file_bytes: SIZE as u64,
        blake3: blake3::hash(&base).to_hex().to_string(),
    };
    let layer = ArrivingDisk { base: vec![base], ..disk("data.qcow2", DiskFormat::Qcow2) };
    let request = ArrivingDisks {
        transfer: TRANSFER.to_owned(),
        vm: VmName::new("web").unwrap(),
        uuid: Uuid::from_u128(0x5eed),
        from: "b".to_owned(),
        to: Some(dir.clone()),
        disks: vec![disk("web.raw", DiskFormat::Raw), layer],
    };
    let half = SIZE / 2;
    let present: [Vec<(u64, u64)>; 2] = [vec![(0, half as u64)], vec![(0, half as u64)]];
    host.with_agent(async |client| {
        let checked: ArrivingDisksChecked =
            client.post("/v1/arriving-disks/checks", &request).await.unwrap();
        let first = accept(&client, &request).await;
        assert_eq!(checked.disks, first.disks);
        assert_eq!(first.disks[0].path, dir.join("web.raw"));
        let sent = [range(0, 0, half), range(1, 0, half)];
        send(&first, &guest, move |streams| round(streams, &sent)).await;
        let again = accept(&client, &request).await;
        assert!(again.id != first.id);
        assert_eq!(present_of(&again), present);
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
    });
    let record = host.path().join(format!("state/arriving-disks/{TRANSFER}.json"));
    host.with_agent(async |client| {
        let accepted = accept(&client, &request).await;
        assert_eq!(present_of(&accepted), present);
        // The guest has written the first half since.
        let rest = [range(0, half, SIZE), range(1, half, SIZE)];
        let last = [range(0, 0, MIB), range(1, 3 * MIB, half)];
        let sending = move |streams: &mut DiskStreams| {
            round(streams, &rest);
            streams.send_last(&last).unwrap();
            streams.confirmed().unwrap();
        };
        send(&accepted, &guest, sending).await;
        until("everything has arrived", async || !record.exists()).await;
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
