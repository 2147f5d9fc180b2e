//! Webhook: each notice is an HTTP request with a JSON body, signed with a shared key.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use godwit_api::control::AlarmNotice;
use http::header::{CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderName, Request, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use ring::hmac;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::{DELIVERY_LIMIT, Undelivered};
use crate::access::trust;
use crate::alarms::WebhookConfig;

/// Header with the signature of the body: `sha256=` and the HMAC in hexadecimal digits.
const SIGNATURE: HeaderName = HeaderName::from_static("x-godwit-signature");

/// An address that gets notices.
pub(crate) struct Webhook {
    uri: Uri,
    /// Present for `https`.
    tls: Option<Arc<ClientConfig>>,
    key: Option<hmac::Key>,
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The path may be a secret.
        f.debug_struct("Webhook").field("authority", &self.uri.authority()).finish_non_exhaustive()
    }
}

impl Webhook {
    /// Opens a webhook of a checked configuration.
    pub(crate) fn open(config: &WebhookConfig, key: Option<&str>) -> Result<Webhook, String> {
        let uri: Uri = config.url.parse().map_err(|_| "its url is invalid".to_owned())?;
        let tls = match uri.scheme_str() {
            Some("https") => {
                let authorities = trust::authorities(config.authority.as_deref());
                let tls = authorities.and_then(trust::client);
                Some(tls.map_err(|error| error.to_string())?)
            }
            _ => None,
        };
        let key = key.map(|key| hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()));
        Ok(Webhook { uri, tls, key })
    }

    /// Sends a request for each notice.
    pub(super) async fn post(&self, notices: &[AlarmNotice]) -> Result<(), Undelivered> {
        for notice in notices {
            let status = self.exchange(self.request(notice)?).await?;
            if status.is_success() {
                continue;
            }
            let why = format!("it answers {status}");
            let is_temporary = status.is_server_error()
                || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
            // Redirections are not followed: the configuration names the receiver.
            return Err(if is_temporary {
                Undelivered::now(&why)
            } else {
                Undelivered::for_good(&why)
            });
        }
        Ok(())
    }

    fn request(&self, notice: &AlarmNotice) -> Result<Request<Full<Bytes>>, Undelivered> {
        let body = serde_json::to_vec(notice).map_err(|error| Undelivered::for_good(&error))?;
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::post(path)
            .header(HOST, self.uri.authority().map_or("", |authority| authority.as_str()))
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("godwit/", env!("CARGO_PKG_VERSION")));
        if let Some(key) = &self.key {
            request = request.header(SIGNATURE, signature(key, &body));
        }
        request.body(Full::new(Bytes::from(body))).map_err(|error| Undelivered::for_good(&error))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<StatusCode, Undelivered> {
        let host = self.uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = self.uri.port_u16().unwrap_or(if self.tls.is_some() { 443 } else { 80 });
        let failed = |error: &dyn fmt::Display| {
            Undelivered::now(&format!("cannot connect to {host}:{port}: {error}"))
        };
        let socket = TcpStream::connect((host, port)).await.map_err(|error| failed(&error))?;
        let Some(tls) = &self.tls else { return answer(socket, request).await };
        let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(&error))?;
        let connected = TlsConnector::from(Arc::clone(tls)).connect(name, socket).await;
        answer(connected.map_err(|error| failed(&error))?, request).await
    }
}

/// Sends a request over a connection. The body of the answer is not read.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<StatusCode, Undelivered> {
    let connected = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = connected.map_err(|error| Undelivered::now(&error))?;
    // It ends with the sender; with a receiver that does not read, after this time.
    tokio::spawn(timeout(2 * DELIVERY_LIMIT, connection));
    let response = sender.send_request(request).await.map_err(|error| Undelivered::now(&error))?;
    Ok(response.status())
}

/// Returns the signature of a body.
fn signature(key: &hmac::Key, body: &[u8]) -> String {
    let mut text = "sha256=".to_owned();
    for byte in hmac::sign(key, body).as_ref() {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_rfc_4231() {
        // Test case 2.
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"Jefe");
        let expected = "sha256=5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(signature(&key, b"what do ya want for nothing?"), expected);
    }
}
