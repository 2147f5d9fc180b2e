//! Stopped VMs for other platforms: a definition, and copies of the disks.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, ExportFormat, ExportVm, ImportFinding, JobStatus};
use godwit_import::{DomainDisk, GRAIN_BYTES, OvaDisk, OvaWriter, ovf_changes, write_domain};
use godwit_qemu::{DiskFormat, OpenLayer, ResolvedSpec, VmName, VmSpec};

use super::findings::refuse;
use super::staged::{Staged, name_all, named_images};
use super::{COPIES, NewImages, Place, tool_failed};
use crate::agent::Agent;
use crate::jobs::{Job, JobRequest};
use crate::vm::Operation;

/// Grains between two chances to end.
const GRAINS_AT_ONCE: u64 = 64;

impl Agent {
    /// Begins to export a stopped VM, or to give a running one to libvirt.
    pub fn export_vm(
        self: &Arc<Self>,
        name: &VmName,
        request: ExportVm,
    ) -> Result<JobStatus, ApiError> {
        if request.live {
            return self.begin_live_export(name, request.format);
        }
        // A wrong state is refused at once.
        let begun = self.begin(name, &Operation::Copy)?;
        let name = name.clone();
        let settled = (begun.before.clone(), begun.vm.clone(), begun.reason.clone());
        let job = self.begin_job(JobRequest::export(&name, &request), |agent, job| {
            let name = name.clone();
            async move {
                let exported = async {
                    agent.refuse_second_process(&name, &begun.before)?;
                    agent.run_export(&job, &begun.spec, &request).await
                };
                let exported = exported.await;
                agent.settle(&name, begun.before, begun.vm, begun.reason);
                exported
            }
        });
        if job.is_err() {
            let (before, vm, reason) = settled;
            self.settle(&name, before, vm, reason);
        }
        job
    }

    async fn run_export(
        &self,
        job: &Job,
        spec: &ResolvedSpec,
        request: &ExportVm,
    ) -> Result<(), ApiError> {
        let files = self.open_to_read(spec)?;
        let mut bytes = Vec::new();
        for (layers, disk) in files.disks.iter().zip(&spec.disks) {
            bytes.push(self.bytes_of(layers, &disk.path)?);
        }
        job.set(|status| status.total_bytes = bytes.iter().sum());
        let source = Source { spec: spec.to_vm_spec(), layers: &files.disks, bytes: &bytes };
        let exported = match request.format {
            ExportFormat::Libvirt => {
                job.until_cancelled(self.export_domain(job, &source, &request.to)).await
            }
            ExportFormat::Ova => {
                job.until_cancelled(self.export_archive(job, &source, &request.to)).await
            }
        };
        let (images, findings) = exported?;
        job.set(|status| {
            status.files = images.paths();
            status.findings = findings;
            status.done_bytes = status.total_bytes;
        });
        images.keep();
        Ok(())
    }

    fn export_place(&self, to: &Path, file: String) -> Result<Place, ApiError> {
        let place = self.place(&to.join(file), "create")?;
        place.check_name()?;
        if place.exists() {
            return Err(place.taken());
        }
        Ok(place)
    }

    async fn export_domain(
        &self,
        job: &Job,
        source: &Source<'_>,
        to: &Path,
    ) -> Result<(NewImages, Vec<ImportFinding>), ApiError> {
        let name = &source.spec.name;
        let mut places = Vec::new();
        for index in 0..source.bytes.len() {
            places.push(self.export_place(to, format!("{name}-disk{index}.qcow2"))?);
        }
        places.push(self.export_place(to, format!("{name}.xml"))?);
        let _claims = places.iter().map(Place::claim).collect::<Result<Vec<_>, _>>()?;
        let mut staged = Vec::new();
        let mut before = 0;
        for (index, place) in places[..source.bytes.len()].iter().enumerate() {
            let copied = |bytes| job.set(|status| status.done_bytes = before + bytes);
            let format = DiskFormat::Qcow2;
            staged.push(self.copy_of(place, source, index, format, &copied).await?);
            before += source.bytes[index];
        }
        let paths: Vec<PathBuf> = places.iter().map(|place| place.path.clone()).collect();
        let disks: Vec<_> = paths[..source.bytes.len()]
            .iter()
            .map(|path| DomainDisk { path, format: DiskFormat::Qcow2 })
            .collect();
        let networks = &self.config().networks;
        let bridge = |network: &str| networks.get(network).map(|found| found.bridge.clone());
        let (text, findings) = write_domain(&source.spec, &disks, &bridge);
        if let Some(place) = places.last() {
            let file = place.stage().map_err(|error| place.failed("create", &error))?;
            let written = (&file.file).write_all(text.as_bytes());
            written.map_err(|error| place.failed("create", &error))?;
            staged.push(file);
        }
        let named = name_all(staged);
        let images = named_images(places, named)?;
        Ok((images, findings))
    }

    /// Copies a disk into a file without a name.
    async fn copy_of<'a>(
        &self,
        place: &'a Place,
        source: &Source<'_>,
        index: usize,
        format: DiskFormat,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Staged<'a>, ApiError> {
        let _turn = COPIES.acquire().await;
        let (layers, bytes) = (&source.layers[index], source.bytes[index]);
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        staged.check_room(layers, bytes)?;
        staged.write(format, bytes, None)?;
        let target = staged.open_layers(format)?;
        let tool = self.image_tool().await?;
        let copied = async {
            let open = tool.open_source(layers).await?;
            tool.copy_source(&open, &target, progress).await
        };
        copied.await.map_err(|error| tool_failed("create", &place.path, &error))?;
        Ok(staged)
    }

    async fn export_archive(
        &self,
        job: &Job,
        source: &Source<'_>,
        to: &Path,
    ) -> Result<(NewImages, Vec<ImportFinding>), ApiError> {
        let findings = ovf_changes(&source.spec);
        let name = &source.spec.name;
        let remedy = "export it for libvirt (--format libvirt)";
        refuse(&format!("export VM \"{name}\""), &findings, remedy)?;
        let place = self.export_place(to, format!("{name}.ova"))?;
        let claim = place.claim()?;
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        let failed = |error: io::Error| place.failed("create", &error);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let package = OvaWriter::begin(&source.spec, source.bytes, &staged.file, now.as_secs());
        let mut package = package.map_err(failed)?;
        let mut before = 0;
        for (index, bytes) in source.bytes.iter().enumerate() {
            // Half of the work is the copy, half the compression.
            let copied = |bytes: u64| job.set(|status| status.done_bytes = before + bytes / 2);
            let raw = self.copy_of(&place, source, index, DiskFormat::Raw, &copied).await?;
            let mut disk = package.begin_disk(index).map_err(failed)?;
            for grain in 0..bytes.div_ceil(GRAIN_BYTES as u64) {
                let at = grain * GRAIN_BYTES as u64;
                tokio::task::block_in_place(|| add_grain(&mut disk, &raw.file, at, *bytes))
                    .map_err(failed)?;
                if grain.is_multiple_of(GRAINS_AT_ONCE) {
                    let done = before + bytes / 2 + at / 2;
                    job.set(|status| status.done_bytes = done);
                    tokio::task::yield_now().await;
                }
            }
            disk.finish().map_err(failed)?;
            before += bytes;
        }
        package.finish().map_err(failed)?;
        let named = name_all(vec![staged]);
        drop(claim);
        Ok((named_images(vec![place], named)?, findings))
    }
}

/// What is exported.
struct Source<'a> {
    spec: VmSpec,
    layers: &'a [Vec<OpenLayer>],
    /// Sizes of the disks.
    bytes: &'a [u64],
}

/// Adds the grain at an offset of a raw image with `bytes` bytes.
fn add_grain(disk: &mut OvaDisk<'_, &File>, raw: &File, at: u64, bytes: u64) -> io::Result<()> {
    let length = usize::try_from(bytes - at).unwrap_or(GRAIN_BYTES).min(GRAIN_BYTES);
    let mut grain = vec![0; length];
    raw.read_exact_at(&mut grain, at)?;
    disk.grain(&grain)
}
