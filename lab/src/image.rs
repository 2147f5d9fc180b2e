//! Guest images of the lab: a Linux kernel of the distribution with our init in an initramfs, a user space of the
//! distribution on a disk for it, and the bare 32-bit guest for KVM.
//!
//! Everything lands in one folder and is made again only when what it is made from changed. Nothing is installed
//! into the machine: the kernel's package is downloaded and unpacked.

mod bare;
mod cpio;
mod debian;
mod kernel;

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, bail};

pub use bare::build_bare;
pub use debian::{Content as DebianContent, Debian, build_debian};

/// Modules that init loads, with whatever they depend on.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_net", "virtio_blk"];
/// What a user space on a disk needs beside them: its root is the disk with a tmpfs over it, and systemd wants the others.
const USER_SPACE_MODULES: [&str; 3] = ["overlay", "autofs4", "binfmt_misc"];

/// A kernel and an initramfs for QEMU's `-kernel` and `-initrd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestImage {
    /// The kernel (bzImage).
    pub kernel: PathBuf,
    /// The initramfs (newc).
    pub initrd: PathBuf,
}

/// Kernel command line that every lab guest starts with; options of the guest (`godwit.*`) follow it.
///
/// `preempt=full` keeps the echo prompt while a workload sits in the kernel; `panic=-1` with QEMU's `-no-reboot`
/// makes a dead guest an ended QEMU. `mitigations=off`, `init_on_alloc=0`, `nowatchdog` and `psi=0`: a guest that is emulated pays
/// for page-table isolation with a flushed TLB at each system call, and for each path through its kernel with code to be
/// translated anew when it arrives at another QEMU.
pub const COMMAND_LINE: &str = "console=ttyS0 quiet preempt=full net.ifnames=0 panic=-1 mitigations=off init_on_alloc=0 nowatchdog psi=0";

/// Where images lie unless somebody says otherwise: `out/guest` of the source tree.
pub fn default_dir() -> PathBuf {
    source_tree().join("out/guest")
}

/// The images of `out_dir` as they are, if they have been built.
pub fn find(out_dir: &Path) -> Option<GuestImage> {
    let image = GuestImage { kernel: out_dir.join("vmlinuz"), initrd: out_dir.join("initrd.img") };
    (image.kernel.is_file() && image.initrd.is_file()).then_some(image)
}

/// Builds kernel and initramfs in `out_dir`, or what of it is out of date.
///
/// Needs cargo and a static libc for init, and, the first time, `apt-get download` for the kernel. Builds at the
/// same time wait for each other.
pub fn build(out_dir: &Path) -> anyhow::Result<GuestImage> {
    let _lock = lock(out_dir)?;
    build_with(out_dir, "initrd.img", &[])
}

/// The kernel, and an initramfs of that name with further modules.
fn build_with(out_dir: &Path, initrd: &str, further_modules: &[&str]) -> anyhow::Result<GuestImage> {
    let init = build_init(out_dir)?;
    let kernel = kernel::obtain(&out_dir.join("kernel"))?;
    let mut archive = cpio::Archive::new();
    for folder in ["dev", "proc", "sys", "modules"] {
        archive.folder(folder)?;
    }
    // The kernel opens it for init before init can mount anything.
    archive.character_device("dev/console", 5, 1)?;
    archive.program("init", &fs::read(&init).with_context(|| format!("reading {}", init.display()))?)?;
    for module in kernel.modules(&[&MODULES, further_modules].concat())? {
        archive.file(&format!("modules/{}.ko", module.name), &module.bytes)?;
    }
    let image = GuestImage { kernel: out_dir.join("vmlinuz"), initrd: out_dir.join(initrd) };
    write_if_changed(&image.kernel, &fs::read(&kernel.image)?)?;
    write_if_changed(&image.initrd, &archive.finish()?)?;
    Ok(image)
}

/// Builds init as a static binary. Its own target folder: its flags would otherwise rebuild the whole workspace.
fn build_init(out_dir: &Path) -> anyhow::Result<PathBuf> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let tree = source_tree();
    if !tree.join("lab/guest/Cargo.toml").is_file() {
        bail!(
            "the guest's sources are not at {}: build the image where Godwit was built, with `make build`",
            tree.display()
        );
    }
    let target_dir = out_dir.join("init-target");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(&tree)
        .args(["build", "--quiet", "--release", "--locked", "--package", "godwit-guest", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target_dir)
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static\u{1f}-Cstrip=debuginfo");
    run(&mut cargo).context("building the guest's init (a static binary: needs libc6-dev)")?;
    Ok(target_dir.join(TARGET).join("release/godwit-guest"))
}

fn source_tree() -> PathBuf {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.parent().unwrap_or(lab).to_path_buf()
}

/// Keeps other builds out of `out_dir`, which it makes, until the file is dropped.
fn lock(out_dir: &Path) -> anyhow::Result<fs::File> {
    fs::create_dir_all(out_dir).with_context(|| format!("making {}", out_dir.display()))?;
    let path = out_dir.join("lock");
    let file = fs::File::create(&path).with_context(|| format!("making {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// Replaces the file in one step where its content differs, so that a guest which is starting never reads half
/// of it, and one that is up to date keeps its time stamp.
fn write_if_changed(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let staged = path.with_extension("new");
    fs::write(&staged, bytes).with_context(|| format!("writing {}", staged.display()))?;
    fs::rename(&staged, path).with_context(|| format!("replacing {}", path.display()))
}

/// Runs a command to its end and gives its standard output; a failure carries the last of its standard error.
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
