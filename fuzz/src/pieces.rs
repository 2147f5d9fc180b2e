//! Compressed pages and deltas.

use std::cell::RefCell;

use godwit_lanes::fuzzing::{PIECE_BYTES, Pieces};
use godwit_lanes::xor;
use godwit_wire::Codec;

const PAGE: usize = 4096;

thread_local! {
    /// State kept from one piece to the next, as on a stream.
    static PIECES: RefCell<Pieces> = RefCell::default();
}

pub fn run(data: &[u8]) {
    let Some((&[how, pages], bytes)) = data.split_first_chunk::<2>() else { return };
    let codec = Codec::ALL[usize::from(how & 1)];
    let raw_bytes = usize::from(pages) * PAGE;
    PIECES.with_borrow_mut(|pieces| {
        if how & 2 == 0 {
            let unpacked = pieces.unpack(codec, bytes, raw_bytes);
            assert!(unpacked.is_none_or(|raw| raw.len() == raw_bytes && raw_bytes <= PIECE_BYTES));
        } else {
            survives(pieces, codec, bytes, usize::from(pages % 5) * PAGE);
        }
    });
}

fn survives(pieces: &mut Pieces, codec: Codec, bytes: &[u8], raw_bytes: usize) {
    let mut raw = bytes.to_vec();
    raw.resize(raw_bytes, 0);
    if let Some(packed) = pieces.pack(codec, &raw).map(<[u8]>::to_vec) {
        assert_eq!(pieces.unpack(codec, &packed, raw.len()), Some(&raw[..]));
        assert_eq!(pieces.unpack(codec, &packed, raw.len() + PAGE), None);
    }
    let mut differing = raw.clone();
    xor(&mut differing, bytes);
    xor(&mut differing, bytes);
    assert_eq!(differing, raw);
}
