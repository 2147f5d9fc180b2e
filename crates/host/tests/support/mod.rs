//! A host for tests: it has its own directories, its own network namespace and a bare guest. Its
//! agents can be ended and restarted like real ones.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use godwit_api::{Client, Endpoint};
use godwit_host::{Config, RunError};
use godwit_qemu::{Accel, ByteSize, MemoryBlock, Nic, VmSpec};
use godwit_types::{Incarnation, Ownership};
use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::runtime::Runtime;

/// Time limit for anything that a test waits for.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Ownership of a shadow in these tests.
#[allow(dead_code, reason = "not every test file has a shadow")]
pub(crate) fn arriving(epoch: u64) -> Ownership {
    Ownership { incarnation: Incarnation::new(7), epoch }
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A multiboot kernel that prints a number sign, which no firmware does, and then echoes what it
/// reads from the serial line (Multiboot specification 0.6.96, address fields given).
pub(crate) fn bare_guest() -> Vec<u8> {
    const MAGIC: u32 = 0x1bad_b002;
    const FLAGS: u32 = 0x0001_0000;
    const BASE: u32 = 0x0010_0000;
    let header =
        [MAGIC, FLAGS, 0_u32.wrapping_sub(MAGIC).wrapping_sub(FLAGS), BASE, BASE, 0, 0, BASE + 32];
    let code: [u8; 24] = [
        0x66, 0xba, 0xf8, 0x03, 0xb0, 0x23, 0xee, // mov dx, 0x3f8; mov al, '#'; out dx, al
        0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74,
        0xf7, // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again
        0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, 0xeb,
        0xef, // mov dx, 0x3f8; in al, dx; out dx, al; jmp again
    ];
    header.iter().flat_map(|word| word.to_le_bytes()).chain(code).collect()
}

/// A host without an agent. Everything created for it is removed when it is dropped.
pub(crate) struct TestHost {
    dir: tempfile::TempDir,
    namespace: String,
    pub(crate) config: Config,
}

impl TestHost {
    /// Creates a host; `None`, with a printed reason, if the machine cannot have one.
    pub(crate) fn new() -> Option<TestHost> {
        let why = if !rustix::process::geteuid().is_root() {
            Some("mounting a tmpfs and making taps needs root")
        } else if !Path::new("/usr/bin/qemu-system-x86_64").exists() {
            Some("there is no /usr/bin/qemu-system-x86_64")
        } else if Command::new("ip").arg("-V").output().is_err() {
            Some("the command ip is missing")
        } else {
            None
        };
        if let Some(why) = why {
            eprintln!("skipped: {why}");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("gw").tempdir().unwrap();
        let namespace =
            format!("gwtest-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        ip(&["netns", "add", &namespace]);
        // The test's own thread enters the namespace and stays there.
        enter(&namespace);
        ip(&["-n", &namespace, "link", "set", "lo", "up"]);
        ip(&["-n", &namespace, "link", "add", "br-test", "type", "bridge"]);
        fs::write(dir.path().join("guest"), bare_guest()).unwrap();
        let at = dir.path().display();
        let text = format!(
            "name = \"a\"\nsocket = \"{at}/agent.sock\"\nstate_dir = \"{at}/state\"\n\
             run_dir = \"{at}/run\"\nqemu = \"/usr/bin/qemu-system-x86_64\"\n\
             vm_dirs = [\"{at}\"]\ninsecure = true\n[networks.lan]\nbridge = \"br-test\"\n\
             [networks.lost]\nbridge = \"br-lost\"\n[peers]\nb = \"http://127.0.0.1:9\"\n"
        );
        let config = Config::parse(&text, Path::new("test.toml")).unwrap();
        Some(TestHost { dir, namespace, config })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the specification of a small VM with the bare guest and one NIC, which has an
    /// address if the VM is `web`.
    pub(crate) fn spec(&self, name: &str) -> VmSpec {
        VmSpec {
            memory: vec![
                MemoryBlock::shared(ByteSize::from_mib(16)),
                MemoryBlock::shared(ByteSize::from_bytes(12288 + 4096)),
            ],
            accel: Accel::Tcg,
            kernel: Some(self.path().join("guest")),
            nics: vec![Nic {
                network: "lan".into(),
                address: (name == "web").then(|| "10.88.0.21".parse().unwrap()),
                ..Nic::default()
            }],
            ..VmSpec::new(name)
        }
    }

    /// Creates a runtime whose threads and tasks live in this host's network namespace.
    pub(crate) fn runtime(&self) -> Runtime {
        let namespace = self.namespace.clone();
        let enter = move || enter(&namespace);
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .on_thread_start(enter)
            .build()
            .unwrap()
    }

    /// Runs `test` in the namespace on its own runtime; all of its tasks end with it, as with a
    /// process.
    pub(crate) fn run<T>(&self, test: impl Future<Output = T>) -> T {
        let runtime = self.runtime();
        // An agent in this process catches SIGTERM, so the test must end by itself if it hangs.
        let outcome = runtime.block_on(async { tokio::time::timeout(4 * LIMIT, test).await });
        runtime.shutdown_timeout(LIMIT);
        outcome.expect("the test hangs")
    }

    /// Runs `test` beside an agent. The agent ends with the test; its VMs do not.
    pub(crate) fn with_agent<T>(&self, test: impl AsyncFnOnce(Client) -> T) -> T {
        let config = self.config.clone();
        self.run(async move {
            let client = Client::new(Endpoint::Unix(config.socket.clone()));
            let mut agent = tokio::spawn(godwit_host::run(config.clone()));
            until("the agent answers", async || {
                if agent.is_finished() {
                    let error = (&mut agent).await.unwrap().expect_err("the agent ended");
                    assert!(is_held_by_a_child(&error), "the agent ended: {error}");
                    agent = tokio::spawn(godwit_host::run(config.clone()));
                }
                client.host().await.is_ok()
            })
            .await;
            test(client).await
        })
    }

    /// Returns everything that VMs left on the host: files, guest memory, taps, processes.
    pub(crate) fn remains(&self) -> Vec<String> {
        let mut remains = Vec::new();
        for place in ["run/vms", "run/trackers", "run/ram", "state/vms"] {
            let entries = fs::read_dir(self.path().join(place)).into_iter().flatten().flatten();
            remains.extend(entries.map(|entry| entry.path().display().to_string()));
        }
        remains.extend(self.taps());
        remains.extend(self.qemus().iter().map(|pid| format!("process {pid}")));
        remains
    }

    pub(crate) fn taps(&self) -> Vec<String> {
        let links = Command::new("ip")
            .args(["-n", &self.namespace, "-o", "link", "show", "master", "br-test"])
            .output()
            .unwrap();
        String::from_utf8_lossy(&links.stdout).lines().map(str::to_owned).collect()
    }

    /// Returns the QEMUs of this host: processes with its directory on their command line.
    pub(crate) fn qemus(&self) -> Vec<i32> {
        let dir = self.path().display().to_string();
        let processes = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let arguments = fs::read(entry.path().join("cmdline")).ok()?;
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            (name.starts_with("qemu") && String::from_utf8_lossy(&arguments).contains(&dir))
                .then_some(pid)
        });
        processes.collect()
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        for pid in self.qemus() {
            kill(pid);
        }
        let _ = rustix::mount::unmount(self.path().join("run/ram"), UnmountFlags::DETACH);
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).output();
    }
}

fn enter(namespace: &str) {
    let file = fs::File::open(PathBuf::from("/run/netns").join(namespace)).unwrap();
    move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network))
        .unwrap();
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "ip {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Kills a process.
pub(crate) fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Waits until `holds` returns true; panics past the limit.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let mut poll = tokio::time::interval(Duration::from_millis(20));
    let deadline = tokio::time::Instant::now() + LIMIT;
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        poll.tick().await;
    }
}

/// Tells whether an agent could not start because a child that another test is just starting still
/// holds the previous agent's lock or port. The child closes both when its program starts.
fn is_held_by_a_child(error: &RunError) -> bool {
    match error {
        RunError::State(error) => error.message.contains("another agent"),
        RunError::Listen { source, .. } => source.kind() == std::io::ErrorKind::AddrInUse,
        _ => false,
    }
}
