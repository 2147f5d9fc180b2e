//! A VM's TPM: what the host needs for it, the end of a move, and a swtpm that ends by itself.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::ResolvedSpec;

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::vm::{TpmSite, Vm, sync_tpm_state};

/// Time for the end of a QEMU to be noticed after that of its swtpm.
const QEMU_END_LIMIT: Duration = Duration::from_secs(2);

impl Agent {
    /// Returns the parameters of a VM's TPM on this host; `None` if it has none.
    ///
    /// # Errors
    /// The host has no swtpm.
    pub(super) fn tpm_site(&self, spec: &ResolvedSpec) -> Result<Option<TpmSite>, ApiError> {
        if !spec.tpm {
            return Ok(None);
        }
        let program = godwit_qemu::find_program(&self.config.swtpm).ok();
        let Some(program) = program.filter(|program| program.is_file()) else {
            let (host, wanted) = (&self.config.name, self.config.swtpm.display());
            let message = format!(
                "cannot give VM \"{}\" a TPM: host {host} has no swtpm ({wanted})",
                spec.name
            );
            let remedy = "install it there (`apt-get install swtpm`), or set swtpm in that host's \
                          configuration";
            return Err(ApiError::new(ErrorCode::NotFound, message, remedy));
        };
        Ok(Some(TpmSite { program, state: self.store.tpm_path(&spec.name) }))
    }

    /// Whether VMs may have a TPM on this host.
    pub(super) fn has_swtpm(&self) -> bool {
        godwit_qemu::find_program(&self.config.swtpm).is_ok_and(|program| program.is_file())
    }

    /// Returns the version of swtpm; `None` if there is none or it does not say.
    pub(super) async fn swtpm_version(&self) -> Option<String> {
        let program = godwit_qemu::find_program(&self.config.swtpm).ok()?;
        let changed = std::fs::metadata(&program).and_then(|data| data.modified()).ok()?;
        let mut known = self.swtpm.lock().await;
        match &*known {
            Some((path, at, version)) if (path, *at) == (&program, changed) => version.clone(),
            _ => {
                let version = godwit_qemu::swtpm_version(&program, self.query_user()).await;
                *known = Some((program, changed, version.clone()));
                version
            }
        }
    }

    /// At the destination, before it reports that the guest runs here: brings the TPM's state to
    /// the disk. The source then removes its own.
    ///
    /// # Errors
    /// The disk refuses: the source must keep its own.
    pub(super) fn sync_arrived_tpm(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        if !spec.tpm {
            return Ok(());
        }
        let dir = self.store.tpm_path(&spec.name);
        let synced = tokio::task::block_in_place(|| sync_tpm_state(&dir));
        let is_there = synced.map_err(|error| {
            let what = format!("cannot bring the TPM's state in {} to the disk", dir.display());
            host_failed(&what, &error)
        })?;
        if !is_there {
            let (vm, dir) = (spec.name.as_str(), dir.display());
            tracing::error!(vm, %dir, "a VM with a TPM has no state of it");
        }
        Ok(())
    }

    /// Refuses to migrate a guest whose TPM has ended: nothing has what it held.
    pub(super) fn refuse_lost_tpm(vm: &Vm) -> Result<(), ApiError> {
        if vm.losses().tpm.is_none() {
            return Ok(());
        }
        let message = format!("cannot migrate VM \"{}\": its TPM (swtpm) has ended", vm.name);
        let remedy = "restart the VM first: `godwit vm restart`";
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    }

    /// Shows that a VM lost its TPM, if swtpm ends while QEMU runs. What the TPM held since the
    /// boot is lost with it, so no other swtpm can take its place.
    pub(super) fn watch_tpm(vm: &Arc<Vm>) {
        let vm = vm.clone();
        if !vm.spec().tpm {
            return;
        }
        tokio::spawn(async move {
            let exit = match &vm.tpm {
                Some(tpm) => tokio::select! {
                    exit = tpm.exited() => exit.to_string(),
                    _ = vm.process.exited() => return,
                },
                None => "exit code unknown".to_owned(),
            };
            // swtpm also ends when QEMU does, which may be noticed later.
            if tokio::time::timeout(QEMU_END_LIMIT, vm.process.exited()).await.is_ok() {
                return;
            }
            let reason = format!(
                "its TPM (swtpm) ended by itself with {exit}, and its guest has none until the VM \
                 is restarted; see {}",
                vm.files.tpm_log().display()
            );
            tracing::error!(vm = vm.name.as_str(), reason, "TPM ended");
            vm.note_tpm_lost(reason);
        });
    }
}
