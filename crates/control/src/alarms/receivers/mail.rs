//! Mail: one message to a mail server (SMTP) for the notices that wait.

use std::error::Error as _;
use std::time::Duration;
use std::{fmt, io};

use godwit_api::control::AlarmNotice;
use lettre::Address;
use lettre::address::Envelope;
use lettre::transport::smtp::Error;
use lettre::transport::smtp::authentication::{Credentials, DEFAULT_MECHANISMS};
use lettre::transport::smtp::client::{
    AsyncSmtpConnection, AsyncTokioStream, Certificate, CertificateStore, TlsParameters,
};
use lettre::transport::smtp::extension::ClientId;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::Undelivered;
use super::bounded::Bounded;
use super::message::message;
use crate::access::trust;
use crate::alarms::{MailConfig, MailTls};

/// Longest time for the goodbye to a server.
const QUIT_LIMIT: Duration = Duration::from_secs(2);

/// A mail server, and the sender and recipients of notices.
pub(crate) struct Mail {
    server: String,
    port: u16,
    /// TLS from the first byte on, and the name that the server's certificate must have.
    at_once: Option<(TlsConnector, ServerName<'static>)>,
    /// TLS after STARTTLS.
    later: Option<TlsParameters>,
    credentials: Option<Credentials>,
    from: String,
    to: Vec<String>,
    envelope: Envelope,
}

impl fmt::Debug for Mail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mail { server, port, to, .. } = self;
        f.debug_struct("Mail")
            .field("server", server)
            .field("port", port)
            .field("to", to)
            .finish_non_exhaustive()
    }
}

impl Mail {
    /// Opens a mail server of a checked configuration.
    pub(crate) fn open(config: &MailConfig, password: Option<String>) -> Result<Mail, String> {
        let (at_once, later) = match config.tls {
            MailTls::None => (None, None),
            MailTls::Starttls => (None, Some(parameters(config)?)),
            MailTls::Tls => (Some(connector(config)?), None),
        };
        let address = |text: &String| {
            text.parse::<Address>().map_err(|error| format!("{text:?} is no address: {error}"))
        };
        let to = config.to.iter().map(address).collect::<Result<Vec<Address>, String>>()?;
        let envelope = Envelope::new(Some(address(&config.from)?), to);
        let credentials = config.user.clone().zip(password);
        Ok(Mail {
            server: config.server.clone(),
            port: config.port(),
            at_once,
            later,
            credentials: credentials.map(|(user, password)| Credentials::new(user, password)),
            from: config.from.clone(),
            to: config.to.clone(),
            envelope: envelope.map_err(|error| error.to_string())?,
        })
    }

    /// Sends one message about these notices.
    pub(super) async fn send(&self, notices: &[AlarmNotice]) -> Result<(), Undelivered> {
        let text = message(&self.from, &self.to, notices);
        let stream = self.connect().await.map_err(|error| self.unreachable(&error))?;
        let mut connection = self.greet(stream).await.map_err(|error| self.failed(&error))?;
        let sent = connection.send(&self.envelope, text.as_bytes()).await;
        // A server that has accepted the message and does not say goodbye gets no second one.
        tokio::spawn(async move {
            let _ = timeout(QUIT_LIMIT, connection.abort()).await;
        });
        sent.map(drop).map_err(|error| self.failed(&error))
    }

    async fn connect(&self) -> io::Result<Box<dyn AsyncTokioStream>> {
        let socket = TcpStream::connect((self.server.as_str(), self.port)).await?;
        let peer = socket.peer_addr()?;
        let stream: Box<dyn AsyncTokioStream> = match &self.at_once {
            Some((connector, name)) => {
                let encrypted = connector.connect(name.clone(), socket).await?;
                Box::new(Bounded::new(encrypted, peer))
            }
            None => Box::new(Bounded::new(socket, peer)),
        };
        Ok(stream)
    }

    /// Introduces the manager to the server, with TLS and a password as they are configured.
    async fn greet(&self, stream: Box<dyn AsyncTokioStream>) -> Result<AsyncSmtpConnection, Error> {
        let name = ClientId::Domain(godwit_pki::machine_name());
        let mut connection = AsyncSmtpConnection::connect_with_transport(stream, &name).await?;
        if let Some(parameters) = self.later.clone() {
            connection.starttls(parameters, &name).await?;
        }
        if let Some(credentials) = &self.credentials {
            connection.auth(DEFAULT_MECHANISMS, credentials).await?;
        }
        Ok(connection)
    }

    fn unreachable(&self, error: &io::Error) -> Undelivered {
        let Mail { server, port, .. } = self;
        Undelivered::now(&format!("cannot send mail through {server}:{port}: {error}"))
    }

    /// Describes an error without the server's own words: they could repeat a secret.
    fn failed(&self, error: &Error) -> Undelivered {
        let Mail { server, port, .. } = self;
        let why = match (error.status(), error.source()) {
            (Some(code), _) => format!("mail server {server}:{port} answers {code}"),
            (None, Some(source)) if !error.is_response() => {
                format!("cannot send mail through {server}:{port}: {source}")
            }
            _ => format!("mail server {server}:{port} sends an invalid answer"),
        };
        if error.is_permanent() { Undelivered::for_good(&why) } else { Undelivered::now(&why) }
    }
}

/// Returns the settings of TLS from the first byte on: the server must show a certificate of its
/// name.
fn connector(config: &MailConfig) -> Result<(TlsConnector, ServerName<'static>), String> {
    let name = ServerName::try_from(config.server.clone()).map_err(|error| error.to_string())?;
    let client = trust::authorities(config.authority.as_deref()).and_then(trust::client);
    Ok((TlsConnector::from(client.map_err(|error| error.to_string())?), name))
}

/// Returns the settings of TLS after STARTTLS, as strict.
fn parameters(config: &MailConfig) -> Result<TlsParameters, String> {
    let authorities = trust::authorities(config.authority.as_deref());
    let mut builder =
        TlsParameters::builder(config.server.clone()).certificate_store(CertificateStore::None);
    for authority in authorities.map_err(|error| error.to_string())? {
        let certificate = Certificate::from_der(authority.to_vec());
        builder = builder.add_root_certificate(certificate.map_err(|error| error.to_string())?);
    }
    builder.build().map_err(|error| error.to_string())
}
