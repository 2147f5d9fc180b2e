//! Screens: viewers and pictures before, during and after a move, with both video devices. Prints
//! how soon a viewer that connects again sees the guest at its new host.

use anyhow::{Result, ensure};
use godwit_api::{ChangeVm, ClientError, ErrorCode, StopVm};
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, LIMIT, Trial};
use godwit_qemu::{SpecPatch, Video};
use serde_json::json;

use crate::move_and_check;
use crate::viewer::{Viewer, Watching, Way};

/// Viewers that a screen has at most.
const MOST_VIEWERS: usize = 8;

/// Returns width and height of a PNG.
fn size_of(png: &[u8]) -> Result<(u32, u32)> {
    ensure!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 24, "no PNG");
    ensure!(png.ends_with(b"IEND\xaeB`\x82"), "the PNG is cut");
    let number =
        |at: usize| Ok::<_, anyhow::Error>(u32::from_be_bytes(png[at..at + 4].try_into()?));
    Ok((number(16)?, number(20)?))
}

fn refusal<T>(result: Result<T, ClientError>, code: ErrorCode, word: &str) -> Result<()> {
    let Err(ClientError::Refused(error)) = result else { anyhow::bail!("it is not refused") };
    let says = error.message.contains(word) || error.remedy.contains(word);
    ensure!(error.code == code && says, "{error:?}");
    Ok(())
}

#[test]
fn a_screen_is_seen_before_and_after_a_move() -> Result<()> {
    let options = LabOptions { manager: true, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("screen", options)? else { return Ok(()) };
    let plans = [(Video::Vga, "web", 21), (Video::Virtio, "db", 22)]
        .map(|(video, name, number)| GuestPlan { video, number, ..GuestPlan::new(name) });
    let mut guests = trial.guests("a", &plans)?;
    for guest in &mut guests {
        let name = guest.name.clone();
        let (a, b) = (trial.agent("a"), trial.agent("b"));
        let before = size_of(&trial.ask(a.screenshot(&name))?)?;
        let mut viewer = trial.ask(Viewer::open(&a, &name))?;
        let shown = (u32::from(viewer.size.0), u32::from(viewer.size.1));
        ensure!(shown == before, "{name}: a viewer gets {shown:?}, a picture has {before:?}");
        trial.ask(viewer.see())?;
        refusal(trial.ask(b.screenshot(&name)), ErrorCode::NotFound, "no VM")?;

        let ways = [("its agent", Way::agents(&trial)), ("the manager", Way::manager(&trial))];
        let watching = ways.map(|way| Watching::begin(&trial, guest, way));
        let watching = watching.into_iter().collect::<Result<Vec<_>>>()?;
        move_and_check(&trial, guest)?;
        trial.ask(viewer.end())?;
        for viewer in watching {
            viewer.report(&name)?;
        }
        let mut viewer = trial.ask(Viewer::open(&b, &name))?;
        trial.ask(viewer.see())?;
        let after = size_of(&trial.ask(b.screenshot(&name))?)?;
        ensure!(after == before, "{name}: {before:?} became {after:?}");
    }
    several_viewers(&trial)?;
    refusals(&trial)?;
    trial.finish()
}

/// Opens as many viewers as a screen has, and one more.
fn several_viewers(trial: &Trial) -> Result<()> {
    let agent = trial.agent("b");
    let mut viewers = Vec::new();
    // The viewer of the move may still hold its place.
    let until = std::time::Instant::now() + LIMIT;
    while viewers.len() < MOST_VIEWERS {
        match trial.ask(Viewer::open(&agent, "web")) {
            Ok(viewer) => viewers.push(viewer),
            Err(error) => ensure!(std::time::Instant::now() < until, "{error:#}"),
        }
    }
    refusal(trial.ask(agent.screen("web")), ErrorCode::Busy, "too many viewers")?;
    for viewer in &mut viewers {
        trial.ask(viewer.see())?;
    }
    Ok(())
}

/// Checks what is said of a VM that does not run, and of one without a screen.
fn refusals(trial: &Trial) -> Result<()> {
    let agent = trial.agent("b");
    trial.ask(agent.stop_vm("web", StopVm { force: true, grace_ms: None }))?;
    refusal(trial.ask(agent.screenshot("web")), ErrorCode::WrongState, "start it")?;
    let spec: SpecPatch = serde_json::from_value(json!({ "video": "none" }))?;
    trial.ask(agent.change_vm("web", &ChangeVm { spec, ..ChangeVm::default() }))?;
    refusal(trial.ask(agent.screen("web")), ErrorCode::WrongState, "--video")?;
    refusal(trial.ask(agent.screenshot("web")), ErrorCode::WrongState, "no video device")
}
