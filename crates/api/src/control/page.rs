//! Pages of lists.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Default number of items per page.
pub const DEFAULT_PAGE_ITEMS: u32 = 100;
/// Largest number of items per page.
pub const MAX_PAGE_ITEMS: u32 = 1000;

/// A page of a list, ordered by name or time of the items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// Items of the page.
    pub items: Vec<T>,
    /// Number of items that match the request's filter, on all pages.
    #[schema(example = 1)]
    pub total: u64,
    /// Cursor of the next page (`cursor=`); absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
