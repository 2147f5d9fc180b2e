//! The manager from the command line, over simulated agents: the program as manager and as the one who asks it.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_fleet::{Fleet, FleetPlan};
use serde_json::Value;

/// However slow the machine is, nothing takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// A manager that knows simulated hosts, and a hosts file that names it.
struct Managed {
    process: Child,
    hosts: PathBuf,
    /// The agents end with it.
    _runtime: tokio::runtime::Runtime,
    _fleet: Fleet,
    _dir: tempfile::TempDir,
}

impl Drop for Managed {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn godwit(hosts: &Path, line: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    for variable in ["GODWIT_MANAGER", "GODWIT_TOKEN", "GODWIT_CA"] {
        command.env_remove(variable);
    }
    command.arg("--json").arg("--hosts").arg(hosts).args(line);
    command
}

impl Managed {
    fn begin(hosts: usize) -> Managed {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display();
        let (socket, config) = (dir.path().join("control.sock"), dir.path().join("control.toml"));
        let text = format!(
            "name = \"m1\"\ninsecure = true\nsocket = \"{place}/control.sock\"\nstate_dir = \"{place}/state\"\n"
        );
        std::fs::write(&config, text).unwrap();
        let file = dir.path().join("hosts.toml");
        std::fs::write(&file, format!("[hosts.none]\napi = \"unix:{place}/none.sock\"\n[manager]\napi = \"unix:{place}/control.sock\"\n")).unwrap();
        let run = ["control", "run", "--config", config.to_str().unwrap()];
        let process = godwit(&file, &run).stderr(Stdio::null()).spawn().unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let plan = FleetPlan { hosts, vms: 0, hosts_with_vms: 1, ..FleetPlan::default() };
        let fleet = runtime.block_on(Fleet::begin(plan)).unwrap();
        let managed = Managed { process, hosts: file, _runtime: runtime, _fleet: fleet, _dir: dir };
        until("the manager answers", || UnixStream::connect(&socket).is_ok());
        until("the manager leads", || managed.ask("control status")["leader"].is_object());
        for (name, address) in managed._fleet.agents() {
            managed.ask(&format!("control host add {name} --address {address} --link 10gbit"));
        }
        until("all hosts are heard", || managed.ask("control status")["hosts_up"] == hosts);
        managed
    }

    fn run(&self, line: &str) -> (i32, Value, Value) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = godwit(&self.hosts, &words).output().unwrap();
        let read = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or(Value::Null);
        (output.status.code().unwrap_or(-1), read(&output.stdout), read(&output.stderr))
    }

    fn ask(&self, line: &str) -> Value {
        let (code, result, failure) = self.run(line);
        assert_eq!(code, 0, "{line}: {failure}");
        result
    }

    fn refused(&self, line: &str) -> (i32, String) {
        let (code, _, failure) = self.run(line);
        assert_ne!(code, 0, "{line}");
        (code, failure["error"]["message"].as_str().unwrap_or_default().to_owned())
    }
}

#[test]
fn a_vm_lives_its_life_by_the_manager() {
    let managed = Managed::begin(2);
    let made = managed.ask("vm create web --memory 1GiB --kernel /k --label app=shop --start");
    assert_eq!((made["name"].as_str(), made["state"].as_str()), (Some("web"), Some("running")));
    assert!(made["host_reason"].as_str().is_some_and(|why| !why.is_empty()), "{made}");
    let (code, message) = managed.refused("vm create web --kernel /k");
    assert_eq!(code, 4, "{message}");
    let listed = managed.ask("vm list");
    assert_eq!(
        (listed[0]["name"].as_str(), listed[0]["labels"]["app"].as_str()),
        (Some("web"), Some("shop"))
    );
    // As a host tells it, its specification with it.
    assert_eq!(managed.ask("vm show web")["spec"]["kernel"], "/k");
    assert_eq!(managed.refused("vm delete web").0, 4);
    assert_eq!(managed.ask("vm stop web --grace 1s")["state"], "stopped");
    assert_eq!(managed.ask("vm start web --skip-preflight")["state"], "running");
    assert_eq!(managed.ask("vm delete web --force")["deleted"], "web");
    assert_eq!(managed.refused("vm show web").0, 3);
    let (code, message) = managed.refused("vm create db --memory 9999GiB --kernel /k");
    assert!(code == 5 && message.contains("memory"), "{message}");
}

#[test]
fn what_hosts_share_is_listed() {
    let managed = Managed::begin(2);
    managed.ask("vm create web --kernel /k --disk path=/srv/a.raw,format=raw --nic network=lan");
    let networks = managed.ask("control networks");
    assert_eq!((networks[0]["name"].as_str(), networks[0]["vms"].as_u64()), (Some("lan"), Some(1)));
    assert_eq!(networks[0]["hosts"][1]["host"], "host-0001");
    let datastores = managed.ask("control datastores");
    assert_eq!((datastores[0]["name"].as_str(), datastores[0]["vms"].as_u64()), (Some("/srv"), Some(1)));
}
