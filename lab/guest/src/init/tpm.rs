//! The use of the guest's TPM, if it has one: a register is extended again and again, and a counter
//! in its non-volatile memory is incremented at each boot. Both must go on where they were.
//!
//! Commands and their parts are those of "TPM 2.0 Library, Part 3: Commands".

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::guest::{Guest, print};

/// The TPM's device.
const DEVICE: &str = "/dev/tpm0";
/// Interval between two extensions.
const INTERVAL: Duration = Duration::from_millis(20);
/// Extensions between two lines on the console.
const LINE_EVERY: u64 = 10;
/// Register for applications, which no firmware and no kernel uses.
const REGISTER: u8 = 23;
/// Index of the counter.
const COUNTER: [u8; 4] = [0x01, 0x80, 0x47, 0x57];
/// Authorization with an empty password: size, TPM_RS_PW, no nonce, no attributes, no password.
const NO_PASSWORD: [u8; 13] = [0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0];
/// Longest response.
const MOST_RESPONSE_BYTES: usize = 4096;
const DIGEST_BYTES: usize = 32;
const SHA256: [u8; 2] = [0x00, 0x0b];

/// Uses the TPM for ever.
pub(crate) fn use_it(guest: &Arc<Guest>) -> anyhow::Result<()> {
    // The kernel makes the device before it starts init.
    let Ok(mut tpm) = OpenOptions::new().read(true).write(true).open(DEVICE) else {
        loop {
            std::thread::park();
        }
    };
    print(&format!("TPM counter {}", increment(&mut tpm)?));
    let mut last = read_register(&mut tpm)?;
    for extensions in 1u64.. {
        std::thread::park_timeout(INTERVAL);
        let now = read_register(&mut tpm)?;
        if now != last {
            guest.report("TPM: its register changed by itself");
        }
        extend_register(&mut tpm, extensions)?;
        last = read_register(&mut tpm)?;
        if last == now {
            guest.report("TPM: its register did not change");
        }
        if extensions % LINE_EVERY == 0 {
            print(&format!("TPM {extensions} extensions"));
        }
    }
    Ok(())
}

fn read_register(tpm: &mut File) -> anyhow::Result<Vec<u8>> {
    let mut select = [0; 3];
    select[usize::from(REGISTER / 8)] = 1 << (REGISTER % 8);
    let what = [&[0, 0, 0, 1][..], &SHA256, &[3], &select].concat();
    let response = command(tpm, 0x8001, 0x17e, &what).context("TPM2_PCR_Read")?;
    let digest = response.len().checked_sub(DIGEST_BYTES).context("a short TPM2_PCR_Read")?;
    Ok(response[digest..].to_vec())
}

fn extend_register(tpm: &mut File, with: u64) -> anyhow::Result<()> {
    let mut digest = [0; DIGEST_BYTES];
    digest[..8].copy_from_slice(&with.to_be_bytes());
    let handle = [0, 0, 0, REGISTER];
    let what = [&handle[..], &NO_PASSWORD, &[0, 0, 0, 1], &SHA256, &digest].concat();
    command(tpm, 0x8002, 0x182, &what).context("TPM2_PCR_Extend").map(drop)
}

/// Increments the counter, which is made at the first boot, and returns it.
fn increment(tpm: &mut File) -> anyhow::Result<u64> {
    let handles = [COUNTER, COUNTER].concat();
    let increment = [&handles[..], &NO_PASSWORD].concat();
    if command(tpm, 0x8002, 0x134, &increment).is_err() {
        // TPMA_NV: AUTHWRITE, OWNERWRITE, a counter, AUTHREAD, OWNERREAD, NO_DA.
        let attributes = 0x0206_0016_u32.to_be_bytes();
        let public = [&[0, 14][..], &COUNTER, &SHA256, &attributes, &[0, 0], &[0, 8]].concat();
        let owner = [0x40, 0, 0, 1];
        let define = [&owner[..], &NO_PASSWORD, &[0, 0], &public].concat();
        command(tpm, 0x8002, 0x12a, &define).context("TPM2_NV_DefineSpace")?;
        command(tpm, 0x8002, 0x134, &increment).context("TPM2_NV_Increment")?;
    }
    let read = [&handles[..], &NO_PASSWORD, &[0, 8, 0, 0]].concat();
    let response = command(tpm, 0x8002, 0x14e, &read).context("TPM2_NV_Read")?;
    // After the size of the parameters and that of the value.
    let value = response.get(6..14).context("a short TPM2_NV_Read")?;
    Ok(u64::from_be_bytes(value.try_into()?))
}

/// Sends a command and returns its response without the header.
fn command(tpm: &mut File, tag: u16, code: u32, body: &[u8]) -> anyhow::Result<Vec<u8>> {
    let length = u32::try_from(10 + body.len())?.to_be_bytes();
    tpm.write_all(&[&tag.to_be_bytes()[..], &length, &code.to_be_bytes(), body].concat())?;
    let mut response = vec![0; MOST_RESPONSE_BYTES];
    let read = tpm.read(&mut response)?;
    response.truncate(read);
    ensure!(read >= 10, "a response of {read} bytes");
    let code = u32::from_be_bytes(response[6..10].try_into()?);
    ensure!(code == 0, "response code {code:#x}");
    Ok(response.split_off(10))
}
