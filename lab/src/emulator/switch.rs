//! The emulator's switch: a frame enters at one time and leaves at a later time. A pure state
//! machine, no I/O, no clock.
//!
//! # The model
//! Each host is connected to one port. A frame that a host sends
//! 1. waits, if flows have a cap, until the earlier frames of its TCP flow have left at the rate of
//!    the cap,
//! 2. may be lost (each frame independently),
//! 3. takes the one-way delay,
//! 4. then waits in the queue of its output port and is sent from there at the port's rate.
//!
//! A host's own sending rate is not shaped here but by its NIC's queueing discipline (HTB), as on a
//! real host: there the kernel throttles a socket (TCP small queues) before it drops, which a
//! switch cannot do. Such a discipline passes a train of packets at once and then waits. So a
//! train's first bit arrives after the delay alone, and its last one after delay and serialisation,
//! as on a wire.
//!
//! # The queues
//! The queues of flows and ports work alike: drop-tail, bounded in time. A frame whose first bit
//! would wait longer than the queue's limit is dropped. The limit is one round-trip time and 50 ms
//! at the port's rate: a bandwidth-delay product, which a loss-based congestion control needs to
//! keep the link full after it halves its window, and in addition what an ordinary switch has for
//! bursts. Bytes in flight (the delay) occupy no queue. A port without a rate has no queue, and its
//! bytes in flight are bounded in bytes instead.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use crate::emulator::frame::{Flow, FrameHeader, Mac, is_group};
use crate::random::Random;
use crate::units::{BitRate, Loss, Rtt};

/// Capacity of a queue above one bandwidth-delay product.
pub const QUEUE_ABOVE_RTT: Duration = Duration::from_millis(50);
/// Maximum bytes in flight to one port: 10 Gb/s for 200 ms. It only limits memory use.
const MAX_BYTES_TO_PORT: u64 = 256 << 20;
/// Maximum addresses learned; a lab has a few per host. Beyond it frames are flooded.
const MAX_ADDRESSES: usize = 4096;
/// Maximum flows known at a time; a lab has some hundreds. Beyond it frames of further flows do not
/// wait.
const MAX_FLOWS: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkModel {
    /// Rate of each output port; `None`: as fast as the machine.
    pub rate: Option<BitRate>,
    /// Round-trip time between two hosts; each direction takes half of it.
    pub rtt: Rtt,
    /// Loss of each direction.
    pub loss: Loss,
    /// Maximum rate of each TCP flow; `None`: all of the link.
    pub flow_cap: Option<BitRate>,
}

impl LinkModel {
    /// Returns the longest time that a frame may wait in the queue of its flow, and again in that
    /// of its output port.
    #[must_use]
    pub fn queue_limit(&self) -> Duration {
        self.rtt.duration() + QUEUE_ABOVE_RTT
    }
}

/// Counters of one output port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames sent out.
    pub frames: u64,
    /// Their bytes on the wire.
    pub wire_bytes: u64,
    /// Frames dropped because the queue was full.
    pub dropped: u64,
    /// Frames lost deliberately.
    pub lost: u64,
}

struct InFlight<F> {
    due_ns: u64,
    wire_bytes: u64,
    frame: Rc<F>,
}

struct Port<F> {
    /// Ordered by due time: the delay is the same for all, and a port sends one frame after the
    /// other.
    in_flight: VecDeque<InFlight<F>>,
    bytes_in_flight: u64,
    /// Time until which the port is busy with the frames that it has accepted.
    busy_until_ns: u64,
    counters: PortCounters,
}

/// Frame in the queue of its flow.
struct Held<F> {
    from: usize,
    header: FrameHeader,
    frame: F,
}

/// Switch. `F` is the carrier of a frame; its ports share a flooded one.
pub struct Switch<F> {
    model: LinkModel,
    ports: Vec<Port<F>>,
    addresses: HashMap<Mac, usize>,
    /// Time until which each flow is busy with the frames that it has sent.
    flows: HashMap<Flow, u64>,
    /// Frames in the queues of the flows, by the time when they leave the queue (nanoseconds) and
    /// their number.
    held: BTreeMap<(u64, u64), Held<F>>,
    held_so_far: u64,
    random: Random,
}

impl<F> Switch<F> {
    /// Creates a switch of `ports` ports; `seed` determines which frames are lost.
    #[must_use]
    pub fn new(ports: usize, model: LinkModel, seed: u64) -> Switch<F> {
        let port = || Port {
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            busy_until_ns: 0,
            counters: PortCounters::default(),
        };
        Switch {
            model,
            ports: (0..ports).map(|_| port()).collect(),
            addresses: HashMap::new(),
            flows: HashMap::new(),
            held: BTreeMap::new(),
            held_so_far: 0,
            random: Random::new(seed),
        }
    }

    /// Accepts a frame that arrived at port `from` at `now_ns`. Times must not run backwards.
    pub fn accept(&mut self, now_ns: u64, from: usize, header: &FrameHeader, frame: F) {
        self.release(now_ns);
        self.learn(header.source, from);
        match (self.model.flow_cap, header.flow) {
            (Some(cap), Some(flow)) if self.has_room_for(now_ns, flow) => {
                self.hold(now_ns, cap, flow, Held { from, header: *header, frame });
            }
            _ => self.forward(now_ns, from, header, frame),
        }
    }

    /// Returns whether the flow is known or can be. To make room, flows without waiting frames are
    /// forgotten.
    fn has_room_for(&mut self, now_ns: u64, flow: Flow) -> bool {
        if self.flows.len() >= MAX_FLOWS && !self.flows.contains_key(&flow) {
            self.flows.retain(|_, busy_until_ns| *busy_until_ns > now_ns);
        }
        self.flows.len() < MAX_FLOWS || self.flows.contains_key(&flow)
    }

    /// Puts a frame into the queue of its flow.
    fn hold(&mut self, now_ns: u64, cap: BitRate, flow: Flow, held: Held<F>) {
        let busy_until_ns = self.flows.entry(flow).or_insert(now_ns);
        let start_ns = now_ns.max(*busy_until_ns);
        if start_ns - now_ns > nanoseconds(self.model.queue_limit()) {
            if let Some(to) = self.port_of(held.header.destination) {
                self.ports[to].counters.dropped += 1;
            }
            return;
        }
        *busy_until_ns = start_ns + cap.serialisation_ns(held.header.wire_bytes);
        self.held.insert((*busy_until_ns, self.held_so_far), held);
        self.held_so_far += 1;
    }

    /// Forwards the frames that have left the queues of the flows by now. It comes before anything
    /// newer, so ports see times in order.
    fn release(&mut self, now_ns: u64) {
        while let Some(first) = self.held.first_entry()
            && first.key().0 <= now_ns
        {
            let ((released_ns, _), Held { from, header, frame }) = first.remove_entry();
            self.forward(released_ns, from, &header, frame);
        }
    }

    /// Returns the port through which a frame to `destination` leaves; `None`: all ports.
    fn port_of(&self, destination: Mac) -> Option<usize> {
        self.addresses.get(&destination).copied().filter(|_| !is_group(destination))
    }

    fn forward(&mut self, now_ns: u64, from: usize, header: &FrameHeader, frame: F) {
        let frame = Rc::new(frame);
        match self.port_of(header.destination) {
            Some(to) if to == from => {}
            Some(to) => self.enqueue(now_ns, to, header.wire_bytes, frame),
            None => {
                for to in (0..self.ports.len()).filter(|to| *to != from) {
                    self.enqueue(now_ns, to, header.wire_bytes, Rc::clone(&frame));
                }
            }
        }
    }

    /// Returns when the next frame is due to leave or to move on inside, if one is in flight.
    #[must_use]
    pub fn next_due_ns(&self) -> Option<u64> {
        let leaving =
            self.ports.iter().filter_map(|port| port.in_flight.front()).map(|first| first.due_ns);
        let held = self.held.first_key_value().map(|((released_ns, _), _)| *released_ns);
        leaving.chain(held).min()
    }

    /// Returns the next frame that is due at `now_ns`, with the port that it leaves from. Frames of
    /// a port come in order.
    pub fn take_due(&mut self, now_ns: u64) -> Option<(usize, Rc<F>)> {
        self.release(now_ns);
        let is_due =
            |port: &Port<F>| port.in_flight.front().is_some_and(|first| first.due_ns <= now_ns);
        let index = self.ports.iter().position(is_due)?;
        let port = &mut self.ports[index];
        let first = port.in_flight.pop_front()?;
        port.bytes_in_flight -= first.wire_bytes;
        port.counters.frames += 1;
        port.counters.wire_bytes += first.wire_bytes;
        Some((index, first.frame))
    }

    /// Returns the counters of each output port, in the order of the ports.
    #[must_use]
    pub fn counters(&self) -> Vec<PortCounters> {
        self.ports.iter().map(|port| port.counters).collect()
    }

    fn learn(&mut self, source: Mac, from: usize) {
        if is_group(source)
            || (self.addresses.len() >= MAX_ADDRESSES && !self.addresses.contains_key(&source))
        {
            return;
        }
        self.addresses.insert(source, from);
    }

    fn enqueue(&mut self, now_ns: u64, to: usize, wire_bytes: u64, frame: Rc<F>) {
        let lost = is_lost(&mut self.random, self.model.loss);
        let limit_ns = nanoseconds(self.model.queue_limit());
        let port = &mut self.ports[to];
        if lost {
            port.counters.lost += 1;
            return;
        }
        let arrival_ns = now_ns + nanoseconds(self.model.rtt.one_way());
        let start_ns = arrival_ns.max(port.busy_until_ns);
        if start_ns - arrival_ns > limit_ns || port.bytes_in_flight + wire_bytes > MAX_BYTES_TO_PORT
        {
            port.counters.dropped += 1;
            return;
        }
        let due_ns = start_ns + self.model.rate.map_or(0, |rate| rate.serialisation_ns(wire_bytes));
        port.busy_until_ns = due_ns;
        port.bytes_in_flight += wire_bytes;
        port.in_flight.push_back(InFlight { due_ns, wire_bytes, frame });
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns whether a frame is lost: a few operations per frame, and the same losses for the same
/// seed.
fn is_lost(random: &mut Random, loss: Loss) -> bool {
    !loss.is_none() && random.next() % 1_000_000 < u64::from(loss.parts_per_million())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: Mac = [2, 0, 0, 0, 0, 1];
    const B: Mac = [2, 0, 0, 0, 0, 2];
    const BROADCAST: Mac = [0xff; 6];
    const MS: u64 = 1_000_000;

    fn model(rate: Option<&str>, rtt: &str, loss: &str) -> LinkModel {
        LinkModel {
            rate: rate.map(|rate| rate.parse().unwrap()),
            rtt: rtt.parse().unwrap(),
            loss: loss.parse().unwrap(),
            flow_cap: None,
        }
    }

    fn header(source: Mac, destination: Mac, wire_bytes: u64) -> FrameHeader {
        FrameHeader { destination, source, flow: None, wire_bytes }
    }

    /// Returns the header of a frame from A to B of the TCP flow with that number.
    fn of_flow(number: u8, wire_bytes: u64) -> FrameHeader {
        FrameHeader { flow: Some(Flow::numbered(number)), ..header(A, B, wire_bytes) }
    }

    /// Returns a switch with two hosts whose addresses it knows.
    fn two_hosts(model: LinkModel) -> Switch<u64> {
        let mut switch = Switch::new(2, model, 1);
        switch.learn(A, 0);
        switch.learn(B, 1);
        switch
    }

    fn drain(switch: &mut Switch<u64>) -> Vec<(u64, usize, u64)> {
        let mut out = Vec::new();
        while let Some(due) = switch.next_due_ns() {
            while let Some((port, frame)) = switch.take_due(due) {
                out.push((due, port, *frame));
            }
        }
        out
    }

    #[test]
    fn unknown_and_group_addresses_are_flooded_and_senders_learnt() {
        let mut switch: Switch<u64> = Switch::new(3, model(None, "0", "0"), 1);
        switch.accept(0, 0, &header(A, BROADCAST, 60), 1);
        switch.accept(0, 2, &header(B, A, 60), 2);
        switch.accept(0, 1, &header([2; 6], [4; 6], 60), 3);
        switch.accept(0, 0, &header(A, A, 60), 4);
        let mut out = drain(&mut switch);
        out.sort_unstable();
        assert_eq!(out, [(0, 0, 2), (0, 0, 3), (0, 1, 1), (0, 2, 1), (0, 2, 3)]);
    }

    #[test]
    fn an_address_that_moves_is_followed() {
        let mut switch: Switch<u64> = Switch::new(3, model(None, "0", "0"), 1);
        switch.accept(0, 1, &header(A, BROADCAST, 60), 1);
        switch.accept(0, 2, &header(A, BROADCAST, 60), 2);
        drain(&mut switch);
        switch.accept(1, 0, &header(B, A, 60), 3);
        assert_eq!(drain(&mut switch), [(1, 2, 3)]);
    }

    #[test]
    fn each_direction_takes_half_the_round_trip() {
        let mut switch = two_hosts(model(None, "10ms", "0"));
        switch.accept(7, 0, &header(A, B, 1514), 1);
        assert_eq!(switch.next_due_ns(), Some(5 * MS + 7));
        assert!(switch.take_due(5 * MS + 6).is_none());
        assert_eq!(drain(&mut switch), [(5 * MS + 7, 1, 1)]);
    }

    #[test]
    fn frames_leave_at_the_rate_of_the_port() {
        let mut switch = two_hosts(model(Some("1gbit"), "10ms", "0"));
        for frame in 0..3 {
            switch.accept(0, 0, &header(A, B, 1514), frame);
        }
        let times: Vec<u64> = drain(&mut switch).iter().map(|(due, ..)| *due).collect();
        assert_eq!(times, [5 * MS + 12_112, 5 * MS + 24_224, 5 * MS + 36_336]);
    }

    #[test]
    fn the_two_directions_do_not_wait_for_each_other() {
        let mut switch = two_hosts(model(Some("1mbit"), "0", "0"));
        switch.accept(0, 0, &header(A, B, 1000), 1);
        switch.accept(0, 1, &header(B, A, 1000), 2);
        let times: Vec<u64> = drain(&mut switch).iter().map(|(due, ..)| *due).collect();
        assert_eq!(times, [8 * MS, 8 * MS]);
    }

    #[test]
    fn a_full_queue_drops_at_the_tail_and_recovers() {
        // 8 ms per frame, 10 + 50 ms of queue: the first frame does not wait, and the eighth waits
        // 56 ms.
        let mut switch = two_hosts(model(Some("1mbit"), "10ms", "0"));
        for frame in 0..20 {
            switch.accept(0, 0, &header(A, B, 1000), frame);
        }
        assert_eq!(drain(&mut switch).len(), 8);
        assert_eq!(
            switch.counters()[1],
            PortCounters { frames: 8, wire_bytes: 8000, dropped: 12, lost: 0 }
        );
        switch.accept(100 * MS, 0, &header(A, B, 1000), 99);
        assert_eq!(drain(&mut switch), [(113 * MS, 1, 99)]);
    }

    #[test]
    fn a_flow_waits_for_itself_alone() {
        let cap = Some("1mbit".parse().unwrap());
        let mut switch = two_hosts(LinkModel { flow_cap: cap, ..model(None, "10ms", "0") });
        for (frame, flow) in [(0, 1), (1, 1), (2, 2)] {
            switch.accept(0, 0, &of_flow(flow, 1000), frame);
        }
        switch.accept(0, 0, &header(A, B, 1000), 3);
        // Frames without a flow do not wait; 1000 bytes of a flow take 8 ms, then all take the
        // delay of 5 ms.
        assert_eq!(
            drain(&mut switch),
            [(5 * MS, 1, 3), (13 * MS, 1, 0), (13 * MS, 1, 2), (21 * MS, 1, 1)]
        );
    }

    #[test]
    fn capped_flows_share_the_rate_of_the_port() {
        let cap = Some("1mbit".parse().unwrap());
        let mut switch = two_hosts(LinkModel { flow_cap: cap, ..model(Some("2mbit"), "0", "0") });
        for flow in 0..4 {
            switch.accept(0, 0, &of_flow(flow, 1000), u64::from(flow));
        }
        let times: Vec<u64> = drain(&mut switch).iter().map(|(due, ..)| *due).collect();
        assert_eq!(times, [12 * MS, 16 * MS, 20 * MS, 24 * MS]);
    }

    #[test]
    fn a_flows_full_queue_drops_and_recovers() {
        let cap = Some("1mbit".parse().unwrap());
        let mut switch = two_hosts(LinkModel { flow_cap: cap, ..model(None, "10ms", "0") });
        for frame in 0..20 {
            switch.accept(0, 0, &of_flow(1, 1000), frame);
        }
        assert_eq!(drain(&mut switch).len(), 8);
        assert_eq!(
            switch.counters()[1],
            PortCounters { frames: 8, wire_bytes: 8000, dropped: 12, lost: 0 }
        );
        switch.accept(100 * MS, 0, &of_flow(1, 1000), 99);
        assert_eq!(drain(&mut switch), [(113 * MS, 1, 99)]);
    }

    #[test]
    fn the_share_of_lost_frames_is_as_asked() {
        let mut switch = two_hosts(model(None, "0", "1%"));
        for frame in 0..100_000 {
            switch.accept(frame, 0, &header(A, B, 1514), frame);
        }
        let delivered = drain(&mut switch).len() as u64;
        let lost = switch.counters()[1].lost;
        assert_eq!(delivered + lost, 100_000);
        assert!((800..1200).contains(&lost), "{lost} of 100000 lost");
    }

    proptest! {
        /// Checks for any input: order is kept, no frame arrives early, the rate is never exceeded,
        /// the queue is bounded, and every frame is accounted for.
        #[test]
        fn the_link_keeps_its_promises(
            frames in prop::collection::vec((0_u64..2 * MS, 60_u64..68_000), 1..400),
            mbit in 1_u64..10_000,
            rtt_us in 0_u64..50_000,
        ) {
            let rate = BitRate::new(mbit * 1_000_000).unwrap();
            let rtt = Rtt::from(Duration::from_micros(rtt_us));
            let link = LinkModel { rate: Some(rate), rtt, loss: Loss::default(), flow_cap: None };
            let mut switch = two_hosts(link);
            let (mut now, mut sent) = (0, Vec::new());
            for (index, (pause, bytes)) in frames.iter().enumerate() {
                now += pause;
                switch.accept(now, 0, &header(A, B, *bytes), index as u64);
                sent.push((now, *bytes));
            }
            let out = drain(&mut switch);
            let counters = switch.counters()[1];
            prop_assert_eq!(counters.frames + counters.dropped, frames.len() as u64);
            let one_way = nanoseconds(rtt.one_way());
            let longest = one_way + nanoseconds(link.queue_limit()) + rate.serialisation_ns(68_000);
            let mut last: Option<(u64, u64)> = None;
            for (due, port, index) in out {
                let (at, bytes) = sent[usize::try_from(index).unwrap()];
                let serialisation = rate.serialisation_ns(bytes);
                prop_assert_eq!(port, 1);
                prop_assert!(due >= at + one_way + serialisation);
                prop_assert!(due <= at + longest);
                if let Some((last_due, last_index)) = last {
                    prop_assert!(index > last_index);
                    prop_assert!(due >= last_due + serialisation);
                }
                last = Some((due, index));
            }
        }

        /// Checks for any input: each flow's order is kept, none exceeds its cap, no frame waits
        /// longer than two full queues, and every frame is accounted for.
        #[test]
        fn flows_keep_to_their_cap(
            frames in prop::collection::vec((0_u64..2 * MS, 0_u8..4, 60_u64..68_000), 1..400),
            mbit in 1_u64..10_000,
            cap_mbit in 1_u64..1_000,
            rtt_us in 0_u64..50_000,
        ) {
            let [rate, cap] = [mbit, cap_mbit].map(|mbit| BitRate::new(mbit * 1_000_000).unwrap());
            let rtt = Rtt::from(Duration::from_micros(rtt_us));
            let flow_cap = Some(cap);
            let link = LinkModel { rate: Some(rate), rtt, loss: Loss::default(), flow_cap };
            let mut switch = two_hosts(link);
            let (mut now, mut sent, mut out) = (0, Vec::new(), Vec::new());
            for (index, (pause, flow, bytes)) in frames.iter().enumerate() {
                now += pause;
                // Part of it leaves while more arrives.
                while let Some(due) = switch.next_due_ns().filter(|due| *due <= now) {
                    out.extend(switch.take_due(due).map(|(_, frame)| (due, *frame)));
                }
                switch.accept(now, 0, &of_flow(*flow, *bytes), index as u64);
                sent.push((now, *flow, *bytes));
            }
            out.extend(drain(&mut switch).into_iter().map(|(due, _, frame)| (due, frame)));
            let counters = switch.counters()[1];
            prop_assert_eq!(counters.frames, out.len() as u64);
            prop_assert_eq!(counters.frames + counters.dropped, frames.len() as u64);
            let one_way = nanoseconds(rtt.one_way());
            let longest = one_way + 2 * nanoseconds(link.queue_limit())
                + rate.serialisation_ns(68_000) + cap.serialisation_ns(68_000);
            // For each flow: the last frame, and the earliest time when its next bit can have left
            // its queue.
            let mut flows: HashMap<u8, (u64, u64)> = HashMap::new();
            for (due, index) in out {
                let (at, flow, bytes) = sent[usize::try_from(index).unwrap()];
                let before = flows.get(&flow).copied();
                let (last, earliest) =
                    before.map_or((None, at), |(last, left)| (Some(last), left.max(at)));
                let left = earliest + cap.serialisation_ns(bytes);
                prop_assert!(last.is_none_or(|last| index > last));
                prop_assert!(due >= left + one_way + rate.serialisation_ns(bytes));
                prop_assert!(due <= at + longest);
                flows.insert(flow, (index, left));
            }
        }
    }
}
