//! The reports of moves that are over, in the store: a history outlives the manager that saw it.

use godwit_api::control::Problem;
use godwit_migration::Report;
use serde::{Deserialize, Serialize};

use super::job::{Job, MOVES};
use crate::keeper::{Keeper, Writes};
use crate::store::Transaction;
use crate::store::records::{Record, Table};

/// The most that is kept of a report, as JSON: it is written in one transaction with its move. What is longer loses rounds from its middle.
const MOST_BYTES: usize = 256 << 10;

const REPORTS: Table<SavedReport> = Table::new();

/// A move's report, as it is saved: as agents told it, which is also what is told of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedReport {
    report: Report,
}

impl Record for SavedReport {
    const KIND: &'static str = "report";
    const PREFIX: &'static str = "reports/";
    const VERSION: u32 = 1;
}

/// Writes a job in the place of the one that is known, and beside it the report of its end.
pub(super) async fn save(keeper: &Keeper, job: &Job) -> Result<(), Problem> {
    let Some(report) = job.report.as_ref().filter(|_| job.state.is_over()) else {
        return keeper.replace(MOVES, &job.id, &job.saved()).await;
    };
    let saved = SavedReport { report: shortened(report.clone()) };
    let writes = keeper.put(Writes::default(), MOVES, &job.id, &job.saved()).await?;
    let writes = keeper.put(writes, REPORTS, &job.id, &saved).await?;
    keeper.write(writes).await
}

/// The report of the move of this id; none: it never began, is not over, or its end was not seen by a manager.
pub(super) async fn find(keeper: &Keeper, id: &str) -> Result<Option<Report>, Problem> {
    Ok(keeper.find(REPORTS, id).await?.map(|kept| kept.record.report))
}

/// Forgets a move's report, where there is one.
pub(super) async fn forget(keeper: &Keeper, id: &str) -> Result<(), Problem> {
    if let Some(kept) = keeper.find(REPORTS, id).await? {
        keeper.write_unknown(REPORTS.remove(Transaction::new(), id, kept.revision)).await?;
    }
    Ok(())
}

/// One that may be kept. Its rounds alone have no limit of their own.
fn shortened(mut report: Report) -> Report {
    let is_too_long = |report: &Report| serde_json::to_vec(report).is_ok_and(|text| text.len() > MOST_BYTES);
    while is_too_long(&report) && !report.rounds.is_empty() {
        let (rounds, cut) = (report.rounds.len(), report.rounds.len().div_ceil(2));
        let from = (rounds - cut) / 2;
        report.rounds.drain(from..from + cut);
    }
    report
}

#[cfg(test)]
mod tests {
    use godwit_migration::RoundReport;

    use super::*;
    use crate::moves::tests::report;

    #[test]
    fn of_a_very_long_report_the_first_and_the_last_rounds_are_kept() {
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
        let kept = shortened(long);
        let numbers: Vec<_> = kept.rounds.iter().map(|round| round.round).collect();
        assert_eq!((numbers.first(), numbers.last()), (Some(&0), Some(&19_999)));
        assert!(serde_json::to_vec(&kept).unwrap().len() <= MOST_BYTES);
        assert_eq!(shortened(kept.clone()), kept);
    }
}
