//! Measures the store:
//! `cargo run --release -p godwit-store --example store_figures [http://ETCD:2379]`.
//!
//! Prints JSON. Without an argument it measures SQLite in a temporary directory; set `TMPDIR` to
//! choose the disk. With an argument it measures that etcd, under its own prefix, which it empties
//! afterwards.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_store::{Candidate, Leadership, MOST_KEYS, SqliteStore, Store, Transaction};
use serde_json::{Value, json};

const ITEMS: usize = 50_000;
const ITEM_BYTES: usize = 1000;
const COMMITS: usize = 500;
const WRITERS: usize = 32;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let figures = match std::env::args().nth(1) {
        Some(endpoint) => etcd(endpoint).await?,
        None => sqlite(tempfile::tempdir()?.path()).await?,
    };
    println!("{figures:#}");
    Ok(())
}

async fn sqlite(dir: &Path) -> Result<Value, Box<dyn Error>> {
    let path = dir.join("manager.db");
    let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&path)?);
    let mut figures = measure(&store).await?;
    drop(store);
    let begun = Instant::now();
    drop(SqliteStore::open(&path)?);
    figures["open_and_check_ms"] = ms(begun.elapsed());
    Ok(figures)
}

#[cfg(feature = "etcd")]
async fn etcd(endpoint: String) -> Result<Value, Box<dyn Error>> {
    use godwit_store::{EtcdSettings, EtcdStore};
    let settings = EtcdSettings {
        endpoints: vec![endpoint],
        prefix: "/godwit-figures".to_owned(),
        ..EtcdSettings::default()
    };
    let store: Arc<dyn Store> = Arc::new(EtcdStore::new(&settings)?);
    let figures = measure(&store).await?;
    empty(&store).await?;
    Ok(figures)
}

#[cfg(not(feature = "etcd"))]
async fn etcd(_endpoint: String) -> Result<Value, Box<dyn Error>> {
    Err("this was built without etcd".into())
}

async fn measure(store: &Arc<dyn Store>) -> Result<Value, Box<dyn Error>> {
    let candidate = Candidate { name: "figures".to_owned(), address: String::new() };
    let leads = Arc::new(store.lead(&candidate).await?);
    let keys: Vec<_> = (0..ITEMS).map(|n| format!("items/{n:06}")).collect();
    let value = format!("\"{}\"", "7".repeat(ITEM_BYTES - 2));
    let begun = Instant::now();
    for some in keys.chunks(MOST_KEYS) {
        let puts =
            some.iter().fold(Transaction::new(), |all, key| all.put(key.as_str(), value.as_str()));
        store.commit(&leads, puts).await?;
    }
    let filled = begun.elapsed();
    let begun = Instant::now();
    let read = store.read("").await?.items.len();
    let read_took = begun.elapsed();
    let one_by_one = commits(Arc::clone(store), Arc::clone(&leads), 0, COMMITS).await?;
    let begun = Instant::now();
    let writers: Vec<_> = (0..WRITERS)
        .map(|n| tokio::spawn(commits(Arc::clone(store), Arc::clone(&leads), n, COMMITS / WRITERS)))
        .collect();
    let mut together = Vec::new();
    for writer in writers {
        together.extend(writer.await?.map_err(|error| error.to_string())?);
    }
    let rate = f64::from(u32::try_from(together.len())?) / begun.elapsed().as_secs_f64();
    Ok(json!({
        "items": read, "item_bytes": ITEM_BYTES,
        "fill_ms": ms(filled), "read_all_ms": ms(read_took),
        "commit_one_by_one": spread(one_by_one),
        "commit_from_32_writers": spread(together), "commits_per_s_from_32_writers": rate.round(),
    }))
}

/// Removes the measured items.
#[cfg(feature = "etcd")]
async fn empty(store: &Arc<dyn Store>) -> Result<(), Box<dyn Error>> {
    let leads =
        store.lead(&Candidate { name: "figures".to_owned(), address: String::new() }).await?;
    for some in store.read("").await?.items.chunks(MOST_KEYS) {
        let deletes =
            some.iter().fold(Transaction::new(), |all, item| all.delete(item.key.as_str()));
        store.commit(&leads, deletes).await?;
    }
    Ok(())
}

/// Returns the duration of each of `number` commits.
async fn commits(
    store: Arc<dyn Store>,
    leads: Arc<Leadership>,
    writer: usize,
    commits: usize,
) -> Result<Vec<Duration>, godwit_store::StoreError> {
    let mut took = Vec::new();
    for n in 0..commits {
        let begun = Instant::now();
        store
            .commit(&leads, Transaction::new().put(format!("writers/{writer}"), n.to_string()))
            .await?;
        took.push(begun.elapsed());
    }
    Ok(took)
}

fn spread(mut took: Vec<Duration>) -> Value {
    took.sort_unstable();
    let at = |percent: usize| took.get(took.len() * percent / 100).copied().unwrap_or_default();
    let longest = took.last().copied().unwrap_or_default();
    json!({ "median_ms": ms(at(50)), "p99_ms": ms(at(99)), "longest_ms": ms(longest) })
}

fn ms(took: Duration) -> Value {
    json!((took.as_secs_f64() * 1e5).round() / 1e2)
}
