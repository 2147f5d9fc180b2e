//! Writes the initial inputs of each target from real encodings: `cargo run --release --example
//! seeds` in this folder. Inputs found by fuzzing are beside them.

use std::fs;
use std::path::Path;

use godwit_ha::heartbeat::{Block, Slot};
use godwit_ha::own::{End, OwnBlock};
use godwit_ha::{Mark, Term};
use godwit_lanes::fuzzing::Pieces;
use godwit_ram::{MissingPages, PageRange};
use godwit_wire::{
    Begin, BlockRun, Codec, Delta, Digests, DiskBlocks, DiskBlocksHeader, DiskMissing,
    DiskReferences, DiskZeros, Encoding, HEADER_LEN, Message, MigrationId, PageRun, PagedIn,
    PagesEnd, PagesHeader, Place, Reason, References, Running, SUPPORTED, Zeros,
};
use serde_json::{Value, json};

fn main() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let all = [
        ("frames", frames()),
        ("runs", runs()),
        ("stream", streams()),
        ("pieces", pieces()),
        ("qmp", qmp()),
        ("guest", guest()),
        ("api", api()),
        ("records", records()),
        ("images", images()),
        ("definitions", definitions()),
        ("settings", settings()),
        ("units", units()),
        ("reports", reports()),
        ("answers", answers()),
        ("outcomes", outcomes()),
        ("joins", joins()),
        ("heartbeats", heartbeats()),
        ("watchdog", watchdog()),
        ("loads", loads()),
        ("mirrors", mirrors()),
    ];
    for (target, inputs) in all {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder).expect("a folder");
        for (number, input) in inputs.iter().enumerate() {
            fs::write(folder.join(format!("seed-{number:02}")), input).expect("a file");
        }
    }
}

/// Returns blocks of a host: the opening one, a later one, a damaged one and an empty one. And two
/// of a VM that agents restart: a claim and the end of a term.
fn heartbeats() -> Vec<Vec<u8>> {
    let slot = Slot { cluster: [1; 16], host: [2; 16], datastore: [3; 16] };
    let opening = Block::opening(slot, Term(4)).encode();
    let later = Block { slot, mark: Mark { term: Term(4), sequence: 77 } }.encode();
    let mut damaged = later;
    damaged[60] ^= 1;
    let claim = OwnBlock::claim(slot, Term(4), true);
    let ended = OwnBlock { end: End::Failed, ..claim };
    let own = [claim.encode(), ended.encode()];
    [opening, later, damaged, [0; 512]].into_iter().chain(own).map(Vec::from).collect()
}

/// Returns messages to a watchdog: VMs to guard, none, and a process that cannot be one.
fn watchdog() -> Vec<Vec<u8>> {
    [
        r#"{"deadline_ns":12000000005,"pids":[[7,99],[8,100]]}"#,
        r#"{"deadline_ns":null,"pids":[]}"#,
        r#"{"deadline_ns":0,"pids":[[-1,99]],"more":[{}]}"#,
    ]
    .map(Vec::from)
    .to_vec()
}

fn messages() -> Vec<Message> {
    let runs =
        vec![BlockRun { block: 0, first: 3, count: 40 }, BlockRun { block: 1, first: 0, count: 1 }];
    let place = Place { content: 1, block: 0, page: 7 };
    let reason = Reason { code: 7, detail: "cancelled by an operator".into() };
    vec![
        Message::Hello { versions: SUPPORTED, migration: MigrationId([7; 16]), stream: 1 },
        Message::Welcome { version: 1 },
        Message::Begin(Begin { epoch: 2, incarnation: 0, run: true, block_pages: vec![700, 133] }),
        Message::Ready,
        Message::Zeros(Zeros { round: 1, runs: runs.clone() }),
        Message::UnitEnd,
        Message::UnitsApplied { stream: 1, units: 9 },
        Message::CloseStream { stream: 2 },
        Message::StreamClosed { stream: 2, units: 5 },
        Message::PagesEnd(PagesEnd { pages: 833, units: vec![4, 5] }),
        Message::Ping { sent_ns: 1 },
        Message::Pong { sent_ns: 1, answered_ns: 2 },
        Message::DeviceState(b"QEVM\0\0\0\x03".to_vec()),
        Message::DeviceStateEnd { bytes: 8 },
        Message::Commit { epoch: 2, incarnation: 0 },
        Message::Commit { epoch: 2, incarnation: 7 },
        Message::Running(Running { commit_ns: 1, loaded_ns: 2, running_ns: 3 }),
        Message::Refused(reason.clone()),
        Message::Abort(reason),
        Message::Padding { bytes: 40 },
        Message::References(References {
            round: 1,
            block: 0,
            first: 4,
            place,
            hashes: vec![[5; 32]; 2],
        }),
        Message::Missing { runs: runs.clone() },
        Message::Digests(Digests { place, prefixes: vec![1, 0, 3] }),
        Message::Delta(Delta {
            round: 1,
            block: 0,
            first: 4,
            bases: vec![1, 2],
            packed: packed(Codec::Lz4, 2),
        }),
        Message::PreparePageIn,
        Message::PageInReady { able: true },
        Message::Remaining { runs: runs.clone() },
        Message::RemainingEnd { pages: 41 },
        Message::Fetch { runs },
        Message::PagedIn(Box::new(PagedIn { pages: 41, demanded: 3, ..PagedIn::default() })),
        disk_blocks(None, vec![7; 512]),
        disk_blocks(Some(Codec::Lz4), packed(Codec::Lz4, 2)),
        disk_blocks(Some(Codec::Zstd), packed(Codec::Zstd, 2)),
        Message::DiskZeros(DiskZeros { disk: 1, offset: 65_536, bytes: 1 << 20 }),
        Message::DiskMark { mark: 1 },
        Message::DiskMarked { mark: 1 },
        Message::DiskEnd { streams: 4, mark: 2 },
        Message::DiskReferences(DiskReferences {
            disk: 1,
            offset: 3 << 16,
            hashes: vec![[7; 32], [8; 32]],
        }),
        Message::DiskMissing(DiskMissing { disk: 1, units: 2, offset: 3 << 16 }),
    ]
}

/// Returns blocks of a disk: 512 raw bytes, or two pages compressed.
fn disk_blocks(codec: Option<Codec>, content: Vec<u8>) -> Message {
    let raw_bytes = if codec.is_some() { 8192 } else { 512 };
    let header = DiskBlocksHeader { disk: 0, codec, raw_bytes, offset: 1 << 20 };
    Message::DiskBlocks(DiskBlocks { header, content })
}

fn payload(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes.split_off(HEADER_LEN)
}

/// Returns compressed pages.
fn packed(codec: Codec, pages: usize) -> Vec<u8> {
    let raw: Vec<u8> = (0..pages * 4096).map(|at| (at / 700) as u8).collect();
    Pieces::default().pack(codec, &raw).expect("it compresses").to_vec()
}

fn pages_headers() -> Vec<PagesHeader> {
    let run = PageRun { block: 0, first: 7, count: 3 };
    let packed = Encoding::Compressed { codec: Codec::Zstd, bytes: 500 };
    [Encoding::Raw, packed].map(|encoding| PagesHeader { round: 2, run, encoding, sum: 9 }).to_vec()
}

fn frames() -> Vec<Vec<u8>> {
    let pages = pages_headers().into_iter().map(Message::Pages);
    let input = |message: Message| {
        let mut header = Vec::new();
        message.encode(&mut header);
        [&header[..4], &payload(&message)].concat()
    };
    messages().into_iter().chain(pages).map(input).collect()
}

fn runs() -> Vec<Vec<u8>> {
    let runs: Vec<BlockRun> =
        (0..20).map(|i| BlockRun { block: i / 10, first: u64::from(i) * 999, count: 5 }).collect();
    let missing = [&[1], &payload(&Message::Missing { runs: runs.clone() })[..]].concat();
    vec![missing, [&[0], &payload(&Message::Zeros(Zeros { round: 3, runs }))[..]].concat()]
}

/// Returns streams in the target's form: a kind, a length, the bytes, and an unused field.
fn streams() -> Vec<Vec<u8>> {
    let op = |message: &Message| {
        let payload = payload(message);
        let length = u16::try_from(payload.len()).expect("short").to_le_bytes();
        [&[message.kind() as u8], &length[..], &payload, &[0, 0]].concat()
    };
    let pages = |kind: u8, fields: [u8; 4], content: &[u8]| {
        let length = u16::try_from(content.len()).expect("short").to_le_bytes();
        [&[kind], &fields[..], &length, content, &[0, 0]].concat()
    };
    let (lz4, zstd) = (packed(Codec::Lz4, 4), packed(Codec::Zstd, 60));
    let unit = [
        op(&messages()[0]),
        pages(5, [1, 2, 0, 0], b"some bytes"),
        pages(5, [20, 64, 0, 0], b"many pages"),
        pages(21, [3, 4, 0, 0], &lz4),
        pages(21, [3, 60, 0, 1], &zstd),
        op(&messages()[5]),
    ];
    let all: Vec<Vec<u8>> = messages().iter().map(op).collect();
    let wrong = [0x45, 1, 2, 0, 0, 3, 0, 1, 2, 3, 40, 0, 1];
    vec![
        unit.concat(),
        all.concat(),
        [&unit.concat()[..], &wrong].concat(),
        pages(5, [90, 20, 0, 0], b"beyond"),
    ]
}

fn pieces() -> Vec<Vec<u8>> {
    let mut inputs = vec![vec![2, 3, 1, 2, 3], vec![3, 2, 0, 0, 9]];
    for (how, codec) in (0..).zip(Codec::ALL) {
        for pages in [1, 4, 64] {
            inputs.push([&[how, pages], &packed(codec, usize::from(pages))[..]].concat());
        }
    }
    inputs
}

fn guest() -> Vec<Vec<u8>> {
    let answers: Vec<Value> = vec![
        json!({"return": [{
            "name": "eth0", "hardware-address": "52:54:00:00:00:01", "ip-addresses": [
                {"ip-address-type": "ipv4", "ip-address": "10.0.0.5", "prefix": 24},
                {"ip-address-type": "ipv6", "ip-address": "fd00::5", "prefix": 64},
            ],
        }]}),
        json!({"return": {"pretty-name": "Debian", "host-name": "web"}}),
        json!({"error": {"class": "CommandNotFound", "desc": "no"}}),
    ];
    answers.iter().map(|answer| answer.to_string().into_bytes()).collect()
}

fn qmp() -> Vec<Vec<u8>> {
    let lines: Vec<Value> = vec![
        json!({"QMP": {"version": {"qemu": {"major": 10}}, "capabilities": ["oob"]}}),
        json!({"return": {}, "id": 1}),
        json!({"return": {"status": "running", "running": true}, "id": 2}),
        json!({
            "return": {
                "status": "active", "ram": {"total": 7, "mbps": 1.5}, "blocked-reasons": ["x"],
            },
            "id": 3,
        }),
        json!({"error": {"class": "GenericError", "desc": "no"}, "id": 4}),
        json!({
            "timestamp": {"seconds": 5, "microseconds": 7}, "event": "MIGRATION",
            "data": {"status": "completed"},
        }),
        json!({"timestamp": {"seconds": -1, "microseconds": -1}, "event": "STOP"}),
        json!([]),
    ];
    let mut inputs: Vec<Vec<u8>> =
        lines.iter().map(|line| format!("{line}\r\n").into_bytes()).collect();
    inputs.push(inputs[..7].concat());
    inputs
}

fn spec() -> Value {
    json!({"name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
        "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/boot/vmlinuz", "cmdline": "quiet",
        "disks": [{"path": "/d", "format": "raw"}],
        "nics": [{"network": "lan", "mac": "52:54:00:00:00:01"}]})
}

/// Returns a specification as a source sends it, without defaults.
fn spec_of_a_peer() -> Value {
    json!({"name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
        "machine": "pc-q35-7.2", "accel": "tcg", "qemu": "/opt/qemu/bin/qemu-system-x86_64",
        "kernel": "/srv/vms/vmlinuz",
        "disks": [{"path": "/srv/vms/d", "format": "qcow2"}],
        "nics": [{"network": "lan", "mac": "52:54:00:00:00:01"}],
        "uuid": "6d5a2f7c-0000-4000-8000-000000000001"})
}

/// Returns definitions of each kind, as other platforms write them, and what NBD servers say.
fn definitions() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/import/src/tests");
    let files = [
        "libvirt-pc.xml",
        "libvirt-q35.xml",
        "proxmox-101.conf",
        "proxmox-204.conf",
        "virtualbox.ovf",
        "vmware.ovf",
    ];
    let files = files.iter().map(|file| fs::read(folder.join(file)).expect("a definition"));
    files.chain(nbd()).collect()
}

/// Returns what an NBD server says to a reader, and to one that asks for chunks and extents.
fn nbd() -> [Vec<u8>; 2] {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect();
    let option = |option: u32, kind: u32, content: &[u8]| -> Vec<u8> {
        let length = u32::try_from(content.len()).expect("short");
        let head: Vec<u8> = words(&[0x0003_e889, 0x0455_65a9, option, kind, length]);
        [&head[..], content].concat()
    };
    let chunk = |cookie: u32, flags_and_kind: u32, content: &[u8]| -> Vec<u8> {
        let length = u32::try_from(content.len()).expect("short");
        let head: Vec<u8> = words(&[0x668e_33ef, flags_and_kind, 0, cookie, length]);
        [&head[..], content].concat()
    };
    let mut greeting = b"NBDMAGICIHAVEOPT".to_vec();
    greeting.extend([0, 3]);
    // A disk of a MiB that can be flushed and zeroed.
    let size = option(7, 3, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0x45]);
    let open = [size, option(7, 1, &[])].concat();
    let done: Vec<u8> = words(&[0x6744_6698, 0, 0, 1]);
    let reader = [&greeting[..], &open, &done, &[7; 512]].concat();
    let data = [&[0; 8][..], &[7; 200]].concat();
    let chunks = [
        greeting,
        option(8, 1, &[]),
        option(10, 4, b"\0\0\0\x01base:allocation"),
        option(10, 4, b"\0\0\0\x02qemu:dirty-bitmap:b0"),
        option(10, 1, &[]),
        open,
        chunk(1, 1, &data),
        chunk(1, 0x0001_0002, &words(&[0, 200, 312])),
        chunk(2, 5, &words(&[1, 1 << 30, 3])),
        chunk(2, 0x0001_0005, &words(&[2, 65536, 1, 1 << 30, 0])),
        words(&[0x6744_6698, 0, 0, 3]),
    ];
    [reader, chunks.concat()]
}

/// Returns overlay images of version 2 and of version 3, an image with external data, and a
/// standalone image.
fn images() -> Vec<Vec<u8>> {
    let image = |version: u32, features: u64, backing: &str, format: &str| {
        let header_bytes: u32 = if version >= 3 { 104 } else { 72 };
        let mut extension = Vec::new();
        if !format.is_empty() {
            extension.extend(0xe279_2aca_u32.to_be_bytes());
            extension.extend(u32::try_from(format.len()).expect("short").to_be_bytes());
            extension.extend(format.bytes());
            extension.resize(extension.len().next_multiple_of(8), 0);
        }
        extension.extend([0; 8]);
        let offset =
            if backing.is_empty() { 0 } else { u64::from(header_bytes) + extension.len() as u64 };
        let mut head = b"QFI\xfb".to_vec();
        head.extend(version.to_be_bytes());
        head.extend(offset.to_be_bytes());
        head.extend(u32::try_from(backing.len()).expect("short").to_be_bytes());
        head.resize(72, 0);
        if version >= 3 {
            head.extend(features.to_be_bytes());
            head.resize(100, 0);
            head.extend(header_bytes.to_be_bytes());
        }
        [&head[..], &extension, backing.as_bytes()].concat()
    };
    vec![
        image(2, 0, "base.img", "raw"),
        image(3, 0, "/srv/vms/base.qcow2", "qcow2"),
        image(3, 0, "json:{}", "raw"),
        image(3, 0, "base.img", ""),
        image(3, 4, "", ""),
        image(3, 0, "", ""),
    ]
}

/// Returns API bodies. The number is an index of the target's table.
fn api() -> Vec<Vec<u8>> {
    let progress = json!({"phase": "pre-copy"});
    let bodies = [
        (0, json!({"spec": spec(), "start": true})),
        (1, json!({"runs_on": "b", "keep_memory": true})),
        (2, json!({"grace_ms": 5})),
        (3, json!({"to": "b", "policy": "deadline=90s", "bandwidth_limit": "1gbit", "streams": 2})),
        (4, json!({"limit": "none"})),
        (5, json!({"to": "b", "seconds": 0.5})),
        (
            6,
            json!({
                "spec": spec(), "epoch": 2, "from": "a", "qemu_version": "10.0.0", "engine": "qemu",
            }),
        ),
        (7, json!({"run": true})),
        (8, json!({"epoch": 2, "from": "a"})),
        (9, json!({"from": "a", "limit_ms": 600_000})),
        (10, json!({"id": "00", "addresses": ["10.0.0.1:7"], "references": "all"})),
        (11, json!({"addresses": ["fd00::1"]})),
        (
            12,
            json!({
                "id": "00", "vm": "web", "state": "receiving", "failure": null, "running_ns": null,
                "now_ns": 1,
            }),
        ),
        (13, json!({"complete": false, "id": "00", "addresses": []})),
        (14, json!({"id": "00", "addresses": []})),
        (15, json!({"readings": []})),
        (18, json!({"id": "00"})),
        (20, json!({"host": "1gbit", "migration": "none", "lanes": {"10.0.0.1": "500mbit"}})),
        (21, json!({"code": "busy", "message": "m", "remedy": "n"})),
    ];
    let events = [(23, "progress", &progress), (24, "failed", &bodies[18].1)];
    let event = |(which, name, data): &(u8, &str, &Value)| {
        [&[*which], format!("event: {name}\ndata: {data}\n\n").as_bytes()].concat()
    };
    let body = |(which, body): &(u8, Value)| [&[*which], body.to_string().as_bytes()].concat();
    let vm = json!({
        "name": "web", "host": "a", "state": "running", "reason": null, "in_doubt": false,
        "epoch": 3, "pid": 7, "memory_bytes": 1, "vcpus": 1, "accel": "tcg", "machine": "q35",
        "migration": null, "page_in": null, "addresses": [], "spec": spec(),
    });
    let later = [
        (25, json!({"epoch": 4})),
        (26, json!({"has": {"role": "handing-over", "epoch": 3}})),
        (26, json!({"gone": {"epoch": 3}})),
        (26, json!({"gone": {"incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 3}})),
        (26, json!("never")),
        (27, json!({"vm": null})),
        (27, json!({"vm": vm})),
        (
            6,
            json!({
                "spec": spec_of_a_peer(), "epoch": 2, "from": "a", "qemu_version": "10.0.0",
                "engine": "godwit",
            }),
        ),
    ];
    let events = events.iter().map(event);
    bodies.iter().map(body).chain(events).chain(later.iter().map(body)).collect()
}

fn records() -> Vec<Vec<u8>> {
    let record = json!({"format": 1, "desired": "running", "role": "in-doubt", "epoch": 3,
        "pages_kept_for": "b", "spec": spec()});
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("missing");
    let missing = MissingPages::create(&path, &[700, 133]).expect("a file");
    missing.insert(1, PageRange::new(3, 100));
    drop(missing);
    let file = fs::read(path).expect("the file exists");
    let handing_over = json!({"format": 1, "desired": "running", "role": "handing-over", "epoch": 3,
        "other": {"name": "b", "needs_pages": true, "runs": true}, "spec": spec_of_a_peer()});
    let gone = json!({"format": 1, "name": "web", "epoch": 3});
    vec![
        [b"\0", record.to_string().as_bytes()].concat(),
        [&[1], &file[..]].concat(),
        [b"\x02", gone.to_string().as_bytes()].concat(),
        [b"\0", handing_over.to_string().as_bytes()].concat(),
    ]
}

fn settings() -> Vec<Vec<u8>> {
    let config = r#"name = "a"
listen = ["10.77.0.11:7700"]
migration_addresses = ["10.77.0.11", "fd77::11"]
qemu_user = "nobody"
[tls]
authority = "/etc/godwit/ca.pem"
certificate = "/etc/godwit/a.pem"
key = "/etc/godwit/a.key"
[limits]
host = "5gbit"
lanes = { "10.77.0.11" = "1gbit" }
[references]
base_memory = "2GiB"
[policies.minimal-impact]
throttle_above = 0.9
[networks.lan]
bridge = "br-lan"
[peers]
b = "https://10.77.0.12:7700"
"#;
    let spec = r#"name = "web"
memory = "1GiB"
vcpus = 2
kernel = "/boot/vmlinuz"
[[disks]]
path = "/d"
format = "qcow2"
[[nics]]
network = "lan"
"#;
    let json =
        json!({"name": "web", "memory": [{"size": "1G", "backing": "private"}], "kernel": "/k"});
    vec![
        [b"\0", config.as_bytes()].concat(),
        [b"\x01", spec.as_bytes()].concat(),
        [b"\x02", json.to_string().as_bytes()].concat(),
    ]
}

fn units() -> Vec<Vec<u8>> {
    let texts = [
        "1gbit",
        "2.5mbit",
        "none",
        "1GiB",
        "1536M",
        "52:54:00:12:34:56",
        "deadline=1.5min",
        "minimal-pause",
        "0123456789abcdef0123456789abcdef",
        "https://10.0.0.1:7700",
        "unix:/run/godwit/agent.sock",
        "http://[fd::1]:1",
        "rbd:vms/shop/web",
        "[client.godwit]\nkey = AQBhR2dlAAAAABAAm1Yv8pIB3tG0H0Qa4V9zAg==\n",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Returns event streams of a host to the manager.
fn reports() -> Vec<Vec<u8>> {
    let vm = |name: &str, state: &str, epoch: u64| {
        let info = json!({
            "name": name, "host": "liar", "state": state, "epoch": epoch,
            "memory_bytes": 1 << 20, "vcpus": 1, "incarnation": "00000000000000000000000000000001",
            "accel": "kvm", "machine": "pc-q35-10.0",
            "migration": "m1", "addresses": ["10.0.0.7"], "spec": { "name": name, "kernel": "/k" },
        });
        format!("event: vm\ndata: {info}\n\n")
    };
    let host = json!({
        "name": "liar", "version": "0.8.0", "kernel": "6.18",
        "memory_available_bytes": 1, "memory_committed_bytes": 0, "huge_pages": true,
        "migration_addresses": ["10.0.0.9"], "networks": { "lan": { "bridge": "br0" } },
        "peers": { "a": "http://a:1" }, "vms": 2, "load_average_1min": 0.5,
    });
    let host = format!("event: host\ndata: {host}\n\n");
    let progress = serde_json::to_value(godwit_types::Progress::begin(1 << 20)).expect("progress");
    let migration = |from: &str, to: &str| {
        let status = json!({
            "id": "m1", "vm": "web", "from": from, "to": to, "engine": "godwit",
            "started_unix_ms": 1,
            "progress": progress, "report": null,
        });
        format!("event: migration\ndata: {status}\n\n")
    };
    let known = "event: known\ndata: null\n\n";
    let gone = "event: vm-gone\ndata: \"web\"\n\n";
    let all: [&[&str]; 5] = [
        &[&host, known],
        &[&host, &vm("own", "running", 1), known, &vm("web", "running", 1 << 40), gone],
        &[&vm("web", "migrating-in", 4), &vm("web", "running", 4), &migration("a", "liar")],
        &[&migration("liar", "b"), &vm("db", "migrating-out", 2), gone, known],
        &[&vm("web", "paused", 0), &vm("web", "stopped", u64::MAX), &vm("../x", "running", 1)],
    ];
    all.iter().map(|events| events.concat().into_bytes()).collect()
}

/// Returns responses to dry runs.
fn answers() -> Vec<Vec<u8>> {
    let dry_run = |more: Value| {
        let mut answer = json!({
            "vm": "web", "from": "a", "to": "b", "policy": "auto", "switchover_budget_ms": 300.0,
            "guest_bytes": 1 << 30, "predicted": null, "blackout_ms": null, "why": null,
            "guest": null,
            "lanes": null, "error": null, "dry_run_time_ms": 12.0,
        });
        if let (Value::Object(answer), Value::Object(more)) = (&mut answer, more) {
            answer.extend(more);
        }
        answer.to_string().into_bytes()
    };
    let predicted = |means: &str| {
        json!({
            "predicted": {
                "migration_time_ms": 900.0, "wire_bytes": 1 << 20, "rounds": 3,
                "switchover_ms": 20.0, "means": means,
            },
            "blackout_ms": 25.0, "why": "rounds alone",
            "guest": {
                "data_pages": 700, "sent_as": "raw", "wire_bytes_per_page": 4100.0,
                "written_wire_bytes_per_page": 4100.0, "dirty_pages_per_s": 10.0,
                "working_set_pages": 7,
                "samples": [{ "ms": 100.0, "pages": 7 }],
            },
            "lanes": {
                "bytes_per_s": 1e9, "round_trip_ms": 0.1, "bandwidth_limit": null,
                "known_by": "probe",
            },
        })
    };
    let error = json!({
        "error": { "code": "preflight", "message": "too little memory", "remedy": "free some" },
    });
    vec![
        dry_run(json!({})),
        dry_run(error),
        dry_run(predicted("plain")),
        dry_run(predicted("throttle")),
        dry_run(predicted("page-in")),
        dry_run(predicted("none")),
    ]
}

/// Returns responses to the manager's other requests. The number is an index of the target's table.
fn outcomes() -> Vec<Vec<u8>> {
    let progress = serde_json::to_value(godwit_types::Progress::begin(1 << 20)).expect("progress");
    let status = |report: Value| {
        json!({
            "id": "m1", "vm": "web", "from": "a", "to": "b", "engine": "godwit",
            "started_unix_ms": 1,
            "progress": progress, "report": report,
        })
    };
    let report = |outcome: &str, error: Value| {
        json!({
            "outcome": outcome, "engine": "godwit", "vm": "web", "from": "a", "to": "b",
            "migration_time_ms": 900.0, "switchover_ms": 20.0, "blackout_ms": null,
            "wire_bytes": 1 << 20, "guest_bytes": 1 << 30,
            "bandwidth_limit": null, "round_trip_ms": 0.2,
            "rounds": [{ "round": 0, "pages": 256, "zero_pages": 3, "bytes": 1 << 20,
                "duration_ms": 800.0, "dirty_pages_per_s": 10.0,
                "throttled_to_pages_per_s": null }],
            "phases": [{ "phase": "pre-copy", "duration_ms": 800.0 }],
            "switchover": null, "error": error,
        })
    };
    let error =
        json!({ "code": "lane-lost", "message": "the lane is gone", "remedy": "migrate again" });
    let host = json!({
        "name": "liar", "version": "0.8.0", "kernel": "6.18",
        "memory_available_bytes": 1, "memory_committed_bytes": 0, "huge_pages": true,
        "migration_addresses": ["10.0.0.9"], "networks": {}, "peers": {}, "vms": 0,
    });
    let vm = json!({
        "name": "web", "host": "liar", "state": "running", "epoch": 3,
        "memory_bytes": 1 << 20, "vcpus": 1, "accel": "kvm", "machine": "pc-q35-10.0",
        "addresses": [], "spec": { "name": "web", "kernel": "/k" },
    });
    let answers = [
        (0, status(Value::Null)),
        (0, status(report("completed", Value::Null))),
        (0, status(report("failed", error.clone()))),
        (0, status(report("in-doubt", error))),
        (1, json!({ "id": "m1" })),
        (2, json!({ "code": "busy", "message": "VM web is moving", "remedy": "wait" })),
        (3, vm),
        (4, host),
        (5, json!({ "peers": { "b": "https://10.0.0.2:7700" } })),
        (6, json!({ "number": 7, "certificates": 2 })),
    ];
    answers.iter().map(|(which, body)| [&[*which], body.to_string().as_bytes()].concat()).collect()
}

fn joins() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().expect("a folder");
    let signing = godwit_pki::request(&folder.path().join("key.pem")).expect("a signing request");
    let request = json!({
        "token": "godwit-join-00", "host": "a", "address": "https://10.0.0.1:7700",
        "addresses": ["10.0.0.1"],
        "request": signing,
    });
    vec![request.to_string().into_bytes(), signing.into_bytes()]
}

/// Sectors of a file with the history of load: an empty one, one in which every bit is set, and one
/// with some of everything.
fn loads() -> Vec<Vec<u8>> {
    vec![vec![0; 508], vec![0xff; 508], (0..=u8::MAX).cycle().take(508).collect()]
}

/// Returns what QEMU says: options and one request of each kind, and a write beyond the disk.
fn mirrors() -> Vec<Vec<u8>> {
    let option = |option: u32, content: &[u8]| {
        let length = u32::try_from(content.len()).expect("short");
        let head = [option.to_be_bytes(), length.to_be_bytes()].concat();
        [&b"IHAVEOPT"[..], &head, content].concat()
    };
    let request = |command: u16, at: u64, length: u32| {
        let head = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 2], &command.to_be_bytes()].concat();
        [&head[..], &7_u64.to_be_bytes(), &at.to_be_bytes(), &length.to_be_bytes()].concat()
    };
    let go = [&5_u32.to_be_bytes()[..], b"disk0", &[0, 1, 0, 3]].concat();
    let opening = [&[0_u8, 0, 0, 3][..], &option(8, &[]), &option(7, &go)].concat();
    let write = [&request(1, 4096, 8)[..], b"content."].concat();
    let rest = [request(6, 0, 4096), request(4, 8192, 1), request(3, 0, 0), request(2, 0, 0)];
    let whole = [&opening[..], &write, &rest.concat()].concat();
    let beyond = [&opening[..], &request(1, (1 << 20) - 4, 8), b"content.", &write].concat();
    vec![whole, beyond, opening]
}
