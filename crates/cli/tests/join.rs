//! A host joins over the network: the program acts as manager, admin and host, with TLS between
//! them.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use godwit_pki::{Authority, Grant, Identity, RevocationList, Role, Serial, describe};

/// Longest time until the manager answers.
const LONGEST_START: Duration = Duration::from_secs(60);

struct Manager {
    process: Child,
    socket: PathBuf,
    address: String,
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn godwit(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command.args(line.split_whitespace()).env_remove("GODWIT_MANAGER").env_remove("GODWIT_TOKEN");
    command
}

/// Starts a manager with a certificate of this role and a signing authority.
fn manager(dir: &Path, role: Role) -> Manager {
    let pki = dir.join("authority");
    let authority = Authority::create(&pki, "test", 30).unwrap();
    let addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    authority.issue(&Grant { name: "m1".into(), role, addresses, days: 30 }).unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap();
    drop(free);
    let (dir, pki) = (dir.display(), pki.display());
    let text = format!(
        "name = \"m1\"\nlisten = [\"{listen}\"]\nsocket = \"{dir}/control.sock\"\n\
        state_dir = \"{dir}/state\"\n\
        [tls]\nauthority = \"{pki}/ca.pem\"\ncertificate = \"{pki}/m1.pem\"\n\
        key = \"{pki}/m1.key\"\n\
        [authority]\ncertificate = \"{pki}/ca.pem\"\nkey = \"{pki}/ca.key\"\n"
    );
    let config = format!("{dir}/control.toml");
    fs::write(&config, text).unwrap();
    let process =
        godwit(&format!("control run --config {config}")).stderr(Stdio::null()).spawn().unwrap();
    let socket = PathBuf::from(format!("{dir}/control.sock"));
    let manager = Manager { process, socket, address: format!("https://{listen}") };
    let deadline = Instant::now() + LONGEST_START;
    while UnixStream::connect(&manager.socket).is_err() {
        assert!(Instant::now() < deadline, "the manager does not answer");
        std::thread::yield_now();
    }
    manager
}

fn authority_of(dir: &Path) -> PathBuf {
    dir.join("authority/ca.pem")
}

impl Manager {
    /// Returns the revoked certificates with their times.
    fn list(&self, authority: &Path) -> BTreeMap<Serial, i64> {
        let printed = self.ask("certificate crl");
        RevocationList::read(&printed, authority).unwrap().revoked().clone()
    }

    fn ask(&self, line: &str) -> String {
        let socket = self.socket.display();
        let output = godwit(&format!("control {line} --manager unix:{socket}")).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn join(&self, dir: &Path, token: &str) -> Output {
        let file = dir.join("token");
        fs::write(&file, token).unwrap();
        let (address, dir, file) = (&self.address, dir.display(), file.display());
        let line = format!(
            "host join --manager {address} --token-file {file} --address https://127.0.0.1:1 \
            --migration-address 127.0.0.1 --dir {dir}/pki --config {dir}/agent.toml"
        );
        godwit(&line).output().unwrap()
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

#[test]
fn a_host_joins_by_its_token() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path(), Role::Operator);
    let token = manager.ask("join-token create c");
    let host = dir.path().join("c");
    fs::create_dir(&host).unwrap();
    let joined = manager.join(&host, &token);
    assert!(joined.status.success(), "{}", text(&joined));
    let file = |name: &str| host.join("pki").join(name);
    let identity = Identity::load(&file("ca.pem"), &file("c.pem"), &file("c.key")).unwrap();
    assert_eq!(identity.name(), "c");
    assert_eq!(fs::metadata(file("c.key")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(host.join("pki")).unwrap().count(), 3, "nothing is left behind");
    assert!(fs::read_to_string(host.join("agent.toml")).unwrap().contains("name = \"c\""));
    assert!(manager.ask("host list").contains("https://127.0.0.1:1"));
    // The certificate can be revoked by its serial number, and is revoked when its host is removed.
    let shown = describe(&file("c.pem")).unwrap().serial.to_string();
    assert!(manager.ask("certificate list").contains(&shown));
    manager.ask("certificate revoke 4100");
    assert!(!manager.list(&authority_of(dir.path())).contains_key(&shown.parse().unwrap()));
    // A repeated join succeeds without a request.
    let before = fs::read(file("c.pem")).unwrap();
    let again = manager.join(&host, &token);
    assert!(again.status.success() && text(&again).contains("had joined"), "{}", text(&again));
    assert_eq!(fs::read(file("c.pem")).unwrap(), before);
    // A token that leaked afterwards is useless.
    let thief = dir.path().join("thief");
    fs::create_dir(&thief).unwrap();
    let refused = manager.join(&thief, &token);
    assert!(
        !refused.status.success() && text(&refused).contains("has been used"),
        "{}",
        text(&refused)
    );
    assert_eq!(fs::read_dir(thief.join("pki")).unwrap().count(), 0);
    assert!(!thief.join("agent.toml").exists());
    manager.ask("host forget c");
    assert!(manager.list(&authority_of(dir.path())).contains_key(&shown.parse().unwrap()));
}

#[test]
fn who_passes_for_the_manager_learns_no_token() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let real = manager(one.path(), Role::Operator);
    let token = real.ask("join-token create c");
    let strange = manager(other.path(), Role::Operator);
    let refused = strange.join(other.path(), &token);
    assert!(text(&refused).contains("no authority with the fingerprint"), "{}", text(&refused));
    // A host certificate of the right authority does not authenticate a manager.
    let other = tempfile::tempdir().unwrap();
    let host = manager(other.path(), Role::Host);
    let token = host.ask("join-token create c");
    let refused = host.join(other.path(), &token);
    assert!(text(&refused).contains("not a manager's"), "{}", text(&refused));
    assert!(!other.path().join("agent.toml").exists());
}
