//! Implements `godwit vm console`: the guest's serial console on this terminal.

use std::io::IsTerminal;

use futures::{SinkExt, StreamExt};
use godwit_api::ConsoleStream;
use godwit_api::control::{VmMessage, VmSocket};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Key that closes the console: Ctrl-].
const LEAVE: u8 = 0x1d;

/// Most bytes that are read at once.
const PIECE_BYTES: usize = 16 << 10;

/// An open serial port.
pub(super) enum Line {
    OfHost(ConsoleStream),
    OfManager(Box<VmSocket>),
}

impl Line {
    /// Returns the next output of the guest; `None` if the other side has closed the line. Loses
    /// nothing if it is dropped before it is done.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        match self {
            Line::OfHost(stream) => {
                let mut piece = vec![0; PIECE_BYTES];
                let bytes = stream.read(&mut piece).await.unwrap_or(0);
                piece.truncate(bytes);
                Ok((bytes > 0).then_some(piece))
            }
            Line::OfManager(socket) => loop {
                match socket.next().await {
                    Some(Ok(VmMessage::Binary(bytes))) => return Ok(Some(bytes.to_vec())),
                    Some(Ok(VmMessage::Close(Some(close)))) if !close.reason.is_empty() => {
                        let message = format!("the console ended: {}", close.reason);
                        let remedy = "see `godwit vm show`, then open it again";
                        return Err(Failure::new(Exit::Failure, message, remedy));
                    }
                    Some(Ok(VmMessage::Close(_)) | Err(_)) | None => return Ok(None),
                    Some(Ok(_)) => {}
                }
            },
        }
    }

    /// Sends what was typed; returns whether the line is open.
    async fn send(&mut self, typed: &[u8]) -> bool {
        match self {
            Line::OfHost(stream) => stream.write_all(typed).await.is_ok(),
            Line::OfManager(socket) => socket.send(VmMessage::binary(typed.to_vec())).await.is_ok(),
        }
    }
}

pub(super) async fn open(console: Line, name: &str, output: Output) -> Result<Exit, Failure> {
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        output.note(&format!("console of VM {name}; Ctrl-] leaves it, Enter shows the prompt"));
    }
    let raw = if terminal { Some(RawTerminal::enter()?) } else { None };
    let outcome = copy(console, terminal).await;
    drop(raw);
    if terminal {
        output.note("");
    }
    outcome.map(|()| Exit::Ok)
}

async fn copy(mut console: Line, terminal: bool) -> Result<(), Failure> {
    let (mut stdin, mut stdout) = (tokio::io::stdin(), tokio::io::stdout());
    let (mut typed, mut typing) = ([0; 1024], true);
    loop {
        tokio::select! {
            bytes = console.next() => {
                let Some(bytes) = bytes? else { return Ok(()) };
                stdout.write_all(&bytes).await?;
                stdout.flush().await?;
            }
            bytes = stdin.read(&mut typed), if typing => {
                let bytes = &typed[..bytes?];
                let leave = bytes.iter().position(|&byte| terminal && byte == LEAVE);
                let kept = leave.unwrap_or(bytes.len());
                if !console.send(&bytes[..kept]).await || kept < bytes.len() {
                    return Ok(());
                }
                // Input from a file has ended; the guest's output is still shown.
                typing = !bytes.is_empty();
            }
            _ = tokio::signal::ctrl_c(), if !terminal => return Ok(()),
        }
    }
}

/// Puts the terminal in raw mode until the value is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> Result<RawTerminal, Failure> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).map_err(std::io::Error::from)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).map_err(std::io::Error::from)?;
        Ok(RawTerminal(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
