//! Frames: header and payload. A decoded frame is encoded to the same bytes.

use godwit_wire::{BlockRun, FrameHeader, HEADER_LEN, Kind, Message, PagesHeader, checksum};

/// Decodes a kind, a length for frames whose payload does not come with the message, and a payload.
/// Corrects the checksums, because otherwise no code behind them would run.
pub fn run(data: &[u8]) {
    if let Some(bytes) = data.first_chunk::<HEADER_LEN>() {
        let _ = FrameHeader::parse(bytes);
    }
    let Some((&[code, l0, l1, l2], payload)) = data.split_first_chunk::<4>() else { return };
    let Some(kind) = Kind::from_code(code) else { return };
    decode(kind, u32::from_le_bytes([l0, l1, l2, 0]), payload);
}

/// Decodes runs of pages, in each frame that has them, and made-up runs.
pub fn run_runs(data: &[u8]) {
    let Some((&which, payload)) = data.split_first() else { return };
    let kinds = [Kind::Zeros, Kind::Missing, Kind::Remaining, Kind::Fetch];
    decode(kinds[usize::from(which) % kinds.len()], 0, payload);
    let number = |bytes: &[u8]| bytes.iter().fold(0_u64, |all, byte| all << 7 | u64::from(*byte));
    let made_up = |bytes: &[u8]| BlockRun {
        block: u16::from(bytes[0] % 64),
        first: number(&bytes[1..7]),
        count: number(&bytes[7..]) + 1,
    };
    let runs: Vec<BlockRun> = payload.chunks_exact(11).map(made_up).collect();
    if !runs.is_empty() {
        check_round_trip(&Message::Missing { runs });
    }
}

fn decode(kind: Kind, length: u32, payload: &[u8]) {
    let apart = matches!(kind, Kind::Pages | Kind::CompressedPages);
    let length = if apart { length } else { u32::try_from(payload.len()).expect("short") };
    let header = FrameHeader { kind, length, sum: checksum(payload) };
    let Ok(parsed) = FrameHeader::parse(&header.to_bytes()) else { return };
    assert_eq!(parsed, header);
    let Ok(message) = Message::decode(header, payload) else { return };
    assert_eq!(message.kind(), kind);
    let encoded = check_round_trip(&message);
    // Numbers of variable length, text and padding may be encoded differently.
    let free = matches!(
        message,
        Message::Zeros(_)
            | Message::Missing { .. }
            | Message::Remaining { .. }
            | Message::Fetch { .. }
            | Message::Refused(_)
            | Message::Abort(_)
            | Message::Padding { .. }
    );
    if !free {
        assert_eq!(encoded[..HEADER_LEN], header.to_bytes());
        assert_eq!(&encoded[HEADER_LEN..], payload);
    }
}

/// Returns the message's bytes.
fn check_round_trip(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    let taken = message.encode(&mut bytes);
    let header = FrameHeader::parse(bytes.first_chunk().expect("a header")).expect("within bounds");
    let again = Message::decode(header, &bytes[HEADER_LEN..]).expect("encoded before");
    match (&again, message) {
        (Message::Zeros(again), Message::Zeros(before)) => {
            assert_eq!((again.round, &again.runs[..]), (before.round, &before.runs[..taken]));
        }
        (Message::Missing { runs: again }, Message::Missing { runs })
        | (Message::Remaining { runs: again }, Message::Remaining { runs })
        | (Message::Fetch { runs: again }, Message::Fetch { runs }) => {
            assert_eq!(again[..], runs[..taken])
        }
        (Message::Refused(again), Message::Refused(before))
        | (Message::Abort(again), Message::Abort(before)) => {
            assert_eq!(again.code, before.code);
            assert!(
                before.detail.starts_with(&again.detail)
                    && !again.detail.contains(char::is_control)
            );
        }
        (Message::Pages(again), Message::Pages(before)) => {
            assert_eq!(again, before);
            assert_eq!(bytes.len(), PagesHeader::LEN);
        }
        (again, before) => assert_eq!(again, before),
    }
    bytes
}
