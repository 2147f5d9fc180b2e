//! Messages of the agent to the watchdog, and its answers: JSON, one line each, over a unix socket.
//!
//! The watchdog keeps running when the package is upgraded, so both sides ignore unknown fields.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ha::Guarded;

/// Most processes in a message.
pub(super) const MOST_PROCESSES: usize = 4096;
/// Longest line, in bytes. A process takes up to 34.
pub(super) const MOST_LINE_BYTES: usize = 256 << 10;

/// The watchdog's answer to each message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answer {
    /// Whether a watchdog of the kernel is open with the right timeout. While something is guarded,
    /// it is armed.
    pub(super) kernel: bool,
}

/// Form of [`Guarded`] on the socket.
#[derive(Serialize, Deserialize)]
struct Message {
    deadline_ns: Option<u64>,
    pids: Vec<(i32, u64)>,
}

/// Error of a message.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadMessage {
    #[error("it is no message of this protocol: {0}")]
    Json(#[from] serde_json::Error),
    #[error("it has {0} processes, and at most {most} are possible", most = MOST_PROCESSES)]
    Many(usize),
    #[error("{0} is not a process ID")]
    Pid(i32),
}

/// Returns the line, with its end.
pub(super) fn encode(guarded: &Guarded) -> Result<Vec<u8>, BadMessage> {
    check(&guarded.pids)?;
    // 2^64 ns are 584 years.
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    line(&Message { deadline_ns: guarded.deadline.map(nanos), pids: guarded.pids.clone() })
}

/// Reads a line, without its end.
pub(super) fn decode(line: &[u8]) -> Result<Guarded, BadMessage> {
    let Message { deadline_ns, pids } = serde_json::from_slice(line)?;
    check(&pids)?;
    Ok(Guarded { deadline: deadline_ns.map(Duration::from_nanos), pids })
}

/// Reads a line, and returns it as it is written. For the fuzz target.
pub(crate) fn again(read: &[u8]) -> Option<Vec<u8>> {
    let mut line = encode(&decode(read).ok()?).ok()?;
    line.pop();
    Some(line)
}

impl Answer {
    /// Returns the line, with its end.
    pub(super) fn encode(self) -> Result<Vec<u8>, BadMessage> {
        line(&self)
    }

    /// Reads a line, without its end.
    pub(super) fn decode(line: &[u8]) -> Result<Answer, BadMessage> {
        Ok(serde_json::from_slice(line)?)
    }
}

fn check(pids: &[(i32, u64)]) -> Result<(), BadMessage> {
    if pids.len() > MOST_PROCESSES {
        return Err(BadMessage::Many(pids.len()));
    }
    match pids.iter().find(|(pid, _)| *pid <= 0) {
        Some((pid, _)) => Err(BadMessage::Pid(*pid)),
        None => Ok(()),
    }
}

fn line(of: &impl Serialize) -> Result<Vec<u8>, BadMessage> {
    let mut line = serde_json::to_vec(of)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_has_a_fixed_form() {
        let deadline = Some(Duration::new(12, 5));
        let guarded = Guarded { deadline, pids: vec![(7, 99)] };
        let line = encode(&guarded).unwrap();
        assert_eq!(line, b"{\"deadline_ns\":12000000005,\"pids\":[[7,99]]}\n");
        let newer = br#"{"deadline_ns":null,"pids":[],"more":{"a":[1]}}"#;
        assert_eq!(decode(newer).unwrap(), Guarded::default());
        assert_eq!(Answer { kernel: true }.encode().unwrap(), b"{\"kernel\":true}\n");
    }

    #[test]
    fn messages_that_lie_are_refused() {
        for line in [
            &br#"{"deadline_ns":1,"pids":[[0,1]]}"#[..],
            br#"{"deadline_ns":1,"pids":[[-7,1]]}"#,
            br#"{"deadline_ns":-1,"pids":[]}"#,
            br#"{"deadline_ns":1}"#,
            br#"{"deadline_ns":1,"pids":[[1]]}"#,
            br#"{"deadline_ns":1e300,"pids":[]}"#,
            b"",
            b"[",
        ] {
            assert!(decode(line).is_err(), "{}", String::from_utf8_lossy(line));
        }
        let many = Guarded { deadline: None, pids: vec![(1, 1); MOST_PROCESSES + 1] };
        assert!(encode(&many).is_err());
        assert!(Answer::decode(b"{}").is_err());
    }

    #[test]
    fn the_longest_message_fits_in_a_line() {
        let pids = vec![(i32::MAX, u64::MAX); MOST_PROCESSES];
        let guarded = Guarded { deadline: Some(Duration::MAX), pids };
        assert!(encode(&guarded).unwrap().len() <= MOST_LINE_BYTES);
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(
            deadline in any::<Option<u64>>(),
            pids in prop::collection::vec((1..=i32::MAX, any::<u64>()), 0..50),
        ) {
            let guarded = Guarded { deadline: deadline.map(Duration::from_nanos), pids };
            let line = encode(&guarded).unwrap();
            let (end, line) = line.split_last().unwrap();
            prop_assert_eq!(*end, b'\n');
            prop_assert!(!line.contains(end));
            prop_assert_eq!(decode(line).unwrap(), guarded);
        }

        #[test]
        fn no_line_does_harm(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (decode(&line), Answer::decode(&line));
        }
    }
}
