//! Configuration of fencing devices. Passwords are in files of their own, which are read when the
//! manager starts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;

use super::ipmitool::Device;
use crate::cluster::names::check_name;
use crate::secrets::secret;

/// Most devices.
const MOST_DEVICES: usize = 1024;
/// Longest address of a device, characters: that of a name in DNS.
const MOST_ADDRESS: usize = 253;
/// Longest user name (IPMI 2.0, section 22.28), bytes.
const MOST_USER_BYTES: usize = 16;
/// Longest password (IPMI 2.0, section 22.30), bytes.
const MOST_PASSWORD_BYTES: usize = 20;
/// Cipher suites that authenticate, protect the integrity and encrypt (IPMI 2.0, table 22-20).
const CIPHERS: [u8; 4] = [3, 8, 12, 17];

/// `[ha]` of the manager's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HaConfig {
    /// Fencing devices by host.
    pub fencing: BTreeMap<String, FencingConfig>,
}

/// Management controller (BMC) of a host, with IPMI 2.0 over LAN.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FencingConfig {
    /// Name or IP address.
    pub address: String,
    #[serde(default = "default_port")]
    pub port: u16,
    /// User with the privilege of an operator.
    pub user: String,
    /// File with the user's password.
    pub password_file: PathBuf,
    /// Cipher suite; none: the best that device and program have.
    #[serde(default)]
    pub cipher: Option<u8>,
}

fn default_port() -> u16 {
    623
}

/// A problem of the configuration: its key, what is wrong, and the remedy.
type Problem = (&'static str, String, &'static str);

const FENCING: &str = "ha.fencing";

impl HaConfig {
    /// Returns what is wrong, without a look at the files.
    pub(crate) fn problem(&self) -> Option<Problem> {
        if self.fencing.len() > MOST_DEVICES {
            let why = format!("there are more than {MOST_DEVICES} devices");
            return Some((FENCING, why, "remove those of hosts that are gone"));
        }
        let mut seen = BTreeSet::new();
        for (host, device) in &self.fencing {
            if check_name(host).is_err() {
                let why = format!("{host:?} is not a name of a host");
                return Some((FENCING, why, "name hosts as the manager lists them"));
            }
            if let Some((why, remedy)) = device.problem() {
                return Some((FENCING, format!("{host}: {why}"), remedy));
            }
            // Otherwise one host would be cut, and the other one taken for off.
            let place = (device.address.to_ascii_lowercase(), device.port);
            if !seen.insert(place) {
                let why = format!("{host}: another host has the device {}", device.address);
                return Some((FENCING, why, "name each host's own BMC"));
            }
        }
        None
    }
}

impl FencingConfig {
    fn problem(&self) -> Option<(String, &'static str)> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        let is_address = (1..=MOST_ADDRESS).contains(&self.address.len())
            && self.address.bytes().all(is_plain)
            && !self.address.starts_with('-');
        if !is_address {
            let why = format!("{:?} is not an address", self.address);
            return Some((why, "write it as HOST or IP; the port has its own key"));
        }
        if self.port == 0 {
            return Some(("port 0 does not exist".to_owned(), "leave port out: it is 623"));
        }
        let is_user = (1..=MOST_USER_BYTES).contains(&self.user.len())
            && self.user.bytes().all(|byte| byte.is_ascii_graphic())
            && !self.user.starts_with('-');
        if !is_user {
            let why = format!("{:?} is not a user of IPMI", self.user);
            return Some((why, "use 1 to 16 letters, digits and signs"));
        }
        if self.cipher.is_some_and(|cipher| !CIPHERS.contains(&cipher)) {
            let why = "its cipher suite lacks authentication, integrity or encryption".to_owned();
            return Some((why, "use 17, 12, 8 or 3, or leave cipher out"));
        }
        None
    }
}

/// Error of a device's files.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the fencing device of host {host}: {why}")]
pub struct FencingSetupError {
    host: String,
    why: String,
}

impl FencingSetupError {
    /// Returns what to do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        "correct password_file under [ha.fencing] in the configuration: docs/ha.md".to_owned()
    }
}

/// Reads the passwords.
pub(super) fn open(config: &HaConfig) -> Result<BTreeMap<String, Device>, FencingSetupError> {
    let mut devices = BTreeMap::new();
    for (host, config) in &config.fencing {
        let failed = |why| FencingSetupError { host: host.clone(), why };
        let password = password(config).map_err(failed)?;
        devices.insert(host.clone(), Device::new(config, password));
    }
    Ok(devices)
}

fn password(config: &FencingConfig) -> Result<String, String> {
    let file = config.password_file.display();
    let password = secret(&config.password_file)?;
    if password.len() > MOST_PASSWORD_BYTES {
        return Err(format!("the password in {file} is longer than {MOST_PASSWORD_BYTES} bytes"));
    }
    if password.chars().any(char::is_control) {
        return Err(format!("the password in {file} has control characters"));
    }
    Ok(password)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn problem(text: &str) -> String {
        let config: HaConfig = toml::from_str(text).unwrap();
        config.problem().map_or_else(|| "none".to_owned(), |(key, why, _)| format!("{key}: {why}"))
    }

    fn device(host: &str, address: &str, more: &str) -> String {
        format!(
            "[fencing.{host:?}]\naddress = {address:?}\nuser = \"fence\"\n\
            password_file = \"/p\"\n{more}\n"
        )
    }

    #[test]
    fn values_are_checked_before_any_file_is_read() {
        assert_eq!(problem(""), "none");
        assert_eq!(problem(&device("a", "bmc-a.example", "cipher = 17\nport = 6623")), "none");
        assert_eq!(problem(&device("a", "fd00::1", "cipher = 3")), "none");
        for (text, word) in [
            (device("a b", "bmc", ""), "not a name"),
            (device("a", "", ""), "not an address"),
            (device("a", "-f/etc/shadow", ""), "not an address"),
            (device("a", "bmc a", ""), "not an address"),
            (device("a", "bmc", "port = 0"), "port 0"),
            (device("a", "bmc", "").replace("\"fence\"", "\"-P\""), "not a user"),
            (device("a", "bmc", "").replace("\"fence\"", "\"x23456789012345678\""), "not a user"),
            (device("a", "bmc", "cipher = 0"), "lacks authentication"),
            (device("a", "bmc", "cipher = 1"), "lacks authentication"),
        ] {
            assert!(problem(&text).contains(word), "{text}: {}", problem(&text));
        }
    }

    #[test]
    fn two_hosts_do_not_share_a_device() {
        let both = |more| format!("{}{}", device("a", "bmc", ""), device("b", "BMC", more));
        assert!(problem(&both("")).contains("another host"), "{}", problem(&both("")));
        assert_eq!(problem(&both("port = 1623")), "none");
    }

    #[test]
    fn passwords_come_from_private_files_and_no_debug_output_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("password");
        let text = device("a", "bmc", "").replace("/p", &file.display().to_string());
        let config: HaConfig = toml::from_str(&text).unwrap();
        let refused = |word: &str| {
            let error = open(&config).unwrap_err().to_string();
            assert!(error.contains("host a") && error.contains(word), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        };
        refused("cannot read");
        fs::write(&file, "hunter2\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        refused("chmod 600");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "hunter2".repeat(3)).unwrap();
        refused("longer than 20");
        fs::write(&file, "hunter2\nhunter3\n").unwrap();
        refused("control characters");
        fs::write(&file, "hunter2\n").unwrap();
        let shown = format!("{:?}", open(&config).unwrap());
        assert!(!shown.contains("hunter2") && shown.contains("bmc"), "{shown}");
    }
}
