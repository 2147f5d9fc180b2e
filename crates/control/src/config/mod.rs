//! The manager's configuration file (TOML). Every error names the file, the place in it and the remedy.

mod etcd;

pub use etcd::EtcdConfig;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_planner::queue::Limits;
use serde::Deserialize;

pub use crate::access::authorities::AuthorityConfig;
use crate::access::oidc::OidcRules;
use crate::journal::audit::Retention;

/// Where the manager's own socket is when nothing else is configured.
pub const DEFAULT_MANAGER_SOCKET: &str = "/run/godwit-control/control.sock";

/// What `godwit control run --config FILE` reads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// This manager's name: what the others and the audit log call it. Without it the machine's.
    #[serde(default = "godwit_pki::machine_name")]
    pub name: String,
    /// Addresses of its API; none: its socket alone.
    #[serde(default)]
    pub listen: Vec<SocketAddr>,
    /// Where others reach its API, `https://HOST:PORT`; none: the first of `listen`.
    #[serde(default)]
    pub address: Option<String>,
    /// The unix socket for the command line, root only.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// What must survive a reboot.
    #[serde(default = "default_state_dir")]
    pub state_dir: PathBuf,
    /// Its certificate, an operator's, and whom it trusts; none: only with `insecure`.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// Addresses for browsers, with a certificate that the cluster's authority has not issued.
    #[serde(default)]
    pub web: Option<WebConfig>,
    /// The authority that signs certificates of hosts that join; none: none can.
    #[serde(default)]
    pub authority: Option<AuthorityConfig>,
    /// An OpenID Connect issuer whose tokens are accepted.
    #[serde(default)]
    pub oidc: Option<OidcRules>,
    /// Where several managers keep what they must not forget; none: this one is alone, and keeps it in a file of `state_dir`.
    #[serde(default)]
    pub etcd: Option<EtcdConfig>,
    /// How much of the audit log is kept.
    #[serde(default)]
    pub audit: AuditConfig,
    /// How many migrations may run at once.
    #[serde(default)]
    pub limits: Limits,
    /// Its API and agents go unprotected: for a network that is theirs alone.
    #[serde(default)]
    pub insecure: bool,
}

/// Files of TLS, as `godwit pki` makes them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// Addresses for browsers: the same API and console as at `listen`, by a certificate of another authority.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebConfig {
    /// The addresses.
    pub listen: Vec<SocketAddr>,
    /// The certificate that browsers are shown, with its chain if it has one.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// How much of the audit log is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditConfig {
    /// Entries at most; the newest stay.
    pub most_entries: usize,
    /// None that is older.
    pub days: u32,
}

impl Default for AuditConfig {
    fn default() -> AuditConfig {
        AuditConfig { most_entries: 100_000, days: 400 }
    }
}

impl AuditConfig {
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

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("the configuration {path} can't be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no configuration.
    #[error("{path}: {why}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        why: String,
    },
    /// A value makes no sense.
    #[error("{path}: {key}: {why}")]
    Value {
        /// The file.
        path: PathBuf,
        key: &'static str,
        /// What is wrong with it.
        why: String,
        /// What to write instead.
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

    /// The same of a text.
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
                format!("\"{}\" is no name", self.name),
                "use letters, digits, - _ .",
            ));
        }
        if let Some(oidc) = &self.oidc
            && !oidc.issuer.starts_with("https://")
        {
            let why = format!("{} is asked for its keys, and nothing protects that", oidc.issuer);
            return Some(("oidc.issuer", why, "name the issuer as its tokens do, https://…"));
        }
        match (&self.tls, self.insecure) {
            (Some(_), true) => {
                Some(("insecure", "this manager has [tls] as well".into(), "remove one of the two"))
            }
            (None, false) => Some((
                "tls",
                "agents and users are spoken to, and nothing protects that".into(),
                "make an operator's certificate with `godwit pki issue --operator` and name it under [tls], or write insecure = true",
            )),
            _ => self.problem_of_several(),
        }
    }

    /// Managers reach each other by the network.
    fn problem_of_several(&self) -> Option<(&'static str, String, &'static str)> {
        let etcd = self.etcd.as_ref()?;
        if self.listen.is_empty() {
            let why = "other managers send requests here, and it listens nowhere".into();
            return Some((
                "listen",
                why,
                "name an address of this host: listen = [\"10.0.0.5:7800\"]",
            ));
        }
        if self.address.is_none() && self.listen[0].ip().is_unspecified() {
            let why = format!("others can't reach {}", self.listen[0]);
            return Some(("address", why, "write where they do: address = \"https://HOST:PORT\""));
        }
        etcd.problem()
    }

    /// Where others reach it.
    #[must_use]
    pub fn public_address(&self) -> String {
        let scheme = if self.insecure { "http" } else { "https" };
        let listen = || self.listen.first().map(|address| format!("{scheme}://{address}"));
        self.address
            .clone()
            .or_else(listen)
            .unwrap_or_else(|| format!("unix:{}", self.socket.display()))
    }

    pub(crate) fn store_file(&self) -> PathBuf {
        self.state_dir.join("control.sqlite")
    }

    /// The file that was the store before this was told of etcd; none: there is none.
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

    /// What the manual shows is read, and it shows every key that there is.
    #[test]
    fn the_manual_lists_every_key() {
        let manual = include_str!("../../../../docs/manager.md");
        let (_, section) = manual.split_once("## Configuration\n```toml\n").unwrap();
        let (text, _) = section.split_once("```").unwrap();
        let config = parse(text).unwrap();
        assert_eq!((config.limits.total, config.limits.datastores["/srv/slow"]), (Some(20), 2));
        for table in [
            "",
            "[tls]\n",
            "[web]\n",
            "[authority]\n",
            "[oidc]\n",
            "[audit]\n",
            "[limits]\n",
            "[limits.hosts.a]\n",
            "[etcd]\n",
        ] {
            // A key that nobody knows is refused with all that are known.
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
    fn the_old_name_of_a_limit_is_understood() {
        let config = parse("name = \"m1\"\ninsecure = true\n[limits]\ntotal = 3").unwrap();
        assert_eq!(config.limits.total, Some(3));
    }

    #[test]
    fn a_short_one_is_enough() {
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
            "name = \"m1\"\ninsecure = true\naddress = \"http://m1:7800\"\nlisten = [\"127.0.0.1:7800\"]\nstate_dir = {:?}\n",
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
    fn what_is_wrong_is_named_with_the_mend() {
        for (text, words) in [
            ("listen = 7", ["listen", "docs/manager.md"]),
            ("name = \"m 1\"\ninsecure = true", ["name", "letters"]),
            ("", ["tls", "godwit pki"]),
            (
                "name = \"m1\"\ninsecure = true\n[etcd]\nendpoints = []",
                ["listen", "other managers"],
            ),
            (
                "name = \"m1\"\ninsecure = true\nlisten = [\"0.0.0.0:7800\"]\n[etcd]\nendpoints = []",
                ["address", "https://HOST:PORT"],
            ),
            ("name = \"m1\"\ninsecure = true\nport = 1", ["port", "docs/manager.md"]),
        ] {
            let error = parse(text).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
