//! The engine that moves the memory of a guest.

use serde::{Deserialize, Serialize};

/// Which engine moved the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EngineKind {
    /// The engine of this project, beside the hypervisor.
    #[default]
    Godwit,
    /// QEMU's own migration.
    Qemu,
}
