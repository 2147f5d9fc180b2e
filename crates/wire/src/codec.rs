//! Compression methods.

/// Compression method for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// LZ4's block format.
    Lz4 = 1,
    /// Zstandard frames without a dictionary.
    Zstd = 2,
}

impl Codec {
    pub const ALL: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

    /// Returns the codec with this number on the wire, or `None` if this version does not know it.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Codec> {
        Codec::ALL.into_iter().find(|codec| *codec as u8 == code)
    }
}
