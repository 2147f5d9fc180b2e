//! Line length and words of sources and documents.

use std::fs;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 100;
/// Folders and files with text that people read or write, from the root of the tree.
const READ: [&str; 12] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    ".ci",
    "crates",
    "docs",
    "fuzz",
    "lab",
    "scripts",
    "web",
];
const EXTENSIONS: [&str; 9] = ["rs", "md", "ts", "tsx", "mjs", "css", "sh", "service", ""];
/// What is built, fetched, generated or recorded.
const LEFT_OUT: [&str; 9] = [
    "target",
    "node_modules",
    "dist",
    "corpus",
    "artifacts",
    "figures",
    "schema.d.ts",
    "glossary.md",
    "tidy",
];
/// Files in which a program writes table rows, or in which a line cannot be broken.
const WIDE: [&str; 3] =
    ["docs/reliability.md", "web/src/parts/bird.tsx", "web/src/parts/status.tsx"];
/// Forms that docs/glossary.md replaces, in lower case.
const BANNED: [&str; 15] = [
    "foreseen",
    "to be had",
    "by tls",
    "is no end",
    " mended",
    "held against",
    "it is looked",
    "whoever",
    "nobody in:",
    "is told",
    "are told",
    "was told",
    "were told",
    "been told",
    "as far as is known",
];

fn collect(path: &Path, found: &mut Vec<PathBuf>) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if LEFT_OUT.contains(&name.as_str()) {
        return;
    }
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            collect(&entry.unwrap().path(), found);
        }
        return;
    }
    let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
    if EXTENSIONS.contains(&extension.as_str()) && !name.starts_with('.') {
        found.push(path.to_owned());
    }
}

/// Words that no identifier has, with their plain replacements in docs/glossary.md.
const NOT_IN_NAMES: [&str; 1] = ["told"];

/// Returns whether a line of Rust has an identifier with this word. Comments and text are exempt.
fn has_identifier_with(line: &str, word: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    // Every second part is within quotation marks.
    code.split('"').step_by(2).any(|code| {
        let names = code.split(|other: char| !other.is_alphanumeric() && other != '_');
        names.flat_map(|name| name.split('_')).any(|part| part.eq_ignore_ascii_case(word))
    })
}

/// Start of a docstring that leans on its neighbour.
const LEANING: [&str; 2] = ["/// The same", "//! The same"];

/// Calls `check` with each line: path from the root, line number from 1, text.
fn each_line(mut check: impl FnMut(&str, usize, &str)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    READ.iter().for_each(|part| collect(&root.join(part), &mut files));
    assert!(files.len() > 500, "found only {} files", files.len());
    for file in files {
        let path = file.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        let text = String::from_utf8(fs::read(&file).unwrap()).unwrap_or_default();
        for (number, line) in (1..).zip(text.lines()) {
            check(&path, number, line);
        }
    }
}

#[test]
fn lines_have_at_most_100_columns() {
    let mut found = Vec::new();
    each_line(|path, number, line| {
        let columns = line.chars().count();
        if columns > COLUMNS && !WIDE.contains(&path) && !line.contains("https://") {
            found.push(format!("{path}:{number}: {columns} columns"));
        }
    });
    assert!(found.is_empty(), "{} lines are too long:\n{}", found.len(), found.join("\n"));
}

#[test]
fn banned_forms_are_not_used() {
    let mut found = Vec::new();
    each_line(|path, number, line| {
        let lower = line.to_lowercase();
        for form in BANNED.iter().filter(|form| lower.contains(*form)) {
            found.push(format!("{path}:{number}: {form:?}"));
        }
        let is_rust = path.ends_with(".rs");
        for word in NOT_IN_NAMES.iter().filter(|word| is_rust && has_identifier_with(line, word)) {
            found.push(format!("{path}:{number}: an identifier with {word:?}"));
        }
        if LEANING.iter().any(|form| line.trim_start().starts_with(form)) {
            found.push(format!("{path}:{number}: a docstring stands alone"));
        }
    });
    assert!(
        found.is_empty(),
        "{} banned forms; docs/glossary.md has the plain ones:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn words_in_identifiers_are_recognised() {
    for line in ["let told = 1;", "fn told_pages() {", "is_told: bool,", "const TOLD: f64 = 1.0;"] {
        assert!(has_identifier_with(line, "told"), "{line}");
    }
    for line in ["// told", "panic!(\"told {it}\");", "let foretold = 1;"] {
        assert!(!has_identifier_with(line, "told"), "{line}");
    }
}
