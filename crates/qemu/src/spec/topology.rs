//! The devices of a VM that another program defined, at the addresses that its guest knows.
//!
//! A VM that was adopted keeps them for as long as it exists: QEMU loads a guest's state only into
//! the same devices. Memory, images, networks and sockets are not part of a topology: it has places
//! for them, and the specification says what is there. A topology may come from a user or from a
//! peer, so [`Topology::check`] applies the rules of an adoption to it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::spec::error::SpecError;

pub(crate) mod allowed;
mod properties;

pub use properties::Properties;

/// Most parts of a topology.
pub(crate) const MOST_PARTS: usize = 1024;
/// Longest ID of an object of QEMU.
const MOST_ID_BYTES: usize = 128;

/// Parts of a machine in the order in which QEMU gets them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Topology {
    pub parts: Vec<Part>,
}

/// One part of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Part {
    /// Options of `-machine` behind its type.
    Machine(String),
    /// An option with its value, if it has one.
    Option { name: String, value: Option<String> },
    /// A device without an image.
    Device(Properties),
    /// An object that is no memory.
    Object(Properties),
    /// Place of a memory block.
    Memory {
        /// Its index in the specification.
        block: usize,
        /// Its name in QEMU and in a migration stream.
        id: String,
        /// Value of `x-use-canonical-path-for-ramblock-id`, which changes that name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        canonical: Option<bool>,
        /// Whether the machine takes it as its only memory.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        whole: bool,
    },
    /// Device of a disk, without its `drive`.
    Disk { disk: usize, device: Properties },
    /// Device of a CD-ROM drive, without its `drive`.
    Cdrom { drive: usize, device: Properties },
    /// Place of a NIC's tap.
    Netdev { nic: usize, id: String },
    /// Place of a serial port, from 1.
    Serial {
        port: u32,
        id: String,
        /// Whether QEMU itself chooses the device (`-serial`).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        implied: bool,
    },
    /// Place of the guest agent's socket.
    GuestAgent { id: String },
    /// A channel that nothing uses any more.
    Silent { id: String },
    /// Sound that nobody hears.
    Audio { id: String },
}

/// What a specification has that needs a place in its topology.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) memory: usize,
    pub(super) disks: usize,
    pub(super) cdroms: usize,
    pub(super) nics: usize,
    pub(super) serial_ports: u32,
}

/// Parts that devices refer to, by their IDs.
#[derive(Default)]
struct Places<'a> {
    memory: BTreeSet<&'a str>,
    netdevs: BTreeSet<&'a str>,
    chardevs: BTreeSet<&'a str>,
    audio: BTreeSet<&'a str>,
    objects: BTreeSet<String>,
}

impl Topology {
    /// Checks the topology as part of a specification.
    ///
    /// # Errors
    /// [`SpecError::Topology`]: the first error found.
    pub(super) fn check(&self, spec: Wanted) -> Result<(), SpecError> {
        let checked = self.check_size().and_then(|()| self.check_parts(spec));
        checked.map_err(|why| SpecError::Topology { why })
    }

    fn check_size(&self) -> Result<(), String> {
        if self.parts.len() > MOST_PARTS {
            return Err(format!("it has more than {MOST_PARTS} parts"));
        }
        Ok(())
    }

    fn check_parts(&self, spec: Wanted) -> Result<(), String> {
        let places = self.places()?;
        let (mut disks, mut drives, mut nics) = (Vec::new(), Vec::new(), Vec::new());
        let (mut blocks, mut ports, mut machines) = (Vec::new(), Vec::new(), 0);
        for part in &self.parts {
            match part {
                Part::Machine(options) => {
                    machines += 1;
                    allowed::check_machine(options)?;
                }
                Part::Option { name, value } => {
                    allowed::check_option(name, value.as_deref())?;
                    if name == "-numa" {
                        places.check_numa(value.as_deref().unwrap_or_default())?;
                    }
                }
                Part::Device(device) => {
                    allowed::check_device(device)?;
                    places.check_device(device)?;
                }
                Part::Object(object) => allowed::check_object(object)?,
                Part::Memory { block, .. } => blocks.push(*block),
                Part::Disk { disk: index, device } => {
                    disks.push(*index);
                    allowed::check_disk(device)?;
                    places.check_device(device)?;
                }
                Part::Cdrom { drive: index, device } => {
                    drives.push(*index);
                    allowed::check_device(device)?;
                    places.check_device(device)?;
                }
                Part::Netdev { nic, .. } => nics.push(*nic),
                Part::Serial { port, .. } => ports.push(*port as usize),
                Part::GuestAgent { .. } | Part::Silent { .. } | Part::Audio { .. } => {}
            }
        }
        if machines != 1 {
            return Err("it has not one machine".to_owned());
        }
        for (what, found, first, count) in [
            ("memory block", blocks, 0, spec.memory),
            ("disk", disks, 0, spec.disks),
            ("CD-ROM drive", drives, 0, spec.cdroms),
            ("NIC", nics, 0, spec.nics),
        ] {
            check_each_once(what, found, first, count)?;
        }
        let most_ports = ports.len();
        check_each_once("serial port", ports, 1, most_ports)?;
        if most_ports.max(1) != spec.serial_ports as usize {
            return Err("the number of its serial ports differs".to_owned());
        }
        Ok(())
    }

    /// Collects what devices may refer to.
    fn places(&self) -> Result<Places<'_>, String> {
        let mut places = Places::default();
        for part in &self.parts {
            let (known, id) = match part {
                Part::Memory { id, .. } => (&mut places.memory, id),
                Part::Netdev { id, .. } => (&mut places.netdevs, id),
                Part::Audio { id } => (&mut places.audio, id),
                Part::Serial { id, .. } | Part::GuestAgent { id } | Part::Silent { id } => {
                    (&mut places.chardevs, id)
                }
                Part::Object(object) => {
                    places.objects.extend(object.get("id"));
                    continue;
                }
                _ => continue,
            };
            let good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if id.is_empty() || id.len() > MOST_ID_BYTES || !id.chars().all(good) {
                return Err(format!("\"{id}\" is not a valid ID"));
            }
            if !known.insert(id) {
                return Err(format!("two parts have ID {id}"));
            }
        }
        Ok(places)
    }

    /// Returns the IDs of the serial ports' channels, in their order, each with whether QEMU
    /// chooses the device.
    pub(crate) fn serial_ports(&self) -> Vec<(&str, bool)> {
        let mut ports: Vec<(u32, &str, bool)> = Vec::new();
        for part in &self.parts {
            if let Part::Serial { port, id, implied } = part {
                ports.push((*port, id, *implied));
            }
        }
        ports.sort_by_key(|(port, ..)| *port);
        ports.into_iter().map(|(_, id, implied)| (id, implied)).collect()
    }
}

impl Places<'_> {
    fn check_device(&self, device: &Properties) -> Result<(), String> {
        let driver = device.get("driver").unwrap_or_default();
        let known = |kind: &str, id: &str| match kind {
            "netdev" => self.netdevs.contains(id),
            "chardev" => self.chardevs.contains(id),
            "audiodev" => self.audio.contains(id),
            "rng" | "iothread" => self.objects.contains(id),
            // The place of an image is filled in later.
            "drive" => false,
            _ => true,
        };
        match device.fields().iter().find(|(key, value)| !known(key, value)) {
            Some((key, value)) => Err(format!("device {driver} has an unknown {key} \"{value}\"")),
            None => Ok(()),
        }
    }

    fn check_numa(&self, value: &str) -> Result<(), String> {
        let memdev = Properties::parse(value, "type")?.get("memdev");
        match memdev.filter(|id| !self.memory.contains(id.as_str())) {
            Some(id) => Err(format!("a node has unknown memory \"{id}\"")),
            None => Ok(()),
        }
    }
}

/// Checks that each of `count` things, counted from `first`, has one place.
fn check_each_once(
    what: &str,
    mut found: Vec<usize>,
    first: usize,
    count: usize,
) -> Result<(), String> {
    found.sort_unstable();
    if found.into_iter().eq(first..first + count) {
        return Ok(());
    }
    Err(format!("not each {what} has one place in it"))
}
