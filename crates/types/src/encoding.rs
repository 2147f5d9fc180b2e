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
