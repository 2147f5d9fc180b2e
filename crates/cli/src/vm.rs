//! Implements `godwit vm`.

mod adopt;
mod asked;
mod clones;
mod cloud_init;
mod console;
mod create;
mod drives;
mod guest;
pub(crate) mod imports;
pub(crate) mod managed;
mod screen;
mod set;
mod settings;
mod snapshots;

use std::collections::BTreeSet;
use std::io::Write;

use godwit_api::{
    ChangeDrive, Client, CreateVm, DriveChange, LogSource, LogStream, RenameVm, SetTemplate,
    StopVm, VmInfo,
};
use godwit_qemu::{CloudInit, Nic, NicModel, VmSpec};
use godwit_types::Fault;
use serde_json::json;

use crate::args::{CreateArgs, DeleteArgs, SetArgs, VmCommand};
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, fields, table};
use crate::units::byte_count;

pub(crate) async fn run(
    command: VmCommand,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        VmCommand::Create(options) => create_at_host(&options, hosts, only, output).await,
        // main has handled it.
        VmCommand::Preflight(_) => Ok(Exit::Ok),
        VmCommand::Adopt(args) => adopt::at_host(&args, hosts, only, output).await,
        VmCommand::List { labels, .. } if !labels.is_empty() => Err(Failure::usage(
            "cannot select VMs by label: a host has no labels",
            "name a manager (--manager, or [manager] in the hosts file), and no --host; a host \
             selects by --tag",
        )),
        VmCommand::List { tags, all, .. } => list((&tags, all), hosts, only, output).await,
        VmCommand::Show { name } => {
            let found = hosts.find(&name, only, output).await?;
            let guest = match guest::is_asked(&found.vm) {
                // An agent of an older release does not know the request.
                true => found.client.guest(&name).await.ok(),
                false => None,
            };
            guest::show(&found.vm, guest.as_ref(), output)?;
            Ok(Exit::Ok)
        }
        VmCommand::Start { .. }
        | VmCommand::Stop(_)
        | VmCommand::Restart(_)
        | VmCommand::Reset { .. }
        | VmCommand::Suspend { .. }
        | VmCommand::Rename { .. } => change_state(command, hosts, only, output).await,
        VmCommand::Freeze { .. } | VmCommand::Thaw { .. } | VmCommand::Nic(_) => {
            guest::run(command, hosts, only, output).await
        }
        VmCommand::Disk { command } => {
            change_drive(drives::of_disk(&command)?, hosts, only, output).await
        }
        VmCommand::Cdrom { command } => {
            change_drive(drives::of_cdrom(&command)?, hosts, only, output).await
        }
        VmCommand::Set(options) => set_at_host(&options, hosts, only, output).await,
        VmCommand::Clone(args) => clones::at_host(&args, hosts, only, output).await,
        VmCommand::Import(args) => {
            if let Some(name) = args.name.as_deref().filter(|_| !args.dry_run) {
                refuse_second(name, hosts, output).await?;
            }
            imports::import(&args, hosts, only, output).await
        }
        VmCommand::Export(args) => imports::export(&args, hosts, only, output).await,
        VmCommand::Template { name, off } => {
            let found = hosts.find(&name, only, output).await?;
            let request = SetTemplate { template: !off };
            print(&found.client.set_template(&name, request).await?, output)
        }
        VmCommand::Snapshot { command } => snapshots::at_host(&command, hosts, only, output).await,
        VmCommand::Delete(args) => delete(&args, hosts, only, output).await,
        VmCommand::Console { name, port } => {
            let found = hosts.find(&name, only, output).await?;
            let line = match port {
                Some(port) => found.client.serial_port(&name, port).await?,
                None => found.client.console(&name).await?,
            };
            console::open(console::Line::OfHost(line), &name, output).await
        }
        VmCommand::Screen(args) => {
            screen::show(&args, screen::Way::Hosts(hosts, only), output).await
        }
        VmCommand::Screenshot(args) => {
            screen::picture(&args, screen::Way::Hosts(hosts, only), output).await
        }
        VmCommand::Logs { name, follow, qemu, port } => {
            let found = hosts.find(&name, only, output).await?;
            let source = if qemu { LogSource::Qemu } else { LogSource::Console };
            let log = match port {
                Some(port) => found.client.serial_log(&name, port, follow).await?,
                None => found.client.log(&name, source, follow).await?,
            };
            copy_log(log).await
        }
    }
}

/// Creates a VM at a host, without a manager.
async fn create_at_host(
    options: &CreateArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    if !options.labels.is_empty() {
        return Err(Failure::usage(
            "cannot set labels: the VM is created without a manager",
            "name a manager (--manager, or [manager] in the hosts file), or omit --label",
        ));
    }
    let (spec, new_disks) = create::specification(options)?;
    refuse_second(&spec.name, hosts, output).await?;
    let (_, client) = hosts.one(only)?;
    let request = CreateVm { spec, start: options.start, vm_dirs_only: false, new_disks };
    let vm = client.create_vm(&request).await?;
    create::note_nearly_full(client, &vm, output).await;
    print(&vm, output)
}

/// Starts, stops, resets, suspends or renames a VM.
async fn change_state(
    command: VmCommand,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        // A single host knows nothing of baselines.
        VmCommand::Start { name, skip_preflight: _ } => {
            let found = hosts.find(&name, only, output).await?;
            print(&found.client.start_vm(&name).await?, output)
        }
        VmCommand::Stop(stop) => {
            let found = hosts.find(&stop.name, only, output).await?;
            let request = StopVm { force: stop.force, grace_ms: stop.grace_ms() };
            print(&found.client.stop_vm(&stop.name, request).await?, output)
        }
        VmCommand::Restart(stop) => {
            let found = hosts.find(&stop.name, only, output).await?;
            let request = StopVm { force: stop.force, grace_ms: stop.grace_ms() };
            print(&found.client.restart_vm(&stop.name, request).await?, output)
        }
        VmCommand::Reset { name } => {
            let found = hosts.find(&name, only, output).await?;
            print(&found.client.reset_vm(&name).await?, output)
        }
        VmCommand::Rename { name, new_name } => {
            let found = hosts.find(&name, only, output).await?;
            let request = RenameVm { name: new_name };
            print(&found.client.rename_vm(&name, &request).await?, output)
        }
        VmCommand::Suspend { name } => {
            let found = hosts.find(&name, only, output).await?;
            print(&found.client.suspend_vm(&name).await?, output)
        }
        _ => Ok(Exit::Ok),
    }
}

async fn set_at_host(
    options: &SetArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let change = set::of_host(options)?;
    let found = hosts.find(&options.name, only, output).await?;
    let vm = found.client.change_vm(&options.name, &change).await?;
    output.result(&vm, || describe(&vm))?;
    Ok(Exit::Ok)
}

async fn change_drive(
    (name, change): (&str, DriveChange),
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let found = hosts.find(name, only, output).await?;
    let request = ChangeDrive { change, vm_dirs_only: false };
    let vm = found.client.change_drive(name, &request).await?;
    output.result(&vm, || describe(&vm))?;
    Ok(Exit::Ok)
}

/// Checks that a VM's name is unique among all hosts, which a single host cannot do. Unreachable
/// hosts are not checked.
async fn refuse_second(name: &str, hosts: &Hosts, output: Output) -> Result<(), Failure> {
    match hosts.find(name, None, output).await {
        Ok(found) => Err(Failure {
            exit: Exit::Conflict,
            fault: Fault::new(
                "already-exists",
                format!(
                    "cannot create VM \"{name}\": host {} already has a VM of that name",
                    found.host
                ),
                "choose another name, or delete that VM first",
            ),
        }),
        Err(failure) if failure.exit == Exit::Conflict => Err(failure),
        Err(_) => Ok(()),
    }
}

fn print(vm: &VmInfo, output: Output) -> Result<Exit, Failure> {
    output.result(vm, || match vm.in_doubt {
        true => format!(
            "VM {} on host {} is still in doubt, and has no process there",
            vm.name, vm.host
        ),
        false => format!("VM {} on host {} is {}", vm.name, vm.host, vm.state),
    })?;
    Ok(Exit::Ok)
}

async fn list(
    (tags, all): (&[String], bool),
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let (answers, silent) = hosts.ask_all(only, output, Client::vms).await?;
    let mut vms: Vec<VmInfo> = answers.into_iter().flat_map(|(_, vms)| vms).collect();
    vms.retain(|vm| settings::has_tags(&vm.spec.tags, tags));
    vms.sort_by(|a, b| (&a.name, &a.host).cmp(&(&b.name, &b.host)));
    let as_table = || {
        let rows: Vec<Vec<String>> = vms.iter().map(row).collect();
        table(&["name", "host", "state", "memory", "vcpus", "accel", "addresses", "tags"], &rows)
    };
    if all {
        // An agent of an older release, or without libvirt, has none.
        let (foreign, _) = hosts.ask_all(only, output, Client::foreign_guests).await?;
        let foreign = adopt::by_host(foreign);
        output.result(&json!({ "vms": vms, "foreign": foreign }), || {
            format!("{}{}", as_table(), adopt::foreign_table(&foreign))
        })?;
    } else {
        output.result(&vms, as_table)?;
    }
    Ok(if silent.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

fn row(vm: &VmInfo) -> Vec<String> {
    vec![
        vm.name.clone(),
        vm.host.clone(),
        state(vm),
        byte_count(vm.memory_bytes),
        vm.vcpus.to_string(),
        vm.accel.clone(),
        addresses(vm),
        settings::tags(&vm.spec.tags),
    ]
}

/// Formats the state of a VM; "in doubt" takes precedence.
fn state(vm: &VmInfo) -> String {
    if vm.in_doubt { format!("in doubt ({})", vm.state) } else { vm.state.to_string() }
}

fn addresses(vm: &VmInfo) -> String {
    vm.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Describes the small devices of a VM.
fn helpers(spec: &VmSpec) -> Vec<(&'static str, String)> {
    let rng = spec.rng.then(|| ("rng", "virtio".to_owned()));
    let reports = spec.free_page_reporting == Some(true);
    let reports = reports.then(|| ("free memory", "reported by the guest".to_owned()));
    let watchdog = spec.watchdog.map(|watchdog| ("watchdog", watchdog.to_string()));
    let panics = spec.panic_device == Some(true);
    let panics = panics.then(|| ("panic device", "pvpanic".to_owned()));
    [rng, reports, watchdog, panics].into_iter().flatten().collect()
}

fn describe(vm: &VmInfo) -> String {
    let mut lines = vec![("vm", vm.name.clone()), ("host", vm.host.clone()), ("state", state(vm))];
    if let Some(reason) = &vm.reason {
        lines.push(("reason", reason.clone()));
    }
    if vm.in_doubt {
        let remedy = format!(
            "start the other host's agent or repair the link: the hosts then resolve it within \
             seconds. If the other host is lost permanently, power it off, then run \
             `godwit migration resolve {} --runs-on {}`",
            vm.name, vm.host
        );
        lines.push(("what to do", remedy));
    }
    lines.extend(settings::lines(&vm.spec));
    lines.extend(settings::last_crash(vm));
    if let Some(migration) = &vm.migration {
        lines.push(("migration", migration.clone()));
    }
    if let Some(page_in) = &vm.page_in {
        let comes =
            if page_in.connected { "arriving" } else { "the source is unreachable at the moment" };
        lines.push(("missing pages", format!("{}, {comes}", page_in.missing_pages)));
    }
    if vm.frozen_until_ms.is_some() {
        lines.push(("file systems", format!("frozen, {}", guest::frozen(vm))));
    }
    if vm.spec.refuses_page_in {
        lines.push(("page-in", "refused".to_owned()));
    }
    if !vm.incarnation.is_unrecorded() {
        lines.push(("incarnation", vm.incarnation.to_string()));
    }
    lines.extend([
        ("epoch", vm.epoch.to_string()),
        ("process", vm.pid.map_or_else(|| "none".to_owned(), |pid| pid.to_string())),
        (
            "memory",
            up_to(
                byte_count(vm.memory_bytes),
                vm.spec.max_memory.map(|most| byte_count(most.bytes())),
            ),
        ),
        ("vcpus", up_to(vm.vcpus.to_string(), vm.spec.max_cpus)),
        ("cpu", vm.spec.cpu_model.clone().unwrap_or_default()),
        ("machine", vm.machine.clone()),
        ("firmware", vm.spec.firmware.to_string()),
        ("tpm", if vm.spec.tpm { "2.0" } else { "none" }.to_owned()),
        ("video", vm.spec.video.to_string()),
        ("accel", vm.accel.clone()),
    ]);
    lines.extend(devices(vm));
    fields(&lines)
}

/// Returns the lines of a VM's devices and of what it boots with.
fn devices(vm: &VmInfo) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(kernel) = &vm.spec.kernel {
        lines.push(("kernel", kernel.display().to_string()));
    }
    if vm.spec.hotplug_slots > 0 {
        lines.push(("hotplug slots", vm.spec.hotplug_slots.to_string()));
    }
    for disk in &vm.spec.disks {
        let access = if disk.readonly { ", read only" } else { "" };
        let (format, bus) = (disk.format.name(), disk.bus.name());
        lines.push(("disk", format!("{} ({format}, {bus}{access})", disk.path.display())));
    }
    for drive in &vm.spec.cdroms {
        let image = drive.image.as_ref().map(|image| image.display().to_string());
        lines.push(("cd-rom", image.unwrap_or_else(|| "empty".to_owned())));
    }
    for nic in &vm.spec.nics {
        lines.push(("nic", nic_text(nic)));
    }
    if vm.spec.serial_ports > 1 {
        lines.push(("serial ports", vm.spec.serial_ports.to_string()));
    }
    lines.extend(helpers(&vm.spec));
    if let Some(settings) = &vm.spec.cloud_init {
        lines.push(("cloud-init", first_boot(settings)));
    }
    lines
}

/// Returns a value with what it may become while the VM runs.
fn up_to(value: String, most: Option<impl std::fmt::Display>) -> String {
    match most {
        Some(most) => format!("{value}, up to {most}"),
        None => value,
    }
}

fn nic_text(nic: &Nic) -> String {
    let mut text = format!("{}, {}", nic.network, nic.mac.as_deref().unwrap_or_default());
    let settings = [
        nic.address.map(|address| address.to_string()),
        (nic.model == NicModel::E1000e).then(|| "e1000e".to_owned()),
        nic.queues.map(|queues| format!("{queues} queues")),
        nic.mtu.map(|mtu| format!("MTU {mtu}")),
        (!nic.link.is_up()).then(|| "link down".to_owned()),
        nic.vlan.map(|vlan| format!("VLAN {vlan}")),
        (!nic.trunk.is_empty()).then(|| format!("trunk {}", joined(&nic.trunk))),
        nic.filter.map(|filter| format!("filter {filter}")),
        (!nic.addresses.is_empty()).then(|| format!("addresses {}", joined(&nic.addresses))),
        nic.boot_order.map(|order| format!("boot order {order}")),
        nic.slot.map(|slot| format!("slot {slot}")),
    ];
    for setting in settings.into_iter().flatten() {
        text.push_str(", ");
        text.push_str(&setting);
    }
    text
}

fn joined<T: ToString>(items: &BTreeSet<T>) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}

/// Lists what cloud-init in the guest gets.
fn first_boot(settings: &CloudInit) -> String {
    let mut parts = Vec::new();
    parts.extend(settings.user.as_ref().map(|user| format!("user {user}")));
    parts.extend(settings.hostname.as_ref().map(|name| format!("host name {name}")));
    match settings.ssh_keys.len() {
        0 => {}
        1 => parts.push("1 SSH key".to_owned()),
        keys => parts.push(format!("{keys} SSH keys")),
    }
    parts.extend(settings.password_hash.as_ref().map(|_| "a password".to_owned()));
    for network in &settings.network {
        let addresses: Vec<String> = network.addresses.iter().map(ToString::to_string).collect();
        parts.push(if addresses.is_empty() { "dhcp".to_owned() } else { addresses.join(" ") });
    }
    parts.extend(settings.user_data.as_ref().map(|_| "user data".to_owned()));
    if parts.is_empty() { "defaults".to_owned() } else { parts.join(", ") }
}

async fn delete(
    args: &DeleteArgs,
    hosts: &Hosts,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let DeleteArgs { name, force, delete_disks, yes } = args;
    let found = hosts.find(name, only, output).await?;
    let images = match delete_disks {
        true => Some(found.client.images_of_vm(name).await?),
        false => None,
    };
    if let Some(images) = images.as_ref().filter(|_| !yes) {
        clones::confirm(name, images, output)?;
    }
    let has_process = !found.vm.state.is_off();
    if *force && has_process && !found.vm.in_doubt {
        found.client.stop_vm(name, StopVm { force: true, grace_ms: None }).await?;
    }
    if *force {
        found.client.give_up_vm(name).await?;
    } else {
        found.client.delete_vm(name).await?;
    }
    let images = match images {
        Some(images) => Some(found.client.delete_images(images).await),
        None => None,
    };
    let done = json!({ "deleted": name, "host": found.host, "images": images });
    output.result(&done, || {
        let first = format!("VM {name} on host {} is deleted", found.host);
        clones::with_images(first, images.as_ref())
    })?;
    Ok(Exit::Ok)
}

async fn copy_log(mut log: LogStream) -> Result<Exit, Failure> {
    loop {
        let piece = tokio::select! {
            piece = log.next() => piece?,
            _ = tokio::signal::ctrl_c() => return Ok(Exit::Ok),
        };
        let Some(piece) = piece else { return Ok(Exit::Ok) };
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(&piece).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(Exit::Ok),
            other => other?,
        }
    }
}
