//! Metrics of the host for Prometheus (OpenMetrics text). docs/metrics.md lists all of them. Labels
//! are bounded: a VM's name is a label only while a migration of it runs from here, and in the load
//! ([`load`]) while it has a process here. No metric reveals the content of a guest's memory.

mod ha;
mod load;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use godwit_api::{ErrorCode, HaHost, LoadSample, VmInfo};
use godwit_types::{EngineKind, FailureCode, Outcome, PageInReport, Phase, Progress, Report};
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};
use tokio::time::Instant;

use crate::lanes_seen::LanesCarry;
use crate::memory::MemoryFigures;

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge>;
type Rates = Family<Labels, Gauge<f64, AtomicU64>>;
type Counters = Family<Labels, Counter>;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// All metrics. One set for each agent.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    began: Instant,
    /// Held during a scrape, so that another scrape does not clear gauges being set.
    scrape: Mutex<()>,
    now: Now,
    load: load::LoadNow,
    ha: ha::HaNow,
    ended: Ended,
    requests: Histograms,
}

/// The state of the host at a scrape.
#[derive(Debug)]
pub(crate) struct HostNow {
    pub(crate) vms: Vec<VmInfo>,
    /// `None`: the kernel does not report memory.
    pub(crate) memory: Option<MemoryFigures>,
    /// Progress of the outgoing migrations, by VM.
    pub(crate) migrations: Vec<(String, Progress)>,
    /// Whether a probe is running.
    pub(crate) probes: bool,
    /// Recent measurements of the lanes, by host.
    pub(crate) lanes: Vec<(String, LanesCarry)>,
    /// Newest sample of the load, if there is one.
    pub(crate) load: Option<Arc<LoadSample>>,
    /// The guard of the host's lease.
    pub(crate) ha: HaHost,
}

/// Metrics that are read at each scrape.
#[derive(Debug, Default)]
struct Now {
    uptime: Gauge<f64, AtomicU64>,
    vms: Gauges,
    vms_in_doubt: Gauge,
    memory_total: Gauge,
    memory_available: Gauge,
    memory_committed: Gauge,
    migrations: Gauges,
    sent: Gauges,
    remaining: Gauges,
    rounds: Gauges,
    bandwidth: Rates,
    dirty_rate: Rates,
    page_ins: Gauge,
    page_in_missing: Gauge,
    page_ins_cut: Gauge,
    probe: Gauge,
    lane_bandwidth: Rates,
    lane_round_trip: Rates,
}

/// Metrics that are counted when migrations end.
#[derive(Debug)]
struct Ended {
    migrations: Counters,
    durations: Histograms,
    switchovers: Histogram,
    blackouts: Histogram,
    rounds: Histogram,
    cuts: Counter,
    lane_sent: Counters,
    lane_broken: Counters,
    throttled: Counter,
    throttle_faults: Counter,
    throttle_held: Counter<f64, AtomicU64>,
    page_in_pages: Counter,
    page_in_requests: Counter,
    page_in_waits: Counters,
}

/// Buckets from 1 ms to 33 s.
fn answers() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

/// Buckets from 0.1 s to 7 h.
fn migrations() -> Histogram {
    Histogram::new(exponential_buckets(0.1, 2.0, 19))
}

impl Default for Ended {
    fn default() -> Ended {
        Ended {
            migrations: Family::default(),
            durations: Family::new_with_constructor(migrations),
            switchovers: answers(),
            blackouts: answers(),
            rounds: Histogram::new(exponential_buckets(1.0, 2.0, 10)),
            cuts: Counter::default(),
            lane_sent: Family::default(),
            lane_broken: Family::default(),
            throttled: Counter::default(),
            throttle_faults: Counter::default(),
            throttle_held: Counter::default(),
            page_in_pages: Counter::default(),
            page_in_requests: Counter::default(),
            page_in_waits: Family::default(),
        }
    }
}

/// Registers a metric under a name, with its unit and help text.
fn add(
    registry: &mut Registry,
    name: &str,
    unit: Option<Unit>,
    help: &str,
    metric: &(impl Metric + Clone + 'static),
) {
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, metric.clone()),
        None => registry.register(name, help, metric.clone()),
    }
}

impl Now {
    #[rustfmt::skip]
    fn register(&self, to: &mut Registry) {
        let (bytes, seconds) = (|| Some(Unit::Bytes), || Some(Unit::Seconds));
        add(to, "uptime", seconds(), "Time since the agent's start", &self.uptime);
        add(to, "vms", None, "VMs of this host, by state", &self.vms);
        add(to, "vms_in_doubt", None, "VMs that another host may run", &self.vms_in_doubt);
        add(to, "memory_total", bytes(), "Guest memory of the host without any VM",
            &self.memory_total);
        add(to, "memory_available", bytes(), "Guest memory available to a new VM",
            &self.memory_available);
        add(to, "memory_committed", bytes(), "Guest memory promised to active VMs",
            &self.memory_committed);
        add(to, "migrations", None, "Running migrations from this host, by phase",
            &self.migrations);
        add(to, "migration_sent", bytes(), "Bytes sent by a running migration", &self.sent);
        add(to, "migration_remaining", bytes(),
            "Bytes left to scan or send in the round of a running migration", &self.remaining);
        add(to, "migration_round", None, "Round of a running migration", &self.rounds);
        add(to, "migration_bandwidth_bytes_per_second", None,
            "Bandwidth of a running migration", &self.bandwidth);
        add(to, "migration_dirty_rate_bytes_per_second", None,
            "Dirty rate of the guest of a running migration", &self.dirty_rate);
        add(to, "page_ins", None, "VMs that run here and lack pages", &self.page_ins);
        add(to, "page_ins_cut", None, "VMs that lack pages and receive none at the moment",
            &self.page_ins_cut);
        add(to, "page_in_missing_pages", None, "Pages that VMs running here lack",
            &self.page_in_missing);
        add(to, "probe_running", None, "1 while a probe of lanes runs", &self.probe);
        add(to, "lane_bandwidth_bytes_per_second", None,
            "Recently measured bandwidth of the lanes to a host", &self.lane_bandwidth);
        add(to, "lane_round_trip", seconds(), "Recently measured round trip to a host",
            &self.lane_round_trip);
    }
}

impl Ended {
    #[rustfmt::skip]
    fn register(&self, to: &mut Registry) {
        let (bytes, seconds) = (|| Some(Unit::Bytes), || Some(Unit::Seconds));
        add(to, "migrations_ended", None,
            "Ended migrations from this host, by outcome, engine and failure code",
            &self.migrations);
        add(to, "migration_duration", seconds(),
            "Time from a migration's request to its end, by outcome", &self.durations);
        add(to, "switchover", seconds(), "Pause of the vCPUs", &self.switchovers);
        add(to, "blackout", seconds(), "Longest silence seen by an outside client",
            &self.blackouts);
        add(to, "migration_rounds", None, "Rounds of completed migrations", &self.rounds);
        add(to, "migration_cuts", None, "Cuts of the link that a migration survived", &self.cuts);
        add(to, "lane_sent", bytes(),
            "Bytes sent by a lane, from an address of this host to a host, counted at the \
             migration's end", &self.lane_sent);
        add(to, "lane_broken_streams", None,
            "Streams of a lane that broke or could not be opened", &self.lane_broken);
        add(to, "migrations_throttled", None, "Migrations whose guest was throttled",
            &self.throttled);
        add(to, "throttle_faults", None, "Writes that waited for the throttle",
            &self.throttle_faults);
        add(to, "throttle_held", seconds(), "Total time that vCPUs waited for the throttle",
            &self.throttle_held);
        add(to, "page_in_pages", None, "Pages that guests lacked at their hand-over",
            &self.page_in_pages);
        add(to, "page_in_requests", None, "Lacking pages that guests touched before they arrived",
            &self.page_in_requests);
        add(to, "page_in_waits", None, "Waits of guests for such pages, by duration",
            &self.page_in_waits);
    }

    /// Counts an ended migration.
    fn count(&self, report: &Report) {
        let outcome = outcome(report.outcome).to_owned();
        let engine = match report.engine {
            EngineKind::Godwit => "godwit",
            EngineKind::Qemu => "qemu",
        };
        let code = report.error.as_ref().map_or("", |error| known_code(&error.code));
        let labels = [
            ("outcome", outcome.clone()),
            ("engine", engine.to_owned()),
            ("code", code.to_owned()),
        ];
        self.migrations.get_or_create(&labels.to_vec()).inc();
        self.durations
            .get_or_create(&vec![("outcome", outcome)])
            .observe(report.migration_time_ms / 1e3);
        for (histogram, ms) in
            [(&self.switchovers, report.switchover_ms), (&self.blackouts, report.blackout_ms)]
        {
            if let Some(ms) = ms {
                histogram.observe(ms / 1e3);
            }
        }
        if let (Outcome::Completed, Ok(rounds)) =
            (report.outcome, u32::try_from(report.rounds.len()))
        {
            self.rounds.observe(rounds.into());
        }
        self.cuts.inc_by(report.cuts.len() as u64);
        for lane in &report.lanes {
            let from = lane.from.map_or_else(|| "any".to_owned(), |from| from.to_string());
            let labels = vec![("from", from), ("to", report.to.clone())];
            self.lane_sent.get_or_create(&labels).inc_by(lane.bytes);
            self.lane_broken.get_or_create(&labels).inc_by(lane.broken.len() as u64);
        }
        if let Some(throttle) = &report.throttle {
            self.throttled.inc();
            self.throttle_faults.inc_by(throttle.faults);
            self.throttle_held.inc_by(throttle.held_ms.max(0.0) / 1e3);
        }
        if let Some(page_in) = &report.page_in {
            self.count_page_in(page_in);
        }
    }

    fn count_page_in(&self, page_in: &PageInReport) {
        self.page_in_pages.inc_by(page_in.pages);
        self.page_in_requests.inc_by(page_in.demanded_pages);
        for class in &page_in.waits {
            let below =
                class.below_ms.map_or_else(|| "inf".to_owned(), |ms| (ms / 1e3).to_string());
            self.page_in_waits.get_or_create(&vec![("below_seconds", below)]).inc_by(class.waits);
        }
    }
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
        Outcome::InDoubt => "in-doubt",
    }
}

/// Returns the code if it is a known one: reports contain texts of other hosts.
fn known_code(code: &str) -> &'static str {
    let names = (0..=64).map(|wire| FailureCode::from_wire(wire).name());
    let of_engine = names.into_iter().find(|name| *name == code);
    of_engine.unwrap_or_else(|| match ErrorCode::from_name(code) {
        ErrorCode::InvalidRequest => "invalid-request",
        ErrorCode::NotFound => "not-found",
        ErrorCode::AlreadyExists => "already-exists",
        ErrorCode::WrongState => "wrong-state",
        ErrorCode::Busy => "busy",
        ErrorCode::Forbidden => "forbidden",
        ErrorCode::InsufficientMemory => "insufficient-memory",
        ErrorCode::Preflight => "preflight",
        ErrorCode::HypervisorFailed => "hypervisor-failed",
        ErrorCode::PeerUnreachable => "peer-unreachable",
        ErrorCode::PeerVersion => "peer-version",
        ErrorCode::MigrationFailed => "migration-failed",
        ErrorCode::Cancelled => "cancelled",
        ErrorCode::InDoubt => "in-doubt",
        ErrorCode::HostFailed => "host-failed",
        ErrorCode::Unknown => "other",
    })
}

impl Default for Metrics {
    fn default() -> Metrics {
        let (mut registry, now, ended) =
            (Registry::with_prefix("godwit_host"), Now::default(), Ended::default());
        let (load, ha) = (load::LoadNow::default(), ha::HaNow::default());
        now.register(&mut registry);
        load.register(&mut registry);
        ha.register(&mut registry);
        ended.register(&mut registry);
        let requests = Histograms::new_with_constructor(answers);
        let help = "Requests, by method, route and status";
        add(&mut registry, "request_duration", Some(Unit::Seconds), help, &requests);
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "The agent's version", Info::new(version));
        let (began, scrape) = (Instant::now(), Mutex::default());
        Metrics { registry, began, scrape, now, load, ha, ended, requests }
    }
}

impl Metrics {
    /// Counts an ended migration of this host.
    pub(crate) fn ended(&self, report: &Report) {
        self.ended.count(report);
    }

    /// Returns all metrics with their current values, as OpenMetrics text.
    pub(crate) fn render(&self, host: &HostNow) -> Result<String, fmt::Error> {
        let _one = self.scrape.lock();
        let now = &self.now;
        now.uptime.set(self.began.elapsed().as_secs_f64());
        now.vms.clear();
        let vms = &host.vms;
        for vm in vms {
            now.vms.get_or_create(&vec![("state", vm.state.name().to_owned())]).inc();
        }
        set(&now.vms_in_doubt, vms.iter().filter(|vm| vm.in_doubt).count() as u64);
        // If the kernel does not report memory, there is no figure.
        if let Some(memory) = &host.memory {
            set(&now.memory_total, memory.total_bytes);
            set(&now.memory_available, memory.available_bytes);
            set(&now.memory_committed, memory.committed_bytes);
        }
        self.update_migrations(&host.migrations);
        let missing: Vec<_> = vms.iter().filter_map(|vm| vm.page_in).collect();
        set(&now.page_ins, missing.len() as u64);
        set(&now.page_ins_cut, missing.iter().filter(|one| !one.connected).count() as u64);
        set(&now.page_in_missing, missing.iter().map(|one| one.missing_pages).sum());
        set(&now.probe, host.probes.into());
        now.lane_bandwidth.clear();
        now.lane_round_trip.clear();
        for (to, lanes) in &host.lanes {
            let labels = vec![("to", to.clone())];
            now.lane_bandwidth.get_or_create(&labels).set(lanes.bytes_per_s);
            now.lane_round_trip.get_or_create(&labels).set(lanes.round_trip.as_secs_f64());
        }
        self.load.update(host.load.as_deref());
        self.ha.update(&host.ha);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Sets the gauges of running migrations, by VM, and removes those of ended ones.
    fn update_migrations(&self, running: &[(String, Progress)]) {
        let now = &self.now;
        for phase in Phase::ALL {
            let count = running.iter().filter(|(_, progress)| progress.phase == phase).count();
            set(
                &now.migrations.get_or_create(&vec![("phase", phase.name().to_owned())]),
                count as u64,
            );
        }
        for family in [&now.sent, &now.remaining, &now.rounds] {
            family.clear();
        }
        now.bandwidth.clear();
        now.dirty_rate.clear();
        for (vm, progress) in running {
            let labels = vec![("vm", vm.clone())];
            set(&now.sent.get_or_create(&labels), progress.sent_bytes);
            set(&now.remaining.get_or_create(&labels), progress.remaining_bytes);
            set(&now.rounds.get_or_create(&labels), progress.round.into());
            now.bandwidth.get_or_create(&labels).set(progress.bandwidth_bytes_per_s);
            now.dirty_rate.get_or_create(&labels).set(progress.dirty_bytes_per_s);
        }
    }

    /// Records a request and its duration.
    pub(crate) fn request(&self, method: &str, route: &str, status: u16, took: Duration) {
        let labels = [("method", method.to_owned()), ("route", route.to_owned())];
        let labels = labels.into_iter().chain([("status", status.to_string())]).collect();
        self.requests.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

fn set(gauge: &Gauge, count: u64) {
    gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use godwit_types::{Fault, FetchTimes, LaneReport, ThrottleReport, WaitClass};

    use super::*;
    use crate::migrations::tests::report;

    fn text(metrics: &Metrics) -> String {
        let mut text = String::new();
        encode(&mut text, &metrics.registry).unwrap();
        text
    }

    fn lane() -> LaneReport {
        LaneReport {
            from: Some([10, 0, 0, 1].into()),
            to: ([10, 0, 0, 2], 7701).into(),
            streams: 2,
            bytes: 5000,
            broken: vec!["cut".into()],
            vanishing_mtu: None,
        }
    }

    /// Creates a report with every kind of event.
    fn eventful() -> Report {
        let error =
            Fault { code: "lane-lost".into(), message: "cut".into(), remedy: String::new() };
        Report {
            outcome: Outcome::Failed,
            error: Some(error),
            switchover_ms: Some(12.0),
            blackout_ms: Some(20.0),
            lanes: vec![lane()],
            throttle: Some(ThrottleReport {
                faults: 7,
                held_ms: 1500.0,
                ..ThrottleReport::default()
            }),
            page_in: Some(PageInReport {
                pages: 30,
                demanded_pages: 3,
                cuts: 0,
                duration_ms: 1.0,
                fetch_ms: FetchTimes::default(),
                waits: vec![
                    WaitClass { below_ms: Some(2.0), waits: 2 },
                    WaitClass { below_ms: None, waits: 1 },
                ],
            }),
            ..report("web")
        }
    }

    #[test]
    fn ended_migrations_are_counted() {
        let metrics = Metrics::default();
        metrics.ended(&eventful());
        metrics.ended(&report("db"));
        let text = text(&metrics);
        for line in [
            concat!(
                r#"godwit_host_migrations_ended_total{outcome="failed",engine="godwit","#,
                r#"code="lane-lost"} 1"#
            ),
            r#"godwit_host_migrations_ended_total{outcome="completed",engine="godwit",code=""} 1"#,
            r#"godwit_host_lane_sent_bytes_total{from="10.0.0.1",to="b"} 5000"#,
            r#"godwit_host_lane_broken_streams_total{from="10.0.0.1",to="b"} 1"#,
            "godwit_host_switchover_seconds_count 1",
            "godwit_host_throttle_faults_total 7",
            "godwit_host_throttle_held_seconds_total 1.5",
            "godwit_host_page_in_requests_total 3",
            r#"godwit_host_page_in_waits_total{below_seconds="0.002"} 2"#,
            r#"godwit_host_page_in_waits_total{below_seconds="inf"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("web") && !text.contains("db"), "{text}");
    }

    #[test]
    fn a_vm_is_a_label_only_while_its_migration_runs() {
        let metrics = Metrics::default();
        let progress =
            Progress { phase: Phase::PreCopy, round: 3, sent_bytes: 9, ..Progress::begin(1 << 20) };
        metrics.update_migrations(&[("web".to_owned(), progress)]);
        let rendered = text(&metrics);
        for line in [
            r#"godwit_host_migration_round{vm="web"} 3"#,
            r#"godwit_host_migration_sent_bytes{vm="web"} 9"#,
            r#"godwit_host_migrations{phase="pre-copy"} 1"#,
            r#"godwit_host_migrations{phase="switchover"} 0"#,
        ] {
            assert!(rendered.lines().any(|found| found == line), "{line}\n{rendered}");
        }
        metrics.update_migrations(&[]);
        let rendered = text(&metrics);
        let is_cleared = !rendered.contains("web");
        assert!(is_cleared && rendered.contains(r#"{phase="pre-copy"} 0"#), "{rendered}");
    }

    #[test]
    fn texts_of_other_hosts_make_no_labels() {
        assert_eq!(known_code("not-converging"), "not-converging");
        assert_eq!(known_code("wrong-state"), "wrong-state");
        assert_eq!(known_code("whatever another host says"), "other");
    }

    /// Returns each metric that a text names.
    fn named(text: &str) -> BTreeSet<String> {
        let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        words.filter(|word| word.starts_with("godwit_host_")).map(str::to_owned).collect()
    }

    /// Returns each registered metric, as a query names it. A metric without a value is not
    /// rendered.
    fn registered() -> BTreeSet<String> {
        let metrics = Metrics::default();
        metrics.ended(&eventful());
        metrics.update_migrations(&[("web".to_owned(), Progress::begin(1))]);
        metrics.load.update(Some(&load::tests::sample()));
        metrics.ha.update(&ha::tests::held());
        metrics.request("GET", "/metrics", 200, Duration::from_millis(1));
        drop(metrics.now.vms.get_or_create(&Labels::new()));
        drop(metrics.now.lane_bandwidth.get_or_create(&Labels::new()));
        drop(metrics.now.lane_round_trip.get_or_create(&Labels::new()));
        let text = text(&metrics);
        let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let names = kinds.map(|(name, kind)| match kind {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name.to_owned(),
        });
        names.collect()
    }

    #[test]
    fn the_list_and_the_dashboard_match_the_registered_metrics() {
        let listed = named(include_str!("../../../docs/metrics.md"));
        assert_eq!(listed, registered());
        let shown = named(include_str!("../../../packaging/grafana/godwit.json"));
        let whole = |name: &String| {
            let histogram =
                ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix));
            histogram.filter(|name| listed.contains(*name)).unwrap_or(name).to_owned()
        };
        assert_eq!(shown.iter().map(whole).collect::<BTreeSet<_>>(), listed);
    }
}
