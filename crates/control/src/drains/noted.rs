//! Journal entries about drains of hosts.

use godwit_api::control::{DrainState, DrainVmState, JournalKind};

use super::state::HostDrain;
use crate::journal::entries::NewEntry;

/// Returns the entry about a drain whose state changes; `before` is its state until now.
pub(super) fn of(id: &str, before: Option<DrainState>, drain: &HostDrain) -> Option<NewEntry> {
    use JournalKind::{DrainEnded, DrainStarted};
    let HostDrain { host, state, asked_by, .. } = drain;
    if before == Some(*state) {
        return None;
    }
    let (kind, text) = match state {
        DrainState::Planned => return None,
        DrainState::Running => (DrainStarted, "is being drained, and is in maintenance mode"),
        DrainState::Undoing => (DrainStarted, "gets the VMs of its drain back"),
        DrainState::Done => (DrainEnded, "is drained"),
        DrainState::Cancelled => (DrainEnded, "is no longer drained: the drain was cancelled"),
        DrainState::Undone => (DrainEnded, "has the VMs of its drain back"),
    };
    let staying = drain.outcome.iter().filter(|vm| vm.state == DrainVmState::Stays).count();
    let text = match staying {
        0 => format!("host {host} {text}"),
        staying => format!("host {host} {text}; {staying} VMs stay there"),
    };
    let entry =
        if staying > 0 { NewEntry::warning(kind, text) } else { NewEntry::info(kind, text) };
    let entry = entry.about("host", host).about("drain", id);
    // Another user may have cancelled it.
    Some(if *state == DrainState::Cancelled { entry } else { entry.by(asked_by) })
}
