//! A viewer that stays open while its VM moves again and again.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use godwit_api::Client;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::Viewer;

/// Pause of a viewer that found its VM on no host.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// What a viewer saw that follows its VM.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    pub(crate) updates: usize,
    /// Times from the end of a connection to the next whole picture.
    pub(crate) reconnects: Vec<Duration>,
}

/// A viewer that stays open while its VM moves.
pub(crate) struct Follower {
    end: oneshot::Sender<()>,
    seen: Arc<Mutex<Seen>>,
    thread: JoinHandle<Result<()>>,
}

impl Follower {
    /// Opens a viewer on whichever of these hosts has the VM, again and again.
    pub(crate) fn open(agents: Vec<Client>, vm: &'static str) -> Result<Follower> {
        let (end, ended) = oneshot::channel();
        let seen = Arc::<Mutex<Seen>>::default();
        let shared = Arc::clone(&seen);
        let thread = std::thread::Builder::new().name("viewer".to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                tokio::select! {
                    // Also if the test has failed.
                    _ = ended => Ok(()),
                    never = follow(&agents, vm, &shared) => never,
                }
            })
        })?;
        Ok(Follower { end, seen, thread })
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    pub(crate) fn close(self) -> Result<Seen> {
        let _ = self.end.send(());
        self.thread.join().ok().context("the viewer panicked")??;
        Ok(self.seen.lock().clone())
    }
}

async fn follow(agents: &[Client], vm: &str, seen: &Mutex<Seen>) -> Result<()> {
    let mut retry = tokio::time::interval(RETRY_INTERVAL);
    let mut lost: Option<Instant> = None;
    loop {
        for agent in agents {
            let Ok(mut viewer) = Viewer::open(agent, vm).await else { continue };
            let mut changes = false;
            while viewer.update(changes).await.is_ok() {
                changes = true;
                let mut seen = seen.lock();
                seen.updates += 1;
                seen.reconnects.extend(lost.take().map(|since| since.elapsed()));
            }
            lost = lost.or_else(|| Some(Instant::now()));
        }
        retry.tick().await;
    }
}
