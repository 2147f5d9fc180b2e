//! Implements `godwit migrate` and `godwit migration`: starts, follows and cancels migrations.

mod blackout;
pub(crate) mod dry_run;
mod eta;
mod line;

use godwit_api::{
    Client, ClientError, ErrorCode, MigrationEvent, MigrationRequest, MigrationStatus,
    QemuEngineOptions, Resolve, Resolved, VmInfo, VmState, json_name,
};
use godwit_types::{EngineKind, PageInUse, Report};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{MigrateArgs, MigrationCommand};
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::migrate::blackout::BlackoutWatch;
use crate::migrate::line::ProgressLine;
use crate::output::{Output, table};
use crate::report;
use crate::units::millis;

pub(crate) async fn run(
    options: MigrateArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let request = request(&options)?;
    hosts.check(&options.to)?;
    let found = hosts.find(&options.vm, only, output).await?;
    if found.vm.host == options.to {
        let message = format!(
            "cannot move VM \"{}\" to host {}: it is already there",
            options.vm, options.to
        );
        return Err(Failure::new(Exit::Conflict, message, "name another host with --to"));
    }
    if options.page_in && found.vm.spec.refuses_page_in {
        let vm = &options.vm;
        output.note(&format!(
            "VM {vm} refuses page-in (it was created with --no-page-in): the migration sends \
             pages in rounds only"
        ));
    }
    if options.dry_run {
        return dry_run::run(found.client, &options.vm, &request, output).await;
    }
    if options.detach {
        let accepted = found.client.migrate(&options.vm, &request).await?;
        output.result(&accepted, || accepted.id.clone())?;
        return Ok(Exit::Ok);
    }
    // Installed before the migration starts: from then on an interrupt cancels it.
    let interrupts = interrupts()?;
    let watch = begin_watch(hosts, &found.vm, output).await;
    let accepted = found.client.migrate(&options.vm, &request).await?;
    let Some(mut report) = follow(found.client, &accepted.id, interrupts, output).await? else {
        return Ok(detached(&accepted.id, output));
    };
    // The migration was refused before its start, so the client's observations say nothing about
    // it.
    if let Some(watch) = watch.filter(|_| report.has_begun()) {
        report.blackout_ms = watch.end(output).await;
    }
    output.result(&report, || report::render(&report, output))?;
    Ok(Exit::of_report(&report))
}

fn request(options: &MigrateArgs) -> Result<MigrationRequest, Failure> {
    let qemu = QemuEngineOptions {
        multifd_channels: options.multifd_channels,
        compression: options.multifd_compression.clone().filter(|kind| kind != "none"),
        auto_converge: options.auto_converge,
        postcopy: options.postcopy,
        plaintext: options.plaintext,
        autostart: options.autostart,
    };
    if matches!(options.engine, EngineKind::Godwit) && qemu != QemuEngineOptions::default() {
        return Err(Failure::usage(
            "--multifd-channels, --multifd-compression, --auto-converge, --postcopy, --plaintext \
             and --autostart require --engine qemu",
            "add --engine qemu, or omit them",
        ));
    }
    if matches!(options.engine, EngineKind::Qemu) {
        check_for_qemu(options)?;
    }
    Ok(MigrationRequest {
        to: options.to.clone(),
        id: None,
        engine: options.engine,
        switchover_budget_ms: options.switchover_budget.as_secs_f64() * 1e3,
        policy: options.policy.unwrap_or_default(),
        page_in: match options {
            MigrateArgs { page_in: true, .. } => PageInUse::Now,
            MigrateArgs { no_page_in: true, .. } => PageInUse::Never,
            _ => PageInUse::Allowed,
        },
        qemu,
        streams: options.streams,
        bandwidth_limit: options.bandwidth_limit,
        cut_limit_ms: u64::try_from(options.cut_limit.as_millis()).unwrap_or(u64::MAX),
        compression: options.compression.unwrap_or_default(),
        references: options.references.unwrap_or_default(),
        tracking: options.tracking.unwrap_or_default(),
        disks: options.disks.request(),
    })
}

/// Refuses settings of Godwit's engine for a migration by QEMU's.
fn check_for_qemu(options: &MigrateArgs) -> Result<(), Failure> {
    let refused = |what: &str, remedy: &str| {
        Err(Failure::usage(format!("cannot use {what} with --engine qemu"), remedy))
    };
    if options.streams.is_some() {
        return refused("--streams", "omit it; QEMU's engine has --multifd-channels");
    }
    if options.compression.is_some() {
        let remedy = "omit it; QEMU's engine has --multifd-compression, with --multifd-channels";
        return refused("--compression", remedy);
    }
    if options.references.is_some() {
        return refused("--references", "omit it");
    }
    if options.tracking.is_some() {
        return refused("--tracking", "omit it");
    }
    if options.policy.is_some() {
        let remedy = "omit it; QEMU's engine has --auto-converge and --postcopy";
        return refused("--policy", remedy);
    }
    if options.page_in || options.no_page_in {
        return refused("--page-in or --no-page-in", "omit it; QEMU's engine has --postcopy");
    }
    if options.disks.with_disks {
        return refused("--with-disks", "omit one of them: disks travel with Godwit's own engine");
    }
    if options.dry_run {
        let message = "cannot use --dry-run with --engine qemu: its migrations are not predicted";
        return Err(Failure::usage(message, "omit --engine qemu"));
    }
    Ok(())
}

async fn begin_watch(hosts: &Hosts, vm: &VmInfo, output: Output) -> Option<BlackoutWatch> {
    let (socket, address) = (hosts.watch.as_ref()?.socket.clone(), *vm.addresses.first()?);
    match BlackoutWatch::begin(socket, address).await {
        Ok(watch) => Some(watch),
        Err(why) => {
            output.note(&format!("note: cannot measure the blackout: {why}"));
            None
        }
    }
}

fn interrupts() -> Result<Signal, Failure> {
    Ok(signal(SignalKind::interrupt())?)
}

fn detached(id: &str, output: Output) -> Exit {
    output.note(&format!("the migration continues; `godwit migration show {id}` shows its result"));
    Exit::Interrupted
}

/// Shows a migration until its report. `None` after the second interrupt.
async fn follow(
    client: &Client,
    id: &str,
    mut interrupts: Signal,
    output: Output,
) -> Result<Option<Report>, Failure> {
    let mut events = client.migration_events(id).await?;
    let mut line = ProgressLine::new(output);
    let mut cancelled = false;
    loop {
        tokio::select! {
            event = events.next() => match event {
                Ok(Some(MigrationEvent::Progress(progress))) => line.show(&progress),
                Ok(Some(MigrationEvent::Report(report))) => {
                    line.end();
                    return Ok(Some(*report));
                }
                Ok(None) | Err(_) => {
                    line.end();
                    return broken_off(client, id).await.map(Some);
                }
            },
            _ = interrupts.recv() => {
                if cancelled {
                    line.end();
                    return Ok(None);
                }
                cancelled = true;
                line.remark(
                    "cancelling: waiting until the guest runs on at the source (Ctrl-C again exits \
                     without waiting)",
                );
                match client.cancel_migration(id).await {
                    // The migration ended at the same moment: the report follows.
                    Err(error) if error.code() == Some(ErrorCode::WrongState) => {}
                    // The guest runs at the destination and lacks pages: the report follows when it
                    // has them.
                    Err(error) if error.code() == Some(ErrorCode::Busy) => {
                        line.remark(&error.to_string());
                    }
                    other => other?,
                }
            }
        }
    }
}

/// Queries the report after a stream that ended without one.
async fn broken_off(client: &Client, id: &str) -> Result<Report, Failure> {
    let lost = |why: String| {
        let remedy = "start that agent again, then see `godwit vm list` and `vm show`: the VM is \
                      running or in doubt; if the agent exited, its report is lost";
        Failure::new(
            Exit::Unreachable,
            format!("cannot follow migration {id}, its result is unknown: {why}"),
            remedy,
        )
    };
    let status = client.migration(id).await.map_err(|error| lost(error.to_string()))?;
    status.report.ok_or_else(|| {
        lost("the connection to the agent broke, and the migration still runs".to_owned())
    })
}

pub(crate) async fn manage(
    command: MigrationCommand,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        MigrationCommand::List => list(hosts, only, output).await,
        MigrationCommand::Show { id } => {
            let (_, status) = find(&id, hosts, only, output).await?;
            output.result(&status, || describe(&status, output))?;
            Ok(Exit::Ok)
        }
        MigrationCommand::Follow { id } => {
            let (client, _) = find(&id, hosts, only, output).await?;
            let mut interrupted = interrupts()?;
            let mut events = client.migration_events(&id).await?;
            let mut line = ProgressLine::new(output);
            loop {
                let event = tokio::select! {
                    event = events.next() => event?,
                    _ = interrupted.recv() => return Ok(detached(&id, output)),
                };
                match event {
                    Some(MigrationEvent::Progress(progress)) => line.show(&progress),
                    Some(MigrationEvent::Report(report)) => {
                        line.end();
                        output.result(&report, || report::render(&report, output))?;
                        return Ok(Exit::of_report(&report));
                    }
                    None => {
                        return broken_off(client, &id)
                            .await
                            .map(|report| Exit::of_report(&report));
                    }
                }
            }
        }
        MigrationCommand::Limit { id, limit } => {
            let (client, _) = find(&id, hosts, only, output).await?;
            let status = client.limit_migration(&id, limit).await?;
            output
                .result(&status, || format!("the bandwidth limit of migration {id} is {limit}"))?;
            Ok(Exit::Ok)
        }
        MigrationCommand::Resolve { vm, runs_on, keep_memory } => {
            resolve(&vm, &Resolve { runs_on, keep_memory }, hosts, only, output).await
        }
        MigrationCommand::Cancel { id } => {
            let (client, _) = find(&id, hosts, only, output).await?;
            client.cancel_migration(&id).await?;
            output.result(&json!({ "cancelling": id }), || {
                format!("migration {id} is being cancelled")
            })?;
            Ok(Exit::Ok)
        }
    }
}

/// Declares the owner of a VM to every reachable host that has it in doubt.
async fn resolve(
    vm: &str,
    word: &Resolve,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    hosts.check(&word.runs_on)?;
    let (answers, _) = hosts.ask_all(only, output, Client::vms).await?;
    let runs = |info: &VmInfo| info.name == vm && info.state == VmState::Running && !info.in_doubt;
    let runner = answers.iter().find(|(_, vms)| vms.iter().any(runs)).map(|(host, _)| *host);
    if let Some(runner) = runner.filter(|runner| *runner != word.runs_on) {
        let message =
            format!("cannot assign VM {vm} to host {}: it runs on host {runner}", word.runs_on);
        let remedy = format!("repair the link between the two hosts, or use --runs-on {runner}");
        return Err(Failure::new(Exit::Conflict, message, remedy));
    }
    let in_doubt =
        |vms: Vec<VmInfo>| vms.into_iter().any(|known| known.name == vm && known.in_doubt);
    let mut asked: Vec<&str> =
        answers.into_iter().filter_map(|(host, vms)| in_doubt(vms).then_some(host)).collect();
    if asked.is_empty() {
        // A host that keeps pages for a lost host is not in doubt, but may take the guest back as
        // well.
        asked.push(hosts.find(vm, only, output).await?.host);
    }
    let mut answers = Vec::new();
    let chosen = hosts.chosen(None)?.into_iter().filter(|(host, _)| asked.contains(host));
    let mut chosen: Vec<(&str, &Client)> = chosen.collect();
    // Were the other host asked first, it could settle this one's doubt before this one has the
    // operator's word.
    chosen.sort_by_key(|(host, _)| *host != word.runs_on);
    for (host, client) in chosen {
        let resolved = match client.resolve(vm, word).await {
            // It has asked the owner meanwhile.
            Err(ClientError::Refused(error))
                if host != word.runs_on && error.code == ErrorCode::NotFound =>
            {
                Resolved { vm: None }
            }
            resolved => resolved?,
        };
        let text = match &resolved.vm {
            Some(info) if info.state == VmState::Failed => {
                format!(
                    "VM {vm} now belongs to host {host}. Its guest was ended: `godwit vm start \
                     {vm}` boots it from its disks"
                )
            }
            Some(info) => format!("VM {vm} now belongs to host {host}, and is {}", info.state),
            None => {
                format!(
                    "VM {vm} belongs to host {}; host {host} has removed its part",
                    word.runs_on
                )
            }
        };
        answers.push((json!({ "host": host, "vm": resolved.vm }), text));
    }
    let (values, texts): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
    output.result(&values, || texts.join("\n"))?;
    Ok(Exit::Ok)
}

async fn list(hosts: &Hosts, only: Option<&str>, output: Output) -> Result<Exit, Failure> {
    let (answers, silent) = hosts.ask_all(only, output, Client::migrations).await?;
    let mut all: Vec<MigrationStatus> =
        answers.into_iter().flat_map(|(_, migrations)| migrations).collect();
    all.sort_by_key(|migration| std::cmp::Reverse(migration.started_unix_ms));
    output.result(&all, || {
        let rows: Vec<Vec<String>> = all.iter().map(row).collect();
        table(&["migration", "vm", "from", "to", "engine", "state", "time", "pause"], &rows)
    })?;
    Ok(if silent.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

fn row(status: &MigrationStatus) -> Vec<String> {
    let (state, time, switchover) = match &status.report {
        Some(report) => (
            json_name(&report.outcome),
            millis(report.migration_time_ms),
            report.switchover_ms.map_or_else(|| "-".to_owned(), millis),
        ),
        None => {
            (status.progress.phase.to_string(), millis(status.progress.elapsed_ms), "-".to_owned())
        }
    };
    let engine = format!("{:?}", status.engine).to_lowercase();
    vec![
        status.id.clone(),
        status.vm.clone(),
        status.from.clone(),
        status.to.clone(),
        engine,
        state,
        time,
        switchover,
    ]
}

async fn find<'a>(
    id: &str,
    hosts: &'a Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<(&'a Client, MigrationStatus), Failure> {
    let ask = |client: &'a Client| {
        let (client, id) = (client.clone(), id.to_owned());
        async move {
            match client.migration(&id).await {
                Ok(status) => Ok(Some((client, status))),
                Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
                Err(error) => Err(error),
            }
        }
    };
    let (answers, _) = hosts.ask_all(only, output, ask).await?;
    let found = answers.into_iter().find_map(|(host, found)| Some((host, found?.1)));
    let Some((host, status)) = found else {
        let message = format!("cannot find migration {id} on any host that responds");
        return Err(Failure::new(
            Exit::NotFound,
            message,
            "list the migrations with `godwit migration list`",
        ));
    };
    let (_, client) = hosts.one(Some(host))?;
    Ok((client, status))
}

fn describe(status: &MigrationStatus, output: Output) -> String {
    match &status.report {
        Some(report) => report::render(report, output),
        None => format!(
            "migration {} of VM {} from {} to {}: {}\n",
            status.id,
            status.vm,
            status.from,
            status.to,
            line::describe(&status.progress, None)
        ),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use godwit_api::TravellingDisks;
    use godwit_types::Compression;

    use super::*;
    use crate::args::{Cli, Command};

    fn parse(line: &str) -> Result<MigrationRequest, Failure> {
        match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Migrate(options) => request(&options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_request_says_what_the_flags_say() {
        let request = parse(
            "godwit migrate web --to b --engine qemu --multifd-channels 4 \
             --multifd-compression zstd --postcopy",
        )
        .unwrap();
        assert_eq!(request.engine, EngineKind::Qemu);
        assert_eq!(request.qemu.multifd_channels, Some(4));
        assert_eq!(request.qemu.compression.as_deref(), Some("zstd"));
        assert!(request.qemu.postcopy && !request.qemu.auto_converge);
        let budget = parse("godwit migrate web --to b --switchover-budget 500us")
            .unwrap()
            .switchover_budget_ms;
        assert!((budget - 0.5).abs() < 1e-9);
        let limit = |flags: &str| {
            parse(&format!("godwit migrate web --to b {flags}"))
                .unwrap()
                .bandwidth_limit
                .map(|limit| limit.to_string())
        };
        assert_eq!(limit(""), None, "the host decides");
        assert_eq!(limit("--bandwidth-limit 1.5gbit"), Some("1500mbit".into()));
        assert_eq!(limit("--engine qemu --bandwidth-limit none"), Some("none".into()));
        assert_eq!(parse("godwit migrate web --to b").unwrap().compression, Compression::Auto);
        let asked = parse("godwit migrate web --to b --compression none").unwrap();
        assert_eq!(asked.compression, Compression::None);
        assert_eq!(parse("godwit migrate web --to b").unwrap().disks, None);
        let asked = parse("godwit migrate web --to b --with-disks --disks-to /ssd").unwrap();
        let disks = TravellingDisks { to: Some("/ssd".into()), ..TravellingDisks::default() };
        assert_eq!(asked.disks, Some(disks));
    }

    #[test]
    fn settings_of_the_other_engine_are_refused() {
        let failure = parse("godwit migrate web --to b --auto-converge").unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.fault.remedy.contains("--engine qemu"));
        let failure = parse("godwit migrate web --to b --engine qemu --dry-run").unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        let failure =
            parse("godwit migrate web --to b --engine qemu --compression zstd").unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.fault.remedy.contains("--multifd-compression"));
        let failure = parse("godwit migrate web --to b --engine qemu --with-disks").unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
    }
}
