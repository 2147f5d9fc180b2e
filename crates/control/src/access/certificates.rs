//! Revoked certificates: the signed list, and its distribution to all agents.
//! The list in the store is authoritative: the leading manager signs it, every manager reads it,
//! and checks it in each handshake. The manager records a host's certificate when it issues the
//! certificate and when it sees it in a handshake.

pub(crate) mod http;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::control::{CertificateInfo, Problem, ProblemCode, RevokedCertificates};
use godwit_pki::{Description, Identity, PkiError, RevocationList, Role, Serial, next_list_number};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};
use tokio::time::{MissedTickBehavior, interval};

use crate::access::authorities::Authorities;
use crate::agents::AgentClients;
use crate::agents::fleet::Fleet;
use crate::clock::now_unix_ms;
use crate::storage::keeper::{Keeper, Writes};
use crate::storage::planned::Planned;
use crate::storage::planning::Planning;
use crate::storage::term::Term;

pub(crate) const CERTIFICATES: Table<SavedCertificate> = Table::new();
pub(crate) const REVOCATIONS: Table<SavedRevocations> = Table::new();
/// ID of the list's only record.
const LIST: &str = "list";
/// Interval between two checks of which agents lack the list.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which an expired certificate stays on the list and its record is kept, seconds. Clocks
/// differ.
const KEPT_AFTER_END_S: i64 = 7 * 24 * 3600;

/// Saved properties of a host certificate. The key of the record is the serial number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedCertificate {
    holder: String,
    ends_unix_s: i64,
    noted_unix_ms: u64,
}

impl Record for SavedCertificate {
    const KIND: &'static str = "certificate";
    const PREFIX: &'static str = "certificates/";
    const VERSION: u32 = 1;
}

impl SavedCertificate {
    pub(crate) fn of(description: &Description) -> SavedCertificate {
        SavedCertificate {
            holder: description.name.clone(),
            ends_unix_s: description.not_after.unix_timestamp(),
            noted_unix_ms: now_unix_ms(),
        }
    }

    /// Returns whether it expired so long ago that nobody accepts it, revoked or not.
    pub(crate) fn is_over(&self, now_unix_ms: u64) -> bool {
        let now_s = i64::try_from(now_unix_ms / 1000).unwrap_or(i64::MAX);
        self.ends_unix_s.saturating_add(KEPT_AFTER_END_S) < now_s
    }
}

/// Returns when the certificate of each host ends, milliseconds since 1970. Of several certificates
/// of a host, the last one that was noted counts.
pub(crate) async fn ends_of_hosts(keeper: &Keeper) -> Result<BTreeMap<String, u64>, Problem> {
    let mut last = BTreeMap::<String, SavedCertificate>::new();
    for (_, noted) in keeper.read_all(CERTIFICATES).await? {
        let before = last.get(&noted.holder);
        if before.is_none_or(|before| before.noted_unix_ms <= noted.noted_unix_ms) {
            last.insert(noted.holder.clone(), noted);
        }
    }
    let ms = |unix_s: i64| u64::try_from(unix_s).unwrap_or(0).saturating_mul(1000);
    Ok(last.into_iter().map(|(host, noted)| (host, ms(noted.ends_unix_s))).collect())
}

/// Saved list of revoked certificates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRevocations {
    /// PEM.
    list: String,
}

impl Record for SavedRevocations {
    const KIND: &'static str = "revocations";
    const PREFIX: &'static str = "revocations/";
    const VERSION: u32 = 1;
}

impl Planned<Certificates> for SavedRevocations {
    fn known(certificates: &Certificates) -> BTreeSet<String> {
        certificates.agents.revocations.newest().map(|_| LIST.to_owned()).into_iter().collect()
    }

    fn set(certificates: &Certificates, _: &str, record: Option<SavedRevocations>) {
        // Certificates of a list that was removed from the store stay revoked.
        let Some(saved) = record else { return };
        let read = certificates.authorities.authority().map_err(|problem| problem.detail).and_then(
            |signing| {
                let certificate = signing.authority.certificate();
                RevocationList::read(&saved.list, &certificate).map_err(|error| error.to_string())
            },
        );
        match read {
            Ok(list) => certificates.know(list),
            Err(why) => tracing::error!(why, "cannot use the saved list of revoked certificates"),
        }
    }
}

/// Recorded and revoked certificates.
#[derive(Clone)]
pub(crate) struct Certificates {
    agents: Arc<AgentClients>,
    fleet: Arc<Fleet>,
    authorities: Arc<Authorities>,
    keeper: Arc<Term<Keeper>>,
    planning: Planning,
}

impl Certificates {
    pub(crate) fn new(
        agents: Arc<AgentClients>,
        fleet: Arc<Fleet>,
        authorities: Arc<Authorities>,
        keeper: Arc<Term<Keeper>>,
        planning: Planning,
    ) -> Certificates {
        Certificates { agents, fleet, authorities, keeper, planning }
    }

    /// Applies a list, and reconnects to hosts whose certificates are new on it.
    fn know(&self, list: RevocationList) {
        let revocations = &self.agents.revocations;
        let is_new = |serial: &&Serial| !revocations.has(serial);
        let new: Vec<Serial> = list.revoked().keys().filter(is_new).cloned().collect();
        if let Err(error) = revocations.accept(list) {
            tracing::warn!(%error, "ignored an older list of revoked certificates");
        }
        let holders: BTreeSet<String> =
            new.iter().filter_map(|serial| revocations.holder(serial)).collect();
        for host in holders {
            self.fleet.follow_anew(&host);
        }
    }

    /// Returns the recorded host certificates and all revoked certificates, by serial number.
    pub(crate) async fn list(&self) -> Result<Vec<CertificateInfo>, Problem> {
        let noted = self.keeper.get()?.read_all(CERTIFICATES).await?;
        let ms = |unix_s: i64| u64::try_from(unix_s).ok().map(|unix_s| unix_s.saturating_mul(1000));
        let info = |serial: String, noted: Option<SavedCertificate>| CertificateInfo {
            serial,
            holder: noted.as_ref().map(|noted| noted.holder.clone()),
            noted_unix_ms: noted.as_ref().map(|noted| noted.noted_unix_ms),
            ends_unix_ms: noted.as_ref().and_then(|noted| ms(noted.ends_unix_s)),
            revoked_unix_ms: None,
        };
        let mut all: BTreeMap<String, CertificateInfo> = noted
            .into_iter()
            .map(|(serial, noted)| (serial.clone(), info(serial, Some(noted))))
            .collect();
        let list = self.agents.revocations.newest();
        for (serial, unix_s) in list.iter().flat_map(RevocationList::revoked) {
            let serial = serial.to_string();
            all.entry(serial.clone()).or_insert_with(|| info(serial, None)).revoked_unix_ms =
                ms(*unix_s);
        }
        Ok(all.into_values().collect())
    }

    /// Returns the list of revoked certificates.
    pub(crate) fn revoked(&self) -> Result<RevokedCertificates, Problem> {
        self.agents.revocations.newest().as_ref().map(revoked_certificates).ok_or_else(|| {
            let remedy = "revoke one with `godwit control certificate revoke`, or remove a host";
            Problem::new(ProblemCode::NotFound, "no certificate has been revoked", remedy)
        })
    }

    /// Revokes a certificate by its serial number.
    pub(crate) async fn revoke(&self, serial: &str) -> Result<RevokedCertificates, Problem> {
        let wrong = |detail: String, remedy: &str| {
            Problem::new(ProblemCode::InvalidRequest, detail, remedy)
        };
        let remedy = "see `godwit control certificate list`, or `godwit pki show FILE`";
        let serial: Serial = serial.parse().map_err(|why: String| wrong(why, remedy))?;
        if self.agents.identity().is_some_and(|own| *own.serial() == serial) {
            let remedy = "install another certificate for the manager first";
            return Err(wrong("cannot revoke the manager's own certificate".to_owned(), remedy));
        }
        let certificates = self.clone();
        self.planning
            .change(move |keeper| async move {
                certificates.revoke_all(&keeper, [serial]).await?;
                certificates.revoked()
            })
            .await
    }

    /// Revokes a host's certificates. A manager without a signing authority only logs a warning.
    pub(crate) async fn revoke_host(&self, keeper: &Keeper, host: &str) -> Result<(), Problem> {
        let now = now_unix_ms();
        let all = keeper.read_all(CERTIFICATES).await?.into_iter();
        let its = all.filter(|(_, noted)| noted.holder == host && !noted.is_over(now));
        let serials: Vec<Serial> = its.filter_map(|(serial, _)| serial.parse().ok()).collect();
        if serials.is_empty() {
            return Ok(());
        }
        if self.authorities.authority().is_err() {
            tracing::warn!(
                host,
                ?serials,
                "cannot revoke the host's certificates: this manager has no authority that signs \
                (use `godwit pki revoke`)"
            );
            return Ok(());
        }
        self.revoke_all(keeper, serials).await
    }

    /// Adds certificates to the list, signs it and saves it.
    async fn revoke_all(
        &self,
        keeper: &Keeper,
        serials: impl IntoIterator<Item = Serial>,
    ) -> Result<(), Problem> {
        let authority = &self.authorities.authority()?.authority;
        let now = now_unix_ms();
        let now_s = i64::try_from(now / 1000).unwrap_or(i64::MAX);
        // Includes the authority's own list, which `godwit pki revoke` writes.
        let own = authority.own_list().map_err(|error| failed(&error))?;
        let newest = self.agents.revocations.newest();
        let before = || newest.iter().chain(&own);
        let number = before().map(RevocationList::number).max().unwrap_or(0);
        let mut revoked: BTreeMap<Serial, i64> =
            before().flat_map(|list| list.revoked().clone()).collect();
        for serial in serials {
            revoked.entry(serial).or_insert(now_s);
        }
        // Nobody accepts an expired certificate.
        for (serial, noted) in keeper.read_all(CERTIFICATES).await? {
            if let (true, Ok(serial)) = (noted.is_over(now), serial.parse()) {
                revoked.remove(&serial);
            }
        }
        let list =
            authority.list(next_list_number(number), revoked).map_err(|error| failed(&error))?;
        let saved = SavedRevocations { list: list.pem().to_owned() };
        keeper.write(keeper.put_over(Writes::default(), REVOCATIONS, LIST, &saved).await?).await?;
        self.know(list);
        Ok(())
    }
}

fn failed(error: &PkiError) -> Problem {
    if let PkiError::BadList { .. } = error {
        let remedy = "check crl.pem beside the certificate of [authority]; if the list is full, \
            create a new authority (docs/recover.md)";
        return Problem::new(ProblemCode::WrongState, error.to_string(), error.remedy_and(remedy));
    }
    let remedy = "check the files of [authority] in the manager's configuration";
    Problem::new(ProblemCode::ManagerFailed, error.to_string(), error.remedy_and(remedy))
}

fn revoked_certificates(list: &RevocationList) -> RevokedCertificates {
    RevokedCertificates {
        number: list.number(),
        certificates: list.revoked().len(),
        list: list.pem().to_owned(),
    }
}

/// Sends the list to every agent that lacks it, and records hosts' certificates, while this manager
/// leads.
pub(crate) async fn spread_all(agents: Weak<AgentClients>, keeper: Arc<Keeper>) {
    let mut ticks = interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = Vec::new();
    loop {
        ticks.tick().await;
        let Some(agents) = agents.upgrade() else { return };
        note_seen(&agents, &keeper, &mut seen).await;
        let Some(list) = agents.revocations.newest() else { continue };
        agents.give_revocations(&list).await;
    }
}

/// Records certificates that hosts have presented, also manually issued ones. A failed write is
/// repeated at the next call.
async fn note_seen(agents: &AgentClients, keeper: &Keeper, waiting: &mut Vec<Description>) {
    let own = agents.identity().map_or(&[][..], Identity::addresses);
    let fresh = agents.revocations.take_seen().into_iter().filter(|seen| seen.role == Role::Host);
    waiting.extend(fresh.inspect(|seen| {
        // In earlier versions a joining host could choose its addresses.
        let shared: Vec<_> =
            seen.addresses.iter().filter(|address| own.contains(address)).collect();
        if !shared.is_empty() {
            let (host, serial) = (&seen.name, &seen.serial);
            tracing::warn!(
                host,
                %serial,
                ?shared,
                "a host's certificate is valid for addresses of this manager: let the host join \
                again and revoke the certificate, unless both run on one machine"
            );
        }
    }));
    while let Some(seen) = waiting.last() {
        let serial = seen.serial.to_string();
        let noted = match keeper.find(CERTIFICATES, &serial).await {
            Ok(None) => keeper.insert(CERTIFICATES, &serial, &SavedCertificate::of(seen)).await,
            found => found.map(drop),
        };
        if let Err(problem) = noted {
            tracing::warn!(%problem, serial, "cannot record a host's certificate yet");
            return;
        }
        waiting.pop();
    }
}
