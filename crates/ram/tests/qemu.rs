//! Stock QEMU, run by an unprivileged user, with a bare guest that writes exactly 16,384 pages
//! again and again, tracked over two RAM blocks.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_ram::{DirtyTracker, PageRange, Region, tracker_listener};
use support::{Bench, NOBODY, library, preload, skip, spawn};

/// 32-bit multiboot guest (the header's flag 16 gives its own addresses). It increments the first
/// word of each page from 16 MiB to 80 MiB, and after every 4 passes sends a dot to the serial
/// port.
#[rustfmt::skip]
const GUEST: [u8; 71] = [
    // magic, flags, checksum
    0x02, 0xb0, 0xad, 0x1b, 0x03, 0x00, 0x01, 0x00, 0xfb, 0x4f, 0x51, 0xe4,
    0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x10, 0x00, // the header and the image load at 0x100000
    // all of the file, no bss, entry
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x20, 0x00, 0x10, 0x00,
    0xbf, 0x00, 0x00, 0x00, 0x01, // 1: mov $0x1000000,%edi
    0xb9, 0x00, 0x40, 0x00, 0x00, // mov $16384,%ecx
    0xff, 0x07, // 2: incl (%edi)
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add $4096,%edi
    0x49, 0x75, 0xf5, // dec %ecx; jnz 2b
    0x45, 0xf7, 0xc5, 0x03, 0x00, 0x00, 0x00, 0x75, 0xe2, // inc %ebp; test $3,%ebp; jnz 1b
    // mov $0x3f8,%dx; mov $'.',%al; out %al,(%dx); jmp 1b
    0x66, 0xba, 0xf8, 0x03, 0xb0, 0x2e, 0xee, 0xeb, 0xd9,
];
const FIRST_PAGE: u64 = (16 << 20) / 4096;
const WRITTEN_PAGES: u64 = 16384;
/// Together a multiple of 8 KiB, as QEMU requires, but neither is a multiple of 2 MiB.
const BLOCK_KIB: [u64; 2] = [41_076, 61_348];
/// The sandbox that libvirt uses; the library's thread must work in it.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// Generous, because a busy machine boots slowly.
const PATIENCE: Duration = Duration::from_secs(60);

struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        // It has ended or can be killed, and is then waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Qemu {
    /// Waits for `count` new dots. Returns false if the guest does not send them.
    fn dots(&mut self, count: usize) -> bool {
        let until = Instant::now() + PATIENCE;
        let serial = self.0.stdout.as_mut().expect("piped");
        let old = rustix::io::ioctl_fionread(&*serial).expect("a pipe");
        let mut old = serial.take(old);
        std::io::copy(&mut old, &mut std::io::sink()).expect("they are there");
        let serial = old.into_inner();
        let mut left = count;
        while left > 0 {
            let rest = until.saturating_duration_since(Instant::now());
            let rest = rustix::time::Timespec::try_from(rest).expect("a minute");
            let mut ready = [rustix::event::PollFd::from_borrowed_fd(
                serial.as_fd(),
                rustix::event::PollFlags::IN,
            )];
            if !matches!(rustix::event::poll(&mut ready, Some(&rest)), Ok(1..)) {
                return false;
            }
            let mut bytes = [0; 64];
            match serial.read(&mut bytes[..left.min(64)]) {
                Ok(1..) => left -= bytes.iter().filter(|byte| **byte == b'.').count().min(left),
                _ => return false,
            }
        }
        true
    }

    /// Stops the guest. After the return its vCPUs are paused and all their writes are complete.
    fn stop(&self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("ours");
        rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED)
            .expect("our child");
    }
}

fn guest_blocks(bench: &Bench, accel: &str) -> Vec<Arc<Region>> {
    BLOCK_KIB
        .iter()
        .enumerate()
        .map(|(index, kib)| bench.region(&format!("{accel}.{index}"), kib / 4))
        .collect()
}

/// Starts QEMU as nobody. It inherits KVM's device, because nobody may not open it.
fn start(
    bench: &Bench,
    accel: &str,
    regions: &[Arc<Region>],
    socket: &std::path::Path,
) -> Option<Qemu> {
    bench.let_pass();
    let image = bench.dir.path().join("guest");
    std::fs::write(&image, GUEST).expect("our directory");
    let listener = tracker_listener(socket).expect("a listener");
    let mut command = Command::new("qemu-system-x86_64");
    let ram_kib: u64 = BLOCK_KIB.iter().sum();
    command.args([
        "-nodefaults",
        "-display",
        "none",
        "-serial",
        "stdio",
        "-M",
        "q35",
        "-sandbox",
        SANDBOX,
    ]);
    command.args(["-accel", accel, "-m", &format!("{ram_kib}K")]).arg("-kernel").arg(image);
    for (index, region) in regions.iter().enumerate() {
        let size = region.size_bytes();
        let path = region.path().display();
        command
            .arg("-object")
            .arg(format!("memory-backend-file,id=m{index},size={size}B,share=on,mem-path={path}"));
        let cpus = if index == 0 { ",cpus=0" } else { "" };
        command.arg("-numa").arg(format!("node,memdev=m{index}{cpus}"));
    }
    let library = bench.publish(&library());
    preload(&mut command, &library, &listener, 0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    if accel == "tcg" {
        command.uid(NOBODY.0).gid(NOBODY.1);
    }
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        return skip("qemu-system-x86_64 is not installed");
    }
    Some(Qemu(spawn(&mut command)))
}

fn take_all(tracker: &mut DirtyTracker, regions: &[Arc<Region>]) -> Vec<Vec<PageRange>> {
    let each = regions.iter().enumerate().map(|(block, region)| {
        let (all, mut out) = (region.all_pages(), Vec::new());
        let next = tracker.take_dirty(block, all, u64::MAX, &mut out).expect("takes");
        assert_eq!(next, all.end());
        out
    });
    each.collect()
}

fn track_a_guest(accel: &str) {
    let Some(bench) = Bench::tracking() else { return };
    let regions = guest_blocks(&bench, accel);
    let socket = bench.socket("tracker");
    let Some(mut qemu) = start(&bench, accel, &regions, &socket) else {
        return;
    };
    if !qemu.dots(2) {
        assert_ne!(accel, "tcg", "the guest does not run under TCG");
        skip::<()>("the bare guest does not run under KVM on this machine");
        return;
    }
    let pid = i32::try_from(qemu.0.id()).expect("pids are small");
    let mut tracker = DirtyTracker::attach(&socket, pid, &regions).expect("attaches");
    tracker.start().expect("starts");
    let split = regions[0].pages();
    let expected = [
        vec![PageRange::between(FIRST_PAGE, split)],
        vec![PageRange::between(0, FIRST_PAGE + WRITTEN_PAGES - split)],
    ];
    for round in 0..5 {
        // A dot may have been on its way already; 4 passes lie between the second and the third.
        assert!(qemu.dots(3), "the guest runs on while it is tracked");
        assert_eq!(take_all(&mut tracker, &regions), expected, "round {round}");
    }
    qemu.stop();
    take_all(&mut tracker, &regions);
    assert_eq!(tracker.count_dirty().expect("counts").pages, 0, "a paused guest writes nothing");
}

#[test]
fn exactly_what_a_guest_writes_under_tcg() {
    track_a_guest("tcg");
}

#[test]
fn exactly_what_a_guest_writes_under_kvm() {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => track_a_guest("kvm"),
        Err(error) => skip::<()>(&format!("/dev/kvm: {error}")).unwrap_or(()),
    }
}
