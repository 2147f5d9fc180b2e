//! The authority: its own certificate and key in a directory, and the certificates it issues.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};

use crate::certificate::{Description, Role, describe, describe_der};
use crate::revocation::{RevocationList, Serial};
use crate::{PkiError, check_key, file_error};

/// Clocks of hosts differ: a certificate is good from an hour before it was made.
const CLOCKS_DIFFER: Duration = Duration::hours(1);
const CERTIFICATE: &str = "ca.pem";
const KEY: &str = "ca.key";
const LIST: &str = "crl.pem";

/// A directory with an authority.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    certificate: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    /// It issues certificates for browsers alone, and the cluster trusts none of them.
    is_web: bool,
}

/// What a certificate is to say.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The holder's name: what the other agents' configurations call the host.
    pub name: String,
    /// What the holder may do.
    pub role: Role,
    /// Addresses that it also stands for.
    pub addresses: Vec<IpAddr>,
    /// How long it is good for.
    pub days: u32,
}

/// A certificate's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its key, readable by its owner alone.
    pub key: PathBuf,
}

/// A certificate that was signed for somebody else's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The certificate, PEM.
    pub certificate: String,
    /// The authority's own, PEM.
    pub authority: String,
    /// What the certificate says.
    pub description: Description,
}

impl Authority {
    /// Makes an authority of this name in a directory, which is made if need be.
    ///
    /// # Errors
    /// [`PkiError::Exists`] where there is one already; nothing is half made.
    pub fn create(dir: &Path, name: &str, days: u32) -> Result<Authority, PkiError> {
        Authority::make(dir, name, days, None)
    }

    /// Makes an authority for what browsers connect to: people import its certificate, and it signs for no host.
    ///
    /// # Errors
    /// Those of [`Authority::create`].
    pub fn create_web(dir: &Path, name: &str, days: u32) -> Result<Authority, PkiError> {
        Authority::make(dir, name, days, Some(Role::Web))
    }

    fn make(dir: &Path, name: &str, days: u32, kind: Option<Role>) -> Result<Authority, PkiError> {
        fs::create_dir_all(dir).map_err(file_error(dir, "made"))?;
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

    /// The authority in a directory.
    ///
    /// # Errors
    /// [`PkiError::NoAuthority`], [`PkiError::File`], [`PkiError::OpenKey`], [`PkiError::Unreadable`].
    pub fn open(dir: &Path) -> Result<Authority, PkiError> {
        let (certificate, key) = (dir.join(CERTIFICATE), dir.join(KEY));
        if !certificate.exists() {
            return Err(PkiError::NoAuthority { dir: dir.to_owned() });
        }
        Authority::load(&certificate, &key)
    }

    /// The authority of a certificate's file and its key's.
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

    /// Whether it issues certificates for browsers alone.
    #[must_use]
    pub fn is_web(&self) -> bool {
        self.is_web
    }

    /// Refuses a role that this kind of authority does not issue: one that browsers trust signs for no host.
    fn check_role(&self, role: Role) -> Result<(), PkiError> {
        if (role == Role::Web) == self.is_web {
            return Ok(());
        }
        let kind = if self.is_web { "browsers" } else { "the cluster" };
        let role = role.unit().trim_start_matches("godwit ");
        Err(PkiError::OtherAuthority { path: self.certificate.clone(), role, kind })
    }

    /// The authority's own certificate: what every host must know.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        self.certificate.clone()
    }

    /// Signs a request (PKCS #10, PEM) whose sender proves by it that the key is theirs. Of the request the public key is taken, and nothing
    /// else: the certificate says what [`Authority::issue`] would have it say.
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
        let description = describe_der(certificate.der())
            .ok_or_else(|| PkiError::BadRequest { why: "its certificate cannot be read".to_owned() })?;
        let path = &self.certificate;
        let authority = fs::read_to_string(path).map_err(file_error(path, "read"))?;
        Ok(Signed { certificate: certificate.pem(), authority, description })
    }

    /// Issues a certificate with a key of its own, as `NAME.pem` and `NAME.key` in the authority's directory.
    ///
    /// # Errors
    /// [`PkiError::Exists`] where that name has one; [`PkiError::BadName`]; nothing is half made.
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

    /// Issues anew what a name has, with a new key, good for `days` from now.
    ///
    /// # Errors
    /// As [`Authority::issue`]; [`PkiError::File`] where the name has no certificate yet.
    pub fn renew(&self, name: &str, days: u32) -> Result<Issued, PkiError> {
        let issued = self.files(CheckedName::new(name)?);
        let old = describe(&issued.certificate)?;
        let grant = Grant { name: name.to_owned(), role: old.role, addresses: old.addresses.clone(), days };
        self.write(&grant, &issued)?;
        Ok(issued)
    }

    /// Signs a list of revoked certificates with the times, seconds since 1970. Later lists need higher numbers.
    ///
    /// # Errors
    /// [`PkiError::BadList`]: it would be too long. [`PkiError::Make`].
    pub fn list(&self, number: u64, revoked: BTreeMap<Serial, i64>) -> Result<RevocationList, PkiError> {
        RevocationList::sign(&self.issuer, number, revoked)
    }

    /// Where this authority keeps its own list of revoked certificates.
    #[must_use]
    pub fn list_file(&self) -> PathBuf {
        self.dir.join(LIST)
    }

    /// Its own list; none: it has revoked nothing.
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

    /// Adds certificates to its own list and writes it: an empty one too, where there is none yet.
    ///
    /// # Errors
    /// [`PkiError::File`], [`PkiError::BadList`]; the list before stays.
    pub fn revoke(&self, serials: impl IntoIterator<Item = Serial>) -> Result<RevocationList, PkiError> {
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
        fs::rename(&fresh, &path).map_err(file_error(&path, "written"))?;
        Ok(list)
    }

    fn files(&self, name: CheckedName<'_>) -> Issued {
        Issued {
            certificate: self.dir.join(format!("{name}.pem")),
            key: self.dir.join(format!("{name}.key")),
        }
    }

    /// Each file is written under another name and then takes its place.
    fn write(&self, grant: &Grant, issued: &Issued) -> Result<(), PkiError> {
        self.check_role(grant.role)?;
        let params = contents(grant)?;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let fresh = |path: &Path| path.with_extension("new");
        let (new_key, new_certificate) = (fresh(&issued.key), issued.certificate.with_extension("pem.new"));
        for stale in [&new_key, &new_certificate] {
            let _ = fs::remove_file(stale);
        }
        write_new(&new_key, &key.serialize_pem(), 0o600)?;
        write_new(&new_certificate, &certificate.pem(), 0o644)?;
        fs::rename(&new_key, &issued.key).map_err(file_error(&issued.key, "written"))?;
        fs::rename(&new_certificate, &issued.certificate).map_err(file_error(&issued.certificate, "written"))
    }
}

/// What a certificate says.
fn contents(grant: &Grant) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(vec![grant.name.clone()])?;
    params.serial_number = Some(Serial::draw()?.number());
    params.subject_alt_names.extend(grant.addresses.iter().map(|address| SanType::IpAddress(*address)));
    params.distinguished_name.push(DnType::CommonName, grant.name.clone());
    params.distinguished_name.push(DnType::OrganizationalUnitName, grant.role.unit());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    params.extended_key_usages = match grant.role {
        Role::Host | Role::Operator => vec![ClientAuth, ServerAuth],
        // Who only asks passes for no host, whatever its name.
        Role::Monitor => vec![ClientAuth],
        Role::Web => vec![ServerAuth],
    };
    (params.not_before, params.not_after) = validity(grant.days);
    Ok(params)
}

/// The number of the list after this one. Numbers go by time, so that an authority whose list was lost still signs later
/// ones.
#[must_use]
pub fn next_list_number(number: u64) -> u64 {
    let now = OffsetDateTime::now_utc().unix_timestamp();
    number.saturating_add(1).max(u64::try_from(now).unwrap_or(0))
}

fn validity(days: u32) -> (OffsetDateTime, OffsetDateTime) {
    let now = OffsetDateTime::now_utc();
    (now - CLOCKS_DIFFER, now.saturating_add(Duration::days(days.into())))
}

/// Refuses what is no DNS label or several (RFC 1123), as TLS compares names so.
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

/// A name that [`check_name`] has let pass. Files that are named after a host or an operator are named by this type alone.
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
        _ => PkiError::File { path: path.to_owned(), action: "made", source },
    })?;
    file.write_all(text.as_bytes()).map_err(file_error(path, "written"))
}
