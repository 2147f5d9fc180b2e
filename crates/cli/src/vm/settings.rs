//! Settings of a VM that its guest does not see: from options, and as text.

use std::collections::BTreeSet;

use godwit_api::{VmInfo, json_name};
use godwit_qemu::{Autostart, SpecPatch, VmName, VmSpec};
use serde_json::{Value, json};

use crate::args::{OnOff, SettingsArgs};
use crate::exit::Failure;
use crate::units::utc;

/// Adds the settings that the options name to a change.
pub(super) fn add(patch: &mut SpecPatch, options: &SettingsArgs) -> Result<(), Failure> {
    if let Some(text) = &options.description {
        let text = Some(text).filter(|text| !text.is_empty());
        patch.set("description", json!(text));
    }
    if !options.tags.is_empty() {
        patch.set("tags", json!(options.tags));
    }
    if let Some(policy) = options.on_crash {
        patch.set("on_crash", json!(policy));
    }
    if let Some(priority) = options.protect {
        patch.set("protect", json!(priority));
    }
    if options.protect_by_agents {
        patch.set("protect_by_agents", json!(true));
    }
    let mut autostart = json!({});
    if let Some(order) = options.autostart_order {
        autostart["order"] = json!(order);
    }
    if let Some(delay) = options.autostart_delay {
        autostart["delay_ms"] = json!(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
    }
    if !options.autostart_after.is_empty() {
        let others = options.autostart_after.iter().filter(|name| !name.is_empty());
        autostart["after"] = others.map(String::as_str).collect();
    }
    match options.autostart {
        Some(OnOff::Off) if autostart != json!({}) => Err(Failure::usage(
            "--autostart off has no order, no delay and no other VMs",
            "omit the other options of autostart, or use --autostart on",
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
    if let Some(Autostart { order, delay_ms, after }) = &spec.autostart {
        let order = order.map_or_else(|| "last".to_owned(), |order| format!("order {order}"));
        let seconds = *delay_ms as f64 / 1000.0;
        let delay = if *delay_ms == 0 { String::new() } else { format!(", then {seconds} s") };
        let others: Vec<&str> = after.iter().map(VmName::as_str).collect();
        let after = match others[..] {
            [] => String::new(),
            _ => format!(", after {}", others.join(" ")),
        };
        lines.push(("autostart", format!("{order}{delay}{after}")));
    }
    if !spec.on_crash.is_never() {
        lines.push(("restart", spec.on_crash.to_string()));
    }
    if let Some(priority) = spec.protect {
        lines.push(("protected", format!("restart priority {}", json_name(&priority))));
    }
    if spec.protect_by_agents {
        lines.push(("protected", "by the agents of hosts".to_owned()));
    }
    lines
}

/// Returns the line of `vm show` about the last crash.
pub(super) fn last_crash(vm: &VmInfo) -> Option<(&'static str, String)> {
    let crash = vm.last_crash?;
    let at = utc(crash.at_unix_ms);
    let mut text = format!("{at}: {}", crash.how);
    match crash.restarts {
        0 => {}
        1 => text.push_str(", 1 restart within an hour"),
        restarts => text.push_str(&format!(", {restarts} restarts within an hour")),
    }
    if crash.restarting {
        text.push_str(", the last of them is to come");
    }
    Some(("last crash", text))
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

    use godwit_qemu::{OnCrash, RestartPriority};

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
            (
                SettingsArgs { protect: Some(RestartPriority::High), ..none() },
                json!({ "protect": "high" }),
            ),
            (
                SettingsArgs { protect_by_agents: true, ..none() },
                json!({ "protect_by_agents": true }),
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
        let after = |names: &[&str]| {
            let autostart_after = names.iter().map(|name| (*name).to_owned()).collect();
            change(SettingsArgs { autostart_after, ..none() }).unwrap()
        };
        assert_eq!(after(&["db", "app"]), json!({ "autostart": { "after": ["db", "app"] } }));
        assert_eq!(after(&[""]), json!({ "autostart": { "after": [] } }));
        let policy = SettingsArgs { on_crash: Some(OnCrash::Times(3)), ..none() };
        assert_eq!(change(policy).unwrap(), json!({ "on_crash": { "times": 3 } }));
        let both = SettingsArgs { autostart: Some(OnOff::Off), autostart_order: Some(1), ..none() };
        assert!(change(both).unwrap_err().fault.message.contains("no order"));
    }

    #[test]
    fn settings_are_shown() {
        let spec = VmSpec {
            description: Some("The\nshop\u{1b}[2J".into()),
            tags: ["b", "a"].map(str::to_owned).into(),
            autostart: Some(Autostart {
                order: Some(2),
                delay_ms: 1500,
                after: ["db", "app"].map(|name| VmName::new(name).unwrap()).into(),
            }),
            on_crash: OnCrash::Times(3),
            protect: Some(RestartPriority::Low),
            ..VmSpec::new("web")
        };
        let expected = [
            ("description", "The shop [2J"),
            ("tags", "a b"),
            ("autostart", "order 2, then 1.5 s, after app db"),
            ("restart", "up to 3 within an hour"),
            ("protected", "restart priority low"),
        ];
        let expected = expected.map(|(key, value)| (key, value.to_owned()));
        assert_eq!(lines(&spec), expected);
        assert!(has_tags(&spec.tags, &["a".into()]));
        assert!(!has_tags(&spec.tags, &["a".into(), "c".into()]));
        let last = VmSpec { autostart: Some(Autostart::default()), ..VmSpec::new("web") };
        assert_eq!(lines(&last), [("autostart", "last".to_owned())]);
        let own = VmSpec { protect_by_agents: true, ..VmSpec::new("m1") };
        assert_eq!(lines(&own), [("protected", "by the agents of hosts".to_owned())]);
    }
}
