use std::net::SocketAddr;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use futures::{SinkExt, StreamExt};
use godwit_api::VmState;
use godwit_api::control::{AuditEntry, Page, ProblemCode, Role, TokenInfo, VmSummary};
use http::{Method, StatusCode};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::handshake::client::Response;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::http::tests::request;
use crate::vms::tests::Cluster;

/// A manager with some simulated hosts, on an address for browsers.
struct Served {
    cluster: Cluster,
    at: SocketAddr,
    vm: String,
}

type Console = WebSocketStream<TcpStream>;

impl Served {
    async fn begin() -> Served {
        let cluster = Cluster::begin(2, 1).await;
        let vm = cluster
            .fleet
            .agents()
            .keys()
            .find_map(|host| Some(cluster.fleet.vms_of(host).first()?.name.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let app = cluster.managed.app.clone().into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Served { cluster, at, vm: vm.unwrap() }
    }

    /// As [`Served::begin`], with a VM that has a screen on the first host.
    async fn with_screen() -> Served {
        let served = Served::begin().await;
        let host = served.cluster.fleet.agents().keys().next().unwrap().clone();
        let mut spec = json!({ "name": "seen", "kernel": "/srv/vmlinuz", "video": "vga" });
        spec["serial_ports"] = 2.into();
        let request = json!({ "spec": spec, "host": host });
        let made = served.cluster.root(Method::POST, "/api/v1/vms", Some(request)).await;
        assert_eq!(made.status, 201, "{}", made.body);
        Served { vm: "seen".to_owned(), ..served }
    }

    async fn open_screen(&self) -> Console {
        let origin = format!("http://{}", self.at);
        let (screen, response) = self.open_what("screen", &origin, Role::Operator).await.unwrap();
        assert_eq!(response.headers()["sec-websocket-protocol"], "godwit.screen.v1");
        screen
    }

    fn path(&self, what: &str) -> String {
        format!("/api/v1/vms/{}/{what}", self.vm)
    }

    /// Opens the console like a browser on a page of that origin.
    async fn open(&self, origin: &str, role: Role) -> Result<(Console, Response), StatusCode> {
        self.open_what("console", origin, role).await
    }

    /// Opens the console or the screen.
    async fn open_what(
        &self,
        what: &str,
        origin: &str,
        role: Role,
    ) -> Result<(Console, Response), StatusCode> {
        let token = BASE64_URL_SAFE_NO_PAD.encode(self.cluster.managed.token(role).await.token);
        let mut request =
            format!("ws://{}{}", self.at, self.path(what)).into_client_request().unwrap();
        let offered = format!("godwit.{what}.v1, godwit.bearer.{token}");
        request.headers_mut().insert("sec-websocket-protocol", offered.parse().unwrap());
        request.headers_mut().insert("origin", origin.parse().unwrap());
        let stream = TcpStream::connect(self.at).await.unwrap();
        tokio_tungstenite::client_async(request, stream).await.map_err(|error| match error {
            Error::Http(response) => response.status(),
            other => panic!("{other}"),
        })
    }

    async fn open_own(&self) -> Console {
        let (console, response) =
            self.open(&format!("http://{}", self.at), Role::Operator).await.unwrap();
        assert_eq!(response.headers()["sec-websocket-protocol"], "godwit.console.v1");
        console
    }
}

/// Returns the output up to this text, or the reason for the close.
async fn until(console: &mut Console, text: &str) -> String {
    let mut output = String::new();
    while !output.contains(text) {
        match console.next().await.unwrap().unwrap() {
            Message::Binary(bytes) => output.push_str(std::str::from_utf8(&bytes).unwrap()),
            Message::Close(Some(close)) => {
                return format!("{}: {}", u16::from(close.code), close.reason);
            }
            Message::Ping(_) => {}
            other => panic!("{other}"),
        }
    }
    output
}

#[tokio::test(flavor = "multi_thread")]
async fn a_console_follows_its_vm_and_ends_with_it() {
    let served = Served::begin().await;
    let hosts: Vec<String> = served.cluster.fleet.agents().keys().cloned().collect();
    let mut console = served.open_own().await;
    until(&mut console, &format!("{} at {}", served.vm, hosts[0])).await;
    console.send(Message::binary(&b"uptime\r"[..])).await.unwrap();
    until(&mut console, "uptime").await;

    let to = json!({ "to": hosts[1] });
    let asked = served.cluster.root(Method::POST, &served.path("moves"), Some(to)).await;
    assert_eq!(asked.status, StatusCode::ACCEPTED, "{}", asked.body);
    until(&mut console, &format!("{} at {}", served.vm, hosts[1])).await;
    console.send(Message::binary(&b"hostname\r"[..])).await.unwrap();
    until(&mut console, "hostname").await;
    // The VM runs there before the move is over.
    let path = format!("/api/v1/vms/{}", served.vm);
    loop {
        let now: VmSummary = served.cluster.root(Method::GET, &path, None).await.read();
        if now.r#move.is_none() && now.state == VmState::Running {
            break;
        }
        tokio::task::yield_now().await;
    }

    let stopped = served
        .cluster
        .root(Method::POST, &served.path("stop"), Some(json!({ "force": true })))
        .await;
    assert_eq!(stopped.status, StatusCode::OK, "{}", stopped.body);
    let reason = until(&mut console, "never").await;
    assert!(reason.starts_with("4000: ") && reason.contains("stopped"), "{reason}");
    // The audit log is written after the responses.
    let opened = loop {
        let log: Page<AuditEntry> =
            served.cluster.root(Method::GET, "/api/v1/audit", None).await.read();
        if let Some(entry) = log.items.into_iter().find(|entry| entry.what.ends_with("/console")) {
            break entry;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!((opened.who.as_str(), opened.status), ("operator", 101));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_operators_and_the_managers_own_pages_open_a_console() {
    let served = Served::begin().await;
    let own = format!("http://{}", served.at);
    assert_eq!(served.open(&own, Role::Viewer).await.err(), Some(StatusCode::FORBIDDEN));
    for other in ["http://elsewhere.example", "null", "http://127.0.0.1:1"] {
        assert_eq!(
            served.open(other, Role::Admin).await.err(),
            Some(StatusCode::FORBIDDEN),
            "{other}"
        );
    }
    let viewer = served.cluster.managed.token(Role::Viewer).await.token;
    let log =
        served.cluster.managed.ask(Method::GET, &served.path("log"), Some(&viewer), None).await;
    assert_eq!(log.problem(), ProblemCode::Forbidden);
    let plain = served.cluster.root(Method::GET, &served.path("console"), None).await;
    assert_eq!(plain.problem(), ProblemCode::InvalidRequest);
    let missing = served.cluster.root(Method::GET, "/api/v1/vms/nothing/console", None).await;
    assert_eq!(missing.problem(), ProblemCode::NotFound);
    // A follower does not pass such a request on, because the leader would trust it.
    let managed = &served.cluster.managed;
    managed.manager.step_down();
    let mut foreign = request(Method::GET, &served.path("console"), Some(&viewer), None);
    foreign.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    foreign.headers_mut().insert("host", "m1:7800".parse().unwrap());
    foreign.headers_mut().insert("origin", "http://elsewhere.example".parse().unwrap());
    let refused = managed.send(managed.app.clone(), foreign).await;
    assert_eq!(
        refused.body["detail"],
        "a page of \"http://elsewhere.example\" must not open a connection to this manager"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_log_begins_at_a_line() {
    let served = Served::begin().await;
    let manager = &served.cluster.managed.manager;
    let read = async |tail| {
        let log = manager
            .vms
            .vm_log(&served.vm, (godwit_api::LogSource::Console, 1), tail)
            .await
            .unwrap();
        String::from_utf8(log).unwrap()
    };
    let all = read(1 << 20).await;
    assert_eq!(all.lines().count(), 100, "{all}");
    let end = read(200).await;
    assert!(end.len() <= 200 && end.starts_with('[') && all.ends_with(&end), "{end}");
    for query in ["tail=0", "source=other", "port=2", "source=qemu&port=1"] {
        let path = format!("{}?{query}", served.path("log"));
        let problem = served.cluster.root(Method::GET, &path, None).await.problem();
        assert_eq!(problem, ProblemCode::InvalidRequest, "{query}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_console_ends_with_the_token_that_opened_it() {
    let served = Served::begin().await;
    let mut console = served.open_own().await;
    until(&mut console, &served.vm).await;
    let tokens: Vec<TokenInfo> =
        served.cluster.root(Method::GET, "/api/v1/tokens", None).await.read();
    for token in tokens {
        served.cluster.root(Method::DELETE, &format!("/api/v1/tokens/{}", token.id), None).await;
    }
    let reason = until(&mut console, "never").await;
    assert!(reason.starts_with("4000: ") && reason.contains("token"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_screen_is_opened_again_at_the_new_host() {
    let served = Served::with_screen().await;
    let to = served.cluster.fleet.agents().keys().nth(1).unwrap().clone();
    let mut screen = served.open_screen().await;
    assert_eq!(until(&mut screen, "\n").await, "RFB 003.008\n");
    let request = Some(json!({ "to": to }));
    let asked = served.cluster.root(Method::POST, &served.path("moves"), request).await;
    assert_eq!(asked.status, StatusCode::ACCEPTED);
    assert_eq!(until(&mut screen, "never").await, "4001: connect again");
    // At once: the manager waits for the new host.
    let mut screen = served.open_screen().await;
    assert_eq!(until(&mut screen, "\n").await, "RFB 003.008\n");
    let vm: VmSummary =
        served.cluster.root(Method::GET, &format!("/api/v1/vms/{}", served.vm), None).await.read();
    assert_eq!(vm.host, to);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_screen_ends_with_its_vm() {
    let served = Served::with_screen().await;
    let mut screen = served.open_screen().await;
    until(&mut screen, "\n").await;
    let request = Some(json!({ "force": true }));
    let stopped = served.cluster.root(Method::POST, &served.path("stop"), request).await;
    assert_eq!(stopped.status, StatusCode::OK);
    let reason = until(&mut screen, "never").await;
    // Its host may close the screen before it reports the stop.
    assert!(reason == "4001: connect again" || reason.contains("stopped"), "{reason}");
    let refused = served.cluster.root(Method::GET, &served.path("screen"), None).await;
    assert!(refused.body["detail"].as_str().unwrap().contains("stopped"), "{}", refused.body);
    assert_eq!(refused.problem(), ProblemCode::WrongState);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_operators_see_screens() {
    let served = Served::with_screen().await;
    let own = format!("http://{}", served.at);
    let viewer = served.open_what("screen", &own, Role::Viewer).await;
    assert_eq!(viewer.err(), Some(StatusCode::FORBIDDEN));
    let foreign = served.open_what("screen", "http://elsewhere.example", Role::Admin).await;
    assert_eq!(foreign.err(), Some(StatusCode::FORBIDDEN));
    let token = served.cluster.managed.token(Role::Viewer).await.token;
    let path = served.path("screenshot");
    let refused = served.cluster.managed.ask(Method::GET, &path, Some(&token), None).await;
    assert_eq!(refused.problem(), ProblemCode::Forbidden);
    let plain = served.cluster.root(Method::GET, &served.path("screen"), None).await;
    assert_eq!(plain.problem(), ProblemCode::InvalidRequest);
    // A VM without a video device has none.
    for what in ["screen", "screenshot"] {
        let without =
            served.cluster.fleet.vms_of(served.cluster.fleet.agents().keys().next().unwrap());
        let name = &without.iter().find(|vm| vm.name != served.vm).unwrap().name;
        let path = format!("/api/v1/vms/{name}/{what}");
        let refused = served.cluster.root(Method::GET, &path, None).await;
        assert!(refused.body["remedy"].as_str().unwrap().contains("--video"), "{}", refused.body);
        assert_eq!(refused.problem(), ProblemCode::WrongState);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_takes_pictures_and_opens_screens() {
    let served = Served::with_screen().await;
    let token = served.cluster.managed.token(Role::Operator).await.token;
    let endpoint = godwit_api::Endpoint::Tcp(served.at.to_string());
    let client = godwit_api::control::ManagerClient::new(endpoint, Some(token));
    let picture = client.screenshot(&served.vm).await.unwrap();
    assert!(picture.starts_with(b"\x89PNG"), "{} bytes", picture.len());
    let mut screen = client.screen(&served.vm).await.unwrap();
    let first = screen.next().await.unwrap().unwrap();
    assert_eq!(first.into_data().as_ref(), b"RFB 003.008\n");
    for (port, greeting) in [(1, "seen at "), (2, ", port 2\r\n")] {
        let mut console = client.console(&served.vm, port).await.unwrap();
        // The greeting comes in pieces on a busy machine.
        let mut seen = String::new();
        while !seen.contains(greeting) {
            let piece = console.next().await.expect(&seen).unwrap();
            seen.push_str(piece.to_text().unwrap());
        }
    }
    let refused = client.console(&served.vm, 3).await.unwrap_err();
    assert!(refused.detail().contains("no serial port 3: it has 2"), "{refused}");
    let refused = client.screen("nothing").await.unwrap_err();
    assert!(refused.detail().contains("no host has VM"), "{refused}");
}
