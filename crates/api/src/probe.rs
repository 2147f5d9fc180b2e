//! Probes of the lanes between two hosts: what a client asks of the source, and what the source asks of the destination.

use std::net::SocketAddr;

use godwit_types::probe::{CpuReading, ProbeProgress, ProbeReport};
use serde::{Deserialize, Serialize};

use crate::ApiError;

/// The memory of the VM that an estimate is for when a request names none: 16 GiB.
pub const DEFAULT_PROBE_GUEST_BYTES: u64 = 16 << 30;
/// How long each throughput is measured when a request does not say.
pub const DEFAULT_PROBE_SECONDS: f64 = 1.0;
/// The shortest and the longest that each throughput may be measured.
pub const PROBE_SECONDS: std::ops::RangeInclusive<f64> = 0.1..=30.0;

/// `POST /v1/probes` at the source. The answer is a stream of server-sent events, and the probe lives as long as it is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeRequest {
    /// The destination, one of the source's peers.
    pub to: String,
    /// The memory of the VM that is to be moved.
    #[serde(default = "default_guest_bytes")]
    pub guest_bytes: u64,
    /// How long each throughput is measured, within [`PROBE_SECONDS`].
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
    /// A probe with the defaults.
    pub fn to(host: impl Into<String>) -> Self {
        ProbeRequest {
            to: host.into(),
            guest_bytes: default_guest_bytes(),
            seconds: default_seconds(),
        }
    }
}

/// What the answer to a [`ProbeRequest`] sends: progress, then one report or one failure.
#[derive(Clone, Debug, PartialEq)]
pub enum ProbeEvent {
    /// What is measured now.
    Progress(ProbeProgress),
    /// What was found; the last event.
    Report(Box<ProbeReport>),
    /// Why nothing was found; the last event.
    Failed(ApiError),
}

/// `POST /v1/incoming-probes`: a source asks to be let in with the streams of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingProbeRequest {
    /// The source host's name; its certificate's counts where there is one.
    pub from: String,
    /// How long it may take in all.
    pub limit_ms: u64,
}

/// The destination expects the probe's streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingProbeAccepted {
    /// Names the probe; the streams' hello carries it.
    pub id: String,
    /// Where the streams are expected, an address a lane.
    pub addresses: Vec<SocketAddr>,
}

/// `GET /v1/incoming-probes/{id}?since_ns=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingProbeStatus {
    /// How busy the destination was, several times a second, the oldest first.
    pub readings: Vec<CpuReading>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_enough_for_a_request() {
        let request: ProbeRequest = serde_json::from_str(r#"{"to":"b"}"#).unwrap();
        assert_eq!(request, ProbeRequest::to("b"));
        assert!(PROBE_SECONDS.contains(&request.seconds));
        assert!(serde_json::from_str::<ProbeRequest>(r#"{"to":"b","lanes":1}"#).is_err());
    }
}
