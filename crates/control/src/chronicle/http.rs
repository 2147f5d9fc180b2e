//! HTTP handler of the journal.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{JournalEntry, JournalKind, JournalSeverity, Page, Problem, ProblemCode};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Journal, Search};
use crate::answers::{Failed, Query, Refusal, cursor};

/// Longest object and text of a filter, bytes.
const MOST_FILTER_BYTES: usize = 512;
/// Latest time of a filter: the largest integer that every JSON number represents exactly.
const MOST_UNIX_MS: u64 = (1 << 53) - 1;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    Journal: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(list))
}

/// Filter of the journal, and the page to return.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListJournal {
    /// Entries about this object: `vm:NAME`, `host:NAME`, `move:ID`, `drain:ID`, `datastore:NAME`,
    /// `rule:NAME`, `alarm:ID`, `manager:NAME` or `cluster`.
    #[param(max_length = 512)]
    object: Option<String>,
    /// Entries of this kind.
    kind: Option<JournalKind>,
    /// Entries of this severity or a higher one.
    severity: Option<JournalSeverity>,
    /// Entries whose text, reason or user contains this, in upper or lower case.
    #[param(max_length = 512)]
    text: Option<String>,
    /// Entries of this time or later, milliseconds since 1970.
    #[param(maximum = 9_007_199_254_740_991_u64)]
    from: Option<u64>,
    /// Entries before this time, milliseconds since 1970.
    #[param(maximum = 9_007_199_254_740_991_u64)]
    to: Option<u64>,
    /// Start of the page: `next` of the page before.
    cursor: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

impl ListJournal {
    /// Returns the search, if its values are within their limits.
    fn search(self) -> Result<Search, Problem> {
        let wrong = |detail: String, remedy: &str| {
            Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy))
        };
        let ListJournal { object, kind, severity, text, from, to, .. } = self;
        if from.max(to).is_some_and(|ms| ms > MOST_UNIX_MS) {
            let detail =
                format!("a time is later than the largest one, {MOST_UNIX_MS} ms since 1970");
            return wrong(detail, "use an earlier time");
        }
        let longest = object.iter().chain(&text).map(String::len).max().unwrap_or(0);
        if longest > MOST_FILTER_BYTES {
            let detail = format!("a filter has {longest} bytes: the most is {MOST_FILTER_BYTES}");
            return wrong(detail, "search for a shorter text");
        }
        Ok(Search {
            object,
            kind,
            severity,
            text: text.map(|text| text.to_lowercase()),
            from_unix_ms: from,
            to_unix_ms: to,
        })
    }
}

/// Lists the journal, the newest entry first.
///
/// A page has fewer items than its limit if few entries match; further ones follow as long as there
/// is a next page.
#[utoipa::path(get, path = "/api/v1/journal", operation_id = "list_journal", tag = "cluster",
    params(ListJournal), responses(
    (status = 200, body = Page<JournalEntry>,
        description = "A page of entries; `total` counts only the entries of this page"),
    Failed,
))]
async fn list(
    State(journal): State<Journal>,
    Query(mut query): Query<ListJournal>,
) -> Result<Json<Page<JournalEntry>>, Refusal> {
    let cursor = cursor(query.cursor.take(), query.limit)?;
    let search = query.search()?;
    let (items, next) = journal.page(&search, cursor.behind, cursor.limit).await?;
    Ok(Json(Page { total: items.len() as u64, items, next }))
}
