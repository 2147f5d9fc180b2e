//! Connects to the manager.

use std::path::Path;

use godwit_api::Endpoint;
use godwit_api::control::{ManagerClient, TOKEN_VARIABLE};
use godwit_control::DEFAULT_MANAGER_SOCKET;
use godwit_pki::Trust;

use crate::args::ManagerPlace;
use crate::exit::{Exit, Failure};
use crate::hosts::{authority_of, manager_of};

/// Connects to the manager's socket by default, or to the address named on the command line or in
/// the hosts file. There, the client sends a token if there is one.
pub(crate) fn client(place: &ManagerPlace, hosts: Option<&Path>) -> Result<ManagerClient, Failure> {
    let token = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
    let named = place.manager()?;
    let of_file = if named.is_some() { None } else { manager_of(hosts)? };
    let by_default = || Endpoint::Unix(DEFAULT_MANAGER_SOCKET.into());
    let endpoint = named.or(of_file).unwrap_or_else(by_default);
    let Endpoint::Tls(authority) = &endpoint else {
        return Ok(ManagerClient::new(endpoint, token));
    };
    let Some(ca) = place.authority().map_or_else(|| authority_of(hosts), |ca| Ok(Some(ca)))? else {
        let message =
            format!("cannot verify {endpoint}: the certificate of its authority is missing");
        return Err(Failure::usage(
            message,
            "set it with --ca FILE, GODWIT_CA, or [tls] in the hosts file",
        ));
    };
    let trust = Trust::load(&ca)
        .map_err(|error| Failure::new(Exit::Usage, error.to_string(), error.remedy()))?;
    let name = authority.rsplit_once(':').map_or(authority.as_str(), |(name, _)| name);
    let name = name.trim_start_matches('[').trim_end_matches(']').to_owned();
    Ok(ManagerClient::trusting(endpoint, &trust, &name, token))
}
