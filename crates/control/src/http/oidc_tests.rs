//! Web tokens of a test issuer, served over TLS with its own keys.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::routing::get;
use axum::{Json, Router};
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use godwit_api::control::{ProblemCode, Role};
use godwit_pki::{Authority, Grant, Identity, Role as CertificateRole};
use godwit_store::MemoryStore;
use http::{Method, StatusCode};
use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use parking_lot::Mutex;
use rcgen::KeyPair;
use serde_json::{Value, json};

use super::tests::*;
use crate::access::authorities::Authorities;
use crate::access::issuer::Oidc;
use crate::access::oidc::OidcRules;
use crate::clock::now_unix_ms;

const HOSTS: &str = "/api/v1/hosts";

/// Signing key of an issuer.
struct Key {
    id: &'static str,
    secret: EncodingKey,
}

impl Key {
    fn new(id: &'static str) -> Key {
        Key { id, secret: EncodingKey::from_ec_der(&KeyPair::generate().unwrap().serialize_der()) }
    }

    fn public(&self) -> Jwk {
        let mut key = Jwk::from_encoding_key(&self.secret, Algorithm::ES256).unwrap();
        key.common.key_id = Some(self.id.to_owned());
        key
    }

    fn sign(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.id.to_owned()), ..Header::new(Algorithm::ES256) };
        encode(&header, claims, &self.secret).unwrap()
    }
}

struct Issuer {
    address: String,
    keys: Arc<Mutex<JwkSet>>,
    /// Number of requests for its keys.
    asked: Arc<AtomicU32>,
    handle: Handle<SocketAddr>,
}

impl Drop for Issuer {
    fn drop(&mut self) {
        self.handle.shutdown();
    }
}

impl Issuer {
    async fn begin(dir: &Path, keys: Vec<Jwk>) -> Issuer {
        let authority = Authority::create(dir, "test", 30).unwrap();
        let addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        let grant =
            Grant { name: "issuer".into(), role: CertificateRole::Operator, addresses, days: 30 };
        let issued = authority.issue(&grant).unwrap();
        let identity =
            Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = format!("https://{}", listener.local_addr().unwrap());
        let (keys, asked) = (Arc::new(Mutex::new(JwkSet { keys })), Arc::<AtomicU32>::default());
        let configuration = json!({ "issuer": address, "jwks_uri": format!("{address}/keys") });
        let (shown, counted) = (Arc::clone(&keys), Arc::clone(&asked));
        let app = Router::new()
            .route("/.well-known/openid-configuration", get(async move || Json(configuration)))
            .route(
                "/keys",
                get(async move || {
                    counted.fetch_add(1, Ordering::SeqCst);
                    let keys = shown.lock().clone();
                    Json(keys)
                }),
            );
        let handle = Handle::new();
        let tls = RustlsConfig::from_config(Arc::clone(identity.server_for_users()));
        let server = axum_server::from_tcp_rustls(listener, tls).unwrap().handle(handle.clone());
        tokio::spawn(server.serve(app.into_make_service()));
        Issuer { address, keys, asked, handle }
    }

    /// Returns the claims of a valid token.
    fn claims(&self, role: &str) -> Value {
        let now_s = now_unix_ms() / 1000;
        json!({
            "iss": self.address, "aud": "godwit", "sub": "ann", "iat": now_s,
            "exp": now_s + 300, "godwit_role": role
        })
    }

    async fn manager(&self, dir: &Path) -> Managed {
        let text = format!(
            "issuer = \"{}\"\naudience = \"godwit\"\nauthority = \"{}/ca.pem\"",
            self.address,
            dir.display()
        );
        let rules: OidcRules = toml::from_str(&text).unwrap();
        Managed::with_authorities(
            Arc::new(MemoryStore::new()),
            Authorities::trusting(Oidc::open(rules).unwrap()),
        )
        .await
    }
}

fn with(mut claims: Value, name: &str, value: Value) -> Value {
    claims[name] = value;
    claims
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_the_issuer_grants_its_role() {
    let dir = tempfile::tempdir().unwrap();
    let key = Key::new("k1");
    let issuer = Issuer::begin(dir.path(), vec![key.public()]).await;
    let managed = issuer.manager(dir.path()).await;
    let viewer = key.sign(&issuer.claims("viewer"));
    let admin = key.sign(&issuer.claims("admin"));
    assert_eq!(managed.ask(Method::GET, HOSTS, Some(&viewer), None).await.status, StatusCode::OK);
    let weaker = managed.ask(Method::POST, HOSTS, Some(&viewer), Some(host_a())).await;
    assert_eq!(weaker.problem(), ProblemCode::Forbidden);
    let done = managed.ask(Method::POST, HOSTS, Some(&admin), Some(host_a())).await;
    assert_eq!(done.status, StatusCode::CREATED);
    // The manager's own tokens remain valid.
    let own = managed.token(Role::Viewer).await.token;
    assert_eq!(managed.ask(Method::GET, HOSTS, Some(&own), None).await.status, StatusCode::OK);
    let noted = noted(&managed, 3).await;
    let entries: Vec<_> = noted.iter().map(|entry| (entry.who.as_str(), entry.status)).collect();
    assert_eq!(entries, [("root", 201), ("oidc:ann", 201), ("oidc:ann", 403)]);
    assert!(noted.iter().all(|entry| !format!("{entry:?}").contains(&viewer)));
    assert_eq!(issuer.asked.load(Ordering::SeqCst), 1, "its keys are cached");
}

#[tokio::test(flavor = "multi_thread")]
async fn faulty_tokens_are_refused_and_audited() {
    let dir = tempfile::tempdir().unwrap();
    let (key, foreign) = (Key::new("k1"), Key::new("k1"));
    let issuer = Issuer::begin(dir.path(), vec![key.public()]).await;
    let managed = issuer.manager(dir.path()).await;
    let good = issuer.claims("admin");
    let now_s = now_unix_ms() / 1000;
    let by_secret = Header { kid: Some("k1".into()), ..Header::new(Algorithm::HS256) };
    let public = serde_json::to_vec(&key.public()).unwrap();
    let signed = key.sign(&good);
    let (_, body) = signed.split_once('.').unwrap();
    let wrong = [
        ("expired", key.sign(&with(good.clone(), "exp", json!(now_s - 120)))),
        ("not valid yet", key.sign(&with(good.clone(), "nbf", json!(now_s + 120)))),
        ("audience", key.sign(&with(good.clone(), "aud", json!("other")))),
        ("another issuer", key.sign(&with(good.clone(), "iss", json!("https://other")))),
        ("it is invalid", foreign.sign(&good)),
        ("no key of this ID", Key { id: "k2", ..foreign }.sign(&good)),
        ("not accepted", encode(&by_secret, &good, &EncodingKey::from_secret(&public)).unwrap()),
        // {"alg":"none"}
        ("cannot read it", format!("eyJhbGciOiJub25lIn0.{body}")),
        ("cannot read it", "..".to_owned()),
        (
            "it is invalid",
            key.sign(&json!({ "iss": issuer.address, "aud": "godwit", "sub": "ann" })),
        ),
    ];
    for (why, token) in &wrong {
        let answer = managed.ask(Method::GET, HOSTS, Some(token), None).await;
        assert!(answer.body["detail"].as_str().unwrap().contains(why), "{why}: {}", answer.body);
        assert_eq!(answer.problem(), ProblemCode::Unauthenticated);
    }
    let unknown_role = key.sign(&with(good, "godwit_role", json!("root")));
    assert_eq!(
        managed.ask(Method::GET, HOSTS, Some(&unknown_role), None).await.problem(),
        ProblemCode::Forbidden
    );
    // Of unauthenticated requests, only the first have entries of their own.
    let noted = noted(&managed, 3).await;
    assert!(noted.iter().all(|entry| entry.who == "nobody" && entry.reason.is_some()));
}

#[tokio::test(flavor = "multi_thread")]
async fn new_keys_are_fetched_and_unknown_keys_do_not_flood_the_issuer() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (Key::new("k1"), Key::new("k2"));
    let issuer = Issuer::begin(dir.path(), vec![new.public()]).await;
    let managed = issuer.manager(dir.path()).await;
    let of_old = old.sign(&issuer.claims("viewer"));
    for _ in 0..20 {
        let answer = managed.ask(Method::GET, HOSTS, Some(&of_old), None).await;
        assert!(!answer.status.is_success());
    }
    // Keys read in the meantime are known; the issuer was queried once within the minute.
    let of_new = new.sign(&issuer.claims("viewer"));
    assert_eq!(managed.root(Method::GET, HOSTS, None).await.status, StatusCode::OK);
    let answer = managed.ask(Method::GET, HOSTS, Some(&of_new), None).await;
    assert!(
        matches!(answer.status, StatusCode::OK | StatusCode::TOO_MANY_REQUESTS),
        "{}",
        answer.body
    );
    issuer.keys.lock().keys.push(old.public());
    assert!(!managed.ask(Method::GET, HOSTS, Some(&of_old), None).await.status.is_success());
    assert_eq!(issuer.asked.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_issuer_is_not_reported_as_a_faulty_token() {
    let dir = tempfile::tempdir().unwrap();
    let key = Key::new("k1");
    let issuer = Issuer::begin(dir.path(), vec![key.public()]).await;
    let managed = issuer.manager(dir.path()).await;
    let token = key.sign(&issuer.claims("viewer"));
    drop(issuer);
    for _ in 0..2 {
        let answer = managed.ask(Method::GET, HOSTS, Some(&token), None).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.body);
        assert!(answer.body["detail"].as_str().unwrap().contains("OIDC issuer"), "{}", answer.body);
        assert_eq!(answer.problem(), ProblemCode::IssuerAway);
    }
    let own = managed.token(Role::Viewer).await.token;
    assert_eq!(managed.ask(Method::GET, HOSTS, Some(&own), None).await.status, StatusCode::OK);
    let noted = noted(&managed, 3).await;
    assert_eq!(noted.iter().filter(|entry| entry.status == 503).count(), 2);
}
