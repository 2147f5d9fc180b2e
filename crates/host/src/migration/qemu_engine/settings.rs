//! Settings of QEMU's own migration, and its events.

use std::time::Duration;

use godwit_api::QemuEngineOptions;
use godwit_qemu::{
    EVENTS, LATE_BLOCK_ACTIVATE, PAUSE_BEFORE_SWITCHOVER, Qmp, QmpError, QmpEvent, X_IGNORE_SHARED,
};
use serde_json::json;
use tokio::sync::broadcast;

use crate::state_stream::UNLIMITED_BYTES_PER_S;

/// QEMU's own default for multifd.
const DEFAULT_CHANNELS: u32 = 2;

/// Side of a migration that a QEMU is on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Side {
    /// With the longest time for which the guest may be paused.
    Source {
        downtime_ms: f64,
    },
    Destination,
}

/// Configures one side's QEMU.
pub(super) async fn set_up(
    qmp: &Qmp,
    options: &QemuEngineOptions,
    side: Side,
) -> Result<(), QmpError> {
    // A destination that waits for the source's decision leaves the disks to the source until then.
    let waits = side == Side::Destination && !options.runs_by_itself();
    qmp.migrate_set_capabilities(&[
        (EVENTS, true),
        (X_IGNORE_SHARED, false),
        (PAUSE_BEFORE_SWITCHOVER, false),
        (LATE_BLOCK_ACTIVATE, waits),
        ("multifd", options.multifd_channels.is_some()),
        ("auto-converge", options.auto_converge),
        ("postcopy-ram", options.postcopy),
    ])
    .await?;
    let mut parameters = bandwidth(None);
    if options.multifd_channels.is_some() || options.compression.is_some() {
        parameters["multifd-channels"] =
            options.multifd_channels.unwrap_or(DEFAULT_CHANNELS).into();
        parameters["multifd-compression"] = options.compression.as_deref().unwrap_or("none").into();
    }
    if let Side::Source { downtime_ms } = side {
        // QEMU takes whole milliseconds, at least one.
        let millis = Duration::from_secs_f64(downtime_ms / 1e3).as_millis().max(1);
        parameters["downtime-limit"] = u64::try_from(millis).unwrap_or(u64::MAX).into();
    }
    qmp.migrate_set_parameters(parameters).await
}

/// Returns QEMU's parameters for a bandwidth limit. Post-copy has its own parameter, for which 0
/// means unlimited.
pub(super) fn bandwidth(limit_bytes_per_s: Option<u64>) -> serde_json::Value {
    json!({
        "max-bandwidth": limit_bytes_per_s.unwrap_or(UNLIMITED_BYTES_PER_S),
        "max-postcopy-bandwidth": limit_bytes_per_s.unwrap_or(0),
    })
}

/// Returns the events that have arrived and were not read.
pub(super) fn queued(events: &mut broadcast::Receiver<QmpEvent>) -> impl Iterator<Item = QmpEvent> {
    std::iter::from_fn(|| {
        loop {
            match events.try_recv() {
                Ok(event) => return Some(event),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => return None,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn queued_events_are_all_read_even_if_some_were_lost() {
        let (sender, mut events) = broadcast::channel(2);
        for name in ["RESUME", "MIGRATION", "STOP"] {
            let (data, at) = (serde_json::Value::Null, Instant::now());
            sender.send(QmpEvent { name: name.into(), data, at, emitted: None }).unwrap();
        }
        let names: Vec<_> = queued(&mut events).map(|event| event.name).collect();
        assert_eq!(names, ["MIGRATION", "STOP"]);
        assert_eq!(queued(&mut events).count(), 0);
        drop(sender);
        assert_eq!(queued(&mut events).count(), 0);
    }
}
