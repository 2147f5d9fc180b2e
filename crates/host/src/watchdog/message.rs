//! Messages of the agent to the watchdog, and its answers: JSON, one line each, over a unix socket.
//!
//! A message has groups of processes, each with a deadline of its own: first that of the host's
//! term, then those of VMs that agents alone protect. The watchdog keeps running when the package
//! is upgraded, so both sides ignore unknown fields: a watchdog of version 1 guards the first group
//! only, and the agent sees its version in the answer.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ha::Guarded;

/// Version of the messages: from 2 on, there can be several groups.
pub(super) const VERSION: u32 = 2;
/// Most groups in a message.
pub(super) const MOST_GROUPS: usize = 256;
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
    /// Version of the process that answers.
    #[serde(default = "first_version")]
    pub(super) version: u32,
}

fn first_version() -> u32 {
    1
}

/// A message on the socket: the first group, and the others.
#[derive(Serialize, Deserialize)]
struct Message {
    deadline_ns: Option<u64>,
    pids: Vec<(i32, u64)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    others: Vec<Group>,
}

/// Form of [`Guarded`] on the socket.
#[derive(Serialize, Deserialize)]
struct Group {
    deadline_ns: Option<u64>,
    pids: Vec<(i32, u64)>,
}

impl From<&Guarded> for Group {
    fn from(guarded: &Guarded) -> Self {
        // 2^64 ns are 584 years.
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Group { deadline_ns: guarded.deadline.map(nanos), pids: guarded.pids.clone() }
    }
}

impl From<Group> for Guarded {
    fn from(Group { deadline_ns, pids }: Group) -> Self {
        Guarded { deadline: deadline_ns.map(Duration::from_nanos), pids }
    }
}

/// Error of a message.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadMessage {
    #[error("it is no message of this protocol: {0}")]
    Json(#[from] serde_json::Error),
    #[error("it has {0} processes, and at most {most} are possible", most = MOST_PROCESSES)]
    Many(usize),
    #[error("it has {0} groups, and at most {most} are possible", most = MOST_GROUPS)]
    ManyGroups(usize),
    #[error("{0} is not a process ID")]
    Pid(i32),
}

/// Returns the line, with its end. Without a group, nothing is guarded.
pub(super) fn encode(groups: &[Guarded]) -> Result<Vec<u8>, BadMessage> {
    check(groups)?;
    let mut groups = groups.iter().map(Group::from);
    let first = groups.next().unwrap_or_else(|| Group::from(&Guarded::default()));
    let Group { deadline_ns, pids } = first;
    line(&Message { deadline_ns, pids, others: groups.collect() })
}

/// Reads a line, without its end. Returns at least one group.
pub(super) fn decode(line: &[u8]) -> Result<Vec<Guarded>, BadMessage> {
    let Message { deadline_ns, pids, others } = serde_json::from_slice(line)?;
    let mut groups = vec![Guarded::from(Group { deadline_ns, pids })];
    groups.extend(others.into_iter().map(Guarded::from));
    check(&groups)?;
    Ok(groups)
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

fn check(groups: &[Guarded]) -> Result<(), BadMessage> {
    if groups.len() > MOST_GROUPS {
        return Err(BadMessage::ManyGroups(groups.len()));
    }
    let processes: usize = groups.iter().map(|group| group.pids.len()).sum();
    if processes > MOST_PROCESSES {
        return Err(BadMessage::Many(processes));
    }
    match groups.iter().flat_map(|group| &group.pids).find(|(pid, _)| *pid <= 0) {
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
        let line = encode(std::slice::from_ref(&guarded)).unwrap();
        assert_eq!(line, b"{\"deadline_ns\":12000000005,\"pids\":[[7,99]]}\n");
        let line = encode(&[Guarded::default(), guarded]).unwrap();
        let expected = br#"{"deadline_ns":null,"pids":[],"others":[{"deadline_ns":12000000005,"#;
        assert!(line.starts_with(expected), "{}", String::from_utf8_lossy(&line));
        let newer = br#"{"deadline_ns":null,"pids":[],"more":{"a":[1]}}"#;
        assert_eq!(decode(newer).unwrap(), [Guarded::default()]);
        assert_eq!(decode(&encode(&[]).unwrap()).unwrap(), [Guarded::default()]);
        let answer = Answer { kernel: true, version: VERSION };
        assert_eq!(answer.encode().unwrap(), b"{\"kernel\":true,\"version\":2}\n");
        let older = Answer { kernel: true, version: 1 };
        assert_eq!(Answer::decode(br#"{"kernel":true}"#).unwrap(), older);
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
            br#"{"deadline_ns":1,"pids":[],"others":[{"deadline_ns":1}]}"#,
            br#"{"deadline_ns":1,"pids":[],"others":[{"deadline_ns":1,"pids":[[0,1]]}]}"#,
            br#"{"deadline_ns":1,"pids":[],"others":{}}"#,
            b"",
            b"[",
        ] {
            assert!(decode(line).is_err(), "{}", String::from_utf8_lossy(line));
        }
        let half = Guarded { deadline: None, pids: vec![(1, 1); MOST_PROCESSES / 2 + 1] };
        assert!(encode(std::slice::from_ref(&half)).is_ok());
        assert!(matches!(encode(&[half.clone(), half]), Err(BadMessage::Many(_))));
        let groups = vec![Guarded::default(); MOST_GROUPS + 1];
        assert!(matches!(encode(&groups), Err(BadMessage::ManyGroups(_))));
        assert!(Answer::decode(b"{}").is_err());
    }

    #[test]
    fn the_longest_message_fits_in_a_line() {
        let pids = vec![(i32::MAX, u64::MAX); MOST_PROCESSES / MOST_GROUPS];
        let groups = vec![Guarded { deadline: Some(Duration::MAX), pids }; MOST_GROUPS];
        assert!(encode(&groups).unwrap().len() <= MOST_LINE_BYTES);
    }

    fn group() -> impl Strategy<Value = Guarded> {
        let pids = prop::collection::vec((1..=i32::MAX, any::<u64>()), 0..50);
        (any::<Option<u64>>(), pids).prop_map(|(deadline, pids)| Guarded {
            deadline: deadline.map(Duration::from_nanos),
            pids,
        })
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(
            groups in prop::collection::vec(group(), 1..5),
        ) {
            let line = encode(&groups).unwrap();
            let (end, line) = line.split_last().unwrap();
            prop_assert_eq!(*end, b'\n');
            prop_assert!(!line.contains(end));
            prop_assert_eq!(decode(line).unwrap(), groups);
        }

        #[test]
        fn no_line_does_harm(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (decode(&line), Answer::decode(&line));
        }
    }
}
