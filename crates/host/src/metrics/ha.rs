//! Metrics of the guard of this host's lease.

use godwit_api::{HaHost, HaStanding, json_name};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::{Gauges, Labels, Rates, add, set};

const STANDINGS: [HaStanding; 3] = [HaStanding::Held, HaStanding::Stopping, HaStanding::Over];

/// Metrics that are set at each scrape.
#[derive(Debug, Default)]
pub(super) struct HaNow {
    term: Gauge,
    standing: Gauges,
    lease_left: Rates,
    protected: Gauge,
    heartbeat_failures: Counter,
}

impl HaNow {
    #[rustfmt::skip]
    pub(super) fn register(&self, to: &mut Registry) {
        add(to, "ha_term", None, "Newest term of HA; 0 without one", &self.term);
        add(to, "ha_standing", None, "1 for how the host stands to its term", &self.standing);
        add(to, "ha_lease_left", Some(Unit::Seconds), "Time until the lease runs out",
            &self.lease_left);
        add(to, "ha_protected_vms", None, "Protected VMs with a process", &self.protected);
        add(to, "ha_heartbeat_failures", None, "Heartbeats that could not be written",
            &self.heartbeat_failures);
    }

    /// Sets the metrics; without a lease its figure is absent.
    pub(super) fn update(&self, guard: &HaHost) {
        set(&self.term, guard.term);
        for standing in STANDINGS {
            let labels: Labels = vec![("standing", json_name(&standing))];
            set(&self.standing.get_or_create(&labels), (standing == guard.standing).into());
        }
        self.lease_left.clear();
        if let Some(ms) = guard.lease_left_ms {
            let left = std::time::Duration::from_millis(ms).as_secs_f64();
            self.lease_left.get_or_create(&Labels::new()).set(left);
        }
        set(&self.protected, guard.vms.len() as u64);
        let counted = self.heartbeat_failures.get();
        self.heartbeat_failures.inc_by(guard.heartbeat_failures.saturating_sub(counted));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    pub(in crate::metrics) fn held() -> HaHost {
        HaHost {
            standing: HaStanding::Held,
            term: 4,
            lease_left_ms: Some(7500),
            watchdog: true,
            watchdog_process: true,
            answered_ms_ago: Some(500),
            heartbeat_failures: 3,
            ending: Vec::new(),
            datastores: Vec::new(),
            vms: vec!["web".to_owned()],
            own: Vec::new(),
            own_problems: Vec::new(),
        }
    }

    fn text(of: &HaNow) -> String {
        let mut registry = Registry::default();
        of.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn a_guard_shows_its_term_its_lease_and_its_failures() {
        let metrics = HaNow::default();
        for _ in 0..2 {
            metrics.update(&held());
        }
        let shown = text(&metrics);
        for line in [
            "ha_term 4",
            r#"ha_standing{standing="held"} 1"#,
            r#"ha_standing{standing="over"} 0"#,
            "ha_lease_left_seconds{} 7.5",
            "ha_protected_vms 1",
            "ha_heartbeat_failures_total 3",
        ] {
            assert!(shown.lines().any(|found| found == line), "{line}\n{shown}");
        }
        let over = HaHost { standing: HaStanding::Over, lease_left_ms: None, ..held() };
        metrics.update(&HaHost { heartbeat_failures: 5, ..over });
        let shown = text(&metrics);
        assert!(shown.contains(r#"{standing="over"} 1"#) && !shown.contains("seconds 7.5"));
        assert!(shown.contains("ha_heartbeat_failures_total 5"), "{shown}");
    }
}
