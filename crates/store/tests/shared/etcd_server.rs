//! An etcd for tests: on loopback, in a temporary directory, ended by its own process.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use godwit_store::EtcdSettings;
use tempfile::TempDir;

/// Attempts to start. A free port may be taken before etcd binds it.
const TRIES: usize = 5;
/// Room in memory for the data of those that run at a time.
const DATA_BYTES: u64 = 2 << 30;

/// Creates a directory in memory, if there is room: a busy disk delays etcd by seconds, longer than
/// its clients wait.
fn data_dir() -> TempDir {
    let memory = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(memory).map_or(0, |found| found.f_bavail * found.f_frsize);
    let in_memory = (room >= DATA_BYTES).then(|| tempfile::tempdir_in(memory).ok()).flatten();
    in_memory.unwrap_or_else(|| tempfile::tempdir().unwrap())
}

/// An etcd with one member.
pub(crate) struct EtcdServer {
    dir: TempDir,
    data: TempDir,
    client_port: u16,
    peer_port: u16,
    more: Vec<String>,
    scheme: &'static str,
    process: Option<Child>,
}

impl EtcdServer {
    /// Returns `None`, with a message, where etcd is not installed.
    pub(crate) fn start() -> Option<EtcdServer> {
        EtcdServer::start_with("http", tempfile::tempdir().unwrap(), &[])
    }

    /// Starts with further arguments, and with the files in that directory that they name.
    pub(crate) fn start_with(
        scheme: &'static str,
        dir: TempDir,
        more: &[String],
    ) -> Option<EtcdServer> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            println!("skipped: etcd is not installed (Debian's package is etcd-server)");
            return None;
        }
        let (data, more) = (data_dir(), more.to_vec());
        let mut server =
            EtcdServer { dir, data, client_port: 0, peer_port: 0, more, scheme, process: None };
        for _ in 0..TRIES {
            let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            (server.client_port, server.peer_port) = (free(), free());
            if server.run() {
                return Some(server);
            }
        }
        panic!("etcd does not start");
    }

    /// Starts the process. Returns true once it serves, or false if it ends.
    pub(crate) fn run(&mut self) -> bool {
        let (client, peer) = (self.endpoint(), format!("http://127.0.0.1:{}", self.peer_port));
        let mut process = Command::new("etcd")
            .args(["--name", "one", "--data-dir"])
            .arg(self.data.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .args(&self.more)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(process.stderr.take().unwrap());
        let (serves, served) = mpsc::channel();
        // Read to the end, or etcd would block on a full pipe.
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                if line.contains("serving") && line.contains("client requests on") {
                    let _ = serves.send(());
                }
            }
        });
        let up = served.recv().is_ok();
        self.process = Some(process);
        if !up {
            self.kill();
        }
        up
    }

    /// Kills it, as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.client_port)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns settings for a manager. The lease is long because the test machine may be busy.
    pub(crate) fn settings(&self, prefix: &str) -> EtcdSettings {
        EtcdSettings {
            endpoints: vec![self.endpoint()],
            prefix: prefix.to_owned(),
            lease: Duration::from_secs(60),
            ..EtcdSettings::default()
        }
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}
