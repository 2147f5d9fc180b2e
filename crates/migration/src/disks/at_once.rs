//! Work on several disks of a transfer at the same time.

use crate::failure::{Failure, FailureCode};

/// Most threads that work at the same time, with the calling one. A source chooses how often its
/// disks are flushed.
const MOST_THREADS: usize = 4;

/// Calls `work` for each item, for several of them at the same time, and waits for all. A host
/// without a thread to spare does one after the other.
///
/// # Errors
/// The first failure, in the order of the items. The others are worked on all the same.
pub fn at_once<T: Sync>(
    items: &[T],
    work: impl Fn(&T) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let each = |items: &[T]| items.iter().map(&work).fold(Ok(()), Result::and);
    let each = &each;
    let mut shares = items.chunks(items.len().div_ceil(MOST_THREADS).max(1));
    let Some(own) = shares.next() else { return Ok(()) };
    std::thread::scope(|scope| {
        let begin = |share| {
            let thread = std::thread::Builder::new().name("disks".to_owned());
            (share, thread.spawn_scoped(scope, move || each(share)))
        };
        let begun: Vec<_> = shares.map(begin).collect();
        begun.into_iter().fold(each(own), |all, (share, begun)| {
            let done = match begun {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
                Err(_) => each(share),
            };
            all.and(done)
        })
    })
}

fn panicked() -> Failure {
    Failure::new(FailureCode::Internal, "a thread that works on a disk panicked")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn all_are_worked_on_and_the_first_failure_counts() {
        for count in 0..=2 * MOST_THREADS + 1 {
            let items: Vec<usize> = (0..count).collect();
            let done = AtomicUsize::new(0);
            let work = |item: &usize| {
                done.fetch_add(1, Ordering::Relaxed);
                match item {
                    1 | 3 => Err(Failure::new(FailureCode::DiskFailed, item.to_string())),
                    _ => Ok(()),
                }
            };
            let failed = at_once(&items, work).err().map(|failure| failure.detail);
            assert_eq!(done.load(Ordering::Relaxed), count);
            assert_eq!(failed, (count > 1).then(|| "1".to_owned()));
        }
    }

    #[test]
    fn two_are_worked_on_at_the_same_time() {
        let ((to_first, first), (to_second, second)) = (sync_channel(1), sync_channel(1));
        let ends = [(to_second, Mutex::new(first)), (to_first, Mutex::new(second))];
        // Each waits for the other one to begin. The limit only guards against hanging.
        let meet = |(other, own): &(SyncSender<()>, Mutex<Receiver<()>>)| {
            other.send(()).unwrap();
            own.lock().recv_timeout(Duration::from_secs(60)).unwrap();
            Ok(())
        };
        at_once(&ends, meet).unwrap();
    }

    #[test]
    fn a_panic_is_a_failure() {
        let failure = at_once(&[0, 1], |item| {
            assert_ne!(*item, 1, "as intended");
            Ok(())
        });
        assert_eq!(failure.unwrap_err().code, FailureCode::Internal);
    }
}
