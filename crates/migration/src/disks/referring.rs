//! What of a chunk is named by its hash: whole units. The rest goes with its content.

use godwit_lanes::DiskPart;
use godwit_wire::{DISK_UNIT_BYTES, DiskReferences, MAX_DISK_REFERENCES};

/// Bytes of a unit.
pub(super) const UNIT_BYTES: usize = DISK_UNIT_BYTES as usize;

/// Splits parts of a chunk into references to whole units and all other parts.
pub(super) fn refer(
    disk: u16,
    parts: Vec<DiskPart<'_>>,
) -> (Vec<DiskReferences>, Vec<DiskPart<'_>>) {
    let (mut references, mut rest) = (Vec::new(), Vec::new());
    for part in parts {
        let DiskPart::Blocks { offset, bytes } = part else {
            rest.push(part);
            continue;
        };
        let until_unit = offset.next_multiple_of(UNIT_BYTES as u64) - offset;
        let head = usize::try_from(until_unit).unwrap_or(bytes.len()).min(bytes.len());
        let (head, aligned) = bytes.split_at(head);
        let (units, tail) = aligned.split_at(aligned.len() - aligned.len() % UNIT_BYTES);
        push_blocks(&mut rest, offset, head);
        let mut at = offset + head.len() as u64;
        for some in units.chunks(UNIT_BYTES * MAX_DISK_REFERENCES as usize) {
            let hashes = some.chunks_exact(UNIT_BYTES).map(|unit| *blake3::hash(unit).as_bytes());
            references.push(DiskReferences { disk, offset: at, hashes: hashes.collect() });
            at += some.len() as u64;
        }
        push_blocks(&mut rest, at, tail);
    }
    (references, rest)
}

fn push_blocks<'a>(parts: &mut Vec<DiskPart<'a>>, offset: u64, bytes: &'a [u8]) {
    if !bytes.is_empty() {
        parts.push(DiskPart::Blocks { offset, bytes });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::disks::parts::parts;

    #[test]
    fn a_part_of_a_unit_goes_with_its_content() {
        let bytes = vec![7; 3 * UNIT_BYTES];
        let offset = (5 * UNIT_BYTES - 512) as u64;
        let (references, rest) = refer(2, parts(offset, &bytes));
        let hash = *blake3::hash(&bytes[..UNIT_BYTES]).as_bytes();
        let named = DiskReferences { disk: 2, offset: offset + 512, hashes: vec![hash; 2] };
        assert_eq!(references, [named]);
        let blocks = |offset: u64, bytes| DiskPart::Blocks { offset, bytes };
        let behind = offset + 512 + 2 * UNIT_BYTES as u64;
        assert_eq!(rest, [blocks(offset, &bytes[..512]), blocks(behind, &bytes[512..UNIT_BYTES])]);
    }

    proptest! {
        #[test]
        fn references_and_the_rest_make_up_the_bytes(
            at in 0..1_u64 << 30,
            length in 0..(5 * UNIT_BYTES),
            marks in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut bytes = vec![0; length];
            marks.iter().filter(|_| length > 0).for_each(|mark| bytes[mark.index(length)] = 7);
            let (references, rest) = refer(0, parts(at, &bytes));
            let mut covered: Vec<(u64, u64)> = Vec::new();
            for named in references {
                prop_assert!(named.offset.is_multiple_of(UNIT_BYTES as u64));
                let from = usize::try_from(named.offset - at).unwrap();
                for (hash, unit) in named.hashes.iter().zip(bytes[from..].chunks(UNIT_BYTES)) {
                    prop_assert_eq!(blake3::hash(unit), *hash);
                }
                covered.push((named.offset, named.bytes()));
            }
            for part in rest {
                covered.push(match part {
                    DiskPart::Zeros { offset, bytes } => (offset, bytes),
                    DiskPart::Blocks { offset, bytes } => (offset, bytes.len() as u64),
                });
            }
            covered.sort_unstable();
            let mut end = at;
            for (offset, bytes) in covered {
                prop_assert_eq!(offset, end);
                end += bytes;
            }
            prop_assert_eq!(end, at + length as u64);
        }
    }
}
