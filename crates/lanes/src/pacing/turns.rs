//! Order of turns at a limit. Migrations take turns by the bytes that each has been given, whatever
//! the number of its streams. Within a migration, the first come is the first served. (This is
//! start-time fair queueing with the migrations as flows.)

use std::collections::VecDeque;

/// Bytes that a migration may catch up with after it had nothing to send for a moment.
const CREDIT_BYTES: u64 = 1 << 20;

/// Place in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

#[derive(Debug)]
struct Line<T> {
    migration: u64,
    /// Bytes given, counted from the others' level when the migration arrived.
    served: u64,
    waiting: VecDeque<(Ticket, T)>,
}

#[derive(Debug)]
pub(super) struct Turns<T> {
    lines: Vec<Line<T>>,
    /// Bytes that the migration served last had been given before.
    clock: u64,
    tickets: u64,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Turns { lines: Vec::new(), clock: 0, tickets: 0 }
    }
}

impl<T> Turns<T> {
    /// Takes a place: the last one in the migration's queue, or the first one for a stream that was
    /// away for a moment.
    pub(super) fn join(&mut self, migration: u64, first: bool, who: T) -> Ticket {
        let ticket = Ticket(self.tickets);
        self.tickets += 1;
        let oldest = self.clock.saturating_sub(CREDIT_BYTES);
        self.lines.retain(|line| !line.waiting.is_empty() || line.served > oldest);
        let known = self.lines.iter().position(|line| line.migration == migration);
        let place = known.unwrap_or_else(|| {
            self.lines.push(Line { migration, served: oldest, waiting: VecDeque::new() });
            self.lines.len() - 1
        });
        let line = &mut self.lines[place];
        if line.waiting.is_empty() {
            line.served = line.served.max(oldest);
        }
        if first {
            line.waiting.push_front((ticket, who));
        } else {
            line.waiting.push_back((ticket, who));
        }
        ticket
    }

    fn next_line(&self) -> Option<usize> {
        let heads = self.lines.iter().enumerate();
        let heads =
            heads.filter_map(|(place, line)| Some((line.served, line.waiting.front()?.0, place)));
        heads.min().map(|(_, _, place)| place)
    }

    /// Returns whose turn it is.
    pub(super) fn next(&self) -> Option<(Ticket, &T)> {
        self.lines[self.next_line()?].waiting.front().map(|(ticket, who)| (*ticket, who))
    }

    /// Serves the stream whose turn it is with so many bytes, and removes it.
    pub(super) fn serve(&mut self, bytes: u64) {
        let Some(place) = self.next_line() else { return };
        let line = &mut self.lines[place];
        self.clock = self.clock.max(line.served);
        line.served = line.served.saturating_add(bytes);
        line.waiting.pop_front();
    }

    /// Gives up a place.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        for line in &mut self.lines {
            line.waiting.retain(|(known, _)| *known != ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn eight_streams_do_not_exceed_two() {
        let mut turns = Turns::default();
        let mut given = BTreeMap::new();
        for (migration, streams) in [(1, 8), (2, 2)] {
            for _ in 0..streams {
                turns.join(migration, false, migration);
            }
        }
        for _ in 0..1000 {
            let migration = *turns.next().unwrap().1;
            turns.serve(64 << 10);
            *given.entry(migration).or_insert(0_u32) += 1;
            // It sends and comes back.
            turns.join(migration, false, migration);
        }
        assert_eq!(given, BTreeMap::from([(1, 500), (2, 500)]));
    }

    #[test]
    fn a_stream_that_stalls_while_sending_loses_nothing() {
        let mut turns = Turns::default();
        for _ in 0..8 {
            turns.join(1, false, 1);
        }
        turns.join(2, false, 2);
        let (mut given, mut away) = ([0_u32; 3], 0);
        for _ in 0..2000 {
            let migration = *turns.next().unwrap().1;
            turns.serve(64 << 10);
            given[migration] += 1;
            if migration == 1 {
                turns.join(1, false, 1);
            } else {
                away = 3;
            }
            // Its bytes are on their way to the socket while another is served.
            away -= i32::from(away > 0);
            if away == 1 {
                turns.join(2, false, 2);
            }
        }
        assert!(given[2] >= 990, "{given:?}");
    }

    #[test]
    fn a_stream_that_rejoins_keeps_its_place() {
        let mut turns = Turns::default();
        let first = turns.join(1, false, "first");
        turns.join(1, false, "second");
        turns.leave(first);
        turns.join(1, true, "first again");
        assert_eq!(turns.next().map(|(_, who)| *who), Some("first again"));
    }

    proptest! {
        /// Checks that migrations that always wait are given the same number of bytes, within one
        /// piece each.
        #[test]
        fn bytes_are_shared_by_migration(
            streams in prop::collection::vec(1_usize..9, 2..6),
            pieces in prop::collection::vec(1_u64..256 << 10, 100..400),
        ) {
            let mut turns = Turns::default();
            for (migration, count) in streams.iter().enumerate() {
                for _ in 0..*count {
                    turns.join(migration as u64, false, migration);
                }
            }
            let mut given = vec![0_u64; streams.len()];
            for piece in pieces {
                let migration = *turns.next().unwrap().1;
                turns.serve(piece);
                given[migration] += piece;
                turns.join(migration as u64, false, migration);
            }
            let (least, most) = (given.iter().min().unwrap(), given.iter().max().unwrap());
            prop_assert!(most - least <= 256 << 10, "{given:?}");
        }

        /// Checks that every waiting stream is served eventually, whatever others come and go.
        #[test]
        fn no_waiter_waits_forever(
            joins in prop::collection::vec((0_u64..4, any::<bool>()), 1..60),
        ) {
            let mut turns = Turns::default();
            for (migration, serve) in &joins {
                turns.join(*migration, false, ());
                if *serve {
                    turns.serve(1 << 16);
                }
            }
            let mut left = joins.len();
            while turns.next().is_some() {
                turns.serve(1 << 16);
                left -= 1;
            }
            prop_assert_eq!(left, joins.iter().filter(|(_, serve)| *serve).count());
        }
    }
}
