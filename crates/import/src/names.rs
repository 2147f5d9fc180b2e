//! Names, texts and numbers of other platforms, made those of a specification.

use std::collections::BTreeSet;

use godwit_qemu::{ByteSize, MacAddress, VmName, VmSpec};
use godwit_types::ImportFinding;

use crate::finding::Findings;

/// Longest description and tag that a specification may have, in bytes.
const MOST_DESCRIPTION_BYTES: usize = 4096;
const MOST_TAG_BYTES: usize = 63;
const MOST_TAGS: usize = 32;

/// Returns a valid name of a VM, as close to this one as possible; `None` if nothing of it is left.
#[must_use]
pub fn vm_name(text: &str) -> Option<String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = text.trim().chars().map(|c| if good(c) { c } else { '-' }).collect();
    let name = name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    let name: String = name.chars().take(VmName::MAX_BYTES).collect();
    VmName::new(name.trim_end_matches('-').to_owned()).ok().map(String::from)
}

/// Makes name, description, tags and hardware addresses such that a specification may have them.
pub(crate) fn tidy(spec: &mut VmSpec, findings: &mut Vec<ImportFinding>) {
    let mut notes = Findings::default();
    match vm_name(&spec.name) {
        Some(name) if name == spec.name => {}
        Some(name) => {
            notes.note("name", format!("\"{}\" becomes \"{name}\": see --name", spec.name));
            spec.name = name;
        }
        None => {
            notes.note("name", "the definition has none that is usable: \"imported\"; see --name");
            "imported".clone_into(&mut spec.name);
        }
    }
    if let Some(text) = spec.description.take() {
        let clean: String =
            text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
        let most = MOST_DESCRIPTION_BYTES.min(clean.len());
        let end = (0..=most).rev().find(|end| clean.is_char_boundary(*end)).unwrap_or(0);
        if end < clean.len() {
            notes.note("description", "it is cut at 4096 bytes");
        }
        spec.description = Some(clean[..end].trim().to_owned()).filter(|text| !text.is_empty());
    }
    let tags = std::mem::take(&mut spec.tags);
    let good = |tag: &String| {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        tag.len() <= MOST_TAG_BYTES
            && tag.starts_with(|c: char| c.is_ascii_alphanumeric())
            && tag.chars().all(good)
    };
    let (kept, lost): (BTreeSet<_>, BTreeSet<_>) = tags.into_iter().partition(good);
    for tag in lost {
        notes.note(format!("tag {tag}"), "it has characters that a tag cannot have: left out");
    }
    if kept.len() > MOST_TAGS {
        notes.note("tags", "more than 32: the rest is left out");
    }
    spec.tags = kept.into_iter().take(MOST_TAGS).collect();
    for (index, nic) in spec.nics.iter_mut().enumerate() {
        let Some(text) = nic.mac.take() else {
            notes.note(format!("NIC {index}"), "it has no hardware address: it gets a new one");
            continue;
        };
        nic.mac = text.parse::<MacAddress>().ok().map(|mac| mac.to_string());
        if nic.mac.is_none() {
            notes.note(
                format!("NIC {index}"),
                format!("\"{text}\" is not a valid hardware address: the NIC gets a new one"),
            );
        }
    }
    findings.append(&mut notes.0);
}

/// Returns bytes of a number with a unit of libvirt (`b`, `KB`, `KiB`, `k`, …) or of OVF.
pub(crate) fn bytes_of(number: &str, unit: &str) -> Option<u64> {
    let factor: u64 = match unit.trim() {
        "b" | "bytes" | "byte" | "Bytes" => 1,
        "KB" => 1000,
        "" | "k" | "K" | "KiB" | "KiloBytes" | "byte * 2^10" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" | "MegaBytes" | "byte * 2^20" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" | "GigaBytes" | "byte * 2^30" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" | "byte * 2^40" => 1 << 40,
        other => return binary_unit(other).and_then(|factor| scaled(number, factor)),
    };
    scaled(number, factor)
}

fn scaled(number: &str, factor: u64) -> Option<u64> {
    number.trim().parse::<u64>().ok()?.checked_mul(factor)
}

/// Reads `byte * 2^N`, in any spacing.
fn binary_unit(unit: &str) -> Option<u64> {
    let unit: String = unit.chars().filter(|c| !c.is_whitespace()).collect();
    let power: u32 =
        unit.strip_prefix("byte*2^").or(unit.strip_prefix("bytes*2^"))?.parse().ok()?;
    1_u64.checked_shl(power)
}

/// Returns a size of memory, rounded up to a MiB.
pub(crate) fn whole_mib(bytes: u64, notes: &mut Findings) -> ByteSize {
    const UNIT: u64 = 1 << 20;
    let whole = bytes.div_ceil(UNIT).saturating_mul(UNIT);
    if whole != bytes {
        notes.note("memory", format!("{bytes} bytes become {}", ByteSize::from_bytes(whole)));
    }
    ByteSize::from_bytes(whole)
}

/// Decodes `%0A` and the like.
pub(crate) fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| bytes[at] == b'%') {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Sets the machine type for one of another QEMU, or refuses it.
pub(crate) fn set_machine(text: &str, spec: &mut VmSpec, notes: &mut Findings) {
    match machine(text) {
        Some((name, note)) => {
            spec.machine = Some(name);
            if let Some(note) = note {
                notes.note("machine type", note);
            }
        }
        None => notes.refuse(format!("machine type {text}"), "only q35 and pc can be imported"),
    }
}

/// Returns the machine type for one of another QEMU, and a note if it changes; `None`: there is
/// none for it.
fn machine(text: &str) -> Option<(String, Option<String>)> {
    let is_upstream = |prefix: &str| {
        text.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-".contains(c);
    if (is_upstream("pc-q35-") || is_upstream("pc-i440fx-")) && text.chars().all(plain) {
        // Proxmox VE marks its own changes: `pc-i440fx-8.1+pve0`, cut by the caller.
        return Some((text.to_owned(), None));
    }
    let family = match text {
        "q35" | "pc" => return Some((text.to_owned(), None)),
        _ if text.starts_with("pc-q35-") => "q35",
        _ if text.starts_with("pc-") || text.starts_with("rhel") => "pc",
        _ => return None,
    };
    Some((family.to_owned(), Some(format!("\"{text}\" becomes {family} of this host's QEMU"))))
}
