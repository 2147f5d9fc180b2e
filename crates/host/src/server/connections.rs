//! Connections from other hosts: limits on their number and on the time that a request may take.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use godwit_api::{ApiError, ErrorCode};
use http::{Extensions, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::server::answers::{MAX_BODY_BYTES, Refusal, explain_too_long};

/// Concurrent connections of one certificate. Each request and each event stream has its own.
pub(super) const MOST_OF_ONE: usize = 128;
/// Concurrent connections in total.
pub(super) const MOST_OF_ALL: usize = 512;
/// Buffer size for a request's head.
const MOST_HEAD_BYTES: usize = 64 << 10;

/// Time limits for what the client alone must do. Neither the handler's answer nor an event stream
/// is limited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// From the handshake, or the previous answer, to the end of a request's head.
    pub(super) head: Duration,
    /// From the end of the head to the end of the body.
    pub(super) body: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { head: Duration::from_secs(10), body: Duration::from_secs(10) }
    }
}

/// Numbers of open connections, by client.
#[derive(Debug, Default)]
pub(super) struct Permits(Mutex<BTreeMap<String, usize>>);

/// Permit of one connection, held for as long as the connection lives.
#[derive(Debug)]
pub(super) struct Permit {
    permits: Arc<Permits>,
    who: String,
}

impl Permits {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        // Each change is one assignment.
        self.0.lock()
    }

    /// Takes a permit for one more connection; `None` if there are too many.
    pub(super) fn acquire(self: &Arc<Self>, who: &str) -> Option<Permit> {
        let mut all = self.lock();
        let own = all.get(who).copied().unwrap_or(0);
        if own >= MOST_OF_ONE || all.values().sum::<usize>() >= MOST_OF_ALL {
            return None;
        }
        all.insert(who.to_owned(), own + 1);
        Some(Permit { permits: Arc::clone(self), who: who.to_owned() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut all = self.permits.lock();
        match all.get_mut(&self.who) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(all.remove(&self.who)),
        }
    }
}

/// Adds to a router the time limit for the body of each request.
pub(super) fn reading(app: Router, patience: Patience) -> Router {
    app.layer(axum::middleware::from_fn_with_state(patience.body, read_body))
}

/// Serves the requests of one connection until it ends; `known` is among their extensions.
pub(super) async fn serve<T: Clone + Send + Sync + 'static>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    app: Router,
    known: T,
    patience: Patience,
) {
    let app = TowerToHyperService::new(app);
    let answer = service_fn(move |mut request: http::Request<Incoming>| {
        let extensions: &mut Extensions = request.extensions_mut();
        extensions.insert(known.clone());
        let answered = app.call(request);
        async move { Ok::<_, Infallible>(answered.await.unwrap_or_else(|never| match never {})) }
    });
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(patience.head)
        .max_buf_size(MOST_HEAD_BYTES);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), answer).with_upgrades().await
    {
        tracing::debug!(%error, "connection ended");
    }
}

/// Passes a request on once its whole body has arrived.
async fn read_body(State(limit): State<Duration>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let read = axum::body::to_bytes(body, MAX_BODY_BYTES);
    match tokio::time::timeout(limit, read).await {
        Ok(Ok(body)) => next.run(Request::from_parts(head, Body::from(body))).await,
        // The body is too long, or the connection broke.
        Ok(Err(_)) => explain_too_long(StatusCode::PAYLOAD_TOO_LARGE.into_response()).await,
        Err(_) => {
            let message =
                format!("cannot read the request's body: it did not arrive within {limit:?}");
            let remedy = "check the link between the two hosts, then repeat the request";
            Refusal(ApiError::new(ErrorCode::InvalidRequest, message, remedy)).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use futures::StreamExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    /// Long enough that a test which waits for it hangs.
    const FOR_EVER: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(50);

    fn connect(app: &Router, patience: Patience) -> DuplexStream {
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(serve(far, reading(app.clone(), patience), (), patience));
        near
    }

    /// Reads everything until the other end closes the connection.
    async fn rest(mut stream: DuplexStream) -> String {
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        all
    }

    #[test]
    fn connections_are_limited_for_each_certificate_and_in_total() {
        let permits = Arc::<Permits>::default();
        let mut taken: Vec<Permit> =
            (0..MOST_OF_ONE).map(|_| permits.acquire("host b").unwrap()).collect();
        assert!(permits.acquire("host b").is_none());
        taken.pop();
        taken.push(permits.acquire("host b").unwrap());
        let others =
            (0..MOST_OF_ALL).filter_map(|number| permits.acquire(&format!("host {}", number % 9)));
        let others: Vec<Permit> = others.collect();
        assert_eq!(taken.len() + others.len(), MOST_OF_ALL);
        assert!(permits.acquire("operator").is_none());
        drop((taken, others));
        assert!(permits.lock().is_empty() && permits.acquire("operator").is_some());
    }

    #[tokio::test]
    async fn a_silent_client_is_disconnected() {
        let app = Router::new().route("/", get(async || "here"));
        let patience = Patience { head: SHORT, body: FOR_EVER };
        assert_eq!(rest(connect(&app, patience)).await, "");
        for more in ["", "GET / HTTP/1.1\r\nHo"] {
            let mut stream = connect(&app, patience);
            stream
                .write_all(format!("GET / HTTP/1.1\r\nHost: a\r\n\r\n{more}").as_bytes())
                .await
                .unwrap();
            let received = rest(stream).await;
            assert!(
                received.starts_with("HTTP/1.1 200") && received.ends_with("here"),
                "{received}"
            );
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_arrive_is_refused() {
        let app = Router::new().route("/", post(async |body: String| body));
        let mut stream = connect(&app, Patience { head: SHORT, body: SHORT });
        stream
            .write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhel")
            .await
            .unwrap();
        let received = rest(stream).await;
        assert!(received.contains("did not arrive within"), "{received}");
    }

    #[tokio::test]
    async fn an_event_stream_is_not_limited() {
        let (sender, receiver) = tokio::sync::mpsc::channel::<&str>(1);
        let receiver = Arc::new(tokio::sync::Mutex::new(Some(receiver)));
        let events = async move || {
            let receiver = receiver.lock().await.take().unwrap();
            Body::from_stream(
                tokio_stream::wrappers::ReceiverStream::new(receiver).map(Ok::<_, Infallible>),
            )
        };
        let app = Router::new().route("/", get(events));
        let patience = Patience { head: SHORT, body: SHORT };
        let mut stream = connect(&app, patience);
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        // The time limit of another connection passes meanwhile.
        assert_eq!(rest(connect(&app, patience)).await, "");
        sender.send("an event").await.unwrap();
        drop(sender);
        assert!(rest(stream).await.contains("an event"));
    }
}
