//! Migrations in a trial: begun through the agent's API, followed, cancelled, and reported together
//! with the client's measurements.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use godwit_api::{
    Client, ClientError, MigrationEvent, MigrationEvents, MigrationRequest, QemuEngineOptions,
    VmState,
};
use godwit_migration::millis;
use godwit_prober::Gaps;
use godwit_prober::clock::monotonic_ns;
use godwit_types::{EngineKind, Outcome, Phase, Progress, ReferenceUse, Report};
use serde::Serialize;

use crate::trial::{Guest, LIMIT, Trial, until};

/// Migration of a guest that was probed all the time.
#[derive(Debug, Clone, Serialize)]
pub struct Watched {
    /// Its report, with the blackout.
    pub report: Report,
    /// Results of the probes from before its request until the guest answered after its report.
    pub probes: Gaps,
    /// Time of its request, in `CLOCK_MONOTONIC` nanoseconds as the probes' times.
    pub begun_ns: u64,
}

impl Watched {
    /// Returns the phase in which the longest silence began, or `None` if there was none. If it is
    /// not the switchover, the silence has another cause: the machine had no CPU time for the
    /// guest, or for the client.
    #[must_use]
    pub fn phase_of_blackout(&self) -> Option<Phase> {
        let mut left_ms =
            millis(Duration::from_nanos(self.probes.gap_start_ns?.saturating_sub(self.begun_ns)));
        // Pre-copy and convergence alternate and are reported as sums: before the switchover they
        // count as one.
        for phase in &self.report.phases {
            if left_ms <= phase.duration_ms {
                return Some(phase.phase);
            }
            left_ms -= phase.duration_ms;
        }
        Some(Phase::Report)
    }
}

/// Time limit of a migration. Those of tests and benchmarks take seconds; one that does not
/// converge never ends.
pub const MOVE_LIMIT: Duration = Duration::from_secs(180);

#[derive(Debug)]
pub struct Migration<'a> {
    trial: &'a Trial,
    agent: Client,
    events: MigrationEvents,
    report: Option<Report>,
    pub id: String,
}

impl Trial {
    /// Begins a migration of a VM from a host.
    ///
    /// # Errors
    /// The agent refuses.
    pub fn begin_migration(
        &self,
        vm: &str,
        from: &str,
        request: &MigrationRequest,
    ) -> Result<Migration<'_>, ClientError> {
        let agent = self.agent(from);
        let (id, events) = self.ask(async {
            let accepted = agent.migrate(vm, request).await?;
            Ok::<_, ClientError>((accepted.id.clone(), agent.migration_events(&accepted.id).await?))
        })?;
        Ok(Migration { trial: self, agent, events, report: None, id })
    }

    /// Migrates a guest that answers, whatever the outcome. The report contains the blackout, and
    /// the results of the probes are returned beside it. If the guest was moved, its host is the
    /// destination afterwards.
    ///
    /// # Errors
    /// The agent refuses, or the guest does not answer before or after.
    pub fn migrate(&self, guest: &mut Guest, request: &MigrationRequest) -> Result<Watched> {
        self.migrate_followed(guest, request, MOVE_LIMIT, |_| {})
    }

    /// Migrates a guest as [`Trial::migrate`] does, with a time limit. `seen` receives its
    /// progress.
    ///
    /// # Errors
    /// As [`Trial::migrate`].
    pub fn migrate_followed(
        &self,
        guest: &mut Guest,
        request: &MigrationRequest,
        limit: Duration,
        seen: impl FnMut(&Progress),
    ) -> Result<Watched> {
        let since_ns = guest.watch()?;
        let begun_ns = monotonic_ns();
        let migration = self.begin_migration(&guest.name, &guest.host, request)?;
        let mut report = migration.report_within(limit, seen)?;
        if report.outcome == Outcome::Completed {
            guest.host.clone_from(&request.to);
        }
        let until_ns = guest.wait_answer().with_context(|| format!("after {report:?}"))?;
        let gaps = guest.gaps(since_ns, until_ns)?;
        guest.unwatch()?;
        #[expect(
            clippy::cast_precision_loss,
            reason = "a gap is shorter than the 104 days that f64 holds exactly"
        )]
        let blackout_ms = gaps.longest_gap_ns.map(|ns| ns as f64 / 1e6);
        report.blackout_ms = blackout_ms;
        Ok(Watched { report, probes: gaps, begun_ns })
    }

    /// Waits until a host knows the digests of all memory that it offers to arriving guests.
    ///
    /// # Errors
    /// It does not finish within the limit.
    pub fn wait_digested(&self, host: &str) -> Result<()> {
        until(&format!("host {host} knows its digests"), LIMIT, || {
            let known = self.ask(self.agent(host).host())?.references;
            Ok((known.digested_pages == known.pages).then_some(()))
        })
    }

    /// Moves a guest to another host. Any outcome except success is an error.
    ///
    /// # Errors
    /// The migration did not complete.
    pub fn move_guest(&self, guest: &mut Guest, request: &MigrationRequest) -> Result<Watched> {
        let from = guest.host.clone();
        let watched = self.migrate(guest, request)?;
        let report = &watched.report;
        ensure!(
            report.outcome == Outcome::Completed,
            "{from} to {} did not complete: {report:#?}",
            request.to
        );
        Ok(watched)
    }

    /// Moves a VM that does not answer probes.
    ///
    /// # Errors
    /// The migration did not complete.
    pub fn move_silent(&self, vm: &str, from: &str, request: &MigrationRequest) -> Result<Report> {
        let report = self.begin_migration(vm, from, request)?.report()?;
        ensure!(
            report.outcome == Outcome::Completed,
            "{from} to {} did not complete: {report:#?}",
            request.to
        );
        ensure!(
            self.vm(&request.to, vm)?.state == VmState::Running,
            "it does not run on host {}",
            request.to
        );
        Ok(report)
    }
}

impl Migration<'_> {
    /// Follows the migration until `is_there` accepts its progress. Returns `None` if its report
    /// came first.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn until(
        &mut self,
        mut is_there: impl FnMut(&Progress) -> bool,
    ) -> Result<Option<Progress>> {
        while self.report.is_none() {
            match self.trial.ask(self.events.next())? {
                Some(MigrationEvent::Progress(progress)) if is_there(&progress) => {
                    return Ok(Some(progress));
                }
                Some(MigrationEvent::Progress(_)) => {}
                Some(MigrationEvent::Report(report)) => self.report = Some(*report),
                None => {
                    bail!("the agent closed the events of migration {} before its report", self.id)
                }
            }
        }
        Ok(None)
    }

    /// Requests a rollback. The report shows whether it happened; a migration that is already over
    /// is not an error.
    ///
    /// # Errors
    /// The agent is gone.
    pub fn cancel(&self) -> Result<()> {
        match self.trial.ask(self.agent.cancel_migration(&self.id)) {
            Err(error @ (ClientError::Unreachable { .. } | ClientError::Protocol { .. })) => {
                Err(error.into())
            }
            Ok(()) | Err(ClientError::Refused(_)) => Ok(()),
        }
    }

    /// Follows the migration to its end. One that takes longer than [`MOVE_LIMIT`] is cancelled.
    ///
    /// # Errors
    /// The agent is gone, or the migration does not end although it was cancelled.
    pub fn report(self) -> Result<Report> {
        self.report_within(MOVE_LIMIT, |_| {})
    }

    /// Follows the migration to its end as [`Migration::report`] does, with a time limit. `seen`
    /// receives its progress.
    ///
    /// # Errors
    /// As [`Migration::report`].
    pub fn report_within(
        mut self,
        limit: Duration,
        mut seen: impl FnMut(&Progress),
    ) -> Result<Report> {
        if !self.ends_by(Instant::now() + limit, &mut seen)? {
            eprintln!("migration {} is not over within {limit:?}: cancelled", self.id);
            self.cancel()?;
            // A migration whose guest already runs at the destination cannot be cancelled: it ends
            // or it does not.
            let ends = self.ends_by(Instant::now() + LIMIT, &mut seen)?;
            ensure!(
                ends,
                "migration {} does not end, though it was cancelled {LIMIT:?} ago",
                self.id
            );
        }
        self.report.take().context("no report came")
    }

    /// Follows the migration until its report arrives or the deadline passes, also if nothing is
    /// reported any more.
    fn ends_by(&mut self, deadline: Instant, seen: &mut impl FnMut(&Progress)) -> Result<bool> {
        while self.report.is_none() {
            let next = async { tokio::time::timeout_at(deadline.into(), self.events.next()).await };
            let Ok(event) = self.trial.ask(next) else { return Ok(false) };
            match event? {
                Some(MigrationEvent::Progress(progress)) => {
                    seen(&progress);
                    // Continuous reports would otherwise leave no time to check the deadline.
                    if Instant::now() >= deadline {
                        return Ok(false);
                    }
                }
                Some(MigrationEvent::Report(report)) => self.report = Some(*report),
                None => {
                    bail!("the agent closed the events of migration {} before its report", self.id)
                }
            }
        }
        Ok(true)
    }
}

/// Returns the other host of a lab of two.
#[must_use]
pub fn other_host(host: &str) -> &'static str {
    if host == "a" { "b" } else { "a" }
}

impl Guest {
    /// Returns the address that users know.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.ipv4.into()
    }

    /// Returns the request that moves it to the other host of a lab of two.
    #[must_use]
    pub fn to_other_host(&self) -> MigrationRequest {
        request_to(other_host(&self.host), EngineKind::Godwit)
    }
}

/// Returns a request for a move to `host`. Traffic between a lab's hosts is encrypted, but QEMU's
/// own engine may send plaintext. References are off for Godwit's engine, and no content of earlier
/// moves is kept; tests of references request them.
#[must_use]
pub fn request_to(host: &str, engine: EngineKind) -> MigrationRequest {
    let qemu = QemuEngineOptions { plaintext: true, ..QemuEngineOptions::default() };
    let references =
        if engine == EngineKind::Godwit { ReferenceUse::None } else { ReferenceUse::default() };
    MigrationRequest { engine, qemu, references, ..MigrationRequest::to(host) }
}
