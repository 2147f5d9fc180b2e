//! Options whose values are names of the API, each with its help, and labels.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::de::DeserializeOwned;

/// Names that an option accepts, each with its help.
pub(crate) type Choices = &'static [(&'static str, &'static str)];

pub(crate) const ACCELERATORS: Choices = &[
    ("auto", "KVM if a 64-bit guest really runs under it, otherwise TCG"),
    ("kvm", "KVM, the hypervisor of the kernel"),
    ("tcg", "TCG, the software emulation of QEMU"),
];
pub(crate) const ADMISSION_POLICIES: Choices = &[
    ("off", "It is not checked"),
    ("warn", "It is carried out, with a warning"),
    ("refuse", "It is refused"),
];
pub(crate) const COMPRESSIONS: Choices = &[
    ("auto", "Compress if it is useful on the link with the available CPU"),
    ("none", "No compression"),
    ("lz4", "Fast, lower compression ratio"),
    ("zstd", "Slower, higher compression ratio"),
];
pub(crate) const ENGINES: Choices = &[
    ("godwit", "The engine of this project, which runs beside QEMU"),
    ("qemu", "The built-in migration of QEMU"),
];
pub(crate) const FIRMWARES: Choices = &[
    ("bios", "BIOS, which is part of QEMU"),
    ("uefi", "UEFI, with variables of the VM's own"),
    ("uefi-secure", "UEFI that starts only what is signed (Secure Boot); machine type q35"),
];
pub(crate) const JOURNAL_SEVERITIES: Choices = &[
    ("info", "Everything"),
    ("warning", "What needs a look, and failures"),
    ("error", "Failures only"),
];
pub(crate) const LINKS: Choices =
    &[("up", "The cable is plugged in"), ("down", "The cable is not plugged in")];
pub(crate) const LOAD_RESOLUTIONS: Choices = &[
    ("5s", "Five seconds, kept for an hour"),
    ("1min", "A minute, kept for a day"),
    ("1h", "An hour, kept for a year"),
];
pub(crate) const MULTIFD_COMPRESSIONS: Choices = &[
    ("zlib", "Slow, high compression ratio"),
    ("zstd", "Fast, high compression ratio"),
    ("none", "No compression"),
];
pub(crate) const PRIORITIES: Choices = &[
    ("low", "After all others"),
    ("normal", "Default order"),
    ("high", "Before moves of normal priority"),
    ("urgent", "Before all others"),
];
pub(crate) const REFERENCES: Choices = &[
    ("all", "All memory at the destination: an earlier stay, other guests, the guest's own pages"),
    ("own", "The guest's own pages only"),
    ("none", "No references: every page is sent, and no memory is retained for the VM's return"),
];
pub(crate) const RESTART_PRIORITIES: Choices =
    &[("high", "Before all others"), ("normal", "Default order"), ("low", "After all others")];
pub(crate) const ROLES: Choices = &[
    ("viewer", "Read everything"),
    ("operator", "Manage VMs, moves and drains"),
    ("admin", "Manage hosts, rules, limits and tokens"),
];
pub(crate) const RULE_KINDS: Choices = &[
    ("together", "Keep all VMs on the same host"),
    ("apart", "Keep each VM on a different host"),
    ("on", "Run the VMs only on the hosts given by --at and --at-label"),
    ("not-on", "Never run the VMs on these hosts"),
];
pub(crate) const TOPS: Choices = &[
    ("cpu", "CPU time used"),
    ("ready", "Time waited for a processor"),
    ("memory", "Memory used"),
    ("disk", "Bytes read from disks and written to them"),
    ("network", "Bytes received and sent"),
];
pub(crate) const TRACKINGS: Choices = &[
    ("auto", "Faults for guests of 512 MiB and more, scans for smaller ones"),
    ("faults", "Faults: a shorter pause of a guest with much memory"),
    ("scans", "Scans of all memory: a first write to a page costs the guest least"),
];
pub(crate) const WATCHDOGS: Choices = &[
    ("reset", "Reset the guest"),
    ("poweroff", "Terminate the VM, which then shows as failed"),
    ("pause", "Pause the VM"),
    ("none", "Nothing but a line in the log of QEMU"),
];
pub(crate) const VIDEOS: Choices = &[
    ("none", "No screen: the guest has its serial console only"),
    ("vga", "A VGA adapter, which every guest can use"),
    ("virtio", "A virtio adapter, for guests with its driver; VGA until they load it"),
];

/// Accepts one of the names, and reads it as the API does.
pub(crate) fn one_of<T>(choices: Choices) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    let values = choices.iter().map(|(name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|name| serde_json::from_value::<T>(name.into()))
}

/// Parses `KEY=VALUE`.
pub(super) fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    if key.is_empty() {
        Err("the key is empty".to_owned())
    } else {
        Ok((key.to_owned(), value.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{
        AdmissionPolicy, LoadResolution, MovePriority, Role, RuleKind, TopBy,
    };
    use godwit_qemu::{Accel, Firmware, NicLink, RestartPriority, Video, Watchdog};
    use godwit_types::{Compression, EngineKind, ReferenceUse, TrackingUse};

    use super::*;

    fn check<T: DeserializeOwned>(choices: Choices) {
        for (name, _) in choices {
            let read = serde_json::from_value::<T>((*name).into());
            read.unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn the_api_has_each_name() {
        check::<Accel>(ACCELERATORS);
        check::<AdmissionPolicy>(ADMISSION_POLICIES);
        check::<Compression>(COMPRESSIONS);
        check::<LoadResolution>(LOAD_RESOLUTIONS);
        check::<TopBy>(TOPS);
        check::<EngineKind>(ENGINES);
        check::<Firmware>(FIRMWARES);
        check::<NicLink>(LINKS);
        check::<MovePriority>(PRIORITIES);
        check::<ReferenceUse>(REFERENCES);
        check::<RestartPriority>(RESTART_PRIORITIES);
        check::<Role>(ROLES);
        check::<RuleKind>(RULE_KINDS);
        check::<TrackingUse>(TRACKINGS);
        check::<Watchdog>(WATCHDOGS);
        check::<Video>(VIDEOS);
    }
}
