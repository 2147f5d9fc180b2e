//! Runs a liar against a manager and checks that each lie is shown and nothing of other hosts
//! changes.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use godwit_api::control::{ManagedHost, NameConflict, Page, VmSummary};
use serde_json::json;

use crate::Asker;
use crate::liar::{Liar, Lie};

/// Longest time until the manager has read a lie. It exceeds the time for reading a faulty host and
/// the delay before the manager reconnects.
const LIMIT: Duration = Duration::from_secs(90);
/// Poll interval.
const LOOK: Duration = Duration::from_millis(2);
/// Polls after which a message is repeated, because the manager may have missed it.
const LOOKS: u32 = 250;
/// Lies between two checks of all VMs of the other hosts.
const LIES_A_LOOK: u64 = 25;

/// Results of lies.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Lied {
    /// Messages sent, each a lie.
    pub messages: u64,
    /// Claims of other hosts' VMs.
    pub claims: u64,
    /// Messages with a value that no agent reports.
    pub impossible: u64,
    /// Lies of both kinds that the manager showed, as a conflict or as a fault.
    pub shown: u64,
    /// First lies that it did not show.
    pub unshown: Vec<String>,
    /// Changes of other hosts.
    pub changed: Vec<String>,
}

/// State of a VM as an operator sees it, which no lie may change.
type Seen = Vec<(String, String, String, u64, bool, bool)>;

async fn seen(asker: &mut Asker, liar: &str) -> Result<Seen> {
    let page: Page<VmSummary> = asker.get("/api/v1/vms?limit=1000").await?;
    let others = page.items.into_iter().filter(|vm| vm.host != liar);
    let fields = |vm: VmSummary| {
        (vm.name, vm.host, vm.state.to_string(), vm.memory_bytes, vm.in_doubt, vm.is_current)
    };
    Ok(others.map(fields).collect())
}

/// Adds the liar to the cluster and makes it send this many lies.
///
/// # Errors
/// The manager does not answer or does not read the liar's messages.
pub async fn lie(asker: &mut Asker, liar: &mut Liar, messages: u64) -> Result<Lied> {
    let before = seen(asker, liar.name()).await?;
    let host = json!({ "name": liar.name(), "address": liar.address() });
    let _: serde_json::Value = asker.post("/api/v1/hosts", &host).await?;
    let mut lied = Lied::default();
    let path = format!("/api/v1/hosts/{}", liar.name());
    while !liar.is_connected() {
        tokio::time::sleep(LOOK).await;
    }
    let mut refused = until_received(asker, liar, &path, 0).await?.refused_reports;
    for _ in 0..messages {
        let (lie, number) = liar.lie()?;
        let host = until_received(asker, liar, &path, number).await?;
        lied.messages += 1;
        let is_shown = match &lie {
            Lie::Claim(vm) => {
                lied.claims += 1;
                let page: Page<NameConflict> =
                    asker.get("/api/v1/name-conflicts?limit=1000").await?;
                let of_liar = |one: &NameConflict| {
                    one.vm == *vm && one.claims.iter().any(|claim| claim.host == liar.name())
                };
                Some(page.items.iter().any(of_liar))
            }
            Lie::Impossible(_) => {
                lied.impossible += 1;
                Some(host.summary.fault.is_some() && host.refused_reports > refused)
            }
            Lie::OfItself => None,
        };
        refused = host.refused_reports;
        match is_shown {
            Some(true) => lied.shown += 1,
            Some(false) if lied.unshown.len() < 10 => {
                lied.unshown.push(format!("{number}: {lie:?}"));
            }
            _ => {}
        }
        if (number % LIES_A_LOOK == 0 || number == messages) && lied.changed.len() < 10 {
            let now = seen(asker, liar.name()).await?;
            let changed = before.iter().filter(|vm| !now.contains(vm));
            lied.changed.extend(changed.map(|vm| format!("{number}: {vm:?}")));
        }
    }
    Ok(lied)
}

/// Waits until the manager has read the liar's number.
async fn until_received(
    asker: &mut Asker,
    liar: &Liar,
    path: &str,
    number: u64,
) -> Result<ManagedHost> {
    let began = Instant::now();
    #[expect(clippy::cast_precision_loss, reason = "numbers of messages")]
    let load = number as f64;
    for look in 1.. {
        let host: ManagedHost = asker.get(path).await?;
        if host.info.is_some() && (host.summary.load_average_1min - load).abs() < 0.5 {
            return Ok(host);
        }
        if began.elapsed() > LIMIT {
            bail!("the manager has not read message {number}: {:?}", host.summary);
        }
        // The message was lost if the connection had ended.
        if look % LOOKS == 0 && liar.is_connected() {
            liar.repeat();
        }
        tokio::time::sleep(LOOK).await;
    }
    bail!("the manager has not read message {number}")
}
