//! Tests that documents name.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const DOCUMENTS: [&str; 6] =
    ["fuzzing.md", "ha.md", "ha-terms.md", "handover.md", "reliability.md", "security.md"];

/// Collects the names of all functions below a folder.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for path in entries.filter(|path| !path.ends_with("target")).collect::<Vec<PathBuf>>() {
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let names = text.split("fn ").skip(1).map(|rest| {
                rest.chars().take_while(|next| next.is_alphanumeric() || *next == '_').collect()
            });
            found.extend(names);
        }
    }
}

#[test]
fn tests_that_documents_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut known = BTreeSet::new();
    for folder in ["crates", "lab", "fuzz"] {
        functions(&root.join(folder), &mut known);
    }
    let (mut named, mut missing) = (0, Vec::new());
    for document in DOCUMENTS {
        let text = fs::read_to_string(root.join("docs").join(document)).unwrap();
        // Names are in italics and have at least three words; `…` leaves out the rest.
        for name in text.split('*').filter(|name| name.matches('_').count() >= 2) {
            if name.contains(|other: char| !other.is_alphanumeric() && !"_…".contains(other)) {
                continue;
            }
            named += 1;
            let exists = match name.split_once('…') {
                Some((start, _)) => known.iter().any(|known| known.starts_with(start)),
                None => known.contains(name),
            };
            if !exists {
                missing.push(format!("{document}: {name}"));
            }
        }
    }
    assert!(named > 50, "found only {named} names");
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
}
