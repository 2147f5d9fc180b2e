//! Parser of QEMU's responses about CPUs, with limits. Pure.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::features::CpuFeatures;
use super::model::{canonical, is_paravirtual};

/// Most CPU models of a response. QEMU 10.0 has 154.
const MOST_MODELS: usize = 2048;
/// Most features of a model. QEMU 10.0 has 390.
const MOST_FEATURES: usize = 4096;
/// Longest name. The longest of QEMU 10.0 has 24 letters.
const LONGEST_NAME_BYTES: usize = 64;

/// A model in the response to `query-cpu-definitions`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ModelFit {
    pub(super) name: String,
    /// The versioned model behind an alias.
    pub(super) alias_of: Option<String>,
    /// Features of the model that the host lacks.
    pub(super) missing: CpuFeatures,
    /// A later QEMU will remove it.
    pub(super) is_deprecated: bool,
}

/// `CpuDefinitionInfo` of qapi/machine-target.json. Omits `static`, which on x86 only `base` is
/// (7.2 to 10.0).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Definition {
    name: String,
    alias_of: Option<String>,
    /// Absent where QEMU does not know.
    unavailable_features: Option<Vec<String>>,
    #[serde(default)]
    deprecated: bool,
}

/// Returns the models for which QEMU knows what the host lacks.
///
/// # Errors
/// The reason as text: the response has another shape, or is longer than any QEMU's.
pub(super) fn read_models(answer: &Value) -> Result<Vec<ModelFit>, String> {
    let definitions = answer.as_array().ok_or("its list of CPU models is not a list")?;
    if definitions.len() > MOST_MODELS {
        return Err(format!("it has {} CPU models, more than {MOST_MODELS}", definitions.len()));
    }
    definitions.iter().filter_map(|definition| read_model(definition).transpose()).collect()
}

fn read_model(definition: &Value) -> Result<Option<ModelFit>, String> {
    let Definition { name, alias_of, unavailable_features, deprecated } =
        Definition::deserialize(definition)
            .map_err(|why| format!("cannot read a CPU model: {why}"))?;
    let Some(missing) = unavailable_features else { return Ok(None) };
    let is_name = |name: &str| !name.is_empty() && name.len() <= LONGEST_NAME_BYTES;
    if !is_name(&name) || missing.len() > MOST_FEATURES || !missing.iter().all(|name| is_name(name))
    {
        return Err("it has a CPU model that no QEMU has".to_owned());
    }
    let missing = missing.iter().map(|name| canonical(name)).collect();
    Ok(Some(ModelFit { name, alias_of, missing, is_deprecated: deprecated }))
}

/// Returns the enabled features of an expanded model, without those that are not the processor's.
///
/// # Errors
/// The reason as text: the response has another shape, or is longer than any QEMU's.
pub(super) fn read_expansion(answer: &Value) -> Result<CpuFeatures, String> {
    let props = answer.pointer("/model/props").and_then(Value::as_object);
    let props = props.ok_or("an expanded CPU model has no properties")?;
    if props.len() > MOST_FEATURES || props.keys().any(|name| name.len() > LONGEST_NAME_BYTES) {
        return Err("it has a CPU model with features that no QEMU has".to_owned());
    }
    let on = props.iter().filter(|(_, value)| **value == Value::Bool(true));
    let features: CpuFeatures =
        on.map(|(name, _)| canonical(name)).filter(|name| !is_paravirtual(name)).collect();
    let has_vmx = features.contains("vmx");
    // QEMU drops features that depend on a disabled feature (`feature_dependencies` of
    // target/i386/cpu.c).
    Ok(features.into_iter().filter(|name| has_vmx || !name.starts_with("vmx-")).collect())
}

/// Returns the most vCPUs of each machine type in the response to `query-machines`. What cannot be
/// read is left out: QEMU itself then decides.
pub(super) fn read_machines(answer: &Value) -> BTreeMap<String, u32> {
    let machines = answer.as_array().into_iter().flatten().take(MOST_MODELS);
    let most = |machine: &Value| {
        let name = machine["name"].as_str().filter(|name| name.len() <= LONGEST_NAME_BYTES)?;
        let most = machine["cpu-max"].as_u64().filter(|most| *most > 0)?;
        Some((name.to_owned(), u32::try_from(most).unwrap_or(u32::MAX)))
    };
    machines.filter_map(most).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn set(names: &[&str]) -> CpuFeatures {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn models_with_unknown_fields_are_read() {
        let answer = json!([
            {"name": "Westmere-v1", "typename": "x", "unavailable-features": [], "static": false,
             "new": {"a": 1}},
            {"name": "Westmere", "alias-of": "Westmere-v1", "deprecated": true,
             "unavailable-features": ["aes", "aes", "sse4_1"]},
            {"name": "later"},
        ]);
        let models = read_models(&answer).unwrap();
        assert_eq!(models.len(), 2);
        assert_eq!(models[0].missing, set(&[]));
        assert_eq!(models[1].alias_of.as_deref(), Some("Westmere-v1"));
        assert_eq!(models[1].missing, set(&["aes", "sse4.1"]));
        assert_eq!(
            models.iter().map(|model| model.is_deprecated).collect::<Vec<_>>(),
            [false, true]
        );
    }

    #[test]
    fn enabled_features_are_read_by_canonical_names() {
        let answer = json!({"model": {"name": "base", "props": {
            "avx2": true, "sse3": true, "aes": false, "kvm-pv-eoi": true, "hypervisor": true,
            "vmx-ept": true, "min-level": 13, "vendor": "GenuineIntel", "unheard-of": {"deep": []},
        }}, "deprecated-props": []});
        assert_eq!(read_expansion(&answer).unwrap(), set(&["avx2", "pni"]));
    }

    #[test]
    fn most_vcpus_are_read_where_they_are_known() {
        let answer = json!([
            {"name": "pc-q35-7.2", "alias": "q35", "cpu-max": 288, "hotpluggable-cpus": true},
            {"name": "later"}, {"name": "none", "cpu-max": 0}, {"cpu-max": 1},
            {"name": "x".repeat(65), "cpu-max": 1}, 7,
        ]);
        assert_eq!(read_machines(&answer), BTreeMap::from([("pc-q35-7.2".to_owned(), 288)]));
        assert!(read_machines(&json!({})).is_empty());
    }

    #[test]
    fn impossible_responses_are_refused() {
        let many: Vec<Value> =
            (0..=MOST_MODELS).map(|i| json!({"name": format!("m{i}")})).collect();
        for answer in
            [json!(many), json!({}), json!([{"name": "x".repeat(65), "unavailable-features": []}])]
        {
            assert!(read_models(&answer).is_err());
        }
        let features: Map<String, Value> =
            (0..=MOST_FEATURES).map(|i| (format!("f{i}"), json!(true))).collect();
        assert!(read_expansion(&json!({"model": {"name": "base", "props": features}})).is_err());
        assert!(read_expansion(&json!({"models": {}})).is_err());
    }
}
