//! Refused requests in the audit log. Anyone who can reach the manager can send such requests, and
//! they must not displace other entries from the log. So the log has the first refusals of a
//! caller, or of a network if the caller is unknown, in full, and only the count of those in the
//! next minutes. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use godwit_api::control::AuditEntry;

use crate::access::rates::network;

/// Period after which counts are written, milliseconds.
const SPAN_MS: u64 = 10 * 60 * 1000;
/// Full entries of one network per period.
const MOST_WHOLE: u64 = 3;
/// Full entries of a known caller per period.
const MOST_WHOLE_OF_CALLER: u64 = 50;
/// Networks that are counted separately per period; all others share one count.
const MOST_APART: usize = 20;

/// Sender whose refusals are counted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum From {
    /// Known caller: the ID of a token, or a name.
    Caller(String),
    /// Network; `true`: requests to join, which are counted separately, so that guessing join
    /// tokens is visible.
    Network(Option<IpAddr>, bool),
    Others,
}

/// Refusals of the current period.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    began_unix_ms: u64,
    /// Last refusal of each sender, and their number.
    counted: BTreeMap<From, (AuditEntry, u64)>,
}

impl Refusals {
    /// Counts a refusal. Returns the entries to write.
    pub(crate) fn note(&mut self, entry: AuditEntry) -> Vec<AuditEntry> {
        let mut due = self.over(entry.unix_ms);
        if self.counted.is_empty() {
            self.began_unix_ms = entry.unix_ms;
        }
        let from = self.sender(&entry);
        let count = self.counted.get(&from).map_or(0, |(_, count)| *count) + 1;
        due.extend((count <= most_whole(&from)).then(|| entry.clone()));
        self.counted.insert(from, (entry, count));
        due
    }

    fn sender(&self, entry: &AuditEntry) -> From {
        if entry.role.is_some() || entry.who != "nobody" {
            return From::Caller(entry.token.clone().unwrap_or_else(|| entry.who.clone()));
        }
        let from = From::Network(entry.from.map(network), entry.what.ends_with("/join"));
        let networks = self.counted.keys().filter(|from| !matches!(from, From::Caller(_))).count();
        if self.counted.contains_key(&from) || networks < MOST_APART { from } else { From::Others }
    }

    /// Ends the period if it is over. Returns the entries to write.
    pub(crate) fn over(&mut self, now_unix_ms: u64) -> Vec<AuditEntry> {
        // Also ends if the clock was set back.
        if now_unix_ms.abs_diff(self.began_unix_ms) < SPAN_MS {
            return Vec::new();
        }
        let counted = std::mem::take(&mut self.counted).into_iter();
        let more = counted.filter(|(from, (_, count))| *count > most_whole(from));
        more.map(|(from, (last, count))| sum(&from, last, count - most_whole(&from))).collect()
    }
}

fn most_whole(from: &From) -> u64 {
    if matches!(from, From::Caller(_)) { MOST_WHOLE_OF_CALLER } else { MOST_WHOLE }
}

fn sum(from: &From, last: AuditEntry, more: u64) -> AuditEntry {
    let reason = last.reason.as_deref().unwrap_or("refused");
    AuditEntry {
        from: last.from.filter(|_| *from != From::Others),
        reason: Some(format!("refused within 10 minutes; the last was {}: {reason}", last.what)),
        what: format!("{more} more requests"),
        ..last
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{AuditOutcome, Role};

    use super::*;

    fn refused(unix_ms: u64, from: [u8; 4], what: &str) -> AuditEntry {
        AuditEntry {
            unix_ms,
            who: "nobody".into(),
            role: None,
            token: None,
            from: Some(from.into()),
            what: what.into(),
            outcome: AuditOutcome::Refused,
            status: 401,
            reason: Some("no token is shown".into()),
            made: None,
        }
    }

    #[test]
    fn the_first_refusals_are_written_in_full_and_the_others_counted() {
        let mut refusals = Refusals::default();
        for n in 0..3 {
            let whole = refused(1_000_000 + n, [10, 0, 0, 9], "GET /api/v1/hosts");
            assert_eq!(refusals.note(whole.clone()), [whole]);
        }
        for n in 1..=500 {
            assert_eq!(refusals.note(refused(1_000_000 + n, [10, 0, 0, 9], "GET /api/v1/vms")), []);
        }
        let join = refused(1_000_600, [10, 0, 0, 9], "POST /api/v1/join");
        assert_eq!(refusals.note(join.clone()), [join]);
        assert_eq!(refusals.over(1_000_000 + SPAN_MS - 1), []);
        let written = refusals.over(1_000_000 + SPAN_MS);
        assert_eq!(written.len(), 1, "{written:?}");
        assert_eq!(
            (written[0].what.as_str(), written[0].unix_ms),
            ("500 more requests", 1_000_500)
        );
        assert!(written[0].reason.as_ref().unwrap().contains("GET /api/v1/vms: no token"));
        assert_eq!(refusals.over(3 * SPAN_MS), []);
    }

    #[test]
    fn a_known_callers_refusals_are_counted_by_its_token() {
        let mut refusals = Refusals::default();
        let of = |n: u64, token: &str| AuditEntry {
            who: "ann".into(),
            role: Some(Role::Viewer),
            token: Some(token.into()),
            status: 403,
            ..refused(1_000_000 + n, [10, 0, 0, 9], "DELETE /api/v1/hosts/a")
        };
        let whole: usize = (0..1_000).map(|n: u64| refusals.note(of(n, "one")).len()).sum();
        assert_eq!(whole as u64, MOST_WHOLE_OF_CALLER);
        assert_eq!(refusals.note(of(1_000, "other")).len(), 1);
        let sums = refusals.over(1_000_000 + SPAN_MS);
        assert_eq!(
            (sums.len(), sums[0].what.as_str(), sums[0].who.as_str()),
            (1, "950 more requests", "ann")
        );
    }

    #[test]
    fn many_addresses_cause_few_entries() {
        let mut refusals = Refusals::default();
        let written: usize = (0..60_000_u32)
            .map(|n| {
                let [_, _, high, low] = n.to_be_bytes();
                refusals
                    .note(refused(2 * SPAN_MS + u64::from(n), [10, 1, high, low], "GET /"))
                    .len()
            })
            .sum();
        assert!(written <= MOST_APART + 3, "{written}");
        let sums = refusals.over(4 * SPAN_MS);
        assert_eq!(sums.len(), 1);
        assert_eq!((sums[0].from, sums[0].what.as_str()), (None, "59977 more requests"));
    }
}
