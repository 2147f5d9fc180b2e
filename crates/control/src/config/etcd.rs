//! `[etcd]` of the manager's configuration: the store that several managers share.

use std::path::PathBuf;

use serde::Deserialize;

/// Addresses of etcd, and this manager's credentials.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// Addresses of etcd's members, such as `https://10.0.0.1:2379`; all with TLS or none.
    pub endpoints: Vec<String>,
    /// Prefix of all keys of this cluster's managers.
    #[serde(default = "default_prefix")]
    pub prefix: String,
    /// User name at etcd; none: etcd requires none, or uses the certificate.
    #[serde(default)]
    pub user: Option<String>,
    /// File with the user's password and nothing else, readable by its owner alone.
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// Authority that issued etcd's certificates (PEM); none: `http://` endpoints.
    #[serde(default)]
    pub ca: Option<PathBuf>,
    /// This manager's client certificate for etcd; none: etcd requires none.
    #[serde(default)]
    pub certificate: Option<PathBuf>,
    #[serde(default)]
    pub key: Option<PathBuf>,
    /// Time for which a leadership outlives its manager, seconds.
    #[serde(default = "default_lease_s")]
    pub lease_s: u64,
}

fn default_prefix() -> String {
    "/godwit".to_owned()
}

fn default_lease_s() -> u64 {
    5
}

impl EtcdConfig {
    /// Returns the key, the error and the remedy, if the values are inconsistent.
    pub(crate) fn problem(&self) -> Option<(&'static str, String, &'static str)> {
        let given = |one: bool| if one { "given" } else { "missing" };
        if self.user.is_some() != self.password_file.is_some() {
            let why = format!(
                "user is {}, password_file {}",
                given(self.user.is_some()),
                given(self.user.is_none())
            );
            return Some(("etcd", why, "give both, or none"));
        }
        if self.certificate.is_some() != self.key.is_some() {
            let why = format!(
                "certificate is {}, key {}",
                given(self.key.is_none()),
                given(self.key.is_some())
            );
            return Some(("etcd", why, "give both, or none"));
        }
        if self.certificate.is_some() && self.ca.is_none() {
            return Some((
                "etcd",
                "certificate is given, but ca is missing".into(),
                "name the authority of etcd's certificates in ca",
            ));
        }
        None
    }
}

#[cfg(feature = "etcd")]
mod settings {
    use std::fs;
    use std::io;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::time::Duration;

    use godwit_store::{EtcdSettings, EtcdTls, StoreError};

    use super::EtcdConfig;

    impl EtcdConfig {
        /// Returns the settings for the store, and reads the password from its file.
        pub(crate) fn settings(&self) -> Result<EtcdSettings, StoreError> {
            let user = match (&self.user, &self.password_file) {
                (Some(user), Some(file)) => Some((user.clone(), password(file)?)),
                _ => None,
            };
            let identity = self.certificate.clone().zip(self.key.clone());
            let tls = self.ca.clone().map(|authority| EtcdTls { authority, identity });
            Ok(EtcdSettings {
                endpoints: self.endpoints.clone(),
                prefix: self.prefix.clone(),
                tls,
                user,
                lease: Duration::from_secs(self.lease_s),
            })
        }
    }

    fn password(file: &Path) -> Result<String, StoreError> {
        let failed =
            |source: io::Error| StoreError::File { path: file.to_owned(), action: "read", source };
        if fs::metadata(file).map_err(failed)?.mode() & 0o077 != 0 {
            let why =
                format!("the password in {} can be read by others (chmod 600 it)", file.display());
            return Err(StoreError::Settings { why });
        }
        let text = fs::read_to_string(file).map_err(failed)?;
        Ok(text.trim_end_matches(['\r', '\n']).to_owned())
    }
}

#[cfg(all(test, feature = "etcd"))]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn parse(text: &str) -> Result<EtcdConfig, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn endpoints_are_enough() {
        let settings = parse("endpoints = [\"http://10.0.0.1:2379\"]").unwrap().settings().unwrap();
        assert_eq!((settings.prefix.as_str(), settings.lease.as_secs()), ("/godwit", 5));
        assert!(settings.tls.is_none() && settings.user.is_none());
    }

    #[test]
    fn a_password_file_must_be_private_and_is_never_printed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("password");
        fs::write(&file, "very secret\n").unwrap();
        let text = format!("endpoints = []\nuser = \"m\"\npassword_file = \"{}\"", file.display());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(parse(&text).unwrap().settings().unwrap_err().to_string().contains("chmod 600"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let settings = parse(&text).unwrap().settings().unwrap();
        assert_eq!(settings.user, Some(("m".to_owned(), "very secret".to_owned())));
        assert!(!format!("{:?}{settings:?}", parse(&text).unwrap()).contains("secret"));
    }

    #[test]
    fn keys_that_belong_together_are_required_together() {
        for text in [
            "user = \"m\"",
            "password_file = \"/p\"",
            "certificate = \"/c\"",
            "key = \"/k\"",
            "certificate = \"/c\"\nkey = \"/k\"",
        ] {
            assert!(
                parse(&format!("endpoints = []\n{text}")).unwrap().problem().is_some(),
                "{text}"
            );
        }
        assert_eq!(
            parse("endpoints = []\nca = \"/ca\"\ncertificate = \"/c\"\nkey = \"/k\"")
                .unwrap()
                .problem(),
            None
        );
    }
}
