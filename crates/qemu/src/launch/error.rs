//! Errors at the start of QEMU, with remedies.

use std::path::{Path, PathBuf};

use crate::process::Exit;
use crate::qmp::QmpError;
use godwit_types::Fault;

/// Why QEMU does not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// A file or socket for QEMU cannot be created.
    #[error("cannot start QEMU: cannot {what} {}: {why}", path.display())]
    Prepare {
        /// The attempted operation, as a verb.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system error.
        why: String,
    },
    /// A file that QEMU's user may not read is too long to be copied.
    #[error("cannot start QEMU: {}: {why}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The reason, with the limit.
        why: String,
    },
    /// The binary cannot be started.
    #[error("cannot start QEMU \"{}\": {why}", qemu.display())]
    Spawn {
        /// The binary.
        qemu: PathBuf,
        /// The system error.
        why: String,
    },
    /// QEMU started and ended at once.
    #[error("QEMU ended during its start ({exit}): {}", or_nothing(last_words))]
    Exited {
        /// How it ended.
        exit: Exit,
        /// The last lines of its output.
        last_words: String,
    },
    /// QEMU started, but its monitor was unusable. QEMU was killed.
    #[error("QEMU started, but {why}; its output: {}", or_nothing(last_words))]
    NotReady {
        /// The error of its monitor.
        why: QmpError,
        /// The last lines of its output.
        last_words: String,
    },
}

fn or_nothing(last_words: &str) -> &str {
    if last_words.is_empty() { "no output" } else { last_words }
}

/// Fragments of QEMU's messages (7.2 to 10.x) and their remedies. The first match counts.
const REMEDIES: [(&str, &str); 16] = [
    ("max CPUs supported by machine", "give the VM fewer vCPUs, or a newer machine type"),
    ("invalid kernel header", "give the path of a kernel: a bzImage, a multiboot or a PVH kernel"),
    ("sandbox", "use a QEMU built with seccomp, or set qemu_sandbox = false in the configuration"),
    ("support requested feature", "choose a CPU model that this host has, or the accelerator tcg"),
    (
        "KVM kernel module: Permission",
        "let a dedicated group open /dev/kvm, as packaging/99-godwit.rules does, or choose the \
        accelerator tcg",
    ),
    (
        "failed to initialize kvm",
        "load the KVM module of this host's CPU, or choose the accelerator tcg",
    ),
    (
        "Could not access KVM",
        "load the KVM module of this host's CPU, or choose the accelerator tcg",
    ),
    ("\" lock", "stop the VM or program that uses this disk image, or give the VM its own"),
    ("O_DIRECT", "put the disk image on a file system that supports O_DIRECT"),
    (
        "is not a valid device model name",
        "correct the device's name, or install its package (virtio-vga may be in \
        qemu-system-modules-opengl): see `-device help` of this QEMU",
    ),
    ("Permission denied", "give QEMU's own user access to this file or device"),
    (
        "could not open kernel file",
        "give the path of a kernel that this host and QEMU's user can read",
    ),
    ("could not load initrd", "give the path of an initrd that this host and QEMU's user can read"),
    ("No such file", "give a path that exists on this host"),
    ("not in qcow2 format", "give the actual format of the disk image"),
    ("Cannot allocate memory", "free memory on this host, or give the VM less"),
];

impl StartError {
    pub(super) fn prepare(what: &'static str, path: &Path, why: &std::io::Error) -> StartError {
        let (path, text) = (path.to_owned(), why.to_string());
        match why.kind() {
            std::io::ErrorKind::FileTooLarge => StartError::TooLong { path, why: text },
            _ => StartError::Prepare { what, path, why: text },
        }
    }

    /// Stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            StartError::Prepare { .. } => "qemu-not-prepared",
            StartError::TooLong { .. } => "file-too-long",
            StartError::Spawn { .. } => "qemu-not-found",
            StartError::Exited { .. } => "qemu-exited",
            StartError::NotReady { .. } => "qemu-not-ready",
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        let text = match self {
            StartError::Prepare { .. } => {
                "check that the path of the agent's run directory is short, writable and not full"
            }
            StartError::TooLong { .. } => {
                "make the file readable for others (chmod o+r), or shorter"
            }
            StartError::Spawn { .. } => "install QEMU 7.2 or later, or configure its path",
            StartError::Exited { last_words, .. } | StartError::NotReady { last_words, .. } => {
                REMEDIES.iter().find(|(words, _)| last_words.contains(words)).map_or(
                    "correct what QEMU reports; the VM's QEMU log has its whole output",
                    |(_, remedy)| remedy,
                )
            }
        };
        text.to_owned()
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}
