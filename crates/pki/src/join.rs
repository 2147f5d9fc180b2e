//! How a new host obtains its certificate: it makes a key, and a request that proves possession of
//! the key, and it sends the request to a manager that it knows by the fingerprint of its
//! authority.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;

use rcgen::{CertificateParams, KeyPair};
use ring::digest::{SHA256, digest};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::FromDer;

use crate::PkiError;
use crate::error::file_error;
use crate::key_file::check_key;

/// SHA-256 of a certificate in its wire form (DER), or of a public key. As text: `SHA256:` and 64
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Computes the fingerprint of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Fingerprint {
        let mut sum = [0; 32];
        sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Fingerprint(sum)
    }

    /// Computes the fingerprint of the first certificate in a file (PEM).
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::Unreadable`].
    pub fn of_certificate(path: &Path) -> Result<Fingerprint, PkiError> {
        let bytes = fs::read(path).map_err(file_error(path, "read"))?;
        let unreadable = |error: &dyn fmt::Display| PkiError::Unreadable {
            path: path.to_owned(),
            why: error.to_string(),
        };
        let (_, pem) = parse_x509_pem(&bytes).map_err(|error| unreadable(&error))?;
        Ok(Fingerprint::of(&pem.contents))
    }

    /// Returns the 64 hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SHA256:{}", self.hex())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    /// Parses a fingerprint with or without `SHA256:`, and with or without colons between the bytes
    /// (as `openssl x509 -fingerprint` prints it).
    fn from_str(text: &str) -> Result<Fingerprint, String> {
        let wrong = || "a fingerprint is SHA256: and 64 hexadecimal digits".to_owned();
        let prefix = text.get(..7).filter(|prefix| prefix.eq_ignore_ascii_case("sha256:"));
        let digits: Vec<char> =
            text[prefix.map_or(0, str::len)..].chars().filter(|digit| *digit != ':').collect();
        if digits.len() != 64 {
            return Err(wrong());
        }
        let mut sum = [0; 32];
        for (byte, pair) in sum.iter_mut().zip(digits.chunks(2)) {
            let value = |digit: char| digit.to_digit(16).and_then(|value| u8::try_from(value).ok());
            let both = value(pair[0]).zip(value(pair[1])).ok_or_else(wrong)?;
            *byte = both.0 << 4 | both.1;
        }
        Ok(Fingerprint(sum))
    }
}

/// Creates a certificate signing request (PKCS #10, PEM) with the key in a file. If the file does
/// not exist, it is created with a new key, readable only by its owner. The request contains no
/// name: its signer knows whom it is for.
///
/// # Errors
/// [`PkiError::File`], [`PkiError::OpenKey`], [`PkiError::Unreadable`], [`PkiError::Make`].
pub fn request(key: &Path) -> Result<String, PkiError> {
    if !key.exists() {
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(key);
        let mut file = opened.map_err(file_error(key, "create"))?;
        let text = KeyPair::generate()?.serialize_pem();
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        if let Err(error) = written {
            let _ = fs::remove_file(key);
            return Err(file_error(key, "write")(error));
        }
    }
    check_key(key)?;
    let text = fs::read_to_string(key).map_err(file_error(key, "read"))?;
    let pair = KeyPair::from_pem(&text)
        .map_err(|error| PkiError::Unreadable { path: key.to_owned(), why: error.to_string() })?;
    let params = CertificateParams::new(Vec::new())?;
    Ok(params.serialize_request(&pair)?.pem()?)
}

/// Returns the fingerprint of the public key in a request, or `None` if the text is not a valid
/// request.
#[must_use]
pub fn requested_key(request: &str) -> Option<Fingerprint> {
    let (_, pem) = parse_x509_pem(request.as_bytes()).ok()?;
    let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
    Some(Fingerprint::of(request.certification_request_info.subject_pki.raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_as_it_is_printed_here_and_by_openssl() {
        let print = Fingerprint::of(b"a certificate");
        let colons: Vec<String> = print
            .hex()
            .as_bytes()
            .chunks(2)
            .map(|two| String::from_utf8_lossy(two).to_uppercase())
            .collect();
        for text in [print.to_string(), print.hex(), format!("sha256:{}", colons.join(":"))] {
            assert_eq!(text.parse(), Ok(print), "{text}");
        }
        for text in ["", "SHA256:", "SHA256:00", &"g".repeat(64), &"ä".repeat(64)] {
            assert!(text.parse::<Fingerprint>().is_err(), "{text}");
        }
    }
}
