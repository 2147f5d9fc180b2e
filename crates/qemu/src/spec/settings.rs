//! Settings of a VM that its guest does not see: a description, tags, its start with the host and
//! its restarts after crashes. They may change while it runs, and they move with it.

use std::collections::BTreeSet;
use std::time::Duration;

use godwit_types::Fault;
use serde::{Deserialize, Serialize};

use crate::spec::VmSpec;
use crate::spec::error::SpecError;
use crate::spec::name::VmName;

/// Longest description, in bytes.
const MOST_DESCRIPTION_BYTES: usize = 4096;
/// Most tags of a VM.
const MOST_TAGS: usize = 32;
/// Longest tag, in bytes.
const MOST_TAG_BYTES: usize = 63;
/// Longest delay after a start, in milliseconds: an hour.
const MOST_DELAY_MS: u64 = 3_600_000;
/// Most VMs that a VM starts after.
const MOST_AFTER: usize = 32;

/// Start of a VM with its host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Autostart {
    /// Place in the order of the host's VMs, lowest first. Default: after those with a place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<u32>,
    /// Time between this start and the next VM's, in milliseconds; at most an hour.
    #[cfg_attr(feature = "schema", schema(maximum = 3_600_000))]
    pub delay_ms: u64,
    /// VMs of the same host that are started before it, whatever the order says; up to 32. Those
    /// that the host does not have, or does not start, are not waited for.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>, max_items = 32))]
    pub after: BTreeSet<VmName>,
}

/// Order of restarts after the failure of a host: VMs of a higher priority are placed and started
/// first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[allow(missing_docs, reason = "the names say it")]
pub enum RestartPriority {
    High,
    #[default]
    Normal,
    Low,
}

impl Autostart {
    /// Returns the place among the VMs of a host; VMs with the same place start by name.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.order.map_or(u64::MAX, u64::from)
    }

    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_millis(self.delay_ms)
    }
}

/// Checks the settings of a VM of this name.
pub(super) fn check(
    name: &str,
    description: Option<&str>,
    tags: &BTreeSet<String>,
    autostart: Option<&Autostart>,
) -> Result<(), SpecError> {
    let wrong = |what, why| {
        let remedy = match what {
            "description" => "give a text of at most 4096 bytes",
            "tags" => {
                "give at most 32, each of 1 to 63 letters, digits, \"-\", \"_\", \".\" or \":\""
            }
            _ => "give a delay of at most an hour, and at most 32 other VMs to start after",
        };
        Err(SpecError::Setting { what, why, remedy })
    };
    if let Some(text) = description {
        if text.len() > MOST_DESCRIPTION_BYTES {
            return wrong("description", "it is too long");
        }
        if text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t')) {
            return wrong("description", "it contains a control character");
        }
    }
    if tags.len() > MOST_TAGS {
        return wrong("tags", "there are too many");
    }
    if !tags.iter().all(|tag| is_tag(tag)) {
        return wrong("tags", "one is empty, too long, or has a character that is not allowed");
    }
    let Some(autostart) = autostart else { return Ok(()) };
    if autostart.delay_ms > MOST_DELAY_MS {
        return wrong("autostart", "its delay is too long");
    }
    if autostart.after.len() > MOST_AFTER {
        return wrong("autostart", "it names too many other VMs");
    }
    if autostart.after.iter().any(|other| **other == *name) {
        return wrong("autostart", "the VM would start after itself");
    }
    Ok(())
}

/// Checks that agents can restart the VM among themselves if it says so.
pub(super) fn check_own(spec: &VmSpec) -> Result<(), SpecError> {
    if !spec.protect_by_agents {
        return Ok(());
    }
    let wrong = |why, remedy| Err(SpecError::Setting { what: "protect_by_agents", why, remedy });
    if spec.protect.is_some() {
        return wrong("the manager protects the VM already", "end one of both protections");
    }
    if spec.autostart.is_some() {
        return wrong("the VM starts with its host", "remove its autostart: agents start it");
    }
    if spec.tpm {
        return wrong("the VM has a TPM, whose state is on its host", "use a VM without a TPM");
    }
    if !spec.extra_devices.is_empty() || spec.topology.is_some() {
        return wrong("the VM has devices of its host", "use a VM without extra_devices");
    }
    if spec.qemu.is_some() {
        return wrong("the VM has a QEMU of its own", "use the QEMU of each host");
    }
    Ok(())
}

/// Returns why a VM with `protect_by_agents` cannot leave its place.
#[must_use]
pub fn kept_by_agents(vm: &str) -> Fault {
    let remedy = format!(
        "end that first: `godwit vm set {vm} --unset protect-by-agents`, then set it again where \
         the VM is"
    );
    Fault::new("protect-by-agents", "agents restart it among themselves", remedy)
}

fn is_tag(tag: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    (1..=MOST_TAG_BYTES).contains(&tag.len())
        && tag.starts_with(|c: char| c.is_ascii_alphanumeric())
        && tag.chars().all(good)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::spec::{OnCrash, SpecPatch};

    fn spec() -> VmSpec {
        VmSpec { kernel: Some("/k".into()), ..VmSpec::new("web") }
    }

    fn vms(count: usize) -> BTreeSet<VmName> {
        (0..count).map(|number| VmName::new(format!("db{number}")).unwrap()).collect()
    }

    #[test]
    fn settings_are_bounded() {
        let good = VmSpec {
            description: Some("Shop\n\tof Ms Müller".to_owned()),
            tags: ["prod", "team:shop", "2026"].map(str::to_owned).into(),
            autostart: Some(Autostart {
                order: Some(1),
                delay_ms: MOST_DELAY_MS,
                after: vms(MOST_AFTER),
            }),
            on_crash: OnCrash::Times(100),
            ..spec()
        };
        good.validate().unwrap();
        let long = |bytes: usize| "x".repeat(bytes);
        let with = |autostart| VmSpec { autostart: Some(autostart), ..spec() };
        for (wrong, word) in [
            (VmSpec { description: Some(long(4097)), ..spec() }, "description"),
            (VmSpec { description: Some("\u{1b}[2J".to_owned()), ..spec() }, "control"),
            (VmSpec { tags: [String::new()].into(), ..spec() }, "tags"),
            (VmSpec { tags: ["a,b".to_owned()].into(), ..spec() }, "tags"),
            (VmSpec { tags: [long(64)].into(), ..spec() }, "tags"),
            (VmSpec { tags: (0..33).map(|n| n.to_string()).collect(), ..spec() }, "too many"),
            (with(Autostart { delay_ms: MOST_DELAY_MS + 1, ..Autostart::default() }), "delay"),
            (with(Autostart { after: vms(MOST_AFTER + 1), ..Autostart::default() }), "too many"),
            (
                with(Autostart {
                    after: [VmName::new("web").unwrap()].into(),
                    ..Autostart::default()
                }),
                "after itself",
            ),
            (VmSpec { on_crash: OnCrash::Times(0), ..spec() }, "on_crash"),
            (VmSpec { on_crash: OnCrash::Times(101), ..spec() }, "on_crash"),
        ] {
            let error = wrong.validate().unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
            assert!(!error.remedy().is_empty());
        }
    }

    #[test]
    fn a_change_of_settings_is_distinguished_from_others() {
        let patch: SpecPatch =
            serde_json::from_value(json!({ "tags": ["a", "a"], "autostart": { "order": 3 } }))
                .unwrap();
        let changed = patch.apply(&spec()).unwrap();
        assert_eq!(changed.tags.len(), 1);
        assert!(changed.differs_in_settings_alone(&spec()));
        let delayed: SpecPatch =
            serde_json::from_value(json!({ "autostart": { "delay_ms": 10 } })).unwrap();
        let delayed = delayed.apply(&changed).unwrap();
        let expected = Autostart { order: Some(3), delay_ms: 10, ..Autostart::default() };
        assert_eq!(delayed.autostart, Some(expected));
        assert!(!VmSpec { vcpus: 2, ..changed.clone() }.differs_in_settings_alone(&changed));
        // A VM of an earlier version has none.
        let old: VmSpec = serde_json::from_value(json!({ "name": "web" })).unwrap();
        assert_eq!((old.description, old.autostart), (None, None));
        assert_eq!((old.on_crash, old.panic_device), (OnCrash::Never, None));
        let text = serde_json::to_value(VmSpec::new("web")).unwrap();
        assert!(text.get("tags").is_none() && text.get("autostart").is_none());
        assert!(text.get("on_crash").is_none() && text.get("panic_device").is_none());
    }

    #[test]
    fn a_policy_for_crashes_is_a_setting() {
        let set = |spec: &VmSpec, value| {
            let patch: SpecPatch = serde_json::from_value(json!({ "on_crash": value })).unwrap();
            patch.apply(spec).unwrap()
        };
        let mut changed = spec();
        for (value, policy) in [
            (json!("always"), OnCrash::Always),
            (json!({ "times": 3 }), OnCrash::Times(3)),
            (json!("never"), OnCrash::Never),
            (json!({ "times": 1 }), OnCrash::Times(1)),
            (json!(null), OnCrash::Never),
        ] {
            changed = set(&changed, value);
            assert_eq!(changed.on_crash, policy);
            assert!(changed.differs_in_settings_alone(&spec()));
        }
    }

    #[test]
    fn vms_without_a_place_start_last() {
        let placed = Autostart { order: Some(7), ..Autostart::default() };
        assert!(placed.place() < Autostart::default().place());
    }

    #[test]
    fn agents_restart_only_what_other_hosts_can_start() {
        let own = VmSpec { protect_by_agents: true, ..spec() };
        own.validate().unwrap();
        let text = serde_json::to_value(&own).unwrap();
        assert_eq!(text["protect_by_agents"], json!(true));
        assert!(serde_json::to_value(spec()).unwrap().get("protect_by_agents").is_none());
        let wrong = [
            VmSpec { protect: Some(RestartPriority::Low), ..own.clone() },
            VmSpec { autostart: Some(Autostart::default()), ..own.clone() },
            VmSpec { tpm: true, ..own.clone() },
            VmSpec { extra_devices: vec!["vfio-pci,host=01:00.0".into()], ..own.clone() },
            VmSpec { qemu: Some("/q".into()), ..own.clone() },
        ];
        for spec in wrong {
            let refused = spec.validate().unwrap_err();
            assert!(refused.to_string().contains("invalid protect_by_agents"), "{refused}");
            VmSpec { protect_by_agents: false, ..spec }.validate().unwrap();
        }
    }
}
