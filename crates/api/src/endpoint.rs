//! Addresses of agents, and why a request to one has no usable response.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use http::Uri;

use crate::{ApiError, ErrorCode};

/// Address on which an agent listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// Unix socket: `unix:/run/godwit/agent.sock`.
    Unix(PathBuf),
    /// Address and port, without TLS: `http://10.77.0.11:7700`.
    Tcp(String),
    /// Address and port, over mutual TLS: `https://10.77.0.11:7700`.
    Tls(String),
}

impl FromStr for Endpoint {
    type Err = ApiError;

    fn from_str(text: &str) -> Result<Self, ApiError> {
        let wrong = |why: &str| {
            ApiError::new(
                ErrorCode::InvalidRequest,
                format!("\"{text}\" is not an agent address: {why}"),
                "write unix:/path/to/agent.sock or https://address:port",
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            let Some(below_root) = path.strip_prefix('/') else {
                return Err(wrong("the path is not absolute"));
            };
            // Extra leading slashes mean the same path, but would be read as another one after
            // `unix:`.
            return Ok(Endpoint::Unix(format!("/{}", below_root.trim_start_matches('/')).into()));
        }
        let uri: Uri = text.parse().map_err(|error| wrong(&format!("{error}")))?;
        match (uri.scheme_str(), uri.authority()) {
            (Some("http"), Some(authority)) if authority.port_u16().is_some() => {
                Ok(Endpoint::Tcp(authority.to_string()))
            }
            (Some("https"), Some(authority)) if authority.port_u16().is_some() => {
                Ok(Endpoint::Tls(authority.to_string()))
            }
            (Some("http" | "https"), Some(_)) => Err(wrong("the port is missing")),
            _ => Err(wrong("it starts with none of unix:, https:// and http://")),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
            Endpoint::Tcp(authority) => write!(f, "http://{authority}"),
            Endpoint::Tls(authority) => write!(f, "https://{authority}"),
        }
    }
}

/// Reason why a request has no usable response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The agent is unreachable.
    #[error("{} ({})", self.detail(), self.remedy())]
    Unreachable {
        /// Address of the agent.
        endpoint: Endpoint,
        /// Error of the connection.
        why: String,
        /// Whether the agent's certificate is not trusted.
        is_untrusted: bool,
    },
    /// The agent refused the request.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The response does not come from an agent.
    #[error("{} ({})", self.detail(), self.remedy())]
    Protocol {
        /// Address of the responder.
        endpoint: Endpoint,
        /// What is wrong with the response.
        why: String,
    },
}

/// Remedy for a server whose certificate is not trusted.
pub(crate) const UNTRUSTED_REMEDY: &str =
    "check that --ca, or authority in [tls] of the hosts file, is the authority that issued it";

impl ClientError {
    /// Returns the agent's error code if the agent refused the request.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            ClientError::Refused(error) => Some(error.code),
            _ => None,
        }
    }

    /// Returns what failed and why, in one line.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            ClientError::Unreachable { endpoint, why, .. } => {
                format!("cannot reach the agent at {endpoint}: {why}")
            }
            ClientError::Refused(error) => error.message.clone(),
            ClientError::Protocol { endpoint, why } => {
                format!("{endpoint} does not respond as a Godwit agent: {why}")
            }
        }
    }

    /// Returns how to fix it.
    #[must_use]
    pub fn remedy(&self) -> &str {
        match self {
            ClientError::Unreachable { is_untrusted: true, .. } => UNTRUSTED_REMEDY,
            ClientError::Unreachable { endpoint: Endpoint::Unix(_), .. } => {
                "start the agent (`systemctl start godwit-host`, or `godwit host run`), and run \
                 this command as root"
            }
            ClientError::Unreachable { .. } => {
                "check the network, and start the agent there (`systemctl start godwit-host`)"
            }
            ClientError::Refused(error) => &error.remedy,
            ClientError::Protocol { .. } => "check the address and the version of the agent there",
        }
    }
}
