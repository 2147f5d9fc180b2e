//! What two agents say to each other before and beside a lane: `/v1/incoming` at the destination.

use std::net::{IpAddr, SocketAddr};

use godwit_qemu::ResolvedSpec;
use godwit_types::{EngineKind, Fault, Incarnation, Ownership, ReferenceUse};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::QemuEngineOptions;

/// `POST /v1/incoming`: a source asks for a shadow VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingRequest {
    /// The VM, nothing left to defaults.
    pub spec: ResolvedSpec,
    /// The life of the VM. Left out where it is not recorded, as releases without incarnations do.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// The generation of ownership that the destination gets.
    pub epoch: u64,
    /// The source host's name.
    pub from: String,
    /// The version of the source's QEMU, `MAJOR.MINOR.MICRO`.
    pub qemu_version: String,
    /// Who moves the memory.
    pub engine: EngineKind,
    /// Settings of QEMU's own migration: both sides must have the same.
    #[serde(default)]
    pub qemu: QemuEngineOptions,
    /// What pages may be told by; left out where it is nothing, as releases without references do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub references: Option<ReferenceUse>,
    /// For how long the shadow VM is kept after a cut of the link, in milliseconds; 0: not at all.
    #[serde(default)]
    pub cut_limit_ms: u64,
}

/// `POST /v1/incoming/{id}/resume`: the source's lane was cut, and it asks for another one. Answered with [`IncomingAccepted`], whose id is
/// for the new lane's hello alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingResume {
    /// The life of the VM.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// The generation of ownership that the destination gets.
    pub epoch: u64,
}

impl IncomingRequest {
    /// Returns the ownership that the destination gets.
    #[must_use]
    pub fn offered(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }
}

impl IncomingResume {
    /// Returns the ownership that the destination gets.
    #[must_use]
    pub fn offered(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }
}

impl PageInRequest {
    /// Returns the asked host's ownership.
    #[must_use]
    pub fn ownership(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }
}

/// The shadow VM is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingAccepted {
    /// Names the migration at the destination; the lane's hello carries it.
    pub id: String,
    /// Where the lane, or QEMU's own connection, is expected. Any of them will do.
    pub addresses: Vec<SocketAddr>,
    /// What pages may be told by, no more than was asked for; none by a release without references.
    #[serde(default)]
    pub references: Option<ReferenceUse>,
}

/// `POST /v1/incoming/checks` with an [`IncomingRequest`]: the VM could arrive, and nothing was made of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingChecked {
    /// Where lanes would be expected.
    pub addresses: Vec<IpAddr>,
}

/// Where a migration is, by the destination's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IncomingState {
    /// Waiting for the source, or receiving.
    Receiving,
    /// The guest runs here.
    Runs,
    /// It does not and will not run here.
    Refused,
    /// QEMU's post-copy broke off: the guest has begun to run here, and part of its memory is still at the source.
    Broken,
}

/// `POST /v1/incoming/{id}/run`: the source's word, by QEMU's own engine, that it has let go of the guest. Answered with
/// an [`IncomingStatus`] when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingRun {
    /// False: it was paused at the source and stays so.
    pub run: bool,
}

/// `GET /v1/incoming/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncomingStatus {
    /// Its name.
    pub id: String,
    pub vm: String,
    /// Its life: a state of another one is no answer.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// Where it is.
    pub state: IncomingState,
    /// Why it was refused.
    pub failure: Option<Fault>,
    /// When the vCPUs ran here, ns of the destination's clock `now_ns`; QEMU's own engine only.
    pub running_ns: Option<u64>,
    /// The destination's clock at the time of the answer, ns from a point of its own.
    pub now_ns: u64,
}

/// `POST /v1/page-ins/{name}`, asked by a source whose guest runs at the asked host while pages of it are still at the source: for
/// streams to bring them by, instead of those that were cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageInRequest {
    /// The life of the VM.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// The generation of the asked host's ownership.
    pub epoch: u64,
    /// The source host's name.
    pub from: String,
}

/// The answer to a [`PageInRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageInAnswer {
    /// Nothing is missing: the source may forget the guest.
    pub complete: bool,
    /// What the streams' hello carries.
    #[serde(default)]
    pub id: Option<String>,
    /// Where they are expected.
    #[serde(default)]
    pub addresses: Vec<SocketAddr>,
}

/// What a VM that runs already lacks of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PageInState {
    /// Pages that are still at the source.
    pub missing_pages: u64,
    /// Whether they come at the moment: not while the link to the source is cut.
    pub connected: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_that_is_not_recorded_is_not_sent() {
        // As releases without incarnations send it, and as they take it: they refuse fields that they do not know.
        let older = r#"{"epoch":2,"from":"a"}"#;
        let request: PageInRequest = serde_json::from_str(older).unwrap();
        assert!(request.incarnation.is_unrecorded());
        assert_eq!(serde_json::to_string(&request).unwrap(), older);
        let resume: IncomingResume = serde_json::from_str(r#"{"epoch":2}"#).unwrap();
        assert_eq!(serde_json::to_string(&resume).unwrap(), r#"{"epoch":2}"#);

        let named = IncomingResume { incarnation: Incarnation::new(7), ..resume };
        let text = serde_json::to_string(&named).unwrap();
        assert!(text.contains("00000000000000000000000000000007"), "{text}");
        assert_eq!(serde_json::from_str::<IncomingResume>(&text).unwrap(), named);
    }
}
