//! CPUs of guests: what a host can give, what a guest's model needs, and what hosts have in common (a baseline).
//!
//! A running guest has read once which features its CPU has, and uses them until it is started anew. So it may only go to a host that
//! has all of them, and a cluster whose guests shall go anywhere gives them a baseline: a model that each of its hosts runs whole.
//!
//! **Who says what a feature is called, and who has it:** the host's QEMU with the accelerator that its guests get, asked by QMP. A
//! feature of the processor that KVM or QEMU does not pass on is of no use to a guest, so `/proc/cpuinfo` is asked for the names of
//! vendor and processor alone. What a named model holds is also QEMU's word, by `query-cpu-model-expansion`; a model in a fixed version
//! (`Haswell-v4`) holds the same in every QEMU that has it.
//!
//! Static expansion is asked for, not full: it has QEMU's canonical names and no aliases (`pni`, not also `sse3`), and only what is a
//! feature. Neither expansion leaves out what the host lacks (7.2 and 10.0), so it is the model's definition.
//!
//! What is paravirtual (`kvm…`, `hypervisor`) is left out of all sets here: QEMU gives it by itself, and it is no processor's.

mod answers;
mod ask;
mod baseline;
mod change;
mod generations;
mod model;

use std::collections::{BTreeMap, BTreeSet};

pub use ask::{CpuError, host_cpu};
pub use baseline::{Baseline, Common, NoCommon, common_baseline};
pub use change::{BaselineChange, RunningVm, Unmet, change_of_baseline};
pub use generations::{
    AMD, AMD_GENERATIONS, INTEL, INTEL_GENERATIONS, LEVEL_MODELS, PsabiLevel, UnknownLevel,
};
pub use model::CpuModel;

use crate::spec::Accelerator;

/// Features of a CPU by QEMU's canonical names: `avx2`, `sse4.1`, `pni` (which others call SSE3).
pub type CpuFeatures = BTreeSet<String>;

/// The CPU that a host can give to its guests, by one QEMU with one accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCpu {
    /// The processor's vendor as CPUID tells it: [`INTEL`], [`AMD`] or another; empty where the kernel does not say.
    pub vendor: String,
    /// The processor's name, as the kernel shows it.
    pub name: String,
    /// What runs the guests.
    pub accel: Accelerator,
    /// What guests can have and keep while they move.
    pub features: CpuFeatures,
    /// What this host lacks of each model that its QEMU has, by names and aliases; empty: the model runs whole. QEMU does not always
    /// name what depends on another missing feature.
    pub models: BTreeMap<String, CpuFeatures>,
    /// What models of the generations hold, by their versioned names, whether they run here or not.
    pub definitions: BTreeMap<String, CpuFeatures>,
    /// The versioned model that an alias stands for, `Haswell-noTSX-IBRS` for `Haswell-v4`.
    pub aliases: BTreeMap<String, String>,
    /// Models that a later QEMU will not have: none of them becomes a baseline by itself.
    pub deprecated: BTreeSet<String>,
}

/// Why a guest with a CPU model can't run, or go on running, on a host. [`Unfit::remedy`] says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The host's QEMU has no such model.
    #[error("CPU model \"{model}\" is unknown to the host's QEMU")]
    UnknownModel {
        /// The model, without features.
        model: String,
    },
    /// The host lacks features.
    #[error(
        "CPU model \"{model}\" has features that the host's guests can't have: {}",
        list(missing)
    )]
    Missing {
        /// The model with its features.
        model: String,
        missing: CpuFeatures,
    },
    /// The guest would find another vendor after the move. KVM shows the host's own unless the model names one.
    #[error("the guest was started on a processor of {from} and would find itself on one of {to}")]
    OtherVendor {
        /// The vendor that it has seen.
        from: String,
        /// The vendor that it would see.
        to: String,
    },
    /// No guest moves between KVM and TCG.
    #[error("the guest runs by {from}, and {to} can't take it up")]
    OtherAccelerator {
        /// What runs it.
        from: Accelerator,
        /// What would.
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
                "take another host, or stop the VM and give it a CPU model that all its hosts have (a baseline)"
            }
            Unfit::OtherVendor { .. } => {
                "take a host of the same vendor, or stop the VM before it goes there: it can start on either"
            }
            Unfit::OtherAccelerator { .. } => "take a host that runs guests as this one does",
        }
    }
}

impl HostCpu {
    /// Whether a guest with that model can run here.
    ///
    /// A model that says `enforce=off` takes what there is, so nothing of it can be missing. Of `host` and `max`, which are each
    /// host's own, nothing is missing either; whether a guest that has one may move is [`HostCpu::takes_over`]'s to say.
    ///
    /// # Errors
    /// What is missing, by name.
    pub fn runs(&self, model: &CpuModel) -> Result<(), Unfit> {
        let Some(missing) = self.missing_of(model) else {
            return Err(Unfit::UnknownModel { model: model.name.clone() });
        };
        if missing.is_empty() || model.takes_what_there_is() {
            return Ok(());
        }
        Err(Unfit::Missing { model: model.to_string(), missing })
    }

    /// Whether a guest with that model, running on `from`, can go on running here.
    ///
    /// # Errors
    /// What it would miss, or what it would find changed.
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
        // What it has is what there was.
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

    /// What this host lacks of a model; none: its QEMU has no such model.
    #[must_use]
    pub fn missing_of(&self, model: &CpuModel) -> Option<CpuFeatures> {
        let lacking = self.models.get(&model.name)?;
        let of_model =
            lacking.difference(&model.without).filter(|name| !model.with.contains(*name));
        let asked = model.with.difference(&self.features);
        Some(of_model.chain(asked).cloned().collect())
    }

    /// What a model holds on paper, whether this host has it or not; none where that is not known here.
    #[must_use]
    pub fn features_of(&self, model: &CpuModel) -> Option<CpuFeatures> {
        let name = self.aliases.get(&model.name).unwrap_or(&model.name);
        let definition = self.definitions.get(name)?;
        Some(definition.difference(&model.without).chain(&model.with).cloned().collect())
    }

    /// What this host lacks of a cluster's baseline; empty: it satisfies it.
    #[must_use]
    pub fn lacks_of(&self, baseline: &Baseline) -> CpuFeatures {
        baseline.lacking(&self.features, |model| self.missing_of(model))
    }

    /// The models that run here whole, sorted.
    #[must_use]
    pub fn whole_models(&self) -> Vec<String> {
        let whole = self.models.iter().filter(|(_, missing)| missing.is_empty());
        whole.map(|(name, _)| name.clone()).collect()
    }

    /// The highest psABI level whose features guests can have here.
    #[must_use]
    pub fn psabi_level(&self) -> Option<PsabiLevel> {
        PsabiLevel::of(&self.features)
    }
}

/// Whether it is an answer about CPUs: for the fuzz targets.
pub(crate) fn is_answer(answer: &serde_json::Value) -> bool {
    answers::read_models(answer).is_ok() || answers::read_expansion(answer).is_ok()
}

/// Names for a message.
fn list(names: &CpuFeatures) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
