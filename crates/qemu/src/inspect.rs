//! Inspection of a QEMU binary: version, machine types, CPU models. Queried from the binary itself,
//! never guessed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::helper::{helper, spawn};
use godwit_types::Fault;

/// Oldest QEMU that Godwit supports: it has `-device` and `-object` in JSON, and `x-ignore-shared`
/// beside file backends.
pub const OLDEST_QEMU: (u32, u32, u32) = (7, 2, 0);

/// Longest time until a QEMU has printed its version or a list.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Most bytes of output that are read.
const LONGEST_ANSWER_BYTES: u64 = 1 << 20;
/// Most bytes of error output that are read.
const LONGEST_COMPLAINT_BYTES: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuInfo {
    /// Absolute path of the binary.
    pub path: PathBuf,
    /// Major, minor, micro.
    pub version: (u32, u32, u32),
    /// Machine types.
    pub machines: Vec<MachineType>,
    /// CPU models, in fixed versions and by their aliases.
    pub cpu_models: Vec<String>,
}

/// A machine type of a QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineType {
    /// Full name, such as `pc-q35-7.2`.
    pub name: String,
    /// Alias in this QEMU, such as `q35`.
    pub alias: Option<String>,
    /// Whether this is QEMU's default.
    pub is_default: bool,
}

/// Why a binary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The binary does not exist or cannot be started.
    #[error("cannot start QEMU \"{}\": {why}", path.display())]
    CannotStart {
        /// The requested binary.
        path: PathBuf,
        /// The system error.
        why: std::io::Error,
    },
    /// The binary does not answer as QEMU does.
    #[error("\"{}\" does not answer as QEMU does: {why}", path.display())]
    NotQemu {
        /// The requested binary.
        path: PathBuf,
        /// What it did instead.
        why: String,
    },
    #[error("QEMU {found} at \"{}\" is too old: Godwit needs 7.2 or later", path.display())]
    TooOld {
        /// The requested binary.
        path: PathBuf,
        /// Its version.
        found: String,
    },
}

impl InspectError {
    /// Stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            InspectError::CannotStart { .. } => "qemu-not-found",
            InspectError::NotQemu { .. } => "qemu-not-qemu",
            InspectError::TooOld { .. } => "qemu-too-old",
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        let wanted = "QEMU 7.2 or later (Debian: apt-get install qemu-system-x86)";
        match self {
            InspectError::CannotStart { .. } => format!("install {wanted}, or configure its path"),
            InspectError::NotQemu { .. } => "configure the path of a qemu-system-x86_64".to_owned(),
            InspectError::TooOld { .. } => {
                format!("install {wanted}, or configure the path of a newer one")
            }
        }
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

impl QemuInfo {
    /// Returns the versioned machine type for a name or alias; `None` if this QEMU lacks it.
    #[must_use]
    pub fn versioned_machine(&self, name: &str) -> Option<&str> {
        let named = self.machines.iter().find(|machine| machine.name == name);
        let found = named.or_else(|| {
            self.machines.iter().find(|machine| machine.alias.as_deref() == Some(name))
        });
        found.map(|machine| machine.name.as_str())
    }

    /// Returns the default machine type of this QEMU.
    #[must_use]
    pub fn default_machine(&self) -> Option<&str> {
        self.machines.iter().find(|machine| machine.is_default).map(|machine| machine.name.as_str())
    }

    /// Whether this QEMU has that CPU model. Ignores features behind a comma.
    #[must_use]
    pub fn knows_cpu_model(&self, model: &str) -> bool {
        let name = model.split(',').next().unwrap_or(model);
        self.cpu_models.iter().any(|known| known == name)
    }

    /// Returns the version as text.
    #[must_use]
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }
}

fn version_text((major, minor, micro): (u32, u32, u32)) -> String {
    format!("{major}.{minor}.{micro}")
}

/// Inspects a binary. A bare name in `path` is searched in PATH. `user`: the user and group to run
/// it as; `None` for those of the caller.
///
/// # Errors
/// The binary cannot be started, is not a QEMU, or is older than [`OLDEST_QEMU`].
pub async fn inspect(
    path: impl AsRef<Path>,
    user: Option<(u32, u32)>,
) -> Result<QemuInfo, InspectError> {
    let path = find_program(path.as_ref())?;
    let binary = Binary { path: &path, user };
    let version = supported_version(&path, &binary.answer(&["--version"]).await?)?;
    let machines = parse_machines(&binary.answer(&["-machine", "help"]).await?);
    if machines.is_empty() {
        let why = "-machine help lists no machine type".to_owned();
        return Err(InspectError::NotQemu { path, why });
    }
    let cpu_models = parse_cpu_models(&binary.answer(&["-cpu", "help"]).await?);
    Ok(QemuInfo { path, version, machines, cpu_models })
}

/// Returns the absolute path of a binary. A bare name is searched in PATH.
///
/// # Errors
/// No directory of PATH has the binary.
pub fn find_program(path: &Path) -> Result<PathBuf, InspectError> {
    let error = |why| InspectError::CannotStart { path: path.to_owned(), why };
    if path.components().count() > 1 || path.is_absolute() {
        return std::path::absolute(path).map_err(error);
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let candidates = std::env::split_paths(&folders).map(|folder| folder.join(path));
    let found = candidates
        .filter(|candidate| candidate.is_absolute())
        .find(|candidate| candidate.is_file());
    found.ok_or_else(|| {
        error(std::io::Error::new(std::io::ErrorKind::NotFound, "no directory of PATH has it"))
    })
}

/// A binary under inspection.
struct Binary<'a> {
    path: &'a Path,
    user: Option<(u32, u32)>,
}

impl Binary<'_> {
    fn not_qemu(&self, why: String) -> InspectError {
        InspectError::NotQemu { path: self.path.to_owned(), why }
    }

    fn cannot_start(&self, why: std::io::Error) -> InspectError {
        InspectError::CannotStart { path: self.path.to_owned(), why }
    }

    /// Returns what it prints for these arguments. It is killed if it takes too long or prints too
    /// much.
    async fn answer(&self, arguments: &[&str]) -> Result<String, InspectError> {
        let mut command = helper(self.path, self.user);
        command.args(arguments);
        let mut child = spawn(command).await.map_err(|why| self.cannot_start(why))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let all = async {
            let printed = async {
                self.within(read_start(stdout, LONGEST_ANSWER_BYTES).await, LONGEST_ANSWER_BYTES)
            };
            let complained = async {
                self.within(
                    read_start(stderr, LONGEST_COMPLAINT_BYTES).await,
                    LONGEST_COMPLAINT_BYTES,
                )
            };
            let (printed, complained) = tokio::try_join!(printed, complained)?;
            Ok((printed, complained, child.wait().await.map_err(|why| self.cannot_start(why))?))
        };
        let call = arguments.join(" ");
        let (printed, complained, status) =
            tokio::time::timeout(ANSWER_LIMIT, all).await.map_err(|_| {
                self.not_qemu(format!("no response to {call} within {ANSWER_LIMIT:?}"))
            })??;
        if !status.success() {
            let first = complained.lines().next().unwrap_or("nothing").to_owned();
            return Err(self.not_qemu(format!("{call} ended with {status}: {first}")));
        }
        Ok(printed)
    }

    fn within(&self, read: std::io::Result<Vec<u8>>, most: u64) -> Result<String, InspectError> {
        let bytes = read.map_err(|why| self.cannot_start(why))?;
        if bytes.len() as u64 > most {
            return Err(self.not_qemu(format!("it prints more than {most} bytes")));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Reads up to `most` bytes and one more.
async fn read_start(pipe: Option<impl AsyncRead + Unpin>, most: u64) -> std::io::Result<Vec<u8>> {
    let mut start = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(most + 1).read_to_end(&mut start).await?;
    }
    Ok(start)
}

/// Returns the version in the output of `--version`, if Godwit supports it.
fn supported_version(path: &Path, answer: &str) -> Result<(u32, u32, u32), InspectError> {
    let path = path.to_owned();
    let Some(version) = parse_version(answer) else {
        let why = format!("--version printed {:?}", answer.lines().next().unwrap_or(""));
        return Err(InspectError::NotQemu { path, why });
    };
    if version < OLDEST_QEMU {
        return Err(InspectError::TooOld { path, found: version_text(version) });
    }
    Ok(version)
}

/// `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)` → (7, 2, 22).
fn parse_version(answer: &str) -> Option<(u32, u32, u32)> {
    let rest = answer.lines().next()?.strip_prefix("QEMU emulator version ")?;
    let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    let mut parts = number.split('.').map(|part| part.parse::<u32>().ok());
    let major = parts.next()??;
    let minor = parts.next()??;
    Some((major, minor, parts.next().flatten().unwrap_or(0)))
}

/// Parses `-machine help`: `NAME  DESCRIPTION (alias of NAME)` and `NAME  DESCRIPTION (default)`
/// (7.2 to 10.x).
fn parse_machines(answer: &str) -> Vec<MachineType> {
    let rows = || answer.lines().skip(1).filter_map(|line| line.split_once(char::is_whitespace));
    let alias_target = |description: &str| {
        let (_, rest) = description.rsplit_once("(alias of ")?;
        Some(rest.split(')').next()?.to_owned())
    };
    let mut machines: Vec<MachineType> = rows()
        .filter(|(_, description)| alias_target(description).is_none())
        .map(|(name, description)| MachineType {
            name: name.to_owned(),
            alias: None,
            is_default: description.contains("(default)"),
        })
        .collect();
    for (alias, description) in rows() {
        let target = alias_target(description);
        if let Some(machine) =
            machines.iter_mut().find(|machine| Some(&machine.name) == target.as_ref())
        {
            machine.alias = Some(alias.to_owned());
        }
    }
    machines
}

/// Parses `-cpu help`: rows of `x86 NAME  DESCRIPTION` (7.2) or `  NAME  DESCRIPTION` (9.x and
/// later), up to the flags.
fn parse_cpu_models(answer: &str) -> Vec<String> {
    let rows = answer.lines().skip(1).take_while(|line| !line.starts_with("Recognized"));
    let names = rows.filter_map(|row| {
        let row = row.trim_start();
        row.strip_prefix("x86 ").unwrap_or(row).split_whitespace().next()
    });
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_every_vendor_are_read() {
        let cases = [
            (
                "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright",
                Some((7, 2, 22)),
            ),
            ("QEMU emulator version 10.0.2", Some((10, 0, 2))),
            ("QEMU emulator version 9.1", Some((9, 1, 0))),
            ("QEMU emulator version 8.2.0-rc1", Some((8, 2, 0))),
            ("GNU bash, version 5.2", None),
            ("", None),
        ];
        for (answer, version) in cases {
            assert_eq!(parse_version(answer), version, "{answer}");
        }
    }

    #[test]
    fn machine_lists_of_old_and_new_qemu_are_read() {
        let list = "Supported machines are:\n\
            pc                   Standard PC (i440FX + PIIX, 1996) (alias of pc-i440fx-7.2)\n\
            pc-i440fx-7.2        Standard PC (i440FX + PIIX, 1996) (default)\n\
            q35                  Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)\n\
            pc-q35-7.2           Standard PC (Q35 + ICH9, 2009)\n\
            pc-q35-2.4           Standard PC (Q35 + ICH9, 2009) (deprecated)\n";
        let info = QemuInfo {
            path: "/q".into(),
            version: (7, 2, 0),
            machines: parse_machines(list),
            cpu_models: Vec::new(),
        };
        assert_eq!(info.versioned_machine("q35"), Some("pc-q35-7.2"));
        assert_eq!(info.versioned_machine("pc-q35-2.4"), Some("pc-q35-2.4"));
        assert_eq!(info.versioned_machine("pc-q35-9.0"), None);
        assert_eq!(info.default_machine(), Some("pc-i440fx-7.2"));
    }

    #[test]
    fn cpu_lists_of_old_and_new_qemu_are_read() {
        let old = "Available CPUs:\nx86 486                   (alias configured by machine type)\n\
            x86 Westmere-v1           Westmere E56xx\n\nRecognized CPUID flags:\n  3dnow aes\n";
        let new = "Available CPUs:\n  486                   (alias configured by machine type)\n  \
            Westmere-v1           Westmere E56xx\n\nRecognized CPUID flags:\n  3dnow aes\n";
        for list in [old, new] {
            assert_eq!(parse_cpu_models(list), ["486", "Westmere-v1"]);
        }
    }

    #[tokio::test]
    async fn a_binary_that_is_not_qemu_is_refused() {
        let error = inspect("/nowhere/qemu", None).await.unwrap_err();
        assert_eq!(error.code(), "qemu-not-found");
        assert_eq!(
            inspect("no-such-qemu-anywhere", None).await.unwrap_err().code(),
            "qemu-not-found"
        );
        assert_eq!(inspect("/bin/true", None).await.unwrap_err().code(), "qemu-not-qemu");
        assert_eq!(inspect("/bin/false", None).await.unwrap_err().code(), "qemu-not-qemu");
    }

    #[tokio::test]
    async fn a_binary_that_prints_endlessly_is_killed() {
        let binary = Binary { path: Path::new("/usr/bin/yes"), user: None };
        let error = binary.answer(&["QEMU emulator version 10.0.0"]).await.unwrap_err();
        assert!(error.to_string().contains("it prints more than 1048576 bytes"), "{error}");
    }

    #[test]
    fn an_old_qemu_is_refused() {
        let path = Path::new("/q");
        let error = supported_version(path, "QEMU emulator version 6.2.0").unwrap_err();
        assert_eq!(error.code(), "qemu-too-old", "{error}");
        assert_eq!(supported_version(path, "QEMU emulator version 7.2.0").unwrap(), OLDEST_QEMU);
    }
}
