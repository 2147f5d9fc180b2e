//! Starts and removes real labs with their own names. Needs root for namespaces; without root it
//! says so and passes.

use std::io::Write;
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use godwit_lab::{
    Family, LabName, LabOptions, LabPaths, LinkEngine, Programs, down, in_namespace, namespace,
    status, up,
};
use godwit_prober::clock::monotonic_ns;
use godwit_prober::watch::{WatchEvent, WatchOptions, watch};
use godwit_prober::{Client, Gaps};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        // `cargo test -- --list` and similar tools pass this to a test without the standard
        // harness.
        ["--list", ..] => Ok(()),
        _ => run_all(words.iter().find(|word| !word.starts_with('-')).copied().unwrap_or("")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:?}");
            ExitCode::FAILURE
        }
    }
}

type Test = (&'static str, fn(&LabName) -> Result<()>);

const TESTS: [Test; 8] = [
    ("kernel_lab_comes_up_and_leaves_nothing", kernel_lab_comes_up_and_leaves_nothing),
    ("emulated_link_delays_and_delivers", emulated_link_delays_and_delivers),
    ("lossy_link_loses_packets", lossy_link_loses_packets),
    ("lanes_are_networks_of_their_own", lanes_are_networks_of_their_own),
    ("capped_flows_deliver", capped_flows_deliver),
    ("up_is_idempotent_and_repairs", up_is_idempotent_and_repairs),
    ("down_works_without_its_state", down_works_without_its_state),
    ("what_can_not_come_up_leaves_nothing", what_can_not_come_up_leaves_nothing),
];

fn run_all(filter: &str) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    for (number, (test, run)) in
        TESTS.iter().enumerate().filter(|(_, (test, _))| test.contains(filter))
    {
        let prefix = format!("gwt{}-{number}", std::process::id());
        let state_dir = std::env::temp_dir().join(&prefix).join("lab");
        let name = LabName { prefix, state_dir };
        let outcome = run(&name);
        let left = down(&name).and_then(|_| leaves_nothing(&name));
        outcome.and(left).with_context(|| format!("{test} failed"))?;
        eprintln!("test {test} ... ok");
    }
    Ok(())
}

fn options(name: &LabName) -> LabOptions {
    let LabName { prefix, state_dir } = name.clone();
    LabOptions { agents: false, prefix, state_dir, ..LabOptions::default() }
}

fn programs() -> Programs {
    Programs::beside(env!("CARGO_BIN_EXE_godwit-lab").into())
}

fn leaves_nothing(name: &LabName) -> Result<()> {
    let left: Vec<String> =
        namespace::list()?.into_iter().filter(|found| found.starts_with(&name.prefix)).collect();
    ensure!(left.is_empty(), "namespaces left: {left:?}");
    ensure!(!name.state_dir.exists(), "{} still exists", name.state_dir.display());
    let parent = name.state_dir.parent().context("no parent")?;
    if parent.exists() {
        std::fs::remove_dir(parent)?;
    }
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!table.contains(&name.prefix), "a file system is still mounted");
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&command);
        ensure!(!text.contains(&format!("{}/", name.prefix)), "a process still runs: {text}");
    }
    Ok(())
}

/// Room for the probes of seconds in which this machine stalls.
const ECHO_BUFFER_BYTES: usize = 16 << 20;

/// Answers packets to the echo port at `address` in a namespace, until the namespace is gone.
fn echo(namespace: &str, address: &str) -> Result<()> {
    let socket = in_namespace(namespace, || UdpSocket::bind((address, 7)))??;
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, ECHO_BUFFER_BYTES)?;
    std::thread::spawn(move || {
        let mut bytes = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut bytes) {
            drop(socket.send_to(&bytes[..length], from));
        }
    });
    Ok(())
}

/// Gives host `letter` an address on the guest LAN, like an address of its guest.
fn guest_addresses(name: &LabName, letter: &str, addresses: &[&str]) -> Result<()> {
    for address in addresses {
        let namespace = format!("{}-{letter}", name.prefix);
        let ended = std::process::Command::new("ip")
            .args(["-n", &namespace, "addr", "add", address, "dev", "br-lan"])
            .status()?;
        ensure!(ended.success(), "cannot add {address}");
    }
    Ok(())
}

fn kernel_lab_comes_up_and_leaves_nothing(name: &LabName) -> Result<()> {
    let wanted = LabOptions { hosts: 3, link: Some("1gbit".parse()?), ..options(name) };
    let lab = up(&wanted, &programs())?;
    ensure!(lab.up && lab.engine == Some(LinkEngine::Kernel), "{lab}");
    // A mount and a process inside, as agents leave them.
    let ram = LabPaths::new(&name.state_dir).host("a").join("ram");
    rustix::mount::mount("godwit", &ram, "tmpfs", rustix::mount::MountFlags::empty(), None)?;
    guest_addresses(name, "b", &["10.88.0.21/24", "fd88::21/64"])?;
    for address in ["10.88.0.21", "fd88::21"] {
        echo(&format!("{}-b", name.prefix), address)?;
    }
    let mut client = Client::connect(&LabPaths::new(&name.state_dir).client_socket())?;
    let absent: IpAddr = "10.88.0.99".parse()?;
    client.watch(absent)?;
    for address in ["10.88.0.21", "fd88::21"] {
        let target: IpAddr = address.parse()?;
        client.watch(target)?;
        let first = client.wait_answer(target, 0, Duration::from_secs(20))?.context("no answer")?;
        // A hundred more, then the check.
        client
            .wait_answer(target, first + 100_000_000, Duration::from_secs(20))?
            .context("no further answer")?;
        let gaps = client.gaps(target, first, monotonic_ns())?;
        ensure!(gaps.received > 10 && !loses_packets(&gaps), "{address}: {gaps:?}");
    }
    let gaps = client.gaps(absent, 0, monotonic_ns())?;
    ensure!(gaps.received == 0 && gaps.sent > 10, "a missing target answers: {gaps:?}");
    down(name)?;
    leaves_nothing(name)?;
    down(name).map(drop)
}

/// Measures round trips over the migration network from host a to `address` on host b with the
/// prober. Counts from the first answer: before it the hosts resolve each other's hardware address,
/// and if one of those few packets is lost, the kernel repeats it only a second later.
fn migration_gaps(name: &LabName, address: &str) -> Result<Gaps> {
    echo(&format!("{}-b", name.prefix), address)?;
    let options = WatchOptions {
        namespace: Some(format!("{}-a", name.prefix)),
        duration: Some(Duration::from_secs(20)),
        ..WatchOptions::new(address.parse()?)
    };
    let answered = AtomicBool::new(false);
    watch(&options, &|| answered.load(Ordering::Relaxed), &mut |event| {
        answered.fetch_or(matches!(event, WatchEvent::Answering { .. }), Ordering::Relaxed);
    })?;
    let options = WatchOptions { duration: Some(Duration::from_millis(1500)), ..options };
    watch(&options, &|| false, &mut |_| {})
}

/// Returns whether a link loses packets. A few are lost on any link where this machine stalls: they
/// exceed the buffers on the way.
fn loses_packets(gaps: &Gaps) -> bool {
    gaps.lost * 4 > gaps.sent
}

fn emulated_link_delays_and_delivers(name: &LabName) -> Result<()> {
    let wanted = LabOptions {
        link: Some("1gbit".parse()?),
        rtt: "40ms".parse()?,
        force_emulator: true,
        ..options(name)
    };
    let lab = up(&wanted, &programs())?;
    ensure!(lab.up && lab.engine == Some(LinkEngine::Emulator), "{lab}");
    for address in ["10.77.0.12", "fd77::12"] {
        let gaps = migration_gaps(name, address)?;
        let rtt_ns = gaps.median_rtt_ns.context("no answer")?;
        ensure!((40_000_000..1_000_000_000).contains(&rtt_ns), "{address}: {gaps:?}");
        ensure!(!loses_packets(&gaps), "{address}: {gaps:?}");
    }
    let links = status(name)?.links;
    ensure!(links.len() == 2 && links.iter().all(|link| link.frames > 0), "{links:?}");
    Ok(())
}

fn lossy_link_loses_packets(name: &LabName) -> Result<()> {
    let wanted = LabOptions { loss: "20%".parse()?, force_emulator: true, ..options(name) };
    up(&wanted, &programs())?;
    let gaps = migration_gaps(name, "10.77.0.12")?;
    // 20 % each way: 36 % of the round trips.
    ensure!(gaps.received > 0 && gaps.lost * 10 > gaps.sent, "{gaps:?}");
    Ok(())
}

fn lanes_are_networks_of_their_own(name: &LabName) -> Result<()> {
    let lanes = vec!["1gbit".parse()?, "250mbit".parse()?];
    for force_emulator in [false, true] {
        let wanted =
            LabOptions { lanes: lanes.clone(), force_emulator, replace: true, ..options(name) };
        let lab = up(&wanted, &programs())?;
        let expected = ["10.77.0.12", "fd77::12", "10.77.1.12", "fd77:0:0:1::12"];
        ensure!(lab.up && lab.hosts[1].migration_addresses == expected, "{lab}");
        for address in expected {
            let gaps = migration_gaps(name, address)?;
            ensure!(gaps.received > 0, "{address}: {gaps:?}");
        }
        if force_emulator {
            let devices: Vec<String> =
                status(name)?.links.into_iter().map(|link| link.device).collect();
            ensure!(devices == ["mig0", "mig0", "mig1", "mig1"], "{devices:?}");
        }
    }
    let ipv6 = LabOptions { lanes, family: Family::Ipv6, replace: true, ..options(name) };
    let lab = up(&ipv6, &programs())?;
    ensure!(lab.hosts[0].migration_addresses == ["fd77::11", "fd77:0:0:1::11"], "{lab}");
    let again = up(&LabOptions { replace: false, ..ipv6 }, &programs())?;
    ensure!(again.up, "{again}");
    Ok(())
}

fn capped_flows_deliver(name: &LabName) -> Result<()> {
    let cap = Some("200mbit".parse()?);
    let wanted = LabOptions { link: Some("1gbit".parse()?), flow_cap: cap, ..options(name) };
    let lab = up(&wanted, &programs())?;
    ensure!(lab.engine == Some(LinkEngine::Emulator), "{lab}");
    let listener =
        in_namespace(&format!("{}-b", name.prefix), || TcpListener::bind(("10.77.0.12", 7)))??;
    let receiving = std::thread::spawn(move || -> std::io::Result<u64> {
        std::io::copy(&mut listener.accept()?.0, &mut std::io::sink())
    });
    let mut sender =
        in_namespace(&format!("{}-a", name.prefix), || TcpStream::connect(("10.77.0.12", 7)))??;
    sender.write_all(&vec![1; 4 << 20])?;
    drop(sender);
    let received = receiving.join().map_err(|_| anyhow!("the receiver panicked"))??;
    ensure!(received == 4 << 20, "only {received} bytes arrived");
    Ok(())
}

fn up_is_idempotent_and_repairs(name: &LabName) -> Result<()> {
    let wanted = LabOptions { rtt: "10ms".parse()?, force_emulator: true, ..options(name) };
    let first = up(&wanted, &programs())?;
    let prober = |lab: &godwit_lab::LabStatus| lab.client.as_ref().and_then(|client| client.prober);
    let again = up(&wanted, &programs())?;
    ensure!(prober(&first) == prober(&again), "the prober was started twice");
    let other = LabOptions { rtt: "20ms".parse()?, ..wanted.clone() };
    let refused = up(&other, &programs()).err().context("another lab was started over this one")?;
    ensure!(format!("{refused:#}").contains("--replace"), "{refused:#}");

    // All processes of the lab die. `status` reports that, and `up` starts them again.
    for space in ["client", "link"] {
        for pid in namespace::processes(&format!("{}-{space}", name.prefix))? {
            let pid = rustix::process::Pid::from_raw(pid).context("no pid")?;
            let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
            rustix::event::poll(
                &mut [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)],
                None,
            )?;
        }
    }
    let broken = status(name)?;
    ensure!(!broken.up && broken.problems.len() == 2, "{broken}");
    let repaired = up(&wanted, &programs())?;
    ensure!(repaired.up && prober(&repaired).is_some(), "{repaired}");
    let gaps = migration_gaps(name, "10.77.0.12")?;
    ensure!(gaps.median_rtt_ns.is_some_and(|rtt_ns| rtt_ns >= 10_000_000), "{gaps:?}");

    let replaced = up(&LabOptions { replace: true, ..other }, &programs())?;
    ensure!(
        replaced.up
            && replaced
                .options
                .is_some_and(|options| options.rtt == "20ms".parse().unwrap_or_default()),
        "not replaced"
    );
    Ok(())
}

fn down_works_without_its_state(name: &LabName) -> Result<()> {
    let wanted = LabOptions { rtt: "10ms".parse()?, force_emulator: true, ..options(name) };
    up(&wanted, &programs())?;
    std::fs::remove_file(LabPaths::new(&name.state_dir).state_file())?;
    let refused = up(&wanted, &programs()).err().context("a lab was started over another")?;
    ensure!(format!("{refused:#}").contains("godwit-lab down"), "{refused:#}");
    down(name)?;
    leaves_nothing(name)
}

fn what_can_not_come_up_leaves_nothing(name: &LabName) -> Result<()> {
    // The networks exist by the time the first process fails.
    let nothing = Programs { lab: "/bin/false".into(), godwit: "/bin/false".into() };
    let failed =
        up(&options(name), &nothing).err().context("a lab without its programs started")?;
    ensure!(format!("{failed:#}").contains("client prober"), "{failed:#}");
    leaves_nothing(name)?;
    let no_qemu = LabOptions { agents: true, qemu: Some("/nowhere/qemu".into()), ..options(name) };
    let failed = up(&no_qemu, &programs()).err().context("a lab without QEMU started")?;
    ensure!(format!("{failed:#}").contains("no QEMU"), "{failed:#}");
    leaves_nothing(name)
}
