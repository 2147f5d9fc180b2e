//! Settings of a VM that its guest does not see: from options, and as text.

use std::collections::BTreeSet;

use godwit_qemu::{Autostart, SpecPatch, VmSpec};
use serde_json::{Value, json};

use crate::args::{OnOff, SettingsArgs};
use crate::exit::Failure;

/// Adds the settings that the options name to a change.
pub(super) fn add(patch: &mut SpecPatch, options: &SettingsArgs) -> Result<(), Failure> {
    if let Some(text) = &options.description {
        let text = Some(text).filter(|text| !text.is_empty());
        patch.set("description", json!(text));
    }
    if !options.tags.is_empty() {
        patch.set("tags", json!(options.tags));
    }
    let mut autostart = json!({});
    if let Some(order) = options.autostart_order {
        autostart["order"] = json!(order);
    }
    if let Some(delay) = options.autostart_delay {
        autostart["delay_ms"] = json!(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
    }
    match options.autostart {
        Some(OnOff::Off) if autostart != json!({}) => Err(Failure::usage(
            "--autostart off has no order and no delay",
            "omit --autostart-order and --autostart-delay, or use --autostart on",
        )),
        Some(OnOff::Off) => {
            patch.set("autostart", Value::Null);
            Ok(())
        }
        None if autostart == json!({}) => Ok(()),
        Some(OnOff::On) | None => {
            patch.set("autostart", autostart);
            Ok(())
        }
    }
}

/// Returns the lines of `vm show` about the settings.
pub(super) fn lines(spec: &VmSpec) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(text) = &spec.description {
        // A host may report anything.
        lines.push(("description", text.replace(|c: char| c.is_control(), " ")));
    }
    if !spec.tags.is_empty() {
        lines.push(("tags", tags(&spec.tags)));
    }
    if let Some(Autostart { order, delay_ms }) = spec.autostart {
        let order = order.map_or_else(|| "last".to_owned(), |order| format!("order {order}"));
        let seconds = delay_ms as f64 / 1000.0;
        let delay = if delay_ms == 0 { String::new() } else { format!(", then {seconds} s") };
        lines.push(("autostart", format!("{order}{delay}")));
    }
    lines
}

/// Formats tags for a list.
pub(super) fn tags(tags: &BTreeSet<String>) -> String {
    tags.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
}

/// Whether a VM has each of these tags.
pub(super) fn has_tags(tags: &BTreeSet<String>, wanted: &[String]) -> bool {
    wanted.iter().all(|tag| tags.contains(tag))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn options_change_what_they_name() {
        let change = |options: SettingsArgs| {
            let mut patch = SpecPatch::default();
            add(&mut patch, &options).map(|()| serde_json::to_value(patch).unwrap())
        };
        let none = SettingsArgs::default;
        for (options, expected) in [
            (none(), json!({})),
            (SettingsArgs { description: Some("a".into()), ..none() }, json!({"description": "a"})),
            (
                SettingsArgs { description: Some(String::new()), ..none() },
                json!({ "description": null }),
            ),
            (
                SettingsArgs { tags: vec!["b".into(), "a".into()], ..none() },
                json!({"tags": ["b", "a"]}),
            ),
            (SettingsArgs { autostart: Some(OnOff::On), ..none() }, json!({ "autostart": {} })),
            (SettingsArgs { autostart: Some(OnOff::Off), ..none() }, json!({ "autostart": null })),
            (
                SettingsArgs {
                    autostart_order: Some(2),
                    autostart_delay: Some(Duration::from_millis(1500)),
                    ..none()
                },
                json!({ "autostart": { "order": 2, "delay_ms": 1500 } }),
            ),
        ] {
            assert_eq!(change(options).unwrap(), expected);
        }
        let both = SettingsArgs { autostart: Some(OnOff::Off), autostart_order: Some(1), ..none() };
        assert!(change(both).unwrap_err().fault.message.contains("no order"));
    }

    #[test]
    fn settings_are_shown() {
        let spec = VmSpec {
            description: Some("The\nshop\u{1b}[2J".into()),
            tags: ["b", "a"].map(str::to_owned).into(),
            autostart: Some(Autostart { order: Some(2), delay_ms: 1500 }),
            ..VmSpec::new("web")
        };
        let expected = [
            ("description", "The shop [2J"),
            ("tags", "a b"),
            ("autostart", "order 2, then 1.5 s"),
        ];
        let expected = expected.map(|(key, value)| (key, value.to_owned()));
        assert_eq!(lines(&spec), expected);
        assert!(has_tags(&spec.tags, &["a".into()]));
        assert!(!has_tags(&spec.tags, &["a".into(), "c".into()]));
        let last = VmSpec { autostart: Some(Autostart::default()), ..VmSpec::new("web") };
        assert_eq!(lines(&last), [("autostart", "last".to_owned())]);
    }
}
