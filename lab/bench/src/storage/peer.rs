//! QEMU's own way, as management programs drive it: the destination's QEMU exports its empty disks
//! over NBD, the source's mirrors to them, and once the mirrors are ready the guest migrates. Both
//! QEMUs are started here; Godwit does not know them.

mod qemu;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host};
use godwit_qemu::{DiskFormat, QmpEvent};
use serde_json::{Value, json};

use super::images::{self, Folders, Image};
use super::{Moved, Mover, Way};
use qemu::{Events, Qemu};

/// Ports of the destination's QEMU.
const NBD_PORT: u16 = 10_809;
const MIGRATION_PORT: u16 = 10_810;
/// More than any link here carries: QEMU has no word for "unlimited".
const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;
/// Time limit of a step that waits for nothing but QEMU.
const STEP: Duration = Duration::from_secs(60);

/// Guest of QEMUs without Godwit.
pub(super) struct Peer<'a> {
    trial: &'a Trial,
    plan: GuestPlan,
    folders: Folders,
    limit: Duration,
    guest: Guest,
    qemu: Qemu,
    images: Vec<Image>,
    former: Vec<Image>,
}

impl<'a> Peer<'a> {
    /// Boots the guest at host a, and fills its disks.
    pub(super) fn new(
        trial: &'a Trial,
        plan: &GuestPlan,
        folders: Folders,
        limit: Duration,
    ) -> Result<Peer<'a>> {
        for host in ["a", "b"] {
            qemu::make_tap(trial, host)?;
        }
        let images = folders.make_filled_images("a")?;
        let (qemu, guest) = boot(trial, plan, &folders, &images)?;
        let (plan, former) = (plan.clone(), Vec::new());
        Ok(Peer { trial, plan, folders, limit, guest, qemu, images, former })
    }

    /// Starts the destination's QEMU with empty images, which it exports.
    fn prepare(&self, to: &str, images: &[Image], address: &str) -> Result<Qemu> {
        let folder = self.folders.at(to);
        let target = Qemu::start(self.trial, to, &self.plan, images, &folder, true)?;
        let place = json!({ "host": address, "port": NBD_PORT.to_string() });
        let server = json!({ "addr": { "type": "inet", "data": place }, "max-connections": 0 });
        target.execute(self.trial, "nbd-server-start", server)?;
        for number in 0..images.len() {
            let export = json!({
                "type": "nbd",
                "id": export_id(number),
                "node-name": qemu::node(number),
                "name": qemu::node(number),
                "writable": true,
            });
            target.execute(self.trial, "block-export-add", export)?;
        }
        set_up_migration(self.trial, &target)?;
        let uri = json!({ "uri": format!("tcp:{address}:{MIGRATION_PORT}") });
        target.execute(self.trial, "migrate-incoming", uri)?;
        Ok(target)
    }

    /// Mirrors all disks and waits until the mirrors are ready. Returns when they were.
    fn mirror(&self, way: Way, address: &str, events: &mut Events) -> Result<Instant> {
        for (number, image) in self.images.iter().enumerate() {
            let node = json!({
                "driver": "nbd",
                "node-name": target_node(number),
                "server": { "type": "inet", "host": address, "port": NBD_PORT.to_string() },
                "export": qemu::node(number),
                "discard": "unmap",
            });
            self.qemu.execute(self.trial, "blockdev-add", node)?;
            self.qemu.execute(self.trial, "blockdev-mirror", mirror_job(number, image, way))?;
        }
        for _ in 0..self.images.len() {
            // Any other event of a job is its end.
            let is_of_job = |event: &QmpEvent| event.name.starts_with("BLOCK_JOB_");
            let event = events.wait(self.trial, "a mirror is ready", self.limit, is_of_job)?;
            ensure!(event.name == "BLOCK_JOB_READY", "{}: {}", event.name, event.data);
        }
        Ok(Instant::now())
    }

    /// Migrates the guest and ends the mirrors in its pause. Returns the pause.
    fn hand_over(&self, target: &Qemu, address: &str, events: &mut Events) -> Result<f64> {
        let trial = self.trial;
        let mut arriving = target.events();
        set_up_migration(trial, &self.qemu)?;
        let uri = json!({ "uri": format!("tcp:{address}:{MIGRATION_PORT}") });
        self.qemu.execute(trial, "migrate", uri)?;
        let stop = events.wait(trial, "the guest is stopped", self.limit, stops)?;
        ensure!(stop.name == "STOP", "the migration ended: {}", stop.data);
        events.wait(trial, "the migration waits", STEP, |event| has_status(event, WAITS))?;
        for number in 0..self.images.len() {
            let cancel = json!({ "device": job_id(number) });
            self.qemu.execute(trial, "block-job-cancel", cancel)?;
        }
        for _ in 0..self.images.len() {
            let is_end = |event: &QmpEvent| event.name == "BLOCK_JOB_COMPLETED";
            let end = events.wait(trial, "a mirror ends", STEP, is_end)?;
            ensure!(end.data["error"].is_null(), "a mirror failed: {}", end.data);
        }
        self.qemu.execute(trial, "migrate-continue", json!({ "state": WAITS }))?;
        let resumes = |event: &QmpEvent| event.name == "RESUME";
        let resume = arriving.wait(trial, "the guest runs", STEP, resumes)?;
        events.wait(trial, "the migration ends", STEP, |event| has_status(event, "completed"))?;
        let (stop, resume) = (stop.emitted, resume.emitted);
        let (stop, resume) = stop.zip(resume).context("QEMU gives no time of an event")?;
        Ok(resume.saturating_sub(stop).as_secs_f64() * 1e3)
    }

    /// Ends the source's QEMU, and what the destination's exports.
    fn let_go(&mut self, target: Qemu) -> Result<()> {
        let mut source = std::mem::replace(&mut self.qemu, target);
        source.quit(self.trial)?;
        for number in 0..self.images.len() {
            let id = json!({ "id": export_id(number), "mode": "hard" });
            self.qemu.execute(self.trial, "block-export-del", id)?;
        }
        self.qemu.execute(self.trial, "nbd-server-stop", Value::Null).map(drop)
    }
}

impl Mover for Peer<'_> {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn travelling_bytes(&self, _: Way) -> u64 {
        self.folders.used_bytes()
    }

    fn move_by(&mut self, way: Way) -> Result<Moved> {
        let to = other_host(&self.guest.host);
        let address = self.trial.lane_addresses(to)?;
        let address = address.first().context("the host has no address")?.to_string();
        let images = self.folders.make_images(to)?;
        let target = self.prepare(to, &images, &address)?;
        let mut events = self.qemu.events();
        let begun = Instant::now();
        let ready = self.mirror(way, &address, &mut events)?;
        let switchover_ms = self.hand_over(&target, &address, &mut events)?;
        let migration_ms = begun.elapsed().as_secs_f64() * 1e3;
        self.let_go(target)?;
        self.former = std::mem::replace(&mut self.images, images);
        to.clone_into(&mut self.guest.host);
        self.guest.status().context("the guest does not answer after its move")?;
        let mirrored_ms = ready.duration_since(begun).as_secs_f64() * 1e3;
        Ok(Moved::by_qemu(migration_ms, switchover_ms, mirrored_ms))
    }

    fn expect_same_images(&self) -> Result<()> {
        images::expect_same(&self.former, &self.images)
    }

    fn remove_former(&mut self) -> Result<()> {
        images::remove(&std::mem::take(&mut self.former))
    }

    fn anew(&mut self) -> Result<()> {
        // The destination's QEMU ended when the move returned its error.
        self.qemu.kill();
        self.folders.clear()?;
        self.former.clear();
        self.images = self.folders.make_filled_images("a")?;
        (self.qemu, self.guest) = boot(self.trial, &self.plan, &self.folders, &self.images)?;
        Ok(())
    }
}

/// Boots the guest at host a, and fills its disks.
fn boot(
    trial: &Trial,
    plan: &GuestPlan,
    folders: &Folders,
    images: &[Image],
) -> Result<(Qemu, Guest)> {
    let qemu = Qemu::start(trial, "a", plan, images, &folders.at("a"), false)?;
    let guest = trial.guest_elsewhere("a", plan);
    guest.wait_ready(plan.boot_limit)?;
    guest.fill_disks(&folders.fills())?;
    Ok((qemu, guest))
}

/// Status of a migration that waits for the mirrors' end.
const WAITS: &str = "pre-switchover";

/// Sets what both sides need, no limit of the rate, and the pause that is allowed.
fn set_up_migration(trial: &Trial, qemu: &Qemu) -> Result<()> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    let capabilities = json!({ "capabilities": [on("events"), on("pause-before-switchover")] });
    qemu.execute(trial, "migrate-set-capabilities", capabilities)?;
    // The pause that Godwit has, too.
    let budget_ms = MigrationRequest::to("").switchover_budget_ms;
    let downtime_ms = Duration::from_secs_f64(budget_ms / 1e3).as_millis().max(1);
    let downtime_ms = u64::try_from(downtime_ms)?;
    let limits = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S, "downtime-limit": downtime_ms });
    qemu.execute(trial, "migrate-set-parameters", limits).map(drop)
}

/// Returns the arguments of a mirror: of an overlay only what it has itself, because the
/// destination has its base.
fn mirror_job(number: usize, image: &Image, way: Way) -> Value {
    let copy_mode = if way == Way::MirrorBlocking { "write-blocking" } else { "background" };
    json!({
        "job-id": job_id(number),
        "device": qemu::node(number),
        "target": target_node(number),
        "sync": if image.format == DiskFormat::Qcow2 { "top" } else { "full" },
        "copy-mode": copy_mode,
    })
}

fn stops(event: &QmpEvent) -> bool {
    event.name == "STOP" || has_status(event, "failed")
}

fn has_status(event: &QmpEvent, status: &str) -> bool {
    event.name == "MIGRATION" && event.data["status"] == status
}

fn job_id(number: usize) -> String {
    format!("mirror{number}")
}

fn target_node(number: usize) -> String {
    format!("target{number}")
}

fn export_id(number: usize) -> String {
    format!("export{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_of_an_overlay_leaves_its_base_where_it_is() {
        let image = |format| Image { path: "/d/a/disk".into(), format };
        let top = mirror_job(0, &image(DiskFormat::Qcow2), Way::MirrorBlocking);
        assert!(top["sync"] == "top" && top["copy-mode"] == "write-blocking", "{top}");
        let whole = mirror_job(1, &image(DiskFormat::Raw), Way::MirrorBackground);
        assert!(whole["sync"] == "full" && whole["copy-mode"] == "background", "{whole}");
        assert_eq!(whole["target"], "target1");
    }
}
