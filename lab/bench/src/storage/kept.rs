//! Runs that are kept in the file of the results, so that a run of the scenario that was stopped
//! can be continued.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use godwit_lab::Rtt;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Run, Way};

/// Settings that all moves of a file must have in common: figures of others are not comparable.
const SAME: [&str; 8] =
    ["link", "virtual_size", "content", "used", "written", "base", "limit_s", "tls"];

/// A rate of writes on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) rtt: Rtt,
    pub(super) rate_mib_s: u64,
}

/// A move; no figures if the guest was lost.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeptRun {
    place: Place,
    way: Way,
    /// Number of the round, from 1.
    round: u32,
    run: Option<Run>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeptComparison {
    place: Place,
    compared: Compared,
}

/// Comparison of the images after a move of a guest that does not write.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Compared {
    pub(crate) way: Way,
    /// What differs, or why they were not compared; `None` if they are the same.
    pub(crate) difference: Option<String>,
}

/// All moves and comparisons so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    runs: Vec<KeptRun>,
    comparisons: Vec<KeptComparison>,
}

impl Record {
    /// Reads the record of a file of results, to be continued with these settings.
    pub(super) fn read(file: &Path, settings: &impl Serialize) -> Result<Record> {
        let name = file.display();
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
        let found: Value =
            serde_json::from_str(&text).with_context(|| format!("cannot parse {name}"))?;
        let settings = serde_json::to_value(settings)?;
        for setting in SAME {
            let (then, now) = (&found["settings"][setting], &settings[setting]);
            ensure!(then == now, "{name} has moves with {setting} {then}, not {now}");
        }
        serde_json::from_value(found).with_context(|| format!("cannot parse {name}"))
    }

    pub(super) fn add_run(&mut self, place: Place, way: Way, round: u32, run: Option<Run>) {
        self.runs.push(KeptRun { place, way, round, run });
    }

    pub(super) fn add_comparison(&mut self, place: Place, compared: Compared) {
        self.comparisons.push(KeptComparison { place, compared });
    }

    pub(super) fn has_run(&self, place: Place, way: Way, round: u32) -> bool {
        self.runs.iter().any(|kept| (kept.place, kept.way, kept.round) == (place, way, round))
    }

    pub(super) fn has_comparison(&self, place: Place, way: Way) -> bool {
        self.comparisons.iter().any(|kept| (kept.place, kept.compared.way) == (place, way))
    }

    /// Returns the moves by a way.
    pub(super) fn runs(&self, place: Place, way: Way) -> Vec<Option<Run>> {
        let of_way = self.runs.iter().filter(|kept| (kept.place, kept.way) == (place, way));
        of_way.map(|kept| kept.run.clone()).collect()
    }

    pub(super) fn comparisons(&self, place: Place) -> Vec<Compared> {
        let here = self.comparisons.iter().filter(|kept| kept.place == place);
        here.map(|kept| kept.compared.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_has_the_runs_and_what_is_missing() {
        let place = |rtt: &str, rate_mib_s| Place { rtt: rtt.parse().unwrap(), rate_mib_s };
        let (here, there) = (place("0ms", 5), place("10ms", 5));
        let run = Run { longest_write_ms: 7.5, ..Run::default() };
        let mut record = Record::default();
        record.add_run(here, Way::Godwit, 1, Some(run));
        record.add_run(here, Way::MirrorBlocking, 1, None);
        record.add_comparison(here, Compared { way: Way::Godwit, difference: None });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("storage.json");
        let mut results = serde_json::to_value(&record).unwrap();
        let settings = json!({"content": "files", "runs": 5});
        results["settings"] = settings.clone();
        fs::write(&file, results.to_string()).unwrap();
        let again = Record::read(&file, &json!({"content": "files", "runs": 7})).unwrap();
        assert!(again.has_run(here, Way::Godwit, 1) && again.has_run(here, Way::MirrorBlocking, 1));
        assert!(!again.has_run(here, Way::Godwit, 2) && !again.has_run(there, Way::Godwit, 1));
        assert!(again.has_comparison(here, Way::Godwit));
        assert!(!again.has_comparison(here, Way::MirrorBlocking));
        let runs = again.runs(here, Way::Godwit);
        assert_eq!(runs[0].as_ref().map(|run| run.longest_write_ms), Some(7.5));
        assert!(again.runs(here, Way::MirrorBlocking)[0].is_none());
        assert_eq!((again.comparisons(here).len(), again.comparisons(there).len()), (1, 0));
        let other = Record::read(&file, &json!({"content": "random"})).unwrap_err().to_string();
        assert!(other.ends_with("has moves with content \"files\", not \"random\""), "{other}");
        assert!(Record::read(&folder.path().join("another"), &settings).is_err());
    }
}
