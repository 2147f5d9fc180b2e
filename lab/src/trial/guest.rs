//! Guests of a trial: their boot, requests from the client's namespace, and checks.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_api::VmState;
use godwit_guest::control::{Answer, Request};
use godwit_prober::clock::monotonic_ns;
use godwit_prober::{Client, Gaps};
use godwit_qemu::{Accel, ByteSize, Disk, Firmware, MemoryBlock, Nic, Video, VmSpec};

use crate::guest::{CONNECT_LIMIT, ask_guest, connect};
use crate::image::{self, GuestImage};
use crate::topology::LAN_NETWORK;
use crate::trial::{BOOT_LIMIT, LIMIT, Trial, until};

/// Size of a guest page.
const PAGE_BYTES: u64 = 4096;

/// Plan of a Linux guest.
#[derive(Debug, Clone)]
pub struct GuestPlan {
    pub name: String,
    /// Last number of its addresses, 21 to 99.
    pub number: u8,
    pub memory: Vec<ByteSize>,
    pub vcpus: u32,
    pub firmware: Firmware,
    pub video: Video,
    /// Part of its memory with verifiable content.
    pub fill: ByteSize,
    /// Shares of page kinds in that part, such as `zero=0,compressible=0`; `None` uses the
    /// workload's.
    pub mix: Option<String>,
    /// Workload, as text (lab/guest/src/workload.rs).
    pub workload: String,
    pub disks: Vec<Disk>,
    /// Image, if not the built one.
    pub image: Option<GuestImage>,
    /// Additional words of the kernel command line.
    pub words: String,
    /// Longest time to boot and get ready.
    pub boot_limit: Duration,
}

impl GuestPlan {
    /// Plans an idle guest of 224 MiB with 48 MiB in use. QEMU's own migration under TCG needs the
    /// additional 64 KiB (docs/engines.md).
    #[must_use]
    pub fn new(name: &str) -> GuestPlan {
        GuestPlan {
            name: name.to_owned(),
            number: 21,
            memory: vec![ByteSize::from_bytes((224 << 20) + (64 << 10))],
            vcpus: 1,
            firmware: Firmware::Bios,
            video: Video::None,
            fill: ByteSize::from_mib(48),
            mix: None,
            workload: "idle".to_owned(),
            disks: Vec::new(),
            image: None,
            words: String::new(),
            boot_limit: BOOT_LIMIT,
        }
    }

    /// Returns its addresses on the guest LAN.
    #[must_use]
    pub fn addresses(&self) -> (Ipv4Addr, Ipv6Addr) {
        let number = u16::from(self.number);
        let digits = (number / 10) * 16 + number % 10;
        (Ipv4Addr::new(10, 88, 0, self.number), Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, digits))
    }

    #[must_use]
    pub fn spec(&self, image: &GuestImage) -> VmSpec {
        let (ipv4, ipv6) = self.addresses();
        let image = self.image.as_ref().unwrap_or(image);
        let mix = self.mix.as_ref().map(|mix| format!(" godwit.mix={mix}")).unwrap_or_default();
        let cmdline = format!(
            "{} godwit.ip={ipv4}/24 godwit.ip6={ipv6}/64 godwit.fill={}{mix} godwit.workload={} {}",
            image::COMMAND_LINE,
            self.fill.bytes(),
            self.workload,
            self.words
        );
        let cmdline = cmdline.trim_end().to_owned();
        VmSpec {
            memory: self.memory.iter().copied().map(MemoryBlock::shared).collect(),
            vcpus: self.vcpus,
            firmware: self.firmware,
            video: self.video,
            kernel: Some(image.kernel.clone()),
            initrd: Some(image.initrd.clone()),
            cmdline: Some(cmdline),
            disks: self.disks.clone(),
            nics: vec![Nic {
                network: LAN_NETWORK.to_owned(),
                address: Some(ipv4.into()),
                ..Nic::default()
            }],
            ..VmSpec::new(&self.name)
        }
    }
}

/// Booted Linux guest, reached over the network wherever it runs.
#[derive(Debug, Clone)]
pub struct Guest {
    pub name: String,
    /// Host on which it runs, as far as this program knows.
    pub host: String,
    /// IPv4 address on the guest LAN.
    pub ipv4: Ipv4Addr,
    /// IPv6 address on the guest LAN.
    pub ipv6: Ipv6Addr,
    /// Pages of its memory with verifiable content. At least as many must be checked.
    pub fill_pages: u64,
    client_namespace: String,
    prober: PathBuf,
}

impl Trial {
    /// Boots a guest and waits until its memory is filled and it answers.
    ///
    /// # Errors
    /// The agent refuses the VM, or the guest does not boot. The error contains its console.
    pub fn guest(&self, host: &str, plan: &GuestPlan) -> Result<Guest> {
        self.guest_of(host, plan, plan.spec(&self.image))
    }

    /// Boots a guest with a specification derived from the plan's.
    ///
    /// # Errors
    /// As [`Trial::guest`].
    pub fn guest_of(&self, host: &str, plan: &GuestPlan, spec: VmSpec) -> Result<Guest> {
        let guest = self.begin_guest(host, plan, spec)?;
        self.wait_booted(&guest, plan)?;
        Ok(guest)
    }

    /// Boots several guests at once.
    ///
    /// # Errors
    /// As [`Trial::guest`].
    pub fn guests(&self, host: &str, plans: &[GuestPlan]) -> Result<Vec<Guest>> {
        let begun = plans.iter().map(|plan| self.begin_guest(host, plan, plan.spec(&self.image)));
        let guests = begun.collect::<Result<Vec<Guest>>>()?;
        guests.iter().zip(plans).try_for_each(|(guest, plan)| self.wait_booted(guest, plan))?;
        Ok(guests)
    }

    fn begin_guest(&self, host: &str, plan: &GuestPlan, spec: VmSpec) -> Result<Guest> {
        self.create(host, spec)?;
        Ok(self.guest_elsewhere(host, plan))
    }

    /// Returns the guest of a plan that something else boots at a host, by the plan's kernel and
    /// command line.
    #[must_use]
    pub fn guest_elsewhere(&self, host: &str, plan: &GuestPlan) -> Guest {
        let (ipv4, ipv6) = plan.addresses();
        Guest {
            name: plan.name.clone(),
            host: host.to_owned(),
            ipv4,
            ipv6,
            fill_pages: plan.fill.bytes() / PAGE_BYTES,
            client_namespace: self.topology().client_namespace,
            prober: self.paths.client_socket(),
        }
    }

    fn wait_booted(&self, guest: &Guest, plan: &GuestPlan) -> Result<()> {
        guest.wait_ready(plan.boot_limit).with_context(|| {
            let console =
                self.console(&guest.host, &plan.name).unwrap_or_else(|error| format!("{error:#}"));
            format!("the guest of VM {} did not boot; its console:\n{console}", plan.name)
        })
    }

    /// Boots a guest with the same memory content as every other clone, although its addresses
    /// differ.
    ///
    /// # Errors
    /// As [`Trial::guest`].
    pub fn clone_guest(&self, host: &str, plan: &GuestPlan) -> Result<Guest> {
        let mut spec = plan.spec(&self.image);
        spec.cmdline = spec.cmdline.map(|line| format!("{line} godwit.seed=1"));
        self.guest_of(host, plan, spec)
    }

    /// Starts the bare guest. It needs no firmware, no 64-bit mode and no device except a serial
    /// line.
    ///
    /// # Errors
    /// The guest cannot be assembled, or the agent refuses the VM.
    pub fn bare_guest(&self, host: &str, name: &str, accel: Accel) -> Result<()> {
        let kernel = image::build_bare(&image::default_dir())?;
        let memory = vec![MemoryBlock::shared(ByteSize::from_mib(96))];
        // It needs no CPU features, and a KVM that runs nothing else lacks those of the default
        // model.
        let cpu_model = Some("qemu32,enforce=off".to_owned());
        self.create(
            host,
            VmSpec { memory, accel, cpu_model, kernel: Some(kernel), ..VmSpec::new(name) },
        )?;
        Ok(())
    }

    /// Starts the bare guest that answers packets, and waits until it does. It knows only probes,
    /// no requests. Each probe makes it write and check five pages of its memory.
    ///
    /// # Errors
    /// The guest cannot be compiled, the agent refuses the VM, or it does not answer.
    pub fn echo_guest(&self, host: &str, name: &str, accel: Accel) -> Result<Guest> {
        let plan = GuestPlan {
            memory: vec![ByteSize::from_mib(96)],
            fill: ByteSize::from_bytes(0),
            ..GuestPlan::new(name)
        };
        let spec = self.echo_spec(&plan, accel)?;
        let guest = self.begin_guest(host, &plan, spec)?;
        until("the bare guest's first line", BOOT_LIMIT, || {
            Ok(self.console(host, name)?.contains("READY").then_some(()))
        })?;
        guest.watch()?;
        guest.unwatch()?;
        Ok(guest)
    }

    /// Returns the specification of a bare guest that answers packets, which prints READY once it
    /// does.
    ///
    /// # Errors
    /// The guest cannot be compiled.
    pub fn echo_spec(&self, plan: &GuestPlan, accel: Accel) -> Result<VmSpec> {
        let kernel = image::build_echo(&image::default_dir())?;
        Ok(VmSpec {
            accel,
            cpu_model: Some("qemu32,enforce=off".to_owned()),
            kernel: Some(kernel),
            initrd: None,
            cmdline: None,
            ..plan.spec(&self.image)
        })
    }

    /// Returns how many reports the bare guest has printed on this host, one every 64 sweeps.
    ///
    /// # Errors
    /// The guest found a page that does not hold what it wrote.
    pub fn bare_generations(&self, host: &str, name: &str) -> Result<usize> {
        let console = self.console(host, name)?;
        ensure!(!console.contains("BAD"), "the guest found a wrong page: {console}");
        Ok(console.lines().filter(|line| line.starts_with("G ")).count())
    }

    /// Checks that the guest runs on its host only, answers over both address families, and that
    /// all memory filled by its plan is correct.
    ///
    /// # Errors
    /// A check fails.
    pub fn expect_whole(&self, guest: &Guest) -> Result<Answer> {
        for host in self.hosts() {
            let state = self.vm(&host, &guest.name).map(|vm| vm.state);
            match state {
                Ok(state) if host == guest.host => {
                    ensure!(state == VmState::Running, "on host {host} the VM is {state}");
                }
                Ok(state) => {
                    ensure!(state == VmState::Stopped, "on host {host} too, the VM is {state}");
                }
                Err(error) => ensure!(host != guest.host, "on host {host}: {error}"),
            }
        }
        guest.ask_at(guest.ipv6.into(), &Request::Status {}).context("over IPv6")?;
        guest.verify()
    }
}

impl Guest {
    /// Waits until it has filled its memory, with occasional requests, not with a thousand probes a
    /// second, which alone keep a vCPU busy under TCG.
    ///
    /// # Errors
    /// It does not within the limit, or it has problems.
    pub fn wait_ready(&self, limit: Duration) -> Result<()> {
        let status = until("the guest has filled its memory", limit, || {
            let status = self.status()?;
            Ok(status.ready.then_some(status))
        })?;
        ensure!(status.problems.is_empty(), "the guest has problems: {:?}", status.problems);
        Ok(())
    }

    /// Requests its status.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn status(&self) -> Result<Answer> {
        self.ask_at(self.ipv4.into(), &Request::Status {})
    }

    /// Changes its workload.
    ///
    /// # Errors
    /// The guest does not answer or does not know the workload.
    pub fn workload(&self, spec: &str) -> Result<()> {
        let answer = self.ask_at(self.ipv4.into(), &Request::Workload { spec: spec.to_owned() })?;
        ensure!(answer.ok, "the guest refuses the workload {spec}: {answer:?}");
        Ok(())
    }

    /// Makes it check every filled page while its workload continues.
    ///
    /// # Errors
    /// A page is wrong, a write found its page changed, a thread of the guest died, or fewer pages
    /// were checked than were to be filled.
    pub fn verify(&self) -> Result<Answer> {
        let verdict = self.ask_at(self.ipv4.into(), &Request::Verify {})?;
        let whole = verdict.ok && verdict.wrong == Some(0) && verdict.stale_on_write == 0;
        ensure!(
            whole && verdict.problems.is_empty(),
            "the guest's memory is not whole: {verdict:?}"
        );
        let wanted = self.fill_pages;
        ensure!(
            verdict.pages >= wanted,
            "{} pages were checked of {wanted}: {verdict:?}",
            verdict.pages
        );
        Ok(verdict)
    }

    /// Makes it compute for this time with each of its kernels, and returns their speed.
    ///
    /// # Errors
    /// The guest does not answer, or the time is longer than allowed.
    pub fn kernels(&self, each: Duration) -> Result<Answer> {
        let millis = u64::try_from(each.as_millis()).unwrap_or(u64::MAX);
        let answer = self.ask_at(self.ipv4.into(), &Request::Kernels { millis })?;
        ensure!(answer.ok && answer.kernels.is_some(), "the guest does not compute: {answer:?}");
        Ok(answer)
    }

    /// Makes it power itself off. Does not wait for an answer, which never comes.
    ///
    /// # Errors
    /// The guest cannot be reached.
    pub fn power_off(&self) -> Result<()> {
        self.send_last(&Request::Poweroff {})
    }

    /// Makes its kernel panic. Does not wait for an answer, which never comes.
    ///
    /// # Errors
    /// The guest cannot be reached.
    pub fn panic(&self) -> Result<()> {
        self.send_last(&Request::Panic {})
    }

    /// Sends a request that the guest does not survive.
    fn send_last(&self, request: &Request) -> Result<()> {
        let mut stream = self.connect(self.ipv4.into(), CONNECT_LIMIT)?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        Ok(stream.write_all(&line)?)
    }

    /// Sends a request over the network, from the client's namespace as the guest's users do.
    pub(super) fn ask_at(&self, address: IpAddr, request: &Request) -> Result<Answer> {
        ask_guest(&self.client_namespace, address, request)
    }

    /// Connects to its control port.
    pub(super) fn connect(&self, address: IpAddr, limit: Duration) -> Result<TcpStream> {
        connect(&self.client_namespace, address, limit)
    }

    /// Makes the lab's client probe it from now on, waits for an answer and returns its time
    /// (`CLOCK_MONOTONIC` nanoseconds).
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn watch(&self) -> Result<u64> {
        self.prober()?.watch(self.ipv4.into())?;
        self.wait_answer()
    }

    /// Makes the lab's client stop probing it.
    ///
    /// # Errors
    /// The client does not answer.
    pub fn unwatch(&self) -> Result<()> {
        Ok(self.prober()?.unwatch(self.ipv4.into())?)
    }

    /// Waits until it answers a probe sent from now on. It must be watched. Returns the time
    /// (`CLOCK_MONOTONIC` nanoseconds).
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn wait_answer(&self) -> Result<u64> {
        let answered = self.prober()?.wait_answer(self.ipv4.into(), monotonic_ns(), LIMIT)?;
        answered.with_context(|| format!("no echo from {} within {LIMIT:?}", self.ipv4))
    }

    /// Returns the results of the probes in a span of time.
    ///
    /// # Errors
    /// The client does not answer.
    pub fn gaps(&self, since_ns: u64, until_ns: u64) -> Result<Gaps> {
        Ok(self.prober()?.gaps(self.ipv4.into(), since_ns, until_ns)?)
    }

    fn prober(&self) -> Result<Client> {
        Ok(Client::connect(&self.prober)?)
    }
}
