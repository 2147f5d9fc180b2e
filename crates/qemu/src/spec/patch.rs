//! Changes of a specification: some of its keys with new values.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::spec::VmSpec;
use crate::spec::memory::MemoryBlock;

/// Keys of a [`VmSpec`] with new values; null restores a key's default. This is a JSON Merge Patch
/// (RFC 7396): an object, such as `cloud_init`, is changed key by key, and any other value, such as
/// a list, is replaced. A size as the new value of `memory` keeps the backing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(value_type = std::collections::BTreeMap<String, Value>))]
pub struct SpecPatch(Map<String, Value>);

/// Keys that identify a VM, which no patch changes.
const IDENTITY: [&str; 2] = ["name", "uuid"];

impl SpecPatch {
    /// Gives a key a new value.
    pub fn set(&mut self, key: &str, value: Value) {
        self.0.insert(key.to_owned(), value);
    }

    /// Restores the default of a key. A key of an object follows its object's and a dot.
    pub fn unset(&mut self, key: &str) {
        match key.split_once('.') {
            None => drop(self.0.insert(key.to_owned(), Value::Null)),
            Some((object, key)) => {
                let changes = self.0.entry(object).or_insert_with(|| json!({}));
                if let Value::Object(changes) = changes {
                    changes.insert(key.to_owned(), Value::Null);
                }
            }
        }
    }

    /// Makes a patch of all keys that a specification sets.
    ///
    /// # Errors
    /// A path of the specification is not UTF-8.
    pub fn of(spec: &VmSpec) -> Result<SpecPatch, serde_json::Error> {
        serde_json::from_value(serde_json::to_value(spec)?)
    }

    /// As [`SpecPatch::apply`]; with `replace`, on a new VM's defaults with the identity of `spec`.
    ///
    /// # Errors
    /// As [`SpecPatch::apply`].
    pub fn apply_or_replace(&self, spec: &VmSpec, replace: bool) -> Result<VmSpec, String> {
        match replace {
            true => self.apply(&VmSpec { uuid: spec.uuid, ..VmSpec::new(spec.name.as_str()) }),
            false => self.apply(spec),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the changed specification. It is not validated yet.
    ///
    /// # Errors
    /// A sentence that names an unknown key, a value of the wrong kind, or a key that identifies
    /// the VM.
    pub fn apply(&self, spec: &VmSpec) -> Result<VmSpec, String> {
        let mut value = serde_json::to_value(spec).map_err(|error| error.to_string())?;
        let Value::Object(all) = &mut value else { return Err("it has no keys".to_owned()) };
        for (key, new) in &self.0 {
            if IDENTITY.contains(&key.as_str()) && all.get(key) != Some(new) {
                return Err(format!("`{key}` identifies the VM and cannot be changed"));
            }
            let is_private = spec.memory.first().is_some_and(MemoryBlock::is_private);
            match new {
                // A size alone keeps the backing.
                Value::String(_) | Value::Number(_) if key == "memory" && is_private => {
                    drop(all.insert(key.clone(), json!({ "size": new, "backing": "private" })));
                }
                Value::Null => drop(all.remove(key)),
                Value::Object(changes) => {
                    let old = all.entry(key.clone()).or_insert_with(|| json!({}));
                    merge(old, changes);
                }
                new => drop(all.insert(key.clone(), new.clone())),
            }
        }
        serde_json::from_value(value).map_err(|error| error.to_string())
    }
}

/// Merges an object that is the value of a key; the objects in it are replaced.
fn merge(old: &mut Value, changes: &Map<String, Value>) {
    if !old.is_object() {
        *old = json!({});
    }
    let Value::Object(old) = old else { return };
    for (key, new) in changes {
        match new {
            Value::Null => drop(old.remove(key)),
            new => drop(old.insert(key.clone(), new.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::ByteSize;
    use crate::spec::Backing;

    fn patch(value: Value) -> SpecPatch {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn keys_get_new_values_and_null_restores_the_default() {
        let mut spec = VmSpec::new("web");
        spec.vcpus = 4;
        spec.kernel = Some("/k".into());
        let changed =
            patch(json!({ "memory": "2GiB", "vcpus": null, "kernel": null })).apply(&spec).unwrap();
        assert_eq!(changed.memory[0].size, ByteSize::from_mib(2048));
        assert_eq!((changed.vcpus, changed.kernel), (1, None));
        assert_eq!(SpecPatch::default().apply(&spec).unwrap(), spec);
        assert_eq!(SpecPatch::of(&spec).unwrap().apply(&VmSpec::new("web")).unwrap(), spec);
    }

    #[test]
    fn an_object_is_changed_key_by_key() {
        let spec = VmSpec::new("web");
        let set = |spec: &VmSpec, value| patch(json!({ "cloud_init": value })).apply(spec);
        let spec = set(&spec, json!({ "user": "deploy", "hostname": "a" })).unwrap();
        let mut change = patch(json!({ "cloud_init": { "user_data": "x" } }));
        change.unset("cloud_init.hostname");
        let spec = change.apply(&spec).unwrap();
        let settings = spec.cloud_init.as_ref().unwrap();
        assert_eq!((settings.user.as_deref(), &settings.hostname), (Some("deploy"), &None));
        assert_eq!(settings.user_data.as_deref(), Some("x"));
        assert_eq!(set(&spec, Value::Null).unwrap().cloud_init, None);
        assert!(set(&spec, json!({ "usr": "deploy" })).unwrap_err().contains("usr"));
    }

    #[test]
    fn a_size_alone_keeps_the_backing_of_the_memory() {
        let mut spec = VmSpec::new("web");
        spec.memory[0].backing = Backing::Private;
        let changed = patch(json!({ "memory": "2GiB" })).apply(&spec).unwrap();
        assert_eq!(
            changed.memory,
            [MemoryBlock {
                size: ByteSize::from_mib(2048),
                backing: Backing::Private,
                address: None
            }]
        );
        let block = json!([{ "size": "2GiB" }]);
        let changed = patch(json!({ "memory": block })).apply(&spec).unwrap();
        assert_eq!(changed.memory, [MemoryBlock::shared(ByteSize::from_mib(2048))]);
    }

    #[test]
    fn wrong_keys_values_and_identities_are_refused() {
        let spec = VmSpec::new("web");
        for (wrong, word) in [
            (json!({ "name": "other" }), "name"),
            (json!({ "uuid": "8a0e6c1e-0000-4000-8000-000000000000" }), "uuid"),
            (json!({ "memroy": "2GiB" }), "memroy"),
            (json!({ "vcpus": "many" }), "many"),
            (json!({ "disks": {} }), "map"),
        ] {
            let error = patch(wrong).apply(&spec).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        patch(json!({ "name": "web" })).apply(&spec).unwrap();
    }
}
