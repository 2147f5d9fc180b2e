//! High availability between manager and agent: renewals of a host's lease, heartbeats on
//! datastores, and VMs that were started elsewhere. docs/ha-terms.md explains them.
//!
//! The manager makes all requests. It fetches a renewal, and brings the answer with the renewal's
//! nonce; the lease counts from the moment at which the agent made the renewal.

use godwit_qemu::{Uuid, VmSpec};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most heartbeat datastores of a term.
pub const MOST_HEARTBEAT_DATASTORES: usize = 3;
/// Most heartbeats in one request to read.
pub const MOST_HEARTBEATS_READ: usize = 256;
/// Most VMs in one request to release.
pub const MOST_RELEASED: usize = 4096;
/// Part of the refusal of a start that was carried out before, when the VM has left the host since.
pub const START_CARRIED_OUT: &str = "this attempt was carried out";
/// Most VMs in a renewal whose protection is about to end.
pub const MOST_ENDING: usize = 64;
/// Most protected VMs of a host that a renewal names.
pub const MOST_HERE: usize = 512;
/// Most VMs of a datastore that agents restart among themselves.
pub const MOST_OWN_VMS: usize = 8;

/// Place of a host's heartbeat on a datastore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeartbeatSlot {
    /// Identity of the cluster.
    pub cluster: Uuid,
    /// Identity of the host in that cluster.
    pub host: Uuid,
    /// Identity of the datastore.
    pub datastore: Uuid,
}

/// Response of `POST /v1/ha/renewal`: the guard's message to its judge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HaRenewal {
    /// Number that the answer must repeat. Random, so that an answer to another agent's process is
    /// recognised.
    pub nonce: u64,
    /// Cluster and host of the newest term; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<TermHolder>,
    /// The newest term; 0 before the first one.
    pub term: u64,
    /// Whether none of its VMs runs, and none ever will.
    pub over: bool,
    /// Whether a watchdog of the kernel or the hardware is armed while a term is held.
    pub watchdog: bool,
    /// VMs of this host whose protection is about to end, at most [`MOST_ENDING`]. They end with
    /// the term until an answer to a renewal that names them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ending: Vec<Uuid>,
    /// All protected VMs that this host has, running or not, at most [`MOST_HERE`]. No other one
    /// gets a process here before an answer to a renewal that names it, except by
    /// [`StartProtected`]. Absent if they are not known, and from agents of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub here: Option<Vec<Uuid>>,
}

/// Cluster and host of a term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TermHolder {
    pub cluster: Uuid,
    pub host: Uuid,
}

/// Request of `POST /v1/ha/answer`: the judge's answer to a renewal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HaAnswer {
    /// The renewal's number.
    pub nonce: u64,
    /// Cluster and host that the answer is for.
    pub holder: TermHolder,
    pub verdict: HaVerdict,
}

/// What the judge says about a renewal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum HaVerdict {
    /// The host may hold this term.
    Granted {
        term: u64,
        /// Heartbeat datastores of the term, at most [`MOST_HEARTBEAT_DATASTORES`].
        datastores: Vec<Uuid>,
    },
    /// The term has ended; its VMs may run elsewhere.
    Ended { term: u64 },
    /// The judge never opened the renewal's term.
    Unknown,
    /// The host is in maintenance: it gives up the term if no protected VM is on it, and gets none
    /// until its maintenance ends. Otherwise this is a grant of the same term.
    Rest { term: u64 },
}

/// Request of `POST /v1/ha/forward`: one request of the manager to another host, which the manager
/// does not reach itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HaForward {
    /// Name of the other host, a peer of this agent.
    pub host: String,
    /// The answer to bring; absent: fetch a renewal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<HaAnswer>,
}

/// Response of `POST /v1/ha/forward`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HaForwarded {
    /// The renewal; absent if an answer was brought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal: Option<HaRenewal>,
}

/// Request of `POST /v1/ha/heartbeats/open`: a reader creates the file of another host's heartbeat
/// with sequence number 0 of this term, or replaces that of an earlier term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenHeartbeat {
    pub slot: HeartbeatSlot,
    pub term: u64,
}

/// Request of `POST /v1/ha/heartbeats/read`, at most [`MOST_HEARTBEATS_READ`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadHeartbeats {
    pub slots: Vec<HeartbeatSlot>,
}

/// What a reader found, in the order of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum HeartbeatReading {
    /// A heartbeat of the slot.
    Block { term: u64, sequence: u64 },
    /// An empty block.
    Empty,
    /// A block that is damaged, or belongs to another slot. Never a silence.
    Foreign { why: String },
    /// The block could not be read in time. Never a silence.
    Failed { why: String },
}

/// Request of `POST /v1/ha/start`: creates and starts a protected VM whose former host has failed.
/// The agent accepts it only while it holds the term. If the start fails, nothing remains. A VM of
/// that name and uuid that this host has already is started. A repetition of an attempt that this
/// host has carried out starts nothing: the VM may have left it since.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartProtected {
    pub spec: VmSpec,
    pub term: u64,
    /// ID of the attempt, the same in all of its repetitions; the nil one of managers of earlier
    /// versions, which is not remembered.
    #[serde(default)]
    pub attempt: Uuid,
}

/// Request of `POST /v1/ha/release`: VMs of ended terms of this host that were started elsewhere.
/// The agent deletes their definitions; disks stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseVms {
    /// At most [`MOST_RELEASED`].
    pub vms: Vec<ReleasedVm>,
}

/// A VM that was started elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleasedVm {
    pub name: String,
    /// Incarnation that this host had. Another VM of the name is left alone.
    pub incarnation: godwit_types::Incarnation,
    /// Host that runs it now.
    pub to: String,
}

/// How a host's guard stands to its newest term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HaStanding {
    /// Protected VMs may run.
    Held,
    /// The term is lost; protected VMs are being ended.
    Stopping,
    /// No protected VM runs.
    Over,
}

/// Response of `GET /v1/ha`: the guard of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HaHost {
    pub standing: HaStanding,
    /// The newest term; 0 before the first one.
    pub term: u64,
    /// Milliseconds until the lease runs out, if the term is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_left_ms: Option<u64>,
    /// Whether a watchdog of the kernel or the hardware is armed while a term is held.
    pub watchdog: bool,
    /// Whether the watchdog process answers, which ends protected VMs if the agent is dead.
    pub watchdog_process: bool,
    /// Milliseconds since a manager's last answer; absent without one since the agent's start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answered_ms_ago: Option<u64>,
    /// Heartbeats that could not be written since the agent's start.
    #[serde(default)]
    pub heartbeat_failures: u64,
    /// Names of VMs whose protection is about to end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ending: Vec<String>,
    /// Heartbeat datastores of the term, with the last failure of each.
    pub datastores: Vec<HeartbeatState>,
    /// Names of protected VMs that have a process.
    pub vms: Vec<String>,
    /// VMs that agents restart among themselves, of all datastores of this host; at most
    /// [`MOST_OWN_VMS`] of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<OwnVm>,
    /// Why the folder of such VMs on a datastore cannot be used, or not all of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_problems: Vec<String>,
}

/// How this host stands to a VM that agents restart among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OwnStanding {
    /// This host holds its term: it may run here.
    Held,
    /// This host has lost its term, and ends it.
    Stopping,
    /// Another host may run it, and this one watches that.
    Watched,
    /// Its host is silent, and only an operator can say that it is off.
    Doubtful,
    /// It moves, or has moved and not been found since. Nobody restarts it.
    Resting,
    /// A user has stopped it, or its last start failed.
    Stopped,
}

/// A VM that agents restart among themselves, as this host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OwnVm {
    /// Name of the VM.
    pub vm: String,
    #[schema(value_type = String)]
    pub uuid: Uuid,
    /// Identity of the datastore with its disks and terms.
    #[schema(value_type = String)]
    pub datastore: Uuid,
    /// Its newest term.
    pub term: u64,
    pub standing: OwnStanding,
    /// Identity of the host that claimed the term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub holder: Option<Uuid>,
    /// Name of that host, if the VM's record says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// What prevents its protection, or why it does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Request of `POST /v1/ha/own/{vm}/confirm-off`: an operator confirms that the host of this term
/// has no power. Response: [`HaHost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfirmOwnOff {
    /// The term, as `GET /v1/ha` shows it.
    pub term: u64,
}

/// A heartbeat datastore of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeartbeatState {
    /// Identity of the datastore.
    #[schema(value_type = String)]
    pub datastore: Uuid,
    /// Milliseconds since the start of the last confirmed write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_ms_ago: Option<u64>,
    /// Why the last write failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_manager_names_no_attempt() {
        let earlier: StartProtected =
            serde_json::from_str(r#"{"spec":{"name":"web"},"term":3}"#).unwrap();
        assert!(earlier.attempt.is_nil());
        let earlier = r#"{"nonce":1,"term":2,"over":true,"watchdog":false}"#;
        assert_eq!(serde_json::from_str::<HaRenewal>(earlier).unwrap().here, None);
        let unknown = r#"{"spec":{"name":"web"},"term":3,"force":true}"#;
        assert!(serde_json::from_str::<StartProtected>(unknown).is_err());
    }
}
