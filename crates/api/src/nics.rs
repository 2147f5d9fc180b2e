//! Changes of the NICs of a VM that exists.

use godwit_qemu::Nic;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A NIC that a VM gets or loses, running or stopped; request of `POST /v1/vms/{name}/nics`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
#[schema(example = json!({ "action": "attach", "nic": { "network": "lan" } }))]
pub enum NicChange {
    /// Attaches a NIC. A running VM takes it in a free slot of its `hotplug_slots`.
    Attach {
        /// The NIC. Without a hardware address it gets one.
        nic: Nic,
    },
    /// Detaches the NIC with this hardware address.
    Detach {
        /// Its hardware address.
        mac: String,
    },
}
