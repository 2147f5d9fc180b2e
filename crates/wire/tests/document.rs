//! docs/protocol.md matches the code.

use godwit_wire::{Kind, SUPPORTED};

const DOCUMENT: &str = include_str!("../../../docs/protocol.md");

#[test]
fn the_table_of_frames_is_the_codes() {
    let rows: Vec<Vec<&str>> = DOCUMENT
        .lines()
        .filter(|line| line.contains('→') && line.starts_with("| ") || line.contains("| both |"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let documented: Vec<_> = rows
        .iter()
        .map(|row| (row[0].to_string(), row[1].to_string(), row[4].to_string(), row[5].to_string()))
        .collect();
    let coded: Vec<_> = Kind::ALL
        .iter()
        .map(|&kind| {
            let (least, most) = kind.bounds();
            (format!("{kind:?}"), (kind as u8).to_string(), least.to_string(), most.to_string())
        })
        .collect();
    // Ready has no text in its payload column; its row still has all six columns.
    assert_eq!(documented, coded);
}

#[test]
fn the_documents_version_is_the_newest() {
    assert!(
        DOCUMENT.starts_with(&format!("# The migration protocol, version {}\n", SUPPORTED.newest))
    );
}
