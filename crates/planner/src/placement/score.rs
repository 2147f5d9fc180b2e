//! Score of a host for a VM. The module's documentation has the formula.

use godwit_api::control::{HostWarning, PlacementScore};

use super::candidates::Host;
use super::judge::{Need, Room};
use crate::words::Bytes;

const MEMORY: f64 = 40.0;
const CPU: f64 = 30.0;
const VCPUS: f64 = 10.0;
const LANES: f64 = 15.0;
const CLONES: f64 = 5.0;
/// Cost of a broken `should` rule.
const RULE: f64 = 25.0;
/// vCPUs per core at which that part is 0.
const MOST_VCPUS_A_CORE: f64 = 4.0;
/// Share of the host's memory; with less of it free after the arrival, the host is nearly full.
const NEARLY_FULL: f64 = 0.05;

/// What an operator can do about a host that is nearly full.
pub const NEARLY_FULL_REMEDY: &str =
    "give the VM less memory, move VMs off that host first, or add a host";

/// Whether a host with this much free memory is nearly full. A host of unknown size is not.
#[must_use]
pub fn is_nearly_full(left_bytes: u64, total_bytes: u64) -> bool {
    total_bytes > 0 && share(left_bytes as f64, total_bytes as f64) < NEARLY_FULL
}

/// Returns `part` of `whole`, between 0 and 1; 0 if `whole` is 0.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 }
}

/// Returns the free memory of a host once the VMs are there.
fn memory_after(room: &Room<'_>, need: &Need<'_>) -> u64 {
    room.left_bytes.saturating_sub(need.memory_bytes)
}

/// Returns a host's points for a VM.
pub(super) fn score(
    host: &Host,
    room: &Room<'_>,
    need: &Need<'_>,
    rules_broken: usize,
) -> PlacementScore {
    let cores = f64::from(host.cores);
    let memory_after = memory_after(room, need) as f64;
    let vcpus_after = room.vcpus as f64 + need.vcpus as f64;
    let limit = f64::from(host.arrivals_limit.max(1));
    let has_clone = need.reference_groups.iter().any(|group| room.has_clone(host, group));
    let mut score = PlacementScore {
        total: 0.0,
        memory: MEMORY * share(memory_after, host.facts.memory_total_bytes as f64),
        cpu: CPU * share(cores - room.busy_cores - need.load, cores),
        vcpus: VCPUS * (1.0 - share(vcpus_after, MOST_VCPUS_A_CORE * cores)),
        lanes: LANES / (1.0 + f64::from(room.arrivals) / limit),
        clones: if has_clone { CLONES } else { 0.0 },
        // Starts from 0: without a broken rule the product alone would be -0.
        rules: 0.0 - RULE * rules_broken as f64,
    };
    if host.cores == 0 {
        score.vcpus = 0.0;
    }
    let sum: f64 = parts(&score).iter().sum();
    score.total = (sum * 100.0).round() / 100.0;
    score
}

fn parts(score: &PlacementScore) -> [f64; 6] {
    [score.memory, score.cpu, score.vcpus, score.lanes, score.clones, score.rules]
}

/// Returns why a host is first.
pub(super) fn why_first(host: &Host, room: &Room<'_>, need: &Need<'_>) -> String {
    let figures = [Part::Memory, Part::Cpu, Part::Lanes].map(|part| part.figure(host, room, need));
    let verdict = match warning(host, room, need) {
        Some(_) => "best, but nearly full",
        None => "best",
    };
    format!("{verdict}: {}", figures.join(", "))
}

/// Returns the warning about a host that VMs leave nearly full.
pub(super) fn warning(host: &Host, room: &Room<'_>, need: &Need<'_>) -> Option<HostWarning> {
    let (left, total) = (memory_after(room, need), host.facts.memory_total_bytes);
    is_nearly_full(left, total).then(|| HostWarning {
        text: format!("nearly full: {}", Part::Memory.figure(host, room, need)),
        remedy: NEARLY_FULL_REMEDY.to_owned(),
    })
}

/// A part of the score.
#[derive(Clone, Copy)]
enum Part {
    Memory,
    Cpu,
    Vcpus,
    Lanes,
    Clones,
    Rules,
}

const PARTS: [Part; 6] =
    [Part::Memory, Part::Cpu, Part::Vcpus, Part::Lanes, Part::Clones, Part::Rules];

impl Part {
    /// Describes the figures behind the part.
    fn figure(self, host: &Host, room: &Room<'_>, need: &Need<'_>) -> String {
        match self {
            Part::Memory => {
                let after = Bytes(memory_after(room, need));
                format!("{after} of {} memory left after it", Bytes(host.facts.memory_total_bytes))
            }
            Part::Cpu => {
                let load = room.busy_cores + need.load;
                let idle = f64::from(host.cores) - load;
                if idle < 0.05 {
                    return format!("CPU full (load {load:.1} on {} cores)", host.cores);
                }
                format!("{idle:.1} of {} cores idle", host.cores)
            }
            Part::Vcpus => format!("{} vCPUs on {} cores", room.vcpus + need.vcpus, host.cores),
            Part::Lanes => match room.arrivals {
                0 => "no VMs arriving".to_owned(),
                1 => "1 VM arriving".to_owned(),
                arrivals => format!("{arrivals} VMs arriving"),
            },
            Part::Clones => {
                match need.reference_groups.iter().any(|group| room.has_clone(host, group)) {
                    true => "a clone of it there".to_owned(),
                    false => "no clone of it there".to_owned(),
                }
            }
            Part::Rules => String::new(),
        }
    }
}

/// A host and its score, for a comparison.
pub(super) struct Compared<'c, 'a> {
    pub(super) host: &'c Host,
    pub(super) room: &'c Room<'a>,
    pub(super) score: PlacementScore,
    pub(super) breaks: &'c [String],
}

/// Returns why a host is behind the first one: the part that costs it most.
pub(super) fn why_behind(
    first: &Compared<'_, '_>,
    this: &Compared<'_, '_>,
    need: &Need<'_>,
) -> String {
    let name = &first.host.facts.name;
    let lost =
        parts(&first.score).into_iter().zip(parts(&this.score)).map(|(first, this)| first - this);
    let most = PARTS.into_iter().zip(lost).max_by(|(_, one), (_, other)| one.total_cmp(other));
    if this.score.total >= first.score.total {
        return format!("equal to {name}, and after it by name");
    }
    match most {
        Some((Part::Rules, _)) => {
            format!("behind {name}: it would break rule {}", this.breaks.join(", "))
        }
        Some((part, _)) => {
            let (here, there) = (
                part.figure(this.host, this.room, need),
                part.figure(first.host, first.room, need),
            );
            format!("behind {name}: {here}, against {there}")
        }
        None => format!("behind {name}"),
    }
}
