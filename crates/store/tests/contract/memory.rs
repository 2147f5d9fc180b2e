//! The faults of the store in memory, which other tests use.

use std::sync::Arc;

use godwit_store::{Loss, MemoryStore, Store, StoreError, Transaction, Written};

use crate::rig::candidate;

#[tokio::test]
async fn one_manager_can_be_cut_off_alone() {
    let first = MemoryStore::new();
    let second = first.peer();
    let leads = first.lead(&candidate("m1")).await.unwrap();
    first.set_unavailable(true);
    let error = first.commit(&leads, Transaction::new().put("a", "1")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { written: Written::No, .. }), "{error}");
    assert!(first.read("").await.is_err() && first.leader().await.is_err());
    assert!(second.read("").await.unwrap().items.is_empty());
    // The time expires on its own side first, then in the store.
    first.give_up_leadership();
    assert_eq!((leads.lost().await, leads.holds()), (Loss::RanOut, false));
    assert_eq!(second.leader().await.unwrap().unwrap().epoch, leads.epoch());
    second.end_leadership_silently();
    let next = second.lead(&candidate("m2")).await.unwrap();
    first.set_unavailable(false);
    let error = first.commit(&leads, Transaction::new().put("a", "1")).await.unwrap_err();
    assert!(matches!(error, StoreError::LeadershipLost { why: Loss::RanOut }), "{error}");
    // Dropping the old leadership does not end the new one.
    drop(leads);
    second.commit(&next, Transaction::new().put("a", "2")).await.unwrap();
}

#[tokio::test]
async fn a_lost_response_belongs_to_a_written_change() {
    let store = MemoryStore::new();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    store.lose_answers(1);
    let error = store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { written: Written::Unknown, .. }), "{error}");
    assert_eq!(store.read("").await.unwrap().items[0].value, "1");
    store.commit(&leads, Transaction::new().put("a", "2")).await.unwrap();
}

#[tokio::test]
async fn a_manager_leads_after_it_reconnects() {
    let store = Arc::new(MemoryStore::new());
    store.set_unavailable(true);
    let waits = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.lead(&candidate("m1")).await.unwrap().epoch() }
    });
    // There is no leader while it waits.
    assert!(store.peer().leader().await.unwrap().is_none());
    store.set_unavailable(false);
    waits.await.unwrap();
}
