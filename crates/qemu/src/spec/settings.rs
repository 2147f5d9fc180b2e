//! Settings of a VM that its guest does not see: a description, tags, and its start with the host.
//! They may change while it runs, and they move with it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::spec::error::SpecError;

/// Longest description, in bytes.
const MOST_DESCRIPTION_BYTES: usize = 4096;
/// Most tags of a VM.
const MOST_TAGS: usize = 32;
/// Longest tag, in bytes.
const MOST_TAG_BYTES: usize = 63;
/// Longest delay after a start, in milliseconds: an hour.
const MOST_DELAY_MS: u64 = 3_600_000;

/// Start of a VM with its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Autostart {
    /// Place in the order of the host's VMs, lowest first. Default: after those with a place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<u32>,
    /// Time between this start and the next VM's, in milliseconds; at most an hour.
    #[cfg_attr(feature = "schema", schema(maximum = 3_600_000))]
    pub delay_ms: u64,
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

/// Checks the settings of a VM.
pub(super) fn check(
    description: Option<&str>,
    tags: &BTreeSet<String>,
    autostart: Option<Autostart>,
) -> Result<(), SpecError> {
    let wrong = |what, why| {
        let remedy = match what {
            "description" => "give a text of at most 4096 bytes",
            "tags" => {
                "give at most 32, each of 1 to 63 letters, digits, \"-\", \"_\", \".\" or \":\""
            }
            _ => "give a delay of at most an hour",
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
    if autostart.is_some_and(|autostart| autostart.delay_ms > MOST_DELAY_MS) {
        return wrong("autostart", "its delay is too long");
    }
    Ok(())
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
    use crate::spec::{SpecPatch, VmSpec};

    fn spec() -> VmSpec {
        VmSpec { kernel: Some("/k".into()), ..VmSpec::new("web") }
    }

    #[test]
    fn settings_are_bounded() {
        let good = VmSpec {
            description: Some("Shop\n\tof Ms Müller".to_owned()),
            tags: ["prod", "team:shop", "2026"].map(str::to_owned).into(),
            autostart: Some(Autostart { order: Some(1), delay_ms: MOST_DELAY_MS }),
            ..spec()
        };
        good.validate().unwrap();
        let long = |bytes: usize| "x".repeat(bytes);
        for (wrong, word) in [
            (VmSpec { description: Some(long(4097)), ..spec() }, "description"),
            (VmSpec { description: Some("\u{1b}[2J".to_owned()), ..spec() }, "control"),
            (VmSpec { tags: [String::new()].into(), ..spec() }, "tags"),
            (VmSpec { tags: ["a,b".to_owned()].into(), ..spec() }, "tags"),
            (VmSpec { tags: [long(64)].into(), ..spec() }, "tags"),
            (VmSpec { tags: (0..33).map(|n| n.to_string()).collect(), ..spec() }, "too many"),
            (
                VmSpec {
                    autostart: Some(Autostart { order: None, delay_ms: MOST_DELAY_MS + 1 }),
                    ..spec()
                },
                "delay",
            ),
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
        assert_eq!(delayed.autostart, Some(Autostart { order: Some(3), delay_ms: 10 }));
        assert!(!VmSpec { vcpus: 2, ..changed.clone() }.differs_in_settings_alone(&changed));
        // A VM of an earlier version has none.
        let old: VmSpec = serde_json::from_value(json!({ "name": "web" })).unwrap();
        assert_eq!((old.description, old.autostart), (None, None));
        let text = serde_json::to_value(VmSpec::new("web")).unwrap();
        assert!(text.get("tags").is_none() && text.get("autostart").is_none());
    }

    #[test]
    fn vms_without_a_place_start_last() {
        let placed = Autostart { order: Some(7), delay_ms: 0 };
        assert!(placed.place() < Autostart::default().place());
    }
}
