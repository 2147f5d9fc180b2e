//! Pages that are sent by reference to what the destination already holds. A reference names a
//! page's content: from an earlier stay of the same VM, from another VM on that host, from an image
//! of a disk that the destination can read, or from the guest's own pages. A delta gives the
//! difference from the version that was sent before. No sockets and no threads.
//!
//! Both are correct because a reference, or a delta, is a guess that the destination verifies. It
//! reads the content named, compares the hash, and only then takes it. It reports every other page
//! as *missing*; the source then sends it in a later sweep, and never by a guess again. While the
//! guest is paused no page is sent this way. Before the guest is stopped, all references and deltas
//! have been applied, so the missing pages are known by then. A reference that fails costs time and
//! nothing else.
//!
//! - [`Content`]: memory or a file of a destination, with the prefixes of its pages' hashes.
//! - [`Arrivals`]: memory of guests that arrive together.
//! - [`ContentIndex`]: a source's knowledge of them.
//! - [`Owed`]: pages that a source still owes because a guess failed.
//! - [`SentPages`]: the versions of pages that a source has sent last.

mod arrivals;
mod content;
mod content_index;
mod origins;
mod owed;
mod page_bits;
mod piece;
mod sent_pages;
mod store;

pub use arrivals::Arrivals;
pub use content::{Content, Reading};
pub use content_index::ContentIndex;
pub use owed::{Owed, Unowed};
pub(crate) use page_bits::PageBits;
pub use piece::{DIGEST_PAGES, Digested};
pub use sent_pages::SentPages;
