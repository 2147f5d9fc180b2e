//! Identity of one life of a VM.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Identifier of one life of a VM, from its creation to its deletion. A VM that is created again
/// under its old name and uuid gets another incarnation, so a record of the old one says nothing
/// about it.
///
/// It consists of 128 random bits, drawn at creation, and is 32 hexadecimal digits as text. Moves
/// keep it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct Incarnation(u128);

impl Incarnation {
    /// Incarnation of VMs that were created before incarnations existed. All of them share it; only
    /// their uuid distinguishes them, as it did then.
    pub const UNRECORDED: Incarnation = Incarnation(0);

    /// Makes an incarnation from random bits.
    #[must_use]
    pub const fn new(bits: u128) -> Incarnation {
        Incarnation(bits)
    }

    #[must_use]
    pub fn bits(self) -> u128 {
        self.0
    }

    /// Returns whether the VM is older than incarnations.
    #[must_use]
    pub fn is_unrecorded(&self) -> bool {
        *self == Incarnation::UNRECORDED
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Error for a text that is not an incarnation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not an incarnation: it has 32 hexadecimal digits")]
pub struct IncarnationError(String);

impl FromStr for Incarnation {
    type Err = IncarnationError;

    fn from_str(text: &str) -> Result<Incarnation, IncarnationError> {
        let error = || IncarnationError(text.chars().take(64).collect());
        if text.len() != 32 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(error());
        }
        u128::from_str_radix(text, 16).map(Incarnation).map_err(|_| error())
    }
}

impl TryFrom<String> for Incarnation {
    type Error = IncarnationError;

    fn try_from(text: String) -> Result<Incarnation, IncarnationError> {
        text.parse()
    }
}

impl From<Incarnation> for String {
    fn from(incarnation: Incarnation) -> String {
        incarnation.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_and_incarnation_match(bits in any::<u128>()) {
            let incarnation = Incarnation::new(bits);
            prop_assert_eq!(incarnation.to_string().parse(), Ok(incarnation));
        }

        #[test]
        fn other_texts_are_refused(text in "\\PC{0,40}") {
            let is_one = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
            prop_assert_eq!(text.parse::<Incarnation>().is_ok(), is_one);
        }
    }
}
