//! The bare guests: flat 32-bit multiboot kernels for a KVM that cannot run a 64-bit Linux. One
//! writes memory all the time, the other answers packets.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;

use super::{lock, run, write_if_changed};

const SWEEPING: &str = include_str!("bare.S");
const ANSWERING: &str = include_str!("echo.c");

/// Assembles the bare guest in `out_dir` and returns its path, for QEMU's `-kernel`. The guest
/// needs 96 MiB of memory.
pub fn build_bare(out_dir: &Path) -> anyhow::Result<PathBuf> {
    build(out_dir, "bare", "S", SWEEPING)
}

/// Compiles the bare guest that answers packets, as [`build_bare`] does the other.
pub fn build_echo(out_dir: &Path) -> anyhow::Result<PathBuf> {
    build(out_dir, "echo", "c", ANSWERING)
}

fn build(out_dir: &Path, name: &str, kind: &str, source: &str) -> anyhow::Result<PathBuf> {
    let _lock = lock(out_dir)?;
    let file = out_dir.join(format!("{name}.{kind}"));
    let staged = out_dir.join(format!("{name}.elf.staged"));
    write_if_changed(&file, source.as_bytes())?;
    run(Command::new("gcc")
        .args(["-m32", "-O2", "-ffreestanding", "-fno-pic", "-fno-stack-protector"])
        .args(["-mgeneral-regs-only", "-nostdlib", "-static", "-no-pie"])
        .args(["-Wl,--build-id=none", "-Wl,-Ttext=0x100040"])
        .args(["-Wl,--section-start=.multiboot=0x100000", "-o"])
        .args([&staged, &file]))
    .with_context(|| {
        format!(
            "cannot build the guest {name}: it needs a gcc for x86 with -m32 (package gcc, no \
             32-bit libraries)"
        )
    })?;
    let image = out_dir.join(format!("{name}.elf"));
    write_if_changed(&image, &std::fs::read(&staged)?)?;
    std::fs::remove_file(&staged)?;
    Ok(image)
}
