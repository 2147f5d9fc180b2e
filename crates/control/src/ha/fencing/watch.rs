//! Checks of the fencing devices while nothing is wrong: a device that fails, or that is another
//! machine's, is reported before it is needed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::time::{MissedTickBehavior, interval};

use super::{Devices, Fault, MOST_AT_ONCE, Power};
use crate::cluster::state::State;

/// Interval between two checks of a device.
const CHECK_INTERVAL: Duration = Duration::from_secs(120);

/// Checks all devices again and again.
pub(crate) async fn watch(devices: Arc<Devices>, state: Arc<State>) {
    if devices.devices.is_empty() {
        return;
    }
    let mut doubted = BTreeSet::new();
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        devices.check_all(|host| state.inventory().is_up(host), &mut doubted).await;
    }
}

impl Devices {
    /// Checks all devices once. A fault counts when the check before found one too: a host that was
    /// just switched off may still be up for the manager, and BMCs leave some requests unanswered.
    pub(super) async fn check_all(
        &self,
        is_up: impl Fn(&str) -> bool + Sync,
        doubted: &mut BTreeSet<String>,
    ) {
        let is_up = &is_up;
        let checks = self.devices.keys().map(|host| async move {
            let was_up = is_up(host);
            let fault = match self.status(host).await {
                Ok(Power::Off) if was_up && is_up(host) => Some(Fault::Contradicted),
                Ok(_) => None,
                Err(fault) => Some(fault),
            };
            (host, fault)
        });
        let checks: Vec<_> = checks.collect();
        let mut checks = stream::iter(checks).buffer_unordered(MOST_AT_ONCE);
        while let Some((host, fault)) = checks.next().await {
            let Some(fault) = fault else {
                doubted.remove(host);
                self.note(host, None);
                continue;
            };
            if !doubted.insert(host.clone()) {
                tracing::warn!(host, %fault, "the fencing device failed two checks");
                self.note(host, Some(fault));
            }
        }
    }
}
