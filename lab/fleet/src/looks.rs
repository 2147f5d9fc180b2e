//! Looks at a manager's moves while they are carried out: does every one that waits say for what, and until nothing is left to do.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use godwit_api::control::{Move, Page};

use crate::Asker;

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// What was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Looks {
    /// Times that it was looked.
    pub looks: u64,
    /// Moves that were seen waiting, each time anew.
    pub waiting: u64,
    /// Those of them that did not say for what.
    pub unexplained: u64,
    /// What was waited for, by code.
    pub codes: std::collections::BTreeMap<String, u64>,
}

impl Looks {
    /// Looks until no move waits or runs.
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
