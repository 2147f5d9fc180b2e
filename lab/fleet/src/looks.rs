//! Polls a manager's moves until none is left, and checks that each waiting move gives a reason.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use godwit_api::control::{Move, Page};

use crate::Asker;

/// Poll interval.
const INTERVAL: Duration = Duration::from_millis(50);

/// Results of the polls.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Looks {
    /// Number of polls.
    pub looks: u64,
    /// Waiting moves, counted at each poll.
    pub waiting: u64,
    /// Waiting moves without a reason.
    pub unexplained: u64,
    /// Reasons of waiting, by code.
    pub codes: std::collections::BTreeMap<String, u64>,
}

impl Looks {
    /// Polls until no move waits or runs.
    ///
    /// # Errors
    /// The manager does not answer, or it takes longer than `limit`.
    pub async fn until_over(&mut self, asker: &mut Asker, limit: Duration) -> Result<()> {
        let began = Instant::now();
        loop {
            let mut left = 0;
            for state in ["waiting", "starting", "running"] {
                let page: Page<Move> =
                    asker.get(&format!("/api/v1/moves?state={state}&limit=1000")).await?;
                left += page.total;
                if state == "waiting" {
                    self.see(&page.items);
                }
            }
            if left == 0 {
                return Ok(());
            }
            if began.elapsed() > limit {
                bail!("{left} moves are not over after {} s", limit.as_secs());
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    fn see(&mut self, waiting: &[Move]) {
        self.looks += 1;
        self.waiting += waiting.len() as u64;
        for one in waiting {
            match &one.waits {
                Some(waits) if !waits.code.is_empty() && !waits.text.is_empty() => {
                    *self.codes.entry(waits.code.clone()).or_default() += 1;
                }
                _ => self.unexplained += 1,
            }
        }
    }
}
