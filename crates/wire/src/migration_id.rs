//! Identifier of a migration.

use crate::WireError;

/// Identifier of one migration: 16 random bytes. The destination's agent issues it, and the
/// source's lane presents it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MigrationId(pub [u8; 16]);

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MigrationId({self})")
    }
}

impl std::str::FromStr for MigrationId {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        let digits = text.as_bytes();
        let mut id = [0; 16];
        if digits.len() != 32 || !text.is_ascii() {
            return Err(WireError::BadValue { what: "migration id" });
        }
        for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair)
                .map_err(|_| WireError::BadValue { what: "migration id" })?;
            *byte = u8::from_str_radix(pair, 16)
                .map_err(|_| WireError::BadValue { what: "migration id" })?;
        }
        Ok(MigrationId(id))
    }
}
