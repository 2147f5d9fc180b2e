//! QEMU's trace of a migration: how long it took to write and to load each section of the device
//! state. Pure.
//!
//! A line is `PID@SECONDS.MICROSECONDS:EVENT ARGUMENTS` (QEMU's log backend with `-msg
//! timestamp=on`, 7.2 to 10.0).

use std::collections::BTreeMap;

/// Events that QEMU is to trace.
pub(super) const EVENTS: [&str; 4] = [
    "savevm_section_start",
    "savevm_section_end",
    "qemu_loadvm_state_section",
    "qemu_loadvm_state_section_startfull",
];

/// Times of a section, one for each process, in milliseconds.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Times {
    pub(super) saved_ms: Vec<f64>,
    pub(super) loaded_ms: Vec<f64>,
}

/// Adds the times of the sections in the trace of a process that loaded its guest once and wrote it
/// once. Those of several sections with one name are added up.
pub(super) fn add(trace: &str, times: &mut BTreeMap<String, Times>) {
    let (mut saved, mut loaded) = (BTreeMap::new(), BTreeMap::new());
    let mut writing: Option<(&str, f64)> = None;
    let mut loading: Option<(&str, f64)> = None;
    for (at_ms, event, arguments) in trace.lines().filter_map(event) {
        match event {
            "savevm_section_start" => {
                writing = arguments.split_once(", ").map(|(name, _)| (name, at_ms));
            }
            "savevm_section_end" => {
                if let Some((name, since)) = writing.take() {
                    *saved.entry(name).or_default() += at_ms - since;
                }
            }
            "qemu_loadvm_state_section_startfull" => {
                loading = named(arguments).map(|name| (name, at_ms));
            }
            // The next section begins, or the stream ends.
            "qemu_loadvm_state_section" => {
                if let Some((name, since)) = loading.take() {
                    *loaded.entry(name).or_default() += at_ms - since;
                }
            }
            _ => {}
        }
    }
    for (name, ms) in saved {
        times.entry(name.to_owned()).or_default().saved_ms.push(ms);
    }
    for (name, ms) in loaded {
        times.entry(name.to_owned()).or_default().loaded_ms.push(ms);
    }
}

/// Splits a line into its time in milliseconds, the event and the arguments.
fn event(line: &str) -> Option<(f64, &str, &str)> {
    let (head, rest) = line.split_once(':')?;
    let at_s: f64 = head.split_once('@')?.1.parse().ok()?;
    let (event, arguments) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((at_s * 1e3, event, arguments))
}

/// Returns the name in `ID(NAME) INSTANCE VERSION`.
fn named(arguments: &str) -> Option<&str> {
    let (_, rest) = arguments.split_once('(')?;
    Some(rest.rsplit_once(')')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_timed_on_both_sides() {
        let trace = "\
7@100.000000:savevm_section_start 0000:00:01.0/virtio-gpu, section_id 3
7@100.001500:savevm_section_end 0000:00:01.0/virtio-gpu, section_id 3 -> 0
not an event
8@100.010000:qemu_loadvm_state_section 4
8@100.010100:qemu_loadvm_state_section_startfull 3(0000:00:01.0/virtio-gpu) 0 2
8@100.012100:qemu_loadvm_state_section 4
8@100.012200:qemu_loadvm_state_section_startfull 4(timer) 0 2
8@100.012200:qemu_loadvm_state_section 4
8@100.012300:qemu_loadvm_state_section_startfull 5(timer) 1 2
8@100.012310:qemu_loadvm_state_section 0
";
        let mut times = BTreeMap::new();
        add(trace, &mut times);
        let of = |name: &str| -> Vec<String> {
            let times: &Times = &times[name];
            let both = times.saved_ms.iter().chain(&times.loaded_ms);
            both.map(|ms| format!("{ms:.2}")).collect()
        };
        assert_eq!(of("0000:00:01.0/virtio-gpu"), ["1.50", "2.00"]);
        assert_eq!(of("timer"), ["0.01"]);
    }
}
