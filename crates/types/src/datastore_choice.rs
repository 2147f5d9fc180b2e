//! Choice of the datastore of a new disk, by space and latency. Pure.

use crate::datastores::DatastoreHealth;

/// Space that a new disk leaves free in a datastore.
const RESERVE_BYTES: u64 = 1 << 30;
/// Factor and slack within which two latencies count as the same: a measurement is one of a few
/// writes.
const SAME_LATENCY_FACTOR: u64 = 2;
const SAME_LATENCY_US: u64 = 1_000;
/// Part of the space by which two may differ and count as the same.
const SAME_SPACE_PART: u64 = 100;
/// Most other datastores that an explanation names.
const MOST_NAMED: usize = 4;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A datastore that a new disk may go to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatastoreCandidate {
    /// Name in the explanation.
    pub name: String,
    pub free_bytes: u64,
    /// Time of a write, microseconds; `None`: not measured.
    pub write_us: Option<u64>,
    pub health: Option<DatastoreHealth>,
    /// Whether other hosts have it, so that VMs move without their disks.
    pub is_shared: bool,
    /// Why it takes no new disks, if it does not, such as `in maintenance`.
    pub refused: Option<String>,
}

/// The chosen datastore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatastoreChoice {
    /// Position among the candidates.
    pub index: usize,
    /// Reasons, in a sentence.
    pub why: String,
}

/// Chooses the datastore of a new disk of so many bytes.
///
/// Of the datastores with room for the whole disk, those with about the lowest latency count; of
/// these, those that other hosts share, if there are any; of these, the one with the most space.
/// Spaces that are about the same are the same: then the first counts. If none has room for the
/// whole disk, the one with the most space is chosen: an image grows as it is written.
///
/// # Errors
/// The reason of each candidate, if none takes a disk.
pub fn choose_datastore(
    candidates: &[DatastoreCandidate],
    bytes: u64,
) -> Result<DatastoreChoice, String> {
    let usable: Vec<usize> =
        (0..candidates.len()).filter(|index| refusal(&candidates[*index]).is_none()).collect();
    let roomiest = |of: &[usize]| {
        let most = of.iter().map(|index| candidates[*index].free_bytes).max()?;
        // Directories of one file system are asked one after the other.
        let about = most - most / SAME_SPACE_PART;
        of.iter().copied().find(|index| candidates[*index].free_bytes >= about)
    };
    let wanted = bytes.saturating_add(RESERVE_BYTES);
    let fitting: Vec<usize> =
        usable.iter().copied().filter(|index| candidates[*index].free_bytes >= wanted).collect();
    let least_us = fitting.iter().filter_map(|index| candidates[*index].write_us).min();
    let fast: Vec<usize> = fitting
        .iter()
        .copied()
        .filter(|index| is_fast(candidates[*index].write_us, least_us))
        .collect();
    let shared: Vec<usize> =
        fast.iter().copied().filter(|index| candidates[*index].is_shared).collect();
    let found = roomiest(&shared).or_else(|| roomiest(&fast)).or_else(|| roomiest(&usable));
    let Some(index) = found else {
        return Err(refusals(candidates));
    };
    let chosen = &candidates[index];
    let mut why = format!("{}: {} free", chosen.name, size(chosen.free_bytes));
    if let Some(write_us) = chosen.write_us {
        why = format!("{why}, {} a write", latency(write_us));
    }
    if fitting.is_empty() {
        why = format!("{why}, the most, but not room for the whole disk of {}", size(bytes));
    }
    let others = (0..candidates.len()).filter(|other| *other != index);
    let others = others.map(|other| {
        format!("{} {}", candidates[other].name, behind(&candidates[other], chosen, wanted))
    });
    let named: Vec<String> = others.take(MOST_NAMED).collect();
    if !named.is_empty() {
        why = format!("{why}; {}", named.join(", "));
    }
    Ok(DatastoreChoice { index, why })
}

/// Returns whether a latency is about the lowest. One that was not measured may be.
fn is_fast(write_us: Option<u64>, least_us: Option<u64>) -> bool {
    let (Some(write_us), Some(least_us)) = (write_us, least_us) else { return true };
    write_us <= least_us.saturating_mul(SAME_LATENCY_FACTOR).saturating_add(SAME_LATENCY_US)
}

fn refusal(candidate: &DatastoreCandidate) -> Option<String> {
    let unwell = candidate.health.filter(|health| !health.takes_disks());
    candidate.refused.clone().or_else(|| {
        unwell.map(|health| match health {
            DatastoreHealth::NoAnswer => "does not answer".to_owned(),
            other => format!("is {other}"),
        })
    })
}

fn refusals(candidates: &[DatastoreCandidate]) -> String {
    let reasons = candidates
        .iter()
        .filter_map(|candidate| Some(format!("{} {}", candidate.name, refusal(candidate)?)));
    let reasons: Vec<String> = reasons.take(MOST_NAMED).collect();
    if reasons.is_empty() { "there is no datastore".to_owned() } else { reasons.join(", ") }
}

/// Returns why a candidate comes after the chosen one.
fn behind(other: &DatastoreCandidate, chosen: &DatastoreCandidate, wanted: u64) -> String {
    if let Some(refusal) = refusal(other) {
        return refusal;
    }
    if other.free_bytes < wanted && chosen.free_bytes >= wanted {
        return format!("has only {} free", size(other.free_bytes));
    }
    match (other.write_us, chosen.write_us) {
        (Some(slow), Some(fast)) if !is_fast(Some(slow), Some(fast)) => {
            format!("is slower ({} a write)", latency(slow))
        }
        _ if chosen.is_shared && !other.is_shared => "is not shared with other hosts".to_owned(),
        _ => format!("has {} free", size(other.free_bytes)),
    }
}

/// Formats a size, rounded down: free space is never shown as more than it is.
fn size(bytes: u64) -> String {
    let (unit, name) = if bytes >= GIB { (GIB, "GiB") } else { (MIB, "MiB") };
    format!("{}.{} {name}", bytes / unit, bytes % unit * 10 / unit)
}

fn latency(us: u64) -> String {
    format!("{}.{} ms", us / 1_000, us % 1_000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, free_gib: u64, write_us: Option<u64>) -> DatastoreCandidate {
        DatastoreCandidate {
            name: name.to_owned(),
            free_bytes: free_gib << 30,
            write_us,
            ..DatastoreCandidate::default()
        }
    }

    fn chosen(candidates: &[DatastoreCandidate], gib: u64) -> (String, String) {
        let choice = choose_datastore(candidates, gib << 30).unwrap();
        (candidates[choice.index].name.clone(), choice.why)
    }

    #[test]
    fn the_fast_one_with_the_most_space_is_chosen() {
        let ssd = candidate("/ssd", 100, Some(400));
        let other = candidate("/ssd2", 200, Some(900));
        let hdd = candidate("/hdd", 4_000, Some(12_000));
        let (name, why) = chosen(&[hdd.clone(), ssd.clone(), other.clone()], 20);
        assert_eq!(name, "/ssd2");
        assert_eq!(
            why,
            "/ssd2: 200.0 GiB free, 0.9 ms a write; /hdd is slower (12.0 ms a write), /ssd has \
             100.0 GiB free"
        );
        // Too large for the fast ones.
        let (name, why) = chosen(&[hdd, ssd, other], 500);
        assert_eq!(name, "/hdd");
        assert!(why.contains("/ssd has only 100.0 GiB free"), "{why}");
    }

    #[test]
    fn what_takes_no_disks_is_left_out_with_its_reason() {
        let full = DatastoreCandidate {
            health: Some(DatastoreHealth::Full),
            ..candidate("/full", 900, None)
        };
        let maintained = DatastoreCandidate {
            refused: Some("is in maintenance".to_owned()),
            ..candidate("/new", 900, None)
        };
        let (name, why) = chosen(&[full.clone(), maintained.clone(), candidate("/a", 3, None)], 1);
        assert_eq!(name, "/a");
        assert!(why.contains("/full is full, /new is in maintenance"), "{why}");
        let refused = choose_datastore(&[full, maintained], 1).unwrap_err();
        assert_eq!(refused, "/full is full, /new is in maintenance");
        assert_eq!(choose_datastore(&[], 1).unwrap_err(), "there is no datastore");
    }

    #[test]
    fn without_room_for_the_whole_disk_the_most_space_wins() {
        let (name, why) =
            chosen(&[candidate("/a", 3, Some(1)), candidate("/b", 5, Some(50_000))], 20);
        assert_eq!(name, "/b");
        assert!(why.contains("not room for the whole disk of 20.0 GiB"), "{why}");
        // The first of several that are about the same.
        let same = [candidate("/a", 500, None), candidate("/b", 501, None)];
        assert_eq!(chosen(&same, 1).0, "/a");
    }

    #[test]
    fn of_the_fast_ones_one_that_other_hosts_share_is_chosen() {
        let nfs = DatastoreCandidate { is_shared: true, ..candidate("/srv", 50, Some(900)) };
        let local = candidate("/var/lib/godwit/images", 900, Some(60));
        let (name, why) = chosen(&[local.clone(), nfs.clone()], 20);
        assert_eq!(name, "/srv");
        assert!(why.ends_with("/var/lib/godwit/images is not shared with other hosts"), "{why}");
        let slow = DatastoreCandidate { write_us: Some(30_000), ..nfs };
        assert_eq!(chosen(&[local, slow], 20).0, "/var/lib/godwit/images");
    }
}
