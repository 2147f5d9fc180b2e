//! The authority: its own certificate and key in a directory, and the certificates that it issues.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};

use crate::PkiError;
use crate::certificate::{Description, Role, describe, describe_der};
use crate::error::file_error;
use crate::key_file::check_key;
use crate::{RevocationList, Serial};

/// Allowance for differing clocks of hosts: a certificate is valid from this long before its
/// creation.
const CLOCKS_DIFFER: Duration = Duration::hours(1);
const CERTIFICATE: &str = "ca.pem";
const KEY: &str = "ca.key";
const LIST: &str = "crl.pem";

#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    certificate: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    /// Whether it issues certificates only for browsers. The cluster trusts none of those.
    is_web: bool,
}

/// Contents of a certificate to be issued.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Name of the holder, as other agents' configurations call the host.
    pub name: String,
    pub role: Role,
    /// IP addresses that the certificate is valid for.
    pub addresses: Vec<IpAddr>,
    pub days: u32,
}

/// Files of an issued certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    pub certificate: PathBuf,
    /// The key, readable only by its owner.
    pub key: PathBuf,
}

/// Certificate signed for a key that another host holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    pub certificate: String,
    /// The authority's own certificate (PEM).
    pub authority: String,
    /// Summary of the certificate.
    pub description: Description,
}

impl Authority {
    /// Creates an authority with this name in a directory, which is created if necessary.
    ///
    /// # Errors
    /// [`PkiError::Exists`] if there is one already; no partial result remains.
    pub fn create(dir: &Path, name: &str, days: u32) -> Result<Authority, PkiError> {
        Authority::make(dir, name, days, None)
    }

    /// Creates an authority for servers that browsers connect to: people import its certificate,
    /// and it does not sign for hosts.
    ///
    /// # Errors
    /// Those of [`Authority::create`].
    pub fn create_web(dir: &Path, name: &str, days: u32) -> Result<Authority, PkiError> {
        Authority::make(dir, name, days, Some(Role::Web))
    }

    fn make(dir: &Path, name: &str, days: u32, kind: Option<Role>) -> Result<Authority, PkiError> {
        fs::create_dir_all(dir).map_err(file_error(dir, "create"))?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        if let Some(kind) = kind {
            params.distinguished_name.push(DnType::OrganizationalUnitName, kind.unit());
        }
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (params.not_before, params.not_after) = validity(days);
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        let path = dir.join(KEY);
        write_new(&path, &key.serialize_pem(), 0o600)?;
        if let Err(error) = write_new(&dir.join(CERTIFICATE), &certificate.pem(), 0o644) {
            let _ = fs::remove_file(path);
            return Err(error);
        }
        Authority::open(dir)
    }

    /// Opens the authority in a directory.
    ///
    /// # Errors
    /// [`PkiError::NoAuthority`], [`PkiError::File`], [`PkiError::OpenKey`],
    /// [`PkiError::Unreadable`].
    pub fn open(dir: &Path) -> Result<Authority, PkiError> {
        let (certificate, key) = (dir.join(CERTIFICATE), dir.join(KEY));
        if !certificate.exists() {
            return Err(PkiError::NoAuthority { dir: dir.to_owned() });
        }
        Authority::load(&certificate, &key)
    }

    /// Loads an authority from the files of its certificate and its key.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::OpenKey`], [`PkiError::Unreadable`].
    pub fn load(certificate: &Path, key: &Path) -> Result<Authority, PkiError> {
        let read = |path: &Path| fs::read_to_string(path).map_err(file_error(path, "read"));
        let unreadable = |path: &Path, error: &rcgen::Error| PkiError::Unreadable {
            path: path.to_owned(),
            why: error.to_string(),
        };
        check_key(key)?;
        let pair = KeyPair::from_pem(&read(key)?).map_err(|error| unreadable(key, &error))?;
        let issuer = Issuer::from_ca_cert_pem(&read(certificate)?, pair)
            .map_err(|error| unreadable(certificate, &error))?;
        let dir = certificate.parent().unwrap_or(Path::new("")).to_owned();
        let is_web = describe(certificate)?.role == Role::Web;
        Ok(Authority { dir, certificate: certificate.to_owned(), issuer, is_web })
    }

    /// Returns whether it issues certificates only for browsers.
    #[must_use]
    pub fn is_web(&self) -> bool {
        self.is_web
    }

    /// Refuses a role that this kind of authority does not issue: one that browsers trust does not
    /// sign for hosts.
    fn check_role(&self, role: Role) -> Result<(), PkiError> {
        if (role == Role::Web) == self.is_web {
            return Ok(());
        }
        let kind = if self.is_web { "browsers" } else { "the cluster" };
        let role = role.unit().trim_start_matches("godwit ");
        Err(PkiError::OtherAuthority { path: self.certificate.clone(), role, kind })
    }

    /// Returns the file of the authority's own certificate, which every host needs.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        self.certificate.clone()
    }

    /// Signs a request (PKCS #10, PEM), which proves that its sender holds the key. Only the public
    /// key is taken from the request: the certificate has the contents that [`Authority::issue`]
    /// would give it.
    ///
    /// # Errors
    /// [`PkiError::BadRequest`], [`PkiError::BadName`], [`PkiError::File`].
    pub fn sign(&self, request: &str, grant: &Grant) -> Result<Signed, PkiError> {
        check_name(&grant.name)?;
        self.check_role(grant.role)?;
        let bad = |error: rcgen::Error| PkiError::BadRequest { why: error.to_string() };
        let mut request = CertificateSigningRequestParams::from_pem(request).map_err(bad)?;
        request.params = contents(grant)?;
        let certificate = request.signed_by(&self.issuer)?;
        let description = describe_der(certificate.der()).ok_or_else(|| PkiError::BadRequest {
            why: "its certificate cannot be read".to_owned(),
        })?;
        let path = &self.certificate;
        let authority = fs::read_to_string(path).map_err(file_error(path, "read"))?;
        Ok(Signed { certificate: certificate.pem(), authority, description })
    }

    /// Issues a certificate with a new key, as `NAME.pem` and `NAME.key` in the authority's
    /// directory.
    ///
    /// # Errors
    /// [`PkiError::Exists`] if that name has one; [`PkiError::BadName`]; no partial result remains.
    pub fn issue(&self, grant: &Grant) -> Result<Issued, PkiError> {
        let issued = self.files(CheckedName::new(&grant.name)?);
        for path in [&issued.certificate, &issued.key] {
            if path.exists() {
                return Err(PkiError::Exists { path: path.clone() });
            }
        }
        self.write(grant, &issued)?;
        Ok(issued)
    }

    /// Reissues the certificate of a name, with a new key, valid for `days` from now.
    ///
    /// # Errors
    /// As [`Authority::issue`]; [`PkiError::File`] if the name has no certificate yet.
    pub fn renew(&self, name: &str, days: u32) -> Result<Issued, PkiError> {
        let issued = self.files(CheckedName::new(name)?);
        let old = describe(&issued.certificate)?;
        let grant =
            Grant { name: name.to_owned(), role: old.role, addresses: old.addresses.clone(), days };
        self.write(&grant, &issued)?;
        Ok(issued)
    }

    /// Signs a list of revoked certificates with the times of their revocation, seconds since 1970.
    /// Later lists need higher numbers.
    ///
    /// # Errors
    /// [`PkiError::BadList`]: it would be too long. [`PkiError::Make`].
    pub fn list(
        &self,
        number: u64,
        revoked: BTreeMap<Serial, i64>,
    ) -> Result<RevocationList, PkiError> {
        RevocationList::sign(&self.issuer, number, revoked)
    }

    /// Returns the file in which this authority keeps its own list of revoked certificates.
    #[must_use]
    pub fn list_file(&self) -> PathBuf {
        self.dir.join(LIST)
    }

    /// Returns its own list, or `None` if it has revoked nothing.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::BadList`].
    pub fn own_list(&self) -> Result<Option<RevocationList>, PkiError> {
        let path = self.list_file();
        match fs::read_to_string(&path) {
            Ok(text) => RevocationList::read(&text, &self.certificate).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(file_error(&path, "read")(error)),
        }
    }

    /// Adds certificates to its own list and writes it. If there is no list yet, it writes one even
    /// if it is empty.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::BadList`]; the previous list stays.
    pub fn revoke(
        &self,
        serials: impl IntoIterator<Item = Serial>,
    ) -> Result<RevocationList, PkiError> {
        let before = self.own_list()?;
        let now = OffsetDateTime::now_utc().unix_timestamp();
        let (number, mut revoked) =
            before.map_or((0, BTreeMap::new()), |list| (list.number(), list.revoked().clone()));
        for serial in serials {
            revoked.entry(serial).or_insert(now);
        }
        let list = self.list(next_list_number(number), revoked)?;
        let (path, fresh) = (self.list_file(), self.dir.join(format!("{LIST}.new")));
        let _ = fs::remove_file(&fresh);
        write_new(&fresh, list.pem(), 0o644)?;
        fs::rename(&fresh, &path).map_err(file_error(&path, "write"))?;
        Ok(list)
    }

    fn files(&self, name: CheckedName<'_>) -> Issued {
        Issued {
            certificate: self.dir.join(format!("{name}.pem")),
            key: self.dir.join(format!("{name}.key")),
        }
    }

    /// Writes each file under another name, then moves it into place.
    fn write(&self, grant: &Grant, issued: &Issued) -> Result<(), PkiError> {
        self.check_role(grant.role)?;
        let params = contents(grant)?;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let fresh = |path: &Path| path.with_extension("new");
        let (new_key, new_certificate) =
            (fresh(&issued.key), issued.certificate.with_extension("pem.new"));
        for stale in [&new_key, &new_certificate] {
            let _ = fs::remove_file(stale);
        }
        write_new(&new_key, &key.serialize_pem(), 0o600)?;
        write_new(&new_certificate, &certificate.pem(), 0o644)?;
        fs::rename(&new_key, &issued.key).map_err(file_error(&issued.key, "write"))?;
        fs::rename(&new_certificate, &issued.certificate)
            .map_err(file_error(&issued.certificate, "write"))
    }
}

/// Returns the contents of a certificate.
fn contents(grant: &Grant) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(vec![grant.name.clone()])?;
    params.serial_number = Some(Serial::draw()?.number());
    params
        .subject_alt_names
        .extend(grant.addresses.iter().map(|address| SanType::IpAddress(*address)));
    params.distinguished_name.push(DnType::CommonName, grant.name.clone());
    params.distinguished_name.push(DnType::OrganizationalUnitName, grant.role.unit());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    params.extended_key_usages = match grant.role {
        Role::Host | Role::Operator => vec![ClientAuth, ServerAuth],
        // A holder that only reads must not pass for a host, whatever its name.
        Role::Monitor => vec![ClientAuth],
        Role::Web => vec![ServerAuth],
    };
    (params.not_before, params.not_after) = validity(grant.days);
    Ok(params)
}

/// Returns the number of the list after this one. Numbers follow the time, so that an authority
/// whose list was lost still signs later ones.
#[must_use]
pub fn next_list_number(number: u64) -> u64 {
    let now = OffsetDateTime::now_utc().unix_timestamp();
    number.saturating_add(1).max(u64::try_from(now).unwrap_or(0))
}

fn validity(days: u32) -> (OffsetDateTime, OffsetDateTime) {
    let now = OffsetDateTime::now_utc();
    (now - CLOCKS_DIFFER, now.saturating_add(Duration::days(days.into())))
}

/// Refuses a name that is not a single DNS label (RFC 1123), because TLS compares names in this
/// form.
///
/// # Errors
/// [`PkiError::BadName`].
pub fn check_name(name: &str) -> Result<(), PkiError> {
    let bad = |why: &str| Err(PkiError::BadName { name: name.to_owned(), why: why.to_owned() });
    if name.is_empty() || name.len() > 63 {
        return bad("it has no letter, or more than 63");
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.')) {
        return bad("it has other characters");
    }
    if name == "ca" || name == "crl" {
        return bad("that is the authority's own");
    }
    let edge = |c: char| c == '-' || c == '.';
    if name.starts_with(edge) || name.ends_with(edge) || name.contains("..") {
        return bad("it begins or ends with a dot or hyphen, or has two dots in a row");
    }
    Ok(())
}

/// Name that [`check_name`] has accepted. Only this type names files after a host or an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedName<'a>(&'a str);

impl CheckedName<'_> {
    /// Checks a name.
    ///
    /// # Errors
    /// [`PkiError::BadName`].
    pub fn new(name: &str) -> Result<CheckedName<'_>, PkiError> {
        check_name(name).map(|()| CheckedName(name))
    }
}

impl std::fmt::Display for CheckedName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), PkiError> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = opened.map_err(|source| match source.kind() {
        std::io::ErrorKind::AlreadyExists => PkiError::Exists { path: path.to_owned() },
        _ => PkiError::File { path: path.to_owned(), action: "create", source },
    })?;
    file.write_all(text.as_bytes()).map_err(file_error(path, "write"))
}
