//! Check before a host is forgotten without `force`: its drain, its moves, and the VMs that it
//! runs.

use godwit_api::VmState;
use godwit_api::control::{DrainState, Problem, ProblemCode};
use godwit_planner::words::Count;

use crate::cluster::inventory::Inventory;
use crate::drains::Drains;
use crate::moves::Moves;

/// Most names that a refusal lists.
const MOST_NAMES: usize = 5;

/// Refuses to forget a host that is in use.
pub(crate) fn check_unused(
    host: &str,
    drains: &Drains,
    moves: &Moves,
    inventory: &Inventory,
) -> Result<(), Problem> {
    let remedy = format!(
        "wait for its end or cancel it; `godwit control host forget {host} --force` \
        (`?force=true`) ends it as failed"
    );
    let refused = |what: String, remedy: &str| {
        Problem::new(ProblemCode::WrongState, format!("host {host} {what}"), remedy)
    };
    if let Some((id, state)) = drains.of_host(host) {
        let does =
            if state == DrainState::Undoing { "is being refilled" } else { "is being drained" };
        return Err(refused(format!("{does} by drain {id}"), &remedy));
    }
    let moves: Vec<String> = {
        let all = moves.all();
        let is_its =
            |to: Option<&String>, from: &str| from == host || to.is_some_and(|to| to == host);
        let open = all.open().filter(|one| is_its(one.to.as_ref(), &one.from));
        open.map(|one| one.id.clone()).collect()
    };
    if !moves.is_empty() {
        let what = format!("has {}: {}", Count(moves.len(), "open move"), some(&moves));
        return Err(refused(what, &remedy));
    }
    let runs = |state: VmState| !state.is_off();
    let vms = inventory.vms_of(host).filter(|info| runs(info.state));
    let vms: Vec<String> = vms.map(|info| info.name.clone()).collect();
    if !vms.is_empty() && inventory.is_up(host) {
        let what = format!("is reachable and runs {}: {}", Count(vms.len(), "VM"), some(&vms));
        let remedy = format!(
            "drain it with `godwit host drain {host}`; with \
            `godwit control host forget {host} --force` (`?force=true`) they run on, and no \
            manager knows them"
        );
        return Err(refused(what, &remedy));
    }
    Ok(())
}

/// Returns the first of these names, and the number of the others.
fn some(names: &[String]) -> String {
    let first = names[..names.len().min(MOST_NAMES)].join(", ");
    match names.len().saturating_sub(MOST_NAMES) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
