//! A disk with the lab's Linux guest that boots by itself, by BIOS and by UEFI: GRUB for both, and
//! the guest's kernel and initramfs in one file system.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial};

/// Size of the disk, and place of its file system.
pub(super) const DISK_BYTES: u64 = 64 << 20;
const PARTITION_BYTES: u64 = 62 << 20;
const PARTITION_AT: u64 = 1 << 20;
/// Bytes of the boot sector in front of the partition table.
const BOOT_CODE_BYTES: usize = 440;
const BIOS: &str = "/usr/lib/grub/i386-pc";
const UEFI: &str = "/usr/lib/grub/x86_64-efi";

/// Returns what is missing to make such a disk.
pub(super) fn missing() -> Option<String> {
    let programs = ["/usr/bin/grub-mkimage", "/usr/bin/mcopy", "/usr/sbin/mkfs.vfat"];
    let needed = programs.into_iter().chain(["/usr/sbin/sfdisk", "/usr/bin/qemu-img", BIOS, UEFI]);
    let lacks = |path: &&str| !Path::new(path).exists();
    needed.into_iter().find(lacks).map(|path| format!("no {path} (scripts/deps --libvirt)"))
}

/// Runs a program to its end.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let ended = Command::new(program).args(arguments).output();
    let ended = ended.with_context(|| format!("cannot run {program}"))?;
    let errors = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "{program} {arguments:?}: {errors}");
    Ok(())
}

/// Makes the raw disk of a plan's guest in a folder.
pub(super) fn build(trial: &Trial, folder: &Path, plan: &GuestPlan) -> Result<PathBuf> {
    let at = |name: &str| folder.join(name);
    let text = |path: &Path| path.display().to_string();
    let spec = plan.spec(trial.image());
    let line = spec.cmdline.context("the guest has a command line")?;
    let load = at("load.cfg");
    let script = "search.file /vmlinuz root\nlinux /vmlinuz LINE\ninitrd /initrd.img\nboot\n";
    fs::write(&load, script.replace("LINE", &line))?;
    let load = text(&load);
    let (core, loader) = (at("core.img"), at("BOOTX64.EFI"));
    for (format, out, more) in
        [("i386-pc", &core, &["biosdisk"][..]), ("x86_64-efi", &loader, &[][..])]
    {
        let out = text(out);
        let head = ["--format", format, "--output", &out, "--config", &load, "--prefix", "/"];
        let modules = ["part_msdos", "fat", "search_fs_file", "linux", "boot"];
        run("grub-mkimage", &[&head[..], &modules, more].concat())?;
    }
    let fat = at("fat");
    File::create(&fat)?.set_len(PARTITION_BYTES)?;
    let fat = text(&fat);
    run("/usr/sbin/mkfs.vfat", &[&fat])?;
    run("mmd", &["-i", &fat, "::/EFI", "::/EFI/BOOT"])?;
    let path = |file: &Option<PathBuf>| file.as_deref().map(text).unwrap_or_default();
    for (from, to) in [
        (path(&spec.kernel), "::/vmlinuz"),
        (path(&spec.initrd), "::/initrd.img"),
        (text(&loader), "::/EFI/BOOT/BOOTX64.EFI"),
    ] {
        run("mcopy", &["-i", &fat, &from, to])?;
    }
    let disk = at("bootable.raw");
    File::create(&disk)?.set_len(DISK_BYTES)?;
    let table = at("table");
    let (start, sectors) = (PARTITION_AT / 512, PARTITION_BYTES / 512);
    fs::write(&table, format!("label: dos\nstart={start}, size={sectors}, type=ef, bootable\n"))?;
    let input = File::open(&table)?;
    let made = Command::new("/usr/sbin/sfdisk").arg("--quiet").arg(&disk).stdin(input).output()?;
    ensure!(made.status.success(), "sfdisk: {}", String::from_utf8_lossy(&made.stderr));
    let out = File::options().write(true).open(&disk)?;
    let sector = fs::read(Path::new(BIOS).join("boot.img"))?;
    // The boot sector loads what follows it.
    out.write_all_at(&sector[..BOOT_CODE_BYTES], 0)?;
    let core = fs::read(core)?;
    ensure!((core.len() as u64) < PARTITION_AT - 512, "GRUB has {} bytes", core.len());
    out.write_all_at(&core, 512)?;
    out.write_all_at(&fs::read(&fat)?, PARTITION_AT)?;
    Ok(disk)
}

/// Converts the disk into a file of another format, with an option of that format if one is given.
pub(super) fn convert(disk: &Path, format: &str, option: &str, to: &Path) -> Result<()> {
    let (disk, to) = (disk.display().to_string(), to.display().to_string());
    let mut arguments = vec!["convert", "-f", "raw", "-O", format];
    if !option.is_empty() {
        arguments.extend(["-o", option]);
    }
    arguments.extend([disk.as_str(), to.as_str()]);
    run("qemu-img", &arguments)
}
