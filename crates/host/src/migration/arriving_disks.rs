//! The destination's end of disks that travel with a VM: accepts the streams of their source, and
//! writes what they bring. The images are [`crate::agent`]'s.
//!
//! A stream's data counts when it is on the disk, which the source learns by a mark. A source whose
//! streams broke returns with the same transfer, gets other streams, and sends what is missing;
//! nothing of the earlier ones is written any more by then. When the last round has arrived, the
//! images are closed, so that the VM's shadow can lock them, and its guest may run.

mod alike;
mod writers;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ArrivingDisks, ArrivingDisksAccepted, ArrivingImage, ErrorCode};
use godwit_migration::Failure;
use godwit_migration::disks::{DiskRange, Lookup, StreamEnd, receive_disks};
use godwit_migration::drive::WelcomedStream;
use godwit_types::FailureCode;

use crate::agent::Agent;
use crate::disk_arrivals::{ArrivingStreams, DiskArrival, PreparedArrival};
use crate::doorman::{Doorman, Guard, fresh_id, listen};
use crate::failure::host_failed;
use crate::hold::hold;
use writers::Writers;

/// Time without a stream after which a source has to connect anew.
const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// Makes or finds the images for the disks of a VM, and awaits the streams of its source.
pub(crate) async fn accept_disks(
    agent: &Arc<Agent>,
    request: ArrivingDisks,
) -> Result<ArrivingDisksAccepted, ApiError> {
    let listeners = listeners(agent)?;
    let prepared = agent.prepare_arriving_disks(&request).await?;
    hold("disks-prepared");
    let begun = begin(agent, &prepared, request.from, listeners).await;
    if let Err(error) = &begun {
        tracing::warn!(vm = request.vm.as_str(), %error, "the disks of a VM cannot arrive");
        if prepared.is_new {
            agent.remove_unbegun(&prepared).await;
        }
    }
    begun
}

/// Checks whether the disks of a VM could arrive. Creates nothing; returns the images that there
/// would be.
pub(crate) async fn could_disks_arrive(
    agent: &Agent,
    request: &ArrivingDisks,
) -> Result<Vec<ArrivingImage>, ApiError> {
    drop(listeners(agent)?);
    agent.check_arriving_disks(request).await
}

fn listeners(agent: &Agent) -> Result<Vec<TcpListener>, ApiError> {
    if agent.config().migration_addresses.is_empty() {
        return Err(ApiError::new(
            ErrorCode::Preflight,
            format!(
                "cannot accept disks: host {} has no address for migrations",
                agent.config().name
            ),
            "set migration_addresses in its configuration",
        ));
    }
    listen(&agent.config().migration_addresses)
}

async fn begin(
    agent: &Arc<Agent>,
    prepared: &PreparedArrival,
    from: String,
    listeners: Vec<TcpListener>,
) -> Result<ArrivingDisksAccepted, ApiError> {
    let arrival = &prepared.arrival;
    let writers = Writers::open(agent.open_arrival(arrival).await?, &arrival.sizes())?;
    let alike = agent.find_alike(arrival, prepared.is_new).await;
    prepared.turn.refuse_cancelled(&arrival.record.vm)?;
    let has_alike = alike.iter().any(|images| !images.is_empty());
    let lookup = has_alike.then(|| Lookup::new(alike::readers(agent, alike), writers.readers()));
    let addresses: Result<Vec<SocketAddr>, _> =
        listeners.iter().map(TcpListener::local_addr).collect();
    let addresses =
        addresses.map_err(|error| host_failed("cannot read the lane's address", &error))?;
    let id = fresh_id()?;
    let doorman = Doorman::open(Guard { id, from, identity: agent.identity(), listeners })?;
    let present = arrival.present.lock().runs();
    let disks = arrival.record.disks.iter().zip(present).map(|(disk, present)| ArrivingImage {
        path: disk.path.clone(),
        backing: disk.backing.clone(),
        cluster: agent.cluster_of_image(&disk.path),
        present,
        identity: Some((disk.inode, disk.born_unix_ns)),
    });
    let accepted = ArrivingDisksAccepted {
        id: id.to_string(),
        addresses,
        disks: disks.collect(),
        references: lookup.is_some(),
    };
    let connection = Connection {
        agent: Arc::clone(agent),
        arrival: Arc::clone(arrival),
        streams: arrival.connect(),
        doorman,
        writers,
        lookup,
        sizes: arrival.sizes(),
    };
    agent.note_seen(arrival);
    let streams = Arc::clone(&connection.streams);
    let spawned = std::thread::Builder::new()
        .name(format!("disks-{}", arrival.record.vm))
        .spawn(move || connection.serve());
    if let Err(error) = spawned {
        streams.close();
        return Err(host_failed("cannot start a thread", &error));
    }
    Ok(accepted)
}

/// A connection of a transfer's source.
struct Connection {
    agent: Arc<Agent>,
    arrival: Arc<DiskArrival>,
    streams: Arc<ArrivingStreams>,
    doorman: Doorman,
    writers: Writers,
    /// Content that the source may refer to.
    lookup: Option<Lookup>,
    /// Sizes of the disks.
    sizes: Vec<u64>,
}

impl Connection {
    /// Receives until everything has arrived, or nobody sends any more.
    fn serve(self) {
        let this = &self;
        let _closed = Closing(&this.streams);
        std::thread::scope(|scope| {
            while !this.streams.is_done(IDLE_LIMIT) {
                let Some(stream) = this.doorman.let_in() else { continue };
                let Some(number) = this.streams.admit(stream.stream()) else {
                    stream.stream().close();
                    continue;
                };
                let thread = std::thread::Builder::new().name("disk-stream".to_owned());
                let spawned = thread.spawn_scoped(scope, move || this.receive(number, stream));
                if let Err(error) = spawned {
                    let detail = format!("cannot start a thread: {error}");
                    let failure = Failure::new(FailureCode::Internal, detail);
                    this.streams.note_end(number, Err(failure));
                }
            }
        });
        // After an end, this has been done.
        if let Err(failure) = self.writers.close() {
            tracing::warn!(vm = self.arrival.record.vm.as_str(), %failure, "images not closed");
        }
        self.agent.note_seen(&self.arrival);
    }

    fn receive(&self, number: u64, stream: WelcomedStream) {
        let vm = self.arrival.record.vm.as_str();
        let marked = |ranges: &[DiskRange]| {
            let parts = ranges.iter().map(|range| (range.disk, range.offset, range.bytes));
            self.arrival.present.lock().mark(parts.collect());
            Ok(())
        };
        let lookup = self.lookup.as_ref();
        let ended = match receive_disks(stream, self.writers.all(), &self.sizes, lookup, &marked) {
            StreamEnd::Ended { streams } => Ok(streams),
            StreamEnd::Broken(failure) => {
                tracing::warn!(vm, %failure, "a stream of disks broke");
                Err(failure)
            }
        };
        if self.streams.note_end(number, ended) {
            hold("disks-arrived");
            let outcome = self.finish();
            tracing::info!(vm, is_complete = outcome.is_ok(), "all disks have arrived");
            self.streams.complete(outcome);
        }
    }

    /// Closes the images and removes the record of the transfer, both at the same time: the guest
    /// is paused, and may run after both. Everything was flushed before the streams ended.
    ///
    /// An agent that ends here may leave the images without a record, as one that ends before the
    /// guest runs. No guest has run with them.
    fn finish(&self) -> Result<(), Failure> {
        let (begun, close) = (Instant::now(), || self.writers.close());
        let (closed, taken) = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("disks-close".to_owned());
            let closing = thread.spawn_scoped(scope, close);
            let taken = self.agent.take_disks(&self.arrival);
            let recorded = begun.elapsed();
            let closed = match closing {
                Ok(closing) => closing.join().unwrap_or_else(|_| Err(panicked())),
                // There is no thread to spare.
                Err(_) => close(),
            };
            let (vm, whole) = (self.arrival.record.vm.as_str(), begun.elapsed());
            tracing::debug!(vm, ?recorded, ?whole, "images closed and their record removed");
            (closed, taken)
        });
        closed?;
        taken.map_err(|error| Failure::new(FailureCode::DiskFailed, error.message))
    }
}

fn panicked() -> Failure {
    Failure::new(FailureCode::Internal, "a thread that closes disks panicked")
}

/// Notes that nothing is written any more, also after a panic.
struct Closing<'a>(&'a ArrivingStreams);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
