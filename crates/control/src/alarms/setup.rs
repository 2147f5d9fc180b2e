//! Configuration of the receivers of notices. Secrets are in files of their own, which are read
//! when the manager starts.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use godwit_api::control::AlarmSeverity;
use http::Uri;
use lettre::Address;
use serde::Deserialize;

use super::receivers::{Mail, Receiver, Webhook};
use crate::secrets::secret;

/// Most receivers. Each has a queue and a task.
const MOST_RECEIVERS: usize = 16;
/// Most recipients of a mail.
const MOST_RECIPIENTS: usize = 32;

/// Receivers of notices about alarms.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlarmsConfig {
    pub webhooks: Vec<WebhookConfig>,
    pub mails: Vec<MailConfig>,
}

/// Receiver that gets each notice as an HTTP request with a JSON body.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// Name of the receiver in logs and answers.
    pub name: String,
    /// Address, `https://…` or `http://…`.
    pub url: String,
    /// File with the key for signatures (HMAC-SHA256); none: requests are not signed.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// File with the certificates of the receiver's authorities; none: those of the distribution.
    #[serde(default)]
    pub authority: Option<PathBuf>,
    /// Lowest severity of notices.
    #[serde(default = "warning")]
    pub least: AlarmSeverity,
}

/// Receiver that gets notices as mails.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MailConfig {
    /// Name of the receiver in logs and answers.
    pub name: String,
    /// Mail server.
    pub server: String,
    /// Port; none: 587 for STARTTLS, 465 for TLS, 25 without.
    #[serde(default)]
    pub port: Option<u16>,
    #[serde(default)]
    pub tls: MailTls,
    /// File with the certificates of the server's authorities; none: those of the distribution.
    #[serde(default)]
    pub authority: Option<PathBuf>,
    /// User at the server; none: no authentication.
    #[serde(default)]
    pub user: Option<String>,
    /// File with the user's password.
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// Address of the sender.
    pub from: String,
    /// Addresses of the recipients.
    pub to: Vec<String>,
    /// Lowest severity of notices.
    #[serde(default = "warning")]
    pub least: AlarmSeverity,
}

/// Encryption of the connection to a mail server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MailTls {
    /// TLS after the command STARTTLS, which the server must support.
    #[default]
    Starttls,
    /// TLS from the beginning.
    Tls,
    /// No encryption.
    None,
}

fn warning() -> AlarmSeverity {
    AlarmSeverity::Warning
}

/// A problem of the configuration: its key, what is wrong, and the remedy.
type Problem = (&'static str, String, &'static str);

const WEBHOOKS: &str = "alarms.webhooks";
const MAILS: &str = "alarms.mails";

impl AlarmsConfig {
    /// Returns what is wrong, without a look at the files.
    pub(crate) fn problem(&self) -> Option<Problem> {
        let of_webhooks = self.webhooks.iter().map(|one| (WEBHOOKS, &one.name));
        let names = of_webhooks.chain(self.mails.iter().map(|one| (MAILS, &one.name)));
        let mut seen = BTreeSet::new();
        for (count, (key, name)) in names.enumerate() {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            if name.is_empty() || name.len() > 63 || !name.bytes().all(is_plain) {
                let why = format!("{name:?} is not a valid name");
                return Some((key, why, "use at most 63 letters, digits, - _ ."));
            }
            if !seen.insert(name) {
                let why = format!("two receivers have the name {name}");
                return Some((key, why, "give each its own name"));
            }
            if count >= MOST_RECEIVERS {
                let why = format!("there are more than {MOST_RECEIVERS} receivers");
                return Some((key, why, "remove some; a mail may have several recipients"));
            }
        }
        let mut webhooks = self.webhooks.iter();
        let of_webhook = webhooks.find_map(WebhookConfig::problem);
        of_webhook.or_else(|| self.mails.iter().find_map(MailConfig::problem))
    }
}

impl WebhookConfig {
    fn problem(&self) -> Option<Problem> {
        // The address may contain a secret, so no message has it.
        let wrong = |why: &str, remedy| Some((WEBHOOKS, format!("{}: {why}", self.name), remedy));
        let uri = self.url.parse::<Uri>().ok();
        let has_host = |uri: &Uri| uri.host().is_some_and(|host| !host.is_empty());
        let Some(uri) = uri.filter(has_host) else {
            return wrong("its url is invalid", "write it as https://HOST/PATH");
        };
        let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
        match uri.scheme_str() {
            Some("https" | "http") if authority.contains('@') => {
                wrong("its url contains a password", "name a key_file instead")
            }
            Some("https" | "http") => None,
            _ => wrong("its url is not an address of HTTP", "write it as https://HOST/PATH"),
        }
    }
}

impl MailConfig {
    fn problem(&self) -> Option<Problem> {
        let wrong = |why: String, remedy| Some((MAILS, format!("{}: {why}", self.name), remedy));
        for address in self.to.iter().chain([&self.from]) {
            if !address.is_ascii() || address.parse::<Address>().is_err() {
                return wrong(format!("{address:?} is not an address"), "write it as NAME@HOST");
            }
        }
        if self.to.is_empty() || self.to.len() > MOST_RECIPIENTS {
            let why = format!("it has {} recipients", self.to.len());
            return wrong(why, "name 1 to 32 addresses in to");
        }
        if self.user.is_some() != self.password_file.is_some() {
            let why = "it has a user without a password, or the reverse".to_owned();
            return wrong(why, "set both user and password_file, or neither");
        }
        if self.user.is_some() && self.tls == MailTls::None {
            let why = "the password would be sent unencrypted".to_owned();
            return wrong(why, "set tls = \"starttls\" or tls = \"tls\"");
        }
        None
    }

    pub(super) fn port(&self) -> u16 {
        self.port.unwrap_or(match self.tls {
            MailTls::Starttls => 587,
            MailTls::Tls => 465,
            MailTls::None => 25,
        })
    }
}

/// Error of a receiver's files.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the receiver {receiver} of alarms: {why}")]
pub struct AlarmSetupError {
    receiver: String,
    why: String,
}

impl AlarmSetupError {
    /// Returns what to do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        "correct its files under [alarms] in the configuration: docs/alarms.md".to_owned()
    }
}

/// A certificate of the manager itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnCertificate {
    /// What it is, with its article: `the certificate for browsers`.
    pub(crate) what: &'static str,
    pub(crate) path: PathBuf,
}

/// What the alarms get of the configuration.
#[derive(Debug, Default)]
pub(crate) struct AlarmSetup {
    receivers: Vec<Arc<Receiver>>,
    own_certificates: Vec<OwnCertificate>,
}

impl AlarmSetup {
    /// Reads the files of the receivers.
    pub(crate) fn open(
        config: &AlarmsConfig,
        own_certificates: Vec<OwnCertificate>,
    ) -> Result<AlarmSetup, AlarmSetupError> {
        let mut receivers = Vec::new();
        for one in &config.webhooks {
            let failed = |why| AlarmSetupError { receiver: one.name.clone(), why };
            let key = one.key_file.as_deref().map(secret).transpose().map_err(failed)?;
            let webhook = Webhook::open(one, key.as_deref()).map_err(failed)?;
            receivers.push(Arc::new(Receiver::webhook(&one.name, one.least, webhook)));
        }
        for one in &config.mails {
            let failed = |why| AlarmSetupError { receiver: one.name.clone(), why };
            let password = one.password_file.as_deref().map(secret).transpose().map_err(failed)?;
            let mail = Mail::open(one, password).map_err(failed)?;
            receivers.push(Arc::new(Receiver::mail(&one.name, one.least, mail)));
        }
        Ok(AlarmSetup { receivers, own_certificates })
    }

    pub(super) fn receivers(&self) -> &[Arc<Receiver>] {
        &self.receivers
    }

    pub(super) fn own_certificates(&self) -> &[OwnCertificate] {
        &self.own_certificates
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn problem(text: &str) -> String {
        let config: AlarmsConfig = toml::from_str(text).unwrap();
        config.problem().map_or_else(|| "none".to_owned(), |(key, why, _)| format!("{key}: {why}"))
    }

    const MAIL: &str = "[[mails]]\nname = \"m\"\nserver = \"mail\"\n\
        from = \"a@b.example\"\nto = [\"c@d.example\"]\n";

    #[test]
    fn values_are_checked_before_any_file_is_read() {
        let hook = |url: &str| format!("[[webhooks]]\nname = \"w\"\nurl = \"{url}\"\n");
        assert_eq!(problem(&format!("{}{MAIL}", hook("https://h/x"))), "none");
        assert_eq!(problem(&hook("http://h:1/x")), "none");
        for (text, word) in [
            (hook("ftp://h/x"), "address of HTTP"),
            (hook("https://"), "invalid"),
            (hook("https://me:secret@h/x"), "password"),
            (format!("{}{}", hook("https://h/x"), hook("https://h/y")), "two receivers"),
            (MAIL.replace("\"m\"", "\"m m\""), "valid name"),
            (MAIL.replace("c@d.example", "c"), "not an address"),
            (MAIL.replace("a@b.example", "a@b\\nBcc: x@y"), "not an address"),
            (MAIL.replace("[\"c@d.example\"]", "[]"), "0 recipients"),
            (format!("{MAIL}user = \"u\""), "without a password"),
            (
                format!("{MAIL}user = \"u\"\npassword_file = \"/p\"\ntls = \"none\""),
                "sent unencrypted",
            ),
        ] {
            assert!(problem(&text).contains(word), "{text}: {}", problem(&text));
            assert!(!problem(&text).contains("secret"), "{}", problem(&text));
        }
        let many: String =
            (0..17).map(|n| hook("https://h").replace("\"w\"", &format!("\"w{n}\""))).collect();
        assert!(problem(&many).contains("more than 16"));
    }

    #[test]
    fn secrets_come_from_files_and_no_debug_output_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        let text = format!(
            "[[webhooks]]\nname = \"w\"\nurl = \"http://h/path-secret\"\nkey_file = {file:?}\n\
            {MAIL}user = \"u\"\npassword_file = {file:?}\n"
        );
        let config: AlarmsConfig = toml::from_str(&text).unwrap();
        let missing = AlarmSetup::open(&config, vec![]).unwrap_err();
        assert!(missing.to_string().contains("receiver w"), "{missing}");
        fs::write(&file, "\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let open = AlarmSetup::open(&config, vec![]).unwrap_err();
        assert!(open.to_string().contains("chmod 600"), "{open}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let empty = AlarmSetup::open(&config, vec![]).unwrap_err();
        assert!(empty.to_string().contains("is empty"), "{empty}");
        fs::write(&file, "x".repeat(5000)).unwrap();
        assert!(AlarmSetup::open(&config, vec![]).is_err());
        fs::write(&file, "hunter2\n").unwrap();
        // The mail's server is checked against an authority, of which a machine may have none.
        let webhooks = AlarmsConfig { mails: vec![], ..config };
        let setup = AlarmSetup::open(&webhooks, vec![]).unwrap();
        let shown = format!("{setup:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("path-secret"), "{shown}");
    }
}
