//! Shared helpers of the tests: a tmpfs of their own, the built tracker library, and processes to
//! be tracked.
#![allow(
    dead_code,
    clippy::expect_used,
    clippy::panic,
    reason = "each test program uses its part, and a failure here fails the test"
)]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use godwit_ram::tracking::protocol::{ENV_LISTENER, ENV_PEER_UID};
use godwit_ram::{RamDir, Region, TrackError, check_kernel, tracker_listener};
use tempfile::TempDir;

/// nobody and nogroup of Debian.
pub(crate) const NOBODY: (u32, u32) = (65534, 65534);

/// Directory with a RAM tmpfs in a mount namespace of the calling thread. The kernel removes it
/// with the thread, whatever becomes of the test.
pub(crate) struct Bench {
    pub(crate) dir: TempDir,
    pub(crate) ram: RamDir,
}

impl Bench {
    /// Creates a bench. Returns `None`, and prints the reason, if this machine cannot run the test.
    pub(crate) fn new() -> Option<Bench> {
        if !rustix::process::geteuid().is_root() {
            return skip("mounting a tmpfs and a process of another user need root");
        }
        use rustix::thread::{UnshareFlags, unshare_unsafe};
        // SAFETY: only this thread's view of the mounts changes; descriptors and memory stay shared
        // as before.
        let unshared = unsafe { unshare_unsafe(UnshareFlags::NEWNS) };
        if let Err(errno) = unshared {
            return skip(&format!("no mount namespace: {errno}"));
        }
        let private = rustix::mount::MountPropagationFlags::PRIVATE
            | rustix::mount::MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).expect("the namespace is ours");
        let dir = TempDir::new().expect("a directory");
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).expect("our directory");
        let ram = RamDir::open(&dir.path().join("ram")).expect("root may mount");
        Some(Bench { dir, ram })
    }

    /// Creates a bench as [`Bench::new`] does, if the kernel can track.
    pub(crate) fn tracking() -> Option<Bench> {
        match check_kernel() {
            Ok(()) => Bench::new(),
            Err(error @ (TrackError::KernelTooOld { .. } | TrackError::NoUserfaultfd { .. })) => {
                skip(&error.to_string())
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn region(&self, name: &str, pages: u64) -> Arc<Region> {
        let path = self.ram.path().join(name);
        Arc::new(Region::create(&path, pages * 4096, Some(NOBODY)).expect("a region"))
    }

    /// Lets the user nobody reach its own files by their paths; a QEMU inherits them open instead.
    pub(crate) fn let_pass(&self) {
        let passable = std::fs::Permissions::from_mode(0o711);
        std::fs::set_permissions(self.ram.path(), passable).expect("ours");
    }

    /// Copies a program or library to where the user nobody can reach it.
    pub(crate) fn publish(&self, file: &Path) -> PathBuf {
        let copy = self.dir.path().join(file.file_name().expect("a file"));
        if copy.exists() {
            return copy;
        }
        std::fs::copy(file, &copy).expect("copies");
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755)).expect("our copy");
        copy
    }

    /// Returns the path of a socket in a directory that only root can enter, as the agent's is.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        let dir = self.dir.path().join("sockets");
        std::fs::create_dir_all(&dir).expect("a directory");
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))
            .expect("our directory");
        dir.join(name)
    }
}

pub(crate) fn skip<T>(reason: &str) -> Option<T> {
    eprintln!("skipped: {reason}");
    None
}

/// Returns target/release (or debug).
fn profile_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("a test runs from a file");
    let deps = exe.parent().expect("target/PROFILE/deps");
    deps.parent().expect("target/PROFILE").to_owned()
}

/// Builds what `cargo test` does not build for this test by itself. It is quick if the result
/// exists already.
fn build(arguments: &[&str]) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.arg("build").args(arguments);
    if profile_dir().ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let built = built.expect("cargo runs the tests, so it is there");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// Returns the library built from the present sources.
pub(crate) fn library() -> PathBuf {
    build(&["-p", "godwit-tracker"]);
    profile_dir().join("libgodwit_tracker.so")
}

fn writer() -> PathBuf {
    build(&["-p", "godwit-ram", "--example", "memory_writer"]);
    profile_dir().join("examples/memory_writer")
}

/// Gives a command the tracker library, as the agent does.
pub(crate) fn preload(command: &mut Command, library: &Path, listener: &OwnedFd, peer_uid: u32) {
    let fd = listener.as_raw_fd();
    command
        .env("LD_PRELOAD", library)
        .env(ENV_LISTENER, fd.to_string())
        .env(ENV_PEER_UID, peer_uid.to_string());
    // SAFETY: only fcntl is called between fork and exec, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            let listener = std::os::fd::BorrowedFd::borrow_raw(fd);
            Ok(rustix::io::fcntl_setfd(listener, rustix::io::FdFlags::empty())?)
        })
    };
}

/// Starts a program that was just copied. A process that another test forked meanwhile may hold the
/// copy open for writing until it executes its own program; until then the start fails with "busy"
/// and is retried.
pub(crate) fn spawn(command: &mut Command) -> Child {
    loop {
        match command.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                std::thread::yield_now();
            }
            child => return child.expect("the program starts"),
        }
    }
}

/// How a [`Writer`] is started.
#[derive(Clone, Copy)]
pub(crate) struct Start {
    pub(crate) kind: &'static str,
    pub(crate) preloaded: bool,
    pub(crate) peer_uid: u32,
}

impl Default for Start {
    fn default() -> Start {
        Start { kind: "shared", preloaded: true, peer_uid: 0 }
    }
}

/// The memory_writer example, running as nobody. Killed when dropped.
pub(crate) struct Writer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub(crate) socket: PathBuf,
}

impl Writer {
    pub(crate) fn start(bench: &Bench, name: &str, files: &[&Path], how: Start) -> Writer {
        bench.let_pass();
        let program = bench.publish(&writer());
        let library = bench.publish(&library());
        let socket = bench.socket(name);
        let listener = tracker_listener(&socket).expect("a listener");
        let mut command = Command::new(program);
        for file in files {
            command.arg(format!("{}:{}", how.kind, file.display()));
        }
        command.uid(NOBODY.0).gid(NOBODY.1);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if how.preloaded {
            preload(&mut command, &library, &listener, how.peer_uid);
        }
        let mut child = spawn(&mut command);
        let mut writer = Writer {
            input: child.stdin.take().expect("piped"),
            output: BufReader::new(child.stdout.take().expect("piped")),
            child,
            socket,
        };
        assert_eq!(writer.line(), "ready");
        writer
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("pids are small")
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the writer answers");
        line.trim_end().to_owned()
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("the writer reads");
        self.line()
    }

    /// Runs `COMMAND MAPPING PAGE COUNT`.
    pub(crate) fn run(&mut self, command: &str, mapping: usize, first: u64, count: u64) {
        assert_eq!(self.ask(&format!("{command} {mapping} {first} {count}")), "done");
    }

    /// Returns the first byte of each page, as the process sees it.
    pub(crate) fn bytes(&mut self, mapping: usize, first: u64, count: u64) -> Vec<u8> {
        let line = self.ask(&format!("bytes {mapping} {first} {count}"));
        line.split_whitespace().map(|byte| byte.parse().expect("a byte")).collect()
    }

    /// Returns the same bytes as [`Writer::bytes`], read by several threads, which must agree and
    /// see no half-written page.
    pub(crate) fn crowd(
        &mut self,
        mapping: usize,
        first: u64,
        count: u64,
        threads: u64,
    ) -> Vec<u8> {
        let line = self.ask(&format!("crowd {mapping} {first} {count} {threads}"));
        let byte = |word: &str| word.parse().unwrap_or_else(|_| panic!("{line}"));
        line.split_whitespace().map(byte).collect()
    }

    /// Returns how many descriptors the process has open.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs").count()
    }

    /// Writes every `step`th of `count` pages.
    pub(crate) fn scatter(&mut self, mapping: usize, first: u64, count: u64, step: usize) {
        assert_eq!(self.ask(&format!("write {mapping} {first} {count} {step}")), "done");
    }

    pub(crate) fn end(&mut self) {
        // It has ended or can be killed, and is then waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Two blocks, and a writer that has mappings 0 and 1 of them, and 2, again of block 0.
pub(crate) struct TwoBlocks {
    pub(crate) bench: Bench,
    pub(crate) regions: Vec<Arc<Region>>,
    pub(crate) writer: Writer,
}

impl TwoBlocks {
    /// Creates blocks of so many pages. `prepare` is called with each before the writer maps it.
    pub(crate) fn new(pages: [u64; 2], prepare: impl Fn(&Region)) -> Option<TwoBlocks> {
        let bench = Bench::tracking()?;
        let regions: Vec<_> =
            ["a", "b"].iter().zip(pages).map(|(name, pages)| bench.region(name, pages)).collect();
        regions.iter().for_each(|region| prepare(region));
        let files = [regions[0].path(), regions[1].path(), regions[0].path()];
        let writer = Writer::start(&bench, "tracker", &files, Start::default());
        Some(TwoBlocks { bench, regions, writer })
    }
}

/// Returns how many mappings of `file` the kernel lists for the process.
pub(crate) fn mappings_of(pid: i32, file: &Path) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    let name = file.to_str().expect("plain names");
    maps.lines().filter(|line| line.ends_with(name)).count()
}

/// Generator of the same sequence of numbers in each run (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}
