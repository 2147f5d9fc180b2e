//! Items, and transactions with the limits that all stores share. Pure.

use std::collections::BTreeSet;

use super::error::StoreError;
use super::revision::{KeyState, Revision};
use crate::{MOST_KEY_BYTES, MOST_KEYS, MOST_TRANSACTION_BYTES, MOST_VALUE_BYTES};

/// A stored key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The key, in visible ASCII.
    pub key: String,
    /// JSON text, which a store does not interpret.
    pub value: String,
    /// The revision of the last change of the key.
    pub revision: Revision,
}

/// All items of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The items in key order.
    pub items: Vec<Item>,
    /// The store's revision at the time of the read. A watch from here reports later changes.
    pub revision: Revision,
}

/// A page of the items of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The items in key order.
    pub items: Vec<Item>,
    /// The store's revision at the time of the read.
    pub revision: Revision,
    /// Whether further items follow the last key.
    pub more: bool,
}

/// Changes that are made together or not at all, if every key is as expected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    expectations: Vec<(String, KeyState)>,
    writes: Vec<(String, Option<String>)>,
}

impl Transaction {
    /// Creates an empty transaction.
    #[must_use]
    pub fn new() -> Transaction {
        Transaction::default()
    }

    /// Requires that the key has this state.
    #[must_use]
    pub fn expect(mut self, key: impl Into<String>, state: KeyState) -> Transaction {
        self.expectations.push((key.into(), state));
        self
    }

    /// Sets the key to this value: JSON text.
    #[must_use]
    pub fn put(mut self, key: impl Into<String>, value: impl Into<String>) -> Transaction {
        self.writes.push((key.into(), Some(value.into())));
        self
    }

    /// Deletes the key, if it has a value.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Transaction {
        self.writes.push((key.into(), None));
        self
    }

    /// Adds another transaction's expectations and writes.
    #[must_use]
    pub fn and(mut self, other: Transaction) -> Transaction {
        self.expectations.extend(other.expectations);
        self.writes.extend(other.writes);
        self
    }

    /// Whether another transaction's expectations and writes fit within the limits as well.
    #[must_use]
    pub fn has_room_for(&self, other: &Transaction) -> bool {
        self.expectations.len() + other.expectations.len() <= MOST_KEYS
            && self.writes.len() + other.writes.len() <= MOST_KEYS
            && self.bytes() + other.bytes() <= MOST_TRANSACTION_BYTES
    }

    /// Bytes of the keys and values that it writes.
    fn bytes(&self) -> usize {
        let writes = self.writes.iter();
        writes.map(|(key, value)| key.len() + value.as_ref().map_or(0, String::len)).sum()
    }

    /// The expected state of each key.
    #[must_use]
    pub fn expectations(&self) -> &[(String, KeyState)] {
        &self.expectations
    }

    /// The writes; `None` deletes the key.
    #[must_use]
    pub fn writes(&self) -> &[(String, Option<String>)] {
        &self.writes
    }

    /// Returns the writes without a copy.
    #[must_use]
    pub(crate) fn into_writes(self) -> Vec<(String, Option<String>)> {
        self.writes
    }

    /// Refuses a transaction that one of the stores could not accept. All stores refuse the same
    /// transactions.
    ///
    /// # Errors
    /// [`StoreError::TooBig`], [`StoreError::BadKey`], [`StoreError::WrittenTwice`].
    pub fn check(&self) -> Result<(), StoreError> {
        within("keys with expectations", self.expectations.len(), MOST_KEYS)?;
        within("keys to write", self.writes.len(), MOST_KEYS)?;
        let mut written = BTreeSet::new();
        for (key, value) in &self.writes {
            check_key(key)?;
            if !written.insert(key) {
                return Err(StoreError::WrittenTwice { key: key.clone() });
            }
            within("bytes in one value", value.as_ref().map_or(0, String::len), MOST_VALUE_BYTES)?;
        }
        for (key, _) in &self.expectations {
            check_key(key)?;
        }
        within("bytes of keys and values", self.bytes(), MOST_TRANSACTION_BYTES)
    }

    /// Returns the first key, of those in `state`, that is not as expected.
    pub(crate) fn first_conflict<E>(
        &self,
        mut state: impl FnMut(&str) -> Result<KeyState, E>,
    ) -> Result<Option<StoreError>, E> {
        for (key, expected) in &self.expectations {
            let found = state(key)?;
            if found != *expected {
                return Ok(Some(StoreError::Conflict {
                    key: key.clone(),
                    expected: *expected,
                    found,
                }));
            }
        }
        Ok(None)
    }
}

fn within(what: &'static str, is: usize, most: usize) -> Result<(), StoreError> {
    if is <= most { Ok(()) } else { Err(StoreError::TooBig { what, is, most }) }
}

/// Checks a key. It must be visible ASCII, so that it can be printed and its order is the same
/// everywhere.
fn check_key(key: &str) -> Result<(), StoreError> {
    let why = if key.is_empty() {
        "it is empty"
    } else if key.len() > MOST_KEY_BYTES {
        "it is too long"
    } else if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        "it has characters that are not visible ASCII"
    } else {
        return Ok(());
    };
    Err(StoreError::BadKey { key: key.to_owned(), why })
}

/// Returns the half-open range of the keys that start with `prefix` and come after `after`.
pub(crate) fn range(prefix: &str, after: Option<&str>) -> (String, String) {
    // Nothing lies between a key and the key with a 0 appended, and no key has a byte from 0x7f on.
    let from = after.map(|after| format!("{after}\0")).filter(|after| after.as_str() > prefix);
    (from.unwrap_or_else(|| prefix.to_owned()), format!("{prefix}\x7f"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_within_the_limits_passes() {
        let mut full = Transaction::new();
        for n in 0..MOST_KEYS {
            full = full.put(format!("vms/{n}"), "{}").expect(format!("vms/{n}"), KeyState::Absent);
        }
        full.check().unwrap();
        let value = "x".repeat(MOST_VALUE_BYTES);
        Transaction::new().put("k".repeat(MOST_KEY_BYTES), value).delete("other").check().unwrap();
    }

    #[test]
    fn a_transaction_beyond_a_limit_is_refused() {
        let too_many = (0..=MOST_KEYS)
            .fold(Transaction::new(), |all, n| all.expect(format!("{n}"), KeyState::Absent));
        assert!(matches!(too_many.check(), Err(StoreError::TooBig { is: 121, .. })));
        let too_many =
            (0..=MOST_KEYS).fold(Transaction::new(), |all, n| all.delete(format!("{n}")));
        assert!(matches!(too_many.check(), Err(StoreError::TooBig { is: 121, .. })));
        let value = "x".repeat(MOST_VALUE_BYTES + 1);
        assert!(matches!(
            Transaction::new().put("k", value).check(),
            Err(StoreError::TooBig { .. })
        ));
        let value = "x".repeat(MOST_VALUE_BYTES);
        let too_big =
            (0..2).fold(Transaction::new(), |all, n| all.put(format!("{n}"), value.clone()));
        assert!(matches!(
            too_big.check(),
            Err(StoreError::TooBig { most: MOST_TRANSACTION_BYTES, .. })
        ));
        for key in ["", " ", "a b", "ä", "a\0", &"k".repeat(MOST_KEY_BYTES + 1)] {
            assert!(
                matches!(Transaction::new().delete(key).check(), Err(StoreError::BadKey { .. })),
                "{key}"
            );
            let expecting = Transaction::new().expect(key, KeyState::Absent);
            assert!(matches!(expecting.check(), Err(StoreError::BadKey { .. })), "{key}");
        }
        let twice = Transaction::new().put("a", "1").delete("a");
        assert!(matches!(twice.check(), Err(StoreError::WrittenTwice { .. })));
    }

    #[test]
    fn has_room_for_predicts_the_limits() {
        let many = |count: usize, name: &str| {
            (0..count).fold(Transaction::new(), |all, n| {
                let key = format!("{name}/{n}");
                all.expect(key.clone(), KeyState::Absent).put(key, "{}")
            })
        };
        let (most, one) = (many(MOST_KEYS - 1, "a"), many(1, "b"));
        assert!(most.has_room_for(&one));
        let full = most.and(one);
        full.check().unwrap();
        assert!(!full.has_room_for(&many(1, "c")) && full.has_room_for(&Transaction::new()));
        let value = "x".repeat(MOST_TRANSACTION_BYTES / 4 - 1);
        let large =
            (0..4).fold(Transaction::new(), |all, n| all.put(format!("{n}"), value.clone()));
        large.check().unwrap();
        assert!(!large.has_room_for(&Transaction::new().put("k", "1")));
    }

    #[test]
    fn a_range_covers_the_prefix_after_the_given_key() {
        let within =
            |key: &str, (from, to): (String, String)| key >= from.as_str() && key < to.as_str();
        assert!(within("vms/", range("vms/", None)));
        assert!(within("vms/~~", range("vms/", None)));
        assert!(!within("vms0", range("vms/", None)));
        assert!(!within("vms/a", range("vms/", Some("vms/a"))));
        assert!(within("vms/a!", range("vms/", Some("vms/a"))));
        assert!(within("vms/a", range("vms/", Some("hosts/z"))));
        assert!(within("a", range("", None)));
    }
}
