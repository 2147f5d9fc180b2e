//! Implements `godwit vm console`: the guest's serial console on this terminal.

use std::io::IsTerminal;

use godwit_api::Client;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Key that closes the console: Ctrl-].
const LEAVE: u8 = 0x1d;

pub(super) async fn open(
    client: &Client,
    name: &str,
    port: Option<u32>,
    output: Output,
) -> Result<Exit, Failure> {
    let console = match port {
        Some(port) => client.serial_port(name, port).await?,
        None => client.console(name).await?,
    };
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

async fn copy(console: godwit_api::ConsoleStream, terminal: bool) -> Result<(), Failure> {
    let (mut from_guest, mut to_guest) = tokio::io::split(console);
    let (mut stdin, mut stdout) = (tokio::io::stdin(), tokio::io::stdout());
    let (mut typed, mut shown) = ([0; 1024], [0; 16 << 10]);
    let mut typing = true;
    loop {
        tokio::select! {
            bytes = from_guest.read(&mut shown) => match bytes {
                Ok(0) | Err(_) => return Ok(()),
                Ok(bytes) => {
                    stdout.write_all(&shown[..bytes]).await?;
                    stdout.flush().await?;
                }
            },
            bytes = stdin.read(&mut typed), if typing => {
                let bytes = &typed[..bytes?];
                let leave = bytes.iter().position(|&byte| terminal && byte == LEAVE);
                let kept = leave.unwrap_or(bytes.len());
                if to_guest.write_all(&bytes[..kept]).await.is_err() || kept < bytes.len() {
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
