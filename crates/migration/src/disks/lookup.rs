//! Content that a destination has already, found by hash. A reference is a guess: what was read at
//! the moment of use counts only if its whole BLAKE3 is the one that the source named.
//!
//! Two places are looked at: the same offset of images that are probably alike, and the place where
//! the same hash was named before in this transfer. Nothing is hashed in advance.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use godwit_wire::{DiskHash, prefix};
use parking_lot::Mutex;

use super::access::ImageReader;
use super::range::DiskRange;

/// Hashes whose places are remembered: those of 16 GiB.
const MOST_PLACES: usize = 1 << 18;

/// Content of a destination that the source of a transfer can refer to. All streams share it.
pub struct Lookup {
    /// For each disk: images that may have the same bytes at the same place, the likeliest first.
    alike: Vec<Vec<Arc<dyn ImageReader>>>,
    /// The images that arrive, by number of the disk.
    arriving: Vec<Arc<dyn ImageReader>>,
    /// Disk and offset where a hash was named first, by the beginning of the hash.
    places: Mutex<HashMap<u64, (usize, u64)>>,
}

impl fmt::Debug for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("disks", &self.arriving.len()).finish_non_exhaustive()
    }
}

impl Lookup {
    /// Creates the lookup of a transfer. `alike`: for each disk images that may have the same bytes
    /// at the same place, the likeliest first; `arriving`: the images that are filled.
    #[must_use]
    pub fn new(
        alike: Vec<Vec<Arc<dyn ImageReader>>>,
        arriving: Vec<Arc<dyn ImageReader>>,
    ) -> Lookup {
        Lookup { alike, arriving, places: Mutex::default() }
    }

    /// Reads into the buffer, which has the range's length, bytes with this hash. Returns whether
    /// they were found; if not, the buffer's content is undefined.
    pub(super) fn find(&self, range: DiskRange, hash: &DiskHash, buffer: &mut [u8]) -> bool {
        let mut has = |image: &Arc<dyn ImageReader>, at: u64| {
            image.read_at(at, buffer).is_ok() && blake3::hash(buffer) == *hash
        };
        let alike = self.alike.get(range.disk).map_or(&[][..], Vec::as_slice);
        if alike.iter().any(|image| has(image, range.offset)) {
            self.note(range, hash);
            return true;
        }
        let Some((disk, at)) = self.note(range, hash) else { return false };
        self.arriving.get(disk).is_some_and(|image| has(image, at))
    }

    /// Notes where bytes with this hash will be. Returns where they were named before.
    fn note(&self, range: DiskRange, hash: &DiskHash) -> Option<(usize, u64)> {
        let (key, here) = (prefix(hash), (range.disk, range.offset));
        let mut places = self.places.lock();
        let earlier = places.get(&key).copied();
        if earlier.is_none() && places.len() < MOST_PLACES {
            places.insert(key, here);
        }
        earlier.filter(|earlier| *earlier != here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{Failure, FailureCode};

    const UNIT: usize = 64 << 10;

    /// Image of this content. Reads beyond its end fail.
    struct Image(Mutex<Vec<u8>>);

    impl ImageReader for Image {
        fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
            let at = usize::try_from(at).unwrap();
            let content = self.0.lock();
            let beyond = || Failure::new(FailureCode::DiskFailed, "beyond the end");
            buffer.copy_from_slice(content.get(at..at + buffer.len()).ok_or_else(beyond)?);
            Ok(())
        }
    }

    fn image(units: &[u8]) -> Arc<Image> {
        Arc::new(Image(Mutex::new(units.iter().flat_map(|byte| [*byte; UNIT]).collect())))
    }

    fn unit(disk: usize, number: usize) -> DiskRange {
        DiskRange { disk, offset: (number * UNIT) as u64, bytes: UNIT as u64 }
    }

    fn hash(byte: u8) -> DiskHash {
        *blake3::hash(&[byte; UNIT]).as_bytes()
    }

    #[test]
    fn only_content_with_the_hash_is_taken() {
        let (first, second) = (image(&[1, 2]), image(&[9, 3, 4]));
        let alike: Vec<Arc<dyn ImageReader>> = vec![first.clone(), second];
        let lookup = Lookup::new(vec![alike, Vec::new()], vec![image(&[0; 4]), image(&[0; 4])]);
        let mut buffer = vec![0; UNIT];
        assert!(lookup.find(unit(0, 0), &hash(1), &mut buffer) && buffer == [1; UNIT]);
        assert!(lookup.find(unit(0, 1), &hash(3), &mut buffer) && buffer == [3; UNIT]);
        // Beyond the end of the first one.
        assert!(lookup.find(unit(0, 2), &hash(4), &mut buffer) && buffer == [4; UNIT]);
        assert!(!lookup.find(unit(0, 3), &hash(4), &mut buffer), "not there yet");
        assert!(!lookup.find(unit(1, 0), &hash(2), &mut buffer), "no image is like that disk");
        assert!(!lookup.find(unit(7, 0), &hash(5), &mut buffer), "no such disk");
        // It changes between two looks.
        first.0.lock()[5] = 7;
        assert!(!lookup.find(unit(0, 0), &hash(1), &mut buffer));
    }

    #[test]
    fn content_that_arrives_is_found_again_elsewhere() {
        let arriving = [image(&[0; 4]), image(&[0; 4])];
        let readers = arriving.iter().map(|image| Arc::clone(image) as Arc<dyn ImageReader>);
        let lookup = Lookup::new(Vec::new(), readers.collect());
        let mut buffer = vec![0; UNIT];
        assert!(!lookup.find(unit(0, 1), &hash(5), &mut buffer));
        assert!(!lookup.find(unit(1, 3), &hash(5), &mut buffer), "it is on its way");
        arriving[0].0.lock()[UNIT..2 * UNIT].fill(5);
        assert!(lookup.find(unit(1, 3), &hash(5), &mut buffer) && buffer == [5; UNIT]);
        // The guest has written the first place since.
        arriving[0].0.lock()[UNIT] = 6;
        assert!(!lookup.find(unit(1, 2), &hash(5), &mut buffer));
    }

    #[test]
    fn a_source_that_names_too_many_hashes_takes_no_more_memory() {
        let lookup = Lookup::new(Vec::new(), Vec::new());
        for number in 0..MOST_PLACES as u64 + 9 {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            assert_eq!(lookup.note(unit(0, 0), &hash), None);
        }
        assert_eq!(lookup.places.lock().len(), MOST_PLACES);
    }
}
