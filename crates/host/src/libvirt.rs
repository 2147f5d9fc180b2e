//! The host's libvirt, through its own command line: `virsh` knows each version's protocol and how
//! to reach the daemon. Commands that change nothing run with `--readonly`.

use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::Uuid;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use crate::config::LibvirtConfig;

/// Longest time for an answer of libvirt.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Longest output that is read.
const MOST_OUTPUT_BYTES: u64 = 4 << 20;
/// Cause of an error when libvirt has not answered in time.
pub(crate) const UNANSWERED: &str = "libvirt does not answer";
/// Most domains that are listed.
const MOST_DOMAINS: usize = 1024;

/// A domain as libvirt lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Domain {
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
    /// In libvirt's words.
    pub(crate) state: String,
}

/// Lists the domains.
pub(crate) async fn domains(libvirt: &LibvirtConfig) -> Result<Vec<Domain>, ApiError> {
    let listed = run_virsh(libvirt, &["--readonly", "list", "--all", "--name"], None).await?;
    let mut domains = Vec::new();
    for name in listed.lines().map(str::trim).filter(|name| !name.is_empty()).take(MOST_DOMAINS) {
        // It may have gone since.
        let Ok(uuid) = uuid_of(libvirt, name).await else { continue };
        let by_uuid = uuid.to_string();
        let state =
            run_virsh(libvirt, &["--readonly", "domstate", "--domain", &by_uuid], None).await;
        let Ok(state) = state else { continue };
        domains.push(Domain { name: name.to_owned(), uuid, state: state.trim().to_owned() });
    }
    Ok(domains)
}

/// Returns the UUID of the domain of that name. Other commands name it by its UUID: `virsh` takes a
/// number for an ID, even if another domain has that name.
pub(crate) async fn uuid_of(libvirt: &LibvirtConfig, name: &str) -> Result<Uuid, ApiError> {
    if name.is_empty() || name.starts_with('-') || name.chars().any(char::is_control) {
        let message = format!("cannot find domain \"{name}\": the name is invalid");
        return Err(ApiError::new(ErrorCode::InvalidRequest, message, "see `virsh list --all`"));
    }
    let uuid = run_virsh(libvirt, &["--readonly", "domuuid", "--domain", name], None).await?;
    let uuid = Uuid::parse_str(uuid.trim())
        .map_err(|_| failed(libvirt, &format!("domain {name} has no UUID")))?;
    let found = name_of(libvirt, uuid).await?;
    if found != name {
        let why = format!("\"{name}\" is understood as an ID or UUID, that of domain \"{found}\"");
        return Err(failed(libvirt, &why));
    }
    Ok(uuid)
}

pub(crate) async fn name_of(libvirt: &LibvirtConfig, uuid: Uuid) -> Result<String, ApiError> {
    let uuid = uuid.to_string();
    let name = run_virsh(libvirt, &["--readonly", "domname", "--domain", &uuid], None).await?;
    Ok(name.trim_matches(['\r', '\n']).to_owned())
}

/// Runs one command of `virsh`, with a descriptor as its standard input.
pub(crate) async fn run_virsh(
    libvirt: &LibvirtConfig,
    arguments: &[&str],
    input: Option<OwnedFd>,
) -> Result<String, ApiError> {
    let mut command = virsh(libvirt);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(input.map_or_else(Stdio::null, Stdio::from));
    let mut child = command.spawn().map_err(|error| failed(libvirt, &error.to_string()))?;
    let (mut out, mut errors) = (child.stdout.take(), child.stderr.take());
    let all = async {
        let (out, errors) = tokio::join!(read_all(&mut out), read_all(&mut errors));
        (out, errors, child.wait().await)
    };
    let done = tokio::time::timeout(ANSWER_LIMIT, all).await;
    let (out, errors, status) = done.map_err(|_| failed(libvirt, UNANSWERED))?;
    if status.is_ok_and(|status| status.success()) {
        return Ok(out);
    }
    let why = errors.lines().map(|line| line.trim_start_matches("error: ")).collect::<Vec<_>>();
    Err(failed(libvirt, &why.join("; ")))
}

/// Returns the definition of a domain that is shut off.
pub(crate) async fn definition_of(libvirt: &LibvirtConfig, name: &str) -> Result<String, ApiError> {
    let uuid = uuid_of(libvirt, name).await?.to_string();
    let state = run_virsh(libvirt, &["--readonly", "domstate", "--domain", &uuid], None).await?;
    if state.trim() != "shut off" {
        let message = format!(
            "cannot import domain \"{name}\": it is {}, and its disks change",
            state.trim()
        );
        let remedy = "shut it down first (`virsh shutdown`)";
        return Err(ApiError::new(ErrorCode::Preflight, message, remedy));
    }
    run_virsh(libvirt, &["--readonly", "dumpxml", "--inactive", "--domain", &uuid], None).await
}

async fn read_all(stream: &mut Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        let _ = stream.take(MOST_OUTPUT_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns `virsh`, connected to the libvirt of the configuration.
pub(crate) fn virsh(libvirt: &LibvirtConfig) -> Command {
    let mut command = Command::new(&libvirt.virsh);
    command.env_clear().env("LC_ALL", "C").kill_on_drop(true);
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.args(["--quiet", "--connect", &libvirt.uri]);
    command
}

pub(crate) fn failed(libvirt: &LibvirtConfig, why: &str) -> ApiError {
    let message = format!("cannot ask libvirt at {}: {why}", libvirt.uri);
    let remedy = "check `virsh list` on the host; [libvirt] in the configuration names the program \
                  and the URI";
    ApiError::new(ErrorCode::HostFailed, message, remedy)
}

/// Whether libvirt did not answer in time: it may still do what it was asked for.
pub(crate) fn is_unanswered(error: &ApiError) -> bool {
    error.message.ends_with(UNANSWERED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_answered_may_still_happen() {
        let libvirt = LibvirtConfig::default();
        assert!(is_unanswered(&failed(&libvirt, UNANSWERED)));
        assert!(!is_unanswered(&failed(&libvirt, "domain is not running")));
    }

    #[tokio::test]
    async fn a_host_without_libvirt_is_an_error_and_no_hang() {
        let libvirt = LibvirtConfig { virsh: "/nonexistent/virsh".into(), ..Default::default() };
        assert!(domains(&libvirt).await.is_err());
    }
}
