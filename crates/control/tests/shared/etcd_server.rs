//! An etcd of the tests' own: on loopback, in a temporary directory, ended by its process.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::time::Duration;

use etcd_client::Client;
use godwit_control::store::{EtcdSettings, EtcdStore};
use tempfile::TempDir;

/// A port that was free may be taken by the time etcd wants it.
const TRIES: usize = 5;

/// An etcd with one member.
pub(crate) struct EtcdServer {
    dir: TempDir,
    client_port: u16,
    peer_port: u16,
    more: Vec<String>,
    scheme: &'static str,
    process: Option<Child>,
}

impl EtcdServer {
    /// None where etcd is not installed: the test says so, and is over.
    pub(crate) fn start() -> Option<EtcdServer> {
        EtcdServer::start_with("http", tempfile::tempdir().unwrap(), &[])
    }

    /// With arguments of its own, and what these name in that directory.
    pub(crate) fn start_with(scheme: &'static str, dir: TempDir, more: &[String]) -> Option<EtcdServer> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            println!("skipped: there is no etcd here (Debian's package is etcd-server)");
            return None;
        }
        let more = more.to_vec();
        let mut server = EtcdServer { dir, client_port: 0, peer_port: 0, more, scheme, process: None };
        for _ in 0..TRIES {
            let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            (server.client_port, server.peer_port) = (free(), free());
            if server.run() {
                return Some(server);
            }
        }
        panic!("etcd does not start");
    }

    /// Starts the process; returns when it serves, or false when it ends instead.
    pub(crate) fn run(&mut self) -> bool {
        let (client, peer) = (self.endpoint(), format!("http://127.0.0.1:{}", self.peer_port));
        let mut process = Command::new("etcd")
            .args(["--name", "one", "--data-dir"])
            .arg(self.dir.path().join("data"))
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
        // It is read to its end, or etcd would stop at a full pipe.
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

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.client_port)
    }

    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// As a manager is told of it. The lease is long: the tests' machine may be busy.
    pub(crate) fn settings(&self, prefix: &str) -> EtcdSettings {
        EtcdSettings {
            endpoints: vec![self.endpoint()],
            prefix: prefix.to_owned(),
            lease: Duration::from_secs(60),
            ..EtcdSettings::default()
        }
    }

    /// What an operator would do by hand.
    pub(crate) async fn raw(&self) -> Client {
        Client::connect([self.endpoint()], None).await.unwrap()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A part of an etcd that several tests share, for one of them alone.
pub(crate) struct Prefix {
    server: Arc<EtcdServer>,
    prefix: String,
}

/// The etcd that tests share: it ends with the last of them.
static SHARED: Mutex<Weak<EtcdServer>> = Mutex::new(Weak::new());
static PREFIXES: AtomicUsize = AtomicUsize::new(0);

impl Prefix {
    pub(crate) fn new() -> Option<Prefix> {
        let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let server = match shared.upgrade() {
            Some(server) => server,
            None => Arc::new(EtcdServer::start()?),
        };
        *shared = Arc::downgrade(&server);
        let prefix = format!("/test-{}", PREFIXES.fetch_add(1, Ordering::Relaxed));
        Some(Prefix { server, prefix })
    }

    pub(crate) fn open(&self) -> EtcdStore {
        EtcdStore::new(&self.server.settings(&self.prefix)).unwrap()
    }

    pub(crate) async fn remove_leader(&self) {
        let key = format!("{}/leader", self.prefix);
        self.server.raw().await.delete(key, None).await.unwrap();
    }
}
