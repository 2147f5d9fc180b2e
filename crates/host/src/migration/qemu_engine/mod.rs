//! QEMU's own migration as an engine: for VMs that the external engine cannot move, and for
//! comparison in benchmarks. It takes the same request and gives the same report.

mod receiving;
mod sending;

use std::time::Duration;

use godwit_api::{ErrorCode, IncomingAccepted, QemuEngineOptions};
use godwit_qemu::{
    Accelerator, EVENTS, LATE_BLOCK_ACTIVATE, PAUSE_BEFORE_SWITCHOVER, QemuInfo, Qmp, QmpError,
    QmpEvent, ResolvedSpec, X_IGNORE_SHARED,
};
use godwit_types::{Fault, Report};
use serde_json::json;
use tokio::sync::broadcast;

use super::outgoing::Outgoing;
use super::state_stream::{UNLIMITED_BYTES_PER_S, qemu_failure};
use crate::migrations::MigrationControl;

pub(super) use receiving::begin_incoming;

/// QEMU's own default for multifd.
const DEFAULT_CHANNELS: u32 = 2;

/// Version from which QEMU under TCG is sound. Earlier versions lose writes to guest memory: when
/// QEMU takes its dirty bitmap word by word, it clears the bits but leaves the vCPUs' TLBs assuming
/// that they are set, and writes through those are not recorded again. ("physmem: Fix migration
/// dirty bitmap coherency with TCG memory access", QEMU 9.0.)
const SOUND_UNDER_TCG: (u32, u32, u32) = (9, 0, 0);
/// Memory for one word of QEMU's dirty bitmap: 64 pages. A RAM block whose size is not a multiple
/// of it is taken page by page, which is sound.
const BITMAP_WORD_BYTES: u64 = 64 * 4096;

/// Side of a migration that a QEMU is on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    /// With the longest time for which the guest may be paused.
    Source {
        downtime_ms: f64,
    },
    Destination,
}

/// Configures one side's QEMU.
async fn set_up(qmp: &Qmp, options: &QemuEngineOptions, side: Side) -> Result<(), QmpError> {
    // A destination that waits for the source's decision leaves the disks to the source until then.
    let waits = side == Side::Destination && !options.runs_by_itself();
    qmp.migrate_set_capabilities(&[
        (EVENTS, true),
        (X_IGNORE_SHARED, false),
        (PAUSE_BEFORE_SWITCHOVER, false),
        (LATE_BLOCK_ACTIVATE, waits),
        ("multifd", options.multifd_channels.is_some()),
        ("auto-converge", options.auto_converge),
        ("postcopy-ram", options.postcopy),
    ])
    .await?;
    let mut parameters = bandwidth(None);
    if options.multifd_channels.is_some() || options.compression.is_some() {
        parameters["multifd-channels"] =
            options.multifd_channels.unwrap_or(DEFAULT_CHANNELS).into();
        parameters["multifd-compression"] = options.compression.as_deref().unwrap_or("none").into();
    }
    if let Side::Source { downtime_ms } = side {
        // QEMU takes whole milliseconds, at least one.
        let millis = Duration::from_secs_f64(downtime_ms / 1e3).as_millis().max(1);
        parameters["downtime-limit"] = u64::try_from(millis).unwrap_or(u64::MAX).into();
    }
    qmp.migrate_set_parameters(parameters).await
}

/// Returns QEMU's parameters for a bandwidth limit. Post-copy has its own parameter, for which 0
/// means unlimited.
fn bandwidth(limit_bytes_per_s: Option<u64>) -> serde_json::Value {
    json!({
        "max-bandwidth": limit_bytes_per_s.unwrap_or(UNLIMITED_BYTES_PER_S),
        "max-postcopy-bandwidth": limit_bytes_per_s.unwrap_or(0),
    })
}

/// Checks the options before anything is created.
fn check(options: &QemuEngineOptions) -> Result<(), Fault> {
    options.check_values().and_then(|()| options.check_together()).map_err(Fault::from)
}

/// Refuses a VM whose memory this QEMU would corrupt.
fn check_tracking(spec: &ResolvedSpec, qemu: &QemuInfo) -> Result<(), Fault> {
    let sound = spec.accel != Accelerator::Tcg
        || qemu.version >= SOUND_UNDER_TCG
        || spec.memory.iter().all(|block| !block.size.bytes().is_multiple_of(BITMAP_WORD_BYTES));
    if sound {
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
    match prepare(outgoing).await {
        Ok(accepted) => {
            control.engine_begins();
            let report = sending::send(outgoing, accepted, control).await;
            Report { bandwidth_limit: control.pace.holding(), ..report }
        }
        Err(failure) => outgoing.failed(failure),
    }
}

async fn prepare(outgoing: &Outgoing) -> Result<IncomingAccepted, Fault> {
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
    let qemu = outgoing.agent.qemu(vm.spec.qemu.as_deref()).await.map_err(Fault::from)?;
    check_tracking(&vm.spec, &qemu)?;
    let side = Side::Source { downtime_ms: outgoing.request.switchover_budget_ms };
    set_up(&vm.process.qmp, &outgoing.request.qemu, side).await.map_err(|error| {
        qemu_failure(&outgoing.agent.config().name, "prepare", &error).to_fault()
    })?;
    outgoing.ask_destination(&qemu).await
}

/// Returns the events that have arrived and were not read.
fn queued(events: &mut broadcast::Receiver<QmpEvent>) -> impl Iterator<Item = QmpEvent> {
    std::iter::from_fn(|| {
        loop {
            match events.try_recv() {
                Ok(event) => return Some(event),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => return None,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

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

    #[test]
    fn queued_events_are_all_read_even_if_some_were_lost() {
        let (sender, mut events) = broadcast::channel(2);
        for name in ["RESUME", "MIGRATION", "STOP"] {
            let (data, at) = (serde_json::Value::Null, Instant::now());
            sender.send(QmpEvent { name: name.into(), data, at, emitted: None }).unwrap();
        }
        let names: Vec<_> = queued(&mut events).map(|event| event.name).collect();
        assert_eq!(names, ["MIGRATION", "STOP"]);
        assert_eq!(queued(&mut events).count(), 0);
        drop(sender);
        assert_eq!(queued(&mut events).count(), 0);
    }
}
