//! Guests that have arrived at a host or are arriving, in the order in which their arrival began.
//! What has arrived of one is announced to the sources of all others, so that guests which arrive
//! together share common content.

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::Content;

/// Memory of guests that are arriving, or have arrived and are still there.
#[derive(Debug, Default)]
pub struct Arrivals(Mutex<Begun>);

#[derive(Debug, Default)]
struct Begun {
    /// Total number of arrivals so far.
    count: u64,
    /// Each content with its number.
    contents: Vec<(u64, Weak<Content>)>,
}

impl Arrivals {
    fn begun(&self) -> MutexGuard<'_, Begun> {
        // A list and a count, each changed by one call.
        self.0.lock()
    }

    /// Registers a guest whose arrival begins. The content belongs to its VM, and is forgotten when
    /// the VM is gone.
    pub fn begin(&self, content: &Arc<Content>) {
        let mut begun = self.begun();
        begun.contents.retain(|(_, content)| content.strong_count() > 0);
        let number = begun.count;
        begun.contents.push((number, Arc::downgrade(content)));
        begun.count += 1;
    }

    /// Returns all contents that still exist, the oldest first.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Content>> {
        self.since(0).0
    }

    /// Returns the contents that still exist and whose arrival began after so many others, the
    /// oldest first, and the count for the next call.
    #[must_use]
    pub fn since(&self, count: u64) -> (Vec<Arc<Content>>, u64) {
        let begun = self.begun();
        let new = begun.contents.iter().skip_while(|(number, _)| *number < count);
        (new.filter_map(|(_, content)| content.upgrade()).collect(), begun.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_query_returns_later_arrivals_and_forgets_dropped_ones() {
        let arrivals = Arrivals::default();
        let contents: Vec<_> = (0..3).map(|_| Arc::new(Content::of(&[]).unwrap())).collect();
        arrivals.begin(&contents[0]);
        arrivals.begin(&contents[1]);
        let (first, count) = arrivals.since(0);
        assert_eq!((first.len(), count), (2, 2));
        assert!(arrivals.since(count).0.is_empty());
        drop((first, contents.into_iter().next()));
        assert_eq!(arrivals.all().len(), 0);
        let late = Arc::new(Content::of(&[]).unwrap());
        arrivals.begin(&late);
        let (new, count) = arrivals.since(count);
        assert!(count == 3 && new.len() == 1 && Arc::ptr_eq(&new[0], &late));
    }
}
