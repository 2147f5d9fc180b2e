//! One fencing device, through the program `ipmitool`. The password is in the program's
//! environment, which root and the manager's own user can read, and never in its arguments. Its
//! output is bounded, and nothing but the exact answer counts.

use std::fmt;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::setup::FencingConfig;
use super::{Fault, Power};
use crate::cluster::names::is_unseen;
use crate::cluster::text::beginning;

/// Longest output of a command, bytes.
const MOST_OUTPUT_BYTES: u64 = 16 * 1024;
/// Longest text of a device in a fault, bytes.
const MOST_TEXT_BYTES: usize = 160;
/// Seconds until a request is repeated, and number of requests.
const REPEATS: [&str; 4] = ["-N", "1", "-R", "3"];

/// Management controller of a host.
pub(super) struct Device {
    /// The program, found in `PATH` unless it is a path.
    pub(super) program: String,
    address: String,
    port: u16,
    user: String,
    password: String,
    cipher: Option<u8>,
    /// Held by questions, so that they use one session at a time.
    pub(super) turn: Mutex<()>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Device");
        shown.field("address", &self.address).field("port", &self.port).finish_non_exhaustive()
    }
}

impl Device {
    pub(super) fn new(config: &FencingConfig, password: String) -> Device {
        Device {
            program: "ipmitool".to_owned(),
            address: config.address.clone(),
            port: config.port,
            user: config.user.clone(),
            password,
            cipher: config.cipher,
            turn: Mutex::default(),
        }
    }

    /// Asks for the power to be cut. Success means that the device has accepted it, no more.
    pub(super) async fn power_off(&self, limit: Duration) -> Result<(), Fault> {
        self.run(&["chassis", "power", "off"], limit).await.map(drop)
    }

    /// Asks for the state of the power.
    pub(super) async fn status(&self, limit: Duration) -> Result<Power, Fault> {
        let answer = self.run(&["chassis", "power", "status"], limit).await?;
        match answer.trim() {
            "Chassis Power is off" => Ok(Power::Off),
            "Chassis Power is on" => Ok(Power::On),
            other => Err(Fault::Unclear(self.shown(other))),
        }
    }

    /// Runs a command and returns its output. It has ended afterwards, however this ends.
    async fn run(&self, arguments: &[&str], limit: Duration) -> Result<String, Fault> {
        let mut command = self.command(arguments);
        let child = command.spawn().map_err(|error| Fault::NotRun(error.to_string()))?;
        let mut running = Running(child);
        let done = timeout(limit, running.output()).await.map_err(|_| Fault::NoAnswer)?;
        let (is_success, out, errors) = done.map_err(|why| Fault::Unclear(why.to_owned()))?;
        if is_success {
            return Ok(out);
        }
        // The last line is about the end, those before it about the way there.
        let mut lines = out.lines().chain(errors.lines()).map(str::trim);
        let line = lines.rfind(|line| !line.is_empty()).unwrap_or("it gave no reason");
        Err(Fault::Refused(self.shown(line)))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().env("LC_ALL", "C").env("IPMI_PASSWORD", &self.password);
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.args(["-I", "lanplus", "-H", &self.address, "-p", &self.port.to_string()]);
        command.args(["-U", &self.user, "-E", "-L", "OPERATOR"]).args(REPEATS);
        if let Some(cipher) = self.cipher {
            command.args(["-C", &cipher.to_string()]);
        }
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        // A group of its own: its children end with it.
        command.stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
        command
    }

    /// Returns a text of the program or the device as one short line without the password.
    fn shown(&self, text: &str) -> String {
        let text = text.replace(&self.password, "***").replace(is_unseen, " ");
        beginning(&text, MOST_TEXT_BYTES)
    }
}

/// A process that is killed with its group on drop.
struct Running(Child);

impl Running {
    /// Returns whether it succeeded, its output and its errors.
    async fn output(&mut self) -> Result<(bool, String, String), &'static str> {
        let (out, errors) = (self.0.stdout.take(), self.0.stderr.take());
        let (out, errors) = tokio::try_join!(read_all(out), read_all(errors))?;
        // Not before: the group's number stays this process's own until then.
        let status = self.0.wait().await.map_err(|_| "its end is unknown")?;
        Ok((status.success(), out, errors))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // There is no number any more once the process has been waited for.
        let id = self.0.id().and_then(|id| i32::try_from(id).ok());
        if let Some(group) = id.and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

async fn read_all(stream: Option<impl AsyncRead + Unpin>) -> Result<String, &'static str> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        let read = stream.take(MOST_OUTPUT_BYTES + 1).read_to_end(&mut bytes).await;
        read.map_err(|_| "its output is unreadable")?;
    }
    if u64::try_from(bytes.len()).is_ok_and(|bytes| bytes <= MOST_OUTPUT_BYTES) {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    Err("its output is too long")
}
