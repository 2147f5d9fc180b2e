//! Guests of another program at a simulated host: one that can be adopted, and is at once.

use axum::Json;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::StatusCode;
use godwit_api::{
    AdoptGuest, Adoption, AdoptionState, ApiError, ErrorCode, ForeignGuest, ForeignPlace,
};
use godwit_types::Phase;

use super::{Answer, Refusal, body};

fn guest(from: ForeignPlace) -> ForeignGuest {
    ForeignGuest {
        from,
        name: "guest".to_owned(),
        uuid: None,
        state: "running".to_owned(),
        pid: Some(4711),
        memory_bytes: Some(1 << 30),
        vcpus: Some(1),
        findings: Vec::new(),
    }
}

pub(super) async fn found() -> Json<Vec<ForeignGuest>> {
    Json(vec![guest(ForeignPlace::Libvirt("guest".to_owned()))])
}

pub(super) async fn list() -> Json<Vec<Adoption>> {
    Json(Vec::new())
}

pub(super) async fn check(bytes: Bytes) -> Answer<ForeignGuest> {
    let request: AdoptGuest = body(&bytes)?;
    Ok(Json(guest(request.from)))
}

/// Answers as if the adoption was complete; no VM comes of it.
pub(super) async fn adopt(bytes: Bytes) -> Result<(StatusCode, Json<Adoption>), Refusal> {
    let request: AdoptGuest = body(&bytes)?;
    let adoption = Adoption {
        id: "adoption-1".to_owned(),
        from: request.from,
        vm: request.name.unwrap_or_else(|| "guest".to_owned()),
        state: AdoptionState::Completed,
        phase: Phase::Report,
        remaining_bytes: 0,
        total_bytes: 1 << 30,
        elapsed_ms: 1000.0,
        pause_ms: Some(20.0),
        notes: Vec::new(),
        findings: Vec::new(),
        error: None,
    };
    Ok((StatusCode::ACCEPTED, Json(adoption)))
}

pub(super) async fn none(Path(id): Path<String>) -> Refusal {
    let message = format!("no adoption \"{id}\" on this host");
    ApiError::new(ErrorCode::NotFound, message, "").into()
}
