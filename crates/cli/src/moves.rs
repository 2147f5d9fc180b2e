//! Implements `godwit control move`.

use std::time::Duration;

use godwit_api::ErrorCode;
use godwit_api::control::{CreateMove, ManagerClient, Move, MoveState};
use godwit_types::{Outcome, Phase};

use crate::args::MoveCommand;
use crate::exit::{Exit, Failure};
use crate::output::{Output, fields, spinner, table};
use crate::report::render;
use crate::units::{byte_count, millis, utc};
use crate::waiting::{Reply, Waiting};

const HEADS: [&str; 9] =
    ["id", "vm", "from", "to", "state", "requested by", "requested", "took", "reason"];

pub(crate) async fn run(
    command: MoveCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        MoveCommand::Create { vm, to, priority, engine, disks, detach } => {
            let disks = disks.request();
            let request = CreateMove { to, priority, engine, disks, ..CreateMove::default() };
            return create(&vm, &request, detach, manager, output).await;
        }
        MoveCommand::List { all } => {
            let mut moves = manager.moves().await?;
            moves.retain(|one| all || !one.state.is_over());
            let rows: Vec<_> = moves.iter().map(move_row).collect();
            output.result(&moves, || table(&HEADS, &rows))?;
        }
        MoveCommand::Show { id } => {
            let found = manager.find_move(&id).await?;
            output.result(&found, || move_fields(&found))?;
        }
        MoveCommand::Cancel { id } => {
            let asked = manager.cancel_move(&id).await?;
            output.result(&asked, || format!("move {id} is being cancelled"))?;
        }
    }
    Ok(Exit::Ok)
}

async fn create(
    vm: &str,
    request: &CreateMove,
    detach: bool,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    let mut waiting = Waiting::begin(output)?;
    let asked = match waiting.ask(manager.create_move(vm, request)).await? {
        Reply::Answer(asked) => asked,
        Reply::Interrupted => {
            output.note(
                "it is unknown whether the manager has accepted the move (see `godwit control move \
                 list`)",
            );
            return Ok(Exit::Interrupted);
        }
    };
    if detach {
        output.result(&asked, || move_fields(&asked))?;
        return Ok(Exit::Ok);
    }
    let (over, was_interrupted) = follow(manager, asked, &mut waiting).await?;
    output.result(&over, || match &over.report {
        Some(report) => format!("{}\n{}", move_fields(&over), render(report, output)),
        None => move_fields(&over),
    })?;
    if was_interrupted {
        let id = &over.id;
        output.note(&format!(
            "move {id} continues (cancel it with `godwit control move cancel {id}`)"
        ));
        return Ok(Exit::Interrupted);
    }
    Ok(move_exit(&over))
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

/// Formats the reason for waiting, the progress, or the reason for the failure.
pub(crate) fn because(one: &Move) -> String {
    if let Some(waits) = &one.waits {
        return waits.text.clone();
    }
    if let Some(progress) = one.progress.as_ref().filter(|_| !one.state.is_over()) {
        // What is left of the memory is all of it as long as the disks travel.
        let left = match &progress.disks {
            Some(disks) if progress.phase == Phase::Disks => disks.remaining_bytes,
            _ => progress.remaining_bytes,
        };
        return format!("{}, {} left", progress.phase, byte_count(left));
    }
    one.failure.as_ref().map(ToString::to_string).unwrap_or_default()
}

fn move_row(one: &Move) -> Vec<String> {
    let to = one.to.clone().unwrap_or_else(|| "-".to_owned());
    vec![
        one.id.clone(),
        one.vm.clone(),
        one.from.clone(),
        to,
        move_state(one.state).to_owned(),
        one.asked_by.clone(),
        utc(one.asked_unix_ms),
        took(one).unwrap_or_else(|| "-".to_owned()),
        because(one),
    ]
}

/// Returns the duration of the last attempt; `None` if it has not ended or never started.
fn took(one: &Move) -> Option<String> {
    let ms = one.ended_unix_ms?.saturating_sub(one.started_unix_ms?);
    Some(millis(Duration::from_millis(ms).as_secs_f64() * 1000.0))
}

fn move_fields(one: &Move) -> String {
    let mut rows = vec![
        ("move", one.id.clone()),
        ("vm", one.vm.clone()),
        ("from", one.from.clone()),
        ("to", one.to.clone().unwrap_or_else(|| "not chosen yet".to_owned())),
        ("state", move_state(one.state).to_owned()),
        ("requested", format!("{} by {}", utc(one.asked_unix_ms), one.asked_by)),
    ];
    let why = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    rows.extend(why(&one.to_reason).map(|reason| ("reason for target", reason)));
    rows.extend(why(&Some(because(one))).map(|reason| ("reason", reason)));
    rows.extend(why(&one.drain).map(|drain| ("drain", drain)));
    if let Some(report) = &one.report {
        let took = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms"));
        rows.push(("took", took(Some(report.migration_time_ms))));
        rows.push(("switchover", took(report.switchover_ms)));
    }
    fields(&rows)
}

/// Follows a move until it ends or until Ctrl-C. In the latter case the move continues, and the
/// second value is true.
async fn follow(
    manager: &ManagerClient,
    asked: Move,
    waiting: &mut Waiting,
) -> Result<(Move, bool), Failure> {
    let bar = spinner();
    let mut now = asked;
    while !now.state.is_over() {
        if let Some(bar) = &bar {
            bar.set_message(format!("{} {}: {}", now.vm, move_state(now.state), because(&now)));
            bar.tick();
        }
        let (what, command) =
            (format!("move {}", now.id), format!("godwit control move show {}", now.id));
        match waiting.poll(|| manager.find_move(&now.id), &what, &command).await? {
            Reply::Answer(latest) => now = latest,
            Reply::Interrupted => return Ok((now, true)),
        }
    }
    Ok((now, false))
}

/// Returns the exit code of a finished move.
pub(crate) fn move_exit(over: &Move) -> Exit {
    match over.state {
        MoveState::Cancelled => Exit::Cancelled,
        MoveState::Failed => {
            let code = over.failure.as_ref().map_or("", |failure| failure.code.as_str());
            match &over.report {
                _ if ErrorCode::from_name(code) == ErrorCode::InDoubt => Exit::InDoubt,
                Some(report) if report.outcome != Outcome::Completed => Exit::of_report(report),
                _ => Exit::of_failure(code, over.attempts > 0),
            }
        }
        MoveState::Done | MoveState::Waiting | MoveState::Starting | MoveState::Running => Exit::Ok,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn the_exit_code_says_how_a_move_ended() {
        for (state, code, attempts, exit) in [
            ("done", None, 1, Exit::Ok),
            ("cancelled", None, 0, Exit::Cancelled),
            ("failed", Some("lane-lost"), 8, Exit::MigrationFailed),
            ("failed", Some("not-converging"), 8, Exit::MigrationFailed),
            ("failed", Some("preflight"), 1, Exit::Preflight),
            ("failed", Some("in-doubt"), 1, Exit::InDoubt),
        ] {
            let failure = code.map(|code| json!({ "code": code, "message": "", "remedy": "" }));
            let over = json!({
                "id": "v", "vm": "web", "from": "a", "state": state, "priority": "normal",
                "asked_by": "root", "asked_unix_ms": 1,
                "attempts": attempts, "failure": failure
            });
            assert_eq!(move_exit(&from_value(over).unwrap()), exit, "{state} {code:?}");
        }
    }
}
