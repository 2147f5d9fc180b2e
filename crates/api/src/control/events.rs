//! Events of `GET /api/v1/events`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::Ref;
use utoipa::openapi::schema::{AnyOfBuilder, Object, ObjectBuilder, Schema, Type};

use super::alarms::Alarm;
use super::baseline::CpuBaseline;
use super::hosts::HostSummary;
use super::journal::JournalEntry;
use super::limits::MoveLimits;
use super::moves::{Drain, Move};
use super::rules::RuleInfo;
use super::vms::{NameConflict, VmSummary};

/// A numbered change of the cluster. A client that reconnects continues after the last number it
/// received (`Last-Event-ID`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "number": 1201, "unix_ms": 1_795_444_970_253_u64, "kind": "vm-gone", "data": "web"
}))]
pub struct ClusterEvent {
    /// Number of the event. It increases by one and restarts with each new leader.
    pub number: u64,
    /// Time of the change, in milliseconds since 1970.
    pub unix_ms: u64,
    #[serde(flatten)]
    pub change: Change,
}

/// Kind of a change, with the changed object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", content = "data", rename_all = "kebab-case")]
pub enum Change {
    /// A host is new or has changed.
    Host(Box<HostSummary>),
    /// A host was removed; its name.
    HostGone(String),
    /// A VM is new or has changed.
    Vm(Box<VmSummary>),
    /// A VM no longer exists; its name.
    VmGone(String),
    /// Other hosts claim the name of a VM without an explanation, or the claims have changed.
    NameConflict(Box<NameConflict>),
    /// A name conflict is over; the name of the VM.
    NameConflictGone(String),
    /// A move is new or has changed.
    Move(Box<Move>),
    /// A drain is new or has changed.
    Drain(Box<Drain>),
    /// A rule is new, with its current state. Later changes follow from the events of the VMs.
    Rule(Box<RuleInfo>),
    /// A rule was removed; its name.
    RuleGone(String),
    /// The cluster's CPU baseline was set. Hosts that do not satisfy it get events of their own.
    CpuBaseline(Box<CpuBaseline>),
    /// The cluster's CPU baseline was removed.
    CpuBaselineGone,
    /// The limits for moves have changed. Limits of single hosts are in the hosts' own events.
    Limits(Box<MoveLimits>),
    /// An alarm was raised, has changed or was acknowledged; or it was cleared, if it has
    /// `cleared_unix_ms`.
    Alarm(Box<Alarm>),
    /// The journal has a new entry.
    Journal(Box<JournalEntry>),
}

/// A change, as sent in the stream of server-sent events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "event": "vm-gone", "id": "1201",
    "data": "{\"number\":1201,\"unix_ms\":1795444970253,\"kind\":\"vm-gone\",\"data\":\"web\"}"
}))]
pub struct StreamedEvent {
    /// Kind of the change; `missed` if changes were missed that are no longer stored: query
    /// everything again.
    pub event: String,
    /// Number of the change, for resuming after it (`Last-Event-ID`).
    pub id: String,
    /// A [`ClusterEvent`] as JSON; `null` if changes were missed.
    #[schema(schema_with = event_as_text)]
    pub data: String,
}

fn event_as_text() -> Object {
    let event = AnyOfBuilder::new()
        .item(Ref::from_schema_name("ClusterEvent"))
        .item(ObjectBuilder::new().schema_type(Type::Null));
    ObjectBuilder::new()
        .schema_type(Type::String)
        .content_media_type("application/json")
        .content_schema(Some(Schema::AnyOf(event.build())))
        .description(Some("A ClusterEvent as JSON; null if changes were missed."))
        .build()
}
