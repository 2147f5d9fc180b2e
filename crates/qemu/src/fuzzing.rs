//! Entry points of the fuzz targets. Not a public interface.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use serde::Deserialize;
use serde_json::Value;

use crate::commands::{MigrateInfo, MigrationStatus, RunState};
use crate::qmp::message::{self, Message};
use crate::qmp::{Lines, QmpEvent};
use crate::spec::{Disk, DiskFormat};

/// Reads everything that QEMU sends on a connection, and parses each response as one to every
/// command. Returns the number of lines.
#[must_use]
pub fn read_qmp(mut bytes: &[u8]) -> usize {
    let mut lines = Lines::new(&mut bytes);
    let mut count = 0;
    loop {
        let next = pin!(lines.next());
        // The bytes are in memory, so reading never waits.
        let Poll::Ready(Ok(line)) = next.poll(&mut Context::from_waker(Waker::noop())) else {
            return count;
        };
        count += 1;
        match message::parse(line) {
            Ok(Message::Event { name, data, emitted }) => {
                let event = QmpEvent { name, data, at: std::time::Instant::now(), emitted };
                let _ = MigrationStatus::of_event(&event).map(|status| status.name());
            }
            Ok(Message::Answer { result: Ok(value), .. }) => read_answer(&value),
            Ok(Message::Greeting | Message::Answer { .. } | Message::Unknown) => {}
            Err(_) => return count,
        }
    }
}

fn read_answer(value: &Value) {
    let _ = MigrateInfo::deserialize(value);
    let _ = crate::cpu::is_answer(value);
    let disk = Disk::new("/d", DiskFormat::Raw);
    let _ = crate::counters::of_disks(value, &[disk.into()]);
    if let Some(state) = value.get("status").and_then(|status| RunState::deserialize(status).ok()) {
        let _ = state.is_running();
    }
}

/// Reads a line of a guest's agent as the answer to each question. Returns the number of addresses.
#[must_use]
pub fn read_guest_answer(line: &[u8]) -> usize {
    let Ok(answer) = crate::guest_agent::returned(line, "") else { return 0 };
    let _ = crate::guest_agent::text(&answer["host-name"]);
    let _ = crate::guest_agent::os_name(&answer);
    let interfaces = crate::guest_agent::interfaces(&answer);
    interfaces.iter().map(|interface| interface.addresses.len()).sum()
}

/// Reads the head of a qcow2 image; `None` if it has no backing file or cannot be used.
#[must_use]
pub fn backing_file(head: &[u8]) -> Option<String> {
    crate::launch::backing(head).ok()?.map(|backing| backing.file)
}
