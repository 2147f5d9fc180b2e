//! The guest that Godwit moves, with its disks or without.

use std::time::Duration;

use anyhow::{Context, Result};
use godwit_api::TravellingDisks;
use godwit_lab::trial::{Guest, GuestPlan, Trial};
use godwit_types::Outcome;

use super::images::{self, Folders, Image};
use super::{Moved, Mover, Way};

/// Guest of Godwit's agents.
pub(super) struct Subject<'a> {
    trial: &'a Trial,
    plan: GuestPlan,
    folders: Folders,
    limit: Duration,
    guest: Guest,
    images: Vec<Image>,
    /// Images that the last move left behind.
    former: Vec<Image>,
}

impl<'a> Subject<'a> {
    /// Boots the guest at host a, and fills its disks.
    pub(super) fn new(
        trial: &'a Trial,
        plan: &GuestPlan,
        folders: Folders,
        limit: Duration,
    ) -> Result<Subject<'a>> {
        let images = folders.make_filled_images("a")?;
        let plan = GuestPlan { disks: images.iter().map(Image::disk).collect(), ..plan.clone() };
        let guest = trial.guest("a", &plan)?;
        guest.fill_disks(&folders.fills())?;
        Ok(Subject { trial, plan, folders, limit, guest, images, former: Vec::new() })
    }

    /// Returns the images that the VM has now.
    fn images_now(&self) -> Result<Vec<Image>> {
        let vm = self.trial.vm(&self.guest.host, &self.guest.name)?;
        let image =
            |disk: &godwit_qemu::Disk| Image { path: disk.path.clone(), format: disk.format };
        Ok(vm.spec.disks.iter().map(image).collect())
    }
}

impl Mover for Subject<'_> {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn travelling_bytes(&self, way: Way) -> u64 {
        if way == Way::Godwit { self.folders.used_bytes() } else { 0 }
    }

    fn move_by(&mut self, way: Way) -> Result<Moved> {
        let first = self.images.first().context("the guest has no disks")?;
        let to = self.folders.at(self.folders.other(first));
        let with_disks = way == Way::Godwit;
        let mut request = self.guest.to_other_host();
        request.disks =
            with_disks.then(|| TravellingDisks { to: Some(to), ..TravellingDisks::default() });
        let Guest { name, host, .. } = &self.guest;
        let migration = self.trial.begin_migration(name, host, &request)?;
        let report = migration.report_within(self.limit, |_| {})?;
        if report.outcome == Outcome::Completed {
            self.guest.host.clone_from(&request.to);
            if with_disks {
                let now = self.images_now()?;
                self.former = std::mem::replace(&mut self.images, now);
            }
        }
        self.guest.status().context("the guest does not answer after its move")?;
        Ok(Moved::by_godwit(report))
    }

    fn expect_same_images(&self) -> Result<()> {
        images::expect_same(&self.former, &self.images)
    }

    fn remove_former(&mut self) -> Result<()> {
        images::remove(&std::mem::take(&mut self.former))
    }

    fn anew(&mut self) -> Result<()> {
        for host in self.trial.hosts() {
            // It may be on either host, or on both.
            if let Err(error) = self.trial.delete(&host, &self.plan.name) {
                eprintln!("  host {host}: {error}");
            }
        }
        self.folders.clear()?;
        self.former.clear();
        self.images = self.folders.make_filled_images("a")?;
        self.plan.disks = self.images.iter().map(Image::disk).collect();
        self.guest = self.trial.guest("a", &self.plan)?;
        self.guest.fill_disks(&self.folders.fills())?;
        Ok(())
    }
}
