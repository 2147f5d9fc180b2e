//! Settings that a guest takes from its host at its first boot, by cloud-init (data source
//! NoCloud). [`crate::seed_image`] makes the disk from them.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::spec::error::SpecError;

/// Longest `user_data`, in bytes.
pub const MOST_USER_DATA_BYTES: usize = 64 << 10;
/// What is shown in place of a secret. In a change, it keeps the secret.
pub const HIDDEN: &str = "(hidden)";

const MOST_KEYS: usize = 32;
const MOST_KEY_BYTES: usize = 4096;
/// Most networks, and most addresses or name servers of one.
const MOST_ITEMS: usize = 32;

/// Settings for cloud-init in the guest. What is left out is up to the guest's image.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CloudInit {
    /// Name of the guest's first user. Default: that of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Public keys with which that user may log in by SSH, as in `authorized_keys`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
    /// Hash of that user's password, as `openssl passwd -6` prints it. It is not shown again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_hash: Option<String>,
    /// Host name of the guest. Default: the VM's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Settings of the NICs, in their order. NICs beyond the list use DHCP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<GuestNetwork>,
    /// User data of the operator, such as a `#cloud-config` or a script, at most 64 KiB. It has
    /// precedence over the settings above. It is not shown again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
}

/// Network settings of one NIC in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GuestNetwork {
    /// Addresses with the lengths of their prefixes, such as `10.0.0.5/24`; none: DHCP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub addresses: Vec<AddressWithPrefix>,
    /// Default gateways, at most one of each address family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub gateways: Vec<IpAddr>,
    /// Name servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub dns: Vec<IpAddr>,
}

/// An address with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressWithPrefix {
    pub address: IpAddr,
    pub prefix: u8,
}

impl FromStr for AddressWithPrefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(address, prefix)| {
            let address: IpAddr = address.parse().ok()?;
            let prefix: u8 = prefix.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            (prefix <= most).then_some(AddressWithPrefix { address, prefix })
        });
        parsed.ok_or_else(|| format!("\"{text}\" is not an address like 10.0.0.5/24"))
    }
}

impl TryFrom<String> for AddressWithPrefix {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<AddressWithPrefix> for String {
    fn from(address: AddressWithPrefix) -> String {
        address.to_string()
    }
}

impl fmt::Display for AddressWithPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Secrets are left out: what is formatted like this may reach a log.
impl fmt::Debug for CloudInit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloudInit")
            .field("user", &self.user)
            .field("ssh_keys", &self.ssh_keys.len())
            .field("hostname", &self.hostname)
            .field("network", &self.network)
            .finish_non_exhaustive()
    }
}

impl CloudInit {
    /// Checks everything that does not depend on the VM.
    pub(super) fn check(&self, nics: usize) -> Result<(), SpecError> {
        let wrong = |what, why| Err(SpecError::CloudInit { what, why });
        if self.user.as_deref().is_some_and(|user| !is_user_name(user)) {
            return wrong("user", "it is not a user name");
        }
        if self.ssh_keys.len() > MOST_KEYS || !self.ssh_keys.iter().all(|key| is_key(key)) {
            return wrong("ssh_keys", "an item is not a public key on one line");
        }
        if self.password_hash.as_deref().is_some_and(|hash| !is_hash(hash) && hash != HIDDEN) {
            return wrong("password_hash", "it is not a hash of a password");
        }
        if self.hostname.as_deref().is_some_and(|name| !is_host_name(name)) {
            return wrong("hostname", "it is not a host name");
        }
        if self.user_data.as_ref().is_some_and(|data| data.len() > MOST_USER_DATA_BYTES) {
            return wrong("user_data", "it has more than 64 KiB");
        }
        if self.user_data.as_ref().is_some_and(String::is_empty) {
            return wrong("user_data", "it is empty");
        }
        if self.network.len() > nics {
            return wrong("network", "it has more items than the VM has NICs");
        }
        self.network.iter().try_for_each(GuestNetwork::check)
    }

    /// Replaces secrets with a mark, for everyone who may see the VM.
    pub(super) fn hide_secrets(&mut self) {
        for secret in [&mut self.password_hash, &mut self.user_data].into_iter().flatten() {
            HIDDEN.clone_into(secret);
        }
    }

    /// Replaces each mark with the secret that it stands for.
    pub(super) fn restore_secrets(&mut self, known: &CloudInit) {
        for (secret, known) in [
            (&mut self.password_hash, &known.password_hash),
            (&mut self.user_data, &known.user_data),
        ] {
            if secret.as_deref() == Some(HIDDEN) && known.is_some() {
                secret.clone_from(known);
            }
        }
    }

    /// Refuses a mark in place of a secret.
    pub(super) fn refuse_hidden(&self) -> Result<(), SpecError> {
        let why = "it is a mark in place of what is not shown";
        for (what, secret) in
            [("password_hash", &self.password_hash), ("user_data", &self.user_data)]
        {
            if secret.as_deref() == Some(HIDDEN) {
                return Err(SpecError::CloudInit { what, why });
            }
        }
        Ok(())
    }
}

impl GuestNetwork {
    fn check(&self) -> Result<(), SpecError> {
        let wrong = |why| Err(SpecError::CloudInit { what: "network", why });
        if self.addresses.len() > MOST_ITEMS || self.dns.len() > MOST_ITEMS {
            return wrong("an item has too many addresses");
        }
        if self.addresses.is_empty() && !self.gateways.is_empty() {
            return wrong("an item has a gateway and no address");
        }
        let of_family = |v4| self.gateways.iter().filter(|gateway| gateway.is_ipv4() == v4).count();
        if of_family(true) > 1 || of_family(false) > 1 {
            return wrong("an item has two gateways of one address family");
        }
        Ok(())
    }
}

/// Whether a text is a portable user name (useradd(8)).
fn is_user_name(text: &str) -> bool {
    let is_first = |c: char| c.is_ascii_lowercase() || c == '_';
    let is_other = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-.".contains(c);
    text.len() <= 32 && text.starts_with(is_first) && text.chars().all(is_other)
}

/// Whether a text is a public key: a line of printable characters with at least two words.
fn is_key(text: &str) -> bool {
    text.len() <= MOST_KEY_BYTES
        && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
        && text.split(' ').filter(|word| !word.is_empty()).count() >= 2
}

/// Whether a text is a hash that cloud-init takes for one: `$ID$SALT$HASH` of crypt(5). Anything
/// else would become the password itself.
fn is_hash(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"./$=,+-".contains(&byte);
    let Some((id, rest)) = text.strip_prefix('$').and_then(|text| text.split_once('$')) else {
        return false;
    };
    let is_known = ["1", "2a", "2y", "5", "6"].contains(&id);
    is_known && text.len() <= 256 && rest.bytes().all(is_good) && rest.len() >= 20
}

/// Whether a text is a host name (RFC 1123), with or without a domain.
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "$6$salt$0123456789abcdefghijklmnopqrstuvwxyz./";

    fn check(change: impl FnOnce(&mut CloudInit)) -> Result<(), SpecError> {
        let mut settings = CloudInit::default();
        change(&mut settings);
        settings.check(1)
    }

    #[test]
    fn good_settings_are_accepted() {
        check(|_| {}).unwrap();
        check(|settings| {
            settings.user = Some("deploy".to_owned());
            settings.ssh_keys = vec!["ssh-ed25519 AAAAC3 me@laptop \"a\"".to_owned()];
            settings.password_hash = Some(HASH.to_owned());
            settings.hostname = Some("web-1.example.com".to_owned());
            settings.user_data = Some("#!/bin/sh\necho hi\n".to_owned());
            let network = r#"{"addresses":["10.0.0.5/24","fd00::5/64"],"gateways":["10.0.0.1"]}"#;
            settings.network = vec![serde_json::from_str(network).unwrap()];
        })
        .unwrap();
    }

    #[test]
    fn wrong_settings_are_named_without_their_values() {
        type Spoil = fn(&mut CloudInit);
        let network = |text: &str| serde_json::from_str::<GuestNetwork>(text);
        let cases: [(&str, Spoil); 12] = [
            ("user", |s| s.user = Some("root\nuser: x".into())),
            ("user", |s| s.user = Some("Ann".into())),
            ("ssh_keys", |s| s.ssh_keys = vec!["ssh-rsa AAA\nssh-rsa BBB".into()]),
            ("ssh_keys", |s| s.ssh_keys = vec!["AAAA".into()]),
            ("ssh_keys", |s| s.ssh_keys = vec![format!("ssh-rsa {}", "A".repeat(5000))]),
            ("password_hash", |s| s.password_hash = Some("correct horse".into())),
            ("password_hash", |s| s.password_hash = Some("$9$salt$01234567890123456789".into())),
            ("hostname", |s| s.hostname = Some("-web".into())),
            ("hostname", |s| s.hostname = Some("web: 1".into())),
            ("user_data", |s| s.user_data = Some("x".repeat(MOST_USER_DATA_BYTES + 1))),
            ("user_data", |s| s.user_data = Some(String::new())),
            ("network", |s| s.network = vec![GuestNetwork::default(); 2]),
        ];
        for (what, spoil) in cases {
            let error = check(spoil).unwrap_err();
            assert!(matches!(error, SpecError::CloudInit { what: named, .. } if named == what));
            assert!(!error.to_string().contains("horse"), "{error}");
        }
        for text in [
            r#"{"gateways":["10.0.0.1"]}"#,
            r#"{"addresses":["10.0.0.5/24"],"gateways":["10.0.0.1","10.0.0.2"]}"#,
        ] {
            let network = network(text).unwrap();
            assert!(check(|settings| settings.network = vec![network]).is_err(), "{text}");
        }
        for text in [r#"{"addresses":["10.0.0.5"]}"#, r#"{"addresses":["10.0.0.5/33"]}"#] {
            assert!(network(text).is_err(), "{text}");
        }
    }

    #[test]
    fn secrets_are_hidden_and_kept_by_a_change() {
        let secret = CloudInit {
            password_hash: Some(HASH.to_owned()),
            user_data: Some("a secret".to_owned()),
            ..CloudInit::default()
        };
        assert!(
            !format!("{secret:?}").contains("secret\"") && !format!("{secret:?}").contains('$')
        );
        let mut shown = secret.clone();
        shown.hide_secrets();
        let text = serde_json::to_string(&shown).unwrap();
        assert_eq!(text, r#"{"password_hash":"(hidden)","user_data":"(hidden)"}"#);
        shown.check(0).unwrap();
        assert!(shown.refuse_hidden().is_err());
        shown.restore_secrets(&secret);
        assert_eq!(shown, secret);
        shown.refuse_hidden().unwrap();
    }
}
