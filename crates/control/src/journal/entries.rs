//! Journal: what happened in the cluster, and why.

use godwit_api::control::{JournalEntry, JournalKind, JournalSeverity};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::requester;
use crate::clock::now_unix_ms;

/// Longest text and reason of an entry, bytes; longer ones are cut.
const MOST_TEXT_BYTES: usize = 1_024;
/// Longest name in an entry, bytes.
const MOST_NAME_BYTES: usize = 256;
/// Most objects of an entry.
const MOST_OBJECTS: usize = 16;

/// Entries of the journal, newest first, for reading pages.
pub const JOURNAL: Table<SavedEntry> = Table::new();

/// A journal entry as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedEntry {
    /// The entry as the API returns it, without its ID. Another version may have written it.
    entry: Value,
}

impl Record for SavedEntry {
    const KIND: &'static str = "journal";
    const PREFIX: &'static str = "journal/";
    const VERSION: u32 = 1;
}

impl SavedEntry {
    pub(crate) fn of(entry: &JournalEntry) -> SavedEntry {
        let mut entry = serde_json::to_value(entry).unwrap_or_default();
        if let Value::Object(fields) = &mut entry {
            fields.remove("id");
        }
        SavedEntry { entry }
    }

    /// Returns the entry with this ID. `None`: another version wrote it, and this one cannot read
    /// it.
    pub(crate) fn read(self, id: &str) -> Option<JournalEntry> {
        let mut entry = self.entry;
        entry.as_object_mut()?.insert("id".to_owned(), Value::String(id.to_owned()));
        serde_json::from_value(entry).ok()
    }
}

/// An entry that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewEntry {
    at_unix_ms: u64,
    kind: JournalKind,
    severity: JournalSeverity,
    objects: Vec<String>,
    text: String,
    why: Option<String>,
    who: Option<String>,
    source: Option<String>,
}

impl NewEntry {
    /// Creates an entry of now. It names the user whose request the current task carries out.
    pub(crate) fn new(
        kind: JournalKind,
        severity: JournalSeverity,
        text: impl Into<String>,
    ) -> NewEntry {
        NewEntry {
            at_unix_ms: now_unix_ms(),
            kind,
            severity,
            objects: Vec::new(),
            text: cut(text.into(), MOST_TEXT_BYTES),
            why: None,
            who: requester::current().map(name),
            source: None,
        }
    }

    pub(crate) fn info(kind: JournalKind, text: impl Into<String>) -> NewEntry {
        NewEntry::new(kind, JournalSeverity::Info, text)
    }

    pub(crate) fn warning(kind: JournalKind, text: impl Into<String>) -> NewEntry {
        NewEntry::new(kind, JournalSeverity::Warning, text)
    }

    pub(crate) fn error(kind: JournalKind, text: impl Into<String>) -> NewEntry {
        NewEntry::new(kind, JournalSeverity::Error, text)
    }

    /// Adds an object: a kind such as `vm`, and its name.
    #[must_use]
    pub(crate) fn about(self, kind: &str, name: &str) -> NewEntry {
        self.about_object(format!("{kind}:{name}"))
    }

    /// Adds an object in the form of the API: `vm:NAME`.
    #[must_use]
    pub(crate) fn about_object(mut self, object: impl Into<String>) -> NewEntry {
        if self.objects.len() < MOST_OBJECTS {
            self.objects.push(name(object.into()));
        }
        self
    }

    /// Sets the reason.
    #[must_use]
    pub(crate) fn because(self, why: Option<impl Into<String>>) -> NewEntry {
        NewEntry {
            why: why.map(|why| cut(why.into(), MOST_TEXT_BYTES)).filter(|why| !why.is_empty()),
            ..self
        }
    }

    /// Sets the user who requested it.
    #[must_use]
    pub(crate) fn by(self, who: impl Into<String>) -> NewEntry {
        NewEntry { who: Some(name(who.into())), ..self }
    }

    /// Sets the host whose reports cause the entry. The number of such entries is limited.
    #[must_use]
    pub(crate) fn reported_by(self, host: &str) -> NewEntry {
        NewEntry { source: Some(name(host.to_owned())), ..self }
    }

    #[must_use]
    pub(crate) fn at(self, at_unix_ms: u64) -> NewEntry {
        NewEntry { at_unix_ms, ..self }
    }

    pub(crate) fn at_unix_ms(&self) -> u64 {
        self.at_unix_ms
    }

    pub(crate) fn kind(&self) -> JournalKind {
        self.kind
    }

    /// Returns the host whose reports cause the entry, if any.
    pub(crate) fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// Returns the first object.
    pub(crate) fn object(&self) -> Option<&str> {
        self.objects.first().map(String::as_str)
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the public form with this ID.
    pub(crate) fn with_id(self, id: String) -> JournalEntry {
        let NewEntry { at_unix_ms, kind, severity, objects, text, why, who, source: _ } = self;
        JournalEntry { id, at_unix_ms, kind, severity, objects, text, why, who }
    }
}

fn name(text: String) -> String {
    cut(text, MOST_NAME_BYTES)
}

/// Makes one line of a text and limits its length.
fn cut(text: String, most_bytes: usize) -> String {
    let line =
        if text.contains(char::is_control) { text.replace(char::is_control, " ") } else { text };
    if line.len() <= most_bytes {
        return line;
    }
    let end = (0..=most_bytes).rev().find(|at| line.is_char_boundary(*at));
    format!("{}…", line.get(..end.unwrap_or(0)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let entry = NewEntry::error(JournalKind::VmCrashed, "VM web\ncrashed")
            .about("vm", "web")
            .because(Some("the guest panicked"))
            .by("ana")
            .at(7)
            .with_id("i".to_owned());
        assert_eq!(entry.text, "VM web crashed");
        assert_eq!(SavedEntry::of(&entry).read("i"), Some(entry));
    }

    #[test]
    fn an_entry_of_a_later_version_is_not_read() {
        let entry = serde_json::json!({ "at_unix_ms": 1, "kind": "later", "severity": "info" });
        assert_eq!(SavedEntry { entry }.read("i"), None);
    }

    #[test]
    fn long_texts_are_cut_and_objects_are_bounded() {
        let long = "ä".repeat(5_000);
        let mut entry = NewEntry::info(JournalKind::VmStarted, long.clone()).because(Some(long));
        for _ in 0..100 {
            entry = entry.about("vm", &"x".repeat(9_000));
        }
        let entry = entry.with_id(String::new());
        let bytes = serde_json::to_vec(&entry).unwrap().len();
        assert!(bytes < 8 << 10, "{bytes}");
    }
}
