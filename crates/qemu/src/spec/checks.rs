//! Checks that several parts of a specification share.

use std::path::Path;

use crate::spec::error::SpecError;

/// Most vCPUs a VM may have (KVM_MAX_VCPUS of Linux 6 on x86).
pub(super) const MAX_VCPUS: u32 = 4096;
/// Most serial ports of a VM: those that a PC has addresses for.
pub const MOST_SERIAL_PORTS: u32 = 4;
/// Longest kernel command line on x86 (COMMAND_LINE_SIZE, Linux 6).
pub(super) const MAX_CMDLINE_BYTES: usize = 2047;

/// Checks a value that becomes part of an option of QEMU.
///
/// # Errors
/// It is empty or has a character other than letters, digits and `punctuation`.
pub(super) fn check_value(
    what: &'static str,
    value: &str,
    punctuation: &str,
) -> Result<(), SpecError> {
    let good = |c: char| c.is_ascii_alphanumeric() || punctuation.contains(c);
    if value.starts_with(|c: char| c.is_ascii_alphanumeric()) && value.chars().all(good) {
        return Ok(());
    }
    Err(SpecError::Value { what, value: value.to_owned() })
}

/// Checks the path of a file on a host.
///
/// # Errors
/// It is relative, not UTF-8, or has a control character.
pub(super) fn check_path(role: &'static str, path: &Path) -> Result<(), SpecError> {
    let error = |why| Err(SpecError::Path { role, path: path.to_owned(), why });
    match path.to_str() {
        None => error("not UTF-8"),
        Some(text) if text.chars().any(char::is_control) => {
            error("a path with a control character")
        }
        Some(_) if !path.is_absolute() => error("not an absolute path"),
        Some(_) => Ok(()),
    }
}

/// Checks that a versioned machine type can have a TPM: its ACPI tables name it to the guest.
///
/// # Errors
/// [`SpecError::Tpm`] if it cannot.
pub(super) fn check_tpm(tpm: bool, machine: &str) -> Result<(), SpecError> {
    if !tpm || is_pc(machine) {
        return Ok(());
    }
    Err(SpecError::Tpm { machine: machine.to_owned() })
}

/// Checks that a versioned machine type can have the device by which a guest reports a panic.
///
/// # Errors
/// [`SpecError::Setting`] if it cannot.
pub(super) fn check_panic_device(is_wanted: bool, machine: &str) -> Result<(), SpecError> {
    if !is_wanted || is_pc(machine) {
        return Ok(());
    }
    Err(SpecError::Setting {
        what: "panic_device",
        why: "the machine type has no place for it",
        remedy: "use machine type q35 or pc, or no panic_device",
    })
}

/// Returns whether a versioned machine type is a PC.
pub(super) fn is_pc(machine: &str) -> bool {
    machine.starts_with("pc-q35-") || machine.starts_with("pc-i440fx-")
}
