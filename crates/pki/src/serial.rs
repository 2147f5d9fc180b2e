//! Serial numbers of certificates.

use std::fmt;
use std::str::FromStr;

use rcgen::SerialNumber;
use ring::rand::{SecureRandom, SystemRandom};

use crate::PkiError;

/// Longest serial number in bytes (RFC 5280, 4.1.2.2).
const MOST_SERIAL_BYTES: usize = 20;
/// Length of the serial numbers generated here, in bytes.
const DRAWN_SERIAL_BYTES: usize = 16;

/// Serial number of a certificate: up to 20 bytes, as text hexadecimal digits.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(pub(crate) Vec<u8>);

impl Serial {
    /// Reads the bytes of an ASN.1 integer. Returns `None` if it is too long for a serial number.
    pub(crate) fn of(bytes: &[u8]) -> Option<Serial> {
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        let bytes = &bytes[zeros.min(bytes.len().saturating_sub(1))..];
        (bytes.len() <= MOST_SERIAL_BYTES).then(|| Serial(bytes.to_vec()))
    }

    /// Generates a random serial number.
    pub(crate) fn draw() -> Result<Serial, PkiError> {
        let mut bytes = [0; DRAWN_SERIAL_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| PkiError::Make(rcgen::Error::RingUnspecified))?;
        // Makes the number positive and of fixed length.
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

    /// Parses hexadecimal digits, with or without colons between the bytes (as `openssl x509
    /// -serial` prints them).
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
