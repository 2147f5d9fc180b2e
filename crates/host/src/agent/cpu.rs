//! The CPU model of guests on this host, and whether it suffices for an arriving guest.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use godwit_api::{ApiError, ErrorCode, HostCpuInfo};
use godwit_qemu::{
    Accelerator, CpuError, CpuModel, HostCpu, PsabiLevel, QemuInfo, ResolvedSpec, SpecError, Unfit,
};

use super::host::modified;
use crate::agent::Agent;
use crate::failure::spec_refused;

/// CPU models of each QEMU and accelerator, with the modification time of the program.
#[derive(Debug, Default)]
pub(super) struct KnownCpus {
    cpus: HashMap<(PathBuf, Accelerator), (SystemTime, Arc<HostCpu>)>,
    /// Why the last query of a QEMU failed; `None` if it succeeded.
    problem: Option<String>,
}

impl Agent {
    /// Returns the CPU that guests can have here with that accelerator. The result is cached until
    /// the program changes. The processor and its kernel do not change while the agent runs.
    pub(crate) async fn cpu(
        &self,
        qemu: &QemuInfo,
        accel: Accelerator,
    ) -> Result<Arc<HostCpu>, CpuError> {
        let key = (qemu.path.clone(), accel);
        let changed = modified(&qemu.path);
        // Held while QEMU answers: concurrent callers would ask the same question.
        let mut known = self.cpus.lock().await;
        if let Some((then, cpu)) = known.cpus.get(&key)
            && changed == Some(*then)
        {
            return Ok(Arc::clone(cpu));
        }
        let user = self.places.users.for_query_with(accel);
        let asked = godwit_qemu::host_cpu(qemu, accel, Some((user.uid, user.gid))).await;
        self.places.users.end_query(&self.places.run_dir.join("vms"), user);
        known.problem = asked.as_ref().err().map(ToString::to_string);
        let cpu = Arc::new(asked?);
        let level = cpu.psabi_level().map(PsabiLevel::name);
        tracing::info!(
            %accel,
            vendor = cpu.vendor,
            level,
            features = cpu.features.len(),
            "guest CPU model determined"
        );
        if let Some(changed) = changed {
            known.cpus.insert(key, (changed, Arc::clone(&cpu)));
        }
        Ok(cpu)
    }

    /// Returns the cached default CPU of guests, or why it is unknown. Does not wait for a query.
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

    /// Checks that the machine type takes the VM's vCPUs. If QEMU does not tell, it decides itself
    /// when the VM starts.
    pub(super) async fn check_vcpus(
        &self,
        spec: &ResolvedSpec,
        qemu: &QemuInfo,
    ) -> Result<(), ApiError> {
        if spec.vcpus == 1 {
            return Ok(());
        }
        // The machine types do not depend on the accelerator.
        let known = {
            let known = self.cpus.lock().await;
            let of_qemu = known.cpus.iter().find(|((path, _), _)| *path == qemu.path);
            of_qemu.map(|(_, (_, cpu))| cpu.clone())
        };
        let cpu = match known {
            Some(cpu) => Some(cpu),
            None => self.cpu(qemu, Accelerator::Tcg).await.ok(),
        };
        match cpu.and_then(|cpu| cpu.most_vcpus.get(&spec.machine).copied()) {
            Some(most) if spec.vcpus > most => {
                let (vcpus, machine) = (spec.vcpus, spec.machine.clone());
                Err(spec_refused(&SpecError::TooManyVcpus { vcpus, machine, most }))
            }
            _ => Ok(()),
        }
    }

    /// Checks whether a guest of another host can continue here with its CPU model.
    ///
    /// If this host's QEMU does not report its CPU models, the guest is admitted. QEMU itself then
    /// reports what is missing when the shadow starts.
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
                tracing::warn!(vm = spec.name.as_str(), %error, "CPU of the guest not checked");
                return Ok(());
            }
        };
        cpu.runs(&model).map_err(|unfit| refused(spec, &unfit, from, &self.config.name))
    }
}

fn refused(spec: &ResolvedSpec, unfit: &Unfit, from: &str, host: &str) -> ApiError {
    let message =
        format!("cannot migrate VM \"{}\" from host {from} to host {host}: {unfit}", spec.name);
    ApiError::new(ErrorCode::Preflight, message, unfit.remedy())
}
