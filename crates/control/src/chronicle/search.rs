//! Filters of the journal. Pure.

use godwit_api::control::{JournalEntry, JournalKind, JournalSeverity};

use crate::journal::newest_first::behind_later_than;

/// Selection of entries. Absent filters let everything through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Search {
    /// Object such as `vm:web`.
    pub(crate) object: Option<String>,
    pub(crate) kind: Option<JournalKind>,
    /// Entries of this severity or a higher one.
    pub(crate) severity: Option<JournalSeverity>,
    /// Text in the entry, in its reason or in its user, in lower case.
    pub(crate) text: Option<String>,
    /// Entries of this time or later, milliseconds since 1970.
    pub(crate) from_unix_ms: Option<u64>,
    /// Entries before this time, milliseconds since 1970.
    pub(crate) to_unix_ms: Option<u64>,
}

impl Search {
    /// Returns the cursor behind which the search begins: no entry before it matches.
    pub(crate) fn begin(&self, behind: Option<String>) -> Option<String> {
        let to = self.to_unix_ms.map(|to| behind_later_than(to.saturating_sub(1)));
        // IDs grow with the age.
        behind.max(to)
    }

    /// Returns whether this entry, and so all behind it, are too old.
    pub(crate) fn is_past(&self, entry: &JournalEntry) -> bool {
        self.from_unix_ms.is_some_and(|from| entry.at_unix_ms < from)
    }

    pub(crate) fn lets_through(&self, entry: &JournalEntry) -> bool {
        let has = |text: &str| {
            let all = [Some(&entry.text), entry.why.as_ref(), entry.who.as_ref()];
            all.into_iter().flatten().any(|part| part.to_lowercase().contains(text))
        };
        self.object.as_ref().is_none_or(|object| entry.objects.contains(object))
            && self.kind.is_none_or(|kind| entry.kind == kind)
            && self.severity.is_none_or(|severity| entry.severity >= severity)
            && self.text.as_deref().is_none_or(has)
            && self.to_unix_ms.is_none_or(|to| entry.at_unix_ms < to)
            && !self.is_past(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::entries::NewEntry;

    fn entry(at_unix_ms: u64) -> JournalEntry {
        NewEntry::warning(JournalKind::HostAway, "host Rack-1 is away")
            .about("host", "Rack-1")
            .because(Some("no route"))
            .by("ana")
            .at(at_unix_ms)
            .with_id("i".to_owned())
    }

    #[test]
    fn filters_select_by_each_field() {
        let all = Search::default();
        assert!(all.lets_through(&entry(5)));
        let is = |search: Search| search.lets_through(&entry(5));
        assert!(is(Search { object: Some("host:Rack-1".into()), ..all.clone() }));
        assert!(!is(Search { object: Some("vm:Rack-1".into()), ..all.clone() }));
        assert!(is(Search { kind: Some(JournalKind::HostAway), ..all.clone() }));
        assert!(!is(Search { kind: Some(JournalKind::HostUp), ..all.clone() }));
        assert!(is(Search { severity: Some(JournalSeverity::Info), ..all.clone() }));
        assert!(!is(Search { severity: Some(JournalSeverity::Error), ..all.clone() }));
        for text in ["rack-1 is", "no route", "ana"] {
            assert!(is(Search { text: Some(text.into()), ..all.clone() }), "{text}");
        }
        assert!(!is(Search { text: Some("fire".into()), ..all.clone() }));
        assert!(is(Search { from_unix_ms: Some(5), to_unix_ms: Some(6), ..all.clone() }));
        assert!(!is(Search { to_unix_ms: Some(5), ..all.clone() }));
        assert!(!is(Search { from_unix_ms: Some(6), ..all }));
    }

    #[test]
    fn a_search_begins_at_its_last_time_or_behind_the_cursor() {
        let search = Search { to_unix_ms: Some(1_000), ..Search::default() };
        let begin = search.begin(None).unwrap();
        assert_eq!(search.begin(Some("000".into())), Some(begin.clone()));
        let behind = format!("{begin}-1");
        assert_eq!(search.begin(Some(behind.clone())), Some(behind));
        assert_eq!(Search::default().begin(None), None);
    }
}
