//! Whether KVM runs 64-bit guests here, by a probe guest.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use godwit_qemu::AccelProbe;
use serde::{Deserialize, Serialize};

use crate::agent::Agent;
use crate::agent::host::modified;

/// File in the run directory with the last failure of a guest that kept a core busy. Its probe
/// takes a second or more, in which no VM can start, so the next agent reads the result here.
const FAILURE: &str = "kvm-probe.json";

/// A probe that failed, and what it was run with.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Failure {
    subject: Subject,
    reason: String,
}

/// What a result depends on. A change of any of it requires a new probe.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Subject {
    /// Version of the agent, whose probe may differ.
    agent: String,
    qemu: PathBuf,
    qemu_modified: SystemTime,
    /// Status change of /dev/kvm, in seconds and nanoseconds: its module makes a new device, and so
    /// does a boot.
    device_changed: (i64, i64),
    sandbox: bool,
}

impl Subject {
    fn of(qemu: &Path, sandbox: bool) -> Option<Subject> {
        let device = fs::metadata("/dev/kvm").ok()?;
        Some(Subject {
            agent: env!("CARGO_PKG_VERSION").to_owned(),
            qemu: qemu.to_owned(),
            qemu_modified: modified(qemu)?,
            device_changed: (device.ctime(), device.ctime_nsec()),
            sandbox,
        })
    }
}

impl Agent {
    /// Probes whether KVM runs 64-bit guests here, by starting a test guest; once for each QEMU.
    pub async fn accel(&self, qemu: &Path) -> AccelProbe {
        let mut known = self.accels.lock().await;
        if let Some(probe) = known.get(qemu) {
            return probe.clone();
        }
        let sandbox = self.config.qemu_sandbox;
        let file = self.places.run_dir.join(FAILURE);
        let subject = Subject::of(qemu, sandbox);
        let probe = match subject.as_ref().and_then(|subject| read_failure(&file, subject)) {
            Some(reason) => {
                let reason = format!("{reason} (recorded in {})", file.display());
                AccelProbe { kvm: false, reason }
            }
            None => {
                let probe = godwit_qemu::usable_accel(qemu, sandbox).await;
                if let Some(subject) = subject.filter(|_| probe.hung_busy()) {
                    write_failure(&file, &Failure { subject, reason: probe.reason.clone() });
                }
                probe
            }
        };
        tracing::info!(kvm = probe.kvm, reason = probe.reason, "KVM probed");
        known.insert(qemu.to_owned(), probe.clone());
        probe
    }
}

fn read_failure(file: &Path, subject: &Subject) -> Option<String> {
    let failure: Failure = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (failure.subject == *subject).then_some(failure.reason)
}

/// Writes a failure for the next agent, which probes again if it cannot read it.
fn write_failure(file: &Path, failure: &Failure) {
    let written = serde_json::to_vec(failure)
        .map_err(std::io::Error::from)
        .and_then(|bytes| fs::write(file, bytes));
    if let Err(error) = written {
        tracing::warn!(file = %file.display(), %error, "cannot record the result of the KVM probe");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_applies_to_what_it_was_found_with() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FAILURE);
        let subject = |sandbox, device| Subject {
            agent: "1".to_owned(),
            qemu: "/usr/bin/qemu".into(),
            qemu_modified: SystemTime::UNIX_EPOCH,
            device_changed: (device, 0),
            sandbox,
        };
        assert_eq!(read_failure(&file, &subject(true, 1)), None);
        write_failure(&file, &Failure { subject: subject(true, 1), reason: "it hung".into() });
        assert_eq!(read_failure(&file, &subject(true, 1)).as_deref(), Some("it hung"));
        assert_eq!(read_failure(&file, &subject(true, 2)), None, "a new /dev/kvm");
        assert_eq!(read_failure(&file, &subject(false, 1)), None);
        fs::write(&file, b"{").unwrap();
        assert_eq!(read_failure(&file, &subject(true, 1)), None);
    }
}
