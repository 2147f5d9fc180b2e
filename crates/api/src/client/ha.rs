//! Requests about high availability: the manager's, and an operator's about one host.

use bytes::Bytes;
use http::Method;
use serde::Serialize;

use super::{Client, STORAGE_LIMIT, segment};
use crate::{
    ClientError, ConfirmOwnOff, HaAnswer, HaForward, HaForwarded, HaHost, HaRenewal,
    HeartbeatReading, OpenHeartbeat, ReadHeartbeats, ReleaseVms, StartProtected, VmInfo,
};

impl Client {
    /// Returns the guard of the host.
    pub async fn ha(&self) -> Result<HaHost, ClientError> {
        self.get("/v1/ha").await
    }

    /// Fetches a renewal of the host's lease.
    pub async fn ha_renewal(&self) -> Result<HaRenewal, ClientError> {
        self.post("/v1/ha/renewal", &()).await
    }

    /// Brings the answer to a renewal.
    pub async fn ha_answer(&self, answer: &HaAnswer) -> Result<(), ClientError> {
        self.tell("/v1/ha/answer", answer).await
    }

    /// Has this host fetch a renewal of another host, or bring an answer to it.
    pub async fn ha_forward(&self, forward: &HaForward) -> Result<HaForwarded, ClientError> {
        self.post("/v1/ha/forward", forward).await
    }

    /// Opens a term's heartbeat of another host on a datastore of this one.
    pub async fn ha_open_heartbeat(&self, heartbeat: &OpenHeartbeat) -> Result<(), ClientError> {
        self.tell("/v1/ha/heartbeats/open", heartbeat).await
    }

    /// Reads heartbeats of other hosts; returns what was found in the order of the request.
    pub async fn ha_read_heartbeats(
        &self,
        slots: &ReadHeartbeats,
    ) -> Result<Vec<HeartbeatReading>, ClientError> {
        self.post("/v1/ha/heartbeats/read", slots).await
    }

    /// Starts a protected VM whose former host has failed.
    pub async fn ha_start(&self, request: &StartProtected) -> Result<VmInfo, ClientError> {
        self.with_patience(STORAGE_LIMIT).post("/v1/ha/start", request).await
    }

    /// Has the definitions of VMs deleted that were started elsewhere.
    pub async fn ha_release(&self, released: &ReleaseVms) -> Result<(), ClientError> {
        self.tell("/v1/ha/release", released).await
    }

    /// Confirms that the host of this term of a VM that agents restart is off: this host may start
    /// the VM.
    pub async fn ha_confirm_own_off(&self, vm: &str, term: u64) -> Result<HaHost, ClientError> {
        let path = format!("/v1/ha/own/{}/confirm-off", segment(vm));
        self.post(&path, &ConfirmOwnOff { term }).await
    }

    /// Sends `POST path`; the response has nothing to read.
    async fn tell(&self, path: &str, request: &(impl Serialize + Sync)) -> Result<(), ClientError> {
        let body = serde_json::to_vec(request).map_err(|error| self.protocol(error))?;
        self.send(Method::POST, path, Bytes::from(body)).await.map(drop)
    }
}
