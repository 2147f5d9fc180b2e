//! Managers as separate processes, which a test can kill as a crash would. The process is the
//! test's own program, run again.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use godwit_api::control::{Cluster, ManagerClient, Problem};
use godwit_api::{Client, Endpoint};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Environment variable with the path of the configuration for a process of this test.
pub(crate) const CONFIG_VARIABLE: &str = "GODWIT_TEST_MANAGER";
/// Deadline of every wait, longer than any wait takes even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) struct ManagerProcess {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) socket: PathBuf,
    config: PathBuf,
    process: Option<Child>,
}

impl ManagerProcess {
    /// Starts a manager. `more` is added to its configuration; `tls` says whether that has
    /// certificates.
    pub(crate) fn start(dir: &Path, name: &str, tls: bool, more: &str) -> ManagerProcess {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (config, socket) = (dir.join(format!("{name}.toml")), dir.join(format!("{name}.sock")));
        let insecure = if tls { "" } else { "insecure = true\n" };
        let (state, own) = (dir.join(name), socket.display());
        let text = format!(
            "name = \"{name}\"\nlisten = [\"127.0.0.1:{port}\"]\nsocket = \"{own}\"\n\
             state_dir = \"{}\"\n{insecure}{more}",
            state.display()
        );
        fs::write(&config, text).unwrap();
        let scheme = if tls { "https" } else { "http" };
        let address = format!("{scheme}://127.0.0.1:{port}");
        let mut manager =
            ManagerProcess { name: name.to_owned(), address, socket, config, process: None };
        manager.run();
        manager
    }

    /// Starts the process again.
    pub(crate) fn run(&mut self) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.config.with_extension("log"))
            .unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "manager_process", "--ignored", "--nocapture"])
            .env(CONFIG_VARIABLE, &self.config)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.process = Some(process.unwrap());
    }

    /// Ends the process as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Shuts the process down.
    pub(crate) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let pid = rustix::process::Pid::from_child(&process);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            assert!(process.wait().unwrap().success());
        }
    }

    /// Returns a client with root's rights, over the manager's own socket.
    pub(crate) fn root(&self) -> ManagerClient {
        ManagerClient::new(Endpoint::Unix(self.socket.clone()), None)
    }

    pub(crate) async fn cluster(&self) -> Option<Cluster> {
        self.root().cluster().await.ok()
    }

    /// Returns whether the manager says that it leads.
    pub(crate) async fn leads(&self) -> bool {
        let cluster = self.cluster().await;
        cluster.and_then(|cluster| cluster.leader).is_some_and(|leader| leader.is_self)
    }

    /// Sends a request over the network, with a token.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        token: &str,
        body: Option<Value>,
    ) -> Answer {
        self.ask_at(self.address.parse().unwrap(), method, path, Some(token), body).await
    }

    /// Sends a request over the manager's own socket.
    pub(crate) async fn ask_as_root(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Answer {
        self.ask_at(Endpoint::Unix(self.socket.clone()), method, path, None, body).await
    }

    async fn ask_at(
        &self,
        endpoint: Endpoint,
        method: Method,
        path: &str,
        token: Option<&str>,
        body: Option<Value>,
    ) -> Answer {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers
                .insert(AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {token}")).unwrap());
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let client = Client::new(endpoint);
        let connection = client.connection().await.unwrap();
        let response =
            client.pass_on(connection, method, path, headers, body.into()).await.unwrap();
        let status = response.status();
        let body = to_bytes(Body::new(response.into_body()), 16 << 20).await.unwrap();
        Answer { status, body: serde_json::from_slice(&body).unwrap_or(Value::Null) }
    }

    /// Returns the manager's log, for a failed test.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.config.with_extension("log")).unwrap_or_default()
    }
}

impl Drop for ManagerProcess {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            println!("--- {}\n{}", self.name, self.log());
        }
    }
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    body: Value,
}

impl Answer {
    pub(crate) fn read<T: DeserializeOwned>(self) -> T {
        assert!(self.status.is_success(), "{} {}", self.status, self.body);
        serde_json::from_value(self.body).unwrap()
    }

    pub(crate) fn problem(self) -> Problem {
        serde_json::from_value(self.body).unwrap()
    }
}

/// Waits for a leader and returns its index.
pub(crate) async fn leader_of(managers: &[ManagerProcess]) -> usize {
    let started = Instant::now();
    loop {
        for (at, manager) in managers.iter().enumerate() {
            if manager.process.is_some() && manager.leads().await {
                return at;
            }
        }
        pause(started, "no manager leads").await;
    }
}

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !holds().await {
        pause(started, what).await;
    }
}

async fn pause(started: Instant, what: &str) {
    assert!(started.elapsed() < DEADLINE, "{what}: not within {DEADLINE:?}");
    tokio::time::sleep(Duration::from_millis(20)).await;
}
