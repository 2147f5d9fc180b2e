//! The source's streams beside the driver: data streams are connected, the control stream is read, and what it says of units goes
//! to the board at once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use godwit_lanes::{Incoming, Stream, StreamReceiver, StreamSender};
use godwit_ram::Region;
use godwit_wire::Message;

use crate::board::Misaccounted;
use crate::drive::dispatch::Dispatch;
use crate::drive::{Events, Hello, HypervisorEvent, Inbox, Input, lane_failure, say_hello};
use crate::failure::{Failure, FailureCode};
use crate::source::Event;

/// What the data streams' threads share beside the work.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub(super) regions: &'a [Arc<Region>],
    /// The streams that are connected, to be closed at the end.
    pub(super) data: &'a Mutex<Vec<Stream>>,
}

/// A data stream, connected and welcome.
pub(super) fn open(
    number: usize,
    connect: &(dyn Fn(usize) -> Result<Stream, Failure> + Sync),
    hello: Hello,
    shared: &Shared<'_>,
) -> Result<StreamSender, Failure> {
    let stream = connect(number)?;
    shared.data.lock().unwrap_or_else(PoisonError::into_inner).push(stream.clone());
    let mut sender = stream.sender();
    say_hello(&mut sender, &mut stream.receiver(), hello)?;
    Ok(sender)
}

pub(super) fn board_place(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

/// The data streams' numbers on the wire come after the control stream's.
pub(super) fn wire_number(number: usize) -> u16 {
    u16::try_from(number + 1).unwrap_or(u16::MAX)
}

/// Reads the control stream until it ends. The end of a finished migration is an event that nobody takes.
pub(super) fn read_control(mut receiver: StreamReceiver, inbox: &Inbox, dispatch: &Dispatch) {
    loop {
        let told = match receiver.receive() {
            // By way of the driver these would wait for a sweep to end, which may wait for them.
            Ok(Incoming::Message(Message::UnitsApplied { stream, units })) => {
                board_number(stream).and_then(|number| count(dispatch.applied(number, units))).map(|all| {
                    if all {
                        inbox.put_now(Input::Moved);
                    }
                })
            }
            Ok(Incoming::Message(Message::StreamClosed { stream, units })) => board_number(stream)
                .and_then(|number| count(dispatch.closed(number, units)))
                .and_then(|left| {
                    tracing::warn!(stream, left, "a data stream is closed: the others do its work");
                    inbox.put_now(Input::Moved);
                    let last = || Failure::new(FailureCode::LaneLost, "the last data stream broke");
                    if left == 0 { Err(last()) } else { Ok(()) }
                }),
            Ok(Incoming::Message(message)) => {
                inbox.put_now(Input::Lane(message));
                Ok(())
            }
            Ok(Incoming::Pages(_)) => {
                Err(Failure::new(FailureCode::ProtocolBroken, "the destination sent pages"))
            }
            Err(error) => Err(lane_failure(&error)),
        };
        if let Err(failure) = told {
            return inbox.put_now(Input::Machine(Event::LaneLost(failure)));
        }
    }
}

fn board_number(stream: u16) -> Result<u16, Failure> {
    let none = || Failure::new(FailureCode::ProtocolBroken, "the control stream carries no pages");
    stream.checked_sub(1).ok_or_else(none)
}

fn count<T>(told: Result<T, Misaccounted>) -> Result<T, Failure> {
    told.map_err(|error| Failure::new(FailureCode::ProtocolBroken, error.to_string()))
}

/// Takes what has come during a sweep. A broken stream's work is waited for by the sweep: it is told at once. True: the sweep
/// is pointless.
pub(super) fn interrupted(
    events: &Events,
    waiting: &mut VecDeque<(Instant, Input)>,
    sender: &mut StreamSender,
) -> Result<bool, Failure> {
    for (at, input) in events.receiver.try_iter() {
        match input {
            Input::StreamBroke { number } => {
                let message = Message::CloseStream { stream: wire_number(number) };
                sender.send(&message).map_err(|error| lane_failure(&error))?;
            }
            other => waiting.push_back((at, other)),
        }
    }
    Ok(waiting.iter().any(|(_, input)| interrupts(input)))
}

/// Whether a round under way is pointless once this has come.
fn interrupts(input: &Input) -> bool {
    match input {
        Input::Machine(event) => {
            matches!(
                event,
                Event::CancelRequested | Event::LaneLost(_) | Event::Failed(_) | Event::PeerRefused(_)
            )
        }
        Input::Hypervisor(event) => matches!(event, HypervisorEvent::Failed(_)),
        Input::Lane(message) => {
            !matches!(message, Message::Pong { .. } | Message::Ready | Message::Running(_))
        }
        Input::Moved | Input::StreamBroke { .. } => false,
    }
}
