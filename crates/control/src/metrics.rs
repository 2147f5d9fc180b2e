//! Metrics of the manager and its cluster for Prometheus (OpenMetrics text). docs/metrics.md lists
//! them all. No label contains the name of a VM or host, so the number of series does not grow with
//! the cluster; the API has the values of single VMs and hosts.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use godwit_api::control::{AlarmSeverity, HaStatus, Move, MoveState, ReceiverKind, Waits};
use godwit_api::json_name;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;

use crate::cluster::inventory::Tally;
use crate::cluster::state::State;

type Labels = Vec<(&'static str, String)>;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// Metrics of this process, which has one manager.
pub(crate) static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// All metrics of the manager.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    hosts: Family<Labels, Gauge>,
    hosts_in_maintenance: Gauge,
    vms: Family<Labels, Gauge>,
    vms_in_doubt: Gauge,
    name_conflicts: Gauge,
    hosts_faulty: Gauge,
    moves: Family<Labels, Gauge>,
    moves_waiting: Family<Labels, Gauge>,
    is_leader: Gauge,
    event_listeners: Gauge,
    moves_ended: Family<Labels, Counter>,
    move_durations: Histograms,
    switchovers: Histogram,
    blackouts: Histogram,
    requests: Histograms,
    store: Histograms,
    alarms: Family<Labels, Gauge>,
    alarm_notices: Family<Labels, Counter>,
    ha: HaMetrics,
}

/// Metrics of high availability.
#[derive(Debug, Default)]
struct HaMetrics {
    terms: Family<Labels, Gauge>,
    vms: Family<Labels, Gauge>,
    shortfall: Gauge,
    restarts: Counter,
    fencing: Family<Labels, Counter>,
}

impl HaMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("ha_terms", "Newest terms of hosts, by phase", self.terms.clone());
        registry.register("ha_vms", "Protected VMs, by state", self.vms.clone());
        let help = "Memory that protected VMs lack after the failures of the admission control";
        let shortfall = self.shortfall.clone();
        registry.register_with_unit("ha_shortfall", help, Unit::Bytes, shortfall);
        let help = "Protected VMs that started on another host";
        registry.register("ha_restarts", help, self.restarts.clone());
        let help = "Hosts whose power was to be cut, by outcome";
        registry.register("ha_fencing", help, self.fencing.clone());
    }
}

/// Buckets for durations of requests: 1 ms to 33 s.
fn answers() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

/// Buckets for durations of moves: 0.1 s to 7 h.
fn moves() -> Histogram {
    Histogram::new(exponential_buckets(0.1, 2.0, 19))
}

/// Buckets for pauses of guests: 1 ms to 33 s.
fn pauses() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

impl Metrics {
    fn new() -> Metrics {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("godwit_manager"),
            hosts: Family::default(),
            hosts_in_maintenance: Gauge::default(),
            vms: Family::default(),
            vms_in_doubt: Gauge::default(),
            name_conflicts: Gauge::default(),
            hosts_faulty: Gauge::default(),
            moves: Family::default(),
            moves_waiting: Family::default(),
            is_leader: Gauge::default(),
            event_listeners: Gauge::default(),
            moves_ended: Family::default(),
            move_durations: Family::new_with_constructor(moves),
            switchovers: pauses(),
            blackouts: pauses(),
            requests: Family::new_with_constructor(answers),
            store: Family::new_with_constructor(answers),
            alarms: Family::default(),
            alarm_notices: Family::default(),
            ha: HaMetrics::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("hosts", "Hosts, by state", self.hosts.clone());
        let maintenance = self.hosts_in_maintenance.clone();
        registry.register("hosts_in_maintenance", "Hosts that accept no VMs", maintenance);
        registry.register("vms", "VMs that hosts report, by state", self.vms.clone());
        let in_doubt = self.vms_in_doubt.clone();
        registry.register(
            "vms_in_doubt",
            "VMs for which it is unknown which host may run them",
            in_doubt,
        );
        let conflicts = self.name_conflicts.clone();
        registry.register(
            "name_conflicts",
            "Names of VMs that several hosts claim and no move explains",
            conflicts,
        );
        let faulty = self.hosts_faulty.clone();
        registry.register("hosts_faulty", "Hosts that report invalid data", faulty);
        registry.register("moves", "Unfinished moves, by state", self.moves.clone());
        let waiting = self.moves_waiting.clone();
        registry.register("moves_waiting", "Waiting moves, by the reason for the wait", waiting);
        registry.register("is_leader", "1 if this manager leads", self.is_leader.clone());
        let listeners = self.event_listeners.clone();
        registry.register("event_listeners", "Clients that follow the events", listeners);
        let ended = self.moves_ended.clone();
        registry.register(
            "moves_ended",
            "Finished moves, by outcome and code of the failure",
            ended,
        );
        let durations = self.move_durations.clone();
        let help = "Time from a move's last start to its end, by outcome";
        registry.register_with_unit("move_duration", help, Unit::Seconds, durations);
        let switchovers = self.switchovers.clone();
        registry.register_with_unit(
            "switchover",
            "Time for which moves paused the vCPUs",
            Unit::Seconds,
            switchovers,
        );
        let help = "Longest interruption that an outside client saw during moves";
        registry.register_with_unit("blackout", help, Unit::Seconds, self.blackouts.clone());
        let help = "Time until the answer to a request begins, by method, route and status";
        registry.register_with_unit("request_duration", help, Unit::Seconds, self.requests.clone());
        let help = "Time that the store took, by operation and outcome";
        registry.register_with_unit("store_duration", help, Unit::Seconds, self.store.clone());
        registry.register("alarms", "Alarms that are raised, by severity", self.alarms.clone());
        let notices = self.alarm_notices.clone();
        let help = "Notices about alarms, by kind of the receiver and outcome";
        registry.register("alarm_notices", help, notices);
        self.ha.register(registry);
    }

    /// Counts a host whose power a fencing device has cut (`off`), or did not (`failed`).
    pub(crate) fn fenced(&self, is_off: bool) {
        let outcome = if is_off { "off" } else { "failed" };
        self.ha.fencing.get_or_create(&vec![("outcome", outcome.to_owned())]).inc();
    }

    /// Counts a protected VM that started on another host.
    pub(crate) fn restarted(&self) {
        self.ha.restarts.inc();
    }

    /// Updates the gauges of high availability. While it is off, and in a manager that does not
    /// lead, there are no terms and no VMs.
    pub(crate) fn update_ha(&self, status: Option<&HaStatus>) {
        let status = status.filter(|status| status.settings.enabled);
        let (mut terms, mut vms) = (BTreeMap::<String, u64>::new(), BTreeMap::<String, u64>::new());
        for host in status.into_iter().flat_map(|status| &status.hosts) {
            let has_term = host.term > 0;
            let phase = if has_term { json_name(&host.phase) } else { "no-term".to_owned() };
            *terms.entry(phase).or_default() += 1;
        }
        for vm in status.into_iter().flat_map(|status| &status.vms) {
            let state = match (&vm.restart, &vm.problem) {
                (Some(_), _) => "restarting",
                (None, Some(_)) => "bound",
                (None, None) => "protected",
            };
            *vms.entry(state.to_owned()).or_default() += 1;
        }
        refill(&self.ha.terms, "phase", terms);
        refill(&self.ha.vms, "state", vms);
        let shortfall = status.and_then(|status| status.shortfall.as_ref());
        set(&self.ha.shortfall, shortfall.map_or(0, |shortfall| shortfall.memory_bytes));
    }

    /// Counts notices that a receiver accepted (`delivered`) or did not (`failed`).
    pub(crate) fn notices(&self, kind: ReceiverKind, outcome: &'static str, count: usize) {
        let labels = vec![("receiver", kind.name().to_owned()), ("outcome", outcome.to_owned())];
        self.alarm_notices.get_or_create(&labels).inc_by(count as u64);
    }

    /// Updates the gauge of alarms, of which a manager that does not lead has none.
    pub(crate) fn update_alarms(&self, raised: impl Iterator<Item = AlarmSeverity>) {
        let mut counts = BTreeMap::<String, u64>::new();
        for severity in raised {
            *counts.entry(severity.name().to_owned()).or_default() += 1;
        }
        refill(&self.alarms, "severity", counts);
    }

    pub(crate) fn store(&self, operation: &'static str, is_ok: bool, took: Duration) {
        let outcome = if is_ok { "ok" } else { "failed" };
        let labels = vec![("operation", operation.to_owned()), ("outcome", outcome.to_owned())];
        self.store.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn ended(&self, over: &Move) {
        let outcome = json_name(&over.state);
        let code = over.failure.as_ref().map_or(String::new(), |failure| failure.code.clone());
        let labels = vec![("outcome", outcome.clone()), ("code", code)];
        self.moves_ended.get_or_create(&labels).inc();
        if let (Some(started), Some(ended)) = (over.started_unix_ms, over.ended_unix_ms) {
            let took = Duration::from_millis(ended.saturating_sub(started));
            let labels = vec![("outcome", outcome)];
            self.move_durations.get_or_create(&labels).observe(took.as_secs_f64());
        }
        let Some(report) = &over.report else { return };
        for (histogram, ms) in
            [(&self.switchovers, report.switchover_ms), (&self.blackouts, report.blackout_ms)]
        {
            if let Some(ms) = ms {
                histogram.observe(ms / 1000.0);
            }
        }
    }

    /// Updates the gauges, which are counted on each query. `open_moves` are the leader's
    /// unfinished moves; a manager that does not lead has none.
    pub(crate) fn update_gauges<'m>(
        &self,
        state: &State,
        open_moves: Option<impl Iterator<Item = &'m Move>>,
    ) {
        let tally = state.inventory().tally();
        let Tally { hosts, hosts_in_maintenance, hosts_faulty, vms, vms_in_doubt, .. } = tally;
        let unknown = ("unknown".to_owned(), tally.vms_unknown);
        refill(
            &self.hosts,
            "state",
            hosts.into_iter().map(|(state, count)| (state.name().to_owned(), count)),
        );
        refill(
            &self.vms,
            "state",
            vms.into_iter()
                .map(|(state, count)| (state.name().to_owned(), count))
                .chain(std::iter::once(unknown).filter(|(_, count)| *count > 0)),
        );
        set(&self.hosts_in_maintenance, hosts_in_maintenance);
        set(&self.vms_in_doubt, vms_in_doubt);
        set(&self.name_conflicts, tally.name_conflicts);
        set(&self.hosts_faulty, hosts_faulty);
        let (mut states, mut codes) =
            (BTreeMap::<String, u64>::new(), BTreeMap::<String, u64>::new());
        let is_leader = open_moves.is_some();
        for one in open_moves.into_iter().flatten() {
            *states.entry(json_name(&one.state)).or_default() += 1;
            if let Some(Waits { code, .. }) =
                one.waits.as_ref().filter(|_| one.state == MoveState::Waiting)
            {
                *codes.entry(code.clone()).or_default() += 1;
            }
        }
        refill(&self.moves, "state", states);
        refill(&self.moves_waiting, "code", codes);
        self.is_leader.set(i64::from(is_leader));
        self.event_listeners.set(i64::try_from(state.events().listeners()).unwrap_or(i64::MAX));
    }

    /// Returns all metrics in the text format of Prometheus.
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

fn set(gauge: &Gauge, count: u64) {
    gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
}

/// Sets the gauges of a family to `counts` and removes all others.
fn refill(
    family: &Family<Labels, Gauge>,
    label: &'static str,
    counts: impl IntoIterator<Item = (String, u64)>,
) {
    family.clear();
    for (value, count) in counts {
        set(&family.get_or_create(&vec![(label, value)]), count);
    }
}

/// Measures a request until its answer begins, by the route that answers it.
pub(crate) async fn time(route: Option<MatchedPath>, request: Request, next: Next) -> Response {
    let route = route.map_or_else(|| "none".to_owned(), |route| route.as_str().to_owned());
    // A caller can send any method: unknown ones share a label, so that the series stay few.
    let method = match request.method().as_str() {
        known @ ("GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS") => {
            known.to_owned()
        }
        _ => "other".to_owned(),
    };
    let began = Instant::now();
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    let labels = vec![("method", method), ("route", route), ("status", status)];
    METRICS.requests.get_or_create(&labels).observe(began.elapsed().as_secs_f64());
    response
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use godwit_api::control::{HaHostStatus, HaPhase, HaSettings, HaShortfall, HaVmStatus};

    use super::*;

    /// Returns each metric that a text names.
    fn named(text: &str) -> BTreeSet<String> {
        let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        words.filter(|word| word.starts_with("godwit_manager_")).map(str::to_owned).collect()
    }

    /// Returns each registered metric, as a query names it.
    fn registered() -> BTreeSet<String> {
        let metrics = Metrics::new();
        // The text omits families without a value.
        let Metrics { hosts, vms, moves, moves_waiting, moves_ended, .. } = &metrics;
        let HaMetrics { terms, vms: ha_vms, fencing, .. } = &metrics.ha;
        for family in [hosts, vms, moves, moves_waiting, &metrics.alarms, terms, ha_vms] {
            drop(family.get_or_create(&Labels::new()));
        }
        drop(fencing.get_or_create(&Labels::new()));
        drop(moves_ended.get_or_create(&Labels::new()));
        drop(metrics.alarm_notices.get_or_create(&Labels::new()));
        for family in [&metrics.move_durations, &metrics.requests, &metrics.store] {
            drop(family.get_or_create(&Labels::new()));
        }
        let text = metrics.text().unwrap();
        let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        kinds
            .map(
                |(name, kind)| {
                    if kind == "counter" { format!("{name}_total") } else { name.to_owned() }
                },
            )
            .collect()
    }

    fn shown(metrics: &Metrics, name: &str) -> Vec<String> {
        let text = metrics.text().unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.map(|line| line.trim_start_matches("godwit_manager_").to_owned()).collect()
    }

    #[test]
    fn high_availability_that_is_off_has_no_terms_and_no_vms() {
        let host = |host: &str, term: u64, phase: HaPhase| HaHostStatus {
            host: host.to_owned(),
            term,
            phase,
            watchdog: true,
            fencing: false,
            datastores: Vec::new(),
            heard_ms_ago: None,
            rests: false,
            problem: None,
        };
        let vm = |restart: Option<&str>, problem: Option<&str>| HaVmStatus {
            vm: "web".to_owned(),
            host: "a".to_owned(),
            priority: godwit_qemu::RestartPriority::High,
            problem: problem.map(str::to_owned),
            restart: restart.map(str::to_owned),
        };
        let shortfall = HaShortfall { hosts: Vec::new(), vms: Vec::new(), memory_bytes: 7 };
        let mut status = HaStatus {
            settings: HaSettings { enabled: true, ..HaSettings::default() },
            hosts: vec![host("a", 3, HaPhase::Doubtful), host("b", 0, HaPhase::Over)],
            vms: vec![vm(None, None), vm(Some("waits"), Some("a TPM")), vm(None, Some("a TPM"))],
            own: Vec::new(),
            own_problems: Vec::new(),
            shortfall: Some(shortfall),
        };
        let metrics = Metrics::new();
        let of_ha = |metrics: &Metrics| {
            let mut shown = shown(metrics, "godwit_manager_ha_");
            shown.retain(|line| !line.starts_with("ha_restarts"));
            shown.sort_unstable();
            shown
        };
        metrics.update_ha(Some(&status));
        let expected = [
            "ha_shortfall_bytes 7",
            "ha_terms{phase=\"doubtful\"} 1",
            "ha_terms{phase=\"no-term\"} 1",
            "ha_vms{state=\"bound\"} 1",
            "ha_vms{state=\"protected\"} 1",
            "ha_vms{state=\"restarting\"} 1",
        ];
        assert_eq!(of_ha(&metrics), expected);
        status.settings.enabled = false;
        metrics.update_ha(Some(&status));
        assert_eq!(of_ha(&metrics), ["ha_shortfall_bytes 0"]);
        metrics.fenced(true);
        metrics.fenced(false);
        let fencing = shown(&metrics, "godwit_manager_ha_fencing_total");
        assert_eq!(fencing.len(), 2, "{fencing:?}");
    }

    #[test]
    fn manual_and_dashboard_name_every_metric() {
        let listed = named(include_str!("../../../docs/metrics.md"));
        assert_eq!(listed, registered());
        let dashboard = include_str!("../../../packaging/grafana/godwit.json");
        let _: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let shown = named(dashboard);
        let suffixes = ["_bucket", "_count", "_sum"];
        let whole = |name: &String| {
            let histogram = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
            histogram.filter(|name| listed.contains(*name)).unwrap_or(name).to_owned()
        };
        let shown: BTreeSet<String> = shown.iter().map(whole).collect();
        assert_eq!(shown, listed);
    }
}
