//! Measures the lab's links with iperf3: `cargo run --release -p godwit-lab --example link_bench`.
//!
//! Prints, per link, TCP's goodput in each direction in turn, its theoretical maximum, the round
//! trip while the link is loaded and while it is idle, and the emulator's drops. Needs root and
//! iperf3.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use godwit_lab::iperf::Iperf;
use godwit_lab::{
    LabName, LabOptions, LabStatus, Programs, daemon, down, in_namespace, status, up,
};
use godwit_prober::Gaps;
use godwit_prober::watch::{WatchOptions, watch};

/// TCP over IPv4 with timestamps: 1448 bytes of data in a frame of 1514.
const GOODPUT_SHARE: f64 = 1448.0 / 1514.0;
const DURATION: Duration = Duration::from_secs(6);
/// Excluded at the start, because TCP's slow start is not measured.
const OMITTED: Duration = Duration::from_secs(3);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["daemon", kind, "--config", config] = words[..] {
        return daemon::run(kind.parse()?, Path::new(config));
    }
    let name = LabName { prefix: "gwbench".to_owned(), state_dir: "/run/gwbench/lab".into() };
    println!(
        "link      rtt    loss    by        control  a to b Gb/s  b to a Gb/s  share of possible  \
         idle rtt ms  loaded rtt ms  dropped"
    );
    let outcome = measure_all(&name, words.contains(&"--emulator"));
    down(&name)?;
    drop(std::fs::remove_dir("/run/gwbench"));
    outcome
}

fn measure_all(name: &LabName, force_emulator: bool) -> Result<()> {
    let links = [
        (Some("1gbit"), "0", "0"),
        (Some("1gbit"), "10ms", "0"),
        (Some("1gbit"), "40ms", "0"),
        (Some("5gbit"), "10ms", "0"),
        (None, "10ms", "0"),
        (None, "0", "0"),
        (Some("1gbit"), "10ms", "0.1%"),
    ];
    for (link, rtt, loss) in links {
        let options = LabOptions {
            link: link.map(str::parse).transpose()?,
            rtt: rtt.parse()?,
            loss: loss.parse()?,
            force_emulator,
            agents: false,
            replace: true,
            prefix: name.prefix.clone(),
            state_dir: name.state_dir.clone(),
            ..LabOptions::default()
        };
        let lab = up(&options, &Programs::beside(std::env::current_exe()?))?;
        for control in ["cubic", "bbr"] {
            if !has_control(control)? {
                continue;
            }
            measure(name, &options, &lab, control)?;
        }
    }
    Ok(())
}

fn measure(name: &LabName, options: &LabOptions, lab: &LabStatus, control: &str) -> Result<()> {
    let b = &lab.hosts[1].namespace;
    let address = &lab.hosts[1].migration_addresses[0];
    let echo = in_namespace(b, || std::net::UdpSocket::bind((address.as_str(), 7)))??;
    let answering = echo.try_clone()?;
    let echoing = std::thread::spawn(move || {
        let mut bytes = [0; 2048];
        while let Ok((length, from)) = answering.recv_from(&mut bytes) {
            if length == 0 || answering.send_to(&bytes[..length], from).is_err() {
                return;
            }
        }
    });
    let outcome = measure_between(name, options, lab, control);
    // An empty datagram ends the echo.
    let own = echo.local_addr()?;
    in_namespace(b, || {
        std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(&[], own))
    })??;
    drop(echoing.join());
    outcome
}

fn measure_between(
    name: &LabName,
    options: &LabOptions,
    lab: &LabStatus,
    control: &str,
) -> Result<()> {
    let (a, b) = (&lab.hosts[0].namespace, &lab.hosts[1].namespace);
    let address = &lab.hosts[1].migration_addresses[0];
    let dropped = |lab: &LabStatus| lab.links.iter().map(|link| link.dropped).sum::<u64>();
    let before = dropped(&status(name)?);
    let idle = round_trips(a, address, Duration::from_secs(1))?;
    let there = iperf(a, b, address, control)?;
    let back = iperf(b, a, &lab.hosts[0].migration_addresses[0], control)?;
    let loaded = std::thread::scope(|scope| -> Result<Gaps> {
        let load = scope.spawn(|| iperf(a, b, address, control));
        let loaded = round_trips(a, address, Duration::from_secs(8))?;
        drop(load.join());
        Ok(loaded)
    })?;
    let share = options.link.map_or_else(
        || "-".to_owned(),
        |rate| {
            let most = GOODPUT_SHARE * rate.bits_per_second() as f64;
            format!("{:.1} % / {:.1} %", 100.0 * there / most, 100.0 * back / most)
        },
    );
    let engine = lab.engine.map(|engine| engine.to_string()).unwrap_or_default();
    let link = options.link.map_or_else(|| "unshaped".to_owned(), |rate| rate.to_string());
    println!(
        "{link:<9} {:<6} {:<7} {engine:<9} {control:<8} {:<12.3} {:<12.3} {share:<18} {:<12.2} \
         {:<14.2} {}",
        options.rtt.to_string(),
        options.loss.to_string(),
        there / 1e9,
        back / 1e9,
        milliseconds(&idle),
        milliseconds(&loaded),
        dropped(&status(name)?) - before,
    );
    Ok(())
}

fn milliseconds(gaps: &Gaps) -> f64 {
    gaps.median_rtt_ns.map_or(f64::NAN, |ns| ns as f64 / 1e6)
}

fn round_trips(namespace: &str, address: &str, duration: Duration) -> Result<Gaps> {
    let options = WatchOptions {
        namespace: Some(namespace.to_owned()),
        duration: Some(duration),
        ..WatchOptions::new(address.parse()?)
    };
    watch(&options, &|| false, &mut |_| {})
}

/// Measures TCP's goodput in bit/s with one stream.
fn iperf(from: &str, to: &str, address: &str, control: &str) -> Result<f64> {
    let iperf = Iperf {
        from,
        to,
        addresses: &[address.parse()?],
        streams: 1,
        duration: DURATION,
        omitted: OMITTED,
        congestion: Some(control),
    };
    iperf.goodput()
}

/// Returns whether this kernel has a congestion control.
fn has_control(control: &str) -> Result<bool> {
    let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")?;
    Ok(known.split_whitespace().any(|name| name == control))
}
