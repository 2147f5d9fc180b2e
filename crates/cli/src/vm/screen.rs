//! Implements `godwit vm screen` and `godwit vm screenshot`.
//!
//! A viewer on this machine connects to a socket of this command, which connects to the host that
//! runs the VM, or to the manager. RFB, the protocol of VNC, cannot continue with another server:
//! when the VM moves, the viewer's connection ends, and its next one goes to the new host.

mod local;

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{SinkExt, StreamExt};
use godwit_api::ConsoleStream;
use godwit_api::control::{ManagerClient, VmMessage, VmSocket};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Child;
use tokio::time::{Instant, sleep};

use crate::args::{ScreenArgs, ScreenshotArgs};
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::Output;

use local::{Place, Program, Viewer};

/// Time limit for connecting again after a move.
const AGAIN_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(200);
/// Most bytes that are read at once.
const PIECE_BYTES: usize = 16 << 10;
/// Most viewers of this command at once: as many as a screen has.
const MOST_VIEWERS: usize = 8;

/// Where a VM's screen is opened.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way<'a> {
    Hosts(&'a Hosts, Option<&'a str>),
    Manager(&'a ManagerClient),
}

/// An open screen.
enum Screen {
    OfHost(ConsoleStream),
    OfManager(Box<VmSocket>),
}

/// Which side ended a viewer's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndedBy {
    Viewer,
    Host,
}

/// Shows a VM's screen until the viewer that was started ends, or the user interrupts the command.
pub(super) async fn show(args: &ScreenArgs, way: Way<'_>, output: Output) -> Result<Exit, Failure> {
    let name = args.name.as_str();
    // What is wrong is reported before a viewer starts.
    drop(way.open(name, output).await?);
    let program = if args.listen.is_none() { Program::find() } else { None };
    let place = match (&args.listen, &program) {
        (Some(listen), _) => Place::named(listen).await?,
        (None, Some(program)) if !program.takes_sockets => Place::port().await?,
        (None, _) => Place::private()?,
    };
    match &program {
        Some(program) => output.note(&format!("screen of VM {name} in {}", program.path.display())),
        None => output.result(&json!({ "vm": name, "listen": place.address() }), || {
            let address = place.address();
            format!("the screen of VM {name} is at {address}\nconnect with: {}", place.hint())
        })?,
    }
    let mut child = program.as_ref().map(|program| program.start(&place)).transpose()?;
    let (mut viewers, mut last) = (FuturesUnordered::new(), EndedBy::Viewer);
    loop {
        tokio::select! {
            viewer = place.accept(), if viewers.len() < MOST_VIEWERS => {
                viewers.push(connect(viewer?, way, name, output));
            }
            Some(ended) = viewers.next() => last = ended,
            ended = exit_of(&mut child) => {
                ended?;
                // The last connection's end may not have been seen yet.
                while let Some(ended) = viewers.next().await {
                    last = ended;
                }
                if last == EndedBy::Viewer {
                    return Ok(Exit::Ok);
                }
                // The VM has moved, or has stopped.
                drop(way.open_again(name, output).await?);
                last = EndedBy::Viewer;
                child = program.as_ref().map(|program| program.start(&place)).transpose()?;
            }
            _ = tokio::signal::ctrl_c() => return Ok(Exit::Ok),
        }
    }
}

/// Writes a picture of a VM's screen to a file.
pub(super) async fn picture(
    args: &ScreenshotArgs,
    way: Way<'_>,
    output: Output,
) -> Result<Exit, Failure> {
    let name = args.name.as_str();
    let picture = match way {
        Way::Hosts(hosts, only) => {
            hosts.find(name, only, output).await?.client.screenshot(name).await?
        }
        Way::Manager(manager) => manager.screenshot(name).await?,
    };
    let written = match args.output.to_str() {
        Some("-") => std::io::stdout().lock().write_all(&picture),
        // It shows what the guest shows: others on this machine do not see it.
        _ => std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&args.output)
            .and_then(|mut file| file.write_all(&picture)),
    };
    written.map_err(|error| {
        let message = format!("cannot write {}: {error}", args.output.display());
        Failure::new(Exit::Failure, message, "choose another file with -o")
    })?;
    if args.output.to_str() != Some("-") {
        output
            .result(&json!({ "vm": name, "file": args.output, "bytes": picture.len() }), || {
                format!("the screen of VM {name} is in {}", args.output.display())
            })?;
    }
    Ok(Exit::Ok)
}

/// Waits for the end of the viewer that was started; forever if none was.
async fn exit_of(child: &mut Option<Child>) -> Result<(), Failure> {
    match child {
        Some(child) => Ok(child.wait().await.map(drop)?),
        None => std::future::pending().await,
    }
}

/// Connects a viewer to the screen.
async fn connect(viewer: Box<dyn Viewer>, way: Way<'_>, name: &str, output: Output) -> EndedBy {
    match way.open_again(name, output).await {
        Ok(screen) => screen.carry(viewer).await,
        Err(failure) => {
            output.failure(&failure);
            EndedBy::Host
        }
    }
}

impl Way<'_> {
    async fn open(self, name: &str, output: Output) -> Result<Screen, Failure> {
        match self {
            Way::Hosts(hosts, only) => {
                let found = hosts.find(name, only, output).await?;
                Ok(Screen::OfHost(found.client.screen(name).await?))
            }
            Way::Manager(manager) => Ok(Screen::OfManager(Box::new(manager.screen(name).await?))),
        }
    }

    /// Opens the screen of a VM that may be on its way to another host.
    async fn open_again(self, name: &str, output: Output) -> Result<Screen, Failure> {
        let until = Instant::now() + AGAIN_LIMIT;
        loop {
            match self.open(name, output).await {
                // No host has the guest at this moment, or several say so.
                Err(failure)
                    if matches!(failure.exit, Exit::Conflict | Exit::NotFound)
                        && Instant::now() < until =>
                {
                    sleep(RETRY).await;
                }
                other => return other,
            }
        }
    }
}

impl Screen {
    /// Carries bytes until either side closes its end.
    async fn carry(self, viewer: Box<dyn Viewer>) -> EndedBy {
        let (mut from_viewer, mut to_viewer) = tokio::io::split(viewer);
        match self {
            Screen::OfHost(guest) => {
                let (mut from_guest, mut to_guest) = tokio::io::split(guest);
                tokio::select! {
                    // A failed write has the same cause as the next failed read.
                    _ = tokio::io::copy(&mut from_guest, &mut to_viewer) => EndedBy::Host,
                    _ = tokio::io::copy(&mut from_viewer, &mut to_guest) => EndedBy::Viewer,
                }
            }
            Screen::OfManager(socket) => {
                let (mut to_guest, mut from_guest) = socket.split();
                let mut piece = vec![0; PIECE_BYTES];
                loop {
                    tokio::select! {
                        message = from_guest.next() => match message {
                            Some(Ok(VmMessage::Binary(bytes))) => {
                                if to_viewer.write_all(&bytes).await.is_err() {
                                    return EndedBy::Viewer;
                                }
                            }
                            Some(Ok(VmMessage::Close(_)) | Err(_)) | None => {
                                return EndedBy::Host;
                            }
                            Some(Ok(_)) => {}
                        },
                        read = from_viewer.read(&mut piece) => match read {
                            Ok(bytes) if bytes > 0 => {
                                let message = VmMessage::binary(piece[..bytes].to_vec());
                                if to_guest.send(message).await.is_err() {
                                    return EndedBy::Host;
                                }
                            }
                            _ => return EndedBy::Viewer,
                        },
                    }
                }
            }
        }
    }
}
