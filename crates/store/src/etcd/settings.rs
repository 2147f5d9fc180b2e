//! Connection settings for etcd.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};

use crate::error::{StoreError, file_error};

/// Shortest lease. A slow disk would lose a shorter one; etcd itself grants none under 2 s.
const SHORTEST_LEASE: Duration = Duration::from_secs(2);
/// Longest lease. For this long there may be no leader.
const LONGEST_LEASE: Duration = Duration::from_secs(60);
/// Longest time to establish a connection.
const CONNECT: Duration = Duration::from_secs(2);
/// Interval of keepalive pings. etcd closes connections of clients that ping more often than every
/// 5 s.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Longest time to the response to a ping.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest prefix in bytes: the largest transaction still fits into a request.
const LONGEST_PREFIX: usize = 128;

/// Addresses of etcd, and the credentials of this manager.
#[derive(Clone)]
pub struct EtcdSettings {
    /// Addresses of the members, such as `https://10.0.0.1:2379`; all with TLS or all without.
    pub endpoints: Vec<String>,
    /// Prefix of all keys of this cluster's managers.
    pub prefix: String,
    /// Certificates; `None` for `http` endpoints.
    pub tls: Option<EtcdTls>,
    /// User name and password; `None` if etcd requires none, or identifies clients by certificate.
    pub user: Option<(String, String)>,
    /// How long a leadership outlasts its manager: whole seconds, 2 to 60.
    pub lease: Duration,
}

/// Certificates for etcd, as PEM files.
#[derive(Clone, Debug)]
pub struct EtcdTls {
    /// Authority that signed etcd's own certificates.
    pub authority: PathBuf,
    /// This manager's certificate and key; `None` if etcd requires none.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl Default for EtcdSettings {
    fn default() -> EtcdSettings {
        EtcdSettings {
            endpoints: vec!["http://127.0.0.1:2379".to_owned()],
            prefix: "/godwit".to_owned(),
            tls: None,
            user: None,
            lease: Duration::from_secs(5),
        }
    }
}

impl std::fmt::Debug for EtcdSettings {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("EtcdSettings")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("tls", &self.tls)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .field("lease", &self.lease)
            .finish()
    }
}

impl EtcdSettings {
    /// Checks the settings and converts them for etcd's client.
    pub(super) fn check_and_load(&self) -> Result<ConnectOptions, StoreError> {
        self.check().map_err(|why| StoreError::Settings { why })?;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT)
            .with_keep_alive(KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT)
            // A member that is cut off from the others must report that, not answer with old data.
            .with_require_leader(true);
        if let Some((name, password)) = &self.user {
            options = options.with_user(name, password).with_auto_token_refresh(true);
        }
        if let Some(tls) = &self.tls {
            options = options.with_tls(tls.load()?);
        } else {
            tracing::warn!(endpoints = ?self.endpoints, "the connection to etcd is not encrypted");
        }
        Ok(options)
    }

    fn check(&self) -> Result<(), String> {
        if self.endpoints.is_empty() {
            return Err("no endpoints are given (list etcd's members, such as https://HOST:2379)"
                .to_owned());
        }
        let scheme = if self.tls.is_some() { "https://" } else { "http://" };
        if let Some(other) = self.endpoints.iter().find(|endpoint| !endpoint.starts_with(scheme)) {
            return Err(format!(
                "the endpoint {other} must begin with {scheme} (use https with certificates, http \
                without)"
            ));
        }
        let prefix = &self.prefix;
        let visible = prefix.bytes().all(|byte| byte.is_ascii_graphic());
        if !visible || prefix.trim_end_matches('/').is_empty() || prefix.len() > LONGEST_PREFIX {
            return Err(format!(
                "the prefix \"{prefix}\" must be visible ASCII, at most {LONGEST_PREFIX} bytes, \
                such as /godwit"
            ));
        }
        if !(SHORTEST_LEASE..=LONGEST_LEASE).contains(&self.lease) || self.lease.subsec_nanos() != 0
        {
            return Err(format!("a lease of {:?} must be 2 to 60 whole seconds", self.lease));
        }
        Ok(())
    }
}

impl EtcdTls {
    fn load(&self) -> Result<TlsOptions, StoreError> {
        let read = |path: &Path| fs::read(path).map_err(file_error(path, "read"));
        let mut tls =
            TlsOptions::new().ca_certificate(Certificate::from_pem(read(&self.authority)?));
        if let Some((certificate, key)) = &self.identity {
            let mode = fs::metadata(key).map_err(file_error(key, "read"))?.mode();
            if mode & 0o077 != 0 {
                let why = format!("others can read the key {} (chmod 600 it)", key.display());
                return Err(StoreError::Settings { why });
            }
            tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        Ok(tls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_etcd_settings_are_refused() {
        let right = EtcdSettings::default();
        right.check().unwrap();
        let wrong = [
            EtcdSettings { endpoints: Vec::new(), ..right.clone() },
            EtcdSettings { endpoints: vec!["https://a:2379".to_owned()], ..right.clone() },
            EtcdSettings { endpoints: vec!["a:2379".to_owned()], ..right.clone() },
            EtcdSettings { prefix: "/".to_owned(), ..right.clone() },
            EtcdSettings { prefix: "a b".to_owned(), ..right.clone() },
            EtcdSettings { lease: Duration::from_secs(1), ..right.clone() },
            EtcdSettings { lease: Duration::from_millis(2500), ..right.clone() },
            EtcdSettings { lease: Duration::from_secs(61), ..right.clone() },
        ];
        for settings in wrong {
            assert!(settings.check().is_err(), "{settings:?}");
        }
    }

    #[test]
    fn a_password_is_not_printed() {
        let user = Some(("manager".to_owned(), "very secret".to_owned()));
        let settings = EtcdSettings { user, ..EtcdSettings::default() };
        let text = format!("{settings:?}");
        assert!(text.contains("manager") && !text.contains("secret"), "{text}");
    }
}
