//! CPUs of guests: what a host can provide, what a guest's model needs, and what hosts have in
//! common (a baseline).
//!
//! A running guest has read once which features its CPU has, and uses them until it is started
//! again. So it may move only to a host that has all of them. A cluster whose guests shall move
//! anywhere gives them a baseline: a model that each of its hosts runs completely.
//!
//! **Source of names and features:** the host's QEMU with the accelerator of its guests, asked over
//! QMP. A processor feature that KVM or QEMU does not pass on is useless to a guest, so
//! `/proc/cpuinfo` is read only for the names of vendor and processor. The features of a named
//! model also come from QEMU, by `query-cpu-model-expansion`. A model in a fixed version
//! (`Haswell-v4`) has the same features in every QEMU that has it.
//!
//! The expansion is static, not full: it has QEMU's canonical names without aliases (`pni`, not
//! also `sse3`), and only features. Neither expansion leaves out what the host lacks (7.2 and
//! 10.0), so it is the model's definition.
//!
//! All sets here omit paravirtual features (`kvm…`, `hypervisor`): QEMU adds them by itself, and
//! they are not the processor's.

mod answers;
mod ask;
mod baseline;
mod change;
mod features;
mod generations;
mod model;

use std::collections::{BTreeMap, BTreeSet};

pub use ask::{CpuError, host_cpu};
pub use baseline::{Baseline, Common, NoCommon, common_baseline};
pub use change::{BaselineChange, RunningVm, Unmet, change_of_baseline};
pub use features::CpuFeatures;
pub use generations::{
    AMD, AMD_GENERATIONS, INTEL, INTEL_GENERATIONS, LEVEL_MODELS, PsabiLevel, UnknownLevel,
};
pub use model::CpuModel;

use crate::accel::Accelerator;

/// The CPU that a host can provide to its guests, by one QEMU with one accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCpu {
    /// The processor's vendor from CPUID: [`INTEL`], [`AMD`] or another; empty if the kernel does
    /// not report it.
    pub vendor: String,
    /// The processor's name, from the kernel.
    pub name: String,
    /// The accelerator.
    pub accel: Accelerator,
    /// Features that guests can have and keep while they move.
    pub features: CpuFeatures,
    /// Features that this host lacks of each model of its QEMU, by names and aliases; empty if the
    /// model runs completely. QEMU does not always list features that depend on another missing
    /// feature.
    pub models: BTreeMap<String, CpuFeatures>,
    /// Features of the generations' models, by their versioned names, whether they run here or not.
    pub definitions: BTreeMap<String, CpuFeatures>,
    /// The versioned model behind each alias, such as `Haswell-v4` for `Haswell-noTSX-IBRS`.
    pub aliases: BTreeMap<String, String>,
    /// Models that a later QEMU will remove: none of them becomes a baseline automatically.
    pub deprecated: BTreeSet<String>,
    /// Most vCPUs of each versioned machine type of this QEMU, if known.
    pub most_vcpus: BTreeMap<String, u32>,
}

/// Why a guest with a CPU model cannot run, or continue to run, on a host. [`Unfit::remedy`]
/// returns what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The host's QEMU has no such model.
    #[error("CPU model \"{model}\" is unknown to the host's QEMU")]
    UnknownModel {
        /// The model, without features.
        model: String,
    },
    /// The host lacks features.
    #[error("the host cannot provide features of CPU model \"{model}\": {}", list(missing))]
    Missing {
        /// The model with its features.
        model: String,
        missing: CpuFeatures,
    },
    /// The guest would find another vendor after the move. KVM shows the host's own vendor unless
    /// the model sets one.
    #[error("the guest was started on a processor of {from} and would move to one of {to}")]
    OtherVendor {
        /// The vendor that the guest has read.
        from: String,
        /// The vendor that the guest would find.
        to: String,
    },
    /// No guest moves between KVM and TCG.
    #[error("the guest runs under {from}, and {to} cannot take it over")]
    OtherAccelerator {
        /// The accelerator that runs it.
        from: Accelerator,
        /// The accelerator of the destination.
        to: Accelerator,
    },
}

impl Unfit {
    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Unfit::UnknownModel { .. } => {
                "upgrade the host's QEMU, or give the VM a model that both hosts know"
            }
            Unfit::Missing { .. } => {
                "choose another host, or stop the VM and give it a CPU model that all its hosts \
                have (a baseline)"
            }
            Unfit::OtherVendor { .. } => {
                "choose a host of the same vendor, or stop the VM before the move: it can start on \
                either"
            }
            Unfit::OtherAccelerator { .. } => "choose a host with the accelerator of this one",
        }
    }
}

impl HostCpu {
    /// Checks whether a guest with that model can run here.
    ///
    /// A model with `enforce=off` takes what the host has, so no feature of it can be missing.
    /// Nothing is missing of `host` and `max` either, which are host-specific;
    /// [`HostCpu::takes_over`] decides whether a guest with one may move.
    ///
    /// # Errors
    /// The missing features, by name.
    pub fn runs(&self, model: &CpuModel) -> Result<(), Unfit> {
        let Some(missing) = self.missing_of(model) else {
            return Err(Unfit::UnknownModel { model: model.name.clone() });
        };
        if missing.is_empty() || model.takes_what_there_is() {
            return Ok(());
        }
        Err(Unfit::Missing { model: model.to_string(), missing })
    }

    /// Checks whether a guest with that model, running on `from`, can continue to run here.
    ///
    /// # Errors
    /// What the guest would miss or find changed.
    pub fn takes_over(&self, model: &CpuModel, from: &HostCpu) -> Result<(), Unfit> {
        if self.accel != from.accel {
            return Err(Unfit::OtherAccelerator { from: from.accel, to: self.accel });
        }
        let shows_hosts = self.accel == Accelerator::Kvm && !model.settings.contains_key("vendor");
        if shows_hosts && self.vendor != from.vendor {
            return Err(Unfit::OtherVendor { from: from.vendor.clone(), to: self.vendor.clone() });
        }
        self.runs(model)?;
        if !model.is_hosts_own() && !model.takes_what_there_is() {
            return Ok(());
        }
        // The guest has the features that its host had.
        let missing: CpuFeatures = from
            .features
            .difference(&self.features)
            .filter(|name| !model.without.contains(*name))
            .cloned()
            .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(Unfit::Missing { model: model.to_string(), missing })
        }
    }

    /// Returns what this host lacks of a model; `None` if its QEMU does not have the model.
    #[must_use]
    pub fn missing_of(&self, model: &CpuModel) -> Option<CpuFeatures> {
        let lacking = self.models.get(&model.name)?;
        let of_model =
            lacking.difference(&model.without).filter(|name| !model.with.contains(*name));
        let asked = model.with.difference(&self.features);
        Some(of_model.chain(asked).cloned().collect())
    }

    /// Returns the features that a model defines, whether this host has them or not; `None` if they
    /// are unknown here.
    #[must_use]
    pub fn features_of(&self, model: &CpuModel) -> Option<CpuFeatures> {
        let name = self.aliases.get(&model.name).unwrap_or(&model.name);
        let definition = self.definitions.get(name)?;
        Some(definition.difference(&model.without).chain(&model.with).cloned().collect())
    }

    /// Returns what this host lacks of a cluster's baseline; empty if it satisfies the baseline.
    #[must_use]
    pub fn lacks_of(&self, baseline: &Baseline) -> CpuFeatures {
        baseline.lacking(&self.features, |model| self.missing_of(model))
    }

    /// Returns the models that run here completely, sorted.
    #[must_use]
    pub fn whole_models(&self) -> Vec<String> {
        let whole = self.models.iter().filter(|(_, missing)| missing.is_empty());
        whole.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the highest psABI level whose features guests can have here.
    #[must_use]
    pub fn psabi_level(&self) -> Option<PsabiLevel> {
        PsabiLevel::of(&self.features)
    }
}

/// Whether a value is a response about CPUs. For the fuzz targets.
pub(crate) fn is_answer(answer: &serde_json::Value) -> bool {
    answers::read_models(answer).is_ok() || answers::read_expansion(answer).is_ok()
}

/// Lists names for a message.
fn list(names: &CpuFeatures) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
