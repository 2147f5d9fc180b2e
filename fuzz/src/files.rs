//! Files of agents and operators.

use std::io::Write;
use std::path::Path;

use godwit_qemu::VmSpec;
use godwit_ram::{MissingPages, PageRange};

/// Reads a VM's record, the note of a VM that is gone, or the account of missing pages, as a crash
/// or a disk may have left them.
pub fn run_records(data: &[u8]) {
    let Some((&which, text)) = data.split_first() else { return };
    let again: fn(&[u8]) -> Option<Vec<u8>> = match which % 4 {
        0 => godwit_host::fuzzing::record,
        2 => godwit_host::fuzzing::gone,
        _ => return missing(which, text),
    };
    if let Some(written) = again(text) {
        assert_eq!(again(&written), Some(written));
    }
}

fn missing(which: u8, text: &[u8]) {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    // The first page is the header. The account covers whole files.
    let zeros = text.len().next_multiple_of(4096) - text.len();
    let length = if which & 2 == 0 { zeros } else { 0 };
    file.write_all(text).and_then(|()| file.write_all(&vec![0; length])).expect("written");
    if let Ok(missing) = MissingPages::open(file.path()) {
        let blocks = missing.block_pages().len();
        let all: u64 =
            (0..blocks).map(|block| missing.count_in(block, PageRange::new(0, u64::MAX))).sum();
        assert_eq!(all, missing.count());
    }
}

/// Reads the header of a qcow2 image, whose creator could fill it with anything.
pub fn run_images(data: &[u8]) {
    if let Some(file) = godwit_qemu::fuzzing::backing_file(data) {
        // Paths that QEMU would open itself are refused before.
        assert!(file.len() <= 1023 && !file.contains('\0'), "{file:?}");
        let first = file.split('/').next().unwrap_or_default();
        assert!(!first.contains(':'), "{file:?}");
    }
}

/// Reads a VM's specification and an agent's configuration.
pub fn run_settings(data: &[u8]) {
    let Some((&which, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    match which % 3 {
        0 => {
            let _ = godwit_host::Config::parse(text, Path::new("/etc/godwit/agent.toml"));
        }
        1 => check(toml::from_str::<VmSpec>(text).ok()),
        _ => check(serde_json::from_str::<VmSpec>(text).ok()),
    }
}

fn check(spec: Option<VmSpec>) {
    let Some(spec) = spec else { return };
    let _ = spec.validate();
    let written = serde_json::to_string(&spec).expect("serialisable");
    assert_eq!(serde_json::from_str::<VmSpec>(&written).expect("written before"), spec);
}
