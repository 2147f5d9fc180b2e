//! The manager's configuration file (TOML). Every error names the file, the place in it and the
//! remedy.

mod etcd;

pub use etcd::EtcdConfig;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_planner::queue::Limits;
use serde::Deserialize;

pub use crate::access::authorities::AuthorityConfig;
use crate::access::oidc::OidcRules;
use crate::alarms::{AlarmsConfig, OwnCertificate};
use crate::ha::fencing::HaConfig;
use crate::journal::newest_first::Retention;

/// Default path of the manager's socket.
pub const DEFAULT_MANAGER_SOCKET: &str = "/run/godwit-control/control.sock";

/// Configuration of `godwit control run --config FILE`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// This manager's name for other managers and the audit log. Default: the machine's name.
    #[serde(default = "godwit_pki::machine_name")]
    pub name: String,
    /// Addresses of the API; none: the socket alone.
    #[serde(default)]
    pub listen: Vec<SocketAddr>,
    /// Address at which others reach the API, `https://HOST:PORT`; none: the first of `listen`.
    #[serde(default)]
    pub address: Option<String>,
    /// Unix socket for the command line, for root only.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Directory of the state that must survive a reboot.
    #[serde(default = "default_state_dir")]
    pub state_dir: PathBuf,
    /// The manager's certificate, which is an operator's, and the authority that it trusts.
    /// Required unless `insecure` is set.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// Addresses for browsers, with a certificate that the cluster's authority has not issued.
    #[serde(default)]
    pub web: Option<WebConfig>,
    /// Authority that signs certificates of joining hosts; none: hosts cannot join.
    #[serde(default)]
    pub authority: Option<AuthorityConfig>,
    /// OpenID Connect issuer whose tokens are accepted.
    #[serde(default)]
    pub oidc: Option<OidcRules>,
    /// Store that several managers share; none: this is the only manager, and its store is a file
    /// in `state_dir`.
    #[serde(default)]
    pub etcd: Option<EtcdConfig>,
    /// Retention of the audit log.
    #[serde(default)]
    pub audit: LogConfig,
    /// Retention of the journal.
    #[serde(default)]
    pub journal: LogConfig,
    /// Receivers of notices about alarms.
    #[serde(default)]
    pub alarms: AlarmsConfig,
    /// High availability: fencing devices of hosts.
    #[serde(default)]
    pub ha: HaConfig,
    /// Limits of concurrent migrations.
    #[serde(default)]
    pub limits: Limits,
    /// Whether the API and the connections to agents are unencrypted: for an isolated network.
    #[serde(default)]
    pub insecure: bool,
}

/// TLS files, as `godwit pki` creates them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// Addresses for browsers. They serve the API and console as `listen` does, with a certificate of
/// another authority.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebConfig {
    pub listen: Vec<SocketAddr>,
    /// Certificate for browsers, with its chain if it has one.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// Retention of the audit log or of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Maximum number of entries; the oldest are deleted.
    pub most_entries: usize,
    /// Maximum age of an entry, days.
    pub days: u32,
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig { most_entries: 100_000, days: 400 }
    }
}

impl LogConfig {
    pub(crate) fn retention(self) -> Retention {
        let longest = Duration::from_secs(u64::from(self.days) * 24 * 3600);
        Retention { most_entries: self.most_entries, longest }
    }
}

fn default_socket() -> PathBuf {
    DEFAULT_MANAGER_SOCKET.into()
}

fn default_state_dir() -> PathBuf {
    "/var/lib/godwit-control".into()
}

/// Error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is unreadable.
    #[error("cannot read configuration {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is not a valid configuration.
    #[error("cannot parse configuration {path}: {why}")]
    Syntax {
        path: PathBuf,
        /// The parser's error, with its position.
        why: String,
    },
    /// A value is invalid.
    #[error("{path}: {key}: {why}")]
    Value {
        path: PathBuf,
        key: &'static str,
        /// The reason why the value is invalid.
        why: String,
        /// The correction.
        remedy: &'static str,
    },
}

impl ConfigError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            ConfigError::Read { .. } => "name an existing file with --config".to_owned(),
            ConfigError::Syntax { .. } => "docs/manager.md lists every key".to_owned(),
            ConfigError::Value { remedy, .. } => (*remedy).to_owned(),
        }
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Config::parse(&text, path)
    }

    /// Parses and checks the text of a configuration; errors name `path`.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`], [`ConfigError::Value`].
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            why: error.to_string(),
        })?;
        match config.problem() {
            None => Ok(config),
            Some((key, why, remedy)) => {
                Err(ConfigError::Value { path: path.to_owned(), key, why, remedy })
            }
        }
    }

    fn problem(&self) -> Option<(&'static str, String, &'static str)> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if self.name.is_empty() || !self.name.bytes().all(is_plain) {
            return Some((
                "name",
                format!("\"{}\" is not a valid name", self.name),
                "use letters, digits, - _ .",
            ));
        }
        if let Some(oidc) = &self.oidc
            && !oidc.issuer.starts_with("https://")
        {
            let why = format!("requests for the keys of {} would be unencrypted", oidc.issuer);
            return Some(("oidc.issuer", why, "name the issuer as in its tokens, https://…"));
        }
        match (&self.tls, self.insecure) {
            (Some(_), true) => {
                Some(("insecure", "[tls] is set as well".into(), "remove one of the two"))
            }
            (None, false) => Some((
                "tls",
                "connections to agents and clients would be unencrypted".into(),
                "issue an operator's certificate with `godwit pki issue --operator` and name it \
                under [tls], or set insecure = true",
            )),
            _ => {
                let of_features = self.alarms.problem().or_else(|| self.ha.problem());
                of_features.or_else(|| self.problem_of_several())
            }
        }
    }

    /// Checks the values that managers need to reach each other.
    fn problem_of_several(&self) -> Option<(&'static str, String, &'static str)> {
        let etcd = self.etcd.as_ref()?;
        if self.listen.is_empty() {
            let why = "other managers send requests to this one, which has no address".into();
            return Some((
                "listen",
                why,
                "name an address of this host: listen = [\"10.0.0.5:7800\"]",
            ));
        }
        if self.address.is_none() && self.listen[0].ip().is_unspecified() {
            let why = format!("other managers cannot connect to {}", self.listen[0]);
            let remedy = "set the address that they use: address = \"https://HOST:PORT\"";
            return Some(("address", why, remedy));
        }
        etcd.problem()
    }

    /// Returns the address at which other managers and clients reach this one.
    #[must_use]
    pub fn public_address(&self) -> String {
        let scheme = if self.insecure { "http" } else { "https" };
        let listen = || self.listen.first().map(|address| format!("{scheme}://{address}"));
        self.address
            .clone()
            .or_else(listen)
            .unwrap_or_else(|| format!("unix:{}", self.socket.display()))
    }

    /// Returns the manager's certificates, whose end is an alarm.
    pub(crate) fn own_certificates(&self) -> Vec<OwnCertificate> {
        let mut own = Vec::new();
        if let Some(TlsConfig { authority, certificate, .. }) = &self.tls {
            own.push(OwnCertificate { what: "the certificate", path: certificate.clone() });
            own.push(OwnCertificate { what: "the authority", path: authority.clone() });
        }
        if let Some(WebConfig { certificate, .. }) = &self.web {
            let what = "the certificate for browsers";
            own.push(OwnCertificate { what, path: certificate.clone() });
        }
        own
    }

    pub(crate) fn store_file(&self) -> PathBuf {
        self.state_dir.join("control.sqlite")
    }

    /// Returns the file that was the store before etcd was configured, if it exists.
    #[cfg(feature = "etcd")]
    pub(crate) fn store_left_behind(&self) -> Option<PathBuf> {
        self.etcd.as_ref()?;
        Some(self.store_file()).filter(|file| file.exists())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("control.toml"))
            .map_err(|error| format!("{error} ({})", error.remedy()))
    }

    /// The manual's example parses, and contains every key.
    #[test]
    fn the_manual_lists_every_key() {
        let manual = include_str!("../../../docs/manager.md");
        let (_, section) = manual.split_once("## Configuration\n").unwrap();
        let (_, example) = section.split_once("```toml\n").unwrap();
        let (text, _) = example.split_once("```").unwrap();
        let config = parse(text).unwrap();
        assert_eq!((config.limits.in_all, config.limits.datastores["/srv/slow"]), (Some(20), 2));
        for table in [
            "",
            "[tls]\n",
            "[web]\n",
            "[authority]\n",
            "[oidc]\n",
            "[audit]\n",
            "[alarms]\n",
            "[[alarms.webhooks]]\n",
            "[[alarms.mails]]\n",
            "[journal]\n",
            "[ha]\n",
            "[ha.fencing.a]\n",
            "[limits]\n",
            "[limits.hosts.a]\n",
            "[etcd]\n",
        ] {
            // The error about an unknown key lists all known keys.
            let error = parse(&format!("{table}no_such_key = 1")).unwrap_err();
            let (_, known) = error.split_once("expected").unwrap();
            let keys = known.split('`').skip(1).step_by(2);
            for key in keys.filter(|key| *key != "total") {
                let forms = [
                    format!("{key} = "),
                    format!("[{key}"),
                    format!(".{key}]"),
                    format!(".{key}."),
                ];
                let is_shown = forms.iter().any(|form| text.contains(form));
                assert!(is_shown, "docs/manager.md lacks {key} of {table}");
            }
        }
    }

    #[test]
    fn the_old_name_of_a_limit_is_accepted() {
        let config = parse("name = \"m1\"\ninsecure = true\n[limits]\ntotal = 3").unwrap();
        assert_eq!(config.limits.in_all, Some(3));
    }

    #[test]
    fn a_minimal_configuration_is_valid() {
        let config =
            parse("name = \"m1\"\ninsecure = true\nlisten = [\"127.0.0.1:7800\"]").unwrap();
        assert_eq!(config.public_address(), "http://127.0.0.1:7800");
        assert_eq!(config.socket, Path::new(DEFAULT_MANAGER_SOCKET));
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn a_file_that_was_the_store_before_etcd_is_noticed() {
        let place = tempfile::tempdir().unwrap();
        let text = format!(
            "name = \"m1\"\ninsecure = true\naddress = \"http://m1:7800\"\n\
            listen = [\"127.0.0.1:7800\"]\nstate_dir = {:?}\n",
            place.path()
        );
        let with_etcd = format!("{text}[etcd]\nendpoints = [\"http://127.0.0.1:2379\"]");
        let (file, etcd) = (parse(&text).unwrap(), parse(&with_etcd).unwrap());
        assert_eq!(etcd.store_left_behind(), None);
        std::fs::write(file.store_file(), "").unwrap();
        assert_eq!(etcd.store_left_behind(), Some(file.store_file()));
        assert_eq!(file.store_left_behind(), None);
    }

    #[test]
    fn errors_name_the_key_and_the_remedy() {
        for (text, words) in [
            ("listen = 7", ["listen", "docs/manager.md"]),
            ("name = \"m 1\"\ninsecure = true", ["name", "letters"]),
            ("", ["tls", "godwit pki"]),
            (
                "name = \"m1\"\ninsecure = true\n[etcd]\nendpoints = []",
                ["listen", "other managers"],
            ),
            (
                "name = \"m1\"\ninsecure = true\nlisten = [\"0.0.0.0:7800\"]\n\
                [etcd]\nendpoints = []",
                ["address", "https://HOST:PORT"],
            ),
            ("name = \"m1\"\ninsecure = true\nport = 1", ["port", "docs/manager.md"]),
        ] {
            let error = parse(text).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
