//! Revoked certificates: lists that an authority signs (X.509 CRLs, RFC 5280), and the lists that a
//! host holds.
//!
//! A list names certificates by their serial numbers. It is in force until a later list of the same
//! authority replaces it. Its number never decreases. It does not expire, because a host that
//! cannot reach a manager must not forget what it knew. Handshakes read the newest list, so a list
//! takes effect from the next connection on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use parking_lot::RwLock;
use rcgen::{
    CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber,
};
use time::{Duration, OffsetDateTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::pem::{Pem, parse_x509_pem};
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;

use crate::PkiError;
use crate::certificate::Description;
use crate::error::file_error;
use crate::serial::Serial;

/// Maximum certificates on one list.
pub const MOST_REVOKED: usize = 5000;
/// Longest list that is read, in bytes of PEM.
pub const MOST_LIST_BYTES: usize = 512 << 10;
/// Maximum certificates that are remembered until they are taken.
const MOST_SEEN: usize = 10_000;

/// Revocation list signed by an authority.
#[derive(Clone, PartialEq, Eq)]
pub struct RevocationList {
    number: u64,
    /// Time of each certificate's revocation, seconds since 1970.
    revoked: BTreeMap<Serial, i64>,
    pem: String,
}

impl fmt::Debug for RevocationList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revocation list {} of {} certificates", self.number, self.revoked.len())
    }
}

impl RevocationList {
    pub(crate) fn sign(
        issuer: &Issuer<'_, KeyPair>,
        number: u64,
        revoked: BTreeMap<Serial, i64>,
    ) -> Result<RevocationList, PkiError> {
        if revoked.len() > MOST_REVOKED {
            let why = format!(
                "it would name {} certificates, and {MOST_REVOKED} is the most",
                revoked.len()
            );
            return Err(PkiError::BadList { why });
        }
        let now = OffsetDateTime::now_utc();
        let entry = |(serial, unix_s): (&Serial, &i64)| RevokedCertParams {
            serial_number: serial.number(),
            revocation_time: OffsetDateTime::from_unix_timestamp(*unix_s).unwrap_or(now),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: now,
            // The field is required; nothing here lets a list expire.
            next_update: now.saturating_add(Duration::days(3650)),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let pem = params.signed_by(issuer)?.pem()?;
        Ok(RevocationList { number, revoked, pem })
    }

    /// Reads a list (PEM) that one of the authorities in a file has signed.
    ///
    /// # Errors
    /// [`PkiError::BadList`]: it is not a list, too long, or not signed by a trusted authority.
    /// [`PkiError::File`], [`PkiError::Unreadable`]: the authorities cannot be read.
    pub fn read(text: &str, authorities: &Path) -> Result<RevocationList, PkiError> {
        let bad = |why: &str| PkiError::BadList { why: why.to_owned() };
        if text.len() > MOST_LIST_BYTES {
            return Err(bad("it is longer than 512 KiB"));
        }
        let (_, pem) = parse_x509_pem(text.as_bytes()).map_err(|_| bad("it is not a PEM file"))?;
        let (rest, list) = CertificateRevocationList::from_der(&pem.contents)
            .map_err(|_| bad("it is not a certificate revocation list"))?;
        if pem.label != "X509 CRL" || !rest.is_empty() {
            return Err(bad("it is not a certificate revocation list"));
        }
        if !is_signed(&list, authorities)? {
            return Err(bad("no authority that is trusted here has signed it"));
        }
        let number = list.crl_number().and_then(|number| u64::try_from(number).ok());
        let number = number.ok_or_else(|| bad("it has no number"))?;
        let mut revoked = BTreeMap::new();
        for one in list.iter_revoked_certificates() {
            let serial =
                Serial::of(one.raw_serial()).ok_or_else(|| bad("a serial number is too long"))?;
            revoked.insert(serial, one.revocation_date.timestamp());
            if revoked.len() > MOST_REVOKED {
                return Err(bad("it names too many certificates"));
            }
        }
        Ok(RevocationList { number, revoked, pem: text.to_owned() })
    }

    /// Returns the list's number. Later lists have higher numbers.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the time of each certificate's revocation, seconds since 1970.
    #[must_use]
    pub fn revoked(&self) -> &BTreeMap<Serial, i64> {
        &self.revoked
    }

    /// Returns the list in the form in which it is sent and stored (PEM).
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }
}

/// Returns whether an authority in a file (PEM) signed a list.
fn is_signed(list: &CertificateRevocationList<'_>, authorities: &Path) -> Result<bool, PkiError> {
    let bytes = fs::read(authorities).map_err(file_error(authorities, "read"))?;
    for pem in Pem::iter_from_buffer(&bytes) {
        let unreadable = |why: String| PkiError::Unreadable { path: authorities.to_owned(), why };
        let pem = pem.map_err(|error| unreadable(error.to_string()))?;
        let (_, authority) = X509Certificate::from_der(&pem.contents)
            .map_err(|error| unreadable(error.to_string()))?;
        if authority.is_ca()
            && authority.subject().as_raw() == list.issuer().as_raw()
            && list.verify_signature(authority.public_key()).is_ok()
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Revocation lists in force on one host. Clones share them.
#[derive(Clone, Default)]
pub struct Revocations(Arc<RwLock<Held>>);

#[derive(Default)]
struct Held {
    /// The list from the manager.
    newest: Option<RevocationList>,
    /// The list from a file named in the configuration.
    configured: Option<RevocationList>,
    /// How often a list has changed.
    changes: u64,
    /// Valid certificates that servers presented; `None`: they are not recorded.
    seen: Option<Seen>,
}

#[derive(Default)]
struct Seen {
    all: BTreeMap<Serial, Description>,
    /// Certificates that have not been taken yet.
    fresh: BTreeSet<Serial>,
}

impl fmt::Debug for Revocations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.0.read();
        f.debug_tuple("Revocations").field(&held.newest).field(&held.configured).finish()
    }
}

impl Revocations {
    /// Creates the lists of a manager, which also records the certificates that its hosts present.
    #[must_use]
    pub fn watching() -> Revocations {
        let held = Held { seen: Some(Seen::default()), ..Held::default() };
        Revocations(Arc::new(RwLock::new(held)))
    }

    /// Checks that a list may replace the newest one. Returns false if it is the newest one
    /// already.
    ///
    /// # Errors
    /// [`PkiError::OldList`].
    pub fn check_newer(&self, list: &RevocationList) -> Result<bool, PkiError> {
        let held = self.0.read();
        match &held.newest {
            Some(newest) if newest == list => Ok(false),
            Some(newest) if newest.number >= list.number => {
                Err(PkiError::OldList { number: list.number, newest: newest.number })
            }
            _ => Ok(true),
        }
    }

    /// Replaces the newest list. It takes effect from the next handshake on. Returns false if it is
    /// the newest one already.
    ///
    /// # Errors
    /// [`PkiError::OldList`]: the newest list stays.
    pub fn accept(&self, list: RevocationList) -> Result<bool, PkiError> {
        let is_newer = self.check_newer(&list)?;
        let mut held = self.0.write();
        // Another list may have arrived in between.
        if is_newer && held.newest.as_ref().is_none_or(|newest| newest.number < list.number) {
            held.newest = Some(list);
            held.changes = held.changes.wrapping_add(1);
            return Ok(true);
        }
        Ok(false)
    }

    /// Sets the list from the configuration, in addition to the newest one.
    pub fn configure(&self, list: Option<RevocationList>) {
        let mut held = self.0.write();
        if held.configured != list {
            held.configured = list;
            held.changes = held.changes.wrapping_add(1);
        }
    }

    /// Returns how often a list has changed: a connection that was opened at another count has to
    /// be verified again.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.0.read().changes
    }

    /// Returns the newest list, or `None` if no list has arrived.
    #[must_use]
    pub fn newest(&self) -> Option<RevocationList> {
        self.0.read().newest.clone()
    }

    /// Returns whether a certificate is on one of the lists.
    #[must_use]
    pub fn has(&self, serial: &Serial) -> bool {
        let held = self.0.read();
        [&held.newest, &held.configured]
            .into_iter()
            .flatten()
            .any(|list| list.revoked.contains_key(serial))
    }

    /// Returns the valid certificates that servers presented since the last call, if they are
    /// recorded.
    #[must_use]
    pub fn take_seen(&self) -> Vec<Description> {
        let mut held = self.0.write();
        let Some(Seen { all, fresh }) = held.seen.as_mut() else { return Vec::new() };
        std::mem::take(fresh).iter().filter_map(|serial| all.get(serial).cloned()).collect()
    }

    /// Returns the holder of a valid certificate that a server presented, if they are recorded.
    #[must_use]
    pub fn holder(&self, serial: &Serial) -> Option<String> {
        let held = self.0.read();
        held.seen.as_ref()?.all.get(serial).map(|seen| seen.name.clone())
    }

    /// Records a server's valid certificate.
    pub(crate) fn note_seen(&self, description: Description) {
        let is_noted = |seen: &Seen| seen.all.contains_key(&description.serial);
        // Most certificates are recorded already, or recording is off.
        if self.0.read().seen.as_ref().is_none_or(is_noted) {
            return;
        }
        let mut held = self.0.write();
        if let Some(seen) = held.seen.as_mut() {
            if seen.all.len() >= MOST_SEEN {
                // Certificates still in use will be presented again.
                *seen = Seen::default();
            }
            seen.fresh.insert(description.serial.clone());
            seen.all.insert(description.serial.clone(), description);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_is_read_as_it_is_printed_here_and_by_openssl() {
        let serial = Serial::draw().unwrap();
        assert_eq!(serial.to_string().parse(), Ok(serial.clone()));
        assert_eq!("0A:0b".parse(), Ok(Serial(vec![10, 11])));
        assert_eq!("000a".parse(), Ok(Serial(vec![10])));
        assert_eq!("0000".parse(), Ok(Serial(vec![0])));
        for text in ["", "0", "0g", "ä", &"11".repeat(21)] {
            assert!(text.parse::<Serial>().is_err(), "{text}");
        }
    }
}
