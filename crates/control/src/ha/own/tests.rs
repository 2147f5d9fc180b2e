//! What hosts show, merged and bounded; simulated hosts and lying ones.

use godwit_api::HaStanding;
use godwit_api::control::HaStatus;
use godwit_fleet::{Fleet, FleetPlan};
use http::Method;
use proptest::prelude::*;

use super::*;
use crate::vms::tests::Cluster;

const HOSTS: [&str; 3] = ["a", "b", "c"];

fn own(standing: OwnStanding, term: u64) -> OwnVm {
    OwnVm {
        vm: "manager".to_owned(),
        uuid: Uuid::from_u128(1),
        datastore: Uuid::from_u128(2 << 96),
        term,
        standing,
        holder: None,
        host: Some("a".to_owned()),
        problem: None,
    }
}

fn answer(own: Vec<OwnVm>, own_problems: Vec<String>) -> HaHost {
    HaHost {
        standing: HaStanding::Over,
        term: 0,
        lease_left_ms: None,
        watchdog: false,
        watchdog_process: false,
        answered_ms_ago: None,
        heartbeat_failures: 0,
        ending: Vec::new(),
        datastores: Vec::new(),
        vms: Vec::new(),
        own,
        own_problems,
    }
}

fn reports(shown: &[(&str, OwnVm)]) -> BTreeMap<String, Report> {
    let report = |(host, own): &(&str, OwnVm)| {
        ((*host).to_owned(), Report::of(answer(vec![own.clone()], Vec::new())))
    };
    shown.iter().map(report).collect()
}

#[test]
fn the_word_of_the_holder_counts_before_that_of_others() {
    let shown = merged(&reports(&[
        ("a", own(OwnStanding::Held, 3)),
        ("b", own(OwnStanding::Doubtful, 3)),
        ("c", own(OwnStanding::Watched, 2)),
    ]));
    let [vm] = &shown[..] else { panic!("{shown:?}") };
    assert_eq!((vm.standing, vm.term, vm.host.as_deref()), (OwnStanding::Held, 3, Some("a")));
    assert_eq!(
        (&vm.watched_by[..], &vm.confirm_at),
        (&["b".to_owned(), "c".to_owned()][..], &None)
    );
    assert_eq!(vm.problem, None);
}

#[test]
fn a_newer_term_counts_before_an_older_one() {
    let shown =
        merged(&reports(&[("a", own(OwnStanding::Stopping, 3)), ("b", own(OwnStanding::Held, 4))]));
    assert_eq!((shown[0].term, shown[0].host.as_deref()), (4, Some("b")));
    assert_eq!(shown[0].watched_by, ["a"]);
}

#[test]
fn a_doubtful_vm_raises_an_alarm_with_the_command() {
    let reports =
        reports(&[("b", own(OwnStanding::Doubtful, 3)), ("c", own(OwnStanding::Doubtful, 3))]);
    let shown = merged(&reports);
    assert_eq!(shown[0].confirm_at.as_deref(), Some("b"));
    let troubles = troubles_of(&reports);
    let [trouble] = &troubles[..] else { panic!("{troubles:?}") };
    assert_eq!((trouble.kind, &*trouble.object), (AlarmKind::HaDoubtful, "vm:manager"));
    assert!(trouble.text.contains("the host a of VM manager"), "{trouble:?}");
    let remedy = trouble.remedy.as_ref().unwrap();
    assert!(remedy.ends_with("godwit host ha confirm-off b manager --term 3"), "{remedy}");
}

#[test]
fn a_vm_that_would_not_restart_raises_an_alarm() {
    let alone = reports(&[("a", own(OwnStanding::Held, 3))]);
    let why = merged(&alone)[0].problem.clone().unwrap();
    assert!(why.contains("no other reachable host"), "{why}");
    let failed = OwnVm { problem: Some("no\nroom".to_owned()), ..own(OwnStanding::Watched, 3) };
    let both = reports(&[("a", own(OwnStanding::Held, 3)), ("b", failed)]);
    for (reports, part) in [(alone, "no other"), (both, "host b: no room")] {
        let troubles = troubles_of(&reports);
        assert_eq!((troubles.len(), troubles[0].kind), (1, AlarmKind::HaUnprotected));
        assert!(troubles[0].text.contains(part), "{troubles:?}");
        assert!(troubles[0].remedy.as_ref().unwrap().contains("--unset protect-by-agents"));
    }
}

#[test]
fn a_problem_of_a_host_raises_an_alarm_when_it_lasts() {
    let own_vm = || vec![own(OwnStanding::Held, 3)];
    let of = |own: Vec<OwnVm>| Report::of(answer(own, vec!["it is slow".to_owned()]));
    let alarms = |report: Report| {
        let watching = Report::of(answer(vec![own(OwnStanding::Watched, 3)], Vec::new()));
        let b = (!report.vms.is_empty()).then(|| ("b".to_owned(), watching));
        let all = BTreeMap::from_iter([("a".to_owned(), report)].into_iter().chain(b));
        troubles_of(&all)
    };
    assert_eq!(alarms(of(own_vm()).after(None)), []);
    let raised = alarms(of(own_vm()).after(Some(&of(own_vm()))));
    assert_eq!((raised.len(), raised[0].kind), (1, AlarmKind::HaTrouble));
    assert_eq!(raised[0].object, "host:a");
    // Without such VMs nothing depends on it.
    assert_eq!(alarms(of(Vec::new()).after(Some(&of(Vec::new())))), []);
}

#[test]
fn an_answer_counts_until_three_are_missing() {
    let mut report = Some(Report::of(answer(vec![own(OwnStanding::Held, 3)], Vec::new())));
    for is_known in [true, true, false, false] {
        report = report.and_then(Report::missed);
        assert_eq!(report.is_some(), is_known);
    }
}

fn any_text() -> impl Strategy<Value = Option<String>> {
    let text = ("\\PC{0,9}|[\u{1b}\n;`$\u{202e}a]{0,9}", 1..60_usize);
    proptest::option::of(text.prop_map(|(text, times)| text.repeat(times)))
}

fn any_own() -> impl Strategy<Value = OwnVm> {
    let standing = prop_oneof![
        Just(OwnStanding::Held),
        Just(OwnStanding::Stopping),
        Just(OwnStanding::Watched),
        Just(OwnStanding::Doubtful),
        Just(OwnStanding::Resting),
        Just(OwnStanding::Stopped),
    ];
    let vm = prop_oneof!["[a-z]{1,48}", "[a-z;` \n-]{0,60}"];
    let which = (vm, 0..3_u128, 0..2_u128);
    (which, any::<u64>(), standing, any_text(), any_text()).prop_map(
        |((vm, uuid, datastore), term, standing, host, problem)| OwnVm {
            vm,
            uuid: Uuid::from_u128(uuid),
            datastore: Uuid::from_u128(datastore),
            term,
            standing,
            holder: None,
            host,
            problem,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_hosts_show_is_bounded_and_one_line(
        lists in proptest::collection::vec(proptest::collection::vec(any_own(), 0..80), 3),
    ) {
        let report = |(host, own): (&str, Vec<OwnVm>)| {
            (host.to_owned(), Report::of(answer(own, vec!["\u{1b}x".repeat(400); 20])))
        };
        let reports: BTreeMap<String, Report> =
            HOSTS.into_iter().zip(lists).map(report).collect();
        let is_plain = |text: &str| !text.contains(is_unseen) && text.len() <= MOST_TEXT_BYTES + 30;
        for report in reports.values() {
            prop_assert!(report.vms.len() <= MOST_VMS_OF_HOST);
            prop_assert!(report.problems.len() <= MOST_PROBLEMS_OF_HOST);
            prop_assert!(report.problems.iter().all(|why| is_plain(why)));
        }
        let shown = merged(&reports);
        for vm in &shown {
            prop_assert!(VmName::new(vm.vm.as_str()).is_ok());
            prop_assert!(vm.problem.iter().chain(&vm.host).all(|text| is_plain(text)));
            let at = vm.confirm_at.as_deref();
            prop_assert_eq!(at.is_some(), vm.standing == OwnStanding::Doubtful);
            prop_assert!(at.is_none_or(|at| HOSTS.contains(&at)));
            prop_assert!(vm.watched_by.iter().all(|host| HOSTS.contains(&host.as_str())));
        }
        for trouble in troubles_of(&reports) {
            prop_assert!(trouble.remedy.iter().all(|text| is_plain(text)));
        }
    }
}

/// Has the hosts asked until the API shows what is expected. A slow machine may miss answers.
async fn until(cluster: &Cluster, is_so: impl Fn(&HaStatus) -> bool) -> HaStatus {
    loop {
        cluster.managed.manager.leading().unwrap().judges.own().ask_all().await;
        let shown: HaStatus = cluster.root(Method::GET, "/api/v1/ha", None).await.read();
        if is_so(&shown) {
            return shown;
        }
    }
}

/// Has a host show a VM of another one as doubtful.
fn doubt(fleet: &Fleet, host: &str, former: &str) {
    let doubtful = OwnVm { host: Some(former.to_owned()), ..own(OwnStanding::Doubtful, 3) };
    fleet.set_own(host, vec![doubtful], vec!["it is slow".to_owned()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manager_shows_vms_of_agents_also_while_its_own_ha_is_off() {
    let plan = FleetPlan { hosts: 3, vms: 1, datastores: true, ..FleetPlan::default() };
    let cluster = Cluster::of(plan.clone()).await;
    let (first, second) = (plan.host_name(0), plan.host_name(1));
    cluster.fleet.protect_by_agents(&first, &plan.vm_name(0));
    let is_whole = |shown: &HaStatus| shown.own.first().is_some_and(|vm| vm.watched_by.len() == 2);
    let shown = until(&cluster, is_whole).await;
    assert!(!shown.settings.enabled);
    let [vm] = &shown.own[..] else { panic!("{shown:?}") };
    assert_eq!((&vm.vm, vm.standing), (&plan.vm_name(0), OwnStanding::Held));
    assert_eq!((vm.host.as_ref(), &*vm.datastore), (Some(&first), "/srv/shared"));
    assert_eq!(vm.problem, None);
    // Its host ends, and another one is in doubt of the host of another VM.
    cluster.fleet.set_own(&first, Vec::new(), Vec::new());
    doubt(&cluster.fleet, &second, &first);
    let shown = until(&cluster, |shown| shown.own.len() == 2).await;
    assert_eq!((&*shown.own[0].vm, shown.own[0].confirm_at.as_ref()), ("manager", Some(&second)));
    assert_eq!(shown.own_problems, [format!("host {second}: it is slow")]);
    let troubles = cluster.managed.manager.ha.troubles.all();
    assert!(troubles.iter().any(|one| one.kind == AlarmKind::HaDoubtful), "{troubles:?}");
    cluster.fleet.set_own(&second, Vec::new(), Vec::new());
    // The third host still lists its VM.
    until(&cluster, |shown| shown.own.len() == 1 && shown.own_problems.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_a_datastore_is_not_asked() {
    let plan = FleetPlan { hosts: 1, vms: 0, ..FleetPlan::default() };
    let cluster = Cluster::of(plan.clone()).await;
    doubt(&cluster.fleet, &plan.host_name(0), "x");
    let shown = until(&cluster, |_| true).await;
    assert_eq!((shown.own, shown.own_problems), (Vec::new(), Vec::new()));
}
