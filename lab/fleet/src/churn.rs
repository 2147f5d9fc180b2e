//! Steady small changes of a cluster in use.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::server::Shared;

/// Interval of changes.
const INTERVAL: Duration = Duration::from_millis(20);

/// Makes this many changes per second until it is aborted.
pub(crate) async fn churn(shared: Arc<Shared>, changes_per_s: u32) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut turn, mut due) = (0_usize, 0.0);
    loop {
        ticks.tick().await;
        due += f64::from(changes_per_s) * INTERVAL.as_secs_f64();
        let mut world = shared.world();
        while due >= 1.0 {
            world.disturb(turn);
            turn += 1;
            due -= 1.0;
        }
    }
}
