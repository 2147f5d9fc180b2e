//! Sizes in bytes in human-readable form: `1GiB`, `512M`, `1073741824`.

use std::fmt;
use std::str::FromStr;

use godwit_types::parse_scaled;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// A number of bytes. Parsed from a number, or from text with a binary unit (`K`, `KiB`, `M`,
/// `MiB`, `G`, `GiB`, `T`, `TiB`: all powers of 1024, as in QEMU's own options). Formatted as text
/// with the largest unit that is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

/// Units by their first letter, largest first.
const UNITS: [(&str, u32); 4] = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];

/// A size that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a size: write bytes or a whole number with K, M, G or T, like 1GiB or 1536M"
)]
pub struct SizeError(String);

impl ByteSize {
    /// Creates a size from bytes.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> ByteSize {
        ByteSize(bytes)
    }

    /// Creates a size from MiB (saturating).
    #[must_use]
    pub const fn from_mib(mib: u64) -> ByteSize {
        ByteSize(mib.saturating_mul(1 << 20))
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |shift: u32| self.0 != 0 && self.0.is_multiple_of(1 << shift);
        match UNITS.into_iter().find(|&(_, shift)| exact(shift)) {
            Some((letter, shift)) => f.pad(&format!("{}{letter}iB", self.0 >> shift)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<ByteSize, SizeError> {
        let trimmed = text.trim();
        let digits_end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits_end);
        let scale = match unit.trim_start() {
            "" | "B" => Some(1),
            unit => {
                let letter = unit.strip_suffix("iB").unwrap_or(unit);
                let known = UNITS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(letter));
                known.map(|(_, shift)| 1 << shift)
            }
        };
        let bytes = scale.and_then(|scale| parse_scaled(number, scale));
        bytes.map(ByteSize).ok_or_else(|| SizeError(text.to_owned()))
    }
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for ByteSize {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
        let kinds = SchemaType::from_iter([Type::String, Type::Integer]);
        let text = "A number of bytes, or text such as `4GiB`. Responses contain text.";
        ObjectBuilder::new().schema_type(kinds).minimum(Some(0)).description(Some(text)).into()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for ByteSize {}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        struct SizeVisitor;
        impl Visitor<'_> for SizeVisitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size like \"1GiB\" or a number of bytes")
            }
            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes)
                    .map(ByteSize)
                    .map_err(|_| E::custom("a size cannot be negative"))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_human_readable_form() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4K", 4096),
            ("1GiB", 1 << 30),
            ("1 GiB", 1 << 30),
            ("1536M", 1536 << 20),
            ("2t", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize::from_bytes(bytes)), "{text}");
        }
        for text in ["", "GiB", "1GB", "1.5G", "-1", "1X", "99999999999T", "1é", "1Gé"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_survives_json_as_text_and_as_a_number() {
        for bytes in [0, 1, 4096, 12288, 1 << 30, (1 << 30) + 4096, u64::MAX] {
            let size = ByteSize::from_bytes(bytes);
            let text = serde_json::to_string(&size).unwrap();
            assert_eq!(serde_json::from_str::<ByteSize>(&text).unwrap(), size, "{text}");
            assert_eq!(serde_json::from_value::<ByteSize>(bytes.into()).unwrap(), size);
        }
        assert_eq!(ByteSize::from_mib(1024).to_string(), "1GiB");
    }
}
