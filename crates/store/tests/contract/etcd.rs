//! Tests for etcd alone: expiring leases, unavailable members, certificates and passwords.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use etcd_client::PermissionType;
use godwit_store::{
    EtcdSettings, EtcdStore, EtcdTls, KeyState, Loss, Revision, Store, StoreError, Transaction,
    Written,
};

use crate::etcd_prefix::raw;
use crate::etcd_server::EtcdServer;
use crate::rig::candidate;

/// Variable by which a test gives its child the address of etcd.
const CHILD: &str = "GODWIT_TEST_ETCD";
/// A lease that a test waits for. A busy machine may take seconds for its first renewal.
const SHORT: Duration = Duration::from_secs(8);

fn short(server: &EtcdServer) -> EtcdSettings {
    EtcdSettings { lease: SHORT, ..server.settings("/godwit") }
}

/// Child process of the test below: leads until it is killed.
#[test]
#[ignore = "run by another test"]
fn child_leads_until_it_is_killed() {
    let Some(endpoint) = std::env::var_os(CHILD) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let endpoints = vec![endpoint.into_string().unwrap()];
        let settings = EtcdSettings { endpoints, lease: SHORT, ..EtcdSettings::default() };
        let store = EtcdStore::new(&settings).unwrap();
        let leads = store.lead(&candidate("child")).await.unwrap();
        let mut out = std::io::stdout();
        writeln!(out, "\nleads {}", leads.epoch()).unwrap();
        out.flush().unwrap();
        std::future::pending::<()>().await;
    });
}

#[tokio::test]
async fn another_manager_leads_after_the_leader_was_killed() {
    let Some(server) = EtcdServer::start() else { return };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "etcd::child_leads_until_it_is_killed"])
        .env(CHILD, server.endpoint())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let epoch = lines.find_map(|line| line.strip_prefix("leads ").map(str::to_owned)).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let store = EtcdStore::new(&server.settings("/godwit")).unwrap();
    let leads = store.lead(&candidate("m2")).await.unwrap();
    assert!(leads.epoch() > Revision(epoch.parse().unwrap()));
    assert_eq!(store.leader().await.unwrap().unwrap().candidate, candidate("m2"));
}

#[tokio::test]
async fn a_dropped_leadership_expires() {
    let Some(server) = EtcdServer::start() else { return };
    let first = EtcdStore::new(&short(&server)).unwrap();
    let leads = first.lead(&candidate("m1")).await.unwrap();
    drop((leads, first));
    let second = EtcdStore::new(&server.settings("/godwit")).unwrap();
    second.lead(&candidate("m2")).await.unwrap();
}

#[tokio::test]
async fn a_suspended_leader_writes_nothing_while_another_leads() {
    let Some(server) = EtcdServer::start() else { return };
    let first = EtcdStore::new(&server.settings("/godwit")).unwrap();
    let second = EtcdStore::new(&server.settings("/godwit")).unwrap();
    let old = first.lead(&candidate("m1")).await.unwrap();
    first.commit(&old, Transaction::new().put("a", "1")).await.unwrap();
    raw(&server).await.delete("/godwit/leader", None).await.unwrap();
    let new = second.lead(&candidate("m2")).await.unwrap();
    // It has not noticed, but its commit fails.
    let error = first.commit(&old, Transaction::new().put("a", "2")).await.unwrap_err();
    assert!(matches!(error, StoreError::LeadershipLost { why: Loss::Ended }), "{error}");
    second.commit(&new, Transaction::new().put("a", "3")).await.unwrap();
    assert_eq!(first.read("").await.unwrap().items[0].value, "3");
    // Resigning the old leadership does not end the new one.
    drop(old);
    second.commit(&new, Transaction::new()).await.unwrap();
}

#[tokio::test]
async fn the_leader_notices_that_its_key_was_removed() {
    let Some(server) = EtcdServer::start() else { return };
    let settings = EtcdSettings { lease: Duration::from_secs(20), ..server.settings("/godwit") };
    let store = EtcdStore::new(&settings).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    raw(&server).await.delete("/godwit/leader", None).await.unwrap();
    assert_eq!(leads.lost().await, Loss::Ended);
}

#[tokio::test]
async fn while_etcd_is_unavailable_writes_fail_and_the_leadership_ends() {
    let Some(mut server) = EtcdServer::start() else { return };
    let store = EtcdStore::new(&server.settings("/godwit")).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    let brief =
        EtcdStore::new(&EtcdSettings { prefix: "/other".to_owned(), ..short(&server) }).unwrap();
    let runs_out = brief.lead(&candidate("m2")).await.unwrap();
    server.kill();
    // The connection worked a moment ago: the response may have been lost.
    let error = store.commit(&leads, Transaction::new().put("a", "2")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    // Now there is no connection, so nothing is sent.
    let error = store.commit(&leads, Transaction::new().put("a", "3")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { written: Written::No, .. }), "{error}");
    assert!(matches!(store.read("").await, Err(StoreError::Unavailable { .. })));
    assert_eq!(runs_out.lost().await, Loss::RanOut);
    assert!(!runs_out.holds());
    let error = brief.commit(&runs_out, Transaction::new()).await.unwrap_err();
    assert!(matches!(error, StoreError::LeadershipLost { why: Loss::RanOut }), "{error}");
    assert!(server.run());
    drop(runs_out);
    brief.lead(&candidate("m2")).await.unwrap();
    assert_eq!(store.read("a").await.unwrap().items[0].value, "1");
}

#[tokio::test]
async fn a_watch_continues_after_an_outage_of_etcd() {
    let Some(mut server) = EtcdServer::start() else { return };
    let store = EtcdStore::new(&server.settings("/godwit")).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    let start = store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    let mut watch = store.watch("", start).await.unwrap();
    let second = store.commit(&leads, Transaction::new().put("a", "2")).await.unwrap();
    assert_eq!(watch.next().await.unwrap().revision, second);
    server.kill();
    assert!(matches!(watch.next().await, Err(StoreError::Unavailable { .. })));
    assert!(server.run());
    let raw = raw(&server).await.put("/godwit/items/a", "3", None).await.unwrap();
    let event = loop {
        match watch.next().await {
            Ok(event) => break event,
            Err(StoreError::Unavailable { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(event.revision, Revision(raw.header().unwrap().revision().cast_unsigned()));
    assert_eq!(event.changes[0].value.as_deref(), Some("3"));
}

#[tokio::test]
async fn a_watch_of_compacted_revisions_gets_an_error() {
    let Some(server) = EtcdServer::start() else { return };
    let store = EtcdStore::new(&server.settings("/godwit")).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    let start = store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    store.commit(&leads, Transaction::new().put("a", "2")).await.unwrap();
    let last = store.commit(&leads, Transaction::new().put("a", "3")).await.unwrap();
    raw(&server).await.compact(last.0.cast_signed(), None).await.unwrap();
    let mut watch = store.watch("", start).await.unwrap();
    assert!(matches!(watch.next().await, Err(StoreError::HistoryGone { .. })));
    assert!(matches!(watch.next().await, Err(StoreError::HistoryGone { .. })));
    // The current items are still readable.
    assert_eq!(store.read("").await.unwrap().items[0].revision, last);
}

#[tokio::test]
async fn an_unavailable_member_is_skipped() {
    let Some(server) = EtcdServer::start() else { return };
    // The port never responds; binding it keeps others out.
    let away = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", away.local_addr().unwrap());
    let closed = {
        let gone = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", gone.local_addr().unwrap())
    };
    let endpoints = vec![closed, silent, server.endpoint()];
    let store = EtcdStore::new(&EtcdSettings { endpoints, ..server.settings("/godwit") }).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    store
        .commit(&leads, Transaction::new().expect("a", KeyState::Absent).put("a", "1"))
        .await
        .unwrap();
    assert_eq!(store.read("").await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn a_wrong_password_and_a_missing_permission_are_reported() {
    let Some(server) = EtcdServer::start() else { return };
    let mut raw = raw(&server).await;
    raw.user_add("root", "r", None).await.unwrap();
    raw.user_grant_role("root", "root").await.unwrap();
    raw.user_add("manager", "m", None).await.unwrap();
    raw.role_add("manager").await.unwrap();
    let own = etcd_client::Permission::new(PermissionType::Readwrite, "/godwit/").with_prefix();
    raw.role_grant_permission("manager", own).await.unwrap();
    raw.user_grant_role("manager", "manager").await.unwrap();
    raw.auth_enable().await.unwrap();
    let with = |name: &str, password: &str, prefix: &str| {
        let user = Some((name.to_owned(), password.to_owned()));
        EtcdStore::new(&EtcdSettings { user, ..server.settings(prefix) }).unwrap()
    };
    let store = with("manager", "m", "/godwit");
    let leads = store.lead(&candidate("m1")).await.unwrap();
    store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    leads.resign().await.unwrap();
    for refused in [with("manager", "wrong", "/godwit"), with("manager", "m", "/elsewhere")] {
        let error = refused.lead(&candidate("m2")).await.unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error}");
        assert!(matches!(refused.read("").await, Err(StoreError::Refused { .. })));
    }
    // Without a user.
    let nobody = EtcdStore::new(&server.settings("/godwit")).unwrap();
    assert!(matches!(nobody.read("").await, Err(StoreError::Refused { .. })));
}

/// Creates an authority and a certificate for 127.0.0.1 signed by it; false if openssl is
/// unavailable.
fn make_certificates(dir: &Path) -> bool {
    let openssl = |arguments: &str| {
        let words = arguments.split_whitespace();
        let ran =
            Command::new("openssl").args(words).current_dir(dir).stderr(Stdio::null()).status();
        ran.is_ok_and(|status| status.success())
    };
    std::fs::write(
        dir.join("extensions"),
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n",
    )
    .unwrap();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!("req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=test -days 2"))
        && openssl(&format!("req {key} -keyout one.key -out one.csr -subj /CN=manager"))
        && openssl(
            "x509 -req -in one.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out one.pem -days 2 \
            -extfile extensions",
        )
}

#[tokio::test]
async fn both_sides_require_certificates() {
    let dir = tempfile::tempdir().unwrap();
    if !make_certificates(dir.path()) {
        println!("skipped: no openssl here that can create certificates");
        return;
    }
    let path = |name: &str| dir.path().join(name).display().to_string();
    let options = [
        format!("--cert-file={}", path("one.pem")),
        format!("--key-file={}", path("one.key")),
        format!("--trusted-ca-file={}", path("ca.pem")),
        "--client-cert-auth".to_owned(),
    ];
    let Some(server) = EtcdServer::start_with("https", dir, &options) else { return };
    let file = |name: &str| server.dir().join(name);
    let with = |identity| EtcdSettings {
        tls: Some(EtcdTls { authority: file("ca.pem"), identity }),
        ..server.settings("/godwit")
    };
    let store = EtcdStore::new(&with(Some((file("one.pem"), file("one.key"))))).unwrap();
    let leads = store.lead(&candidate("m1")).await.unwrap();
    store.commit(&leads, Transaction::new().put("a", "1")).await.unwrap();
    // A client without a certificate is refused.
    let nobody = EtcdStore::new(&with(None)).unwrap();
    assert!(matches!(nobody.read("").await, Err(StoreError::Unavailable { .. })));
    // A key that others can read is refused.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(file("one.key"), open).unwrap();
    let error = EtcdStore::new(&with(Some((file("one.pem"), file("one.key"))))).unwrap_err();
    assert!(matches!(error, StoreError::Settings { .. }), "{error}");
}
