//! Changes of a VM: its specification while it is stopped, a restart, a reset.

use anyhow::{Result, ensure};
use godwit_api::{ChangeVm, ClientError, ErrorCode, RenameVm, StopVm, VmState};
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{NicFilter, SpecPatch, VmSpec};
use serde_json::{Value, json};

use crate::move_and_check;

fn change(spec: Value) -> Result<ChangeVm> {
    let spec: SpecPatch = serde_json::from_value(spec)?;
    Ok(ChangeVm { spec, ..ChangeVm::default() })
}

/// Waits until the guest has booted a second time under its QEMU.
fn wait_booted_twice(trial: &Trial) -> Result<()> {
    until("the guest has booted again", LIMIT, || {
        Ok((trial.console("a", "web")?.matches("READY").count() == 2).then_some(()))
    })
}

#[test]
fn a_vm_is_changed_restarted_and_reset() -> Result<()> {
    let Some(trial) = Trial::begin("change")? else { return Ok(()) };
    let plan = GuestPlan::new("web");
    let mut guest = trial.guest("a", &plan)?;
    let agent = trial.agent("a");
    let refused = trial.ask(agent.change_vm("web", &change(json!({ "vcpus": 2 }))?));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error))
            if error.code == ErrorCode::WrongState && error.remedy.contains("stop it")),
        "{refused:?}"
    );
    let settings = json!({ "description": "The shop", "autostart": { "order": 2 } });
    let settings = trial.ask(agent.change_vm("web", &change(settings)?))?;
    ensure!(settings.state == VmState::Running && settings.spec.autostart.is_some());
    trial.ask(agent.reset_vm("web"))?;
    wait_booted_twice(&trial)?;

    trial.ask(agent.stop_vm("web", StopVm { force: true, grace_ms: None }))?;
    let before = trial.vm("a", "web")?;
    let stale = ChangeVm { expected: Some(Box::new(before.spec.clone())), ..change(json!({}))? };
    let mut other = stale.clone();
    other.expected = other.expected.map(|spec| Box::new(VmSpec { vcpus: 7, ..*spec }));
    let refused = trial.ask(agent.change_vm("web", &other));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error)) if error.code == ErrorCode::Busy),
        "{refused:?}"
    );
    trial.ask(agent.change_vm("web", &stale))?;
    for wrong in [
        json!({ "disks": [{ "path": "/nowhere/disk", "format": "raw" }] }),
        json!({ "nics": [{ "network": "unknown" }] }),
        json!({ "uuid": "8a0e6c1e-0000-4000-8000-000000000000" }),
        json!({ "memory": "1PiB" }),
        json!({ "vcpus": 2, "kernel": null }),
    ] {
        let refused = trial.ask(agent.change_vm("web", &change(wrong.clone())?));
        ensure!(matches!(&refused, Err(ClientError::Refused(_))), "{wrong}: {refused:?}");
        ensure!(trial.vm("a", "web")? == before, "{wrong}: the VM was changed");
    }
    // With a filter, so that the guest is found after its move only if its announcements pass.
    let mut nics = before.spec.nics.clone();
    let has_filters = trial.ask(agent.host())?.nic_filters == Some(true);
    if has_filters {
        let (v4, v6) = plan.addresses();
        nics[0].filter = Some(NicFilter::MacIp);
        nics[0].addresses = [v4.into(), v6.into()].into();
    }
    let new = json!({ "vcpus": 2, "nics": nics });
    let changed = trial.ask(agent.change_vm("web", &change(new)?))?;
    ensure!((changed.state, changed.vcpus) == (VmState::Stopped, 2), "{changed:?}");
    // A restarted agent knows the change.
    trial.end_agent("a", rustix::process::Signal::KILL)?;
    trial.start_missing()?;
    let started = trial.ask(trial.agent("a").start_vm("web"))?;
    ensure!(started.vcpus == 2 && started.spec.uuid == before.spec.uuid, "{started:?}");
    guest.wait_ready(LIMIT)?;

    // Another name, and back: the VM keeps its address, and so its guest's probe.
    let agent = trial.agent("a");
    let rename =
        |from: &str, to: &str| trial.ask(agent.rename_vm(from, &RenameVm { name: to.to_owned() }));
    ensure!(rename("web", "shop").is_err(), "a running VM was renamed");
    trial.ask(agent.stop_vm("web", StopVm { force: true, grace_ms: None }))?;
    ensure!(rename("web", "../shop").is_err(), "an invalid name was taken");
    let renamed = rename("web", "shop")?;
    ensure!(renamed.spec.nics == started.spec.nics && renamed.spec.uuid == before.spec.uuid);
    ensure!(trial.vm("a", "web").is_err(), "the old name is left");
    rename("shop", "web")?;
    trial.ask(agent.start_vm("web"))?;
    guest.wait_ready(LIMIT)?;

    let stop = StopVm { force: false, grace_ms: Some(100) };
    let started = trial.vm("a", "web")?;
    let restarted = trial.ask(trial.agent("a").restart_vm("web", stop))?;
    ensure!(restarted.state == VmState::Running && restarted.pid != started.pid, "{restarted:?}");
    guest.wait_ready(LIMIT)?;
    trial.expect_whole(&guest)?;
    move_and_check(&trial, &mut guest)?;
    let moved = trial.vm("b", "web")?.spec;
    ensure!(moved.nics == nics && moved.autostart == settings.spec.autostart, "{moved:?}");
    ensure!(moved.description.as_deref() == Some("The shop"), "{moved:?}");
    trial.finish()
}
