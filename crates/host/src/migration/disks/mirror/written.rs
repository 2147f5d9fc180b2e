//! What was written to disks, with its content: of each byte the last. Pure.

use std::collections::BTreeMap;

use godwit_migration::disks::DiskRange;

/// Cost of an extent besides its bytes. It also bounds the number of extents.
const EXTENT_COST: usize = 1024;

/// Content of a part of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// So many zeros.
    Zeros(u64),
    Bytes(Vec<u8>),
}

impl Content {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Content::Zeros(bytes) => *bytes,
            Content::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Returns what it takes in memory.
    pub(super) fn cost(&self) -> usize {
        match self {
            Content::Zeros(_) => EXTENT_COST,
            Content::Bytes(bytes) => EXTENT_COST + bytes.len(),
        }
    }

    /// Splits it behind so many bytes. Neither part keeps the memory of the other.
    fn split(self, at: u64) -> (Content, Content) {
        match self {
            Content::Zeros(bytes) => {
                let first = at.min(bytes);
                (Content::Zeros(first), Content::Zeros(bytes - first))
            }
            Content::Bytes(mut bytes) => {
                let at = to_usize(at).min(bytes.len());
                let rest = bytes.split_off(at);
                bytes.shrink_to_fit();
                (Content::Bytes(bytes), Content::Bytes(rest))
            }
        }
    }

    /// Copies from an offset on as much as there is. Returns how much that was.
    fn copy_to(&self, from: u64, buffer: &mut [u8]) -> usize {
        let there = to_usize(self.bytes().saturating_sub(from));
        let length = there.min(buffer.len());
        let Some(buffer) = buffer.get_mut(..length) else { return 0 };
        match self {
            Content::Zeros(_) => buffer.fill(0),
            Content::Bytes(bytes) => {
                let from = to_usize(from);
                match bytes.get(from..from.saturating_add(length)) {
                    Some(found) => buffer.copy_from_slice(found),
                    None => return 0,
                }
            }
        }
        length
    }
}

/// Extents by disk and offset. They do not overlap, and none is empty.
#[derive(Debug, Default)]
pub(super) struct Written {
    extents: BTreeMap<(usize, u64), Content>,
    cost: usize,
}

impl Written {
    /// Returns what all of it takes in memory.
    pub(super) fn cost(&self) -> usize {
        self.cost
    }

    pub(super) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Notes a write, in place of what was written there before.
    pub(super) fn write(&mut self, disk: usize, at: u64, content: Content) {
        let end = at.saturating_add(content.bytes());
        if end <= at {
            return;
        }
        // One that begins before may reach into it, and beyond.
        let before = self.extents.range((disk, 0)..(disk, at)).next_back();
        let before = before.filter(|(key, content)| key.1 + content.bytes() > at);
        if let Some((key, content)) = before.map(|(key, _)| *key).and_then(|key| self.take(key)) {
            let (left, rest) = content.split(at - key.1);
            self.add(key, left);
            self.add((disk, end), rest.split(end - at).1);
        }
        let within: Vec<_> =
            self.extents.range((disk, at)..(disk, end)).map(|(key, _)| *key).collect();
        for key in within {
            if let Some((_, content)) = self.take(key) {
                self.add((disk, end), content.split(end - key.1).1);
            }
        }
        self.add((disk, at), content);
    }

    /// Adds what was written after this.
    pub(super) fn absorb(&mut self, later: Written) {
        if self.is_empty() {
            *self = later;
            return;
        }
        for ((disk, at), content) in later.extents {
            self.write(disk, at, content);
        }
    }

    /// Lists it, ascending.
    pub(super) fn ranges(&self) -> impl Iterator<Item = DiskRange> {
        self.extents.iter().map(|((disk, offset), content)| DiskRange {
            disk: *disk,
            offset: *offset,
            bytes: content.bytes(),
        })
    }

    /// Fills the buffer with what was written. Returns `false` if a byte of it was not.
    pub(super) fn read(&self, disk: usize, at: u64, buffer: &mut [u8]) -> bool {
        let (mut at, mut rest) = (at, buffer);
        while !rest.is_empty() {
            let found = self.extents.range((disk, 0)..=(disk, at)).next_back();
            let Some((key, content)) = found else { return false };
            let copied = content.copy_to(at - key.1, rest);
            if copied == 0 {
                return false;
            }
            at = at.saturating_add(copied as u64);
            rest = rest.get_mut(copied..).unwrap_or_default();
        }
        true
    }

    fn take(&mut self, key: (usize, u64)) -> Option<((usize, u64), Content)> {
        let content = self.extents.remove(&key)?;
        self.cost = self.cost.saturating_sub(content.cost());
        Some((key, content))
    }

    fn add(&mut self, key: (usize, u64), content: Content) {
        if content.bytes() > 0 {
            self.cost += content.cost();
            self.extents.insert(key, content);
        }
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn writes() -> impl Strategy<Value = Vec<(usize, u64, u64, Option<u8>)>> {
        let write = (0_usize..2, 0_u64..60, 0_u64..20, proptest::option::of(1_u8..));
        proptest::collection::vec(write, 0..40)
    }

    fn content(bytes: u64, filled: Option<u8>) -> Content {
        match filled {
            Some(byte) => Content::Bytes(vec![byte; to_usize(bytes)]),
            None => Content::Zeros(bytes),
        }
    }

    proptest! {
        #[test]
        fn of_each_byte_the_last_write_is_read(writes in writes(), split in 0_usize..40) {
            let mut model = [[None; 80], [None; 80]];
            let (mut first, mut later) = (Written::default(), Written::default());
            for (number, (disk, at, bytes, filled)) in writes.into_iter().enumerate() {
                let written = if number < split { &mut first } else { &mut later };
                written.write(disk, at, content(bytes, filled));
                for at in at..at + bytes {
                    model[disk][to_usize(at)] = Some(filled.unwrap_or(0));
                }
            }
            first.absorb(later);
            let cost: usize = first.extents.values().map(Content::cost).sum();
            prop_assert_eq!(first.cost(), cost);
            let mut listed = [[false; 80], [false; 80]];
            let mut behind = (0, 0);
            for range in first.ranges() {
                prop_assert!((range.disk, range.offset) >= behind && range.bytes > 0);
                behind = (range.disk, range.end());
                (range.offset..range.end())
                    .for_each(|at| listed[range.disk][to_usize(at)] = true);
                let mut read = vec![9; to_usize(range.bytes)];
                prop_assert!(first.read(range.disk, range.offset, &mut read));
            }
            for disk in 0..2 {
                for at in 0..80_u64 {
                    let mut byte = [9];
                    let known = model[disk][to_usize(at)];
                    prop_assert_eq!(listed[disk][to_usize(at)], known.is_some());
                    prop_assert_eq!(first.read(disk, at, &mut byte), known.is_some());
                    prop_assert!(known.is_none_or(|known| byte == [known]));
                }
            }
        }
    }
}
