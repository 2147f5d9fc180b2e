//! The name of a VM, which becomes part of file names, of unix socket paths and of a command line.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::spec::error::SpecError;

/// The name of a VM: 1 to 48 ASCII letters, digits, `-`, `_` and `.`, the first a letter or digit.
///
/// No value of this type has another form, whether it comes from a user, a peer or a file. So it is
/// one component of a path: never empty, `.` or `..`, without a separator. Functions that build
/// paths take this type instead of a string.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

impl VmName {
    /// Longest name: the path of a unix socket has at most 107 bytes.
    pub const MAX_BYTES: usize = 48;

    /// Checks a name.
    ///
    /// # Errors
    /// [`SpecError::Name`]: the name has another form.
    pub fn new(name: impl Into<String>) -> Result<VmName, SpecError> {
        let name = name.into();
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts_well && name.len() <= VmName::MAX_BYTES && name.chars().all(good) {
            return Ok(VmName(name));
        }
        Err(SpecError::Name { name })
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for VmName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for VmName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// One component of a path.
impl AsRef<Path> for VmName {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for VmName {
    type Err = SpecError;

    fn from_str(name: &str) -> Result<VmName, SpecError> {
        VmName::new(name)
    }
}

impl TryFrom<String> for VmName {
    type Error = SpecError;

    fn try_from(name: String) -> Result<VmName, SpecError> {
        VmName::new(name)
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> String {
        name.0
    }
}

impl PartialEq<str> for VmName {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for VmName {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_that_leaves_its_directory_is_refused() {
        let long = "x".repeat(VmName::MAX_BYTES + 1);
        let bad = [
            "",
            ".",
            "..",
            "../etc",
            "/etc/passwd",
            "a/b",
            "a\\b",
            "a b",
            "a\0b",
            "a\nb",
            "-a",
            "_a",
            ".a",
            "é",
            "a,b",
            "a%2Fb",
            &long,
        ];
        for name in bad {
            let error = VmName::new(name).unwrap_err();
            assert_eq!(error.code(), "vm-name", "{name:?}");
            let text = serde_json::to_string(name).unwrap();
            assert!(serde_json::from_str::<VmName>(&text).is_err(), "{name:?}");
        }
        for name in ["a", "web-1", "0.x_Y", &long[1..]] {
            let text = serde_json::to_string(name).unwrap();
            let read: VmName = serde_json::from_str(&text).unwrap();
            assert_eq!(read, name);
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
    }

    proptest! {
        #[test]
        fn every_name_is_one_component_of_a_path(text in "\\PC{0,50}|[a./\\-]{0,6}") {
            if let Ok(name) = VmName::new(text) {
                let parts: Vec<Component<'_>> = Path::new(name.as_str()).components().collect();
                prop_assert_eq!(parts, [Component::Normal(name.as_str().as_ref())]);
                let path = Path::new("/run").join(&name);
                prop_assert_eq!(path.parent(), Some(Path::new("/run")));
            }
        }
    }
}
