//! Limits of the entries that hosts' reports cause. A host that loses its connection again and
//! again, or lies, must not displace other entries from the journal. So the journal has a host's
//! first entries in full, and only the number of those that follow too fast. Entries about the
//! manager's own work are limited only all together. Pure.

use std::collections::BTreeMap;

use godwit_api::control::JournalKind;

use super::entries::NewEntry;

/// Period after which the numbers of omitted entries are written, milliseconds.
const SPAN_MS: u64 = 10 * 60 * 1000;
/// Full entries of one kind about one object that a host causes, per period.
const MOST_OF_OBJECT: u32 = 5;
/// Full entries that a host causes at once: a large host stops with all its VMs.
const MOST_OF_HOST: u32 = 500;
/// Entries by which that number grows again per period.
const REFILL_OF_HOST: u32 = 20;
/// Full entries of all hosts and of the manager, per period.
const MOST_OF_ALL: u32 = 6_000;

/// Counts of entries.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    began_unix_ms: u64,
    written: u32,
    /// Entries of this period that hosts caused. Only those in full are counted.
    of_objects: BTreeMap<(JournalKind, String), u32>,
    /// Full entries of each host, less the refill.
    of_hosts: BTreeMap<String, u32>,
    /// Numbers of omitted entries by host, and the last one.
    omitted: BTreeMap<Option<String>, (u64, NewEntry)>,
}

impl Throttle {
    /// Counts an entry. Returns the entries to write.
    pub(crate) fn note(&mut self, entry: NewEntry, now_unix_ms: u64) -> Vec<NewEntry> {
        let mut due = self.over(now_unix_ms);
        if self.has_room_for(&entry) {
            self.count(&entry);
            due.push(entry);
        } else {
            let source = entry.source().map(str::to_owned);
            let before = self.omitted.get(&source).map_or(0, |(number, _)| *number);
            self.omitted.insert(source, (before + 1, entry));
        }
        due
    }

    /// Ends the period if it is over. Returns the entries to write.
    pub(crate) fn over(&mut self, now_unix_ms: u64) -> Vec<NewEntry> {
        // Also ends if the clock was set back.
        if now_unix_ms.abs_diff(self.began_unix_ms) < SPAN_MS {
            return Vec::new();
        }
        self.began_unix_ms = now_unix_ms;
        self.written = 0;
        self.of_objects.clear();
        self.of_hosts.retain(|_, entries| {
            *entries = entries.saturating_sub(REFILL_OF_HOST);
            *entries > 0
        });
        let omitted = std::mem::take(&mut self.omitted).into_iter();
        let sum = |(source, (number, last)): (Option<String>, (u64, NewEntry))| {
            sum(source.as_deref(), number, &last, now_unix_ms)
        };
        omitted.map(sum).collect()
    }

    fn has_room_for(&self, entry: &NewEntry) -> bool {
        let Some(source) = entry.source() else { return self.written < MOST_OF_ALL };
        let of_host = self.of_hosts.get(source).copied().unwrap_or(0);
        let of_object = self.of_objects.get(&key(entry)).copied().unwrap_or(0);
        self.written < MOST_OF_ALL && of_host < MOST_OF_HOST && of_object < MOST_OF_OBJECT
    }

    fn count(&mut self, entry: &NewEntry) {
        self.written += 1;
        if let Some(source) = entry.source() {
            *self.of_hosts.entry(source.to_owned()).or_default() += 1;
            *self.of_objects.entry(key(entry)).or_default() += 1;
        }
    }
}

fn key(entry: &NewEntry) -> (JournalKind, String) {
    (entry.kind(), entry.object().unwrap_or_default().to_owned())
}

fn sum(source: Option<&str>, number: u64, last: &NewEntry, now_unix_ms: u64) -> NewEntry {
    let text = match source {
        Some(host) => format!("{number} more entries from reports of host {host} were omitted"),
        None => format!("{number} more entries were omitted"),
    };
    let entry = NewEntry::warning(JournalKind::LeftOut, text)
        .because(Some(format!("too many came within 10 minutes; the last was: {}", last.text())))
        .at(now_unix_ms);
    match source {
        Some(host) => entry.about("host", host),
        None => entry.about_object("cluster"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn away(host: &str) -> NewEntry {
        NewEntry::warning(JournalKind::HostAway, format!("host {host} is away"))
            .about("host", host)
            .reported_by(host)
    }

    fn started(vm: &str, host: &str) -> NewEntry {
        NewEntry::info(JournalKind::VmStarted, format!("VM {vm} started"))
            .about("vm", vm)
            .reported_by(host)
    }

    #[test]
    fn a_host_that_flaps_has_few_entries_and_their_number() {
        let mut throttle = Throttle::default();
        let begin = 100 * HOUR_MS;
        let written: usize = (0..1_000).map(|n| throttle.note(away("a"), begin + n).len()).sum();
        assert_eq!(written, 5);
        // Another host is not affected.
        assert_eq!(throttle.note(away("b"), begin + 1_001).len(), 1);
        assert_eq!(throttle.over(begin + 2_000), []);
        let sums = throttle.over(begin + SPAN_MS);
        let [sum] = &sums[..] else { panic!("{sums:?}") };
        assert_eq!(sum.text(), "995 more entries from reports of host a were omitted");
        assert_eq!(throttle.note(away("a"), begin + SPAN_MS + 1).len(), 1);
    }

    #[test]
    fn a_liar_with_ever_new_vms_does_not_fill_the_journal() {
        let mut throttle = Throttle::default();
        let begin = 100 * HOUR_MS;
        // Ten reports a second for a day, each about another VM.
        let written: usize = (0..864_000)
            .map(|n| throttle.note(started(&format!("vm{n}"), "liar"), begin + n * 100).len())
            .sum();
        assert!(written < 500 + 144 * 21 + 10, "{written}");
        // The manager's own entries are still written.
        let own = NewEntry::info(JournalKind::RuleCreated, "rule r was created");
        assert_eq!(throttle.note(own, begin + 86_399_950).len(), 1);
    }

    proptest! {
        #[test]
        fn every_entry_is_written_or_counted_and_each_period_is_bounded(
            all in proptest::collection::vec((0_u64..100_000, 0_u8..4, 0_u8..3, 0_u8..8), 0..2_000),
        ) {
            let mut throttle = Throttle::default();
            let mut now = 100 * HOUR_MS;
            let (mut whole, mut omitted) = (0_u64, 0_u64);
            let mut tally = |due: Vec<NewEntry>| {
                for entry in due {
                    match entry.text().split_once(" more entries") {
                        Some((number, _)) => omitted += number.parse::<u64>().unwrap(),
                        None => whole += 1,
                    }
                }
            };
            for (step, host, kind, vm) in &all {
                now += step;
                let host = format!("h{host}");
                let entry = match kind {
                    0 => away(&host),
                    1 => started(&format!("vm{vm}"), &host),
                    _ => NewEntry::info(JournalKind::MoveDone, "moved"),
                };
                tally(throttle.note(entry, now));
                prop_assert!(throttle.written <= MOST_OF_ALL);
                prop_assert!(throttle.of_hosts.values().all(|entries| *entries <= MOST_OF_HOST));
                prop_assert!(throttle.of_objects.values().all(|n| *n <= MOST_OF_OBJECT));
            }
            tally(throttle.over(now + SPAN_MS));
            prop_assert_eq!(whole + omitted, all.len() as u64);
        }
    }
}
