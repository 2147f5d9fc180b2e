//! Queries of a QEMU about its CPUs. Starts a machine without devices, sends queries
//! and ends it.

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

use super::HostCpu;
use super::answers::{ModelFit, read_expansion, read_machines, read_models};
use super::features::CpuFeatures;
use super::generations::generation_of;
use crate::accel::Accelerator;
use crate::helper::{helper, spawn};
use crate::inspect::QemuInfo;
use crate::qmp::{Qmp, QmpError};
use godwit_types::Fault;

/// Longest duration of all queries. QEMU 7.2 needs a tenth of a second on an idle processor.
const LIMIT: Duration = Duration::from_secs(60);
/// Most bytes of QEMU's error output that are read.
const LONGEST_COMPLAINT_BYTES: u64 = 16 << 10;

/// Why the CPUs of a QEMU are unknown.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// QEMU cannot be started.
    #[error("cannot ask QEMU \"{}\" for its CPUs: {why}", path.display())]
    CannotStart {
        /// The binary.
        path: PathBuf,
        /// The system error.
        why: std::io::Error,
    },
    /// QEMU ended, refused, or took too long.
    #[error("cannot ask QEMU \"{}\" for its CPUs: {why}{}", path.display(), quoted(complaint))]
    NoAnswer {
        /// The binary.
        path: PathBuf,
        /// What happened.
        why: QmpError,
        /// QEMU's error output; may be empty.
        complaint: String,
    },
    /// The response is not QEMU's.
    #[error("cannot read the CPUs of QEMU \"{}\": {why}", path.display())]
    BadAnswer {
        /// The binary.
        path: PathBuf,
        /// What is wrong with the response.
        why: String,
    },
}

fn quoted(complaint: &str) -> String {
    if complaint.is_empty() { String::new() } else { format!(" (it says: {complaint})") }
}

impl CpuError {
    /// Stable code for programs.
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
                "check that QEMU's user may start it, or configure another QEMU"
            }
            CpuError::NoAnswer { .. } => {
                "check the host's load and, for KVM, that QEMU's user may open /dev/kvm"
            }
            CpuError::BadAnswer { .. } => "use a stock QEMU, 7.2 or later",
        }
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

/// Asks which CPU this QEMU can give to guests here, with this accelerator. `user`: the user and
/// group to run it as; `None` for those of the caller. With KVM the user must have access to
/// /dev/kvm.
///
/// # Errors
/// QEMU cannot be started, or does not answer as QEMU does.
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
        // QEMU ends at the latest when this program drops it.
        let _ = qmp.execute("quit", Value::Null).await;
        Ok(answers)
    };
    let too_long =
        || QmpError::Timeout { command: "the queries about its CPUs".to_owned(), limit: LIMIT };
    let answers = tokio::time::timeout(LIMIT, questions).await.unwrap_or_else(|_| Err(too_long()));
    // It is ended whatever the result: it has nothing to lose.
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

/// Returns the first line that an ended QEMU wrote to its error output.
async fn first_line(pipe: Option<tokio::process::ChildStderr>) -> String {
    let mut text = Vec::new();
    if let Some(pipe) = pipe {
        // After an error, the output so far is all there is.
        let _ = pipe.take(LONGEST_COMPLAINT_BYTES).read_to_end(&mut text).await;
    }
    String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim().to_owned()
}

struct Answers {
    models: Value,
    machines: Value,
    /// The model `max`, which exists for each accelerator and under KVM equals `host`.
    most: Value,
    /// Versioned models of the generations.
    definitions: Vec<(String, Value)>,
}

async fn ask(qmp: &Qmp) -> Result<Answers, QmpError> {
    let models = qmp.execute("query-cpu-definitions", Value::Null).await?;
    let machines = qmp.execute("query-machines", Value::Null).await?;
    // Features that cannot migrate with a guest (`invtsc`) do not count.
    let most = qmp
        .execute("query-cpu-model-expansion", expansion("max", &json!({"migratable": true})))
        .await?;
    let mut definitions = Vec::new();
    let names = models.as_array().into_iter().flatten().filter_map(|model| model["name"].as_str());
    for name in names.filter(|name| generation_of(name).is_some()) {
        match qmp.execute("query-cpu-model-expansion", expansion(name, &json!({}))).await {
            Ok(answer) => definitions.push((name.to_owned(), answer)),
            // A model that cannot be expanded cannot be a baseline either.
            Err(QmpError::Command { desc, .. }) => {
                tracing::debug!(model = name, desc, "not expanded");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Answers { models, machines, most, definitions })
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
            most_vcpus: read_machines(&self.machines),
        })
    }
}

/// Returns a field of the first processor in /proc/cpuinfo (proc(5)).
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
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC: 9\n\n\
            processor\t: 1\n";
        assert_eq!(of_cpuinfo(text, "vendor_id"), "AuthenticAMD");
        assert_eq!(of_cpuinfo(text, "model name"), "AMD EPYC: 9");
        assert_eq!(of_cpuinfo("", "model name"), "");
    }

    #[tokio::test]
    async fn a_binary_that_is_not_qemu_reports_no_cpu() {
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
