//! The order in which round 0 visits a guest's memory, seen as a ring.
//!
//! Guests that move to one host at the same time often have much content in common: they are clones
//! of one template. Each of them finds at the destination what the others have brought, if it comes
//! to a part of the memory later than they do. One that follows another closely through the same
//! memory finds nothing: what was sent just before has not arrived yet. So two begin at each place
//! and go in opposite directions. Each part between two places is sent from both ends.

use std::collections::VecDeque;

/// Order in which round 0 visits memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Course {
    /// Where it begins, as a fraction of all memory from 0 to 1.
    pub begin_at: f64,
    /// Whether it goes towards lower addresses.
    pub backwards: bool,
}

impl Course {
    /// Returns the course of one of several migrations that run at the same time, by its number.
    /// Multiples of the golden ratio are evenly spread, for any number of them.
    #[must_use]
    pub fn of(number: u64) -> Course {
        const GOLDEN_RATIO: f64 = 0.618_033_988_749_895;
        let place = (number / 2) as f64 * GOLDEN_RATIO;
        Course { begin_at: place.fract(), backwards: number % 2 == 1 }
    }

    /// Brings parts of memory, which are in the order of their addresses, into this order.
    pub(crate) fn arrange<T>(self, parts: &mut VecDeque<T>) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "below the number of parts"
        )]
        let first = (self.begin_at.clamp(0.0, 1.0) * parts.len() as f64) as usize;
        parts.rotate_left(first.min(parts.len()));
        if self.backwards {
            parts.make_contiguous().reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visited(number: u64, parts: usize) -> Vec<usize> {
        let mut all = (0..parts).collect();
        Course::of(number).arrange(&mut all);
        all.into()
    }

    #[test]
    fn each_part_is_visited_once() {
        for number in 0..50 {
            let mut all = visited(number, 7);
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3, 4, 5, 6], "{number}");
        }
        assert!(visited(3, 0).is_empty());
        assert_eq!((visited(0, 3), visited(1, 3)), (vec![0, 1, 2], vec![2, 1, 0]));
        assert_eq!(visited(3, 5), [2, 1, 0, 4, 3]);
    }

    #[test]
    fn together_they_send_little_twice() {
        // A part that another one visited just before has not arrived; an earlier one has.
        const PARTS: usize = 100;
        const CLOSE: usize = 5;
        let sent_by_all = |count: usize, from: u64| -> usize {
            let courses: Vec<_> =
                (from..).take(count).map(|number| visited(number, PARTS)).collect();
            let when = |course: &[usize], part| course.iter().position(|at| *at == part);
            let is_there = |mine: usize, part| {
                let mut others = courses.iter().filter_map(|course| when(course, part));
                others.any(|theirs| theirs + CLOSE < mine)
            };
            let sent = |course: &Vec<usize>| {
                (0..).zip(course).filter(|(at, part)| !is_there(*at, **part)).count()
            };
            courses.iter().map(sent).sum()
        };
        for from in 0..40 {
            for count in [1, 2, 3, 4, 8] {
                let sent = sent_by_all(count, from);
                // Where two meet, both send what is close.
                let most = PARTS + 2 * CLOSE * count;
                assert!(sent <= most, "{count} from {from}: {sent} of {PARTS} parts");
            }
        }
    }
}
