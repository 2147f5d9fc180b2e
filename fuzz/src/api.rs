//! Bodies of requests and responses, and events.

use godwit_api::{
    ApiError, CreateVm, EventParser, HostEvent, HostInfo, IncomingAccepted, IncomingChecked,
    IncomingProbeAccepted, IncomingProbeRequest, IncomingProbeStatus, IncomingRequest,
    IncomingResume, IncomingRun, IncomingStatus, Limits, MigrationAccepted, MigrationEvent,
    MigrationRequest, MigrationStatus, PageInAnswer, PageInRequest, ProbeEvent, ProbeRequest,
    Resolve, Resolved, SetLimit, SetPeers, StopVm, StreamEvent, VmInfo,
};
use godwit_migration::handover::Known;
use godwit_types::DryRun;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Types of a body, by the first byte of the input.
const BODIES: [fn(&[u8]); 30] = [
    same::<CreateVm>,
    same::<Resolve>,
    same::<StopVm>,
    read::<MigrationRequest>,
    same::<SetLimit>,
    read::<ProbeRequest>,
    same::<IncomingRequest>,
    same::<IncomingRun>,
    same::<PageInRequest>,
    same::<IncomingProbeRequest>,
    same::<IncomingAccepted>,
    same::<IncomingChecked>,
    read::<IncomingStatus>,
    same::<PageInAnswer>,
    same::<IncomingProbeAccepted>,
    read::<IncomingProbeStatus>,
    read::<HostInfo>,
    same::<VmInfo>,
    same::<MigrationAccepted>,
    read::<MigrationStatus>,
    same::<Limits>,
    same::<ApiError>,
    read::<DryRun>,
    events::<MigrationEvent>,
    events::<ProbeEvent>,
    same::<IncomingResume>,
    same::<Known>,
    same::<Resolved>,
    same::<SetPeers>,
    events::<HostEvent>,
];

pub fn run(data: &[u8]) {
    let Some((&which, body)) = data.split_first() else { return };
    BODIES[usize::from(which) % BODIES.len()](body);
}

/// Times are numbers whose last digit need not survive.
fn read<T: DeserializeOwned + Serialize>(body: &[u8]) {
    if let Ok(read) = serde_json::from_slice::<T>(body) {
        let written = serde_json::to_vec(&read).expect("serialisable");
        assert!(serde_json::from_slice::<T>(&written).is_ok(), "cannot read what was written");
    }
}

fn same<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(body: &[u8]) {
    if let Ok(read) = serde_json::from_slice::<T>(body) {
        let written = serde_json::to_vec(&read).expect("serialisable");
        assert_eq!(serde_json::from_slice::<T>(&written).expect("written before"), read);
    }
}

/// Checks that the events do not depend on the pieces in which they arrive.
fn events<T: StreamEvent>(body: &[u8]) {
    let mut parser = EventParser::default();
    let whole = parser.push(body);
    let mut parser = EventParser::default();
    let pieces: Result<Vec<_>, _> = body.chunks(7).map(|piece| parser.push(piece)).collect();
    assert_eq!(pieces.map(|events| events.concat()), whole);
    for event in whole.into_iter().flatten() {
        let _ = T::read(&event.name, &event.data);
    }
}
