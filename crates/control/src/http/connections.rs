//! Limits for connections to the manager's network addresses: how many a network may hold at a
//! time, and how long a client may take to send a request. Root's own socket has no such limits.

use std::collections::BTreeMap;
use std::future::{Ready, ready};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use axum_server::{Handle, Server};
use futures::{StreamExt, stream};
use godwit_pki::ServerConfig;
use hyper::body::Body as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::access::rates::network;

/// Most connections at a time from one network. A browser opens several, a program one for each
/// request; each event stream and each console is one. Other managers pass their requests on.
const MOST_OF_ONE: usize = 512;
/// Most connections at a time in total.
const MOST_OF_ALL: usize = 8192;

/// Time limits for what depends on the client alone. The time of a response or of an event stream
/// has no limit. The TLS handshake has 10 s (`axum_server`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// From the start of a connection to the end of the first request's head.
    first_head: Duration,
    /// From a response to the end of the next request's head. Connections stay open for further
    /// requests.
    next_head: Duration,
    /// From a request's head to the end of its body.
    body: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            first_head: Duration::from_secs(10),
            next_head: Duration::from_secs(75),
            body: Duration::from_secs(30),
        }
    }
}

/// Counts of open connections by network.
#[derive(Debug)]
pub(crate) struct Permits {
    taken: Mutex<BTreeMap<IpAddr, usize>>,
    most_of_one: usize,
}

impl Default for Permits {
    fn default() -> Permits {
        Permits { taken: Mutex::default(), most_of_one: MOST_OF_ONE }
    }
}

/// Permit of one connection, released on drop.
#[derive(Debug)]
struct Permit {
    permits: Arc<Permits>,
    network: IpAddr,
}

impl Permits {
    fn taken(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.taken.lock()
    }

    /// Takes a permit for one more connection.
    fn acquire(self: &Arc<Self>, from: IpAddr) -> io::Result<Permit> {
        let network = network(from);
        let mut taken = self.taken();
        let own = taken.get(&network).copied().unwrap_or(0);
        if own >= self.most_of_one || taken.values().sum::<usize>() >= MOST_OF_ALL {
            tracing::warn!(%from, "connection closed: too many connections");
            return Err(io::Error::other("too many connections"));
        }
        taken.insert(network, own + 1);
        Ok(Permit { permits: Arc::clone(self), network })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.permits.taken();
        match taken.get_mut(&self.network) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.network)),
        }
    }
}

/// Gives each connection a permit, or closes it.
#[derive(Clone, Debug)]
struct PermitAcceptor(Arc<Permits>);

impl<S> Accept<TcpStream, S> for PermitAcceptor {
    type Stream = PermittedStream;
    type Service = S;
    type Future = Ready<io::Result<(PermittedStream, S)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        let permit = stream.peer_addr().and_then(|from| self.0.acquire(from.ip()));
        ready(permit.map(|permit| (PermittedStream { stream, _permit: permit }, service)))
    }
}

/// A connection with its permit.
#[derive(Debug)]
struct PermittedStream {
    stream: TcpStream,
    _permit: Permit,
}

impl AsyncRead for PermittedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for PermittedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Serves clients on the network until the handle ends it.
///
/// # Errors
/// The listener is unusable.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    tls: Option<Arc<ServerConfig>>,
    handle: Handle<SocketAddr>,
    permits: Arc<Permits>,
    patience: Patience,
) -> io::Result<()> {
    let app = app.layer(from_fn(move |request, next| read_in_time(request, next, patience.body)));
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    let server = axum_server::from_tcp(listener)?.handle(handle);
    let assigning = PermitAcceptor(permits);
    match tls {
        Some(tls) => {
            let tls = RustlsConfig::from_config(tls);
            let server = server.acceptor(RustlsAcceptor::new(tls).acceptor(assigning));
            patient(server, patience).serve(service).await
        }
        None => patient(server.acceptor(assigning), patience).serve(service).await,
    }
}

fn patient<A>(mut server: Server<SocketAddr, A>, patience: Patience) -> Server<SocketAddr, A> {
    let builder = server.http_builder();
    builder.http1().header_read_timeout(patience.next_head);
    // A client that is gone without closing the connection answers no ping.
    builder.http2().keep_alive_interval(patience.next_head).keep_alive_timeout(patience.first_head);
    server.first_request_timeout(patience.first_head)
}

/// Ends a body with an error if it does not arrive in time.
async fn read_in_time(request: Request, next: Next, limit: Duration) -> Response {
    // Most requests have no body.
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let deadline = Instant::now() + limit;
    let next_piece = move |mut rest: BodyDataStream| async move {
        match timeout_at(deadline, rest.next()).await {
            Ok(read) => read.transpose().map(|read| read.map(|bytes| (bytes, rest))),
            Err(_) => Err(axum::Error::new(io::Error::from(io::ErrorKind::TimedOut))),
        }
    };
    let in_time =
        |body: Body| Body::from_stream(stream::try_unfold(body.into_data_stream(), next_piece));
    next.run(request.map(in_time)).await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::task::JoinHandle;

    use super::*;

    /// Test server that ends on drop.
    struct Served {
        address: SocketAddr,
        task: JoinHandle<io::Result<()>>,
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    impl Served {
        fn begin(most_of_one: usize, patience: Patience) -> Served {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap();
            let app = Router::new()
                .route("/", get(async || "ok"))
                .route("/", post(async |_: String| "read"));
            let permits = Arc::new(Permits { most_of_one, ..Permits::default() });
            let task = tokio::spawn(serve(listener, app, None, Handle::new(), permits, patience));
            Served { address, task }
        }

        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.unwrap()
        }

        /// Sends text and returns the response, up to the end of the connection.
        async fn until_closed(&self, sent: &str) -> String {
            let mut stream = self.connect().await;
            let _ = stream.write_all(sent.as_bytes()).await;
            let mut back = Vec::new();
            let _ = stream.read_to_end(&mut back).await;
            String::from_utf8(back).unwrap()
        }

        async fn is_served(&self) -> bool {
            self.until_closed("GET / HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n")
                .await
                .contains("200 OK")
        }
    }

    #[tokio::test]
    async fn incomplete_requests_time_out() {
        const SOON: Duration = Duration::from_millis(100);
        const LONG: Duration = Duration::from_secs(3600);
        // Each limit is short alone: a slow machine exceeds no other.
        let patient = Patience { first_head: LONG, next_head: LONG, body: LONG };
        let begin = |patience| Served::begin(MOST_OF_ONE, patience);
        // Nothing, half a head, half a second head, half a body: without a limit each would wait
        // forever.
        let served = begin(Patience { first_head: SOON, ..patient });
        assert_eq!(served.until_closed("").await, "");
        assert_eq!(served.until_closed("GET / HTTP/1.1\r\nHost: m\r\nX: ").await, "");
        let served = begin(Patience { next_head: SOON, ..patient });
        let second = "GET / HTTP/1.1\r\nHost: m\r\n\r\nGET / HTTP/1.1\r\nHo";
        assert!(served.until_closed(second).await.contains("200 OK"));
        let served = begin(Patience { body: SOON, ..patient });
        let body = "POST / HTTP/1.1\r\nHost: m\r\nContent-Length: 9\r\n\r\nhalf";
        assert!(served.until_closed(body).await.contains("400 Bad Request"));
        let served = begin(patient);
        let whole =
            "POST / HTTP/1.1\r\nHost: m\r\nConnection: close\r\nContent-Length: 5\r\n\r\nwhole";
        assert!(served.until_closed(whole).await.contains("200 OK"));
    }

    #[tokio::test]
    async fn a_network_has_a_connection_limit_and_closed_connections_free_slots() {
        let served = Served::begin(2, Patience::default());
        let mut held = Vec::new();
        for _ in 0..2 {
            let mut stream = served.connect().await;
            // After a response the connection has its permit.
            stream.write_all(b"GET / HTTP/1.1\r\nHost: m\r\n\r\n").await.unwrap();
            let mut back = [0; 15];
            stream.read_exact(&mut back).await.unwrap();
            held.push(stream);
        }
        assert!(!served.is_served().await);
        drop(held);
        while !served.is_served().await {
            tokio::task::yield_now().await;
        }
    }
}
