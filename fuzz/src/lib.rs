//! Data that peers may send to an agent and hosts to the manager: one function per decoder. Each
//! panics if its decoder violates a rule. `fuzz_targets` passes them to libFuzzer,
//! `tests/replay.rs` runs them on the committed corpus and on mutations of it. docs/fuzzing.md
//! lists the limits.

mod api;
mod definitions;
mod files;
mod frames;
mod guest;
mod heartbeats;
mod manager;
mod mirrors;
mod pieces;
mod qmp;
mod stream;
mod units;
mod watchdog;

/// Decoder and its limits.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the corpus folder and of libFuzzer's target.
    pub name: &'static str,
    /// Runs one input; panics if something is wrong.
    pub run: fn(&[u8]),
    /// Longest input, in bytes.
    pub longest_input: usize,
    /// Most memory, in MiB, that any input may have allocated at a time.
    pub most_mib: usize,
}

pub const TARGETS: [Target; 20] = [
    Target { name: "frames", run: frames::run, longest_input: 300_000, most_mib: 4 },
    Target { name: "runs", run: frames::run_runs, longest_input: 65_536, most_mib: 4 },
    Target { name: "stream", run: stream::run, longest_input: 300_000, most_mib: 4 },
    Target { name: "pieces", run: pieces::run, longest_input: 262_144, most_mib: 4 },
    Target { name: "qmp", run: qmp::run, longest_input: 1 << 20, most_mib: 128 },
    Target { name: "guest", run: guest::run, longest_input: 1 << 18, most_mib: 64 },
    Target { name: "api", run: api::run, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "records", run: files::run_records, longest_input: 65_536, most_mib: 16 },
    Target { name: "images", run: files::run_images, longest_input: 65_536, most_mib: 1 },
    Target { name: "definitions", run: definitions::run, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "settings", run: files::run_settings, longest_input: 65_536, most_mib: 16 },
    Target { name: "units", run: units::run, longest_input: 4096, most_mib: 1 },
    Target { name: "reports", run: manager::run_reports, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "answers", run: manager::run_answers, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "outcomes", run: manager::run_outcomes, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "joins", run: manager::run_joins, longest_input: 65_536, most_mib: 4 },
    Target { name: "heartbeats", run: heartbeats::run, longest_input: 4096, most_mib: 1 },
    Target { name: "watchdog", run: watchdog::run, longest_input: 1 << 18, most_mib: 4 },
    Target { name: "loads", run: manager::run_loads, longest_input: 300_000, most_mib: 4 },
    Target { name: "mirrors", run: mirrors::run, longest_input: 65_536, most_mib: 16 },
];

/// Returns a target by its name.
///
/// # Panics
/// No target has this name.
#[must_use]
pub fn target(name: &str) -> Target {
    *TARGETS.iter().find(|target| target.name == name).expect("a known target")
}
