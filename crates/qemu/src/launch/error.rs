//! Why QEMU does not start, and what to do about it.

use std::path::{Path, PathBuf};

use crate::process::Exit;
use crate::qmp::QmpError;
use godwit_types::Fault;

/// Why QEMU does not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Something that QEMU needs can't be made.
    #[error("QEMU was not started: the agent can't {what} {}: {why}", path.display())]
    Prepare {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// A file that QEMU's user may not read is too long to be copied.
    #[error("QEMU was not started: {}: {why}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// How long it may be.
        why: String,
    },
    /// The binary can't be started.
    #[error("QEMU \"{}\" can't be started: {why}", qemu.display())]
    Spawn {
        /// The binary.
        qemu: PathBuf,
        /// What the system said.
        why: String,
    },
    /// QEMU started and ended.
    #[error("QEMU ended at its start ({exit}): {}", or_nothing(last_words))]
    Exited {
        /// How it ended.
        exit: Exit,
        /// The last lines it wrote.
        last_words: String,
    },
    /// QEMU started, but its monitor could not be used; it was killed.
    #[error("QEMU started, but {why}; it wrote: {}", or_nothing(last_words))]
    NotReady {
        /// What its monitor did.
        why: QmpError,
        /// The last lines it wrote.
        last_words: String,
    },
}

fn or_nothing(last_words: &str) -> &str {
    if last_words.is_empty() { "it wrote nothing" } else { last_words }
}

/// Words of QEMU (7.2 to 10.x) and the remedy of what they tell; the first that is found counts.
const MENDS: [(&str, &str); 15] = [
    ("invalid kernel header", "give the path of a kernel: a bzImage, a multiboot or a PVH kernel"),
    (
        "sandbox",
        "take a QEMU that was built with seccomp, or set qemu_sandbox = false in the configuration",
    ),
    ("support requested feature", "choose a CPU model that this host has, or tcg as accelerator"),
    (
        "KVM kernel module: Permission",
        "let a group of its own open /dev/kvm, as packaging/99-godwit.rules does, or choose tcg as accelerator",
    ),
    (
        "failed to initialize kvm",
        "load the KVM module of this host's CPU, or choose tcg as accelerator",
    ),
    (
        "Could not access KVM",
        "load the KVM module of this host's CPU, or choose tcg as accelerator",
    ),
    ("\" lock", "stop the VM or program that uses this disk image, or give the VM its own"),
    ("O_DIRECT", "put the disk image on a file system that takes O_DIRECT"),
    (
        "is not a valid device model name",
        "correct the device's name: see `-device help` of this QEMU",
    ),
    ("Permission denied", "let QEMU's user, who is nobody else, read this file or device"),
    (
        "could not open kernel file",
        "give the path of a kernel that this host and QEMU's user can read",
    ),
    ("could not load initrd", "give the path of an initrd that this host and QEMU's user can read"),
    ("No such file", "give a path that exists on this host"),
    ("not in qcow2 format", "give the format that the disk image really has"),
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

    /// A stable code for programs.
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
                "check that the agent's run directory is short, writable and not full"
            }
            StartError::TooLong { .. } => {
                "let others read the file (chmod o+r), or make it shorter"
            }
            StartError::Spawn { .. } => "install QEMU 7.2 or later, or name its path",
            StartError::Exited { last_words, .. } | StartError::NotReady { last_words, .. } => {
                MENDS.iter().find(|(words, _)| last_words.contains(words)).map_or(
                    "change what QEMU complains of; the VM's QEMU log has all it wrote",
                    |(_, remedy)| remedy,
                )
            }
        };
        text.to_owned()
    }

    /// Code, message and remedy together.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}
