//! Whether references pay: a source guesses that the destination has a disk's content, and the
//! destination says what it misses. Pure.

use parking_lot::Mutex;

/// Bytes of a disk that are referred to before the guesses are judged.
const TRIAL_BYTES: u64 = 8 << 20;
/// Bytes after which earlier guesses count half.
const REMEMBERED_BYTES: u64 = 64 << 20;
/// Where most guesses were wrong, one of so many chunks is referred to: the content may be alike
/// further on.
const SAMPLED_CHUNKS: u32 = 16;

/// Guesses of a transfer. All streams share it.
#[derive(Debug, Default)]
pub(super) struct Guesses(Mutex<Vec<Account>>);

/// Guesses about one disk.
#[derive(Clone, Debug, Default)]
struct Account {
    made_bytes: u64,
    wrong_bytes: u64,
    /// Chunks that were not referred to since the last that was.
    skipped: u32,
}

impl Guesses {
    /// Returns whether the next chunk of a disk is to be referred to.
    pub(super) fn pay(&self, disk: usize) -> bool {
        self.with(disk, |account| {
            // A reference that is wrong costs a second read and a while.
            let are_right = account.wrong_bytes / 3 <= account.made_bytes / 4;
            let pay = account.made_bytes < TRIAL_BYTES
                || are_right
                || account.skipped + 1 >= SAMPLED_CHUNKS;
            account.skipped = if pay { 0 } else { account.skipped + 1 };
            pay
        })
    }

    /// Notes that so many bytes are referred to. They count as right until they are missing.
    pub(super) fn made(&self, disk: usize, bytes: u64) {
        self.with(disk, |account| {
            account.made_bytes += bytes;
            if account.made_bytes > REMEMBERED_BYTES {
                account.made_bytes /= 2;
                account.wrong_bytes /= 2;
            }
        });
    }

    /// Notes that so many bytes among them are missing.
    pub(super) fn wrong(&self, disk: usize, bytes: u64) {
        self.with(disk, |account| account.wrong_bytes += bytes);
    }

    fn with<T>(&self, disk: usize, work: impl FnOnce(&mut Account) -> T) -> T {
        let mut accounts = self.0.lock();
        if accounts.len() <= disk {
            accounts.resize(disk + 1, Account::default());
        }
        work(&mut accounts[disk])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 1 << 20;

    /// Returns how many of so many chunks were referred to.
    fn chunks(guesses: &Guesses, disk: usize, count: usize, are_wrong: bool) -> usize {
        let refer = |_: &usize| {
            let pay = guesses.pay(disk);
            if pay {
                guesses.made(disk, CHUNK);
                guesses.wrong(disk, if are_wrong { CHUNK } else { 0 });
            }
            pay
        };
        (0..count).filter(refer).count()
    }

    #[test]
    fn wrong_guesses_become_rare_and_right_ones_go_on() {
        let guesses = Guesses::default();
        assert_eq!(chunks(&guesses, 1, 8, true), 8);
        assert_eq!(chunks(&guesses, 1, 160, true), 10);
        // Another disk has its own.
        assert_eq!(chunks(&guesses, 0, 1000, false), 1000);
        // Content that is alike further on is found.
        chunks(&guesses, 1, 2000, false);
        assert_eq!(chunks(&guesses, 1, 100, false), 100);
    }
}
