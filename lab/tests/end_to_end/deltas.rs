//! Pages sent as deltas: a guest writes a little to many pages, over a link that is too slow for
//! whole pages.

use anyhow::{Context, Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_qemu::ByteSize;
use godwit_types::EncodingName;

use crate::move_and_check;

/// 6,000 pages a second, 16 words of each: 24 MiB/s of pages, about 2 MiB/s of differences.
const LITTLE_OF_MANY: &str =
    "dirty:rate=6000,ws=24M,order=random,zero=0,compressible=0,touch=words:16";

#[test]
fn a_guest_that_writes_a_little_to_many_pages_moves_over_a_slow_link() -> Result<()> {
    let link = Some("100mbit".parse()?);
    let Some(trial) = Trial::begin_with("deltas", LabOptions { link, ..LabOptions::default() })?
    else {
        return Ok(());
    };
    let plan = GuestPlan {
        workload: LITTLE_OF_MANY.to_owned(),
        fill: ByteSize::from_mib(48),
        ..GuestPlan::new("web")
    };
    let mut guest = trial.guest("a", &plan)?;
    let watched = move_and_check(&trial, &mut guest)?;
    let encodings = &watched.report.encodings;
    let delta = encodings.iter().find(|encoding| encoding.name == EncodingName::Delta);
    let delta = delta.with_context(|| format!("{:#?}", watched.report))?;
    ensure!(delta.wire_bytes < delta.raw_bytes / 5, "{delta:?}");
    trial.finish()
}
