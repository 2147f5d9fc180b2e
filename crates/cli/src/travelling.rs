//! Disks that travel with a VM, as text: progress of a migration, and its report.

use godwit_types::{DiskMeans, DiskReport, DisksProgress, DisksReport};

use crate::output::table;
use crate::units::{byte_count, bytes, millis, utc};

/// Formats the progress of the disks: `round 2  remaining 120 MiB of 1.0 GiB  bandwidth 90 MiB/s
/// writes limited to 20 MiB/s`.
pub(crate) fn progress_text(disks: &DisksProgress) -> String {
    let mut text = format!(
        "round {}  remaining {} of {}  bandwidth {}/s",
        disks.round,
        byte_count(disks.remaining_bytes),
        byte_count(disks.total_bytes),
        bytes(disks.bytes_per_s),
    );
    text.push_str(&limit_text(disks));
    text
}

/// Formats what remains of the disks while the memory moves.
pub(crate) fn rest_text(disks: &DisksProgress) -> String {
    format!("disks {}{}", byte_count(disks.remaining_bytes), limit_text(disks))
}

fn limit_text(disks: &DisksProgress) -> String {
    let limit = disks.limited_to_bytes_per_s;
    limit.map_or_else(String::new, |limit| format!("  writes limited to {}/s", byte_count(limit)))
}

/// Formats the report of the disks: a line for each of them, and what holds for all.
pub(crate) fn report_lines(report: &DisksReport) -> Vec<(&'static str, String)> {
    let mut lines: Vec<_> = report.disks.iter().map(|disk| ("disk", disk_text(disk))).collect();
    let plural = if report.rounds.len() == 1 { "" } else { "s" };
    let mut all = format!(
        "{} on the wire in {} round{plural}",
        byte_count(report.wire_bytes),
        report.rounds.len()
    );
    if let Some(last_ms) = report.last_round_ms {
        all.push_str(&format!(", the last one {} in the pause", millis(last_ms)));
    }
    lines.push(("disks", all));
    if report.means == DiskMeans::Mirror {
        lines.push(("means", "a mirror of QEMU: exports of these disks are unsafe".to_owned()));
    }
    if report.resent_bytes > 0 {
        lines.push(("sent again", format!("{} of the disks", byte_count(report.resent_bytes))));
    }
    if let Some(limit) = report.limited_to_bytes_per_s {
        let held = millis(report.limited_ms);
        lines.push(("disk writes", format!("limited to {}/s, for {held}", byte_count(limit))));
    }
    if let Some(until_ms) = report.kept_until_unix_ms {
        lines.push(("old images", format!("kept until {} UTC", utc(until_ms))));
    }
    lines
}

fn disk_text(disk: &DiskReport) -> String {
    let DiskReport { from, to, virtual_bytes, sent_bytes, .. } = disk;
    let mut text = if from == to { from.clone() } else { format!("{from} to {to}") };
    text.push_str(&format!(": {} of {}", byte_count(*sent_bytes), byte_count(*virtual_bytes)));
    if disk.zero_bytes > 0 {
        text.push_str(&format!(", {} of it zero", byte_count(disk.zero_bytes)));
    }
    if disk.referenced_bytes > 0 {
        text.push_str(&format!(", {} of it was there", byte_count(disk.referenced_bytes)));
    }
    if disk.base_was_there {
        text.push_str("; its base was there");
    }
    text
}

/// Formats the rounds of the disks as a table.
pub(crate) fn rounds_table(report: &DisksReport) -> String {
    let mut rows = Vec::new();
    for (number, round) in report.rounds.iter().enumerate() {
        rows.push(vec![number.to_string(), byte_count(round.bytes), millis(round.duration_ms)]);
    }
    table(&["round of the disks", "bytes", "time"], &rows)
}

#[cfg(test)]
mod tests {
    use godwit_types::DiskRound;

    use super::*;

    #[test]
    fn progress_names_the_limit_of_writes() {
        let disks = DisksProgress {
            round: 2,
            remaining_bytes: 120 << 20,
            total_bytes: 1 << 30,
            sent_bytes: 2 << 30,
            referenced_bytes: 0,
            bytes_per_s: 94_371_840.0,
            limited_to_bytes_per_s: Some(20 << 20),
        };
        let text = progress_text(&disks);
        assert_eq!(
            text,
            "round 2  remaining 120 MiB of 1.0 GiB  bandwidth 90 MiB/s  writes limited to 20 MiB/s"
        );
        let free = DisksProgress { limited_to_bytes_per_s: None, ..disks };
        assert_eq!(rest_text(&free), "disks 120 MiB");
    }

    #[test]
    fn the_report_has_a_line_for_each_disk() {
        let disk = DiskReport {
            from: "/srv/web.qcow2".into(),
            to: "/ssd/web.qcow2".into(),
            virtual_bytes: 20 << 30,
            sent_bytes: 3 << 30,
            zero_bytes: 1 << 30,
            referenced_bytes: 512 << 20,
            base_was_there: true,
        };
        let same = DiskReport {
            from: "/srv/db.raw".into(),
            to: "/srv/db.raw".into(),
            ..DiskReport::default()
        };
        let report = DisksReport {
            means: DiskMeans::Mirror,
            disks: vec![disk, same],
            rounds: vec![DiskRound { bytes: 3 << 30, duration_ms: 30_000.0 }],
            wire_bytes: 2 << 30,
            resent_bytes: 4 << 20,
            limited_to_bytes_per_s: Some(8 << 20),
            limited_ms: 2500.0,
            last_round_ms: Some(4.2),
            kept_until_unix_ms: Some(86_400_000),
        };
        let lines = report_lines(&report);
        for line in [
            (
                "disk",
                "/srv/web.qcow2 to /ssd/web.qcow2: 3.0 GiB of 20 GiB, 1.0 GiB of it zero, 512 MiB \
                of it was there; its base was there",
            ),
            ("disk", "/srv/db.raw: 0 B of 0 B"),
            ("disks", "2.0 GiB on the wire in 1 round, the last one 4.2 ms in the pause"),
            ("means", "a mirror of QEMU: exports of these disks are unsafe"),
            ("sent again", "4.0 MiB of the disks"),
            ("disk writes", "limited to 8.0 MiB/s, for 2.50 s"),
            ("old images", "kept until 1970-01-02 00:00:00 UTC"),
        ] {
            assert!(lines.contains(&(line.0, line.1.to_owned())), "{line:?} in {lines:#?}");
        }
        assert!(rounds_table(&report).contains("3.0 GiB"));
    }
}
