//! All jobs of the manager. Unfinished and finished jobs are apart: nothing that happens often
//! walks over the finished ones, which are found by their IDs only.

use std::collections::BTreeMap;
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
    /// Number of jobs that were visited through the iterators.
    #[cfg(test)]
    visited: AtomicU64,
}

impl Jobs {
    /// Adds a job, or replaces it.
    pub(super) fn put(&mut self, job: Job) {
        let id = job.id.clone();
        if job.state.is_over() {
            if self.open.remove(&id).is_some() && self.open_of_vm.get(&job.vm) == Some(&id) {
                self.open_of_vm.remove(&job.vm);
            }
            self.over.insert(id, job);
        } else {
            self.over.remove(&id);
            self.open_of_vm.insert(job.vm.clone(), id.clone());
            self.open.insert(id, job);
        }
    }

    pub(super) fn remove(&mut self, id: &str) {
        self.over.remove(id);
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
