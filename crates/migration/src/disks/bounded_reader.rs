//! Reads of an image with a time limit. Storage may answer a search and hang later, and a read of
//! it cannot be interrupted. So threads of their own read, as many as there are streams that read
//! the image at once. If one does not answer in time, the image is not read any more, and content
//! that it may have counts as missing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;

use super::access::ImageReader;
use crate::failure::{Failure, FailureCode};

/// Most threads that read images, for all transfers of a host together.
const MOST_THREADS: usize = 1024;

static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Reads an image until a read takes longer than a limit.
pub struct BoundedReader {
    image: Arc<dyn ImageReader>,
    limit: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Threads without work.
    idle: Vec<Reading>,
    /// Whether a read took too long.
    is_lost: bool,
}

/// A thread that reads, as its user sees it. The thread ends when this is dropped.
struct Reading {
    orders: SyncSender<Order>,
    answers: Receiver<Answer>,
    /// Used again for the next order.
    buffer: Vec<u8>,
}

/// Offset, and a buffer of the length that is read.
type Order = (u64, Vec<u8>);
type Answer = (Vec<u8>, Result<(), Failure>);

/// The right to have a thread, until it is dropped.
struct Place;

impl Place {
    fn take() -> Option<Place> {
        let is_free = |taken: usize| (taken < MOST_THREADS).then_some(taken + 1);
        let taken = THREADS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_free);
        taken.is_ok().then_some(Place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::SeqCst);
    }
}

impl fmt::Debug for BoundedReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundedReader").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl BoundedReader {
    /// Creates the reader of an image. `limit`: longest time for a read, the first of which may
    /// have to open the image.
    #[must_use]
    pub fn new(image: Arc<dyn ImageReader>, limit: Duration) -> BoundedReader {
        BoundedReader { image, limit, state: Mutex::default() }
    }

    /// Returns a thread without work.
    fn thread(&self) -> Result<Reading, Failure> {
        let mut state = self.state.lock();
        if state.is_lost {
            return Err(failed("its storage does not answer"));
        }
        if let Some(idle) = state.idle.pop() {
            return Ok(idle);
        }
        drop(state);
        let place = Place::take().ok_or_else(|| failed("too many threads read images"))?;
        let (orders, ordered) = sync_channel::<Order>(1);
        let (answer, answers) = sync_channel::<Answer>(1);
        let image = Arc::clone(&self.image);
        let reads = move || {
            let _place = place;
            while let Ok((at, mut buffer)) = ordered.recv() {
                let read = image.read_at(at, &mut buffer);
                if answer.send((buffer, read)).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("read-alike".to_owned()).spawn(reads);
        spawned.map_err(|error| failed(&format!("no thread: {error}")))?;
        Ok(Reading { orders, answers, buffer: Vec::new() })
    }

    /// Notes that the image does not answer; the threads without work end.
    fn lose(&self) -> Failure {
        let idle = {
            let mut state = self.state.lock();
            state.is_lost = true;
            std::mem::take(&mut state.idle)
        };
        drop(idle);
        failed("its storage does not answer")
    }

    /// Takes back a thread that has answered.
    fn rest(&self, thread: Reading) {
        let mut state = self.state.lock();
        if !state.is_lost {
            state.idle.push(thread);
        }
    }
}

impl ImageReader for BoundedReader {
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut thread = self.thread()?;
        let mut own = std::mem::take(&mut thread.buffer);
        own.resize(buffer.len(), 0);
        if thread.orders.send((at, own)).is_err() {
            return Err(self.lose());
        }
        let Ok((own, read)) = thread.answers.recv_timeout(self.limit) else {
            return Err(self.lose());
        };
        if read.is_ok() {
            // A reader cannot change the length.
            buffer.copy_from_slice(&own);
        }
        thread.buffer = own;
        self.rest(thread);
        read
    }
}

fn failed(why: &str) -> Failure {
    Failure::new(FailureCode::DiskFailed, format!("cannot read an image: {why}"))
}

#[cfg(test)]
mod tests {
    use parking_lot::Condvar;
    use proptest::prelude::*;

    use super::*;

    /// Far more than a read takes.
    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(5);

    /// Storage that hangs from one of its reads on, until it is freed.
    #[derive(Default)]
    struct Gate {
        is_free: Mutex<bool>,
        freed: Condvar,
    }

    impl Gate {
        fn wait(&self) {
            let mut is_free = self.is_free.lock();
            while !*is_free {
                self.freed.wait(&mut is_free);
            }
        }

        fn free(&self) {
            *self.is_free.lock() = true;
            self.freed.notify_all();
        }
    }

    struct Image {
        byte: u8,
        /// Number of the first read that hangs.
        hangs_at: Option<usize>,
        reads: AtomicUsize,
        gate: Arc<Gate>,
    }

    impl ImageReader for Image {
        fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
            let read = self.reads.fetch_add(1, Ordering::SeqCst);
            if self.hangs_at.is_some_and(|first| read >= first) {
                self.gate.wait();
            }
            if at > 9 {
                return Err(failed("beyond the end"));
            }
            buffer.fill(self.byte);
            Ok(())
        }
    }

    #[test]
    fn reads_of_several_streams_do_not_wait_for_each_other() {
        let gate = Arc::<Gate>::default();
        let (hangs_at, reads) = (Some(0), AtomicUsize::new(0));
        let image = Arc::new(Image { byte: 7, hangs_at, reads, gate: Arc::clone(&gate) });
        let reader = BoundedReader::new(image.clone(), LONG);
        std::thread::scope(|scope| {
            let both = [0, 1].map(|at| {
                let reader = &reader;
                scope.spawn(move || {
                    let mut buffer = [0; 4];
                    reader.read_at(at, &mut buffer).map(|()| buffer)
                })
            });
            // Both are under way before one is answered.
            while image.reads.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            gate.free();
            for one in both {
                assert_eq!(one.join().unwrap().unwrap(), [7; 4]);
            }
        });
        assert_eq!(reader.state.lock().idle.len(), 2);
        // A read that fails is no silence.
        assert!(reader.read_at(10, &mut [0; 4]).is_err());
        reader.read_at(9, &mut [0; 4]).unwrap();
        assert_eq!(reader.state.lock().idle.len(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Images in any order, some of which hang from some read on: those that do not hang are
        /// read always, one that hangs costs one read, and nothing waits for it again.
        #[test]
        fn an_image_that_hangs_costs_one_read(
            hangs in prop::collection::vec(prop::option::of(0_usize..4), 1..4),
            order in prop::collection::vec(0_usize..4, 1..24),
        ) {
            let gate = Arc::<Gate>::default();
            let images: Vec<_> = (1_u8..).zip(&hangs).map(|(byte, hangs_at)| {
                let (hangs_at, reads, gate) = (*hangs_at, AtomicUsize::new(0), gate.clone());
                Arc::new(Image { byte, hangs_at, reads, gate })
            }).collect();
            let readers: Vec<_> = images.iter().map(|image| {
                let limit = if image.hangs_at.is_some() { SHORT } else { LONG };
                BoundedReader::new(image.clone(), limit)
            }).collect();
            let mut asked = vec![0; images.len()];
            for number in order {
                let number = number % images.len();
                let mut buffer = [0; 8];
                let read = readers[number].read_at(1, &mut buffer);
                let first = images[number].hangs_at;
                if first.is_none() {
                    prop_assert!(read.is_ok());
                }
                if first.is_some_and(|first| asked[number] >= first) {
                    prop_assert!(read.is_err());
                }
                if read.is_ok() {
                    prop_assert_eq!(buffer, [images[number].byte; 8]);
                }
                asked[number] += 1;
            }
            for image in &images {
                let reads = image.reads.load(Ordering::SeqCst);
                prop_assert!(image.hangs_at.is_none_or(|first| reads <= first + 1));
            }
            gate.free();
        }
    }
}
