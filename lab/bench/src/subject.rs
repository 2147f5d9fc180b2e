//! Who is moved, and by whom: the guest of a benchmark, which engines move in turns.

use anyhow::Result;
use clap::ValueEnum;
use godwit_api::{MigrationRequest, QemuEngineOptions};
use godwit_lab::trial::{Guest, GuestPlan, Trial, Watched};
use godwit_migration::EngineKind;
use serde::Serialize;

/// Who moves the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Engine {
    /// Godwit's own
    Godwit,
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
    /// QEMU's, eight channels
    #[value(name = "multifd-8")]
    #[serde(rename = "multifd-8")]
    Multifd8,
}

impl Engine {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Engine::Godwit => "godwit",
            Engine::Qemu => "qemu",
            Engine::Multifd2 => "multifd-2",
            Engine::Multifd4 => "multifd-4",
            Engine::Multifd8 => "multifd-8",
        }
    }

    /// Its request, made of the one that the lab's guest gives.
    pub(crate) fn request(self, request: MigrationRequest) -> MigrationRequest {
        let channels = |multifd_channels| MigrationRequest {
            engine: EngineKind::Qemu,
            // The peer at its best: no word of ours between its two sides.
            qemu: QemuEngineOptions {
                multifd_channels,
                autostart: true,
                plaintext: true,
                ..QemuEngineOptions::default()
            },
            ..request.clone()
        };
        match self {
            Engine::Godwit => request,
            Engine::Qemu => channels(None),
            Engine::Multifd2 => channels(Some(2)),
            Engine::Multifd4 => channels(Some(4)),
            Engine::Multifd8 => channels(Some(8)),
        }
    }
}

/// A guest that is there again when an engine has lost it.
pub(crate) struct Subject<'a> {
    trial: &'a Trial,
    plan: GuestPlan,
    pub(crate) guest: Guest,
}

impl<'a> Subject<'a> {
    /// Boots it.
    pub(crate) fn new(trial: &'a Trial, plan: GuestPlan) -> Result<Subject<'a>> {
        let guest = trial.guest("a", &plan)?;
        Ok(Subject { trial, plan, guest })
    }

    /// Has it do something else, now and when it is made anew.
    pub(crate) fn work(&mut self, workload: &str) -> Result<()> {
        workload.clone_into(&mut self.plan.workload);
        self.guest.workload(workload)
    }

    /// Moves it to the other host. A move that does not complete is a result: the guest runs on at the source. A guest
    /// that does not answer any more is one as well, `None`: it is made anew, and the others go on.
    /// `change` has the last word on the request.
    pub(crate) fn move_by(
        &mut self,
        engine: Engine,
        change: impl Fn(MigrationRequest) -> MigrationRequest,
    ) -> Result<Option<Watched>> {
        let request = change(engine.request(self.guest.to_other_host()));
        let error = match self.trial.migrate(&mut self.guest, &request) {
            Ok(watched) => {
                if let Some(error) = &watched.report.error {
                    eprintln!("  {} to {}: {} ({})", engine.name(), request.to, error.message, error.code);
                }
                return Ok(Some(watched));
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
