//! Command line of `godwit control journal`.

use std::time::Duration;

use clap::{Args, Subcommand};
use godwit_api::control::{JournalFilter, JournalKind, JournalSeverity};
use godwit_control::now_unix_ms;

use super::choices::{JOURNAL_SEVERITIES, one_of};
use crate::units::parse_duration;

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// List what happened, newest first; with --follow, show it as it happens, one per line
    #[command(after_help = "Examples:
  godwit control journal list
  godwit control journal list --object vm:web --since 24h
  godwit control journal list --severity warning --text away
  godwit control journal list --kind move-failed
  godwit control journal list --follow

Objects are vm:NAME, host:NAME, move:ID, drain:ID, datastore:NAME, rule:NAME, alarm:ID, \
manager:NAME and cluster.")]
    List {
        #[command(flatten)]
        filter: JournalArgs,
        /// Number of entries to list
        #[arg(
            long,
            value_name = "LINES",
            default_value_t = 50,
            value_parser = clap::value_parser!(u16).range(1..=1000)
        )]
        lines: u16,
        /// Go on with new entries, the oldest first; Ctrl-C ends the command
        #[arg(long)]
        follow: bool,
    },
    /// Write all entries as JSON, one object per line, newest first
    #[command(after_help = "Examples:
  godwit control journal export >journal.jsonl
  godwit control journal export --since 720h --object host:a | jq .text")]
    Export {
        #[command(flatten)]
        filter: JournalArgs,
    },
}

/// Filter of the journal.
#[derive(Debug, Args)]
pub(crate) struct JournalArgs {
    /// Entries about this object
    #[arg(long, value_name = "OBJECT")]
    object: Option<String>,
    /// Entries of this kind, such as vm-started or host-away
    #[arg(long, value_name = "KIND", value_parser = parse_kind)]
    kind: Option<JournalKind>,
    /// Entries of this severity or a higher one
    #[arg(
        long,
        value_name = "SEVERITY",
        value_parser = one_of::<JournalSeverity>(JOURNAL_SEVERITIES)
    )]
    severity: Option<JournalSeverity>,
    /// Entries with this text, in upper or lower case
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// Entries of at most this age
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    since: Option<Duration>,
    /// Entries of more than this age
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    until: Option<Duration>,
}

impl JournalArgs {
    /// Returns the filter of the API.
    pub(crate) fn filter(self) -> JournalFilter {
        let now_ms = now_unix_ms();
        let ago = |age: Duration| {
            now_ms.saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX))
        };
        let JournalArgs { object, kind, severity, text, since, until } = self;
        JournalFilter {
            object,
            kind,
            severity,
            text,
            from_unix_ms: since.map(ago),
            to_unix_ms: until.map(ago),
        }
    }
}

fn parse_kind(text: &str) -> Result<JournalKind, String> {
    JournalKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
        let names: Vec<&str> = JournalKind::ALL.iter().map(|kind| kind.name()).collect();
        format!("unknown kind; the kinds are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_by_their_names() {
        assert_eq!(parse_kind("host-away"), Ok(JournalKind::HostAway));
        assert!(parse_kind("flood").unwrap_err().contains("vm-started"));
    }
}
