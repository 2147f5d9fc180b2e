//! The contract of a store, tested on all implementations: memory, SQLite, and etcd where it is
//! installed.

// Test helpers may fail the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

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

/// Turns each scenario into a test of each store.
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
    a_transaction_without_changes_makes_no_revision,
    a_conflict_names_the_key_and_writes_nothing,
    the_largest_transaction_passes_and_a_larger_one_is_refused,
    an_ended_leadership_writes_nothing,
    a_resigned_leadership_is_taken_over,
    a_candidate_that_gives_up_does_not_block_others,
    a_watch_reports_every_change_in_order,
    a_commit_survives_a_crash,
    concurrent_writers_lose_nothing,
);
