//! Addresses of a machine's PCI devices, which a shadow VM gets before the pause.
//!
//! **Why.** QEMU maps a device's registers when it loads the state of the device, and after each
//! change it renders the whole address space again (`memory_region_transaction_commit`, QEMU 7.2 to
//! 10.0). A machine with many devices does that a hundred times while its guest is paused. If the
//! registers are where the state says, nothing is mapped and nothing rendered. So the shadow gets
//! the addresses of the source's devices while the guest still runs there.
//!
//! **Why it is safe.** The writes are those of a firmware that sets a machine up, over the ports
//! of PCI's configuration. They end before the first byte of the device state is loaded, and the
//! device state replaces all that they wrote: the whole configuration of each device is in it. An
//! address that is missing or outdated costs time, as it did before.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Most functions that are placed: more than a bus has devices.
const MOST_FUNCTIONS: usize = 256;
/// Base addresses of a function; the last is its ROM's.
const MOST_BARS: u8 = 7;
/// Deepest nesting of buses that is read.
const MOST_DEPTH: usize = 8;

/// Port that selects a register of the configuration, and port of its content (PCI 3.0, section
/// 3.2.2.3.2).
const ADDRESS_PORT: u16 = 0xcf8;
const DATA_PORT: u16 = 0xcfc;
/// Register of the command, of the first base address, and of a bridge's bus numbers.
const COMMAND: u8 = 0x04;
const FIRST_BAR: u8 = 0x10;
const BUSES: u8 = 0x18;
/// Bits of the command: the function decodes I/O, decodes memory, and accesses memory by itself.
const DECODES_IO: u32 = 1;
const DECODES_MEMORY: u32 = 2;
const IS_MASTER: u32 = 4;

/// A function of a PCI device that is mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciFunction {
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
    /// Mapped base addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bars: Vec<PciBar>,
    /// Secondary and subordinate bus of a bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buses: Option<(u8, u8)>,
}

/// A mapped base address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciBar {
    /// Number, below 6.
    pub bar: u8,
    pub address: u64,
    /// It is in the I/O ports.
    #[serde(default)]
    pub io: bool,
    /// It has 64 bits, and takes the next number too.
    #[serde(default)]
    pub wide: bool,
}

/// A write to an I/O port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PortWrite {
    port: u16,
    /// HMP's letter of its size: `w` is 4 bytes, `h` is 2.
    size: char,
    value: u32,
}

impl PciFunction {
    /// Whether it is one that a machine can have.
    fn is_valid(&self) -> bool {
        let fits = |bar: &PciBar| bar.bar.saturating_add(bar.wide.into()) < MOST_BARS - 1;
        self.device < 32
            && self.function < 8
            && self.bars.len() < usize::from(MOST_BARS)
            && self.bars.iter().all(fits)
    }

    /// Returns the writes that place it: its buses and addresses, then what it decodes.
    fn writes(&self) -> Vec<PortWrite> {
        let select = |register: u8| {
            let place = u32::from(self.bus) << 16
                | u32::from(self.device) << 11
                | u32::from(self.function) << 8;
            let value = 1 << 31 | place | u32::from(register);
            PortWrite { port: ADDRESS_PORT, size: 'w', value }
        };
        let write = |register: u8, value: u32| {
            [select(register), PortWrite { port: DATA_PORT, size: 'w', value }]
        };
        let mut writes = Vec::new();
        if let Some((secondary, subordinate)) = self.buses {
            let numbers = [self.bus, secondary, subordinate, 0];
            writes.extend(write(BUSES, u32::from_le_bytes(numbers)));
        }
        let mut command = IS_MASTER;
        for PciBar { bar, address, io, wide } in &self.bars {
            let register = FIRST_BAR + 4 * *bar;
            #[expect(clippy::cast_possible_truncation, reason = "the two halves of an address")]
            let (low, high) = (*address as u32, (address >> 32) as u32);
            writes.extend(write(register, low));
            if *wide {
                writes.extend(write(register + 4, high));
            }
            command |= if *io { DECODES_IO } else { DECODES_MEMORY };
        }
        writes.extend([select(COMMAND), PortWrite { port: DATA_PORT, size: 'h', value: command }]);
        writes
    }
}

/// Collects the functions of `query-pci`, bridges before what is behind them.
fn collect(devices: &Value, depth: usize, into: &mut Vec<PciFunction>) {
    for device in devices.as_array().into_iter().flatten() {
        let number = |value: &Value| value.as_u64().and_then(|number| u8::try_from(number).ok());
        let place = number(&device["bus"]).zip(number(&device["slot"]));
        let Some(((bus, slot), function)) = place.zip(number(&device["function"])) else {
            continue;
        };
        let regions = device["regions"].as_array().into_iter().flatten();
        let bars = regions.filter_map(|region| {
            // -1: not mapped.
            let address = region["address"].as_u64().filter(|address| *address < u64::MAX)?;
            // The ROM's address takes effect by a bit of its own.
            let bar = number(&region["bar"]).filter(|bar| *bar < MOST_BARS - 1)?;
            let wide = region["mem_type_64"].as_bool().unwrap_or_default();
            Some(PciBar { bar, address, io: region["type"] == "io", wide })
        });
        let bridge = &device["pci_bridge"];
        let secondary = number(&bridge["bus"]["secondary"]);
        let buses = secondary.zip(number(&bridge["bus"]["subordinate"]));
        let found = PciFunction { bus, device: slot, function, bars: bars.collect(), buses };
        if (buses.is_some() || !found.bars.is_empty()) && into.len() < MOST_FUNCTIONS {
            into.push(found);
        }
        if depth < MOST_DEPTH {
            collect(&bridge["devices"], depth + 1, into);
        }
    }
}

impl Qmp {
    /// Returns the functions of the machine's PCI devices that are mapped. Empty for a machine
    /// without PCI.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn pci_functions(&self) -> Result<Vec<PciFunction>, QmpError> {
        let buses = self.execute("query-pci", Value::Null).await?;
        let mut found = Vec::new();
        for bus in buses.as_array().into_iter().flatten() {
            collect(&bus["devices"], 0, &mut found);
        }
        Ok(found)
    }

    /// Places the functions of the PCI devices of a machine whose guest has not been loaded.
    /// Functions that no machine can have are left out.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]. The rest is not placed.
    pub async fn place_pci_functions(&self, functions: &[PciFunction]) -> Result<(), QmpError> {
        let valid = functions.iter().take(MOST_FUNCTIONS).filter(|function| function.is_valid());
        for PortWrite { port, size, value } in valid.flat_map(PciFunction::writes) {
            let line = format!("o /{size} {port:#x} {value:#x}");
            self.execute("human-monitor-command", json!({ "command-line": line })).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(answer: &Value) -> Vec<PciFunction> {
        let mut found = Vec::new();
        collect(answer, 0, &mut found);
        found
    }

    #[test]
    fn mapped_functions_are_found_behind_bridges_too() {
        let disk = json!({
            "bus": 1, "slot": 0, "function": 0, "qdev_id": "disk0", "class_info": {"class": 256},
            "regions": [
                {"bar": 1, "type": "memory", "address": 0xfe00_0000_u32, "size": 4096,
                 "prefetch": false, "mem_type_64": false},
                {"bar": 4, "type": "memory", "address": 0x8_0000_0000_u64, "size": 16384,
                 "prefetch": true, "mem_type_64": true},
                {"bar": 6, "type": "memory", "address": -1, "size": 4096},
            ],
        });
        let answer = json!([
            {"bus": 0, "slot": 0, "function": 0, "regions": []},
            {"bus": 0, "slot": 2, "function": 0,
             "regions": [{"bar": 0, "type": "io", "address": 0xc000, "size": 32}]},
            {"bus": 0, "slot": 30, "function": 1, "regions": [],
             "pci_bridge": {"bus": {"number": 0, "secondary": 1, "subordinate": 1},
                            "devices": [disk]}},
            {"bus": 700, "slot": "x"},
        ]);
        let found = functions(&answer);
        assert_eq!(found.len(), 3);
        assert_eq!(found[1].buses, Some((1, 1)));
        let bars: Vec<_> = found[2].bars.iter().map(|bar| (bar.bar, bar.wide)).collect();
        assert_eq!(bars, [(1, false), (4, true)]);
        assert!(found.iter().all(PciFunction::is_valid));
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<Vec<PciFunction>>(&text).unwrap(), found);
    }

    #[test]
    fn a_function_is_placed_by_its_configuration() {
        let bar = PciBar { bar: 4, address: 0x8_1000_0000, io: false, wide: true };
        let function =
            PciFunction { bus: 1, device: 3, function: 2, bars: vec![bar], buses: Some((2, 4)) };
        let values: Vec<u32> = function.writes().iter().map(|write| write.value).collect();
        let place = 0x8001_1a00;
        assert_eq!(
            values,
            [place | 0x18, 0x0004_0201, place | 0x20, 0x1000_0000, place | 0x24, 8, place | 4, 6]
        );
        let last = function.writes().pop().unwrap();
        assert_eq!((last.port, last.size), (0xcfc, 'h'));
    }

    #[test]
    fn functions_that_no_machine_has_are_left_out() {
        let bar = PciBar { bar: 5, address: 0, io: false, wide: true };
        let good = PciFunction { bus: 0, device: 1, function: 0, bars: Vec::new(), buses: None };
        assert!(good.is_valid());
        let bad = [
            PciFunction { device: 32, ..good.clone() },
            PciFunction { function: 8, ..good.clone() },
            PciFunction { bars: vec![bar], ..good.clone() },
            PciFunction { bars: vec![PciBar { bar: u8::MAX, ..bar }], ..good.clone() },
            PciFunction { bars: vec![PciBar { bar: 0, ..bar }; 7], ..good.clone() },
        ];
        assert!(!bad.iter().any(PciFunction::is_valid));
    }
}
