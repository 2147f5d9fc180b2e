//! A manager as a process of its own, with a store of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use godwit_api::control::Cluster;
use godwit_fleet::{Asker, Fleet};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Time limit of every wait.
const LIMIT: Duration = Duration::from_secs(180);
/// Poll interval.
const LOOK: Duration = Duration::from_millis(10);

/// The process.
pub(super) struct Managed {
    godwit: PathBuf,
    folder: PathBuf,
    child: Option<Child>,
}

impl Managed {
    /// Prepares a manager of this program, with an empty store in a folder of its own.
    pub(super) fn new(godwit: Option<&Path>) -> Result<Managed> {
        let beside = std::env::current_exe()?.with_file_name("godwit");
        let godwit = godwit.map_or(beside, Path::to_owned);
        let folder = std::env::temp_dir().join(format!("godwit-bench-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let config = format!(
            "name = \"bench\"\ninsecure = true\nsocket = \"{0}/control.sock\"\nstate_dir = \
             \"{0}/state\"\n",
            folder.display()
        );
        fs::write(folder.join("control.toml"), config)?;
        Ok(Managed { godwit, folder, child: None })
    }

    pub(super) fn asker(&self) -> Asker {
        Asker::new(&self.folder.join("control.sock"))
    }

    /// Starts the manager. It has answered when this returns.
    pub(super) async fn start(&mut self) -> Result<()> {
        let log = fs::File::create(self.folder.join("log"))?;
        let child = Command::new(&self.godwit)
            .args(["control", "run", "--config"])
            .arg(self.folder.join("control.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| {
                format!("cannot start {}; remedy: make build", self.godwit.display())
            })?;
        self.child = Some(child);
        self.until(|_| true).await.map(drop)
    }

    /// Waits until the cluster satisfies the condition. Returns the time taken.
    pub(super) async fn until(&mut self, is_so: impl Fn(&Cluster) -> bool) -> Result<Duration> {
        let began = Instant::now();
        let mut asker = self.asker();
        loop {
            if asker.get::<Cluster>("/api/v1/cluster").await.is_ok_and(|cluster| is_so(&cluster)) {
                return Ok(began.elapsed());
            }
            let ended = self.child.as_mut().map(Child::try_wait).transpose()?.flatten();
            if ended.is_some() || began.elapsed() > LIMIT {
                let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
                bail!(
                    "the manager did not reach the expected state: {}",
                    log.lines().last().unwrap_or_default()
                );
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Adds a fleet's hosts, several at a time. Returns the time taken.
    pub(super) async fn add_hosts(
        &mut self,
        fleet: &Fleet,
        link_bits_per_s: u64,
    ) -> Result<Duration> {
        let began = Instant::now();
        let requests: Vec<Value> = fleet
            .agents()
            .iter()
            .enumerate()
            .map(|(number, (name, address))| {
                let labels = json!({ "rack": format!("r{}", number / 20) });
                json!({
                    "name": name, "address": address, "labels": labels,
                    "link_bits_per_s": link_bits_per_s,
                })
            })
            .collect();
        let mut tasks = tokio::task::JoinSet::new();
        for share in requests.chunks(requests.len().div_ceil(8).max(1)) {
            let (share, mut asker) = (share.to_vec(), self.asker());
            tasks.spawn(async move {
                for request in share {
                    let _: Value = asker.post("/api/v1/hosts", &request).await?;
                }
                anyhow::Ok(())
            });
        }
        for done in tasks.join_all().await {
            done?;
        }
        Ok(began.elapsed())
    }

    /// Returns its memory now and at its peak, and its CPU time.
    pub(super) fn usage(&self) -> Result<Usage> {
        let pid = self.child.as_ref().context("the manager is not running")?.id();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kib = |key: &str| -> Option<f64> {
            let line = status.lines().find(|line| line.starts_with(key))?;
            line.split_ascii_whitespace().nth(1)?.parse().ok()
        };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let rest = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
        let ticks = rest
            .split_ascii_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<f64>().ok());
        let ticks_per_s = rustix::param::clock_ticks_per_second();
        #[expect(clippy::cast_precision_loss, reason = "100")]
        let cpu_s = ticks.sum::<f64>() / ticks_per_s as f64;
        Ok(Usage {
            rss_mib: kib("VmRSS:").context("no VmRSS")? / 1024.0,
            hwm_mib: kib("VmHWM:").context("no VmHWM")? / 1024.0,
            cpu_s,
        })
    }

    /// Ends the manager gracefully.
    pub(super) fn stop(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no pid")?;
            kill_process(pid, Signal::TERM)?;
            child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Resource use of a process.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(super) struct Usage {
    pub(super) rss_mib: f64,
    pub(super) hwm_mib: f64,
    pub(super) cpu_s: f64,
}
