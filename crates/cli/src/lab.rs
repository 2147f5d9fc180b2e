//! `godwit lab`.

use std::path::{Path, PathBuf};

use godwit_lab::{
    DEFAULT_PREFIX, DEFAULT_STATE_DIR, DaemonKind, Hooks, LabName, LabOptions, daemon, down, status, up,
};
use serde_json::json;

use crate::args::{LabCommand, LabPlace, LabUpArgs};
use crate::exit::{Exit, Failure};
use crate::guest;
use crate::output::Output;

pub(crate) fn run(
    command: LabCommand,
    hosts: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        LabCommand::Up(options) => {
            let lab = up(&wanted(options), &std::env::current_exe()?)?;
            output.result(&lab, || lab.to_string())?;
            Ok(Exit::Ok)
        }
        LabCommand::Down(place) => {
            let name = name(&place);
            let was_there = down(&name)?;
            output.result(&json!({ "up": false, "was_there": was_there }), || {
                let told = if was_there {
                    "the lab is down; nothing of it is left"
                } else {
                    "there was no lab, and nothing left of one"
                };
                told.to_owned()
            })?;
            Ok(Exit::Ok)
        }
        LabCommand::Status(place) => {
            let lab = status(&name(&place))?;
            output.result(&lab, || lab.to_string())?;
            Ok(if lab.up { Exit::Ok } else { Exit::Failure })
        }
        LabCommand::Guest { vm, address, command, .. } => {
            guest::run(&vm, address, &command, hosts, only, output)
        }
        LabCommand::Daemon { kind, config } => {
            let kind: DaemonKind = kind.parse()?;
            daemon::run(kind, &config)?;
            Ok(Exit::Ok)
        }
    }
}

fn name(place: &LabPlace) -> LabName {
    LabName {
        prefix: place.prefix.clone().unwrap_or_else(|| DEFAULT_PREFIX.to_owned()),
        state_dir: place.state_dir.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_STATE_DIR)),
    }
}

fn wanted(options: LabUpArgs) -> LabOptions {
    let LabName { prefix, state_dir } = name(&options.place);
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
        tracker: options.tracker,
        insecure: options.insecure,
        hooks: Hooks::default(),
        replace: options.replace,
        place: 0,
        prefix,
        state_dir,
    }
}

/// The namespace of the lab's client, where a lab is up. `prober`: the socket of its prober, as the hosts file names
/// it; none: the default lab's.
pub(crate) fn client_namespace(prober: Option<&Path>) -> Option<String> {
    let state_dir = prober.and_then(Path::parent).unwrap_or(Path::new(DEFAULT_STATE_DIR));
    // What a lab is called is in its state.
    let name = LabName { prefix: DEFAULT_PREFIX.to_owned(), state_dir: state_dir.to_owned() };
    Some(status(&name).ok()?.client?.namespace)
}
