//! Peers of another version and peers that are not agents: one error each, and the guest does not
//! notice.

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_types::Outcome;

use crate::fake_peer::{self, Manner, PORT};
use crate::move_and_check;

/// Fake peers, one per host. Hosts c to g run an agent that is not used, and the test's peer beside
/// it. Each entry has the code of the error and words of its message.
const PEERS: [(&str, &str, Manner, &str, &str); 5] = [
    ("c", "10.77.0.13", Manner::Stranger, "peer-version", "does not respond as a Godwit agent"),
    ("d", "10.77.0.14", Manner::RefusesVersion, "version-mismatch", "98 to 99"),
    ("e", "10.77.0.15", Manner::WelcomesInVersion99, "version-mismatch", "99"),
    // Such bytes may be a damaged frame. The source cannot know, so the text names both causes.
    ("f", "10.77.0.16", Manner::Garbage, "lane-lost", "does not speak this protocol"),
    ("g", "10.77.0.17", Manner::HangsUp, "lane-lost", "the lane"),
];

#[test]
fn peers_of_another_version_are_distinguished_from_peers_that_are_gone() -> Result<()> {
    // The fake peers have no TLS. The errors are the same with it.
    let options = LabOptions { hosts: 7, insecure: true, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("peer-version", options)? else { return Ok(()) };
    for (host, address, manner, ..) in PEERS {
        fake_peer::start(&trial.namespace(host), address, manner)?;
    }
    trial.reconfigure("a", |config| {
        let peers = config.get_mut("peers").and_then(toml::Value::as_table_mut).unwrap();
        for (host, address, ..) in PEERS {
            peers.insert(host.to_owned(), format!("http://{address}:{PORT}").into());
        }
        peers.insert("nobody".to_owned(), "http://10.77.0.12:7798".into());
    })?;
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    let with_guest = trial.traces("a")?;
    let peers = PEERS.map(|(host, _, _, code, words)| (host, code, words));
    for (host, code, words) in peers.into_iter().chain([("nobody", "peer-unreachable", "nobody")]) {
        let report = trial.begin_migration("web", "a", &MigrationRequest::to(host))?.report()?;
        ensure!(report.outcome == Outcome::Failed, "{report:#?}");
        let error = report.error.context("no reason")?;
        ensure!(error.code == code && error.message.contains(words), "to {host}: {error:?}");
        ensure!(!error.remedy.is_empty(), "{error:?}");
        eprintln!("  error: {} ({}; {})", error.message, error.code, error.remedy);
        trial.expect_whole(&guest)?;
        trial.expect_traces("a", &with_guest)?;
    }
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
