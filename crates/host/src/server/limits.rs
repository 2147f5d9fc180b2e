//! Requests about bandwidth limits of a migration, the host and its lanes; for operators only.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::{get, put};
use axum::{Json, Router};
use godwit_api::{ApiError, ErrorCode, LimitOf, Limits, MigrationStatus, SetLimit};

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/limits", get(show))
        .route("/v1/limits/host", put(set_host))
        .route("/v1/limits/migration", put(set_migration_default))
        .route("/v1/limits/lanes/{address}", put(set_lane))
        .route("/v1/migrations/{id}/limit", put(set_migration))
}

async fn show(State(agent): State<Arc<Agent>>) -> Json<Limits> {
    Json(agent.limits().show())
}

fn set(agent: &Agent, of: LimitOf, bytes: &Bytes) -> Result<Json<Limits>, Refusal> {
    let SetLimit { limit } = body(bytes)?;
    Ok(Json(agent.limits().set(of, limit)?))
}

async fn set_host(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<Json<Limits>, Refusal> {
    set(&agent, LimitOf::Host, &bytes)
}

async fn set_migration_default(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<Json<Limits>, Refusal> {
    set(&agent, LimitOf::Migration, &bytes)
}

async fn set_lane(
    State(agent): State<Arc<Agent>>,
    Path(address): Path<String>,
    bytes: Bytes,
) -> Result<Json<Limits>, Refusal> {
    let address: IpAddr = address.parse().map_err(|_| {
        let message = format!("\"{address}\" is not a valid IP address");
        let remedy = "name a lane by its address on this host, one of migration_addresses";
        ApiError::new(ErrorCode::InvalidRequest, message, remedy)
    })?;
    set(&agent, LimitOf::Lane(address), &bytes)
}

async fn set_migration(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
    bytes: Bytes,
) -> Result<Json<MigrationStatus>, Refusal> {
    let SetLimit { limit } = body(&bytes)?;
    Ok(Json(agent.migrations().limit(&id, limit)?))
}
