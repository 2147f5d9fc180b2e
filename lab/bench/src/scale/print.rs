//! Tables of the scenario for people, and the curves from size to size.

use serde::Serialize;

use super::Row;
use super::bend::{Growth, growths};
use super::picture;
use super::tables::TableTimes;
use crate::figures::{Spread, cell, dash};

/// Figure over the sizes.
#[derive(Debug, Serialize)]
pub(crate) struct Curve {
    what: &'static str,
    medians: Vec<Option<f64>>,
    /// Growth from each size to the next.
    growths: Vec<Option<Growth>>,
}

/// Curves in the picture.
const DRAWN: [&str; 5] = [
    "round 0, CPU",
    "engine's memory",
    "pause, simulated",
    "page tables: clean scan, faults",
    "page tables: change-over",
];

/// Renders the picture.
pub(crate) fn picture(rows: &[Row], curves: &[Curve]) -> String {
    let gib: Vec<f64> = rows.iter().map(|row| row.gib).collect();
    let drawn = curves.iter().filter(|curve| DRAWN.contains(&curve.what));
    let drawn: Vec<_> = drawn.map(|curve| (curve.what, &curve.medians[..])).collect();
    picture::render(&gib, &drawn)
}

/// Prints all tables. Returns the curves.
pub(crate) fn print(rows: &[Row]) -> Vec<Curve> {
    print_played(rows);
    print_tables(rows);
    let curves = curves(rows);
    print_curves(rows, &curves);
    curves
}

fn print_played(rows: &[Row]) {
    println!(
        "\nThe engine without page tables and content, CPU time; medians (least to most)\n\
         {:>8} {:>17} {:>17} {:>19} {:>16} {:>16} {:>16} {:>8}",
        "guest",
        "round 0, s",
        "ns/page",
        "later, ns/dirty p.",
        "clean sweep, ms",
        "count, ms",
        "last sweep, ms",
        "KiB/GiB",
    );
    for row in rows {
        println!(
            "{:>8} {:>17} {:>17} {:>19} {:>16} {:>16} {:>16} {:>8.0}",
            row.memory,
            cell(row.spread(|run| run.first_round_s), 2),
            cell(row.spread(|run| run.first_round_ns_per_page), 1),
            cell(row.spread(|run| run.dirty_ns_per_page), 0),
            cell(row.spread(|run| run.clean_sweep_cpu_ms), 2),
            cell(row.spread(|run| run.count_ms), 2),
            cell(row.spread(|run| run.last_sweep_cpu_ms), 2),
            row.engine_bytes as f64 / 1024.0 / row.gib,
        );
    }
    println!(
        "\nThe migration, simulated\n{:>8} {:>9} {:>9} {:>8} {:>14} {:>14} {:>16}",
        "guest", "tracking", "scan, ms", "rounds", "migration, s", "remaining", "pause, ms",
    );
    for row in rows {
        println!(
            "{:>8} {:>9} {:>9.0} {:>8} {:>14} {:>14} {:>16}",
            row.memory,
            if row.by_faults { "faults" } else { "scans" },
            row.scan_ms,
            row.spread(|run| run.rounds.into()).map_or(0.0, |rounds| rounds.median),
            row.spread(|run| run.simulated_migration_s)
                .map_or_else(String::new, |s| format!("{:.1}", s.median)),
            row.spread(|run| run.remaining_pages as f64)
                .map_or_else(String::new, |pages| format!("{:.0}", pages.median)),
            cell(row.spread(|run| run.simulated_pause_ms), 1),
        );
    }
}

fn print_tables(rows: &[Row]) {
    println!(
        "\nReal page tables; milliseconds\n{:>8} {:>8} {:>9} {:>9} {:>18} {:>18} {:>18} {:>18} \
         {:>18} {:>18}",
        "guest",
        "tracking",
        "MiB",
        "protect",
        "clean scan",
        "scan, dirty pages",
        "check of notes",
        "count",
        "change-over",
        "last pages",
    );
    let ways = |row: &Row| {
        let (faults, scans) = (row.tables_by_faults.clone(), row.tables_by_scans.clone());
        [("faults", faults), ("scans", scans)]
    };
    for row in rows {
        for (tracking, times) in ways(row) {
            let Some(times) = times else { continue };
            println!(
                "{:>8} {:>8} {:>9} {:>9.0} {:>18} {:>18} {:>18} {:>18} {:>18} {:>18}",
                row.memory,
                tracking,
                times.page_table_mib,
                times.protect_ms,
                cell(times.clean_ms, 1),
                cell(times.dirty_ms, 1),
                cell(times.check_ms, 1),
                cell(times.count_ms, 1),
                cell(times.change_over_ms, 1),
                cell(times.last_ms, 1),
            );
        }
    }
}

fn curves(rows: &[Row]) -> Vec<Curve> {
    let curve = |what, of: &dyn Fn(&Row) -> Option<f64>| {
        let points: Vec<_> = rows.iter().map(|row| (row.gib, of(row))).collect();
        let medians = points.iter().map(|(_, median)| *median).collect();
        Curve { what, medians, growths: growths(&points) }
    };
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let faults =
        |row: &Row, of: fn(&TableTimes) -> Option<f64>| row.tables_by_faults.as_ref().and_then(of);
    let scans =
        |row: &Row, of: fn(&TableTimes) -> Option<f64>| row.tables_by_scans.as_ref().and_then(of);
    let clean = |times: &TableTimes| Some(times.clean_ms?.median);
    let check = |times: &TableTimes| Some(times.check_ms?.median);
    let change_over = |times: &TableTimes| Some(times.change_over_ms?.median);
    let last = |times: &TableTimes| Some(times.last_ms?.median);
    vec![
        curve("round 0, CPU", &|row| median(row.spread(|run| run.first_round_s))),
        curve("later rounds, CPU a dirty page", &|row| {
            median(row.spread(|run| run.dirty_ns_per_page))
        }),
        curve("clean sweep, CPU", &|row| median(row.spread(|run| run.clean_sweep_cpu_ms))),
        curve("count", &|row| median(row.spread(|run| run.count_ms))),
        curve("last sweep, CPU", &|row| median(row.spread(|run| run.last_sweep_cpu_ms))),
        curve("engine's memory", &|row| Some(row.engine_bytes as f64)),
        curve("migration, simulated", &|row| median(row.spread(|run| run.simulated_migration_s))),
        curve("pause, simulated", &|row| median(row.spread(|run| run.simulated_pause_ms))),
        curve("page tables: protect, faults", &|row| faults(row, |times| Some(times.protect_ms))),
        curve("page tables: protect, scans", &|row| scans(row, |times| Some(times.protect_ms))),
        curve("page tables: clean scan, faults", &|row| faults(row, clean)),
        curve("page tables: clean scan, scans", &|row| scans(row, clean)),
        curve("page tables: check of notes", &|row| faults(row, check)),
        curve("page tables: change-over", &|row| faults(row, change_over)),
        curve("page tables: last pages, faults", &|row| faults(row, last)),
        curve("page tables: last pages, scans", &|row| scans(row, last)),
    ]
}

/// Prints the exponents of each curve, and where it bends.
fn print_curves(rows: &[Row], curves: &[Curve]) {
    print!("\nGrowth with the size: 1 is as the size, above 1 the curve bends (*)\n{:32}", "");
    for pair in rows.windows(2) {
        print!(" {:>16}", format!("{}-{}", pair[0].memory, pair[1].memory));
    }
    println!();
    for curve in curves.iter().filter(|curve| curve.growths.iter().any(Option::is_some)) {
        print!("{:32}", curve.what);
        for growth in &curve.growths {
            let text = growth.map_or_else(dash, |growth| {
                format!("{:.2}{}", growth.exponent, if growth.bends() { "*" } else { " " })
            });
            print!(" {text:>16}");
        }
        println!();
    }
}
