//! What other hosts have is checked and asked: writers of a base, the addresses of a snapshot, a VM
//! that no report contains yet.

use axum::http::Method;
use godwit_api::control::{ManagedVm, ProblemCode, Role};
use godwit_api::{Client, CreateVm};
use godwit_qemu::{Nic, VmSpec};
use serde_json::{Value, json};

use crate::vms::tests::Cluster;

const VMS: &str = "/api/v1/vms";

async fn create(cluster: &Cluster, name: &str, host: &str, more: Value) {
    let mut spec = json!({ "name": name, "kernel": "/srv/vmlinuz" });
    let Value::Object(more) = more else { panic!("{more}") };
    spec.as_object_mut().unwrap().extend(more);
    let request = json!({ "spec": spec, "host": host });
    let made = cluster.root(Method::POST, VMS, Some(request)).await;
    assert_eq!(made.status, 201, "{}", made.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_that_a_vm_of_another_host_writes_is_refused_for_a_new_vm() {
    let cluster = Cluster::begin(2, 0).await;
    let disk = json!({ "path": "/srv/base.raw", "format": "raw" });
    create(&cluster, "writer", "host-0000", json!({ "disks": [disk] })).await;
    let spec = json!({ "name": "web" });
    let new_disks = json!([{ "base": "/srv/base.raw" }]);
    let request = json!({ "spec": spec, "host": "host-0001", "new_disks": new_disks });
    let refused = cluster.root(Method::POST, VMS, Some(request)).await;
    let detail = refused.body["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("/srv/base.raw") && detail.contains("\"writer\""), "{detail}");
    assert_eq!(refused.problem(), ProblemCode::AlreadyExists);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revert_is_checked_as_a_change_is() {
    let cluster = Cluster::begin(2, 0).await;
    let mac = "52:54:00:00:00:01";
    let disk = json!({ "path": "/srv/shared.raw", "format": "raw" });
    let nic = json!({ "network": "lan", "mac": mac });
    create(&cluster, "first", "host-0000", json!({ "disks": [disk], "nics": [nic] })).await;
    create(&cluster, "web", "host-0001", json!({})).await;
    let vms = &cluster.managed.manager.vms;
    let info = vms.state().inventory().vm_info("web").unwrap().clone();
    let check = |change: &dyn Fn(&mut VmSpec), role| {
        let mut spec = info.spec.clone();
        change(&mut spec);
        vms.check_revert(&info, &spec, role).map(|nics| nics.is_some())
    };
    let code = |change: &dyn Fn(&mut VmSpec), role| check(change, role).unwrap_err().code;
    assert!(!check(&|spec| spec.vcpus = 2, Role::Operator).unwrap());
    let lan =
        |mac: &str| Nic { network: "lan".to_owned(), mac: Some(mac.to_owned()), ..Nic::default() };
    let taken = code(&|spec| spec.nics = vec![lan(mac)], Role::Admin);
    assert_eq!(taken, ProblemCode::AlreadyExists);
    assert!(check(&|spec| spec.nics = vec![lan("52:54:00:00:00:02")], Role::Operator).unwrap());
    let own_qemu = |spec: &mut VmSpec| spec.qemu = Some("/opt/qemu".into());
    assert_eq!(code(&own_qemu, Role::Operator), ProblemCode::Forbidden);
    check(&own_qemu, Role::Admin).unwrap();
    let shared = |spec: &mut VmSpec| {
        let disk = json!({ "path": "/srv/shared.raw", "format": "raw", "readonly": true });
        spec.disks = vec![serde_json::from_value(disk).unwrap()];
    };
    assert_eq!(code(&shared, Role::Admin), ProblemCode::AlreadyExists);
    assert_eq!(code(&|spec| spec.vcpus = 0, Role::Admin), ProblemCode::InvalidRequest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_was_just_created_at_an_agent_is_known() {
    let cluster = Cluster::begin(2, 0).await;
    let agent = Client::new(cluster.fleet.agents()["host-0001"].parse().unwrap());
    for number in 0..20 {
        let name = format!("vm-{number}");
        let spec = VmSpec { kernel: Some("/srv/vmlinuz".into()), ..VmSpec::new(name.as_str()) };
        agent.create_vm(&CreateVm::new(spec, false)).await.unwrap();
        let shown = cluster.root(Method::GET, &format!("{VMS}/{name}"), None).await;
        assert_eq!(shown.status, 200, "{}", shown.body);
        assert_eq!(shown.read::<ManagedVm>().summary.host, "host-0001");
    }
    let missing = cluster.root(Method::GET, &format!("{VMS}/nothing"), None).await;
    assert_eq!(missing.problem(), ProblemCode::NotFound);
}
