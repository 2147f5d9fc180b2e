//! Entries of the journal that may be in the store: the answer to their change was lost. A change
//! that is repeated gets its entry again, with the same ID, so the journal has it once. Pure.

use std::collections::VecDeque;

use godwit_api::control::JournalEntry;

use crate::journal::entries::NewEntry;

/// Most entries that are remembered.
const MOST: usize = 256;
/// Time after the last attempt from which a change counts as another one.
const REPEATED_MS: u64 = 60_000;

/// Entries whose changes are in doubt, with the time of the last attempt.
#[derive(Debug, Default)]
pub(super) struct Unsure(VecDeque<(u64, JournalEntry)>);

impl Unsure {
    /// Notes the entries of a change that may have been written.
    pub(super) fn note(&mut self, entries: Vec<JournalEntry>, now_unix_ms: u64) {
        self.settle(&entries);
        self.0.extend(entries.into_iter().map(|entry| (now_unix_ms, entry)));
        let surplus = self.0.len().saturating_sub(MOST);
        self.0.drain(..surplus);
    }

    /// Returns the entry of the earlier attempt, if the change that it describes is repeated.
    pub(super) fn again(&mut self, entry: &NewEntry, now_unix_ms: u64) -> Option<JournalEntry> {
        self.0.retain(|(last, _)| now_unix_ms.abs_diff(*last) <= REPEATED_MS);
        let (last, known) = self.0.iter_mut().find(|(_, known)| is_same(entry, known))?;
        *last = now_unix_ms;
        Some(known.clone())
    }

    /// Forgets entries that have been written.
    pub(super) fn settle(&mut self, written: &[JournalEntry]) {
        self.0.retain(|(_, known)| written.iter().all(|entry| entry.id != known.id));
    }
}

/// Returns whether two entries differ in nothing but their time and ID.
fn is_same(entry: &NewEntry, known: &JournalEntry) -> bool {
    let entry = entry.clone().with_id(known.id.clone());
    JournalEntry { at_unix_ms: known.at_unix_ms, ..entry } == *known
}

#[cfg(test)]
mod tests {
    use godwit_api::control::JournalKind;

    use super::*;

    fn entry(host: &str) -> NewEntry {
        NewEntry::warning(JournalKind::TermEnded, "a term has ended").about("host", host)
    }

    #[test]
    fn a_repeated_change_has_the_same_entry_until_it_is_written() {
        let mut unsure = Unsure::default();
        let first = entry("a").with_id("1".to_owned());
        unsure.note(vec![first.clone(), entry("b").with_id("2".to_owned())], 0);
        assert_eq!(unsure.again(&entry("c"), 0), None);
        // Each attempt counts anew.
        for at in [REPEATED_MS, 2 * REPEATED_MS] {
            assert_eq!(unsure.again(&entry("a"), at), Some(first.clone()));
        }
        assert_eq!(unsure.again(&entry("b"), 2 * REPEATED_MS), None, "it was not repeated");
        unsure.note(vec![first.clone()], 2 * REPEATED_MS);
        assert_eq!(unsure.0.len(), 1);
        unsure.settle(&[first]);
        assert_eq!(unsure.again(&entry("a"), 2 * REPEATED_MS), None);
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut unsure = Unsure::default();
        for number in 0..=MOST {
            unsure.note(vec![entry(&number.to_string()).with_id(number.to_string())], 0);
        }
        assert_eq!(unsure.0.len(), MOST);
        assert_eq!(unsure.again(&entry("0"), 0), None);
        assert!(unsure.again(&entry("1"), 0).is_some());
    }
}
