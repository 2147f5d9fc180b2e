//! What the data streams have sent.

use std::sync::atomic::{AtomicU64, Ordering};

use godwit_lanes::UnitSent;
use parking_lot::Mutex;

use crate::encoding::Encodings;

#[derive(Debug, Default)]
pub(crate) struct Totals {
    zero_pages: AtomicU64,
    bytes: AtomicU64,
    padding_bytes: AtomicU64,
    encodings: Mutex<Encodings>,
}

impl Totals {
    /// Adds a unit with so many zero pages.
    pub(crate) fn sent(&self, sent: &UnitSent, zero_pages: u64) {
        self.encodings.lock().add(sent);
        self.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
        self.bytes.fetch_add(sent.wire_bytes, Ordering::Relaxed);
    }

    pub(crate) fn padded(&self, bytes: u64) {
        self.padding_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn zero_pages(&self) -> u64 {
        self.zero_pages.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes of padding sent on data streams: they say nothing about the wire's rate,
    /// because windows are small at first.
    pub(crate) fn padding_bytes(&self) -> u64 {
        self.padding_bytes.load(Ordering::Relaxed)
    }

    /// Returns how the units sent were encoded.
    pub(crate) fn encodings(&self) -> Encodings {
        *self.encodings.lock()
    }
}
