//! All jobs of the manager. Unfinished and finished jobs are apart: nothing that happens often
//! walks over the finished ones, which are found by their IDs only.

use std::collections::{BTreeMap, BTreeSet};
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};

use super::job::{Job, job_of};

/// Jobs by ID. IDs sort by the time of the request.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    open: BTreeMap<String, Job>,
    over: BTreeMap<String, Job>,
    /// ID of the unfinished job of each VM.
    open_of_vm: BTreeMap<String, String>,
    /// Hosts and names of the migrations that agents were asked for.
    foreign: BTreeSet<(String, String)>,
    /// Number of jobs that were visited through the iterators.
    #[cfg(test)]
    visited: AtomicU64,
}

/// Returns the host and the name of a job's migration if an agent was asked for it.
fn foreign(job: &Job) -> Option<(String, String)> {
    let migration = job.state.migration().filter(|_| job.state.is_over())?;
    (job_of(migration) != Some(job.id.as_str())).then(|| (job.from.clone(), migration.to_owned()))
}

impl Jobs {
    /// Adds a job, or replaces it.
    pub(super) fn put(&mut self, job: Job) {
        let id = job.id.clone();
        if job.state.is_over() {
            if self.open.remove(&id).is_some() && self.open_of_vm.get(&job.vm) == Some(&id) {
                self.open_of_vm.remove(&job.vm);
            }
            self.foreign.extend(foreign(&job));
            self.over.insert(id, job);
        } else {
            self.over.remove(&id);
            self.open_of_vm.insert(job.vm.clone(), id.clone());
            self.open.insert(id, job);
        }
    }

    pub(super) fn remove(&mut self, id: &str) {
        if let Some(key) = self.over.remove(id).as_ref().and_then(foreign) {
            self.foreign.remove(&key);
        }
    }

    /// Returns whether this migration of a host is known, or belonged to a job that was removed
    /// because others are newer.
    pub(super) fn has_ended(&self, host: &str, migration: &str) -> bool {
        let is_removed = |id: &str| {
            let oldest = self.over.first_key_value().map(|(oldest, _)| oldest.as_str());
            id.starts_with('v') && oldest.is_some_and(|oldest| id < oldest)
        };
        self.is_own(migration)
            || job_of(migration).is_some_and(is_removed)
            || self.foreign.contains(&(host.to_owned(), migration.to_owned()))
    }

    pub(super) fn get(&self, id: &str) -> Option<&Job> {
        self.open.get(id).or_else(|| self.over.get(id))
    }

    /// Returns a job for changing anything but its state: [`Jobs::put`] changes that and keeps the
    /// indices.
    pub(super) fn get_mut(&mut self, id: &str) -> Option<&mut Job> {
        self.open.get_mut(id).or_else(|| self.over.get_mut(id))
    }

    /// Returns the job whose present or last attempt is this migration.
    pub(super) fn of_migration(&mut self, migration: &str) -> Option<&mut Job> {
        let job = self.get_mut(job_of(migration)?)?;
        (job.state.migration() == Some(migration)).then_some(job)
    }

    /// Returns whether a migration belongs to a job.
    pub(super) fn is_own(&self, migration: &str) -> bool {
        job_of(migration).is_some_and(|id| self.get(id).is_some())
    }

    /// Returns the unfinished jobs, by ID.
    pub(super) fn open(&self) -> impl Iterator<Item = &Job> + Clone {
        self.open.values().inspect(|_| self.visit())
    }

    pub(super) fn open_count(&self) -> usize {
        self.open.len()
    }

    /// Returns the unfinished job of a VM.
    pub(super) fn open_of_vm(&self, vm: &str) -> Option<&Job> {
        self.open.get(self.open_of_vm.get(vm)?)
    }

    /// Returns the IDs of the oldest finished jobs beyond the newest `most`, at most `limit`.
    pub(super) fn oldest_over(&self, most: usize, limit: usize) -> Vec<String> {
        let beyond = self.over.len().saturating_sub(most).min(limit);
        self.over.keys().take(beyond).inspect(|_| self.visit()).cloned().collect()
    }

    /// Returns the IDs of all jobs.
    pub(super) fn ids(&self) -> impl Iterator<Item = &String> {
        self.over.keys().chain(self.open.keys()).inspect(|_| self.visit())
    }

    fn visit(&self) {
        #[cfg(test)]
        self.visited.fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn visited(&self) -> u64 {
        self.visited.load(Ordering::Relaxed)
    }
}
