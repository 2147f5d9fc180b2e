//! The process: one thread, which listens to the agent and looks at the clock.

use std::fs::{DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_ha::Timing;
use godwit_ram::KernelWatchdog;
use rustix::mm::{MlockAllFlags, mlockall};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use super::keeper::{Keeper, Leave};
use super::lines::Lines;
use super::message::{self, Answer};
use super::processes::{ByPidfd, Processes};
use super::socket;
use super::timer::{Device, Open, Timer};
use crate::config::Config;
use crate::ha::{Guarded, boot_clock};
use crate::local_socket;

/// Time between two looks at the clock. Messages are taken in between.
const TICK: Duration = Duration::from_millis(200);
/// Part of the grace that is for writes on their way to storage when the host is reset.
const WRITES: Duration = Duration::from_secs(1);

/// Error that keeps the watchdog from running.
#[derive(Debug, thiserror::Error)]
pub enum WatchdogError {
    /// The socket cannot be created.
    #[error("cannot create the watchdog's socket {path}: {source}")]
    Socket { path: PathBuf, source: io::Error },
    /// Another watchdog of this agent runs.
    #[error("another watchdog already runs for {path}")]
    Runs { path: PathBuf },
    /// The system refuses what the process needs.
    #[error("cannot start the watchdog: {0}")]
    Start(io::Error),
}

impl WatchdogError {
    /// Returns what to do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            WatchdogError::Socket { .. } => {
                "make its directory writable, or change run_dir in the configuration"
            }
            WatchdogError::Runs { .. } => "leave that one running, or stop it first",
            WatchdogError::Start(_) => "check the system's resource limits",
        }
    }
}

/// Runs the watchdog of this host until SIGTERM or SIGINT. Blocks.
///
/// # Errors
/// Another watchdog runs, or the system refuses what it needs.
pub fn run(config: &Config) -> Result<(), WatchdogError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(WatchdogError::Start)?;
    runtime.block_on(run_until_signal(config))
}

async fn run_until_signal(config: &Config) -> Result<(), WatchdogError> {
    let path = socket(&config.run_dir);
    let failed = |source| WatchdogError::Socket { path: path.clone(), source };
    let _lock = lock(&config.run_dir)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(WatchdogError::Start)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(WatchdogError::Start)?;
    let listener = local_socket::bind(&path).map_err(failed)?;
    let device = &config.ha.watchdog;
    if device.is_some() {
        keep_in_memory();
    }
    tracing::info!(socket = %path.display(), ?device, "watchdog ready");
    let keeper = Keeper::<ByPidfd, _>::new(Timer::new(device.clone().map(opens)));
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    serve(&listener, keeper, stop).await;
    let _ = std::fs::remove_file(&path);
    Ok(())
}

/// Returns how a device is opened, with the timeout that guards and judges count with.
fn opens(path: PathBuf) -> Open<KernelWatchdog> {
    let timeout = Timing::default().grace.saturating_sub(WRITES).as_secs();
    let timeout = u16::try_from(timeout).unwrap_or(u16::MAX);
    Box::new(move || {
        KernelWatchdog::open(&path, timeout)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    })
}

/// Makes sure that one watchdog runs: a second one would take the agent's messages away, and the
/// first would end VMs whose lease goes on.
fn lock(run_dir: &Path) -> Result<File, WatchdogError> {
    let path = run_dir.join("watchdog.lock");
    let failed = |source| WatchdogError::Socket { path: path.clone(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir).map_err(failed)?;
    let file =
        File::options().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(WatchdogError::Runs { path: run_dir.to_owned() }),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Keeps this program in memory: a disk that hangs must not stop it.
fn keep_in_memory() {
    if let Err(error) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        tracing::warn!(%error, "cannot lock memory: the watchdog stops if the host's disk hangs");
    }
}

/// The agent's connection.
struct Agent {
    stream: UnixStream,
    lines: Lines,
}

impl Agent {
    /// Accepts root and this process's own user.
    fn admitted(stream: UnixStream) -> Option<Agent> {
        let uid = stream.peer_cred().map(|caller| caller.uid());
        if uid.as_ref().is_ok_and(|uid| local_socket::admits(*uid)) {
            return Some(Agent { stream, lines: Lines::default() });
        }
        tracing::warn!(?uid, "connection to the watchdog refused: only root may use it");
        None
    }

    /// Sends an answer. An agent that takes none must not stop the watchdog.
    fn answer(&self, answer: Answer) -> io::Result<()> {
        let line = answer.encode().map_err(io::Error::other)?;
        let written = self.stream.try_write(&line)?;
        if written == line.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// Returns the agent's next message; without an agent, never.
async fn hear(agent: &mut Option<Agent>) -> io::Result<Vec<Guarded>> {
    let Some(Agent { stream, lines }) = agent else { return std::future::pending().await };
    let line = lines.next(stream).await?;
    message::decode(&line).map_err(io::Error::other)
}

/// Keeps the watchdog until `stop`, and as long after it as nobody else does.
async fn serve<P: Processes + Default, D: Device>(
    listener: &UnixListener,
    mut keeper: Keeper<P, D>,
    stop: impl Future<Output = ()>,
) {
    tokio::pin!(stop);
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut agent = None;
    let (mut accepts, mut is_stopping) = (true, false);
    loop {
        let mut is_message = false;
        tokio::select! {
            biased;
            _ = ticks.tick() => accepts = true,
            () = &mut stop, if !is_stopping => is_stopping = true,
            accepted = listener.accept(), if accepts => match accepted {
                Ok((stream, _)) => agent = Agent::admitted(stream).or(agent),
                Err(error) => {
                    tracing::error!(%error, "cannot accept the agent's connection");
                    accepts = false;
                }
            },
            heard = hear(&mut agent) => match heard {
                Ok(groups) => {
                    keeper.take(&groups);
                    is_message = true;
                }
                Err(error) => {
                    tracing::warn!(%error, "the agent's connection has ended");
                    agent = None;
                }
            },
        }
        keeper.keep(boot_clock());
        if is_message {
            let answer = Answer { kernel: keeper.has_kernel(), version: message::VERSION };
            agent = agent.filter(|agent| agent.answer(answer).is_ok());
        }
        if is_stopping {
            match keeper.leave(boot_clock(), agent.is_some()) {
                Leave::Stay => {}
                Leave::HandOver => {
                    tracing::warn!(
                        "ended while VMs are guarded: unless it is started again, the kernel's \
                         watchdog resets this host"
                    );
                    return;
                }
                Leave::Close => return keeper.close(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::process::Command;
    use std::rc::Rc;
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::{oneshot, watch};

    use super::super::follow;
    use super::super::timer::fake::{Fake, opens};
    use super::*;
    use crate::ha::WatchdogStatus;

    const LONG: Duration = Duration::from_secs(3600);

    /// Waits until the status is as expected.
    async fn until(status: &WatchdogStatus, process: bool, kernel: bool) {
        while (status.process(), status.kernel()) != (process, kernel) {
            tokio::task::yield_now().await;
        }
    }

    /// Runs a watchdog with a fake device in `run_dir` until the sender sends or is dropped.
    fn start(
        run_dir: &Path,
        fake: &Rc<RefCell<Fake>>,
    ) -> (tokio::task::JoinHandle<()>, oneshot::Sender<()>) {
        let listener = local_socket::bind(&socket(run_dir)).unwrap();
        let keeper = Keeper::<ByPidfd, _>::new(Timer::new(Some(opens(fake))));
        let (stop, stopped) = oneshot::channel();
        let serving = async move {
            let stop = async {
                let _ = stopped.await;
            };
            serve(&listener, keeper, stop).await;
        };
        (tokio::task::spawn_local(serving), stop)
    }

    async fn scene<T>(test: impl AsyncFnOnce(&Path) -> T) -> T {
        let folder = tempfile::tempdir().unwrap();
        tokio::task::LocalSet::new().run_until(test(folder.path())).await
    }

    #[tokio::test]
    async fn a_watchdog_that_is_started_again_takes_over() {
        scene(async |run_dir: &Path| {
            let fake = Rc::<RefCell<Fake>>::default();
            let guarded = watch::Sender::new(Guarded::default());
            let status = Arc::<WatchdogStatus>::default();
            let own = watch::Sender::new(Vec::new());
            let (term, others) = (guarded.subscribe(), own.subscribe());
            let following = follow(run_dir.to_owned(), term, others, status.clone());
            let following = tokio::task::spawn_local(following);
            let (first, stop) = start(run_dir, &fake);
            until(&status, true, true).await;
            assert!(fake.borrow().reset_at.is_none(), "armed although nothing is guarded");

            let mut vm = Command::new("sleep").arg("1000").spawn().unwrap();
            let pid = i32::try_from(vm.id()).unwrap();
            let pids = vec![(pid, godwit_qemu::start_time_of(pid).unwrap())];
            let deadline = Some(boot_clock() + LONG);
            guarded.send_replace(Guarded { deadline, pids: pids.clone() });
            while fake.borrow().reset_at.is_none() {
                tokio::task::yield_now().await;
            }
            stop.send(()).unwrap();
            first.await.unwrap();
            until(&status, false, false).await;
            assert!(fake.borrow().reset_at.is_some(), "stopped although a VM is guarded");
            let (second, stop) = start(run_dir, &fake);
            until(&status, true, true).await;

            // The lease has run out, and the agent hangs: no message follows.
            guarded.send_replace(Guarded { deadline: Some(Duration::ZERO), pids });
            while vm.try_wait().unwrap().is_none() {
                tokio::task::yield_now().await;
            }
            stop.send(()).unwrap();
            second.await.unwrap();
            assert!(fake.borrow().reset_at.is_none(), "the device was not closed");
            drop(guarded);
            following.await.unwrap();
            assert!(!status.process());
        })
        .await;
    }

    #[tokio::test]
    async fn a_process_of_an_earlier_version_guards_the_term_of_its_host_alone() {
        scene(async |run_dir: &Path| {
            let listener = local_socket::bind(&socket(run_dir)).unwrap();
            let guarded = watch::Sender::new(Guarded::default());
            let own = watch::Sender::new(Vec::new());
            let status = Arc::<WatchdogStatus>::default();
            let (term, others) = (guarded.subscribe(), own.subscribe());
            let following = follow(run_dir.to_owned(), term, others, status.clone());
            let following = tokio::task::spawn_local(following);
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"{\"kernel\":true}\n").await.unwrap();
            until(&status, true, true).await;
            assert!(!status.kernel_of_own(), "it does not know the VM's group");
            drop(guarded);
            following.await.unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn a_liar_on_the_socket_is_disconnected_and_changes_nothing() {
        scene(async |run_dir: &Path| {
            let fake = Rc::<RefCell<Fake>>::default();
            let (serving, stop) = start(run_dir, &fake);
            let long = vec![b'1'; 2 * message::MOST_LINE_BYTES];
            for lie in [&b"{}\n"[..], b"\n", b"{\"deadline_ns\":1,\"pids\":[[-1,1]]}\n", &long[..]]
            {
                let mut stream = UnixStream::connect(socket(run_dir)).await.unwrap();
                // A long one is refused before all of it is written.
                let _ = stream.write_all(lie).await;
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer).await;
                assert!(answer.is_empty());
            }
            assert!(!fake.borrow().is_open);
            stop.send(()).unwrap();
            serving.await.unwrap();
        })
        .await;
    }

    #[test]
    fn only_one_watchdog_runs_and_files_are_private() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let run_dir = folder.path().join("run");
        let first = lock(&run_dir).unwrap();
        let mode = std::fs::metadata(&run_dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        assert!(matches!(lock(&run_dir), Err(WatchdogError::Runs { .. })));
        drop(first);
    }
}
