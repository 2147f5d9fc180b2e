//! Items, and transactions with the bounds that all stores share. Pure.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::StoreError;
use super::{MOST_KEY_BYTES, MOST_KEYS, MOST_TRANSACTION_BYTES, MOST_VALUE_BYTES};

/// A state of the whole store: each change has a greater one than those before. Numbers may be left out.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

/// What is stored under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The key: visible ASCII.
    pub key: String,
    /// JSON text; a store does not look into it.
    pub value: String,
    /// The revision of its last change.
    pub revision: Revision,
}

/// All items of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// In the order of their keys.
    pub items: Vec<Item>,
    /// The store's revision when they were like this: what changes later, a watch since then tells.
    pub revision: Revision,
}

/// Some items of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// In the order of their keys.
    pub items: Vec<Item>,
    /// The store's revision when they were like this.
    pub revision: Revision,
    /// Further items follow: ask for those after the last key.
    pub more: bool,
}

/// Whether a key has a value, and since when it has that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// It has none.
    Absent,
    /// It was changed last at this revision.
    At(Revision),
}

impl fmt::Display for KeyState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyState::Absent => out.write_str("absent"),
            KeyState::At(revision) => write!(out, "at revision {revision}"),
        }
    }
}

/// Changes that are made together or not at all: if every key is as expected, all is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    expectations: Vec<(String, KeyState)>,
    writes: Vec<(String, Option<String>)>,
}

impl Transaction {
    /// An empty one.
    #[must_use]
    pub fn new() -> Transaction {
        Transaction::default()
    }

    /// Carried out only if the key is like this.
    #[must_use]
    pub fn expect(mut self, key: impl Into<String>, state: KeyState) -> Transaction {
        self.expectations.push((key.into(), state));
        self
    }

    /// Gives the key this value: JSON text.
    #[must_use]
    pub fn put(mut self, key: impl Into<String>, value: impl Into<String>) -> Transaction {
        self.writes.push((key.into(), Some(value.into())));
        self
    }

    /// Takes the key's value away, if it has one.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Transaction {
        self.writes.push((key.into(), None));
        self
    }

    /// The same and another one's expectations and writes.
    #[must_use]
    pub fn and(mut self, other: Transaction) -> Transaction {
        self.expectations.extend(other.expectations);
        self.writes.extend(other.writes);
        self
    }

    /// Whether one transaction holds another's expectations and writes as well.
    #[must_use]
    pub fn has_room_for(&self, other: &Transaction) -> bool {
        self.expectations.len() + other.expectations.len() <= MOST_KEYS
            && self.writes.len() + other.writes.len() <= MOST_KEYS
            && self.bytes() + other.bytes() <= MOST_TRANSACTION_BYTES
    }

    /// What it writes, keys and values.
    fn bytes(&self) -> usize {
        let writes = self.writes.iter();
        writes.map(|(key, value)| key.len() + value.as_ref().map_or(0, String::len)).sum()
    }

    /// What is expected of which key.
    #[must_use]
    pub fn expectations(&self) -> &[(String, KeyState)] {
        &self.expectations
    }

    /// The keys that get a value, or lose theirs.
    #[must_use]
    pub fn writes(&self) -> &[(String, Option<String>)] {
        &self.writes
    }

    /// The same, for the store that keeps them.
    #[must_use]
    pub(crate) fn into_writes(self) -> Vec<(String, Option<String>)> {
        self.writes
    }

    /// Refuses what one of the stores could not take: they all refuse the same.
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

    /// The first key that is not as expected, of those in `state`.
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

/// A key is visible ASCII, so that it can be printed, and its order is the same everywhere.
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

/// Where to look for the keys that start with `prefix` and come after `after`: from the first, up to the second and without it.
pub(crate) fn range(prefix: &str, after: Option<&str>) -> (String, String) {
    // Nothing lies between a key and itself with a 0 at its end, and no key has a byte from 0x7f on.
    let from = after.map(|after| format!("{after}\0")).filter(|after| after.as_str() > prefix);
    (from.unwrap_or_else(|| prefix.to_owned()), format!("{prefix}\x7f"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_within_the_bounds_passes() {
        let mut full = Transaction::new();
        for n in 0..MOST_KEYS {
            full = full.put(format!("vms/{n}"), "{}").expect(format!("vms/{n}"), KeyState::Absent);
        }
        full.check().unwrap();
        let value = "x".repeat(MOST_VALUE_BYTES);
        Transaction::new().put("k".repeat(MOST_KEY_BYTES), value).delete("other").check().unwrap();
    }

    #[test]
    fn what_is_beyond_a_bound_is_told() {
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
    fn what_fits_together_is_told_beforehand() {
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
    fn a_range_holds_the_prefix_and_what_comes_after() {
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
