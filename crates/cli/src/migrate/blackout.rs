//! Blackout of a migration as an external client observes it: the prober in the hosts file returns
//! the longest gap in the guest's answers.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use godwit_prober::clock::monotonic_ns;
use godwit_prober::{AskError, Client};

use crate::output::Output;

/// Wait for the first answer of a guest that was not probed before.
const FIRST_ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// Wait for an answer after the migration.
const LAST_ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// A guest under observation.
#[derive(Debug)]
pub(super) struct BlackoutWatch {
    socket: PathBuf,
    address: IpAddr,
    since_ns: u64,
}

impl BlackoutWatch {
    /// Starts to probe the guest and waits until it answers.
    pub(super) async fn begin(socket: PathBuf, address: IpAddr) -> Result<BlackoutWatch, String> {
        let path = socket.clone();
        let answered = blocking(move || {
            let mut client = Client::connect(&path)?;
            client.watch(address)?;
            client.wait_answer(address, monotonic_ns(), FIRST_ANSWER_LIMIT)
        });
        match answered.await? {
            Some(since_ns) => Ok(BlackoutWatch { socket, address, since_ns }),
            None => Err(format!("the guest does not answer the probes at {address}")),
        }
    }

    /// Returns the longest gap since then, up to the first answer from now on, in milliseconds.
    pub(super) async fn end(self, output: Output) -> Option<f64> {
        let BlackoutWatch { socket, address, since_ns } = self;
        let gaps = blocking(move || {
            let mut client = Client::connect(&socket)?;
            match client.wait_answer(address, monotonic_ns(), LAST_ANSWER_LIMIT)? {
                Some(until_ns) => client.gaps(address, since_ns, until_ns).map(Some),
                None => Ok(None),
            }
        });
        match gaps.await {
            #[expect(
                clippy::cast_precision_loss,
                reason = "a gap is shorter than the 104 days that f64 holds exactly"
            )]
            Ok(Some(gaps)) => gaps.longest_gap_ns.map(|ns| ns as f64 / 1e6),
            Ok(None) => {
                let limit = LAST_ANSWER_LIMIT.as_secs();
                output.note(&format!(
                    "note: the guest at {address} has not answered for {limit} s: cannot measure \
                     the blackout"
                ));
                None
            }
            Err(why) => {
                output.note(&format!("note: the blackout is unknown: {why}"));
                None
            }
        }
    }
}

async fn blocking<T: Send + 'static>(
    ask: impl FnOnce() -> Result<T, AskError> + Send + 'static,
) -> Result<T, String> {
    match tokio::task::spawn_blocking(ask).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}
