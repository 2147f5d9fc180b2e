//! The CPU that guests can have here, and whether it is enough for a guest that arrives.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use godwit_api::{ApiError, ErrorCode, HostCpuInfo};
use godwit_qemu::{
    Accelerator, CpuError, CpuModel, HostCpu, PsabiLevel, QemuInfo, ResolvedSpec, Unfit,
};

use super::host::modified;
use crate::agent::Agent;

/// What each QEMU can give by which accelerator, with the time of the binary's last change.
#[derive(Debug, Default)]
pub(super) struct KnownCpus {
    cpus: HashMap<(PathBuf, Accelerator), (SystemTime, Arc<HostCpu>)>,
    /// Why the QEMU that was asked last gave no answer; none where it did.
    problem: Option<String>,
}

impl Agent {
    /// What CPU guests can have here by that accelerator; asked once and again when the program has changed. The processor and its kernel
    /// stay the same for as long as the agent runs.
    pub(crate) async fn cpu(
        &self,
        qemu: &QemuInfo,
        accel: Accelerator,
    ) -> Result<Arc<HostCpu>, CpuError> {
        let key = (qemu.path.clone(), accel);
        let changed = modified(&qemu.path);
        // Held while QEMU answers: who comes meanwhile would ask the same.
        let mut known = self.cpus.lock().await;
        if let Some((then, cpu)) = known.cpus.get(&key)
            && changed == Some(*then)
        {
            return Ok(Arc::clone(cpu));
        }
        let user = self.places.users.of_question_by(accel);
        let asked = godwit_qemu::host_cpu(qemu, accel, Some((user.uid, user.gid))).await;
        self.places.users.end_question(&self.places.run_dir.join("vms"), user);
        known.problem = asked.as_ref().err().map(ToString::to_string);
        let cpu = Arc::new(asked?);
        let level = cpu.psabi_level().map(PsabiLevel::name);
        tracing::info!(%accel, vendor = cpu.vendor, level, features = cpu.features.len(), "CPU of guests known");
        if let Some(changed) = changed {
            known.cpus.insert(key, (changed, Arc::clone(&cpu)));
        }
        Ok(cpu)
    }

    /// What is known of the CPU of guests that ask for nothing else, and why nothing is; nobody waits for it here.
    pub(super) fn known_cpu(
        &self,
        qemu: &Path,
        kvm: bool,
    ) -> (Option<HostCpuInfo>, Option<String>) {
        let accel = if kvm { Accelerator::Kvm } else { Accelerator::Tcg };
        let Ok(known) = self.cpus.try_lock() else { return (None, None) };
        let cpu = known.cpus.get(&(qemu.to_owned(), accel)).map(|(_, cpu)| HostCpuInfo::of(cpu));
        let problem = if cpu.is_some() { None } else { known.problem.clone() };
        (cpu, problem)
    }

    /// Whether a guest of another host can go on running here with the CPU that it has.
    ///
    /// Where this host's QEMU does not say what CPU it can give, the guest is let in: QEMU then says by itself what is missing, when the
    /// shadow starts.
    pub(crate) async fn check_cpu(
        &self,
        spec: &ResolvedSpec,
        qemu: &QemuInfo,
        from: &str,
    ) -> Result<(), ApiError> {
        let model = CpuModel::parse(&spec.cpu_model);
        if model.takes_what_there_is() {
            return Ok(());
        }
        let cpu = match self.cpu(qemu, spec.accel).await {
            Ok(cpu) => cpu,
            Err(error) => {
                tracing::warn!(vm = spec.name.as_str(), %error, "the CPU of an arriving guest is not checked");
                return Ok(());
            }
        };
        cpu.runs(&model).map_err(|unfit| refused(spec, &unfit, from, &self.config.name))
    }
}

fn refused(spec: &ResolvedSpec, unfit: &Unfit, from: &str, host: &str) -> ApiError {
    let message =
        format!("VM \"{}\" can't move from host {from} to host {host}: {unfit}", spec.name);
    ApiError::new(ErrorCode::Preflight, message, unfit.remedy())
}
