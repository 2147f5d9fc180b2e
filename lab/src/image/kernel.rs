//! A kernel for guests from the distribution's package, downloaded and unpacked but not installed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};

use super::run;

/// Meta packages whose dependency names the newest kernel. The cloud kernel boots fastest.
const META_PACKAGES: [&str; 2] = ["linux-image-cloud-amd64", "linux-image-amd64"];

/// An unpacked kernel package.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The bzImage.
    pub(super) image: PathBuf,
    /// Files of all modules by name (`-` as `_`).
    module_files: BTreeMap<String, PathBuf>,
}

/// One kernel module, uncompressed.
pub(super) struct Module {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

/// Returns the kernel unpacked in `dir`, and fetches it first if there is none. Remove the folder
/// to get a newer one.
pub(super) fn obtain(dir: &Path) -> anyhow::Result<Kernel> {
    let tree = dir.join("tree");
    if !tree.is_dir() {
        fetch(dir, &tree).context(
            "cannot fetch the guest's kernel: it needs Debian's or Ubuntu's apt-get and dpkg-deb \
             and a package list \
             (run `make deps`)",
        )?;
    }
    Kernel::at(&tree)
}

/// Downloads the package and unpacks it beside `tree`, which appears only when it is complete.
fn fetch(dir: &Path, tree: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let package = newest_package()?;
    eprintln!("fetching {package} for the lab's guest");
    let staged = dir.join("unpacking");
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    fs::create_dir(&staged)?;
    // As root, apt-get drops to the user _apt for the download by default; that user cannot write
    // here.
    run(Command::new("apt-get").current_dir(&staged).args([
        "-o",
        "APT::Sandbox::User=root",
        "download",
        &package,
    ]))?;
    let archive = find_file(&staged, |name| name.ends_with(".deb"))
        .with_context(|| format!("apt-get download {package} left no file"))?;
    run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(staged.join("tree")))?;
    fs::rename(staged.join("tree"), tree)?;
    fs::remove_dir_all(&staged)?;
    Ok(())
}

fn newest_package() -> anyhow::Result<String> {
    for meta in META_PACKAGES {
        let listing = run(Command::new("apt-cache").args(["depends", meta])).unwrap_or_default();
        if let Some(package) = kernel_package(&String::from_utf8_lossy(&listing)) {
            return Ok(package);
        }
    }
    bail!("apt-cache knows neither {}: run `apt-get update`", META_PACKAGES.join(" nor "))
}

/// Returns the kernel named in `apt-cache depends`' output for a meta package.
fn kernel_package(listing: &str) -> Option<String> {
    let dependencies = listing.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    dependencies.map(str::trim).find(|name| name.starts_with("linux-image-")).map(str::to_owned)
}

impl Kernel {
    /// Reads the tree of an unpacked kernel package.
    fn at(tree: &Path) -> anyhow::Result<Kernel> {
        let image = find_file(&tree.join("boot"), |name| name.starts_with("vmlinuz-"))
            .with_context(|| {
                format!("{} holds no boot/vmlinuz-*: remove it and build again", tree.display())
            })?;
        let mut module_files = BTreeMap::new();
        for root in ["lib/modules", "usr/lib/modules"] {
            collect_modules(&tree.join(root), &mut module_files)?;
        }
        Ok(Kernel { image, module_files })
    }

    /// Returns the wanted modules and their dependencies, without those built into this kernel.
    pub(super) fn modules(&self, wanted: &[&str]) -> anyhow::Result<Vec<Module>> {
        let mut found = BTreeMap::new();
        let mut waiting: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
        while let Some(name) = waiting.pop() {
            let Some(path) = self.module_files.get(&name) else {
                continue;
            };
            if found.contains_key(&name) {
                continue;
            }
            let bytes = read_module(path)?;
            waiting.extend(dependencies(&bytes));
            found.insert(name, bytes);
        }
        Ok(found.into_iter().map(|(name, bytes)| Module { name, bytes }).collect())
    }
}

fn find_file(dir: &Path, wanted: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let mut entries = fs::read_dir(dir).ok()?.filter_map(Result::ok);
    entries.find(|entry| entry.file_name().to_str().is_some_and(&wanted)).map(|entry| entry.path())
}

fn collect_modules(dir: &Path, into: &mut BTreeMap<String, PathBuf>) -> anyhow::Result<()> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Ok(());
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect_modules(&entry.path(), into)?;
        } else if let Some((name, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
            into.insert(name.replace('-', "_"), entry.path());
        }
    }
    Ok(())
}

/// Reads a module. Init takes modules uncompressed, whatever the guest's kernel could unpack.
fn read_module(path: &Path) -> anyhow::Result<Vec<u8>> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).with_context(|| format!("reading {}", path.display())),
    };
    run(Command::new(tool).arg("-dc").arg(path))
}

/// Returns the modules named in a module's `.modinfo` section, a list of `key=value` texts that
/// each end with a zero byte.
fn dependencies(module: &[u8]) -> Vec<String> {
    let texts = module.split(|byte| *byte == 0);
    let Some(names) = texts.filter_map(|text| text.strip_prefix(b"depends=")).next() else {
        return Vec::new();
    };
    let names = String::from_utf8_lossy(names);
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_among_a_meta_packages_dependencies() {
        let listing = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n  \
            Suggests: grub\n";
        assert_eq!(kernel_package(listing).unwrap(), "linux-image-6.1.0-56-cloud-amd64");
        assert_eq!(kernel_package("linux-image-amd64\n"), None);
    }

    #[test]
    fn dependencies_come_from_modinfo() {
        let module = b"\x7fELF\0license=GPL\0depends=net_failover,virtio-ring\0name=virtio_net\0";
        assert_eq!(dependencies(module), ["net_failover", "virtio_ring"]);
        assert!(dependencies(b"license=GPL\0depends=\0").is_empty());
        assert!(dependencies(b"").is_empty());
    }

    #[test]
    fn a_tree_with_compressed_modules() {
        let tree = tempfile::tempdir().unwrap();
        let modules = tree.path().join("usr/lib/modules/6.12/kernel/net");
        fs::create_dir_all(&modules).unwrap();
        fs::create_dir(tree.path().join("boot")).unwrap();
        fs::write(tree.path().join("boot/vmlinuz-6.12"), "kernel").unwrap();
        fs::write(modules.join("base.ko"), b"\0depends=\0").unwrap();
        fs::write(modules.join("top-most.ko"), b"\0depends=base,built_in\0").unwrap();
        if let Err(error) = run(Command::new("xz").arg(modules.join("base.ko"))) {
            return eprintln!("skipped: {error:#}");
        }
        let kernel = Kernel::at(tree.path()).unwrap();
        let found = kernel.modules(&["top_most", "absent"]).unwrap();
        let names: Vec<&str> = found.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["base", "top_most"]);
        assert_eq!(found[0].bytes, b"\0depends=\0");
    }

    #[test]
    fn a_tree_without_a_kernel_is_an_error_with_its_mend() {
        let tree = tempfile::tempdir().unwrap();
        let error = Kernel::at(tree.path()).unwrap_err().to_string();
        assert!(error.contains("build again"), "{error}");
    }
}
