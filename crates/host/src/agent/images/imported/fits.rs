//! What a definition becomes on this host: its networks, machine type, CPU model, CDs and disks.

use godwit_api::{ApiError, ImportDisk, ImportFinding, ImportVm};
use godwit_import::{DiskSource, SourceDisk};
use godwit_qemu::{Disk, DiskFormat, FoundFile, NewDrive, OpenFiles, VmSpec};

use super::opened::Opened;
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;

impl Agent {
    /// Names the networks of this host; one that it does not have refuses the import.
    pub(super) fn fit_networks(
        &self,
        request: &ImportVm,
        spec: &mut VmSpec,
        findings: &mut Vec<ImportFinding>,
    ) {
        for nic in &mut spec.nics {
            if let Some(network) = request.networks.get(&nic.network) {
                nic.network.clone_from(network);
            }
            let networks = &self.config().networks;
            if !networks.contains_key(&nic.network)
                && let Some((name, _)) = networks.iter().find(|(_, of)| of.bridge == nic.network)
            {
                nic.network.clone_from(name);
            }
            if !networks.contains_key(&nic.network) {
                let known: Vec<_> = networks.keys().map(String::as_str).collect();
                let why = format!(
                    "host {} has no such network: give --network \"{}\"=NAME, one of: {}",
                    self.config().name,
                    nic.network,
                    known.join(", ")
                );
                findings.push(ImportFinding::refusal(format!("network {}", nic.network), why));
            }
        }
    }

    /// Replaces a machine type and a CPU model that this host's QEMU lacks.
    pub(super) async fn fit_machine(
        &self,
        spec: &mut VmSpec,
        findings: &mut Vec<ImportFinding>,
    ) -> Result<(), ApiError> {
        let qemu = self.qemu(None).await?;
        if let Some(machine) = spec.machine.clone()
            && qemu.versioned_machine(&machine).is_none()
        {
            let family = if machine.starts_with("pc-q35") { "q35" } else { "pc" };
            let why = format!("this host's QEMU has no \"{machine}\": {family}");
            findings.push(ImportFinding::note("machine type", why));
            spec.machine = Some(family.to_owned());
        }
        if let Some(model) = spec.cpu_model.clone()
            && !qemu.knows_cpu_model(&model)
        {
            let why = "this host's QEMU has no such model: the default of Godwit";
            findings.push(ImportFinding::note(format!("CPU {model}"), why));
            spec.cpu_model = None;
        }
        Ok(())
    }

    /// Empties drives whose CD is not on this host.
    pub(super) fn fit_cdroms(
        &self,
        spec: &mut VmSpec,
        rule: FileRule,
        findings: &mut Vec<ImportFinding>,
    ) {
        let may_open = |file: &FoundFile| rule.allows(file, &self.config().vm_dirs);
        for drive in &mut spec.cdroms {
            let Some(image) = &drive.image else { continue };
            if let Err(error) = OpenFiles::open_drive(&NewDrive::Medium(image), &may_open) {
                findings.push(ImportFinding::note("CD", format!("the drive is empty: {error}")));
                drive.image = None;
            }
        }
    }
}

/// Compares the size of an image with what the definition promises.
pub(super) fn check_size(disk: &SourceDisk, found: &ImportDisk, findings: &mut Vec<ImportFinding>) {
    let Some(promised) = disk.bytes.filter(|bytes| *bytes != found.bytes) else { return };
    let why = format!("its image is of {} bytes, and the definition says {promised}", found.bytes);
    // The sizes of Proxmox VE are rounded, and can be out of date.
    findings.push(match disk.source {
        DiskSource::Member(_) => ImportFinding::refusal(&disk.name, why),
        _ => ImportFinding::note(&disk.name, why),
    });
}

/// Makes a disk of the VM the image itself.
pub(super) fn take(
    wanted: &mut Disk,
    disk: &SourceDisk,
    found: &ImportDisk,
    open: &Opened,
    findings: &mut Vec<ImportFinding>,
) {
    match (open, &found.source) {
        (Opened::Layers(layers), Some(path)) => {
            wanted.path.clone_from(path);
            wanted.format = layers.first().map_or(DiskFormat::Raw, |layer| layer.format);
            let why = "the VM uses its image itself: its old platform must not start it again";
            findings.push(ImportFinding::note(&disk.name, why));
        }
        _ => {
            let why = format!("cannot use {} images in place: import a copy", found.format);
            findings.push(ImportFinding::refusal(&disk.name, why));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_a_package_lies_about_is_refused() {
        let found = ImportDisk {
            name: "vda".to_owned(),
            source: None,
            format: "vmdk".to_owned(),
            bytes: 1 << 30,
        };
        let findings = |source| {
            let bytes = Some(2 << 30);
            let disk = SourceDisk { name: "vda".to_owned(), source, format: None, bytes };
            let mut findings = Vec::new();
            check_size(&disk, &found, &mut findings);
            findings.iter().map(|found| found.refuses).collect::<Vec<_>>()
        };
        assert_eq!(findings(DiskSource::Member("a".to_owned())), [true]);
        let volume = DiskSource::Volume { storage: "local".to_owned(), name: "a".to_owned() };
        assert_eq!(findings(volume), [false]);
    }
}
