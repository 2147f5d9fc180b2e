//! Disks that travel with a VM: their progress and their report.

use serde::{Deserialize, Serialize};

/// Progress of the disks of a running migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DisksProgress {
    /// Number of the current round.
    pub round: u32,
    /// Bytes of the disks that this round still has to send.
    pub remaining_bytes: u64,
    /// Bytes of the disks that are in use, as found when the transfer began.
    pub total_bytes: u64,
    /// Bytes of the disks that were sent so far, before compression.
    pub sent_bytes: u64,
    /// Bytes among them that the destination had already, as far as rounds have ended.
    #[serde(default)]
    pub referenced_bytes: u64,
    /// Measured throughput, before compression.
    pub bytes_per_s: f64,
    /// Limit of the guest's writes to its disks; absent if they are not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_to_bytes_per_s: Option<u64>,
}

/// How a source knows what a guest writes to its disks while they travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DiskMeans {
    /// QEMU records it in dirty bitmaps, and exports the disks.
    #[default]
    Bitmaps,
    /// QEMU sends each write to the agent: a mirror.
    Mirror,
}

/// How the disks travelled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DisksReport {
    /// How it was known what the guest wrote meanwhile.
    #[serde(default)]
    pub means: DiskMeans,
    /// The disks, in the order of the VM's specification.
    pub disks: Vec<DiskReport>,
    /// All rounds, the last one in the pause.
    pub rounds: Vec<DiskRound>,
    /// Bytes of the disks that the streams carried, including headers.
    pub wire_bytes: u64,
    /// Bytes that were sent again because a cut or a restart came before they were on the
    /// destination's disk.
    #[serde(default)]
    pub resent_bytes: u64,
    /// Lowest limit of the guest's writes to its disks; absent if they were not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_to_bytes_per_s: Option<u64>,
    /// Time for which the guest's writes were limited.
    #[serde(default)]
    pub limited_ms: f64,
    /// Time that the last round took, in the pause; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_round_ms: Option<f64>,
    /// Time at which the source may remove the images that it still has, in Unix milliseconds.
    /// Absent: it has deleted them, or keeps them without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until_unix_ms: Option<u64>,
}

/// One disk that travelled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DiskReport {
    /// The image at the source.
    pub from: String,
    /// The image at the destination.
    pub to: String,
    /// Size of the disk that the guest sees.
    pub virtual_bytes: u64,
    /// Bytes that were sent, before compression.
    pub sent_bytes: u64,
    /// Bytes among them that were zero, and took no space on the wire.
    pub zero_bytes: u64,
    /// Bytes among them that the destination had already: their hashes were sent.
    #[serde(default)]
    pub referenced_bytes: u64,
    /// Whether its backing file stayed behind, because the destination has the same.
    #[serde(default)]
    pub base_was_there: bool,
}

/// One round over all disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DiskRound {
    /// Bytes that were to be sent.
    pub bytes: u64,
    /// Time until all of them were on the destination's disk.
    pub duration_ms: f64,
}
