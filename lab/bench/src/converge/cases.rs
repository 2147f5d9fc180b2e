//! Cases: which guest over which link, moved by which engine. Pure.

use anyhow::Result;
use clap::ValueEnum;
use godwit_lab::BitRate;
use serde::Serialize;

use crate::converge::Settings;
use crate::results::as_text;
use crate::subject::Engine;

const PAGE_BYTES: f64 = 4096.0;
/// Payload share of a frame of 1500 bytes, without the headers of Ethernet (including the gap
/// between frames), IP and TCP.
const PAYLOAD_SHARE: f64 = 1448.0 / 1538.0;
/// Link of [`Kind::Computing`].
const COMPUTING_LINK: &str = "1gbit";
const COMPUTING_TIMES: u32 = 5;
/// Links of [`Kind::Links`], like 10 and 40 Gb/s in the published figures, and the multiple of the
/// faster one at which the guest writes.
pub(crate) const LINKS: [&str; 2] = ["200mbit", "800mbit"];
const LINKS_TIMES: u32 = 2;
/// Write rate of [`Kind::Fetching`]: high enough that pages are missing when the guest accesses
/// them, on a wire as fast as the machine.
const FETCHING_PAGES_PER_S: f64 = 50_000.0;

/// Groups of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// A guest that rewrites its memory at multiples of the link's rate
    Rewriting,
    /// A guest with 2 vCPUs that rewrites memory on one and computes on the other; 5 times 1 Gb/s
    Computing,
    /// A guest that rewrites at 2 times 800 Mb/s, over 200 Mb/s and over 800 Mb/s
    Links,
    /// A guest whose missing pages are fetched where no link is the limit; page-in only
    Fetching,
}

/// One guest on one link.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    /// Name of the case and of its picture.
    pub(crate) name: String,
    #[serde(serialize_with = "link_as_text")]
    pub(crate) link: Option<BitRate>,
    pub(crate) pages_per_s: f64,
    pub(crate) vcpus: u32,
    pub(crate) engines: Vec<Engine>,
}

fn link_as_text<S: serde::Serializer>(
    link: &Option<BitRate>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match link {
        Some(link) => as_text(link, serializer),
        None => serializer.serialize_none(),
    }
}

impl Case {
    /// Returns whether another thread computes beside the one that writes.
    pub(crate) fn computes(&self) -> bool {
        self.kind == Kind::Computing
    }

    /// Returns whether it can be measured in the same lab with the same guest.
    pub(crate) fn shares_lab(&self, other: &Case) -> bool {
        self.link == other.link && self.vcpus == other.vcpus
    }

    /// Returns the guest's workload.
    pub(crate) fn workload(&self, working_set_bytes: u64) -> String {
        let compute = if self.computes() { ",compute=yes" } else { "" };
        format!(
            "dirty:rate={:.0},ws={working_set_bytes},order=random,zero=0,compressible=0{compute}",
            self.pages_per_s
        )
    }

    /// Returns how long so many bytes take on the wire, or `None` if no link is the limit.
    pub(crate) fn wire_ms(&self, bytes: f64) -> Option<f64> {
        Some(bytes / (bytes_per_s(self.link?) * PAYLOAD_SHARE) * 1e3)
    }
}

/// Returns the cases to measure, with those of one lab in sequence. Cases without an engine are
/// left out.
pub(crate) fn cases(settings: &Settings) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for kind in &settings.cases {
        match kind {
            Kind::Rewriting => rewriting(settings, &mut cases),
            Kind::Computing => cases.push(computing(settings)?),
            Kind::Links => {
                for link in LINKS {
                    cases.push(over(settings, link)?);
                }
            }
            Kind::Fetching => cases.push(fetching(settings)),
        }
    }
    cases.retain(|case| !case.engines.is_empty());
    Ok(cases)
}

fn rewriting(settings: &Settings, cases: &mut Vec<Case>) {
    for &link in &settings.links {
        cases.extend(settings.times.iter().map(|times| Case {
            kind: Kind::Rewriting,
            name: format!("{link}-{times}-times"),
            link: Some(link),
            pages_per_s: pages_per_s(link, *times),
            vcpus: 1,
            engines: settings.engines.clone(),
        }));
    }
}

fn computing(settings: &Settings) -> Result<Case> {
    let link: BitRate = COMPUTING_LINK.parse()?;
    Ok(Case {
        kind: Kind::Computing,
        name: format!("computing-{link}-{COMPUTING_TIMES}-times"),
        link: Some(link),
        pages_per_s: pages_per_s(link, COMPUTING_TIMES),
        vcpus: 2,
        engines: chosen(settings, |engine| engine.is_ours() || engine == Engine::AutoConverge),
    })
}

fn over(settings: &Settings, link: &str) -> Result<Case> {
    let [_, faster] = LINKS;
    Ok(Case {
        kind: Kind::Links,
        name: format!("links-{link}"),
        link: Some(link.parse()?),
        pages_per_s: pages_per_s(faster.parse()?, LINKS_TIMES),
        vcpus: 1,
        engines: chosen(settings, |engine| engine == Engine::Godwit),
    })
}

fn fetching(settings: &Settings) -> Case {
    Case {
        kind: Kind::Fetching,
        name: "fetching".to_owned(),
        link: None,
        pages_per_s: FETCHING_PAGES_PER_S,
        vcpus: 1,
        engines: chosen(settings, |engine| engine == Engine::GodwitPageIn),
    }
}

fn chosen(settings: &Settings, wanted: impl Fn(Engine) -> bool) -> Vec<Engine> {
    settings.engines.iter().copied().filter(|engine| wanted(*engine)).collect()
}

fn pages_per_s(link: BitRate, times: u32) -> f64 {
    f64::from(times) * bytes_per_s(link) / PAGE_BYTES
}

/// Returns a link's raw rate.
#[expect(clippy::cast_precision_loss, reason = "rates far below 2^53")]
pub(crate) fn bytes_per_s(link: BitRate) -> f64 {
    link.bits_per_second() as f64 / 8.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        settings: Settings,
    }

    fn of(words: &[&str]) -> Vec<Case> {
        let line = Line::parse_from(["bench"].iter().chain(words));
        cases(&line.settings).unwrap()
    }

    #[test]
    fn all_are_measured_and_those_of_one_lab_follow_each_other() {
        let all = of(&[]);
        let names: Vec<&str> = all.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(
            names[..8],
            [
                "200mbit-2-times",
                "200mbit-5-times",
                "200mbit-20-times",
                "1gbit-2-times",
                "1gbit-5-times",
                "1gbit-20-times",
                "computing-1gbit-5-times",
                "links-200mbit"
            ]
        );
        let labs: Vec<usize> = all.chunk_by(Case::shares_lab).map(<[Case]>::len).collect();
        assert_eq!(labs, [3, 3, 1, 1, 1, 1]);
        assert_eq!(all[6].engines, [Engine::Godwit, Engine::GodwitPageIn, Engine::AutoConverge]);
        assert_eq!((all.len(), &all[9].engines[..]), (10, &[Engine::GodwitPageIn][..]));
        assert!(
            all[6]
                .workload(4096)
                .ends_with("ws=4096,order=random,zero=0,compressible=0,compute=yes")
        );
    }

    #[test]
    fn a_case_without_an_engine_is_left_out() {
        assert_eq!(of(&["--engine", "postcopy", "--case", "computing,links,fetching"]).len(), 0);
        let one =
            of(&["--engine", "godwit", "--case", "rewriting", "--link", "1gbit", "--times", "5"]);
        let [case] = &one[..] else { panic!("{one:?}") };
        // 5 times 125 MB/s.
        assert!((case.pages_per_s - 152_587.9).abs() < 0.1, "{case:?}");
        // 125 MB take a second on the raw link.
        assert!((case.wire_ms(125e6).unwrap() - 1062.2).abs() < 0.1);
        assert!(case.workload(1).starts_with("dirty:rate=152588,"));
    }

    #[test]
    fn both_links_have_the_same_guest() {
        let [slower, faster] = &of(&["--case", "links"])[..] else { panic!() };
        assert_eq!(slower.workload(1), faster.workload(1));
        assert_eq!(
            (slower.name.as_str(), faster.name.as_str()),
            ("links-200mbit", "links-800mbit")
        );
    }
}
