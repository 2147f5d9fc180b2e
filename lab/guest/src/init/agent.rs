//! Agent of the lab's guest: answers on its virtio-serial port as `qemu-ga` does, as far as Godwit
//! asks. It names the disk for cloud-init by its content, so that a test can compare that with what
//! the host made.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use godwit_guest::options::Options;
use rustix::time::{ClockId, Timespec};
use serde_json::{Value, json};

use crate::guest::{Guest, print};
use crate::tasks::Ticks;

const PORT: &str = "org.qemu.guest_agent.0";
const DELIMITER: u8 = 0xff;
/// Interval at which a port without a host is read again.
const READ_AGAIN: Duration = Duration::from_millis(100);

/// Whether the guest pretends that its file systems are frozen. It has none that could be.
static FROZEN: AtomicBool = AtomicBool::new(false);

/// Answers forever; without a port, does nothing.
pub(crate) fn serve(_: &Arc<Guest>, options: &Options) -> anyhow::Result<()> {
    let Some(path) = port() else {
        loop {
            std::thread::park();
        }
    };
    let mut port = OpenOptions::new().read(true).write(true).open(path)?;
    let (mut read, mut piece) = (Vec::new(), [0; 4096]);
    let mut again = Ticks::every(READ_AGAIN)?;
    loop {
        let count = port.read(&mut piece)?;
        if count == 0 {
            // No host is connected.
            again.next()?;
        }
        for &byte in &piece[..count] {
            match byte {
                DELIMITER => read.clear(),
                b'\n' => {
                    let answer = answer(&read, options);
                    read.clear();
                    if let Some(answer) = answer {
                        port.write_all(&answer)?;
                    }
                }
                byte => read.push(byte),
            }
        }
    }
}

fn port() -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    ports.filter_map(Result::ok).find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim() == PORT).then(|| PathBuf::from("/dev").join(entry.file_name()))
    })
}

fn answer(line: &[u8], options: &Options) -> Option<Vec<u8>> {
    let request: Value = serde_json::from_slice(line).ok()?;
    let command = request["execute"].as_str()?;
    let arguments = &request["arguments"];
    let mut answer = Vec::new();
    let returned = match command {
        "guest-sync-delimited" => {
            answer.push(DELIMITER);
            Ok(arguments["id"].clone())
        }
        "guest-info" => Ok(json!({ "version": "lab", "supported_commands": [] })),
        "guest-get-host-name" => Ok(json!({ "host-name": text("/proc/sys/kernel/hostname") })),
        "guest-get-osinfo" => Ok(json!({
            "pretty-name": format!("lab, seed {}", seed().unwrap_or_else(|_| "none".to_owned())),
            "kernel-release": text("/proc/sys/kernel/osrelease"),
        })),
        "guest-network-get-interfaces" => Ok(interfaces(options)),
        "guest-get-time" => Ok(json!(nanos_since_1970())),
        "guest-set-time" => set_time(arguments["time"].as_i64().unwrap_or_default()),
        "guest-fsfreeze-status" => {
            Ok(json!(if FROZEN.load(Ordering::SeqCst) { "frozen" } else { "thawed" }))
        }
        "guest-fsfreeze-freeze" => Ok(freeze(true)),
        "guest-fsfreeze-thaw" => Ok(freeze(false)),
        "guest-shutdown" => {
            print("AGENT shutdown");
            let off = rustix::system::RebootCommand::PowerOff;
            rustix::system::reboot(off).map(|()| Value::Null).map_err(anyhow::Error::from)
        }
        _ => Err(anyhow::anyhow!("unknown command")),
    };
    let message = match returned {
        Ok(value) => json!({ "return": value }),
        Err(error) => json!({ "error": { "class": "GenericError", "desc": error.to_string() } }),
    };
    answer.extend_from_slice(message.to_string().as_bytes());
    answer.push(b'\n');
    Some(answer)
}

fn freeze(frozen: bool) -> Value {
    print(if frozen { "AGENT frozen" } else { "AGENT thawed" });
    json!(i32::from(FROZEN.swap(frozen, Ordering::SeqCst) != frozen))
}

fn set_time(nanos: i64) -> anyhow::Result<Value> {
    let time = Timespec { tv_sec: nanos / 1_000_000_000, tv_nsec: nanos % 1_000_000_000 };
    rustix::time::clock_settime(ClockId::Realtime, time)?;
    print("AGENT time set");
    Ok(json!({}))
}

fn nanos_since_1970() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX)
}

fn interfaces(options: &Options) -> Value {
    let mut addresses = Vec::new();
    if let Some(ip) = &options.ip {
        addresses.push(json!({ "ip-address": ip.address.to_string(), "prefix": ip.prefix_bits,
            "ip-address-type": "ipv4" }));
    }
    if let Some(ip) = &options.ip6 {
        addresses.push(json!({ "ip-address": ip.address.to_string(), "prefix": ip.prefix_bits,
            "ip-address-type": "ipv6" }));
    }
    let has_carrier = text("/sys/class/net/eth0/carrier") == "1";
    let name = if has_carrier { "eth0" } else { "eth0 unplugged" };
    json!([
        { "name": "lo", "ip-addresses": [] },
        { "name": name, "hardware-address": text("/sys/class/net/eth0/address"),
            "ip-addresses": addresses },
    ])
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Reads the disk for cloud-init and returns the digest of its content. The kernel keeps nothing of
/// a disk that no one has open, so each call reads it from the host.
fn seed() -> anyhow::Result<String> {
    for entry in fs::read_dir("/sys/block")? {
        let path = PathBuf::from("/dev").join(entry?.file_name());
        let mut head = [0; 64];
        let is_seed = File::open(&path).and_then(|mut disk| disk.read_exact(&mut head)).is_ok()
            && &head[43..49] == b"CIDATA";
        if is_seed {
            return Ok(blake3::hash(&fs::read(path)?).to_hex().to_string());
        }
    }
    None.context("no such disk")
}
