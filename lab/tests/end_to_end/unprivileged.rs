//! QEMU as one unprivileged user for all VMs, instead of one user per VM. It never opens
//! /dev/userfaultfd itself, nor a file by its path.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::image::GuestImage;
use godwit_lab::trial::{GuestPlan, Trial};

use crate::{BUSY, move_and_check};

#[test]
fn qemu_may_be_nobody() -> Result<()> {
    let options = LabOptions { qemu_user: Some("nobody".to_owned()), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("unprivileged", options)? else { return Ok(()) };
    let clean = trial.traces("a")?;
    // Readable by root only, as kernels are in some distributions.
    let folder = tempfile::tempdir_in("/run")?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700))?;
    let image = GuestImage {
        kernel: folder.path().join("vmlinuz"),
        initrd: folder.path().join("initrd.img"),
    };
    for (from, to) in
        [(&trial.image().kernel, &image.kernel), (&trial.image().initrd, &image.initrd)]
    {
        fs::copy(from, to)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o600))?;
    }
    let plan = GuestPlan { image: Some(image), workload: BUSY.to_owned(), ..GuestPlan::new("web") };
    let mut guest = trial.guest("a", &plan)?;
    for _ in 0..2 {
        move_and_check(&trial, &mut guest)?;
        let pid = trial.vm(&guest.host, "web")?.pid.context("no process")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let ids = status.lines().find(|line| line.starts_with("Uid:")).context("no uid")?;
        ensure!(!ids.split_whitespace().skip(1).any(|uid| uid == "0"), "QEMU runs as root: {ids}");
        let groups = status.lines().find(|line| line.starts_with("Groups:")).unwrap_or_default();
        ensure!(
            !groups.split_whitespace().skip(1).any(|gid| gid == "0"),
            "QEMU is in root's group: {groups}"
        );
    }
    trial.delete("a", "web")?;
    trial.expect_traces("a", &clean)?;
    trial.finish()
}
