//! Implements `godwit top` and `godwit control load`.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_api::StorageLoad;
use godwit_api::control::{
    LoadHistory, LoadMetric, LoadSeries, LoadTop, ManagerClient, TopHost, TopVm,
};

use crate::args::{LoadArgs, TopArgs};
use crate::exit::{Exit, Failure};
use crate::manager::client;
use crate::output::{Output, table};
use crate::units::{byte_count, millis, utc};

/// Interval of the table: that of the agents' samples.
const INTERVAL: Duration = Duration::from_secs(5);
/// Clears a terminal and returns to its first line (ECMA-48: ED, CUP).
const CLEAR: &str = "\u{1b}[2J\u{1b}[H";

/// Shows the VMs and hosts that use most, until Ctrl-C.
pub(crate) async fn top(
    args: &TopArgs,
    hosts: Option<&Path>,
    output: Output,
) -> Result<Exit, Failure> {
    let manager = client(&args.place, hosts)?;
    let is_once = args.once || output.is_json() || !io::stdout().is_terminal();
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            _ = tokio::signal::ctrl_c() => return Ok(Exit::Ok),
        }
        let top = manager.top(args.by, u32::from(args.limit)).await?;
        if is_once {
            output.result(&top, || tables(&top))?;
            return Ok(Exit::Ok);
        }
        output.result(&top, || format!("{CLEAR}{}\n{}", utc(top.at_unix_ms), tables(&top)))?;
    }
}

/// Shows the load of an object over time.
pub(crate) async fn history(
    args: &LoadArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let from = now.saturating_sub(args.since).as_millis();
    let from = u64::try_from(from).unwrap_or_default();
    let history = manager.load(&args.object, Some(from), None, args.resolution).await?;
    output.result(&history, || periods(&history))
}

fn tables(top: &LoadTop) -> String {
    const OF_HOST: [&str; 9] =
        ["host", "cpu", "ready", "memory", "io/s", "disk/s", "latency", "received/s", "sent/s"];
    let of_vm = [&["vm", "host"][..], &OF_HOST[1..]].concat();
    let hosts: Vec<_> = top.hosts.iter().map(host_row).collect();
    let vms: Vec<_> = top.vms.iter().map(vm_row).collect();
    let rest = top.vms_total.saturating_sub(top.vms.len() as u64);
    let more = if rest > 0 { format!("and {rest} more VMs (--limit)\n") } else { String::new() };
    format!("{}\n{}{more}", table(&OF_HOST, &hosts), table(&of_vm, &vms))
}

fn host_row(host: &TopHost) -> Vec<String> {
    let TopHost { host: name, load, storage, cpu_ready_millicores } = host;
    let mut row = vec![
        name.clone(),
        format!("{}/{}", processors(load.cpu_used_millicores), load.cores),
        processors(*cpu_ready_millicores),
        of_all(load.memory_used_bytes, load.memory_total_bytes),
    ];
    row.extend(storage_cells(Some(storage)));
    row.extend([load.rx_bytes_per_s, load.tx_bytes_per_s].map(byte_count));
    row
}

fn vm_row(vm: &TopVm) -> Vec<String> {
    let TopVm { host, load, storage } = vm;
    let mut row = vec![
        load.name.clone(),
        host.clone(),
        format!("{}/{}", processors(load.cpu_used_millicores), load.vcpus),
        load.cpu_ready_millicores.map_or_else(unknown, processors),
        of_all(load.memory_used_bytes, load.memory_total_bytes),
    ];
    row.extend(storage_cells(storage.as_ref()));
    row.extend([load.rx_bytes_per_s, load.tx_bytes_per_s].map(byte_count));
    row
}

fn storage_cells(storage: Option<&StorageLoad>) -> [String; 3] {
    let Some(load) = storage else { return [unknown(), unknown(), unknown()] };
    [
        load.reads_per_s.saturating_add(load.writes_per_s).to_string(),
        byte_count(load.read_bytes_per_s.saturating_add(load.write_bytes_per_s)),
        load.latency_us.map_or_else(unknown, micros),
    ]
}

fn unknown() -> String {
    "-".to_owned()
}

/// Formats thousandths of a processor: `0.81`.
fn processors(millicores: u64) -> String {
    format!("{}.{:02}", millicores / 1_000, millicores % 1_000 / 10)
}

fn of_all(used: u64, all: u64) -> String {
    format!("{}/{}", byte_count(used), byte_count(all))
}

#[expect(clippy::cast_precision_loss, reason = "for people: three digits are shown")]
fn micros(us: u64) -> String {
    millis(us as f64 / 1e3)
}

/// Formats a line for each period with a figure: the mean, and the highest value if it differs.
fn periods(history: &LoadHistory) -> String {
    let LoadHistory { from_unix_ms, step_ms, series, .. } = history;
    let Some(first) = series.first() else {
        return "no load was measured in this time".to_owned();
    };
    let mut heads = vec!["from"];
    heads.extend(series.iter().map(|series| head(series.metric)));
    let begin = |point: u64| from_unix_ms.saturating_add(point.saturating_mul(*step_ms));
    let begins = (0..history.points).map(begin).take(first.mean.len());
    let rows = begins.enumerate().filter_map(|(point, begin)| {
        let cells: Vec<Option<String>> = series.iter().map(|series| cell(series, point)).collect();
        let is_gap = cells.iter().all(Option::is_none);
        let shown = cells.into_iter().map(|cell| cell.unwrap_or_else(unknown));
        (!is_gap).then(|| std::iter::once(utc(begin)).chain(shown).collect())
    });
    table(&heads, &rows.collect::<Vec<Vec<String>>>())
}

fn cell(series: &LoadSeries, point: usize) -> Option<String> {
    let at = |values: &[Option<u64>]| values.get(point).copied().flatten();
    let (mean, max) = (at(&series.mean)?, at(&series.max)?);
    let format = |value| figure(series.metric, value);
    let (mean, max) = (format(mean), format(max));
    Some(if mean == max { mean } else { format!("{mean} (max {max})") })
}

fn head(metric: LoadMetric) -> &'static str {
    match metric {
        LoadMetric::CpuUsedMillicores => "cpu",
        LoadMetric::CpuReadyMillicores => "ready",
        LoadMetric::MemoryUsedBytes => "memory",
        LoadMetric::MemoryBalloonedBytes => "ballooned",
        LoadMetric::DirtyBytesPerS => "dirtied/s",
        LoadMetric::ReadsPerS => "reads/s",
        LoadMetric::WritesPerS => "writes/s",
        LoadMetric::ReadBytesPerS => "read/s",
        LoadMetric::WriteBytesPerS => "written/s",
        LoadMetric::LatencyUs => "latency",
        LoadMetric::RxBytesPerS => "received/s",
        LoadMetric::TxBytesPerS => "sent/s",
        LoadMetric::SpaceUsedBytes => "space used",
    }
}

fn figure(metric: LoadMetric, value: u64) -> String {
    match metric {
        LoadMetric::CpuUsedMillicores | LoadMetric::CpuReadyMillicores => processors(value),
        LoadMetric::ReadsPerS | LoadMetric::WritesPerS => value.to_string(),
        LoadMetric::LatencyUs => micros(value),
        LoadMetric::MemoryUsedBytes
        | LoadMetric::MemoryBalloonedBytes
        | LoadMetric::DirtyBytesPerS
        | LoadMetric::ReadBytesPerS
        | LoadMetric::WriteBytesPerS
        | LoadMetric::RxBytesPerS
        | LoadMetric::TxBytesPerS
        | LoadMetric::SpaceUsedBytes => byte_count(value),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{LoadCapacity, LoadResolution, TopBy};
    use godwit_api::{HostLoad, VmLoad};

    use super::*;

    #[test]
    fn periods_without_a_figure_are_left_out() {
        let series = |metric, mean: [Option<u64>; 3], max: [Option<u64>; 3]| LoadSeries {
            metric,
            mean: mean.to_vec(),
            max: max.to_vec(),
        };
        let cpu = [Some(812), None, Some(40)];
        let history = LoadHistory {
            object: "vm:web".into(),
            resolution: LoadResolution::Minute,
            from_unix_ms: 60_000,
            step_ms: 60_000,
            points: 3,
            capacity: LoadCapacity::default(),
            series: vec![
                series(LoadMetric::CpuUsedMillicores, cpu, [Some(1_990), None, Some(40)]),
                series(LoadMetric::LatencyUs, [Some(310), None, None], [Some(310), None, None]),
            ],
        };
        assert_eq!(
            periods(&history),
            "FROM                 CPU              LATENCY\n\
             1970-01-01 00:01:00  0.81 (max 1.99)  0.3 ms\n\
             1970-01-01 00:03:00  0.04             -\n"
        );
        let none = LoadHistory { series: Vec::new(), ..history };
        assert_eq!(periods(&none), "no load was measured in this time");
    }

    #[test]
    fn hosts_and_vms_are_listed() {
        let load = HostLoad { cores: 16, cpu_used_millicores: 2_310, ..HostLoad::default() };
        let storage = StorageLoad { reads_per_s: 2, writes_per_s: 3, ..StorageLoad::default() };
        let host = TopHost { host: "a".into(), load, storage, cpu_ready_millicores: 9 };
        let load = VmLoad {
            name: "web".into(),
            vcpus: 2,
            memory_used_bytes: 1 << 30,
            memory_total_bytes: 4 << 30,
            rx_bytes_per_s: 2_048,
            ..VmLoad::default()
        };
        let top = LoadTop {
            at_unix_ms: 0,
            by: TopBy::Cpu,
            vms_total: 3,
            hosts_total: 1,
            vms: vec![TopVm { host: "a".into(), load, storage: None }],
            hosts: vec![host],
        };
        let text = tables(&top);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "HOST  CPU      READY  MEMORY   IO/S  DISK/S  LATENCY  RECEIVED/S  SENT/S"
        );
        assert_eq!(
            lines[1],
            "a     2.31/16  0.00   0 B/0 B  5     0 B     -        0 B         0 B"
        );
        assert!(lines[3].starts_with("VM   HOST  CPU"), "{text}");
        assert!(lines[4].starts_with("web  a     0.00/2  -      1.0 GiB/4.0 GiB"), "{text}");
        assert_eq!(lines[5], "and 2 more VMs (--limit)");
    }
}
