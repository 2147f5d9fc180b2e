//! The lab's guests in a trial: booted, asked from the client's namespace, checked.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_api::VmState;
use godwit_guest::control::{Answer, Request};
use godwit_prober::clock::monotonic_ns;
use godwit_prober::{Client, Gaps};
use godwit_qemu::{Accel, ByteSize, Disk, MemoryBlock, Nic, VmSpec};

use crate::guest::{CONNECT_LIMIT, ask_guest, connect};
use crate::image::{self, GuestImage};
use crate::topology::LAN_NETWORK;
use crate::trial::{BOOT_LIMIT, LIMIT, Trial, until};

/// A page of the guest's.
const PAGE_BYTES: u64 = 4096;

/// A Linux guest to be made.
#[derive(Debug, Clone)]
pub struct GuestPlan {
    pub name: String,
    /// Last number of its addresses, 21 to 99.
    pub number: u8,
    pub memory: Vec<ByteSize>,
    pub vcpus: u32,
    /// How much of its memory holds what it can check.
    pub fill: ByteSize,
    /// Shares of kinds of pages in that, such as `zero=0,compressible=0`; none: those of the workload.
    pub mix: Option<String>,
    /// What it does (lab/guest tells the words).
    pub workload: String,
    pub disks: Vec<Disk>,
    /// Another image than the built one.
    pub image: Option<GuestImage>,
    /// Further words of the kernel's command line.
    pub words: String,
    /// How long it may take to boot and to get ready.
    pub boot_limit: Duration,
}

impl GuestPlan {
    /// A guest of 320 MiB with 128 MiB in use that is idle. The 64 KiB more are for QEMU's own migration under TCG
    /// (docs/engines.md).
    #[must_use]
    pub fn new(name: &str) -> GuestPlan {
        GuestPlan {
            name: name.to_owned(),
            number: 21,
            memory: vec![ByteSize::from_bytes((320 << 20) + (64 << 10))],
            vcpus: 1,
            fill: ByteSize::from_mib(128),
            mix: None,
            workload: "idle".to_owned(),
            disks: Vec::new(),
            image: None,
            words: String::new(),
            boot_limit: BOOT_LIMIT,
        }
    }

    /// Its addresses on the guest LAN.
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
            kernel: Some(image.kernel.clone()),
            initrd: Some(image.initrd.clone()),
            cmdline: Some(cmdline),
            disks: self.disks.clone(),
            nics: vec![Nic {
                network: LAN_NETWORK.to_owned(),
                mac: None,
                address: Some(ipv4.into()),
            }],
            ..VmSpec::new(&self.name)
        }
    }
}

/// A Linux guest that has booted. It is asked over the network, wherever it runs.
#[derive(Debug, Clone)]
pub struct Guest {
    pub name: String,
    /// The host it runs on, as far as this program knows.
    pub host: String,
    /// Its IPv4 address on the guest LAN.
    pub ipv4: Ipv4Addr,
    /// Its IPv6 address there.
    pub ipv6: Ipv6Addr,
    /// Pages of its memory that hold what it can check: as many must be checked.
    pub fill_pages: u64,
    client_namespace: String,
    prober: PathBuf,
}

impl Trial {
    /// Boots a guest and waits until its memory is filled and it answers.
    ///
    /// # Errors
    /// The agent says no, or the guest does not come up; its console is told.
    pub fn guest(&self, host: &str, plan: &GuestPlan) -> Result<Guest> {
        self.guest_of(host, plan, plan.spec(&self.image))
    }

    /// The same with a specification that was made from the plan's and changed.
    ///
    /// # Errors
    /// As [`Trial::guest`].
    pub fn guest_of(&self, host: &str, plan: &GuestPlan, spec: VmSpec) -> Result<Guest> {
        let guest = self.begin_guest(host, plan, spec)?;
        self.wait_booted(&guest, plan)?;
        Ok(guest)
    }

    /// Boots guests side by side.
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
        let (ipv4, ipv6) = plan.addresses();
        Ok(Guest {
            name: plan.name.clone(),
            host: host.to_owned(),
            ipv4,
            ipv6,
            fill_pages: plan.fill.bytes() / PAGE_BYTES,
            client_namespace: self.topology().client_namespace,
            prober: self.paths.client_socket(),
        })
    }

    fn wait_booted(&self, guest: &Guest, plan: &GuestPlan) -> Result<()> {
        guest.wait_ready(plan.boot_limit).with_context(|| {
            let console =
                self.console(&guest.host, &plan.name).unwrap_or_else(|error| format!("{error:#}"));
            format!("the guest of VM {} does not come up; its console:\n{console}", plan.name)
        })
    }

    /// Boots a guest whose memory holds the same as that of every other clone: what the plan's addresses would make differ
    /// does not.
    ///
    /// # Errors
    /// As [`Trial::guest`].
    pub fn clone_guest(&self, host: &str, plan: &GuestPlan) -> Result<Guest> {
        let mut spec = plan.spec(&self.image);
        spec.cmdline = spec.cmdline.map(|line| format!("{line} godwit.seed=1"));
        self.guest_of(host, plan, spec)
    }

    /// Starts the bare guest, which needs no firmware, no 64-bit mode and no devices but a serial line.
    ///
    /// # Errors
    /// It can't be assembled, or the agent says no.
    pub fn bare_guest(&self, host: &str, name: &str, accel: Accel) -> Result<()> {
        let kernel = image::build_bare(&image::default_dir())?;
        let memory = vec![MemoryBlock::shared(ByteSize::from_mib(96))];
        // It needs nothing of a CPU, and a KVM that runs nothing else lacks what the default model has.
        let cpu_model = Some("qemu32,enforce=off".to_owned());
        self.create(
            host,
            VmSpec { memory, accel, cpu_model, kernel: Some(kernel), ..VmSpec::new(name) },
        )?;
        Ok(())
    }

    /// How many thousand sweeps the bare guest has printed since it came to this host.
    ///
    /// # Errors
    /// It found a page that does not hold what it wrote.
    pub fn bare_generations(&self, host: &str, name: &str) -> Result<usize> {
        let console = self.console(host, name)?;
        ensure!(!console.contains("BAD"), "the guest found a wrong page: {console}");
        Ok(console.lines().filter(|line| line.starts_with("G ")).count())
    }

    /// Checks that the guest runs on its host and on no other, answers over both address families, and that its memory is right: all
    /// of it that its plan had filled.
    ///
    /// # Errors
    /// Something of that is not so.
    pub fn expect_whole(&self, guest: &Guest) -> Result<Answer> {
        for host in self.hosts() {
            let state = self.vm(&host, &guest.name).map(|vm| vm.state);
            match state {
                Ok(state) if host == guest.host => {
                    ensure!(state == VmState::Running, "on host {host} it is {state}");
                }
                Ok(state) => {
                    ensure!(state == VmState::Stopped, "on host {host} too, it is {state}")
                }
                Err(error) => ensure!(host != guest.host, "on host {host}: {error}"),
            }
        }
        guest.ask_at(guest.ipv6.into(), &Request::Status {}).context("over IPv6")?;
        guest.verify()
    }
}

impl Guest {
    /// Asked now and then, not probed a thousand times a second: under TCG that alone keeps a vCPU busy.
    fn wait_ready(&self, limit: Duration) -> Result<()> {
        let status = until("the guest has filled its memory", limit, || {
            let status = self.status()?;
            Ok(status.ready.then_some(status))
        })?;
        ensure!(status.problems.is_empty(), "the guest has problems: {:?}", status.problems);
        Ok(())
    }

    /// Asks how it is.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> Result<Answer> {
        self.ask_at(self.ipv4.into(), &Request::Status {})
    }

    /// Has it do something else.
    ///
    /// # Errors
    /// It does not answer, or does not know such a workload.
    pub fn workload(&self, spec: &str) -> Result<()> {
        let answer = self.ask_at(self.ipv4.into(), &Request::Workload { spec: spec.to_owned() })?;
        ensure!(answer.ok, "the guest refuses the workload {spec}: {answer:?}");
        Ok(())
    }

    /// Has it check every page that it has filled, while it goes on with what it does.
    ///
    /// # Errors
    /// A page is wrong, a write found its page changed, a thread of the guest died, or fewer pages were checked than it was to fill.
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

    /// Has it compute for so long with each of its kernels, and tells how fast they are.
    ///
    /// # Errors
    /// It does not answer, or that is longer than it may take.
    pub fn kernels(&self, each: Duration) -> Result<Answer> {
        let millis = u64::try_from(each.as_millis()).unwrap_or(u64::MAX);
        let answer = self.ask_at(self.ipv4.into(), &Request::Kernels { millis })?;
        ensure!(answer.ok && answer.kernels.is_some(), "the guest does not compute: {answer:?}");
        Ok(answer)
    }

    /// Has it power itself off; nobody waits for its answer, which never comes.
    ///
    /// # Errors
    /// It can't be reached.
    pub fn power_off(&self) -> Result<()> {
        let mut stream = self.connect(self.ipv4.into(), CONNECT_LIMIT)?;
        let mut line = serde_json::to_vec(&Request::Poweroff {})?;
        line.push(b'\n');
        Ok(stream.write_all(&line)?)
    }

    /// Asks over the network, from inside the client's namespace as the guest's users do.
    fn ask_at(&self, address: IpAddr, request: &Request) -> Result<Answer> {
        ask_guest(&self.client_namespace, address, request)
    }

    /// A connection to its control port.
    pub(super) fn connect(&self, address: IpAddr, limit: Duration) -> Result<TcpStream> {
        connect(&self.client_namespace, address, limit)
    }

    /// Has the lab's client probe it from now on, and waits until it has answered; gives when.
    ///
    /// # Errors
    /// It does not answer.
    pub fn watch(&self) -> Result<u64> {
        self.prober()?.watch(self.ipv4.into())?;
        self.wait_answer()
    }

    /// Has the lab's client leave it alone.
    ///
    /// # Errors
    /// The client does not answer.
    pub fn unwatch(&self) -> Result<()> {
        Ok(self.prober()?.unwatch(self.ipv4.into())?)
    }

    /// Waits until it answers a probe from now on, which it does only while it is watched; gives when (`CLOCK_MONOTONIC` nanoseconds).
    ///
    /// # Errors
    /// It does not.
    pub fn wait_answer(&self) -> Result<u64> {
        let answered = self.prober()?.wait_answer(self.ipv4.into(), monotonic_ns(), LIMIT)?;
        answered.with_context(|| format!("no echo from {} within {LIMIT:?}", self.ipv4))
    }

    /// What the probes tell of a span of time.
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
