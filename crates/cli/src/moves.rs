//! Moves and drains by the manager: `godwit control move`, `godwit host drain`.

use std::path::Path;
use std::time::Duration;

use godwit_api::control::{
    AuditEntry, CreateDrain, CreateMove, Drain, DrainState, DrainVmState, ManagerClient, Move, MoveState,
};

use crate::args::{DrainArgs, MoveCommand};
use crate::control::client;
use crate::exit::{Exit, Failure};
use crate::output::{Output, fields, spinner, table};
use crate::report::render;
use crate::units::byte_count;

/// How often the manager is asked how far something is.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

pub(crate) async fn run(
    command: MoveCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        MoveCommand::Create { vm, to, priority, engine, detach } => {
            let request =
                CreateMove { to, priority: priority.into(), engine: engine.into(), ..CreateMove::default() };
            let asked = manager.create_move(&vm, &request).await?;
            if detach {
                output.result(&asked, || move_fields(&asked))?;
                return Ok(Exit::Ok);
            }
            let over = follow_move(manager, asked, output).await?;
            output.result(&over, || match &over.report {
                Some(report) => format!("{}\n{}", move_fields(&over), render(report, output)),
                None => move_fields(&over),
            })?;
            return Ok(if over.state == MoveState::Done { Exit::Ok } else { Exit::Failure });
        }
        MoveCommand::List { all } => {
            let mut moves = manager.moves().await?;
            moves.retain(|one| all || !one.state.is_over());
            let rows: Vec<_> = moves.iter().map(move_row).collect();
            output.result(&moves, || table(&["id", "vm", "from", "to", "state", "because"], &rows))?;
        }
        MoveCommand::Show { id } => {
            let found = manager.find_move(&id).await?;
            output.result(&found, || move_fields(&found))?;
        }
        MoveCommand::Cancel { id } => {
            let asked = manager.cancel_move(&id).await?;
            output.result(&asked, || format!("move {id} is being called off"))?;
        }
    }
    Ok(Exit::Ok)
}

pub(crate) fn move_state(of: MoveState) -> &'static str {
    match of {
        MoveState::Waiting => "waiting",
        MoveState::Starting => "starting",
        MoveState::Running => "running",
        MoveState::Done => "done",
        MoveState::Failed => "failed",
        MoveState::Cancelled => "cancelled",
    }
}

/// What it waits for, how far it is, or why it failed.
pub(crate) fn because(one: &Move) -> String {
    if let Some(waits) = &one.waits {
        return waits.text.clone();
    }
    if let Some(progress) = one.progress.as_ref().filter(|_| !one.state.is_over()) {
        return format!("{}, {} left", progress.phase, byte_count(progress.remaining_bytes));
    }
    let failure = one.failure.as_ref();
    failure.map(|failure| format!("{} ({})", failure.message, failure.mend)).unwrap_or_default()
}

fn move_row(one: &Move) -> Vec<String> {
    let to = one.to.clone().unwrap_or_else(|| "-".to_owned());
    vec![one.id.clone(), one.vm.clone(), one.from.clone(), to, move_state(one.state).to_owned(), because(one)]
}

fn move_fields(one: &Move) -> String {
    let mut rows = vec![
        ("move", one.id.clone()),
        ("vm", one.vm.clone()),
        ("from", one.from.clone()),
        ("to", one.to.clone().unwrap_or_else(|| "not chosen yet".to_owned())),
        ("state", move_state(one.state).to_owned()),
    ];
    let why = |told: &Option<String>| told.clone().filter(|told| !told.is_empty());
    rows.extend(why(&one.to_reason).map(|reason| ("why there", reason)));
    rows.extend(why(&Some(because(one))).map(|reason| ("because", reason)));
    rows.extend(why(&one.drain).map(|drain| ("drain", drain)));
    if let Some(report) = &one.report {
        let took = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms"));
        rows.push(("took", took(Some(report.migration_time_ms))));
        rows.push(("switchover", took(report.switchover_ms)));
    }
    fields(&rows)
}

/// Until it is over, or the operator has seen enough: it goes on without them.
async fn follow_move(manager: &ManagerClient, asked: Move, output: Output) -> Result<Move, Failure> {
    let bar = spinner();
    let mut now = asked;
    while !now.state.is_over() {
        if let Some(bar) = &bar {
            bar.set_message(format!("{} {}: {}", now.vm, move_state(now.state), because(&now)));
            bar.tick();
        }
        if has_interrupted(LOOK_INTERVAL).await {
            output.note(&format!(
                "move {} goes on (godwit control move cancel {} calls it off)",
                now.id, now.id
            ));
            break;
        }
        now = manager.find_move(&now.id).await?;
    }
    Ok(now)
}

/// Whether Ctrl-C came before the time was over.
async fn has_interrupted(within: Duration) -> bool {
    tokio::time::timeout(within, tokio::signal::ctrl_c()).await.is_ok()
}

pub(crate) async fn drain(args: DrainArgs, hosts: Option<&Path>, output: Output) -> Result<Exit, Failure> {
    let manager = client(&args.place, hosts)?;
    let host = &args.of;
    let begun = if args.cancel || args.undo {
        let drains = manager.drains().await?;
        let last = drains.into_iter().rev().find(|drain| drain.host == *host);
        let Some(last) = last else {
            let message = format!("host {host} was not drained");
            return Err(Failure::new(Exit::NotFound, message, "see `godwit host drains`"));
        };
        if args.cancel { manager.cancel_drain(&last.id).await? } else { manager.undo_drain(&last.id).await? }
    } else {
        let request = CreateDrain {
            plan_only: args.plan,
            priority: args.priority.into(),
            engine: args.engine.into(),
            ..CreateDrain::default()
        };
        manager.create_drain(host, &request).await?
    };
    if args.plan || args.detach || args.cancel {
        output.result(&begun, || drain_text(&begun))?;
        return Ok(Exit::Ok);
    }
    let over = follow_drain(&manager, begun, output).await?;
    output.result(&over, || drain_text(&over))?;
    let all_went = over.state == DrainState::Undone
        || over.vms.iter().all(|vm| matches!(vm.state, DrainVmState::Gone | DrainVmState::Back));
    Ok(if all_went || !is_over(&over) { Exit::Ok } else { Exit::Failure })
}

pub(crate) async fn drains(manager: &ManagerClient, output: Output) -> Result<Exit, Failure> {
    let drains = manager.drains().await?;
    let row = |drain: &Drain| {
        let gone = count(drain, DrainVmState::Gone);
        let stays = count(drain, DrainVmState::Stays);
        vec![
            drain.id.clone(),
            drain.host.clone(),
            drain_state(drain.state).to_owned(),
            format!("{gone} of {}", drain.vms.len()),
            stays.to_string(),
            drain.asked_by.clone(),
        ]
    };
    let rows: Vec<_> = drains.iter().map(row).collect();
    output.result(&drains, || table(&["id", "host", "state", "gone", "stay", "asked by"], &rows))?;
    Ok(Exit::Ok)
}

fn is_over(drain: &Drain) -> bool {
    matches!(drain.state, DrainState::Done | DrainState::Cancelled | DrainState::Undone | DrainState::Planned)
}

fn count(drain: &Drain, state: DrainVmState) -> usize {
    drain.vms.iter().filter(|vm| vm.state == state).count()
}

pub(crate) fn drain_state(of: DrainState) -> &'static str {
    match of {
        DrainState::Planned => "planned",
        DrainState::Running => "running",
        DrainState::Done => "done",
        DrainState::Cancelled => "cancelled",
        DrainState::Undoing => "undoing",
        DrainState::Undone => "undone",
    }
}

fn vm_state(of: DrainVmState) -> &'static str {
    match of {
        DrainVmState::Going => "going",
        DrainVmState::Gone => "gone",
        DrainVmState::Stays => "stays",
        DrainVmState::Back => "back",
    }
}

async fn follow_drain(manager: &ManagerClient, begun: Drain, output: Output) -> Result<Drain, Failure> {
    let bar = spinner();
    let mut now = begun;
    while !is_over(&now) {
        if let Some(bar) = &bar {
            bar.set_message(headline(&now));
            bar.tick();
        }
        if has_interrupted(LOOK_INTERVAL).await {
            output.note(&format!("the drain goes on (godwit host drain {} --cancel calls it off)", now.host));
            break;
        }
        now = manager.drain(&now.id).await?;
    }
    Ok(now)
}

/// How far it is, and when it will be over.
fn headline(drain: &Drain) -> String {
    let (gone, back) = (count(drain, DrainVmState::Gone), count(drain, DrainVmState::Back));
    let stays = count(drain, DrainVmState::Stays);
    let mut text =
        format!("host {}: {}, {gone} of {} gone", drain.host, drain_state(drain.state), drain.vms.len());
    if back > 0 {
        text += &format!(", {back} back");
    }
    if stays > 0 {
        text += &format!(", {stays} can't go");
    }
    let from = if drain.state == DrainState::Planned { Some(drain.asked_unix_ms) } else { now_unix_ms() };
    if let (Some(eta), Some(from)) = (drain.eta_unix_ms, from) {
        text += &format!(", about {} s", eta.saturating_sub(from).div_ceil(1000));
    }
    text
}

fn now_unix_ms() -> Option<u64> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(now.as_millis()).ok()
}

fn drain_text(drain: &Drain) -> String {
    let row = |vm: &godwit_api::control::DrainVm| {
        let to = vm.to.clone().unwrap_or_else(|| "-".to_owned());
        vec![vm.vm.clone(), vm_state(vm.state).to_owned(), to, vm.reason.clone()]
    };
    let rows: Vec<_> = drain.vms.iter().map(row).collect();
    format!("{}\n{}", headline(drain), table(&["vm", "state", "to", "because"], &rows))
}

/// Who did what, the newest first.
pub(crate) async fn audit(manager: &ManagerClient, lines: usize, output: Output) -> Result<Exit, Failure> {
    let entries = manager.audit(lines).await?;
    let row = |entry: &AuditEntry| {
        let from = entry.from.map_or_else(|| "socket".to_owned(), |from| from.to_string());
        let told = entry.reason.clone().unwrap_or_default();
        let when = utc(entry.unix_ms);
        vec![when, entry.who.clone(), from, entry.what.clone(), entry.status.to_string(), told]
    };
    let rows: Vec<_> = entries.iter().map(row).collect();
    output.result(&entries, || table(&["when", "who", "from", "what", "status", "because"], &rows))?;
    Ok(Exit::Ok)
}

/// A time as people read it, UTC, to the second.
fn utc(unix_ms: u64) -> String {
    let seconds = i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX);
    time::OffsetDateTime::from_unix_timestamp(seconds).map_or_else(
        |_| "-".to_owned(),
        |at| format!("{} {:02}:{:02}:{:02}", at.date(), at.hour(), at.minute(), at.second()),
    )
}
