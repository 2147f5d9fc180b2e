//! Datastores: which directories and pools of hosts are one, what is in them, and their settings.
//!
//! Two directories are one datastore if their marker files have the same identity. A directory
//! without one is the same as those with its path: only the hosts know whether they share it. A
//! pool of Ceph has `rbd:POOL` or `rbd:POOL/NAMESPACE` where others have a path, and an identity
//! that is made of its cluster and its name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use godwit_api::control::{
    DatastoreAtHost, DatastoreDetails, DatastoreDisk, ManagedDatastore, Page, Problem, ProblemCode,
};
use godwit_api::{DatastoreInfo, HostInfo, VmInfo};
use godwit_qemu::{RbdImage, Uuid, is_rbd};
use godwit_types::DatastoreHealth;

use super::select::{Cursor, page};
use super::{Inventory, Vm};

/// Most datastores that a refusal names.
const MOST_NAMED: usize = 4;

/// Settings of a datastore, which the store keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatastorePlan {
    /// Its name; none: its path.
    pub name: Option<String>,
    pub description: String,
    pub tags: BTreeSet<String>,
    /// Whether it takes no new disks.
    pub maintenance: bool,
}

/// Filter for datastores. Each field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DatastoreFilter {
    pub(crate) tag: Option<String>,
    pub(crate) maintenance: Option<bool>,
    /// Host that has them.
    pub(crate) host: Option<String>,
}

/// Directories of a datastore, and what is in it.
#[derive(Debug, Default)]
struct Group {
    /// Host and path of each directory.
    at: BTreeSet<(String, PathBuf)>,
    vms: u64,
    disks: u64,
}

/// A disk of a VM in a datastore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskInDatastore {
    pub(crate) vm: String,
    pub(crate) host: String,
    pub(crate) path: PathBuf,
    /// It is a CD, or a disk that the guest only reads.
    pub(crate) readonly: bool,
}

/// Identities that a host has reported of its directories.
#[derive(Clone, Debug, Default)]
pub(super) struct Identities(BTreeMap<PathBuf, String>);

impl Identities {
    /// Returns whether one of the host's directories has this identity.
    pub(super) fn has(&self, id: &str) -> bool {
        self.0.values().any(|identity| identity == id)
    }

    /// Notes a report. A directory that it does not describe keeps its identity: the agent may not
    /// have its file system's answer yet.
    pub(super) fn note(&mut self, info: &HostInfo) {
        let own: BTreeSet<&PathBuf> = info.vm_dirs.iter().collect();
        self.0.retain(|path, _| own.contains(path));
        for (path, found) in info.datastores.iter().filter(|(path, _)| own.contains(path)) {
            match &found.identity {
                Some(identity) => drop(self.0.insert(path.clone(), identity.clone())),
                None => drop(self.0.remove(path)),
            }
        }
    }
}

impl Inventory {
    /// Sets or removes the settings of a datastore.
    pub(crate) fn plan_datastore(&mut self, id: &str, plan: Option<DatastorePlan>) {
        match plan {
            Some(plan) => drop(self.datastores.insert(id.to_owned(), plan)),
            None => drop(self.datastores.remove(id)),
        }
    }

    /// Returns the settings of all datastores that have some, by ID.
    pub(crate) fn datastore_plans(&self) -> &BTreeMap<String, DatastorePlan> {
        &self.datastores
    }

    /// Returns the directory of a datastore at a host that contains this directory: the nearest of
    /// its directories for VMs, or else this one. A pool does not contain its namespaces.
    pub(crate) fn datastore_dir(&self, host: &str, dir: &Path) -> PathBuf {
        let own = self.host_info(host).map(|info| info.vm_dirs.as_slice()).unwrap_or_default();
        let is_in = |own: &Path| if is_rbd(dir) { dir == own } else { dir.starts_with(own) };
        let above = own.iter().filter(|own| is_in(own.as_path()));
        above.max_by_key(|own| own.as_os_str().len()).map_or(dir, PathBuf::as_path).to_owned()
    }

    /// Returns the ID of the datastore that contains a directory of a host.
    pub(crate) fn datastore_at(&self, host: &str, dir: &Path) -> String {
        let dir = self.datastore_dir(host, dir);
        let identity = self.hosts.get(host).and_then(|host| host.identities.0.get(&dir));
        identity.cloned().unwrap_or_else(|| id_of_path(&dir))
    }

    /// Returns a page of the datastores, by name.
    pub(crate) fn datastores(
        &self,
        filter: &DatastoreFilter,
        cursor: &Cursor,
    ) -> Page<ManagedDatastore> {
        let is_wanted = |datastore: &ManagedDatastore| {
            filter.tag.as_ref().is_none_or(|tag| datastore.tags.contains(tag))
                && filter.maintenance.is_none_or(|wanted| datastore.maintenance == wanted)
                && filter
                    .host
                    .as_ref()
                    .is_none_or(|host| datastore.hosts.iter().any(|at| at.host == *host))
        };
        let all = self.all_datastores().into_iter().filter(is_wanted);
        // Two hosts may have a datastore each with the same path.
        let by_name: BTreeMap<String, ManagedDatastore> =
            all.map(|one| (format!("{} {}", one.name, one.id), one)).collect();
        page(by_name.iter(), cursor, |_, datastore: &ManagedDatastore| datastore.clone())
    }

    /// Returns all datastores, by ID: `vm_dirs` of hosts, directories with VMs' disks, and those
    /// with settings.
    pub(crate) fn all_datastores(&self) -> Vec<ManagedDatastore> {
        self.groups().iter().map(|(id, group)| self.shown_datastore(id, group)).collect()
    }

    /// Finds a datastore by its ID, its name, or its path at one of its hosts.
    pub(crate) fn find_datastore(&self, named: &str) -> Result<ManagedDatastore, Problem> {
        let all = self.all_datastores();
        let named_so = |is_it: &dyn Fn(&ManagedDatastore) -> bool| {
            all.iter().filter(|one| is_it(one)).cloned().collect::<Vec<_>>()
        };
        let found = [
            named_so(&|one| one.id == named),
            named_so(&|one| one.name == named),
            named_so(&|one| one.hosts.iter().any(|at| at.path == named)),
        ];
        let mut found = found.into_iter().find(|found| !found.is_empty()).unwrap_or_default();
        match (found.pop(), found.is_empty()) {
            (Some(one), true) => Ok(one),
            (None, _) => Err(no_datastore(named)),
            (Some(last), false) => {
                found.push(last);
                let which = |one: &ManagedDatastore| {
                    let host = one.hosts.first().map_or("no host", |at| at.host.as_str());
                    format!("{} of {host}", one.id)
                };
                let which: Vec<String> = found.iter().take(MOST_NAMED).map(which).collect();
                let detail = format!("{} datastores are named \"{named}\"", found.len());
                let remedy = format!("use an ID ({}), or give them names", which.join(", "));
                Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy))
            }
        }
    }

    /// Returns a datastore with the disks in it.
    pub(crate) fn datastore_details(&self, named: &str) -> Result<DatastoreDetails, Problem> {
        let datastore = self.find_datastore(named)?;
        let shown = |disk: DiskInDatastore| DatastoreDisk {
            vm: disk.vm,
            host: disk.host,
            path: disk.path.display().to_string(),
            readonly: disk.readonly,
        };
        let used_by = self.disks_in(&datastore.id).into_iter().map(shown).collect();
        Ok(DatastoreDetails { datastore, used_by })
    }

    /// Returns the disks of VMs in a datastore, by VM.
    pub(crate) fn disks_in(&self, id: &str) -> Vec<DiskInDatastore> {
        let is_in = |info: &VmInfo, image: &Path| {
            dir_of(image).is_some_and(|dir| self.datastore_at(&info.host, dir) == id)
        };
        let mut found = Vec::new();
        for info in self.vms.values().filter_map(Vm::main) {
            let disk = |path: &Path, readonly| DiskInDatastore {
                vm: info.name.clone(),
                host: info.host.clone(),
                path: path.to_owned(),
                readonly,
            };
            let disks = info.spec.disks.iter().map(|one| disk(&one.path, one.readonly));
            let cds = info.spec.cdroms.iter().filter_map(|cd| Some(disk(cd.image.as_ref()?, true)));
            found.extend(disks.chain(cds).filter(|disk| is_in(info, &disk.path)));
        }
        found
    }

    /// Returns whether a VM has a disk in a directory, or in the datastore with this ID.
    pub(super) fn is_on_datastore(&self, info: &VmInfo, named: &str, id: Option<&str>) -> bool {
        let mut dirs = info.spec.images().filter_map(dir_of);
        dirs.any(|dir| {
            dir == Path::new(named)
                || self.datastore_dir(&info.host, dir) == Path::new(named)
                || id.is_some_and(|id| self.datastore_at(&info.host, dir) == id)
        })
    }

    fn groups(&self) -> BTreeMap<String, Group> {
        let mut groups = BTreeMap::<String, Group>::new();
        for id in self.datastores.keys() {
            groups.entry(id.clone()).or_default();
        }
        for (host, info) in self.host_infos() {
            // Agents that report datastores omit directories that do not exist.
            let reports = !info.datastores.is_empty();
            let dirs = info.vm_dirs.iter();
            for dir in dirs.filter(|dir| !reports || info.datastores.contains_key(*dir)) {
                let group = groups.entry(self.datastore_at(host, dir)).or_default();
                group.at.insert((host.to_owned(), dir.clone()));
            }
        }
        for info in self.vms.values().filter_map(Vm::main) {
            let mut of_vm = BTreeSet::new();
            for dir in info.spec.images().filter_map(dir_of) {
                let id = self.datastore_at(&info.host, dir);
                let group = groups.entry(id.clone()).or_default();
                group.at.insert((info.host.clone(), self.datastore_dir(&info.host, dir)));
                group.disks += 1;
                if of_vm.insert(id) {
                    group.vms += 1;
                }
            }
        }
        groups
    }

    fn shown_datastore(&self, id: &str, group: &Group) -> ManagedDatastore {
        let plan = self.datastores.get(id).cloned().unwrap_or_default();
        let hosts: Vec<DatastoreAtHost> =
            group.at.iter().map(|(host, path)| self.at_host(host, path)).collect();
        let infos = group.at.iter().filter_map(|(host, path)| self.datastore_info(host, path));
        let sized = infos.clone().filter(|info| has_size(info));
        let path = hosts.first().map(|at| at.path.clone()).unwrap_or_default();
        let by_default = if path.is_empty() { id.to_owned() } else { path.clone() };
        ManagedDatastore {
            id: id.to_owned(),
            name: plan.name.unwrap_or(by_default),
            path,
            description: plan.description,
            tags: plan.tags,
            maintenance: plan.maintenance,
            kind: hosts.iter().find_map(|at| at.kind.clone()),
            total_bytes: sized.clone().map(|info| info.total_bytes).max(),
            free_bytes: sized.map(|info| info.free_bytes).min(),
            promised_bytes: infos.filter_map(|info| info.promised_bytes).max(),
            health: worst(&hosts),
            hosts,
            vms: group.vms,
            disks: group.disks,
        }
    }

    /// Returns what a host reports of a directory of a datastore.
    pub(crate) fn datastore_info(&self, host: &str, dir: &Path) -> Option<&DatastoreInfo> {
        self.host_info(host)?.datastores.get(dir)
    }

    fn at_host(&self, host: &str, dir: &Path) -> DatastoreAtHost {
        let info = self.datastore_info(host, dir);
        let sized = info.filter(|info| has_size(info));
        DatastoreAtHost {
            host: host.to_owned(),
            path: dir.display().to_string(),
            is_current: self.is_up(host),
            total_bytes: sized.map(|info| info.total_bytes),
            free_bytes: sized.map(|info| info.free_bytes),
            kind: info.and_then(|info| info.kind.clone()),
            speed: info.and_then(|info| info.speed),
            health: info.and_then(|info| info.health),
            problem: info.and_then(|info| info.problem.clone()),
        }
    }

    fn host_infos(&self) -> impl Iterator<Item = (&str, &HostInfo)> {
        self.hosts.iter().filter_map(|(name, host)| Some((name.as_str(), host.info.as_deref()?)))
    }
}

/// Returns the worst health at the reachable hosts.
fn worst(hosts: &[DatastoreAtHost]) -> Option<DatastoreHealth> {
    hosts.iter().filter(|at| at.is_current).filter_map(|at| at.health).max()
}

pub(crate) fn no_datastore(named: &str) -> Problem {
    let detail = format!("unknown datastore \"{named}\"");
    Problem::new(ProblemCode::NotFound, detail, "see `godwit datastore list`")
}

/// Returns the ID of a datastore without an identity: it is made of its path.
fn id_of_path(dir: &Path) -> String {
    let hash = blake3::hash(format!("godwit datastore path {}", dir.display()).as_bytes());
    let first = hash.as_bytes().first_chunk().copied().unwrap_or_default();
    Uuid::from_u128(u128::from_be_bytes(first)).to_string()
}

/// Whether the size of a datastore is known.
fn has_size(info: &DatastoreInfo) -> bool {
    info.total_bytes > 0
}

/// Returns the directory or the pool of an image; `None` for a name in a pool that is not well
/// formed.
fn dir_of(image: &Path) -> Option<&Path> {
    let is_named = !is_rbd(image) || RbdImage::of(image).is_some();
    image.parent().filter(|_| is_named)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::inventory::VmFilter;
    use crate::rig;

    const SHARED: &str = "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10";

    /// Returns two hosts that share a directory by different paths, and have one each of the same
    /// path.
    fn cluster() -> Inventory {
        let mut inventory = Inventory::default();
        for (name, shared) in [("a", "/srv/shared"), ("b", "/mnt/shared")] {
            let mut info = rig::host(name, None);
            info.vm_dirs = vec![shared.into(), "/local".into(), "/old".into()];
            let local = format!("{name}0000000-7f2c-4d7e-9c1e-5b8a8e3d2a10");
            info.datastores = serde_json::from_value(json!({
                shared: { "total_bytes": 100, "free_bytes": if name == "a" { 40 } else { 39 },
                    "identity": SHARED, "kind": "nfs", "promised_bytes": 300, "health": "ok" },
                "/local": { "total_bytes": 50, "free_bytes": 20, "identity": local,
                    "health": if name == "a" { "ok" } else { "slow" } },
                "/old": { "total_bytes": 7, "free_bytes": 7 },
            }))
            .unwrap();
            let mut vm = rig::vm(&format!("web-{name}"), name, None);
            let disk = |path: String| json!({ "path": path, "format": "raw" });
            let disks = json!([
                disk(format!("{shared}/images/a.raw")),
                disk(format!("{shared}/b.raw")),
                disk("/elsewhere/c.raw".to_owned()),
            ]);
            vm.spec.disks = serde_json::from_value(disks).unwrap();
            rig::put_host(&mut inventory, info, &[], vec![vm]);
        }
        inventory
    }

    const POOL: &str = "90000000-7f2c-4d7e-9c1e-5b8a8e3d2a10";
    const SHOP: &str = "91000000-7f2c-4d7e-9c1e-5b8a8e3d2a10";

    /// Returns two hosts with a pool of Ceph, of which b knows no space, and a namespace of it that
    /// a alone has. A host c does not have them.
    fn pools() -> Inventory {
        let mut inventory = Inventory::default();
        for name in ["a", "b", "c"] {
            let mut info = rig::host(name, None);
            info.vm_dirs = vec!["/srv".into()];
            let of = |identity: &str, total: u64, free: u64| {
                json!({ "total_bytes": total, "free_bytes": free, "identity": identity,
                    "kind": "ceph-rbd" })
            };
            let mut found = json!({ "/srv": { "total_bytes": 9, "free_bytes": 9 } });
            if name != "c" {
                info.vm_dirs.push("rbd:vms".into());
                found["rbd:vms"] = if name == "a" { of(POOL, 100, 40) } else { of(POOL, 0, 0) };
            }
            if name == "a" {
                info.vm_dirs.push("rbd:vms/shop".into());
                found["rbd:vms/shop"] = of(SHOP, 100, 40);
            }
            info.datastores = serde_json::from_value(found).unwrap();
            let mut vm = rig::vm(&format!("web-{name}"), name, None);
            let disk = |path: String| json!({ "path": path, "format": "raw" });
            let disks = json!([
                disk(format!("rbd:vms/{name}")),
                disk(format!("rbd:vms/shop/{name}")),
                disk("rbd:bad".to_owned()),
            ]);
            vm.spec.disks = serde_json::from_value(disks).unwrap();
            rig::put_host(&mut inventory, info, &[], vec![vm]);
        }
        inventory
    }

    #[test]
    fn a_pool_of_several_hosts_is_one_datastore_with_its_images() {
        let mut inventory = pools();
        let pool = inventory.find_datastore(POOL).unwrap();
        let hosts: Vec<_> = pool.hosts.iter().map(|at| (&*at.host, &*at.path)).collect();
        assert_eq!(hosts, [("a", "rbd:vms"), ("b", "rbd:vms")]);
        assert_eq!((pool.name.as_str(), pool.kind.as_deref()), ("rbd:vms", Some("ceph-rbd")));
        // What b does not know counts as nothing known.
        assert_eq!((pool.total_bytes, pool.free_bytes), (Some(100), Some(40)));
        assert_eq!((pool.hosts[1].total_bytes, pool.hosts[1].free_bytes), (None, None));
        assert_eq!((pool.vms, pool.disks), (2, 2));
        // A namespace is one of its own, and so is a pool that a host has not reported.
        let shop = inventory.find_datastore(SHOP).unwrap();
        assert_eq!((shop.path.as_str(), shop.disks, shop.hosts.len()), ("rbd:vms/shop", 1, 1));
        for unreported in [("b", "rbd:vms/shop"), ("c", "rbd:vms")] {
            let id = inventory.datastore_at(unreported.0, Path::new(unreported.1));
            assert!(id != POOL && id != SHOP, "{unreported:?}");
            assert_eq!(inventory.disks_in(&id).len(), if unreported.0 == "b" { 2 } else { 1 });
        }
        // By its path there are several; a name makes it one.
        assert!(inventory.find_datastore("rbd:vms").is_err());
        let plan = DatastorePlan { name: Some("ceph".into()), ..DatastorePlan::default() };
        inventory.plan_datastore(POOL, Some(plan));
        let details = inventory.datastore_details("ceph").unwrap();
        let paths: Vec<_> = details.used_by.iter().map(|disk| disk.path.as_str()).collect();
        assert_eq!(paths, ["rbd:vms/a", "rbd:vms/b"]);
        let filter = VmFilter { datastore: Some("ceph".to_owned()), ..VmFilter::default() };
        assert_eq!(inventory.vms(&filter, &all(10)).total, 2);
    }

    fn all(limit: usize) -> Cursor {
        Cursor { behind: None, limit }
    }

    #[test]
    fn directories_with_one_identity_are_one_datastore() {
        let inventory = cluster();
        let list = inventory.datastores(&DatastoreFilter::default(), &all(10));
        let shown: Vec<_> = list
            .items
            .iter()
            .map(|one| (one.name.as_str(), one.hosts.len(), one.vms, one.disks))
            .collect();
        let expected = [
            ("/elsewhere", 2, 2, 2),
            ("/local", 1, 0, 0),
            ("/local", 1, 0, 0),
            ("/old", 2, 0, 0),
            ("/srv/shared", 2, 2, 4),
        ];
        assert_eq!(shown, expected);
        let shared = &list.items[4];
        assert_eq!((shared.free_bytes, shared.total_bytes), (Some(39), Some(100)));
        assert_eq!((shared.promised_bytes, shared.kind.as_deref()), (Some(300), Some("nfs")));
        assert_eq!(shared.hosts[1].path, "/mnt/shared");
        // In pages, too.
        let first = inventory.datastores(&DatastoreFilter::default(), &all(2));
        let rest = Cursor { behind: first.next, limit: 10 };
        let rest = inventory.datastores(&DatastoreFilter::default(), &rest);
        assert_eq!((rest.items.len(), rest.items[0].name.as_str()), (3, "/local"));
    }

    #[test]
    fn a_datastore_is_found_by_id_name_and_path() {
        let mut inventory = cluster();
        let plan = DatastorePlan { name: Some("fast".to_owned()), ..DatastorePlan::default() };
        inventory.plan_datastore(SHARED, Some(plan));
        for named in [SHARED, "fast", "/mnt/shared", "/srv/shared"] {
            assert_eq!(inventory.find_datastore(named).unwrap().id, SHARED, "{named}");
        }
        let ambiguous = inventory.find_datastore("/local").unwrap_err();
        assert!(ambiguous.remedy.contains("of a"), "{ambiguous}");
        assert_eq!(inventory.find_datastore("none").unwrap_err().code, ProblemCode::NotFound);
        let details = inventory.datastore_details("fast").unwrap();
        assert_eq!((details.used_by.len(), details.datastore.name.as_str()), (4, "fast"));
        for named in [SHARED, "fast", "/srv/shared/images", "/mnt/shared"] {
            let filter = VmFilter { datastore: Some(named.to_owned()), ..VmFilter::default() };
            let expected = if named == "/srv/shared/images" { 1 } else { 2 };
            assert_eq!(inventory.vms(&filter, &all(10)).total, expected, "{named}");
        }
        // Settings outlast the hosts.
        inventory.forget_host("a");
        inventory.forget_host("b");
        let left = inventory.find_datastore("fast").unwrap();
        assert!(left.hosts.is_empty() && left.health.is_none());
    }

    #[test]
    fn a_directory_whose_file_system_has_not_answered_yet_keeps_its_identity() {
        let mut inventory = cluster();
        let mut info = HostInfo::clone(inventory.host_info("a").unwrap());
        info.datastores.clear();
        rig::put_host(&mut inventory, info.clone(), &[], vec![]);
        assert_eq!(inventory.datastore_at("a", Path::new("/srv/shared")), SHARED);
        // It says now that there is none.
        info.datastores.insert("/srv/shared".into(), DatastoreInfo::default());
        rig::put_host(&mut inventory, info, &[], vec![]);
        assert_ne!(inventory.datastore_at("a", Path::new("/srv/shared")), SHARED);
    }

    #[test]
    fn a_filter_takes_tags_maintenance_and_hosts() {
        let mut inventory = cluster();
        let tags = BTreeSet::from(["ssd".to_owned()]);
        let plan = DatastorePlan { tags, maintenance: true, ..DatastorePlan::default() };
        inventory.plan_datastore(SHARED, Some(plan));
        let count = |filter: DatastoreFilter| inventory.datastores(&filter, &all(10)).total;
        let filter = DatastoreFilter::default;
        assert_eq!(count(DatastoreFilter { tag: Some("ssd".into()), ..filter() }), 1);
        assert_eq!(count(DatastoreFilter { tag: Some("hdd".into()), ..filter() }), 0);
        assert_eq!(count(DatastoreFilter { maintenance: Some(false), ..filter() }), 4);
        assert_eq!(count(DatastoreFilter { host: Some("b".into()), ..filter() }), 4);
        let worst = inventory.all_datastores().into_iter().filter_map(|one| one.health).max();
        assert_eq!(worst, Some(DatastoreHealth::Slow));
    }
}
