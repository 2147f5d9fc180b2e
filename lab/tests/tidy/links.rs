//! Links between documents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the numbered lines of a document that are not code.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            lines.push((number, line));
        }
    }
    lines
}

/// Returns the anchor of a heading as the forges compute it.
fn anchor(heading: &str) -> String {
    let kept = |next: &char| next.is_alphanumeric() || " -_".contains(*next);
    heading.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

/// Returns the anchors of a document.
fn anchors(text: &str) -> BTreeSet<String> {
    let lines = prose(text).into_iter();
    let headings = lines.filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#'))).collect()
}

/// Returns the targets of the links that end in a line, or are defined there.
fn targets(line: &str) -> Vec<&str> {
    let rests = line.split("](").skip(1);
    let mut found: Vec<&str> = rests.filter_map(|rest| rest.split(')').next()).collect();
    if line.starts_with('[')
        && let Some((_, target)) = line.split_once("]: ")
    {
        found.push(target);
    }
    found
}

/// Returns the documents with their text, by their paths without links.
fn documents() -> BTreeMap<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let mut found = BTreeMap::new();
    for folder in [root.clone(), root.join("docs")] {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path, text);
            }
        }
    }
    found
}

#[test]
fn links_between_documents_lead_to_a_heading() {
    let documents = documents();
    let known: BTreeMap<&PathBuf, BTreeSet<String>> =
        documents.iter().map(|(path, text)| (path, anchors(text))).collect();
    let (mut links, mut broken) = (0, Vec::new());
    for (document, text) in &documents {
        for (number, line) in prose(text) {
            for target in targets(line).into_iter().filter(|target| !target.contains("://")) {
                links += 1;
                let (file, heading) = target.split_once('#').unwrap_or((target, ""));
                let path = if file.is_empty() {
                    Ok(document.clone())
                } else {
                    document.with_file_name(file).canonicalize()
                };
                let leads = path.is_ok_and(|path| match known.get(&path) {
                    Some(headings) => heading.is_empty() || headings.contains(heading),
                    None => true,
                });
                if !leads {
                    broken.push(format!("{}:{number}: {target}", document.display()));
                }
            }
        }
    }
    assert!(links > 500, "found only {links} links");
    assert!(broken.is_empty(), "these links lead nowhere:\n{}", broken.join("\n"));
}
