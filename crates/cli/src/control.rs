//! Implements `godwit control`: runs the manager and sends requests to it.

use std::path::Path;

use godwit_api::ErrorCode;
use godwit_api::control::{
    AddHost, CertificateInfo, Cluster, CreateToken, HostSummary, ManagedHost, ManagerClient,
    ManagerError, NameClaim, NameConflict, ProblemCode, TokenInfo, UpdateHost, VmSummary,
};
use godwit_control::{Config, RunError};
use godwit_pki::describe;
use godwit_types::{BitRate, Fault};
use serde_json::json;

use crate::alarms;
use crate::args::{
    CertificateCommand, ControlCommand, ManagedHostCommand, ManagerPlace, Switch, TokenCommand,
};
use crate::audit;
use crate::baseline;
use crate::datastores;
use crate::events;
use crate::exit::{Exit, Failure};
use crate::ha;
use crate::join;
use crate::journal;
use crate::limits;
use crate::load;
use crate::manager::client;
use crate::moves;
use crate::output::{Output, fields, log_to_stderr, table};
use crate::rules;
use crate::shares;
use crate::units::{byte_count, utc};

/// Runs the manager in the foreground.
pub(crate) async fn run(config: &Path) -> Result<Exit, Failure> {
    log_to_stderr();
    let config = Config::load(config)
        .map_err(|error| Failure::new(Exit::Usage, error.to_string(), error.remedy()))?;
    match godwit_control::run(config).await {
        Ok(()) => Ok(Exit::Ok),
        Err(error @ RunError::SocketInUse { .. }) => {
            Err(Failure::new(Exit::Conflict, error.to_string(), error.remedy()))
        }
        Err(error) => Err(Failure::new(Exit::Failure, error.to_string(), error.remedy())),
    }
}

/// Copies a manager's store to a new file.
pub(crate) fn back_up(config: &Path, to: &Path, output: Output) -> Result<Exit, Failure> {
    let config = Config::load(config)
        .map_err(|error| Failure::new(Exit::Usage, error.to_string(), error.remedy()))?;
    godwit_control::back_up(&config, to)
        .map_err(|error| Failure::new(Exit::Failure, error.to_string(), error.remedy()))?;
    let result = serde_json::json!({ "backup": to });
    output.result(&result, || format!("copied the manager's store to {}", to.display()))?;
    Ok(Exit::Ok)
}

/// Prints the OpenAPI document of the manager's API; needs no running manager.
pub(crate) fn openapi(output: Output) -> Result<Exit, Failure> {
    let document = godwit_control::openapi();
    output.result(&document, || serde_json::to_string_pretty(&document).unwrap_or_default())?;
    Ok(Exit::Ok)
}

pub(crate) async fn ask(
    command: ControlCommand,
    place: &ManagerPlace,
    hosts: Option<&Path>,
    output: Output,
) -> Result<Exit, Failure> {
    let manager = client(place, hosts)?;
    match command {
        ControlCommand::Status => {
            let cluster = manager.cluster().await?;
            output.result(&cluster, || status(&cluster))?;
        }
        ControlCommand::Host { command } => host(command, &manager, output).await?,
        ControlCommand::Vms => {
            let vms = manager.vms().await?;
            let rows: Vec<_> = vms.iter().map(vm_row).collect();
            output.result(&vms, || table(&["vm", "host", "state", "memory", "vcpus"], &rows))?;
        }
        ControlCommand::Conflicts => conflicts(&manager, output).await?,
        ControlCommand::Bind { vm, to } => {
            let bound = manager.bind_vm(&vm, &to).await?;
            output.result(&bound, || {
                format!("the name {vm} is bound to the VM on host {}", bound.summary.host)
            })?;
        }
        ControlCommand::Networks => shares::networks(&manager, output).await?,
        ControlCommand::Datastores => datastores::list(&manager, None, None, output).await?,
        ControlCommand::Move { command } => return moves::run(command, &manager, output).await,
        ControlCommand::Rule { command } => rules::run(command, &manager, output).await?,
        ControlCommand::CpuBaseline { command } => baseline::run(command, &manager, output).await?,
        ControlCommand::Limits { command } => limits::run(command, &manager, output).await?,
        ControlCommand::Load(args) => load::history(&args, &manager, output).await?,
        ControlCommand::Ha { command } => return ha::run(command, &manager, output).await,
        ControlCommand::Alarm { command } => return alarms::run(command, &manager, output).await,
        ControlCommand::Events { behind } => return events::follow(&manager, behind, output).await,
        ControlCommand::Audit { lines } => {
            return audit::run(&manager, usize::from(lines), output).await;
        }
        ControlCommand::Journal { command } => {
            return journal::run(command, &manager, output).await;
        }
        ControlCommand::Token { command } => token(command, &manager, output).await?,
        ControlCommand::Certificate { command } => certificates(command, &manager, output).await?,
        ControlCommand::JoinToken { command } => join::token(command, &manager, output).await?,
        // These send no requests: main has handled them.
        ControlCommand::Run { .. } | ControlCommand::Backup { .. } | ControlCommand::Openapi => {}
    }
    Ok(Exit::Ok)
}

/// Lists VM names that several hosts claim.
async fn conflicts(manager: &ManagerClient, output: Output) -> Result<(), Failure> {
    let all = manager.name_conflicts().await?;
    let row = |vm: &str, holds: &str, claim: &NameClaim| {
        let state = claim.state.map_or("not reported", |state| state.name());
        let epoch = claim.epoch.map_or_else(|| "-".to_owned(), |epoch| epoch.to_string());
        let uuid = claim.uuid.clone().unwrap_or_else(|| "-".to_owned());
        [vm, &claim.host, holds, state, &epoch, &uuid].map(str::to_owned).to_vec()
    };
    let rows: Vec<Vec<String>> = all
        .iter()
        .flat_map(|NameConflict { vm, holder, claims }| {
            let claims = claims.iter().map(|claim| row(vm, "no", claim));
            std::iter::once(row(vm, "yes", holder)).chain(claims)
        })
        .collect();
    output
        .result(&all, || table(&["vm", "host", "holds the name", "state", "epoch", "uuid"], &rows))
}

/// Most hosts that a manager names as away.
const MOST_AWAY: usize = 16;

fn vm_counts(cluster: &Cluster) -> String {
    let Cluster { vms, vms_running, vms_unknown, .. } = cluster;
    match vms_unknown {
        0 => format!("{vms}, {vms_running} of them running"),
        unknown => format!("{vms}, {vms_running} of them running, {unknown} in an unknown state"),
    }
}

/// Returns the names of hosts that are away. With as many as a manager names there may be more, so
/// the last one is among the others.
fn named_away(hosts: &[String]) -> String {
    match hosts.get(..MOST_AWAY - 1) {
        Some(first) if hosts.len() >= MOST_AWAY => format!("{} and others", first.join(", ")),
        _ => hosts.join(", "),
    }
}

fn status(cluster: &Cluster) -> String {
    let leader = cluster.leader.as_ref().map_or("none at the moment".to_owned(), |leader| {
        let which = if leader.is_self { " (this manager)" } else { " (a standby answered)" };
        format!("{} at {}{which}", leader.name, leader.address)
    });
    let mut rows = vec![
        ("manager", cluster.version.clone()),
        ("leader", leader),
        ("hosts", format!("{}, {} of them up", cluster.hosts, cluster.hosts_up)),
        ("vms", vm_counts(cluster)),
        ("moves", format!("{} running, {} waiting", cluster.moves_running, cluster.moves_waiting)),
    ];
    if !cluster.hosts_away.is_empty() {
        let names = named_away(&cluster.hosts_away);
        rows.push(("hosts away", format!("{names} (godwit control host list)")));
    }
    if cluster.name_conflicts > 0 {
        let count = cluster.name_conflicts;
        rows.push(("name conflicts", format!("{count} (godwit control conflicts)")));
    }
    if cluster.hosts_faulty > 0 {
        let count = cluster.hosts_faulty;
        rows.push(("faulty hosts", format!("{count} (godwit control host list)")));
    }
    fields(&rows)
}

async fn host(
    command: ManagedHostCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    match command {
        ManagedHostCommand::Add { name, address, labels, link } => {
            let request = AddHost {
                name,
                address: address.to_string(),
                labels: labels.into_iter().collect(),
                link_bits_per_s: link.map(BitRate::bits_per_second),
                most_moves: None,
            };
            let added = manager.add_host(&request).await?;
            output.result(&added, || format!("host {} is added", added.summary.name))
        }
        ManagedHostCommand::List => {
            let hosts = manager.hosts().await?;
            let rows: Vec<_> = hosts.iter().map(host_row).collect();
            output.result(&hosts, || table(&["host", "state", "vms", "memory left", "api"], &rows))
        }
        ManagedHostCommand::Show { name } => {
            let host = manager.host(&name).await?;
            output.result(&host, || host_fields(&host))
        }
        ManagedHostCommand::Set(options) => limits::set_host(options, manager, output).await,
        ManagedHostCommand::Maintenance { name, switch } => {
            let change =
                UpdateHost { maintenance: Some(switch == Switch::On), ..UpdateHost::default() };
            let host = manager.update_host(&name, &change).await?;
            let accepts = if host.summary.maintenance { "accepts no VMs" } else { "accepts VMs" };
            output.result(&host, || format!("host {name} {accepts}"))
        }
        ManagedHostCommand::Forget { name, force } => {
            manager.forget_host(&name, force).await?;
            output.result(&serde_json::json!({ "forgotten": name }), || {
                format!("host {name} is forgotten")
            })
        }
    }
}

fn host_fields(host: &ManagedHost) -> String {
    let HostSummary { name, address, maintenance, vms, reason, labels, .. } = &host.summary;
    let lacks = lacks(&host.summary);
    let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let link = host.link_bits_per_s.and_then(BitRate::new).map(|rate| rate.to_string());
    let mut rows = vec![
        ("host", name.clone()),
        ("api", address.clone()),
        ("state", host.summary.state.name().to_owned()),
    ];
    rows.extend(reason.clone().map(|reason| ("why", reason)));
    rows.extend(host.summary.fault.clone().map(|fault| ("fault", fault)));
    rows.extend([
        ("maintenance", if *maintenance { "yes" } else { "no" }.to_owned()),
        ("labels", if labels.is_empty() { "none".to_owned() } else { labels.join(" ") }),
        ("link", link.unwrap_or_else(|| "unknown".to_owned())),
        (
            "most moves",
            host.most_moves.map_or_else(|| "by its link".to_owned(), |most| most.to_string()),
        ),
        ("vms", vms.to_string()),
        ("memory left", byte_count(host.summary.memory_available_bytes)),
    ]);
    rows.extend((!lacks.is_empty()).then_some(("below the cpu baseline, lacks", lacks)));
    fields(&rows)
}

/// Formats the features of the cluster's CPU baseline that the host is known to lack.
fn lacks(host: &HostSummary) -> String {
    let features: Vec<&str> = host.lacks_of_baseline.iter().map(String::as_str).collect();
    features.join(" ")
}

fn host_row(host: &HostSummary) -> Vec<String> {
    let state = match (host.maintenance, host.lacks_of_baseline.is_empty()) {
        _ if host.fault.is_some() => format!("{}, FAULTY", host.state.name()),
        (true, _) => "maintenance".to_owned(),
        (false, true) => host.state.name().to_owned(),
        (false, false) => format!("{} (below the cpu baseline)", host.state.name()),
    };
    vec![
        host.name.clone(),
        state,
        host.vms.to_string(),
        byte_count(host.memory_available_bytes),
        host.address.clone(),
    ]
}

fn vm_row(vm: &VmSummary) -> Vec<String> {
    let state =
        if vm.is_current { vm.state.to_string() } else { format!("unknown (was {})", vm.state) };
    let state = if vm.conflicts.is_empty() { state } else { format!("{state}, {}", claimed(vm)) };
    vec![vm.name.clone(), vm.host.clone(), state, byte_count(vm.memory_bytes), vm.vcpus.to_string()]
}

async fn certificates(
    command: CertificateCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    match command {
        CertificateCommand::List => {
            let all = manager.certificates().await?;
            let rows: Vec<_> = all.iter().map(certificate_row).collect();
            output.result(&all, || table(&["serial", "host", "valid until", "revoked"], &rows))
        }
        CertificateCommand::Revoke { serial, file } => {
            let of_file = file.map(|file| describe(&file).map(|it| it.serial)).transpose()?;
            let serial = serial.or(of_file).unwrap_or_default().to_string();
            let list = manager.revoke_certificate(&serial).await?;
            let revoked = json!({
                "revoked": serial, "number": list.number, "certificates": list.certificates
            });
            output.result(&revoked, || {
                format!("certificate {serial} is revoked: agents receive list {}", list.number)
            })
        }
        CertificateCommand::Crl => {
            let list = manager.revocations().await?;
            output.result(&list, || list.list.trim_end().to_owned())
        }
    }
}

fn certificate_row(certificate: &CertificateInfo) -> Vec<String> {
    let CertificateInfo { serial, holder, ends_unix_ms, revoked_unix_ms, .. } = certificate;
    let time = |unix_ms: Option<u64>| unix_ms.map_or_else(|| "-".to_owned(), utc);
    let holder = holder.clone().unwrap_or_else(|| "-".to_owned());
    vec![serial.clone(), holder, time(*ends_unix_ms), time(*revoked_unix_ms)]
}

/// Formats the other hosts that claim a VM's name.
pub(crate) fn claimed(vm: &VmSummary) -> String {
    format!("ALSO CLAIMED BY {}", vm.conflicts.join(", "))
}

async fn token(
    command: TokenCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    match command {
        TokenCommand::Create { name, role, days } => {
            let made = manager.create_token(&CreateToken { name, role, days }).await?;
            // Only the token is on standard output: `GODWIT_TOKEN=$(godwit control token create
            // …)`.
            output.result(&made, || made.token.clone())
        }
        TokenCommand::List => {
            let tokens = manager.tokens().await?;
            let rows: Vec<_> = tokens.iter().map(token_row).collect();
            output.result(&tokens, || {
                table(&["id", "name", "role", "created by", "valid until"], &rows)
            })
        }
        TokenCommand::Revoke { id } => {
            manager.revoke_token(&id).await?;
            output
                .result(&serde_json::json!({ "revoked": id }), || format!("token {id} is revoked"))
        }
    }
}

fn token_row(token: &TokenInfo) -> Vec<String> {
    let until = utc(token.expires_unix_ms);
    vec![
        token.id.clone(),
        token.name.clone(),
        token.role.name().to_owned(),
        token.made_by.clone(),
        until,
    ]
}

impl From<ManagerError> for Failure {
    fn from(error: ManagerError) -> Failure {
        let (message, remedy) = (error.detail(), error.remedy().to_owned());
        match error {
            ManagerError::Refused(problem) => {
                let in_doubt = problem.cause == Some(ErrorCode::InDoubt);
                let exit = if in_doubt { Exit::InDoubt } else { of_code(problem.code) };
                Failure { exit, fault: Fault::from(&problem) }
            }
            ManagerError::Unreachable { .. } => Failure::new(Exit::Unreachable, message, remedy),
            ManagerError::Protocol { .. } => Failure::new(Exit::Failure, message, remedy),
        }
    }
}

fn of_code(code: ProblemCode) -> Exit {
    use ProblemCode as P;
    match code {
        P::InvalidRequest
        | P::KeyReused
        | P::TooLong
        | P::UnsupportedType
        | P::MethodNotAllowed => Exit::Usage,
        P::NotFound => Exit::NotFound,
        P::AlreadyExists | P::WrongState | P::Conflict | P::TooManyRequests => Exit::Conflict,
        P::Unauthenticated | P::Forbidden | P::Preflight | P::NoHost | P::BaselineUnmet => {
            Exit::Preflight
        }
        P::HostAway | P::NoLeader | P::StoreAway | P::IssuerAway => Exit::Unreachable,
        P::HostRefused | P::ManagerFailed | P::Unknown => Exit::Failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_away_only_if_the_manager_could_not_name_them_all() {
        let hosts: Vec<String> = (10..10 + MOST_AWAY).map(|number| format!("h{number}")).collect();
        let all_but_one = named_away(&hosts[..MOST_AWAY - 1]);
        assert!(all_but_one.ends_with(", h24"), "{all_but_one}");
        assert_eq!(named_away(&hosts), format!("{all_but_one} and others"));
        assert_eq!(named_away(&hosts[..1]), "h10");
    }
}
