//! Writer of a ledger on a disk: `godwit.ledger=vda`.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_guest::ledger::{BootId, Ledger};
use rustix::fs::OFlags;

use crate::guest::print;

/// Interval between two writes.
const INTERVAL: Duration = Duration::from_millis(50);

/// Writes the ledger of this boot, for ever.
pub(crate) fn keep(name: &str) -> anyhow::Result<()> {
    // The kernel may still be looking for it.
    while !Path::new("/sys/block").join(name).exists() {
        std::thread::park_timeout(INTERVAL);
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(format!("/dev/{name}"))
        .with_context(|| format!("cannot open disk {name}"))?;
    let mut ledger = Ledger::begin(file, random()?).context("cannot begin the ledger")?;
    print(&format!("LEDGER boot {} writes", ledger.place()));
    loop {
        ledger.append().context("cannot write the ledger")?;
        std::thread::park_timeout(INTERVAL);
    }
}

/// Returns the kernel's random number in hexadecimal digits and dashes.
fn random() -> anyhow::Result<BootId> {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid").context("no random number")?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut boot = [0; 16];
    ensure!(digits.len() == 2 * boot.len(), "the random number is {text:?}");
    for (byte, pair) in boot.iter_mut().zip(digits.as_chunks::<2>().0) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair)?, 16)?;
    }
    Ok(boot)
}
