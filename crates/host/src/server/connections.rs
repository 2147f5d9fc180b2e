//! Connections of others: how many there are at a time, and how long one may take to ask.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
use tokio::io::{AsyncRead, AsyncWrite};

use crate::server::routes::{MAX_BODY_BYTES, Refusal, tell_too_long};

/// Connections at a time of one certificate: a request has one of its own, and so has each event stream.
pub(super) const MOST_OF_ONE: usize = 128;
/// Connections at a time of all.
pub(super) const MOST_OF_ALL: usize = 512;
/// What is kept of a request's head.
const MOST_HEAD_BYTES: usize = 64 << 10;

/// How long another may take over what it alone has to do. How long an answer takes, and a stream of events, is not limited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// From the handshake, or the answer before, to the end of a request's head.
    pub(super) head: Duration,
    /// From there to the end of its body.
    pub(super) body: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { head: Duration::from_secs(10), body: Duration::from_secs(10) }
    }
}

/// Connections that there are, by who is at their other ends.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<BTreeMap<String, usize>>);

/// A connection's place, as long as it lives.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    who: String,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        // Changed by one assignment at a time.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more; none: there are too many.
    pub(super) fn take(self: &Arc<Self>, who: &str) -> Option<Place> {
        let mut all = self.lock();
        let own = all.get(who).copied().unwrap_or(0);
        if own >= MOST_OF_ONE || all.values().sum::<usize>() >= MOST_OF_ALL {
            return None;
        }
        all.insert(who.to_owned(), own + 1);
        Some(Place { places: Arc::clone(self), who: who.to_owned() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.places.lock();
        match all.get_mut(&self.who) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(all.remove(&self.who)),
        }
    }
}

/// The same, for requests whose bodies come within that time.
pub(super) fn reading(app: Router, patience: Patience) -> Router {
    app.layer(axum::middleware::from_fn_with_state(patience.body, read_body))
}

/// Answers the requests of a connection, which have `known` among their extensions, to its end.
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
        tracing::debug!(%error, "a connection ended");
    }
}

/// Lets a request through once all of its body is there.
async fn read_body(State(limit): State<Duration>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let read = axum::body::to_bytes(body, MAX_BODY_BYTES);
    match tokio::time::timeout(limit, read).await {
        Ok(Ok(body)) => next.run(Request::from_parts(head, Body::from(body))).await,
        // More than that, or the connection broke.
        Ok(Err(_)) => tell_too_long(StatusCode::PAYLOAD_TOO_LARGE.into_response()).await,
        Err(_) => {
            let message = format!("the request's body did not come within {limit:?}");
            let remedy = "see the link between the two hosts, then ask again";
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

    /// So long that a test which waits for it hangs.
    const FOR_EVER: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(50);

    fn connect(app: &Router, patience: Patience) -> DuplexStream {
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(serve(far, reading(app.clone(), patience), (), patience));
        near
    }

    /// All that comes until the other end hangs up.
    async fn rest(mut stream: DuplexStream) -> String {
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        all
    }

    #[test]
    fn one_certificate_has_no_more_than_its_places_and_all_no_more_than_theirs() {
        let places = Arc::<Places>::default();
        let mut taken: Vec<Place> =
            (0..MOST_OF_ONE).map(|_| places.take("host b").unwrap()).collect();
        assert!(places.take("host b").is_none());
        taken.pop();
        taken.push(places.take("host b").unwrap());
        let others =
            (0..MOST_OF_ALL).filter_map(|number| places.take(&format!("host {}", number % 9)));
        let others: Vec<Place> = others.collect();
        assert_eq!(taken.len() + others.len(), MOST_OF_ALL);
        assert!(places.take("operator").is_none());
        drop((taken, others));
        assert!(places.lock().is_empty() && places.take("operator").is_some());
    }

    #[tokio::test]
    async fn who_does_not_ask_is_hung_up_on() {
        let app = Router::new().route("/", get(async || "here"));
        let patience = Patience { head: SHORT, body: FOR_EVER };
        assert_eq!(rest(connect(&app, patience)).await, "");
        for more in ["", "GET / HTTP/1.1\r\nHo"] {
            let mut stream = connect(&app, patience);
            stream
                .write_all(format!("GET / HTTP/1.1\r\nHost: a\r\n\r\n{more}").as_bytes())
                .await
                .unwrap();
            let said = rest(stream).await;
            assert!(said.starts_with("HTTP/1.1 200") && said.ends_with("here"), "{said}");
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let app = Router::new().route("/", post(async |body: String| body));
        let mut stream = connect(&app, Patience { head: SHORT, body: SHORT });
        stream
            .write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhel")
            .await
            .unwrap();
        let said = rest(stream).await;
        assert!(said.contains("did not come within"), "{said}");
    }

    #[tokio::test]
    async fn a_stream_of_events_lives_on() {
        let (tell, told) = tokio::sync::mpsc::channel::<&str>(1);
        let told = Arc::new(tokio::sync::Mutex::new(Some(told)));
        let events = async move || {
            let told = told.lock().await.take().unwrap();
            Body::from_stream(
                tokio_stream::wrappers::ReceiverStream::new(told).map(Ok::<_, Infallible>),
            )
        };
        let app = Router::new().route("/", get(events));
        let patience = Patience { head: SHORT, body: SHORT };
        let mut stream = connect(&app, patience);
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        // Others' time is over meanwhile.
        assert_eq!(rest(connect(&app, patience)).await, "");
        tell.send("an event").await.unwrap();
        drop(tell);
        assert!(rest(stream).await.contains("an event"));
    }
}
