//! Screens: viewers and pictures before and after a move, with both video devices.

use anyhow::{Result, ensure};
use godwit_api::{ChangeVm, Client, ClientError, ErrorCode, StopVm};
use godwit_lab::trial::{GuestPlan, LIMIT, Trial};
use godwit_qemu::{SpecPatch, Video};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::move_and_check;

/// Viewers that a screen has at most.
const MOST_VIEWERS: usize = 8;

/// A viewer after the handshake: RFB 3.8 without a password (RFC 6143, section 7).
struct Viewer {
    stream: godwit_api::ConsoleStream,
    size: (u16, u16),
}

impl Viewer {
    async fn open(agent: &Client, vm: &str) -> Result<Viewer> {
        tokio::time::timeout(LIMIT, Viewer::greet(agent.screen(vm).await?)).await?
    }

    async fn greet(mut stream: godwit_api::ConsoleStream) -> Result<Viewer> {
        let mut version = [0; 12];
        stream.read_exact(&mut version).await?;
        ensure!(version == *b"RFB 003.008\n", "{version:?}");
        stream.write_all(&version).await?;
        let mut kinds = [0; 2];
        stream.read_exact(&mut kinds).await?;
        ensure!(kinds == [1, 1], "the kinds of security are {kinds:?}");
        stream.write_all(&[1]).await?;
        ensure!(stream.read_u32().await? == 0, "the viewer is refused");
        // Others may watch too.
        stream.write_all(&[1]).await?;
        let mut size = [0; 4];
        stream.read_exact(&mut size).await?;
        let mut format = [0; 16];
        stream.read_exact(&mut format).await?;
        let mut name = vec![0; usize::try_from(stream.read_u32().await?)?.min(256)];
        stream.read_exact(&mut name).await?;
        let size = (u16::from_be_bytes([size[0], size[1]]), u16::from_be_bytes([size[2], size[3]]));
        Ok(Viewer { stream, size })
    }

    /// Asks for the whole picture and reads the beginning of the answer.
    async fn see(&mut self) -> Result<()> {
        let mut asked = vec![3, 0, 0, 0, 0, 0];
        asked.extend(self.size.0.to_be_bytes());
        asked.extend(self.size.1.to_be_bytes());
        self.stream.write_all(&asked).await?;
        let mut update = [0; 4];
        tokio::time::timeout(LIMIT, self.stream.read_exact(&mut update)).await??;
        ensure!(update[0] == 0 && update[3] > 0, "no update of the picture: {update:?}");
        Ok(())
    }

    /// Waits for the end of the connection.
    async fn end(mut self) -> Result<()> {
        let mut rest = [0; 4096];
        let ends = async { while self.stream.read(&mut rest).await.is_ok_and(|read| read > 0) {} };
        Ok(tokio::time::timeout(LIMIT, ends).await?)
    }
}

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
    let Some(trial) = Trial::begin("screen")? else { return Ok(()) };
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

        move_and_check(&trial, guest)?;
        trial.ask(viewer.end())?;
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
