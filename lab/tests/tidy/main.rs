//! Conventions of the source tree that no lint checks.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod links;
mod named;
mod text;

use std::fs;
use std::path::{Path, PathBuf};

/// Folders with code of the product and of the labs.
const FOLDERS: [&str; 2] = ["crates", "lab"];
/// Calls, beside `channel()` itself, that make an unbounded channel.
const UNBOUNDED: [&str; 5] = [
    "unbounded_channel",
    "futures::channel::mpsc::unbounded",
    "crossbeam",
    "flume",
    "async_channel",
];

/// Collects every Rust file below a folder that is not part of a test, bench or example.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    const LEFT_OUT: [&str; 5] = ["tests", "benches", "examples", "target", "corpus"];
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if entry.is_dir() {
            if !LEFT_OUT.contains(&name.as_str()) {
                sources(&entry, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" && !name.ends_with("_tests.rs") {
            found.push(entry);
        }
    }
}

/// Returns the numbered lines of a file before its unit tests, without comments.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let begin_of_tests = "#[cfg(test)]\nmod tests {";
    let code = text.split(begin_of_tests).next().unwrap_or_default();
    let is_code = |(_, line): &(usize, &str)| !line.trim_start().starts_with("//");
    (1..).zip(code.lines()).filter(is_code)
}

/// Returns whether a line makes an unbounded channel. A oneshot channel takes one message.
fn is_unbounded(line: &str) -> bool {
    if UNBOUNDED.iter().any(|call| line.contains(call)) {
        return true;
    }
    line.match_indices("channel").any(|(at, word)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        let is_whole = !before.ends_with(|last: char| last.is_alphanumeric() || last == '_');
        let call = match after.strip_prefix("::<") {
            // The message types, up to the call.
            Some(types) => types.find(">(").map_or("", |end| &types[end + 1..]),
            None => after,
        };
        is_whole && call.starts_with("()") && !before.ends_with("oneshot::")
    })
}

#[test]
fn no_channel_is_unbounded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    FOLDERS.iter().for_each(|folder| sources(&root.join(folder), &mut files));
    assert!(files.len() > 100, "found too few source files");
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in code(&text).filter(|(_, line)| is_unbounded(line)) {
            found.push(format!("{}:{number}: {}", file.display(), line.trim()));
        }
    }
    assert!(
        found.is_empty(),
        "these channels have no bound, so their writers decide how much memory they take:\n{}\n\
        remedy: use `sync_channel` or tokio's `channel` with a bound, and list the channel and its \
        behaviour when it is full in docs/boundaries.md",
        found.join("\n")
    );
}

#[test]
fn unbounded_channels_are_recognised() {
    for line in [
        "let (a, b) = mpsc::channel();",
        "let (a, b) = std::sync::mpsc::channel::<(Instant, Input)>();",
        "let (a, b) = mpsc::channel::<Vec<u8>>();",
        "let (a, b) = channel();",
        "let (a, b) = mpsc::unbounded_channel();",
        "use crossbeam_channel::unbounded;",
    ] {
        assert!(is_unbounded(line), "{line}");
    }
    for line in [
        "let (a, b) = mpsc::channel(64);",
        "let (a, b) = mpsc::channel::<&str>(1);",
        "let (a, b) = mpsc::sync_channel(1);",
        "let (a, b) = oneshot::channel();",
        "let (a, b) = watch::channel(None);",
    ] {
        assert!(!is_unbounded(line), "{line}");
    }
}

/// Collects every `mod.rs` below a folder that is not shared code of integration tests.
fn mod_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() && !path.ends_with("target") {
            mod_files(&path, found);
        } else if path.ends_with("mod.rs") && !path.ends_with("tests/support/mod.rs") {
            found.push(path);
        }
    }
}

#[test]
fn module_files_stand_beside_their_folders() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    ["crates", "lab", "fuzz"].iter().for_each(|folder| mod_files(&root.join(folder), &mut found));
    assert!(found.is_empty(), "rename foo/mod.rs to foo.rs: {found:#?}");
}

/// Neither a dependency nor a part of a package may come from the lab.
#[test]
fn the_product_does_not_depend_on_the_lab() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut read = 0;
    for entry in fs::read_dir(crates).unwrap() {
        let manifest = entry.unwrap().path().join("Cargo.toml");
        let Ok(text) = fs::read_to_string(&manifest) else { continue };
        read += 1;
        for part in ["godwit-lab", "godwit-guest", "godwit-bench", "godwit-sim"] {
            assert!(!text.contains(part), "{} names {part}", manifest.display());
        }
    }
    assert!(read >= 10, "{read} manifests were read");
}

/// The manager, the planner, the API and the command line know migrations by `godwit-types` alone.
#[test]
fn the_manager_and_the_command_line_depend_on_no_engine() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    for name in ["types", "api", "planner", "store", "control", "cli"] {
        let manifest = crates.join(name).join("Cargo.toml");
        let text = fs::read_to_string(&manifest).unwrap();
        for part in ["godwit-ram", "godwit-lanes", "godwit-migration"] {
            assert!(!text.contains(part), "{} names {part}", manifest.display());
        }
    }
}
