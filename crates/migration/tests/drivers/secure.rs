//! Certificates of both hosts for a test, the source's with an end that the test chooses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use godwit_pki::{Authority, Grant, Identity, Role};

/// Certificates of both hosts, with the destination's clock judging the source's.
pub(crate) struct Secure {
    pub(crate) source: Identity,
    pub(crate) destination: Identity,
    /// Whether the source's certificate has expired.
    ended: Arc<AtomicBool>,
    /// Numbers of data streams that were requested, and that were admitted.
    queries: AtomicUsize,
    pub(crate) let_in: AtomicUsize,
    /// Whether one was refused.
    pub(crate) refused: Arc<AtomicBool>,
}

impl Secure {
    pub(crate) fn new(folder: &tempfile::TempDir) -> Secure {
        let authority = Authority::create(folder.path(), "test", 9).unwrap();
        let identity = |name: &str, days| {
            let grant =
                Grant { name: name.to_owned(), role: Role::Host, addresses: Vec::new(), days };
            let issued = authority.issue(&grant).unwrap();
            Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap()
        };
        let begun = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let is_ended = Arc::clone(&ended);
        let two_days = Duration::from_secs(2 * 86_400);
        let now = move || if is_ended.load(Ordering::SeqCst) { begun + two_days } else { begun };
        Secure {
            source: identity("a", 1),
            destination: identity("b", 8).with_clock(now),
            ended,
            queries: AtomicUsize::new(0),
            let_in: AtomicUsize::new(0),
            refused: Arc::default(),
        }
    }

    /// Waits before a data stream is connected; the source's certificate expires when `last` of
    /// them have been admitted. A connection that waited for that itself would keep others from
    /// being admitted.
    pub(crate) fn data_stream_comes(&self, last: usize) {
        if self.queries.fetch_add(1, Ordering::SeqCst) >= last {
            while self.let_in.load(Ordering::SeqCst) < last {
                std::thread::yield_now();
            }
            self.ended.store(true, Ordering::SeqCst);
        }
    }
}
