//! Who may connect to whom: a private authority, certificates of hosts and operators, and their use
//! in TLS.
//!
//! Every certificate names its holder (a DNS name in `subjectAltName`) and its role (the subject's
//! organisational unit). Both ends of a connection present one. Only TLS 1.3 and AES-GCM are used.

mod authority;
mod certificate;
mod error;
mod identity;
mod join;
mod key_file;
mod revocation;
mod serial;
mod verify;

pub use authority::{Authority, CheckedName, Grant, Issued, Signed, check_name, next_list_number};
pub use certificate::{Description, Role, describe, describe_der};
pub use error::PkiError;
pub use identity::{Identity, Peer, Trust, web_server};
pub use join::{Fingerprint, request, requested_key};
pub use revocation::{MOST_LIST_BYTES, MOST_REVOKED, RevocationList, Revocations};
pub use rustls::ServerConfig;
pub use serial::Serial;

/// Returns this machine's own name without its domain: the default name of an agent or a manager.
#[must_use]
pub fn machine_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.split('.').next().unwrap_or_default().to_owned()
}
