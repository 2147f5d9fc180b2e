//! QEMU's command line of a VM that was adopted: its topology, with what the specification has in
//! the places for memory, images, networks and sockets.

use serde_json::json;

use super::Launch;
use super::arguments::{
    Arguments, FIRST_FILE_SET, HUGE_PAGE_BYTES, Inherited, add_boot, add_cpu, add_image,
    add_medium, add_netdev,
};
use crate::drives;
use crate::firmware;
use crate::process::path_in_qemu;
use crate::spec::{MemoryBlock, Part, Properties, Topology};

impl Launch {
    pub(super) fn add_topology(
        &self,
        arguments: &mut Arguments,
        topology: &Topology,
        fds: &Inherited,
    ) {
        let spec = &self.spec;
        arguments.add("-m", format!("{}B", spec.memory_bytes()));
        add_cpu(arguments, spec);
        for (option, value) in fds
            .firmware
            .iter()
            .flat_map(|numbers| firmware::arguments(spec, *numbers, FIRST_FILE_SET))
        {
            arguments.add(option, value);
        }
        self.add_consoles(arguments, fds);
        if !spec.video.is_none() {
            arguments.add("-vnc", "none,share=force-shared");
        }
        for part in &topology.parts {
            self.add_part(arguments, (topology, part), fds);
        }
        add_boot(arguments, spec, fds);
    }

    fn add_part(
        &self,
        arguments: &mut Arguments,
        (topology, part): (&Topology, &Part),
        fds: &Inherited,
    ) {
        let spec = &self.spec;
        match part {
            Part::Machine(options) => {
                let options =
                    if options.is_empty() { String::new() } else { format!(",{options}") };
                let memory = topology.parts.iter().find_map(|part| match part {
                    Part::Memory { id, whole: true, .. } => Some(format!(",memory-backend={id}")),
                    _ => None,
                });
                let firmware = firmware::machine_options(spec.firmware);
                let memory = memory.unwrap_or_default();
                let machine = format!(
                    "{}{options},suppress-vmdesc=on,dump-guest-core=off,mem-merge=off{memory}\
                     {firmware}",
                    spec.machine
                );
                arguments.add("-machine", machine);
            }
            Part::Option { name, value: Some(value) } => arguments.add(name, value),
            Part::Option { name, value: None } => arguments.add_flag(name),
            Part::Device(device) => arguments.add("-device", self.own(topology, device).argument()),
            Part::Object(object) => arguments.add("-object", object.argument()),
            Part::Memory { block, id, canonical, .. } => {
                let (Some(memory), Some(number)) = (spec.memory.get(*block), fds.ram.get(*block))
                else {
                    return;
                };
                add_memory(arguments, memory, (id, *canonical), &path_in_qemu(*number));
            }
            Part::Disk { disk: index, device } => {
                let (Some(disk), Some(layers)) = (spec.disks.get(*index), fds.disks.get(*index))
                else {
                    return;
                };
                let name = drives::disk_name(&spec.disks, *index);
                let top = add_image(arguments, &name, (disk, layers), fds);
                arguments.add("-device", with(device, "drive", &top).argument());
            }
            Part::Cdrom { drive: index, device } => {
                let (drive, number) = (spec.cdroms.get(*index), fds.cdroms.get(*index));
                let medium = match (drive, number.copied().flatten()) {
                    (Some(drive), Some(number)) => Some(add_medium(arguments, drive, number)),
                    _ => None,
                };
                let device = match medium {
                    Some(medium) => with(device, "drive", &medium),
                    None => device.clone(),
                };
                arguments.add("-device", device.argument());
            }
            Part::Netdev { nic, id } => {
                if let Some((queues, vhosts)) = fds.taps.get(*nic) {
                    add_netdev(arguments, id, (queues, vhosts));
                }
            }
            // With the consoles.
            Part::Serial { .. } => {}
            Part::GuestAgent { id } => match fds.guest_agent {
                Some(number) => {
                    let socket = format!("socket,id={id},fd={number},server=on,wait=off");
                    arguments.add("-chardev", socket);
                }
                None => arguments.add("-chardev", format!("null,id={id}")),
            },
            Part::Silent { id } => arguments.add("-chardev", format!("null,id={id}")),
            Part::Audio { id } => arguments.add("-audiodev", format!("none,id={id}")),
        }
    }

    /// Returns a device with the hardware address that the specification has: a clone has others.
    fn own(&self, topology: &Topology, device: &Properties) -> Properties {
        let netdev = device.get("netdev");
        let nic = topology.parts.iter().find_map(|part| match part {
            Part::Netdev { nic, id } if Some(id) == netdev.as_ref() => self.spec.nics.get(*nic),
            _ => None,
        });
        nic.map_or_else(|| device.clone(), |nic| with(device, "mac", &nic.mac.to_string()))
    }
}

fn with(device: &Properties, key: &str, value: &str) -> Properties {
    let mut device = device.clone();
    device.set(key, value);
    device
}

fn add_memory(
    arguments: &mut Arguments,
    block: &MemoryBlock,
    (id, canonical): (&str, Option<bool>),
    path: &str,
) {
    let mut object = json!({
        "qom-type": "memory-backend-file", "id": id, "size": block.size.bytes(), "merge": false,
        "dump": false, "mem-path": path, "share": true, "prealloc": false,
    });
    if block.size.bytes() >= HUGE_PAGE_BYTES {
        object["align"] = HUGE_PAGE_BYTES.into();
    }
    if let Some(canonical) = canonical {
        object["x-use-canonical-path-for-ramblock-id"] = canonical.into();
    }
    arguments.add_json("-object", &object);
}
