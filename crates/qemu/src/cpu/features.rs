//! Features of CPUs.

use std::collections::BTreeSet;

/// Features of a CPU by QEMU's canonical names: `avx2`, `sse4.1`, `pni` (known elsewhere as SSE3).
pub type CpuFeatures = BTreeSet<String>;
