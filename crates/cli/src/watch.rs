//! Implements `godwit watch`: what a client of a guest observes.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_prober::watch::{WatchEvent, WatchOptions, watch};

use crate::args::WatchArgs;
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, fields};
use crate::units::millis;

pub(crate) async fn run(
    args: WatchArgs,
    hosts: Option<&Path>,
    output: Output,
) -> Result<Exit, Failure> {
    let of_hosts_file = Hosts::load(hosts)?.watch.and_then(|watch| watch.namespace);
    let options = WatchOptions {
        port: args.port,
        least_gap: args.min_gap,
        duration: args.duration,
        namespace: args.namespace.or(of_hosts_file),
        ..WatchOptions::new(args.address)
    };
    let stopped = Arc::new(AtomicBool::new(false));
    let seen = stopped.clone();
    let watching = tokio::task::spawn_blocking(move || {
        watch(&options, &|| seen.load(Ordering::Relaxed), &mut |event| print(event, output))
    });
    let stop = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stopped.store(true, Ordering::Relaxed);
        }
    });
    let gaps = watching.await.map_err(|error| {
        Failure::new(Exit::Failure, format!("cannot probe the guest: {error}"), "")
    })??;
    stop.abort();
    let time = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), nanos);
    output.result(&gaps, || {
        fields(&[
            ("sent", gaps.sent.to_string()),
            ("received", gaps.received.to_string()),
            ("lost", gaps.lost.to_string()),
            ("longest gap", time(gaps.longest_gap_ns)),
            ("median round trip", time(gaps.median_rtt_ns)),
        ])
    })?;
    Ok(if gaps.received == 0 { Exit::Unreachable } else { Exit::Ok })
}

fn print(event: WatchEvent, output: Output) {
    let text = if output.is_json() {
        serde_json::to_string(&event).unwrap_or_default()
    } else {
        match event {
            WatchEvent::Answering { .. } => "answering".to_owned(),
            WatchEvent::Silent { .. } => "silent for a second".to_owned(),
            WatchEvent::Gap { length_ns, .. } => format!("gap of {}", nanos(length_ns)),
        }
    };
    // A closed output is no reason to stop the measurement.
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

#[expect(clippy::cast_precision_loss, reason = "for people: three digits are shown")]
fn nanos(ns: u64) -> String {
    millis(ns as f64 / 1e6)
}
