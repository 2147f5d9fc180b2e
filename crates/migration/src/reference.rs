//! Pages that are told by what the destination has instead of being sent: by their content, from an earlier stay of the same VM,
//! from another VM that is there, or from the guest's own pages; or by what differs from what was sent of them before. No sockets
//! and no threads.
//!
//! What makes it right: a reference, or a delta, is a guess that the destination checks. It reads what it is pointed to, compares the
//! hash, and only then takes it; anything else it says to be *missing*, and the source sends those pages by a later sweep, and
//! never by guess again. While the guest stands still nothing is told so; before it is stopped all that was has
//! been applied, so what is missing is known by then. So a reference that fails costs time and nothing else.
//!
//! - [`Content`]: memory that a destination has, with the beginnings of its pages' hashes.
//! - [`Arrivals`]: that of guests which arrive together.
//! - [`Known`]: what a source knows of them.
//! - [`Owed`]: what a source still owes, as a guess failed.
//! - [`SentPages`]: what a source has sent of pages last.

mod arrivals;
mod content;
mod known;
mod origins;
mod owed;
mod page_bits;
mod sent_pages;

use serde::{Deserialize, Serialize};

pub use arrivals::Arrivals;
pub use content::{Content, DIGEST_PAGES};
pub use known::Known;
pub use owed::{Owed, Unowed};
pub(crate) use page_bits::PageBits;
pub use sent_pages::SentPages;

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
