//! Client of an agent: HTTP/1.1 over a Unix socket, TLS or TCP, one connection per request unless
//! some are kept.
//!
//! An unreachable agent and an agent that refuses a request are different errors. The first says
//! nothing about the state of the host; the second is the host's own answer.

mod adoption;
mod arriving_disks;
mod clones;
mod ha;
mod imports;
mod incoming;
mod kept;
mod tcp;

pub use kept::KeptConnections;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use godwit_pki::{Identity, Revocations, Trust};
use godwit_types::{DryRun, RateLimit};
use http::header::{CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{self, ClientConfig};

use crate::events::next_bytes;
use crate::{
    ApiError, ChangeDrive, ChangeVm, ClientError, CreateDisk, CreateVm, DiskInfo, DiskList,
    Endpoint, FreezeVm, GuestInfo, HostEvents, HostInfo, LimitOf, Limits, LoadSample, LogSource,
    MigrationAccepted, MigrationEvents, MigrationRequest, MigrationStatus, NicChange, ProbeEvents,
    ProbeRequest, RenameVm, ResizeDisk, Resolve, Resolved, RevocationsTaken, SetLimit, SetNicLink,
    SetPeers, SetRevocations, StopVm, VmInfo,
};
use tcp::connect_tcp;

/// Connection timeout. Agents are close to each other.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Response timeout. The slowest request is to start a VM with much memory.
const ANSWER_LIMIT: Duration = Duration::from_secs(180);
/// Time to write a large guest's memory or a large image to a disk, or to read it. An agent copies
/// an image for at most this long.
pub(crate) const STORAGE_LIMIT: Duration = Duration::from_secs(6 * 3600);
/// Default limit for a response that is read whole: the reports of 256 migrations.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Longest error response that is read; the next constant limits each of its texts.
const MAX_REFUSAL_BYTES: usize = 64 << 10;
const MAX_REFUSAL_TEXT_BYTES: usize = 4 << 10;

/// Longest picture of a screen: 32 MiB of pixels that cannot be compressed.
pub(crate) const MAX_PICTURE_BYTES: usize = 40 << 20;
/// First bytes of every PNG (RFC 2083, section 12.11).
pub(crate) const PNG_MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";

/// Longest event of a host: its own state, with the addresses of several thousand peers.
const MAX_HOST_EVENT_BYTES: usize = 2 << 20;

/// An open connection without a request yet.
#[derive(Debug)]
pub struct Connection(SendRequest<Full<Bytes>>);

/// Client of one agent. Cheap to clone; keeps no connection, except with [`Client::keeping`].
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    /// TLS configuration, and the host name expected in the agent's certificate.
    secure: Option<(Arc<ClientConfig>, String)>,
    /// Revoked certificates, which kept connections follow.
    revocations: Option<Revocations>,
    most_answer_bytes: usize,
    answer_limit: Duration,
    kept: Option<KeptConnections>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Client {
    /// Creates a client of the agent at `endpoint`.
    #[must_use]
    pub fn new(endpoint: Endpoint) -> Self {
        Client {
            endpoint,
            secure: None,
            revocations: None,
            most_answer_bytes: MAX_ANSWER_BYTES,
            answer_limit: ANSWER_LIMIT,
            kept: None,
        }
    }

    /// Creates a client that presents `identity` over TLS and talks only to the agent of `host`.
    #[must_use]
    pub fn secure(endpoint: Endpoint, identity: &Identity, host: impl Into<String>) -> Self {
        Client {
            secure: Some((Arc::clone(identity.client()), host.into())),
            revocations: Some(identity.revocations().clone()),
            ..Client::new(endpoint)
        }
    }

    /// Creates a client that presents `identity` and talks only to the manager with this name. Host
    /// certificates are not accepted.
    #[must_use]
    pub fn to_manager(endpoint: Endpoint, identity: &Identity, manager: impl Into<String>) -> Self {
        let secure = Some((Arc::clone(identity.client_of_managers()), manager.into()));
        let revocations = Some(identity.revocations().clone());
        Client { secure, revocations, ..Client::new(endpoint) }
    }

    /// Creates a client that presents no certificate, for servers with another authentication
    /// method.
    pub(crate) fn trusting(endpoint: Endpoint, trust: &Trust, name: impl Into<String>) -> Self {
        Client { secure: Some((Arc::clone(trust.client()), name.into())), ..Client::new(endpoint) }
    }

    /// Limits the length of responses, for an agent that queries another.
    #[must_use]
    pub fn with_answers_of_at_most(self, bytes: usize) -> Self {
        Client { most_answer_bytes: bytes, ..self }
    }

    /// Waits longer for responses, for a request that takes this long beside the usual work.
    #[must_use]
    pub(crate) fn with_patience(&self, more: Duration) -> Self {
        Client { answer_limit: ANSWER_LIMIT.saturating_add(more), ..self.clone() }
    }

    /// Returns the address of the agent.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the properties and resources of the host.
    pub async fn host(&self) -> Result<HostInfo, ClientError> {
        self.get("/v1/host").await
    }

    /// Lists every VM of the host.
    pub async fn vms(&self) -> Result<Vec<VmInfo>, ClientError> {
        self.get("/v1/vms").await
    }

    pub async fn vm(&self, name: &str) -> Result<VmInfo, ClientError> {
        self.get(&format!("/v1/vms/{}", segment(name))).await
    }

    /// Defines a VM, and starts it if the request says so.
    pub async fn create_vm(&self, request: &CreateVm) -> Result<VmInfo, ClientError> {
        let more = if request.new_disks.is_empty() { Duration::ZERO } else { STORAGE_LIMIT };
        self.with_patience(more).post("/v1/vms", request).await
    }

    /// Starts a stopped VM or resumes a paused one.
    pub async fn start_vm(&self, name: &str) -> Result<VmInfo, ClientError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        patient.post(&format!("/v1/vms/{}/start", segment(name)), &()).await
    }

    /// Stops a VM; the response arrives when the VM is stopped.
    pub async fn stop_vm(&self, name: &str, request: StopVm) -> Result<VmInfo, ClientError> {
        let patient = self.with_patience(request.grace());
        patient.post(&format!("/v1/vms/{}/stop", segment(name)), &request).await
    }

    /// Stops a VM and starts it again; the response arrives when it runs.
    pub async fn restart_vm(&self, name: &str, request: StopVm) -> Result<VmInfo, ClientError> {
        let patient = self.with_patience(request.grace());
        patient.post(&format!("/v1/vms/{}/restart", segment(name)), &request).await
    }

    /// Suspends a running VM; the response arrives when its memory is on the disk.
    pub async fn suspend_vm(&self, name: &str) -> Result<VmInfo, ClientError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        patient.post(&format!("/v1/vms/{}/suspend", segment(name)), &()).await
    }

    /// Resets a running VM without a shutdown of its guest.
    pub async fn reset_vm(&self, name: &str) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/reset", segment(name)), &()).await
    }

    /// Gives a stopped VM another name.
    pub async fn rename_vm(&self, name: &str, request: &RenameVm) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/rename", segment(name)), request).await
    }

    /// Asks the agent in a running guest for its addresses and names.
    pub async fn guest(&self, name: &str) -> Result<GuestInfo, ClientError> {
        self.get(&format!("/v1/vms/{}/guest", segment(name))).await
    }

    /// Freezes the guest's file systems for a limited time.
    pub async fn freeze_vm(&self, name: &str, request: FreezeVm) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/freeze", segment(name)), &request).await
    }

    /// Sets the link of a NIC of a running VM.
    pub async fn set_link(&self, name: &str, request: SetNicLink) -> Result<VmInfo, ClientError> {
        self.ask(Method::PUT, &format!("/v1/vms/{}/link", segment(name)), &request).await
    }

    /// Thaws the guest's file systems.
    pub async fn thaw_vm(&self, name: &str) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/thaw", segment(name)), &()).await
    }

    /// Changes the specification of a VM; a running one takes only some changes.
    pub async fn change_vm(&self, name: &str, request: &ChangeVm) -> Result<VmInfo, ClientError> {
        self.ask(Method::PATCH, &format!("/v1/vms/{}", segment(name)), request).await
    }

    /// Changes a disk or a CD of a VM, running or stopped.
    pub async fn change_drive(
        &self,
        name: &str,
        request: &ChangeDrive,
    ) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/drives", segment(name)), request).await
    }

    /// Attaches or detaches a NIC of a VM, running or stopped.
    pub async fn change_nic(&self, name: &str, change: &NicChange) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/nics", segment(name)), change).await
    }

    /// Lists the disk images in the host's directories for VMs.
    pub async fn disks(&self) -> Result<DiskList, ClientError> {
        self.get("/v1/disks").await
    }

    /// Describes a disk image.
    pub async fn disk(&self, path: &Path) -> Result<DiskInfo, ClientError> {
        self.get(&format!("/v1/disks/info?path={}", segment(&path.to_string_lossy()))).await
    }

    /// Creates a disk image.
    pub async fn create_disk(&self, request: &CreateDisk) -> Result<DiskInfo, ClientError> {
        self.with_patience(STORAGE_LIMIT).post("/v1/disks", request).await
    }

    /// Makes a disk larger.
    pub async fn resize_disk(&self, request: &ResizeDisk) -> Result<DiskInfo, ClientError> {
        self.post("/v1/disks/resize", request).await
    }

    /// Deletes a disk image that no VM of the host uses.
    pub async fn delete_disk(&self, path: &Path) -> Result<(), ClientError> {
        self.delete(&format!("/v1/disks?path={}", segment(&path.to_string_lossy()))).await
    }

    /// Deletes the definition of a stopped VM and everything stored for it.
    pub async fn delete_vm(&self, name: &str) -> Result<(), ClientError> {
        self.delete(&format!("/v1/vms/{}", segment(name))).await
    }

    /// Deletes a VM even if it is in doubt. This discards the guest state on this host, which may
    /// be the only copy.
    pub async fn give_up_vm(&self, name: &str) -> Result<(), ClientError> {
        self.delete(&format!("/v1/vms/{}?force=true", segment(name))).await
    }

    /// Declares which host runs the guest of a VM in doubt.
    pub async fn resolve(&self, name: &str, word: &Resolve) -> Result<Resolved, ClientError> {
        self.post(&format!("/v1/vms/{}/resolve", segment(name)), word).await
    }

    /// Streams a VM's log from its beginning; with `follow` the stream continues as the log grows.
    pub async fn log(
        &self,
        name: &str,
        source: LogSource,
        follow: bool,
    ) -> Result<LogStream, ClientError> {
        self.read_log(&format!(
            "/v1/vms/{}/log?source={}&follow={follow}",
            segment(name),
            source.name()
        ))
        .await
    }

    /// Streams the output of a serial port, from 1, as [`Client::log`] does.
    pub async fn serial_log(
        &self,
        name: &str,
        port: u32,
        follow: bool,
    ) -> Result<LogStream, ClientError> {
        self.read_log(&format!("/v1/vms/{}/log?port={port}&follow={follow}", segment(name))).await
    }

    /// Streams the last `bytes` bytes of a VM's log. An agent of an older version sends the whole
    /// log.
    pub async fn log_tail(
        &self,
        name: &str,
        source: LogSource,
        bytes: u64,
    ) -> Result<LogStream, ClientError> {
        self.read_log(&format!(
            "/v1/vms/{}/log?source={}&tail_bytes={bytes}",
            segment(name),
            source.name()
        ))
        .await
    }

    /// Streams the last `bytes` bytes of the output of a serial port, from 1.
    pub async fn serial_log_tail(
        &self,
        name: &str,
        port: u32,
        bytes: u64,
    ) -> Result<LogStream, ClientError> {
        let name = segment(name);
        self.read_log(&format!("/v1/vms/{name}/log?port={port}&tail_bytes={bytes}")).await
    }

    async fn read_log(&self, path: &str) -> Result<LogStream, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        Ok(LogStream { endpoint: self.endpoint.clone(), body: response.into_body() })
    }

    /// Opens the guest's serial console, in both directions, until either side closes it.
    pub async fn console(&self, name: &str) -> Result<ConsoleStream, ClientError> {
        self.upgraded(&format!("/v1/vms/{}/console", segment(name)), "godwit-console").await
    }

    /// Opens a serial port, from 1, as [`Client::console`] does.
    pub async fn serial_port(&self, name: &str, port: u32) -> Result<ConsoleStream, ClientError> {
        let path = format!("/v1/vms/{}/console?port={port}", segment(name));
        self.upgraded(&path, "godwit-console").await
    }

    /// Opens a VM's screen; the stream carries RFB, the protocol of VNC.
    pub async fn screen(&self, name: &str) -> Result<ConsoleStream, ClientError> {
        self.upgraded(&format!("/v1/vms/{}/screen", segment(name)), "godwit-screen").await
    }

    /// Takes a picture of a VM's screen; returns a PNG, by its first bytes.
    pub async fn screenshot(&self, name: &str) -> Result<Bytes, ClientError> {
        let path = format!("/v1/vms/{}/screenshot", segment(name));
        let response = self.send(Method::GET, &path, Bytes::new()).await?;
        let picture = self.read(response.into_body(), MAX_PICTURE_BYTES).await?;
        match picture.starts_with(PNG_MAGIC) {
            true => Ok(picture),
            false => Err(self.protocol("the picture is not a PNG")),
        }
    }

    /// Sends a request that upgrades its connection; returns the connection.
    async fn upgraded(&self, path: &str, protocol: &str) -> Result<ConsoleStream, ClientError> {
        let request = Request::builder()
            .method(Method::GET)
            .uri(path)
            .header(HOST, self.authority())
            .header(CONNECTION, "upgrade")
            .header(UPGRADE, protocol)
            .body(Full::new(Bytes::new()))
            .map_err(|error| self.protocol(error))?;
        let response = self.exchange(request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(self.refusal(response).await);
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(|error| self.protocol(error))
    }

    /// Starts a migration; the VM must run on this client's host.
    pub async fn migrate(
        &self,
        vm: &str,
        request: &MigrationRequest,
    ) -> Result<MigrationAccepted, ClientError> {
        self.post(&format!("/v1/vms/{}/migrations", segment(vm)), request).await
    }

    /// Predicts a migration without moving anything; takes several seconds.
    pub async fn dry_run(
        &self,
        vm: &str,
        request: &MigrationRequest,
    ) -> Result<DryRun, ClientError> {
        self.post(&format!("/v1/vms/{}/migrations/dry-run", segment(vm)), request).await
    }

    /// Lists current and past migrations from this host, newest first.
    pub async fn migrations(&self) -> Result<Vec<MigrationStatus>, ClientError> {
        self.get("/v1/migrations").await
    }

    pub async fn migration(&self, id: &str) -> Result<MigrationStatus, ClientError> {
        self.get(&format!("/v1/migrations/{}", segment(id))).await
    }

    /// Requests the rollback of a migration. The report shows the outcome: past the commit point
    /// the migration completes.
    pub async fn cancel_migration(&self, id: &str) -> Result<(), ClientError> {
        self.delete(&format!("/v1/migrations/{}", segment(id))).await
    }

    /// Sets the bandwidth limit of a running migration, effective immediately.
    pub async fn limit_migration(
        &self,
        id: &str,
        limit: RateLimit,
    ) -> Result<MigrationStatus, ClientError> {
        self.put(&format!("/v1/migrations/{}/limit", segment(id)), &SetLimit { limit }).await
    }

    pub async fn limits(&self) -> Result<Limits, ClientError> {
        self.get("/v1/limits").await
    }

    /// Sets one of the host's limits until the agent exits; returns all of them.
    pub async fn set_limit(&self, of: LimitOf, limit: RateLimit) -> Result<Limits, ClientError> {
        let path = match of {
            LimitOf::Host => "/v1/limits/host".to_owned(),
            LimitOf::Migration => "/v1/limits/migration".to_owned(),
            LimitOf::Lane(address) => format!("/v1/limits/lanes/{}", segment(&address.to_string())),
        };
        self.put(&path, &SetLimit { limit }).await
    }

    /// Follows a migration to its report, starting with its current progress.
    pub async fn migration_events(&self, id: &str) -> Result<MigrationEvents, ClientError> {
        let path = format!("/v1/migrations/{}/events", segment(id));
        let response = self.send(Method::GET, &path, Bytes::new()).await?;
        Ok(MigrationEvents::new(self.endpoint.clone(), response.into_body()))
    }

    /// Follows the state of the host, starting with all of it.
    pub async fn watch(&self) -> Result<HostEvents, ClientError> {
        let response = self.send(Method::GET, "/v1/watch", Bytes::new()).await?;
        let events = HostEvents::new(self.endpoint.clone(), response.into_body());
        Ok(events.with_events_of_at_most(MAX_HOST_EVENT_BYTES))
    }

    /// Returns the newest sample of the load of the host and its VMs.
    ///
    /// # Errors
    /// [`ClientError`]: the agent is unreachable, has no sample yet, or has an older version.
    pub async fn load(&self) -> Result<LoadSample, ClientError> {
        self.get("/v1/load").await
    }

    /// Sets the migration targets in addition to those of the host's configuration. The list
    /// replaces the previous one.
    pub async fn set_peers(&self, peers: &SetPeers) -> Result<SetPeers, ClientError> {
        self.put("/v1/peers", peers).await
    }

    /// Sets the revoked certificates: a list signed by the certificate authority.
    pub async fn set_revocations(
        &self,
        list: &SetRevocations,
    ) -> Result<RevocationsTaken, ClientError> {
        self.put("/v1/revocations", list).await
    }

    /// Probes the lanes from this client's host to another. The probe ends with the last event, or
    /// when the returned stream is dropped.
    pub async fn probe(&self, request: &ProbeRequest) -> Result<ProbeEvents, ClientError> {
        let body = serde_json::to_vec(request).map_err(|error| self.protocol(error))?;
        let response = self.send(Method::POST, "/v1/probes", body.into()).await?;
        Ok(ProbeEvents::new(self.endpoint.clone(), response.into_body()))
    }

    /// Sends `GET path` and reads the JSON response.
    pub async fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        self.json(response).await
    }

    /// Sends `POST path` with a JSON body and reads the JSON response.
    pub async fn post<R: Serialize + Sync, A: DeserializeOwned>(
        &self,
        path: &str,
        request: &R,
    ) -> Result<A, ClientError> {
        self.ask(Method::POST, path, request).await
    }

    /// Sends `PUT path` with a JSON body and reads the JSON response.
    pub async fn put<R: Serialize + Sync, A: DeserializeOwned>(
        &self,
        path: &str,
        request: &R,
    ) -> Result<A, ClientError> {
        self.ask(Method::PUT, path, request).await
    }

    async fn ask<R: Serialize + Sync, A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        request: &R,
    ) -> Result<A, ClientError> {
        let body = serde_json::to_vec(request).map_err(|error| self.protocol(error))?;
        let response = self.send(method, path, body.into()).await?;
        self.json(response).await
    }

    /// Sends `DELETE path`.
    pub async fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.send(Method::DELETE, path, Bytes::new()).await.map(drop)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ClientError> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, self.authority())
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| self.protocol(error))?;
        let response = self.exchange(request).await?;
        if response.status().is_success() {
            Ok(response)
        } else {
            Err(self.refusal(response).await)
        }
    }

    /// Connects. If this fails, no request was sent.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub async fn connection(&self) -> Result<Connection, ClientError> {
        Ok(Connection(self.open().await?))
    }

    /// Forwards a request of another client with its headers, and returns any response. For a
    /// manager that forwards to another.
    pub async fn pass_on(
        &self,
        Connection(mut sender): Connection,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, ClientError> {
        let mut request = Request::builder().method(method).uri(path);
        request.headers_mut().ok_or_else(|| self.protocol("no path"))?.extend(headers);
        let request = request.header(HOST, self.authority()).body(Full::new(body));
        self.exchange_on(&mut sender, request.map_err(|error| self.protocol(error))?).await
    }

    /// Opens a connection on which no request has been sent yet.
    pub(crate) async fn open(&self) -> Result<SendRequest<Full<Bytes>>, ClientError> {
        let seconds = CONNECT_LIMIT.as_secs();
        let late = |_| self.unreachable(format!("no connection within {seconds} s"));
        let stream = tokio::time::timeout(CONNECT_LIMIT, self.connect()).await.map_err(late)?;
        let stream = stream.map_err(|error| self.not_connected(&error))?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.unreachable(error))?;
        // The task ends when the response body is read or dropped, or when the upgraded stream
        // closes.
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    /// Sends a request on a connection. Without a response, it is unknown whether the request was
    /// carried out.
    pub(crate) async fn exchange_on(
        &self,
        sender: &mut SendRequest<Full<Bytes>>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, ClientError> {
        tokio::time::timeout(self.answer_limit, sender.send_request(request))
            .await
            .map_err(|_| {
                self.unreachable(format!("no answer within {} s", self.answer_limit.as_secs()))
            })?
            .map_err(|error| self.unreachable(error))
    }

    async fn connect(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match &self.endpoint {
            Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Endpoint::Tcp(authority) => Box::new(connect_tcp(authority).await?),
            Endpoint::Tls(authority) => {
                let Some((config, host)) = &self.secure else {
                    return Err(std::io::Error::other(
                        "no client certificate is configured: set [tls]",
                    ));
                };
                let name = Identity::server_name(host).map_err(std::io::Error::other)?;
                let connector = TlsConnector::from(Arc::clone(config));
                Box::new(connector.connect(name, connect_tcp(authority).await?).await?)
            }
        })
    }

    async fn json<A: DeserializeOwned>(
        &self,
        response: Response<Incoming>,
    ) -> Result<A, ClientError> {
        let body = self.whole(response.into_body()).await?;
        serde_json::from_slice(&body).map_err(|error| self.protocol(error))
    }

    pub(crate) async fn whole(&self, body: Incoming) -> Result<Bytes, ClientError> {
        self.read(body, self.most_answer_bytes).await
    }

    pub(crate) async fn read(
        &self,
        body: Incoming,
        most_bytes: usize,
    ) -> Result<Bytes, ClientError> {
        let body = Limited::new(body, most_bytes).collect();
        let body = tokio::time::timeout(ANSWER_LIMIT, body).await.map_err(|_| {
            self.unreachable(format!("the response stalled for {} s", ANSWER_LIMIT.as_secs()))
        })?;
        Ok(body.map_err(|error| self.protocol(error))?.to_bytes())
    }

    async fn refusal(&self, response: Response<Incoming>) -> ClientError {
        let status = response.status();
        let body = match self.read(response.into_body(), MAX_REFUSAL_BYTES).await {
            Ok(body) => body,
            Err(error) => return error,
        };
        match serde_json::from_slice::<ApiError>(&body) {
            Ok(error) => ClientError::Refused(ApiError {
                message: cut(error.message),
                remedy: cut(error.remedy),
                ..error
            }),
            Err(_) => self.protocol(format!("HTTP status {status} without a godwit error")),
        }
    }

    pub(crate) fn authority(&self) -> &str {
        match &self.endpoint {
            Endpoint::Unix(_) => "localhost",
            Endpoint::Tcp(authority) | Endpoint::Tls(authority) => authority,
        }
    }

    fn unreachable(&self, why: impl fmt::Display) -> ClientError {
        let endpoint = self.endpoint.clone();
        ClientError::Unreachable { endpoint, why: why.to_string(), is_untrusted: false }
    }

    /// Returns the error of a failed connection. An untrusted certificate has its own remedy.
    fn not_connected(&self, error: &std::io::Error) -> ClientError {
        let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        let Some(rustls::Error::InvalidCertificate(why)) = of_tls else {
            return self.unreachable(error);
        };
        ClientError::Unreachable {
            endpoint: self.endpoint.clone(),
            why: format!("its certificate is not trusted ({why})"),
            is_untrusted: true,
        }
    }

    fn protocol(&self, why: impl fmt::Display) -> ClientError {
        ClientError::Protocol { endpoint: self.endpoint.clone(), why: why.to_string() }
    }
}

/// Shortens a text to [`MAX_REFUSAL_TEXT_BYTES`].
fn cut(mut text: String) -> String {
    if text.len() > MAX_REFUSAL_TEXT_BYTES {
        let end = (0..=MAX_REFUSAL_TEXT_BYTES).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or_default());
        text.push('…');
    }
    text
}

/// Returns a name as one path segment. Percent-encodes every byte that could end the segment or the
/// path.
pub(crate) fn segment(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Byte stream of the guest's serial console, or of a screen.
pub type ConsoleStream = TokioIo<Upgraded>;

/// Byte stream of a log.
#[derive(Debug)]
pub struct LogStream {
    endpoint: Endpoint,
    body: Incoming,
}

impl LogStream {
    /// Returns the next bytes, or `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        next_bytes(&self.endpoint, &mut self.body).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_untrusted_certificate_has_its_own_remedy() {
        let client = Client::new("https://a:7700".parse().unwrap());
        let cause = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let error = client.not_connected(&std::io::Error::other(cause));
        assert!(error.remedy().contains("--ca"), "{error}");
        let error = client.not_connected(&std::io::Error::other("no route"));
        assert!(!error.remedy().contains("--ca"), "{error}");
    }

    #[test]
    fn endpoints_round_trip_and_invalid_ones_are_refused() {
        for text in
            ["unix:/run/godwit/agent.sock", "https://10.77.0.11:7700", "http://[fd77::11]:7700"]
        {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in ["unix:////", "unix:///run//agent.sock", "unix:////run/agent.sock"] {
            let read: Endpoint = text.parse().unwrap();
            assert_eq!(read.to_string().parse::<Endpoint>().unwrap(), read, "{text}");
        }
        for (text, word) in [
            ("10.77.0.11:7700", "http://"),
            ("http://host-a", "port"),
            ("unix:agent.sock", "absolute"),
            ("https://host-a", "port"),
        ] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_name_stays_one_path_segment() {
        assert_eq!(segment("web-1"), "web-1");
        assert_eq!(segment("../a b?"), "..%2Fa%20b%3F");
    }

    #[tokio::test]
    async fn an_unreachable_agent_and_a_foreign_server_are_different_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let client = Client::new(Endpoint::Unix(path.clone()));
        assert!(matches!(client.host().await, Err(ClientError::Unreachable { .. })));

        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno")
                .await
                .unwrap();
        });
        assert!(matches!(client.host().await, Err(ClientError::Protocol { .. })));
    }
}
