//! Source of a probe: asks the destination, measures on a thread of its own, reports to the client,
//! and ends with it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{
    ApiError, Client, ClientError, ErrorCode, IncomingProbeAccepted, IncomingProbeRequest,
    IncomingProbeStatus, PROBE_SECONDS, ProbeRequest,
};
use godwit_lanes::Stream;
use godwit_migration::probe::{Cancel, Findings, ProbeExtent, ProbeJob, ProbePlan, probe};
use godwit_migration::{FIRST_STREAMS, Failure, millis};
use godwit_pki::Identity;
use godwit_types::{
    BitRate, FailureCode, Lane,
    probe::{CpuReading, LaneProbe, ProbeProgress, ProbeReport, STREAM_COUNTS},
};
use godwit_wire::MigrationId;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::incoming::LONGEST;
use crate::agent::Agent;
use crate::failure::{host_failed, of_peer};
use crate::network;
use crate::probes::Turn;

/// Time for a lane beside its throughput runs; searching for a packet size that is lost takes the
/// longest.
const LANE_LIMIT: Duration = Duration::from_secs(45);
/// Duration of each throughput run of a brief probe.
const BRIEF_SECONDS: f64 = 0.4;
/// Time for a throughput run beside the measured time.
const RUN_LIMIT: Duration = Duration::from_secs(10);

/// An event of a probe for the client that began it. The last one is the report or the failure.
#[derive(Debug)]
pub(crate) enum ProbeEvent {
    Progress(ProbeProgress),
    Report(Box<ProbeReport>),
    Failed(ApiError),
}

/// A probe that its destination has accepted.
struct Outgoing {
    agent: Arc<Agent>,
    request: ProbeRequest,
    extent: ProbeExtent,
    peer: Client,
    accepted: IncomingProbeAccepted,
    id: MigrationId,
    begun: Instant,
    /// Held until the probe ends.
    turn: Turn,
}

/// Begins a probe and returns its events. The probe ends early when the receiver is dropped.
pub(crate) async fn begin(
    agent: Arc<Agent>,
    request: ProbeRequest,
) -> Result<mpsc::Receiver<ProbeEvent>, ApiError> {
    let (events, stream) = mpsc::channel(64);
    let (agreed, begun) = oneshot::channel();
    // In its own task: a client that disconnects must not leave a probe at the destination.
    tokio::spawn(async move {
        match ask(agent, request).await {
            Ok(outgoing) => {
                let _ = agreed.send(Ok(()));
                outgoing.run(events).await;
            }
            Err(error) => drop(agreed.send(Err(error))),
        }
    });
    begun.await.map_err(|error| host_failed("the probe's task ended", &error))??;
    Ok(stream)
}

/// Checks the request, and asks the destination to accept the streams.
async fn ask(agent: Arc<Agent>, request: ProbeRequest) -> Result<Outgoing, ApiError> {
    let (host, to) = (agent.config().name.clone(), request.to.clone());
    let invalid =
        |message, remedy: &str| Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
    if to == host {
        return invalid(format!("cannot probe host {host} from itself"), "name another host");
    }
    if !PROBE_SECONDS.contains(&request.seconds) {
        let (least, most) = (PROBE_SECONDS.start(), PROBE_SECONDS.end());
        let remedy = format!("use {least} to {most}");
        return invalid(
            format!("cannot measure each throughput for {} seconds", request.seconds),
            &remedy,
        );
    }
    if request.guest_bytes == 0 {
        return invalid(
            "cannot predict the migration of a VM without memory".to_owned(),
            "give its memory size, such as 16GiB",
        );
    }
    let peer = agent.peer(&to)?;
    let turn = super::take_turn(&agent, format!("host {host} probes host {to}"))?;
    let begun = Instant::now();
    let wanted = IncomingProbeRequest { from: host, limit_ms: longest_ms(request.seconds) };
    let accepted: IncomingProbeAccepted =
        peer.post("/v1/incoming-probes", &wanted).await.map_err(|error| refused(&to, error))?;
    let Ok(id) = accepted.id.parse() else {
        let remedy = "install compatible releases of the agent on both hosts";
        return Err(ApiError::new(
            ErrorCode::PeerVersion,
            format!("cannot probe host {to}: it returned an invalid probe ID"),
            remedy,
        ));
    };
    Ok(Outgoing { agent, request, extent: ProbeExtent::Full, peer, accepted, id, begun, turn })
}

/// Returns the longest time that the destination must wait, for as many lanes as hosts have.
fn longest_ms(seconds: f64) -> u64 {
    const LANES: u32 = 8;
    let run = Duration::from_secs_f64(seconds) + RUN_LIMIT;
    let runs = u32::try_from(STREAM_COUNTS.len()).unwrap_or(u32::MAX);
    let limit = ((LANE_LIMIT + run * runs) * LANES).min(LONGEST);
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

/// Returns why the destination does not take part.
fn refused(host: &str, error: ClientError) -> ApiError {
    of_peer(host, error, |error| match error.code {
        // An older release: its API does not know the request, or who may send it.
        ErrorCode::NotFound | ErrorCode::Forbidden => {
            let message =
                format!("cannot probe host {host}: its release has no probes ({})", error.message);
            ApiError::new(ErrorCode::PeerVersion, message, format!("upgrade Godwit on host {host}"))
        }
        code => ApiError::new(code, format!("host {host}: {}", error.message), error.remedy),
    })
}

/// Runs a short probe for a prediction and records its result; `streams`: fixed number of streams
/// for each lane.
pub(crate) async fn brief(
    agent: &Arc<Agent>,
    to: &str,
    streams: Option<u32>,
) -> Result<ProbeReport, ApiError> {
    let request = ProbeRequest { seconds: BRIEF_SECONDS, ..ProbeRequest::to(to) };
    let extent = streams.map_or(ProbeExtent::Brief, ProbeExtent::Fixed);
    let outgoing = Outgoing { extent, ..ask(Arc::clone(agent), request).await? };
    match outgoing.measured(|_| {}, std::future::pending()).await {
        Some(outcome) => outcome,
        None => Err(ApiError::new(ErrorCode::Cancelled, "the client ended the probe", "")),
    }
}

impl Outgoing {
    async fn run(self, events: mpsc::Sender<ProbeEvent>) {
        let (sender, left) = (events.clone(), events.clone());
        // A client that reads slowly misses some events.
        let progress = move |progress: ProbeProgress| {
            drop(sender.try_send(ProbeEvent::Progress(progress)));
        };
        let event = match self.measured(progress, left.closed()).await {
            Some(Ok(report)) => ProbeEvent::Report(Box::new(report)),
            Some(Err(error)) => ProbeEvent::Failed(error),
            None => return,
        };
        let _ = events.send(event).await;
    }

    /// Measures until the end, or until the client has gone; `None` then.
    async fn measured(
        self,
        progress: impl Fn(ProbeProgress) + Send + Sync + 'static,
        left: impl Future<Output = ()>,
    ) -> Option<Result<ProbeReport, ApiError>> {
        let (to, from) = (self.request.to.clone(), self.agent.config().name.clone());
        tracing::info!(to, probe = self.accepted.id, "probe begins");
        let (peer, path) = (self.peer.clone(), format!("/v1/incoming-probes/{}", self.accepted.id));
        let cancel = Arc::new(Cancel::default());
        *self.agent.probes().outgoing.lock() = Some(Arc::clone(&cancel));
        let agent = Arc::clone(&self.agent);
        let mut measured = self.on_a_thread(Arc::clone(&cancel), progress);
        let outcome = tokio::select! {
            outcome = &mut measured => Some(outcome),
            () = left => None,
        };
        cancel.ask("the client ended the probe");
        *agent.probes().outgoing.lock() = None;
        // The probe is over in any case. A destination that has ended it already has nothing left
        // to end.
        if let Err(error) = peer.delete(&path).await {
            tracing::debug!(%error, "the destination no longer has the probe");
        }
        match outcome {
            Some(Ok(Ok(report))) => {
                tracing::info!(from, to, limit = ?report.limit, "probe ended");
                agent.lanes_seen().probed(&report);
                Some(Ok(report))
            }
            Some(Ok(Err(error))) => {
                tracing::warn!(to, %error, "probe failed");
                Some(Err(error))
            }
            Some(Err(error)) => {
                Some(Err(host_failed("the thread of the probe ended without a result", &error)))
            }
            None => {
                tracing::info!(to, "probe ended by its client");
                None
            }
        }
    }

    /// Measures on a thread of its own, because sockets block. The thread ends soon after `cancel`.
    fn on_a_thread(
        self,
        cancel: Arc<Cancel>,
        progress: impl Fn(ProbeProgress) + Send + Sync + 'static,
    ) -> oneshot::Receiver<Result<ProbeReport, ApiError>> {
        let (done, measured) = oneshot::channel();
        let runtime = Handle::current();
        let body = move || drop(done.send(self.measure(&cancel, &progress, &runtime)));
        // If no thread starts, `done` is dropped and the receiver reports the failure.
        if let Err(error) = std::thread::Builder::new().name("probe-out".to_owned()).spawn(body) {
            tracing::error!(%error, "cannot start a thread");
        }
        measured
    }

    fn measure(
        self,
        cancel: &Cancel,
        progress: &(dyn Fn(ProbeProgress) + Sync),
        runtime: &Handle,
    ) -> Result<ProbeReport, ApiError> {
        let Outgoing { agent, request, extent, peer, accepted, id, begun, turn } = self;
        let identity = agent.identity();
        let secure = identity.as_ref().map(|identity: &Identity| {
            |stream: Stream| -> Result<Stream, godwit_lanes::LaneError> {
                stream.secure(identity, &request.to)
            }
        });
        let interface_mtu =
            |address: IpAddr| runtime.block_on(network::mtu_of(address)).ok().flatten();
        let readings = |since_ns: u64| runtime.block_on(readings(&peer, &accepted.id, since_ns));
        let job = ProbeJob {
            lanes: runtime.block_on(lanes(&agent, &accepted)),
            id,
            plan: ProbePlan {
                time: Duration::from_secs_f64(request.seconds),
                guest_bytes: request.guest_bytes,
                usual_streams: u32::try_from(FIRST_STREAMS).unwrap_or(1),
                extent,
            },
            secure: secure.as_ref().map(|secure| secure as _),
            interface_mtu: &interface_mtu,
            readings: &readings,
            progress,
            cancel,
        };
        let found = probe(&job);
        drop(turn);
        let Findings { lanes, together, together_failure, limit, estimate } =
            found.map_err(|failure| failed(&request.to, &failure))?;
        Ok(ProbeReport {
            from: agent.config().name.clone(),
            to: request.to.clone(),
            encrypted: identity.is_some(),
            bandwidth_limit: limit_of_migrations(&agent, &lanes),
            lanes,
            together,
            together_failure,
            limit,
            estimate,
            probe_time_ms: millis(begun.elapsed()),
        })
    }
}

/// Returns the bandwidth limit that would apply to a migration over these lanes.
fn limit_of_migrations(agent: &Agent, lanes: &[LaneProbe]) -> Option<BitRate> {
    let pace = agent.limits().migration(None);
    lanes.iter().filter_map(|lane| lane.from).for_each(|from| pace.uses(from));
    pace.holding()
}

/// Returns the lanes that a migration would use.
async fn lanes(agent: &Agent, accepted: &IncomingProbeAccepted) -> Vec<Lane> {
    godwit_lanes::pair(
        &network::near(&agent.config().migration_addresses).await,
        &accepted.addresses,
    )
}

async fn readings(peer: &Client, id: &str, since_ns: u64) -> Result<Vec<CpuReading>, Failure> {
    let status: Result<IncomingProbeStatus, _> =
        peer.get(&format!("/v1/incoming-probes/{id}?since_ns={since_ns}")).await;
    match status {
        Ok(status) => Ok(status.readings),
        Err(error) if error.code() == Some(ErrorCode::NotFound) => {
            Err(Failure::new(FailureCode::UnknownMigration, "the destination has ended the probe"))
        }
        Err(error) => Err(Failure::new(FailureCode::Internal, error.to_string())),
    }
}

/// Returns the error of a probe that failed as a whole.
fn failed(host: &str, failure: &Failure) -> ApiError {
    let error = |code, remedy: &str| {
        ApiError::new(code, format!("host {host}: {}", failure.detail), remedy)
    };
    match failure.code {
        FailureCode::VersionMismatch => error(ErrorCode::PeerVersion, failure.code.remedy()),
        FailureCode::Cancelled => {
            error(ErrorCode::Cancelled, "probe again when no VM is migrating")
        }
        FailureCode::UnknownMigration => error(
            ErrorCode::HostFailed,
            "a migration began there, its agent restarted, or the probe took too long: probe again",
        ),
        _ => error(ErrorCode::PeerUnreachable, "check the agent on that host, and its log"),
    }
}
