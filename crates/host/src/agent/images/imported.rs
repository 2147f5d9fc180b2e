//! VMs of other platforms: their definitions, and copies of their disks.
//!
//! Everything that can be known is known before anything is created: the whole definition is read
//! (`imported/loaded.rs`) and made to fit this host (`fits.rs`), each disk is opened and its size
//! found (`sources.rs`). Copies (`copies.rs`) have no names until all of them are complete, so that
//! a failure, a request to end and a crash of the agent leave no image behind.
//!
//! QEMU gets an image of another format only if it refers to no other file. It gets open files,
//! with their formats named, and runs as all work on images does.

mod archive;
mod copies;
mod fits;
mod loaded;
mod opened;
mod sources;

use std::sync::Arc;

use godwit_api::{
    ApiError, CreateVm, ImportDisk, ImportFinding, ImportPlan, ImportVm, JobStatus, WarmStep,
};
use godwit_import::Imported;
use godwit_qemu::VmSpec;

use archive::{Archive, check_manifest};
use opened::Opened;

use super::NewImages;
use super::findings::refuse;
use super::warm::WarmSource;
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::failure::spec_refused;
use crate::jobs::{Job, JobRequest};

/// A VM that could be imported.
struct Planned {
    spec: VmSpec,
    disks: Vec<(ImportDisk, Opened)>,
    findings: Vec<ImportFinding>,
    archive: Option<Archive>,
    /// Sources of a warm import.
    warm: Vec<WarmSource>,
}

impl Agent {
    /// Begins to import a VM of another platform.
    pub fn import_vm(self: &Arc<Self>, request: ImportVm) -> Result<JobStatus, ApiError> {
        let about = JobRequest::import(&request);
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
        let vm_dirs_only = request.vm_dirs_only;
        if let Some(pass) = &request.warm {
            let datastore = request.datastore.as_deref();
            let copied = self.warm_pass(job, &mut spec, pass, &mut warm, datastore);
            let copies = job.until_cancelled(copied).await?;
            let create = CreateVm { spec, start: false, vm_dirs_only, new_disks: Vec::new() };
            return match pass.step {
                WarmStep::Copy | WarmStep::Again => Ok(()),
                WarmStep::CutOver => self.cut_over(job, create, copies).await,
            };
        }
        let images = match request.take_disks {
            true => NewImages::default(),
            false => {
                let datastore = request.datastore.as_deref();
                job.until_cancelled(self.copy_disks(job, &mut spec, &disks, datastore)).await?
            }
        };
        let name = spec.name.clone();
        let start = request.start;
        let created = self.create(CreateVm { spec, start, vm_dirs_only, new_disks: Vec::new() });
        match created.await {
            Ok(vm) => {
                images.keep();
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
        let Imported { mut spec, disks, mut findings } = loaded.imported.clone();
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
}
