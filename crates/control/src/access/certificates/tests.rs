//! Recording, revocation and distribution of certificates, tested with a complete manager and
//! simulated agents.

use std::path::Path;
use std::sync::Arc;

use godwit_api::Client;
use godwit_api::control::{
    CertificateInfo, JoinRequest, JoinToken, Joined, ProblemCode, RevokedCertificates, Role,
};
use godwit_fleet::{Fleet, FleetPlan};
use godwit_pki::{
    Authority, Grant, Identity, RevocationList, Revocations, Role as CertificateRole,
};
use godwit_store::{MemoryStore, Store};
use http::{Method, StatusCode};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::access::authorities::Authorities;
use crate::access::authorities::AuthorityConfig;
use crate::http::tests::*;
use crate::rig;

const CERTIFICATES: &str = "/api/v1/certificates";
const REVOCATIONS: &str = "/api/v1/revocations";

fn authorities(dir: &Path) -> Authorities {
    let certificate = dir.join("ca.pem");
    Authorities::signing(&AuthorityConfig { certificate, key: dir.join("ca.key") })
}

async fn join(managed: &Managed, dir: &Path, host: &str, address: &str) -> Joined {
    let grant = json!({ "host": host, "address": address });
    let made: JoinToken =
        managed.root(Method::POST, "/api/v1/join-tokens", Some(grant)).await.read();
    let request = JoinRequest {
        token: made.token,
        host: host.to_owned(),
        address: None,
        addresses: vec![],
        request: godwit_pki::request(&dir.join(format!("{host}.key"))).unwrap(),
    };
    let body = Some(serde_json::to_value(request).unwrap());
    let answer = managed.ask(Method::POST, "/api/v1/join", None, body).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.body);
    answer.read()
}

async fn certificates(managed: &Managed) -> Vec<CertificateInfo> {
    managed.root(Method::GET, CERTIFICATES, None).await.read()
}

async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_a_removed_host_are_on_the_list_of_every_agent() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "test", 30).unwrap();
    let store = Arc::new(MemoryStore::new());
    let managed = Managed::with_authorities(Arc::clone(&store), authorities(dir.path())).await;
    let fleet = Fleet::begin(FleetPlan { hosts: 2, vms: 0, ..FleetPlan::default() }).await.unwrap();
    let agents: Vec<(String, String)> =
        fleet.agents().iter().map(|(name, address)| (name.clone(), address.to_string())).collect();
    let ((gone, gone_at), (stays, stays_at)) = (&agents[0], &agents[1]);
    join(&managed, dir.path(), gone, gone_at).await;
    let host = json!({ "name": stays, "address": stays_at });
    assert_eq!(
        managed.root(Method::POST, "/api/v1/hosts", Some(host)).await.status,
        StatusCode::CREATED
    );
    let noted = certificates(&managed).await;
    assert_eq!(
        (noted.len(), noted[0].holder.as_ref(), noted[0].revoked_unix_ms),
        (1, Some(gone), None)
    );
    assert_eq!(managed.root(Method::GET, REVOCATIONS, None).await.problem(), ProblemCode::NotFound);

    let path = format!("/api/v1/hosts/{gone}?force=true");
    assert_eq!(managed.root(Method::DELETE, &path, None).await.status, StatusCode::NO_CONTENT);
    let (old, first) = (&noted[0].serial, certificates(&managed).await);
    assert!(first[0].serial == *old && first[0].revoked_unix_ms.is_some(), "{first:?}");
    let list: RevokedCertificates = managed.root(Method::GET, REVOCATIONS, None).await.read();
    let read = RevocationList::read(&list.list, &authority.certificate()).unwrap();
    assert!(read.revoked().contains_key(&old.parse().unwrap()) && read.number() == list.number);
    until(|| fleet.revoked_at(stays).as_ref() == Some(&list.list)).await;

    // The host joins again with another certificate. The next list includes what `godwit pki
    // revoke` put on the authority's list.
    join(&managed, dir.path(), gone, gone_at).await;
    let by_hand = "4100000000000000000000000000000b";
    authority.revoke([by_hand.parse().unwrap()]).unwrap();
    let serial = "4100000000000000000000000000000a";
    let path = format!("{REVOCATIONS}/{serial}");
    let next: RevokedCertificates = managed.root(Method::PUT, &path, None).await.read();
    assert!(next.certificates == 3 && next.number > list.number, "{next:?}");
    let now = certificates(&managed).await;
    let good: Vec<_> = now.iter().filter(|one| one.revoked_unix_ms.is_none()).collect();
    assert_eq!((now.len(), good.len(), good[0].holder.as_ref()), (4, 1, Some(gone)));
    for host in [gone, stays] {
        until(|| fleet.revoked_at(host).as_ref() == Some(&next.list)).await;
    }
    for wrong in ["nothing", "0", &"11".repeat(21)] {
        let refused = managed.root(Method::PUT, &format!("{REVOCATIONS}/{wrong}"), None).await;
        assert_eq!(refused.problem(), ProblemCode::InvalidRequest, "{wrong}");
    }
    let operator = managed.token(Role::Operator).await.token;
    let refused = managed.ask(Method::PUT, &path, Some(&operator), None).await;
    assert_eq!(refused.problem(), ProblemCode::Forbidden);

    // The next manager has the list.
    drop(managed);
    let managed = Managed::with_authorities(store, authorities(dir.path())).await;
    assert_eq!(
        managed.root(Method::GET, REVOCATIONS, None).await.read::<RevokedCertificates>(),
        next
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_manager_has_the_list() {
    let dir = tempfile::tempdir().unwrap();
    Authority::create(dir.path(), "test", 30).unwrap();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let leader = rig::leader(Arc::clone(&store)).await;
    leader.authorities.set(authorities(dir.path()));
    let (follower, _standby) = rig::follower(&store);
    follower.authorities.set(authorities(dir.path()));
    let list = leader.certificates.revoke("41").await.unwrap();
    until(|| follower.agents.revocations.newest().is_some_and(|known| known.pem() == list.list))
        .await;
    // Without an authority no list is signed.
    let without = Managed::begin().await;
    let refused = without.root(Method::PUT, &format!("{REVOCATIONS}/41"), None).await;
    assert_eq!(refused.problem(), ProblemCode::WrongState);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_presented_certificate_is_recorded_and_revoked_with_its_host() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "test", 30).unwrap();
    let load = |name: &str, role, revocations: &Revocations| {
        let grant = Grant { name: name.to_owned(), role, addresses: vec![], days: 30 };
        let issued = authority.issue(&grant).unwrap();
        Identity::load_with(&authority.certificate(), &issued.certificate, &issued.key, revocations)
            .unwrap()
    };
    let own = load("m1", CertificateRole::Operator, &Revocations::watching());
    let host = load("a", CertificateRole::Host, &Revocations::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    let acceptor = TlsAcceptor::from(Arc::clone(host.server()));
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            drop(acceptor.accept(socket).await);
        }
    });
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let manager = rig::secure_leader(store, own.clone()).await;
    manager.authorities.set(authorities(dir.path()));
    let request = json!({ "name": "a", "address": address });
    manager.host_requests.add_host(serde_json::from_value(request).unwrap()).await.unwrap();
    let serial = host.serial().to_string();
    while manager.certificates.list().await.unwrap().iter().all(|noted| noted.serial != serial) {
        tokio::task::yield_now().await;
    }
    manager.host_requests.forget_host("a", true).await.unwrap();
    assert!(manager.agents.revocations.has(host.serial()));
    // The manager itself refuses the host.
    let client = Client::secure(address.parse().unwrap(), &own, "a");
    let refused = client.host().await.unwrap_err().to_string();
    assert!(refused.contains("Revoked"), "{refused}");
    // The manager does not revoke its own certificate.
    let refused = manager.certificates.revoke(&own.serial().to_string()).await.unwrap_err();
    assert_eq!(refused.code, ProblemCode::InvalidRequest);
}
