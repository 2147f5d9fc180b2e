//! A user space of this machine's own distribution, made from its packages by mmdebstrap, as a disk
//! for guests. It is made once and is read-only from then on; another list of packages rebuilds it.

use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use super::{GuestImage, USER_SPACE_MODULES, build_with, lock, run};

/// Packages for a server that is also used for builds, in addition to those of every system. All
/// releases have packages of these names.
const PACKAGES: [&str; 33] = [
    "build-essential",
    "ca-certificates",
    "clang",
    "cmake",
    "cron",
    "curl",
    "dbus",
    "default-jre-headless",
    "emacs-nox",
    "gdb",
    "git",
    "golang-go",
    "iproute2",
    "less",
    "locales",
    "logrotate",
    "man-db",
    "manpages-dev",
    "nginx-light",
    "nodejs",
    "openssh-server",
    "perl",
    "php-cli",
    "postgresql",
    "python3",
    "python3-numpy",
    "rsync",
    "rsyslog",
    "ruby",
    "systemd-sysv",
    "tmux",
    "udev",
    "vim",
];

/// Units that would wake up in the middle of a measurement, or wait for a network that the guest's
/// program sets up.
const MASKED: [&str; 9] = [
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "logrotate.timer",
    "man-db.timer",
    "networking.service",
    "systemd-tmpfiles-clean.timer",
];

/// Fraction of additional room on the disk for the file system's own tables: a quarter.
const ROOM_PART: u64 = 4;

/// User space, ready to be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Debian {
    /// Kernel, and the initramfs that boots the disk (`godwit.root=/dev/vda`).
    pub image: GuestImage,
    /// The disk: a plain ext4 file system without partitions.
    pub disk: PathBuf,
    pub content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The distribution's own name for itself.
    pub name: String,
    pub packages: u64,
    /// Total bytes of the files.
    pub file_bytes: u64,
    /// The list that it was made from; another list rebuilds it.
    made_of: Vec<String>,
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}, {} packages, {} MiB of files",
            self.name,
            self.packages,
            self.file_bytes >> 20
        )
    }
}

/// Creates the disk in `out_dir` if it does not exist, and the image that boots it. The first time
/// it needs root, mmdebstrap and the distribution's archive, and takes some minutes.
///
/// # Errors
/// The missing requirement, or mmdebstrap's error.
pub fn build_debian(out_dir: &Path) -> anyhow::Result<Debian> {
    let _lock = lock(out_dir)?;
    let image = build_with(out_dir, "debian-initrd.img", &USER_SPACE_MODULES)?;
    let (disk, description) = (out_dir.join("debian.ext4"), out_dir.join("debian.json"));
    let wanted: Vec<String> =
        PACKAGES.iter().chain(&MASKED).map(|name| (*name).to_owned()).collect();
    let known =
        fs::read(&description).ok().and_then(|text| serde_json::from_slice::<Content>(&text).ok());
    if let Some(content) = known.filter(|content| content.made_of == wanted && disk.is_file()) {
        return Ok(Debian { image, disk, content });
    }
    let tree = out_dir.join("debian-tree");
    remove(&tree)?;
    eprintln!(
        "making a user space of the distribution's packages in {}; this takes some minutes",
        disk.display()
    );
    let made = fill(&tree, &disk, wanted);
    remove(&tree)?;
    let content = made?;
    // Written last: it marks a complete disk.
    fs::write(&description, serde_json::to_vec_pretty(&content)?)?;
    Ok(Debian { image, disk, content })
}

/// Installs the packages in `tree` and writes them to the disk.
fn fill(tree: &Path, disk: &Path, made_of: Vec<String>) -> anyhow::Result<Content> {
    let sources = sources()?;
    let release = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    let suite =
        release_field(&release, "VERSION_CODENAME").context("/etc/os-release names no release")?;
    // Proxies and other settings of this machine's apt also apply to the download.
    let options = tree.with_extension("apt.conf");
    fs::write(
        &options,
        acquire_options(&run(Command::new("apt-config").arg("dump")).unwrap_or_default()),
    )?;
    let mut make = Command::new("mmdebstrap");
    make.args(["--mode=root", "--format=directory", "--variant=important", "--quiet"])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .arg(format!("--aptopt={}", options.display()))
        // No daemon is started during installation, and the guest has its own name and clock.
        .arg(
            "--essential-hook=printf '#!/bin/sh\\nexit 101\\n' > \"$1/usr/sbin/policy-rc.d\"; \
             chmod 755 \"$1/usr/sbin/policy-rc.d\"",
        )
        .arg(
            "--customize-hook=rm \"$1/usr/sbin/policy-rc.d\"; echo guest > \"$1/etc/hostname\"; \
             : > \"$1/etc/fstab\"",
        )
        .arg(format!("--customize-hook=chroot \"$1\" systemctl mask {}", MASKED.join(" ")))
        .arg(&suite)
        .arg(tree)
        .arg(&sources);
    let made = run(&mut make)
        .context("making a user space: needs mmdebstrap (scripts/deps --bench) and root");
    fs::remove_file(&options)?;
    made?;
    let content = Content {
        name: release_field(&release, "PRETTY_NAME").unwrap_or(suite),
        packages: installed(&fs::read_to_string(tree.join("var/lib/dpkg/status"))?),
        file_bytes: bytes_below(tree)?,
        made_of,
    };
    ensure!(content.packages > 0, "mmdebstrap has installed nothing in {}", tree.display());
    write_disk(tree, disk, content.file_bytes)?;
    Ok(content)
}

fn write_disk(tree: &Path, disk: &Path, file_bytes: u64) -> anyhow::Result<()> {
    let staged = disk.with_extension("staged");
    let bytes = (file_bytes + file_bytes / ROOM_PART + (64 << 20)).next_multiple_of(1 << 20);
    fs::File::create(&staged)?
        .set_len(bytes)
        .with_context(|| format!("making {}", staged.display()))?;
    // Without a journal and reserved blocks: the disk is never written again.
    run(Command::new("mke2fs")
        .args([
            "-q",
            "-t",
            "ext4",
            "-F",
            "-m",
            "0",
            "-O",
            "^has_journal",
            "-E",
            "root_owner=0:0",
            "-d",
        ])
        .args([tree, &staged]))
    .context("writing the user space to a disk (package e2fsprogs)")?;
    fs::rename(&staged, disk).with_context(|| format!("replacing {}", disk.display()))
}

/// Returns the sources list from which this machine's own apt gets the distribution, and no others.
fn sources() -> anyhow::Result<PathBuf> {
    const PLACES: [&str; 3] = [
        "/etc/apt/sources.list.d/debian.sources",
        "/etc/apt/sources.list.d/ubuntu.sources",
        "/etc/apt/sources.list",
    ];
    let has_text = |place: &&&str| fs::metadata(place).is_ok_and(|data| data.len() > 0);
    match PLACES.iter().find(has_text) {
        Some(place) => Ok(place.into()),
        None => bail!("apt's sources of the distribution are at none of {}", PLACES.join(", ")),
    }
}

/// Returns the settings of `apt-config dump` about acquiring files.
fn acquire_options(dump: &[u8]) -> String {
    let dump = String::from_utf8_lossy(dump);
    dump.lines()
        .filter(|line| line.starts_with("Acquire::"))
        .fold(String::new(), |text, line| text + line + "\n")
}

/// Returns a field of an os-release file.
fn release_field(text: &str, name: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.trim_matches('"').to_owned()).filter(|value| !value.is_empty())
}

/// Returns the number of installed packages, from dpkg's own list.
fn installed(status: &str) -> u64 {
    status.lines().filter(|line| *line == "Status: install ok installed").count() as u64
}

/// Returns the size of the files on a disk, each rounded up to whole blocks, with files of several
/// names counted once.
fn bytes_below(folder: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        let data = fs::symlink_metadata(&path)?;
        bytes += if data.is_dir() {
            4096 + bytes_below(&path)?
        } else {
            data.size().next_multiple_of(4096)
        };
    }
    Ok(bytes)
}

/// Removes a tree, if it exists.
fn remove(tree: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(tree) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", tree.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_installed_counts() {
        let status = "Package: bash\nStatus: install ok installed\nVersion: 5\n\nPackage: \
            gone\nStatus: deinstall ok config-files\n";
        assert_eq!(installed(status), 1);
    }

    #[test]
    fn the_release_by_its_fields() {
        let text =
            "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\nEMPTY=\n";
        assert_eq!(release_field(text, "VERSION_CODENAME").unwrap(), "bookworm");
        assert_eq!(release_field(text, "PRETTY_NAME").unwrap(), "Debian GNU/Linux 12 (bookworm)");
        assert_eq!(release_field(text, "EMPTY"), None);
    }

    #[test]
    fn apt_gets_options_for_downloading_and_nothing_else() {
        let dump = b"APT \"\";\nAcquire::http::Proxy \"http://proxy:3128\";\nDir::State \"var\";\n";
        assert_eq!(acquire_options(dump), "Acquire::http::Proxy \"http://proxy:3128\";\n");
    }

    #[test]
    fn files_and_folders_take_whole_blocks() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("a")).unwrap();
        fs::write(tree.path().join("a/one"), [1; 5000]).unwrap();
        std::os::unix::fs::symlink("nowhere", tree.path().join("link")).unwrap();
        assert_eq!(bytes_below(tree.path()).unwrap(), 4096 + 8192 + 4096);
        remove(&tree.path().join("a")).unwrap();
        remove(&tree.path().join("a")).unwrap();
        assert_eq!(bytes_below(tree.path()).unwrap(), 4096);
    }
}
