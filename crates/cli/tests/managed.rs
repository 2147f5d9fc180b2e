//! The manager from the command line, with simulated agents: the program is both the manager and
//! its client.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_fleet::{Fleet, FleetPlan};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Limit that no step reaches, even on a slow machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A manager with simulated hosts, and a hosts file that names it.
struct Managed {
    process: Child,
    hosts: PathBuf,
    /// Runs the agents; they end with it.
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

/// Starts the manager in the directory of the hosts file.
fn manager(hosts: &Path) -> Child {
    let config = hosts.with_file_name("control.toml");
    let run = ["control", "run", "--config", config.to_str().unwrap()];
    godwit(hosts, &run).stderr(Stdio::null()).spawn().unwrap()
}

fn signal(to: &Child, which: Signal) {
    kill_process(Pid::from_child(to), which).unwrap();
}

/// Returns whether a process has installed its SIGINT handler.
fn catches_interrupts(process: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
    let bit = Signal::INT.as_raw() - 1;
    u64::from_str_radix(caught, 16).unwrap() >> bit & 1 == 1
}

/// Returns the exit code of a command.
fn ended(mut command: Child) -> Option<i32> {
    command.wait().unwrap().code()
}

impl Managed {
    fn await_leading(&self) {
        let socket = self.hosts.with_file_name("control.sock");
        until("the manager answers", || UnixStream::connect(&socket).is_ok());
        until("the manager leads", || self.ask("control status")["leader"].is_object());
    }

    /// Kills the manager and starts it again.
    fn start_again(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.process = manager(&self.hosts);
        self.await_leading();
    }

    /// Starts a command that runs beside others.
    fn leave(&self, line: &str) -> Child {
        let words: Vec<&str> = line.split_whitespace().collect();
        godwit(&self.hosts, &words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Returns the host of a running VM, and another host.
    fn with_vm(&self, name: &str) -> (&'static str, &'static str) {
        let made = self.ask(&format!("vm create {name} --kernel /k --start"));
        if made["host"] == "host-0000" {
            ("host-0000", "host-0001")
        } else {
            ("host-0001", "host-0000")
        }
    }

    fn begin(hosts: usize) -> Managed {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display();
        let config = dir.path().join("control.toml");
        let text = format!(
            "name = \"m1\"\ninsecure = true\nsocket = \"{place}/control.sock\"\n\
             state_dir = \"{place}/state\"\n"
        );
        std::fs::write(&config, text).unwrap();
        let file = dir.path().join("hosts.toml");
        let text = format!(
            "[hosts.none]\napi = \"unix:{place}/none.sock\"\n\
             [manager]\napi = \"unix:{place}/control.sock\"\n"
        );
        std::fs::write(&file, text).unwrap();
        let process = manager(&file);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let plan = FleetPlan { hosts, vms: 0, hosts_with_vms: 1, ..FleetPlan::default() };
        let fleet = runtime.block_on(Fleet::begin(plan)).unwrap();
        let managed = Managed { process, hosts: file, _runtime: runtime, _fleet: fleet, _dir: dir };
        managed.await_leading();
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

    /// Returns the text output for people.
    fn text(&self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        command.env_remove("GODWIT_MANAGER").env_remove("GODWIT_TOKEN").env_remove("GODWIT_CA");
        let output = command.arg("--hosts").arg(&self.hosts).args(words).output().unwrap();
        assert!(output.status.success(), "{line}");
        let text = String::from_utf8(output.stdout).unwrap();
        println!("{line}\n{text}");
        text
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
    // As the host reports it, with its specification.
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
fn without_its_manager_a_vm_is_shown_and_not_changed() {
    let mut managed = Managed::begin(1);
    managed.ask("vm create web --kernel /k");
    managed.process.kill().unwrap();
    managed.process.wait().unwrap();
    let (name, address) = managed._fleet.agents().iter().next().unwrap();
    let file = format!("[hosts.{name}]\napi = \"{address}\"\n");
    let text = std::fs::read_to_string(&managed.hosts).unwrap();
    let (_, of_manager) = text.split_once("[manager]").unwrap();
    std::fs::write(&managed.hosts, format!("{file}[manager]{of_manager}")).unwrap();
    for line in ["vm delete web", "vm start web", "vm stop web"] {
        let (code, _, failure) = managed.run(line);
        assert_eq!(code, 6, "{line}: {failure}");
        assert!(failure["error"]["remedy"].as_str().unwrap().contains("--host"), "{failure}");
    }
    assert_eq!(managed.ask("vm list")[0]["state"], "stopped");
}

#[test]
fn what_hosts_share_is_listed() {
    let managed = Managed::begin(2);
    managed.ask("vm create web --kernel /k --disk path=/srv/a.raw,format=raw --nic network=lan");
    let networks = managed.ask("control networks");
    assert_eq!((networks[0]["name"].as_str(), networks[0]["vms"].as_u64()), (Some("lan"), Some(1)));
    assert_eq!(networks[0]["hosts"][1]["host"], "host-0001");
    let datastores = managed.ask("control datastores");
    assert_eq!(
        (datastores[0]["name"].as_str(), datastores[0]["vms"].as_u64()),
        (Some("/srv"), Some(1))
    );
}

#[test]
fn rules_are_made_obeyed_and_deleted() {
    let managed = Managed::begin(3);
    let made = managed.ask("control rule create db-apart apart --vm db1,db2");
    assert_eq!((made["state"].as_str(), made["absent"][1].as_str()), (Some("kept"), Some("db2")));
    let one = managed.ask("vm create db1 --memory 1GiB --kernel /k")["host"].clone();
    let other = managed.ask("vm create db2 --memory 1GiB --kernel /k")["host"].clone();
    assert_ne!(one, other);
    let (code, message) = managed.refused("control rule create near together --vm db2,db1");
    assert!(code == 2 && message.contains("db-apart"), "{message}");
    managed.ask("control rule create near together --vm db2,db1 --should");
    let listed = managed.ask("control rule list");
    assert_eq!(
        (listed[0]["state"].as_str(), listed[1]["state"].as_str()),
        (Some("kept"), Some("broken"))
    );
    let text = managed.text("control rule show near");
    assert!(text.contains("broken by") && text.contains("db"), "{text}");
    assert_eq!(managed.refused("control rule create near apart --vm x,y").0, 4);
    assert_eq!(managed.ask("control rule delete near")["deleted"], "near");
    assert_eq!(managed.refused("control rule show near").0, 3);
}

#[test]
fn the_cpu_baseline_is_planned_set_and_cleared() {
    let managed = Managed::begin(2);
    managed.ask("vm create old --memory 1GiB --kernel /k --start");
    let shown = managed.ask("control cpu-baseline show");
    assert_eq!(
        (shown["baseline"].is_null(), shown["common"]["cpu_model"].as_str()),
        (true, Some("Westmere-v1"))
    );
    let plan = managed.ask("control cpu-baseline set Westmere-v1,-avx2 --plan");
    assert_eq!(
        (plan["set"].as_bool(), plan["must_restart_count"].as_u64()),
        (Some(false), Some(1))
    );
    assert!(managed.ask("control cpu-baseline show")["baseline"].is_null());
    let (code, message) = managed.refused("control cpu-baseline set Westmere-v1,+warp");
    assert!(code == 5 && message.contains("warp"), "{code} {message}");
    assert_eq!(managed.refused("control cpu-baseline set Zen9").0, 2);
    assert_eq!(managed.ask("control cpu-baseline set Westmere-v1,-avx2")["set"], true);
    assert_eq!(
        managed.ask("vm create new --memory 1GiB --kernel /k --start")["spec"]["cpu_model"],
        "Westmere-v1,-avx2"
    );
    let vms = &managed.ask("control cpu-baseline show --vms")["must_restart"];
    assert_eq!((vms.as_array().unwrap().len(), vms[0]["beyond"][0].as_str()), (1, Some("avx2")));
    let short =
        managed.ask("control cpu-baseline set Westmere-v1,+warp --without host-0000,host-0001");
    assert_eq!(short["falls_short"].as_array().unwrap().len(), 2);
    let text = managed.text("control host list");
    assert!(text.contains("below the cpu baseline"), "{text}");
    let text = managed.text("control cpu-baseline show --vms");
    assert!(text.contains("falls-short") && text.contains("warp"), "{text}");
    managed.ask("control cpu-baseline clear");
    assert_eq!(managed.refused("control cpu-baseline clear").0, 3);
}

#[test]
fn limits_hold_at_once_and_are_taken_back() {
    let managed = Managed::begin(2);
    let made = managed.ask("vm create web --kernel /k --start");
    let to = if made["host"] == "host-0000" { "host-0001" } else { "host-0000" };
    let set = managed.ask("control limits set --in-all 0 --datastore /srv=3");
    assert_eq!((set["in_all"].as_u64(), set["datastores"]["/srv"].as_u64()), (Some(0), Some(3)));
    assert_eq!(managed.ask("control status")["limits"], managed.ask("control limits show"));
    let asked = managed.ask(&format!("control move create web --to {to} --detach"));
    assert_eq!(asked["waits"]["code"], "total-limit", "{asked}");
    assert!(managed.ask("control limits set --in-all default")["in_all"].is_null());
    let show = format!("control move show {}", asked["id"].as_str().unwrap());
    until("the move is done", || managed.ask(&show)["state"] == "done");
    let host =
        managed.ask("control host set host-0000 --most-moves 3 --link 25gbit --label rack=r1");
    assert_eq!(
        (host["most_moves"].as_u64(), host["labels"]["rack"].as_str()),
        (Some(3), Some("r1"))
    );
    let host = managed.ask("control host set host-0000 --most-moves default --no-labels");
    assert!(host["most_moves"].is_null() && host["labels"]["rack"].is_null(), "{host}");
    assert_eq!(host["link_bits_per_s"], 25_000_000_000_u64);
    assert_eq!(managed.refused("control limits set").0, 2);
    assert_eq!(managed.refused("control limits set --datastore srv=3").0, 2);
}

#[test]
fn events_are_printed_a_line_each() {
    let managed = Managed::begin(1);
    // Event numbers start from the clock: events before the manager's start are unavailable.
    let mut follows = godwit(&managed.hosts, &["control", "events", "--behind", "0"]);
    let mut follows = follows.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(follows.stdout.take().unwrap()).lines();
    let mut lines = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert_eq!(lines.next().unwrap()["kind"], "missed");
    managed.ask("vm create web --kernel /k");
    let mut before = None;
    let vm = lines.find(|event| {
        let number = event["number"].as_u64().unwrap();
        assert!(before.is_none_or(|before| number == before + 1), "{event}");
        before = Some(number);
        event["kind"] == "vm"
    });
    assert_eq!(vm.unwrap()["data"]["name"], "web");
    follows.kill().unwrap();
    follows.wait().unwrap();
}

#[test]
fn an_interrupt_ends_the_looking_alone_whatever_is_under_way() {
    let managed = Managed::begin(2);
    let (from, to) = managed.with_vm("web");
    managed.ask("control limits set --in-all 0");
    let looks = managed.leave(&format!("control move create web --to {to}"));
    until("the move is in", || managed.ask("control move list")[0]["state"] == "waiting");
    signal(&looks, Signal::INT);
    assert_eq!(ended(looks), Some(130));
    assert_eq!(managed.ask("control move list")[0]["state"], "waiting");
    // A stopped manager accepts connections and never answers.
    signal(&managed.process, Signal::STOP);
    for line in ["control move create web".to_owned(), format!("host drain {from}")] {
        let asks = managed.leave(&line);
        until("it can be interrupted", || catches_interrupts(&asks));
        signal(&asks, Signal::INT);
        assert_eq!(ended(asks), Some(130), "{line}");
    }
    signal(&managed.process, Signal::CONT);
}

#[test]
fn a_command_that_waits_ends_as_what_it_waits_for() {
    let managed = Managed::begin(3);
    let (from, to) = managed.with_vm("web");
    managed.ask("control limits set --in-all 0");
    let looks = managed.leave(&format!("control move create web --to {to}"));
    until("the move is in", || managed.ask("control move list")[0]["state"] == "waiting");
    let id = managed.ask("control move list")[0]["id"].as_str().unwrap().to_owned();
    managed.ask(&format!("control move cancel {id}"));
    assert_eq!(ended(looks), Some(8));
    // Also within the same second, the running drain is selected.
    for _ in 0..4 {
        managed.ask(&format!("host drain {from} --detach"));
        assert_eq!(managed.ask(&format!("host drain {from} --cancel"))["state"], "cancelled");
    }
    let (code, message) = managed.refused(&format!("host drain {from} --cancel"));
    assert!(code == 4 && message.contains("is cancelled"), "{code} {message}");
    assert_eq!(managed.refused("host drain host-0002 --undo").0, 3);
    let looks = managed.leave(&format!("host drain {from}"));
    until("the drain runs", || {
        let drains = managed.ask("host drains");
        drains.as_array().unwrap().iter().any(|drain| drain["state"] == "running")
    });
    managed.ask(&format!("host drain {from} --cancel"));
    assert_eq!(ended(looks), Some(8));
    managed.ask("control limits set --in-all default");
    managed.ask(&format!("host drain {from}"));
    // The VM is moved again by hand, so it does not return when the drain is undone.
    let there = managed.ask("vm show web")["host"].as_str().unwrap().to_owned();
    let third = ["host-0000", "host-0001", "host-0002"];
    let third = third.into_iter().find(|host| *host != from && *host != there).unwrap();
    managed.ask(&format!("control move create web --to {third}"));
    let (code, undone, _) = managed.run(&format!("host drain {from} --undo"));
    assert_eq!((code, undone["state"].as_str()), (1, Some("undone")), "{undone}");
    managed.ask(&format!("host drain {third}"));
    assert_eq!(managed.ask(&format!("host drain {third} --undo"))["vms"][0]["state"], "back");
}

#[test]
fn a_drain_is_followed_while_the_manager_is_started_again() {
    let mut managed = Managed::begin(2);
    let (from, to) = managed.with_vm("web");
    managed.ask("control limits set --in-all 0");
    let looks = managed.leave(&format!("host drain {from}"));
    until("the drain runs", || managed.ask("host drains")[0]["state"] == "running");
    managed.start_again();
    managed.ask("control limits set --in-all default");
    assert_eq!(ended(looks), Some(0));
    assert_eq!(managed.ask("vm show web")["host"], to);
}

#[test]
fn whatever_is_refused_says_what_to_do() {
    let managed = Managed::begin(1);
    for line in [
        "control move show v1",
        "control move cancel v1",
        "control host show none",
        "control rule show none",
        "vm show none",
        "host drain none",
        "control status --manager unix:/nonexistent/control.sock",
        "control --host a status",
    ] {
        let (code, _, failure) = managed.run(line);
        let remedy = failure["error"]["remedy"].as_str().unwrap_or_default();
        assert!(code != 0 && !remedy.is_empty() && !remedy.contains("/api/"), "{line}: {failure}");
    }
}
