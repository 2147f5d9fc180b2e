//! Guest images of the lab: a Linux kernel of the distribution with our init in an initramfs, a
//! user space of the distribution on a disk, and the bare 32-bit guest for KVM.
//!
//! All files are in one folder and are rebuilt only when their inputs change. Nothing is installed
//! on the machine: the kernel's package is downloaded and unpacked.

mod bare;
mod cpio;
mod debian;
mod kernel;

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, bail};

pub use bare::{build_bare, build_echo};
pub use debian::{Content as DebianContent, Debian, build_debian};

/// Modules that init loads, with their dependencies.
const MODULES: [&str; 5] =
    ["virtio_pci", "virtio_net", "virtio_blk", "virtio_console", "pvpanic_mmio"];
/// Further modules for a guest that uses its disks and CDs. The kernel has no driver for AHCI.
const DRIVE_MODULES: [&str; 3] = ["virtio_scsi", "sd_mod", "sr_mod"];
/// Further modules for a user space on a disk: its root is the disk with a tmpfs over it, and
/// systemd needs the next two. The last one reports free memory.
const USER_SPACE_MODULES: [&str; 4] = ["overlay", "autofs4", "binfmt_misc", "virtio_balloon"];

/// Kernel and initramfs for QEMU's `-kernel` and `-initrd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestImage {
    pub kernel: PathBuf,
    /// The initramfs (newc).
    pub initrd: PathBuf,
}

/// Kernel command line of every lab guest; options of the guest (`godwit.*`) follow it.
///
/// `preempt=full` keeps the echo prompt while a workload is in the kernel. `panic=-1` with QEMU's
/// `-no-reboot` makes a dead guest an ended QEMU. `mitigations=off`, `init_on_alloc=0`,
/// `nowatchdog` and `psi=0`: an emulated guest pays for page-table isolation with a flushed TLB at
/// each system call, and for each path through its kernel with code to be translated anew when it
/// arrives at another QEMU.
pub const COMMAND_LINE: &str = "console=ttyS0 quiet preempt=full net.ifnames=0 panic=-1 \
    mitigations=off init_on_alloc=0 nowatchdog psi=0";

/// Returns the default folder of images: `out/guest` of the source tree.
pub fn default_dir() -> PathBuf {
    source_tree().join("out/guest")
}

/// Returns the images in `out_dir`, if they have been built.
pub fn find(out_dir: &Path) -> Option<GuestImage> {
    let image = GuestImage { kernel: out_dir.join("vmlinuz"), initrd: out_dir.join("initrd.img") };
    (image.kernel.is_file() && image.initrd.is_file()).then_some(image)
}

/// Builds kernel and initramfs in `out_dir`, or those that are out of date.
///
/// The first time it needs `apt-get download` for the kernel. Concurrent builds wait for each
/// other.
pub fn build(out_dir: &Path) -> anyhow::Result<GuestImage> {
    let _lock = lock(out_dir)?;
    build_with(out_dir, "initrd.img", &[])
}

/// Builds kernel and initramfs of a guest that uses its disks and CDs, as [`build`] does.
pub fn build_with_drives(out_dir: &Path) -> anyhow::Result<GuestImage> {
    let _lock = lock(out_dir)?;
    build_with(out_dir, "initrd-drives.img", &DRIVE_MODULES)
}

/// Builds the kernel, and an initramfs with that name and further modules.
fn build_with(
    out_dir: &Path,
    initrd: &str,
    further_modules: &[&str],
) -> anyhow::Result<GuestImage> {
    let kernel = kernel::obtain(&out_dir.join("kernel"))?;
    let mut archive = cpio::Archive::new();
    for folder in ["dev", "proc", "sys", "modules"] {
        archive.folder(folder)?;
    }
    // The kernel opens it for init before init can mount anything.
    archive.character_device("dev/console", 5, 1)?;
    add_init(&mut archive)?;
    for module in kernel.modules(&[&MODULES, further_modules].concat())? {
        archive.file(&format!("modules/{}.ko", module.name), &module.bytes)?;
    }
    let image = GuestImage { kernel: out_dir.join("vmlinuz"), initrd: out_dir.join(initrd) };
    write_if_changed(&image.kernel, &fs::read(&kernel.image)?)?;
    write_if_changed(&image.initrd, &archive.finish()?)?;
    Ok(image)
}

/// Returns the guest's init, which cargo builds with the running program.
fn find_init() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding the running program")?;
    // Tests are in `deps`, examples in `examples`, and programs one folder up.
    let mut places = program.ancestors().skip(1).take(2).map(|folder| folder.join("godwit-guest"));
    places.find(|path| path.is_file()).with_context(|| {
        format!("no godwit-guest beside {}: run `make programs`", program.display())
    })
}

/// Adds init, and the loader and libraries that it needs at the paths that they have here.
fn add_init(archive: &mut cpio::Archive) -> anyhow::Result<()> {
    let init = find_init()?;
    let listing = String::from_utf8(run(Command::new("ldd").arg(&init))?)?;
    let libraries: Vec<&str> = listing.lines().filter_map(library).collect();
    let parents = libraries.iter().flat_map(|path| Path::new(path).ancestors().skip(1));
    let folders: BTreeSet<&str> = parents.filter_map(Path::to_str).map(in_archive).collect();
    // In order, so each folder comes before its content.
    for folder in folders.into_iter().filter(|folder| !folder.is_empty()) {
        archive.folder(folder)?;
    }
    let programs = libraries.iter().map(|path| (in_archive(path), Path::new(path)));
    for (name, path) in programs.chain([("init", init.as_path())]) {
        let content = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        archive.program(name, &content)?;
    }
    Ok(())
}

/// Returns the path in a line of `ldd`'s output, such as `libc.so.6 => /lib/libc.so.6 (0x7f…)`.
fn library(line: &str) -> Option<&str> {
    line.split_whitespace().find(|word| word.starts_with('/'))
}

fn in_archive(path: &str) -> &str {
    path.trim_start_matches('/')
}

fn source_tree() -> PathBuf {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.parent().unwrap_or(lab).to_path_buf()
}

/// Locks `out_dir`, which it creates, against other builds until the file is dropped.
fn lock(out_dir: &Path) -> anyhow::Result<fs::File> {
    fs::create_dir_all(out_dir).with_context(|| format!("making {}", out_dir.display()))?;
    let path = out_dir.join("lock");
    let file = fs::File::create(&path).with_context(|| format!("making {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// Replaces the file atomically if its content differs. A guest that is starting never reads half
/// of it, and an unchanged file keeps its time stamp.
fn write_if_changed(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let staged = path.with_extension("new");
    fs::write(&staged, bytes).with_context(|| format!("writing {}", staged.display()))?;
    fs::rename(&staged, path).with_context(|| format!("replacing {}", path.display()))
}

/// Runs a command to its end and returns its standard output. An error contains the end of its
/// standard error.
fn run(command: &mut Command) -> anyhow::Result<Vec<u8>> {
    run_with_input(command, &[])
}

fn run_with_input(command: &mut Command, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let line = describe(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("starting `{line}`"))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // From a thread of its own: a filter writes before it has read everything.
        scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
        child.wait_with_output()
    })
    .with_context(|| format!("waiting for `{line}`"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let tail: Vec<&str> = errors.lines().rev().take(15).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("`{line}` failed ({}):\n{}", output.status, tail.join("\n"));
    }
    Ok(output.stdout)
}

fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
