//! Requests about the journal.

use super::{ManagerClient, ManagerError};
use crate::client::segment;
use crate::control::journal::{JournalEntry, JournalFilter};
use crate::control::page::Page;

impl ManagerClient {
    /// Returns a page of the journal, newest first, up to `limit` entries. `cursor` is `next` of
    /// the page before. A page may be shorter although another one follows.
    ///
    /// # Errors
    /// [`ManagerError`]: the manager is unreachable or refuses the request.
    pub async fn journal(
        &self,
        filter: &JournalFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<Page<JournalEntry>, ManagerError> {
        let mut path = format!("/api/v1/journal?limit={limit}");
        let cursor = cursor.map(|cursor| ("cursor", cursor.to_owned()));
        for (name, value) in filter.parameters().into_iter().chain(cursor) {
            path = format!("{path}&{name}={}", segment(&value));
        }
        self.get(&path).await
    }
}
