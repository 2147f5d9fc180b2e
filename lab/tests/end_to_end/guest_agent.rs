//! The agent in a guest, and the disk for cloud-init: both are at both ends of a move.

use anyhow::{Context, Result, ensure};
use godwit_api::{
    ChangeVm, ClientError, ErrorCode, FreezeVm, GuestInfo, MigrationRequest, SetNicLink, StopVm,
    VmInfo, VmState,
};
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{
    AccelProbe, CloudInit, MachineType, Nic, NicLink, NicModel, QemuInfo, SpecPatch, VmSpec,
    Watchdog, seed_image,
};
use serde_json::json;

use crate::move_and_check;

const SECRET: &str = "#cloud-config\n# a secret\n";

fn settings() -> Result<CloudInit> {
    Ok(serde_json::from_value(json!({
        "user": "deploy", "ssh_keys": ["ssh-ed25519 AAAA me"], "user_data": SECRET,
        "network": [{ "addresses": ["10.88.0.21/24"], "gateways": ["10.88.0.1"] }],
    }))?)
}

/// Returns the digest of the disk that the host must have made for a VM with these settings.
fn seed_of(vm: &VmInfo, settings: &CloudInit) -> Result<String> {
    let spec = VmSpec { cloud_init: Some(settings.clone()), ..vm.spec.clone() };
    let machine = MachineType { name: vm.machine.clone(), alias: None, is_default: true };
    let qemu = QemuInfo {
        path: "/q".into(),
        version: (7, 2, 0),
        machines: vec![machine],
        cpu_models: spec.cpu_model.iter().map(|model| model.to_string()).collect(),
    };
    let spec = spec.resolve(&qemu, &AccelProbe { kvm: false, reason: String::new() })?;
    let image = seed_image(&spec)?.context("the VM has no settings")?;
    Ok(blake3::hash(&image).to_hex().to_string())
}

/// Waits until the guest's agent answers.
fn answer(trial: &Trial, host: &str) -> Result<GuestInfo> {
    until("the guest's agent answers", LIMIT, || {
        let info = trial.ask(trial.agent(host).guest("web"))?;
        Ok(info.answers.then_some(info))
    })
}

fn is_frozen(trial: &Trial, host: &str) -> Result<bool> {
    Ok(trial.vm(host, "web")?.frozen_until_ms.is_some())
}

fn wait_thawed(trial: &Trial, host: &str) -> Result<()> {
    until("the guest is thawed", LIMIT, || Ok((!is_frozen(trial, host)?).then_some(())))
}

/// Waits until the console has this text so often. It may arrive after the guest agent's answer.
fn wait_said(trial: &Trial, host: &str, what: &str, times: usize) -> Result<()> {
    until(&format!("the console says \"{what}\" {times} times"), LIMIT, || {
        let said = trial.console(host, "web")?.matches(what).count();
        ensure!(said == times, "it says that {said} times");
        Ok(Some(()))
    })
}

#[test]
fn a_guest_is_asked_at_both_ends_of_a_move() -> Result<()> {
    let Some(trial) = Trial::begin("guest_agent")? else { return Ok(()) };
    let plan = GuestPlan { vcpus: 2, ..GuestPlan::new("web") };
    let mut nics = plan.spec(trial.image()).nics;
    nics[0].queues = Some(2);
    nics[0].mtu = Some(1400);
    nics.push(Nic { model: NicModel::E1000e, address: None, mac: None, ..nics[0].clone() });
    (nics[1].queues, nics[1].mtu) = (None, None);
    let spec = VmSpec {
        nics,
        guest_agent: true,
        cloud_init: Some(settings()?),
        rng: true,
        watchdog: Some(Watchdog::Pause),
        ..plan.spec(trial.image())
    };
    let mut guest = trial.guest_of("a", &plan, spec)?;
    let vm = trial.vm("a", "web")?;
    ensure!(!serde_json::to_string(&vm)?.contains("a secret"), "secrets are shown: {vm:?}");
    let info = answer(&trial, "a")?;
    let seed = seed_of(&vm, &settings()?)?;
    ensure!(info.os.as_deref() == Some(&*format!("lab, seed {seed}")), "{info:?}");
    ensure!(info.interfaces[0].addresses.contains(&"10.88.0.21/24".to_owned()), "{info:?}");

    freeze_and_thaw(&trial)?;
    trial.ask(trial.agent("a").freeze_vm("web", FreezeVm { for_ms: Some(600_000) }))?;
    move_and_check(&trial, &mut guest)?;
    ensure!(!is_frozen(&trial, "b")?, "a move keeps a freeze");
    let arrived = answer(&trial, "b")?;
    ensure!(arrived == info, "{arrived:?} is not {info:?}");
    let shown = trial.godwit(&["vm", "show", "web"])?.stdout;
    ensure!(shown.contains("10.88.0.21/24") && shown.contains("user deploy"), "{shown}");

    set_link(&trial)?;
    // The guest is shut down by its agent.
    let grace_ms = u64::try_from(LIMIT.as_millis()).ok();
    let agent = trial.agent("b");
    let stopped = trial.ask(agent.stop_vm("web", StopVm { force: false, grace_ms }))?;
    ensure!((stopped.state, &stopped.reason) == (VmState::Stopped, &None), "{stopped:?}");
    wait_said(&trial, "b", "AGENT shutdown", 1)?;

    // A change keeps what is not shown, and the new disk has the change.
    let spec: SpecPatch = serde_json::from_value(json!({ "cloud_init": { "hostname": "front" } }))?;
    let expected = Some(Box::new(stopped.spec.clone()));
    let change = ChangeVm { spec, expected, ..ChangeVm::default() };
    let vm = trial.ask(agent.change_vm("web", &change))?;
    trial.ask(agent.start_vm("web"))?;
    guest.wait_ready(LIMIT)?;
    let changed = CloudInit { hostname: Some("front".to_owned()), ..settings()? };
    let (now, seed) = (answer(&trial, "b")?, seed_of(&vm, &changed)?);
    ensure!(now.os.as_deref() == Some(&*format!("lab, seed {seed}")), "{now:?}");
    trial.delete("b", "web")?;
    trial.finish()
}

/// Unplugs the guest's NIC at host b and plugs it in again.
fn set_link(trial: &Trial) -> Result<()> {
    let link = |host: &str| trial.vm(host, "web").map(|vm| vm.spec.nics[0].link);
    let unplugged = trial.godwit(&["vm", "nic", "link", "web", "0", "down"])?;
    ensure!(unplugged.stdout.contains("is down"), "{unplugged:?}");
    ensure!(link("b")? == NicLink::Down, "the link is not recorded");
    trial.end_agent("b", rustix::process::Signal::KILL)?;
    trial.start_missing()?;
    ensure!(link("b")? == NicLink::Down, "the link is forgotten");
    trial.move_silent("web", "b", &MigrationRequest::to("a"))?;
    ensure!(link("a")? == NicLink::Down, "the move lost the link's state");
    let seen = answer(trial, "a")?;
    ensure!(seen.interfaces[0].name == "eth0 unplugged", "{seen:?}");
    trial.ask(trial.agent("a").set_link("web", SetNicLink { nic: 0, link: NicLink::Up }))?;
    let wrong = SetNicLink { nic: 2, link: NicLink::Up };
    let refused = trial.ask(trial.agent("a").set_link("web", wrong));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound),
        "{refused:?}"
    );
    trial.move_silent("web", "a", &MigrationRequest::to("b"))?;
    Ok(())
}

/// Freezes the guest at host a: it is thawed on request, and by itself.
fn freeze_and_thaw(trial: &Trial) -> Result<()> {
    let long = FreezeVm { for_ms: Some(600_000) };
    let frozen = trial.ask(trial.agent("a").freeze_vm("web", long))?;
    ensure!(frozen.frozen_until_ms.is_some(), "{frozen:?}");
    let refused = trial.ask(trial.agent("a").freeze_vm("web", long));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error))
            if error.code == ErrorCode::WrongState && error.remedy.contains("vm thaw")),
        "{refused:?}"
    );
    let refused = trial.ask(trial.agent("a").freeze_vm("web", FreezeVm { for_ms: Some(0) }));
    ensure!(matches!(&refused, Err(ClientError::Refused(_))), "{refused:?}");
    // The next agent knows of the freeze.
    trial.end_agent("a", rustix::process::Signal::KILL)?;
    trial.start_missing()?;
    ensure!(is_frozen(trial, "a")?, "the freeze is forgotten");
    let thawed = trial.ask(trial.agent("a").thaw_vm("web"))?;
    ensure!(thawed.frozen_until_ms.is_none(), "{thawed:?}");
    wait_said(trial, "a", "AGENT thawed", 1)?;
    trial.ask(trial.agent("a").freeze_vm("web", FreezeVm { for_ms: Some(100) }))?;
    wait_thawed(trial, "a")?;
    wait_said(trial, "a", "AGENT thawed", 2)
}
