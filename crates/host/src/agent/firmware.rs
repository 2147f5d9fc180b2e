//! A VM's firmware in flash: its images and variables at a start, and at both ends of a move.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use godwit_api::{ApiError, ErrorCode, IncomingFirmware};
use godwit_migration::Failure;
use godwit_qemu::{OpenFirmware, ResolvedSpec};
use godwit_types::{FailureCode, Fault};

use crate::agent::Agent;
use crate::failure::host_failed;
use crate::firmware::{OpenImages, VariablesWatch, read_variables};
use crate::vm::{Begin, Vm};

impl Agent {
    /// Opens this host's images for a VM's firmware; `None` for a BIOS, which QEMU has itself.
    ///
    /// # Errors
    /// This host has none, or one cannot be used.
    pub(super) fn firmware_images(
        &self,
        spec: &ResolvedSpec,
    ) -> Result<Option<OpenImages>, ApiError> {
        let (firmware, host) = (spec.firmware, &self.config.name);
        if firmware.is_bios() {
            return Ok(None);
        }
        let Some(images) = self.config.firmware.images(firmware, &spec.machine) else {
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!(
                    "cannot give VM \"{}\" firmware {firmware}: host {host} has no image of it for \
                     machine type {}",
                    spec.name, spec.machine
                ),
                format!(
                    "install it there (`apt-get install ovmf`), or set firmware.{firmware} in that \
                     host's configuration"
                ),
            ));
        };
        OpenImages::open(images).map(Some).map_err(|(path, why)| {
            let path = path.display();
            ApiError::new(
                ErrorCode::NotFound,
                format!("cannot use firmware {path} on host {host}: {why}"),
                "install it again (`apt-get install --reinstall ovmf`), or correct the path in the \
                 configuration",
            )
        })
    }

    /// Opens the code and the VM's variables for QEMU. A VM that boots without variables gets those
    /// of the template.
    pub(super) fn open_firmware(
        &self,
        spec: &ResolvedSpec,
        begin: Begin,
    ) -> Result<Option<OpenFirmware>, ApiError> {
        let Some(images) = self.firmware_images(spec)? else { return Ok(None) };
        let path = self.store.variables_path(spec);
        let failed = |what: &str, error: &io::Error| {
            host_failed(&format!("cannot {what} the variables {}", path.display()), error)
        };
        let exists = path.try_exists().map_err(|error| failed("open", &error))?;
        if begin == Begin::Boot && !exists {
            let template = images.template().map_err(|error| failed("create", &error))?;
            self.store.save_variables(spec, &template)?;
        }
        let variables = OpenOptions::new().read(true).write(true).open(&path);
        let variables = variables.map_err(|error| failed("open", &error))?;
        let bytes = variables.metadata().map_err(|error| failed("open", &error))?.len();
        if bytes != images.template_bytes {
            return Err(self.other_variables(&images, &path, bytes));
        }
        Ok(Some(OpenFirmware { code: images.code.into(), variables: variables.into() }))
    }

    fn other_variables(&self, images: &OpenImages, path: &Path, bytes: u64) -> ApiError {
        let (code, path) = (images.paths.code.display(), path.display());
        let message = format!(
            "cannot start with firmware {code} on host {}: its variables have {} bytes, and those \
             of the VM, {path}, have {bytes}",
            self.config.name, images.template_bytes
        );
        let remedy = format!(
            "set [firmware] in the configuration to the build that the VM had; or remove {path}: \
             the VM then starts with the variables of the new build"
        );
        ApiError::new(ErrorCode::Preflight, message, remedy)
    }

    /// At the destination: checks that an arriving VM's firmware fits this host's.
    pub(crate) fn check_incoming_firmware(
        &self,
        spec: &ResolvedSpec,
        from: &str,
        theirs: Option<&IncomingFirmware>,
    ) -> Result<(), ApiError> {
        let (name, host) = (&spec.name, &self.config.name);
        let refused = |message: String, remedy: &str| {
            Err(ApiError::new(ErrorCode::Preflight, message, remedy))
        };
        let (images, theirs) = match (self.firmware_images(spec)?, theirs) {
            (None, None) => return Ok(()),
            (Some(images), Some(theirs)) => (images, theirs),
            _ => {
                let message =
                    format!("cannot accept VM \"{name}\": the request does not fit its firmware");
                return refused(message, "both agents must run the same release");
            }
        };
        let paths = &images.paths;
        for (what, path, ours_bytes, theirs_bytes) in [
            ("code", &paths.code, images.code_bytes, theirs.code_bytes),
            ("variables", &paths.variables, images.template_bytes, theirs.variables_bytes),
        ] {
            if ours_bytes != theirs_bytes {
                let message = format!(
                    "cannot accept VM \"{name}\": the size of the {what} of its firmware {} \
                     differs: {theirs_bytes} bytes on host {from}, {ours_bytes} bytes on host \
                     {host} ({})",
                    spec.firmware,
                    path.display()
                );
                let remedy = "install the same build of the firmware on both hosts, and restart \
                              the VM if its host's was changed while it ran";
                return refused(message, remedy);
            }
        }
        Ok(())
    }

    /// At the destination, before QEMU starts: saves the variables of an arriving VM.
    pub(super) fn save_arriving_variables(
        &self,
        spec: &ResolvedSpec,
        theirs: Option<&IncomingFirmware>,
    ) -> Result<(), ApiError> {
        let Some(theirs) = theirs else { return Ok(()) };
        let decoded = BASE64.decode(&theirs.variables).ok();
        let fits = |content: &Vec<u8>| content.len() as u64 == theirs.variables_bytes;
        let Some(content) = decoded.filter(fits) else {
            let message = format!("cannot read the firmware's variables of VM \"{}\"", spec.name);
            let remedy = "both agents must run the same release";
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        };
        Ok(tokio::task::block_in_place(|| self.store.save_variables(spec, &content))?)
    }

    /// At the source: describes the firmware of a running VM to a destination. With `content`, adds
    /// the variables.
    pub(crate) async fn outgoing_firmware(
        &self,
        vm: &Vm,
        content: bool,
    ) -> Result<Option<IncomingFirmware>, Fault> {
        if vm.spec().firmware.is_bios() {
            return Ok(None);
        }
        let failed = |why: String| {
            let detail = format!("cannot read the firmware of VM \"{}\": {why}", vm.name);
            Failure::new(FailureCode::HypervisorFailed, detail).to_fault()
        };
        // The host's files may have been replaced since the start.
        let qmp = &vm.process.qmp;
        let code_bytes = qmp.flash_bytes(0).await.map_err(|error| failed(error.to_string()))?;
        let variables_bytes =
            qmp.flash_bytes(1).await.map_err(|error| failed(error.to_string()))?;
        let variables = match content {
            true => {
                let path = self.store.variables_path(&vm.spec());
                let read = tokio::task::block_in_place(|| read_variables(&path));
                let read = read.map_err(|error| failed(format!("{}: {error}", path.display())))?;
                if read.len() as u64 != variables_bytes {
                    let bytes = read.len();
                    let why = format!("{} has {bytes} bytes of {variables_bytes}", path.display());
                    return Err(failed(why));
                }
                BASE64.encode(read)
            }
            false => String::new(),
        };
        Ok(Some(IncomingFirmware { code_bytes, variables_bytes, variables }))
    }

    /// At the source, before QEMU's stream begins: watches the VM's variables, if it has any.
    pub(crate) fn watch_variables(&self, vm: &Vm) -> Result<Option<VariablesWatch>, Failure> {
        if vm.spec().firmware.is_bios() {
            return Ok(None);
        }
        let path = self.store.variables_path(&vm.spec());
        VariablesWatch::begin(path).map(Some).map_err(|error| {
            let detail = format!("cannot read the variables of VM \"{}\": {error}", vm.name);
            Failure::new(FailureCode::Internal, detail)
        })
    }
}
