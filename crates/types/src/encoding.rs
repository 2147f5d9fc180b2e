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

/// How pages were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EncodingName {
    /// Told to be zero: a few bytes a run.
    Zero,
    /// As they are.
    Raw,
    /// Compressed by LZ4.
    Lz4,
    /// Compressed by Zstandard.
    Zstd,
    /// Told by their content, which the destination had.
    Reference,
    /// Told by what differed from what was sent of them before.
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
    /// How many; what was sent again after a stream broke counts again.
    pub pages: u64,
    /// Bytes of the pages themselves.
    pub raw_bytes: u64,
    /// Bytes of the frames that carried them, before TLS adds its own.
    pub wire_bytes: u64,
}
