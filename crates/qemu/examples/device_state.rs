//! Measures QEMU's own time in a switchover, on this machine. It moves a guest's device state
//! between two QEMUs that share one memory file, and prints medians. No page is copied, so only
//! QEMU's own time is left.
//!
//! ```text
//! cargo run --release -p godwit-qemu --example device_state -- \
//!     KERNEL INITRD [CMDLINE] [--moves N] [--kvm] [--video none|vga|virtio]
//! ```
//!
//! It measures each order of commands: with and without a pause before the switchover, with `cont`
//! after the load or before the last byte of the state.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // An example may fail loudly.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_qemu::{
    Accel, AccelProbe, ByteSize, CONSOLE_LOG, EVENTS, LATE_BLOCK_ACTIVATE, Launch, MemoryBlock,
    MigrationStatus, OpenFiles, PAUSE_BEFORE_SWITCHOVER, QemuInfo, QemuProcess, QmpEvent, RESUME,
    ResolvedSpec, STOP, VmSpec, X_IGNORE_SHARED, inspect, wait_for_event,
};
use serde_json::json;
use tokio::sync::broadcast::Receiver;

/// Longest time for a step.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Order {
    name: &'static str,
    pause_before_switchover: bool,
    cont_before_last_byte: bool,
}

const ORDERS: [Order; 3] = [
    Order {
        name: "pause before switchover, cont after load",
        pause_before_switchover: true,
        cont_before_last_byte: false,
    },
    Order {
        name: "pause before switchover, cont before the last byte",
        pause_before_switchover: true,
        cont_before_last_byte: true,
    },
    Order {
        name: "no pause, cont before the last byte",
        pause_before_switchover: false,
        cont_before_last_byte: true,
    },
];

/// Figures of one move. Times in ms, sizes in KiB.
#[derive(Default)]
struct Figures(Vec<(&'static str, f64)>);

impl Figures {
    fn time(&mut self, name: &'static str, from: Instant, to: Instant) {
        let ms = to.saturating_duration_since(from).as_secs_f64() * 1e3;
        self.0.push((name, ms - from.saturating_duration_since(to).as_secs_f64() * 1e3));
    }

    fn size(&mut self, name: &'static str, bytes: usize) {
        self.0.push((name, bytes as f64 / 1024.0));
    }
}

/// The source's stream, with the time of each read.
struct Stream {
    pieces: Vec<(Instant, Vec<u8>)>,
    ended: Instant,
}

impl Stream {
    fn read(mut socket: UnixStream) -> Stream {
        let mut pieces = Vec::new();
        let mut buffer = vec![0; 256 << 10];
        loop {
            let length = socket.read(&mut buffer).unwrap();
            let at = Instant::now();
            if length == 0 {
                return Stream { pieces, ended: at };
            }
            pieces.push((at, buffer[..length].to_vec()));
        }
    }

    fn bytes_before(&self, moment: Instant) -> usize {
        self.pieces.iter().filter(|(at, _)| *at < moment).map(|(_, piece)| piece.len()).sum()
    }
}

async fn at_status(events: &mut Receiver<QmpEvent>, status: MigrationStatus) -> Instant {
    let wanted = |event: &QmpEvent| MigrationStatus::of_event(event).as_ref() == Some(&status);
    wait_for_event(events, &status.name(), LIMIT, wanted).await.unwrap().at
}

async fn at_event(events: &mut Receiver<QmpEvent>, name: &str) -> Instant {
    wait_for_event(events, name, LIMIT, |event| event.name == name).await.unwrap().at
}

struct Lab {
    folder: tempfile::TempDir,
    qemu: QemuInfo,
    spec: ResolvedSpec,
    ram: PathBuf,
}

impl Lab {
    async fn start(&self, number: usize, incoming: bool) -> QemuProcess {
        let run_dir = self.folder.path().join(number.to_string());
        std::fs::create_dir_all(&run_dir).unwrap();
        let launch = Launch {
            spec: self.spec.clone(),
            qemu: self.qemu.path.clone(),
            run_dir,
            ram_files: vec![self.ram.clone()],
            files: OpenFiles::open(&self.spec, &|_| true).unwrap(),
            taps: Vec::new(),
            tpm: None,
            tracker: None,
            user: None,
            sandbox: true,
            limits: Default::default(),
            incoming,
            paused: true,
        };
        launch.start().await.unwrap()
    }

    async fn move_guest(
        &self,
        source: &QemuProcess,
        number: usize,
        order: Order,
    ) -> (QemuProcess, Figures) {
        let shadow = self.start(number, true).await;
        let pause = (PAUSE_BEFORE_SWITCHOVER, order.pause_before_switchover);
        source
            .qmp
            .migrate_set_capabilities(&[(X_IGNORE_SHARED, true), (EVENTS, true), pause])
            .await
            .unwrap();
        source.qmp.migrate_set_parameters(json!({"max-bandwidth": 1_u64 << 40})).await.unwrap();
        let late = (LATE_BLOCK_ACTIVATE, true);
        shadow
            .qmp
            .migrate_set_capabilities(&[(X_IGNORE_SHARED, true), (EVENTS, true), late])
            .await
            .unwrap();
        let (theirs, ours) = UnixStream::pair().unwrap();
        source.qmp.getfd("state", theirs.as_fd()).await.unwrap();
        drop(theirs);
        let (theirs, mut to_shadow) = UnixStream::pair().unwrap();
        shadow.qmp.getfd("state", theirs.as_fd()).await.unwrap();
        drop(theirs);
        shadow.qmp.migrate_incoming("fd:state").await.unwrap();
        let reader = std::thread::spawn(move || Stream::read(ours));
        let mut figures = Figures::default();

        let mut events = source.qmp.events();
        let began = Instant::now();
        source.qmp.migrate("fd:state").await.unwrap();
        figures.time("migrate answered after", began, Instant::now());
        let stopped = at_event(&mut events, STOP).await;
        figures.time("migrate → STOP", began, stopped);
        let mut writing_since = stopped;
        if order.pause_before_switchover {
            let paused = at_status(&mut events, MigrationStatus::PreSwitchover).await;
            figures.time("STOP → pre-switchover", stopped, paused);
            writing_since = Instant::now();
            source.qmp.migrate_continue(&MigrationStatus::PreSwitchover).await.unwrap();
            figures.time("migrate-continue answered after", writing_since, Instant::now());
        }
        let completed = at_status(&mut events, MigrationStatus::Completed).await;
        let stream = tokio::task::spawn_blocking(move || reader.join().unwrap()).await.unwrap();
        let last = stream.pieces.last().unwrap().0;
        figures.time("write begins → last byte of the state", writing_since, last);
        figures.time("last byte → end of stream", last, stream.ended);
        figures.time("last byte → source completed", last, completed);
        figures.time("STOP → last byte of the state", stopped, last);
        let all: Vec<u8> = stream.pieces.iter().flat_map(|(_, piece)| piece).copied().collect();
        // The event may be read after the bytes; the last byte is held back in any case.
        let before = stream.bytes_before(stopped).min(all.len() - 1);
        figures.size("stream before STOP, KiB", before);
        figures.size("stream after STOP, KiB", all.len() - before);

        load(&shadow, &mut to_shadow, &all, before, order, &mut figures).await;
        (shadow, figures)
    }
}

/// Feeds the state to the shadow and starts its vCPUs.
async fn load(
    shadow: &QemuProcess,
    to_shadow: &mut UnixStream,
    state: &[u8],
    early: usize,
    order: Order,
    figures: &mut Figures,
) {
    let mut events = shadow.qmp.events();
    // The part from before the stop is loaded while the guest runs; the write returns when QEMU has
    // taken most of it.
    to_shadow.write_all(&state[..early]).unwrap();
    shadow.qmp.status().await.unwrap();
    let (most, last) = state[early..].split_at(state.len() - early - 1);
    let arrived = Instant::now();
    to_shadow.write_all(most).unwrap();
    if order.cont_before_last_byte {
        let cont = Instant::now();
        shadow.qmp.resume().await.unwrap();
        figures.time("cont (before the last byte) answered after", cont, Instant::now());
    }
    let last_written = Instant::now();
    to_shadow.write_all(last).unwrap();
    if order.cont_before_last_byte {
        let resumed = at_event(&mut events, RESUME).await;
        figures.time("last byte in → RESUME", last_written, resumed);
        figures.time("state in → RESUME", arrived, resumed);
        return;
    }
    let completed = at_status(&mut events, MigrationStatus::Completed).await;
    figures.time("last byte in → completed", last_written, completed);
    let cont = Instant::now();
    shadow.qmp.resume().await.unwrap();
    figures.time("cont answered after", cont, Instant::now());
    let resumed = at_event(&mut events, RESUME).await;
    figures.time("cont → RESUME", cont, resumed);
    figures.time("state in → RESUME", arrived, resumed);
}

/// Waits until the guest has written nothing for 3 s: it has booted. The measurement is of a guest,
/// not of its firmware.
async fn until_quiet(run_dir: &Path) {
    let written =
        || std::fs::metadata(run_dir.join(CONSOLE_LOG)).map_or(0, |metadata| metadata.len());
    let mut look = tokio::time::interval(Duration::from_secs(1));
    let (mut last, mut quiet_s) = (0, 0);
    while last == 0 || quiet_s < 3 {
        look.tick().await;
        let now = written();
        quiet_s = if now == last { quiet_s + 1 } else { 0 };
        last = now;
    }
}

fn print(order: &str, moves: &[Figures]) {
    println!("\n{order} ({} moves)", moves.len());
    println!("{:44} {:>9} {:>9} {:>9}", "", "least", "median", "most");
    for (index, (name, _)) in moves[0].0.iter().enumerate() {
        let mut values: Vec<f64> = moves.iter().map(|figures| figures.0[index].1).collect();
        values.sort_by(f64::total_cmp);
        let (least, median, most) = (values[0], values[values.len() / 2], values[values.len() - 1]);
        println!("{name:44} {least:9.2} {median:9.2} {most:9.2}");
    }
}

fn spec_of(arguments: &[String], qemu: &QemuInfo) -> ResolvedSpec {
    let path = |index: usize| std::path::absolute(Path::new(&arguments[index])).unwrap();
    let mut spec = VmSpec::new("figures");
    spec.memory = vec![MemoryBlock::shared(ByteSize::from_mib(1024))];
    spec.kernel = Some(path(0));
    spec.initrd = Some(path(1));
    let cmdline = arguments.get(2).filter(|text| !text.starts_with("--"));
    spec.cmdline = Some(format!("console=ttyS0 {}", cmdline.map_or("", String::as_str)));
    spec.accel = if arguments.iter().any(|text| text == "--kvm") { Accel::Kvm } else { Accel::Tcg };
    if let Some(index) = arguments.iter().position(|text| text == "--video") {
        spec.video =
            serde_json::from_value(arguments[index + 1].as_str().into()).expect("a video device");
    }
    spec.extra_devices = vec!["virtio-net-pci,romfile=".to_owned()];
    spec.resolve(qemu, &AccelProbe { kvm: false, reason: String::new() }).unwrap()
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 2 {
        eprintln!(
            "usage: device_state KERNEL INITRD [CMDLINE] [--moves N] [--kvm] [--video VIDEO]"
        );
        std::process::exit(2);
    }
    let moves = arguments.iter().position(|text| text == "--moves");
    let moves: usize =
        moves.map_or(15, |index| arguments[index + 1].parse().expect("a number after --moves"));
    let qemu = inspect("qemu-system-x86_64", None).await.unwrap();
    println!("QEMU {}", qemu.version_text());
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = spec_of(&arguments, &qemu);
    let ram = folder.path().join("ram");
    std::fs::File::create(&ram).unwrap().set_len(spec.memory_bytes()).unwrap();
    let lab = Lab { folder, qemu, spec, ram };
    let mut current = lab.start(0, false).await;
    current.qmp.resume().await.unwrap();
    until_quiet(&current.run_dir).await;
    let mut number = 0;
    for order in ORDERS {
        let mut all = Vec::new();
        for _ in 0..moves {
            number += 1;
            let (next, figures) = lab.move_guest(&current, number, order).await;
            current.quit().await;
            current = next;
            all.push(figures);
        }
        print(order.name, &all);
    }
    current.quit().await;
}
