//! Parts of a chunk: what is zero takes no space on the wire and none on the destination's disk.

use godwit_lanes::DiskPart;

/// Bytes that are examined together: a cluster of a qcow2 image, and a bit of a dirty bitmap.
const EXAMINED_BYTES: u64 = 64 << 10;
/// Bytes that are examined before the first one that is not zero ends the look.
const STEP_BYTES: usize = 64;

/// Splits bytes of a disk, which begin at this offset, into parts.
pub(super) fn parts(at: u64, bytes: &[u8]) -> Vec<DiskPart<'_>> {
    let (mut parts, mut rest, mut offset) = (Vec::new(), bytes, at);
    // Offset and first byte of the run of blocks before `rest`.
    let mut blocks: Option<(u64, usize)> = None;
    let place = |rest: &[u8]| bytes.len() - rest.len();
    while !rest.is_empty() {
        let until_next = EXAMINED_BYTES - offset % EXAMINED_BYTES;
        let (piece, after) = rest.split_at(rest.len().min(to_usize(until_next)));
        let length = piece.len() as u64;
        if is_zero(piece) {
            if let Some((offset, from)) = blocks.take() {
                parts.push(DiskPart::Blocks { offset, bytes: &bytes[from..place(rest)] });
            }
            match parts.last_mut() {
                Some(DiskPart::Zeros { bytes, .. }) => *bytes += length,
                _ => parts.push(DiskPart::Zeros { offset, bytes: length }),
            }
        } else {
            blocks.get_or_insert((offset, place(rest)));
        }
        (rest, offset) = (after, offset + length);
    }
    if let Some((offset, from)) = blocks {
        parts.push(DiskPart::Blocks { offset, bytes: &bytes[from..] });
    }
    parts
}

/// Returns the bytes that are zero, and those that are not.
pub(super) fn zero_and_other_bytes(parts: &[DiskPart<'_>]) -> (u64, u64) {
    parts.iter().fold((0, 0), |(zero, other), part| match part {
        DiskPart::Zeros { bytes, .. } => (zero + bytes, other),
        DiskPart::Blocks { bytes, .. } => (zero, other + bytes.len() as u64),
    })
}

/// Returns whether all bytes are zero. The loop over a step vectorises.
fn is_zero(bytes: &[u8]) -> bool {
    let all_or = |step: &[u8]| step.iter().fold(0, |all, byte| all | byte) == 0;
    let mut steps = bytes.chunks_exact(STEP_BYTES);
    all_or(steps.remainder()) && steps.all(all_or)
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP: usize = 64 << 10;

    fn zeros(offset: usize, bytes: usize) -> DiskPart<'static> {
        DiskPart::Zeros { offset: offset as u64, bytes: bytes as u64 }
    }

    #[test]
    fn a_byte_makes_a_block_of_what_is_around_it() {
        let mut bytes = vec![0; 4 * STEP];
        assert_eq!(parts(0, &bytes), [zeros(0, 4 * STEP)]);
        bytes[2 * STEP - 1] = 1;
        let block = DiskPart::Blocks { offset: STEP as u64, bytes: &bytes[STEP..2 * STEP] };
        assert_eq!(parts(0, &bytes), [zeros(0, STEP), block, zeros(2 * STEP, 2 * STEP)]);
        assert!(parts(0, &[]).is_empty());
    }

    proptest! {
        #[test]
        fn parts_make_up_the_bytes(
            at in 0..1u64 << 30,
            length in 0..6 * STEP,
            marks in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            let mut bytes = vec![0; length];
            marks.iter().filter(|_| length > 0).for_each(|mark| bytes[mark.index(length)] = 7);
            let parts = parts(at, &bytes);
            let (mut copy, mut offset) = (Vec::new(), at);
            for part in &parts {
                let begin = match part {
                    DiskPart::Zeros { offset, bytes } => {
                        copy.resize(copy.len() + to_usize(*bytes), 0);
                        *offset
                    }
                    DiskPart::Blocks { offset, bytes } => {
                        prop_assert!(bytes.contains(&7));
                        copy.extend_from_slice(bytes);
                        *offset
                    }
                };
                prop_assert_eq!(begin, offset);
                offset = at + copy.len() as u64;
            }
            let (zero, other) = zero_and_other_bytes(&parts);
            prop_assert_eq!(zero + other, length as u64);
            prop_assert_eq!(copy, bytes);
        }
    }
}
