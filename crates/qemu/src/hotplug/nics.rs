//! NICs of a running QEMU.

use std::os::fd::{AsFd, BorrowedFd};

use serde_json::{Value, json};

use super::{PlugError, is_refusal};
use crate::launch::Tap;
use crate::nics::{netdev_id, nic_device, nic_id};
use crate::qmp::{Qmp, QmpError};
use crate::spec::ResolvedSpec;

impl Qmp {
    /// Attaches the NIC at `index` of a definition to the running machine, in its slot.
    ///
    /// # Errors
    /// QEMU refuses; nothing of the NIC remains. Or it does not respond, and may have the NIC.
    pub async fn attach_nic(
        &self,
        spec: &ResolvedSpec,
        index: usize,
        tap: &Tap,
    ) -> Result<(), PlugError> {
        let (nics, netdev) = (&spec.nics, netdev_id(&spec.nics, index));
        let attach = async {
            let mut backend = json!({"type": "tap", "id": netdev, "vhost": false});
            self.pass_fds(&mut backend, "fd", &netdev, tap.files.iter().map(AsFd::as_fd)).await?;
            if !tap.vhosts.is_empty() {
                backend["vhost"] = true.into();
                let vhosts = tap.vhosts.iter().map(AsFd::as_fd);
                self.pass_fds(&mut backend, "vhostfd", &netdev, vhosts).await?;
            }
            self.execute("netdev_add", backend).await?;
            self.execute("device_add", nic_device(&spec.machine, nics, index)).await?;
            match nics.get(index) {
                Some(nic) if !nic.link.is_up() => self.set_link(&nic_id(nics, index), false).await,
                _ => Ok(()),
            }
        };
        let Err(error) = attach.await else { return Ok(()) };
        if is_refusal(&error) {
            self.remove_nic_parts(&netdev, Some(&nic_id(nics, index))).await;
            let files = (0..tap.files.len()).map(|number| fd_name(&netdev, "fd", number));
            let vhosts = (0..tap.vhosts.len()).map(|number| fd_name(&netdev, "vhostfd", number));
            for name in files.chain(vhosts) {
                // A back end that was added has taken it.
                let _ = self.closefd(&name).await;
            }
        }
        Err(error.into())
    }

    /// Detaches the NIC at `index` of a definition and waits until the guest has released it.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not release the NIC in time; it then stays attached. A NIC
    /// that is gone already is detached.
    pub async fn detach_nic(&self, spec: &ResolvedSpec, index: usize) -> Result<(), PlugError> {
        self.remove_device(&nic_id(&spec.nics, index)).await?;
        self.remove_nic_parts(&netdev_id(&spec.nics, index), None).await;
        Ok(())
    }

    /// Passes descriptors to QEMU and names them in an option: `fd`, or its plural with several.
    async fn pass_fds(
        &self,
        backend: &mut Value,
        option: &str,
        owner: &str,
        fds: impl ExactSizeIterator<Item = BorrowedFd<'_>>,
    ) -> Result<(), QmpError> {
        let plural = if fds.len() > 1 { "s" } else { "" };
        let mut names = Vec::new();
        for (number, fd) in fds.enumerate() {
            let name = fd_name(owner, option, number);
            self.getfd(&name, fd).await?;
            names.push(name);
        }
        backend[format!("{option}{plural}")] = names.join(":").into();
        Ok(())
    }

    /// Removes the device, if it is there, and the back end, which closes the tap.
    pub(super) async fn remove_nic_parts(&self, netdev: &str, device: Option<&str>) {
        let parts = [("device_del", device), ("netdev_del", Some(netdev))];
        for (command, id) in parts {
            let Some(id) = id else { continue };
            if let Err(error) = self.execute(command, json!({"id": id})).await {
                tracing::debug!(id, command, %error, "not removed from QEMU");
            }
        }
    }
}

/// Returns the name of a passed descriptor. One that began with a digit would be a number.
fn fd_name(owner: &str, option: &str, number: usize) -> String {
    format!("{owner}-{option}{number}")
}
