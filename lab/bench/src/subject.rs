//! The guest of a benchmark, and the engines that move it in turns.

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use godwit_api::{MigrationRequest, QemuEngineOptions};
use godwit_lab::trial::{Guest, GuestPlan, Trial, Watched, other_host};
use godwit_types::{EngineKind, Outcome, PageInUse, Progress, Report};
use serde::Serialize;

use crate::warm::{self, Warm};

/// Who moves the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Engine {
    /// Godwit's engine
    Godwit,
    /// Godwit's engine with a hand-over after each page was sent once
    GodwitPageIn,
    /// QEMU's, one stream
    Qemu,
    /// QEMU's, two channels
    #[value(name = "multifd-2")]
    #[serde(rename = "multifd-2")]
    Multifd2,
    /// QEMU's, four channels
    #[value(name = "multifd-4")]
    #[serde(rename = "multifd-4")]
    Multifd4,
    /// QEMU's, two channels, compressed by Zstandard
    #[value(name = "multifd-2-zstd")]
    #[serde(rename = "multifd-2-zstd")]
    Multifd2Zstd,
    /// QEMU's, four channels, compressed by Zstandard
    #[value(name = "multifd-4-zstd")]
    #[serde(rename = "multifd-4-zstd")]
    Multifd4Zstd,
    /// QEMU's, eight channels
    #[value(name = "multifd-8")]
    #[serde(rename = "multifd-8")]
    Multifd8,
    /// QEMU's, one stream, the vCPUs slowed until it converges
    AutoConverge,
    /// QEMU's, post-copy after the first round
    Postcopy,
}

impl Engine {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Engine::Godwit => "godwit",
            Engine::GodwitPageIn => "godwit-page-in",
            Engine::Qemu => "qemu",
            Engine::Multifd2 => "multifd-2",
            Engine::Multifd4 => "multifd-4",
            Engine::Multifd8 => "multifd-8",
            Engine::Multifd2Zstd => "multifd-2-zstd",
            Engine::Multifd4Zstd => "multifd-4-zstd",
            Engine::AutoConverge => "auto-converge",
            Engine::Postcopy => "postcopy",
        }
    }

    /// Returns whether the engine is Godwit's.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Engine::Godwit | Engine::GodwitPageIn)
    }

    /// Returns whether the engine is QEMU's own with compression.
    pub(crate) fn is_compressed_qemu(self) -> bool {
        matches!(self, Engine::Multifd2Zstd | Engine::Multifd4Zstd)
    }

    /// Returns the engine's request, derived from the one for the lab's guest.
    pub(crate) fn request(self, request: MigrationRequest) -> MigrationRequest {
        let by_qemu = |multifd_channels, compression: Option<&str>| MigrationRequest {
            engine: EngineKind::Qemu,
            // The competitor at its best: without our agent's confirmation between its two sides.
            qemu: QemuEngineOptions {
                multifd_channels,
                compression: compression.map(str::to_owned),
                autostart: true,
                plaintext: true,
                ..QemuEngineOptions::default()
            },
            ..request.clone()
        };
        match self {
            Engine::Godwit => request,
            Engine::GodwitPageIn => MigrationRequest { page_in: PageInUse::Now, ..request },
            Engine::Qemu => by_qemu(None, None),
            Engine::Multifd2 => by_qemu(Some(2), None),
            Engine::Multifd4 => by_qemu(Some(4), None),
            Engine::Multifd8 => by_qemu(Some(8), None),
            Engine::Multifd2Zstd => by_qemu(Some(2), Some("zstd")),
            Engine::Multifd4Zstd => by_qemu(Some(4), Some("zstd")),
            Engine::AutoConverge | Engine::Postcopy => {
                let mut request = by_qemu(None, None);
                request.qemu.auto_converge = self == Engine::AutoConverge;
                request.qemu.postcopy = self == Engine::Postcopy;
                request
            }
        }
    }
}

/// Guest that is replaced if an engine has lost it.
pub(crate) struct Subject<'a> {
    trial: &'a Trial,
    plan: GuestPlan,
    pub(crate) guest: Guest,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(trial: &'a Trial, plan: GuestPlan) -> Result<Subject<'a>> {
        let guest = trial.guest("a", &plan)?;
        Ok(Subject { trial, plan, guest })
    }

    /// Changes the guest's workload, also for later replacements.
    pub(crate) fn work(&mut self, workload: &str) -> Result<()> {
        workload.clone_into(&mut self.plan.workload);
        self.guest.workload(workload)
    }

    /// Keeps as much of the other host's memory warm as the guest will take there.
    pub(crate) fn warm_destination(&self) -> Result<Warm> {
        let bytes = self.plan.memory.iter().map(|block| block.bytes()).sum();
        warm::memory(self.trial, other_host(&self.guest.host), bytes)
    }

    /// Moves the guest to the other host. A move that does not complete is a result: the guest runs
    /// on at the source. A guest that no longer answers is a result too, `None`: it is replaced,
    /// and the other engines go on. `change` makes the final changes to the request.
    pub(crate) fn move_by(
        &mut self,
        engine: Engine,
        change: impl Fn(MigrationRequest) -> MigrationRequest,
    ) -> Result<Option<Watched>> {
        let request = change(engine.request(self.guest.to_other_host()));
        let watched = self.trial.migrate(&mut self.guest, &request);
        self.or_anew(engine, &request, watched, |watched| &watched.report)
    }

    /// Moves the guest as [`Subject::move_by`] does, with a time limit. `seen` receives its
    /// progress.
    pub(crate) fn move_followed_by(
        &mut self,
        engine: Engine,
        limit: Duration,
        seen: impl FnMut(&Progress),
    ) -> Result<Option<Watched>> {
        let request = engine.request(self.guest.to_other_host());
        let watched = self.trial.migrate_followed(&mut self.guest, &request, limit, seen);
        self.or_anew(engine, &request, watched, |watched| &watched.report)
    }

    /// Moves the guest without probing it meanwhile: probes cost an emulated guest a core. `at_end`
    /// runs as soon as the report arrives.
    pub(crate) fn move_unwatched_by<T>(
        &mut self,
        engine: Engine,
        change: impl Fn(MigrationRequest) -> MigrationRequest,
        at_end: impl FnOnce(&Report) -> Result<T>,
    ) -> Result<Option<(Report, T)>> {
        let request = change(engine.request(self.guest.to_other_host()));
        let moved = self.move_unwatched(&request, at_end);
        self.or_anew(engine, &request, moved, |(report, _)| report)
    }

    fn move_unwatched<T>(
        &mut self,
        request: &MigrationRequest,
        at_end: impl FnOnce(&Report) -> Result<T>,
    ) -> Result<(Report, T)> {
        let Guest { name, host, .. } = &self.guest;
        let report = self.trial.begin_migration(name, host, request)?.report()?;
        let looked = at_end(&report)?;
        if report.outcome == Outcome::Completed {
            self.guest.host.clone_from(&request.to);
        }
        // The status of a guest that was not probed is still unknown.
        self.guest.status()?;
        Ok((report, looked))
    }

    /// Returns the result of a move, and replaces the guest if it is lost.
    fn or_anew<T>(
        &mut self,
        engine: Engine,
        request: &MigrationRequest,
        moved: Result<T>,
        report: impl Fn(&T) -> &Report,
    ) -> Result<Option<T>> {
        let error = match moved {
            Ok(moved) => {
                if let Some(error) = &report(&moved).error {
                    eprintln!(
                        "  {} to {}: {} ({})",
                        engine.name(),
                        request.to,
                        error.message,
                        error.code
                    );
                }
                return Ok(Some(moved));
            }
            Err(error) => error,
        };
        eprintln!("  {} to {}: the guest is lost: {error:#}", engine.name(), request.to);
        for host in self.trial.hosts() {
            // It may be on either host, or on both.
            if let Err(error) = self.trial.delete(&host, &self.plan.name) {
                eprintln!("  host {host}: {error}");
            }
        }
        self.guest = self.trial.guest("a", &self.plan)?;
        Ok(None)
    }
}
