//! QEMU's device state stream: the length of each section. Pure.
//!
//! A section has a header with its number and its name, and ends with a footer that repeats the
//! number (migration/savevm.c, QEMU 2.4 to 10.0). The lengths of sections are not in the stream, so
//! a section ends at the first footer with its number behind which another section begins.

use std::collections::BTreeMap;

/// Begins a stream: `QEVM` and version 3.
const HEAD: [u8; 8] = *b"QEVM\0\0\0\x03";
const END_OF_STREAM: u8 = 0;
/// Begins a section that is written in parts, as QEMU's RAM is.
const START: u8 = 1;
const FULL: u8 = 4;
const FOOTER: u8 = 0x7e;
/// Bytes of a footer.
const FOOTER_BYTES: usize = 5;

/// Returns the bytes of each section by its name; those of several with one name are added up.
/// What is between sections that could be read is left out.
pub(super) fn sections(stream: &[u8]) -> BTreeMap<String, usize> {
    let mut sections = BTreeMap::new();
    let mut at = HEAD.len();
    if !stream.starts_with(&HEAD) {
        return sections;
    }
    while at < stream.len() {
        match header(&stream[at..]) {
            Some((number, name)) => {
                let bytes = length(&stream[at..], number);
                *sections.entry(name).or_default() += bytes;
                at += bytes;
            }
            // A part of a section, or the machine's configuration at the start.
            None => at += 1,
        }
    }
    sections
}

/// Returns number and name of the section that begins here.
fn header(bytes: &[u8]) -> Option<(u32, String)> {
    if !matches!(bytes.first(), Some(&START | &FULL)) {
        return None;
    }
    let number = u32::from_be_bytes(bytes.get(1..5)?.try_into().ok()?);
    let length = usize::from(*bytes.get(5)?);
    let name = bytes.get(6..6 + length)?;
    let is_name = length > 1 && number < 0x1_0000 && name.iter().all(u8::is_ascii_graphic);
    Some((number, is_name.then(|| String::from_utf8_lossy(name).into_owned())?))
}

/// Returns the bytes of the section that begins here, with its footer.
fn length(bytes: &[u8], number: u32) -> usize {
    let mut footer = vec![FOOTER];
    footer.extend(number.to_be_bytes());
    let is_end = |at: &usize| {
        let rest = &bytes[at + FOOTER_BYTES..];
        let goes_on = matches!(rest.first(), None | Some(&END_OF_STREAM | &2 | &3 | &6 | &7));
        bytes[*at..].starts_with(&footer) && (goes_on || header(rest).is_some())
    };
    let end = (1..bytes.len().saturating_sub(FOOTER_BYTES - 1)).find(is_end);
    end.map_or(bytes.len(), |at| at + FOOTER_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_have_their_lengths() {
        let section = |kind: u8, number: u8, name: &str, content: &[u8]| {
            let mut bytes = vec![kind, 0, 0, 0, number, u8::try_from(name.len()).unwrap()];
            bytes.extend(name.as_bytes());
            bytes.extend([0; 8]);
            bytes.extend(content);
            bytes.extend([FOOTER, 0, 0, 0, number]);
            bytes
        };
        // Its content looks like its footer, but no section follows it.
        let gpu = section(FULL, 3, "virtio-gpu", &[FOOTER, 0, 0, 0, 3, 9, 9]);
        let timer = section(FULL, 4, "timer", &[]);
        let configuration = [7, 0, 0, 0, 3, b'p', b'c', b'1'];
        let stream = [&HEAD[..], &configuration, &gpu, &timer, &timer, &[END_OF_STREAM]].concat();
        let expected = [("timer", 2 * timer.len()), ("virtio-gpu", gpu.len())];
        assert_eq!(
            sections(&stream),
            expected.map(|(name, bytes)| (name.to_owned(), bytes)).into()
        );
        assert!(sections(b"something else").is_empty());
        for end in 0..stream.len() {
            let total: usize = sections(&stream[..end]).values().sum();
            assert!(total <= end);
        }
    }
}
