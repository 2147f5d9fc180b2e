//! The scenarios of the contract.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_store::{
    Item, KeyState, Leadership, Loss, MOST_KEY_BYTES, MOST_KEYS, MOST_PAGE_ITEMS,
    MOST_TRANSACTION_BYTES, MOST_VALUE_BYTES, Revision, Store, StoreError, Transaction,
};

use crate::rig::{Rig, candidate, lead};

fn keys(items: &[Item]) -> Vec<&str> {
    items.iter().map(|item| item.key.as_str()).collect()
}

/// Writes that many values under a prefix.
async fn fill(store: &Arc<dyn Store>, leads: &Leadership, prefix: &str, items: usize) -> Revision {
    let all: Vec<_> = (0..items).map(|n| format!("{prefix}{n:04}")).collect();
    let mut revision = Revision(0);
    for some in all.chunks(MOST_KEYS) {
        let puts = some.iter().fold(Transaction::new(), |all, key| all.put(key.as_str(), "{}"));
        revision = store.commit(leads, puts).await.unwrap();
    }
    revision
}

pub(crate) async fn items_come_in_order_and_in_pages(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    let items = 2 * MOST_PAGE_ITEMS + 10;
    fill(&store, &leads, "vms/", items).await;
    let last = fill(&store, &leads, "hosts/", 3).await;
    let all = store.read("vms/").await.unwrap();
    assert!(all.items.len() == items && all.revision >= last);
    assert!(all.items.is_sorted_by(|a, b| a.key < b.key));
    assert!(all.items.iter().all(|item| item.value == "{}" && item.revision <= last));
    assert_eq!(store.read("").await.unwrap().items.len(), items + 3);
    assert_eq!(
        keys(&store.read("hosts/").await.unwrap().items),
        ["hosts/0000", "hosts/0001", "hosts/0002"]
    );
    assert!(store.read("rules/").await.unwrap().items.is_empty());

    let mut paged = Vec::new();
    loop {
        let after = paged.last().map(|item: &Item| item.key.clone());
        let page = store.read_page("vms/", after.as_deref(), 100).await.unwrap();
        assert!(page.items.len() <= 100 && page.revision >= last);
        paged.extend(page.items);
        if !page.more {
            break;
        }
    }
    assert_eq!(paged, all.items);
    let page = store.read_page("vms/", None, usize::MAX).await.unwrap();
    assert_eq!((page.items.len(), page.more), (MOST_PAGE_ITEMS, true));
    let page = store.read_page("hosts/", Some("hosts/0000"), 2).await.unwrap();
    assert_eq!((keys(&page.items), page.more), (vec!["hosts/0001", "hosts/0002"], false));
    let beyond = store.read_page("hosts/", Some("vms/"), 2).await.unwrap();
    assert!(beyond.items.is_empty() && !beyond.more);
}

pub(crate) async fn a_transaction_without_changes_makes_no_revision(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    let first = store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    let mut watch = store.watch("", first).await.unwrap();
    // In a shared etcd, writes of others may advance the revision.
    assert!(store.commit(&leads, Transaction::new()).await.unwrap() >= first);
    assert!(store.commit(&leads, Transaction::new().delete("b")).await.unwrap() >= first);
    assert_eq!(store.read("a").await.unwrap().items[0].revision, first);
    // Writing an equal value is a change: the writer can then detect any write since.
    let again = store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    assert!(again > first);
    assert_eq!(watch.next().await.unwrap().revision, again);
    assert_eq!(store.read("a").await.unwrap().items[0].revision, again);
    let gone = store.commit(&leads, Transaction::new().delete("a").delete("b")).await.unwrap();
    assert!(gone > again);
    assert!(store.read("").await.unwrap().items.is_empty());
}

pub(crate) async fn a_conflict_names_the_key_and_writes_nothing(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    let first = store.commit(&leads, Transaction::new().put("a", "1").put("b", "1")).await.unwrap();
    let second = store.commit(&leads, Transaction::new().put("b", "2")).await.unwrap();
    let stale = Transaction::new()
        .expect("a", KeyState::At(first))
        .expect("c", KeyState::Absent)
        .expect("b", KeyState::At(first))
        .put("a", "3")
        .delete("b")
        .put("c", "3");
    match store.commit(&leads, stale).await.unwrap_err() {
        StoreError::Conflict { key, expected, found } => {
            assert_eq!(
                (key.as_str(), expected, found),
                ("b", KeyState::At(first), KeyState::At(second))
            );
        }
        other => panic!("{other}"),
    }
    let there = Transaction::new().expect("a", KeyState::Absent).put("a", "4");
    let error = store.commit(&leads, there).await.unwrap_err();
    assert!(
        matches!(error, StoreError::Conflict { found: KeyState::At(at), .. } if at == first),
        "{error}"
    );
    let gone = Transaction::new().expect("c", KeyState::At(second)).put("a", "5");
    let error = store.commit(&leads, gone).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { found: KeyState::Absent, .. }), "{error}");
    let snapshot = store.read("").await.unwrap();
    let values: Vec<_> =
        snapshot.items.iter().map(|item| (item.key.as_str(), item.value.as_str())).collect();
    assert_eq!(values, [("a", "1"), ("b", "2")]);
    assert!(snapshot.revision >= second);
    let right = Transaction::new()
        .expect("a", KeyState::At(first))
        .expect("b", KeyState::At(second))
        .put("a", "6");
    assert!(store.commit(&leads, right).await.unwrap() > second);
}

pub(crate) async fn the_largest_transaction_passes_and_a_larger_one_is_refused(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    let key = |n: usize| format!("{n:0MOST_KEY_BYTES$}");
    let keys = MOST_KEYS * MOST_KEY_BYTES;
    let value = "7".repeat((MOST_TRANSACTION_BYTES - keys) / MOST_KEYS);
    let largest = (0..MOST_KEYS).fold(Transaction::new(), |all, n| {
        all.expect(key(n + 1000), KeyState::Absent).put(key(n), value.as_str())
    });
    store.commit(&leads, largest.clone()).await.unwrap();
    // A conflict has the largest response.
    let refused = (0..MOST_KEYS).fold(Transaction::new(), |all, n| {
        all.expect(key(n), KeyState::Absent).put(key(n), value.as_str())
    });
    assert!(matches!(store.commit(&leads, refused).await, Err(StoreError::Conflict { .. })));
    let one = Transaction::new().put("one", "7".repeat(MOST_VALUE_BYTES));
    store.commit(&leads, one).await.unwrap();
    let more = largest.put("one-more", "{}");
    assert!(matches!(store.commit(&leads, more).await, Err(StoreError::TooBig { .. })));
    let one = Transaction::new().put("one", "7".repeat(MOST_VALUE_BYTES + 1));
    assert!(matches!(store.commit(&leads, one).await, Err(StoreError::TooBig { .. })));
    assert_eq!(store.read("").await.unwrap().items.len(), MOST_KEYS + 1);
}

pub(crate) async fn an_ended_leadership_writes_nothing(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    let before = store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    rig.end_leadership().await;
    let error = store.commit(&leads, Transaction::new().put("a", "2")).await.unwrap_err();
    assert!(matches!(error, StoreError::LeadershipLost { .. }), "{error}");
    assert_eq!((leads.lost().await, leads.holds()), (Loss::Ended, false));
    let snapshot = store.read("").await.unwrap();
    assert_eq!((snapshot.items[0].value.as_str(), snapshot.items[0].revision), ("1", before));
    let epoch = leads.epoch();
    drop(leads);
    let next = rig.other(&store).lead(&candidate("m2")).await.unwrap();
    assert!(next.epoch() > epoch);
}

pub(crate) async fn a_resigned_leadership_is_taken_over(rig: &Rig) {
    let first = rig.open();
    let second = rig.other(&first);
    assert_eq!(first.leader().await.unwrap(), None);
    let leads = lead(&first).await;
    assert!(leads.holds());
    let leader = second.leader().await.unwrap().unwrap();
    assert_eq!((leader.candidate, leader.epoch), (candidate("m1"), leads.epoch()));
    let waits = tokio::spawn({
        let second = Arc::clone(&second);
        async move { second.lead(&candidate("m2")).await.unwrap() }
    });
    // The first manager keeps the leadership until it resigns.
    first.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    let epoch = leads.epoch();
    leads.resign().await.unwrap();
    let leads = waits.await.unwrap();
    assert!(leads.epoch() > epoch);
    assert_eq!(first.leader().await.unwrap().unwrap().candidate, candidate("m2"));
    second.commit(&leads, Transaction::new().put("a", "2")).await.unwrap();
    assert_eq!(first.read("").await.unwrap().items[0].value, "2");
}

pub(crate) async fn a_candidate_that_gives_up_does_not_block_others(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    let gives_up = tokio::spawn({
        let other = rig.other(&store);
        async move { other.lead(&candidate("m2")).await.map(drop) }
    });
    store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    gives_up.abort();
    assert!(gives_up.await.unwrap_err().is_cancelled());
    leads.resign().await.unwrap();
    let third = rig.other(&store);
    let leads = third.lead(&candidate("m3")).await.unwrap();
    third.commit(&leads, Transaction::new().put("a", "2")).await.unwrap();
}

pub(crate) async fn a_watch_reports_every_change_in_order(rig: &Rig) {
    let store = rig.open();
    let follower = rig.other(&store);
    let leads = lead(&store).await;
    store.commit(&leads, Transaction::new().put("vms/0", "0").put("vms/old", "0")).await.unwrap();
    let start = follower.read("vms/").await.unwrap();
    // Some changes are made before the watch begins, and are still reported.
    let mut revisions = Vec::new();
    for n in 1..=20 {
        let mut change = Transaction::new().put(format!("vms/{}", n % 3), n.to_string());
        change = if n % 5 == 0 {
            change.delete("vms/old")
        } else {
            change.put("vms/old", n.to_string())
        };
        revisions.push(store.commit(&leads, change).await.unwrap());
        store.commit(&leads, Transaction::new().put("hosts/a", n.to_string())).await.unwrap();
        if n == 10 {
            let mut late = follower.watch("vms/", revisions[8]).await.unwrap();
            assert_eq!(late.next().await.unwrap().revision, revisions[9]);
        }
    }
    let mut watch = follower.watch("vms/", start.revision).await.unwrap();
    let mut known: BTreeMap<_, _> =
        start.items.into_iter().map(|item| (item.key, (item.value, item.revision))).collect();
    for revision in revisions {
        let event = watch.next().await.unwrap();
        assert_eq!((event.revision, event.changes.len()), (revision, 2));
        for change in event.changes {
            match change.value {
                Some(value) => known.insert(change.key, (value, revision)),
                None => known.remove(&change.key),
            };
        }
    }
    let end = follower.read("vms/").await.unwrap().items.into_iter();
    assert_eq!(known, end.map(|item| (item.key, (item.value, item.revision))).collect());
    // A waiting watch is woken.
    let waits = tokio::spawn(async move { watch.next().await.unwrap() });
    let last = store.commit(&leads, Transaction::new().put("vms/last", "1")).await.unwrap();
    assert_eq!(waits.await.unwrap().revision, last);
}

pub(crate) async fn a_commit_survives_a_crash(rig: &Rig) {
    let store = rig.open();
    let leads = lead(&store).await;
    fill(&store, &leads, "vms/", 300).await;
    store.commit(&leads, Transaction::new().delete("vms/0007")).await.unwrap();
    let before = store.read("").await.unwrap();
    let epoch = leads.epoch();
    rig.end_leadership().await;
    // Neither resigned nor closed.
    drop((leads, store));
    let store = rig.open();
    assert_eq!(store.read("").await.unwrap().items, before.items);
    let leads = lead(&store).await;
    assert!(leads.epoch() > epoch);
    assert!(
        store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap() > before.revision
    );
}

pub(crate) async fn concurrent_writers_lose_nothing(rig: &Rig) {
    const WRITERS: u64 = 4;
    const EACH: u64 = 10;
    let store = rig.open();
    let leads = Arc::new(lead(&store).await);
    let start = store.commit(&leads, Transaction::new().put("count", "0")).await.unwrap();
    let writers: Vec<_> = (0..WRITERS)
        .map(|_| tokio::spawn(count_up(Arc::clone(&store), Arc::clone(&leads), EACH)))
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    assert_eq!(store.read("count").await.unwrap().items[0].value, (WRITERS * EACH).to_string());
    let mut watch = store.watch("count", start).await.unwrap();
    for n in 1..=WRITERS * EACH {
        assert_eq!(watch.next().await.unwrap().changes[0].value, Some(n.to_string()));
    }
}

/// Increments the value `times` times, and retries after each conflict.
async fn count_up(store: Arc<dyn Store>, leads: Arc<Leadership>, times: u64) {
    let mut done = 0;
    while done < times {
        let now = store.read("count").await.unwrap().items.remove(0);
        let next = now.value.parse::<u64>().unwrap() + 1;
        let change = Transaction::new()
            .expect("count", KeyState::At(now.revision))
            .put("count", next.to_string());
        match store.commit(&leads, change).await {
            Ok(_) => done += 1,
            Err(StoreError::Conflict { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}
