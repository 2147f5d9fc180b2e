//! CPU available to guests, as `GET /v1/host` reports it.

use std::collections::{BTreeMap, BTreeSet};

use godwit_qemu::{
    Accelerator, Baseline, CpuFeatures, CpuModel, DEFAULT_CPU_MODEL, HostCpu, LEVEL_MODELS, Unfit,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// CPU available to guests on a host. Features and models have QEMU's names and are sorted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostCpuInfo {
    /// Vendor of the processor as CPUID reports it: `GenuineIntel`, `AuthenticAMD`.
    pub vendor: String,
    /// Model name of the processor.
    pub name: String,
    /// Default accelerator for guests.
    pub accel: Accelerator,
    /// Highest x86-64 psABI level available to guests, for example `x86-64-v3`; absent if not even
    /// the first level is available.
    #[serde(default)]
    pub level: Option<String>,
    /// CPU features that guests can have and keep across migrations.
    #[schema(value_type = Vec<String>)]
    pub features: CpuFeatures,
    /// CPU models, aliases included, that run here with all their features.
    pub models: Vec<String>,
    /// Models that a later QEMU will drop.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub deprecated: BTreeSet<String>,
    /// For each CPU generation the model that runs best here, by its versioned name; and the models
    /// that levels and defaults are built from.
    #[serde(default)]
    pub generations: BTreeMap<String, GenerationInfo>,
}

/// CPU model of a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GenerationInfo {
    /// Features of the model.
    #[schema(value_type = Vec<String>)]
    pub features: CpuFeatures,
    /// Features that this host lacks: none, or those that no baseline keeps.
    #[serde(default, skip_serializing_if = "CpuFeatures::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub missing: CpuFeatures,
    /// Aliases of the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
}

impl HostCpuInfo {
    /// Summarizes what a host's QEMU reports.
    #[must_use]
    pub fn of(cpu: &HostCpu) -> HostCpuInfo {
        let others = LEVEL_MODELS.into_iter().chain([DEFAULT_CPU_MODEL]);
        let named = cpu.best_models().into_iter().chain(others);
        let generations = named.filter_map(|name| {
            let aliases = cpu.aliases.iter().filter(|(_, model)| *model == name);
            let info = GenerationInfo {
                features: cpu.definitions.get(name)?.clone(),
                missing: cpu.models.get(name)?.clone(),
                aliases: aliases.map(|(alias, _)| alias.clone()).collect(),
            };
            Some((name.to_owned(), info))
        });
        HostCpuInfo {
            vendor: cpu.vendor.clone(),
            name: cpu.name.clone(),
            accel: cpu.accel,
            level: cpu.psabi_level().map(|level| level.name().to_owned()),
            features: cpu.features.clone(),
            models: cpu.whole_models(),
            deprecated: cpu.deprecated.clone(),
            generations: generations.collect(),
        }
    }

    /// Checks whether a guest with `model` that runs on `from` can go on running here. The result
    /// is that of [`HostCpu::takes_over`] on [`HostCpuInfo::to_host_cpu`], without building the
    /// latter, for queries over very many hosts.
    ///
    /// # Errors
    /// Features that the guest would lose, or differences that it would notice.
    pub fn takes_over(&self, model: &CpuModel, from: &HostCpuInfo) -> Result<(), Unfit> {
        if self.accel != from.accel {
            return Err(Unfit::OtherAccelerator { from: from.accel, to: self.accel });
        }
        let shows_hosts = self.accel == Accelerator::Kvm && !model.settings.contains_key("vendor");
        if shows_hosts && self.vendor != from.vendor {
            return Err(Unfit::OtherVendor { from: from.vendor.clone(), to: self.vendor.clone() });
        }
        let unknown = || Unfit::UnknownModel { model: model.name.clone() };
        let mut missing = self.missing_of(model).ok_or_else(unknown)?;
        if model.takes_what_there_is() {
            missing = CpuFeatures::new();
        }
        if missing.is_empty() && (model.is_hosts_own() || model.takes_what_there_is()) {
            // The guest has every feature that `from` offered.
            let has = from.features.difference(&self.features);
            missing = has.filter(|name| !model.without.contains(*name)).cloned().collect();
        }
        if missing.is_empty() {
            Ok(())
        } else {
            Err(Unfit::Missing { model: model.to_string(), missing })
        }
    }

    /// Returns the features of a model that this host lacks; `None` if the model does not run here
    /// in full and nothing more is known about it.
    fn missing_of(&self, model: &CpuModel) -> Option<CpuFeatures> {
        let is_whole = self.models.contains(&model.name);
        let of_model = match self.generation(&model.name) {
            Some(info) => Some(&info.missing),
            None if is_whole => None,
            None => return None,
        };
        let lacking = of_model.into_iter().flatten().filter(|name| !model.without.contains(*name));
        let lacking = lacking.filter(|name| !model.with.contains(*name));
        Some(lacking.chain(model.with.difference(&self.features)).cloned().collect())
    }

    fn generation(&self, name: &str) -> Option<&GenerationInfo> {
        let by_alias = || {
            self.generations.values().find(|info| info.aliases.iter().any(|alias| alias == name))
        };
        self.generations.get(name).or_else(by_alias)
    }

    /// Returns the features of a cluster's baseline that this host lacks; empty if it satisfies the
    /// baseline. Corresponds to [`HostCpu::lacks_of`].
    #[must_use]
    pub fn lacks_of(&self, baseline: &Baseline) -> CpuFeatures {
        baseline.lacking(&self.features, |model| self.missing_of(model))
    }

    /// Converts to the type that computes baselines and checks whether VMs fit. It knows less than
    /// the host itself: it has no model that does not run there in full, and the features of a
    /// model only for those in `generations`.
    #[must_use]
    pub fn to_host_cpu(&self) -> HostCpu {
        let whole = self.models.iter().map(|name| (name.clone(), CpuFeatures::new()));
        let of_generations = self.generations.iter().flat_map(|(name, info)| {
            let names = std::iter::once(name).chain(&info.aliases);
            names.map(|name| (name.clone(), info.missing.clone()))
        });
        let aliases = self.generations.iter().flat_map(|(name, info)| {
            info.aliases.iter().map(|alias| (alias.clone(), name.clone()))
        });
        let definitions =
            self.generations.iter().map(|(name, info)| (name.clone(), info.features.clone()));
        HostCpu {
            vendor: self.vendor.clone(),
            name: self.name.clone(),
            accel: self.accel,
            features: self.features.clone(),
            models: whole.chain(of_generations).collect(),
            definitions: definitions.collect(),
            aliases: aliases.collect(),
            deprecated: self.deprecated.clone(),
            most_vcpus: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::common_baseline;

    use super::*;

    fn set(names: &[&str]) -> CpuFeatures {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_summary_is_enough_for_a_baseline() {
        let holds = [
            ("Nehalem-v1", set(&["lm", "pni"])),
            ("Haswell-v1", set(&["lm", "pni", "avx2", "rtm"])),
            ("Icelake-Server-v1", set(&["lm", "pni", "avx2", "avx512f"])),
        ];
        let features = set(&["lm", "pni", "avx2", "aes"]);
        let models = holds.iter().map(|(name, holds)| ((*name).to_owned(), holds - &features));
        let cpu = HostCpu {
            vendor: "GenuineIntel".to_owned(),
            name: "Xeon".to_owned(),
            accel: Accelerator::Kvm,
            models: models.chain([("max".to_owned(), set(&[]))]).collect(),
            features,
            definitions: holds
                .iter()
                .map(|(name, holds)| ((*name).to_owned(), holds.clone()))
                .collect(),
            aliases: [("Haswell".to_owned(), "Haswell-v1".to_owned())].into(),
            deprecated: BTreeSet::from(["Icelake-Server-v1".to_owned()]),
            most_vcpus: BTreeMap::new(),
        };
        let info = HostCpuInfo::of(&cpu);
        assert_eq!(info.models, ["Nehalem-v1", "max"]);
        assert_eq!(info.generations.keys().collect::<Vec<_>>(), ["Haswell-v1", "Nehalem-v1"]);
        assert_eq!(info.generations["Haswell-v1"].missing, set(&["rtm"]));
        let text = serde_json::to_string(&info).unwrap();
        let parsed: HostCpuInfo = serde_json::from_str(&text).unwrap();
        assert_eq!(parsed, info);
        let (whole, parsed) = (common_baseline(&[("a", &cpu)]), parsed.to_host_cpu());
        assert_eq!(whole.as_ref().unwrap().baseline.cpu_model, "Haswell-v1,-rtm,+aes");
        assert_eq!(common_baseline(&[("a", &parsed)]), whole);
    }
    /// Returns two hosts, of which the second lacks many features.
    fn two() -> [HostCpuInfo; 2] {
        let holds = [
            ("Nehalem-v1", set(&["lm", "pni"])),
            ("Haswell-v1", set(&["lm", "pni", "avx2", "rtm"])),
        ];
        [set(&["lm", "pni", "avx2", "rtm", "aes"]), set(&["lm", "pni", "avx2"])].map(|features| {
            let models = holds.iter().map(|(name, holds)| ((*name).to_owned(), holds - &features));
            let aliases = [("Haswell".to_owned(), "Haswell-v1".to_owned())];
            let of_alias = ("Haswell".to_owned(), &holds[1].1 - &features);
            HostCpuInfo::of(&HostCpu {
                vendor: "GenuineIntel".to_owned(),
                name: "Xeon".to_owned(),
                accel: Accelerator::Kvm,
                models: models.chain([("max".to_owned(), set(&[])), of_alias]).collect(),
                features: features.clone(),
                definitions: holds
                    .iter()
                    .map(|(name, holds)| ((*name).to_owned(), holds.clone()))
                    .collect(),
                aliases: aliases.into(),
                deprecated: BTreeSet::new(),
                most_vcpus: BTreeMap::new(),
            })
        })
    }

    #[test]
    fn the_summary_decides_as_the_full_description_does() {
        let [more, less] = two();
        let amd = HostCpuInfo { vendor: "AuthenticAMD".to_owned(), ..less.clone() };
        let tcg = HostCpuInfo { accel: Accelerator::Tcg, ..more.clone() };
        let models = [
            "Nehalem-v1",
            "Haswell-v1",
            "Haswell",
            "Haswell,-rtm",
            "Haswell-v1,-rtm,+aes",
            "Nehalem-v1,+aes",
            "Nehalem-v1,+aes,enforce=off",
            "Nehalem-v1,vendor=GenuineIntel",
            "max",
            "max,-aes,-rtm",
            "EPYC-v1",
        ];
        for model in models.map(CpuModel::parse) {
            for from in [&more, &less, &amd, &tcg] {
                for to in [&more, &less, &amd, &tcg] {
                    let whole = to.to_host_cpu().takes_over(&model, &from.to_host_cpu());
                    assert_eq!(
                        to.takes_over(&model, from),
                        whole,
                        "{model} from {} to {}",
                        from.vendor,
                        to.vendor
                    );
                }
            }
            let baseline = Baseline { cpu_model: model.to_string(), features: set(&["lm", "aes"]) };
            assert_eq!(less.lacks_of(&baseline), less.to_host_cpu().lacks_of(&baseline), "{model}");
        }
    }
}
