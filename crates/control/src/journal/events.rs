//! Numbered changes of the cluster, published to all listeners. A listener that was disconnected
//! continues after the last event that it received.
//!
//! **Numbers of other managers.** At its start, each manager begins to number from its clock, with
//! 1,000 numbers for each millisecond; no manager publishes that many. So a number from another
//! manager, or from before a restart, lies outside the range retained here, and its listener is
//! informed that changes were missed. Numbers stay below 2^53 until the year 2255, so programs that
//! read JSON numbers as floats read them exactly.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use godwit_api::control::{Change, ClusterEvent};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::clock::now_unix_ms;

/// Numbers between two milliseconds.
const NUMBERS_OF_MS: u64 = 1000;
/// Most changes that are retained for returning listeners: some minutes of a busy cluster.
const KEPT: usize = 10_000;
/// Most bytes of retained changes, as JSON. Drains of large hosts are long.
const KEPT_BYTES: usize = 32 << 20;

/// The latest changes.
#[derive(Debug)]
pub struct Events {
    kept: Mutex<Kept>,
    newest: watch::Sender<u64>,
}

#[derive(Debug)]
struct Kept {
    events: VecDeque<Arc<ClusterEvent>>,
    /// Size of each event in bytes.
    sizes: VecDeque<usize>,
    bytes: usize,
    newest: u64,
}

impl Kept {
    /// Adds an event and removes the oldest events beyond the limits.
    fn keep(&mut self, event: ClusterEvent) {
        let bytes = bytes_of(&event);
        self.bytes += bytes;
        self.sizes.push_back(bytes);
        self.events.push_back(Arc::new(event));
        while self.events.len() > KEPT || (self.bytes > KEPT_BYTES && self.events.len() > 1) {
            self.events.pop_front();
            self.bytes -= self.sizes.pop_front().unwrap_or_default();
        }
    }
}

struct Count(usize);

impl io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the size of an event as JSON, in bytes.
fn bytes_of(event: &ClusterEvent) -> usize {
    let mut count = Count(0);
    // This cannot fail: counting does not fail, and each change serializes to JSON.
    let _ = serde_json::to_writer(&mut count, event);
    count.0
}

/// Position of one listener.
#[derive(Debug)]
pub struct Listener {
    events: Arc<Events>,
    /// Number of the last event that was read.
    read: u64,
    newest: watch::Receiver<u64>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// The next events, in order.
    Events(Vec<Arc<ClusterEvent>>),
    /// Events in between are no longer retained, so the listener must read all state again. It
    /// continues after this number.
    Missed(u64),
}

impl Default for Events {
    fn default() -> Self {
        Events::begin(now_unix_ms())
    }
}

impl Events {
    /// Creates the events of a manager that starts at this time.
    #[must_use]
    pub fn begin(unix_ms: u64) -> Events {
        let newest = unix_ms.saturating_mul(NUMBERS_OF_MS);
        let kept = Kept { events: VecDeque::new(), sizes: VecDeque::new(), bytes: 0, newest };
        Events { kept: Mutex::new(kept), newest: watch::channel(newest).0 }
    }

    /// Publishes changes in their order.
    pub fn publish(&self, changes: impl IntoIterator<Item = Change>, unix_ms: u64) {
        let mut kept = self.lock();
        let before = kept.newest;
        for change in changes {
            kept.newest += 1;
            let number = kept.newest;
            kept.keep(ClusterEvent { number, unix_ms, change });
        }
        if kept.newest > before {
            self.newest.send_replace(kept.newest);
        }
    }

    /// Listens from the number `behind` on, or from now on.
    #[must_use]
    pub fn listen(self: &Arc<Self>, behind: Option<u64>) -> Listener {
        let newest = self.newest.subscribe();
        let read = behind.unwrap_or_else(|| self.lock().newest);
        Listener { events: Arc::clone(self), read, newest }
    }

    /// Returns the number of listeners.
    #[must_use]
    pub fn listeners(&self) -> usize {
        self.newest.receiver_count()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock()
    }

    fn behind(&self, read: u64) -> Option<Next> {
        let kept = self.lock();
        if read == kept.newest {
            return None;
        }
        let oldest = kept.events.front().map_or(kept.newest + 1, |event| event.number);
        // A number from another manager may also lie in the future.
        if read > kept.newest || read + 1 < oldest {
            return Some(Next::Missed(kept.newest));
        }
        let skip = usize::try_from(read + 1 - oldest).unwrap_or(usize::MAX);
        Some(Next::Events(kept.events.iter().skip(skip).cloned().collect()))
    }
}

impl Listener {
    /// Waits for the next events. Returns `None` when the manager ends.
    pub async fn next(&mut self) -> Option<Next> {
        loop {
            // Marked as seen before reading, so a change in between wakes the wait.
            self.newest.borrow_and_update();
            if let Some(next) = self.events.behind(self.read) {
                self.read = match &next {
                    Next::Events(events) => events.last().map_or(self.read, |event| event.number),
                    Next::Missed(newest) => *newest,
                };
                return Some(next);
            }
            self.newest.changed().await.ok()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(number: u64) -> Change {
        Change::VmGone(format!("vm{number}"))
    }

    async fn numbers(listener: &mut Listener) -> Vec<u64> {
        match listener.next().await {
            Some(Next::Events(events)) => events.iter().map(|event| event.number).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_listener_gets_every_event_in_order() {
        let events = Arc::new(Events::begin(0));
        events.publish([gone(1)], 0);
        let mut listener = events.listen(None);
        events.publish([gone(2), gone(3)], 0);
        events.publish([gone(4)], 0);
        assert_eq!(numbers(&mut listener).await, [2, 3, 4]);
        events.publish([gone(5)], 0);
        assert_eq!(numbers(&mut listener).await, [5]);
    }

    #[tokio::test]
    async fn a_returning_listener_continues_or_learns_that_it_missed_events() {
        let events = Arc::new(Events::begin(0));
        events.publish((0..KEPT as u64 + 10).map(gone), 0);
        let newest = KEPT as u64 + 10;
        assert_eq!(numbers(&mut events.listen(Some(newest - 2))).await, [newest - 1, newest]);
        assert_eq!(numbers(&mut events.listen(Some(10))).await.len(), KEPT);
        assert_eq!(events.listen(Some(9)).next().await, Some(Next::Missed(newest)));
        assert_eq!(events.listen(Some(newest + 1)).next().await, Some(Next::Missed(newest)));
    }

    #[tokio::test]
    async fn long_events_are_retained_up_to_the_byte_limit() {
        let events = Arc::new(Events::begin(0));
        events.publish((0..100).map(|_| Change::VmGone("x".repeat(1 << 20))), 0);
        let kept = numbers(&mut events.listen(Some(100 - 31))).await;
        assert_eq!(kept.len(), 31);
        assert_eq!(events.listen(Some(1)).next().await, Some(Next::Missed(100)));
    }

    #[tokio::test]
    async fn a_number_from_another_manager_counts_as_missed_whichever_published_more() {
        let (earlier, later) = (Arc::new(Events::begin(1_000)), Arc::new(Events::begin(1_050)));
        let publish = async |events: &Arc<Events>, count| {
            let mut listener = events.listen(None);
            events.publish((0..count).map(gone), 0);
            *numbers(&mut listener).await.last().unwrap()
        };
        let (of_earlier, of_later) = (publish(&earlier, 40).await, publish(&later, 60).await);
        assert_eq!(later.listen(Some(of_earlier)).next().await, Some(Next::Missed(of_later)));
        assert_eq!(earlier.listen(Some(of_later)).next().await, Some(Next::Missed(of_earlier)));
        // This also holds before the later one has published anything.
        let fresh = Arc::new(Events::begin(1_060));
        assert_eq!(fresh.listen(Some(of_later)).next().await, Some(Next::Missed(1_060_000)));
    }

    #[test]
    fn numbers_fit_exactly_into_floats() {
        let newest = Events::default().lock().newest;
        assert!(newest > 0 && newest < 1 << 53);
    }
}
