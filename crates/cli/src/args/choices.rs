//! Values of the options of `migrate`, each with its help.

use clap::ValueEnum;
use godwit_types::{Compression, EngineKind, ReferenceUse, TrackingUse};

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum EngineArg {
    /// The engine of this project, which runs beside QEMU
    Godwit,
    /// The built-in migration of QEMU
    Qemu,
}

impl From<EngineArg> for EngineKind {
    fn from(engine: EngineArg) -> EngineKind {
        match engine {
            EngineArg::Godwit => EngineKind::Godwit,
            EngineArg::Qemu => EngineKind::Qemu,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompressionArg {
    /// Compress if it is useful on the link with the available CPU
    Auto,
    /// No compression
    None,
    /// Fast, lower compression ratio
    Lz4,
    /// Slower, higher compression ratio
    Zstd,
}

impl From<CompressionArg> for Compression {
    fn from(compression: CompressionArg) -> Compression {
        match compression {
            CompressionArg::Auto => Compression::Auto,
            CompressionArg::None => Compression::None,
            CompressionArg::Lz4 => Compression::Lz4,
            CompressionArg::Zstd => Compression::Zstd,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReferencesArg {
    /// All memory at the destination: an earlier stay, other guests, the guest's own pages
    All,
    /// The guest's own pages only
    Own,
    /// No references: every page is sent, and no memory is retained for the VM's return
    None,
}

impl From<ReferencesArg> for ReferenceUse {
    fn from(references: ReferencesArg) -> ReferenceUse {
        match references {
            ReferencesArg::All => ReferenceUse::All,
            ReferencesArg::Own => ReferenceUse::Own,
            ReferencesArg::None => ReferenceUse::None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrackingArg {
    /// Faults for guests of 2 GiB and more, scans for smaller ones
    Auto,
    /// Faults: a shorter pause of a guest with much memory
    Faults,
    /// Scans of all memory: a first write to a page costs the guest least
    Scans,
}

impl From<TrackingArg> for TrackingUse {
    fn from(tracking: TrackingArg) -> TrackingUse {
        match tracking {
            TrackingArg::Auto => TrackingUse::Auto,
            TrackingArg::Faults => TrackingUse::Faults,
            TrackingArg::Scans => TrackingUse::Scans,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MultifdCompressionArg {
    /// Slow, high compression ratio
    Zlib,
    /// Fast, high compression ratio
    Zstd,
    /// No compression
    None,
}

impl MultifdCompressionArg {
    pub(crate) fn name(self) -> &'static str {
        match self {
            MultifdCompressionArg::Zlib => "zlib",
            MultifdCompressionArg::Zstd => "zstd",
            MultifdCompressionArg::None => "none",
        }
    }
}
