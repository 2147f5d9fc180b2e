//! Plan of a drain of a datastore: which disk goes where, and why. Pure.

use std::collections::BTreeMap;

use godwit_types::{DatastoreCandidate, choose_datastore};

use crate::words::Bytes;

/// A disk in the datastore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeavingDisk {
    /// Host of its VM.
    pub host: String,
    /// Space that its copy needs.
    pub needed_bytes: u64,
    /// Whether its copy needs a backing file.
    pub is_layer: bool,
    /// Why it cannot move at all.
    pub immovable: Option<String>,
}

/// A datastore that disks of a host's VMs may go to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetStore {
    /// ID, which is the same at each host that has it.
    pub id: String,
    /// Name of the space that it has, which others may share.
    pub space: String,
    /// Whether it is a pool of Ceph, whose images have no backing files.
    pub is_pool: bool,
    pub candidate: DatastoreCandidate,
}

/// Plan for a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskPlan {
    /// It goes to a target of its host, by its position.
    Goes {
        target: usize,
        why: String,
    },
    Stays {
        why: String,
    },
}

/// Plans a target for each disk, the largest first. What goes into a datastore counts for the disks
/// after it, at every host that has it and in every datastore that shares its space.
#[must_use]
pub fn plan_disks(
    disks: &[LeavingDisk],
    targets: &BTreeMap<String, Vec<TargetStore>>,
) -> Vec<DiskPlan> {
    let mut order: Vec<usize> = (0..disks.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(disks[*index].needed_bytes));
    let mut taken = BTreeMap::<&str, u64>::new();
    let mut plans = BTreeMap::new();
    for index in order {
        let disk = &disks[index];
        let of_host = targets.get(&disk.host).map(Vec::as_slice).unwrap_or_default();
        let plan = plan_disk(disk, of_host, &taken);
        if let DiskPlan::Goes { target, .. } = &plan {
            *taken.entry(&of_host[*target].space).or_default() += disk.needed_bytes;
        }
        plans.insert(index, plan);
    }
    plans.into_values().collect()
}

fn plan_disk(disk: &LeavingDisk, targets: &[TargetStore], taken: &BTreeMap<&str, u64>) -> DiskPlan {
    let stays = |why: String| DiskPlan::Stays { why };
    if let Some(why) = &disk.immovable {
        return stays(why.clone());
    }
    if targets.is_empty() {
        return stays(format!("host {} has no other datastore for it", disk.host));
    }
    let left = |target: &TargetStore| {
        let taken = taken.get(target.space.as_str()).copied().unwrap_or(0);
        target.candidate.free_bytes.saturating_sub(taken)
    };
    let refused = |target: &TargetStore| match disk.is_layer && target.is_pool {
        true => Some("takes no layers without their bases (--flatten)".to_owned()),
        false => target.candidate.refused.clone(),
    };
    let candidates: Vec<DatastoreCandidate> = targets
        .iter()
        .map(|target| DatastoreCandidate {
            free_bytes: left(target),
            refused: refused(target),
            ..target.candidate.clone()
        })
        .collect();
    match choose_datastore(&candidates, disk.needed_bytes) {
        Ok(choice) if candidates[choice.index].free_bytes >= disk.needed_bytes => {
            DiskPlan::Goes { target: choice.index, why: choice.why }
        }
        Ok(choice) => stays(format!(
            "it needs {}, and no datastore of host {} has that: the most is {}",
            Bytes(disk.needed_bytes),
            disk.host,
            Bytes(candidates[choice.index].free_bytes)
        )),
        Err(why) => stays(format!("no datastore of host {} takes it: {why}", disk.host)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn disk(host: &str, gib: u64) -> LeavingDisk {
        LeavingDisk { host: host.to_owned(), needed_bytes: gib << 30, ..LeavingDisk::default() }
    }

    fn target(id: &str, free_gib: u64) -> TargetStore {
        let candidate = DatastoreCandidate {
            name: id.to_owned(),
            free_bytes: free_gib << 30,
            ..DatastoreCandidate::default()
        };
        TargetStore { id: id.to_owned(), space: id.to_owned(), is_pool: false, candidate }
    }

    fn targets(all: &[(&str, Vec<TargetStore>)]) -> BTreeMap<String, Vec<TargetStore>> {
        all.iter().map(|(host, targets)| ((*host).to_owned(), targets.clone())).collect()
    }

    #[test]
    fn each_disk_goes_where_there_is_room_or_stays_with_its_reason() {
        let readonly = LeavingDisk { immovable: Some("it is a CD".to_owned()), ..disk("a", 1) };
        let disks = [disk("a", 30), disk("a", 50), disk("b", 40), disk("c", 1), readonly];
        let shared = || target("shared", 100);
        let all = targets(&[("a", vec![shared(), target("small", 35)]), ("b", vec![shared()])]);
        let plans = plan_disks(&disks, &all);
        let goes = |plan: &DiskPlan| match plan {
            DiskPlan::Goes { target, .. } => Some(*target),
            DiskPlan::Stays { .. } => None,
        };
        // 50 and 40 GiB are in the shared one before the third disk is planned.
        assert_eq!(
            plans.iter().map(goes).collect::<Vec<_>>(),
            [Some(1), Some(0), Some(0), None, None]
        );
        let DiskPlan::Stays { why } = &plans[3] else { panic!("{plans:?}") };
        assert_eq!(why, "host c has no other datastore for it");
        assert_eq!(plans[4], DiskPlan::Stays { why: "it is a CD".to_owned() });
        let full = plan_disks(&[disk("b", 200)], &all);
        let DiskPlan::Stays { why } = &full[0] else { panic!("{full:?}") };
        assert!(why.contains("it needs 200 GiB") && why.contains("the most is 100 GiB"), "{why}");
    }

    #[test]
    fn a_layer_goes_into_no_pool() {
        let layer = LeavingDisk { is_layer: true, ..disk("a", 10) };
        let pool = TargetStore { is_pool: true, ..target("pool", 500) };
        let into = |targets: Vec<TargetStore>| {
            plan_disks(
                &[layer.clone(), disk("a", 10)],
                &BTreeMap::from([("a".to_owned(), targets)]),
            )
        };
        let plans = into(vec![pool.clone()]);
        let DiskPlan::Stays { why } = &plans[0] else { panic!("{plans:?}") };
        assert!(why.contains("pool takes no layers"), "{why}");
        assert!(matches!(plans[1], DiskPlan::Goes { target: 0, .. }), "{plans:?}");
        let plans = into(vec![pool, target("dir", 100)]);
        assert!(matches!(plans[0], DiskPlan::Goes { target: 1, .. }), "{plans:?}");
        assert!(matches!(plans[1], DiskPlan::Goes { target: 0, .. }), "{plans:?}");
    }

    #[test]
    fn a_pool_and_its_namespaces_have_their_space_once() {
        let store = |id: &str| TargetStore { space: "rbd:vms".to_owned(), ..target(id, 100) };
        let all = targets(&[("a", vec![store("pool"), store("shop")])]);
        let plans = plan_disks(&[disk("a", 60), disk("a", 50), disk("a", 30)], &all);
        let goes = |plan: &DiskPlan| matches!(plan, DiskPlan::Goes { .. });
        assert_eq!(plans.iter().map(goes).collect::<Vec<_>>(), [true, false, true], "{plans:?}");
    }

    proptest! {
        #[test]
        fn no_datastore_gets_more_than_it_has_room_for(
            disks in prop::collection::vec((0..3_usize, 0..40_u64, any::<bool>()), 0..40),
            free in prop::collection::vec(0..100_u64, 4),
            pool in 0..4_usize,
        ) {
            let host = |number: usize| format!("h{number}");
            let disks = disks.into_iter();
            let disks: Vec<_> = disks
                .map(|(at, gib, is_layer)| LeavingDisk { is_layer, ..disk(&host(at), gib) })
                .collect();
            // Host n has datastores n and n + 1.
            let store = |at: usize| {
                TargetStore { is_pool: at == pool, ..target(&host(at), free[at]) }
            };
            let stores = |at: usize| vec![store(at), store(at + 1)];
            let all: BTreeMap<_, _> = (0..3).map(|at| (host(at), stores(at))).collect();
            let plans = plan_disks(&disks, &all);
            prop_assert_eq!(plans.len(), disks.len());
            let mut sums = BTreeMap::<String, u64>::new();
            for (disk, plan) in disks.iter().zip(&plans) {
                if let DiskPlan::Goes { target, .. } = plan {
                    let store = &all[&disk.host][*target];
                    prop_assert!(!(store.is_pool && disk.is_layer));
                    *sums.entry(store.id.clone()).or_default() += disk.needed_bytes;
                }
            }
            for (at, free) in free.iter().enumerate() {
                prop_assert!(sums.get(&host(at)).is_none_or(|sum| *sum <= free << 30));
            }
        }
    }
}
