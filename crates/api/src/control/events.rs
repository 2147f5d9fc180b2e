//! What `GET /api/v1/events` sends.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::Ref;
use utoipa::openapi::schema::{AnyOfBuilder, Object, ObjectBuilder, Schema, Type};

use super::{CpuBaseline, Drain, HostSummary, Move, MoveLimits, NameConflict, RuleInfo, VmSummary};

/// A change of the cluster, with its number: who was cut off goes on behind the last one that came (`Last-Event-ID`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "number": 1201, "unix_ms": 1_795_444_970_253_u64, "kind": "vm-gone", "data": "web"
}))]
pub struct ClusterEvent {
    /// Grows by one with each; begins anew with each manager that leads.
    pub number: u64,
    /// When, milliseconds since 1970.
    pub unix_ms: u64,
    #[serde(flatten)]
    pub change: Change,
}

/// What changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", content = "data", rename_all = "kebab-case")]
pub enum Change {
    /// A host is new or has changed.
    Host(Box<HostSummary>),
    /// A host is known no more, by its name.
    HostGone(String),
    /// A VM is new or has changed.
    Vm(Box<VmSummary>),
    /// A VM is known no more, by its name.
    VmGone(String),
    /// Other hosts than its own claim a VM's name, and nothing explains it, or other ones than before.
    NameConflict(Box<NameConflict>),
    /// Only its own host claims a VM's name again, by that name.
    NameConflictGone(String),
    /// A move is new or has changed.
    Move(Box<Move>),
    /// A drain is new or has changed.
    Drain(Box<Drain>),
    /// A rule is new, and whether it is kept now: what VMs do later, their own events tell.
    Rule(Box<RuleInfo>),
    /// A rule is no more, by its name.
    RuleGone(String),
    /// The cluster's CPU baseline was set; hosts that fall short of it from now on are told as such.
    CpuBaseline(Box<CpuBaseline>),
    /// The cluster has no CPU baseline any more.
    CpuBaselineGone,
    /// Other limits hold for moves: those of single hosts their own events tell.
    Limits(Box<MoveLimits>),
}

/// A change as it stands in the stream of server-sent events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "event": "vm-gone", "id": "1201", "data": "{\"number\":1201,\"unix_ms\":1795444970253,\"kind\":\"vm-gone\",\"data\":\"web\"}"
}))]
pub struct StreamedEvent {
    /// The kind of the change; `missed` where changes were missed that are kept no more: ask for everything anew.
    pub event: String,
    /// The change's number, to go on behind it (`Last-Event-ID`).
    pub id: String,
    /// A [`ClusterEvent`] as JSON; `null` where changes were missed.
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
        .description(Some("A ClusterEvent as JSON; null where changes were missed."))
        .build()
}
