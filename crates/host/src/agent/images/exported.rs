//! Stopped VMs for other platforms: a definition, and copies of the disks.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, ExportFormat, ExportVm, ImportFinding, JobStatus};
use godwit_import::{
    Digest, DomainDisk, ExportedDisk, Manifest, StreamVmdk, ovf_changes, pad_to_block, tar_header,
    write_domain, write_ovf,
};
use godwit_qemu::{DiskFormat, OpenLayer, ResolvedSpec, VmName, VmSpec};

use super::imported::{finding, name_all, named_images, refuse};
use super::{COPIES, NewImages, Place, Staged, tool_failed};
use crate::agent::Agent;
use crate::jobs::Job;
use crate::vm::Operation;

/// Bytes of a grain of a VMDK image.
const GRAIN: usize = StreamVmdk::<Vec<u8>>::GRAIN_BYTES;
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
            return self.leave_for_libvirt(name, request.format);
        }
        // A wrong state is refused at once.
        let begun = self.begin(name, &Operation::Copy)?;
        let name = name.clone();
        let settled = (begun.before.clone(), begun.vm.clone(), begun.reason.clone());
        let job = self.begin_job(|agent, job| {
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
        let _makings = places.iter().map(Place::make).collect::<Result<Vec<_>, _>>()?;
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
        Ok((images, findings.into_iter().map(finding).collect()))
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
        let findings: Vec<_> = ovf_changes(&source.spec).into_iter().map(finding).collect();
        let name = &source.spec.name;
        let remedy = "export it for libvirt (--format libvirt)";
        refuse(&format!("export VM \"{name}\""), &findings, remedy)?;
        let place = self.export_place(to, format!("{name}.ova"))?;
        let making = place.make()?;
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        let failed = |error: io::Error| place.failed("create", &error);
        let mut package =
            Package::begin(&source.spec, source.bytes, &staged.file).map_err(failed)?;
        let mut before = 0;
        for (index, bytes) in source.bytes.iter().enumerate() {
            // Half of the work is the copy, half the compression.
            let copied = |bytes: u64| job.set(|status| status.done_bytes = before + bytes / 2);
            let raw = self.copy_of(&place, source, index, DiskFormat::Raw, &copied).await?;
            let mut disk = package.begin_disk(index).map_err(failed)?;
            let grains = bytes.div_ceil(GRAIN as u64);
            for grain in 0..grains {
                let added = tokio::task::block_in_place(|| disk.add(&raw.file, grain, *bytes));
                added.map_err(failed)?;
                if grain.is_multiple_of(GRAINS_AT_ONCE) {
                    let done = before + bytes / 2 + grain * GRAIN as u64 / 2;
                    job.set(|status| status.done_bytes = done);
                    tokio::task::yield_now().await;
                }
            }
            disk.finish().map_err(failed)?;
            before += bytes;
        }
        package.finish().map_err(failed)?;
        let named = name_all(vec![staged]);
        drop(making);
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

/// An archive that is being written. The descriptor is first, and has its room from the beginning;
/// it is written last, when the sizes of the images are known.
struct Package<'a> {
    spec: &'a VmSpec,
    file: &'a File,
    disks: Vec<ExportedDisk>,
    manifest: Manifest,
    seconds: u64,
    /// Room of the descriptor.
    room: u64,
}

impl<'a> Package<'a> {
    fn begin(spec: &'a VmSpec, bytes: &[u64], file: &'a File) -> io::Result<Package<'a>> {
        let disks: Vec<_> = bytes
            .iter()
            .enumerate()
            .map(|(index, bytes)| ExportedDisk {
                file: format!("{}-disk{index}.vmdk", spec.name),
                file_bytes: u64::MAX,
                bytes: *bytes,
            })
            .collect();
        let room = (write_ovf(spec, &disks).len() as u64).next_multiple_of(512);
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut at = file;
        at.seek(SeekFrom::Start(512 + room))?;
        Ok(Package { spec, file, disks, manifest: Manifest::default(), seconds, room })
    }

    fn begin_disk<'p>(&'p mut self, index: usize) -> io::Result<PackageDisk<'p, 'a>> {
        let mut file = self.file;
        let header = file.stream_position()?;
        file.seek(SeekFrom::Start(header + 512))?;
        let (name, bytes) = (self.disks[index].file.clone(), self.disks[index].bytes);
        let out = Hashed { out: io::BufWriter::new(file), digest: Digest::sha256(), bytes: 0 };
        let image = StreamVmdk::begin(out, bytes, &name)?;
        Ok(PackageDisk { package: self, index, header, image, grain: vec![0; GRAIN] })
    }

    fn finish(mut self) -> io::Result<()> {
        let mut text = write_ovf(self.spec, &self.disks).into_bytes();
        let room = usize::try_from(self.room).map_err(io::Error::other)?;
        // White space may follow the last element.
        text.resize(room, b'\n');
        let mut digest = Digest::sha256();
        digest.update(&text);
        let name = format!("{}.ovf", self.spec.name);
        self.manifest.add(&name, digest.hex());
        let manifest = self.manifest.text().into_bytes();
        let mut file = self.file;
        let length = manifest.len() as u64;
        file.write_all(&tar_header(&format!("{}.mf", self.spec.name), length, self.seconds)?)?;
        file.write_all(&manifest)?;
        file.write_all(&vec![0; pad_to_block(length) + 1024])?;
        file.write_all_at(&tar_header(&name, self.room, self.seconds)?, 0)?;
        file.write_all_at(&text, 512)
    }
}

/// A disk of an archive that is being written.
struct PackageDisk<'p, 'a> {
    package: &'p mut Package<'a>,
    index: usize,
    /// Offset of its header.
    header: u64,
    image: StreamVmdk<Hashed<'a>>,
    grain: Vec<u8>,
}

impl PackageDisk<'_, '_> {
    /// Adds a grain of a raw image with `bytes` bytes.
    fn add(&mut self, raw: &File, index: u64, bytes: u64) -> io::Result<()> {
        let at = index * GRAIN as u64;
        let length = usize::try_from(bytes - at).unwrap_or(GRAIN).min(GRAIN);
        raw.read_exact_at(&mut self.grain[..length], at)?;
        self.image.grain(&self.grain[..length])
    }

    fn finish(self) -> io::Result<()> {
        let Hashed { out, digest, bytes } = self.image.finish()?;
        let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.write_all(&vec![0; pad_to_block(bytes)])?;
        let disk = &mut self.package.disks[self.index];
        disk.file_bytes = bytes;
        self.package.manifest.add(&disk.file, digest.hex());
        file.write_all_at(&tar_header(&disk.file, bytes, self.package.seconds)?, self.header)
    }
}

/// A file whose digest is computed while it is written.
struct Hashed<'a> {
    out: io::BufWriter<&'a File>,
    digest: Digest,
    bytes: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.out.write(bytes)?;
        self.digest.update(&bytes[..length]);
        self.bytes += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
