//! Generations of processors, and the levels of the psABI.
//!
//! The features of a generation are not listed here: QEMU knows them for its versioned models. The
//! tables hold what QEMU lacks: the order of the generations, and the levels of the psABI (unknown
//! to QEMU 10.0).

use std::fmt;
use std::str::FromStr;

use super::features::CpuFeatures;

/// Intel's vendor string in CPUID.
pub const INTEL: &str = "GenuineIntel";
/// AMD's vendor string in CPUID.
pub const AMD: &str = "AuthenticAMD";

/// QEMU's models of Intel's server processors, the oldest first (processors of 2008 to 2023).
/// `SapphireRapids` exists from QEMU 8.0 on.
pub const INTEL_GENERATIONS: [&str; 10] = [
    "Nehalem",
    "Westmere",
    "SandyBridge",
    "IvyBridge",
    "Haswell",
    "Broadwell",
    "Skylake-Server",
    "Cascadelake-Server",
    "Icelake-Server",
    "SapphireRapids",
];

/// QEMU's models of AMD's server processors, the oldest first (2003 to 2022). `EPYC-Genoa` exists
/// from QEMU 8.1 on.
pub const AMD_GENERATIONS: [&str; 9] = [
    "Opteron_G1",
    "Opteron_G2",
    "Opteron_G3",
    "Opteron_G4",
    "Opteron_G5",
    "EPYC",
    "EPYC-Rome",
    "EPYC-Milan",
    "EPYC-Genoa",
];

/// Position of a model among its vendor's models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Generation {
    pub(super) vendor: &'static str,
    /// Rank; later generations have a higher one.
    pub(super) rank: usize,
    pub(super) version: u32,
}

/// Returns the generation of a versioned model, such as `Haswell-v4`; `None` if the model is of
/// none of these generations, or has no version.
pub(super) fn generation_of(model: &str) -> Option<Generation> {
    let (name, version) = model.rsplit_once("-v")?;
    let version = version.parse().ok()?;
    let rank_in = |names: &[&str]| names.iter().position(|known| *known == name);
    let (vendor, rank) = match (rank_in(&INTEL_GENERATIONS), rank_in(&AMD_GENERATIONS)) {
        (Some(rank), _) => (INTEL, rank),
        (None, Some(rank)) => (AMD, rank),
        (None, None) => return None,
    };
    Some(Generation { vendor, rank, version })
}

/// Features that each level adds to the level below, by QEMU's names. Source: System V Application
/// Binary Interface, AMD64 Architecture Processor Supplement, table "Micro-Architecture Levels"
/// (section 3.1.1). OSFXSR and OSXSAVE there are set by the operating system; `xsave` is what it
/// needs for the latter. SCE is `syscall`, LZCNT `abm`, SSE3 `pni`.
const LEVELS: [&[&str]; 4] = [
    &["cmov", "cx8", "fpu", "fxsr", "lm", "mmx", "sse", "sse2", "syscall"],
    &["cx16", "lahf-lm", "pni", "popcnt", "sse4.1", "sse4.2", "ssse3"],
    &["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"],
    &["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"],
];

/// Models from which levels are built: the oldest with about as many features as the first level,
/// and as the second.
pub const LEVEL_MODELS: [&str; 2] = ["Opteron_G1-v1", "Nehalem-v1"];

/// A level of the x86-64 psABI: the features that programs compiled for it need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PsabiLevel {
    /// x86-64-v1: every 64-bit processor.
    V1,
    /// x86-64-v2: from about 2009.
    V2,
    /// x86-64-v3: with AVX2.
    V3,
    /// x86-64-v4: with AVX-512.
    V4,
}

impl PsabiLevel {
    /// All levels, the lowest first.
    pub const ALL: [PsabiLevel; 4] =
        [PsabiLevel::V1, PsabiLevel::V2, PsabiLevel::V3, PsabiLevel::V4];

    /// Name of the level in the psABI.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PsabiLevel::V1 => "x86-64-v1",
            PsabiLevel::V2 => "x86-64-v2",
            PsabiLevel::V3 => "x86-64-v3",
            PsabiLevel::V4 => "x86-64-v4",
        }
    }

    /// All features that the level requires.
    #[must_use]
    pub fn features(self) -> CpuFeatures {
        self.names().map(str::to_owned).collect()
    }

    /// Whether the level requires that feature.
    pub(super) fn asks_for(self, feature: &str) -> bool {
        self.names().any(|name| name == feature)
    }

    fn names(self) -> impl Iterator<Item = &'static str> {
        let levels =
            PsabiLevel::ALL.into_iter().zip(LEVELS).filter(move |(level, _)| *level <= self);
        levels.flat_map(|(_, features)| features).copied()
    }

    /// The model with about as many features.
    pub(super) fn model(self) -> &'static str {
        let [first, second] = LEVEL_MODELS;
        if self == PsabiLevel::V1 { first } else { second }
    }

    /// Returns the highest level that these features reach.
    #[must_use]
    pub fn of(features: &CpuFeatures) -> Option<PsabiLevel> {
        PsabiLevel::ALL.into_iter().rev().find(|level| level.features().is_subset(features))
    }
}

impl fmt::Display for PsabiLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that does not name a level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is not a level of the x86-64 psABI: use x86-64-v1 to x86-64-v4")]
pub struct UnknownLevel {
    pub text: String,
}

impl FromStr for PsabiLevel {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<PsabiLevel, UnknownLevel> {
        let named = PsabiLevel::ALL.into_iter().find(|level| level.name() == text);
        named.ok_or_else(|| UnknownLevel { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versioned_models_have_their_generation() {
        let generation = generation_of("Skylake-Server-v5").unwrap();
        assert_eq!(generation, Generation { vendor: INTEL, rank: 6, version: 5 });
        assert_eq!(generation_of("EPYC-Rome-v2").unwrap().vendor, AMD);
        assert_eq!(generation_of("EPYC-v3").unwrap().rank, 5);
        for other in
            ["Haswell", "Haswell-noTSX", "KnightsMill-v1", "kvm64-v1", "EPYC-v", "host", ""]
        {
            assert_eq!(generation_of(other), None, "{other}");
        }
    }

    #[test]
    fn each_level_includes_the_one_below() {
        for pair in PsabiLevel::ALL.windows(2) {
            assert!(pair[0].features().is_subset(&pair[1].features()));
            assert_eq!(PsabiLevel::of(&pair[0].features()), Some(pair[0]));
        }
        let mut almost = PsabiLevel::V3.features();
        almost.remove("movbe");
        assert_eq!(PsabiLevel::of(&almost), Some(PsabiLevel::V2));
        assert_eq!(PsabiLevel::of(&CpuFeatures::new()), None);
        assert_eq!("x86-64-v3".parse(), Ok(PsabiLevel::V3));
        assert!("x86-64-v5".parse::<PsabiLevel>().is_err());
    }
}
