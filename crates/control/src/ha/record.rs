//! Saved settings of the high availability, and the saved judges of hosts.

use godwit_api::control::{AdmissionPolicy, HaSettings};
use godwit_ha::{Facts, Record as JudgeRecord, Term};
use godwit_qemu::Uuid;
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

pub(crate) const HA: Table<SavedHa> = Table::new();
pub(crate) const HA_HOSTS: Table<SavedJudge> = Table::new();
/// ID of the only record of settings.
pub(crate) const OF_CLUSTER: &str = "cluster";

/// Identity of the cluster towards guards, and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedHa {
    pub(crate) cluster: Uuid,
    enabled: bool,
    failures: u32,
    admission: AdmissionPolicy,
}

impl Record for SavedHa {
    const KIND: &'static str = "settings of HA";
    const PREFIX: &'static str = "ha/";
    const VERSION: u32 = 1;
}

impl SavedHa {
    pub(crate) fn new(cluster: Uuid, settings: HaSettings) -> SavedHa {
        let HaSettings { enabled, failures, admission } = settings;
        SavedHa { cluster, enabled, failures, admission }
    }

    pub(crate) fn settings(&self) -> HaSettings {
        let SavedHa { enabled, failures, admission, .. } = *self;
        HaSettings { enabled, failures, admission }
    }
}

/// The judge of a host, by the host's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedJudge {
    /// Identity of the host towards its guard.
    pub(crate) host: Uuid,
    term: u64,
    over: bool,
    /// Heartbeat datastores of the term, in the order in which both sides count them.
    pub(crate) datastores: Vec<Uuid>,
    watchdog: bool,
    fencing: bool,
}

impl Record for SavedJudge {
    const KIND: &'static str = "judge of host";
    const PREFIX: &'static str = "ha-hosts/";
    const VERSION: u32 = 1;
}

impl SavedJudge {
    /// Creates the record of a host that never had a term.
    pub(crate) fn new(host: Uuid) -> SavedJudge {
        SavedJudge::of(host, JudgeRecord::NEW, Vec::new())
    }

    pub(crate) fn of(host: Uuid, record: JudgeRecord, datastores: Vec<Uuid>) -> SavedJudge {
        let JudgeRecord { term: Term(term), over, facts } = record;
        let Facts { watchdog, fencing, .. } = facts;
        SavedJudge { host, term, over, datastores, watchdog, fencing }
    }

    pub(crate) fn record(&self) -> JudgeRecord {
        let facts = Facts {
            datastores: self.datastores.len(),
            watchdog: self.watchdog,
            fencing: self.fencing,
        };
        JudgeRecord { term: Term(self.term), over: self.over, facts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_judge_is_read_as_it_was_saved() {
        let host = Uuid::from_u128(1);
        assert_eq!(SavedJudge::new(host).record(), JudgeRecord::NEW);
        let facts = Facts { datastores: 2, watchdog: true, fencing: false };
        let record = JudgeRecord { term: Term(7), over: false, facts };
        let saved = SavedJudge::of(host, record, vec![Uuid::from_u128(2), Uuid::from_u128(3)]);
        let text = serde_json::to_string(&saved).unwrap();
        assert_eq!(serde_json::from_str::<SavedJudge>(&text).unwrap(), saved);
        assert_eq!(saved.record(), record);
    }

    #[test]
    fn settings_are_read_as_they_were_saved() {
        let settings = HaSettings { enabled: true, failures: 2, ..HaSettings::default() };
        assert_eq!(SavedHa::new(Uuid::from_u128(1), settings).settings(), settings);
    }
}
