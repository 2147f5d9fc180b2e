//! Lab for one trial, shared by the end-to-end tests and the benchmarks.
//!
//! A [`Trial`] starts a lab with its own prefix and directory, so that it never meets a lab that
//! a person uses. It boots guests and talks to them from the client's namespace, moves them through
//! the agents' API, measures the blackout with the client's prober, and reports what is left over
//! after the lab's removal. Everything blocks until it is done or a deadline has passed. Trials on
//! one machine wait for each other, unless `turn` lets some of them run at the same time.

mod agents;
mod disks;
mod guest;
mod holds;
pub(crate) mod hosts;
mod interrupts;
mod lanes;
mod managers;
mod moving;
mod needs;
mod pinning;
mod sampling;
mod traces;
mod turn;
mod vcpus;
mod wait;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use godwit_api::{Client, ClientError, CreateVm, LogSource, StopVm, VmInfo};
use godwit_qemu::VmSpec;
use tokio::runtime::Runtime;

use crate::image::{self, GuestImage};
use crate::options::LabOptions;
use crate::programs::Programs;
use crate::topology::{LabPaths, Topology};
use crate::{agents as files, status};

pub use disks::{DiskFigures, MARK, write_base};
pub use guest::{Guest, GuestPlan};
pub use holds::Held;
pub use interrupts::take_down_when_interrupted;
pub use moving::{MOVE_LIMIT, Migration, Watched, other_host, request_to};
pub(crate) use needs::programs;
pub use needs::{Needs, missing, must_run};
pub use pinning::{CpusApart, Pinned};
pub use sampling::{Done, Sample, Sampler};
pub use traces::Traces;
pub use vcpus::{Seen, VcpuWatch};
pub use wait::{LIMIT, until};

use turn::Turn;

/// Separate lab with everything that a trial of migrations needs. Removed when dropped.
/// [`Trial::finish`] also reports whether anything was left.
#[derive(Debug)]
pub struct Trial {
    name: String,
    options: LabOptions,
    paths: LabPaths,
    programs: Programs,
    image: GuestImage,
    runtime: Runtime,
    finished: bool,
    /// Held as long as the lab is up.
    _turn: Turn,
}

/// Output of the `godwit` command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CliOutput {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Trial {
    /// Starts a lab of two hosts on an unshaped link. Prints the reason and returns `None` if this
    /// machine cannot run one.
    ///
    /// # Errors
    /// The lab cannot be started.
    pub fn begin(name: &str) -> Result<Option<Trial>> {
        Trial::begin_with(name, LabOptions::default())
    }

    /// Starts a lab with these options, under the trial's own prefix and directory.
    ///
    /// # Errors
    /// As [`Trial::begin`].
    pub fn begin_with(name: &str, options: LabOptions) -> Result<Option<Trial>> {
        if needs::skip(name, &Needs::lab())? {
            return Ok(None);
        }
        let turn = Turn::wait(options.at_once)?;
        let prefix = turn::new_prefix();
        let state_dir = Path::new(DIRECTORY).join(&prefix);
        let options = LabOptions { prefix, state_dir, place: turn.place, ..options };
        let trial = Trial {
            name: name.to_owned(),
            paths: LabPaths::new(&options.state_dir),
            options,
            programs: programs().context("checked above")?,
            image: image::find(&image::default_dir()).context("checked above")?,
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?,
            finished: false,
            _turn: turn,
        };
        trial.start_missing()?;
        Ok(Some(trial))
    }

    /// Starts all parts of the lab that do not run: the whole lab at first, later the agents that
    /// were ended.
    ///
    /// # Errors
    /// A part does not start.
    pub fn start_missing(&self) -> Result<()> {
        let lab = interrupts::bring_up(&self.options, &self.programs)?;
        ensure!(lab.up, "{lab}");
        for host in self.hosts().into_iter().filter(|host| self.has_power(host)) {
            // The agent queries KVM and the CPU with QEMUs that are not VMs. They must be gone
            // before traces are taken.
            until(&format!("the agent of host {host} knows its QEMU"), LIMIT, || {
                let info = self.ask(self.agent(&host).host())?;
                let is_known =
                    info.qemu_problem.is_some() || info.cpu_problem.is_some() || info.cpu.is_some();
                Ok(is_known.then_some(()))
            })?;
        }
        Ok(())
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the lab's options.
    #[must_use]
    pub fn options(&self) -> &LabOptions {
        &self.options
    }

    /// Returns the folder with the lab's certificates and keys.
    #[must_use]
    pub fn pki(&self) -> PathBuf {
        self.paths.pki()
    }

    /// Returns the locations of the lab's files.
    pub fn paths(&self) -> &LabPaths {
        &self.paths
    }

    /// Returns the Linux guest's kernel and initramfs.
    #[must_use]
    pub fn image(&self) -> &GuestImage {
        &self.image
    }

    /// Returns the names of the lab's hosts.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        self.topology().hosts.into_iter().map(|host| host.name).collect()
    }

    /// Returns the network namespace of a host.
    #[must_use]
    pub fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.options.prefix)
    }

    /// Waits for a response of the agents' client.
    pub fn ask<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Returns a client of a host's agent.
    #[must_use]
    pub fn agent(&self, host: &str) -> Client {
        Client::new(godwit_api::Endpoint::Unix(files::socket(&self.paths, host)))
    }

    /// Creates a VM and starts it.
    ///
    /// # Errors
    /// The agent refuses the request.
    pub fn create(&self, host: &str, spec: VmSpec) -> Result<VmInfo, ClientError> {
        self.ask(self.agent(host).create_vm(&CreateVm::new(spec, true)))
    }

    /// Stops and deletes a VM.
    ///
    /// # Errors
    /// The agent refuses the request.
    pub fn delete(&self, host: &str, vm: &str) -> Result<(), ClientError> {
        let agent = self.agent(host);
        self.ask(async {
            agent.stop_vm(vm, StopVm { force: true, grace_ms: None }).await?;
            agent.delete_vm(vm).await
        })
    }

    /// Returns a host's information about a VM.
    ///
    /// # Errors
    /// The host does not know the VM or does not answer.
    pub fn vm(&self, host: &str, vm: &str) -> Result<VmInfo, ClientError> {
        self.ask(self.agent(host).vm(vm))
    }

    /// Returns a VM's output on its serial console since it came to that host.
    ///
    /// # Errors
    /// The host does not know the VM.
    pub fn console(&self, host: &str, vm: &str) -> Result<String> {
        let agent = self.agent(host);
        self.ask(async {
            let mut log = agent.log(vm, LogSource::Console, false).await?;
            let mut text = Vec::new();
            while let Some(bytes) = log.next().await? {
                text.extend_from_slice(&bytes);
            }
            Ok(String::from_utf8_lossy(&text).into_owned())
        })
    }

    /// Runs the `godwit` command with the lab's hosts file.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn godwit(&self, arguments: &[&str]) -> Result<CliOutput> {
        let output = self.godwit_command(arguments).output();
        let output =
            output.with_context(|| format!("cannot run {}", self.programs.godwit.display()))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(CliOutput {
            code: output.status.code(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        })
    }

    /// Returns the `godwit` command with the lab's hosts file, for callers that run it themselves.
    #[must_use]
    pub fn godwit_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.programs.godwit);
        command.env("GODWIT_HOSTS", self.paths.hosts_file()).args(arguments);
        command
    }

    /// Takes the lab down and checks that nothing is left.
    ///
    /// # Errors
    /// Something is left: a namespace, a mount, a file, a process.
    pub fn finish(mut self) -> Result<()> {
        interrupts::take_down(&self.options.name())?;
        self.finished = true;
        let left = traces::left_on_machine(&self.options.name())?;
        if !left.is_empty() {
            bail!("the lab is down, but this is left: {}", left.join(", "));
        }
        Ok(())
    }

    fn topology(&self) -> Topology {
        Topology::new(&self.options.prefix, self.options.hosts)
    }

    /// Copies the logs of an aborted trial to a folder of this name.
    ///
    /// # Errors
    /// The logs cannot be copied.
    pub fn keep_logs(&self, name: &str) -> Result<PathBuf> {
        let keep = needs::source_tree().join("out/trial").join(name);
        if keep.exists() {
            std::fs::remove_dir_all(&keep)?;
        }
        std::fs::create_dir_all(&keep)?;
        for file in traces::files_below(self.paths.root()) {
            if file.extension().is_some_and(|extension| extension == "log") {
                let name =
                    file.strip_prefix(self.paths.root())?.display().to_string().replace('/', "-");
                std::fs::copy(&file, keep.join(name))?;
            }
        }
        Ok(keep)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        match self.keep_logs(&self.name) {
            Ok(place) => eprintln!("trial {}: logs kept in {}", self.name, place.display()),
            Err(error) => eprintln!("trial {}: cannot keep its logs: {error:#}", self.name),
        }
        if let Ok(lab) = status(&self.options.name()) {
            eprint!("{lab}");
        }
        if let Err(error) = interrupts::take_down(&self.options.name()) {
            eprintln!("trial {}: cannot take the lab down: {error:#}", self.name);
        }
    }
}

/// Parent directory of the trials' labs.
const DIRECTORY: &str = "/run";

/// Longest time for a guest to boot and fill its memory.
pub(crate) const BOOT_LIMIT: Duration = Duration::from_secs(120);
