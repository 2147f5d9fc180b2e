//! Requests between two agents before and beside a lane: `/v1/incoming` at the destination.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use godwit_qemu::{PciFunction, ResolvedSpec};
use godwit_types::{ContentKind, EngineKind, Fault, Incarnation, Ownership, ReferenceUse};
use serde::{Deserialize, Serialize};

use crate::QemuEngineOptions;

/// Request of `POST /v1/incoming`: a source requests a shadow VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingRequest {
    /// Specification of the VM, with all defaults filled in.
    pub spec: ResolvedSpec,
    /// Incarnation of the VM. Omitted if it is not recorded, as in releases without incarnations.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// Ownership generation that the destination receives.
    pub epoch: u64,
    /// Name of the source host.
    pub from: String,
    /// Version of the source's QEMU, `MAJOR.MINOR.MICRO`.
    pub qemu_version: String,
    /// Engine that transfers the memory.
    pub engine: EngineKind,
    /// Settings of QEMU's built-in migration; both sides must use the same.
    #[serde(default)]
    pub qemu: QemuEngineOptions,
    /// Memory that pages may refer to. Omitted if there is none, as in releases without references.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub references: Option<ReferenceUse>,
    /// How long the shadow VM is kept after the link is interrupted, in milliseconds; 0: it is
    /// removed.
    #[serde(default)]
    pub cut_limit_ms: u64,
    /// Firmware in the VM's flash; omitted for a BIOS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<IncomingFirmware>,
    /// Where the source's PCI devices are mapped, so that the shadow need not map them during the
    /// pause. Empty if unknown. A destination of an earlier release refuses the field; the request
    /// is then sent without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pci: Vec<PciFunction>,
    /// The guest runs in another program's QEMU, which an adoption moves by QEMU's built-in
    /// migration. The agents carry its stream over a lane, and the destination's QEMU must not be
    /// older. A destination of an earlier release refuses the field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relayed: bool,
    /// ID of the transfer whose images are the VM's disks ([`ArrivingDisks`]); absent if no disks
    /// travel. A destination of an earlier release refuses the field.
    ///
    /// [`ArrivingDisks`]: crate::ArrivingDisks
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<String>,
    /// ID of the attempt, 128 random bits in hexadecimal. A request that is repeated because its
    /// answer was lost gets the answer of the first one, whose shadow waits for `cut_limit_ms`
    /// longer. Absent if the request is not repeated. A destination of an earlier release refuses
    /// the field; the request is then sent without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<String>,
    /// Names of the block devices of disks and CDs that do not travel, by path: LVM UUIDs, WWNs.
    /// Only names that no other device has. The destination refuses a path that is another device
    /// there. One of an earlier release refuses the field; the request is then sent without.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<PathBuf, String>,
}

/// Firmware in the flash of an arriving VM. QEMU's stream has its content at the switchover.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingFirmware {
    /// Size of the code.
    pub code_bytes: u64,
    /// Size of the variables.
    pub variables_bytes: u64,
    /// The variables as they are now, in Base64; empty in a check. A guest that arrives paused
    /// keeps these until it runs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub variables: String,
}

/// Request of `POST /v1/incoming/{id}/resume`: the source's lane was interrupted, and it requests
/// another one. The response is an [`IncomingAccepted`] whose ID is only for the hello of the new
/// lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingResume {
    /// Incarnation of the VM.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// Ownership generation that the destination receives.
    pub epoch: u64,
}

impl IncomingRequest {
    /// Returns the ownership that the destination receives.
    #[must_use]
    pub fn offered(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }

    /// Returns the request without the fields that a destination of an earlier release refuses,
    /// and which it can do without. `None`: it has none of them.
    #[must_use]
    pub fn for_earlier_release(&self) -> Option<IncomingRequest> {
        let earlier = IncomingRequest {
            pci: Vec::new(),
            attempt: None,
            devices: BTreeMap::new(),
            ..self.clone()
        };
        (earlier != *self).then_some(earlier)
    }
}

impl IncomingResume {
    /// Returns the ownership that the destination receives.
    #[must_use]
    pub fn offered(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }
}

impl PageInRequest {
    /// Returns the ownership of the addressed host.
    #[must_use]
    pub fn ownership(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }
}

/// Response to an [`IncomingRequest`]: the shadow VM exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingAccepted {
    /// Migration ID at the destination; the lane's hello carries it.
    pub id: String,
    /// Addresses that accept the lane, or QEMU's own connection. Each of them works.
    pub addresses: Vec<SocketAddr>,
    /// Memory that pages may refer to, at most what was requested; absent from releases without
    /// references.
    #[serde(default)]
    pub references: Option<ReferenceUse>,
    /// What is offered for references, in the order of the numbers of the contents, from 1 on;
    /// empty from releases that offer memory alone. Content beyond the list is memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contents: Vec<OfferedContent>,
}

/// Content that a destination offers for references.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedContent {
    /// What it is.
    pub kind: ContentKind,
    /// Rate at which its file was read, bytes per second; absent if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_s: Option<u64>,
}

/// Response of `POST /v1/incoming/checks` with an [`IncomingRequest`]: the VM could arrive. Nothing
/// was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingChecked {
    /// Addresses that would accept lanes.
    pub addresses: Vec<IpAddr>,
}

/// State of a migration, as the destination reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IncomingState {
    /// The destination waits for the source or receives.
    Receiving,
    /// The guest runs here.
    Runs,
    /// The guest does not run here and never will.
    Refused,
    /// QEMU's post-copy was interrupted: the guest has started here, and part of its memory is
    /// still at the source.
    Broken,
}

/// Request of `POST /v1/incoming/{id}/run`, for QEMU's built-in engine: the source has released the
/// guest. The response is an [`IncomingStatus`], sent when the request is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IncomingRun {
    /// False: the guest was paused at the source and stays paused.
    pub run: bool,
}

/// Response of `GET /v1/incoming/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncomingStatus {
    /// Migration ID.
    pub id: String,
    pub vm: String,
    /// Incarnation of the VM. The caller must ignore the state of another incarnation.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// State of the migration.
    pub state: IncomingState,
    /// Whether QEMU has loaded the guest, which waits for the source's decision; QEMU's built-in
    /// engine only.
    #[serde(default)]
    pub loaded: bool,
    /// Reason why the migration was refused.
    pub failure: Option<Fault>,
    /// Time at which the vCPUs started here, in ns of the destination's clock `now_ns`; QEMU's
    /// built-in engine only.
    pub running_ns: Option<u64>,
    /// The destination's clock at the time of the response, in ns from an arbitrary origin.
    pub now_ns: u64,
}

/// Request of `POST /v1/page-ins/{name}`. The guest runs at the addressed host while the source
/// still has pages of it. The source requests new streams to replace the interrupted ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageInRequest {
    /// Incarnation of the VM.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// Ownership generation of the addressed host.
    pub epoch: u64,
    /// Name of the source host.
    pub from: String,
}

/// Response to a [`PageInRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageInAnswer {
    /// No page is missing: the source may discard the guest.
    pub complete: bool,
    /// ID that the streams' hello carries.
    #[serde(default)]
    pub id: Option<String>,
    /// Addresses that accept the streams.
    #[serde(default)]
    pub addresses: Vec<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_release_gets_a_request_without_what_it_can_do_without() {
        let request: IncomingRequest = serde_json::from_value(serde_json::json!({
            "spec": {
                "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1,
                "cpu_model": "Westmere-v1", "machine": "pc-q35-7.2", "accel": "tcg",
                "kernel": "/boot/vmlinuz", "uuid": "00000000-0000-0000-0000-000000000001",
            },
            "incarnation": Incarnation::new(7), "epoch": 2, "from": "a", "qemu_version": "7.2.0",
            "engine": "qemu", "relayed": true,
        }))
        .unwrap();
        assert_eq!(request.for_earlier_release(), None);
        let devices = BTreeMap::from([("/dev/vg0/web".into(), "LVM-web".to_owned())]);
        let named = IncomingRequest { devices, ..request.clone() };
        assert_eq!(named.for_earlier_release(), Some(request.clone()));
        let repeated = IncomingRequest { attempt: Some("f".repeat(32)), ..request.clone() };
        assert_eq!(repeated.for_earlier_release(), Some(request));
    }

    #[test]
    fn an_incarnation_that_is_not_recorded_is_not_sent() {
        // Releases without incarnations send and accept this form: they refuse unknown fields.
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
