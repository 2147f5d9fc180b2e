//! How the pages of a guest are sent: the settings, and the totals in reports.

use serde::{Deserialize, Serialize};

/// Compression of a migration's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// The method that pays, or none if none pays.
    #[default]
    Auto,
    /// No compression.
    None,
    /// LZ4, where it makes pages smaller.
    Lz4,
    /// Zstandard, where it makes pages smaller.
    Zstd,
}

/// Kinds of references that are permitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReferenceUse {
    /// No references: every page is sent.
    None,
    /// References to pages of the same guest that have been sent before.
    Own,
    /// References to the guest's own pages, and to all memory that the destination holds of other
    /// guests and earlier stays.
    #[default]
    All,
}

/// What a destination offers for references.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentKind {
    /// Memory of another guest, or of an earlier stay.
    #[default]
    Memory,
    /// An image of a disk.
    Disk,
    /// Pages of an earlier stay that were moved from memory to a disk.
    Spilled,
    /// Anything that a later release offers.
    #[serde(other)]
    Other,
}

/// Where the content of pages was that were sent by reference. Pages that are sent again after a
/// stream broke count again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ReferencedPages {
    /// Pages of the same guest that were sent before.
    pub own: u64,
    /// Pages in memory of the destination: of other guests, and of earlier stays.
    pub memory: u64,
    /// Pages in images of disks that the destination can read.
    pub disk: u64,
    /// Pages of earlier stays that the destination had moved from memory to a disk.
    pub spilled: u64,
}

impl ReferencedPages {
    /// Returns the sum with others.
    #[must_use]
    pub fn plus(self, other: ReferencedPages) -> ReferencedPages {
        ReferencedPages {
            own: self.own + other.own,
            memory: self.memory + other.memory,
            disk: self.disk + other.disk,
            spilled: self.spilled + other.spilled,
        }
    }
}

/// How pages were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EncodingName {
    /// A zero page: a few bytes per run.
    Zero,
    /// Unencoded.
    Raw,
    /// Compressed by LZ4.
    Lz4,
    /// Compressed by Zstandard.
    Zstd,
    /// A reference to content that the destination holds.
    Reference,
    /// The difference to what was sent of the page before.
    Delta,
}

impl std::fmt::Display for EncodingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            EncodingName::Zero => "zero",
            EncodingName::Raw => "raw",
            EncodingName::Lz4 => "lz4",
            EncodingName::Zstd => "zstd",
            EncodingName::Reference => "reference",
            EncodingName::Delta => "delta",
        })
    }
}

/// Pages of one encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct EncodingReport {
    /// How they were sent.
    pub name: EncodingName,
    /// Number of pages. Pages that are sent again after a stream broke count again.
    pub pages: u64,
    /// Bytes of the pages themselves.
    pub raw_bytes: u64,
    /// Bytes of the frames that carried them, before TLS adds its own.
    pub wire_bytes: u64,
}
