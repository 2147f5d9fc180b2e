//! Keys of an OpenID Connect issuer: fetched over TLS, cached, and fetched again when a token names
//! an unknown key.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::control::{Problem, ProblemCode};
use http::header::{ACCEPT, HOST};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use jsonwebtoken::jwk::JwkSet;
use parking_lot::RwLock;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::access::Caller;
use crate::access::oidc::{OidcRefusal, OidcRules, caller};
use crate::access::trust;

/// Shortest interval between two fetches of the keys. Without it, invalid tokens could cause any
/// number of fetches.
const LEAST_BETWEEN: Duration = Duration::from_secs(60);
/// Lifetime of cached keys: the manager stops accepting removed keys after this time.
const FRESH_FOR: Duration = Duration::from_secs(3600);
/// Longest time for a response of the issuer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Largest response of the issuer, bytes.
const MOST_ANSWER_BYTES: usize = 1 << 20;

/// Issuer with its cached keys.
pub(crate) struct Oidc {
    rules: OidcRules,
    tls: Arc<ClientConfig>,
    keys: RwLock<Option<FetchedKeys>>,
    /// Time of the last fetch; locked during a fetch.
    last_fetch: Mutex<Option<Instant>>,
}

#[derive(Clone)]
struct FetchedKeys {
    keys: Arc<JwkSet>,
    since: Instant,
}

impl std::fmt::Debug for Oidc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oidc").field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// Metadata of an issuer (OpenID Connect Discovery 1.0, section 3).
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

impl Oidc {
    /// Opens an issuer. Its certificate is checked against `authority` of the rules; by default
    /// against the distribution's public authorities.
    pub(crate) fn open(rules: OidcRules) -> io::Result<Oidc> {
        let tls = trust::client(trust::authorities(rules.authority.as_deref())?)?;
        Ok(Oidc { rules, tls, keys: RwLock::default(), last_fetch: Mutex::default() })
    }

    /// Returns the holder of a token.
    pub(crate) async fn identify(&self, token: &str, now_unix_ms: u64) -> Result<Caller, Problem> {
        let known = self.known();
        if let Some(known) = &known
            && known.since.elapsed() < FRESH_FOR
        {
            match caller(token, &known.keys, &self.rules, now_unix_ms) {
                Ok(caller) => return Ok(caller),
                Err(OidcRefusal::Refused(problem)) => return Err(problem),
                Err(OidcRefusal::UnknownKey) => {}
            }
        }
        let keys = self.newer_than(known.map(|known| known.since)).await?;
        caller(token, &keys, &self.rules, now_unix_ms).map_err(|refusal| match refusal {
            OidcRefusal::Refused(problem) => problem,
            OidcRefusal::UnknownKey => {
                let detail =
                    "the token of the OIDC issuer is refused: the issuer has no key of this ID";
                Problem::new(
                    ProblemCode::Unauthenticated,
                    detail,
                    "get a new token from the issuer",
                )
            }
        })
    }

    fn known(&self) -> Option<FetchedKeys> {
        self.keys.read().clone()
    }

    /// Returns keys that were fetched after `since`: cached ones, or fetched now if the last fetch
    /// is at least [`LEAST_BETWEEN`] ago. Otherwise returns the cached keys while they are fresh.
    async fn newer_than(&self, since: Option<Instant>) -> Result<Arc<JwkSet>, Problem> {
        let mut last_fetch = self.last_fetch.lock().await;
        let known = self.known();
        if let Some(known) = &known
            && since.is_none_or(|since| known.since > since)
        {
            return Ok(Arc::clone(&known.keys));
        }
        let may_fetch = last_fetch.is_none_or(|last| last.elapsed() >= LEAST_BETWEEN);
        let fresh = known.filter(|known| known.since.elapsed() < FRESH_FOR);
        if !may_fetch {
            return fresh
                .map(|known| known.keys)
                .ok_or_else(|| away("the issuer did not respond within the last minute"));
        }
        *last_fetch = Some(Instant::now());
        match self.fetch().await {
            Ok(keys) => {
                let keys = Arc::new(keys);
                let known = FetchedKeys { keys: Arc::clone(&keys), since: Instant::now() };
                *self.keys.write() = Some(known);
                Ok(keys)
            }
            Err(error) => {
                let issuer = &self.rules.issuer;
                tracing::warn!(issuer, %error, "cannot fetch the keys of the OIDC issuer");
                fresh.map(|known| known.keys).ok_or_else(|| away(&error.to_string()))
            }
        }
    }

    /// Fetches the issuer's keys.
    async fn fetch(&self) -> io::Result<JwkSet> {
        let issuer = self.rules.issuer.trim_end_matches('/');
        let discovery: Discovery =
            self.get(&format!("{issuer}/.well-known/openid-configuration")).await?;
        if discovery.issuer != self.rules.issuer {
            return Err(io::Error::other(format!(
                "its metadata has the issuer {}",
                discovery.issuer
            )));
        }
        self.get(&discovery.jwks_uri).await
    }

    async fn get<T: DeserializeOwned>(&self, address: &str) -> io::Result<T> {
        let uri: Uri = address.parse().map_err(io::Error::other)?;
        let answer = tokio::time::timeout(ANSWER_LIMIT, self.exchange(&uri)).await;
        let late = |_| io::Error::other(format!("no response within {} s", ANSWER_LIMIT.as_secs()));
        serde_json::from_slice(&answer.map_err(late)??).map_err(io::Error::other)
    }

    async fn exchange(&self, uri: &Uri) -> io::Result<Bytes> {
        let (Some("https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(io::Error::other(format!("{uri} is not https://")));
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let socket = TcpStream::connect((host, authority.port_u16().unwrap_or(443))).await?;
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(&self.tls)).connect(name, socket).await?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        tokio::spawn(connection);
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path)
            .header(HOST, authority.as_str())
            .header(ACCEPT, "application/json")
            .body(Empty::<Bytes>::new())
            .map_err(io::Error::other)?;
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        if response.status() != StatusCode::OK {
            return Err(io::Error::other(format!("HTTP status {} at {uri}", response.status())));
        }
        let body = Limited::new(response.into_body(), MOST_ANSWER_BYTES).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(io::Error::other)
    }
}

fn away(why: &str) -> Problem {
    let detail = format!("cannot check tokens of the OIDC issuer: its keys are unavailable: {why}");
    let remedy = "try again in a minute; check the issuer, or use a token of `godwit control \
        token create`";
    Problem::new(ProblemCode::IssuerAway, detail, remedy)
}
