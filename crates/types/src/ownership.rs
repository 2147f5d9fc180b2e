//! Whose a guest is: the life of a VM, and the generation of its owners.

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

/// One ownership of one VM: the life of the VM, and the generation of its owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ownership {
    /// The life of the VM. Records of another life say nothing about this one.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// The generation. It grows with each change of owners within that life.
    pub epoch: u64,
}

impl fmt::Display for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.incarnation.is_unrecorded() {
            true => write!(f, "epoch {}", self.epoch),
            false => write!(f, "epoch {} of incarnation {}", self.epoch, self.incarnation),
        }
    }
}

impl Ownership {
    /// Returns the ownership that another host gets from this owner.
    #[must_use]
    pub fn offered(self) -> Ownership {
        Ownership { epoch: self.epoch + 1, ..self }
    }

    /// Returns the ownership of this owner after it takes back a guest that it had offered.
    #[must_use]
    pub fn taken_back(self) -> Ownership {
        Ownership { epoch: self.epoch + 2, ..self }
    }

    /// Returns whether this is the ownership that was offered, or one that followed from it.
    #[must_use]
    pub fn follows(self, offered: Ownership) -> bool {
        self.incarnation == offered.incarnation && self.epoch >= offered.epoch
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
