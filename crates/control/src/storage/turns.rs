//! Locks for operations that must not run twice at a time, by ID, and the users of the latest
//! operations.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::now_unix_ms;
use crate::journal::requester;

/// Most operations whose users are retained, the latest ones.
const MOST_USERS: usize = 4_096;

/// Operations in progress, by ID.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns(Arc<Mutex<Operations>>);

#[derive(Debug, Default)]
struct Operations {
    taken: BTreeSet<String>,
    /// Operations of users, the latest last.
    of_users: VecDeque<OfUser>,
}

/// Operation that a user requested.
#[derive(Debug)]
struct OfUser {
    id: String,
    who: String,
    from_unix_ms: u64,
    /// None: it is in progress.
    to_unix_ms: Option<u64>,
}

/// Lock of one operation, released on drop.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Turns,
    id: String,
}

impl Turns {
    /// Takes the lock of an operation. Returns `None` if the operation is in progress.
    pub(crate) fn take(&self, id: &str) -> Option<Turn> {
        let mut all = self.0.lock();
        if !all.taken.insert(id.to_owned()) {
            return None;
        }
        if let Some(who) = requester::current() {
            let (id, from_unix_ms) = (id.to_owned(), now_unix_ms());
            all.of_users.push_back(OfUser { id, who, from_unix_ms, to_unix_ms: None });
            if all.of_users.len() > MOST_USERS {
                all.of_users.pop_front();
            }
        }
        drop(all);
        Some(Turn { turns: self.clone(), id: id.to_owned() })
    }

    /// Returns the user whose operation was in progress at this time, milliseconds since 1970.
    pub(crate) fn user_at(&self, id: &str, unix_ms: u64) -> Option<String> {
        let all = self.0.lock();
        let mut latest = all.of_users.iter().rev().filter(|one| one.id == id);
        let found = latest.find(|one| {
            one.from_unix_ms <= unix_ms && one.to_unix_ms.is_none_or(|to| unix_ms <= to)
        });
        found.map(|one| one.who.clone())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = self.turns.0.lock();
        all.taken.remove(&self.id);
        let of_user = all.of_users.iter_mut().rev().find(|one| one.id == self.id);
        if let Some(one) = of_user.filter(|one| one.to_unix_ms.is_none()) {
            one.to_unix_ms = Some(now_unix_ms());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_operation_has_one_turn_and_its_user() {
        let turns = Turns::default();
        let turn = requester::serve("ana".to_owned(), async { turns.take("vm web") }).await;
        assert!(turn.is_some() && turns.take("vm web").is_none());
        let now = now_unix_ms();
        assert_eq!(turns.user_at("vm web", now).as_deref(), Some("ana"));
        assert_eq!((turns.user_at("vm web", 1), turns.user_at("vm db", now)), (None, None));
        drop(turn);
        assert_eq!(turns.user_at("vm web", now_unix_ms() + 1_000), None);
        // An operation of the manager itself has no user.
        let turn = turns.take("vm web");
        assert!(turn.is_some());
        assert_eq!(turns.user_at("vm web", now_unix_ms() + 1_000), None);
        for n in 0..2 * MOST_USERS {
            let id = format!("vm {n}");
            drop(requester::serve("ana".to_owned(), async { turns.take(&id) }).await);
        }
        assert_eq!(turns.0.lock().of_users.len(), MOST_USERS);
    }
}
