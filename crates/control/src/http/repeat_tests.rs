//! Requests with an idempotency key.

use axum::body::Body;
use godwit_api::control::{ProblemCode, Role};
use http::{HeaderValue, Method, Request, StatusCode};
use serde_json::{Value, json};

use super::tests::*;
use crate::clock::now_unix_ms;
use crate::idempotency::keys::KEPT_MS;
use crate::leadership::prune::prune;

const HOSTS: &str = "/api/v1/hosts";

fn keyed(path: &str, token: &str, key: &str, body: Value) -> Request<Body> {
    let mut request = request(Method::POST, path, Some(token), Some(body));
    request.headers_mut().insert("idempotency-key", HeaderValue::from_str(key).unwrap());
    request
}

async fn ask(managed: &Managed, token: &str, key: &str, body: Value) -> Answer {
    managed.send(managed.app.clone(), keyed(HOSTS, token, key, body)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_request_is_carried_out_once_and_gets_the_same_response() {
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    let first = ask(&managed, &admin, "k1", host_a()).await;
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.body);
    // Without the key it is refused, because the host exists.
    let without = managed.ask(Method::POST, HOSTS, Some(&admin), Some(host_a())).await;
    assert_eq!(without.problem(), ProblemCode::AlreadyExists);
    let again = ask(&managed, &admin, "k1", host_a()).await;
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    // The store keeps the purpose of the key: the next manager knows it too.
    let managed = Managed::with(managed.store).await;
    let again = ask(&managed, &admin, "k1", host_a()).await;
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    let other = json!({ "name": "b", "address": "http://127.0.0.1:1" });
    assert_eq!(ask(&managed, &admin, "k1", other.clone()).await.problem(), ProblemCode::KeyReused);
    // An equal key of another caller is a different key.
    let root =
        managed.send(super::local(managed.app.clone()), keyed(HOSTS, &admin, "k1", other)).await;
    assert_eq!(root.status, StatusCode::CREATED);
    assert_eq!(ask(&managed, &admin, "", host_a()).await.problem(), ProblemCode::InvalidRequest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_repeated_too() {
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    assert_eq!(ask(&managed, &admin, "k1", json!({})).await.problem(), ProblemCode::InvalidRequest);
    assert_eq!(ask(&managed, &admin, "k1", json!({})).await.problem(), ProblemCode::InvalidRequest);
    let viewer = managed.token(Role::Viewer).await.token;
    let weaker = ask(&managed, &viewer, "k2", host_a()).await;
    assert_eq!(weaker.problem(), ProblemCode::Forbidden);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_concurrent_requests_one_is_carried_out() {
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    let all = (0..8).map(|_| ask(&managed, &admin, "k1", host_a()));
    for answer in futures::future::join_all(all).await {
        // Either the response of the request that was carried out, or a conflict with it.
        if answer.status != StatusCode::CREATED {
            assert_eq!(answer.problem(), ProblemCode::Conflict);
        }
    }
    let answer = ask(&managed, &admin, "k1", host_a()).await;
    assert_eq!(answer.status, StatusCode::CREATED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_never_stored_and_is_created_once() {
    use godwit_store::Store;
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    let body = json!({ "name": "x", "role": "viewer" });
    let made = keyed("/api/v1/tokens", &admin, "k1", body.clone());
    let made = managed.send(managed.app.clone(), made).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let again = keyed("/api/v1/tokens", &admin, "k1", body);
    let again = managed.send(managed.app.clone(), again).await;
    assert_eq!(again.problem(), ProblemCode::Conflict);
    let kept = managed.store.read("").await.unwrap().items;
    assert!(kept.iter().any(|item| item.key.starts_with("idempotency/")));
    let secret = made.body["token"].as_str().unwrap();
    assert!(kept.iter().all(|item| !item.value.contains(&secret[20..])));
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_keys_and_tokens_are_removed() {
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    assert_eq!(ask(&managed, &admin, "k1", host_a()).await.status, StatusCode::CREATED);
    let keeper = &managed.manager.leading().unwrap().keeper;
    let now = now_unix_ms();
    assert_eq!(prune(&managed.manager, keeper, now).await.unwrap(), 0);
    assert_eq!(prune(&managed.manager, keeper, now + KEPT_MS).await.unwrap(), 1);
    // The token is valid for 90 days, and reported as expired for 30 more.
    prune(&managed.manager, keeper, now + 119 * KEPT_MS).await.unwrap();
    assert_eq!(managed.manager.tokens.infos().len(), 1);
    prune(&managed.manager, keeper, now + 121 * KEPT_MS).await.unwrap();
    assert!(managed.manager.tokens.infos().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_with_too_many_keys_evicts_only_its_own() {
    use crate::idempotency::keys::{Keyed, MOST_OF_CALLER, StoredRequest};
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    assert_eq!(ask(&managed, &admin, "k", host_a()).await.status, StatusCode::CREATED);
    let leading = managed.manager.leading().unwrap();
    let now = now_unix_ms();
    for number in 0..=MOST_OF_CALLER as u64 {
        let keyed = Keyed::new("other", format!("k{number}").as_bytes(), "POST /", b"").unwrap();
        let begun = StoredRequest { unix_ms: now + number, digest: keyed.digest, answer: None };
        leading.repeats.begin(&leading.keeper, &keyed, None, &begun).await.unwrap();
    }
    let of = |key: &[u8]| Keyed::new("other", key, "POST /", b"").unwrap().id;
    assert!(
        leading
            .keeper
            .find(crate::idempotency::record::REPEATS, &of(b"k0"))
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        leading
            .keeper
            .find(crate::idempotency::record::REPEATS, &of(b"k1"))
            .await
            .unwrap()
            .is_some()
    );
    let again = ask(&managed, &admin, "k", host_a()).await;
    assert_eq!(again.status, StatusCode::CREATED, "the stored response");
    // The next manager counts the keys in the store.
    let managed = Managed::with(managed.store).await;
    let leading = managed.manager.leading().unwrap();
    let keyed = Keyed::new("other", b"more", "POST /", b"").unwrap();
    let begun = StoredRequest { unix_ms: now + 9_000, digest: keyed.digest, answer: None };
    leading.repeats.begin(&leading.keeper, &keyed, None, &begun).await.unwrap();
    assert!(
        leading
            .keeper
            .find(crate::idempotency::record::REPEATS, &of(b"k1"))
            .await
            .unwrap()
            .is_none()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_describes_the_key() {
    let managed = Managed::begin().await;
    let document = managed.ask(Method::GET, "/api/openapi.json", None, None).await.body;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(post) = methods.get("post") else { continue };
        let parameters = post["parameters"].as_array().cloned().unwrap_or_default();
        let has_key =
            parameters.iter().any(|one| one["name"] == "Idempotency-Key" && one["in"] == "header");
        assert_eq!(has_key, path != "/api/v1/join", "{path}");
    }
}
