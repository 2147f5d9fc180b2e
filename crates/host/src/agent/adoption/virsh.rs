//! A `virsh` that stays during an adoption, because a guest that is paused must not wait for a
//! program to start.

use std::os::fd::OwnedFd;
use std::process::Stdio;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::Uuid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;

use crate::config::LibvirtConfig;
use crate::libvirt::{ANSWER_LIMIT, UNANSWERED, failed, name_of, run_virsh, uuid_of, virsh};

/// Longest line that is read: QMP's answers have some kilobytes.
const MOST_LINE_BYTES: u64 = 4 << 20;
/// Lines that wait to be read.
const LINES: usize = 64;
/// What `virsh` writes before it reads a line.
const PROMPT: &str = "virsh # ";

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
        let mut command = virsh(libvirt);
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
        let line = format!("{}\n", self.monitor_line(command, arguments));
        value_of(command, self.exchange(&line).await?)
    }

    /// Lets libvirt run the guest, by the `virsh` that is there: the guest waits. Returns QEMU's
    /// answer about its state afterwards.
    pub(super) async fn resume(&self) -> Result<Value, ApiError> {
        let status = self.monitor_line("query-status", Value::Null);
        let answer = self.exchange(&format!("resume {}; {status}\n", self.uuid)).await?;
        let state = value_of("query-status", answer)?;
        if state["status"] != "running" {
            // Its reason may come later, and would be taken for that of the next command.
            *self.turn.lock().await = None;
        }
        Ok(state)
    }

    fn monitor_line(&self, command: &str, arguments: Value) -> String {
        let text = request(command, arguments);
        format!("qemu-monitor-command {} '{}'", self.uuid, quoted(&text))
    }

    /// Writes a line of commands, the last of which is one of QEMU's monitor.
    async fn exchange(&self, line: &str) -> Result<Value, ApiError> {
        let mut place = self.turn.lock().await;
        // Also if this call is dropped, the next command has a new `virsh`.
        let mut turn = match place.take() {
            Some(turn) => turn,
            None => Turn::begin(&self.libvirt)?,
        };
        let answered = tokio::time::timeout(ANSWER_LIMIT, turn.exchange(line)).await;
        let answer = answered.unwrap_or_else(|_| Err(UNANSWERED.to_owned()));
        let answer = answer.map_err(|why| failed(&self.libvirt, &why))?;
        *place = Some(turn);
        Ok(answer)
    }

    /// Hands QEMU a descriptor of that name.
    pub(super) async fn give(&self, name: &str, file: OwnedFd) -> Result<(), ApiError> {
        let text = request("getfd", json!({"fdname": name}));
        let uuid = self.uuid.to_string();
        let arguments =
            ["qemu-monitor-command", "--domain", &uuid, "--pass-fds", "0", "--cmd", &text];
        let output =
            run_virsh(&self.libvirt, &arguments, Some(file)).await.map_err(|error| ApiError {
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
        run_virsh(&self.libvirt, &arguments, None).await
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
            if line.len() as u64 > MOST_LINE_BYTES || sender.send(line).await.is_err() {
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
}
