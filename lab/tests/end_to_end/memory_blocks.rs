//! Guests with several RAM blocks, with sizes that are not multiples of a huge page, and with more
//! vCPUs.

use anyhow::Result;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_qemu::ByteSize;

use crate::{BUSY, move_and_check};

#[test]
fn blocks_of_odd_sizes_move_whole() -> Result<()> {
    let Some(trial) = Trial::begin("memory-blocks")? else { return Ok(()) };
    let clean = trial.traces("a")?;
    let kib = |kib: u64| ByteSize::from_bytes(kib << 10);
    // 300 MiB, 17 MiB and 4 KiB, and a block that makes the sum a multiple of 8 KiB, as QEMU
    // requires.
    let memory = vec![kib(300 << 10), kib(17 << 10), kib(4), kib((1 << 10) + 4)];
    let plan =
        GuestPlan { memory, vcpus: 2, workload: BUSY.to_owned(), ..GuestPlan::new("blocks") };
    let mut guest = trial.guest("a", &plan)?;
    move_and_check(&trial, &mut guest)?;
    trial.expect_traces("a", &clean)?;
    guest.workload("compute")?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
