//! VMs of other platforms: their definitions, and copies of their disks.
//!
//! Everything that can be known is known before anything is created: the whole definition is read,
//! each disk is opened and its size found. Copies have no names until all of them are complete, so
//! that a failure, a request to end and a crash of the agent leave no image behind.
//!
//! QEMU gets an image of another format only if it refers to no other file. It gets open files,
//! with their formats named, and runs as all work on images does.

mod archive;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{
    ApiError, CreateVm, ErrorCode, ImportDisk, ImportFinding, ImportFrom, ImportPlan, ImportVm,
    JobStatus, WarmImport, WarmStep,
};
use godwit_import::{
    DiskSource, Finding, Imported, Kind, MOST_TEXT_BYTES, SourceDisk, SourceFormat,
    VHD_FOOTER_BYTES, VmdkImage, check_vhd, kind_of, read_vmdk,
};
use godwit_qemu::{
    Disk, DiskFormat, FoundFile, ImageError, ImageTool, NewDrive, OpenFile, OpenFiles, OpenLayer,
    OpenSource, VmSpec, image_head,
};

use archive::{Archive, check_manifest, load_archive, open_member};

use super::warm::WarmSource;
use super::{COPIES, NewImages, Place, Staged, in_work, taken_by, tool_failed};
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::failure::{file_unusable, spec_refused};
use crate::jobs::{About, Job};
use crate::libvirt;

/// Directory of the storage `local` of Proxmox VE.
const PROXMOX_LOCAL: &str = "/var/lib/vz/images";

/// A definition with the archive that it came from.
struct Loaded {
    imported: Imported,
    /// Directory of the definition.
    beside: Option<PathBuf>,
    archive: Option<Archive>,
}

/// A disk that is open to be copied.
enum Opened {
    /// It has no content.
    Empty,
    Layers(Vec<OpenLayer>),
    /// An image that refers to no other file.
    Foreign {
        file: OpenFile,
        driver: &'static str,
        window: Option<(u64, u64)>,
    },
}

/// A VM that could be imported.
struct Planned {
    spec: VmSpec,
    disks: Vec<(ImportDisk, Opened)>,
    findings: Vec<ImportFinding>,
    archive: Option<Archive>,
    /// Sources of a warm import.
    warm: Vec<WarmSource>,
}

pub(super) fn finding(found: Finding) -> ImportFinding {
    ImportFinding { what: found.what, why: found.why, refuses: found.refuses }
}

/// Fails if findings refuse the operation.
pub(super) fn refuse(
    operation: &str,
    findings: &[ImportFinding],
    remedy: &str,
) -> Result<(), ApiError> {
    let refusing = findings.iter().filter(|found| found.refuses);
    let refusals: Vec<_> = refusing.map(|found| format!("{}: {}", found.what, found.why)).collect();
    if refusals.is_empty() {
        return Ok(());
    }
    let message = format!("cannot {operation}: {}", refusals.join("; "));
    Err(ApiError::new(ErrorCode::Preflight, message, remedy))
}

impl Agent {
    /// Begins to import a VM of another platform.
    pub fn import_vm(self: &Arc<Self>, request: ImportVm) -> Result<JobStatus, ApiError> {
        let about = About::import(&request);
        self.begin_job(about, |agent, job| async move { agent.run_import(&job, request).await })
    }

    async fn run_import(self: Arc<Self>, job: &Job, request: ImportVm) -> Result<(), ApiError> {
        let planned = job.until_cancelled(self.plan_import(job, &request)).await?;
        let disks: Vec<ImportDisk> = planned.disks.iter().map(|(disk, _)| disk.clone()).collect();
        let plan = ImportPlan { spec: planned.spec.clone().without_secrets(), disks };
        job.set(|status| {
            status.total_bytes = plan.disks.iter().map(|disk| disk.bytes).sum();
            status.plan = Some(plan);
            status.findings.clone_from(&planned.findings);
        });
        let remedy = "change the refused parts on the old platform; nothing was created here";
        refuse(&format!("import VM \"{}\"", planned.spec.name), &planned.findings, remedy)?;
        if request.dry_run {
            return Ok(());
        }
        let Planned { mut spec, disks, archive, mut warm, .. } = planned;
        if let Some(archive) = &archive {
            job.until_cancelled(check_manifest(archive)).await?;
        }
        let images = match &request.warm {
            Some(pass) => {
                let pass = self.warm_pass(job, &mut spec, pass, &mut warm);
                job.until_cancelled(pass).await?.keep();
                NewImages::default()
            }
            None if request.take_disks => NewImages::default(),
            None => job.until_cancelled(self.copy_disks(job, &mut spec, &disks)).await?,
        };
        let step = request.warm.as_ref().map(|warm| warm.step);
        if step.is_some_and(|step| step != WarmStep::CutOver) {
            return Ok(());
        }
        let name = spec.name.clone();
        let copies = step.map_or_else(Vec::new, |_| spec.disks.clone());
        let create = CreateVm {
            spec,
            start: request.start || step.is_some(),
            vm_dirs_only: request.vm_dirs_only,
            new_disks: Vec::new(),
        };
        match self.create(create).await {
            Ok(vm) => {
                images.keep();
                for copy in &copies {
                    if let Ok(place) = self.place(&copy.path, "use") {
                        self.forget_copy(&place);
                    }
                }
                tracing::info!(vm = name, "imported");
                job.set(|status| status.vm = Some(vm));
                Ok(())
            }
            Err(error) => {
                // A VM that could not be removed again keeps its disks.
                if self.table().contains_key(name.as_str()) {
                    images.keep();
                }
                Err(error)
            }
        }
    }

    /// Finds out everything about an import, and changes nothing.
    async fn plan_import(&self, job: &Job, request: &ImportVm) -> Result<Planned, ApiError> {
        let rule = if request.vm_dirs_only { FileRule::VmDirs } else { FileRule::Operator };
        let loaded = self.load_definition(request, rule).await?;
        let Imported { mut spec, disks, findings } = loaded.imported.clone();
        let mut findings: Vec<ImportFinding> = findings.into_iter().map(finding).collect();
        if let Some(name) = &request.name {
            spec.name.clone_from(name);
            findings.retain(|found| found.what != "name");
        }
        self.fit_networks(request, &mut spec, &mut findings);
        self.fit_machine(&mut spec, &mut findings).await?;
        self.fit_cdroms(&mut spec, rule, &mut findings);
        let (opened, warm) = match &request.warm {
            Some(warm) => {
                let opened = self.open_all_warm(job, (disks.as_slice(), warm), rule, &mut findings);
                // A request to end is no finding.
                tokio::task::yield_now().await;
                opened
            }
            None => {
                let from = (&loaded, request, rule);
                (self.open_all(&disks, from, &mut spec, &mut findings).await, Vec::new())
            }
        };
        let refused = findings.iter().any(|found| found.refuses);
        if !refused {
            spec.validate().map_err(|error| spec_refused(&error))?;
            let name = godwit_qemu::VmName::new(spec.name.as_str());
            self.check_name(&name.map_err(|error| spec_refused(&error))?)?;
        }
        Ok(Planned { spec, disks: opened, findings, archive: loaded.archive, warm })
    }

    /// Opens all disks that can be opened; the others are findings.
    async fn open_all(
        &self,
        disks: &[SourceDisk],
        (loaded, request, rule): (&Loaded, &ImportVm, FileRule),
        spec: &mut VmSpec,
        findings: &mut Vec<ImportFinding>,
    ) -> Vec<(ImportDisk, Opened)> {
        let mut opened = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let path = match (&loaded.archive, &disk.source) {
                (Some(archive), DiskSource::Member(_)) => Ok(Some(archive.path.clone())),
                _ => path_of(disk, request, loaded.beside.as_deref()),
            };
            let found = match path {
                Ok(path) => self.open_source(disk, path, loaded.archive.as_ref(), rule).await,
                Err(why) => Err(why),
            };
            match found {
                Ok((found, open)) => {
                    check_size(disk, &found, findings);
                    if request.take_disks {
                        take(&mut spec.disks[index], disk, &found, &open, findings);
                    }
                    opened.push((found, open));
                }
                Err(why) => findings.push(refusal(&disk.name, &why)),
            }
        }
        opened
    }

    /// Opens the sources of a warm import, in the order of the disks.
    fn open_all_warm(
        &self,
        job: &Job,
        (disks, warm): (&[SourceDisk], &WarmImport),
        rule: FileRule,
        findings: &mut Vec<ImportFinding>,
    ) -> (Vec<(ImportDisk, Opened)>, Vec<WarmSource>) {
        if warm.sources.len() != disks.len() {
            let (disks, sources) = (disks.len(), warm.sources.len());
            let why = format!("the definition has {disks}, and {sources} are given (--warm)");
            findings.push(refusal("disks", &why));
        }
        let (mut found, mut sources) = (Vec::new(), Vec::new());
        for (disk, source) in disks.iter().zip(&warm.sources) {
            match self.open_warm(job, source, rule) {
                Ok(open) => {
                    let described = ImportDisk {
                        name: disk.name.clone(),
                        source: Some(PathBuf::from(source)),
                        format: "raw".to_owned(),
                        bytes: open.bytes(),
                    };
                    found.push((described, Opened::Empty));
                    sources.push(open);
                }
                Err(error) => findings.push(refusal(&disk.name, &error.message)),
            }
        }
        (found, sources)
    }

    async fn load_definition(
        &self,
        request: &ImportVm,
        rule: FileRule,
    ) -> Result<Loaded, ApiError> {
        let read = |text: &[u8], beside: Option<&Path>| {
            let imported = kind_of(text).and_then(|kind| godwit_import::read(kind, text));
            let imported = imported.map_err(|error| unreadable(&error.to_string()))?;
            Ok(Loaded { imported, beside: beside.map(Path::to_owned), archive: None })
        };
        match &request.from {
            ImportFrom::Text(text) => read(text.as_bytes(), request.disks_in.as_deref()),
            ImportFrom::Libvirt(name) if request.vm_dirs_only => {
                let message = format!("cannot import domain \"{name}\": only an admin may");
                Err(ApiError::new(ErrorCode::Forbidden, message, "send its XML instead"))
            }
            ImportFrom::Libvirt(name) => {
                let text = libvirt::definition_of(&self.config.libvirt, name).await?;
                read(text.as_bytes(), None)
            }
            ImportFrom::File(path) => {
                let path = Path::new(path);
                let file = self.open_any(path, rule)?;
                let text = read_bytes(&file, 0, MOST_TEXT_BYTES as u64 + 1)
                    .map_err(|error| unreadable(&error.to_string()))?;
                match kind_of(&text) {
                    Ok(Kind::Ova) => {
                        let (imported, archive) = load_archive(file, path)?;
                        Ok(Loaded { imported, beside: None, archive: Some(archive) })
                    }
                    _ => read(&text, path.parent()),
                }
            }
        }
    }

    /// Opens a file that the caller names, without a look at its content.
    pub(super) fn open_any(&self, path: &Path, rule: FileRule) -> Result<OpenFile, ApiError> {
        let may_open = |file: &FoundFile| rule.allows(file, &self.config().vm_dirs);
        OpenFiles::open_foreign(path, &may_open).map_err(|error| {
            let ApiError { code, remedy, .. } = file_unusable("", &error);
            ApiError::new(code, error.to_string(), remedy)
        })
    }

    fn fit_networks(
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
                findings.push(refusal(&format!("network {}", nic.network), &why));
            }
        }
    }

    /// Replaces a machine type and a CPU model that this host's QEMU lacks.
    async fn fit_machine(
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
            findings.push(note("machine type", &why));
            spec.machine = Some(family.to_owned());
        }
        if let Some(model) = spec.cpu_model.clone()
            && !qemu.knows_cpu_model(&model)
        {
            let why = "this host's QEMU has no such model: the default of Godwit";
            findings.push(note(&format!("CPU {model}"), why));
            spec.cpu_model = None;
        }
        Ok(())
    }

    /// Empties drives whose CD is not on this host.
    fn fit_cdroms(&self, spec: &mut VmSpec, rule: FileRule, findings: &mut Vec<ImportFinding>) {
        let may_open = |file: &FoundFile| rule.allows(file, &self.config().vm_dirs);
        for drive in &mut spec.cdroms {
            let Some(image) = &drive.image else { continue };
            if let Err(error) = OpenFiles::open_drive(&NewDrive::Medium(image), &may_open) {
                findings.push(note("CD", &format!("the drive is empty: {error}")));
                drive.image = None;
            }
        }
    }

    /// Opens a disk, and finds its size. The error is the reason.
    async fn open_source(
        &self,
        disk: &SourceDisk,
        path: Option<PathBuf>,
        archive: Option<&Archive>,
        rule: FileRule,
    ) -> Result<(ImportDisk, Opened), String> {
        let described = |source, format: &str, bytes| ImportDisk {
            name: disk.name.clone(),
            source,
            format: format.to_owned(),
            bytes,
        };
        let Some(path) = path else {
            let bytes = disk.bytes.unwrap_or(0);
            return Ok((described(None, "empty", bytes), Opened::Empty));
        };
        let opened = match (archive, &disk.source) {
            (Some(archive), DiskSource::Member(name)) => open_member(archive, name)?,
            _ => self.open_file(&path, disk.format, rule)?,
        };
        let format = match &opened {
            Opened::Layers(layers) => layers.first().map_or("raw", |layer| layer.format.name()),
            Opened::Foreign { driver, .. } => *driver,
            Opened::Empty => "empty",
        };
        let tool = self.image_tool().await.map_err(|error| error.message)?;
        let source = open_in(&tool, &opened).await.map_err(|error| error.to_string())?;
        let bytes = source.map_or(0, |source| source.bytes);
        godwit_qemu::check_image_bytes(bytes)?;
        Ok((described(Some(path), format, bytes), opened))
    }

    fn open_file(
        &self,
        path: &Path,
        named: Option<SourceFormat>,
        rule: FileRule,
    ) -> Result<Opened, String> {
        let file = self.open_any(path, rule).map_err(|error| error.message)?;
        let format = match named {
            Some(format) => format,
            None => format_of(&file)?,
        };
        let native = match format {
            SourceFormat::Raw => DiskFormat::Raw,
            SourceFormat::Qcow2 => DiskFormat::Qcow2,
            SourceFormat::Vmdk => return self.open_vmdk(file, path, rule),
            other => {
                if other == SourceFormat::Vpc {
                    check_parentless(&file)
                        .map_err(|why| format!("cannot use {}: {why}", path.display()))?;
                }
                return Ok(Opened::Foreign { file, driver: other.name(), window: None });
            }
        };
        let may_open = |file: &FoundFile| rule.allows(file, &self.config().vm_dirs);
        let disk = Disk::new(path, native).readonly().into();
        let layers = OpenFiles::open_drive(&NewDrive::Disk(&disk), &may_open);
        layers.map(Opened::Layers).map_err(|error| error.to_string())
    }

    fn open_vmdk(&self, file: OpenFile, path: &Path, rule: FileRule) -> Result<Opened, String> {
        let length = length_of(&file).map_err(|error| error.to_string())?;
        let read = |at: u64, buffer: &mut [u8]| -> io::Result<usize> {
            Ok(rustix::io::pread(&file, buffer, at)?)
        };
        let image = read_vmdk(&read, length);
        match image.map_err(|error| format!("cannot use {}: {error}", path.display()))? {
            VmdkImage::Sparse { .. } => Ok(Opened::Foreign { file, driver: "vmdk", window: None }),
            VmdkImage::Flat { file: name, offset, bytes } => {
                let extent = path.with_file_name(&name);
                let file = self.open_any(&extent, rule).map_err(|error| error.message)?;
                let length = length_of(&file).map_err(|error| error.to_string())?;
                if offset.checked_add(bytes).is_none_or(|end| end > length) {
                    return Err(format!("{} is shorter than it claims", extent.display()));
                }
                Ok(Opened::Foreign { file, driver: "raw", window: Some((offset, bytes)) })
            }
        }
    }

    /// Returns the place of an image of a new VM: the first directory for VMs that exists.
    pub(super) fn image_place(
        &self,
        vm: &str,
        index: usize,
        format: DiskFormat,
    ) -> Result<Place, ApiError> {
        let Some(dir) = self.config().vm_dirs.iter().find(|dir| dir.is_dir()) else {
            let message = format!(
                "cannot create the disks of VM \"{}\": host {} has none of its vm_dirs",
                vm,
                self.config().name
            );
            let remedy = "create one of them, or name others in the agent's configuration";
            return Err(ApiError::new(ErrorCode::NotFound, message, remedy));
        };
        let number = if index == 0 { String::new() } else { format!("-{index}") };
        let path = dir.join(format!("{vm}{number}.{}", format.name()));
        let place = self.place(&path, "create")?;
        place.check_name()?;
        Ok(place)
    }

    /// Copies disks into images of the VM, which get their names when all are complete.
    async fn copy_disks(
        &self,
        job: &Job,
        spec: &mut VmSpec,
        disks: &[(ImportDisk, Opened)],
    ) -> Result<NewImages, ApiError> {
        let mut places = Vec::new();
        let mut makings = Vec::new();
        for index in 0..disks.len() {
            let place = self.image_place(&spec.name, index, DiskFormat::Qcow2)?;
            makings.push(place.make()?);
            if place.exists() {
                return Err(place.taken());
            }
            places.push(place);
        }
        let mut staged = Vec::new();
        let mut before = 0;
        for (place, (disk, opened)) in places.iter().zip(disks) {
            let progress = |bytes: u64| job.set(|status| status.done_bytes = before + bytes);
            staged.push(self.copy_one(place, disk, opened, &progress).await?);
            before += disk.bytes;
            job.set(|status| status.done_bytes = before);
        }
        let named = name_all(staged);
        let images = named_images(places, named)?;
        for (disk, path) in spec.disks.iter_mut().zip(images.paths()) {
            (disk.path, disk.format) = (path, DiskFormat::Qcow2);
        }
        Ok(images)
    }

    async fn copy_one<'a>(
        &self,
        place: &'a Place,
        disk: &ImportDisk,
        opened: &Opened,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Staged<'a>, ApiError> {
        let _turn = COPIES.acquire().await;
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        staged.write(DiskFormat::Qcow2, disk.bytes, None)?;
        let _reading = match opened {
            Opened::Empty => return Ok(staged),
            Opened::Layers(layers) => {
                staged.check_room(layers, disk.bytes)?;
                Some(in_work::read(layers).map_err(|path| {
                    let why = format!("layers are being merged into {} or from it", path.display());
                    let remedy = "wait until that ends, then try again";
                    place.refused("create", ErrorCode::Busy, &why, remedy)
                })?)
            }
            Opened::Foreign { file, window, .. } => {
                // Of a compressed image the copy may need more: that shows while it is made.
                let taken = taken_by(file).map_err(|error| place.failed("create", &error))?;
                let most = window.map_or(u64::MAX, |(_, length)| length);
                staged.check_room_for(taken.min(most).min(disk.bytes))?;
                None
            }
        };
        let tool = self.image_tool().await?;
        let copied = async {
            let Some(source) = open_in(&tool, opened).await? else { return Ok(()) };
            let target = staged.open_layers(DiskFormat::Qcow2);
            let target =
                target.map_err(|error| godwit_qemu::ImageToolError::Copy(error.message))?;
            tool.copy_source(&source, &target, progress).await
        };
        tokio::select! {
            copied = copied => {
                copied.map_err(|error| tool_failed("create", &place.path, &error))?;
            }
            full = staged.until_full() => return Err(full),
        }
        Ok(staged)
    }
}

/// Gives files their names, up to the first that cannot have its name. Returns how many have
/// theirs, and that error.
pub(super) fn name_all(staged: Vec<Staged<'_>>) -> (usize, Option<ApiError>) {
    let mut named = 0;
    for file in staged {
        match file.name_it() {
            Ok(()) => named += 1,
            Err(error) => return (named, Some(error)),
        }
    }
    (named, None)
}

/// Returns the files that have their names; if one of them has none, all are removed.
pub(super) fn named_images(
    places: Vec<Place>,
    (named, failed): (usize, Option<ApiError>),
) -> Result<NewImages, ApiError> {
    let images = NewImages(places.into_iter().take(named).collect());
    failed.map_or(Ok(images), Err)
}

/// Opens a disk in a QEMU; `None` if it is empty.
async fn open_in(
    tool: &ImageTool,
    opened: &Opened,
) -> Result<Option<OpenSource>, godwit_qemu::ImageToolError> {
    use std::os::fd::AsFd;
    Ok(Some(match opened {
        Opened::Empty => return Ok(None),
        Opened::Layers(layers) => tool.open_source(layers).await?,
        Opened::Foreign { file, driver, window } => {
            tool.open_foreign(file.as_fd(), driver, *window).await?
        }
    }))
}

/// Finds the path of a disk on this host; `None` if it is empty. The error is the reason.
fn path_of(
    disk: &SourceDisk,
    request: &ImportVm,
    beside: Option<&Path>,
) -> Result<Option<PathBuf>, String> {
    let inside = |dir: &Path, file: &str| dir.join(file);
    let given = request.disks_in.as_deref();
    Ok(Some(match &disk.source {
        DiskSource::Empty => return Ok(None),
        DiskSource::Path(path) => match (given, path.file_name()) {
            (Some(dir), Some(file)) => dir.join(file),
            _ => path.clone(),
        },
        DiskSource::Volume { storage, name } => {
            let file = name.rsplit('/').next().unwrap_or(name);
            let is_plain = !file.is_empty() && !file.starts_with('.');
            match given {
                Some(dir) if is_plain => inside(dir, file),
                None if storage == "local" && is_plain && !name.contains("..") => {
                    inside(Path::new(PROXMOX_LOCAL), name)
                }
                _ => {
                    return Err(format!(
                        "the path of volume {storage}:{name} on this host is unknown: give the \
                         directory with --disks-in"
                    ));
                }
            }
        }
        DiskSource::Member(name) => match given.or(beside) {
            Some(dir) => inside(dir, name),
            None => {
                return Err(format!("the path of {name} on this host is unknown: give --disks-in"));
            }
        },
    }))
}

/// Compares the size of an image with what the definition promises.
fn check_size(disk: &SourceDisk, found: &ImportDisk, findings: &mut Vec<ImportFinding>) {
    let Some(promised) = disk.bytes.filter(|bytes| *bytes != found.bytes) else { return };
    let why = format!("its image is of {} bytes, and the definition says {promised}", found.bytes);
    // The sizes of Proxmox VE are rounded, and can be out of date.
    findings.push(match disk.source {
        DiskSource::Member(_) => refusal(&disk.name, &why),
        _ => note(&disk.name, &why),
    });
}

/// Makes a disk of the VM the image itself.
fn take(
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
            findings.push(note(&disk.name, why));
        }
        _ => {
            let why = format!("cannot use {} images in place: import a copy", found.format);
            findings.push(refusal(&disk.name, &why));
        }
    }
}

fn note(what: &str, why: &str) -> ImportFinding {
    ImportFinding { what: what.to_owned(), why: why.to_owned(), refuses: false }
}

fn refusal(what: &str, why: &str) -> ImportFinding {
    ImportFinding { refuses: true, ..note(what, why) }
}

fn unreadable(why: &str) -> ApiError {
    let message = format!("cannot read the definition: {why}");
    let remedy = "give a libvirt domain, a Proxmox VE configuration, an OVF descriptor or an OVA";
    ApiError::new(ErrorCode::InvalidRequest, message, remedy)
}

pub(super) fn length_of(file: &OpenFile) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// Reads up to `most` bytes.
pub(super) fn read_bytes(file: &OpenFile, at: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(most).map_err(io::Error::other)?];
    let mut length = 0;
    while length < bytes.len() {
        match rustix::io::pread(file, &mut bytes[length..], at + length as u64)? {
            0 => break,
            read => length += read,
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Finds the format of an image by its header, where the definition names none.
pub(super) fn format_of(file: &OpenFile) -> Result<SourceFormat, String> {
    use std::os::fd::AsFd;
    let file = file.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    match image_head(&file.into()) {
        Ok(head) => Ok(match head.format {
            DiskFormat::Raw => SourceFormat::Raw,
            DiskFormat::Qcow2 => SourceFormat::Qcow2,
        }),
        Err(ImageError::NotRaw { format }) => SourceFormat::named(format)
            .ok_or_else(|| format!("its format {format} cannot be imported")),
        Err(error) => Err(error.to_string()),
    }
}

/// Checks that a VHD image has no parent.
fn check_parentless(file: &OpenFile) -> Result<(), String> {
    let footer = |at| read_bytes(file, at, VHD_FOOTER_BYTES).map_err(|error| error.to_string());
    let length = length_of(file).map_err(|error| error.to_string())?;
    check_vhd(&footer(0)?, &footer(length.saturating_sub(VHD_FOOTER_BYTES))?)
}

#[cfg(test)]
mod tests;
