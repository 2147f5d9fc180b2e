//! Asks a QEMU what CPU it can give: a machine without anything, told nothing but three kinds of questions, and ended.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::process::Child;

use super::answers::{ModelFit, read_expansion, read_models};
use super::generations::generation_of;
use super::{CpuFeatures, HostCpu};
use crate::helper::{helper, spawn};
use crate::inspect::QemuInfo;
use crate::qmp::{Qmp, QmpError};
use crate::spec::Accelerator;
use godwit_types::Fault;

/// How long all of it may take: QEMU 7.2 needs a tenth of a second where the processor is free.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest complaint that is read.
const LONGEST_COMPLAINT_BYTES: u64 = 16 << 10;

/// Why a QEMU did not tell what CPU it can give.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// It can't be started.
    #[error("QEMU \"{}\" can't be asked for its CPUs: {why}", path.display())]
    CannotStart {
        /// The binary.
        path: PathBuf,
        /// What the system said.
        why: std::io::Error,
    },
    /// It ended, refused, or took too long.
    #[error("QEMU \"{}\" does not tell its CPUs: {why}{}", path.display(), said(complaint))]
    NoAnswer {
        /// The binary.
        path: PathBuf,
        /// What happened.
        why: QmpError,
        /// What it said beside that; empty: nothing.
        complaint: String,
    },
    /// What it answered is not what QEMU answers.
    #[error("QEMU \"{}\" does not tell its CPUs as QEMU does: {why}", path.display())]
    BadAnswer {
        /// The binary.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

fn said(complaint: &str) -> String {
    if complaint.is_empty() { String::new() } else { format!(" (it says: {complaint})") }
}

impl CpuError {
    /// A stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            CpuError::CannotStart { .. } => "cpu-not-asked",
            CpuError::NoAnswer { .. } => "cpu-no-answer",
            CpuError::BadAnswer { .. } => "cpu-bad-answer",
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            CpuError::CannotStart { .. } => {
                "see that QEMU's user may start it, or name another QEMU"
            }
            CpuError::NoAnswer { .. } => {
                "see that the user may open /dev/kvm where KVM is wanted, and the host's load"
            }
            CpuError::BadAnswer { .. } => "use a stock QEMU, 7.2 or later",
        }
    }

    /// Code, message and remedy together.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

/// Asks what CPU guests can be given here by this QEMU with this accelerator. `user`: whom it is asked as, a user and a group; none:
/// the caller. With KVM the user must be let in to /dev/kvm.
///
/// # Errors
/// QEMU can't be started, or does not answer as QEMU does.
pub async fn host_cpu(
    qemu: &QemuInfo,
    accel: Accelerator,
    user: Option<(u32, u32)>,
) -> Result<HostCpu, CpuError> {
    let cannot_start = |why| CpuError::CannotStart { path: qemu.path.clone(), why };
    let bad = |why| CpuError::BadAnswer { path: qemu.path.clone(), why };
    let (ours, theirs) = StdUnixStream::pair().map_err(cannot_start)?;
    let mut child = start(qemu, accel, user, theirs).await.map_err(cannot_start)?;
    ours.set_nonblocking(true).map_err(cannot_start)?;
    let stream = UnixStream::from_std(ours).map_err(cannot_start)?;
    let complaints = child.stderr.take();
    let questions = async {
        let qmp = Qmp::negotiate(stream).await?;
        let answers = ask(&qmp).await?;
        // It ends by the end of this program's interest at the latest.
        let _ = qmp.execute("quit", Value::Null).await;
        Ok(answers)
    };
    let too_long =
        || QmpError::Timeout { command: "the questions about its CPUs".to_owned(), limit: LIMIT };
    let answers = tokio::time::timeout(LIMIT, questions).await.unwrap_or_else(|_| Err(too_long()));
    // Asked or not, it goes now; it has nothing to lose.
    let _ = child.kill().await;
    let answers = match answers {
        Ok(answers) => answers,
        Err(why) => {
            let complaint = first_line(complaints).await;
            return Err(CpuError::NoAnswer { path: qemu.path.clone(), why, complaint });
        }
    };
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    answers.read(accel, &text).map_err(bad)
}

async fn start(
    qemu: &QemuInfo,
    accel: Accelerator,
    user: Option<(u32, u32)>,
    socket: StdUnixStream,
) -> std::io::Result<Child> {
    let output = socket.try_clone()?;
    let mut command = helper(&qemu.path, user);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-S", "-machine", "none"])
        .args(["-accel", accel.name(), "-qmp", "stdio"])
        .stdin(Stdio::from(OwnedFd::from(socket)))
        .stdout(Stdio::from(OwnedFd::from(output)));
    spawn(command).await
}

/// The first thing that a QEMU that has ended complained of.
async fn first_line(pipe: Option<tokio::process::ChildStderr>) -> String {
    let mut said = Vec::new();
    if let Some(pipe) = pipe {
        // What was read before an error is all there is to tell.
        let _ = pipe.take(LONGEST_COMPLAINT_BYTES).read_to_end(&mut said).await;
    }
    String::from_utf8_lossy(&said).lines().next().unwrap_or_default().trim().to_owned()
}

struct Answers {
    models: Value,
    /// `max`: under KVM it is what `host` is (`max` is there with each accelerator).
    most: Value,
    /// Versioned models of the generations.
    definitions: Vec<(String, Value)>,
}

async fn ask(qmp: &Qmp) -> Result<Answers, QmpError> {
    let models = qmp.execute("query-cpu-definitions", Value::Null).await?;
    // What can't move with a guest (`invtsc`) does not count as what guests can have.
    let most = qmp
        .execute("query-cpu-model-expansion", expansion("max", &json!({"migratable": true})))
        .await?;
    let mut definitions = Vec::new();
    let names = models.as_array().into_iter().flatten().filter_map(|model| model["name"].as_str());
    for name in names.filter(|name| generation_of(name).is_some()) {
        match qmp.execute("query-cpu-model-expansion", expansion(name, &json!({}))).await {
            Ok(answer) => definitions.push((name.to_owned(), answer)),
            // One that can't be expanded can't be a baseline either.
            Err(QmpError::Command { desc, .. }) => {
                tracing::debug!(model = name, desc, "not expanded")
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Answers { models, most, definitions })
}

fn expansion(model: &str, props: &Value) -> Value {
    json!({"type": "static", "model": {"name": model, "props": props}})
}

impl Answers {
    fn read(self, accel: Accelerator, cpuinfo: &str) -> Result<HostCpu, String> {
        let fits = read_models(&self.models)?;
        let definitions = self.definitions.into_iter();
        let definitions: Result<BTreeMap<String, CpuFeatures>, String> =
            definitions.map(|(name, answer)| Ok((name, read_expansion(&answer)?))).collect();
        let (features, definitions) = (read_expansion(&self.most)?, definitions?);
        let alias = |fit: &ModelFit| Some((fit.name.clone(), fit.alias_of.clone()?));
        Ok(HostCpu {
            vendor: of_cpuinfo(cpuinfo, "vendor_id"),
            name: of_cpuinfo(cpuinfo, "model name"),
            accel,
            features,
            aliases: fits.iter().filter_map(alias).collect(),
            deprecated: fits
                .iter()
                .filter(|fit| fit.is_deprecated)
                .map(|fit| fit.name.clone())
                .collect(),
            models: fits.into_iter().map(|fit| (fit.name, fit.missing)).collect(),
            definitions,
        })
    }
}

/// A field of the first processor in /proc/cpuinfo (proc(5)).
fn of_cpuinfo(text: &str, field: &str) -> String {
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let found =
        fields.map(|(name, value)| (name.trim(), value.trim())).find(|(name, _)| *name == field);
    found.map_or_else(String::new, |(_, value)| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_has_its_vendor_and_name() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC: 9\n\nprocessor\t: 1\n";
        assert_eq!(of_cpuinfo(text, "vendor_id"), "AuthenticAMD");
        assert_eq!(of_cpuinfo(text, "model name"), "AMD EPYC: 9");
        assert_eq!(of_cpuinfo("", "model name"), "");
    }

    #[tokio::test]
    async fn what_is_no_qemu_tells_nothing() {
        let info = |path: &str| QemuInfo {
            path: path.into(),
            version: (10, 0, 0),
            machines: Vec::new(),
            cpu_models: Vec::new(),
        };
        let error = host_cpu(&info("/nowhere/qemu"), Accelerator::Tcg, None).await.unwrap_err();
        assert_eq!(error.code(), "cpu-not-asked", "{error}");
        let error = host_cpu(&info("/bin/false"), Accelerator::Tcg, None).await.unwrap_err();
        assert_eq!(error.code(), "cpu-no-answer", "{error}");
        let complaining = host_cpu(&info("/bin/ls"), Accelerator::Tcg, None).await.unwrap_err();
        assert!(complaining.to_string().contains("it says"), "{complaining}");
    }
}
