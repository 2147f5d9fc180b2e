//! An installed Debian with all devices ([`godwit_lab::installed`]) moves again and again while it
//! checks its memory, its disks and its TPM, and a viewer shows its screen.
//! `GODWIT_INSTALLED_MOVES` sets the number of moves; without it the test is skipped, because the
//! boot takes minutes under TCG. `make installed` builds the image first and makes 20 moves. With
//! `RUST_LOG=godwit_host::migration=debug,info` the agents' logs have finer parts of the pauses,
//! and are kept.

use std::time::Duration;

use anyhow::{Context, Result};
use godwit_lab::installed::{self, VM};
use godwit_lab::trial::{Trial, until};
use godwit_qemu::Video;

use crate::viewer::Follower;

/// Longest time until a viewer sees the screen.
const VIEW_LIMIT: Duration = Duration::from_secs(120);

#[test]
fn an_installed_system_moves_with_all_its_devices() -> Result<()> {
    let Ok(moves) = std::env::var("GODWIT_INSTALLED_MOVES") else {
        eprintln!("skipped: installed: it takes minutes (make installed)");
        return Ok(());
    };
    let moves: usize = moves.parse().context("GODWIT_INSTALLED_MOVES is not a number")?;
    let Some(trial) = Trial::begin("installed")? else { return Ok(()) };
    let folder = tempfile::Builder::new().prefix("godwit-installed-").tempdir_in("/var/tmp")?;
    // A virtio adapter costs more of the pause: `godwit-bench devices --video virtio`.
    installed::boot(&trial, folder.path(), Video::Vga)?;
    let viewer = Follower::open(vec![trial.agent("a"), trial.agent("b")], VM)?;
    until("the viewer sees the screen", VIEW_LIMIT, || {
        Ok((viewer.seen().updates > 0).then_some(()))
    })?;

    let mut host = "a".to_owned();
    let mut reports = Vec::new();
    for _ in 0..moves {
        let report = installed::move_on(&trial, &host)?;
        host.clone_from(&report.to);
        reports.push(report);
        until("the viewer sees the screen again", VIEW_LIMIT, || {
            Ok((viewer.seen().reconnects.len() >= reports.len()).then_some(()))
        })?;
    }
    let mut away = viewer.close()?.reconnects;
    away.sort_unstable();
    eprint!("{}", installed::describe_pauses(&reports));
    if let Some(most) = away.last() {
        let median = away[away.len() / 2].as_millis();
        eprintln!("  the viewer was without its screen for {median} ms, at most {most:.0?}");
    }
    trial.delete(&host, VM)?;
    if std::env::var_os("RUST_LOG").is_some() {
        eprintln!("  logs: {}", trial.keep_logs("installed")?.display());
    }
    trial.finish()
}
