//! Tests of joining with a whole manager, except for the network.

use std::path::Path;
use std::sync::Arc;

use godwit_api::control::{
    HostSummary, JoinRequest, JoinToken, JoinTokenInfo, Joined, Page, ProblemCode,
};
use godwit_pki::{Authority, Fingerprint, Identity, Role as CertificateRole, describe};
use godwit_store::MemoryStore;
use http::{Method, StatusCode};
use serde_json::json;

use crate::access::authorities::Authorities;
use crate::access::authorities::AuthorityConfig;
use crate::http::tests::*;

const TOKENS: &str = "/api/v1/join-tokens";
const JOIN: &str = "/api/v1/join";

/// Returns a manager with an authority in this directory.
async fn signing(dir: &Path) -> Managed {
    let authority = Authority::create(dir, "test", 30).unwrap();
    let files = AuthorityConfig { certificate: authority.certificate(), key: dir.join("ca.key") };
    Managed::with_authorities(Arc::new(MemoryStore::new()), Authorities::signing(&files)).await
}

async fn token(managed: &Managed, host: &str) -> JoinToken {
    let made = managed.root(Method::POST, TOKENS, Some(json!({ "host": host }))).await;
    assert_eq!(made.status, StatusCode::CREATED, "{}", made.body);
    made.read()
}

fn asks(token: &str, host: &str, key: &Path) -> JoinRequest {
    JoinRequest {
        token: token.to_owned(),
        host: host.to_owned(),
        address: Some("http://127.0.0.1:1".to_owned()),
        addresses: vec!["10.0.0.7".parse().unwrap()],
        request: godwit_pki::request(key).unwrap(),
    }
}

async fn join(managed: &Managed, request: &JoinRequest) -> Answer {
    managed.ask(Method::POST, JOIN, None, Some(serde_json::to_value(request).unwrap())).await
}

async fn hosts(managed: &Managed) -> Vec<HostSummary> {
    let page: Page<HostSummary> = managed.root(Method::GET, "/api/v1/hosts", None).await.read();
    page.items
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_joins_once_with_a_key_that_it_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let managed = signing(dir.path()).await;
    let made = token(&managed, "c").await;
    let (key, other_key) = (dir.path().join("c.key"), dir.path().join("thief.key"));
    let request = asks(&made.token, "c", &key);
    let answer = join(&managed, &request).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.body);
    let joined: Joined = answer.read();
    let (certificate, authority) = (dir.path().join("c.pem"), dir.path().join("shown.pem"));
    std::fs::write(&certificate, joined.certificate).unwrap();
    std::fs::write(&authority, joined.authority).unwrap();
    let described = describe(&certificate).unwrap();
    assert_eq!((described.name.as_str(), described.role), ("c", CertificateRole::Host));
    Identity::load(&authority, &certificate, &key).unwrap();
    assert_eq!(hosts(&managed).await[0].address, "http://127.0.0.1:1");
    // A host that lost the answer repeats the request. A thief of the token is refused.
    assert_eq!(join(&managed, &request).await.status, StatusCode::CREATED);
    let thief = join(&managed, &asks(&made.token, "c", &other_key)).await;
    assert_eq!(thief.problem(), ProblemCode::Unauthenticated);
    let listed: Vec<JoinTokenInfo> = managed.root(Method::GET, TOKENS, None).await.read();
    assert!(listed[0].used_unix_ms.is_some() && listed[0].host == "c");
    let noted = noted(&managed, 4).await;
    let outcomes: Vec<_> = noted.iter().map(|entry| (entry.who.as_str(), entry.status)).collect();
    assert_eq!(outcomes, [("nobody", 401), ("host c", 201), ("host c", 201), ("root", 201)]);
    assert!(noted.iter().all(|entry| !format!("{entry:?}").contains(&made.token)));
}

/// Joins a host and returns the description of its certificate.
async fn certificate_of(
    managed: &Managed,
    dir: &Path,
    request: &JoinRequest,
) -> godwit_pki::Description {
    let answer = join(managed, request).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.body);
    let file = dir.join("joined.pem");
    std::fs::write(&file, answer.read::<Joined>().certificate).unwrap();
    describe(&file).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_contains_only_what_the_token_grants() {
    let dir = tempfile::tempdir().unwrap();
    let managed = signing(dir.path()).await;
    // A host requests the addresses of the manager and of another host to impersonate them.
    let addresses = vec!["10.0.0.5".parse().unwrap(), "10.0.0.11".parse().unwrap()];
    let made = token(&managed, "c").await;
    let asked = JoinRequest {
        addresses: addresses.clone(),
        ..asks(&made.token, "c", &dir.path().join("c.key"))
    };
    let described = certificate_of(&managed, dir.path(), &asked).await;
    assert_eq!(
        (described.name.as_str(), described.role, described.addresses),
        ("c", CertificateRole::Host, vec![])
    );
    // The certificate has the agent's address if an admin has named it.
    let grant = json!({ "host": "d", "address": "http://10.0.0.7:7700" });
    let made: JoinToken = managed.root(Method::POST, TOKENS, Some(grant)).await.read();
    let asked = JoinRequest {
        addresses,
        address: None,
        ..asks(&made.token, "d", &dir.path().join("d.key"))
    };
    let described = certificate_of(&managed, dir.path(), &asked).await;
    assert_eq!(described.addresses, ["10.0.0.7".parse::<std::net::IpAddr>().unwrap()]);
    // A host cannot have the manager's name.
    for name in ["m1", "M1"] {
        let refused = managed.root(Method::POST, TOKENS, Some(json!({ "host": name }))).await;
        assert_eq!(refused.problem(), ProblemCode::InvalidRequest, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_adds_no_host_and_does_not_use_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let managed = signing(dir.path()).await;
    let made = token(&managed, "c").await;
    let key = dir.path().join("c.key");
    let good = asks(&made.token, "c", &key);
    let unknown = made.token.replacen("godwit_", "godwit_0", 1);
    for (request, code) in [
        (JoinRequest { host: "d".into(), ..good.clone() }, ProblemCode::Forbidden),
        (JoinRequest { token: unknown, ..good.clone() }, ProblemCode::Unauthenticated),
        (JoinRequest { token: String::new(), ..good.clone() }, ProblemCode::Unauthenticated),
        (JoinRequest { request: "nothing".into(), ..good.clone() }, ProblemCode::InvalidRequest),
        (JoinRequest { address: None, ..good.clone() }, ProblemCode::InvalidRequest),
        (
            JoinRequest { address: Some("nowhere".into()), ..good.clone() },
            ProblemCode::InvalidRequest,
        ),
        (
            JoinRequest { addresses: vec!["10.0.0.7".parse().unwrap(); 65], ..good.clone() },
            ProblemCode::InvalidRequest,
        ),
    ] {
        assert_eq!(join(&managed, &request).await.problem(), code, "{request:?}");
    }
    assert!(hosts(&managed).await.is_empty());
    assert_eq!(join(&managed, &good).await.status, StatusCode::CREATED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_admits_one_of_two_concurrent_requests() {
    let dir = tempfile::tempdir().unwrap();
    let managed = signing(dir.path()).await;
    let made = token(&managed, "c").await;
    let one = asks(&made.token, "c", &dir.path().join("1.key"));
    let other = asks(&made.token, "c", &dir.path().join("2.key"));
    let both = futures::future::join(join(&managed, &one), join(&managed, &other)).await;
    let came_in = [both.0.status, both.1.status].into_iter().filter(StatusCode::is_success).count();
    assert_eq!(came_in, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_token_admits_no_host_and_invalid_tokens_are_not_created() {
    let dir = tempfile::tempdir().unwrap();
    let managed = signing(dir.path()).await;
    let made = token(&managed, "c").await;
    assert!(
        made.token
            .contains(&Fingerprint::of_certificate(&dir.path().join("ca.pem")).unwrap().hex())
    );
    let path = format!("{TOKENS}/{}", made.info.id);
    assert_eq!(managed.root(Method::DELETE, &path, None).await.status, StatusCode::NO_CONTENT);
    assert_eq!(managed.root(Method::DELETE, &path, None).await.problem(), ProblemCode::NotFound);
    let refused = join(&managed, &asks(&made.token, "c", &dir.path().join("c.key"))).await;
    assert_eq!(refused.problem(), ProblemCode::Unauthenticated);
    for wrong in [
        json!({ "host": "a b" }),
        json!({ "host": "c", "minutes": 0 }),
        json!({ "host": "c", "address": "http://127.0.0.1:1/path" }),
    ] {
        let refused = managed.root(Method::POST, TOKENS, Some(wrong)).await;
        assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
    }
    let without = Managed::begin().await;
    let refused = without.root(Method::POST, TOKENS, Some(json!({ "host": "c" }))).await;
    assert_eq!(refused.problem(), ProblemCode::WrongState);
}
