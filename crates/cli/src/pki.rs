//! Implements `godwit pki`: the certificate authority and its certificates.

use std::path::Path;

use godwit_pki::{Authority, Description, Grant, Issued, PkiError, Role, describe};
use serde_json::{Value, json};

use crate::args::PkiCommand;
use crate::exit::{Exit, Failure};
use crate::output::{Output, fields};

pub(crate) fn run(command: PkiCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        PkiCommand::Init { place, name, web, days } => {
            let make = if web { Authority::create_web } else { Authority::create };
            let path = make(&place.dir, &name, days)?.certificate();
            let needed = if web { "browsers import it" } else { "every host needs a copy" };
            output.result(&json!({ "certificate": path }), || {
                format!("created {}: {needed}; keep ca.key beside it secret", path.display())
            })?;
        }
        PkiCommand::Issue { name, place, addresses, operator, monitor, days } => {
            let authority = Authority::open(&place.dir)?;
            let role = match (operator, monitor) {
                (true, _) => Role::Operator,
                (_, true) => Role::Monitor,
                _ if authority.is_web() => Role::Web,
                _ => Role::Host,
            };
            let issued = authority.issue(&Grant { name, role, addresses, days })?;
            print_issued(&issued, output)?;
        }
        PkiCommand::Renew { name, place, days } => {
            let issued =
                Authority::open(&place.dir)?.renew(&name, days).map_err(|error| match error {
                    PkiError::File { ref source, .. }
                        if source.kind() == std::io::ErrorKind::NotFound =>
                    {
                        never_issued(&name, &place.dir)
                    }
                    other => other.into(),
                })?;
            print_issued(&issued, output)?;
        }
        PkiCommand::Revoke { files, serials, place } => {
            let authority = Authority::open(&place.dir)?;
            let named = files.iter().map(|file| describe(file).map(|it| it.serial));
            let revoked =
                named.chain(serials.into_iter().map(Ok)).collect::<Result<Vec<_>, _>>()?;
            let list = authority.revoke(revoked)?;
            let (path, names) = (authority.list_file(), list.revoked().len());
            let result = json!({ "list": path, "number": list.number(), "certificates": names });
            output.result(&result, || {
                format!(
                    "{} lists {names} revoked certificates: copy it to every agent",
                    path.display()
                )
            })?;
        }
        PkiCommand::Crl { place } => {
            let list = Authority::open(&place.dir)?.revoke([])?;
            let result = json!({ "number": list.number(), "list": list.pem() });
            output.result(&result, || list.pem().trim_end().to_owned())?;
        }
        PkiCommand::Show { file } => {
            let description = describe(&file)?;
            output.result(&as_json(&description), || as_text(&description))?;
        }
    }
    Ok(Exit::Ok)
}

fn never_issued(name: &str, dir: &Path) -> Failure {
    let message =
        format!("cannot renew the certificate of {name}: there is none in {}", dir.display());
    let remedy = format!(
        "name another --dir, or issue one: godwit pki issue {name} --dir {}",
        dir.display()
    );
    Failure::new(Exit::NotFound, message, remedy)
}

fn print_issued(issued: &Issued, output: Output) -> Result<(), Failure> {
    let Issued { certificate, key } = issued;
    output.result(&json!({ "certificate": certificate, "key": key }), || {
        format!("created {} and {}", certificate.display(), key.display())
    })
}

fn role(description: &Description) -> &'static str {
    match description.role {
        _ if description.is_authority => "authority",
        Role::Host => "host",
        Role::Operator => "operator",
        Role::Monitor => "monitor",
        Role::Web => "web server",
    }
}

fn as_json(description: &Description) -> Value {
    json!({
        "name": description.name,
        "role": role(description),
        "addresses": description.addresses,
        "serial": description.serial.to_string(),
        "issuer": description.issuer,
        "not_before_unix_s": description.not_before.unix_timestamp(),
        "not_after_unix_s": description.not_after.unix_timestamp(),
    })
}

fn as_text(description: &Description) -> String {
    let addresses: Vec<String> = description.addresses.iter().map(ToString::to_string).collect();
    let addresses = if addresses.is_empty() { "-".to_owned() } else { addresses.join(", ") };
    fields(&[
        ("name", description.name.clone()),
        ("role", role(description).to_owned()),
        ("addresses", addresses),
        ("serial", description.serial.to_string()),
        ("issued by", description.issuer.clone()),
        ("valid from", description.not_before.date().to_string()),
        ("valid until", description.not_after.date().to_string()),
    ])
}

impl From<PkiError> for Failure {
    fn from(error: PkiError) -> Failure {
        let exit = match &error {
            PkiError::Exists { .. } => Exit::Conflict,
            PkiError::NoAuthority { .. } => Exit::NotFound,
            PkiError::File { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Exit::NotFound
            }
            PkiError::BadName { .. }
            | PkiError::Unreadable { .. }
            | PkiError::OtherAuthority { .. }
            | PkiError::BadList { .. } => Exit::Usage,
            _ => Exit::Failure,
        };
        Failure::new(exit, error.to_string(), error.remedy())
    }
}
