use axum::http::Method;
use godwit_api::control::{
    CreateManagedVm, HostState, HostedVm, ManagedVm, PlannedPower, Problem, ProblemCode, Role,
};
use godwit_api::{HostEvent, VmInfo, VmState};
use godwit_fleet::{Fleet, FleetPlan};
use godwit_planner::placement::{Hosts, Rule, RuleKind, Strength};
use godwit_qemu::Firmware;
use serde_json::{Value, json};

use crate::access::Caller;
use crate::cluster::inventory::HostPlan;
use crate::http::tests::{Answer, Managed};

const VMS: &str = "/api/v1/vms";

/// A manager of simulated hosts, all of which have reported.
pub(crate) struct Cluster {
    pub(crate) managed: Managed,
    pub(crate) fleet: Fleet,
}

impl Cluster {
    pub(crate) async fn begin(hosts: usize, vms: usize) -> Cluster {
        Cluster::of(FleetPlan { hosts, vms, hosts_with_vms: 1, ..FleetPlan::default() }).await
    }

    pub(crate) async fn of(plan: FleetPlan) -> Cluster {
        let hosts = plan.hosts;
        let cluster =
            Cluster { managed: Managed::begin().await, fleet: Fleet::begin(plan).await.unwrap() };
        for (name, address) in cluster.fleet.agents() {
            let host = json!({ "name": name, "address": address });
            let added = cluster.root(Method::POST, "/api/v1/hosts", Some(host)).await;
            assert_eq!(added.status, 201, "{}", added.body);
        }
        cluster.until(|cluster| cluster.inventory(|all| all.host_counts().1 == hosts as u64)).await;
        cluster
    }

    pub(crate) async fn root(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        self.managed.root(method, path, body).await
    }

    fn inventory<T>(&self, ask: impl FnOnce(&crate::cluster::inventory::Inventory) -> T) -> T {
        ask(&self.managed.manager.state.inventory())
    }

    fn change<C: IntoIterator<Item = godwit_api::control::Change>>(
        &self,
        change: impl FnOnce(&mut crate::cluster::inventory::Inventory) -> C,
    ) {
        self.managed.manager.state.change(change);
    }

    /// Waits until a condition holds; events trigger the checks.
    pub(crate) async fn until(&self, is_so: impl Fn(&Cluster) -> bool) {
        let mut news = self.managed.manager.state.events().listen(None);
        while !is_so(self) {
            news.next().await.unwrap();
        }
    }

    /// Returns the hosts whose agents have a VM of that name.
    fn at(&self, vm: &str) -> Vec<String> {
        let hosts = self.fleet.agents().keys();
        let has = |host: &&String| self.fleet.vms_of(host).iter().any(|info| info.name == vm);
        hosts.filter(has).cloned().collect()
    }

    fn planned(&self, vm: &str) -> Option<PlannedPower> {
        self.inventory(|all| all.vm_plan(vm).map(|plan| plan.power))
    }

    /// Checks that nothing of the VM exists anywhere.
    async fn assert_unmade(&self, vm: &str) {
        assert_eq!((self.at(vm), self.planned(vm)), (Vec::new(), None));
        let keeper = std::sync::Arc::clone(&self.managed.manager.leading().unwrap().keeper);
        assert!(keeper.find(crate::vms::record::VMS, vm).await.unwrap().is_none());
    }
}

fn web() -> Value {
    json!({ "spec": { "name": "web", "memory": "1GiB", "vcpus": 2, "kernel": "/srv/vmlinuz" } })
}

fn with(mut request: Value, change: Value) -> Value {
    let Value::Object(change) = change else { panic!("{change}") };
    request.as_object_mut().unwrap().extend(change);
    request
}

fn with_spec(change: Value) -> Value {
    let mut request = web();
    let Value::Object(change) = change else { panic!("{change}") };
    request["spec"].as_object_mut().unwrap().extend(change);
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_is_placed_created_started_stopped_and_deleted() {
    let cluster = Cluster::begin(3, 20).await;
    let request = with(web(), json!({ "labels": { "app": "shop" } }));
    let made = cluster.root(Method::POST, VMS, Some(request)).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let made: HostedVm = made.read();
    // All other VMs are on the first host.
    assert_eq!(cluster.at("web").as_slice(), std::slice::from_ref(&made.info.host));
    assert_ne!(made.info.host, "host-0000");
    assert!(made.host_reason.is_some_and(|why| !why.is_empty()));
    // The caller sees it at once.
    let shown: ManagedVm = cluster.root(Method::GET, "/api/v1/vms/web", None).await.read();
    assert_eq!(
        (shown.planned, shown.summary.labels["app"].as_str()),
        (Some(PlannedPower::On), "shop")
    );
    let known =
        |cluster: &Cluster| cluster.inventory(|all| all.vm_info("web").map(|info| info.state));
    assert_eq!(known(&cluster), Some(VmState::Running));

    let running = cluster.root(Method::DELETE, "/api/v1/vms/web", None).await;
    assert_eq!(running.problem(), ProblemCode::WrongState);
    let stopped =
        cluster.root(Method::POST, "/api/v1/vms/web/stop", Some(json!({ "grace_ms": 5 }))).await;
    assert_eq!((stopped.status.as_u16(), stopped.body["state"].as_str()), (200, Some("stopped")));
    assert_eq!(
        (cluster.planned("web"), known(&cluster)),
        (Some(PlannedPower::Off), Some(VmState::Stopped))
    );
    // Without a body, the defaults apply.
    let started = cluster.root(Method::POST, "/api/v1/vms/web/start", None).await;
    assert_eq!((started.status.as_u16(), started.body["state"].as_str()), (200, Some("running")));
    assert_eq!(
        (cluster.planned("web"), known(&cluster)),
        (Some(PlannedPower::On), Some(VmState::Running))
    );
    let deleted = cluster.root(Method::DELETE, "/api/v1/vms/web?force=true", None).await;
    assert_eq!(deleted.status, 204, "{}", deleted.body);
    assert_eq!(known(&cluster), None);
    cluster.assert_unmade("web").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_vm_is_changed_and_a_running_one_only_in_its_labels() {
    let cluster = Cluster::begin(1, 1).await;
    let (vm, discovered) = ("/api/v1/vms/web", "/api/v1/vms/vm-00000");
    let request = with(web(), json!({ "labels": { "app": "shop" }, "start": false }));
    assert_eq!(cluster.root(Method::POST, VMS, Some(request)).await.status, 201);
    let change = json!({
        "spec": { "vcpus": 4, "kernel": null, "disks": [{ "path": "/srv/d", "format": "raw" }] },
        "labels": { "tier": "front", "app": null }
    });
    let changed = cluster.root(Method::PATCH, vm, Some(change)).await;
    assert_eq!(changed.status, 200, "{}", changed.body);
    let changed: ManagedVm = changed.read();
    assert_eq!((changed.info.spec.vcpus, &changed.info.spec.kernel), (4, &None));
    assert_eq!(
        changed.summary.labels.into_iter().collect::<Vec<_>>(),
        [("tier".to_owned(), "front".to_owned())]
    );
    assert_eq!(changed.planned, Some(PlannedPower::Off));

    let restarted = cluster.root(Method::POST, &format!("{vm}/restart"), None).await;
    assert_eq!(restarted.body["state"], "running", "{}", restarted.body);
    assert_eq!(cluster.planned("web"), Some(PlannedPower::On));
    // A refused specification changes no label either.
    let both = json!({ "spec": { "vcpus": 8 }, "labels": { "tier": null } });
    let refused = cluster.root(Method::PATCH, vm, Some(both)).await;
    assert_eq!(refused.problem(), ProblemCode::WrongState);
    let shown: ManagedVm = cluster.root(Method::GET, vm, None).await.read();
    assert_eq!((shown.info.spec.vcpus, shown.summary.labels.len()), (4, 1));

    let labels = json!({ "labels": { "tier": "back" } });
    let changed = cluster.root(Method::PATCH, discovered, Some(labels)).await;
    assert_eq!(changed.body["labels"]["tier"], "back", "{}", changed.body);
    assert_eq!(cluster.planned("vm-00000"), Some(PlannedPower::On));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_cloned_on_its_host_and_deleted_with_its_disks() {
    let cluster = Cluster::begin(2, 2).await;
    let disks = json!([{ "path": "/srv/gold.qcow2", "format": "qcow2" }]);
    let nics = json!([{ "network": "lan", "address": "10.64.7.7" }]);
    let mut gold = with_spec(json!({ "name": "gold", "disks": disks, "nics": nics }));
    gold["start"] = json!(false);
    let made = cluster.root(Method::POST, VMS, Some(gold)).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let template = async |on: bool| {
        let path = "/api/v1/vms/gold/template";
        cluster.root(Method::PUT, path, Some(json!({ "template": on }))).await
    };
    assert_eq!(template(true).await.body["state"], "template");
    let clone = async |request: Value| {
        cluster.root(Method::POST, "/api/v1/vms/gold/clone", Some(request)).await
    };
    // An address of another VM is refused; without one, the clone has none.
    let refused = clone(json!({ "name": "one", "addresses": ["10.64.7.7"] })).await;
    assert_eq!(refused.problem(), ProblemCode::AlreadyExists);
    cluster.assert_unmade("one").await;
    let request = json!({ "name": "one", "start": true, "labels": { "app": "shop" } });
    let one = clone(request.clone()).await;
    assert_eq!((one.status.as_u16(), &one.body["state"]), (201, &json!("running")), "{}", one.body);
    assert_eq!(cluster.at("one"), cluster.at("gold"));
    assert_eq!(cluster.planned("one"), Some(PlannedPower::On));
    let (one, gold): (HostedVm, ManagedVm) =
        (one.read(), cluster.root(Method::GET, "/api/v1/vms/gold", None).await.read());
    assert_ne!(one.info.spec.uuid, gold.info.spec.uuid);
    assert_eq!((one.info.spec.nics.len(), one.info.spec.nics[0].address), (1, None));
    assert_eq!(clone(request).await.problem(), ProblemCode::AlreadyExists);
    assert_eq!(clone(json!({ "name": "../one" })).await.problem(), ProblemCode::InvalidRequest);

    let listed = cluster.root(Method::GET, "/api/v1/vms/gold/snapshots", None).await;
    assert_eq!(listed.body, json!([]));
    let images = cluster.root(Method::GET, "/api/v1/vms/gold/images", None).await;
    // The simulated agent says that it is the VM's own; the clone names the same image.
    assert_eq!(images.status, 200, "{}", images.body);
    let deleted = cluster.root(Method::DELETE, "/api/v1/vms/gold?delete_disks=true", None).await;
    assert_eq!(deleted.status, 200, "{}", deleted.body);
    // It has no images, so it has none to delete.
    assert_eq!(deleted.body["kept"][0]["path"], "/srv/gold.qcow2", "{}", deleted.body);
    cluster.assert_unmade("gold").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_is_suspended_resumed_and_gets_another_name() {
    let cluster = Cluster::begin(2, 0).await;
    let post = async |path: &str, body| cluster.root(Method::POST, path, body).await;
    for name in ["web", "other"] {
        let request = with_spec(json!({ "name": name }));
        let request = with(request, json!({ "labels": { "app": "shop" } }));
        let made = post(VMS, Some(request)).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }
    let suspended = post("/api/v1/vms/web/suspend", None).await;
    assert_eq!(suspended.body["state"], "suspended", "{}", suspended.body);
    assert_eq!(cluster.planned("web"), Some(PlannedPower::Off));
    let refused = post("/api/v1/vms/web/moves", Some(json!({}))).await;
    assert!(refused.status.is_client_error(), "{}", refused.body);
    let resumed = post("/api/v1/vms/web/start", None).await;
    assert_eq!(resumed.body["state"], "running", "{}", resumed.body);
    assert_eq!(cluster.planned("web"), Some(PlannedPower::On));

    let rename = async |vm: &str, to: &str| {
        post(&format!("/api/v1/vms/{vm}/rename"), Some(json!({ "name": to }))).await
    };
    assert_eq!(rename("web", "shop").await.problem(), ProblemCode::WrongState);
    post("/api/v1/vms/web/stop", None).await;
    assert_eq!(rename("web", "other").await.problem(), ProblemCode::AlreadyExists);
    assert_eq!(rename("web", "../shop").await.problem(), ProblemCode::InvalidRequest);
    let rule = json!({ "name": "pair", "kind": "together", "vms": ["web", "other"] });
    assert_eq!(post("/api/v1/rules", Some(rule)).await.status, 201);
    let refused = rename("web", "shop").await;
    assert!(refused.body["detail"].as_str().unwrap().contains("pair"), "{}", refused.body);
    assert_eq!(cluster.root(Method::DELETE, "/api/v1/rules/pair", None).await.status, 204);
    assert!(!cluster.at("web").is_empty() && cluster.at("shop").is_empty());

    let renamed = rename("web", "shop").await;
    assert_eq!(renamed.body["name"], "shop", "{}", renamed.body);
    let shown: ManagedVm = cluster.root(Method::GET, "/api/v1/vms/shop", None).await.read();
    assert_eq!(shown.summary.labels["app"], "shop");
    assert_eq!(cluster.planned("shop"), Some(PlannedPower::Off));
    cluster.assert_unmade("web").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_checked_as_a_creation_is() {
    let cluster = Cluster::begin(2, 0).await;
    let nic = json!({ "network": "lan", "mac": "52:54:00:00:00:01" });
    let other = with_spec(json!({ "name": "other", "nics": [nic] }));
    assert_eq!(cluster.root(Method::POST, VMS, Some(other)).await.status, 201);
    let request = with(web(), json!({ "start": false }));
    assert_eq!(cluster.root(Method::POST, VMS, Some(request)).await.status, 201);
    let operator = Caller::named("op", Role::Operator);
    let change = async |spec: Value, caller: &Caller| {
        let request = serde_json::from_value(json!({ "spec": spec })).unwrap();
        cluster.managed.manager.vms.change_vm("web", request, caller).await
    };
    for (spec, code) in [
        (json!({ "nics": [nic] }), ProblemCode::AlreadyExists),
        (json!({ "extra_devices": ["vfio-pci"] }), ProblemCode::Forbidden),
        (json!({ "name": "other" }), ProblemCode::InvalidRequest),
        (json!({ "memroy": "1GiB" }), ProblemCode::InvalidRequest),
        (json!({ "vcpus": 0 }), ProblemCode::InvalidRequest),
    ] {
        let refused: Problem = change(spec.clone(), &operator).await.unwrap_err();
        assert_eq!(refused.code, code, "{spec}: {refused:?}");
    }
    change(json!({ "extra_devices": ["virtio-rng-pci"] }), &Caller::root()).await.unwrap();
    // An operator may change a VM that has a device by an admin.
    change(json!({ "vcpus": 3 }), &operator).await.unwrap();
    assert!(cluster.fleet.counts().held_to_vm_dirs.contains("web"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_from_cloud_init_is_refused_if_another_vm_has_it() {
    let cluster = Cluster::begin(2, 0).await;
    let request = |name: &str, address: &str| {
        Some(with_spec(json!({
            "name": name, "nics": [{ "network": "lan" }],
            "cloud_init": { "network": [{ "addresses": [address] }] },
        })))
    };
    let made = cluster.root(Method::POST, VMS, request("web", "10.9.0.5/16")).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let refused = cluster.root(Method::POST, VMS, request("db", "10.9.0.5/24")).await;
    let detail = refused.body["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("VM \"web\" has the address 10.9.0.5"), "{detail}");
    assert_eq!(refused.problem(), ProblemCode::AlreadyExists);
    cluster.assert_unmade("db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_a_vm_leaves_nearly_full_is_warned_of() {
    let cluster = Cluster::begin(1, 0).await;
    let total = cluster.inventory(|all| all.host_info("host-0000").unwrap().memory_total_bytes);
    let memory = format!("{}MiB", (total >> 20) - 64);
    let request = with_spec(json!({ "memory": memory }));
    let request = with(request, json!({ "host": "host-0000", "start": false }));
    let made = cluster.root(Method::POST, VMS, Some(request)).await;
    let made: HostedVm = made.read();
    let why = made.host_reason.unwrap();
    assert!(why.starts_with("nearly full: 64 MiB of"), "{why}");
    assert!(why.contains("give the VM less memory"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_are_found_by_a_tag_of_their_specification() {
    let cluster = Cluster::begin(1, 0).await;
    let request = with_spec(json!({ "tags": ["prod", "shop"], "description": "The shop" }));
    assert_eq!(cluster.root(Method::POST, VMS, Some(request)).await.status, 201);
    let other = with_spec(json!({ "name": "other", "tags": ["test"] }));
    assert_eq!(cluster.root(Method::POST, VMS, Some(other)).await.status, 201);
    let found = cluster.root(Method::GET, "/api/v1/vms?tag=shop", None).await;
    assert_eq!(found.body["total"], 1, "{}", found.body);
    assert_eq!(found.body["items"][0]["tags"], json!(["prod", "shop"]));
    let wrong = with_spec(json!({ "name": "third", "tags": ["a b"] }));
    let refused = cluster.root(Method::POST, VMS, Some(wrong)).await;
    assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_creation_leaves_nothing() {
    let cluster = Cluster::begin(2, 1).await;
    let disk = json!([{ "path": "/srv/../etc/shadow", "format": "raw" }]);
    for (request, code, word) in [
        (with(web(), json!({ "host": "nowhere" })), ProblemCode::NotFound, "nowhere"),
        (with_spec(json!({ "kernel": null })), ProblemCode::InvalidRequest, "boot"),
        (with_spec(json!({ "vcpus": 0 })), ProblemCode::InvalidRequest, "vCPU"),
        (with_spec(json!({ "memory": "4096GiB" })), ProblemCode::NoHost, "memory"),
        (
            with_spec(json!({ "nics": [{ "network": "prod" }] })),
            ProblemCode::NoHost,
            "no host has network",
        ),
        (with_spec(json!({ "cpu_model": "Westmere-v1,+avx512f" })), ProblemCode::NoHost, "avx512f"),
        (with_spec(json!({ "name": "vm-00000" })), ProblemCode::AlreadyExists, "host-0000"),
        (with(web(), json!({ "hots": "a" })), ProblemCode::InvalidRequest, "hots"),
        (with_spec(json!({ "disks": disk, "colour": 1 })), ProblemCode::InvalidRequest, "colour"),
    ] {
        let answer = cluster.root(Method::POST, VMS, Some(request.clone())).await;
        let detail = answer.body["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(word), "{request}: {detail}");
        assert_eq!(answer.problem(), code, "{request}");
    }
    cluster.assert_unmade("web").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_cannot_use_any_file_program_or_device_of_a_host() {
    let cluster = Cluster::begin(1, 0).await;
    let operator = Caller::named("op", Role::Operator);
    let ask = async |request: Value, caller: &Caller| {
        let request: CreateManagedVm = serde_json::from_value(request).unwrap();
        cluster.managed.manager.vms.create_vm(request, caller).await
    };
    let mut info = cluster.inventory(|all| all.host_info("host-0000").unwrap().as_ref().clone());
    info.vm_dirs = vec!["/srv".into()];
    cluster.change(|all| all.apply("host-0000", HostEvent::Host(Box::new(info)), 1));
    for (change, code) in [
        (json!({ "disks": [{ "path": "/etc/shadow", "format": "raw" }] }), ProblemCode::NoHost),
        (
            json!({ "disks": [{ "path": "/srv/../etc/shadow", "format": "raw" }] }),
            ProblemCode::NoHost,
        ),
        (json!({ "initrd": "/etc/shadow" }), ProblemCode::NoHost),
        (json!({ "qemu": "/opt/qemu" }), ProblemCode::Forbidden),
        (json!({ "extra_devices": ["vfio-pci"] }), ProblemCode::Forbidden),
    ] {
        let refused: Problem = ask(with_spec(change.clone()), &operator).await.unwrap_err();
        assert_eq!(refused.code, code, "{change}");
    }
    cluster.assert_unmade("web").await;
    ask(web(), &operator).await.unwrap();
    let another = with_spec(json!({ "name": "db", "initrd": "/boot/initrd" }));
    ask(another, &Caller::root()).await.unwrap();
    assert_eq!(cluster.at("db").len(), 1);
    // Only the host sees links and image headers: its agent restricts the operator to vm_dirs.
    let held = cluster.fleet.counts().held_to_vm_dirs;
    assert_eq!(held.into_iter().collect::<Vec<_>>(), ["web"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_host_must_be_able_to_take_the_vm() {
    let cluster = Cluster::begin(2, 0).await;
    let there = || Some(with(web(), json!({ "host": "host-0001" })));
    let rule = Rule {
        name: "not-there".into(),
        strength: Strength::Must,
        kind: RuleKind::NotOn(Hosts { names: vec!["host-0001".into()], ..Hosts::default() }),
        vms: vec!["web".into()],
    };
    cluster.change(|all| {
        all.plan_rule("not-there", Some(rule));
        None
    });
    let refused = cluster.root(Method::POST, VMS, there()).await;
    assert!(refused.body["detail"].as_str().unwrap().contains("not-there"), "{}", refused.body);
    assert_eq!(refused.problem(), ProblemCode::NoHost);
    cluster.change(|all| {
        all.plan_rule("not-there", None);
        all.lost("host-0001", "no answer")
    });
    let refused = cluster.root(Method::POST, VMS, there()).await;
    assert_eq!(refused.problem(), ProblemCode::HostAway);
    cluster.assert_unmade("web").await;
    cluster.change(|all| all.apply("host-0001", HostEvent::Known, 1));
    let mut info = cluster.inventory(|all| all.host_info("host-0001").unwrap().as_ref().clone());
    info.firmware = vec![Firmware::Bios];
    info.tpm = Some(false);
    cluster.change(|all| all.apply("host-0001", HostEvent::Host(Box::new(info)), 1));
    let uefi = with(with_spec(json!({ "firmware": "uefi" })), json!({ "host": "host-0001" }));
    let refused = cluster.root(Method::POST, VMS, Some(uefi)).await;
    assert!(refused.body["detail"].as_str().unwrap().contains("uefi"), "{}", refused.body);
    let tpm = with(with_spec(json!({ "tpm": true })), json!({ "host": "host-0001" }));
    let refused = cluster.root(Method::POST, VMS, Some(tpm)).await;
    assert!(refused.body["detail"].as_str().unwrap().contains("no swtpm"), "{}", refused.body);
    let made: HostedVm = cluster.root(Method::POST, VMS, there()).await.read();
    assert_eq!((made.info.host.as_str(), made.host_reason), ("host-0001", None));
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_creations_are_spread_and_each_name_is_created_once() {
    let cluster = Cluster::begin(4, 0).await;
    let names: Vec<String> = (0..8).map(|number| format!("web-{number}")).collect();
    let made = names.iter().map(|name| {
        cluster.root(Method::POST, VMS, Some(with_spec(json!({ "name": name, "memory": "64GiB" }))))
    });
    for answer in futures::future::join_all(made).await {
        assert_eq!(answer.status, 201, "{}", answer.body);
    }
    for host in cluster.fleet.agents().keys() {
        let memory: u64 = cluster.fleet.vms_of(host).iter().map(|vm| vm.memory_bytes).sum();
        assert!(memory <= 256 << 30, "{host}: {memory}");
    }
    let same = (0..6).map(|_| cluster.root(Method::POST, VMS, Some(web())));
    let same: Vec<u16> =
        futures::future::join_all(same).await.iter().map(|answer| answer.status.as_u16()).collect();
    assert_eq!(same.iter().filter(|status| **status == 201).count(), 1, "{same:?}");
    assert!(same.iter().all(|status| [201, 409].contains(status)), "{same:?}");
    assert_eq!(cluster.at("web").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_of_another_vm_is_refused_wherever_that_runs() {
    let cluster = Cluster::begin(2, 0).await;
    let create = async |name: &str, host: &str, nic: Value| {
        let request = with_spec(json!({ "name": name, "nics": [nic] }));
        cluster.root(Method::POST, VMS, Some(with(request, json!({ "host": host })))).await
    };
    let nic = json!({ "network": "lan", "mac": "52:54:00:00:00:01", "address": "10.0.0.1" });
    let made = create("first", "host-0000", nic).await;
    assert_eq!(made.status, 201, "{}", made.body);
    for (nic, word) in [
        (json!({ "network": "lan", "mac": "52:54:00:00:00:01" }), "52:54:00:00:00:01"),
        (json!({ "network": "lan", "address": "10.0.0.1" }), "10.0.0.1"),
    ] {
        let answer = create("second", "host-0001", nic).await;
        let detail = answer.body["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(word) && detail.contains("first"), "{detail}");
        assert_eq!(answer.problem(), ProblemCode::AlreadyExists);
    }
    cluster.assert_unmade("second").await;
    let made = create("second", "host-0001", json!({ "network": "lan" })).await;
    assert_eq!(made.status, 201, "{}", made.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_gets_the_baseline_and_one_with_more_is_refused() {
    let cluster = Cluster::begin(1, 0).await;
    let old = cluster.root(Method::POST, VMS, Some(with_spec(json!({ "name": "old" })))).await;
    assert_eq!(old.status, 201, "{}", old.body);
    cluster.root(Method::POST, "/api/v1/vms/old/stop", None).await;
    let all =
        cluster.inventory(|all| all.host_info("host-0000").unwrap().cpu.clone().unwrap().features);
    let less: Vec<&str> = all.iter().map(String::as_str).filter(|name| *name != "avx2").collect();
    cluster.change(|all| {
        all.plan_baseline(Some(crate::rig::baseline("Westmere-v1,-avx2", &less)));
        None
    });
    let made: HostedVm = cluster.root(Method::POST, VMS, Some(web())).await.read();
    assert_eq!(made.info.spec.cpu_model.as_deref(), Some("Westmere-v1,-avx2"));
    for model in ["Westmere-v1", "host", "Zen9"] {
        let request = with_spec(json!({ "name": "db", "cpu_model": model }));
        let refused = cluster.root(Method::POST, VMS, Some(request)).await;
        assert_eq!(refused.body["checks"][0]["name"], "cpu-baseline", "{}", refused.body);
        let evidence = refused.body["detail"].as_str().unwrap().to_owned();
        assert!(evidence.contains(if model == "Zen9" { "Zen9" } else { "avx2" }), "{evidence}");
        assert_eq!(refused.problem(), ProblemCode::Preflight);
    }
    cluster.assert_unmade("db").await;
    let less = with_spec(json!({ "name": "db", "cpu_model": "Westmere-v1,-avx2,-aes" }));
    assert_eq!(cluster.root(Method::POST, VMS, Some(less)).await.status, 201);
    // This VM is older than the baseline.
    let refused = cluster.root(Method::POST, "/api/v1/vms/old/start", None).await;
    assert_eq!(refused.problem(), ProblemCode::Preflight);
    let all_the_same = Some(json!({ "skip_preflight": true }));
    assert_eq!(cluster.root(Method::POST, "/api/v1/vms/old/start", all_the_same).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moving_vm_or_one_in_doubt_is_not_changed() {
    let cluster = Cluster::begin(2, 1).await;
    let path = "/api/v1/vms/vm-00000";
    // The target is unreachable, so the move waits.
    cluster.change(|all| all.lost("host-0001", "no answer"));
    let to = json!({ "to": "host-0001", "skip_preflight": true });
    let asked = cluster.root(Method::POST, &format!("{path}/moves"), Some(to)).await;
    assert_eq!(asked.body["state"], "waiting", "{}", asked.body);
    let id = asked.body["id"].as_str().unwrap().to_owned();
    let refused = cluster.root(Method::DELETE, &format!("{path}?force=true"), None).await;
    assert!(refused.body["detail"].as_str().unwrap().contains(&id));
    assert_eq!(refused.problem(), ProblemCode::WrongState);
    assert_eq!(cluster.at("vm-00000"), ["host-0000"]);
    // The move has not begun.
    assert_eq!(cluster.root(Method::POST, &format!("{path}/stop"), None).await.status, 200);
    cluster.root(Method::DELETE, &format!("/api/v1/moves/{id}"), None).await;
    cluster.until(|cluster| cluster.inventory(|all| all.planned_move("vm-00000").is_none())).await;

    let doubt = |host: &str| {
        let mut info = cluster.fleet.vms_of("host-0000")[0].clone();
        (info.host, info.in_doubt) = (host.to_owned(), true);
        HostEvent::Vm(Box::new(info))
    };
    cluster.change(|all| all.apply("host-0001", HostEvent::Known, 1));
    cluster.change(|all| all.apply("host-0000", doubt("host-0000"), 1));
    cluster.change(|all| all.apply("host-0001", doubt("host-0001"), 1));
    for (method, path) in
        [(Method::POST, format!("{path}/stop")), (Method::DELETE, format!("{path}?force=true"))]
    {
        let refused = cluster.root(method, &path, None).await;
        assert_eq!(refused.body["cause"], "in-doubt", "{}", refused.body);
        assert_eq!(refused.problem(), ProblemCode::WrongState);
    }
    // If one host alone has it, its agent decides, which needs force.
    cluster.change(|all| all.apply("host-0001", HostEvent::VmGone("vm-00000".into()), 1));
    let deleted = cluster.root(Method::DELETE, &format!("{path}?force=true"), None).await;
    assert_eq!(deleted.status, 204, "{}", deleted.body);
    assert!(cluster.at("vm-00000").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_may_be_on_an_unreachable_host() {
    let cluster = Cluster::begin(1, 0).await;
    cluster.change(|all| {
        let plan = HostPlan { address: "http://127.0.0.1:1".into(), ..HostPlan::default() };
        vec![all.plan_host("silent", plan)]
    });
    assert_eq!(cluster.inventory(|all| all.host_state("silent")), Some(HostState::Unknown));
    let refused = cluster.root(Method::POST, VMS, Some(web())).await;
    assert_eq!(refused.problem(), ProblemCode::HostAway);
    cluster.change(|all| all.lost("silent", "no answer"));
    let made: HostedVm = cluster.root(Method::POST, VMS, Some(web())).await.read();
    // Planned, and removed from its host without the manager: the silent host may have it.
    cluster.change(|all| all.apply(&made.info.host, HostEvent::VmGone("web".into()), 1));
    let refused = cluster.root(Method::POST, VMS, Some(web())).await;
    assert_eq!(refused.problem(), ProblemCode::AlreadyExists);
    let refused = cluster.root(Method::DELETE, "/api/v1/vms/web", None).await;
    assert_eq!(refused.problem(), ProblemCode::HostAway);
    assert_eq!(cluster.root(Method::DELETE, "/api/v1/vms/web?force=true", None).await.status, 204);
    let none = cluster.root(Method::DELETE, "/api/v1/vms/web", None).await;
    assert_eq!(none.problem(), ProblemCode::NotFound);
    // The agent has it anyway and refuses: then nothing is planned for it.
    let refused = cluster.root(Method::POST, VMS, Some(web())).await;
    assert_eq!(refused.problem(), ProblemCode::AlreadyExists);
    assert_eq!(cluster.planned("web"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_manager_knows_created_vms() {
    let cluster = Cluster::begin(1, 0).await;
    let labels = json!({ "labels": { "app": "shop" }, "start": false });
    let made = cluster.root(Method::POST, VMS, Some(with(web(), labels))).await;
    assert_eq!(made.body["state"], "stopped", "{}", made.body);
    let Cluster { managed, fleet: _fleet } = cluster;
    let store = std::sync::Arc::clone(&managed.store);
    drop(managed);
    let managed = Managed::with(store).await;
    let plan = managed.manager.state.inventory().vm_plan("web").cloned().unwrap();
    assert_eq!((plan.power, plan.labels["app"].as_str()), (PlannedPower::Off, "shop"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_stops_answering_is_reported_and_no_plan_remains() {
    let cluster = Cluster::begin(1, 0).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    // It closes every connection.
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let mut info = cluster.inventory(|all| all.host_info("host-0000").unwrap().as_ref().clone());
    info.name = "rude".into();
    cluster.change(|all| {
        let mut changes = vec![all.plan_host("rude", HostPlan { address, ..HostPlan::default() })];
        changes.extend(all.apply("rude", HostEvent::Host(Box::new(info)), 1));
        changes.extend(all.apply("rude", HostEvent::Known, 1));
        changes
    });
    let refused =
        cluster.root(Method::POST, VMS, Some(with(web(), json!({ "host": "rude" })))).await;
    assert!(refused.body["remedy"].as_str().unwrap().contains("not known"), "{}", refused.body);
    assert_eq!(refused.problem(), ProblemCode::HostAway);
    cluster.assert_unmade("web").await;
}

/// Earlier, the claim with the greater epoch had the name, so requests for the VM went to the host
/// that made the claim.
#[tokio::test(flavor = "multi_thread")]
async fn requests_for_a_vm_go_to_its_host_despite_other_claims() {
    let cluster = Cluster::begin(2, 1).await;
    let vm = cluster.fleet.vms_of("host-0000")[0].clone();
    let claim = VmInfo { epoch: 1 << 40, in_doubt: true, ..vm.clone() };
    cluster.change(|all| all.apply("host-0001", HostEvent::Vm(Box::new(claim)), 1));
    let path = |what: &str| format!("/api/v1/vms/{}{what}", vm.name);
    let shown = cluster.root(Method::GET, &path(""), None).await;
    assert_eq!(
        (&shown.body["host"], &shown.body["conflicts"]),
        (&json!("host-0000"), &json!(["host-0001"]))
    );
    let log = cluster.root(Method::GET, &path("/log"), None).await;
    assert_eq!(log.status, 200, "{}", log.body);
    let stopped = cluster.root(Method::POST, &path("/stop"), Some(json!({ "force": true }))).await;
    assert_eq!(
        (stopped.status.as_u16(), &stopped.body["host"]),
        (200, &json!("host-0000")),
        "{}",
        stopped.body
    );
    assert_eq!(cluster.fleet.vms_of("host-0000")[0].state, VmState::Stopped);
    // A host with a VM whose name belongs to another host is not removed as an empty one.
    cluster.change(|all| {
        let second = VmInfo { state: VmState::Running, ..vm.clone() };
        all.apply("host-0001", HostEvent::Vm(Box::new(second)), 1)
    });
    let refused = cluster.root(Method::DELETE, "/api/v1/hosts/host-0001", None).await;
    assert!(refused.body["detail"].as_str().unwrap().contains("runs 1 VM"), "{}", refused.body);
    let deleted = cluster.root(Method::DELETE, &path(""), None).await;
    assert_eq!(deleted.status, 204, "{}", deleted.body);
    assert!(cluster.fleet.vms_of("host-0000").is_empty());
}
