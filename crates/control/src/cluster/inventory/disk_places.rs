//! Places for new disks at a host: the datastore that a request names, or the best directory by
//! space and latency. A datastore in maintenance takes none, and a pool of Ceph only those that
//! name it.

use std::path::{Component, Path, PathBuf};

use godwit_api::control::{Problem, ProblemCode};
use godwit_qemu::{is_rbd, is_thin_pool};
use godwit_types::{DatastoreCandidate, choose_datastore};

use super::Inventory;

/// Word of a request for the best datastore.
pub(crate) const AUTO: &str = "auto";

/// A datastore of a host, as a place for a new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPlace {
    /// Directory or pool at the host.
    pub(crate) dir: PathBuf,
    /// ID of the datastore.
    pub(crate) id: String,
    pub(crate) candidate: DatastoreCandidate,
}

/// Directory or pool of a new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskPlace {
    pub(crate) dir: PathBuf,
    /// Why it was chosen; none: the request named it.
    pub(crate) why: Option<String>,
}

impl Inventory {
    /// Returns the directory or the pool of a new disk of so many bytes at a host. `wanted`: name,
    /// ID or path of a datastore there, or a directory below one; none or `auto`: the best
    /// directory. `None`: the host's agent is of an earlier version and chooses itself.
    pub(crate) fn place_disk(
        &self,
        host: &str,
        wanted: Option<&str>,
        bytes: u64,
    ) -> Result<Option<DiskPlace>, Problem> {
        match wanted.filter(|wanted| *wanted != AUTO) {
            Some(wanted) => {
                let dir = self.named_dir(host, wanted)?;
                self.check_takes_disks(host, &dir)?;
                Ok(Some(DiskPlace { dir, why: None }))
            }
            None => self.best_dir(host, bytes),
        }
    }

    /// Refuses a new disk in a directory of a host whose datastore is in maintenance.
    pub(crate) fn check_takes_disks(&self, host: &str, dir: &Path) -> Result<(), Problem> {
        let id = self.datastore_at(host, dir);
        let Some(plan) = self.datastore_plans().get(&id).filter(|plan| plan.maintenance) else {
            return Ok(());
        };
        let name = plan.name.clone().unwrap_or_else(|| dir.display().to_string());
        let detail = format!("datastore {name} takes no new disks: it is in maintenance");
        let remedy = format!(
            "use another datastore, or end its maintenance: `godwit datastore maintenance {id} off`"
        );
        Err(Problem::new(ProblemCode::WrongState, detail, remedy))
    }

    /// Returns the directory that a name means at a host.
    pub(crate) fn named_dir(&self, host: &str, wanted: &str) -> Result<PathBuf, Problem> {
        let path = Path::new(wanted);
        if path.is_absolute() {
            // The agent checks that it is below one of its directories for VMs.
            let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
            if path.components().all(is_plain) {
                return Ok(path.to_owned());
            }
        }
        let datastore = self.find_datastore(wanted)?;
        let at = datastore.hosts.iter().find(|at| at.host == host);
        let at = at.map(|at| PathBuf::from(&at.path)).ok_or_else(|| {
            let detail = format!("host {host} does not have datastore {}", datastore.name);
            let remedy =
                format!("use a datastore of that host: `godwit datastore list --host {host}`");
            Problem::new(ProblemCode::NoHost, detail, remedy)
        })?;
        if is_thin_pool(&at) {
            let detail = format!("no new disk can be in datastore {}", datastore.name);
            let remedy = "use another datastore: disks come into a thin pool of LVM only with a VM \
                          that moves";
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy));
        }
        Ok(at)
    }

    /// Returns the directory for VMs or the pool of a host that is in a datastore.
    pub(crate) fn dir_of(&self, host: &str, id: &str) -> Option<PathBuf> {
        let mut dirs = self.host_info(host)?.vm_dirs.iter();
        dirs.find(|dir| self.datastore_at(host, dir) == id).cloned()
    }

    fn best_dir(&self, host: &str, bytes: u64) -> Result<Option<DiskPlace>, Problem> {
        let places = self.places(host).into_iter().filter(|place| !is_rbd(&place.dir));
        let (dirs, candidates): (Vec<PathBuf>, Vec<DatastoreCandidate>) =
            places.map(|place| (place.dir, place.candidate)).unzip();
        if candidates.is_empty() {
            return Ok(None);
        }
        match choose_datastore(&candidates, bytes) {
            Ok(choice) => {
                Ok(Some(DiskPlace { dir: dirs[choice.index].clone(), why: Some(choice.why) }))
            }
            Err(why) => {
                let detail = format!("no datastore of host {host} takes a new disk: {why}");
                let remedy = "end the maintenance of one, free space, or use another host";
                Err(Problem::new(ProblemCode::NoHost, detail, remedy))
            }
        }
    }

    /// Returns whether another host has reported a datastore with this identity.
    fn is_elsewhere(&self, id: &str, host: &str) -> bool {
        let mut others = self.hosts.iter().filter(|(other, _)| *other != host);
        others.any(|(_, other)| other.identities.has(id))
    }

    /// Returns the directories for VMs and the pools of Ceph of a host whose agent describes them,
    /// as places for a new disk.
    pub(crate) fn places(&self, host: &str) -> Vec<HostPlace> {
        let Some(info) = self.host_info(host) else { return Vec::new() };
        // Disks come into thin pools only with their VM.
        let dirs = info.vm_dirs.iter().filter(|dir| !is_thin_pool(dir));
        let described = dirs.filter_map(|dir| {
            let found = info.datastores.get(dir).filter(|found| found.kind.is_some())?;
            let id = self.datastore_at(host, dir);
            let plan = self.datastore_plans().get(&id);
            let name = plan.and_then(|plan| plan.name.clone());
            let is_maintained = plan.is_some_and(|plan| plan.maintenance);
            let refused = if is_maintained {
                Some("is in maintenance".to_owned())
            } else if is_rbd(dir) && found.total_bytes == 0 {
                Some("has an unknown size".to_owned())
            } else {
                None
            };
            let candidate = DatastoreCandidate {
                name: name.unwrap_or_else(|| dir.display().to_string()),
                free_bytes: found.free_bytes,
                write_us: found.speed.map(|speed| speed.write_us),
                health: found.health,
                is_shared: found.is_remote() || self.is_elsewhere(&id, host),
                refused,
            };
            Some(HostPlace { dir: dir.clone(), id, candidate })
        });
        described.collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::inventory::DatastorePlan;
    use crate::rig;

    const FAST: &str = "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10";

    fn cluster() -> Inventory {
        let mut inventory = Inventory::default();
        let mut info = rig::host("a", None);
        info.vm_dirs = vec!["/hdd".into(), "/ssd".into()];
        let speed = |us: u64| {
            json!({ "write_us": us, "read_us": us, "write_bytes_per_s": 1, "read_bytes_per_s": 1,
                "measured_unix_ms": 1 })
        };
        info.datastores = serde_json::from_value(json!({
            "/hdd": { "total_bytes": 4_u64 << 40, "free_bytes": 2_u64 << 40, "kind": "xfs",
                "speed": speed(12_000), "health": "ok" },
            "/ssd": { "total_bytes": 1_u64 << 40, "free_bytes": 1_u64 << 39, "kind": "xfs",
                "identity": FAST, "speed": speed(300), "health": "ok" },
        }))
        .unwrap();
        rig::put_host(&mut inventory, info, &[], vec![]);
        // Its agent is of an earlier version.
        let old = godwit_api::HostInfo { vm_dirs: vec!["/srv".into()], ..rig::host("old", None) };
        rig::put_host(&mut inventory, old, &[], vec![]);
        inventory
    }

    #[test]
    fn a_pool_takes_disks_that_name_it_alone() {
        let mut inventory = Inventory::default();
        let mut info = rig::host("a", None);
        info.vm_dirs = vec!["/hdd".into(), "rbd:vms".into(), "rbd:vms/shop".into()];
        let of = |total: u64, kind: &str| {
            json!({ "total_bytes": total, "free_bytes": total, "kind": kind,
                "health": "ok" })
        };
        let mut found = json!({ "/hdd": of(1 << 30, "xfs"), "rbd:vms": of(4 << 40, "ceph-rbd"),
            "rbd:vms/shop": of(0, "ceph-rbd") });
        found["rbd:vms"]["identity"] = FAST.into();
        info.datastores = serde_json::from_value(found).unwrap();
        rig::put_host(&mut inventory, info, &[], vec![]);
        let place = |inventory: &Inventory, wanted| {
            inventory.place_disk("a", wanted, 20 << 30).map(|place| place.unwrap().dir)
        };
        // However much room it has.
        assert_eq!(place(&inventory, None).unwrap(), Path::new("/hdd"));
        let plan = DatastorePlan { name: Some("ceph".into()), ..DatastorePlan::default() };
        inventory.plan_datastore(FAST, Some(plan));
        for wanted in ["ceph", FAST, "rbd:vms"] {
            assert_eq!(place(&inventory, Some(wanted)).unwrap(), Path::new("rbd:vms"));
        }
        let places = inventory.places("a");
        let refused: Vec<_> =
            places.iter().map(|place| place.candidate.refused.as_deref()).collect();
        assert_eq!(refused, [None, None, Some("has an unknown size")]);
        assert!(places[1].candidate.is_shared && places[1].id == FAST);
        assert_eq!(inventory.dir_of("a", FAST), Some("rbd:vms".into()));
        inventory.plan_datastore(FAST, maintained(Some("ceph")));
        let refused = place(&inventory, Some("rbd:vms")).unwrap_err();
        assert!(refused.code == ProblemCode::WrongState && refused.detail.contains("ceph"));
        assert!(inventory.check_takes_disks("a", Path::new("rbd:vms")).is_err());
        assert!(inventory.check_takes_disks("a", Path::new("rbd:vms/shop")).is_ok());
    }

    #[test]
    fn a_thin_pool_takes_no_new_disks_and_can_be_maintained() {
        let mut inventory = Inventory::default();
        let mut info = rig::host("a", None);
        info.vm_dirs = vec!["/hdd".into(), "lvm:vg0/thin0".into()];
        let of = |kind: &str| {
            json!({ "total_bytes": 1_u64 << 40, "free_bytes": 1_u64 << 40, "kind": kind,
                "health": "ok" })
        };
        let mut found = json!({ "/hdd": of("xfs"), "lvm:vg0/thin0": of("lvm-thin-pool") });
        found["lvm:vg0/thin0"]["identity"] = FAST.into();
        info.datastores = serde_json::from_value(found).unwrap();
        rig::put_host(&mut inventory, info, &[], vec![]);
        let dirs: Vec<_> = inventory.places("a").into_iter().map(|place| place.dir).collect();
        assert_eq!(dirs, [Path::new("/hdd")]);
        for wanted in [FAST, "lvm:vg0/thin0"] {
            let refused = inventory.place_disk("a", Some(wanted), 1).map(drop).unwrap_err();
            assert_eq!(refused.code, ProblemCode::InvalidRequest, "{}", refused.detail);
            assert!(refused.remedy.contains("only with a VM"), "{}", refused.remedy);
        }
        // Disks arrive there, unless it is in maintenance.
        let thin = Path::new("lvm:vg0/thin0");
        assert!(inventory.check_takes_disks("a", thin).is_ok());
        inventory.plan_datastore(FAST, maintained(None));
        assert!(inventory.check_takes_disks("a", thin).is_err());
    }

    fn maintained(name: Option<&str>) -> Option<DatastorePlan> {
        let name = name.map(str::to_owned);
        Some(DatastorePlan { name, maintenance: true, ..DatastorePlan::default() })
    }

    #[test]
    fn the_best_datastore_is_chosen_with_its_reason() {
        let mut inventory = cluster();
        let place = |inventory: &Inventory, wanted| inventory.place_disk("a", wanted, 20 << 30);
        let best = place(&inventory, None).unwrap().unwrap();
        assert_eq!(best.dir, Path::new("/ssd"));
        assert!(best.why.unwrap().contains("/hdd is slower"));
        assert_eq!(place(&inventory, Some(AUTO)).unwrap().unwrap().dir, Path::new("/ssd"));
        assert_eq!(inventory.place_disk("old", None, 1).unwrap(), None);
        inventory.plan_datastore(FAST, maintained(Some("fast")));
        let other = place(&inventory, None).unwrap().unwrap();
        assert!(other.dir == Path::new("/hdd") && other.why.unwrap().contains("in maintenance"));
        let hdd = inventory.datastore_at("a", Path::new("/hdd"));
        inventory.plan_datastore(&hdd, maintained(None));
        let none = place(&inventory, None).unwrap_err();
        assert!(none.detail.contains("fast is in maintenance"), "{none}");
    }

    #[test]
    fn a_named_datastore_is_one_of_the_host_and_takes_disks() {
        let mut inventory = cluster();
        let plan = DatastorePlan { name: Some("fast".into()), ..DatastorePlan::default() };
        inventory.plan_datastore(FAST, Some(plan));
        let place = |inventory: &Inventory, host, wanted| {
            inventory.place_disk(host, Some(wanted), 1).map(|place| place.unwrap().dir)
        };
        for wanted in ["fast", FAST, "/ssd"] {
            assert_eq!(place(&inventory, "a", wanted).unwrap(), Path::new("/ssd"));
        }
        assert_eq!(place(&inventory, "a", "/ssd/x").unwrap(), Path::new("/ssd/x"));
        assert_eq!(place(&inventory, "old", "fast").unwrap_err().code, ProblemCode::NoHost);
        assert_eq!(place(&inventory, "a", "/ssd/../x").unwrap_err().code, ProblemCode::NotFound);
        inventory.plan_datastore(FAST, maintained(Some("fast")));
        for wanted in ["fast", "/ssd", "/ssd/below"] {
            let refused = place(&inventory, "a", wanted).unwrap_err();
            assert_eq!(refused.code, ProblemCode::WrongState);
            assert!(refused.remedy.contains("maintenance"), "{refused}");
        }
    }
}
