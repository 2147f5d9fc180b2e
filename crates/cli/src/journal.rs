//! Implements `godwit control journal`.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::time::Duration;

use godwit_api::control::{
    Change, JournalEntry, JournalFilter, MAX_PAGE_ITEMS, ManagerClient, ManagerError, ManagerEvent,
};

use crate::args::JournalCommand;
use crate::events::{Cut, print};
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};
use crate::units::utc;

/// Delay before the command reconnects.
const PAUSE: Duration = Duration::from_secs(1);
/// Time by which an entry may follow a later one: the manager's store was unreachable.
const MOST_LATE_MS: u64 = 600_000;
/// Text that sorts after each ID, which has hexadecimal digits.
const AFTER_ALL_IDS: &str = "~";

pub(crate) async fn run(
    command: JournalCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        JournalCommand::List { filter, lines, follow: false } => {
            list(manager, &filter.filter(), usize::from(lines), output).await?;
        }
        JournalCommand::List { filter, lines, follow: true } => {
            let filter = filter.filter();
            tokio::select! {
                result = follow(manager, &filter, lines, output) => result?,
                _ = tokio::signal::ctrl_c() => {}
            }
        }
        JournalCommand::Export { filter } => export(manager, &filter.filter()).await?,
    }
    Ok(Exit::Ok)
}

/// Prints the newest entries, newest first.
async fn list(
    manager: &ManagerClient,
    filter: &JournalFilter,
    lines: usize,
    output: Output,
) -> Result<(), Failure> {
    let entries = newest(manager, filter, lines).await?;
    let rows: Vec<_> = entries.iter().map(row).collect();
    output.result(&entries, || table(&["when", "severity", "kind", "who", "what"], &rows))
}

/// Returns the newest entries. Pages may be short although others follow.
async fn newest(
    manager: &ManagerClient,
    filter: &JournalFilter,
    lines: usize,
) -> Result<Vec<JournalEntry>, ManagerError> {
    let (mut entries, mut next) = (Vec::new(), None::<String>);
    loop {
        let left = u32::try_from(lines - entries.len()).unwrap_or(MAX_PAGE_ITEMS);
        let page = manager.journal(filter, next.as_deref(), left.min(MAX_PAGE_ITEMS)).await?;
        entries.extend(page.items);
        next = page.next;
        if next.is_none() || entries.len() >= lines {
            return Ok(entries);
        }
    }
}

fn row(entry: &JournalEntry) -> Vec<String> {
    let when = utc(entry.at_unix_ms);
    let (severity, kind) = (entry.severity.name().to_owned(), entry.kind.name().to_owned());
    vec![when, severity, kind, entry.who.clone().unwrap_or_default(), what(entry)]
}

fn what(entry: &JournalEntry) -> String {
    match &entry.why {
        Some(why) => format!("{}: {why}", entry.text),
        None => entry.text.clone(),
    }
}

fn line(entry: &JournalEntry) -> String {
    let who = entry.who.as_ref().map(|who| format!(" ({who})")).unwrap_or_default();
    format!("{} {:<7} {}{who}", utc(entry.at_unix_ms), entry.severity.name(), what(entry))
}

/// Prints the newest entries and then each new one, until nobody reads the output. Reconnects if
/// the manager becomes silent.
async fn follow(
    manager: &ManagerClient,
    filter: &JournalFilter,
    lines: u16,
    output: Output,
) -> Result<(), Failure> {
    let mut printed = Printed::new(usize::from(lines));
    loop {
        let why = match follow_once(manager, filter, &mut printed, output).await {
            Ok(true) => return Ok(()),
            Ok(false) => "the manager has closed the connection".to_owned(),
            Err(Cut::Manager(error @ ManagerError::Unreachable { .. })) if printed.has_begun() => {
                error.detail()
            }
            Err(Cut::Manager(error)) => return Err(error.into()),
            Err(Cut::Failed(failure)) => return Err(failure),
        };
        output.note(&format!("note: {why}; reconnecting"));
        tokio::time::sleep(PAUSE).await;
    }
}

/// Entries that were printed already.
struct Printed {
    /// IDs of the last entries that were read.
    ids: BTreeSet<String>,
    /// Most entries to read.
    most: usize,
    /// ID of the oldest entry that is printed: the first answer did not have older ones.
    oldest: Option<String>,
    /// Time of the newest entry.
    newest_unix_ms: Option<u64>,
}

impl Printed {
    fn new(most: usize) -> Printed {
        Printed { ids: BTreeSet::new(), most, oldest: None, newest_unix_ms: None }
    }

    fn has_begun(&self) -> bool {
        self.oldest.is_some()
    }

    /// Returns the filter of what may be new: the manager does not search the whole journal again.
    fn rest(&self, filter: &JournalFilter) -> JournalFilter {
        let from_unix_ms = self.newest_unix_ms.map(|newest| newest.saturating_sub(MOST_LATE_MS));
        let from_unix_ms = filter.from_unix_ms.max(from_unix_ms);
        JournalFilter { from_unix_ms, ..filter.clone() }
    }

    /// Returns the entries that were not printed, the oldest first. `entries` are newest first, so
    /// their IDs grow with their age.
    fn unprinted<'a>(&self, entries: &'a [JournalEntry]) -> Vec<&'a JournalEntry> {
        let is_old = |id: &String| self.oldest.as_ref().is_some_and(|oldest| id > oldest);
        let is_new = |entry: &&JournalEntry| !is_old(&entry.id) && !self.ids.contains(&entry.id);
        entries.iter().rev().filter(is_new).collect()
    }

    /// Takes in the entries that were read.
    fn note(&mut self, entries: &[JournalEntry]) {
        if self.oldest.is_none() {
            // A shorter answer has all that there is.
            let last = entries.last().filter(|_| entries.len() >= self.most);
            let oldest = last.map_or_else(|| AFTER_ALL_IDS.to_owned(), |last| last.id.clone());
            self.oldest = Some(oldest);
        }
        self.newest_unix_ms =
            entries.iter().map(|entry| entry.at_unix_ms).max().max(self.newest_unix_ms);
        self.ids = entries.iter().map(|entry| entry.id.clone()).collect();
        // What comes at once later is printed whole.
        self.most = MAX_PAGE_ITEMS as usize;
    }

    /// Prints the entries, which are newest first, in the order of their times. Returns false if
    /// nobody reads the output any more.
    fn print(&mut self, entries: &[JournalEntry], output: Output) -> Result<bool, Failure> {
        for entry in self.unprinted(entries) {
            if !print(entry, output, || line(entry))? {
                return Ok(false);
            }
        }
        self.note(entries);
        Ok(true)
    }
}

/// Prints entries until the connection ends. Returns true if nobody reads the output any more.
async fn follow_once(
    manager: &ManagerClient,
    filter: &JournalFilter,
    printed: &mut Printed,
    output: Output,
) -> Result<bool, Cut> {
    // Listens before it reads, so that no entry is lost between the two.
    let mut events = manager.events(None).await.map_err(Cut::Manager)?;
    loop {
        let rest = printed.rest(filter);
        let entries = newest(manager, &rest, printed.most).await.map_err(Cut::Manager)?;
        if !printed.print(&entries, output).map_err(Cut::Failed)? {
            return Ok(true);
        }
        // The manager filters the entries: an event only says that there are new ones.
        loop {
            match events.next().await.map_err(Cut::Manager)? {
                None => return Ok(false),
                Some(ManagerEvent::Missed) => break,
                Some(ManagerEvent::Change(event)) => {
                    if matches!(event.change, Change::Journal(_)) {
                        break;
                    }
                }
            }
        }
    }
}

/// Writes all entries that match, one JSON object per line, newest first.
async fn export(manager: &ManagerClient, filter: &JournalFilter) -> Result<(), Failure> {
    let mut next: Option<String> = None;
    loop {
        let page = manager.journal(filter, next.as_deref(), MAX_PAGE_ITEMS).await?;
        let lines = page.items.iter().map(|entry| serde_json::to_string(entry).unwrap_or_default());
        let text: String = lines.map(|line| line + "\n").collect();
        match io::stdout().lock().write_all(text.as_bytes()) {
            // A reader that closes the pipe early is not an error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
        next = page.next;
        if next.is_none() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{JournalKind, JournalSeverity};

    use super::*;

    fn entry(id: &str, at_unix_ms: u64) -> JournalEntry {
        JournalEntry {
            id: id.to_owned(),
            at_unix_ms,
            kind: JournalKind::HostAway,
            severity: JournalSeverity::Warning,
            objects: Vec::new(),
            text: String::new(),
            why: None,
            who: None,
        }
    }

    #[test]
    fn new_entries_are_followed_and_older_ones_are_not_printed_later() {
        let mut printed = Printed::new(2);
        let newest = [entry("c", 3_000_000), entry("d", 2_900_000)];
        printed.note(&newest);
        // The next answer is longer, and has what was before the first one.
        let more = [entry("b", 3_000_001), newest[0].clone(), newest[1].clone(), entry("e", 9)];
        let ids: Vec<&str> =
            printed.unprinted(&more).into_iter().map(|entry| entry.id.as_str()).collect();
        assert_eq!(ids, ["b"]);
        printed.note(&more);
        let rest = printed.rest(&JournalFilter::default());
        assert_eq!(rest.from_unix_ms, Some(2_400_001));
        let asked = JournalFilter { from_unix_ms: Some(2_500_000), ..JournalFilter::default() };
        assert_eq!(printed.rest(&asked).from_unix_ms, Some(2_500_000));
    }

    #[test]
    fn a_line_has_the_reason_and_the_user() {
        let entry = JournalEntry {
            id: "i".to_owned(),
            at_unix_ms: 1_795_444_970_253,
            kind: JournalKind::HostAway,
            severity: JournalSeverity::Warning,
            objects: vec!["host:a".to_owned()],
            text: "host a is away".to_owned(),
            why: Some("no route".to_owned()),
            who: Some("ana".to_owned()),
        };
        let line = line(&entry);
        assert!(line.ends_with(" warning host a is away: no route (ana)"), "{line}");
        assert_eq!(row(&entry).len(), 5);
    }
}
