//! What others may send to an agent and hosts to the manager, byte by byte: one function a decoder, each of which fails loudly where a decoder does what it must
//! not. `fuzz_targets` hands them to libFuzzer, `tests/replay.rs` to the committed corpus and to mutations of it. docs/fuzzing.md has
//! the bounds that are kept.

mod api;
mod files;
mod frames;
mod manager;
mod pieces;
mod qmp;
mod stream;
mod units;

/// A decoder and what it may cost.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name: of the corpus' folder, and of libFuzzer's target.
    pub name: &'static str,
    /// Takes one input; panics where something is wrong.
    pub run: fn(&[u8]),
    /// The longest input that is tried.
    pub longest_input: usize,
    /// The most memory, in MiB, that one input may have allocated at a time, whatever it is.
    pub most_mib: usize,
}

pub const TARGETS: [Target; 14] = [
    Target { name: "frames", run: frames::run, longest_input: 300_000, most_mib: 4 },
    Target { name: "runs", run: frames::run_runs, longest_input: 65_536, most_mib: 4 },
    Target { name: "stream", run: stream::run, longest_input: 300_000, most_mib: 4 },
    Target { name: "pieces", run: pieces::run, longest_input: 262_144, most_mib: 4 },
    Target { name: "qmp", run: qmp::run, longest_input: 1 << 20, most_mib: 128 },
    Target { name: "api", run: api::run, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "records", run: files::run_records, longest_input: 65_536, most_mib: 16 },
    Target { name: "images", run: files::run_images, longest_input: 65_536, most_mib: 1 },
    Target { name: "settings", run: files::run_settings, longest_input: 65_536, most_mib: 16 },
    Target { name: "units", run: units::run, longest_input: 4096, most_mib: 1 },
    Target { name: "reports", run: manager::run_reports, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "answers", run: manager::run_answers, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "outcomes", run: manager::run_outcomes, longest_input: 1 << 20, most_mib: 64 },
    Target { name: "joins", run: manager::run_joins, longest_input: 65_536, most_mib: 4 },
];

/// A target by its name.
///
/// # Panics
/// There is none of that name.
#[must_use]
pub fn target(name: &str) -> Target {
    *TARGETS.iter().find(|target| target.name == name).expect("a target of that name")
}
