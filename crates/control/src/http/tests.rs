use axum::body::Body;
use futures::StreamExt;
use godwit_api::control::{
    AuditEntry, CreatedToken, HostSummary, ManagedHost, Me, Page, ProblemCode, Role,
};
use godwit_store::{Candidate, MemoryStore, Store};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{Method, Request, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tower::ServiceExt;

use super::*;
use crate::access::Caller;
use crate::access::authorities::Authorities;
use crate::alarms::AlarmSetup;
use crate::cluster::state::State as Cluster;
use crate::rig;
use crate::storage::keeper::Keeper;

/// A manager with a store in memory, without hosts.
pub(crate) struct Managed {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) app: Router,
    pub(crate) manager: Arc<Manager>,
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    kind: String,
    pub(crate) body: Value,
}

impl Answer {
    pub(crate) fn read<T: DeserializeOwned>(self) -> T {
        serde_json::from_value(self.body).unwrap()
    }

    pub(crate) fn problem(self) -> ProblemCode {
        assert_eq!(self.kind, "application/problem+json", "{}", self.body);
        let problem: Problem = serde_json::from_value(self.body).unwrap();
        assert_eq!((problem.status, problem.code.status()), (self.status.as_u16(), self.status));
        assert!(!problem.detail.is_empty());
        problem.code
    }
}

impl Managed {
    pub(crate) async fn begin() -> Managed {
        Managed::with(Arc::new(MemoryStore::new())).await
    }

    pub(crate) async fn with(store: Arc<MemoryStore>) -> Managed {
        Managed::with_authorities(store, Authorities::default()).await
    }

    pub(crate) async fn with_authorities(
        store: Arc<MemoryStore>,
        authorities: Authorities,
    ) -> Managed {
        Managed::with_all(store, authorities, AlarmSetup::default()).await
    }

    pub(crate) async fn with_all(
        store: Arc<MemoryStore>,
        authorities: Authorities,
        alarms: AlarmSetup,
    ) -> Managed {
        store.end_leadership_silently();
        let candidate = Candidate { name: "m1".into(), address: "http://m1:7800".into() };
        let leadership = Arc::new(store.lead(&candidate).await.unwrap());
        let keeper = Keeper::new(Arc::clone(&store) as _, leadership, candidate);
        let state = Arc::<Cluster>::default();
        let manager =
            Manager::new(keeper.candidate().clone(), Arc::clone(keeper.store()), state, None);
        manager.authorities.set(authorities);
        manager.alarm_setup.set(alarms).unwrap();
        manager.lead(keeper).await.unwrap();
        Managed { store, app: router(Arc::clone(&manager)), manager }
    }

    pub(crate) async fn send(&self, app: Router, request: Request<Body>) -> Answer {
        let response = app.oneshot(request).await.unwrap();
        let status = response.status();
        let kind =
            response.headers().get(CONTENT_TYPE).map(|kind| kind.to_str().unwrap().to_owned());
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        Answer { status, kind: kind.unwrap_or_default(), body }
    }

    /// Sends a request over the manager's own socket.
    pub(crate) async fn root(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        self.send(local(self.app.clone()), request(method, path, None, body)).await
    }

    /// Sends a request over the network, with a token.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        token: Option<&str>,
        body: Option<Value>,
    ) -> Answer {
        self.send(self.app.clone(), request(method, path, token, body)).await
    }

    pub(crate) async fn token(&self, role: Role) -> CreatedToken {
        let body = json!({ "name": role.name(), "role": role });
        self.root(Method::POST, "/api/v1/tokens", Some(body)).await.read()
    }
}

pub(crate) fn request(
    method: Method,
    path: &str,
    token: Option<&str>,
    body: Option<Value>,
) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    match body {
        Some(body) => request
            .header(CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))
            .unwrap(),
        None => request.body(Body::empty()).unwrap(),
    }
}

pub(crate) fn host_a() -> Value {
    json!({ "name": "a", "address": "http://127.0.0.1:1", "labels": { "rack": "r1" } })
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_are_added_changed_and_removed() {
    let managed = Managed::begin().await;
    let added = managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    assert_eq!(added.status, StatusCode::CREATED);
    let again = managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    assert_eq!(again.problem(), ProblemCode::AlreadyExists);
    let change = json!({ "maintenance": true });
    let changed: ManagedHost =
        managed.root(Method::PATCH, "/api/v1/hosts/a", Some(change)).await.read();
    assert!(changed.summary.maintenance && changed.summary.labels["rack"] == "r1");
    let page: Page<HostSummary> =
        managed.root(Method::GET, "/api/v1/hosts?maintenance=true", None).await.read();
    assert_eq!((page.total, page.items[0].name.as_str()), (1, "a"));
    let gone = managed.root(Method::DELETE, "/api/v1/hosts/a", None).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    let missing = managed.root(Method::GET, "/api/v1/hosts/a", None).await;
    assert_eq!(missing.problem(), ProblemCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_in_use_is_removed_only_by_force() {
    let managed = Managed::begin().await;
    // It accepts connections and never answers, so the state set here stays.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host =
        json!({ "name": "a", "address": format!("http://{}", silent.local_addr().unwrap()) });
    managed.root(Method::POST, "/api/v1/hosts", Some(host)).await;
    managed.manager.state.reached("a");
    let report = |event| managed.manager.state.apply("a", event);
    report(godwit_api::HostEvent::Host(Box::new(rig::host("a", None))));
    report(godwit_api::HostEvent::Vm(Box::new(rig::vm("web", "a", None))));
    report(godwit_api::HostEvent::Known);
    let refused = managed.root(Method::DELETE, "/api/v1/hosts/a", None).await;
    assert!(
        refused.body["detail"].as_str().unwrap().contains("runs 1 VM: web"),
        "{}",
        refused.body
    );
    assert_eq!(refused.problem(), ProblemCode::WrongState);
    let drain = managed.root(Method::POST, "/api/v1/hosts/a/drain", Some(json!({}))).await;
    assert_eq!(drain.status, StatusCode::ACCEPTED);
    let gone = managed.root(Method::DELETE, "/api/v1/hosts/a?force=true", None).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_admin_gives_a_running_vm_to_libvirt() {
    let managed = Managed::begin().await;
    let operator = managed.token(Role::Operator).await.token;
    let path = "/api/v1/vms/web/export";
    let export = async |live: bool| {
        let request = json!({ "to": "/srv", "format": "libvirt", "live": live });
        managed.ask(Method::POST, path, Some(&operator), Some(request)).await.problem()
    };
    assert_eq!(export(true).await, ProblemCode::Forbidden);
    assert_eq!(export(false).await, ProblemCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_changes_only_the_maintenance_mode_of_a_host() {
    let managed = Managed::begin().await;
    managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    let operator = managed.token(Role::Operator).await.token;
    let viewer = managed.token(Role::Viewer).await.token;
    let ask = async |token: &str, change: Value| {
        managed.ask(Method::PATCH, "/api/v1/hosts/a", Some(token), Some(change)).await
    };
    let changed = ask(&operator, json!({ "maintenance": true })).await;
    assert_eq!(changed.status, StatusCode::OK);
    assert_eq!(ask(&operator, json!({ "maintenance": false })).await.status, StatusCode::OK);
    let more = [
        json!({ "maintenance": true, "most_moves": 3 }),
        json!({ "link_bits_per_s": null }),
        json!({ "labels": {} }),
    ];
    for more in more {
        assert_eq!(ask(&operator, more).await.problem(), ProblemCode::Forbidden);
    }
    assert_eq!(
        ask(&viewer, json!({ "maintenance": true })).await.problem(),
        ProblemCode::Forbidden
    );
    assert!(!managed.manager.host_requests.host("a").unwrap().summary.maintenance);
}

#[test]
fn each_operation_has_a_unique_name() {
    let document = serde_json::to_value(openapi()).unwrap();
    let mut named = BTreeMap::<String, String>::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap().to_owned();
            let at = format!("{method} {path}");
            let other = named.insert(id.clone(), at.clone());
            assert_eq!(other, None, "{at} is {id} as well: give it another operation_id");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_have_limits() {
    let managed = Managed::begin().await;
    managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    let set = async |key: &str, value: &str| {
        let change = json!({ "labels": { key: value } });
        managed.root(Method::PATCH, "/api/v1/hosts/a", Some(change)).await
    };
    assert_eq!(set(&"ä".repeat(63), &"ä".repeat(253)).await.status, StatusCode::OK);
    assert_eq!(set("key", "").await.status, StatusCode::OK);
    for key in ["", "a b", "a\n", "a=b", "a\u{202e}", &"k".repeat(64)] {
        assert_eq!(set(key, "v").await.problem(), ProblemCode::InvalidRequest, "{key:?}");
    }
    for value in ["\0", "\u{1b}[1m", "a\nb", "\u{202e}gpj", &"v".repeat(254)] {
        assert_eq!(set("key", value).await.problem(), ProblemCode::InvalidRequest, "{value:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_outlive_the_manager() {
    let managed = Managed::begin().await;
    managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    let token = managed.token(Role::Viewer).await;
    let Managed { store, app, manager } = managed;
    drop((app, manager));
    let managed = Managed::with(store).await;
    let page: Page<HostSummary> =
        managed.ask(Method::GET, "/api/v1/hosts", Some(&token.token), None).await.read();
    assert_eq!(page.items[0].labels["rack"], "r1");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_role_has_its_rights_and_refusals_are_audited() {
    let managed = Managed::begin().await;
    let viewer = managed.token(Role::Viewer).await;
    let admin = managed.token(Role::Admin).await;
    let hosts = "/api/v1/hosts";
    let anonymous = managed.ask(Method::GET, hosts, None, None).await;
    assert_eq!(anonymous.problem(), ProblemCode::Unauthenticated);
    let wrong = managed.ask(Method::GET, hosts, Some("godwit_00_11"), None).await;
    assert_eq!(wrong.problem(), ProblemCode::Unauthenticated);
    assert_eq!(
        managed.ask(Method::GET, hosts, Some(&viewer.token), None).await.status,
        StatusCode::OK
    );
    let me: Me = managed.ask(Method::GET, "/api/v1/me", Some(&viewer.token), None).await.read();
    assert_eq!(me, Me { name: "viewer".to_owned(), role: Role::Viewer });
    let weaker = managed.ask(Method::POST, hosts, Some(&viewer.token), Some(host_a())).await;
    assert_eq!(weaker.problem(), ProblemCode::Forbidden);
    let done = managed.ask(Method::POST, hosts, Some(&admin.token), Some(host_a())).await;
    assert_eq!(done.status, StatusCode::CREATED);
    let path = format!("/api/v1/tokens/{}", viewer.info.id);
    let revoked = managed.ask(Method::DELETE, &path, Some(&admin.token), None).await;
    assert_eq!(revoked.status, StatusCode::NO_CONTENT);
    let unknown = managed.ask(Method::GET, hosts, Some(&viewer.token), None).await;
    assert_eq!(unknown.problem(), ProblemCode::Unauthenticated);
    let noted = noted(&managed, 8).await;
    let entries: Vec<_> = noted.iter().map(|entry| (entry.who.as_str(), entry.status)).collect();
    let newest = [("nobody", 401), ("admin", 204), ("admin", 201), ("viewer", 403)];
    let oldest = [("nobody", 401), ("nobody", 401), ("root", 201), ("root", 201)];
    assert_eq!(entries, [newest, oldest].concat());
    assert!(noted.iter().all(|entry| !format!("{entry:?}").contains(&viewer.token)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prediction_needs_an_operator_and_is_audited_although_it_is_a_get() {
    let managed = Managed::begin().await;
    let viewer = managed.token(Role::Viewer).await.token;
    let operator = managed.token(Role::Operator).await.token;
    let path = "/api/v1/vms/web/preflight";
    for query in ["?predict=true", "?to=b&predict=true", "?%70redict=tru%65"] {
        let refused =
            managed.ask(Method::GET, &format!("{path}{query}"), Some(&viewer), None).await;
        assert_eq!(refused.problem(), ProblemCode::Forbidden, "{query}");
    }
    // Without a prediction a viewer is admitted and the request only reads; this VM does not exist
    // here.
    for query in ["", "?to=b", "?predict=false"] {
        let read = managed.ask(Method::GET, &format!("{path}{query}"), Some(&viewer), None).await;
        assert_eq!(read.problem(), ProblemCode::NotFound, "{query}");
    }
    let asked =
        managed.ask(Method::GET, &format!("{path}?predict=true"), Some(&operator), None).await;
    assert_eq!(asked.problem(), ProblemCode::NotFound);
    let noted = noted(&managed, 6).await;
    let entries: Vec<_> = noted.iter().map(|entry| (entry.who.as_str(), entry.status)).collect();
    let tokens = [("root", 201); 2];
    assert_eq!(entries, [&[("operator", 404)][..], &[("viewer", 403); 3], &tokens].concat());
    assert_eq!(noted[0].what, format!("GET {path}?predict=true"));
}

/// Waits for this many entries in the audit log, which is written after the responses.
pub(crate) async fn noted(managed: &Managed, entries: usize) -> Vec<AuditEntry> {
    loop {
        let page: Page<AuditEntry> = managed.root(Method::GET, "/api/v1/audit", None).await.read();
        if page.items.len() >= entries {
            return page.items;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_error_is_a_problem_document() {
    let managed = Managed::begin().await;
    let big = json!({ "name": "x".repeat(2 << 20), "address": "http://127.0.0.1:1" });
    for (method, path, body, code) in [
        (Method::GET, "/api/v1/nothing", None, ProblemCode::NotFound),
        (Method::PUT, "/api/v1/hosts", None, ProblemCode::MethodNotAllowed),
        (Method::GET, "/api/v1/hosts?limit=0", None, ProblemCode::InvalidRequest),
        (Method::GET, "/api/v1/hosts?limit=x", None, ProblemCode::InvalidRequest),
        (Method::GET, "/api/v1/hosts?color=red", None, ProblemCode::InvalidRequest),
        (Method::GET, "/api/v1/hosts?label=rack", None, ProblemCode::InvalidRequest),
        (Method::POST, "/api/v1/hosts", None, ProblemCode::UnsupportedType),
        (Method::POST, "/api/v1/hosts", Some(json!({})), ProblemCode::InvalidRequest),
        (Method::POST, "/api/v1/hosts", Some(json!([])), ProblemCode::InvalidRequest),
        (
            Method::POST,
            "/api/v1/hosts",
            Some(json!(["a", "http://127.0.0.1:1"])),
            ProblemCode::InvalidRequest,
        ),
        (Method::POST, "/api/v1/hosts", Some(big), ProblemCode::TooLong),
        (
            Method::POST,
            "/api/v1/hosts",
            Some(json!({ "name": "../a", "address": "http://127.0.0.1:1" })),
            ProblemCode::InvalidRequest,
        ),
        (
            Method::POST,
            "/api/v1/hosts",
            Some(json!({ "name": "a", "address": "https://127.0.0.1:1" })),
            ProblemCode::WrongState,
        ),
        (
            Method::POST,
            "/api/v1/hosts",
            Some(json!({ "name": "a", "address": "http://127.0.0.1:1/path" })),
            ProblemCode::InvalidRequest,
        ),
        (
            Method::POST,
            "/api/v1/hosts",
            Some(json!({ "name": "a", "address": "http://127.0.0.1:1", "most_moves": 1001 })),
            ProblemCode::InvalidRequest,
        ),
        (
            Method::POST,
            "/api/v1/tokens",
            Some(json!({ "name": "x", "role": "viewer", "days": 0 })),
            ProblemCode::InvalidRequest,
        ),
        (
            Method::POST,
            "/api/v1/vms/none/moves",
            Some(json!({ "qemu": { "multifd_channels": 256 } })),
            ProblemCode::InvalidRequest,
        ),
        (
            Method::POST,
            "/api/v1/hosts/none/drain",
            Some(json!({ "qemu": { "multifd_channels": 2, "postcopy": true } })),
            ProblemCode::Preflight,
        ),
        (Method::DELETE, "/api/v1/tokens/none", None, ProblemCode::NotFound),
        (Method::GET, "/api/v1/vms/none", None, ProblemCode::NotFound),
    ] {
        let answer = managed.root(method.clone(), path, body).await;
        assert_eq!(answer.problem(), code, "{method} {path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_number_may_have_a_zero_fraction() {
    let managed = Managed::begin().await;
    let body = json!({ "name": "x", "role": "viewer", "days": 30.0 });
    let made: CreatedToken = managed.root(Method::POST, "/api/v1/tokens", Some(body)).await.read();
    assert_eq!(made.info.expires_unix_ms - made.info.made_unix_ms, 30 * 24 * 3600 * 1000);
    let body = json!({ "name": "x", "role": "viewer", "days": 30.5 });
    let refused = managed.root(Method::POST, "/api/v1/tokens", Some(body)).await;
    assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
}

#[tokio::test(flavor = "multi_thread")]
async fn last_event_id_must_be_an_event_number() {
    let managed = Managed::begin().await;
    for id in ["x", "-1", "9223372036854775808"] {
        let mut request = request(Method::GET, "/api/v1/events", None, None);
        request.headers_mut().insert("last-event-id", id.parse().unwrap());
        let answer = managed.send(local(managed.app.clone()), request).await;
        assert_eq!(answer.problem(), ProblemCode::InvalidRequest, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_stream_ends_with_the_token_of_its_request() {
    let managed = Managed::begin().await;
    let (revoked, kept) = (managed.token(Role::Viewer).await, managed.token(Role::Viewer).await);
    let follow = async |token: &str| {
        let asked = request(Method::GET, "/api/v1/events", Some(token), None);
        let response = managed.app.clone().oneshot(asked).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body()
    };
    let (ends, goes_on) = (follow(&revoked.token).await, follow(&kept.token).await);
    let path = format!("/api/v1/tokens/{}", revoked.info.id);
    managed.root(Method::DELETE, &path, None).await;
    // Without its token's revocation the stream would not end.
    axum::body::to_bytes(ends, 1 << 20).await.unwrap();
    let mut events = goes_on.into_data_stream();
    managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    events.next().await.unwrap().unwrap();
    let over = Caller { until_unix_ms: Some(1), ..Caller::named("oidc:ann", Role::Viewer) };
    managed.manager.tokens.is_good_no_more(&over).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_distinguishes_tokens_of_one_name_and_no_token_is_named_root() {
    let managed = Managed::begin().await;
    let (one, other) = (managed.token(Role::Admin).await, managed.token(Role::Admin).await);
    for made in [&one, &other] {
        managed.ask(Method::DELETE, "/api/v1/hosts/none", Some(&made.token), None).await;
    }
    let both = [Some(one.info.id), Some(other.info.id)];
    loop {
        let log: Page<AuditEntry> = managed.root(Method::GET, "/api/v1/audit", None).await.read();
        let tokens: Vec<_> = log
            .items
            .iter()
            .filter(|entry| entry.who == "admin")
            .map(|entry| entry.token.clone())
            .collect();
        if tokens.len() == 2 {
            assert!(both.iter().all(|id| tokens.contains(id)), "{tokens:?}");
            break;
        }
        tokio::task::yield_now().await;
    }
    for name in ["root", "nobody"] {
        let body = json!({ "name": name, "role": "viewer" });
        let refused = managed.root(Method::POST, "/api/v1/tokens", Some(body)).await;
        assert_eq!(refused.problem(), ProblemCode::InvalidRequest, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_over_the_rate_limit_gets_a_retry_time() {
    let managed = Managed::begin().await;
    let refused = loop {
        let asked = request(Method::GET, "/api/v1/hosts", None, None);
        let response = managed.app.clone().oneshot(asked).await.unwrap();
        if response.status() != StatusCode::UNAUTHORIZED {
            break response;
        }
    };
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["retry-after"], "1");
    // The refusals before it have some entries, then one with a count.
    let mark = json!({ "name": "mark", "role": "viewer" });
    managed.root(Method::POST, "/api/v1/tokens", Some(mark)).await;
    loop {
        let log: Page<AuditEntry> = managed.root(Method::GET, "/api/v1/audit", None).await.read();
        if log.items.iter().any(|entry| entry.what == "POST /api/v1/tokens") {
            assert_eq!(log.items.iter().filter(|entry| entry.who == "nobody").count(), 3);
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_has_every_request_with_its_responses() {
    let managed = Managed::begin().await;
    let document = managed.ask(Method::GET, "/api/openapi.json", None, None).await;
    assert_eq!(document.status, StatusCode::OK);
    assert!(document.body["openapi"].as_str().unwrap().starts_with("3.1"));
    let paths = document.body["paths"].as_object().unwrap();
    assert!(paths.contains_key("/api/v1/hosts/{host}"), "{:?}", paths.keys());
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.contains_key("4XX"), "{method} {path}");
            let is_good = |status: &String| status.starts_with('2') || status == "101";
            assert!(responses.keys().any(is_good), "{method} {path}");
            assert!(
                operation["description"].is_string() || operation["summary"].is_string(),
                "{path}"
            );
        }
    }
}
