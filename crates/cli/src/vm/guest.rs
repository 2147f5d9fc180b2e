//! What a VM's guest reports, the freeze of its file systems, and the links of its NICs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_api::{FreezeVm, GuestInfo, NicChange, SetNicLink, VmInfo};
use serde::Serialize;

use super::create::nic;
use super::describe;
use crate::args::{NicCommand, VmCommand};
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, fields};

/// Carries out a command by the agent of the VM's host.
pub(super) async fn run(
    command: VmCommand,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        VmCommand::Freeze { name, time } => {
            let found = hosts.find(&name, only, output).await?;
            print_frozen(&found.client.freeze_vm(&name, freeze_for(time)).await?, output)
        }
        VmCommand::Nic(NicCommand::Link { name, nic, link }) => {
            let found = hosts.find(&name, only, output).await?;
            let vm = found.client.set_link(&name, SetNicLink { nic, link }).await?;
            print_link(&vm, nic, output)?;
            Ok(Exit::Ok)
        }
        VmCommand::Nic(command) => {
            let Some((name, change)) = nic_change(&command)? else { return Ok(Exit::Ok) };
            let found = hosts.find(name, only, output).await?;
            let vm = found.client.change_nic(name, &change).await?;
            output.result(&vm, || describe(&vm))?;
            Ok(Exit::Ok)
        }
        VmCommand::Thaw { name } => {
            let found = hosts.find(&name, only, output).await?;
            print_frozen(&found.client.thaw_vm(&name).await?, output)
        }
        _ => Ok(Exit::Ok),
    }
}

/// Returns the VM and the change of its NICs; `None` for another command.
pub(super) fn nic_change(command: &NicCommand) -> Result<Option<(&str, NicChange)>, Failure> {
    Ok(match command {
        NicCommand::Attach { name, nic: text } => {
            Some((name, NicChange::Attach { nic: nic(text)? }))
        }
        NicCommand::Detach { name, mac } => Some((name, NicChange::Detach { mac: mac.clone() })),
        NicCommand::Link { .. } => None,
    })
}

/// Whether a VM's guest can be asked for its addresses.
pub(super) fn is_asked(vm: &VmInfo) -> bool {
    vm.spec.guest_agent && vm.pid.is_some()
}

/// A VM, with what its guest reports.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    vm: &'a VmInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    guest: Option<&'a GuestInfo>,
}

pub(super) fn show(vm: &VmInfo, guest: Option<&GuestInfo>, output: Output) -> Result<(), Failure> {
    output.result(&Shown { vm, guest }, || {
        let guest = guest.map(describe_guest).unwrap_or_default();
        format!("{}{guest}", describe(vm))
    })
}

fn describe_guest(guest: &GuestInfo) -> String {
    let mut lines = vec![(
        "guest agent",
        match (&guest.problem, &guest.agent_version) {
            (Some(problem), _) => problem.clone(),
            (None, Some(version)) => format!("answers (version {version})"),
            (None, None) => "answers".to_owned(),
        },
    )];
    for (name, value) in
        [("guest name", &guest.host_name), ("guest os", &guest.os), ("guest kernel", &guest.kernel)]
    {
        if let Some(value) = value {
            lines.push((name, value.clone()));
        }
    }
    for nic in &guest.interfaces {
        let mac = nic.mac.as_deref().unwrap_or("no hardware address");
        lines.push(("guest nic", format!("{}, {mac}: {}", nic.name, nic.addresses.join(" "))));
    }
    format!("\n{}", fields(&lines))
}

/// Makes the request for a freeze of that time.
pub(super) fn freeze_for(time: Duration) -> FreezeVm {
    FreezeVm { for_ms: Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)) }
}

pub(super) fn print_frozen(vm: &VmInfo, output: Output) -> Result<Exit, Failure> {
    output.result(vm, || match vm.frozen_until_ms {
        Some(_) => format!("VM {} on host {} is frozen: {}", vm.name, vm.host, frozen(vm)),
        None => format!("VM {} on host {} is not frozen", vm.name, vm.host),
    })?;
    Ok(Exit::Ok)
}

pub(super) fn print_link(vm: &VmInfo, nic: u8, output: Output) -> Result<(), Failure> {
    output.result(vm, || {
        let link = vm.spec.nics.get(usize::from(nic)).map(|nic| nic.link).unwrap_or_default();
        format!("the link of NIC {nic} of VM {} is {link}", vm.name)
    })
}

/// Says when a frozen guest is thawed.
pub(super) fn frozen(vm: &VmInfo) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let left_ms = u128::from(vm.frozen_until_ms.unwrap_or_default()).saturating_sub(now);
    format!("thawed in {} s at the latest", left_ms.div_ceil(1000))
}
