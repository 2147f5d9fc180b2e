//! Handshake of a stream: identity of the migration, and version of the protocol.

use std::time::{Duration, Instant};

use godwit_lanes::{Carries, Incoming, Interrupt, LaneError, Stream, StreamReceiver, StreamSender};
use godwit_wire::{CONTROL_STREAM, Message, MigrationId, SUPPORTED, VersionRange, negotiate};

use crate::failure::{Failure, FailureCode, lane_failure};

/// Connects a stream of a lane, for a given purpose.
pub type Connect<'a> = dyn Fn(usize, Carries, &Interrupt) -> Result<Stream, Failure> + Sync + 'a;

/// First message of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    /// The migration that the stream belongs to.
    pub migration: MigrationId,
    /// Its number; 0 is the control stream.
    pub stream: u16,
    /// Versions that the source speaks.
    pub versions: VersionRange,
}

/// Performs the source's side: sends the hello and waits for the answer.
///
/// # Errors
/// The lane broke, or the destination refused the stream.
pub fn say_hello(
    sender: &mut StreamSender,
    receiver: &mut StreamReceiver,
    hello: Hello,
) -> Result<u16, Failure> {
    let Hello { migration, stream, versions } = hello;
    if let Err(error) = sender.send(&Message::Hello { versions, migration, stream }) {
        // A destination that closed the connection has sent the reason before, if it did not accept
        // this host's certificate.
        let alert = receiver.receive().err().filter(|alert| matches!(alert, LaneError::Alert(_)));
        return Err(lane_failure(&alert.unwrap_or(error)));
    }
    match receiver.receive().map_err(|error| lane_failure(&error))? {
        Incoming::Message(Message::Welcome { version })
            if (versions.oldest..=versions.newest).contains(&version) =>
        {
            Ok(version)
        }
        Incoming::Message(Message::Welcome { version }) => {
            let VersionRange { oldest, newest } = versions;
            let detail = format!(
                "the destination answers in protocol version {version}; offered was {oldest} to \
                {newest}"
            );
            Err(Failure::new(FailureCode::VersionMismatch, detail))
        }
        Incoming::Message(Message::Refused(reason)) => Err(Failure::from_peer(&reason)),
        _ => Err(Failure::new(
            FailureCode::ProtocolBroken,
            "the destination does not answer the hello",
        )),
    }
}

/// Stream whose source has identified its migration.
#[derive(Debug)]
pub struct WelcomedStream {
    /// Its number; 0 is the control stream.
    pub number: u16,
    pub(crate) stream: Stream,
    pub(crate) sender: StreamSender,
    pub(crate) receiver: StreamReceiver,
}

impl WelcomedStream {
    /// Returns the stream, for callers that may have to close it.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

/// Performs the destination's side: reads the hello within `limit`, checks version and migration,
/// and answers. A stranger receives the reason for its refusal; the next stream may be the right
/// one.
///
/// # Errors
/// The lane broke, or the reason why the source was refused.
pub fn welcome(
    stream: Stream,
    expected: MigrationId,
    limit: Duration,
) -> Result<WelcomedStream, Failure> {
    stream.limit_silence(limit).map_err(|error| lane_failure(&error))?;
    let mut welcomed = WelcomedStream {
        number: CONTROL_STREAM,
        sender: stream.sender(),
        receiver: stream.receiver(),
        stream,
    };
    welcomed.receiver.limit_time(Some(Instant::now() + limit));
    let refusal = match welcomed.receiver.receive().map_err(|error| lane_failure(&error))? {
        Incoming::Message(Message::Hello { versions, migration, stream }) => {
            match check_hello(versions, migration, expected) {
                Ok(version) => {
                    welcomed.number = stream;
                    welcomed.receiver.limit_time(None);
                    let answer = Message::Welcome { version };
                    welcomed.sender.send(&answer).map_err(|error| lane_failure(&error))?;
                    return Ok(welcomed);
                }
                Err(refusal) => refusal,
            }
        }
        _ => Failure::new(FailureCode::ProtocolBroken, "the lane does not begin with a hello"),
    };
    // The peer may be gone already; the refusal matters to this side as well.
    let _ = welcomed.sender.send(&Message::Refused(refusal.to_reason()));
    welcomed.stream.finish_sending();
    Err(refusal)
}

fn check_hello(
    versions: VersionRange,
    migration: MigrationId,
    expected: MigrationId,
) -> Result<u16, Failure> {
    if migration != expected {
        // Only the source may know the ID expected here, so the message does not name it.
        let detail = format!("no migration {migration} is expected on this lane");
        return Err(Failure::new(FailureCode::UnknownMigration, detail));
    }
    negotiate(SUPPORTED, versions)
        .map_err(|error| Failure::new(FailureCode::VersionMismatch, error.to_string()))
}
