//! Implements `godwit control audit`.

use godwit_api::control::{AuditEntry, ManagerClient};

use crate::exit::{Exit, Failure};
use crate::output::{Output, table};
use crate::units::utc;

/// Prints the audit log, newest first.
pub(crate) async fn run(
    manager: &ManagerClient,
    lines: usize,
    output: Output,
) -> Result<Exit, Failure> {
    let entries = manager.audit(lines).await?;
    let row = |entry: &AuditEntry| {
        let from = entry.from.map_or_else(|| "socket".to_owned(), |from| from.to_string());
        let made = entry.made.as_ref().map(|made| format!("created {made}"));
        let outcome = entry.reason.clone().or(made).unwrap_or_default();
        let when = utc(entry.unix_ms);
        vec![when, entry.who.clone(), from, entry.what.clone(), entry.status.to_string(), outcome]
    };
    let rows: Vec<_> = entries.iter().map(row).collect();
    output
        .result(&entries, || table(&["when", "who", "from", "what", "status", "outcome"], &rows))?;
    Ok(Exit::Ok)
}
