//! The `godwit` command: the agent, the manager and their clients in one binary.

mod alarms;
mod args;
mod audit;
mod baseline;
mod control;
mod datastores;
mod disks;
mod drains;
mod events;
mod exit;
mod follow;
mod ha;
mod host;
mod hosts;
mod jobs;
mod join;
mod journal;
mod limits;
mod load;
mod manager;
mod migrate;
mod moves;
mod output;
mod pki;
mod preflight;
mod probe;
mod report;
mod rules;
mod shares;
mod target;
mod travelling;
mod units;
mod vm;
mod waiting;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::args::{Cli, Command, ControlCommand, HostCommand, VmCommand};
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::Output;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            if std::env::args_os()
                .take_while(|argument| argument != "--")
                .any(|argument| argument == "--json")
            {
                Output::new(true).failure(&Failure::of_usage(&error));
            } else {
                let _ = error.print();
            }
            return Exit::Usage.into();
        }
        // Help and version are not errors.
        Err(asked) => {
            let _ = asked.print();
            return Exit::Ok.into();
        }
    };
    let output = Output::new(cli.json);
    match run(cli, output) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            output.failure(&failure);
            failure.exit.into()
        }
    }
}

fn run(cli: Cli, output: Output) -> Result<Exit, Failure> {
    if let Some(failure) = cli.refused_host() {
        return Err(failure);
    }
    if let Command::Completions { shell, .. } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "godwit", &mut std::io::stdout());
        return Ok(Exit::Ok);
    }
    let hosts_file = cli.hosts_file();
    if let Command::Pki { command, .. } = cli.command {
        return pki::run(command, output);
    }
    if let Command::Host { command: HostCommand::Watchdog { config, .. }, .. } = &cli.command {
        // It has one thread of its own.
        return host::watch(config);
    }
    let runtime = tokio::runtime::Runtime::new().map_err(|error| {
        Failure::new(Exit::Failure, format!("cannot start threads: {error}"), "")
    })?;
    let outcome = runtime.block_on(dispatch(cli, hosts_file.as_deref(), output));
    // The console may leave a thread that waits for the keyboard.
    runtime.shutdown_background();
    outcome
}

async fn dispatch(cli: Cli, hosts_file: Option<&Path>, output: Output) -> Result<Exit, Failure> {
    if let Command::Host { command: HostCommand::Run { config, .. }, .. } = &cli.command {
        return host::run(config).await;
    }
    if let Command::Host { command: HostCommand::Join(options), .. } = cli.command {
        return join::run(options, output).await;
    }
    if let Command::Control { place, command, .. } = cli.command {
        return match command {
            ControlCommand::Run { config } => control::run(&config).await,
            ControlCommand::Backup { file, config } => control::back_up(&config, &file, output),
            ControlCommand::Openapi => control::openapi(output),
            command => control::ask(command, &place, hosts_file, output).await,
        };
    }
    match cli.command {
        Command::Host { command: HostCommand::Drain(args), .. } => {
            return drains::run(args, hosts_file, output).await;
        }
        Command::Host { command: HostCommand::Drains { place, .. }, .. } => {
            return drains::list(&manager::client(&place, hosts_file)?, output).await;
        }
        Command::Vm { command: VmCommand::Preflight(args), place, .. } => {
            return preflight::run(args, &place, hosts_file, output).await;
        }
        _ => {}
    }
    if let Command::Vm { command, place, .. } = &cli.command {
        let asked =
            vm::managed::run(command, place, hosts_file, cli.host.as_deref(), output).await?;
        if let Some(exit) = asked {
            return Ok(exit);
        }
    }
    if let Command::Disk { command, place, .. } = cli.command {
        return disks::run(command, &place, hosts_file, cli.host.as_deref(), output).await;
    }
    if let Command::Datastore { command, place, .. } = cli.command {
        return datastores::run(command, &place, hosts_file, cli.host.as_deref(), output).await;
    }
    if let Command::Job { command, place, .. } = cli.command {
        return jobs::run(command, &place, hosts_file, cli.host.as_deref(), output).await;
    }
    if let Command::Watch(options) = cli.command {
        return watch::run(options, hosts_file, output).await;
    }
    if let Command::Top(options) = &cli.command {
        return load::top(options, hosts_file, output).await;
    }
    let hosts = Hosts::load(hosts_file)?;
    let only = cli.host.as_deref();
    match cli.command {
        Command::Host { command, .. } => host::ask(command, &hosts, only, output).await,
        Command::Vm { command, .. } => vm::run(command, &hosts, only, output).await,
        Command::Migrate(options) => migrate::run(options, &hosts, only, output).await,
        Command::Probe(options) => probe::run(options, &hosts, only, output).await,
        Command::Migration { command, .. } => migrate::manage(command, &hosts, only, output).await,
        Command::Pki { .. }
        | Command::Disk { .. }
        | Command::Datastore { .. }
        | Command::Job { .. }
        | Command::Control { .. }
        | Command::Watch(_)
        | Command::Top(_)
        | Command::Completions { .. } => Ok(Exit::Ok),
    }
}
