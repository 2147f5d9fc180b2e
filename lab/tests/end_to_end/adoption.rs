//! Guests of another program's QEMU that are adopted without a stop: a bare QEMU by its QMP socket
//! here, libvirt's domains in `libvirt` (`make adoption`).

pub(crate) mod libvirt;
mod live_export;
mod onto_host;
mod walk;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use godwit_api::{AdoptGuest, Adoption, AdoptionState, ForeignPlace, SetNicLink};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions, image};
use godwit_qemu::NicLink;
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::drives::expect_blocks;
use crate::move_and_check;

/// Options for a lab with hold points.
fn holds() -> LabOptions {
    LabOptions { hooks: Hooks { holds: true, ..Hooks::default() }, ..LabOptions::default() }
}

/// Runs a program to its end.
fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let ended = Command::new(program).args(arguments).status()?;
    ensure!(ended.success(), "{program} {arguments:?} failed");
    Ok(())
}

/// A QEMU that Godwit does not know.
struct BareQemu {
    process: Child,
    socket: PathBuf,
    disk: PathBuf,
    _folder: tempfile::TempDir,
}

impl Drop for BareQemu {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the bridge of the guests' network of a host.
fn bridge(trial: &Trial, host: &str) -> Result<String> {
    let info = trial.ask(trial.agent(host).host())?;
    let network = info.networks.values().next().context("the host has no network")?;
    Ok(network.bridge.clone())
}

impl BareQemu {
    /// Boots the guest of a plan at host a, with a disk, a screen and a tap of its own.
    fn boot(trial: &Trial, plan: &GuestPlan) -> Result<BareQemu> {
        BareQemu::start(trial, plan, "foreign0", &[])
    }

    fn start(trial: &Trial, plan: &GuestPlan, tap: &str, options: &[&str]) -> Result<BareQemu> {
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let (socket, disk) = (folder.path().join("qmp"), folder.path().join("disk.img"));
        std::fs::File::create(&disk)?.set_len(32 << 20)?;
        let namespace = trial.namespace("a");
        let ip =
            |arguments: &[&str]| run("ip", &[&["-n", namespace.as_str()][..], arguments].concat());
        ip(&["tuntap", "add", tap, "mode", "tap"])?;
        ip(&["link", "set", tap, "master", &bridge(trial, "a")?, "up"])?;
        let spec = plan.spec(trial.image());
        let path = |path: &Option<PathBuf>| path.clone().unwrap_or_default().display().to_string();
        let kib = plan.memory.iter().map(|size| size.bytes()).sum::<u64>() >> 10;
        let arguments = format!(
            "-nodefaults -name guest=foreign -machine q35,usb=off -accel tcg -cpu Westmere-v1 \
             -smp 1 -m {kib}K -display none -device VGA,id=vga,addr=0x3 -vnc none \
             -qmp unix:{},server=on,wait=off -serial file:{} \
             -netdev tap,id=lan,ifname={tap},script=no,downscript=no \
             -device virtio-net-pci,netdev=lan,id=nic0,addr=0x4,mac=52:54:00:ad:00:01 \
             -drive if=none,id=d0,format=raw,file={} \
             -device virtio-blk-pci,drive=d0,id=disk0,addr=0x5",
            socket.display(),
            folder.path().join("console").display(),
            disk.display()
        );
        let log = std::fs::File::create(folder.path().join("log"))?;
        let process = Command::new("ip")
            .args(["netns", "exec", &namespace, "qemu-system-x86_64"])
            .args(arguments.split_whitespace())
            .arg("-kernel")
            .arg(path(&spec.kernel))
            .arg("-initrd")
            .arg(path(&spec.initrd))
            .arg("-append")
            .arg(spec.cmdline.unwrap_or_default())
            .args(options)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()?;
        let qemu = BareQemu { process, socket, disk, _folder: folder };
        until("the QEMU has a monitor", LIMIT, || Ok(qemu.socket.exists().then_some(())))?;
        Ok(qemu)
    }

    /// Sends commands to its monitor, which takes one client at a time.
    fn ask(&self, commands: &[Value]) -> Result<()> {
        let mut monitor = UnixStream::connect(&self.socket)?;
        monitor.set_read_timeout(Some(LIMIT))?;
        let mut answers = BufReader::new(monitor.try_clone()?).lines();
        let hello = json!({ "execute": "qmp_capabilities" });
        for command in std::iter::once(&hello).chain(commands) {
            writeln!(monitor, "{command}")?;
            let answer = answers.find(|line| {
                line.as_ref().map_or(true, |line| line.contains("return") || line.contains("error"))
            });
            let answer = answer.context("its monitor was closed")??;
            ensure!(!answer.contains("\"error\""), "{command}: {answer}");
        }
        Ok(())
    }

    fn request(&self) -> AdoptGuest {
        let from = ForeignPlace::Qmp(self.socket.display().to_string());
        AdoptGuest { from, name: None, undefine: false, to: None }
    }

    fn lives(&mut self) -> Result<bool> {
        Ok(self.process.try_wait()?.is_none())
    }
}

/// Waits for the end of an adoption.
fn ended(trial: &Trial, id: &str) -> Result<Adoption> {
    until("the adoption ends", LIMIT, || {
        let adoption = trial.ask(trial.agent("a").adoption(id))?;
        Ok(adoption.state.is_over().then_some(adoption))
    })
}

/// Checks that the guest runs where it was and that host a has nothing of it.
fn expect_where_it_was(trial: &Trial, guest: &Guest, vm: &str) -> Result<()> {
    until("the host has nothing of the VM", LIMIT, || {
        Ok(trial.vm("a", vm).is_err().then_some(()))
    })?;
    let left = trial.hypervisors("a")?;
    ensure!(left.len() == 1, "a QEMU of Godwit is left: {left:?}");
    guest.verify().map(drop)
}

#[test]
fn a_bare_qemu_is_adopted_and_moves_on() -> Result<()> {
    let Some(trial) = Trial::begin_with("adoption", holds())? else { return Ok(()) };
    let plan = GuestPlan {
        workload: crate::BUSY.to_owned(),
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new("foreign")
    };
    let mut qemu = BareQemu::boot(&trial, &plan)?;
    let mut guest = trial.guest_elsewhere("a", &plan);
    guest.wait_ready(plan.boot_limit)?;
    let agent = trial.agent("a");
    let found = trial.ask(agent.check_adoption(&qemu.request()))?;
    ensure!(found.findings.is_empty() && found.vcpus == Some(1), "{found:#?}");

    refused_while_it_migrates(&trial, &qemu, &guest)?;
    undone_before_the_hand_over(&trial, &qemu, &guest)?;

    let begun = trial.ask(agent.adopt(&qemu.request()))?;
    let adoption = ended(&trial, &begun.id)?;
    ensure!(adoption.state == AdoptionState::Completed, "{adoption:#?}");
    let late = trial.ask(agent.cancel_adoption(&begun.id)).err();
    ensure!(late.is_some_and(|error| error.to_string().contains("handed over")), "cancelled late");
    eprintln!(
        "  adopted in {:.0} ms, paused for {:.1} ms",
        adoption.elapsed_ms,
        adoption.pause_ms.unwrap_or_default()
    );
    until("the other QEMU ends", LIMIT, || Ok((!qemu.lives()?).then_some(())))?;
    trial.expect_whole(&guest)?;
    let vm = trial.vm("a", "foreign")?;
    ensure!(vm.spec.topology.is_some() && vm.spec.disks.len() == 1, "{:?}", vm.spec);
    move_and_check(&trial, &mut guest)?;
    // It keeps its devices: a restarted agent finds it, and its hardware stays.
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    trial.expect_whole(&guest)?;
    let down = SetNicLink { nic: 0, link: NicLink::Down };
    let refused = trial.ask(trial.agent("b").set_link("foreign", down)).err();
    ensure!(refused.is_some_and(|error| error.to_string().contains("adopted")), "link set");
    trial.delete("b", "foreign")?;
    expect_blocks(&qemu.disk)?;
    trial.finish()
}

/// A guest that its own program is migrating is not adopted.
fn refused_while_it_migrates(trial: &Trial, qemu: &BareQemu, guest: &Guest) -> Result<()> {
    let path = qemu.socket.with_file_name("elsewhere");
    let elsewhere = UnixListener::bind(&path)?;
    let limit = |bytes_per_s: u64| {
        let arguments = json!({ "max-bandwidth": bytes_per_s });
        json!({ "execute": "migrate-set-parameters", "arguments": arguments })
    };
    let uri = json!({ "uri": format!("unix:{}", path.display()) });
    qemu.ask(&[limit(4096), json!({ "execute": "migrate", "arguments": uri })])?;
    let found = trial.ask(trial.agent("a").check_adoption(&qemu.request()))?.findings;
    let is_named = found.iter().any(|finding| finding.message.contains("is being migrated"));
    ensure!(is_named, "{found:#?}");
    let begun = trial.ask(trial.agent("a").adopt(&qemu.request()))?;
    let adoption = ended(trial, &begun.id)?;
    ensure!(adoption.state == AdoptionState::Failed, "{adoption:#?}");
    drop(elsewhere);
    // QEMU's own default.
    qemu.ask(&[json!({ "execute": "migrate_cancel" }), limit(128 << 20)])?;
    until("that migration ends", LIMIT, || {
        let found = trial.ask(trial.agent("a").check_adoption(&qemu.request()))?.findings;
        Ok(found.is_empty().then_some(()))
    })?;
    guest.verify().map(drop)
}

/// An adoption that is cancelled, one whose new QEMU is killed, one whose disk is locked, and one
/// whose agent dies: the guest runs on in its QEMU.
fn undone_before_the_hand_over(trial: &Trial, qemu: &BareQemu, guest: &Guest) -> Result<()> {
    let held = trial.hold("a", "host.adoption-loaded")?;
    let begun = trial.ask(trial.agent("a").adopt(&qemu.request()))?;
    held.reached(LIMIT)?;
    let second = trial.ask(trial.agent("a").adopt(&qemu.request())).err();
    ensure!(second.is_some_and(|error| error.to_string().contains("in progress")), "two at once");
    trial.ask(trial.agent("a").cancel_adoption(&begun.id))?;
    held.open();
    let adoption = ended(trial, &begun.id)?;
    ensure!(adoption.state == AdoptionState::Cancelled, "{adoption:#?}");
    expect_where_it_was(trial, guest, "foreign")?;

    let held = trial.hold("a", "host.adoption-loaded")?;
    let begun = trial.ask(trial.agent("a").adopt(&qemu.request()))?;
    held.reached(LIMIT)?;
    trial.kill_hypervisor("a", "foreign")?;
    held.open();
    let adoption = ended(trial, &begun.id)?;
    ensure!(adoption.state == AdoptionState::Failed && adoption.error.is_some(), "{adoption:#?}");
    expect_where_it_was(trial, guest, "foreign")?;

    undone_by_a_lock(trial, &qemu.request(), &qemu.disk, guest)?;

    let held = trial.hold("a", "host.adoption-take-over")?;
    trial.ask(trial.agent("a").adopt(&qemu.request()))?;
    held.reached(LIMIT)?;
    trial.end_agent("a", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    until("the guest runs again", LIMIT, || Ok(guest.status().is_ok().then_some(())))?;
    expect_where_it_was(trial, guest, "foreign")
}

/// Another program has a lock that the new QEMU needs. The guest's own QEMU waits for it, too, and
/// gets it.
fn undone_by_a_lock(trial: &Trial, request: &AdoptGuest, disk: &Path, guest: &Guest) -> Result<()> {
    let held = trial.hold("a", "host.adoption-loaded")?;
    let begun = trial.ask(trial.agent("a").adopt(request))?;
    held.reached(LIMIT)?;
    let image = std::fs::File::options().read(true).write(true).open(disk)?;
    rustix::fs::fcntl_lock(&image, FlockOperation::NonBlockingLockExclusive)?;
    held.open();
    until("the new QEMU gives up", LIMIT, || {
        Ok(trial.vm("a", &guest.name).is_err().then_some(()))
    })?;
    drop(image);
    let adoption = ended(trial, &begun.id)?;
    let why = adoption.error.as_ref().map_or("", |error| error.message.as_str());
    ensure!(why.contains("lock"), "{adoption:#?}");
    expect_where_it_was(trial, guest, &guest.name)
}
