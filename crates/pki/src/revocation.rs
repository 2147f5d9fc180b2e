//! Revoked certificates: lists that an authority signs (X.509 CRLs, RFC 5280), and which of them a host holds.
//!
//! A list names certificates by their serial numbers. It counts until a later one of the same authority takes its place:
//! its number never goes back, and it does not expire, as a host that hears no manager must not forget what it knew.
//! Handshakes read the newest list, so that one that arrives counts for the next connection.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use rcgen::{CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber};
use ring::rand::{SecureRandom, SystemRandom};
use time::{Duration, OffsetDateTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::pem::{Pem, parse_x509_pem};
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;

use crate::certificate::Description;
use crate::{PkiError, file_error};

/// Most certificates on one list.
pub const MOST_REVOKED: usize = 5000;
/// Longest list that is read, PEM.
pub const MOST_LIST_BYTES: usize = 512 << 10;
/// Longest serial number (RFC 5280, 4.1.2.2).
const MOST_SERIAL_BYTES: usize = 20;
/// Bytes of the serial numbers that are drawn here.
const DRAWN_SERIAL_BYTES: usize = 16;
/// Certificates that are remembered until somebody takes them.
const MOST_SEEN: usize = 10_000;

/// The serial number of a certificate: up to 20 bytes, as hexadecimal digits.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(Vec<u8>);

impl Serial {
    /// Reads the bytes of an ASN.1 integer; none: no serial number is so long.
    pub(crate) fn of(bytes: &[u8]) -> Option<Serial> {
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        let bytes = &bytes[zeros.min(bytes.len().saturating_sub(1))..];
        (bytes.len() <= MOST_SERIAL_BYTES).then(|| Serial(bytes.to_vec()))
    }

    /// Draws one that no other certificate has.
    pub(crate) fn draw() -> Result<Serial, PkiError> {
        let mut bytes = [0; DRAWN_SERIAL_BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| PkiError::Make(rcgen::Error::RingUnspecified))?;
        // Positive, and of this length.
        bytes[0] = bytes[0] & 0x7f | 0x40;
        Ok(Serial(bytes.to_vec()))
    }

    pub(crate) fn number(&self) -> SerialNumber {
        SerialNumber::from_slice(&self.0)
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Serial {
    type Err = String;

    /// Hexadecimal digits, with or without colons between the bytes (as `openssl x509 -serial` prints them).
    fn from_str(text: &str) -> Result<Serial, String> {
        let wrong = || "a serial number is 1 to 20 bytes in hexadecimal digits".to_owned();
        let digits: Vec<u32> = text
            .chars()
            .filter(|c| *c != ':')
            .map(|c| c.to_digit(16))
            .collect::<Option<_>>()
            .ok_or_else(wrong)?;
        if digits.is_empty() || !digits.len().is_multiple_of(2) {
            return Err(wrong());
        }
        let bytes: Option<Vec<u8>> =
            digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).ok()).collect();
        bytes.and_then(|bytes| Serial::of(&bytes)).ok_or_else(wrong)
    }
}

/// A list that an authority has signed.
#[derive(Clone, PartialEq, Eq)]
pub struct RevocationList {
    number: u64,
    /// When each certificate was revoked, seconds since 1970.
    revoked: BTreeMap<Serial, i64>,
    pem: String,
}

impl fmt::Debug for RevocationList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revocation list {} of {} certificates", self.number, self.revoked.len())
    }
}

impl RevocationList {
    /// Signs a list.
    pub(crate) fn sign(
        issuer: &Issuer<'_, KeyPair>,
        number: u64,
        revoked: BTreeMap<Serial, i64>,
    ) -> Result<RevocationList, PkiError> {
        if revoked.len() > MOST_REVOKED {
            let why = format!("it would name {} certificates, and {MOST_REVOKED} is the most", revoked.len());
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
            // The field is required; nothing here makes a list end.
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
    /// [`PkiError::BadList`]: it is none, too long, or nobody's who is trusted. [`PkiError::File`],
    /// [`PkiError::Unreadable`]: the authorities cannot be read.
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
            let serial = Serial::of(one.raw_serial()).ok_or_else(|| bad("a serial number is too long"))?;
            revoked.insert(serial, one.revocation_date.timestamp());
            if revoked.len() > MOST_REVOKED {
                return Err(bad("it names too many certificates"));
            }
        }
        Ok(RevocationList { number, revoked, pem: text.to_owned() })
    }

    /// Its number: later lists have higher ones.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// When each certificate was revoked, seconds since 1970.
    #[must_use]
    pub fn revoked(&self) -> &BTreeMap<Serial, i64> {
        &self.revoked
    }

    /// The list as it is sent and kept, PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }
}

/// Whether an authority of a file (PEM) has signed a list.
fn is_signed(list: &CertificateRevocationList<'_>, authorities: &Path) -> Result<bool, PkiError> {
    let bytes = fs::read(authorities).map_err(file_error(authorities, "read"))?;
    for pem in Pem::iter_from_buffer(&bytes) {
        let unreadable = |why: String| PkiError::Unreadable { path: authorities.to_owned(), why };
        let pem = pem.map_err(|error| unreadable(error.to_string()))?;
        let (_, authority) =
            X509Certificate::from_der(&pem.contents).map_err(|error| unreadable(error.to_string()))?;
        if authority.is_ca()
            && authority.subject().as_raw() == list.issuer().as_raw()
            && list.verify_signature(authority.public_key()).is_ok()
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The lists that count for one host. Clones share them.
#[derive(Clone, Default)]
pub struct Revocations(Arc<RwLock<Held>>);

#[derive(Default)]
struct Held {
    /// Of the manager.
    newest: Option<RevocationList>,
    /// Of a file of the configuration.
    configured: Option<RevocationList>,
    /// Servers' certificates that were good; none: nobody asks for them.
    seen: Option<Seen>,
}

#[derive(Default)]
struct Seen {
    all: BTreeMap<Serial, Description>,
    /// Those that nobody has taken yet.
    fresh: BTreeSet<Serial>,
}

impl fmt::Debug for Revocations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_tuple("Revocations").field(&held.newest).field(&held.configured).finish()
    }
}

impl Revocations {
    /// Lists of a manager, which also has to know what certificates its hosts show.
    #[must_use]
    pub fn watching() -> Revocations {
        let held = Held { seen: Some(Seen::default()), ..Held::default() };
        Revocations(Arc::new(RwLock::new(held)))
    }

    /// Checks that a list may take the place of the newest; false: it is the newest already.
    ///
    /// # Errors
    /// [`PkiError::OldList`].
    pub fn check_newer(&self, list: &RevocationList) -> Result<bool, PkiError> {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match &held.newest {
            Some(newest) if newest == list => Ok(false),
            Some(newest) if newest.number >= list.number => {
                Err(PkiError::OldList { number: list.number, newest: newest.number })
            }
            _ => Ok(true),
        }
    }

    /// Takes a list in the place of the newest; false: it is the newest already. It counts for the next handshake.
    ///
    /// # Errors
    /// [`PkiError::OldList`]: the newest stays.
    pub fn accept(&self, list: RevocationList) -> Result<bool, PkiError> {
        let is_newer = self.check_newer(&list)?;
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // Another may have come in between.
        if is_newer && held.newest.as_ref().is_none_or(|newest| newest.number < list.number) {
            held.newest = Some(list);
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes a list of the configuration, beside the newest.
    pub fn configure(&self, list: Option<RevocationList>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).configured = list;
    }

    /// The newest list; none: none has come.
    #[must_use]
    pub fn newest(&self) -> Option<RevocationList> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).newest.clone()
    }

    /// Whether a certificate is on one of the lists.
    #[must_use]
    pub fn has(&self, serial: &Serial) -> bool {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        [&held.newest, &held.configured].into_iter().flatten().any(|list| list.revoked.contains_key(serial))
    }

    /// Servers' certificates that were good since the last time, where this watches.
    #[must_use]
    pub fn take_seen(&self) -> Vec<Description> {
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let Some(Seen { all, fresh }) = held.seen.as_mut() else { return Vec::new() };
        std::mem::take(fresh).iter().filter_map(|serial| all.get(serial).cloned()).collect()
    }

    /// The holder of a server's certificate that was good, where this watches.
    #[must_use]
    pub fn holder(&self, serial: &Serial) -> Option<String> {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        held.seen.as_ref()?.all.get(serial).map(|seen| seen.name.clone())
    }

    /// Notes a server's certificate that is good.
    pub(crate) fn note_seen(&self, description: Description) {
        let is_noted = |seen: &Seen| seen.all.contains_key(&description.serial);
        // Most are noted already, or nobody asks.
        if self.0.read().unwrap_or_else(PoisonError::into_inner).seen.as_ref().is_none_or(is_noted) {
            return;
        }
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = held.seen.as_mut() {
            if seen.all.len() >= MOST_SEEN {
                // Those that still count are seen again.
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
