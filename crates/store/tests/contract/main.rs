//! What a store promises, tried on all of them: in memory, SQLite, and etcd where it is installed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may fail the test

#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "etcd")]
mod etcd_prefix;
#[cfg(feature = "etcd")]
#[path = "../shared/etcd_server.rs"]
mod etcd_server;
mod memory;
mod model;
mod rig;
mod sqlite;
mod suite;

use rig::Rig;

/// Each scenario as a test of each store.
macro_rules! for_each_store {
    ($($scenario:ident),* $(,)?) => {
        mod in_memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::suite::$scenario(&super::Rig::memory()).await;
            })*
        }
        mod in_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::suite::$scenario(&super::Rig::sqlite()).await;
            })*
        }
        #[cfg(feature = "etcd")]
        mod in_etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                if let Some(rig) = super::Rig::etcd() {
                    super::suite::$scenario(&rig).await;
                }
            })*
        }
    };
}

for_each_store!(
    items_come_in_order_and_in_pages,
    what_changes_nothing_makes_no_revision,
    a_conflict_names_the_key_and_writes_nothing,
    the_largest_transaction_passes_and_a_larger_one_is_refused,
    a_leadership_that_has_ended_writes_nothing,
    a_leadership_that_was_left_is_taken_over,
    a_candidate_that_gives_up_waiting_is_in_nobodys_way,
    a_watch_tells_every_change_in_order,
    what_was_committed_is_there_after_a_crash,
    writers_at_the_same_time_lose_nothing,
);
