//! Implements `godwit control join-token` on the manager's side and `godwit host join` on the
//! host's side.

use std::fs;

use godwit_api::control::{JoinGrant, JoinTokenInfo, JoinTokenText, ManagerClient};
use godwit_host::{JoinError, JoinOptions, JoinedHost};
use godwit_pki::{Fingerprint, machine_name};
use serde_json::json;

use crate::args::{JoinArgs, JoinTokenCommand};
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};
use crate::units::utc;

pub(crate) async fn token(
    command: JoinTokenCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    match command {
        JoinTokenCommand::Create { host, address, valid } => {
            // Started minutes are rounded up: a token cannot have a validity of zero.
            let minutes = u32::try_from(valid.as_secs().div_ceil(60)).unwrap_or(u32::MAX);
            let address = address.map(|address| address.to_string());
            let made = manager.create_join_token(&JoinGrant { host, address, minutes }).await?;
            // Only the token is on standard output: `godwit control join-token create c >c.token`.
            output.result(&made, || made.token.clone())
        }
        JoinTokenCommand::List => {
            let tokens = manager.join_tokens().await?;
            let rows: Vec<_> = tokens.iter().map(row).collect();
            output.result(&tokens, || {
                table(&["id", "host", "used", "created by", "valid until"], &rows)
            })
        }
        JoinTokenCommand::Revoke { id } => {
            manager.revoke_join_token(&id).await?;
            output.result(&json!({ "revoked": id }), || format!("join token {id} is revoked"))
        }
    }
}

fn row(token: &JoinTokenInfo) -> Vec<String> {
    let used = if token.used_unix_ms.is_some() { "yes" } else { "no" };
    vec![
        token.id.clone(),
        token.host.clone(),
        used.to_owned(),
        token.made_by.clone(),
        utc(token.expires_unix_ms),
    ]
}

pub(crate) async fn run(options: JoinArgs, output: Output) -> Result<Exit, Failure> {
    let file = &options.token_file;
    let text = fs::read_to_string(file).map_err(|error| {
        Failure::usage(
            format!("cannot read {}: {error}", file.display()),
            "name the file that has the join token: --token-file FILE",
        )
    })?;
    let token: JoinTokenText = text.parse().map_err(|why| {
        let remedy = "create one with `godwit control join-token create HOST`";
        Failure::usage(format!("cannot read {}: {why}", file.display()), remedy)
    })?;
    check_authority(&options, &token)?;
    let machine = machine_name();
    if machine != token.host {
        let host = &token.host;
        output.note(&format!(
            "this machine is called {machine}, but the token is for host {host}: the cluster will \
             know this machine as host {host} (if the token is for another machine, run \
             `godwit control host forget {host}` and create a token for this one)"
        ));
    }
    let config = options.config.clone();
    let joined = godwit_host::join(&JoinOptions {
        manager: options.manager,
        token,
        address: options.address.map(|address| address.to_string()),
        migration_addresses: options.migration_addresses,
        dir: options.dir,
        config: options.config,
    })
    .await?;
    let JoinedHost { name, had_joined, authority, certificate, key, to_configure } = &joined;
    let result = json!({
        "host": name, "had_joined": had_joined, "authority": authority,
        "certificate": certificate, "key": key,
        "config": config, "to_configure": to_configure,
    });
    output.result(&result, || {
        let has = if *had_joined { "had joined already" } else { "has joined" };
        let first = format!("host {name} {has}: its certificate is {}", certificate.display());
        let config = config.display();
        let start = format!(
            "start its agent: systemctl restart godwit-host, or godwit host run --config {config}"
        );
        match to_configure {
            None => format!("{first}\n{start}"),
            Some(text) => {
                format!("{first}\nadd this to {config}:\n{text}{start}")
            }
        }
    })?;
    Ok(Exit::Ok)
}

/// Checks that the authority given on the command line matches the token.
fn check_authority(options: &JoinArgs, token: &JoinTokenText) -> Result<(), Failure> {
    let given = match &options.authority {
        Some(file) => Some(Fingerprint::of_certificate(file)?),
        None => options.fingerprint,
    };
    match given {
        Some(given) if given != token.authority => {
            let message = format!(
                "cannot use the token: it is for the authority {}, not {given}",
                token.authority
            );
            Err(Failure::usage(message, "use a token from a manager of that authority"))
        }
        _ => Ok(()),
    }
}

impl From<JoinError> for Failure {
    fn from(error: JoinError) -> Failure {
        match error {
            JoinError::Manager(error) => error.into(),
            JoinError::Pki(error) => error.into(),
            JoinError::Unprotected { .. } => {
                Failure::new(Exit::Usage, error.to_string(), error.remedy())
            }
            JoinError::OtherAuthority { .. } => {
                Failure::new(Exit::Conflict, error.to_string(), error.remedy())
            }
            JoinError::Answer(_) | JoinError::File { .. } => {
                Failure::new(Exit::Failure, error.to_string(), error.remedy())
            }
        }
    }
}
