use super::*;
use crate::rig;

fn vm(name: &str, state: VmState, epoch: u64) -> HostEvent {
    // The manager ignores the host name in a report.
    HostEvent::Vm(Box::new(VmInfo { state, epoch, ..rig::vm(name, "liar", None) }))
}

fn with_hosts(names: &[&str]) -> Inventory {
    let mut inventory = Inventory::default();
    for name in names {
        inventory.plan_host(
            name,
            HostPlan { address: format!("https://{name}:7700"), ..HostPlan::default() },
        );
        inventory.reached(name);
    }
    inventory
}

fn all(limit: usize) -> Cursor {
    Cursor { behind: None, limit }
}

fn names(inventory: &Inventory, filter: &VmFilter) -> Vec<String> {
    inventory.vms(filter, &all(1000)).items.into_iter().map(|vm| vm.name).collect()
}

#[test]
fn a_host_is_up_once_it_has_reported_everything() {
    let mut inventory = with_hosts(&["a"]);
    assert_eq!(inventory.host("a").unwrap().summary.state, HostState::Unknown);
    inventory.apply("a", vm("web", VmState::Running, 1), 5);
    assert!(!inventory.vm("web").unwrap().summary.is_current);
    inventory.apply("a", HostEvent::Known, 6);
    let host = inventory.host("a").unwrap();
    assert_eq!(
        (host.summary.state, host.summary.vms, host.heard_unix_ms),
        (HostState::Up, 1, Some(6))
    );
    let web = inventory.vm("web").unwrap();
    assert_eq!((web.summary.host.as_str(), web.summary.is_current), ("a", true));
}

#[test]
fn a_vm_that_is_not_reported_after_a_reconnection_is_gone() {
    let mut inventory = with_hosts(&["a"]);
    for event in [vm("web", VmState::Running, 1), vm("db", VmState::Running, 1), HostEvent::Known] {
        inventory.apply("a", event, 1);
    }
    inventory.lost("a", "no answer");
    assert_eq!(inventory.host("a").unwrap().summary.state, HostState::Away);
    // The last report stays visible, and is not current.
    assert_eq!(names(&inventory, &VmFilter::default()), ["db", "web"]);
    assert!(!inventory.vm("web").unwrap().summary.is_current);
    inventory.reached("a");
    inventory.apply("a", vm("web", VmState::Running, 1), 2);
    let changes = inventory.apply("a", HostEvent::Known, 2);
    assert!(changes.contains(&Change::VmGone("db".into())), "{changes:?}");
    assert_eq!(names(&inventory, &VmFilter::default()), ["web"]);
}

#[test]
fn a_second_running_guest_of_one_name_is_shown() {
    let mut inventory = with_hosts(&["a", "b"]);
    let twice = |inventory: &Inventory| inventory.vm("web").unwrap().summary.also_runs_at;
    inventory.apply("b", vm("web", VmState::Running, 1), 1);
    inventory.apply("a", HostEvent::Known, 1);
    inventory.apply("b", HostEvent::Known, 1);
    // A source of page-in, which keeps pages that the guest lacks, reports it as paused.
    for other in [
        VmState::MigratingOut,
        VmState::Paused,
        VmState::Stopped,
        VmState::Failed,
        VmState::Stopping,
    ] {
        inventory.apply("a", vm("web", other, 0), 1);
        assert_eq!(twice(&inventory), Vec::<String>::new(), "{other}");
    }
    inventory.apply("a", vm("web", VmState::Running, 0), 1);
    assert_eq!(twice(&inventory), ["a"]);
    // An unreachable host's report does not count as running.
    inventory.lost("a", "no answer");
    assert_eq!(twice(&inventory), Vec::<String>::new());
}

#[test]
fn a_moving_vm_is_on_the_host_where_it_runs() {
    let mut inventory = with_hosts(&["a", "b"]);
    inventory.apply("a", vm("web", VmState::MigratingOut, 4), 1);
    inventory.apply("b", vm("web", VmState::MigratingIn, 5), 1);
    let web = inventory.vm("web").unwrap();
    assert_eq!((web.summary.host.as_str(), web.also_at), ("a", vec!["b".to_owned()]));
    inventory.plan_move("web", Some("v1".into()), Some("b".into()));
    inventory.apply("b", vm("web", VmState::Running, 5), 1);
    inventory.apply("a", vm("web", VmState::Stopping, 4), 1);
    let web = inventory.vm("web").unwrap();
    assert_eq!((web.summary.host.as_str(), web.summary.conflicts), ("b", Vec::<String>::new()));
    inventory.apply("a", HostEvent::VmGone("web".into()), 1);
    assert_eq!(inventory.vm("web").unwrap().also_at, Vec::<String>::new());
    assert_eq!(inventory.vms_of("b").count(), 1);
    assert_eq!(inventory.vms_of("a").count(), 0);
}

#[test]
fn a_host_has_all_vms_that_it_reports_even_if_another_host_holds_their_names() {
    let mut inventory = with_hosts(&["a", "b"]);
    inventory.apply("a", vm("web", VmState::Running, 7), 1);
    inventory.apply("b", vm("web", VmState::Running, 1), 1);
    assert_eq!((inventory.vms_of("a").count(), inventory.vms_of("b").count()), (1, 1));
}

#[test]
fn a_change_that_the_summary_does_not_show_is_not_published() {
    let mut inventory = with_hosts(&["a"]);
    let gone = || HostEvent::VmGone("web".into());
    assert!(inventory.apply("a", gone(), 1).is_empty(), "no host has reported it");
    assert_eq!(inventory.apply("a", vm("web", VmState::Running, 1), 1).len(), 1);
    assert!(inventory.apply("a", vm("web", VmState::Running, 2), 2).is_empty());
    assert_eq!(inventory.vm_info("web").unwrap().epoch, 2);
    assert_eq!(inventory.apply("a", vm("web", VmState::MigratingOut, 2), 3).len(), 1);
    assert!(inventory.plan_move("web", None, None).is_empty());
    assert_eq!(inventory.apply("a", gone(), 4), [Change::VmGone("web".into())]);
    assert!(inventory.plan_move("web", Some("v1".into()), None).is_empty());
}

#[test]
fn pages_follow_each_other_and_count_everything() {
    let mut inventory = with_hosts(&["a"]);
    for number in 0..25 {
        inventory.apply("a", vm(&format!("vm{number:02}"), VmState::Running, 1), 1);
    }
    let filter = VmFilter { search: Some("vm".into()), ..VmFilter::default() };
    let (mut seen, mut cursor) = (Vec::new(), all(10));
    loop {
        let page = inventory.vms(&filter, &cursor);
        assert_eq!(page.total, 25);
        seen.extend(page.items.into_iter().map(|vm| vm.name));
        let Some(next) = page.next else { break };
        cursor.behind = Some(next);
    }
    assert_eq!(seen, (0..25).map(|number| format!("vm{number:02}")).collect::<Vec<_>>());
}

#[test]
fn filters_select_by_host_state_and_label() {
    let mut inventory = with_hosts(&["a", "b"]);
    inventory.apply("a", vm("web", VmState::Running, 1), 1);
    inventory.apply("b", vm("db", VmState::Stopped, 1), 1);
    let labels = BTreeMap::from([("tier".to_owned(), "front".to_owned())]);
    inventory.plan_vm("web", Some(VmPlan { power: PlannedPower::On, labels }));
    let of_host = VmFilter { host: Some("a".into()), ..VmFilter::default() };
    assert_eq!(names(&inventory, &of_host), ["web"]);
    let tagged = VmFilter { tag: Some("prod".into()), ..VmFilter::default() };
    assert!(names(&inventory, &tagged).is_empty());
    let stopped = VmFilter { state: Some(VmState::Stopped), ..VmFilter::default() };
    assert_eq!(names(&inventory, &stopped), ["db"]);
    let label = VmFilter { label: Some(("tier".into(), "front".into())), ..VmFilter::default() };
    assert_eq!(names(&inventory, &label), ["web"]);
    let away = HostFilter { state: Some(HostState::Away), ..HostFilter::default() };
    assert!(inventory.hosts(&away, &all(10)).items.is_empty());
}

#[test]
fn a_forgotten_hosts_reports_are_forgotten_too() {
    let mut inventory = with_hosts(&["a"]);
    inventory.apply("a", vm("web", VmState::Running, 1), 1);
    let changes = inventory.forget_host("a");
    assert_eq!(changes, [Change::VmGone("web".into()), Change::HostGone("a".into())]);
    assert!(inventory.apply("a", vm("web", VmState::Running, 1), 1).is_empty());
    assert!(inventory.vm("web").is_none());
}

#[test]
fn a_host_that_reports_too_much_is_faulty_and_costs_no_more() {
    let mut inventory = with_hosts(&["a", "b"]);
    inventory.apply("b", vm("web", VmState::Running, 1), 1);
    let fault = |inventory: &Inventory| inventory.host("a").unwrap().summary.fault;
    for number in 0..MOST_VMS {
        assert!(
            inventory.try_apply("a", vm(&format!("vm{number}"), VmState::Running, 1), 1).is_ok()
        );
    }
    inventory.apply("a", vm("vm0", VmState::Paused, 1), 1);
    assert_eq!(fault(&inventory), None);
    inventory.apply("a", vm("one-more", VmState::Running, 1), 1);
    assert_eq!(fault(&inventory).unwrap(), "it reports more than 8192 VMs");
    assert!(inventory.vm("one-more").is_none());
    // After a refused report, the end of the host's reports does not make it up.
    inventory.apply("a", HostEvent::Known, 1);
    let host = inventory.host("a").unwrap();
    assert_eq!((host.summary.state, host.refused_reports), (HostState::Unknown, 1));
    // A new connection clears the fault if all reports are valid.
    inventory.reached("a");
    for number in 0..20 {
        inventory.apply("a", vm(&format!("vm{number}"), VmState::Running, 1), 1);
    }
    inventory.apply("a", HostEvent::Known, 1);
    assert_eq!((fault(&inventory), inventory.host("a").unwrap().summary.vms), (None, 20));
    assert_eq!(inventory.host("b").unwrap().summary.fault, None);
}

#[test]
fn the_bytes_of_all_vms_of_a_host_are_limited() {
    let mut inventory = with_hosts(&["a"]);
    let large = |number: usize| {
        let HostEvent::Vm(mut info) = vm(&format!("vm{number}"), VmState::Running, 1) else {
            unreachable!()
        };
        let path = format!("/{}", "d".repeat(7 << 10));
        let disk = serde_json::json!({ "path": path, "format": "raw" });
        info.spec.disks = vec![serde_json::from_value(disk).unwrap(); 7];
        HostEvent::Vm(info)
    };
    let taken = (0..MOST_VMS)
        .take_while(|number| inventory.try_apply("a", large(*number), 1).is_ok())
        .count();
    assert!((300..400).contains(&taken), "{taken}");
    // A VM that is reported again counts once.
    assert!((0..10).all(|_| inventory.try_apply("a", large(0), 1).is_ok()));
}
