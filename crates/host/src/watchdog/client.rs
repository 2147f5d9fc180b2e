//! The agent's side: sends the watchdog what to guard, and keeps its answer.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::lines::Lines;
use super::message::{self, Answer};
use super::socket;
use crate::ha::{Guarded, WatchdogStatus};

/// Time between two messages without a change.
const PERIOD: Duration = Duration::from_millis(500);
/// Longest wait for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Sends the watchdog process what is guarded: each change, and every half second. `guarded` is for
/// the host's term, `own` has a group for each VM that agents alone protect. Returns when one of
/// their senders is gone. A process that is missing or hangs delays nothing.
pub(crate) async fn follow(
    run_dir: PathBuf,
    mut guarded: watch::Receiver<Guarded>,
    mut own: watch::Receiver<Vec<Guarded>>,
    status: Arc<WatchdogStatus>,
) {
    let socket = socket(&run_dir);
    let mut connection = None;
    let mut problem = None;
    let mut is_old = false;
    loop {
        let mut groups = vec![guarded.borrow_and_update().clone()];
        groups.extend(own.borrow_and_update().iter().cloned());
        let answer = timeout(ANSWER_LIMIT, send(&socket, &mut connection, &groups))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        match answer {
            Ok(answer) => {
                let was_old = std::mem::replace(&mut is_old, answer.version < message::VERSION);
                status.answered(answer.kernel, !is_old);
                if is_old && !was_old {
                    tracing::error!(
                        "the watchdog process is of an earlier version, and does not end VMs that \
                         agents protect: run `systemctl restart godwit-watchdog`"
                    );
                }
                if problem.take().is_some() {
                    tracing::info!("the watchdog process answers");
                }
            }
            Err(error) => {
                connection = None;
                status.lost();
                // A host that guards nothing needs no such process.
                if groups.iter().any(|group| *group != Guarded::default())
                    && problem.replace(error.kind()) != Some(error.kind())
                {
                    tracing::error!(%error, "the watchdog process does not answer: start \
                        godwit-watchdog, else nobody ends protected VMs if this agent hangs");
                }
            }
        }
        let change = async {
            tokio::select! {
                changed = guarded.changed() => changed,
                changed = own.changed() => changed,
            }
        };
        if let Ok(Err(_)) = timeout(PERIOD, change).await {
            status.lost();
            return;
        }
    }
}

/// Connection to the watchdog.
struct Connection {
    stream: UnixStream,
    lines: Lines,
}

async fn send(
    socket: &Path,
    connection: &mut Option<Connection>,
    groups: &[Guarded],
) -> io::Result<Answer> {
    let line = message::encode(groups).map_err(io::Error::other)?;
    let Connection { stream, lines } = match connection {
        Some(connection) => connection,
        None => {
            let stream = UnixStream::connect(socket).await?;
            connection.insert(Connection { stream, lines: Lines::default() })
        }
    };
    stream.write_all(&line).await?;
    let answer = lines.next(stream).await?;
    Answer::decode(&answer).map_err(io::Error::other)
}
