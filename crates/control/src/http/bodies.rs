//! Reading the rest of a request's body when the request is refused early. Over HTTP/2, a server
//! that answers and stops reading resets the stream. Some clients (curl up to 8.0) treat the reset
//! as a failure and never show the answer. So the rest is read and discarded, up to the limit that
//! holds for every body.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::MAX_BODY_BYTES;

/// Longest time for reading the rest of a body.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// A body that stays readable after the handler that received it is gone.
#[derive(Clone)]
struct Shared(Arc<Mutex<Body>>);

impl Shared {
    fn with<T>(&self, action: impl FnOnce(&mut Body) -> T) -> T {
        action(&mut self.0.lock())
    }
}

impl HttpBody for Shared {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.with(|body| Pin::new(body).poll_frame(context))
    }

    fn is_end_stream(&self) -> bool {
        self.with(|body| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.with(|body| body.size_hint())
    }
}

/// Reads the rest of a refused request's body before the response is sent.
pub(crate) async fn read_out(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    let shared = Shared(Arc::new(Mutex::new(body)));
    let response = next.run(Request::from_parts(parts, Body::new(shared.clone()))).await;
    if response.status().is_client_error() || response.status().is_server_error() {
        // A client that sends for longer is cut off.
        let _ = timeout(READ_LIMIT, discard(shared)).await;
    }
    response
}

async fn discard(mut body: Shared) {
    let mut bytes = 0;
    while let Some(Ok(frame)) =
        std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
    {
        bytes += frame.data_ref().map_or(0, Bytes::len);
        if bytes > MAX_BODY_BYTES {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::StreamExt;
    use http::StatusCode;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use hyper_util::service::TowerToHyperService;

    use super::*;
    use crate::http::tests::Managed;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_request_that_is_refused_over_http_2_is_read_to_its_end() {
        /// More than a client may send before the server reads.
        const PIECES: usize = 40;
        let managed = Managed::begin().await;
        let (client, server) = tokio::io::duplex(1 << 16);
        let service = TowerToHyperService::new(managed.app.clone());
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(server), service);
        tokio::spawn(server);
        let client =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client));
        let (mut sender, connection) = client.await.unwrap();
        tokio::spawn(connection);
        for token in [None, Some("Bearer unknown")] {
            let sent = Arc::new(AtomicUsize::new(0));
            let counts = Arc::clone(&sent);
            let pieces = futures::stream::iter(0..PIECES).map(move |_| {
                counts.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Bytes::from_static(&[b' '; 1 << 14]))
            });
            let mut request = Request::post("http://m1/api/v1/hosts");
            if let Some(token) = token {
                request = request.header("authorization", token);
            }
            let request = request.body(Body::from_stream(pieces)).unwrap();
            let response = sender.send_request(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
            assert_eq!(sent.load(Ordering::SeqCst), PIECES);
        }
    }
}
