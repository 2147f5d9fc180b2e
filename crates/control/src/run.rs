//! The manager's process: opens the store, campaigns for the leadership, serves requests until a
//! signal.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum_server::Handle;
use godwit_api::control::Problem;
use godwit_pki::{
    Description, Identity, PkiError, Revocations, ServerConfig, describe, web_server,
};
use godwit_store::{Candidate, Loss, SqliteStore, Store, StoreError};
use http::Uri;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::access::authorities::{Authorities, AuthorityError};
use crate::alarms::{AlarmSetup, AlarmSetupError};
use crate::cluster::state::State;
use crate::config::{Config, TlsConfig};
use crate::ha::fencing::{Devices, FencingSetupError};
use crate::http as api;
use crate::http::connections::{self, Patience, Permits};
use crate::leadership::campaign::{Campaign, CampaignError, Retentions};
use crate::leadership::prune::prune_hourly;
use crate::manager::Manager;
use crate::storage::measured::MeasuredStore;

/// Time for open requests to complete when the manager ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Interval at which the rate limits of idle callers are dropped.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);

/// Why the manager does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The store is unusable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store's records are unreadable.
    #[error("cannot read the store's records: {0}")]
    State(Problem),
    /// The manager's certificate is unusable.
    #[error("{0}")]
    Certificate(#[from] PkiError),
    /// The certificate for browsers is unusable.
    #[error("{0}")]
    Web(PkiError),
    /// A configured authority or issuer is unusable.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A receiver of notices about alarms is unusable.
    #[error(transparent)]
    Alarms(#[from] AlarmSetupError),
    /// A fencing device is unusable.
    #[error(transparent)]
    Fencing(#[from] FencingSetupError),
    /// A directory or the socket cannot be created.
    #[error("cannot create {path}: {source}")]
    Directory { path: PathBuf, source: io::Error },
    /// An address is in use or is not this host's.
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    /// Another manager answers on the socket.
    #[error("cannot create the socket {path}: another manager listens there")]
    SocketInUse { path: PathBuf },
    /// Signal handlers cannot be installed.
    #[error("cannot handle signals: {0}")]
    Signals(io::Error),
    /// The manager's name differs from that in its certificate.
    #[error(
        "cannot use the certificate: it names {certificate}, and this manager is {name}; other \
            managers would refuse it"
    )]
    Name {
        /// Name in the configuration.
        name: String,
        /// Name in the certificate.
        certificate: String,
    },
    /// A backup was requested of a store in etcd.
    #[error("cannot back up the store: it is etcd, which makes its own backups")]
    EtcdBacksUp,
    /// This program was built without support for etcd.
    #[cfg(not(feature = "etcd"))]
    #[error(
        "cannot use etcd: [etcd] is configured, but this program was built without support \
        for it"
    )]
    NoEtcd,
    /// The manager has lost its leadership.
    #[error("this manager has lost its leadership: {0}")]
    Lost(Loss),
}

impl RunError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            RunError::Store(error) => error.remedy(),
            RunError::State(problem) => problem.remedy.clone(),
            RunError::Certificate(error) => error
                .remedy_and("correct [tls] in the configuration; `godwit pki` issues certificates"),
            RunError::Web(error) => error.remedy_and(
                "correct [web] in the configuration; see docs/manager.md, \"Browsers\"",
            ),
            RunError::Authority(error) => error.remedy(),
            RunError::Alarms(error) => error.remedy(),
            RunError::Fencing(error) => error.remedy(),
            RunError::Directory { .. } => {
                "correct state_dir and socket in the configuration, or their permissions".to_owned()
            }
            RunError::Listen { .. } => "correct listen in the configuration".to_owned(),
            RunError::SocketInUse { .. } => {
                "stop it, or give this one its own socket and state_dir".to_owned()
            }
            RunError::Signals(_) => "check the limits of the system".to_owned(),
            RunError::Name { .. } => {
                "set name in the configuration to the name in the certificate, or issue another"
                    .to_owned()
            }
            RunError::EtcdBacksUp => {
                "use `etcdctl snapshot save FILE`; see docs/store.md".to_owned()
            }
            #[cfg(not(feature = "etcd"))]
            RunError::NoEtcd => "build it with the feature `etcd`".to_owned(),
            RunError::Lost(_) => "start the manager again".to_owned(),
        }
    }
}

impl From<CampaignError> for RunError {
    fn from(error: CampaignError) -> RunError {
        match error {
            CampaignError::Store(error) => RunError::Store(error),
            CampaignError::State(problem) => RunError::State(problem),
            CampaignError::Lost(loss) => RunError::Lost(loss),
        }
    }
}

/// Runs the manager until SIGTERM or SIGINT. Migrations continue without it.
///
/// # Errors
/// The manager cannot start, or has lost its leadership.
pub async fn run(config: Config) -> Result<(), RunError> {
    allow_many_files();
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Signals)?;
    if UnixStream::connect(&config.socket).await.is_ok() {
        return Err(RunError::SocketInUse { path: config.socket.clone() });
    }
    let identity = load_identity(&config)?;
    let authorities = Authorities::open(
        config.authority.as_ref(),
        config.tls.as_ref().map(|tls| tls.authority.as_path()),
        config.oidc.as_ref(),
    )?;
    let alarm_setup = AlarmSetup::open(&config.alarms, config.own_certificates())?;
    let fencing = Devices::open(&config.ha)?;
    let listeners = listen_all(&config, identity.as_ref())?;
    make_private(&config.state_dir)?;
    let store: Arc<dyn Store> = Arc::new(MeasuredStore(open_store(&config)?));
    let candidate = Candidate { name: config.name.clone(), address: config.public_address() };
    if let (Some(identity), true) = (&identity, config.etcd.is_some()) {
        check_name(identity, &config.name)?;
    }
    let state = Arc::new(State::with_limits(config.limits.clone()));
    let manager = Manager::new(candidate.clone(), Arc::clone(&store), state, identity.clone());
    let retention =
        Retentions { audit: config.audit.retention(), journal: config.journal.retention() };
    let campaign = Campaign::new(Arc::clone(&manager), store, candidate, retention);

    manager.authorities.set(authorities);
    keep_load(&manager, &config)?;
    // This cannot fail: nothing else sets it.
    let _ = manager.alarm_setup.set(alarm_setup);
    let _ = manager.ha.fencing.set(Arc::new(fencing));
    let local = bind(&config.socket)?;
    let _socket = RemovedAtEnd(config.socket.clone());
    let handle = Handle::new();
    let mut servers = serve(&manager, local, listeners, &handle);
    servers.spawn(forget_idle(Arc::clone(&manager)));
    servers.spawn(api::metrics::follow(Arc::clone(&manager)));
    servers.spawn(prune_hourly(Arc::clone(&manager)));
    if config.insecure {
        tracing::warn!("insecure: tokens and requests to agents travel unencrypted");
    }
    tracing::info!(
        name = config.name,
        socket = %config.socket.display(),
        listen = ?config.listen,
        "manager ready"
    );
    let ended = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        ended = campaign.run() => ended.err().map(RunError::from),
    };
    campaign.resign().await;
    handle.graceful_shutdown(Some(LAST_ANSWERS));
    servers.shutdown().await;
    manager.loads.flush().await;
    ended.map_or(Ok(()), Err)
}

/// Keeps the history of load beside the store.
fn keep_load(manager: &Manager, config: &Config) -> Result<(), RunError> {
    let dir = config.state_dir.join("load");
    let kept = manager.loads.keep_in(&dir);
    kept.map_err(|source| RunError::Directory { path: dir, source })
}

/// Loads the manager's certificate, and warns of addresses that it lacks.
fn load_identity(config: &Config) -> Result<Option<Identity>, RunError> {
    let Some(TlsConfig { authority, certificate, key }) = &config.tls else { return Ok(None) };
    let identity = Identity::load_with(authority, certificate, key, &Revocations::watching())?;
    warn_of_strange_addresses(&describe(certificate)?, config);
    Ok(Some(identity))
}

/// Serves the API at the socket and at the addresses.
fn serve(
    manager: &Arc<Manager>,
    local: UnixListener,
    listeners: Vec<Listening>,
    handle: &Handle<SocketAddr>,
) -> JoinSet<()> {
    let app = api::router(Arc::clone(manager));
    let mut servers = JoinSet::new();
    servers.spawn(serve_local(local, api::local(app.clone())));
    let permits = Arc::<Permits>::default();
    for (listener, tls) in listeners {
        let (app, handle, permits) = (app.clone(), handle.clone(), Arc::clone(&permits));
        servers.spawn(async move {
            let patience = Patience::default();
            let served = connections::serve(listener, app, tls, handle, permits, patience);
            if let Err(error) = served.await {
                tracing::error!(%error, "a listener ended");
            }
        });
    }
    servers
}

/// Opens the store: etcd for several managers, a file for one.
fn open_store(config: &Config) -> Result<Arc<dyn Store>, RunError> {
    match &config.etcd {
        #[cfg(feature = "etcd")]
        Some(etcd) => {
            if let Some(left) = config.store_left_behind() {
                tracing::warn!(
                    file = %left.display(),
                    "the store is etcd now; the file that was the store before is not imported: \
                    see docs/store.md"
                );
            }
            Ok(Arc::new(godwit_store::EtcdStore::new(&etcd.settings()?)?))
        }
        #[cfg(not(feature = "etcd"))]
        Some(_) => Err(RunError::NoEtcd),
        None => {
            let file = config.store_file();
            Ok(Arc::new(tokio::task::block_in_place(|| SqliteStore::open(&file))?))
        }
    }
}

/// Writes a copy of the store to a new file. The manager may run meanwhile. Blocks.
///
/// # Errors
/// The store is etcd, which makes its own backups; the store is unreadable; or the copy cannot be
/// written.
pub fn back_up(config: &Config, to: &Path) -> Result<(), RunError> {
    match config.etcd {
        Some(_) => Err(RunError::EtcdBacksUp),
        None => Ok(SqliteStore::back_up(&config.store_file(), to)?),
    }
}

/// Warns of addresses that the certificate lacks. Clients that connect to one refuse the
/// certificate, and the manager sees nothing of it.
fn warn_of_strange_addresses(certificate: &Description, config: &Config) {
    let stands_for =
        |address: IpAddr| address.is_unspecified() || certificate.addresses.contains(&address);
    let listened: Vec<IpAddr> = config.listen.iter().map(SocketAddr::ip).collect();
    let public = config.address.as_deref().and_then(|address| address.parse::<Uri>().ok());
    let public = public.and_then(|uri| uri.host()?.trim_matches(['[', ']']).parse().ok());
    for address in listened.into_iter().chain(public).filter(|address| !stands_for(*address)) {
        tracing::warn!(
            %address,
            "clients cannot connect at an address that the manager's certificate does not name: \
            issue one with `godwit pki issue` and --address"
        );
    }
}

/// Checks that the certificate has the name by which this manager leads: other managers identify
/// the leader by it.
fn check_name(identity: &Identity, name: &str) -> Result<(), RunError> {
    if identity.name() == name {
        return Ok(());
    }
    Err(RunError::Name { name: name.to_owned(), certificate: identity.name().to_owned() })
}

/// Raises the limit of open files. Each host and each client has a connection, and processes
/// usually start with a limit of 1,024 files.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        tracing::warn!(
            %error,
            "cannot raise the limit of open files: the manager may reach it with many hosts"
        );
    }
}

/// Listener and its TLS configuration; none: unencrypted.
type Listening = (TcpListener, Option<Arc<ServerConfig>>);

/// Listens on the addresses for hosts and commands, and on those for browsers.
fn listen_all(config: &Config, identity: Option<&Identity>) -> Result<Vec<Listening>, RunError> {
    let users = identity.map(|identity| Arc::clone(identity.server_for_users()));
    let mut all: Vec<Listening> =
        listen(&config.listen)?.into_iter().map(|listener| (listener, users.clone())).collect();
    if let Some(web) = &config.web {
        let authority = config.tls.as_ref().map(|tls| tls.authority.as_path());
        let tls = web_server(authority, &web.certificate, &web.key).map_err(RunError::Web)?;
        all.extend(
            listen(&web.listen)?.into_iter().map(|listener| (listener, Some(Arc::clone(&tls)))),
        );
    }
    Ok(all)
}

fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, RunError> {
    let bound = addresses.iter().map(|&address| {
        let failed = |source| RunError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(listener)
    });
    bound.collect()
}

fn make_private(path: &Path) -> Result<(), RunError> {
    let failed = |source| RunError::Directory { path: path.to_owned(), source };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)
}

/// Binds the socket under a temporary name and renames it once its mode is set, so that no client
/// connects before.
fn bind(path: &Path) -> Result<UnixListener, RunError> {
    if let Some(parent) = path.parent() {
        make_private(parent)?;
    }
    let fresh = path.with_extension("new");
    let bound = || {
        let _ = fs::remove_file(&fresh);
        let listener = UnixListener::bind(&fresh)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))?;
        fs::rename(&fresh, path)?;
        Ok(listener)
    };
    bound().map_err(|source| RunError::Directory { path: path.to_owned(), source })
}

async fn serve_local(listener: UnixListener, app: Router) {
    if let Err(error) = axum::serve(listener, app).await {
        tracing::error!(%error, "the socket's listener ended");
    }
}

async fn forget_idle(manager: Arc<Manager>) {
    let mut interval = tokio::time::interval(FORGET_INTERVAL);
    loop {
        interval.tick().await;
        manager.rates.forget_idle();
        manager.audit_refusals();
    }
}

struct RemovedAtEnd(PathBuf);

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::get;
    use godwit_pki::{Authority, Grant, Role, Trust};
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs};

    use super::*;

    /// Returns the TLS configuration of a browser that has imported an authority.
    fn importing(authority: &Path) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }

    #[tokio::test]
    async fn browsers_get_a_certificate_of_an_authority_that_signs_no_host() {
        let dir = tempfile::tempdir().unwrap();
        let (cluster_dir, web_dir) = (dir.path().join("cluster"), dir.path().join("web"));
        let cluster = Authority::create(&cluster_dir, "test", 30).unwrap();
        let web = Authority::create_web(&web_dir, "test", 30).unwrap();
        let addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        let grant =
            |role| Grant { name: "m1".to_owned(), role, addresses: addresses.clone(), days: 30 };
        let own = cluster.issue(&grant(Role::Operator)).unwrap();
        let shown = web.issue(&grant(Role::Web)).unwrap();
        let config = |certificate: &Path, key: &Path| {
            let (ca, own_certificate, own_key) =
                (cluster_dir.join("ca.pem"), own.certificate.display(), own.key.display());
            let text = format!(
                "name = \"m1\"\nlisten = [\"127.0.0.1:0\"]\n\
                [tls]\nauthority = {ca:?}\ncertificate = \"{own_certificate}\"\n\
                key = \"{own_key}\"\n\
                [web]\nlisten = [\"127.0.0.1:0\"]\ncertificate = {certificate:?}\nkey = {key:?}\n"
            );
            Config::parse(&text, Path::new("control.toml")).unwrap()
        };
        let identity = Identity::load(&cluster.certificate(), &own.certificate, &own.key).unwrap();
        // The manager's own certificate, which hosts check, is not accepted for browsers.
        let refused = listen_all(&config(&own.certificate, &own.key), Some(&identity)).unwrap_err();
        assert!(matches!(refused, RunError::Web(PkiError::ClusterAuthority { .. })), "{refused}");
        let all = listen_all(&config(&shown.certificate, &shown.key), Some(&identity)).unwrap();
        let (mut servers, mut at) = (JoinSet::new(), Vec::new());
        for (listener, tls) in all {
            at.push(listener.local_addr().unwrap());
            let app = Router::new().route("/", get(async || "ok"));
            let permits = Arc::<Permits>::default();
            servers.spawn(connections::serve(
                listener,
                app,
                tls,
                Handle::new(),
                permits,
                Patience::default(),
            ));
        }
        let [for_hosts, for_browsers] = at[..] else { panic!("{at:?}") };
        let trust = Trust::load(&cluster.certificate()).unwrap();
        let (cluster_ca, web_ca) =
            (importing(&cluster.certificate()), importing(&web.certificate()));
        for (trusts, to, is_served) in [
            (trust.client(), for_hosts, true),
            (trust.client(), for_browsers, false),
            (&web_ca, for_browsers, true),
            (&web_ca, for_hosts, false),
            (&cluster_ca, for_browsers, false),
        ] {
            let socket = TcpStream::connect(to).await.unwrap();
            let name = ServerName::try_from("127.0.0.1").unwrap();
            let connected = TlsConnector::from(Arc::clone(trusts)).connect(name, socket).await;
            assert_eq!(connected.is_ok(), is_served, "{to}: {:?}", connected.err());
        }
    }
}
