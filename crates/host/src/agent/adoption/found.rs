//! The process of another program's QEMU, as `/proc` shows it. Its arguments are the process's own
//! claims. So a file that they name is opened only if the process has it open itself: an adoption
//! gives a guest no file that it did not have.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{MOST_ARGUMENTS_BYTES, OpenFiles, ResolvedSpec, Uuid};
use godwit_types::Fault;
use rustix::fs::OFlags;

use crate::config::LibvirtConfig;
use crate::failure::host_failed;

/// Most descriptors of a process that are looked at.
const MOST_DESCRIPTORS: usize = 65_536;

/// A process of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ForeignProcess {
    pub(super) pid: i32,
    /// Start of the process, which tells it from a later one of that number.
    pub(super) start_time: u64,
}

/// Identity of a file: device and inode, or the device that it is.
type FileId = (u64, u64);

impl ForeignProcess {
    /// Finds a living process.
    pub(super) fn of(pid: i32) -> Option<ForeignProcess> {
        Some(ForeignProcess { pid, start_time: godwit_qemu::start_time_of(pid)? })
    }

    pub(super) fn lives(&self) -> bool {
        godwit_qemu::is_alive(self.pid, self.start_time)
    }

    /// Returns its arguments without its program.
    pub(super) fn arguments(&self) -> Result<Vec<String>, Fault> {
        let path = format!("/proc/{}/cmdline", self.pid);
        let mut bytes = Vec::new();
        let limit = MOST_ARGUMENTS_BYTES as u64 + 1;
        let read = File::open(&path).and_then(|file| file.take(limit).read_to_end(&mut bytes));
        let fault = |why: String| {
            Fault::new(
                "adoption-arguments",
                format!("cannot read {path}: {why}"),
                "check that the guest still runs",
            )
        };
        read.map_err(|error| fault(error.to_string()))?;
        if bytes.is_empty() || bytes.len() > MOST_ARGUMENTS_BYTES {
            return Err(fault(format!("it has {} bytes", bytes.len())));
        }
        let text = String::from_utf8(bytes).map_err(|_| fault("it is not UTF-8".to_owned()))?;
        let text = text.strip_suffix('\0').unwrap_or(&text);
        Ok(text.split('\0').skip(1).map(str::to_owned).collect())
    }

    /// Returns a variable of the environment that it was started with.
    pub(super) fn variable(&self, name: &str) -> Option<String> {
        let path = format!("/proc/{}/environ", self.pid);
        let mut bytes = Vec::new();
        let limit = MOST_ARGUMENTS_BYTES as u64;
        File::open(path).ok()?.take(limit).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let value = |one: &str| one.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        text.split('\0').find_map(value)
    }

    /// Returns the name of the tap that is a descriptor of it.
    pub(super) fn tap_of(&self, descriptor: i32) -> Option<String> {
        let info =
            std::fs::read_to_string(format!("/proc/{}/fdinfo/{descriptor}", self.pid)).ok()?;
        tap_in(&info).map(str::to_owned)
    }

    /// Whether a descriptor of it is the tap of that name: the name in its arguments is a claim.
    pub(super) fn has_tap(&self, name: &str) -> bool {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{}/fdinfo", self.pid)) else {
            return false;
        };
        entries.take(MOST_DESCRIPTORS).flatten().any(|entry| {
            let info = std::fs::read_to_string(entry.path());
            info.is_ok_and(|info| tap_in(&info) == Some(name))
        })
    }

    /// Returns the files that it can read, and whether it can write them too.
    fn open_files(&self) -> std::io::Result<BTreeMap<FileId, bool>> {
        let mut files = BTreeMap::new();
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.pid))?;
        for entry in entries.take(MOST_DESCRIPTORS).flatten() {
            let name = entry.file_name();
            let info = Path::new("/proc").join(self.pid.to_string()).join("fdinfo").join(&name);
            let (Ok(info), Ok(data)) =
                (std::fs::read_to_string(info), std::fs::metadata(entry.path()))
            else {
                continue;
            };
            if let Some(writable) = access_of(&info) {
                *files.entry(id_of(&data)).or_insert(false) |= writable;
            }
        }
        Ok(files)
    }

    /// Checks that it has all files open that its VM is to get, for writing if the VM is to write
    /// them, apart from boot files that every user may read: QEMU closes those.
    pub(super) fn check_files(
        &self,
        spec: &ResolvedSpec,
        files: &OpenFiles,
    ) -> Result<(), ApiError> {
        let known = self.open_files();
        let known =
            known.map_err(|error| host_failed("cannot read the files of its QEMU", &error))?;
        let layers = files.disks.iter().flatten().map(|layer| &layer.file);
        let media = files.cdroms.iter().flatten();
        for file in layers.chain(media) {
            let flags = rustix::fs::fcntl_getfl(file).map_err(|error| {
                host_failed(&format!("cannot read {}", file.path.display()), &error)
            })?;
            let is_written = flags.intersection(OFlags::ACCMODE) != OFlags::RDONLY;
            let is_open = known.get(&id(file.as_fd())?);
            if is_open.is_none_or(|writable| is_written && !writable) {
                return Err(not_open(spec, &file.path));
            }
        }
        for file in files.kernel.iter().chain(&files.initrd) {
            let data = rustix::fs::fstat(file).map_err(|error| {
                host_failed(&format!("cannot read {}", file.path.display()), &error)
            })?;
            if data.st_mode & 0o004 == 0 && !known.contains_key(&(data.st_dev, data.st_ino)) {
                return Err(not_open(spec, &file.path));
            }
        }
        Ok(())
    }

    /// Reads a file that it has open.
    pub(super) fn read_open_file(&self, path: &Path, most: u64) -> Result<Vec<u8>, ApiError> {
        let failed =
            |error: std::io::Error| host_failed(&format!("cannot read {}", path.display()), &error);
        let file = File::open(path).map_err(failed)?;
        let id = id_of(&file.metadata().map_err(failed)?);
        if !self.open_files().map_err(failed)?.contains_key(&id) {
            let message = format!("its QEMU does not have {} open", path.display());
            return Err(ApiError::new(ErrorCode::Preflight, message, "stop it and import it"));
        }
        let mut content = Vec::new();
        file.take(most + 1).read_to_end(&mut content).map_err(failed)?;
        if content.len() as u64 > most {
            let message = format!("{} has more than {most} bytes", path.display());
            return Err(ApiError::new(ErrorCode::Preflight, message, ""));
        }
        Ok(content)
    }
}

fn not_open(spec: &ResolvedSpec, path: &Path) -> ApiError {
    let message = format!(
        "cannot give VM \"{}\" the file {}: the guest's QEMU names it and does not have it open, \
         or not for writing",
        spec.name,
        path.display()
    );
    let remedy = "if the file was replaced while the guest ran, stop the guest and use `godwit vm \
                  import`";
    ApiError::new(ErrorCode::Preflight, message, remedy)
}

fn id(file: BorrowedFd<'_>) -> Result<FileId, ApiError> {
    let file = file.try_clone_to_owned().map(File::from).and_then(|file| file.metadata());
    file.map(|data| id_of(&data)).map_err(|error| host_failed("cannot read an image", &error))
}

/// Reads the name of the tap that a descriptor is (`/proc/PID/fdinfo/N`).
fn tap_in(info: &str) -> Option<&str> {
    info.lines().find_map(|line| line.strip_prefix("iff:")).map(str::trim)
}

/// Reads what a process may do with a descriptor (`/proc/PID/fdinfo/N`): nothing without reading,
/// otherwise whether it may write.
fn access_of(info: &str) -> Option<bool> {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = OFlags::from_bits_retain(u32::from_str_radix(flags.trim(), 8).ok()?);
    // It only names a file: opening one in this way needs no right to it.
    if flags.contains(OFlags::PATH) {
        return None;
    }
    let access = flags.intersection(OFlags::ACCMODE);
    (access != OFlags::WRONLY).then_some(access == OFlags::RDWR)
}

/// Identifies a file. A block device is the same by all of its names.
fn id_of(data: &std::fs::Metadata) -> FileId {
    use std::os::unix::fs::FileTypeExt;
    match data.file_type().is_block_device() {
        true => (u64::MAX, data.rdev()),
        false => (data.dev(), data.ino()),
    }
}

/// Finds the process of a domain by libvirt's own file, which only root can write. Its arguments
/// must have the domain's UUID.
pub(super) fn of_domain(
    libvirt: &LibvirtConfig,
    name: &str,
    uuid: Uuid,
) -> Result<ForeignProcess, Fault> {
    let path: PathBuf = libvirt.run_dir.join(format!("{name}.pid"));
    let pid = (!name.contains('/')).then(|| std::fs::read_to_string(&path).ok()).flatten();
    let process = pid.and_then(|pid| ForeignProcess::of(pid.trim().parse().ok()?));
    let process = process.ok_or_else(|| {
        let remedy = "start it, or use `godwit vm import` for a stopped one";
        Fault::new("adoption-state", format!("domain \"{name}\" does not run"), remedy)
    })?;
    if named_uuid(&process.arguments()?) != Some(uuid) {
        let message = format!("process {} is not the QEMU of domain {uuid}", process.pid);
        let remedy = "check `run_dir` in [libvirt] of the host's configuration";
        return Err(Fault::new("adoption-process", message, remedy));
    }
    Ok(process)
}

/// Returns the UUID that arguments name.
fn named_uuid(arguments: &[String]) -> Option<Uuid> {
    let option = arguments.iter().position(|argument| argument == "-uuid")?;
    Uuid::parse_str(arguments.get(option + 1)?).ok()
}

/// Returns the machine type that arguments name, for a look without asking QEMU.
pub(super) fn named_machine(arguments: &[String]) -> String {
    let option = arguments.iter().position(|argument| matches!(&argument[..], "-machine" | "-M"));
    let value = option.and_then(|at| arguments.get(at + 1)).map_or("", String::as_str);
    let named = value.split(',').find_map(|part| match part.split_once('=') {
        None => Some(part),
        Some(("type", machine)) => Some(machine),
        Some(_) => None,
    });
    named.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn a_file_is_read_only_if_the_process_has_it_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvram");
        std::fs::write(&path, "variables").unwrap();
        let with_input = |input: Stdio| {
            let child = Command::new("sleep").arg("60").stdin(input).spawn().unwrap();
            let process = ForeignProcess::of(child.id().cast_signed()).unwrap();
            (Ended(child), process)
        };
        let (_child, process) = with_input(Stdio::null());
        assert!(process.lives());
        let error = process.read_open_file(&path, 100).unwrap_err();
        assert!(error.message.contains("does not have"), "{error}");
        let (child, process) = with_input(File::open(&path).unwrap().into());
        assert_eq!(process.read_open_file(&path, 100).unwrap(), b"variables");
        assert!(process.read_open_file(&path, 4).is_err());
        drop(child);
        assert!(!process.lives() && ForeignProcess::of(-1).is_none());
    }

    #[test]
    fn a_variable_of_another_process_is_read() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo ready; read _"]).env("GODWIT_MARK", "a=b");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Until it runs its own program, its variables are not there.
        let mut ready = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        let process = ForeignProcess::of(child.id().cast_signed()).unwrap();
        let _child = Ended(child);
        assert_eq!(process.variable("GODWIT_MARK").as_deref(), Some("a=b"));
        assert_eq!(process.variable("GODWIT"), None);
    }

    #[test]
    fn a_descriptor_counts_by_how_it_is_open() {
        assert_eq!(access_of("pos:\t0\nflags:\t0100000\nmnt_id:\t29\n"), Some(false));
        assert_eq!(access_of("pos:\t0\nflags:\t02100002\n"), Some(true));
        assert_eq!(access_of("flags:\t0100001\n"), None);
        let path = OFlags::PATH | OFlags::RDWR;
        assert_eq!(access_of(&format!("flags:\t0{:o}\n", path.bits())), None);
        assert_eq!(access_of("pos:\t0\n"), None);
    }

    #[test]
    fn a_tap_counts_only_if_the_process_has_it() {
        assert_eq!(tap_in("pos:\t0\nflags:\t0104002\niff:\ttap100i0\n"), Some("tap100i0"));
        assert_eq!(tap_in("pos:\t0\nflags:\t0104002\n"), None);
        let this = ForeignProcess::of(std::process::id().cast_signed()).unwrap();
        assert!(!this.has_tap("tap100i0"));
    }

    /// A child that ends with the test.
    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_domain_whose_name_leaves_the_directory_is_not_found() {
        let config = LibvirtConfig::default();
        assert!(of_domain(&config, "../../etc/passwd", Uuid::nil()).is_err());
    }

    #[test]
    fn a_uuid_is_named() {
        let uuid = Uuid::from_u128(7);
        let option = || "-uuid".to_owned();
        assert_eq!(named_uuid(&["-S".to_owned(), option(), uuid.to_string()]), Some(uuid));
        assert_eq!(named_uuid(&[option()]), None);
    }

    #[test]
    fn a_machine_is_named_in_either_form() {
        let named = |value: &str| named_machine(&["-machine".to_owned(), value.to_owned()]);
        assert_eq!(named("pc-q35-7.2,usb=off"), "pc-q35-7.2");
        assert_eq!(named("accel=kvm,type=pc+pve0"), "pc+pve0");
        assert_eq!(named_machine(&[]), "");
    }
}
