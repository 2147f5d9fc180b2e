//! vCPUs and memory of a running QEMU.

use std::os::fd::{BorrowedFd, RawFd};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{PlugError, is_refusal};
use crate::launch::{dimm_device, memory_id, memory_object};
use crate::process::path_in_qemu;
use crate::qmp::{Qmp, QmpError};
use crate::spec::ResolvedSpec;

/// A vCPU that a machine can have (`query-hotpluggable-cpus`).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct PossibleVcpu {
    /// Driver of its device.
    #[serde(rename = "type")]
    driver: String,
    /// Its place in the machine's topology.
    props: Map<String, Value>,
    /// Present if the machine has it.
    qom_path: Option<String>,
}

impl PossibleVcpu {
    /// Returns what orders vCPUs: from the largest part of the topology to the smallest.
    fn place(&self) -> [u64; 6] {
        ["socket-id", "die-id", "cluster-id", "module-id", "core-id", "thread-id"]
            .map(|part| self.props.get(part).and_then(Value::as_u64).unwrap_or(0))
    }
}

/// Returns the devices that make a machine have `count` vCPUs; `None` if what it has is not the
/// first of what it can have.
fn vcpus_to_add(mut possible: Vec<PossibleVcpu>, count: usize) -> Option<Vec<Value>> {
    possible.sort_by_key(PossibleVcpu::place);
    let has = possible.iter().filter(|vcpu| vcpu.qom_path.is_some()).count();
    let are_first = possible.iter().take(has).all(|vcpu| vcpu.qom_path.is_some());
    if !are_first || count > possible.len() || has > count {
        return None;
    }
    let device = |(index, vcpu): (usize, &PossibleVcpu)| {
        let mut device = vcpu.props.clone();
        device.insert("driver".to_owned(), vcpu.driver.clone().into());
        device.insert("id".to_owned(), format!("vcpu{index}").into());
        Value::Object(device)
    };
    Some(possible.iter().enumerate().take(count).skip(has).map(device).collect())
}

impl Qmp {
    /// Gives the running machine more vCPUs, so that it has `count`: the first of those that it can
    /// have.
    ///
    /// # Errors
    /// QEMU refuses or does not respond; the machine may have some of them.
    pub async fn plug_vcpus(&self, count: u32) -> Result<(), PlugError> {
        let answer = self.execute("query-hotpluggable-cpus", Value::Null).await?;
        let possible: Vec<PossibleVcpu> = serde_json::from_value(answer)
            .map_err(|why| QmpError::Protocol { why: format!("the possible vCPUs: {why}") })?;
        let devices = vcpus_to_add(possible, count as usize).ok_or(PlugError::OtherVcpus)?;
        for device in devices {
            self.execute("device_add", device).await?;
        }
        Ok(())
    }

    /// Returns the number of vCPUs that the machine has.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn vcpu_count(&self) -> Result<u32, QmpError> {
        let vcpus = self.execute("query-cpus-fast", Value::Null).await?;
        let count = vcpus.as_array().and_then(|vcpus| u32::try_from(vcpus.len()).ok());
        count.ok_or_else(|| QmpError::Protocol { why: "no list of vCPUs".to_owned() })
    }

    /// Gives the running machine the memory block at `index` of a definition as a module. `file`:
    /// the block's file, if it is shared.
    ///
    /// # Errors
    /// QEMU refuses; nothing of the block remains. Or it does not respond, and may have it.
    pub async fn plug_memory(
        &self,
        spec: &ResolvedSpec,
        index: usize,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(), PlugError> {
        let Some(block) = spec.memory.get(index) else { return Ok(()) };
        let id = memory_id(index);
        // An agent that ended while it plugged memory may have left the block's back end. QEMU
        // removes none that a module uses.
        if self.execute("object-del", json!({"id": id})).await.is_ok() {
            tracing::warn!(id, "a memory block without a module was left in QEMU");
            self.remove_sets(&id).await;
        }
        let plug = async {
            let path = match file {
                // QEMU reopens the descriptor, which is its own afterwards.
                Some(file) => Some(path_in_qemu(self.pass_memory(&id, file).await?)),
                None => None,
            };
            self.execute("object-add", memory_object(index, block, path)).await?;
            let device = dimm_device(spec, index, block);
            let added = self.execute("device_add", device).await;
            if added.as_ref().is_err_and(is_refusal)
                && let Err(error) = self.execute("object-del", json!({"id": id})).await
            {
                tracing::warn!(id, %error, "a memory block stays in QEMU");
            }
            added
        };
        let plugged = plug.await;
        if plugged.as_ref().err().is_none_or(is_refusal) {
            self.remove_sets(&id).await;
        }
        plugged.map(drop).map_err(PlugError::from)
    }

    /// Passes a memory file to QEMU; returns the number of its descriptor there.
    async fn pass_memory(&self, owner: &str, file: BorrowedFd<'_>) -> Result<RawFd, QmpError> {
        let added = self.execute_with_fd("add-fd", json!({"opaque": owner}), file).await?;
        let number = added["fd"].as_i64().and_then(|fd| RawFd::try_from(fd).ok());
        number.ok_or_else(|| QmpError::Protocol {
            why: "the response to add-fd has no descriptor".to_owned(),
        })
    }

    /// Returns the addresses of the memory modules that the machine has.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    async fn dimm_addresses(&self) -> Result<Vec<u64>, QmpError> {
        let devices = self.execute("query-memory-devices", Value::Null).await?;
        let devices = devices.as_array().into_iter().flatten();
        Ok(devices.filter_map(|device| device["data"]["addr"].as_u64()).collect())
    }

    /// Returns the definition with the vCPUs, memory modules and detachable devices that the
    /// machine really has, if they came or went while no agent recorded it; `None` if they are as
    /// recorded.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn as_plugged(&self, spec: &ResolvedSpec) -> Result<Option<ResolvedSpec>, QmpError> {
        let mut real = self.without_released(spec).await?.unwrap_or_else(|| spec.clone());
        if spec.max_cpus.is_some() {
            real.vcpus = self.vcpu_count().await?.clamp(1, spec.most_vcpus());
        }
        if spec.dimms().next().is_some() {
            let addresses = self.dimm_addresses().await?;
            // A module is recorded before it is plugged.
            real.memory.retain(|block| block.address.is_none_or(|at| addresses.contains(&at)));
        }
        Ok((real != *spec).then_some(real))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn possible(core: u64, is_there: bool) -> PossibleVcpu {
        let mut vcpu = json!({
            "type": "Westmere-v1-x86_64-cpu", "vcpus-count": 1,
            "props": {"core-id": core, "thread-id": 0, "socket-id": 0},
        });
        if is_there {
            vcpu["qom-path"] = "/machine/unattached/device[0]".into();
        }
        serde_json::from_value(vcpu).unwrap()
    }

    #[test]
    fn the_next_vcpus_are_added() {
        // QEMU lists the last one first.
        let all =
            || vec![possible(3, false), possible(2, false), possible(1, true), possible(0, true)];
        let added = vcpus_to_add(all(), 3).unwrap();
        assert_eq!(
            added,
            [json!({"driver": "Westmere-v1-x86_64-cpu", "id": "vcpu2", "core-id": 2,
                "thread-id": 0, "socket-id": 0})]
        );
        assert_eq!(vcpus_to_add(all(), 4).unwrap().len(), 2);
        assert_eq!(vcpus_to_add(all(), 2).unwrap(), Vec::<Value>::new());
        assert_eq!(vcpus_to_add(all(), 5), None);
        assert_eq!(vcpus_to_add(all(), 1), None);
        assert_eq!(vcpus_to_add(vec![possible(0, false), possible(1, true)], 2), None);
    }
}
