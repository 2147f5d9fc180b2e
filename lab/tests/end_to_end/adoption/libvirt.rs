//! Domains of a real libvirtd, in the namespace of host a and with directories of its own: ten
//! shapes are adopted live by `godwit vm adopt`, half of them onto host b; one moves on. The guests
//! write to their disks on virtio and SCSI; their kernel has no driver of the others. Under TCG
//! that needs QEMU 9.0, because libvirt rounds memory to MiB (docs/engines.md): `make adoption`
//! brings one.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use godwit_api::{AdoptGuest, Adoption, AdoptionState, ForeignPlace};
use godwit_lab::image;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, must_run, until};
use godwit_qemu::ByteSize;

use super::onto_host::{undone_with_its_link, undone_with_its_memory};
use super::{bridge, ended, expect_where_it_was, holds, undone_by_a_lock};
use crate::drives::expect_blocks;
use crate::move_and_check;

/// Directories of libvirt that are replaced, each with the name of its replacement.
const DIRECTORIES: [(&str, &str); 5] = [
    ("/run/libvirt", "run"),
    ("/var/lib/libvirt", "lib"),
    ("/var/log/libvirt", "log"),
    ("/var/cache/libvirt", "cache"),
    ("/etc/libvirt", "etc"),
];
const QEMU_CONF: &str = "user = \"root\"\ngroup = \"root\"\ndynamic_ownership = 0\n\
    remember_owner = 0\nsecurity_driver = \"none\"\ncgroup_controllers = []\nnamespaces = []\n\
    stdio_handler = \"file\"\n";
const LIBVIRTD_CONF: &str = "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n";
/// Images of UEFI for machine type q35 (package ovmf).
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// What a domain has.
pub(super) struct Shape {
    pub(super) machine: &'static str,
    pub(super) uefi: bool,
    pub(super) video: Option<&'static str>,
    /// Bus and format of each disk.
    pub(super) disks: &'static [(&'static str, &'static str)],
    pub(super) nics: usize,
    pub(super) agent: bool,
    pub(super) vcpus: u32,
}

pub(super) const PLAIN: Shape = Shape {
    machine: "q35",
    uefi: false,
    video: None,
    disks: &[("virtio", "raw")],
    nics: 1,
    agent: false,
    vcpus: 1,
};

const SHAPES: [Shape; 10] = [
    PLAIN,
    Shape { video: Some("vga"), disks: &[("virtio", "qcow2"), ("virtio", "raw")], ..PLAIN },
    Shape { machine: "pc", ..PLAIN },
    Shape { machine: "pc", video: Some("vga"), disks: &[("virtio", "qcow2")], nics: 2, ..PLAIN },
    Shape { uefi: true, ..PLAIN },
    Shape { uefi: true, video: Some("virtio"), disks: &[("virtio", "qcow2")], ..PLAIN },
    Shape { disks: &[("scsi", "raw"), ("scsi", "qcow2"), ("virtio", "raw")], agent: true, ..PLAIN },
    Shape { disks: &[("sata", "raw"), ("sata", "qcow2")], vcpus: 2, ..PLAIN },
    Shape { machine: "pc", disks: &[("ide", "raw")], agent: true, ..PLAIN },
    Shape { video: Some("vga"), nics: 2, agent: true, vcpus: 2, ..PLAIN },
];

/// A libvirtd of the test's own.
pub(crate) struct Libvirt {
    daemon: Child,
    folder: tempfile::TempDir,
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        for name in self.virsh(&["list", "--name"]).unwrap_or_default().split_whitespace() {
            let _ = self.virsh(&["destroy", name]);
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Libvirt {
    pub(crate) fn start(trial: &Trial) -> Result<Libvirt> {
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let mut script = String::from("mount --make-rprivate /\n");
        for (directory, name) in DIRECTORIES {
            let own = folder.path().join(name);
            std::fs::create_dir(&own)?;
            script.push_str(&format!(
                "mkdir -p {directory}\nmount --bind {} {directory}\n",
                own.display()
            ));
        }
        std::fs::write(folder.path().join("etc/qemu.conf"), QEMU_CONF)?;
        std::fs::write(folder.path().join("etc/libvirtd.conf"), LIBVIRTD_CONF)?;
        script.push_str("exec /usr/sbin/libvirtd --config /etc/libvirt/libvirtd.conf\n");
        let log = std::fs::File::create(folder.path().join("libvirtd.log"))?;
        let daemon = Command::new("ip")
            .args(["netns", "exec", &trial.namespace("a"), "unshare", "--mount", "sh", "-ec"])
            .arg(script)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let libvirt = Libvirt { daemon, folder };
        until("libvirtd answers", LIMIT, || Ok(libvirt.virsh(&["list"]).ok()))?;
        Ok(libvirt)
    }

    fn uri(&self) -> String {
        let socket = self.folder.path().join("run/libvirt-sock");
        format!("qemu:///system?socket={}", socket.display())
    }

    /// Returns the path of a disk of a domain.
    pub(super) fn image(&self, domain: &str, disk: usize) -> PathBuf {
        self.folder.path().join(format!("{domain}-{disk}.img"))
    }

    pub(crate) fn virsh(&self, arguments: &[&str]) -> Result<String> {
        let done = Command::new("virsh").args(["-c", &self.uri()]).args(arguments).output()?;
        let errors = String::from_utf8_lossy(&done.stderr).into_owned();
        ensure!(done.status.success(), "virsh {arguments:?}: {errors}");
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    }

    /// Configures this libvirt at the agent of host a.
    pub(super) fn announce(&self, trial: &Trial) -> Result<()> {
        let (uri, run_dir) = (self.uri(), self.folder.path().join("run/qemu"));
        trial.reconfigure("a", |config| {
            let mut libvirt = toml::Table::new();
            libvirt.insert("uri".to_owned(), uri.into());
            libvirt.insert("run_dir".to_owned(), run_dir.display().to_string().into());
            config.insert("libvirt".to_owned(), toml::Value::Table(libvirt));
        })
    }

    /// Boots the guest of a plan as a domain.
    pub(super) fn boot(&self, trial: &Trial, plan: &GuestPlan, shape: &Shape) -> Result<Guest> {
        let xml = self.folder.path().join(format!("{}.xml", plan.name));
        std::fs::write(&xml, self.domain(trial, plan, shape)?)?;
        self.virsh(&["define", &xml.display().to_string()])?;
        self.virsh(&["start", &plan.name])?;
        let guest = trial.guest_elsewhere("a", plan);
        guest.wait_ready(plan.boot_limit)?;
        Ok(guest)
    }

    fn domain(&self, trial: &Trial, plan: &GuestPlan, shape: &Shape) -> Result<String> {
        let spec = plan.spec(trial.image());
        let path = |path: &Option<PathBuf>| path.clone().unwrap_or_default().display().to_string();
        let kib = plan.memory.iter().map(|size| size.bytes()).sum::<u64>() >> 10;
        let name = &plan.name;
        let mut os = format!("<type arch='x86_64' machine='{}'>hvm</type>", shape.machine);
        if shape.uefi {
            let nvram = self.folder.path().join(format!("{name}.fd"));
            os.push_str(&format!(
                "<loader readonly='yes' type='pflash'>{CODE}</loader>\
                 <nvram template='{VARIABLES}'>{}</nvram>",
                nvram.display()
            ));
        }
        let cmdline = spec.cmdline.clone().unwrap_or_default();
        let cmdline = cmdline.replace('&', "&amp;").replace('<', "&lt;");
        os.push_str(&format!(
            "<kernel>{}</kernel><initrd>{}</initrd><cmdline>{cmdline}</cmdline>",
            path(&spec.kernel),
            path(&spec.initrd)
        ));
        let mut devices = String::from("<emulator>/usr/bin/qemu-system-x86_64</emulator>");
        for (index, (bus, format)) in shape.disks.iter().enumerate() {
            let image = self.image(name, index);
            create_image(&image, format)?;
            let letter = char::from(b'a' + u8::try_from(index)?);
            let prefix = match *bus {
                "virtio" => "vd",
                "ide" => "hd",
                _ => "sd",
            };
            devices.push_str(&format!(
                "<disk type='file' device='disk'><driver name='qemu' type='{format}'/>\
                 <source file='{}'/><target dev='{prefix}{letter}' bus='{bus}'/></disk>",
                image.display()
            ));
        }
        if shape.disks.iter().any(|(bus, _)| *bus == "scsi") {
            devices.push_str("<controller type='scsi' model='virtio-scsi'/>");
        }
        let bridge = bridge(trial, "a")?;
        for index in 0..shape.nics {
            devices.push_str(&format!(
                "<interface type='bridge'><source bridge='{bridge}'/>\
                 <mac address='52:54:00:ad:{:02x}:{index:02x}'/><model type='virtio'/></interface>",
                plan.number
            ));
        }
        devices.push_str("<serial type='pty'/>");
        if shape.agent {
            devices.push_str(
                "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/>\
                 </channel>",
            );
        }
        if let Some(video) = shape.video {
            devices.push_str(&format!(
                "<graphics type='vnc' autoport='yes'/><video><model type='{video}'/></video>"
            ));
        }
        let vcpus = shape.vcpus;
        Ok(format!(
            "<domain type='qemu'><name>{name}</name><memory unit='KiB'>{kib}</memory>\
             <vcpu>{vcpus}</vcpu><os>{os}</os><features><acpi/></features>\
             <cpu mode='custom' match='exact' check='none'><model>Westmere</model></cpu>\
             <devices>{devices}</devices></domain>"
        ))
    }
}

fn create_image(path: &Path, format: &str) -> Result<()> {
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", format])
        .arg(path)
        .arg("16M")
        .status()?;
    ensure!(made.success(), "cannot create {}", path.display());
    Ok(())
}

/// Returns a program of libvirt that is missing.
pub(crate) fn missing_programs() -> Option<String> {
    let mut needed = ["/usr/sbin/libvirtd", "/usr/bin/virsh", "/usr/bin/qemu-img"].into_iter();
    let missing = needed.find(|program| !Path::new(program).exists());
    missing.map(|program| format!("no {program} (scripts/deps --libvirt)"))
}

/// Why the test cannot run here.
fn missing() -> Option<String> {
    if let Some(why) = missing_programs() {
        return Some(why);
    }
    let version = Command::new("qemu-system-x86_64").arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&version.stdout).into_owned();
    let major = text.split("version ").nth(1)?.split('.').next()?.parse::<u32>().ok()?;
    (major < 9).then(|| "under TCG it needs QEMU 9.0: make adoption".to_owned())
}

fn request(name: &str) -> AdoptGuest {
    AdoptGuest {
        from: ForeignPlace::Libvirt(name.to_owned()),
        name: None,
        undefine: false,
        to: None,
    }
}

/// Starts a lab with a libvirtd that the agent of host a knows. Returns `None`, and says why, if
/// the test is not wanted or cannot run: boots under TCG take minutes, so only `make adoption` runs
/// it.
pub(super) fn begin(name: &str) -> Result<Option<(Trial, Libvirt)>> {
    if std::env::var_os("GODWIT_ADOPTIONS").is_none() {
        eprintln!("skipped: {name}: make adoption");
        return Ok(None);
    }
    if let Some(why) = missing() {
        ensure!(!must_run(), "{why}");
        eprintln!("skipped: {name}: {why}");
        return Ok(None);
    }
    let Some(trial) = Trial::begin_with(name, holds())? else { return Ok(None) };
    let libvirt = Libvirt::start(&trial)?;
    libvirt.announce(&trial)?;
    Ok(Some((trial, libvirt)))
}

#[test]
fn domains_of_ten_shapes_are_adopted() -> Result<()> {
    let Some((trial, libvirt)) = begin("adoption-libvirt")? else { return Ok(()) };
    let shapes = std::env::var("GODWIT_ADOPTIONS")?;
    for (index, shape) in SHAPES.iter().enumerate().take(shapes.parse()?) {
        adopt_shape(&trial, &libvirt, (index, shape)).with_context(|| format!("shape {index}"))?;
    }
    drop(libvirt);
    trial.finish()
}

fn adopt_shape(trial: &Trial, libvirt: &Libvirt, (index, shape): (usize, &Shape)) -> Result<()> {
    let name = format!("domain{index}");
    let plan = GuestPlan {
        number: 30 + u8::try_from(index)?,
        memory: vec![ByteSize::from_mib(if shape.uefi { 320 } else { 224 })],
        vcpus: shape.vcpus,
        workload: crate::BUSY.to_owned(),
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new(&name)
    };
    let mut guest = libvirt.boot(trial, &plan, shape)?;
    let agent = trial.agent("a");
    let listed = trial.ask(agent.foreign_guests())?;
    let listed = listed.iter().find(|found| found.name == name).context("it is not listed")?;
    ensure!(listed.findings.is_empty() && listed.state == "running", "{listed:#?}");
    // Every second one goes onto the other host in the same step.
    let to = if index % 2 == 1 { "b" } else { "a" };
    let mut adopt: Vec<&str> = vec!["--json", "--host", "a", "vm", "adopt", "--libvirt", &name];
    if to == "b" {
        adopt.extend(["--to", to]);
    }
    let checked = trial.godwit(&[&adopt[..], &["--dry-run"]].concat())?;
    ensure!(checked.code == Some(0), "{}{}", checked.stdout, checked.stderr);
    if index == 0 {
        undone(trial, &name, &guest, libvirt)?;
        libvirt.virsh(&["autostart", &name])?;
    }
    let since = guest.watch()?;
    // The last shape leaves no definition at libvirt.
    let is_undefined = index + 1 == SHAPES.len();
    let undefine: &[&str] = if is_undefined { &["--undefine"] } else { &[] };
    let adopted = trial.godwit(&[&adopt[..], undefine].concat())?;
    ensure!(adopted.code == Some(0), "{}{}", adopted.stdout, adopted.stderr);
    let adoption: Adoption = serde_json::from_str(&adopted.stdout)?;
    ensure!(adoption.state == AdoptionState::Completed, "{adoption:#?}");
    guest.host = to.to_owned();
    let until_ns = guest.wait_answer()?;
    let gaps = guest.gaps(since, until_ns)?;
    guest.unwatch()?;
    trial.expect_whole(&guest)?;
    eprintln!(
        "  shape {index} on host {to}: {:.0} ms, paused for {:.1} ms; longest gap {:.1} ms",
        adoption.elapsed_ms,
        adoption.pause_ms.unwrap_or_default(),
        gaps.longest_gap_ns.unwrap_or_default() as f64 / 1e6
    );
    if is_undefined {
        ensure!(libvirt.virsh(&["domstate", &name]).is_err(), "libvirt still defines it");
    } else {
        ensure!(libvirt.virsh(&["domstate", &name])?.contains("shut off"), "libvirt runs it, too");
    }
    if index == 0 {
        let is_noted = adoption.notes.iter().any(|note| note.contains("autostart"));
        ensure!(is_noted, "{:?}", adoption.notes);
        move_and_check(trial, &mut guest)?;
    }
    trial.delete(&guest.host, &name)?;
    for (disk, (bus, _)) in shape.disks.iter().enumerate() {
        if ["virtio", "scsi"].contains(bus) {
            expect_blocks(&libvirt.image(&name, disk))?;
        }
    }
    Ok(())
}

/// An adoption that is cancelled, one whose new QEMU is killed, one whose disk is locked, and onto
/// the other host one whose link is cut and one that gets too little memory: libvirt's domain runs
/// on.
fn undone(trial: &Trial, name: &str, guest: &Guest, libvirt: &Libvirt) -> Result<()> {
    for is_cancelled in [true, false] {
        let held = trial.hold("a", "host.adoption-loaded")?;
        let begun = trial.ask(trial.agent("a").adopt(&request(name)))?;
        held.reached(LIMIT)?;
        if is_cancelled {
            trial.ask(trial.agent("a").cancel_adoption(&begun.id))?;
        } else {
            trial.kill_hypervisor("a", name)?;
        }
        held.open();
        let adoption = ended(trial, &begun.id)?;
        let wanted = if is_cancelled { AdoptionState::Cancelled } else { AdoptionState::Failed };
        ensure!(adoption.state == wanted, "{adoption:#?}");
        expect_where_it_was(trial, guest, name)?;
        expect_running(libvirt, name)?;
    }
    undone_by_a_lock(trial, &request(name), &libvirt.image(name, 0), guest)?;
    expect_running(libvirt, name)?;
    let (onto, clean) =
        (AdoptGuest { to: Some("b".to_owned()), ..request(name) }, trial.traces("b")?);
    undone_with_its_link(trial, &onto, guest, &clean)?;
    expect_running(libvirt, name)?;
    undone_with_its_memory(trial, &onto, guest, &clean)?;
    expect_running(libvirt, name)
}

fn expect_running(libvirt: &Libvirt, name: &str) -> Result<()> {
    ensure!(libvirt.virsh(&["domstate", name])?.contains("running"), "libvirt does not run it");
    Ok(())
}
