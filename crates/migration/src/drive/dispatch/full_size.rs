//! The streams with full-size segments of a lane: their progress, and their closing if their
//! packets are lost.

use godwit_lanes::{Carries, Stream};

use super::stream_state::{FullSize, StreamState};
use super::{Dispatch, State};

impl State {
    fn full_size(&self, lane: usize) -> impl Iterator<Item = (usize, &StreamState)> {
        let is_one = move |(stream, one): &(usize, &StreamState)| {
            one.lane == lane && one.carries == Carries::Pages && !self.board.is_broken(*stream)
        };
        self.streams.iter().enumerate().filter(is_one)
    }
}

impl Dispatch {
    /// Returns the progress of the lane's streams with full-size segments.
    pub(crate) fn full_size(&self, lane: usize) -> Vec<FullSize> {
        let connected: Vec<(usize, Stream)> = self
            .lock()
            .full_size(lane)
            .filter_map(|(stream, one)| Some((stream, one.stream.clone()?)))
            .collect();
        // The kernel is queried without the lock: the query may have to wait for a sender.
        let look = |(stream, socket): (usize, Stream)| FullSize {
            stream,
            carried_bytes: socket.carried_bytes(),
            timeouts: socket.unanswered_timeouts(),
        };
        connected.into_iter().map(look).collect()
    }

    /// Returns whether the destination has welcomed a stream, or `None` if it is broken.
    pub(crate) fn is_ready(&self, stream: usize) -> Option<bool> {
        let state = self.lock();
        (!state.board.is_broken(stream)).then(|| state.streams[stream].ready)
    }

    /// Breaks all streams of the lane with full-size segments, because such segments are lost.
    pub(crate) fn break_full_size(&self, lane: usize) -> Vec<usize> {
        let mut state = self.lock();
        let broken: Vec<usize> = state.full_size(lane).map(|(stream, _)| stream).collect();
        for &number in &broken {
            let one = &mut state.streams[number];
            let socket = one.stream.as_ref();
            one.vanishing_mtu = socket.and_then(|socket| socket.path_mtu().ok());
            let way =
                socket.and_then(|socket| Some((socket.local().ok()?.ip(), socket.peer().ip())));
            let why =
                what_vanishes(way.map(|(from, to)| format!("{from} → {to}")), one.vanishing_mtu);
            tracing::warn!(
                stream = number,
                why,
                "a data stream is replaced by one with small packets"
            );
            state.break_off(number, &why);
        }
        drop(state);
        self.work.notify_all();
        broken
    }
}

fn what_vanishes(way: Option<String>, mtu: Option<u32>) -> String {
    let size = mtu.map_or_else(|| "a size".to_owned(), |mtu| format!("{mtu} bytes"));
    let way = way.map_or_else(String::new, |way| format!(" on the way {way}"));
    format!(
        "packets of {size}, as the MTU of this host's interface lets them be, vanish{way} while \
        small ones pass: the lane goes on with small ones; set the MTU of both hosts' interfaces \
        to what passes (`godwit probe` shows it), or let the network between them carry more"
    )
}
