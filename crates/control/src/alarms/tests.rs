//! Alarms of a whole manager, from trouble in the cluster to a webhook and a mail.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ::http::{Method, StatusCode};
use godwit_api::control::{JournalKind, Page, PlannedPower, Role};
use godwit_api::{DatastoreInfo, HostEvent, VmInfo, VmState};
use godwit_pki::{Authority, Grant, Role as CertificateRole};
use godwit_planner::placement::{Rule, RuleKind, Strength};
use godwit_store::MemoryStore;
use serde_json::json;

use super::receivers::tests::{HttpServer, SmtpServer};
use super::*;
use crate::access::authorities::Authorities;
use crate::cluster::inventory::{HostPlan, Inventory, VmPlan};
use crate::http::tests::*;
use crate::rig::{host, put_host, vm};

/// Writes a secret that nobody else can read.
fn private_file(path: &Path, secret: &str) {
    fs::write(path, secret).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

const ALARMS_PATH: &str = "/api/v1/alarms";

fn alarms(managed: &Managed) -> Arc<Alarms> {
    Arc::clone(&managed.manager.leading().unwrap().alarms)
}

async fn listed(managed: &Managed, query: &str) -> Vec<Alarm> {
    let path = format!("{ALARMS_PATH}{query}");
    managed.root(Method::GET, &path, None).await.read::<Page<Alarm>>().items
}

fn run(inventory: &mut Inventory, name: &str) {
    let plan = VmPlan { power: PlannedPower::On, labels: BTreeMap::new() };
    inventory.plan_vm(name, Some(plan));
}

fn stopped(name: &str, host: &str) -> VmInfo {
    VmInfo { state: VmState::Stopped, ..vm(name, host, None) }
}

/// Makes a host that is away, a VM that is down, a broken rule and a full datastore.
fn break_all(inventory: &mut Inventory) {
    put_host(inventory, host("away", None), &[], vec![vm("unknown", "away", None)]);
    inventory.lost("away", "no route\nto host");
    run(inventory, "unknown");
    let mut full = host("up", None);
    full.vm_dirs = vec!["/srv/vms".into()];
    let space =
        DatastoreInfo { total_bytes: 100 << 30, free_bytes: 4 << 30, ..DatastoreInfo::default() };
    full.datastores.insert("/srv/vms".into(), space);
    let vms = vec![vm("db1", "up", None), vm("db2", "up", None), stopped("web", "up")];
    put_host(inventory, full, &[], vms);
    run(inventory, "web");
    let rule = Rule {
        name: "apart".to_owned(),
        strength: Strength::Must,
        kind: RuleKind::Apart,
        vms: vec!["db1".to_owned(), "db2".to_owned()],
    };
    inventory.plan_rule("apart", Some(rule));
}

/// Ends what [`break_all`] has made.
fn fix_all(inventory: &mut Inventory) {
    put_host(inventory, host("away", None), &[], vec![vm("unknown", "away", None)]);
    put_host(inventory, host("up", None), &[], vec![vm("db1", "up", None), vm("web", "up", None)]);
}

/// A manager with a webhook and a mail server as receivers, whose certificate ends in five days.
struct Rig {
    managed: Managed,
    http: HttpServer,
    smtp: SmtpServer,
    _dir: tempfile::TempDir,
}

impl Rig {
    async fn begin() -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let (http, smtp) = (HttpServer::begin(None, &[]).await, SmtpServer::plain().await);
        let key_file = dir.path().join("key");
        private_file(&key_file, "shared key\n");
        let authority = Authority::create(&dir.path().join("ca"), "test", 400).unwrap();
        let role = CertificateRole::Operator;
        let grant = Grant { name: "m1".to_owned(), role, addresses: vec![], days: 5 };
        let path = authority.issue(&grant).unwrap().certificate;
        let config = AlarmsConfig {
            webhooks: vec![WebhookConfig { key_file: Some(key_file), ..http.config("http", None) }],
            mails: vec![smtp.config(MailTls::None, None)],
        };
        let own = vec![OwnCertificate { what: "the certificate", path }];
        let setup = AlarmSetup::open(&config, own).unwrap();
        let store = Arc::new(MemoryStore::new());
        let managed = Managed::with_all(store, Authorities::default(), setup).await;
        Rig { managed, http, smtp, _dir: dir }
    }

    async fn requested(&mut self) -> AlarmNotice {
        self.http.requests.recv().await.unwrap().notice()
    }

    /// Waits until a mail has each of these texts. Notices that wait share a mail.
    async fn mailed(&mut self, texts: &[String]) {
        let mut all = String::new();
        while !texts.iter().all(|text| all.contains(text)) {
            all.push_str(&self.smtp.mails.recv().await.unwrap().body);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_alarm_reaches_a_webhook_and_a_mailbox() {
    let mut rig = Rig::begin().await;
    let alarms = alarms(&rig.managed);
    rig.managed.manager.state.change(|inventory| {
        break_all(inventory);
        None
    });
    let now_ms = now_unix_ms();
    alarms.evaluate(now_ms).await;
    alarms.evaluate(now_ms + 61_000).await;
    // A move that is stuck needs a host that does not answer; its facts have their own test.
    let stuck = Symptom {
        key: AlarmKey { kind: AlarmKind::MoveStuck, object: "move:v1".to_owned() },
        severity: AlarmSeverity::Warning,
        text: "move v1 has made no progress for 10 min".to_owned(),
        remedy: "cancel it".to_owned(),
    };
    alarms.carry_out(AlarmVerdict::Raise(stuck), now_ms).await.unwrap();
    let mut objects = BTreeMap::new();
    let mut texts = Vec::new();
    while objects.len() < 6 {
        let notice = rig.requested().await;
        assert_eq!((notice.change, notice.manager.as_str()), (AlarmChange::Raised, "m1"));
        assert!(!notice.alarm.text.contains('\n'), "{}", notice.alarm.text);
        texts.push(notice.alarm.text.clone());
        objects.insert(notice.alarm.kind, (notice.alarm.object, notice.alarm.severity));
    }
    let (warning, critical) = (AlarmSeverity::Warning, AlarmSeverity::Critical);
    let expected = [
        (AlarmKind::HostAway, "host:away", critical),
        (AlarmKind::VmDown, "vm:web", critical),
        (AlarmKind::RuleBroken, "rule:apart", warning),
        (AlarmKind::DatastoreFilling, "datastore:/srv/vms", critical),
        (AlarmKind::CertificateEnding, "manager:m1", critical),
        (AlarmKind::MoveStuck, "move:v1", warning),
    ];
    for (kind, object, severity) in expected {
        assert_eq!(objects[&kind], (object.to_owned(), severity));
    }
    rig.mailed(&texts).await;
    // The VM on the host that is away has no alarm of its own.
    assert_eq!(listed(&rig.managed, "?object=vm:unknown").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_ends_some_time_after_its_trouble_and_its_end_is_sent() {
    let mut rig = Rig::begin().await;
    let alarms = alarms(&rig.managed);
    let state = Arc::clone(&rig.managed.manager.state);
    let mut events = state.events().listen(None);
    let change = |what: fn(&mut Inventory)| {
        state.change(|inventory| {
            what(inventory);
            None
        });
    };
    change(break_all);
    let now_ms = now_unix_ms();
    alarms.evaluate(now_ms).await;
    alarms.evaluate(now_ms + 61_000).await;
    assert_eq!(listed(&rig.managed, "").await.len(), 5);
    change(fix_all);
    // The manager's own evaluations may have begun to count earlier.
    alarms.evaluate(now_ms + 62_000).await;
    alarms.evaluate(now_ms + 162_000).await;
    // The certificate still ends.
    let left = listed(&rig.managed, "").await;
    assert_eq!((left.len(), left[0].kind), (1, AlarmKind::CertificateEnding));
    let mut ended = 0;
    while ended < 4 {
        let notice = rig.requested().await;
        if notice.change == AlarmChange::Cleared {
            assert!(notice.alarm.cleared_unix_ms.is_some());
            ended += 1;
        }
    }
    // Pages are live: the same changes are events.
    let mut cleared = 0;
    while cleared < 4 {
        let Some(Next::Events(some)) = events.next().await else { panic!() };
        cleared += some
            .iter()
            .filter(|event| {
                matches!(&event.change, Change::Alarm(alarm) if alarm.cleared_unix_ms.is_some())
            })
            .count();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_have_a_name_and_a_note_and_outlast_the_leader() {
    let managed = Managed::begin().await;
    let trouble = |managed: &Managed| {
        managed.manager.state.change(|inventory| {
            break_all(inventory);
            None
        });
    };
    trouble(&managed);
    let now_ms = now_unix_ms();
    alarms(&managed).evaluate(now_ms).await;
    alarms(&managed).evaluate(now_ms + 61_000).await;
    let all = listed(&managed, "").await;
    assert_eq!(all.len(), 4);
    assert_eq!(listed(&managed, "?severity=warning").await.len(), 1);
    let path = format!("{ALARMS_PATH}/{}/acknowledge", all[0].id);
    let note = json!({ "note": "on my\nway" });
    let token = managed.token(Role::Operator).await.token;
    let answer = managed.ask(Method::POST, &path, Some(&token), Some(note)).await;
    let acknowledged = answer.read::<Alarm>().acknowledged.unwrap();
    assert_eq!((acknowledged.by.as_str(), acknowledged.note.as_str()), ("operator", "on my way"));
    let viewer = managed.token(Role::Viewer).await.token;
    let refused = managed.ask(Method::POST, &path, Some(&viewer), Some(json!({}))).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    let long = json!({ "note": "x".repeat(501) });
    let refused = managed.root(Method::POST, &path, Some(long)).await;
    assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
    let unknown = format!("{ALARMS_PATH}/a0/acknowledge");
    let refused = managed.root(Method::POST, &unknown, Some(json!({}))).await;
    assert_eq!(refused.problem(), ProblemCode::NotFound);
    // Another manager leads, which has heard of no host yet.
    let next = Managed::with(Arc::clone(&managed.store)).await;
    alarms(&next).evaluate(now_unix_ms()).await;
    let kept = listed(&next, "?acknowledged=true").await;
    assert_eq!((kept.len(), kept[0].acknowledged.as_ref()), (1, Some(&acknowledged)));
    assert_eq!(listed(&next, "?acknowledged=false&limit=2").await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_that_becomes_critical_loses_its_acknowledgement() {
    let managed = Managed::begin().await;
    let alarms = alarms(&managed);
    let fill = |free_gib: u64| {
        managed.manager.state.change(|inventory| {
            let mut info = host("a", None);
            info.vm_dirs = vec!["/srv/vms".into()];
            let (total_bytes, free_bytes) = (100 << 30, free_gib << 30);
            let space = DatastoreInfo { total_bytes, free_bytes, ..DatastoreInfo::default() };
            info.datastores.insert("/srv/vms".into(), space);
            put_host(inventory, info, &[], vec![]);
            None
        });
    };
    fill(14);
    alarms.evaluate(now_unix_ms()).await;
    let found = listed(&managed, "?kind=datastore-filling").await;
    let [alarm] = &found[..] else { panic!("{found:?}") };
    assert_eq!(alarm.severity, AlarmSeverity::Warning);
    alarms.acknowledge(&alarm.id, "", "ana").await.unwrap();
    fill(3);
    alarms.evaluate(now_unix_ms()).await;
    let found = listed(&managed, "").await;
    let [worse] = &found[..] else { panic!("{found:?}") };
    assert_eq!((&worse.id, worse.severity), (&alarm.id, AlarmSeverity::Critical));
    assert!(worse.acknowledged.is_none() && worse.text.contains("97 %"), "{worse:?}");
}

#[test]
fn texts_have_one_line_and_one_direction() {
    assert_eq!(one_line("disks\r\nBcc: \u{202e}x"), "disks  Bcc:  x");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_vm_fails_again_and_again_does_not_fill_the_journal() {
    let managed = Managed::begin().await;
    managed.manager.state.change(|inventory| {
        put_host(inventory, host("up", None), &[], vec![stopped("web", "up")]);
        None
    });
    let alarms = alarms(&managed);
    let key = AlarmKey { kind: AlarmKind::VmDown, object: "vm:web".to_owned() };
    for _ in 0..20 {
        let symptom = Symptom {
            key: key.clone(),
            severity: AlarmSeverity::Critical,
            text: "VM web is down".to_owned(),
            remedy: "start it".to_owned(),
        };
        alarms.carry_out(AlarmVerdict::Raise(symptom), now_unix_ms()).await.unwrap();
        alarms.carry_out(AlarmVerdict::Clear(key.clone()), now_unix_ms()).await.unwrap();
    }
    let (entries, _) = alarms.means.keeper.journal_page(None, 256).await.unwrap();
    let of = |kind: JournalKind| entries.iter().filter(|entry| entry.kind == kind).count();
    assert_eq!((of(JournalKind::AlarmRaised), of(JournalKind::AlarmCleared)), (5, 5));
    assert!(alarms.reporters.lock().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_that_is_less_urgent_is_not_noted_as_raised() {
    let managed = Managed::begin().await;
    let alarms = alarms(&managed);
    let key = AlarmKey { kind: AlarmKind::DatastoreFilling, object: "datastore:fast".to_owned() };
    let symptom = |severity| Symptom {
        key: key.clone(),
        severity,
        text: "datastore fast is nearly full".to_owned(),
        remedy: "free space".to_owned(),
    };
    let now_ms = now_unix_ms();
    let critical = symptom(AlarmSeverity::Critical);
    alarms.carry_out(AlarmVerdict::Raise(critical.clone()), now_ms).await.unwrap();
    let warning = symptom(AlarmSeverity::Warning);
    alarms.carry_out(AlarmVerdict::Change(warning), now_ms).await.unwrap();
    alarms.carry_out(AlarmVerdict::Change(critical), now_ms).await.unwrap();
    let (entries, _) = alarms.means.keeper.journal_page(None, 256).await.unwrap();
    let of = |kind: JournalKind| entries.iter().filter(|entry| entry.kind == kind).count();
    assert_eq!((of(JournalKind::AlarmRaised), of(JournalKind::AlarmLowered)), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_repeats_recent_notices_that_nobody_has_acknowledged() {
    let managed = Managed::begin().await;
    let now_ms = now_unix_ms();
    for (name, at_ms) in [("old", now_ms - 2 * REPEATED_MS), ("new", now_ms), ("seen", now_ms)] {
        let symptom = Symptom {
            key: AlarmKey { kind: AlarmKind::VmDown, object: format!("vm:{name}") },
            severity: AlarmSeverity::Critical,
            text: format!("VM {name} is down"),
            remedy: "start it".to_owned(),
        };
        alarms(&managed).carry_out(AlarmVerdict::Raise(symptom), at_ms).await.unwrap();
    }
    let seen = listed(&managed, "?object=vm:seen").await.remove(0);
    alarms(&managed).acknowledge(&seen.id, "", "ana").await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let key_file = dir.path().join("key");
    private_file(&key_file, "shared key");
    let mut http = HttpServer::begin(None, &[]).await;
    let webhook = WebhookConfig { key_file: Some(key_file), ..http.config("http", None) };
    let config = AlarmsConfig { webhooks: vec![webhook], mails: vec![] };
    let setup = AlarmSetup::open(&config, vec![]).unwrap();
    let store = Arc::clone(&managed.store);
    let next = Managed::with_all(store, Authorities::default(), setup).await;
    let notice = http.requests.recv().await.unwrap().notice();
    assert_eq!((notice.change, notice.alarm.object.as_str()), (AlarmChange::Raised, "vm:new"));
    // The next notice is that of a test: the other alarms were not repeated.
    let path = format!("{ALARMS_PATH}/test");
    let test: AlarmTest = next.root(Method::POST, &path, None).await.read();
    assert!(test.receivers[0].delivered, "{test:?}");
    let notice = http.requests.recv().await.unwrap().notice();
    assert_eq!((notice.change, notice.alarm.kind), (AlarmChange::Test, AlarmKind::Test));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_test_reports_each_receiver_and_raises_no_alarm() {
    let Rig { managed, http, mut smtp, _dir } = Rig::begin().await;
    drop(http);
    let path = format!("{ALARMS_PATH}/test");
    let viewer = managed.token(Role::Viewer).await.token;
    let refused = managed.ask(Method::POST, &path, Some(&viewer), None).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    let test: AlarmTest = managed.root(Method::POST, &path, None).await.read();
    let outcomes: Vec<_> =
        test.receivers.iter().map(|one| (one.name.as_str(), one.delivered)).collect();
    assert_eq!(outcomes, [("hook", false), ("mail", true)]);
    assert!(test.receivers[0].error.is_some() && test.receivers[1].error.is_none());
    // The certificate's alarm may come first.
    while !smtp.mails.recv().await.unwrap().body.contains("a test, which root asked for") {}
    assert_eq!(listed(&managed, "?kind=test").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_in_maintenance_raises_no_alarm() {
    let managed = Managed::begin().await;
    managed.manager.state.change(|inventory| {
        put_host(inventory, host("a", None), &[], vec![]);
        let plan = inventory.host_plan("a").unwrap().clone();
        inventory.plan_host("a", HostPlan { maintenance: true, ..plan });
        inventory.lost("a", "no route to host")
    });
    let now_ms = now_unix_ms();
    alarms(&managed).evaluate(now_ms).await;
    alarms(&managed).evaluate(now_ms + 61_000).await;
    assert_eq!(listed(&managed, "").await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_hosts_matter_and_those_of_alarms_do_not() {
    let managed = Managed::begin().await;
    let state = &managed.manager.state;
    let mut listener = state.events().listen(None);
    let alarm = any_alarm();
    state.change(|_| Some(Change::Alarm(Box::new(alarm))));
    assert!(!may_matter(&listener.next().await.unwrap()));
    state.change(|inventory| {
        put_host(inventory, host("a", None), &[], vec![]);
        inventory.apply("a", HostEvent::Vm(Box::new(vm("web", "a", None))), 1)
    });
    // Events of the journal come beside it.
    while !may_matter(&listener.next().await.unwrap()) {}
}

fn any_alarm() -> Alarm {
    Alarm {
        id: "a1".to_owned(),
        kind: AlarmKind::VmDown,
        severity: AlarmSeverity::Critical,
        object: "vm:web".to_owned(),
        text: "VM web is down".to_owned(),
        remedy: "start it".to_owned(),
        raised_unix_ms: 1,
        cleared_unix_ms: None,
        acknowledged: None,
    }
}
