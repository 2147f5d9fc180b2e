//! Joining: an admin creates a token for a host. The host sends it with a certificate request for a
//! key that it generated, gets a certificate, and is added to the hosts.

pub(crate) mod http;
pub(crate) mod record;
#[cfg(test)]
mod tests;
pub(crate) mod token;

use std::net::IpAddr;

use godwit_api::control::{
    JoinGrant, JoinRequest, JoinToken, JoinTokenInfo, JoinTokenText, Joined, Problem, ProblemCode,
};
use godwit_pki::{Grant, Identity, PkiError, Role, check_name, requested_key};
use godwit_store::Transaction;

use crate::access::certificates::{CERTIFICATES, SavedCertificate};
use crate::access::{Caller, Secret};
use crate::agents::record::{HOSTS, SavedHost};
use crate::clock::now_unix_ms;
use crate::cluster::inventory::HostPlan;
use crate::hosts::join::record::JOIN_TOKENS;
use crate::hosts::join::token::{JoinTokenRecord, JoinUse, unknown_join_token};
use crate::hosts::{HostRequests, added};
use crate::storage::keeper::{Keeper, problem};

/// Validity of a host's certificate, days: the default of `godwit pki issue`.
const CERTIFICATE_DAYS: u32 = 365;
/// Most addresses in a request to join.
const MOST_ADDRESSES: usize = 64;
/// Longest validity of a join token, minutes: a week.
const LONGEST_MINUTES: u32 = 7 * 24 * 60;

impl HostRequests {
    /// Creates a token with which one host can join once.
    pub(crate) async fn create_join_token(
        &self,
        grant: JoinGrant,
        caller: &Caller,
    ) -> Result<JoinToken, Problem> {
        let authority = self.authorities.authority()?.fingerprint;
        if !(1..=LONGEST_MINUTES).contains(&grant.minutes) {
            let detail = format!("invalid validity of a join token: {} minutes", grant.minutes);
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, "give 1 to 10080"));
        }
        check_name(&grant.host).map_err(|error| of_pki(&error))?;
        self.check_not_a_manager(&grant.host)?;
        if let Some(address) = &grant.address {
            self.agents.client(&grant.host, address)?;
        }
        let secret = Secret::draw()?;
        let now = now_unix_ms();
        let record = JoinTokenRecord {
            host: grant.host.clone(),
            address: grant.address,
            made_unix_ms: now,
            expires_unix_ms: now + u64::from(grant.minutes) * 60_000,
            made_by: caller.name.clone(),
            digest: secret.digest(),
            used: None,
        };
        let insert = JOIN_TOKENS
            .insert(Transaction::new(), secret.id(), &(&record).into())
            .map_err(problem)?;
        self.keeper.get()?.write_unknown(insert).await?;
        let text = JoinTokenText { secret: secret.reveal(), authority, host: grant.host };
        Ok(JoinToken { info: record.info(secret.id()), token: text.to_string() })
    }

    /// Returns all join tokens, including used ones that are not pruned yet.
    pub(crate) async fn join_tokens(&self) -> Result<Vec<JoinTokenInfo>, Problem> {
        let all = self.keeper.get()?.read_all(JOIN_TOKENS).await?;
        Ok(all.into_iter().map(|(id, saved)| JoinTokenRecord::from(saved).info(&id)).collect())
    }

    /// Revokes a join token. A host that has joined with it stays.
    pub(crate) async fn revoke_join_token(&self, id: &str) -> Result<(), Problem> {
        let keeper = self.keeper.get()?;
        let missing = || {
            let detail = format!("unknown join token {id}");
            Problem::new(ProblemCode::NotFound, detail, "see `godwit control join-token list`")
        };
        let kept = keeper.find(JOIN_TOKENS, id).await?.ok_or_else(missing)?;
        let remove = JOIN_TOKENS.remove(Transaction::new(), id, kept.revision);
        keeper.write_unknown(remove).await.map(drop)
    }

    /// Admits a host by its token: signs a certificate for its key and follows its agent. One
    /// transaction marks the token as used and writes the host.
    pub(crate) async fn join(&self, request: JoinRequest) -> Result<Joined, Problem> {
        let hosts = self.clone();
        self.planning.change(|keeper| async move { hosts.let_in(&keeper, request).await }).await
    }

    /// Refuses this manager's names for a host: the host's certificate would be valid for the
    /// manager.
    fn check_not_a_manager(&self, host: &str) -> Result<(), Problem> {
        let names = [host_of(&self.candidate.address), self.agents.identity().map(Identity::name)];
        if !names.into_iter().flatten().any(|name| name.eq_ignore_ascii_case(host)) {
            return Ok(());
        }
        let detail = format!("cannot use {host} as a host's name: it is this manager's name");
        Err(Problem::new(ProblemCode::InvalidRequest, detail, "give the host another name"))
    }

    /// Returns the addresses for a host's certificate: the agent's address in its token, which an
    /// admin has set. Addresses that the host itself sends are not used, because it could name
    /// those of the manager or of another host.
    fn certificate_addresses(&self, token: &JoinTokenRecord) -> Vec<IpAddr> {
        let named = |address: &str| host_of(address)?.parse::<IpAddr>().ok();
        let own = self.agents.identity().map_or(&[][..], Identity::addresses);
        let is_own = |address: &IpAddr| {
            own.contains(address) || named(&self.candidate.address) == Some(*address)
        };
        token
            .address
            .as_deref()
            .and_then(named)
            .filter(|address| !is_own(address))
            .into_iter()
            .collect()
    }

    async fn let_in(&self, keeper: &Keeper, request: JoinRequest) -> Result<Joined, Problem> {
        let signing = self.authorities.authority()?;
        if request.addresses.len() > MOST_ADDRESSES {
            return Err(Problem::new(
                ProblemCode::InvalidRequest,
                "too many addresses",
                "give 64 at most",
            ));
        }
        let text: JoinTokenText = request.token.parse().map_err(|_| unknown_join_token())?;
        let secret = Secret::parse(&text.secret).ok_or_else(unknown_join_token)?;
        let kept = keeper.find(JOIN_TOKENS, secret.id()).await?.ok_or_else(unknown_join_token)?;
        let mut token = JoinTokenRecord::from(kept.record);
        let key = requested_key(&request.request).ok_or_else(|| {
            let why = "it is not a certificate signing request".to_owned();
            of_pki(&PkiError::BadRequest { why })
        })?;
        let now = now_unix_ms();
        let address = token.admit(&secret, &request, key, now)?;
        self.agents.client(&request.host, &address)?;
        let grant = Grant {
            name: request.host.clone(),
            role: Role::Host,
            addresses: self.certificate_addresses(&token),
            days: CERTIFICATE_DAYS,
        };
        let signed =
            signing.authority.sign(&request.request, &grant).map_err(|error| of_pki(&error))?;
        token.used.get_or_insert(JoinUse { unix_ms: now, key: key.hex() });
        let before = self.state.inventory().host_plan(&request.host).cloned();
        let plan = HostPlan { address: address.clone(), ..before.unwrap_or_default() };
        let used = JOIN_TOKENS
            .replace(Transaction::new(), secret.id(), kept.revision, &(&token).into())
            .map_err(problem)?;
        // Revocation needs the certificate's serial number.
        let serial = signed.description.serial.to_string();
        let noted = CERTIFICATES
            .insert(used, &serial, &SavedCertificate::of(&signed.description))
            .map_err(problem)?;
        let entry = added(&request.host, &plan).because(Some("it used a join token"));
        let writes = keeper.note_in(noted.into(), entry)?;
        let writes = keeper.put(writes, HOSTS, &request.host, &SavedHost::from(&plan)).await?;
        keeper.write(writes).await?;
        self.fleet.plan_host(&request.host, plan);
        Ok(Joined { address, certificate: signed.certificate, authority: signed.authority })
    }
}

/// Returns the host part of `scheme://HOST:PORT`, without brackets.
fn host_of(address: &str) -> Option<&str> {
    let (_, authority) = address.split_once("://")?;
    let (host, _) = authority.rsplit_once(':')?;
    Some(host.trim_start_matches('[').trim_end_matches(']'))
}

/// Converts an error about certificates into a problem document.
fn of_pki(error: &PkiError) -> Problem {
    let remedy = "see docs/manager.md, \"How a host joins\"";
    let code = match error {
        PkiError::BadRequest { .. } | PkiError::BadName { .. } => ProblemCode::InvalidRequest,
        _ => ProblemCode::ManagerFailed,
    };
    Problem::new(code, error.to_string(), error.remedy_and(remedy))
}
