//! Connections that are kept for the next request: two requests a second with a TLS handshake each
//! would cost more than the requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_pki::Revocations;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;

use super::Client;
use crate::{ClientError, Endpoint};

/// Most idle connections to one agent.
const MOST_IDLE: usize = 2;
/// Longest time between two requests. Agents close a connection after 10 s.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// Greatest age of a connection: then the certificates are checked again.
const AGE_LIMIT: Duration = Duration::from_secs(60);
/// Time for a connection to end its last exchange.
const READY_LIMIT: Duration = Duration::from_millis(200);

/// Idle connections to one agent. They are closed when the last clone is dropped.
#[derive(Clone, Debug, Default)]
pub struct KeptConnections(Arc<Mutex<Vec<Kept>>>);

#[derive(Debug)]
struct Kept {
    sender: SendRequest<Full<Bytes>>,
    endpoint: Endpoint,
    /// Count of changes of the revoked certificates before the connection was opened.
    changes: u64,
    opened: Instant,
    used: Instant,
}

impl Kept {
    fn new(sender: SendRequest<Full<Bytes>>, endpoint: Endpoint, changes: u64) -> Kept {
        let now = Instant::now();
        Kept { sender, endpoint, changes, opened: now, used: now }
    }

    fn is_young(&self) -> bool {
        self.used.elapsed() < IDLE_LIMIT && self.opened.elapsed() < AGE_LIMIT
    }

    /// Waits until the last exchange has ended. Returns whether the connection is still open.
    async fn is_ready(&mut self) -> bool {
        matches!(tokio::time::timeout(READY_LIMIT, self.sender.ready()).await, Ok(Ok(())))
    }
}

impl KeptConnections {
    fn all(&self) -> MutexGuard<'_, Vec<Kept>> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, endpoint: &Endpoint, changes: u64) -> Option<Kept> {
        let mut all = self.all();
        let is_of = |kept: &Kept| kept.endpoint == *endpoint && kept.changes == changes;
        all.retain(|kept| kept.is_young() && is_of(kept));
        all.pop()
    }

    fn keep(&self, kept: Kept) {
        let mut all = self.all();
        if all.len() < MOST_IDLE {
            all.push(Kept { used: Instant::now(), ..kept });
        }
    }
}

impl Client {
    /// Uses the connections of earlier requests, and keeps them. Only for requests that may arrive
    /// twice, and whose answers are read whole: a request on a connection that turns out to be
    /// closed is sent again. None is used after the list of revoked certificates has changed.
    #[must_use]
    pub fn keeping(self, kept: &KeptConnections) -> Self {
        Client { kept: Some(kept.clone()), ..self }
    }

    /// Returns how often the lists of revoked certificates have changed.
    fn changes(&self) -> u64 {
        self.revocations.as_ref().map_or(0, Revocations::changes)
    }

    pub(crate) async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, ClientError> {
        let Some(kept) = &self.kept else {
            let mut sender = self.open().await?;
            return self.exchange_on(&mut sender, request).await;
        };
        while let Some(mut one) = kept.take(&self.endpoint, self.changes()) {
            if one.is_ready().await
                && let Ok(response) = self.exchange_on(&mut one.sender, request.clone()).await
            {
                kept.keep(one);
                return Ok(response);
            }
        }
        // Before the handshake: a list that arrives meanwhile has not been read in it.
        let changes = self.changes();
        let mut new = Kept::new(self.open().await?, self.endpoint.clone(), changes);
        let response = self.exchange_on(&mut new.sender, request).await?;
        kept.keep(new);
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use godwit_pki::{Authority, Grant, Identity, Role, Serial};
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncRead, AsyncWrite};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::HaRenewal;

    const RENEWAL: &str = r#"{"nonce":1,"term":2,"over":true,"watchdog":false}"#;

    async fn serve<S>(stream: S, keeps_alive: bool)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let answer = service_fn(|_: Request<Incoming>| async {
            let body = Full::new(Bytes::from_static(RENEWAL.as_bytes()));
            Ok::<_, Infallible>(Response::new(body))
        });
        let mut server = http1::Builder::new();
        server.keep_alive(keeps_alive);
        drop(server.serve_connection(TokioIo::new(stream), answer).await);
    }

    /// Serves renewals. Returns a client of it, and the number of its connections.
    async fn agent(keeps_alive: bool) -> (Client, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
        let accepted = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&accepted);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, keeps_alive));
            }
        });
        (Client::new(endpoint), accepted)
    }

    async fn renew(client: &Client) -> HaRenewal {
        client.ha_renewal().await.unwrap()
    }

    #[tokio::test]
    async fn renewals_use_the_same_connection() {
        let (client, accepted) = agent(true).await;
        let kept = KeptConnections::default();
        for _ in 0..40 {
            // A client of each request, as the manager has it.
            assert_eq!(renew(&client.clone().keeping(&kept)).await.term, 2);
        }
        // A machine that stalls between two of them closes one.
        let kept = accepted.load(Ordering::SeqCst);
        assert!(kept < 10, "{kept} connections");
        renew(&client).await;
        let all = accepted.load(Ordering::SeqCst);
        assert_eq!(all, kept + 1, "without it, each has a connection");
    }

    #[tokio::test]
    async fn a_connection_that_the_agent_closes_is_replaced() {
        let (client, accepted) = agent(false).await;
        let client = client.keeping(&KeptConnections::default());
        for number in 1..4 {
            renew(&client).await;
            assert_eq!(accepted.load(Ordering::SeqCst), number);
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_old_idle_or_of_another_address_is_not_used() {
        let (client, _) = agent(true).await;
        let kept = KeptConnections::default();
        let client = client.keeping(&kept);
        let other = Endpoint::Tcp("127.0.0.1:1".to_owned());
        renew(&client).await;
        assert!(kept.take(&other, 0).is_none() && kept.all().is_empty());
        let changes: [fn(&mut Kept); 2] = [
            |one| one.used = one.used.checked_sub(IDLE_LIMIT).unwrap(),
            |one| one.opened = one.opened.checked_sub(AGE_LIMIT).unwrap(),
        ];
        for change in changes {
            renew(&client).await;
            change(&mut kept.all()[0]);
            assert!(kept.take(client.endpoint(), 0).is_none());
        }
        renew(&client).await;
        assert!(kept.take(client.endpoint(), 0).is_some());
    }

    fn identity(authority: &Authority, name: &str, role: Role, lists: &Revocations) -> Identity {
        let grant = Grant { name: name.to_owned(), role, addresses: Vec::new(), days: 1 };
        let issued = authority.issue(&grant).unwrap();
        let (certificate, key) = (&issued.certificate, &issued.key);
        Identity::load_with(&authority.certificate(), certificate, key, lists).unwrap()
    }

    /// Serves renewals over TLS. Returns the address, and the number of connections.
    async fn secure_agent(host: &Identity) -> (Endpoint, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::Tls(listener.local_addr().unwrap().to_string());
        let acceptor = TlsAcceptor::from(Arc::clone(host.server()));
        let accepted = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&accepted);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        serve(stream, true).await;
                    }
                });
            }
        });
        (endpoint, accepted)
    }

    #[tokio::test]
    async fn a_revoked_host_loses_its_kept_connection() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(folder.path(), "test", 1).unwrap();
        let lists = Revocations::default();
        let manager = identity(&authority, "m1", Role::Operator, &lists);
        let host = identity(&authority, "a", Role::Host, &Revocations::default());
        let (endpoint, accepted) = secure_agent(&host).await;
        let client = Client::secure(endpoint, &manager, "a").keeping(&KeptConnections::default());
        let revoke = |number, serial: Serial| {
            let list = authority.list(number, BTreeMap::from([(serial, 0)])).unwrap();
            assert!(lists.accept(list).unwrap());
        };
        for _ in 0..2 {
            renew(&client).await;
        }
        assert_eq!(accepted.load(Ordering::SeqCst), 1);
        // Another one's certificate: the connection is only opened again.
        revoke(1, "0a:0b".parse().unwrap());
        renew(&client).await;
        assert_eq!(accepted.load(Ordering::SeqCst), 2);
        revoke(2, host.serial().clone());
        for _ in 0..2 {
            let refused = client.ha_renewal().await;
            assert!(matches!(refused, Err(ClientError::Unreachable { .. })), "{refused:?}");
        }
    }
}
