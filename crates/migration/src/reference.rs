//! Pages that are told by their content instead of being sent: from an earlier stay of the same VM, from another VM that the
//! destination has, or from the guest's own pages. No sockets and no threads.
//!
//! What makes it right: a reference is a guess that the destination checks. It reads what it is pointed to, compares the whole
//! hash, and only then takes it; anything else it says to be *missing*, and the source sends those pages by a later sweep, and
//! never by reference again. While the guest stands still nothing is told by its content; before it is stopped all that was has
//! been applied, so what is missing is known by then. So a reference that fails costs time and nothing else.
//!
//! - [`Content`]: memory that a destination has, with the beginnings of its pages' hashes.
//! - [`Known`]: what a source knows of them.
//! - [`Owed`]: what a source still owes, as a reference failed.

mod content;
mod known;
mod owed;
mod page_bits;

use serde::{Deserialize, Serialize};

pub use content::{Content, DIGEST_PAGES};
pub use known::Known;
pub use owed::{Owed, Unowed};
pub(crate) use page_bits::PageBits;

/// What pages may be told by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReferenceUse {
    /// Nothing: every page is sent.
    None,
    /// Pages of the same guest that have been sent before.
    Own,
    /// These, and whatever memory the destination has of other guests and earlier stays.
    #[default]
    All,
}
