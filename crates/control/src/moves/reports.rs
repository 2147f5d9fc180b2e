//! Reports of finished moves in the store, so that the history outlives the manager that saw it.

use godwit_api::control::Problem;
use godwit_store::records::{Record, Table};
use godwit_types::Report;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::job::Job;
use super::record::MOVES;
use crate::cluster::text::beginning;
use crate::journal::entries::NewEntry;
use crate::storage::keeper::{Keeper, Writes};

/// Largest stored report, as JSON: ten thousand of them must fit in a store beside all other
/// records. Longer reports lose the middles of their lists.
const MOST_BYTES: usize = 128 << 10;
/// Longest list in a shortened report; the values are tried in this order.
const MOST_ITEMS: [usize; 3] = [200, 40, 8];
const MOST_TEXT_BYTES: usize = 1024;

const REPORTS: Table<SavedReport> = Table::new();

/// A move's report as it is saved. Another version may have written it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedReport {
    report: Value,
}

impl Record for SavedReport {
    const KIND: &'static str = "report";
    const PREFIX: &'static str = "reports/";
    const VERSION: u32 = 1;
}

/// Saves a job over the known one, with the report of its end and the entry of the journal about
/// it.
pub(super) async fn save_job(
    keeper: &Keeper,
    job: &Job,
    entry: Option<NewEntry>,
) -> Result<(), Problem> {
    let writes = entry.map_or_else(|| Ok(Writes::default()), |entry| keeper.noting(entry))?;
    let is_its_own = job.state.is_over() && job.state.migration().is_some();
    let report = job.report.as_ref().filter(|_| is_its_own).and_then(kept);
    let Some(report) = report else {
        return keeper.replace_with(writes, MOVES, &job.id, &job.saved()).await;
    };
    let writes = keeper.put(writes, MOVES, &job.id, &job.saved()).await?;
    let writes = keeper.put_over(writes, REPORTS, &job.id, &SavedReport { report }).await?;
    keeper.write(writes).await
}

/// Creates a job that is over, with its report and the entry of the journal about it.
pub(super) async fn create_job(keeper: &Keeper, job: &Job, entry: NewEntry) -> Result<(), Problem> {
    let writes = keeper.put(keeper.noting(entry)?, MOVES, &job.id, &job.saved()).await?;
    let report = job.report.as_ref().and_then(kept).map(|report| SavedReport { report });
    let writes = match &report {
        Some(report) => keeper.put_over(writes, REPORTS, &job.id, report).await?,
        None => writes,
    };
    keeper.write(writes).await
}

/// Returns the report of the move with this ID. `None`: the move never began or is not over, no
/// manager saw its end, or another version's report cannot be read.
pub(super) async fn find(keeper: &Keeper, id: &str) -> Result<Option<Report>, Problem> {
    let Some(kept) = keeper.find(REPORTS, id).await? else { return Ok(None) };
    let read = serde_json::from_value(kept.record.report);
    Ok(read
        .inspect_err(|error| tracing::warn!(job = id, %error, "cannot read the report of a move"))
        .ok())
}

/// Removes a move's report, if there is one.
pub(super) async fn remove(keeper: &Keeper, id: &str) -> Result<(), Problem> {
    keeper.remove_unknown(REPORTS, id).await
}

/// Returns the stored form of a report. `None`: it is too long even when shortened.
pub(super) fn kept(report: &Report) -> Option<Value> {
    let mut value = serde_json::to_value(report).ok()?;
    let fits = |value: &Value| serde_json::to_vec(value).is_ok_and(|text| text.len() <= MOST_BYTES);
    for most_items in MOST_ITEMS {
        if fits(&value) {
            return Some(value);
        }
        shorten(&mut value, most_items);
    }
    fits(&value).then_some(value)
}

/// Removes the middles of long lists and the ends of long texts.
fn shorten(value: &mut Value, most_items: usize) {
    match value {
        Value::Array(items) => {
            let beyond = items.len().saturating_sub(most_items);
            let from = (items.len() - beyond) / 2;
            items.drain(from..from + beyond);
            items.iter_mut().for_each(|item| shorten(item, most_items));
        }
        Value::Object(fields) => fields.values_mut().for_each(|field| shorten(field, most_items)),
        Value::String(text) => *text = beginning(text, MOST_TEXT_BYTES),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use godwit_types::RoundReport;

    use super::*;
    use crate::moves::driver::tests::report;

    #[test]
    fn a_very_long_report_keeps_the_ends_of_its_lists() {
        let mut long = report("web");
        let round = |round| RoundReport {
            round,
            pages: 1,
            zero_pages: 0,
            bytes: 4096,
            duration_ms: 1.0,
            dirty_pages_per_s: 1.0,
            throttled_to_pages_per_s: None,
        };
        long.rounds = (0..20_000).map(round).collect();
        let short: Report = serde_json::from_value(kept(&long).unwrap()).unwrap();
        let numbers: Vec<_> = short.rounds.iter().map(|round| round.round).collect();
        assert_eq!(
            (numbers.len(), numbers.first(), numbers.last()),
            (200, Some(&0), Some(&19_999))
        );
        let whole = report("web");
        assert_eq!(kept(&whole), serde_json::to_value(&whole).ok());
        let named = report(&"w".repeat(1 << 20));
        let short: Report = serde_json::from_value(kept(&named).unwrap()).unwrap();
        assert_eq!(short.vm.trim_end_matches('…').len(), MOST_TEXT_BYTES);
    }
}
