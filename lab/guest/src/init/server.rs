//! Control protocol on TCP port 7000: one line in, one line out. See `godwit_guest::control`.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use godwit_guest::{
    control::{Answer, CONTROL_PORT, LINE_BYTES, Request, WrongPage},
    kernels::{self, MOST_MILLIS},
    memory::{Memory, Verdict},
    workload::Workload,
};
use rustix::system::RebootCommand;

use crate::{
    BACKGROUND, PROMPT,
    guest::Guest,
    network,
    tasks::{panic_text, set_niceness},
};

/// Maximum simultaneous connections; more are closed at once.
const MOST_CONNECTIONS: usize = 32;

static CONNECTIONS: AtomicUsize = AtomicUsize::new(0);

/// Counts a connection during its lifetime.
struct Seat;

impl Seat {
    fn take() -> Option<Seat> {
        let seat = Seat;
        (CONNECTIONS.fetch_add(1, Ordering::Relaxed) < MOST_CONNECTIONS).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        CONNECTIONS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts forever, with a thread per connection.
pub(crate) fn serve(guest: &Arc<Guest>) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, CONTROL_PORT))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, CONTROL_PORT)))
        .context("TCP port 7000")?;
    loop {
        let Ok((connection, _)) = listener.accept() else {
            continue;
        };
        let Some(seat) = Seat::take() else { continue };
        let guest = guest.clone();
        let talk = move || {
            let _seat = seat;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| talk(&guest, connection))) {
                guest.report(&format!("control: panic: {}", panic_text(&*panic)));
            }
        };
        thread::Builder::new()
            .name("control".to_owned())
            .spawn(talk)
            .context("a thread for a connection")?;
    }
}

/// Serves one connection until it closes or sends an invalid line.
fn talk(guest: &Guest, mut connection: TcpStream) -> anyhow::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut line = String::new();
    loop {
        line.clear();
        Read::by_ref(&mut reader).take(LINE_BYTES).read_line(&mut line)?;
        if !line.ends_with('\n') {
            return Ok(());
        }
        let answer = answer(guest, &line);
        let mut bytes = serde_json::to_vec(&answer)?;
        bytes.push(b'\n');
        connection.write_all(&bytes)?;
    }
}

fn answer(guest: &Guest, line: &str) -> Answer {
    carry_out(guest, line).unwrap_or_else(|error| Answer {
        ok: false,
        error: Some(format!("{error:#}")),
        ..guest.status()
    })
}

fn carry_out(guest: &Guest, line: &str) -> anyhow::Result<Answer> {
    match serde_json::from_str(line).context("no request of the control protocol")? {
        Request::Status {} => {}
        Request::Workload { spec } => {
            let workload: Workload = spec.parse()?;
            filled(guest)?;
            guest.set_workload(workload);
        }
        Request::Verify {} => return verify(guest),
        Request::Kernels { millis } => return compute(guest, millis),
        Request::FillDisks { disks, version } => guest.disks.fill(&disks, version)?,
        Request::WriteDisks { bytes_per_s, region_bytes } => {
            guest.disks.set_pace(bytes_per_s, region_bytes)?;
        }
        Request::VerifyDisks {} => return verify_disks(guest),
        Request::Poweroff {} => {
            // A guest without a NIC powers off, too.
            network::take_down().ok();
            rustix::system::reboot(RebootCommand::PowerOff).context("switching off")?;
        }
        // It returns only where the kernel has no such request.
        Request::Panic {} => std::fs::write("/proc/sysrq-trigger", "c").context("panicking")?,
    }
    Ok(guest.status())
}

/// Returns the memory after its first fill; before that, its content is undefined.
fn filled(guest: &Guest) -> anyhow::Result<&Memory> {
    match guest.memory.get() {
        Some(memory) if guest.ready.load(Ordering::Acquire) => Ok(memory),
        Some(memory) => {
            bail!(
                "the memory is still being filled ({} of {} pages): ask again",
                memory.writes(),
                memory.pages()
            )
        }
        None => bail!("the memory is not allocated yet: ask again"),
    }
}

/// Runs the kernels at the workload's priority.
fn compute(guest: &Guest, millis: u64) -> anyhow::Result<Answer> {
    if millis > MOST_MILLIS {
        bail!("{millis} ms are longer than the {MOST_MILLIS} ms that a kernel may run");
    }
    set_niceness(BACKGROUND);
    let rates = kernels::measure(Duration::from_millis(millis));
    set_niceness(PROMPT);
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    Ok(Answer {
        kernels: Some(rates?),
        extensions: kernels::extensions(&cpuinfo),
        ..guest.status()
    })
}

fn verify(guest: &Guest) -> anyhow::Result<Answer> {
    let memory = filled(guest)?;
    let started = Instant::now();
    // At the workload's priority, because the workload must go on meanwhile.
    set_niceness(BACKGROUND);
    let verdict = memory.verify();
    set_niceness(PROMPT);
    Ok(judged(guest, verdict, started))
}

fn verify_disks(guest: &Guest) -> anyhow::Result<Answer> {
    let started = Instant::now();
    set_niceness(BACKGROUND);
    let verdict = guest.disks.verify();
    set_niceness(PROMPT);
    Ok(judged(guest, verdict?, started))
}

/// Returns the answer for a verdict.
fn judged(guest: &Guest, verdict: Verdict, started: Instant) -> Answer {
    let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let wrong_pages = (verdict.wrong > 0).then(|| format!("{} pages wrong", verdict.wrong));
    let error = wrong_pages.or(verdict.wrong_counts);
    Answer {
        ok: error.is_none(),
        error,
        pages: verdict.pages,
        wrong: Some(verdict.wrong),
        first_wrong: verdict.first_wrong.map(|(page, why)| WrongPage { page, why }),
        duration_ms: Some(duration_ms),
        ..guest.status()
    }
}
