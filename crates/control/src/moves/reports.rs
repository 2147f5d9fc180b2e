//! The reports of moves that are over, in the store: a history outlives the manager that saw it.

use godwit_api::control::Problem;
use godwit_store::records::{Record, Table};
use godwit_types::Report;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::job::{Job, MOVES};
use crate::cluster::text::beginning;
use crate::storage::keeper::{Keeper, Writes};

/// The most that is kept of a report, as JSON: ten thousand of them are to fit a store beside all else. Of a longer one the middles of its lists are left out.
const MOST_BYTES: usize = 128 << 10;
/// The longest lists and texts that stay where it is too long, tried in this order.
const MOST_ITEMS: [usize; 3] = [200, 40, 8];
const MOST_TEXT_BYTES: usize = 1024;

const REPORTS: Table<SavedReport> = Table::new();

/// A move's report, as it is saved: what is told of it, which may be that of another version.
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

/// Writes a job in the place of the one that is known, and beside it the report of its end.
pub(super) async fn save(keeper: &Keeper, job: &Job) -> Result<(), Problem> {
    let is_its_own = job.state.is_over() && job.state.migration().is_some();
    let report = job.report.as_ref().filter(|_| is_its_own).and_then(kept);
    let Some(report) = report else {
        return keeper.replace(MOVES, &job.id, &job.saved()).await;
    };
    let writes = keeper.put(Writes::default(), MOVES, &job.id, &job.saved()).await?;
    let writes = keeper.put_over(writes, REPORTS, &job.id, &SavedReport { report }).await?;
    keeper.write(writes).await
}

/// The report of the move of this id; none: it never began, is not over, its end was not seen by a manager, or another version's can't be read.
pub(super) async fn find(keeper: &Keeper, id: &str) -> Result<Option<Report>, Problem> {
    let Some(kept) = keeper.find(REPORTS, id).await? else { return Ok(None) };
    let read = serde_json::from_value(kept.record.report);
    Ok(read
        .inspect_err(|error| tracing::warn!(job = id, %error, "a move's report can't be read"))
        .ok())
}

/// Forgets a move's report, where there is one.
pub(super) async fn forget(keeper: &Keeper, id: &str) -> Result<(), Problem> {
    keeper.remove_unknown(REPORTS, id).await
}

/// What is kept of a report; none: it is too long whatever is left out.
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

/// Leaves out the middles of long lists and the ends of long texts.
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
    use crate::moves::tests::report;

    #[test]
    fn of_a_very_long_report_the_first_and_the_last_of_each_list_are_kept() {
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
