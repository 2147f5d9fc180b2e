//! libvirt by its own command line: `virsh` knows every version's protocol and how to reach the
//! daemon. A look uses `virsh --readonly`. During an adoption one `virsh` stays, because a guest
//! that is paused must not wait for a program to start.

use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::Uuid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

use crate::config::LibvirtConfig;

/// Longest time for an answer of libvirt.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Longest output that is read, and longest line: QMP's answers have some kilobytes.
const MOST_OUTPUT_BYTES: u64 = 4 << 20;
/// Most domains that are listed.
const MOST_DOMAINS: usize = 1024;
/// Lines that wait to be read.
const LINES: usize = 64;
/// What `virsh` writes before it reads a line.
const PROMPT: &str = "virsh # ";

/// A domain as libvirt lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) uuid: Uuid,
    /// In libvirt's words.
    pub(super) state: String,
}

/// Lists the domains.
pub(super) async fn domains(libvirt: &LibvirtConfig) -> Result<Vec<Domain>, ApiError> {
    let listed = once(libvirt, &["--readonly", "list", "--all", "--name"], None).await?;
    let mut domains = Vec::new();
    for name in listed.lines().map(str::trim).filter(|name| !name.is_empty()).take(MOST_DOMAINS) {
        // It may have gone since.
        let Ok(uuid) = uuid_of(libvirt, name).await else { continue };
        let by_uuid = uuid.to_string();
        let state = once(libvirt, &["--readonly", "domstate", "--domain", &by_uuid], None).await;
        let Ok(state) = state else { continue };
        domains.push(Domain { name: name.to_owned(), uuid, state: state.trim().to_owned() });
    }
    Ok(domains)
}

/// Returns the UUID of the domain of that name. From here on it is named by that: `virsh` takes a
/// number for an ID, also if it is the name of another domain.
async fn uuid_of(libvirt: &LibvirtConfig, name: &str) -> Result<Uuid, ApiError> {
    let uuid = once(libvirt, &["--readonly", "domuuid", "--domain", name], None).await?;
    let uuid = Uuid::parse_str(uuid.trim())
        .map_err(|_| failed(libvirt, &format!("domain {name} has no UUID")))?;
    let found = name_of(libvirt, uuid).await?;
    if found != name {
        let why = format!("\"{name}\" is understood as an ID or UUID, that of domain \"{found}\"");
        return Err(failed(libvirt, &why));
    }
    Ok(uuid)
}

async fn name_of(libvirt: &LibvirtConfig, uuid: Uuid) -> Result<String, ApiError> {
    let uuid = uuid.to_string();
    let name = once(libvirt, &["--readonly", "domname", "--domain", &uuid], None).await?;
    Ok(name.trim_matches(['\r', '\n']).to_owned())
}

/// Runs one command of `virsh`, with a descriptor as its standard input.
pub(super) async fn once(
    libvirt: &LibvirtConfig,
    arguments: &[&str],
    input: Option<OwnedFd>,
) -> Result<String, ApiError> {
    let mut command = base(libvirt);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(input.map_or_else(Stdio::null, Stdio::from));
    let mut child = command.spawn().map_err(|error| failed(libvirt, &error.to_string()))?;
    let (mut out, mut errors) = (child.stdout.take(), child.stderr.take());
    let all = async {
        let (out, errors) = tokio::join!(read_all(&mut out), read_all(&mut errors));
        (out, errors, child.wait().await)
    };
    let done = tokio::time::timeout(ANSWER_LIMIT, all).await;
    let (out, errors, status) = done.map_err(|_| failed(libvirt, "libvirt does not answer"))?;
    if status.is_ok_and(|status| status.success()) {
        return Ok(out);
    }
    let why = errors.lines().map(|line| line.trim_start_matches("error: ")).collect::<Vec<_>>();
    Err(failed(libvirt, &why.join("; ")))
}

async fn read_all(stream: &mut Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        let _ = stream.take(MOST_OUTPUT_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn base(libvirt: &LibvirtConfig) -> Command {
    let mut command = Command::new(&libvirt.virsh);
    command.env_clear().env("LC_ALL", "C").kill_on_drop(true);
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.args(["--quiet", "--connect", &libvirt.uri]);
    command
}

fn failed(libvirt: &LibvirtConfig, why: &str) -> ApiError {
    let message = format!("cannot ask libvirt at {}: {why}", libvirt.uri);
    let remedy = "check `virsh list` on the host; [libvirt] in the configuration names the program \
                  and the URI";
    ApiError::new(ErrorCode::HostFailed, message, remedy)
}

/// A `virsh` that stays, for the monitor of one domain.
#[derive(Debug)]
pub(super) struct Virsh {
    libvirt: LibvirtConfig,
    uuid: Uuid,
    /// Nothing after an exchange that was not completed: its late answer would be taken for that
    /// of the next command.
    turn: tokio::sync::Mutex<Option<Turn>>,
}

#[derive(Debug)]
struct Turn {
    _child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    errors: mpsc::Receiver<String>,
}

impl Turn {
    fn begin(libvirt: &LibvirtConfig) -> Result<Turn, ApiError> {
        let mut command = base(libvirt);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| failed(libvirt, &error.to_string()))?;
        let gone = || failed(libvirt, "virsh has no pipes");
        let input = child.stdin.take().ok_or_else(gone)?;
        let lines = follow(child.stdout.take().ok_or_else(gone)?);
        let errors = follow(child.stderr.take().ok_or_else(gone)?);
        Ok(Turn { _child: child, input, lines, errors })
    }

    /// Writes a line, and reads until QEMU's answer.
    async fn exchange(&mut self, line: &str) -> Result<Value, String> {
        self.input.write_all(line.as_bytes()).await.map_err(|error| error.to_string())?;
        loop {
            tokio::select! {
                biased;
                line = self.lines.recv() => match line.as_deref().map(answer) {
                    Some(Some(answer)) => return Ok(answer),
                    Some(None) => {}
                    None => return Err("virsh has ended".to_owned()),
                },
                Some(error) = self.errors.recv() => {
                    if let Some(why) = error.trim().strip_prefix("error: ") {
                        return Err(why.to_owned());
                    }
                }
            }
        }
    }
}

impl Virsh {
    /// Opens a connection to the domain of that UUID, or of that name if its UUID is not known
    /// yet. Returns the name that it has now.
    pub(super) async fn open(
        libvirt: &LibvirtConfig,
        name: &str,
        known: Option<Uuid>,
    ) -> Result<(Virsh, String), ApiError> {
        let (uuid, name) = match known {
            Some(uuid) => (uuid, name_of(libvirt, uuid).await?),
            None => (uuid_of(libvirt, name).await?, name.to_owned()),
        };
        let turn = tokio::sync::Mutex::new(Some(Turn::begin(libvirt)?));
        Ok((Virsh { libvirt: libvirt.clone(), uuid, turn }, name))
    }

    pub(super) fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Runs a command of QEMU's monitor.
    pub(super) async fn execute(&self, command: &str, arguments: Value) -> Result<Value, ApiError> {
        let text = request(command, arguments);
        let line = format!("qemu-monitor-command {} '{}'\n", self.uuid, quoted(&text));
        let mut place = self.turn.lock().await;
        // Also if this call is dropped, the next command has a new `virsh`.
        let mut turn = match place.take() {
            Some(turn) => turn,
            None => Turn::begin(&self.libvirt)?,
        };
        let answered = tokio::time::timeout(ANSWER_LIMIT, turn.exchange(&line)).await;
        let answer = answered.unwrap_or_else(|_| Err("it does not answer".to_owned()));
        let answer = answer.map_err(|why| failed(&self.libvirt, &why))?;
        *place = Some(turn);
        value_of(command, answer)
    }

    /// Hands QEMU a descriptor of that name.
    pub(super) async fn give(&self, name: &str, file: OwnedFd) -> Result<(), ApiError> {
        let text = request("getfd", json!({"fdname": name}));
        let uuid = self.uuid.to_string();
        let arguments =
            ["qemu-monitor-command", "--domain", &uuid, "--pass-fds", "0", "--cmd", &text];
        let output =
            once(&self.libvirt, &arguments, Some(file)).await.map_err(|error| ApiError {
                remedy: "libvirt passes descriptors to QEMU from 8.2 on".to_owned(),
                ..error
            })?;
        let answered = output.lines().find_map(answer).unwrap_or_default();
        value_of("getfd", answered).map(drop)
    }

    /// Runs a command of `virsh` on the domain.
    pub(super) async fn run(&self, command: &str, options: &[&str]) -> Result<String, ApiError> {
        let uuid = self.uuid.to_string();
        let mut arguments = vec![command, "--domain", &uuid];
        arguments.extend(options);
        once(&self.libvirt, &arguments, None).await
    }
}

fn request(command: &str, arguments: Value) -> String {
    let mut request = json!({ "execute": command });
    if !arguments.is_null() {
        request["arguments"] = arguments;
    }
    request.to_string()
}

/// Quotes a text for virsh's single quotes.
fn quoted(text: &str) -> String {
    text.replace('\'', "\\u0027")
}

/// Reads lines until the stream ends or nobody takes them.
fn follow(stream: impl AsyncRead + Unpin + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(LINES);
    tokio::spawn(async move {
        let mut lines = BufReader::new(stream).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if line.len() as u64 > MOST_OUTPUT_BYTES || sender.send(line).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// Returns the answer of QEMU in a line of virsh, which may begin with its prompt.
fn answer(line: &str) -> Option<Value> {
    let mut line = line.trim();
    while let Some(rest) = line.strip_prefix(PROMPT) {
        line = rest;
    }
    let value: Value = serde_json::from_str(line).ok()?;
    (value.get("return").is_some() || value.get("error").is_some()).then_some(value)
}

fn value_of(command: &str, mut answer: Value) -> Result<Value, ApiError> {
    if let Some(error) = answer.get("error") {
        let why = error["desc"].as_str().unwrap_or("no reason given");
        let message = format!("the guest's QEMU refuses {command}: {why}");
        return Err(ApiError::new(ErrorCode::HypervisorFailed, message, ""));
    }
    Ok(answer["return"].take())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_distinguished_from_prompts_and_echoes() {
        assert_eq!(answer(r#"{"return":{"a":1},"id":"libvirt-7"}"#).unwrap()["return"]["a"], 1);
        assert_eq!(
            answer(r#"virsh # {"return":{},"id":"libvirt-7"}"#).unwrap()["return"],
            json!({})
        );
        assert!(answer(r#"virsh # qemu-monitor-command x '{"execute":"stop"}'"#).is_none());
        assert!(answer(r#"{"execute":"stop"}"#).is_none());
        assert!(answer("").is_none());
        let refused = value_of("cont", json!({"error": {"desc": "locked"}})).unwrap_err();
        assert!(refused.message.contains("cont: locked"), "{refused}");
        assert_eq!(request("stop", Value::Null), r#"{"execute":"stop"}"#);
        assert!(!quoted(&request("x", json!({"a": "it's"}))).contains('\''));
    }

    #[tokio::test]
    async fn after_an_exchange_that_failed_a_new_virsh_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let virsh = folder.path().join("virsh");
        // Its late answer must not be the next command's.
        let script = "#!/bin/sh\nif [ -e \"$0.once\" ]; then\nread -r line\n\
                      echo '{\"return\": 2}'\nelse\n: > \"$0.once\"\nread -r line\n\
                      echo 'error: busy' >&2\nsleep 1\necho '{\"return\": 1}'\nfi\nread -r line\n";
        let source = folder.path().join("source");
        std::fs::write(&source, script).unwrap();
        // Another process writes it: a program that anyone has open for writing does not start.
        let mut install = std::process::Command::new("install");
        assert!(install.args(["-m", "755"]).args([&source, &virsh]).status().unwrap().success());
        let libvirt = LibvirtConfig { virsh, ..Default::default() };
        let turn = tokio::sync::Mutex::new(Some(Turn::begin(&libvirt).unwrap()));
        let virsh = Virsh { libvirt, uuid: Uuid::new_v4(), turn };
        let error = virsh.execute("stop", Value::Null).await.unwrap_err();
        assert!(error.message.contains("busy"), "{error}");
        assert_eq!(virsh.execute("cont", Value::Null).await.unwrap(), 2);
    }

    #[tokio::test]
    async fn a_host_without_libvirt_is_an_error_and_no_hang() {
        let libvirt = LibvirtConfig { virsh: "/nonexistent/virsh".into(), ..Default::default() };
        assert!(domains(&libvirt).await.is_err());
    }
}
