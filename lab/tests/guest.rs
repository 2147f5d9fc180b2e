//! Boots of the lab's guests: the Linux guest under TCG behind a tap in the test's own namespace,
//! the bare guest under TCG and, if possible, under KVM.

use std::{
    fs,
    net::{SocketAddr, TcpStream, UdpSocket},
    os::unix::fs::FileExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use godwit_guest::control::{Answer, CONTROL_PORT, DiskFill, ECHO_PORT, Request, ask};
use godwit_lab::image;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const QEMU: &str = "qemu-system-x86_64";
const LIMIT: Duration = Duration::from_secs(120);
/// Size of the guest's disk.
const DISK_BYTES: u64 = 4 << 20;

/// Process of this test; killed when the test ends, whatever its result.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Network namespace of this test with a tap in it.
struct Namespace(String);

impl Namespace {
    fn create() -> anyhow::Result<Namespace> {
        let namespace = Namespace(format!("gwguest-{}", std::process::id()));
        ip(&["netns", "add", &namespace.0])?;
        let inside = |words: &[&str]| ip(&[&["-n", namespace.0.as_str()], words].concat());
        inside(&["tuntap", "add", "tap0", "mode", "tap"])?;
        inside(&["address", "add", "10.88.0.1/24", "dev", "tap0"])?;
        inside(&["address", "add", "fd88::1/64", "dev", "tap0", "nodad"])?;
        inside(&["link", "set", "tap0", "up"])?;
        Ok(namespace)
    }

    /// Moves the calling thread into the namespace.
    fn enter(&self) -> anyhow::Result<()> {
        let file = fs::File::open(Path::new("/run/netns").join(&self.0))?;
        Ok(move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&file),
            Some(LinkNameSpaceType::Network),
        )?)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&["netns", "delete", &self.0]).ok();
    }
}

fn ip(words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip").args(words).output().context("cannot start ip")?;
    ensure!(
        output.status.success(),
        "ip {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn skip_reason() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root for a network namespace".to_owned());
    }
    let found = Command::new(QEMU).arg("--version").stdout(Stdio::null()).status();
    found.err().map(|error| format!("{QEMU}: {error}"))
}

/// Calls `attempt` until it succeeds. The time limits of the kernel or the peer pace it.
fn until<T>(what: &str, mut attempt: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) if Instant::now() > deadline => {
                return Err(error.context(format!("gave up: {what}")));
            }
            Err(_) => wait_a_little(),
        }
    }
}

/// Waits with an empty poll between looks at a file or a port that gives no event.
fn wait_a_little() {
    let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    rustix::event::poll(&mut [], Some(&pause)).ok();
}

fn request(guest: SocketAddr, request: &Request) -> anyhow::Result<Answer> {
    let mut connection = TcpStream::connect_timeout(&guest, Duration::from_secs(2))?;
    connection.set_read_timeout(Some(LIMIT))?;
    Ok(ask(&mut connection, request)?)
}

fn echo(guest: SocketAddr) -> anyhow::Result<()> {
    let local: SocketAddr = if guest.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
    let socket = UdpSocket::bind(local)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    socket.send_to(b"12345678 and more", guest)?;
    let mut answer = [0; 64];
    let (length, from) = socket.recv_from(&mut answer)?;
    ensure!(from == guest && answer.get(..length) == Some(b"12345678 and more"), "another answer");
    Ok(())
}

#[test]
fn the_linux_guest_boots_works_and_checks_itself() -> anyhow::Result<()> {
    if let Some(reason) = skip_reason() {
        eprintln!("skipped: {reason}");
        return Ok(());
    }
    let image = image::build(&image::default_dir())?;
    let dir = tempfile::tempdir()?;
    let (console, disk) = (dir.path().join("console.log"), dir.path().join("disk.raw"));
    fs::File::create(&disk)?.set_len(DISK_BYTES)?;
    let namespace = Namespace::create()?;
    namespace.enter()?;
    let append = format!(
        "{} godwit.ip=10.88.0.21/24 godwit.ip6=fd88::21/64 godwit.fill=64M godwit.colour=red \
         godwit.workload=dirty:rate=2000,ws=32M,touch=words:16",
        image::COMMAND_LINE
    );
    let qemu = Command::new(QEMU)
        .args([
            "-M",
            "q35",
            "-accel",
            "tcg",
            "-m",
            "256",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args([
            "-netdev",
            "tap,id=n0,ifname=tap0,script=no,downscript=no",
            "-device",
            "virtio-net-pci,netdev=n0",
            "-device",
            "virtio-blk-pci,drive=d0",
            "-drive",
        ])
        .arg(format!("if=none,id=d0,format=raw,file={}", disk.display()))
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .args(["-append", &append])
        .spawn()?;
    let mut qemu = Running(qemu);
    let result = examine_linux_guest(&console, &mut qemu).and_then(|()| examine_disk(&disk));
    result.with_context(|| {
        format!("the console says:\n{}", fs::read_to_string(&console).unwrap_or_default())
    })
}

fn examine_linux_guest(console: &Path, qemu: &mut Running) -> anyhow::Result<()> {
    let v4: SocketAddr = format!("10.88.0.21:{CONTROL_PORT}").parse()?;
    let v6: SocketAddr = format!("[fd88::21]:{CONTROL_PORT}").parse()?;
    let status = until("the guest is ready", || {
        if let Some(status) = qemu.0.try_wait()? {
            bail!("QEMU ended: {status}");
        }
        let status = request(v4, &Request::Status {})?;
        ensure!(status.ready, "still filling");
        Ok(status)
    })?;
    assert_eq!(status.pages, 64 << 8);
    // The one bad option is reported, and nothing else went wrong.
    assert_eq!(status.problems.len(), 1, "{:?}", status.problems);
    assert!(status.problems[0].contains("colour"), "{:?}", status.problems);

    for address in ["10.88.0.21", "fd88::21"] {
        echo(SocketAddr::new(address.parse()?, ECHO_PORT))
            .with_context(|| format!("echo of {address}"))?;
    }
    let spec = "dirty:rate=max,ws=48M,zero=20,compressible=30";
    for spec in [spec, "dirty:rate=3000,order=sequential,touch=words:7", "compute", "idle"] {
        let changed = request(v6, &Request::Workload { spec: spec.to_owned() })?;
        assert!(changed.ok, "{changed:?}");
        let verdict = request(v6, &Request::Verify {})?;
        assert_eq!(
            (verdict.ok, verdict.wrong, verdict.pages),
            (true, Some(0), 64 << 8),
            "{verdict:?}"
        );
    }
    let after = request(v4, &Request::Status {})?;
    assert!(after.writes > status.writes && after.iterations > 0, "{after:?}");
    let refused = request(v4, &Request::Workload { spec: "dance".to_owned() })?;
    assert!(!refused.ok && refused.error.is_some_and(|error| error.contains("dance")));

    until("a heartbeat on the console", || {
        ensure!(fs::read_to_string(console)?.contains("HEARTBEAT t="), "none yet");
        Ok(())
    })
}

/// Lets the guest write its disk and check it, and changes a byte behind its back.
fn examine_disk(disk: &Path) -> anyhow::Result<()> {
    let guest: SocketAddr = format!("10.88.0.21:{CONTROL_PORT}").parse()?;
    let answer = |wanted: &Request| -> anyhow::Result<Answer> {
        let answer = request(guest, wanted)?;
        ensure!(answer.ok, "{answer:?}");
        Ok(answer)
    };
    let fill = |name: &str, bytes| Request::FillDisks {
        disks: vec![DiskFill { name: name.to_owned(), bytes }],
        version: 2,
    };
    for (name, bytes) in [("vda", 2 * DISK_BYTES), ("vdz", DISK_BYTES), ("../vda", DISK_BYTES)] {
        let refused = request(guest, &fill(name, bytes))?;
        assert!(!refused.ok && refused.error.is_some(), "{refused:?}");
    }
    let filled = answer(&fill("vda", DISK_BYTES))?.disks.context("no figures of disks")?;
    assert_eq!((filled.disks, filled.bytes), (1, DISK_BYTES));
    answer(&Request::WriteDisks { bytes_per_s: 8 << 20, region_bytes: DISK_BYTES / 2 })?;
    let figures = until("the guest writes its disk", || {
        let disks = answer(&Request::Status {})?.disks.context("no figures of disks")?;
        ensure!(disks.written_bytes >= 1 << 20, "not yet");
        Ok(disks)
    })?;
    assert!(figures.longest_write_ms > 0.0 && figures.failed_writes == 0, "{figures:?}");
    let verdict = answer(&Request::VerifyDisks {})?;
    assert_eq!((verdict.wrong, verdict.pages), (Some(0), DISK_BYTES / 4096));
    answer(&Request::WriteDisks { bytes_per_s: 0, region_bytes: 0 })?;
    fs::OpenOptions::new().write(true).open(disk)?.write_all_at(&[0xff; 4], 5 * 4096 + 9)?;
    let verdict = request(guest, &Request::VerifyDisks {})?;
    assert_eq!((verdict.ok, verdict.wrong), (false, Some(1)), "{verdict:?}");
    Ok(())
}

/// Boots the bare guest with its RAM in a file and returns its output until `enough`.
fn run_bare(
    accel: &str,
    mut step: impl FnMut(&fs::File, &str) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let kernel = image::build_bare(&image::default_dir())?;
    let dir = tempfile::tempdir()?;
    let (ram, console) = (dir.path().join("ram"), dir.path().join("console.log"));
    let child = Command::new(QEMU)
        .args([
            "-M",
            "q35,memory-backend=ram0",
            "-accel",
            accel,
            "-m",
            "96",
            "-nodefaults",
            "-display",
            "none",
        ])
        .arg("-object")
        .arg(format!("memory-backend-file,id=ram0,size=96M,share=on,mem-path={}", ram.display()))
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .arg("-kernel")
        .arg(&kernel)
        .stderr(Stdio::piped())
        .spawn()?;
    let mut qemu = Running(child);
    until("the bare guest's output", || {
        if let Some(status) = qemu.0.try_wait()? {
            bail!("QEMU ended: {status}");
        }
        let text = fs::read_to_string(&console)?;
        let ram = fs::OpenOptions::new().read(true).write(true).open(&ram)?;
        ensure!(step(&ram, &text)?, "output so far: {text:?}");
        Ok(())
    })
}

fn generations(text: &str) -> usize {
    text.lines().filter(|line| line.starts_with("G ")).count()
}

#[test]
fn the_bare_guest_finds_a_page_that_was_changed_behind_its_back() -> anyhow::Result<()> {
    if let Some(reason) = skip_reason() {
        eprintln!("skipped: {reason}");
        return Ok(());
    }
    let mut changed = false;
    run_bare("tcg", |ram, text| {
        if generations(text) < 2 {
            return Ok(false);
        }
        ensure!(changed || !text.contains("BAD"), "the guest reported a correct page as wrong");
        // Changes the last word of the page at 32 MiB at each poll until the guest reports it. A
        // change just between the guest's check and its write goes unseen.
        if !text.contains("BAD") {
            ram.write_all_at(&[0xff; 4], (32 << 20) + 4092)?;
            changed = true;
        }
        Ok(text.contains("BAD 02000000"))
    })
}

#[test]
fn the_bare_guest_runs_under_kvm() -> anyhow::Result<()> {
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if let Some(reason) =
        skip_reason().or_else(|| kvm.err().map(|error| format!("/dev/kvm: {error}")))
    {
        eprintln!("skipped: {reason}");
        return Ok(());
    }
    run_bare("kvm", |ram, text| {
        let mut word = [0; 4];
        ram.read_exact_at(&mut word, 16 << 20)?;
        ensure!(!text.contains("BAD"), "the guest found a wrong page");
        Ok(generations(text) >= 2 && u32::from_le_bytes(word) >= 64)
    })
}
