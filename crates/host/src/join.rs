//! Joining of a cluster: this host creates its key, which never leaves it, has the manager sign a
//! certificate, and stores the answer. No file is half written: the files that an agent reads are
//! put in place last, after they have been verified.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use godwit_api::Endpoint;
use godwit_api::control::{JoinRequest, JoinTokenText, Joined, ManagerClient, ManagerError};
use godwit_pki::{CheckedName, Fingerprint, Identity, PkiError, Trust};

use crate::config::Config;

/// Parameters of joining.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    pub manager: Endpoint,
    /// Token that an admin created for this host.
    pub token: JoinTokenText,
    /// Address of this host's agent; `None`: the one that the token was created with.
    pub address: Option<String>,
    /// Addresses of this host that receive migrations.
    pub migration_addresses: Vec<IpAddr>,
    /// Directory for authority, certificate and key.
    pub dir: PathBuf,
    /// The agent's configuration; created if it does not exist.
    pub config: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinedHost {
    pub name: String,
    /// Whether the host had joined before, so that no request was made.
    pub had_joined: bool,
    pub authority: PathBuf,
    /// Certificate of this host.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Lines that the existing configuration lacks; `None` if it is complete.
    pub to_configure: Option<String>,
}

/// Failure to join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The manager's address is not encrypted.
    #[error(
        "cannot join through {endpoint}: without TLS, an eavesdropper could join in this \
        host's place"
    )]
    Unprotected {
        /// The manager's address.
        endpoint: Endpoint,
    },
    /// The host already has another authority.
    #[error(
        "cannot join: {path} is another authority ({found}) than the token's, so this host belongs \
         to another cluster (name another --dir, or remove the file)"
    )]
    OtherAuthority {
        /// The existing certificate of the authority.
        path: PathBuf,
        found: Fingerprint,
    },
    /// The manager's answer does not match the request.
    #[error("cannot use the manager's answer: {0}")]
    Answer(String),
    /// The manager is unreachable, or refuses.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// A certificate or key cannot be created, read or written.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// A file cannot be written.
    #[error("cannot write {path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
}

impl JoinError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            JoinError::Unprotected { .. } => "name an https:// address".to_owned(),
            JoinError::OtherAuthority { .. } => "name another --dir, or remove the file".to_owned(),
            JoinError::Answer(_) => "nothing was changed; check the manager".to_owned(),
            JoinError::Manager(error) => error.remedy().to_owned(),
            JoinError::Pki(error) => error.remedy(),
            JoinError::File { .. } => String::new(),
        }
    }
}

/// The files of a host.
struct Files {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    fn of(dir: &Path, host: CheckedName<'_>) -> Files {
        let named = |ending: &str| dir.join(format!("{host}.{ending}"));
        Files { authority: dir.join("ca.pem"), certificate: named("pem"), key: named("key") }
    }

    /// Returns the temporary files for an answer that is not verified yet.
    fn fresh(dir: &Path, host: CheckedName<'_>) -> Files {
        let named = |ending: &str| dir.join(format!("{host}.{ending}.joining"));
        Files { authority: named("ca"), certificate: named("pem"), key: named("key") }
    }

    /// Checks that the files belong to this host and to that authority.
    fn are_good(&self, host: &str, authority: Fingerprint) -> Result<(), String> {
        let found =
            Fingerprint::of_certificate(&self.authority).map_err(|error| error.to_string())?;
        if found != authority {
            return Err(format!("its authority is {found}, not the token's authority {authority}"));
        }
        let identity = Identity::load(&self.authority, &self.certificate, &self.key)
            .map_err(|error| error.to_string())?;
        if identity.name() == host {
            Ok(())
        } else {
            Err(format!("the certificate belongs to {}", identity.name()))
        }
    }
}

/// Joins the cluster, or finds that the host has joined.
///
/// # Errors
/// [`JoinError`]. A caller may repeat the call: it requests a certificate for the same key, which
/// the manager may already have signed.
pub async fn join(options: &JoinOptions) -> Result<JoinedHost, JoinError> {
    let JoinOptions { token, dir, .. } = options;
    let files = Files::of(dir, CheckedName::new(&token.host)?);
    if files.authority.exists() {
        let found = Fingerprint::of_certificate(&files.authority)?;
        if found != token.authority {
            return Err(JoinError::OtherAuthority { path: files.authority, found });
        }
    }
    let had_joined = files.are_good(&token.host, token.authority).is_ok();
    let address =
        if had_joined { options.address.clone() } else { Some(ask(options, &files).await?) };
    let to_configure = configure(options, &files, address.as_deref())?;
    let Files { authority, certificate, key } = files;
    Ok(JoinedHost {
        name: token.host.clone(),
        had_joined,
        authority,
        certificate,
        key,
        to_configure,
    })
}

/// Requests a certificate from the manager and stores the answer. Returns the agent's address from
/// the answer.
async fn ask(options: &JoinOptions, files: &Files) -> Result<String, JoinError> {
    let JoinOptions { token, dir, .. } = options;
    let client = client(&options.manager, token)?;
    fs::create_dir_all(dir).map_err(|source| JoinError::File { path: dir.clone(), source })?;
    let fresh = Files::fresh(dir, CheckedName::new(&token.host)?);
    let request = JoinRequest {
        token: token.to_string(),
        host: token.host.clone(),
        address: options.address.clone(),
        addresses: Vec::new(),
        request: godwit_pki::request(&fresh.key)?,
    };
    let joined = client.join(&request).await.inspect_err(|error| {
        // A manager that refused has signed nothing. One that did not answer may have signed for
        // this key.
        if matches!(error, ManagerError::Refused(problem) if problem.status < 500) {
            let _ = fs::remove_file(&fresh.key);
        }
    })?;
    keep(&joined, &fresh, files, token)?;
    Ok(joined.address)
}

/// Creates a client that accepts only a manager of the token's authority.
fn client(manager: &Endpoint, token: &JoinTokenText) -> Result<ManagerClient, JoinError> {
    match manager {
        // Only root of this machine can listen there.
        Endpoint::Unix(_) => Ok(ManagerClient::new(manager.clone(), None)),
        Endpoint::Tcp(_) => Err(JoinError::Unprotected { endpoint: manager.clone() }),
        Endpoint::Tls(authority) => {
            let trust = Trust::by_fingerprint(token.authority)?;
            let name = authority.rsplit_once(':').map_or(authority.as_str(), |(name, _)| name);
            let name = name.trim_start_matches('[').trim_end_matches(']');
            Ok(ManagerClient::trusting(manager.clone(), &trust, name, None))
        }
    }
}

fn keep(
    joined: &Joined,
    fresh: &Files,
    files: &Files,
    token: &JoinTokenText,
) -> Result<(), JoinError> {
    write(&fresh.authority, &joined.authority, 0o644)?;
    write(&fresh.certificate, &joined.certificate, 0o644)?;
    if let Err(why) = fresh.are_good(&token.host, token.authority) {
        let _ = fs::remove_file(&fresh.authority);
        let _ = fs::remove_file(&fresh.certificate);
        return Err(JoinError::Answer(why));
    }
    // The key comes last: without it the host has not joined, and asks again with the key that it
    // has created.
    for (from, to) in [
        (&fresh.authority, &files.authority),
        (&fresh.certificate, &files.certificate),
        (&fresh.key, &files.key),
    ] {
        fs::rename(from, to).map_err(|source| JoinError::File { path: to.clone(), source })?;
    }
    Ok(())
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), JoinError> {
    let written =
        OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path).and_then(
            |mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            },
        );
    written.map_err(|source| JoinError::File { path: path.to_owned(), source })
}

/// Writes the agent's configuration if there is none. If there is one that does not name these
/// files, returns the lines that it needs.
fn configure(
    options: &JoinOptions,
    files: &Files,
    address: Option<&str>,
) -> Result<Option<String>, JoinError> {
    let text = configuration(options, files, address);
    if !options.config.exists() {
        if let Some(parent) = options.config.parent() {
            let failed = |source| JoinError::File { path: parent.to_owned(), source };
            fs::create_dir_all(parent).map_err(failed)?;
        }
        write(&options.config, &text, 0o644)?;
        return Ok(None);
    }
    let is_complete = Config::load(&options.config).is_ok_and(|config| {
        config.name == options.token.host
            && config.tls.is_some_and(|tls| {
                (tls.authority, tls.certificate, tls.key)
                    == (files.authority.clone(), files.certificate.clone(), files.key.clone())
            })
    });
    Ok((!is_complete).then_some(text))
}

/// Returns a minimal configuration of an agent that others can reach.
fn configuration(options: &JoinOptions, files: &Files, address: Option<&str>) -> String {
    let quoted = |text: &str| toml::Value::from(text).to_string();
    let mut text = format!("name = {}\n", quoted(&options.token.host));
    if let Some(listen) = address.and_then(listen) {
        let _ = writeln!(text, "listen = [{}]", quoted(&listen.to_string()));
    }
    if !options.migration_addresses.is_empty() {
        let all: Vec<_> = options
            .migration_addresses
            .iter()
            .map(|address| quoted(&address.to_string()))
            .collect();
        let _ = writeln!(text, "migration_addresses = [{}]", all.join(", "));
    }
    text.push_str("[tls]\n");
    for (key, path) in
        [("authority", &files.authority), ("certificate", &files.certificate), ("key", &files.key)]
    {
        let _ = writeln!(text, "{key} = {}", quoted(&path.display().to_string()));
    }
    text
}

/// Returns the listen address for an agent's URL. With a host name in the URL, the agent listens on
/// every address.
fn listen(address: &str) -> Option<SocketAddr> {
    let (_, authority) = address.split_once("://")?;
    authority.parse().ok().or_else(|| {
        let (_, port) = authority.rsplit_once(':')?;
        Some(SocketAddr::from(([0; 16], port.parse().ok()?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(dir: &Path) -> JoinOptions {
        JoinOptions {
            manager: "https://m1:7800".parse().unwrap(),
            token: JoinTokenText {
                secret: "godwit_0_0".into(),
                authority: Fingerprint::of(b"authority"),
                host: "c".into(),
            },
            address: None,
            migration_addresses: vec!["10.0.0.7".parse().unwrap()],
            dir: dir.join("pki"),
            config: dir.join("agent.toml"),
        }
    }

    #[test]
    fn the_configuration_is_valid_and_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let files = Files::of(&options.dir, CheckedName::new("c").unwrap());
        assert_eq!(configure(&options, &files, Some("https://10.0.0.7:7700")).unwrap(), None);
        let config = Config::load(&options.config).unwrap();
        assert_eq!(
            (config.name.as_str(), config.listen[0].to_string()),
            ("c", "10.0.0.7:7700".into())
        );
        assert_eq!(config.tls.unwrap().key, files.key);
        assert_eq!(configure(&options, &files, None).unwrap(), None, "already configured");
        let mine = "name = \"other\"\n";
        fs::write(&options.config, mine).unwrap();
        let lines = configure(&options, &files, Some("https://c.example:7700")).unwrap().unwrap();
        assert!(lines.contains("listen = [\"[::]:7700\"]"), "{lines}");
        assert_eq!(fs::read_to_string(&options.config).unwrap(), mine);
    }

    #[tokio::test]
    async fn nothing_is_sent_unencrypted_and_nothing_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let open =
            JoinOptions { manager: "http://127.0.0.1:1".parse().unwrap(), ..options(dir.path()) };
        assert!(matches!(join(&open).await, Err(JoinError::Unprotected { .. })));
        assert!(!open.dir.exists() && !open.config.exists());
    }
}
