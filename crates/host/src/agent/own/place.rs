//! Where the terms of a VM are: on the one datastore with all of its disks, and that stays so.

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{HIDDEN, ResolvedSpec, VmSpec, kept_by_agents};

use crate::agent::Agent;
use crate::ha::own::{Place, check_images};

impl Agent {
    /// Checks that other hosts could start a VM that agents restart. Blocks.
    ///
    /// # Errors
    /// A disk of it is not on one datastore with all others.
    pub(in crate::agent) fn check_own(&self, spec: &VmSpec) -> Result<(), ApiError> {
        if spec.protect_by_agents { self.own_place(spec).map(drop) } else { Ok(()) }
    }

    /// Checks that the disks of a VM that agents restart stay on the datastore with its terms.
    /// Blocks.
    ///
    /// # Errors
    /// A change would move them.
    pub(in crate::agent) fn check_stays(
        &self,
        old: &ResolvedSpec,
        wanted: &VmSpec,
    ) -> Result<(), ApiError> {
        if !old.protect_by_agents || !wanted.protect_by_agents {
            return self.check_own(wanted);
        }
        let to = self.own_place(wanted)?;
        match self.own_place(&old.to_vm_spec()) {
            Ok(from) if from.datastore != to.datastore => Agent::refuse_own("move disks of", old),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Returns the place of a VM's terms: the datastore with all of its disks. Blocks.
    pub(super) fn own_place(&self, spec: &VmSpec) -> Result<Place, ApiError> {
        let refuse = |why: &str| {
            let name = &spec.name;
            let message = format!("cannot let agents restart VM \"{name}\": {why}");
            let remedy = "keep all of its disks and CD-ROM images in one shared directory of \
                          vm_dirs that `godwit host show` lists with an identity";
            ApiError::new(ErrorCode::Preflight, message, remedy)
        };
        let uuid = spec.uuid.filter(|uuid| !uuid.is_nil());
        let vm = uuid.ok_or_else(|| refuse("it has no uuid"))?;
        let mut why = "this host has no datastore yet".to_owned();
        let mut known = self.datastore_directories();
        // Directories of disks alone are unknown while an agent starts.
        known.retain(|_, directory| self.config.vm_dirs.contains(directory));
        for (datastore, directory) in known {
            match check_images(spec, &directory) {
                Ok(()) => return Ok(Place { directory, datastore, vm }),
                Err(outside) => why = outside,
            }
        }
        Err(refuse(&why))
    }

    /// Refuses what would move a VM that agents restart, or its disks.
    ///
    /// # Errors
    /// They restart it.
    pub(in crate::agent) fn refuse_own(verb: &str, spec: &ResolvedSpec) -> Result<(), ApiError> {
        if !spec.protect_by_agents {
            return Ok(());
        }
        let name = &spec.name;
        let kept = kept_by_agents(name);
        let message = format!("cannot {verb} VM \"{name}\": {}", kept.message);
        Err(ApiError::new(ErrorCode::WrongState, message, kept.remedy))
    }
}

/// Returns a specification with which another host can start the VM. Secrets for cloud-init were
/// used at the first boot.
pub(super) fn spec_elsewhere(spec: VmSpec) -> VmSpec {
    let mut spec = spec.without_secrets();
    if let Some(seed) = &mut spec.cloud_init {
        for secret in [&mut seed.password_hash, &mut seed.user_data] {
            if secret.as_deref() == Some(HIDDEN) {
                *secret = None;
            }
        }
    }
    spec
}

pub(super) fn refused(verb: &str, vm: &str, why: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("cannot {verb} VM \"{vm}\": {why}"),
        "see `godwit host ha` on its hosts, and the folder .godwit/protected of its datastore",
    )
}
