//! Migration into which a fault is injected. It is started through the agents' API or by `godwit
//! migrate` and observed by polling, so that nothing is lost if the process that answers dies.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::{ClientError, MigrationRequest, MigrationStatus};
use godwit_types::{PageInUse, Phase, Progress, Report};

use super::Moment;
use crate::trial::{LIMIT, Trial, until};

/// Migration in progress.
#[derive(Debug)]
pub(super) struct Moving<'a> {
    trial: &'a Trial,
    from: String,
    id: String,
    cli: Option<Child>,
}

impl<'a> Moving<'a> {
    /// Starts the migration, with the command if the command is to be killed.
    pub(super) fn begin(
        trial: &'a Trial,
        vm: &str,
        from: &str,
        request: &MigrationRequest,
        by_cli: bool,
    ) -> Result<Moving<'a>> {
        let agent = trial.agent(from);
        if !by_cli {
            let id = trial.ask(agent.migrate(vm, request))?.id;
            return Ok(Moving { trial, from: from.to_owned(), id, cli: None });
        }
        let known: Vec<String> =
            trial.ask(agent.migrations())?.into_iter().map(|status| status.id).collect();
        let mut command =
            trial.godwit_command(&["migrate", vm, "--to", &request.to, "--references", "none"]);
        if request.page_in == PageInUse::Now {
            command.arg("--page-in");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let cli = command.spawn().context("cannot start godwit migrate")?;
        let id = until("the command has begun a migration", LIMIT, || {
            let all = trial.ask(agent.migrations())?.into_iter();
            Ok(all.map(|status| status.id).find(|id| !known.contains(id)))
        })?;
        Ok(Moving { trial, from: from.to_owned(), id, cli: Some(cli) })
    }

    fn status(&self) -> Result<MigrationStatus, ClientError> {
        self.trial.ask(self.trial.agent(&self.from).migration(&self.id))
    }

    /// Waits for a moment that has no hold point.
    pub(super) fn until_seen(&self, moment: Moment) -> Result<()> {
        self.until_progress(moment.name(), |progress| match moment {
            Moment::PreCopy => progress.phase == Phase::PreCopy && progress.sent_bytes > 0,
            _ => progress.phase == Phase::PageIn,
        })
    }

    /// Waits until the progress of the migration shows that it is at a moment.
    pub(super) fn until_progress(
        &self,
        moment: &str,
        is_there: impl Fn(&Progress) -> bool,
    ) -> Result<()> {
        until(&format!("the migration is at {moment}"), LIMIT, || {
            let status = self.status()?;
            let is_there = is_there(&status.progress);
            ensure!(is_there || status.report.is_none(), "it is over: {:#?}", status.report);
            Ok(is_there.then_some(()))
        })
    }

    /// Limits the rate of its pages, or lifts the limit.
    pub(super) fn limit(&self, rate: &str) -> Result<()> {
        let limit = rate.parse()?;
        self.trial.ask(self.trial.agent(&self.from).limit_migration(&self.id, limit))?;
        Ok(())
    }

    /// Waits for the report while an agent knows the migration. Returns `None` if that takes longer
    /// or the agent was restarted.
    pub(super) fn report(&self, limit: Duration) -> Option<Report> {
        let deadline = Instant::now() + limit;
        let asked = until("its report", limit, || match self.status() {
            Ok(status) => Ok(status.report.map(Some)),
            Err(ClientError::Refused(_)) => Ok(Some(None)),
            Err(_) if Instant::now() < deadline => Ok(None),
            Err(error) => Err(error.into()),
        });
        asked.ok().flatten()
    }

    /// Kills the command as a crash would.
    pub(super) fn kill_cli(&mut self) -> Result<()> {
        let mut cli = self.cli.take().context("no command began this migration")?;
        ensure!(cli.try_wait()?.is_none(), "the command ended before it was killed");
        cli.kill()?;
        cli.wait()?;
        Ok(())
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        if let Some(cli) = &mut self.cli {
            // The command may already have ended.
            let _ = cli.kill();
            let _ = cli.wait();
        }
    }
}
