//! Origins of copied pages, so that a source that receives the digests of the original need not
//! receive those of the copy as well.

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::Content;

/// Memory from which a guest's pages were copied, each with a number from 1 on.
#[derive(Debug, Default)]
pub(super) struct Origins(Mutex<Vec<Weak<Content>>>);

impl Origins {
    fn contents(&self) -> MutexGuard<'_, Vec<Weak<Content>>> {
        // A list, changed by one call.
        self.0.lock()
    }

    /// Returns the number of an origin.
    pub(super) fn number(&self, of: &Arc<Content>) -> u8 {
        let mut contents = self.contents();
        let known = contents.iter().position(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(of)));
        let place = known.unwrap_or(contents.len());
        let Ok(number) = u8::try_from(place + 1) else { return 0 };
        if known.is_none() {
            contents.push(Arc::downgrade(of));
        }
        number
    }

    /// Returns which origins satisfy `is_so`, by their numbers less one. Memory that is gone does
    /// not.
    pub(super) fn which(&self, is_so: impl Fn(&Arc<Content>) -> bool) -> Vec<bool> {
        self.contents()
            .iter()
            .map(|origin| origin.upgrade().is_some_and(|origin| is_so(&origin)))
            .collect()
    }
}
