//! The source's streams beside the driver: data streams are connected, the control stream is read,
//! and its reports about units go to the board at once.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::Scope;
use std::time::Duration;

use godwit_lanes::{Incoming, StreamReceiver, StreamSender};
use godwit_ram::Region;
use godwit_wire::Message;

use super::worker::Worker;
use crate::board::Misaccounted;
use crate::drive::dispatch::{Closing, Dispatch};
use crate::drive::handshake::{Connect, Hello, say_hello};
use crate::drive::inbox::{Inbox, Input};
use crate::drive::referring::Referring;
use crate::encoding::Chooser;
use crate::failure::{Failure, FailureCode, lane_failure};
use crate::source::Event;
use godwit_types::Compression;

/// State shared by the data streams' threads.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub(super) regions: &'a [Arc<Region>],
    pub(super) dispatch: &'a Dispatch,
    pub(super) referring: &'a Referring,
    pub(super) inbox: &'a Inbox,
    /// Connects a stream of a lane.
    pub(super) connect: &'a Connect<'a>,
    /// The control stream's hello.
    pub(super) hello: Hello,
    pub(super) compression: Compression,
}

/// How long to wait for a message of the destination that says more than the failure to open a
/// stream.
const WORD_LIMIT: Duration = Duration::from_secs(5);

/// Opens the streams whose numbers arrive, each on a thread of its own, until the channel closes.
pub(super) fn open_streams<'scope>(
    scope: &'scope Scope<'scope, '_>,
    numbers: Receiver<usize>,
    shared: Shared<'scope>,
) {
    scope.spawn(move || {
        for number in numbers {
            scope.spawn(move || shared.run(number));
        }
    });
}

impl Shared<'_> {
    fn run(&self, number: usize) {
        let &Shared { regions, dispatch, referring, inbox, .. } = self;
        match self.open(number) {
            Ok(sender) => {
                let chooser = Chooser::new(self.compression).experienced(&referring.experience);
                Worker { number, sender, chooser, regions, dispatch, referring, inbox }.run();
            }
            Err(failure) => {
                tracing::warn!(stream = number, %failure, "cannot open a data stream");
                // Nothing was sent on it, so nothing has to be given back.
                dispatch.broken(number, &failure.detail);
                let is_last = matches!(
                    dispatch.closed(board_place(number), 0),
                    Ok(Closing::GivenBack { live: 0 })
                );
                // A destination that refuses the guest sends the reason on the control stream, and
                // accepts no further streams.
                if is_last && !dispatch.ends_within(WORD_LIMIT) {
                    inbox.put_now(Input::Machine(Event::LaneLost(failure)));
                }
            }
        }
    }

    /// Connects a data stream and performs its handshake.
    fn open(&self, number: usize) -> Result<StreamSender, Failure> {
        let (lane, segments) = self.dispatch.way_of(number);
        let stream = (self.connect)(lane, segments, &self.dispatch.connecting)?;
        self.dispatch.connected(number, &stream);
        let mut sender = stream.sender();
        let hello = Hello { stream: wire_number(number), ..self.hello };
        say_hello(&mut sender, &mut stream.receiver(), hello)?;
        self.dispatch.ready(number);
        Ok(sender)
    }
}

pub(super) fn board_place(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

/// Returns a data stream's number on the wire. Those numbers follow the control stream's.
pub(super) fn wire_number(number: usize) -> u16 {
    u16::try_from(number + 1).unwrap_or(u16::MAX)
}

/// Reads the control stream until it ends, or until a message that nothing can follow. The end of a
/// finished migration is an event that nobody receives.
pub(super) fn read_control(
    mut receiver: StreamReceiver,
    inbox: &Inbox,
    dispatch: &Dispatch,
    referring: &Referring,
) {
    let (mut ready, mut page_in_ready, mut running) = (false, false, false);
    loop {
        let handled = match receiver.receive() {
            // At once: through the driver these would wait for a step of its sweep.
            Ok(Incoming::Message(Message::UnitsApplied { stream, units })) => board_number(stream)
                .and_then(|number| count(dispatch.applied(number, units)))
                .map(|all| {
                    if all {
                        inbox.moved();
                    }
                }),
            Ok(Incoming::Message(Message::StreamClosed { stream, units })) => {
                referring.forget_sent();
                stream_closed(stream, units, inbox, dispatch)
            }
            // Handled before the report that the unit is applied.
            Ok(Incoming::Message(Message::Missing { runs })) => referring.missing(&runs),
            Ok(Incoming::Message(Message::Digests(digests))) => referring.add_digests(&digests),
            // The driver's inbox has no bound of its own: these messages come only as often as they
            // are requested.
            Ok(Incoming::Message(message)) => {
                let goes_on = match message {
                    Message::Pong { .. } => dispatch.pings.answered(),
                    // Requested once by each attempt, of which the policy makes one.
                    Message::PageInReady { .. } => !std::mem::replace(&mut page_in_ready, true),
                    Message::Ready => !std::mem::replace(&mut ready, true),
                    Message::Running(_) => !std::mem::replace(&mut running, true),
                    _ => {
                        // A refusal, or a forbidden message: nothing after it matters.
                        return inbox.put_now(Input::Lane(message));
                    }
                };
                if goes_on {
                    inbox.put_now(Input::Lane(message));
                    Ok(())
                } else {
                    let detail = format!(
                        "the destination sent a {:?} that was not requested",
                        message.kind()
                    );
                    Err(Failure::new(FailureCode::ProtocolBroken, detail))
                }
            }
            Ok(Incoming::Pages(_)) => {
                Err(Failure::new(FailureCode::ProtocolBroken, "the destination sent pages"))
            }
            Err(error) => Err(lane_failure(&error)),
        };
        if let Err(failure) = handled {
            return inbox.put_now(Input::Machine(Event::LaneLost(failure)));
        }
    }
}

fn stream_closed(
    stream: u16,
    units: u64,
    inbox: &Inbox,
    dispatch: &Dispatch,
) -> Result<(), Failure> {
    match count(dispatch.closed(board_number(stream)?, units))? {
        Closing::GivenBack { live } => {
            tracing::warn!(stream, live, "a data stream is closed: the others do its work");
            inbox.moved();
            let last = || Failure::new(FailureCode::LaneLost, "the last data stream broke");
            if live == 0 { Err(last()) } else { Ok(()) }
        }
        Closing::Nothing => Ok(()),
    }
}

fn board_number(stream: u16) -> Result<u16, Failure> {
    let none = || Failure::new(FailureCode::ProtocolBroken, "the control stream carries no pages");
    stream.checked_sub(1).ok_or_else(none)
}

fn count<T>(result: Result<T, Misaccounted>) -> Result<T, Failure> {
    result.map_err(|error| Failure::new(FailureCode::ProtocolBroken, error.to_string()))
}
