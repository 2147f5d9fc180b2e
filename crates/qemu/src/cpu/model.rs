//! A CPU model in the syntax of `-cpu`: `MODEL,+feature,-feature,feature=on,setting=value`.

use std::collections::BTreeMap;
use std::fmt;

use super::features::CpuFeatures;

/// Names that QEMU treats as aliases of others (`x86_cpu_initfn` of target/i386/cpu.c, 7.2 to
/// 10.0). Those with `_` for `-` follow by rule, as in QEMU.
const ALIASES: [(&str, &str); 7] = [
    ("sse3", "pni"),
    ("pclmuldq", "pclmulqdq"),
    ("sse4-1", "sse4.1"),
    ("sse4-2", "sse4.2"),
    ("xd", "nx"),
    ("ffxsr", "fxsr-opt"),
    ("i64", "lm"),
];

/// Properties that `-cpu` accepts beside features: those of QEMU's x86 CPUs (7.2 to 10.0) that
/// static expansion does not count as features, and those of it that are not switches.
const SETTINGS: [&str; 43] = [
    "apic-id",
    "avx10-version",
    "check",
    "core-id",
    "cpuid-0xb",
    "die-id",
    "enforce",
    "family",
    "fill-mtrr-mask",
    "full-cpuid-auto-level",
    "guest-phys-bits",
    "host-cache-info",
    "host-phys-bits",
    "host-phys-bits-limit",
    "l3-cache",
    "lbr-fmt",
    "legacy-cache",
    "legacy-multi-node",
    "level",
    "level-func7",
    "memory",
    "migratable",
    "min-level",
    "min-xlevel",
    "min-xlevel2",
    "model",
    "model-id",
    "module-id",
    "node-id",
    "phys-bits",
    "pmu",
    "socket-id",
    "start-powered-off",
    "stepping",
    "tcg-cpuid",
    "thread-id",
    "tsc-frequency",
    "ucode-rev",
    "vendor",
    "vmware-cpuid-freq",
    "xen-vapic",
    "xlevel",
    "xlevel2",
];

/// A CPU model with added and removed features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuModel {
    /// The model, such as `Haswell-v4`.
    pub name: String,
    /// Features added to the model's own.
    pub with: CpuFeatures,
    /// Features removed from the model.
    pub without: CpuFeatures,
    /// Everything else as written: `enforce`, `vendor`, `hv-…`. A bare name has the value `on`.
    pub settings: BTreeMap<String, String>,
}

impl CpuModel {
    /// Parses a value of `-cpu`. Accepts any text; QEMU reports unknown parts at its start.
    ///
    /// Precedence is QEMU's: of `feature=on` and `feature=off` the last one counts; `+feature`
    /// overrides them, and `-feature` overrides all (`x86_cpu_parse_featurestr`).
    #[must_use]
    pub fn parse(text: &str) -> CpuModel {
        let mut parts = text.split(',').map(str::trim);
        let name = parts.next().unwrap_or_default().to_owned();
        let mut model = CpuModel {
            name,
            with: CpuFeatures::new(),
            without: CpuFeatures::new(),
            settings: BTreeMap::new(),
        };
        let (mut plus, mut minus) = (Vec::new(), Vec::new());
        for part in parts.filter(|part| !part.is_empty()) {
            if let Some(feature) = part.strip_prefix('+') {
                plus.push(canonical(feature));
            } else if let Some(feature) = part.strip_prefix('-') {
                minus.push(canonical(feature));
            } else {
                let (key, value) = part.split_once('=').unwrap_or((part, "on"));
                model.set(canonical(key), value);
            }
        }
        plus.into_iter().for_each(|feature| model.set(feature, "on"));
        minus.into_iter().for_each(|feature| model.set(feature, "off"));
        model
    }

    fn set(&mut self, key: String, value: &str) {
        match switch(value) {
            Some(on) if !is_setting(&key) => {
                let (to, from) = if on {
                    (&mut self.with, &mut self.without)
                } else {
                    (&mut self.without, &mut self.with)
                };
                from.remove(&key);
                to.insert(key);
            }
            _ => drop(self.settings.insert(key, value.to_owned())),
        }
    }

    /// Whether the model is host-specific: the guest's features depend on where it was started.
    #[must_use]
    pub fn is_hosts_own(&self) -> bool {
        matches!(self.name.as_str(), "host" | "max")
    }

    /// Whether the user allows the guest to run without missing features.
    #[must_use]
    pub fn takes_what_there_is(&self) -> bool {
        self.settings.get("enforce").is_some_and(|value| switch(value) == Some(false))
    }
}

/// Formats the model for `-cpu`.
impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        self.without.iter().try_for_each(|feature| write!(f, ",-{feature}"))?;
        self.with.iter().try_for_each(|feature| write!(f, ",+{feature}"))?;
        self.settings.iter().try_for_each(|(key, value)| write!(f, ",{key}={value}"))
    }
}

/// Returns QEMU's canonical name of a feature.
pub(super) fn canonical(name: &str) -> String {
    let name = name.replace('_', "-");
    let known = ALIASES.iter().find(|(alias, _)| *alias == name);
    known.map_or(name, |(_, canonical)| (*canonical).to_owned())
}

/// Parses a switch as QEMU does (`qapi_bool_parse`).
fn switch(value: &str) -> Option<bool> {
    match value {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

fn is_setting(key: &str) -> bool {
    SETTINGS.contains(&key)
        || key.starts_with("hv-")
        || key.starts_with("x-")
        || is_paravirtual(key)
}

/// Whether a feature is not the processor's: QEMU adds it by itself.
pub(super) fn is_paravirtual(name: &str) -> bool {
    name.starts_with("kvm") || name == "hypervisor"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(names: &[&str]) -> CpuFeatures {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn models_are_parsed_as_by_qemu() {
        let model = CpuModel::parse(
            "Haswell-v4,+sse4_1,-x2apic,avx2=off,aes,pcid=on,pmu=on,vendor=GenuineIntel",
        );
        assert_eq!(model.name, "Haswell-v4");
        assert_eq!(model.with, set(&["aes", "pcid", "sse4.1"]));
        assert_eq!(model.without, set(&["avx2", "x2apic"]));
        let settings: Vec<_> =
            model.settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(settings, [("pmu", "on"), ("vendor", "GenuineIntel")]);
    }

    #[test]
    fn removed_features_override_added_ones() {
        assert_eq!(CpuModel::parse("m,-avx,+avx").without, set(&["avx"]));
        assert_eq!(CpuModel::parse("m,+avx,avx=off").with, set(&["avx"]));
        assert_eq!(CpuModel::parse("m,avx=off,avx=on").with, set(&["avx"]));
    }

    #[test]
    fn aliases_of_a_feature_are_equal() {
        for (name, canonical_name) in [
            ("sse3", "pni"),
            ("xd", "nx"),
            ("lahf_lm", "lahf-lm"),
            ("sse4.2", "sse4.2"),
            ("fxsr_opt", "fxsr-opt"),
        ] {
            assert_eq!(canonical(name), canonical_name);
        }
    }

    #[test]
    fn enforce_off_accepts_missing_features() {
        assert!(CpuModel::parse("qemu32,enforce=off").takes_what_there_is());
        assert!(!CpuModel::parse("qemu32,enforce").takes_what_there_is());
        assert!(!CpuModel::parse("qemu32").takes_what_there_is());
    }

    proptest! {
        #[test]
        fn a_formatted_model_parses_to_itself(
            name in "[A-Za-z][A-Za-z0-9-]{0,12}",
            parts in prop::collection::vec(
                "[+-]?(avx|avx2|sse4_1|pmu|aes|hv-time)(=on|=off)?", 0..8,
            ),
        ) {
            // QEMU refuses a sign together with a value.
            let parts: Vec<String> = parts
                .into_iter()
                .map(|part| {
                    if part.starts_with(['+', '-']) {
                        part.replace("=on", "").replace("=off", "")
                    } else {
                        part
                    }
                })
                .collect();
            let text = std::iter::once(name).chain(parts).collect::<Vec<_>>().join(",");
            let model = CpuModel::parse(&text);
            prop_assert!(model.with.is_disjoint(&model.without));
            prop_assert_eq!(CpuModel::parse(&model.to_string()), model);
        }
    }
}
