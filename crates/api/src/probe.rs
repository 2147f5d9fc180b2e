//! Probes of the lanes between two hosts: requests of a client to the source, and of the source to
//! the destination.

use std::net::SocketAddr;

use godwit_types::probe::{CpuReading, ProbeProgress, ProbeReport};
use serde::{Deserialize, Serialize};

use crate::ApiError;

/// Default VM memory for an estimate: 16 GiB.
pub const DEFAULT_PROBE_GUEST_BYTES: u64 = 16 << 30;
/// Default duration of each throughput measurement, in seconds.
pub const DEFAULT_PROBE_SECONDS: f64 = 1.0;
/// Allowed duration of each throughput measurement, in seconds.
pub const PROBE_SECONDS: std::ops::RangeInclusive<f64> = 0.1..=30.0;

/// Request of `POST /v1/probes` at the source. The response is a stream of server-sent events. The
/// probe ends when the client stops reading.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeRequest {
    /// Destination host, one of the source's peers.
    pub to: String,
    /// Memory of the VM to be moved.
    #[serde(default = "default_guest_bytes")]
    pub guest_bytes: u64,
    /// Duration of each throughput measurement in seconds, within [`PROBE_SECONDS`].
    #[serde(default = "default_seconds")]
    pub seconds: f64,
}

fn default_guest_bytes() -> u64 {
    DEFAULT_PROBE_GUEST_BYTES
}

fn default_seconds() -> f64 {
    DEFAULT_PROBE_SECONDS
}

impl ProbeRequest {
    /// Creates a request with the default settings.
    pub fn to(host: impl Into<String>) -> Self {
        ProbeRequest {
            to: host.into(),
            guest_bytes: default_guest_bytes(),
            seconds: default_seconds(),
        }
    }
}

/// Event in the response to a [`ProbeRequest`]: progress, then one report or one failure.
#[derive(Clone, Debug, PartialEq)]
pub enum ProbeEvent {
    /// Measurement in progress.
    Progress(ProbeProgress),
    /// Result; the last event.
    Report(Box<ProbeReport>),
    /// Reason of the failure; the last event.
    Failed(ApiError),
}

/// Request of `POST /v1/incoming-probes`: a source announces the streams of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingProbeRequest {
    /// Name of the source host. If there is a certificate, its name is used instead.
    pub from: String,
    /// Longest total duration of the probe.
    pub limit_ms: u64,
}

/// Response to an [`IncomingProbeRequest`]: the destination expects the streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingProbeAccepted {
    /// ID of the probe; the streams' hello carries it.
    pub id: String,
    /// Addresses that accept the streams, one per lane.
    pub addresses: Vec<SocketAddr>,
}

/// Response of `GET /v1/incoming-probes/{id}?since_ns=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingProbeStatus {
    /// CPU load of the destination, several readings per second, oldest first.
    pub readings: Vec<CpuReading>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_needs_only_a_destination() {
        let request: ProbeRequest = serde_json::from_str(r#"{"to":"b"}"#).unwrap();
        assert_eq!(request, ProbeRequest::to("b"));
        assert!(PROBE_SECONDS.contains(&request.seconds));
        assert!(serde_json::from_str::<ProbeRequest>(r#"{"to":"b","lanes":1}"#).is_err());
    }
}
