//! QEMU's own migration as an engine: for VMs that the external engine cannot move, and for
//! comparison in benchmarks. It takes the same request and gives the same report.

mod receiving;
mod relayed;
mod sending;
mod settings;

use godwit_api::{ErrorCode, IncomingAccepted, QemuEngineOptions};
use godwit_qemu::{QemuInfo, ResolvedSpec};
use godwit_types::{Fault, Report};

use super::outgoing::Outgoing;
use crate::migrations::MigrationControl;
use crate::state_stream::{is_sound, qemu_failure};

use settings::{Side, set_up};

pub(crate) use receiving::{Way, begin_incoming};
pub(crate) use relayed::check as check_relayed;

/// Checks the options before anything is created.
fn check(options: &QemuEngineOptions) -> Result<(), Fault> {
    options.check_values().and_then(|()| options.check_together()).map_err(Fault::from)
}

/// Refuses a VM whose memory this QEMU would corrupt.
fn check_tracking(spec: &ResolvedSpec, qemu: &QemuInfo) -> Result<(), Fault> {
    if is_sound(spec, qemu.version) {
        return Ok(());
    }
    Err(Fault {
        code: ErrorCode::Preflight.to_string(),
        message: format!(
            "cannot migrate VM \"{}\" with QEMU {} under TCG: it loses writes to the guest's \
             memory",
            spec.name,
            qemu.version_text()
        ),
        remedy:
            "use Godwit's own engine or QEMU 9.0, or create the VM with 64 KiB more in each memory \
             block (docs/engines.md)"
                .into(),
    })
}

/// Migrates the VM with QEMU's own migration.
pub(super) async fn run(outgoing: &Outgoing, control: &MigrationControl) -> Report {
    match prepare(outgoing, control).await {
        Ok(accepted) => {
            control.engine_begins();
            let report = sending::send(outgoing, accepted, control).await;
            Report { bandwidth_limit: control.pace.holding(), ..report }
        }
        Err(failure) => outgoing.failed(failure),
    }
}

async fn prepare(
    outgoing: &Outgoing,
    control: &MigrationControl,
) -> Result<IncomingAccepted, Fault> {
    check(&outgoing.request.qemu)?;
    if outgoing.agent.identity().is_some() && !outgoing.request.qemu.plaintext {
        return Err(Fault {
            code: ErrorCode::Preflight.to_string(),
            message: "QEMU's own engine sends the guest's memory unencrypted".into(),
            remedy: "use Godwit's own engine, or add --plaintext if no one else uses the network \
                     between the hosts"
                .into(),
        });
    }
    let vm = &outgoing.vm;
    let qemu = outgoing.agent.qemu(vm.spec().qemu.as_deref()).await.map_err(Fault::from)?;
    check_tracking(&vm.spec(), &qemu)?;
    let spec = vm.spec();
    let disks = spec.disks.iter().map(|disk| (disk.path.as_path(), disk.bus));
    if let Some(fault) = godwit_qemu::unmovable_disks(disks).into_iter().next() {
        let message = format!("cannot migrate VM \"{}\": {}", vm.name, fault.message);
        return Err(Fault { message, ..fault });
    }
    let side = Side::Source { downtime_ms: outgoing.request.switchover_budget_ms };
    set_up(&vm.process.qmp, &outgoing.request.qemu, side).await.map_err(|error| {
        qemu_failure(&outgoing.agent.config().name, "prepare", &error).to_fault()
    })?;
    outgoing.ask_destination(&qemu, control).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_qemu::{Accel, AccelProbe, ByteSize, MachineType, MemoryBlock, VmSpec};

    fn qemu(version: (u32, u32, u32)) -> QemuInfo {
        let machine =
            MachineType { name: "pc-q35-7.2".into(), alias: Some("q35".into()), is_default: true };
        let cpu_models = vec!["Westmere-v1".into(), "host".into()];
        QemuInfo { path: "/q".into(), version, machines: vec![machine], cpu_models }
    }

    fn vm(accel: Accel, block_bytes: &[u64]) -> ResolvedSpec {
        let memory =
            block_bytes.iter().map(|&bytes| MemoryBlock::shared(ByteSize::from_bytes(bytes)));
        let spec = VmSpec {
            accel,
            memory: memory.collect(),
            kernel: Some("/k".into()),
            ..VmSpec::new("web")
        };
        spec.resolve(&qemu((7, 2, 22)), &AccelProbe { kvm: true, reason: String::new() }).unwrap()
    }

    #[test]
    fn a_vm_whose_memory_qemu_would_corrupt_is_refused() {
        const GIB: u64 = 1 << 30;
        let (debian_12, fixed) = (qemu((7, 2, 22)), qemu((9, 0, 0)));
        let refused = check_tracking(&vm(Accel::Tcg, &[GIB]), &debian_12).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Preflight.to_string());
        assert!(
            refused.message.contains("7.2.22") && refused.remedy.contains("64 KiB"),
            "{refused:?}"
        );
        // A single such block of two is enough for a refusal.
        assert!(check_tracking(&vm(Accel::Tcg, &[GIB + 0x1_0000, GIB]), &debian_12).is_err());
        assert!(check_tracking(&vm(Accel::Tcg, &[GIB + 0x1_0000]), &debian_12).is_ok());
        assert!(check_tracking(&vm(Accel::Tcg, &[GIB]), &fixed).is_ok());
        assert!(check_tracking(&vm(Accel::Kvm, &[GIB]), &debian_12).is_ok());
    }
}
