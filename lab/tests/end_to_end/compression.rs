//! Compression of pages: the guest's memory is unchanged afterwards, and fewer bytes crossed the
//! wire.

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_types::{Compression, EncodingName};

use crate::check_report;

#[test]
fn a_compressed_guest_arrives_whole() -> Result<()> {
    let options = LabOptions { link: Some("1gbit".parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("compression", options)? else { return Ok(()) };
    let workload = "dirty:rate=5000,ws=64M,order=random,zero=10,compressible=80".to_owned();
    let mut guest = trial.guest("a", &GuestPlan { workload, ..GuestPlan::new("web") })?;
    for (compression, name) in [
        (Compression::Zstd, Some(EncodingName::Zstd)),
        (Compression::Lz4, Some(EncodingName::Lz4)),
        (Compression::Auto, None),
        (Compression::None, Some(EncodingName::Raw)),
    ] {
        let request = MigrationRequest { compression, ..guest.to_other_host() };
        let report = trial.move_guest(&mut guest, &request)?.report;
        check_report(&report)?;
        trial.expect_whole(&guest).with_context(|| format!("{compression:?}"))?;
        let encodings = &report.encodings;
        eprintln!("  {compression:?}: {:.0} ms, {encodings:?}", report.migration_time_ms);
        let pages: u64 = encodings.iter().map(|encoding| encoding.pages).sum();
        ensure!(pages == report.rounds.iter().map(|round| round.pages).sum::<u64>(), "{report:#?}");
        if let Some(name) = name {
            let used =
                encodings.iter().find(|encoding| encoding.name == name).context("not used")?;
            let smaller = used.wire_bytes < used.raw_bytes * 3 / 4;
            ensure!(smaller == (name != EncodingName::Raw), "{encodings:?}");
        }
    }
    trial.finish()
}
