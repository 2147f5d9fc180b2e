//! `godwit-lab`: starts a lab, takes it down, shows it, and sends requests to its guests.
//!
//! Separate program: it runs the product's programs, which do not know it, and it is not part of
//! packages.

mod args;
mod guest;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use godwit_lab::{Hooks, LabName, LabOptions, Programs, daemon, down, status, up};
use serde::Serialize;
use serde_json::json;

use crate::args::{Cli, Command, UpArgs};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    match run(cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let text = format!("{error:#}");
            let line = if json {
                json!({ "error": { "code": "failure", "message": text } }).to_string()
            } else {
                format!("error: {text}")
            };
            let _ = writeln!(io::stderr().lock(), "{line}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the command. Returns false if it found a problem, which it has printed.
fn run(cli: Cli) -> Result<bool> {
    let name = cli.place.name();
    match cli.command {
        Command::Up(options) => {
            let mut programs = Programs::beside(std::env::current_exe()?);
            if let Some(godwit) = &options.godwit {
                programs.godwit = std::fs::canonicalize(godwit)
                    .with_context(|| format!("cannot open {}", godwit.display()))?;
            }
            let lab = up(&lab_options(name, options), &programs)?;
            print(cli.json, &lab, || lab.to_string())?;
            Ok(true)
        }
        Command::Down => {
            let was_there = down(&name)?;
            print(cli.json, &json!({ "up": false, "was_there": was_there }), || {
                let text = if was_there {
                    "the lab is down; nothing of it is left\n"
                } else {
                    "there was no lab, and nothing left of one\n"
                };
                text.to_owned()
            })?;
            Ok(true)
        }
        Command::Status => {
            let lab = status(&name)?;
            print(cli.json, &lab, || lab.to_string())?;
            Ok(lab.up)
        }
        Command::Guest { vm, address, command } => {
            let answer = guest::run(&name, &vm, address, command)?;
            print(cli.json, &answer, || guest::describe(&answer))?;
            Ok(answer.ok && answer.error.is_none())
        }
        Command::Daemon { kind, config } => daemon::run(kind, &config).map(|()| true),
    }
}

fn lab_options(name: LabName, options: UpArgs) -> LabOptions {
    let LabName { prefix, state_dir } = name;
    LabOptions {
        hosts: options.hosts,
        link: options.link,
        lanes: options.lanes,
        family: options.family,
        flow_cap: options.flow_cap,
        rtt: options.rtt,
        loss: options.loss,
        force_emulator: options.emulator,
        agents: !options.no_agents,
        manager: !options.no_manager && !options.no_agents,
        qemu: options.qemu,
        qemu_user: options.qemu_user,
        vm_dir: options.vm_dir,
        tracker: options.tracker,
        insecure: options.insecure,
        hooks: Hooks::default(),
        at_once: None,
        replace: options.replace,
        place: 0,
        prefix,
        state_dir,
    }
}

/// Prints a result as JSON, or as `text` for people.
fn print(json: bool, result: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
    let text = if json { format!("{}\n", serde_json::to_string_pretty(result)?) } else { text() };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // A reader that has seen enough (`| head`) is no failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
