//! Hardware addresses of network interfaces.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The hardware address of one interface; never a group address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

/// A text that is not a hardware address of a single interface.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a hardware address: write six hexadecimal bytes like 52:54:00:12:34:56, the \
    first of them even"
)]
pub struct MacError(String);

impl MacAddress {
    /// Derives the address of interface `index` of the VM `name`, the same on every host and at
    /// every start.
    ///
    /// It has 40 bits of a FNV-1a hash under the locally administered prefix 52. Among ten thousand
    /// interfaces the chance that two share an address is 1 in 20,000.
    #[must_use]
    pub fn derived(name: &str, index: usize) -> MacAddress {
        let key = format!("{name}\0{index}");
        let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
        // FNV's upper bits are well mixed, its lowest less so: fold them together.
        let [_, _, _, b1, b2, b3, b4, b5] = (hash ^ (hash >> 40)).to_be_bytes();
        MacAddress([0x52, b1, b2, b3, b4, b5])
    }

    /// Returns the six bytes, the first one sent first.
    #[must_use]
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = MacError;

    fn from_str(text: &str) -> Result<MacAddress, MacError> {
        let error = || MacError(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(error)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(error());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        let is_group = bytes[0] & 1 == 1;
        if parts.next().is_some() || is_group || bytes == [0; 6] {
            return Err(error());
        }
        Ok(MacAddress(bytes))
    }
}

impl TryFrom<String> for MacAddress {
    type Error = MacError;

    fn try_from(text: String) -> Result<MacAddress, MacError> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> String {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_stable_and_differ() {
        let first = MacAddress::derived("web", 0);
        assert_eq!(first, MacAddress::derived("web", 0));
        assert_ne!(first, MacAddress::derived("web", 1));
        assert_ne!(first, MacAddress::derived("web2", 0));
        assert_eq!(first.to_string().parse(), Ok(first));
        assert_eq!(first.bytes()[0], 0x52);
    }

    #[test]
    fn only_addresses_of_one_interface_are_accepted() {
        assert!("52:54:00:12:34:56".parse::<MacAddress>().is_ok());
        for text in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "53:54:00:12:34:56",
            "52-54-00-12-34-56",
            "52:54:00:12:34:+6",
            "00:00:00:00:00:00",
        ] {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
    }
}
