//! Client of a manager, over its root-only socket or with a token.

mod adoption;
mod alarms;
mod clones;
mod datastores;
mod ha;
mod imports;
mod journal;
mod load;

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_pki::Trust;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::access::{AuditEntry, CreateToken, CreatedToken, TokenInfo};
use super::baseline::{BaselineVm, CpuBaselineChange, CpuBaselineInfo, SetCpuBaseline};
use super::certificates::{CertificateInfo, RevokedCertificates};
use super::cluster::Cluster;
use super::following::ManagerEvents;
use super::hosts::{AddHost, HostSummary, ManagedHost, UpdateHost};
use super::join::{JoinGrant, JoinRequest, JoinToken, JoinTokenInfo, Joined};
use super::limits::{MoveLimits, UpdateLimits};
use super::moves::{CreateDrain, CreateMove, Drain, Move};
use super::page::Page;
use super::preflight::{Preflight, preflight_query};
use super::problem::{Problem, ProblemCode};
use super::rules::{CreateRule, RuleInfo};
use super::shares::ManagedNetwork;
use super::vms::{
    BindVm, ChangeManagedVm, ChangedVm, CreateManagedVm, HostedVm, ManagedVm, NameConflict,
    StartManagedVm, StopManagedVm, VmSummary,
};
use crate::client::{STORAGE_LIMIT, segment};
use crate::endpoint::UNTRUSTED_REMEDY;
use crate::{
    Client, ClientError, CreateDisk, DiskInfo, DiskList, DriveChange, Endpoint, Events, FreezeVm,
    GuestInfo, NicChange, RenameVm, ResizeDisk, SetNicLink, TravellingDisks,
};

/// Environment variable with the token. On a command line, every user of the machine could read it.
pub const TOKEN_VARIABLE: &str = "GODWIT_TOKEN";

/// Maximum number of attempts for a request without a response.
const MOST_SENT: u32 = 5;
/// Longest time that a manager may be unavailable after a request's connection was lost: three
/// times what a failover needs (docs/manager.md).
const LONGEST_AWAY: Duration = Duration::from_secs(15);
/// Delay before a repeated request while the first one is still being carried out.
const BETWEEN_SENDS: Duration = Duration::from_millis(500);

/// Reason why a request has no usable response.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The manager is unreachable.
    #[error("{} ({})", self.detail(), self.remedy())]
    Unreachable {
        /// Address of the manager.
        endpoint: Endpoint,
        /// Error of the connection.
        why: String,
        /// Whether the manager's certificate is not trusted.
        is_untrusted: bool,
    },
    /// The manager refused the request.
    #[error(transparent)]
    Refused(#[from] Problem),
    /// The response does not come from a manager.
    #[error("{} ({})", self.detail(), self.remedy())]
    Protocol {
        /// Address of the responder.
        endpoint: Endpoint,
        /// What is wrong with the response.
        why: String,
    },
}

impl ManagerError {
    /// Returns what failed and why, in one line.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            ManagerError::Unreachable { endpoint, why, .. } => {
                format!("cannot reach the manager at {endpoint}: {why}")
            }
            ManagerError::Refused(problem) => problem.detail.clone(),
            ManagerError::Protocol { endpoint, why } => {
                format!("{endpoint} does not respond as a Godwit manager: {why}")
            }
        }
    }

    /// Returns how to fix it.
    #[must_use]
    pub fn remedy(&self) -> &str {
        match self {
            ManagerError::Unreachable { is_untrusted: true, .. } => UNTRUSTED_REMEDY,
            ManagerError::Unreachable { endpoint: Endpoint::Unix(_), .. } => {
                "start the manager (`systemctl start godwit-control`, or `godwit control run`) and \
                 run this command as root, or name another with --manager or GODWIT_MANAGER"
            }
            ManagerError::Unreachable { .. } => {
                "check the network, start the manager there (`systemctl start godwit-control`), or \
                 name another with --manager or GODWIT_MANAGER"
            }
            ManagerError::Refused(problem) => &problem.remedy,
            ManagerError::Protocol { .. } => {
                "check the address and the version of the manager there"
            }
        }
    }
}

/// Client of one manager. Cheap to clone; keeps no connection.
#[derive(Clone, Debug)]
pub struct ManagerClient {
    client: Client,
    token: Option<String>,
}

impl ManagerClient {
    /// Creates a client of the manager at `endpoint`, with a token unless it is the manager's
    /// socket.
    #[must_use]
    pub fn new(endpoint: Endpoint, token: Option<String>) -> ManagerClient {
        ManagerClient { client: Client::new(endpoint), token }
    }

    /// Creates a client over TLS. The manager must present a certificate for this name from a
    /// trusted authority.
    #[must_use]
    pub fn trusting(
        endpoint: Endpoint,
        trust: &Trust,
        manager: &str,
        token: Option<String>,
    ) -> ManagerClient {
        ManagerClient { client: Client::trusting(endpoint, trust, manager), token }
    }

    /// Returns the summary of the cluster.
    pub async fn cluster(&self) -> Result<Cluster, ManagerError> {
        self.get("/api/v1/cluster").await
    }

    /// Lists every host, by name.
    pub async fn hosts(&self) -> Result<Vec<HostSummary>, ManagerError> {
        self.all("/api/v1/hosts").await
    }

    pub async fn host(&self, name: &str) -> Result<ManagedHost, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}", segment(name))).await
    }

    /// Adds a host whose agent already has a certificate.
    pub async fn add_host(&self, host: &AddHost) -> Result<ManagedHost, ManagerError> {
        self.ask(Method::POST, "/api/v1/hosts", host).await
    }

    /// Changes the configuration of a host.
    pub async fn update_host(
        &self,
        name: &str,
        change: &UpdateHost,
    ) -> Result<ManagedHost, ManagerError> {
        self.ask(Method::PATCH, &format!("/api/v1/hosts/{}", segment(name)), change).await
    }

    /// Removes a host from the cluster; its guests keep running.
    pub async fn forget_host(&self, name: &str, force: bool) -> Result<(), ManagerError> {
        self.delete(&format!("/api/v1/hosts/{}?force={force}", segment(name))).await
    }

    /// Lists the certificates of hosts and all revoked ones, by serial number.
    pub async fn certificates(&self) -> Result<Vec<CertificateInfo>, ManagerError> {
        self.get("/api/v1/certificates").await
    }

    /// Returns the list of revoked certificates, as every agent receives it.
    pub async fn revocations(&self) -> Result<RevokedCertificates, ManagerError> {
        self.get("/api/v1/revocations").await
    }

    /// Revokes a certificate by its serial number.
    pub async fn revoke_certificate(
        &self,
        serial: &str,
    ) -> Result<RevokedCertificates, ManagerError> {
        self.ask(Method::PUT, &format!("/api/v1/revocations/{}", segment(serial)), &()).await
    }

    /// Returns the limits for concurrent moves.
    pub async fn limits(&self) -> Result<MoveLimits, ManagerError> {
        self.get("/api/v1/limits").await
    }

    /// Changes the limits for concurrent moves.
    pub async fn update_limits(&self, change: &UpdateLimits) -> Result<MoveLimits, ManagerError> {
        self.ask(Method::PATCH, "/api/v1/limits", change).await
    }

    /// Lists every VM that a host reports, by name.
    pub async fn vms(&self) -> Result<Vec<VmSummary>, ManagerError> {
        self.all("/api/v1/vms").await
    }

    pub async fn vm(&self, name: &str) -> Result<ManagedVm, ManagerError> {
        self.get(&format!("/api/v1/vms/{}", segment(name))).await
    }

    /// Lists every VM name that several hosts claim without a move that explains it.
    pub async fn name_conflicts(&self) -> Result<Vec<NameConflict>, ManagerError> {
        self.all("/api/v1/name-conflicts").await
    }

    /// Binds a VM's name to the guest that a host reports.
    pub async fn bind_vm(&self, name: &str, host: &str) -> Result<ManagedVm, ManagerError> {
        let request = BindVm { host: host.to_owned() };
        self.ask(Method::POST, &format!("/api/v1/vms/{}/binding", segment(name)), &request).await
    }

    /// Creates a VM on the given host, or on one that the manager chooses.
    pub async fn create_vm(&self, request: &CreateManagedVm) -> Result<HostedVm, ManagerError> {
        let more = if request.new_disks.is_empty() { Duration::ZERO } else { STORAGE_LIMIT };
        self.with_patience(more).ask(Method::POST, "/api/v1/vms", request).await
    }

    /// Starts a stopped VM or resumes a paused one.
    pub async fn start_vm(
        &self,
        name: &str,
        request: StartManagedVm,
    ) -> Result<HostedVm, ManagerError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        patient.ask(Method::POST, &format!("/api/v1/vms/{}/start", segment(name)), &request).await
    }

    /// Stops a VM; the response arrives when the VM is stopped.
    pub async fn stop_vm(
        &self,
        name: &str,
        request: StopManagedVm,
    ) -> Result<HostedVm, ManagerError> {
        let patient = self.with_patience(Duration::from_millis(request.grace_ms.unwrap_or(0)));
        patient.ask(Method::POST, &format!("/api/v1/vms/{}/stop", segment(name)), &request).await
    }

    /// Stops a VM and starts it again; the response arrives when it runs.
    pub async fn restart_vm(
        &self,
        name: &str,
        request: StopManagedVm,
    ) -> Result<HostedVm, ManagerError> {
        let patient = self.with_patience(Duration::from_millis(request.grace_ms.unwrap_or(0)));
        patient.ask(Method::POST, &format!("/api/v1/vms/{}/restart", segment(name)), &request).await
    }

    /// Suspends a running VM; the response arrives when its memory is on its host's disk.
    pub async fn suspend_vm(&self, name: &str) -> Result<HostedVm, ManagerError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        patient.ask(Method::POST, &format!("/api/v1/vms/{}/suspend", segment(name)), &()).await
    }

    /// Resets a running VM without a shutdown of its guest.
    pub async fn reset_vm(&self, name: &str) -> Result<HostedVm, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/reset", segment(name)), &()).await
    }

    /// Gives a stopped VM another name.
    pub async fn rename_vm(
        &self,
        name: &str,
        request: &RenameVm,
    ) -> Result<HostedVm, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/rename", segment(name)), request).await
    }

    /// Asks the agent in a running guest for its addresses and names.
    pub async fn guest(&self, name: &str) -> Result<GuestInfo, ManagerError> {
        self.get(&format!("/api/v1/vms/{}/guest", segment(name))).await
    }

    /// Freezes the guest's file systems for a limited time.
    pub async fn freeze_vm(&self, name: &str, request: FreezeVm) -> Result<HostedVm, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/freeze", segment(name)), &request).await
    }

    /// Sets the link of a NIC of a running VM.
    pub async fn set_link(
        &self,
        name: &str,
        request: SetNicLink,
    ) -> Result<HostedVm, ManagerError> {
        self.ask(Method::PUT, &format!("/api/v1/vms/{}/link", segment(name)), &request).await
    }

    /// Thaws the guest's file systems.
    pub async fn thaw_vm(&self, name: &str) -> Result<HostedVm, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/thaw", segment(name)), &()).await
    }

    /// Lists the disk images in a host's directories for VMs.
    pub async fn disks(&self, host: &str) -> Result<DiskList, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}/disks", segment(host))).await
    }

    /// Describes a disk image of a host.
    pub async fn disk(&self, host: &str, path: &Path) -> Result<DiskInfo, ManagerError> {
        let path = segment(&path.to_string_lossy());
        self.get(&format!("/api/v1/hosts/{}/disks/info?path={path}", segment(host))).await
    }

    /// Creates a disk image at a host.
    pub async fn create_disk(
        &self,
        host: &str,
        request: &CreateDisk,
    ) -> Result<DiskInfo, ManagerError> {
        let path = format!("/api/v1/hosts/{}/disks", segment(host));
        self.with_patience(STORAGE_LIMIT).ask(Method::POST, &path, request).await
    }

    /// Makes a disk of a host larger.
    pub async fn resize_disk(
        &self,
        host: &str,
        request: &ResizeDisk,
    ) -> Result<DiskInfo, ManagerError> {
        let path = format!("/api/v1/hosts/{}/disks/resize", segment(host));
        self.ask(Method::POST, &path, request).await
    }

    /// Deletes a disk image of a host that no VM names.
    pub async fn delete_disk(&self, host: &str, path: &Path) -> Result<(), ManagerError> {
        let path = segment(&path.to_string_lossy());
        self.delete(&format!("/api/v1/hosts/{}/disks?path={path}", segment(host))).await
    }

    /// Changes a disk or a CD of a VM, running or stopped.
    pub async fn change_drive(
        &self,
        name: &str,
        change: &DriveChange,
    ) -> Result<HostedVm, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/drives", segment(name)), change).await
    }

    /// Attaches or detaches a NIC of a VM, running or stopped.
    pub async fn change_nic(
        &self,
        name: &str,
        change: &NicChange,
    ) -> Result<HostedVm, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/nics", segment(name)), change).await
    }

    /// Changes the specification of a VM, of which a running one takes only some changes, and the
    /// labels of any VM.
    pub async fn change_vm(
        &self,
        name: &str,
        request: &ChangeManagedVm,
    ) -> Result<ChangedVm, ManagerError> {
        self.ask(Method::PATCH, &format!("/api/v1/vms/{}", segment(name)), request).await
    }

    /// Deletes a stopped VM. With `force`, also deletes a running VM, which is terminated, or a VM
    /// in doubt, which is discarded.
    pub async fn delete_vm(&self, name: &str, force: bool) -> Result<(), ManagerError> {
        self.delete(&format!("/api/v1/vms/{}?force={force}", segment(name))).await
    }

    /// Lists every network, by name.
    pub async fn networks(&self) -> Result<Vec<ManagedNetwork>, ManagerError> {
        self.all("/api/v1/networks").await
    }

    /// Requests a move of a VM.
    pub async fn create_move(&self, vm: &str, request: &CreateMove) -> Result<Move, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/moves", segment(vm)), request).await
    }

    /// Runs the preflight checks for a move to a host; without a host, ranks all hosts. `disks`:
    /// how disks travel, if they do.
    pub async fn preflight(
        &self,
        vm: &str,
        to: Option<&str>,
        predict: bool,
        disks: Option<&TravellingDisks>,
    ) -> Result<Preflight, ManagerError> {
        let query = preflight_query(to, predict, disks);
        self.get(&format!("/api/v1/vms/{}/preflight?{query}", segment(vm))).await
    }

    /// Lists every stored move, oldest first, without reports.
    pub async fn moves(&self) -> Result<Vec<Move>, ManagerError> {
        self.all("/api/v1/moves").await
    }

    pub async fn find_move(&self, id: &str) -> Result<Move, ManagerError> {
        self.get(&format!("/api/v1/moves/{}", segment(id))).await
    }

    /// Cancels a move.
    pub async fn cancel_move(&self, id: &str) -> Result<Move, ManagerError> {
        let path = format!("/api/v1/moves/{}", segment(id));
        let response = self.send(Method::DELETE, &path, Bytes::new()).await?;
        self.json(response).await
    }

    /// Drains a host.
    pub async fn create_drain(
        &self,
        host: &str,
        request: &CreateDrain,
    ) -> Result<Drain, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/hosts/{}/drain", segment(host)), request).await
    }

    /// Lists every stored drain, oldest first.
    pub async fn drains(&self) -> Result<Vec<Drain>, ManagerError> {
        self.all("/api/v1/drains").await
    }

    pub async fn drain(&self, id: &str) -> Result<Drain, ManagerError> {
        self.get(&format!("/api/v1/drains/{}", segment(id))).await
    }

    /// Cancels a drain.
    pub async fn cancel_drain(&self, id: &str) -> Result<Drain, ManagerError> {
        let path = format!("/api/v1/drains/{}", segment(id));
        let response = self.send(Method::DELETE, &path, Bytes::new()).await?;
        self.json(response).await
    }

    /// Returns the VMs that a drain has moved.
    pub async fn undo_drain(&self, id: &str) -> Result<Drain, ManagerError> {
        let path = format!("/api/v1/drains/{}/undo", segment(id));
        let response = self.send(Method::POST, &path, Bytes::new()).await?;
        self.json(response).await
    }

    /// Creates a placement rule.
    pub async fn create_rule(&self, rule: &CreateRule) -> Result<RuleInfo, ManagerError> {
        self.ask(Method::POST, "/api/v1/rules", rule).await
    }

    /// Lists every rule, by name, with its current state.
    pub async fn rules(&self) -> Result<Vec<RuleInfo>, ManagerError> {
        self.all("/api/v1/rules").await
    }

    /// Returns a rule, with every VM that violates it.
    pub async fn rule(&self, name: &str) -> Result<RuleInfo, ManagerError> {
        self.get(&format!("/api/v1/rules/{}", segment(name))).await
    }

    /// Removes a rule; no VM moves because of that.
    pub async fn delete_rule(&self, name: &str) -> Result<(), ManagerError> {
        self.delete(&format!("/api/v1/rules/{}", segment(name))).await
    }

    /// Returns the cluster's CPU baseline and compares every host with it.
    pub async fn cpu_baseline(&self) -> Result<CpuBaselineInfo, ManagerError> {
        self.get("/api/v1/cpu-baseline").await
    }

    /// Lists running VMs whose CPU differs from the baseline, by name.
    pub async fn cpu_baseline_vms(&self) -> Result<Vec<BaselineVm>, ManagerError> {
        self.all("/api/v1/cpu-baseline/vms").await
    }

    /// Sets the baseline; with `plan`, only returns the consequences.
    pub async fn set_cpu_baseline(
        &self,
        request: &SetCpuBaseline,
        plan: bool,
    ) -> Result<CpuBaselineChange, ManagerError> {
        self.ask(Method::PUT, &format!("/api/v1/cpu-baseline?plan={plan}"), request).await
    }

    /// Removes the cluster's baseline.
    pub async fn clear_cpu_baseline(&self) -> Result<(), ManagerError> {
        self.delete("/api/v1/cpu-baseline").await
    }

    /// Lists up to `most` entries of the audit log, newest first.
    pub async fn audit(&self, most: usize) -> Result<Vec<AuditEntry>, ManagerError> {
        let page: Page<AuditEntry> = self.get(&format!("/api/v1/audit?limit={most}")).await?;
        Ok(page.items)
    }

    /// Lists every token, without its secret.
    pub async fn tokens(&self) -> Result<Vec<TokenInfo>, ManagerError> {
        self.get("/api/v1/tokens").await
    }

    /// Creates a token. Only this response contains its secret.
    pub async fn create_token(&self, token: &CreateToken) -> Result<CreatedToken, ManagerError> {
        self.ask(Method::POST, "/api/v1/tokens", token).await
    }

    pub async fn revoke_token(&self, id: &str) -> Result<(), ManagerError> {
        self.delete(&format!("/api/v1/tokens/{}", segment(id))).await
    }

    /// Creates a join token, with which one host can join once.
    pub async fn create_join_token(&self, grant: &JoinGrant) -> Result<JoinToken, ManagerError> {
        self.ask(Method::POST, "/api/v1/join-tokens", grant).await
    }

    /// Lists every join token, without its secret.
    pub async fn join_tokens(&self) -> Result<Vec<JoinTokenInfo>, ManagerError> {
        self.get("/api/v1/join-tokens").await
    }

    /// Revokes a join token; a host that has joined with it stays.
    pub async fn revoke_join_token(&self, id: &str) -> Result<(), ManagerError> {
        self.delete(&format!("/api/v1/join-tokens/{}", segment(id))).await
    }

    /// Joins the cluster: returns a certificate for a key that only the host has.
    pub async fn join(&self, request: &JoinRequest) -> Result<Joined, ManagerError> {
        self.ask(Method::POST, "/api/v1/join", request).await
    }

    /// Streams every change from now on, or after the event with the given number.
    pub async fn events(&self, behind: Option<u64>) -> Result<ManagerEvents, ManagerError> {
        let mut request = self.request(&Method::GET, "/api/v1/events", Bytes::new(), None)?;
        if let Some(behind) = behind {
            request.headers_mut().insert("last-event-id", behind.into());
        }
        let response = self.client.exchange(request).await.map_err(|error| self.failed(error))?;
        if !response.status().is_success() {
            return Err(self.refusal(response).await);
        }
        let events = Events::new(self.client.endpoint().clone(), response.into_body());
        Ok(ManagerEvents::new(self.clone(), events))
    }

    /// Reads all pages of a list.
    async fn all<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>, ManagerError> {
        let mut all = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let cursor = next.map(|next| format!("&cursor={}", segment(&next))).unwrap_or_default();
            let page: Page<T> =
                self.get(&format!("{path}?limit={}{cursor}", super::page::MAX_PAGE_ITEMS)).await?;
            all.extend(page.items);
            next = page.next;
            if next.is_none() {
                return Ok(all);
            }
        }
    }

    async fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, ManagerError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        self.json(response).await
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        request: &(impl Serialize + Sync),
    ) -> Result<A, ManagerError> {
        let body = serde_json::to_vec(request).map_err(|error| self.protocol(&error))?;
        let response = self.send(method, path, body.into()).await?;
        self.json(response).await
    }

    fn with_patience(&self, more: Duration) -> ManagerClient {
        ManagerClient { client: self.client.with_patience(more), token: self.token.clone() }
    }

    async fn delete(&self, path: &str) -> Result<(), ManagerError> {
        self.send(Method::DELETE, path, Bytes::new()).await.map(drop)
    }

    /// Sends a request. A POST has an idempotency key. If its connection is lost before the
    /// response, it is sent again with the same key and carried out once. If the manager is
    /// unavailable after that, because it restarts or another one takes over, it has
    /// [`LONGEST_AWAY`] to return.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ManagerError> {
        let key = (method == Method::POST).then(|| Uuid::new_v4().to_string());
        let mut sent = 1;
        // A request that could not be sent was not carried out.
        let mut broke = None;
        loop {
            let request = self.request(&method, path, body.clone(), key.as_deref())?;
            let mut sender = match self.client.open().await {
                Ok(sender) => sender,
                Err(_) if broke.is_some_and(|at: Instant| at.elapsed() < LONGEST_AWAY) => {
                    tokio::time::sleep(BETWEEN_SENDS).await;
                    continue;
                }
                Err(error) => return Err(self.failed(error)),
            };
            let may_again = key.is_some() && sent < MOST_SENT;
            let refused = match self.client.exchange_on(&mut sender, request).await {
                Ok(response) if response.status().is_success() => return Ok(response),
                Ok(response) => self.refusal(response).await,
                Err(_) if may_again => {
                    broke = Some(Instant::now());
                    sent += 1;
                    continue;
                }
                Err(error) => return Err(self.failed(error)),
            };
            // The first request is still being carried out.
            let is_under_way = matches!(&refused, ManagerError::Refused(problem)
                if problem.code == ProblemCode::Conflict);
            if sent == 1 || !may_again || !is_under_way {
                return Err(refused);
            }
            sent += 1;
            tokio::time::sleep(BETWEEN_SENDS).await;
        }
    }

    pub(super) fn request(
        &self,
        method: &Method,
        path: &str,
        body: Bytes,
        key: Option<&str>,
    ) -> Result<Request<Full<Bytes>>, ManagerError> {
        let mut request =
            Request::builder().method(method).uri(path).header(HOST, self.client.authority());
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        request.body(Full::new(body)).map_err(|error| self.protocol(&error))
    }

    async fn json<A: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
    ) -> Result<A, ManagerError> {
        let body =
            self.client.whole(response.into_body()).await.map_err(|error| self.failed(error))?;
        serde_json::from_slice(&body).map_err(|error| self.protocol(&error))
    }

    pub(super) async fn refusal(&self, response: Response<Incoming>) -> ManagerError {
        let status: StatusCode = response.status();
        let body = match self.client.whole(response.into_body()).await {
            Ok(body) => body,
            Err(error) => return self.failed(error),
        };
        match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => ManagerError::Refused(problem),
            Err(_) => self.protocol(&format!("HTTP status {status} without a problem document")),
        }
    }

    /// Converts an error of the transport.
    pub(super) fn failed(&self, error: ClientError) -> ManagerError {
        match error {
            ClientError::Unreachable { endpoint, why, is_untrusted } => {
                ManagerError::Unreachable { endpoint, why, is_untrusted }
            }
            ClientError::Protocol { endpoint, why } => ManagerError::Protocol { endpoint, why },
            ClientError::Refused(error) => self.protocol(&error),
        }
    }

    /// Returns the client of the connection.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn protocol(&self, why: &impl ToString) -> ManagerError {
        ManagerError::Protocol { endpoint: self.client.endpoint().clone(), why: why.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    /// Answers each request with the next of `answers`, or drops the connection for `None`. Returns
    /// the received requests.
    async fn answer(listener: TcpListener, answers: &[Option<&str>]) -> Vec<String> {
        let mut asked = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut text = Vec::new();
            while !text.ends_with(b"}") && !text.ends_with(b"\r\n\r\n") {
                let mut some = [0; 4096];
                let count = stream.read(&mut some).await.unwrap();
                assert_ne!(count, 0);
                text.extend_from_slice(&some[..count]);
            }
            asked.push(String::from_utf8(text).unwrap());
            let Some(answer) = answer else { continue };
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        asked
    }

    fn key(request: &str) -> Option<&str> {
        request.lines().find_map(|line| line.strip_prefix("idempotency-key: "))
    }

    async fn rig() -> (TcpListener, ManagerClient) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
        (listener, ManagerClient::new(endpoint, None))
    }

    fn http(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    #[tokio::test]
    async fn a_request_whose_connection_is_lost_is_repeated_with_the_same_key() {
        let (listener, client) = rig().await;
        let made = http(
            "201 Created",
            "{\"id\":\"1\",\"host\":\"c\",\"made_unix_ms\":0,\"expires_unix_ms\":0,\
             \"made_by\":\"root\",\"token\":\"t\"}",
        );
        let grant = JoinGrant { host: "c".into(), address: None, minutes: 60 };
        let answers = [None, Some(made.as_str())];
        let (asked, made) =
            tokio::join!(answer(listener, &answers), client.create_join_token(&grant));
        assert_eq!(made.unwrap().token, "t");
        assert!(key(&asked[0]).is_some_and(|key| key.len() == 36), "{asked:?}");
        assert_eq!(key(&asked[0]), key(&asked[1]));
    }

    #[tokio::test]
    async fn a_manager_that_restarts_after_the_connection_was_lost_is_awaited() {
        let (listener, client) = rig().await;
        let address = listener.local_addr().unwrap();
        let problem = Problem::new(ProblemCode::NotFound, "no", "");
        let refusal = http("404 Not Found", &serde_json::to_string(&problem).unwrap());
        let restarts = async {
            let first = answer(listener, &[None]).await;
            // Nothing listens in the meantime.
            let again = TcpSocket::new_v4().unwrap();
            again.set_reuseaddr(true).unwrap();
            again.bind(address).unwrap();
            let second = answer(again.listen(1).unwrap(), &[Some(refusal.as_str())]).await;
            (first, second)
        };
        let ((first, second), undone) = tokio::join!(restarts, client.undo_drain("d1"));
        assert!(matches!(undone, Err(ManagerError::Refused(_))), "{undone:?}");
        assert_eq!(key(&first[0]), key(&second[0]));
    }

    #[tokio::test]
    async fn a_read_or_a_refused_request_is_sent_once() {
        let (listener, client) = rig().await;
        let answers = [None];
        let (asked, looked) = tokio::join!(answer(listener, &answers), client.tokens());
        assert!(looked.is_err() && key(&asked[0]).is_none(), "{asked:?}");
        let (listener, client) = rig().await;
        let problem = Problem::new(ProblemCode::Conflict, "no", "");
        let refusal = http("409 Conflict", &serde_json::to_string(&problem).unwrap());
        let answers = [Some(refusal.as_str())];
        let (_, undone) = tokio::join!(answer(listener, &answers), client.undo_drain("d1"));
        assert!(matches!(undone, Err(ManagerError::Refused(_))), "{undone:?}");
    }
}
