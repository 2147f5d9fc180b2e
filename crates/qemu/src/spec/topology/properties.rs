//! Properties of a device or an object in the two forms that QEMU accepts: JSON, and `key=value`
//! separated by commas. They come from another process, so everything is bounded.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Longest argument that is read.
const MOST_ARGUMENT_BYTES: usize = 64 << 10;
/// Most properties of an argument, nested ones included.
const MOST_PROPERTIES: usize = 256;

/// Properties in the form in which QEMU got them: JSON has types, which the other form lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub enum Properties {
    Json(Map<String, Value>),
    /// Keys and values in their order.
    Text(Vec<(String, String)>),
}

/// Properties in a record.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Raw {
    Json(Map<String, Value>),
    Text(String),
}

impl TryFrom<Raw> for Properties {
    type Error = String;

    fn try_from(raw: Raw) -> Result<Properties, String> {
        match raw {
            Raw::Json(map) => Properties::Json(map).checked(),
            Raw::Text(text) => Properties::parse(&text, ""),
        }
    }
}

impl From<Properties> for Raw {
    fn from(properties: Properties) -> Raw {
        match properties {
            Properties::Json(map) => Raw::Json(map),
            text @ Properties::Text(_) => Raw::Text(text.argument()),
        }
    }
}

impl Properties {
    /// Reads an argument. `implied`: key of a first value without one.
    ///
    /// # Errors
    /// It is too long, has too many properties or a control character, or is not JSON although it
    /// begins like it.
    pub fn parse(argument: &str, implied: &str) -> Result<Properties, String> {
        if argument.len() > MOST_ARGUMENT_BYTES {
            return Err(format!("it has more than {MOST_ARGUMENT_BYTES} bytes"));
        }
        if argument.trim_start().starts_with('{') {
            let map = serde_json::from_str(argument).map_err(|why| format!("not JSON: {why}"))?;
            return Properties::Json(map).checked();
        }
        let mut fields = Vec::new();
        for (index, part) in split(argument).into_iter().enumerate() {
            let field = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if index == 0 && !implied.is_empty() => (implied.to_owned(), part),
                None => (part, "on".to_owned()),
            };
            fields.push(field);
        }
        Properties::Text(fields).checked()
    }

    fn checked(self) -> Result<Properties, String> {
        let fields = self.fields();
        if fields.len() > MOST_PROPERTIES {
            return Err(format!("it has more than {MOST_PROPERTIES} properties"));
        }
        let mut texts = fields.iter().flat_map(|(key, value)| [key, value]);
        if texts.any(|text| text.chars().any(char::is_control)) {
            return Err("it has a control character".to_owned());
        }
        // A comma in a name would make another property of the rest, unseen by the allow-list.
        let is_name = |key: &str| {
            !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        if let Some((key, _)) = fields.iter().find(|(key, _)| !is_name(key)) {
            return Err(format!("\"{key}\" is not the name of a property"));
        }
        Ok(self)
    }

    /// Returns all properties as text; the name of a nested one has those above it, with dots.
    #[must_use]
    pub fn fields(&self) -> Vec<(String, String)> {
        match self {
            Properties::Text(fields) => fields.clone(),
            Properties::Json(map) => {
                let mut fields = Vec::new();
                for (key, value) in map {
                    flatten(key.clone(), value, &mut fields);
                }
                fields
            }
        }
    }

    /// Returns a property as text; the last one of that name counts, as in QEMU.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<String> {
        self.fields().into_iter().rev().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// Whether a property is switched on.
    #[must_use]
    pub fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| matches!(value.as_str(), "on" | "true" | "yes"))
    }

    /// Replaces a property, or adds it.
    pub fn set(&mut self, key: &str, value: &str) {
        match self {
            Properties::Json(map) => drop(map.insert(key.to_owned(), value.into())),
            Properties::Text(fields) => {
                fields.retain(|(known, _)| known != key);
                fields.push((key.to_owned(), value.to_owned()));
            }
        }
    }

    pub fn remove(&mut self, key: &str) {
        match self {
            Properties::Json(map) => drop(map.remove(key)),
            Properties::Text(fields) => fields.retain(|(known, _)| known != key),
        }
    }

    /// Returns the argument for QEMU.
    #[must_use]
    pub fn argument(&self) -> String {
        match self {
            Properties::Json(map) => Value::Object(map.clone()).to_string(),
            Properties::Text(fields) => {
                let escaped = |text: &str| text.replace(',', ",,");
                let field = |(key, value): &(String, String)| format!("{key}={}", escaped(value));
                fields.iter().map(field).collect::<Vec<_>>().join(",")
            }
        }
    }
}

/// Splits at commas; two of them are one in a value.
fn split(argument: &str) -> Vec<String> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut chars = argument.chars().peekable();
    while let Some(c) = chars.next() {
        if c != ',' {
            part.push(c);
        } else if chars.next_if_eq(&',').is_some() {
            part.push(',');
        } else {
            parts.push(std::mem::take(&mut part));
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

fn flatten(name: String, value: &Value, fields: &mut Vec<(String, String)>) {
    // One more than is accepted, so that it is refused.
    if fields.len() > MOST_PROPERTIES {
        return;
    }
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                flatten(format!("{name}.{key}"), value, fields);
            }
        }
        Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                flatten(format!("{name}.{index}"), value, fields);
            }
        }
        Value::String(text) => fields.push((name, text.clone())),
        other => fields.push((name, other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_forms_are_read_and_written_again() {
        let text = Properties::parse("virtio-blk-pci,drive=a,,b,multifunction", "driver").unwrap();
        assert_eq!(text.get("driver").as_deref(), Some("virtio-blk-pci"));
        assert_eq!(text.get("drive").as_deref(), Some("a,b"));
        assert!(text.is_on("multifunction"));
        assert_eq!(text.argument(), "driver=virtio-blk-pci,drive=a,,b,multifunction=on");
        let json = Properties::parse(r#"{"driver":"file","cache":{"direct":true}}"#, "").unwrap();
        assert!(json.is_on("cache.direct"));
        for properties in [text, json] {
            let record = serde_json::to_string(&properties).unwrap();
            assert_eq!(serde_json::from_str::<Properties>(&record).unwrap(), properties);
        }
        assert!(Properties::parse("{\"a\":", "").is_err());
        assert!(Properties::parse("a=b\nc", "").is_err());
        assert!(Properties::parse("=b", "").is_err());
        assert!(Properties::parse("a=b,x,,romfile=/etc/shadow", "").is_err());
        assert!(Properties::parse(&"a=b,".repeat(300), "").is_err());
    }

    proptest! {
        #[test]
        fn any_argument_is_refused_or_survives_a_record(argument in "[ -~,=]{0,80}") {
            if let Ok(properties) = Properties::parse(&argument, "driver") {
                let again = Properties::parse(&properties.argument(), "").unwrap();
                prop_assert_eq!(again, properties);
            }
        }

        #[test]
        fn any_bytes_are_read_within_bounds(argument in "\\PC{0,200}|\\{.{0,100}\\}") {
            let _ = Properties::parse(&argument, "");
        }
    }
}
