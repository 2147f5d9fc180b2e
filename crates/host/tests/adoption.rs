//! Adoptions that an agent's end cut off: the next agent decides by record and note.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use godwit_api::{AdoptGuest, CreateVm, ErrorCode, ForeignPlace, VmState};
use godwit_host::Agent;
use godwit_migration::handover::{Known, Role, Standing};
use godwit_qemu::{Uuid, VmName};
use godwit_types::Ownership;
use serde_json::{Value, json};
use support::{TestHost, until};

/// Defines a VM, and rewrites its record and a note as an adoption leaves them whose agent ended.
fn cut_off(host: &TestHost, role: &str, committed: bool) -> PathBuf {
    let spec = host.spec("web");
    let info = host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let create = CreateVm { spec, start: false, vm_dirs_only: false, new_disks: Vec::new() };
        agent.create(create).await.unwrap()
    });
    let path = host.path().join("state/vms/web/vm.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["role"] = role.into();
    record["desired"] = "running".into();
    fs::write(&path, record.to_string()).unwrap();
    let ownership = Ownership { incarnation: info.incarnation, epoch: info.epoch };
    let note = json!({
        // No process has this number and start.
        "from": {"qmp": "/nonexistent/qmp"}, "pid": i32::MAX, "start_time": 1, "vm": "web",
        "ownership": ownership, "undefine": false, "committed": committed,
    });
    let notes = host.path().join("state/adoptions");
    fs::create_dir_all(&notes).unwrap();
    fs::write(notes.join("web.json"), note.to_string()).unwrap();
    notes.join("web.json")
}

/// Starts an agent, which decides; returns the VM's state, if it has the VM.
fn decided(host: &TestHost, note: &Path) -> Option<VmState> {
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        until("the adoption is decided", async || !note.exists()).await;
        agent.vm_info("web").ok().map(|vm| vm.state)
    })
}

#[test]
fn a_guest_that_cannot_have_run_here_is_the_other_programs() {
    let Some(host) = TestHost::new() else { return };
    let note = cut_off(&host, "shadow", false);
    assert_eq!(decided(&host, &note), None);
    // Its note on the tmpfs says that it was not permitted to run.
    let note = cut_off(&host, "taking-over", false);
    fs::write(host.path().join("run/ram/web.unrun"), "").unwrap();
    assert_eq!(decided(&host, &note), None);
    assert!(!host.path().join("state/vms/web").exists());
}

#[test]
fn a_guest_that_may_have_run_here_is_godwits() {
    let Some(host) = TestHost::new() else { return };
    let note = cut_off(&host, "taking-over", false);
    assert_eq!(decided(&host, &note), Some(VmState::Failed));
}

#[test]
fn a_guest_that_moved_on_is_not_resumed_where_it_came_from() {
    let Some(host) = TestHost::new() else { return };
    let note = cut_off(&host, "owner", true);
    fs::remove_dir_all(host.path().join("state/vms/web")).unwrap();
    assert_eq!(decided(&host, &note), None);
}

/// Serves QMP as a QEMU in this process that has sent its guest. Returns the commands that it gets.
fn sent_guest(socket: &Path) -> Arc<Mutex<Vec<String>>> {
    let listener = UnixListener::bind(socket).unwrap();
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let commands = Arc::clone(&seen);
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let greeting = json!({"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": []}});
            writeln!(connection, "{greeting}").unwrap();
            for line in BufReader::new(connection.try_clone().unwrap()).lines() {
                let Ok(line) = line else { break };
                let command: Value = serde_json::from_str(&line).unwrap();
                let name = command["execute"].as_str().unwrap();
                let mut commands = commands.lock().unwrap();
                commands.push(name.to_owned());
                let runs = commands.iter().any(|name| name == "cont");
                let value = match name {
                    "query-migrate" => json!({"status": "completed"}),
                    "query-status" if runs => json!({"status": "running"}),
                    "query-status" => json!({"status": "postmigrate"}),
                    _ => json!({}),
                };
                let _ = writeln!(connection, "{}", json!({"return": value, "id": command["id"]}));
            }
        }
    });
    seen
}

#[test]
fn a_guest_is_resumed_where_it_came_from_only_if_it_never_ran_here() {
    let Some(host) = TestHost::new() else { return };
    let note = cut_off(&host, "taking-over", false);
    fs::remove_dir_all(host.path().join("state/vms/web")).unwrap();
    let socket = host.path().join("qmp");
    let commands = sent_guest(&socket);
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    let mut saved: Value = serde_json::from_slice(&fs::read(&note).unwrap()).unwrap();
    saved["from"] = json!({ "qmp": socket });
    saved["pid"] = std::process::id().into();
    saved["start_time"] = start.parse::<u64>().unwrap().into();
    fs::write(&note, saved.to_string()).unwrap();
    host.run(async {
        let _agent = Agent::open(host.config.clone()).await.unwrap();
        let asked =
            |name: &str| commands.lock().unwrap().iter().filter(|seen| *seen == name).count();
        // A second time: what follows the first answer has been done.
        until("its QEMU is asked twice", async || asked("query-status") > 1).await;
        assert!(note.exists() && asked("cont") == 0);
    });
    saved["unrun"] = true.into();
    fs::write(&note, saved.to_string()).unwrap();
    assert_eq!(decided(&host, &note), None);
    assert!(commands.lock().unwrap().iter().any(|seen| seen == "cont"));
}

#[test]
fn a_guest_on_its_way_to_a_host_is_resumed_only_if_that_host_was_not_asked_to_run_it() {
    let Some(host) = TestHost::new() else { return };
    let note = cut_off(&host, "owner", false);
    fs::remove_dir_all(host.path().join("state/vms/web")).unwrap();
    let socket = host.path().join("qmp");
    let commands = sent_guest(&socket);
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    let mut saved: Value = serde_json::from_slice(&fs::read(&note).unwrap()).unwrap();
    saved["from"] = json!({ "qmp": socket });
    saved["pid"] = std::process::id().into();
    saved["start_time"] = start.parse::<u64>().unwrap().into();
    let (name, uuid) = (VmName::new("web").unwrap(), Uuid::from_u128(7));
    saved["onto"] = json!({ "host": "b", "uuid": uuid, "offered": true });
    fs::write(&note, saved.to_string()).unwrap();
    let ownership: Ownership = serde_json::from_value(saved["ownership"].clone()).unwrap();
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let known = agent.known(&name, uuid, ownership.incarnation).unwrap();
        assert_eq!(known, Known::Has(Standing { role: Role::HandingOver, ownership }));
        let asked =
            |name: &str| commands.lock().unwrap().iter().filter(|seen| *seen == name).count();
        // A second time: what follows the first answer has been done. Nobody can ask host b.
        until("its QEMU is asked twice", async || asked("query-status") > 1).await;
        assert!(note.exists() && asked("cont") == 0);
    });
    saved["onto"]["offered"] = false.into();
    fs::write(&note, saved.to_string()).unwrap();
    assert_eq!(decided(&host, &note), None);
    assert!(commands.lock().unwrap().iter().any(|seen| seen == "cont"));
}

/// Makes host b one that answers every question about a guest with this record.
fn peer_that_knows(host: &mut TestHost, known: Known) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    host.config.peers.insert("b".to_owned(), url);
    let known = serde_json::to_string(&known).unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let mut lines = BufReader::new(connection.try_clone().unwrap()).lines();
            let request = lines.next().unwrap().unwrap();
            while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            let answer = match request.starts_with("GET") {
                true => format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
                     connection: close\r\n\r\n{known}",
                    known.len()
                ),
                false => "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n".to_owned(),
            };
            let _ = connection.write_all(answer.as_bytes());
        }
    });
}

#[test]
fn what_the_other_host_knows_decides_about_a_guest_that_it_may_have() {
    // Its QEMU here has ended, so only the records tell whose the guest is.
    for was_taken in [true, false] {
        let Some(mut host) = TestHost::new() else { return };
        let note = cut_off(&host, "owner", false);
        fs::remove_dir_all(host.path().join("state/vms/web")).unwrap();
        let mut saved: Value = serde_json::from_slice(&fs::read(&note).unwrap()).unwrap();
        let (name, uuid) = (VmName::new("web").unwrap(), Uuid::from_u128(7));
        saved["onto"] = json!({ "host": "b", "uuid": uuid, "offered": true });
        fs::write(&note, saved.to_string()).unwrap();
        let ownership: Ownership = serde_json::from_value(saved["ownership"].clone()).unwrap();
        let standing = Standing { role: Role::Owner, ownership: ownership.offered() };
        let (theirs, ours) = match was_taken {
            true => (Known::Has(standing), ownership),
            false => (Known::Never, ownership.taken_back()),
        };
        peer_that_knows(&mut host, theirs);
        assert_eq!(decided(&host, &note), None);
        let known = host.run(async {
            let agent = Agent::open(host.config.clone()).await.unwrap();
            agent.known(&name, uuid, ownership.incarnation).unwrap()
        });
        assert_eq!(known, Known::Gone(ours));
    }
}

#[test]
fn a_guest_that_is_not_there_is_refused_and_leaves_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let request = |from| AdoptGuest { from, name: None, undefine: false, to: None };
        let socket = request(ForeignPlace::Qmp("/nonexistent/qmp".to_owned()));
        let error = agent.check_adoption(&socket).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::HypervisorFailed, "{error}");
        let relative = request(ForeignPlace::Qmp("qmp".to_owned()));
        let error = agent.check_adoption(&relative).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest, "{error}");
        let begun = agent.adopt_guest(socket).unwrap();
        until("the adoption ends", async || agent.adoption(&begun.id).unwrap().state.is_over())
            .await;
        assert!(agent.adoption(&begun.id).unwrap().error.is_some());
        assert!(agent.vms().is_empty());
    });
}
