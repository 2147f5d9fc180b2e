//! Peers of another version, and peers that are none: one error each, and the guest never notices.

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_migration::Outcome;

use crate::fake_peer::{self, Manner, PORT};
use crate::move_and_check;

/// A host each; c to g have no agent that matters, only a peer of the test's own beside it.
const PEERS: [(&str, &str, Manner, &str); 5] = [
    ("c", "10.77.0.13", Manner::Stranger, "peer-version"),
    ("d", "10.77.0.14", Manner::RefusesVersion, "version-mismatch"),
    ("e", "10.77.0.15", Manner::WelcomesInVersion99, "version-mismatch"),
    ("f", "10.77.0.16", Manner::Garbage, "protocol-broken"),
    ("g", "10.77.0.17", Manner::HangsUp, "lane-lost"),
];

#[test]
fn peers_of_another_version_are_told_from_peers_that_are_gone() -> Result<()> {
    // The fakes speak no TLS: what is told of them is the same.
    let options = LabOptions { hosts: 7, insecure: true, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("peer-version", options)? else { return Ok(()) };
    for (host, address, manner, _) in PEERS {
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
    for (host, code) in
        PEERS.map(|(host, _, _, code)| (host, code)).into_iter().chain([("nobody", "peer-unreachable")])
    {
        let report = trial.begin_migration("web", "a", &MigrationRequest::to(host))?.report()?;
        ensure!(report.outcome == Outcome::Failed, "{report:#?}");
        let error = report.error.context("no reason")?;
        ensure!(error.code == code, "to {host}: {error:?}");
        ensure!(!error.message.is_empty() && !error.mend.is_empty(), "{error:?}");
        eprintln!("  told: {} ({}; {})", error.message, error.code, error.mend);
        trial.expect_whole(&guest)?;
        trial.expect_traces("a", &with_guest)?;
    }
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
