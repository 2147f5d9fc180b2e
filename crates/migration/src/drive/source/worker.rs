//! The thread of one data stream: it takes units from the board and sends them.

use std::sync::Arc;
use std::time::Instant;

use godwit_lanes::{LaneError, StreamSender, UnitPages};
use godwit_ram::{PAGE_SIZE, PageRange, Region, pages::page_count, push_merged};
use godwit_wire::Message;

use crate::board::Unit;
use crate::drive::dispatch::{Dispatch, Work};
use crate::drive::inbox::{Inbox, Input};
use crate::drive::referring::{OfStream, Referring};
use crate::encoding::Chooser;
use crate::failure::{Failure, FailureCode};
use crate::source::Event;

/// Thread of one data stream.
pub(crate) struct Worker<'a> {
    pub(crate) number: usize,
    pub(crate) sender: StreamSender,
    pub(crate) chooser: Chooser,
    pub(crate) regions: &'a [Arc<Region>],
    pub(crate) dispatch: &'a Dispatch,
    pub(crate) referring: &'a Referring,
    pub(crate) inbox: &'a Inbox,
}

impl Worker<'_> {
    pub(crate) fn run(mut self) {
        loop {
            let sent = match self.dispatch.next_work(self.number) {
                Work::Over => return,
                Work::Unit { unit, makes_room } => {
                    if makes_room {
                        self.inbox.moved();
                    }
                    self.send(unit)
                }
                Work::Padding(bytes) => self.pad(bytes),
                Work::Nothing => self.sender.pad(1).map(|()| 0),
            };
            match sent {
                Ok(bytes) => {
                    if self.dispatch.written(self.number, bytes) {
                        self.inbox.moved();
                    }
                }
                // Not the stream's fault: another one would fail too.
                Err(LaneError::Memory(why)) => {
                    let failed = Event::Failed(Failure::new(FailureCode::MemoryFailed, why));
                    return self.inbox.put_now(Input::Machine(failed));
                }
                Err(error) => {
                    tracing::warn!(stream = self.number, %error, "a data stream broke");
                    self.dispatch.broken(self.number, &error.to_string());
                    self.inbox.put_now(Input::StreamBroke { number: self.number });
                    return;
                }
            }
        }
    }

    fn pad(&mut self, bytes: u64) -> Result<u64, LaneError> {
        self.sender.pad(bytes)?;
        self.sender.send(&Message::UnitEnd)?;
        self.dispatch.totals.padded(bytes);
        Ok(bytes)
    }

    /// Sends a unit with its present content. Pages that hold only zeros are announced, not sent.
    fn send(&mut self, unit: Unit) -> Result<u64, LaneError> {
        let Some(region) = self.regions.get(usize::from(unit.block)) else {
            return Err(LaneError::Memory(format!("there is no RAM block {}", unit.block)));
        };
        // Before they are read: a later hash is of what they hold then.
        self.referring.forget_hashes(unit.block, &unit.pages);
        self.referring.forget_hashes(unit.block, &unit.zeros);
        let (mut full, mut zeros) = (Vec::with_capacity(unit.pages.len()), unit.zeros);
        for page in unit.pages.iter().flat_map(|run| run.first..run.end()) {
            let to = if region.is_zero(page) { &mut zeros } else { &mut full };
            push_merged(to, 0, PageRange { first: page, count: 1 });
        }
        let zero_pages = page_count(&zeros);
        let (round, hurry) = self.dispatch.round();
        self.chooser.prospect(self.referring.prospect(round));
        let plain = hurry || self.dispatch.is_content_only();
        let packing = self.chooser.packing(page_count(&full) * PAGE_SIZE, plain);
        self.referring.begins(packing, page_count(&full));
        // While the guest is paused, no later delta uses it, and each look would lengthen the
        // pause.
        if round > 0 && !hurry {
            self.referring.outdate(packing, unit.block, &full, &zeros);
        }
        let Worker { referring, dispatch, number, .. } = *self;
        let streams = dispatch.streams();
        let known = OfStream { referring, dispatch, stream: number, streams, round };
        let pages = UnitPages { round, block: unit.block, region, pages: &full, zeros: &zeros };
        // All delays of the unit count: the encoding has to make up for them.
        let begun = Instant::now();
        let sent = self.sender.unit(&pages, packing, Some(&known))?;
        self.chooser.sent(packing, &sent, begun.elapsed());
        self.referring.sent(&sent, &self.chooser);
        self.dispatch.totals.sent(&sent, zero_pages);
        Ok(sent.wire_bytes)
    }
}
