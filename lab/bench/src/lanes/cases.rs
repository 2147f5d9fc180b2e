//! Cases of the scenario and their promises. Pure.

use std::time::Duration;

use godwit_lab::{BitRate, Family, Rtt};
use serde::Serialize;

use crate::lanes::CaseFigures;

/// Of a frame of 1514 bytes, which the lab's rates count, TCP with timestamps carries 1448 over
/// IPv4.
const IPV4_SHARE: f64 = 1448.0 / 1514.0;
/// IPv6's header is 20 bytes longer.
const IPV6_SHARE: f64 = 1428.0 / 1514.0;
/// The case with which others are compared.
pub(crate) const BASE: &str = "one-gbit";
/// Round trips allowed to a migration in addition to its transfer (RTT goals).
const ROUND_TRIPS: f64 = 10.0;

const GBIT: u64 = 1_000_000_000;
const MBIT: u64 = 1_000_000;

/// Migration networks of a case: cases with the same networks share a lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Links {
    pub(crate) lanes: Vec<BitRate>,
    pub(crate) family: Family,
    pub(crate) rtt: Rtt,
    pub(crate) flow_cap: Option<BitRate>,
    /// Whether the larger guest moves: on a fast link the other is over too soon.
    pub(crate) large_guest: bool,
}

impl Links {
    /// Returns TCP's rate on all lanes together, after headers, in bit/s.
    #[expect(clippy::cast_precision_loss, reason = "rates are far below 2^53 bit/s")]
    pub(crate) fn on_paper(&self) -> f64 {
        let share = if self.family == Family::Ipv6 { IPV6_SHARE } else { IPV4_SHARE };
        self.lanes.iter().map(|rate| rate.bits_per_second() as f64 * share).sum()
    }
}

impl std::fmt::Display for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rates: Vec<String> = self.lanes.iter().map(BitRate::to_string).collect();
        write!(f, "{}, {}, round trip {}", rates.join(" and "), self.family, self.rtt)?;
        match self.flow_cap {
            Some(cap) => write!(f, ", {cap} a flow"),
            None => Ok(()),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) links: Links,
    /// Streams of each lane; `None` is Godwit's default.
    pub(crate) streams: Option<u32>,
    /// Streams with which iperf3 measures what the links carry.
    pub(crate) iperf_streams: u32,
    pub(crate) promise: Promise,
}

/// Promise about a case.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Promise {
    /// At least this fraction of what the links carry.
    Carried(f64),
    /// At least this fraction of the base's rate, both relative to the links' rates without
    /// headers.
    ShareOfBase(f64),
    /// At least `times` times the fraction `share` of the base's rate.
    TimesBase { times: f64, share: f64 },
    /// A migration time of at most this fraction of the base's, plus ten round trips.
    TimeOfBase(f64),
}

impl Promise {
    /// Returns whether the base must be measured for it.
    pub(crate) fn needs_base(self) -> bool {
        !matches!(self, Promise::Carried(_))
    }
}

/// Returns all cases. Those that share a lab are in sequence, and the base comes first.
pub(crate) fn all() -> Vec<Case> {
    let rate = |bits| BitRate::new(bits).into_iter().collect::<Vec<_>>();
    let one = Links {
        lanes: rate(GBIT),
        family: Family::Ipv4,
        rtt: Rtt::default(),
        flow_cap: None,
        large_guest: false,
    };
    let five = Links { lanes: rate(5 * GBIT), large_guest: true, ..one.clone() };
    let four_lanes = Links { lanes: rate(GBIT).repeat(4), large_guest: true, ..one.clone() };
    let two_rates = Links { lanes: [rate(GBIT), rate(250 * MBIT)].concat(), ..one.clone() };
    let capped = Links { flow_cap: BitRate::new(200 * MBIT), ..one.clone() };
    let delayed = |ms| Links { rtt: Duration::from_millis(ms).into(), ..one.clone() };

    let case = |name: &'static str, links: &Links, promise| Case {
        name,
        links: links.clone(),
        streams: None,
        iperf_streams: 2,
        promise,
    };
    let streams = |name: &'static str, count: u32, case: &Case| Case {
        name,
        streams: Some(count),
        iperf_streams: count,
        ..case.clone()
    };
    let mut cases = Vec::new();
    for (links, name, with_streams) in [
        (
            &one,
            BASE,
            ["one-gbit-1-stream", "one-gbit-2-streams", "one-gbit-4-streams", "one-gbit-8-streams"],
        ),
        (
            &five,
            "five-gbit",
            [
                "five-gbit-1-stream",
                "five-gbit-2-streams",
                "five-gbit-4-streams",
                "five-gbit-8-streams",
            ],
        ),
    ] {
        let plain = case(name, links, Promise::Carried(0.97));
        let with_streams = with_streams.into_iter().zip([1, 2, 4, 8]);
        cases.push(plain.clone());
        cases.extend(with_streams.map(|(name, count)| streams(name, count, &plain)));
    }
    cases.push(case(
        "ipv6",
        &Links { family: Family::Ipv6, ..one.clone() },
        Promise::ShareOfBase(0.99),
    ));
    cases.push(case("four-lanes", &four_lanes, Promise::TimesBase { times: 4.0, share: 0.95 }));
    cases.push(case("two-rates", &two_rates, Promise::Carried(0.93)));
    // Filling the link takes more flows than one or two streams have.
    let capped = Case { iperf_streams: 8, ..case("flow-cap", &capped, Promise::Carried(0.90)) };
    let capped_streams = streams("flow-cap-8-streams", 8, &capped);
    cases.extend([capped, capped_streams]);
    cases.push(case("rtt-10ms", &delayed(10), Promise::TimeOfBase(1.05)));
    cases.push(case("rtt-40ms", &delayed(40), Promise::TimeOfBase(1.05)));
    cases
}

/// Returns the names of all cases.
pub(crate) fn names() -> Vec<&'static str> {
    all().into_iter().map(|case| case.name).collect()
}

/// Returns the cases with these names (all, if there are none), with the base if one of them needs
/// it.
pub(crate) fn chosen(names: &[String]) -> Vec<Case> {
    let is_chosen = |case: &Case| names.is_empty() || names.iter().any(|name| name == case.name);
    let needs_base = all().iter().any(|case| is_chosen(case) && case.promise.needs_base());
    all().into_iter().filter(|case| is_chosen(case) || (needs_base && case.name == BASE)).collect()
}

/// Promise, result, and whether it is kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Goal {
    pub(crate) case: &'static str,
    pub(crate) what: String,
    pub(crate) found: String,
    pub(crate) met: bool,
}

/// Checks the case's promise; `base`: the figures of the base.
pub(crate) fn goal(figures: &CaseFigures, base: Option<&CaseFigures>) -> Goal {
    let (what, found) = match figures.case.promise {
        Promise::Carried(share) => (
            format!("at least {} of what the links carry", percent(share)),
            at_least(figures.share(), share),
        ),
        Promise::ShareOfBase(share) => {
            let of_base = base.and_then(CaseFigures::share_on_paper);
            let ratio = figures.share_on_paper().zip(of_base).map(|(ours, of_base)| ours / of_base);
            (
                format!("at least {} of {BASE}, longer headers allowed for", percent(share)),
                at_least(ratio, share),
            )
        }
        Promise::TimesBase { times, share } => {
            let of_base = base.and_then(|base| base.wire_bits_per_s);
            let ratio = figures.wire_bits_per_s.zip(of_base);
            let ratio = ratio.map(|(ours, of_base)| ours.median / (times * of_base.median));
            (format!("at least {} of {times} times {BASE}", percent(share)), at_least(ratio, share))
        }
        Promise::TimeOfBase(factor) => time(figures, base, factor),
    };
    let (found, met) = found.unwrap_or_else(|| ("-".to_owned(), false));
    Goal { case: figures.case.name, what, found, met: met && figures.failed == 0 }
}

type Found = Option<(String, bool)>;

fn at_least(ratio: Option<f64>, wanted: f64) -> Found {
    ratio.map(|ratio| (percent(ratio), ratio >= wanted))
}

fn time(figures: &CaseFigures, base: Option<&CaseFigures>, factor: f64) -> (String, Found) {
    let rtt_ms = figures.case.links.rtt.duration().as_secs_f64() * 1e3;
    let most_ms = base
        .and_then(|base| base.migration_ms)
        .map(|base| factor * (base.median + ROUND_TRIPS * rtt_ms));
    let found = figures.migration_ms.zip(most_ms).map(|(ours, most_ms)| {
        (format!("{:.0} ms of {most_ms:.0} ms", ours.median), ours.median <= most_ms)
    });
    (
        format!(
            "migration time within {} of {BASE}'s plus {ROUND_TRIPS} round trips",
            percent(factor - 1.0)
        ),
        found,
    )
}

/// Rounds down to a tenth, never up: a result printed as met is met.
pub(crate) fn percent(share: f64) -> String {
    let text = format!("{:.1}", (share * 1000.0 + 1e-9).floor() / 10.0);
    format!("{} %", text.trim_end_matches(".0"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Spread;

    fn figures(name: &str, gbit: f64, migration_ms: f64) -> CaseFigures {
        let case = all().into_iter().find(|case| case.name == name).unwrap();
        CaseFigures {
            case,
            failed: 0,
            wire_bits_per_s: Spread::of([gbit * 1e9]),
            carried_bits_per_s: Spread::of([1e9]),
            migration_ms: Spread::of([migration_ms]),
            runs: Vec::new(),
        }
    }

    #[test]
    fn names_are_unique_and_labs_are_shared_by_neighbours() {
        let all = all();
        let mut names = names();
        assert_eq!((all[0].name, all[0].promise), (BASE, Promise::Carried(0.97)));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len());
        let labs = all.chunk_by(|one, other| one.links == other.links).count();
        let mut different: Vec<&Links> = Vec::new();
        for case in &all {
            if !different.contains(&&case.links) {
                different.push(&case.links);
            }
        }
        assert_eq!(labs, different.len());
    }

    #[test]
    fn the_base_is_added_if_it_is_needed() {
        let names = |chosen: &[&str]| -> Vec<&str> {
            let chosen: Vec<String> = chosen.iter().map(|name| (*name).to_owned()).collect();
            super::chosen(&chosen).into_iter().map(|case| case.name).collect()
        };
        assert_eq!(names(&["five-gbit-4-streams"]), ["five-gbit-4-streams"]);
        assert_eq!(names(&["four-lanes"]), [BASE, "four-lanes"]);
        assert_eq!(names(&[]).len(), all().len());
    }

    #[test]
    fn promises_are_kept_or_not() {
        let base = figures(BASE, 0.98, 8000.0);
        let is_met = |name: &str, gbit, ms| goal(&figures(name, gbit, ms), Some(&base)).met;
        assert!(goal(&base, Some(&base)).met);
        assert!(
            is_met("one-gbit-8-streams", 0.97, 0.0) && !is_met("one-gbit-8-streams", 0.969, 0.0)
        );
        assert!(is_met("ipv6", 0.971, 0.0) && !is_met("ipv6", 0.95, 0.0));
        assert!(is_met("four-lanes", 3.73, 0.0) && !is_met("four-lanes", 3.72, 0.0));
        assert!(is_met("rtt-40ms", 0.5, 8820.0) && !is_met("rtt-40ms", 0.5, 8821.0));
        let failed = CaseFigures { failed: 1, ..figures("two-rates", 1.0, 0.0) };
        assert!(!goal(&failed, None).met);
        assert_eq!(goal(&figures("ipv6", 1.0, 0.0), None).found, "-");
    }

    #[test]
    fn shares_are_not_rounded_up() {
        assert_eq!(
            (percent(0.97), percent(0.9699), percent(0.97345)),
            ("97 %".into(), "96.9 %".into(), "97.3 %".into())
        );
        assert_eq!(percent(1.05 - 1.0), "5 %");
    }

    #[test]
    fn headers_reduce_the_rate() {
        let gbit = |name: &str| figures(name, 0.0, 0.0).case.links.on_paper() / 1e9;
        assert!((gbit(BASE) - 0.9564).abs() < 1e-4 && (gbit("ipv6") - 0.9432).abs() < 1e-4);
        assert!((gbit("two-rates") - 1.1955).abs() < 1e-4);
    }
}
