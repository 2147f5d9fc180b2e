//! Incarnations of a VM: a VM created again under its old name and UUID is a different VM to all
//! records of the old one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::sync::Arc;

use godwit_api::{CreateVm, ErrorCode, PageInAnswer, PageInRequest, Resolve};
use godwit_host::Agent;
use godwit_migration::handover::{Known, OfDestination, Role, Standing, of_destination};
use godwit_qemu::{Uuid, VmName, VmSpec};
use godwit_types::Ownership;
use support::{TestHost, arriving};

fn web() -> VmName {
    VmName::new("web").unwrap()
}

const UUID: Uuid = Uuid::from_u128(0x5eed);

fn spec(host: &TestHost, name: &str) -> VmSpec {
    VmSpec { uuid: Some(UUID), ..host.spec(name) }
}

async fn create(agent: &Arc<Agent>, spec: VmSpec, start: bool) -> Ownership {
    let info = agent
        .create(CreateVm { spec, start, vm_dirs_only: false, new_disks: Vec::new() })
        .await
        .unwrap();
    Ownership { incarnation: info.incarnation, epoch: info.epoch }
}

#[test]
fn a_vm_created_again_is_unaffected_by_the_record_of_its_older_incarnation() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let older = create(&agent, spec(&host, "web"), true).await;
        assert!(!older.incarnation.is_unrecorded());
        // It moves to host b, as an operator confirms.
        let vm = agent.begin_migration("web", "m1").unwrap();
        agent.mark_hand_over(&vm, "b", false, true).unwrap();
        agent.hold_in_doubt(&web(), "b").await;
        let word = Resolve { runs_on: "b".to_owned(), keep_memory: false };
        agent.resolve_doubt(&web(), word).await.unwrap();
        let known = |life: Ownership| agent.known(&web(), UUID, life.incarnation).unwrap();
        assert_eq!(known(older), Known::Gone(older));

        // The same specification again, here or elsewhere: this host's records do not concern the
        // new incarnation.
        let newer = create(&agent, spec(&host, "web"), false).await;
        assert_ne!(newer.incarnation, older.incarnation);
        assert_eq!(known(newer), Known::Has(Standing { role: Role::Owner, ownership: newer }));
        assert_eq!(known(older), Known::Gone(older));
        agent.delete(&web(), false).await.unwrap();
        let elsewhere = arriving(1);
        assert_eq!(of_destination(known(elsewhere), elsewhere.offered()), OfDestination::Refused);
        assert_eq!(of_destination(known(older), elsewhere.offered()), OfDestination::Refused);
    });
    // Records outlive the agent, and the next agent distinguishes them as well.
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let kept = create(&agent, spec(&host, "web"), false).await;
        drop(agent);
        assert_eq!(kept.epoch, 1);
    });
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let info = agent.vm_info("web").unwrap();
        assert!(!info.incarnation.is_unrecorded());
        assert!(matches!(agent.known(&web(), UUID, info.incarnation).unwrap(), Known::Has(_)));
    });
}

#[test]
fn a_second_vm_of_one_uuid_is_refused_with_a_clear_error() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        create(&agent, spec(&host, "web"), false).await;
        let again = agent.create(CreateVm::new(spec(&host, "db"), false)).await.unwrap_err();
        let arrival = agent.resolve(spec(&host, "db")).await.unwrap();
        let arrival =
            agent.prepare_incoming(arrival, arriving(2), "b", false, None).await.unwrap_err();
        for refused in [again, arrival] {
            assert_eq!(refused.code, ErrorCode::AlreadyExists);
            assert!(
                refused.message.contains("\"web\"") && refused.message.contains("uuid"),
                "{refused}"
            );
        }
        assert_eq!(agent.vms().len(), 1);
    });
    assert_eq!(host.qemus().len(), 0);
}

#[test]
fn a_query_about_another_incarnation_is_answered_as_for_an_unknown_vm() {
    let Some(host) = TestHost::new() else { return };
    let spec = spec(&host, "web");
    host.with_agent(async |client| {
        let vm = client.create_vm(&CreateVm::new(spec, false)).await.unwrap();
        let ownership = Ownership { incarnation: vm.incarnation, epoch: vm.epoch };
        let known = async |which: &str| {
            client.get::<Known>(&format!("/v1/hand-overs/web?uuid={UUID}{which}")).await.unwrap()
        };
        let has = Known::Has(Standing { role: Role::Owner, ownership });
        assert_eq!(known(&format!("&incarnation={}", vm.incarnation)).await, has);
        // Another incarnation, and an agent that knows no incarnations.
        assert_eq!(known(&format!("&incarnation={}", arriving(1).incarnation)).await, Known::Never);
        assert_eq!(known("").await, Known::Never);
        let bad =
            client.get::<Known>(&format!("/v1/hand-overs/web?uuid={UUID}&incarnation=7")).await;
        assert!(bad.is_err(), "{bad:?}");

        // A source that retains pages of an older incarnation must not learn that all have arrived.
        let session = async |incarnation| {
            let request = PageInRequest { incarnation, epoch: vm.epoch, from: "b".to_owned() };
            client.post::<_, PageInAnswer>("/v1/page-ins/web", &request).await
        };
        assert!(session(vm.incarnation).await.unwrap().complete);
        let other = session(arriving(1).incarnation).await.unwrap_err();
        assert_eq!(other.code(), Some(ErrorCode::NotFound));
    });
}
