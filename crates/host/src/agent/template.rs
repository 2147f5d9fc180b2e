//! Templates: VMs that are never started, so that disks of others can be layers on their images.
//!
//! A layer shows nonsense once its base is written. So a template's images count as read by it and
//! written by nobody, and it becomes an ordinary VM again only when no disk is layered on them.

use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, SetTemplate, VmInfo};
use godwit_qemu::{ResolvedSpec, VmName};

use crate::agent::{Agent, Begun, Slot};
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Condition, Operation};
use crate::whole::whole;

impl Agent {
    /// Makes a stopped VM a template, or a template an ordinary VM.
    pub async fn set_template(
        self: &Arc<Self>,
        name: &VmName,
        SetTemplate { template }: SetTemplate,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let (operation, desired, after) = match template {
                true => (Operation::MakeTemplate, Desired::Template, Condition::Template),
                false => (Operation::EndTemplate, Desired::Stopped, Condition::Stopped),
            };
            let begun = agent.begin(&name, &operation)?;
            match tokio::task::block_in_place(|| agent.save_template(&begun, desired)) {
                Ok(()) => agent.settle(&name, after, None, None),
                Err(error) => {
                    agent.settle(&name, begun.before, begun.vm, begun.reason);
                    return Err(error);
                }
            }
            agent.vm_info(&name)
        })
        .await
    }

    fn save_template(&self, begun: &Begun, desired: Desired) -> Result<(), ApiError> {
        self.refuse_second_process(&begun.spec.name, &begun.before)?;
        match desired {
            Desired::Template => self.refuse_snapshots(&begun.spec.name, "made a template")?,
            _ => self.refuse_layers(&begun.spec)?,
        }
        self.save(&begun.spec, Role::Owner, desired, begun.ownership)
    }

    /// Refuses if a disk is layered on an image that the VM would write. A linked clone enters the
    /// table before it looks whether its source still is a template, so one of the two notices.
    fn refuse_layers(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        for disk in spec.disks.iter().filter(|disk| !disk.readonly) {
            let real = disk.path.canonicalize().unwrap_or_else(|_| disk.path.clone());
            let mut users = self.users_of_image(&real).into_iter();
            let user = users.find(|(user, _)| *user != spec.name);
            let user = user.map(|(user, _)| format!("VM \"{user}\" uses it"));
            let above = self.layers_on(&disk.path)?.into_iter().next();
            let layer = above.map(|above| format!("image {} is a layer on it", above.display()));
            let Some(why) = user.or(layer) else { continue };
            let message = format!(
                "cannot make template \"{}\" an ordinary VM: it would write {}, and {why}",
                spec.name,
                disk.path.display()
            );
            let remedy = "delete what is layered on it first, or make a full clone of the template";
            return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
        }
        Ok(())
    }

    /// At the agent's start: adds a template. It has no process.
    pub(super) fn adopt_template(&self, record: SavedVm) -> Result<(), ApiError> {
        let ownership = record.ownership();
        self.insert(Slot::new(record.spec, ownership, Condition::Template))
    }
}
