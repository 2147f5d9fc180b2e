//! Exit codes, and errors that carry them. docs/cli.md and `godwit --help` list the codes.

use std::fmt;
use std::process::ExitCode;

use godwit_api::{ApiError, ClientError, ErrorCode};
use godwit_types::{DryRun, Fault, Means, Outcome, Report};
use serde::Serialize;

/// Exit code of the command. Stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Ok = 0,
    Failure = 1,
    Usage = 2,
    NotFound = 3,
    Conflict = 4,
    Preflight = 5,
    Unreachable = 6,
    MigrationFailed = 7,
    Cancelled = 8,
    InDoubt = 9,
    Interrupted = 130,
}

/// Meaning of each code, for the help.
pub(crate) const EXIT_CODES: &str = "Exit codes:
  0    done
  1    failure of the host, of QEMU or of this command
  2    invalid command line or request
  3    no such VM, host, migration or file
  4    conflict: already exists, wrong state, or another operation is in progress
  5    refused by a check before any change (preflight, memory, certificate, dry run)
  6    an agent, the manager or a probed lane is unreachable
  7    the migration failed; the guest continues at the source
  8    the migration was cancelled; the guest continues at the source
  9    in doubt: it is unknown which host may run the guest
  130  interrupted; started operations continue, except a probe";

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

impl Exit {
    pub(crate) fn of_code(code: ErrorCode) -> Exit {
        match code {
            ErrorCode::InvalidRequest => Exit::Usage,
            ErrorCode::NotFound => Exit::NotFound,
            ErrorCode::AlreadyExists | ErrorCode::WrongState | ErrorCode::Busy => Exit::Conflict,
            ErrorCode::Preflight | ErrorCode::InsufficientMemory | ErrorCode::Forbidden => {
                Exit::Preflight
            }
            ErrorCode::PeerUnreachable => Exit::Unreachable,
            ErrorCode::MigrationFailed => Exit::MigrationFailed,
            ErrorCode::Cancelled => Exit::Cancelled,
            ErrorCode::InDoubt => Exit::InDoubt,
            ErrorCode::HypervisorFailed
            | ErrorCode::PeerVersion
            | ErrorCode::HostFailed
            | ErrorCode::Unknown => Exit::Failure,
        }
    }

    pub(crate) fn of_report(report: &Report) -> Exit {
        match report.outcome {
            Outcome::Completed => Exit::Ok,
            Outcome::Cancelled => Exit::Cancelled,
            Outcome::InDoubt => Exit::InDoubt,
            Outcome::Failed => {
                let code = report.error.as_ref().map_or("", |error| error.code.as_str());
                Exit::of_failure(code, report.has_begun())
            }
        }
    }

    /// Returns the code of the predicted result: a refusal, or a migration that would not converge.
    pub(crate) fn of_dry_run(dry_run: &DryRun) -> Exit {
        match (&dry_run.error, &dry_run.predicted) {
            (Some(error), _) => Exit::of_failure(&error.code, false),
            (None, Some(predicted)) if predicted.means == Means::None => Exit::Preflight,
            (None, _) => Exit::Ok,
        }
    }

    /// Selects the code by the error code and by whether the migration had started.
    pub(crate) fn of_failure(code: &str, began: bool) -> Exit {
        match ErrorCode::from_name(code) {
            ErrorCode::Preflight => Exit::Preflight,
            ErrorCode::PeerUnreachable if !began => Exit::Unreachable,
            ErrorCode::InvalidRequest
            | ErrorCode::NotFound
            | ErrorCode::AlreadyExists
            | ErrorCode::WrongState
            | ErrorCode::Busy
            | ErrorCode::InsufficientMemory
                if !began =>
            {
                Exit::Preflight
            }
            // Obstacles at the hypervisor have codes of their own; failures of the engine are not
            // obstacles.
            ErrorCode::Unknown if !began && !ENGINE_FAILURES.contains(&code) => Exit::Preflight,
            _ => Exit::MigrationFailed,
        }
    }
}

/// Codes of engine failures that can occur before its first phase ends (`FailureCode`).
const ENGINE_FAILURES: [&str; 7] = [
    "lane-lost",
    "internal",
    "version-mismatch",
    "protocol-broken",
    "memory-failed",
    "unknown-migration",
    "guest-shut-down",
];

/// Error of a command.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct Failure {
    #[serde(skip)]
    pub(crate) exit: Exit,
    pub(crate) fault: Fault,
}

impl Failure {
    pub(crate) fn new(
        exit: Exit,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Failure {
        let code = match exit {
            Exit::Ok | Exit::Failure => "failure",
            Exit::Usage => "invalid-request",
            Exit::NotFound => "not-found",
            Exit::Conflict => "conflict",
            Exit::Preflight => "preflight",
            Exit::Unreachable => "unreachable",
            Exit::MigrationFailed => "migration-failed",
            Exit::Cancelled => "cancelled",
            Exit::InDoubt => "in-doubt",
            Exit::Interrupted => "interrupted",
        };
        Failure { exit, fault: Fault::new(code, message, remedy) }
    }

    /// Converts an error of the command line parser: omits the usage, and uses its tips as the
    /// remedy.
    pub(crate) fn of_usage(error: &clap::Error) -> Failure {
        if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            return Failure::usage("the command is missing or incomplete", "see --help");
        }
        let text = error.to_string();
        let lines = text.lines().take_while(|line| !line.starts_with("Usage:"));
        let (mut message, mut remedy) = (Vec::new(), Vec::new());
        for line in lines
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with("For more information"))
        {
            match line.strip_prefix("tip: ") {
                Some(tip) => remedy.push(tip),
                None => message.push(line),
            }
        }
        remedy.push("see --help");
        let message = message.join(" ");
        Failure::usage(message.strip_prefix("error: ").unwrap_or(&message), remedy.join("; "))
    }

    pub(crate) fn usage(message: impl Into<String>, remedy: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, message, remedy)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { message, remedy, .. } = &self.fault;
        f.write_str(message)?;
        if remedy.is_empty() { Ok(()) } else { write!(f, "\n  {remedy}") }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        Failure { exit: Exit::of_code(error.code), fault: error.into() }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let (message, remedy) = (error.detail(), error.remedy().to_owned());
        match error {
            ClientError::Refused(error) => error.into(),
            ClientError::Unreachable { .. } => Failure::new(Exit::Unreachable, message, remedy),
            ClientError::Protocol { .. } => Failure::new(Exit::Failure, message, remedy),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::new(Exit::Failure, format!("{error:#}"), "")
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::new(Exit::Failure, format!("cannot read or write: {error}"), "")
    }
}

#[cfg(test)]
mod tests {
    use godwit_types::{Phase, PhaseReport};

    use super::*;

    fn failed(code: &str, phases: Vec<PhaseReport>) -> Report {
        Report {
            phases,
            error: Some(Fault::new(code, "", "")),
            ..Report::blank(Outcome::Failed, "web", "a", "b")
        }
    }

    #[test]
    fn a_refusal_before_the_transfer_differs_from_a_failure() {
        let moving = vec![PhaseReport { phase: Phase::PreCopy, duration_ms: 1.0 }];
        for (code, phases, exit) in [
            ("preflight", vec![], Exit::Preflight),
            ("memory-private", vec![], Exit::Preflight),
            ("insufficient-memory", vec![], Exit::Preflight),
            ("peer-unreachable", vec![], Exit::Unreachable),
            ("hypervisor-failed", vec![], Exit::MigrationFailed),
            ("lane-lost", vec![], Exit::MigrationFailed),
            ("guest-shut-down", vec![], Exit::MigrationFailed),
            ("not-converging", moving.clone(), Exit::MigrationFailed),
            ("hypervisor-failed", moving, Exit::MigrationFailed),
        ] {
            assert_eq!(Exit::of_report(&failed(code, phases)), exit, "{code}");
        }
    }

    #[test]
    fn an_invalid_command_line_is_reported_to_programs_without_its_usage() {
        use clap::Parser;
        for (line, message) in [
            ("godwit migrate web --to b --strams 4", "unexpected argument '--strams' found"),
            (
                "godwit migrate web",
                "the following required arguments were not provided: --to <HOST>",
            ),
            ("godwit --json", "'godwit' requires a subcommand but one was not provided"),
            ("godwit migration", "the command is missing or incomplete"),
        ] {
            let error = crate::args::Cli::try_parse_from(line.split_whitespace()).unwrap_err();
            let failure = Failure::of_usage(&error);
            assert_eq!(
                (failure.exit, failure.fault.code.as_str()),
                (Exit::Usage, "invalid-request")
            );
            assert!(failure.fault.message.starts_with(message), "{}", failure.fault.message);
            assert!(failure.fault.remedy.ends_with("see --help"), "{}", failure.fault.remedy);
        }
    }

    #[test]
    fn the_manual_lists_the_same_codes() {
        let manual = include_str!("../../../docs/cli.md");
        for line in EXIT_CODES.lines().skip(1) {
            let (code, meaning) = line.trim().split_once(' ').unwrap();
            let row = format!("| {code} | {} |", meaning.trim());
            assert!(manual.contains(&row), "docs/cli.md lacks {row}");
        }
    }
}
