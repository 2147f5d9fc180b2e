//! A test whether KVM runs 64-bit guests on this host.
//!
//! An accessible `/dev/kvm` proves little. In some clouds and sandboxes it is a replacement that
//! runs only its vendor's guests, and a stock kernel hangs in it without a message. So this module
//! boots a guest of 900 bytes that does what a 64-bit kernel does first (`accel/probe.S` lists its
//! steps) and reports how far it came.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use command_fds::CommandFdExt;
use rustix::process::{Pid, Resource, Rlimit, Signal};
use tokio::process::Child;

use crate::helper::{helper, spawn};
use crate::process::{SANDBOX, path_in_qemu};

/// CPU model of a VM whose specification names none: x86-64-v2 with AES.
///
/// It is a named model in a fixed version, so that the guest sees the same CPU on every host
/// (`host` and `max` are host-specific and must not be migrated). Every Intel or AMD server CPU
/// since 2011 has it. QEMU's TCG implements all of it (no warning in 7.2 or 10.0), so a VM may run
/// on either accelerator. It meets the baseline of current distributions (Debian: x86-64-v1, RHEL
/// 9: v2). `qemu64` would lack SSE4 and include `svm`, which Intel hosts refuse; the later models
/// have features that TCG lacks (`spec-ctrl`, `pcid`, `tsc-deadline`).
pub const DEFAULT_CPU_MODEL: &str = "Westmere-v1";

/// Accelerator after resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Accelerator {
    /// The kernel's hypervisor.
    Kvm,
    /// QEMU's own translator.
    Tcg,
}

impl Accelerator {
    /// Name for QEMU's `-accel`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The probe guest, built from `accel/probe.S` by the command in its header.
const PROBE_GUEST: &[u8] = include_bytes!("accel/probe.bin");
/// QEMU's exit code after the guest wrote 0x2a to isa-debug-exit.
const PASSED_EXIT_CODE: i32 = 0x2a * 2 + 1;
/// Longest run of the probe. The guest needs 0.1 s under TCG, firmware included.
const TIME_LIMIT: Duration = Duration::from_secs(3);
/// Most CPU time of the probe: a guest that hangs in KVM may keep a core busy, and a busy host may
/// run this one late.
const CPU_LIMIT: Duration = Duration::from_secs(1);
/// End of the reason of a probe that used up its CPU time.
const HUNG_BUSY: &str = "it kept a core busy for 1 s";
/// Ability that each letter printed by the guest proves.
const STEPS: [(char, &str); 10] = [
    ('a', "start in protected mode"),
    ('b', "enter long mode with paging"),
    ('c', "run in the upper half of the address space"),
    ('d', "load its descriptor tables and write MSRs"),
    ('e', "take a breakpoint and return from it"),
    ('f', "repair a page fault"),
    ('g', "take timer interrupts out of hlt"),
    ('h', "enter user mode and return by an interrupt"),
    ('i', "return by a system call"),
    ('j', "use SSE registers"),
];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccelProbe {
    /// Whether 64-bit guests run under KVM.
    pub kvm: bool,
    /// The reason, in one sentence.
    pub reason: String,
}

impl AccelProbe {
    /// Whether the guest kept a core busy until it was ended: a failure that a later probe on the
    /// same machine repeats, and the slowest one. Other failures may be transient.
    #[must_use]
    pub fn hung_busy(&self) -> bool {
        !self.kvm && self.reason.ends_with(HUNG_BUSY)
    }
}

/// Determines whether 64-bit guests run under KVM here. Boots the probe guest, for at most 3 s and
/// 1 s of CPU time.
/// Does not fail: an error is the reason why KVM is not used. `sandbox`: QEMU gives up the rights
/// that it does not need for this.
pub async fn usable_accel(qemu: &Path, sandbox: bool) -> AccelProbe {
    let device = Path::new("/dev/kvm");
    if let Err(why) = std::fs::OpenOptions::new().read(true).write(true).open(device) {
        return AccelProbe { kvm: false, reason: format!("cannot open /dev/kvm: {why}") };
    }
    match run_probe(qemu, Accelerator::Kvm, sandbox).await {
        Ok(()) => AccelProbe { kvm: true, reason: "a 64-bit guest runs under KVM".to_owned() },
        Err(reason) => AccelProbe { kvm: false, reason },
    }
}

/// Boots the probe guest.
///
/// # Errors
/// One sentence: what the guest or QEMU could not do.
async fn run_probe(qemu: &Path, accel: Accelerator, sandbox: bool) -> Result<(), String> {
    let not_run =
        |what: &str, why: &std::io::Error| format!("cannot run the probe guest: {what}: {why}");
    // The file has no name: nothing of it stays, however this process ends.
    let mut guest = tempfile::tempfile().map_err(|why| not_run("temporary file", &why))?;
    guest.write_all(PROBE_GUEST).map_err(|why| not_run("temporary file", &why))?;
    let mut command = helper(qemu, None);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "64"])
        .args(["-machine", "q35", "-accel", accel.name(), "-cpu", DEFAULT_CPU_MODEL])
        .args([
            "-chardev",
            "stdio,id=steps,signal=off",
            "-device",
            "isa-debugcon,chardev=steps,iobase=0xe9",
        ])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .args(["-kernel".to_owned(), path_in_qemu(guest.as_raw_fd())]);
    command.as_std_mut().preserved_fds(vec![guest.into()]);
    if sandbox {
        command.args(["-sandbox", SANDBOX]);
    }
    let mut child = spawn(command).await.map_err(|why| not_run("QEMU", &why))?;
    limit_cpu(&child).map_err(|why| not_run("QEMU", &why))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    // The pipes end with QEMU, so they are read to the end beside the wait.
    let steps = tokio::spawn(read_start(stdout));
    let complaints = tokio::spawn(read_start(stderr));
    let exit = tokio::time::timeout(TIME_LIMIT, child.wait()).await;
    if exit.is_err() {
        child.kill().await.map_err(|why| not_run("QEMU", &why))?;
    }
    let steps = steps.await.unwrap_or_default();
    let complaints = complaints.await.unwrap_or_default();
    let end = match exit {
        Err(_) => End::Late,
        Ok(Ok(status)) if status.signal() == Some(Signal::KILL.as_raw()) => End::Busy,
        Ok(status) => status.ok().and_then(|status| status.code()).map_or(End::Late, End::Exit),
    };
    judge(accel, end, &steps, &complaints)
}

/// Makes the kernel kill the probe when it has used [`CPU_LIMIT`].
fn limit_cpu(child: &Child) -> std::io::Result<()> {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let seconds = Some(CPU_LIMIT.as_secs());
    let limit = Rlimit { current: seconds, maximum: seconds };
    // A process that has already ended has no number here; without one, the limit would be ours.
    if let Some(pid) = pid {
        rustix::process::prlimit(Some(pid), Resource::Cpu, limit)?;
    }
    Ok(())
}

/// Reads up to 64 KiB of QEMU's output and discards the rest.
async fn read_start(pipe: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    use tokio::io::AsyncReadExt;
    let mut start = Vec::new();
    if let Some(mut pipe) = pipe {
        let mut limited = (&mut pipe).take(64 << 10);
        // After an error, the output so far is what there is to judge.
        let _ = limited.read_to_end(&mut start).await;
        let _ = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    }
    String::from_utf8_lossy(&start).into_owned()
}

/// How the probe's QEMU ended.
#[derive(Clone, Copy, Debug)]
enum End {
    Exit(i32),
    /// It was killed after [`TIME_LIMIT`].
    Late,
    /// The kernel killed it after [`CPU_LIMIT`].
    Busy,
}

/// Derives the verdict from the end and the output of the probe's QEMU.
fn judge(accel: Accelerator, end: End, steps: &str, complaints: &str) -> Result<(), String> {
    let accel = accel.name().to_uppercase();
    if matches!(end, End::Exit(PASSED_EXIT_CODE)) {
        // QEMU drops features that the accelerator lacks, with a warning. A VM with the default CPU
        // would not start.
        let missing: Vec<&str> = complaints
            .lines()
            .filter_map(|line| line.split_once("doesn't support requested feature: "))
            .map(|(_, feature)| feature.trim())
            .collect();
        return match missing[..] {
            [] => Ok(()),
            _ => Err(format!(
                "{accel} lacks features of {DEFAULT_CPU_MODEL}: {}",
                missing.join(", ")
            )),
        };
    }
    let internal_error = complaints.lines().find(|line| line.contains("KVM internal error"));
    let next_step = STEPS.into_iter().find(|(letter, _)| !steps.contains(*letter));
    let (_, wish) = next_step.unwrap_or((' ', "end"));
    let end = match (end, internal_error) {
        (_, Some(error)) => format!("\"{}\"", error.trim()),
        (End::Late, None) => format!("it hung for {TIME_LIMIT:?}"),
        (End::Busy, None) => HUNG_BUSY.to_owned(),
        (End::Exit(0), None) => "it was reset".to_owned(),
        (End::Exit(code), None) if steps.is_empty() => {
            let last =
                complaints.lines().rfind(|line| !line.contains("warning:")).unwrap_or("no message");
            return Err(format!("QEMU ended with exit code {code} on {accel}: {}", last.trim()));
        }
        (End::Exit(code), None) => format!("QEMU ended with exit code {code}"),
    };
    Err(format!("a 64-bit guest could not {wish} under {accel}: {end}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu() -> Option<&'static Path> {
        let path = Path::new("/usr/bin/qemu-system-x86_64");
        if !path.exists() {
            eprintln!("skipped: no {}", path.display());
            return None;
        }
        Some(path)
    }

    #[tokio::test]
    async fn the_probe_guest_passes_where_64_bit_guests_run() {
        let Some(qemu) = qemu() else { return };
        assert_eq!(run_probe(qemu, Accelerator::Tcg, true).await, Ok(()));
        assert_eq!(run_probe(qemu, Accelerator::Tcg, false).await, Ok(()));
    }

    #[tokio::test]
    async fn kvm_gets_a_verdict_with_a_reason() {
        let Some(qemu) = qemu() else { return };
        let probe = usable_accel(qemu, true).await;
        eprintln!("{probe:?}");
        assert!(!probe.reason.is_empty());
        let missing = usable_accel(Path::new("/nowhere/qemu"), true).await;
        assert!(!missing.kvm);
    }

    #[test]
    fn the_embedded_guest_matches_its_source() {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/accel/probe.S");
        let script = "as --64 -o probe.o \"$1\" && \
            ld -m elf_x86_64 -Ttext=0x100000 -e entry --oformat binary -o probe.bin probe.o";
        let text = std::fs::read_to_string(&source).unwrap();
        assert!(
            text.contains(
                "as --64 -o probe.o probe.S && ld -m elf_x86_64 -Ttext=0x100000 -e entry"
            )
        );
        let tools = std::process::Command::new("sh")
            .args(["-c", "command -v as && command -v ld"])
            .output()
            .unwrap();
        if !tools.status.success() {
            eprintln!("skipped: no as and ld (package binutils)");
            return;
        }
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, "sh"]).arg(&source).current_dir(folder.path());
        assert!(command.status().unwrap().success());
        assert!(
            std::fs::read(folder.path().join("probe.bin")).unwrap() == PROBE_GUEST,
            "probe.bin is stale"
        );
    }

    #[test]
    fn verdicts_name_what_failed() {
        let kvm = Accelerator::Kvm;
        let case = |end, steps, complaints| judge(kvm, end, steps, complaints).unwrap_err();
        let exit = End::Exit;
        assert_eq!(judge(kvm, exit(PASSED_EXIT_CODE), "abcdefghij", ""), Ok(()));
        assert!(
            case(End::Late, "abc", "")
                .contains("load its descriptor tables and write MSRs under KVM: it hung for 3s")
        );
        let probe = |end| AccelProbe { kvm: false, reason: case(end, "", "") };
        assert!(probe(End::Busy).hung_busy());
        assert!(!probe(End::Late).hung_busy() && !probe(exit(1)).hung_busy());
        assert!(
            case(exit(0), "a", "").contains("enter long mode with paging under KVM: it was reset")
        );
        assert!(
            case(End::Late, "abcd", "KVM internal error. Suberror: 1\nmore")
                .contains("KVM internal error")
        );
        assert!(
            case(exit(1), "", "failed to initialize kvm: Permission denied")
                .contains("Permission denied")
        );
        let warning =
            "qemu: warning: host doesn't support requested feature: CPUID.01H:ECX.aes [bit 25]";
        assert!(case(exit(PASSED_EXIT_CODE), "abcdefghij", warning).contains("ECX.aes"));
    }
}
