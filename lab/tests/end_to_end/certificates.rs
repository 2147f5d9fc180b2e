//! Hosts with a certificate of another authority or a revoked certificate: they receive no guest,
//! and the guest does not notice.

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, SetRevocations};
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_pki::{Authority, Grant, Role, describe};
use godwit_types::Outcome;
use rustix::process::Signal;

use crate::{BUSY, move_and_check};

#[test]
fn a_foreign_certificate_gets_no_guest() -> Result<()> {
    let Some(trial) = Trial::begin("certificates")? else { return Ok(()) };
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let foreign = tempfile::tempdir()?;
    let grant = Grant { name: "b".to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
    let issued = Authority::create(foreign.path(), "godwit lab", 1)?.issue(&grant)?;
    let (certificate, key) = (trial.pki().join("b.pem"), trial.pki().join("b.key"));
    let own = (std::fs::read(&certificate)?, std::fs::read(&key)?);
    std::fs::copy(&issued.certificate, &certificate)?;
    std::fs::copy(&issued.key, &key)?;
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    let report = trial.begin_migration("web", "a", &MigrationRequest::to("b"))?.report()?;
    let error = report.error.context("the certificate was accepted")?;
    ensure!(
        report.outcome == Outcome::Failed && error.message.contains("certificate"),
        "{error:?}"
    );
    eprintln!("  error: {} ({}; {})", error.message, error.code, error.remedy);
    trial.expect_whole(&guest)?;
    std::fs::write(&key, own.1)?;
    std::fs::write(&certificate, own.0)?;
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

#[test]
fn a_revoked_certificate_gets_no_guest_until_there_is_another() -> Result<()> {
    let Some(trial) = Trial::begin("revoked")? else { return Ok(()) };
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let authority = Authority::open(&trial.pki())?;
    let list = authority.revoke([describe(&trial.pki().join("b.pem"))?.serial])?;
    let sent = SetRevocations { list: list.pem().to_owned() };
    trial.ask(trial.agent("a").set_revocations(&sent))?;
    let report = trial.begin_migration("web", "a", &MigrationRequest::to("b"))?.report()?;
    let error = report.error.context("the certificate was accepted")?;
    ensure!(report.outcome == Outcome::Failed && error.message.contains("Revoked"), "{error:?}");
    eprintln!("  error: {} ({}; {})", error.message, error.code, error.remedy);
    trial.expect_whole(&guest)?;
    // A renewed certificate is a new one. The agent accepts it without a restart.
    authority.renew("b", 1)?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
