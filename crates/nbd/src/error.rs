//! Errors of the client.

use std::io;

/// Why a disk cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the server does not speak NBD (fixed newstyle): {0}")]
    Protocol(&'static str),
    #[error("the server refuses the export: {0}")]
    Refused(String),
    /// The export lacks what a call needs.
    #[error("the export cannot {0}")]
    Unsupported(&'static str),
    /// The disk has more extents than a list may have.
    #[error("the disk has too many extents to list them at once")]
    TooManyExtents,
    /// An error number of the protocol, which is that of Linux.
    #[error("the server cannot use its disk: {}", io::Error::from_raw_os_error(.0.cast_signed()))]
    Server(u32),
}
