use godwit_api::control::{Change, CheckName, PreflightRanking, Verdict};
use godwit_store::{MemoryStore, Store};
use serde_json::{Value, json};

use super::*;
use crate::access::Caller;
use crate::cluster::inventory::{HostPlan, Inventory};
use crate::journal::events::Next;
use crate::manager::Manager;
use crate::rig::{cpu, follower, host, leader, over_file, put_host, until, vm};

fn request(model: &str, without: &[&str]) -> SetCpuBaseline {
    SetCpuBaseline {
        model: model.to_owned(),
        without: without.iter().map(|host| (*host).to_owned()).collect(),
    }
}

/// Fills an inventory: hosts a and b with all features of Haswell, an old host without avx2, a host
/// without a report of its CPU, and VMs of several models.
fn cluster(inventory: &mut Inventory) {
    let (new, old) = (cpu(&["aes", "avx2"]), cpu(&["aes"]));
    let of_a = vec![vm("plain", "a", Some("Nehalem-v1")), vm("most", "a", Some("max"))];
    put_host(inventory, host("a", Some(&new)), &[], of_a);
    let mut stopped = vm("stopped", "b", Some("Nehalem-v1"));
    stopped.state = godwit_api::VmState::Stopped;
    let of_b = vec![vm("new", "b", Some("Haswell-v4")), vm("odd", "b", Some("pentium3")), stopped];
    put_host(inventory, host("b", Some(&new)), &[], of_b);
    put_host(inventory, host("old", Some(&old)), &[], vec![]);
    put_host(inventory, host("silent", None), &[], vec![]);
}

async fn managed() -> Arc<Manager> {
    let manager = leader(Arc::new(MemoryStore::new())).await;
    manager.state.change(|inventory| {
        cluster(inventory);
        None
    });
    manager
}

async fn set(
    manager: &Arc<Manager>,
    request: SetCpuBaseline,
) -> Result<CpuBaselineChange, Problem> {
    manager.baseline.set(request, false, &Caller::root()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn common_features_are_shown_with_the_names_that_all_hosts_support() {
    let manager = managed().await;
    let info = manager.baseline.show().await.unwrap();
    assert_eq!(info.baseline, None);
    assert_eq!(info.common.unwrap().cpu_model, "Nehalem-v1,+aes");
    let names: Vec<_> = info.named.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["Nehalem-v1"]);
    let fits: Vec<_> = info.hosts.iter().map(|host| (host.host.as_str(), host.fit)).collect();
    assert_eq!(fits, [("a", None), ("b", None), ("old", None), ("silent", None)]);
    assert_eq!(info.hosts[3].why.as_deref(), Some("its QEMU has not been asked yet"));
    assert_eq!(info.must_restart_count, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_returns_the_effects_and_sets_nothing() {
    let manager = managed().await;
    let plan =
        manager.baseline.set(request("Haswell-v4", &[]), true, &Caller::root()).await.unwrap();
    assert!(!plan.set);
    assert_eq!(plan.refused.as_deref(), Some("host old falls short of Haswell-v4: it lacks avx2"));
    let short: Vec<_> =
        plan.falls_short.iter().map(|host| (host.host.as_str(), host.lacks.len())).collect();
    assert_eq!((short, plan.unknown), (vec![("old", 1)], vec!["silent".to_owned()]));
    let restart: Vec<_> =
        plan.must_restart.iter().map(|vm| format!("{} {}", vm.vm, vm.why)).collect();
    assert_eq!(
        restart,
        [
            "odd no host knows the features of CPU model pentium3",
            "plain it lacks aes, avx2 of the baseline"
        ]
    );
    let lower =
        manager.baseline.set(request("Nehalem-v1", &[]), true, &Caller::root()).await.unwrap();
    assert_eq!(lower.refused, None);
    let restart: Vec<_> =
        lower.must_restart.iter().map(|vm| (vm.vm.as_str(), vm.beyond.len())).collect();
    assert_eq!(restart, [("most", 2), ("new", 2), ("odd", 0)]);
    assert_eq!(manager.baseline.show().await.unwrap().baseline, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_in_use_that_falls_short_must_be_excluded() {
    let manager = managed().await;
    let refused = set(&manager, request("Haswell-v4", &[])).await.unwrap_err();
    assert_eq!((refused.code, refused.checks.len()), (ProblemCode::BaselineUnmet, 1));
    assert!(refused.remedy.contains("--without old"), "{refused}");
    assert_eq!(manager.state.inventory().baseline(), None);
    let nobody = set(&manager, request("Haswell-v4", &["nobody"])).await.unwrap_err();
    assert_eq!(nobody.code, ProblemCode::NotFound);
    let done = set(&manager, request("Haswell-v4", &["old"])).await.unwrap();
    assert!(done.set && done.falls_short[0].host == "old");
    assert_eq!(done.baseline.without, ["old"]);
    // An empty host in maintenance does not matter.
    let manager = managed().await;
    manager.state.change(|inventory| {
        let address = "http://old:7700".to_owned();
        Some(
            inventory
                .plan_host("old", HostPlan { address, maintenance: true, ..HostPlan::default() }),
        )
    });
    assert!(set(&manager, request("Haswell-v4", &[])).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn computed_is_what_all_hosts_have_that_are_not_excluded() {
    let manager = managed().await;
    let all = set(&manager, request("computed", &[])).await.unwrap();
    assert_eq!(
        (all.baseline.cpu_model.as_str(), all.baseline.asked.as_str()),
        ("Nehalem-v1,+aes", "computed")
    );
    assert!(all.falls_short.is_empty());
    let fewer = set(&manager, request("computed", &["old"])).await.unwrap();
    assert_eq!(fewer.baseline.cpu_model, "Haswell-v4");
    // It replaces the earlier baseline in the store.
    assert_eq!(manager.baseline.show().await.unwrap().baseline, Some(fewer.baseline));
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_with_different_accelerators_have_no_common_baseline() {
    let manager = managed().await;
    manager.state.change(|inventory| {
        let mut by_tcg: Value = cpu(&["aes"]);
        by_tcg["accel"] = json!("tcg");
        put_host(inventory, host("t1", Some(&by_tcg)), &[], vec![]);
        put_host(inventory, host("t2", Some(&by_tcg)), &[], vec![]);
        None
    });
    let problem = set(&manager, request("computed", &[])).await.unwrap_err();
    assert_eq!(problem.code, ProblemCode::WrongState);
    assert!(
        problem
            .detail
            .starts_with("a, b, old run guests under KVM and t1, t2 run guests under TCG"),
        "{problem}"
    );
    let info = manager.baseline.show().await.unwrap();
    assert!(info.common.is_none() && info.no_common.unwrap().contains("two clusters"));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_baselines_are_refused_with_the_valid_names() {
    let manager = managed().await;
    for (model, why) in [
        ("", "not a valid CPU model"),
        ("Haswell-v4 -enable-kvm", "not a valid CPU model"),
        ("Haswell-v4,enforce=off", "\"enforce\" is not a feature"),
        ("Haswell-v4,hv-time", "\"hv-time\" is not a feature"),
        ("host", "no host knows the features of CPU model host"),
        ("Zen9", "no host knows the features of CPU model Zen9"),
    ] {
        let problem = set(&manager, request(model, &[])).await.unwrap_err();
        assert_eq!(problem.code, ProblemCode::InvalidRequest, "{model}");
        assert!(problem.detail.contains(why), "{problem}");
    }
    let problem = set(&manager, request("Zen9", &[])).await.unwrap_err();
    assert!(problem.remedy.contains("Nehalem-v1, Haswell-v4"), "{problem}");
    assert_eq!(manager.state.inventory().baseline(), None);
    // Every host lacks an unknown feature.
    let problem = set(&manager, request("Nehalem-v1,+warp", &[])).await.unwrap_err();
    assert!(
        problem.code == ProblemCode::BaselineUnmet
            && problem.detail.contains("warp (and 2 more hosts)")
    );
    let empty = leader(Arc::new(MemoryStore::new())).await;
    assert_eq!(
        set(&empty, request("computed", &[])).await.unwrap_err().code,
        ProblemCode::WrongState
    );
    assert_eq!(
        set(&empty, request("Nehalem-v1", &[])).await.unwrap_err().code,
        ProblemCode::WrongState
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alias_is_saved_as_its_version() {
    let manager = managed().await;
    let set = set(&manager, request("Haswell,-avx2", &[])).await.unwrap();
    assert_eq!(set.baseline.cpu_model, "Haswell-v4,-avx2");
    assert_eq!(set.baseline.asked, "Haswell,-avx2");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_vm_goes_to_a_host_that_falls_short_until_the_baseline_is_cleared() {
    let manager = managed().await;
    let fits = async |manager: &Arc<Manager>| match manager
        .requests
        .preflight("plain", None, false, None)
        .await
        .unwrap()
    {
        godwit_api::control::Preflight::Ranking(PreflightRanking { fits, .. }) => {
            fits.into_iter().map(|one| one.host).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(fits(&manager).await, ["b", "old", "silent"]);
    let mut events = manager.state.events().listen(None);
    set(&manager, request("Haswell-v4", &["old"])).await.unwrap();
    assert_eq!(fits(&manager).await, ["b", "silent"]);
    let report = manager.requests.preflight_report("plain", "old", false, None).await.unwrap();
    let check = report.checks.iter().find(|check| check.name == CheckName::CpuBaseline).unwrap();
    assert!(check.verdict == Verdict::Fail && check.evidence.contains("avx2"), "{check:?}");
    manager.baseline.clear().await.unwrap();
    assert_eq!(fits(&manager).await, ["b", "old", "silent"]);
    let again = manager.baseline.clear().await.unwrap_err();
    assert_eq!(again.code, ProblemCode::NotFound);
    let Some(Next::Events(events)) = events.next().await else { panic!("no events") };
    let is_journal = |change: &&Change| matches!(change, Change::Journal(_));
    let changes: Vec<_> =
        events.iter().map(|event| &event.change).filter(|change| !is_journal(change)).collect();
    let [Change::CpuBaseline(_), Change::Host(short), Change::CpuBaselineGone, Change::Host(free)] =
        changes[..]
    else {
        panic!("{changes:?}")
    };
    assert_eq!((short.lacks_of_baseline.len(), free.lacks_of_baseline.len()), (1, 0));
}

#[test]
fn the_baseline_outlives_its_manager_and_the_next_one_can_change_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manager.db");
    let fill = |manager: &Manager| {
        manager.state.change(|inventory| {
            cluster(inventory);
            None
        });
    };
    over_file(&path, async |manager| {
        fill(&manager);
        set(&manager, request("Haswell-v4", &["old"])).await.unwrap();
    });
    over_file(&path, async |manager| {
        // The features are saved, so they are known before any host has reported.
        let kept = manager.baseline.show().await.unwrap().baseline.unwrap();
        assert_eq!(
            (kept.cpu_model.as_str(), kept.features.len(), kept.without.len()),
            ("Haswell-v4", 4, 1)
        );
        assert_eq!(manager.state.inventory().guest_cpu_model(), Some("Haswell-v4"));
        fill(&manager);
        assert_eq!(
            manager.state.inventory().host_summary("old").unwrap().lacks_of_baseline.len(),
            1
        );
        set(&manager, request("Nehalem-v1", &[])).await.unwrap();
    });
    over_file(&path, async |manager| {
        assert_eq!(manager.state.inventory().guest_cpu_model(), Some("Nehalem-v1"));
        manager.baseline.clear().await.unwrap();
    });
    over_file(&path, async |manager| assert_eq!(manager.state.inventory().baseline(), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_manager_knows_the_baseline() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let manager = leader(Arc::clone(&store)).await;
    manager.state.change(|inventory| {
        cluster(inventory);
        None
    });
    set(&manager, request("Nehalem-v1", &[])).await.unwrap();
    let (other, _standby) = follower(&store);
    until(&other, |inventory| inventory.guest_cpu_model() == Some("Nehalem-v1")).await;
    assert_eq!(
        set(&other, request("Haswell-v4", &["old"])).await.unwrap_err().code,
        ProblemCode::NoLeader
    );
    set(&manager, request("Haswell-v4", &["old"])).await.unwrap();
    until(&other, |inventory| inventory.guest_cpu_model() == Some("Haswell-v4")).await;
    manager.baseline.clear().await.unwrap();
    until(&other, |inventory| inventory.baseline().is_none()).await;
}
