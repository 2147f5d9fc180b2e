//! The bare guest: a flat 32-bit multiboot kernel for a KVM that cannot run a 64-bit Linux.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;

use super::{lock, run, write_if_changed};

const SOURCE: &str = include_str!("bare.S");

/// Assembles the bare guest in `out_dir` and returns its path, for QEMU's `-kernel`. The guest
/// needs 96 MiB of memory.
pub fn build_bare(out_dir: &Path) -> anyhow::Result<PathBuf> {
    let _lock = lock(out_dir)?;
    let source = out_dir.join("bare.S");
    let staged = out_dir.join("bare.elf.staged");
    write_if_changed(&source, SOURCE.as_bytes())?;
    run(Command::new("gcc")
        .args([
            "-m32",
            "-nostdlib",
            "-static",
            "-no-pie",
            "-Wl,--build-id=none",
            "-Wl,-Ttext=0x100040",
        ])
        .args(["-Wl,--section-start=.multiboot=0x100000", "-o"])
        .args([&staged, &source]))
    .context(
        "cannot assemble the bare guest: it needs a gcc for x86 with -m32 (package gcc, no 32-bit \
         libraries)",
    )?;
    let image = out_dir.join("bare.elf");
    write_if_changed(&image, &std::fs::read(&staged)?)?;
    std::fs::remove_file(&staged)?;
    Ok(image)
}
