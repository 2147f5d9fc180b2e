//! Cycles between the folders of a crate, which the compiler allows. `cargo test -p godwit-lab
//! --test cycles -- --nocapture` prints them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod cycles;
mod modules;

use std::path::{Path, PathBuf};

use modules::Crate;

/// Most files that depend on each other in a cycle, in crates without [`LARGER_CYCLES`].
const MOST_FILES: usize = 5;

/// Crates with a larger cycle of files. In `control` it is the inventory, whose parts are methods
/// of one type. This list may only get shorter.
const LARGER_CYCLES: &[&str] = &["control"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Reads every crate of `crates/`, by name.
fn crates() -> Vec<(String, Crate)> {
    let folders =
        std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = folders
        .filter(|folder| folder.join("src").is_dir())
        .map(|folder| {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            (name, Crate::read(&folder.join("src")))
        })
        .collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    all
}

#[test]
fn folders_of_a_crate_depend_on_each_other_in_one_direction() {
    let mut with_cycles = Vec::new();
    for (name, of) in crates() {
        let (folders, files) =
            (cycles::largest(&of.folder_uses()), cycles::largest(&of.file_uses()));
        let shown = if folders.is_empty() { "no cycle".to_owned() } else { folders.join(", ") };
        println!("{name}: folders: {shown}; largest cycle of files: {}", files.len());
        for file in &files {
            println!("    {file}");
        }
        let is_listed = LARGER_CYCLES.contains(&name.as_str());
        assert!(
            files.len() <= MOST_FILES || is_listed,
            "{name}: files depend on each other in a cycle: {files:#?}"
        );
        assert!(
            files.len() > MOST_FILES || !is_listed,
            "{name}: its largest cycle has {} files: remove it from LARGER_CYCLES",
            files.len()
        );
        if !folders.is_empty() {
            with_cycles.push(format!("{name}: {shown}"));
        }
    }
    assert!(with_cycles.is_empty(), "folders depend on each other in a cycle: {with_cycles:#?}");
}
