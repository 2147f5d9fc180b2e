//! Clones of stopped VMs and of templates.
//!
//! A clone has a name, a UUID, hardware addresses and images of its own, and a copy of the
//! variables of its source's firmware. cloud-init in it takes its UUID for a new instance. Images
//! of a full clone are copies, those of a linked clone are layers on its template's.

use std::sync::Arc;

use godwit_api::{ApiError, CloneMode, CloneVm, ErrorCode, VmInfo};
use godwit_qemu::{ResolvedSpec, Uuid, VmName};
use godwit_types::{Incarnation, Ownership};

use crate::agent::images::NewImages;
use crate::agent::lifecycle::FIRST_EPOCH;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Slot};
use crate::failure::{host_failed, spec_refused};
use crate::firmware::read_variables;
use crate::store::{Desired, Role};
use crate::vm::{Condition, Operation};
use crate::whole::whole;

impl Agent {
    /// Clones a VM without a process. If that fails, nothing of the clone remains.
    pub async fn clone_vm(
        self: &Arc<Self>,
        source: &VmName,
        request: CloneVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, source) = (self.clone(), source.clone());
        whole(async move {
            let name = VmName::new(request.name.as_str()).map_err(|error| spec_refused(&error))?;
            agent.check_name(&name)?;
            let linked = match request.mode {
                Some(mode) => mode == CloneMode::Linked,
                None => agent.is_template(&source)?,
            };
            let operation = if linked { Operation::Layer } else { Operation::Copy };
            let begun = agent.begin(&source, &operation)?;
            let made = match agent.refuse_second_process(&source, &begun.before) {
                Ok(()) => agent.make_clone(&begun.spec, &name, linked, &request).await,
                Err(error) => Err(error),
            };
            if !linked {
                agent.settle(&source, begun.before, begun.vm, begun.reason);
            }
            let mut images = made?;
            if request.start {
                images = agent.start_created(&name, images).await?;
            }
            images.keep();
            tracing::info!(vm = name.as_str(), source = source.as_str(), linked, "cloned");
            agent.vm_info(&name)
        })
        .await
    }

    fn is_template(&self, name: &VmName) -> Result<bool, ApiError> {
        let table = self.table();
        Ok(table.get(name).ok_or_else(|| self.no_vm(name))?.condition.is_template())
    }

    /// Defines the clone; its images are removed unless the caller keeps them.
    async fn make_clone(
        self: &Arc<Self>,
        source: &ResolvedSpec,
        name: &VmName,
        linked: bool,
        request: &CloneVm,
    ) -> Result<NewImages, ApiError> {
        let uuid = request.uuid.unwrap_or_else(Uuid::new_v4);
        let spec = source.to_vm_spec().cloned(name, uuid, &request.addresses);
        let spec = spec.map_err(|error| spec_refused(&error))?;
        let mut spec = self.resolve(spec).await?;
        let mut images = NewImages::default();
        spec.disks = self.clone_images(source, name, linked, &mut images).await?;
        let rule = if request.vm_dirs_only { FileRule::VmDirs } else { FileRule::Operator };
        let files = self.check_fits(&spec, rule).await?.files;
        files.record_chains(&mut spec);
        let incarnation = Incarnation::new(Uuid::new_v4().as_u128());
        let ownership = Ownership { incarnation, epoch: FIRST_EPOCH };
        // Nothing else begins before it is complete.
        self.insert_new(Slot::new(spec.clone(), ownership, Condition::Changing))?;
        let made = tokio::task::block_in_place(|| {
            self.check_conflicts(&spec, &files)?;
            if linked && !self.is_template(&source.name)? {
                let message = format!(
                    "cannot clone VM \"{}\": it has just ceased to be a template",
                    source.name
                );
                return Err(ApiError::new(ErrorCode::Busy, message, "see the VM, then retry"));
            }
            self.copy_variables(source, &spec)?;
            self.save(&spec, Role::Owner, Desired::Stopped, ownership)
        });
        self.end_creation(name, made)?;
        Ok(images)
    }

    /// Gives a clone the variables of its source's firmware. A source that never started has none.
    fn copy_variables(&self, source: &ResolvedSpec, clone: &ResolvedSpec) -> Result<(), ApiError> {
        let path = self.store.variables_path(source);
        if source.firmware.is_bios() || !path.exists() {
            return Ok(());
        }
        let content = read_variables(&path).map_err(|error| {
            host_failed(&format!("cannot read the variables {}", path.display()), &error)
        })?;
        Ok(self.store.save_variables(clone, &content)?)
    }
}
