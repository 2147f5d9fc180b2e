//! Looks into the folders of VMs on datastores: what is found there is judged ([`Watched`]).

use std::collections::BTreeMap;
use std::path::PathBuf;

use godwit_api::{HaStanding, OwnStanding, OwnVm};
use godwit_qemu::Uuid;

use super::OwnVms;
use super::folder::{self, OwnError, Place};
use super::watching::Watched;
use crate::ha::boot_clock;
use crate::ha::heartbeats::HeartbeatError;
use crate::ha::heartbeats::turns::Work;

impl OwnVms {
    /// Calls a function with what is known of a VM on a datastore.
    pub(crate) fn with_watched<T>(
        &self,
        datastore: Uuid,
        vm: Uuid,
        ask: impl FnOnce(&mut Watched) -> T,
    ) -> Option<T> {
        self.watched.lock().get_mut(&(datastore, vm)).map(ask)
    }

    /// Returns the VMs that are known on a datastore.
    pub(crate) fn watched_at(&self, datastore: Uuid) -> Vec<Uuid> {
        let watched = self.watched.lock();
        let of_it = watched.keys().filter(|(store, _)| *store == datastore);
        of_it.map(|&(_, vm)| vm).collect()
    }

    /// Shows the VMs that are known, and what prevents their protection.
    pub(crate) fn shown(&self) -> (Vec<OwnVm>, Vec<String>) {
        let guards = self.guards.lock().clone();
        let all = self.watched.lock();
        let shown = all.iter().map(|(&(datastore, uuid), watched)| {
            let guard = guards.get(&uuid).map(|own| own.guard.state());
            let guard = guard.filter(|state| {
                let beats = state.datastores.first();
                let is_here = beats.is_none_or(|beats| beats.datastore == datastore);
                is_here && watched.term.0 <= state.term && state.standing != HaStanding::Over
            });
            let standing = match guard.as_ref().map(|state| state.standing) {
                Some(HaStanding::Held) => OwnStanding::Held,
                Some(HaStanding::Stopping) => OwnStanding::Stopping,
                Some(HaStanding::Over) | None => watched.standing(),
            };
            let beat = guard.and_then(|state| state.datastores.first()?.problem.clone());
            let record = watched.record.as_ref();
            let here = || watched.problem.clone().or_else(|| watched.refused.clone());
            let problem = beat.or_else(here);
            OwnVm {
                vm: record.map_or_else(|| uuid.to_string(), |record| record.spec.name.clone()),
                uuid,
                datastore,
                term: watched.term.0,
                standing,
                holder: watched.holder(),
                host: record.map(|record| record.host.clone()),
                problem: problem.or_else(|| record.and_then(|record| record.problem.clone())),
            }
        });
        (shown.collect(), self.problems.lock().values().cloned().collect())
    }

    /// Looks into the folders of a datastore. What was found is taken in.
    pub(crate) async fn scan(&self, directory: PathBuf, datastore: Uuid) {
        if self.turns.begin(datastore, Work::Read).is_none() {
            // The thread of the last look has not ended: the datastore hangs.
            return self.could_not_scan(datastore, &HeartbeatError::Late.into());
        }
        let work = move || {
            let began = boot_clock();
            folder::scan(&directory, datastore).map(|scan| (began, boot_clock(), directory, scan))
        };
        let scanned = self.at(datastore, Work::Read, work).await;
        let (began, now, directory, scan) = match scanned {
            Ok(scanned) => scanned,
            Err(error) => return self.could_not_scan(datastore, &error),
        };
        let mut problems = self.problems.lock();
        problems.remove(&datastore);
        if scan.left_out > 0 {
            let left_out = scan.left_out;
            let problem = format!("{left_out} VMs of datastore {datastore} are not watched");
            problems.insert(datastore, problem);
        }
        drop(problems);
        let mut watched = self.watched.lock();
        watched.retain(|(store, vm), _| {
            *store != datastore || scan.vms.iter().any(|(seen, _)| seen == vm)
        });
        for (vm, found) in scan.vms {
            let place = Place { directory: directory.clone(), datastore, vm };
            let of_vm =
                watched.entry((datastore, vm)).or_insert_with(|| Watched::new(place.clone(), now));
            of_vm.place = place;
            match found {
                Ok(found) => of_vm.saw((began, now), found),
                Err(error) => of_vm.failed(error.to_string()),
            }
        }
    }

    fn could_not_scan(&self, datastore: Uuid, error: &OwnError) {
        let mut watched = self.watched.lock();
        let of_it = watched.iter_mut().filter(|((store, _), _)| *store == datastore);
        of_it.for_each(|(_, watched)| watched.failed(error.to_string()));
        drop(watched);
        let problem = format!("cannot look into .godwit/protected of {datastore}: {error}");
        self.problems.lock().insert(datastore, problem);
    }

    /// Forgets what is known of datastores that this host does not have any more.
    pub(crate) fn keep_datastores(&self, known: &BTreeMap<Uuid, PathBuf>) {
        self.watched.lock().retain(|(datastore, _), _| known.contains_key(datastore));
        self.problems.lock().retain(|datastore, _| known.contains_key(datastore));
    }

    /// Looks into the folder of a VM; `None` if it has none. What was found is taken in.
    ///
    /// # Errors
    /// It cannot be read in time.
    pub(crate) async fn look(&self, place: &Place) -> Result<Option<()>, OwnError> {
        let (of, vm) = (place.clone(), place.vm);
        let work = move || {
            let began = boot_clock();
            folder::look(&of).map(|found| (began, boot_clock(), found))
        };
        let (began, now, found) = self.at(vm, Work::Read, work).await?;
        let mut watched = self.watched.lock();
        let Some(found) = found else {
            watched.remove(&(place.datastore, vm));
            return Ok(None);
        };
        let of_vm = watched
            .entry((place.datastore, vm))
            .or_insert_with(|| Watched::new(place.clone(), now));
        of_vm.saw((began, now), found);
        Ok(Some(()))
    }
}
