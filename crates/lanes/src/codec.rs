//! Compression of pages. It does no I/O and reads no guest memory: it compresses a copy, because
//! the guest writes while its memory is read.

use godwit_wire::{Codec, MAX_PAGES_PER_FRAME, PAGE_SIZE};
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

use crate::unit::{Effort, Stopwatch};

/// Largest piece, in bytes, that is compressed or unpacked at a time.
pub const MAX_PIECE_BYTES: usize = (MAX_PAGES_PER_FRAME * PAGE_SIZE) as usize;

/// The fastest of zstd's usual levels. Higher levels gain little on memory and are slower than a
/// link of 1 Gb/s.
const ZSTD_LEVEL: i32 = 1;
/// Pieces below this size use LZ4's small table, which is cleared in half the time
/// (`CompressTable::Small`).
const LZ4_SMALL_BYTES: usize = u16::MAX as usize;

/// Returns whether compressing the piece saves enough, given that the peer has to unpack it.
fn pays(packed_bytes: usize, raw_bytes: usize) -> bool {
    packed_bytes <= raw_bytes / 10 * 9
}

/// Compressor of pieces. It allocates its tables and its buffer once.
#[derive(Default)]
pub struct Compressor {
    packed: Vec<u8>,
    lz4: Option<[CompressTable; 2]>,
    zstd: Option<zstd::bulk::Compressor<'static>>,
}

impl Compressor {
    /// Compresses a piece of at most [`MAX_PIECE_BYTES`]; `None` if compression does not pay.
    pub fn pack(&mut self, codec: Codec, raw: &[u8]) -> Option<&[u8]> {
        if self.packed.is_empty() {
            self.packed.resize(get_maximum_output_size(MAX_PIECE_BYTES), 0);
        }
        let bytes = match codec {
            Codec::Lz4 => {
                let [small, large] = self
                    .lz4
                    .get_or_insert_with(|| [CompressTable::small(), CompressTable::large()]);
                let table = if raw.len() < LZ4_SMALL_BYTES { small } else { large };
                compress_into_with_table(raw, &mut self.packed, table).ok()?
            }
            Codec::Zstd => {
                if self.zstd.is_none() {
                    self.zstd = zstd::bulk::Compressor::new(ZSTD_LEVEL).ok();
                }
                // Without memory for the tables or room for the result, the pages go raw.
                self.zstd.as_mut()?.compress_to_buffer(raw, self.packed.as_mut_slice()).ok()?
            }
        };
        self.packed.get(..bytes).filter(|packed| pays(packed.len(), raw.len()))
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}

/// Compresses pieces of at most 64 pages each as a trial, before any is sent. Returns the
/// compressed size per byte of each piece, and the effort of all of them. A piece that compression
/// does not make smaller counts as 1, since it is sent raw.
#[must_use]
pub fn try_codec(codec: Codec, pieces: &[Vec<u8>]) -> (Vec<f64>, Effort) {
    let mut compressor = Compressor::default();
    // The first piece of a stream creates the tables, once.
    let _ = pieces.first().map(|piece| compressor.pack(codec, piece).is_some());
    let watch = Stopwatch::start();
    let mut effort = Effort::default();
    let mut ratios = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let packed_bytes = compressor.pack(codec, piece).map_or(piece.len(), <[u8]>::len);
        effort.raw_bytes += piece.len() as u64;
        effort.packed_bytes += packed_bytes as u64;
        #[expect(clippy::cast_precision_loss, reason = "pieces have 256 KiB at most")]
        ratios.push(packed_bytes as f64 / piece.len().max(1) as f64);
    }
    (ratios, Effort { time: watch.elapsed(), cpu: watch.cpu(), ..effort })
}

/// Unpacker of pieces that a peer compressed.
#[derive(Default)]
pub struct Unpacker {
    raw: Vec<u8>,
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Unpacker {
    /// Returns the pages of a piece, or `None` if it does not hold exactly `raw_bytes` bytes.
    /// `raw_bytes` is at most [`MAX_PIECE_BYTES`].
    pub fn unpack(&mut self, codec: Codec, packed: &[u8], raw_bytes: usize) -> Option<&[u8]> {
        if self.raw.is_empty() {
            self.raw.resize(MAX_PIECE_BYTES, 0);
        }
        let room = self.raw.get_mut(..raw_bytes)?;
        let bytes = match codec {
            Codec::Lz4 => decompress_into(packed, room).ok()?,
            Codec::Zstd => {
                if self.zstd.is_none() {
                    self.zstd = zstd::bulk::Decompressor::new().ok();
                }
                // Unpacks from buffer to buffer in one call, so no window of a size that the peer
                // names is allocated.
                self.zstd.as_mut()?.decompress_to_buffer(packed, room).ok()?
            }
        };
        (bytes == raw_bytes).then_some(&*room)
    }
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    /// Returns pages of few different bytes, which every codec makes smaller.
    fn pages(words: &[u16], count: usize) -> Vec<u8> {
        words
            .iter()
            .flat_map(|word| word.to_le_bytes().repeat(100))
            .cycle()
            .take(count * PAGE)
            .collect()
    }

    fn codec() -> impl Strategy<Value = Codec> {
        prop::sample::select(Codec::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn pages_survive(
            codec in codec(),
            words in prop::collection::vec(any::<u16>(), 1..40),
            count in 1usize..=64,
        ) {
            let (mut compressor, mut unpacker) = (Compressor::default(), Unpacker::default());
            // Twice: what one piece leaves behind does not affect the next.
            for raw in [pages(&words, count), pages(&words, 65 - count)] {
                let packed = compressor.pack(codec, &raw).expect("it pays").to_vec();
                prop_assert!(pays(packed.len(), raw.len()));
                prop_assert_eq!(unpacker.unpack(codec, &packed, raw.len()), Some(raw.as_slice()));
            }
        }

        #[test]
        fn another_number_of_pages_is_refused(
            codec in codec(),
            count in 1usize..64,
            claimed in 1usize..=64,
        ) {
            prop_assume!(count != claimed);
            let mut compressor = Compressor::default();
            let packed = compressor.pack(codec, &pages(&[7, 8], count)).expect("it pays");
            prop_assert!(Unpacker::default().unpack(codec, packed, claimed * PAGE).is_none());
        }

        #[test]
        fn arbitrary_pieces_never_panic(
            codec in codec(),
            packed in prop::collection::vec(any::<u8>(), 0..600),
            count in 1usize..=64,
        ) {
            let mut unpacker = Unpacker::default();
            let _ = unpacker.unpack(codec, &packed, count * PAGE);
            // A failed call leaves the unpacker usable.
            let raw = pages(&[3], count);
            let mut compressor = Compressor::default();
            let good = compressor.pack(codec, &raw).expect("it pays");
            prop_assert_eq!(unpacker.unpack(codec, good, raw.len()), Some(raw.as_slice()));
        }

        #[test]
        fn damaged_pieces_never_panic(
            codec in codec(),
            at in any::<prop::sample::Index>(),
            value in any::<u8>(),
        ) {
            let raw = pages(&[1, 500, 77], 8);
            let mut packed = Compressor::default().pack(codec, &raw).expect("it pays").to_vec();
            let at = at.index(packed.len());
            packed[at] = value;
            let mut unpacker = Unpacker::default();
            let unpacked = unpacker.unpack(codec, &packed, raw.len());
            prop_assert!(unpacked.is_none_or(|pages| pages.len() == raw.len()));
        }
    }

    #[test]
    fn incompressible_content_is_sent_raw() {
        let mut state = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(MAX_PIECE_BYTES)
        .collect();
        for codec in Codec::ALL {
            assert!(Compressor::default().pack(codec, &noise).is_none(), "{codec:?}");
            assert!(Compressor::default().pack(codec, &noise[..PAGE]).is_none(), "{codec:?}");
        }
    }

    #[test]
    fn a_trial_reports_what_would_be_sent() {
        let (ratios, shrinks) = try_codec(Codec::Zstd, &[pages(&[1, 2], 64), pages(&[3], 8)]);
        assert_eq!(shrinks.raw_bytes, 72 * PAGE as u64);
        assert!(shrinks.packed_bytes < shrinks.raw_bytes / 2, "{shrinks:?}");
        assert!(ratios.len() == 2 && ratios.iter().all(|ratio| *ratio < 0.5), "{ratios:?}");
        // Longer than a piece, so it stays raw.
        let (ratios, left) = try_codec(Codec::Lz4, &[vec![0; MAX_PIECE_BYTES + PAGE]]);
        assert_eq!((ratios, left.packed_bytes), (vec![1.0], left.raw_bytes));
        assert_eq!(try_codec(Codec::Lz4, &[]).1.raw_bytes, 0);
    }

    #[test]
    fn more_than_a_piece_is_refused() {
        for codec in Codec::ALL {
            assert!(Unpacker::default().unpack(codec, &[0; 10], MAX_PIECE_BYTES + PAGE).is_none());
        }
    }
}
