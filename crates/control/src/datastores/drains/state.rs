//! State of a drain of a datastore, its form in the API, and which moves may begin. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use godwit_api::control::{DatastoreDrain, DrainDisk, DrainDiskState, DrainState};
use godwit_qemu::DiskFormat;
use godwit_types::RateLimit;

/// Most disks that move at once at a host: its agent has places for a few copies.
const MOST_OF_HOST: usize = 2;
/// Most disks that move at once into a datastore.
const MOST_INTO: usize = 4;

/// A drain of a datastore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoreDrain {
    /// ID of the datastore, and its name at the begin.
    pub(super) datastore: String,
    pub(super) name: String,
    pub(super) asked_by: String,
    pub(super) asked_unix_ms: u64,
    pub(super) flatten: bool,
    pub(super) bandwidth_limit: Option<RateLimit>,
    pub(super) state: DrainState,
    pub(super) was_in_maintenance: bool,
    pub(super) ended_unix_ms: Option<u64>,
    pub(super) disks: Vec<StoreDisk>,
}

/// A disk of a drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoreDisk {
    pub(super) vm: String,
    pub(super) host: String,
    /// Image at the begin.
    pub(super) path: PathBuf,
    pub(super) state: DrainDiskState,
    pub(super) reason: String,
    pub(super) to: Option<Target>,
    /// Image after the move.
    pub(super) image: Option<PathBuf>,
    /// Job of the host that moves it.
    pub(super) job: Option<String>,
    /// Whether the move is the one back.
    pub(super) returns: bool,
    /// Format that it had and its move changes: it gets that back.
    pub(super) format_back: Option<DiskFormat>,
    pub(super) progress: Progress,
}

/// What is not saved: the next leader finds it out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) done_bytes: u64,
    pub(super) total_bytes: u64,
    /// Attempts that were refused for now.
    pub(super) refused: u32,
    /// Earliest time of the next attempt.
    pub(super) not_before_ms: u64,
}

/// Datastore that a disk goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) id: String,
    pub(super) name: String,
}

/// Moves that run, of all drains.
#[derive(Debug, Default)]
pub(super) struct Load {
    of_host: BTreeMap<String, usize>,
    into: BTreeMap<String, usize>,
    vms: BTreeSet<String>,
}

impl Load {
    pub(super) fn of<'a>(drains: impl Iterator<Item = &'a StoreDrain>) -> Load {
        let mut load = Load::default();
        drains.for_each(|drain| load.join(drain));
        load
    }

    /// Adds the moves of a drain.
    pub(super) fn join(&mut self, drain: &StoreDrain) {
        let moving = drain.disks.iter().filter(|disk| disk.state == DrainDiskState::Moving);
        moving.for_each(|disk| self.add(drain, disk));
    }

    fn add(&mut self, drain: &StoreDrain, disk: &StoreDisk) {
        *self.of_host.entry(disk.host.clone()).or_default() += 1;
        *self.into.entry(drain.target_of(disk).to_owned()).or_default() += 1;
        self.vms.insert(disk.vm.clone());
    }

    /// Whether there is a place for the move of a disk. A VM's disks move one after the other.
    fn has_place(&self, drain: &StoreDrain, disk: &StoreDisk) -> bool {
        let of_host = self.of_host.get(&disk.host).copied().unwrap_or(0);
        let into = self.into.get(drain.target_of(disk)).copied().unwrap_or(0);
        of_host < MOST_OF_HOST && into < MOST_INTO && !self.vms.contains(&disk.vm)
    }
}

impl StoreDrain {
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, DrainState::Done | DrainState::Cancelled | DrainState::Undone)
    }

    /// Whether a move waits or runs.
    pub(super) fn has_open_moves(&self) -> bool {
        let is_open = |state| matches!(state, DrainDiskState::Waiting | DrainDiskState::Moving);
        self.disks.iter().any(|disk| is_open(disk.state))
    }

    /// Returns the ID of the datastore that a disk goes to.
    fn target_of<'a>(&'a self, disk: &'a StoreDisk) -> &'a str {
        match (&disk.to, disk.returns) {
            (Some(target), false) => &target.id,
            _ => &self.datastore,
        }
    }

    /// Returns the positions of the disks whose moves may begin now.
    pub(super) fn due(&self, load: &mut Load, now_ms: u64) -> Vec<usize> {
        let mut due = Vec::new();
        for (index, disk) in self.disks.iter().enumerate() {
            let waits = disk.state == DrainDiskState::Waiting;
            if waits && disk.progress.not_before_ms <= now_ms && load.has_place(self, disk) {
                load.add(self, disk);
                due.push(index);
            }
        }
        due
    }

    /// Makes the disks that have left return, and ends what waits.
    pub(super) fn turn_back(&mut self) {
        self.state = DrainState::Undoing;
        self.ended_unix_ms = None;
        for disk in &mut self.disks {
            if disk.state == DrainDiskState::Moved {
                disk.state = DrainDiskState::Waiting;
                disk.returns = true;
                disk.job = None;
                disk.progress = Progress::default();
                disk.reason = "it returns".to_owned();
            }
        }
    }

    /// Ends the moves that have not begun.
    pub(super) fn stop_waiting(&mut self, why: &str) {
        for disk in &mut self.disks {
            if disk.state == DrainDiskState::Waiting {
                disk.end_unmoved(why);
            }
        }
    }

    /// Converts the drain for the API.
    pub(super) fn summary(&self, id: &str) -> DatastoreDrain {
        DatastoreDrain {
            id: id.to_owned(),
            datastore: self.datastore.clone(),
            name: self.name.clone(),
            state: self.state,
            asked_by: self.asked_by.clone(),
            asked_unix_ms: self.asked_unix_ms,
            ended_unix_ms: self.ended_unix_ms,
            disks: self.disks.iter().map(StoreDisk::summary).collect(),
        }
    }
}

impl StoreDisk {
    fn summary(&self) -> DrainDisk {
        let shown = |path: &PathBuf| path.display().to_string();
        DrainDisk {
            vm: self.vm.clone(),
            host: self.host.clone(),
            path: shown(&self.path),
            state: self.state,
            to: self.to.as_ref().map(|target| target.name.clone()),
            image: self.image.as_ref().map(shown),
            reason: self.reason.clone(),
            job: self.job.clone(),
            done_bytes: self.progress.done_bytes,
            total_bytes: self.progress.total_bytes,
        }
    }

    /// Returns the image that the VM has now.
    pub(super) fn present(&self) -> &PathBuf {
        match &self.image {
            Some(image) if self.returns => image,
            _ => &self.path,
        }
    }

    /// Notes that the disk is where it was to go.
    pub(super) fn end_moved(&mut self, image: PathBuf) {
        self.state = if self.returns { DrainDiskState::Back } else { DrainDiskState::Moved };
        self.reason = format!("it is {} now", image.display());
        self.image = Some(image);
        self.progress.done_bytes = self.progress.total_bytes;
    }

    /// Notes that the disk stays where it is.
    pub(super) fn end_unmoved(&mut self, why: &str) {
        self.state = if self.returns { DrainDiskState::Moved } else { DrainDiskState::Stays };
        self.reason = if self.returns { format!("not moved back: {why}") } else { why.to_owned() };
        self.progress = Progress::default();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::datastores::drains) fn disk(vm: &str, host: &str, number: u32) -> StoreDisk {
        StoreDisk {
            vm: vm.to_owned(),
            host: host.to_owned(),
            path: format!("/old/{vm}-{number}.raw").into(),
            state: DrainDiskState::Waiting,
            reason: "fast".to_owned(),
            to: Some(Target { id: "fast".to_owned(), name: "fast".to_owned() }),
            image: None,
            job: None,
            returns: false,
            format_back: None,
            progress: Progress::default(),
        }
    }

    pub(in crate::datastores::drains) fn drain(disks: Vec<StoreDisk>) -> StoreDrain {
        StoreDrain {
            datastore: "old".to_owned(),
            name: "old".to_owned(),
            asked_by: "ada".to_owned(),
            asked_unix_ms: 1,
            flatten: false,
            bandwidth_limit: None,
            state: DrainState::Running,
            was_in_maintenance: false,
            ended_unix_ms: None,
            disks,
        }
    }

    #[test]
    fn moves_begin_within_the_limits_of_hosts_datastores_and_vms() {
        let hosts = ["a", "a", "a", "b", "b", "c", "d"];
        let disks = hosts.iter().enumerate().map(|(at, host)| disk(&format!("vm{at}"), host, 0));
        let mut all = drain(disks.collect());
        // Two of a, two of b: four into the datastore.
        assert_eq!(all.due(&mut Load::default(), 0), [0, 1, 3, 4]);
        let two_of_vm = drain(vec![disk("web", "a", 0), disk("web", "a", 1)]);
        assert_eq!(two_of_vm.due(&mut Load::default(), 0), [0]);
        // Moves of another drain count.
        let mut other = drain(vec![disk("x", "a", 0), disk("y", "a", 0)]);
        other.disks.iter_mut().for_each(|disk| disk.state = DrainDiskState::Moving);
        assert_eq!(all.due(&mut Load::of([&other].into_iter()), 0), [3, 4]);
        all.disks[0].progress.not_before_ms = 5;
        assert_eq!(all.due(&mut Load::default(), 4), [1, 2, 3, 4]);
    }

    #[test]
    fn what_has_left_returns_and_what_stays_says_why() {
        let mut all = drain(vec![disk("a", "a", 0), disk("b", "a", 0), disk("c", "a", 0)]);
        all.disks[0].end_moved("/fast/a-0.raw".into());
        all.disks[1].end_unmoved("no room");
        all.stop_waiting("the drain was cancelled");
        assert!(!all.has_open_moves());
        let stays = [&all.disks[1], &all.disks[2]].map(|disk| (disk.state, disk.reason.as_str()));
        let state = DrainDiskState::Stays;
        assert_eq!(stays, [(state, "no room"), (state, "the drain was cancelled")]);
        all.turn_back();
        assert_eq!(all.due(&mut Load::default(), 0), [0]);
        assert_eq!(all.disks[0].present(), &PathBuf::from("/fast/a-0.raw"));
        all.disks[0].end_unmoved("its host is away");
        let left = &all.disks[0];
        assert_eq!(left.state, DrainDiskState::Moved);
        assert_eq!(left.reason, "not moved back: its host is away");
        all.turn_back();
        all.disks[0].end_moved("/old/a-0.raw".into());
        assert_eq!(all.summary("s1").disks[0].state, DrainDiskState::Back);
    }
}
