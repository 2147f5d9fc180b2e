//! Peers that lie: they keep to the session, its handshake and its frames, and say in it whatever a seed draws. Nobody may fall for it:
//! the guest runs on where it is, the agents live, and nothing is left over.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_api::{IncomingAccepted, IncomingState, IncomingStatus};
use godwit_lanes::{Incoming, Lane, Stream, StreamSender};
use godwit_migration::drive::{Hello, say_hello};
use godwit_migration::{EngineKind, Outcome};
use godwit_qemu::{ByteSize, ResolvedSpec};
use godwit_wire::{
    Begin, BlockRun, CONTROL_STREAM, Message, MigrationId, PAGE_IN_STREAM, PagesEnd, Running, SUPPORTED,
    Zeros,
};
use serde::{Deserialize, Serialize};

use super::random::Random;
use crate::namespace::in_namespace;
use crate::options::LabOptions;
use crate::trial::{Guest, GuestPlan, LIMIT, Trial, request_to, until};

/// The most messages of one.
const MESSAGES: u64 = 40;
/// Where the lying destination answers, in the namespace of host b.
const PORT: u16 = 7799;
/// Its name.
const LIAR: &str = "liar";
/// How long either end may be silent.
const SILENCE: Duration = Duration::from_secs(20);

/// What came of the liars of one kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LieReport {
    /// Which kind.
    pub what: String,
    /// What was said of them.
    pub told: Vec<String>,
    /// What is not as it must be; none: all is.
    pub error: Option<String>,
}

/// Has so many peers lie to an agent as its destination, and as many as its source; none where this machine can't have a lab.
///
/// # Errors
/// The lab does not come up.
pub fn lies(seed: u64, liars: u64) -> Result<Vec<LieReport>> {
    let options = LabOptions { insecure: true, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("lies", options)? else { return Ok(Vec::new()) };
    let address: IpAddr = Ipv4Addr::new(10, 77, 0, 12).into();
    trial.reconfigure("a", |config| {
        if let Some(peers) = config.get_mut("peers").and_then(toml::Value::as_table_mut) {
            peers.insert(LIAR.to_owned(), format!("http://{address}:{PORT}").into());
        }
    })?;
    let clean = trial.traces("b")?;
    let plan = GuestPlan {
        memory: vec![ByteSize::from_bytes((160 << 20) + (64 << 10))],
        fill: ByteSize::from_mib(40),
        workload: "dirty:rate=1500,ws=16M,order=random,zero=10,compressible=40".to_owned(),
        ..GuestPlan::new("web")
    };
    let mut guest = trial.guest("a", &plan)?;
    let mut reports = Vec::new();
    let namespace = trial.namespace("b");
    // Ends with this process: it waits for sources.
    std::thread::spawn(move || in_namespace(&namespace, || answer_all(address, seed)));
    until("the lying destination listens", LIMIT, || {
        let connected = in_namespace(&trial.namespace("a"), || TcpStream::connect((address, PORT)))?;
        Ok(connected.is_ok().then_some(()))
    })?;
    reports.push(report(&format!("{liars} destinations that say anything within a valid session"), |told| {
        (0..liars).try_for_each(|_| one_destination(&trial, &guest, told))
    }));
    reports.push(report(&format!("{liars} sources that say anything within a valid session"), |told| {
        (0..liars).try_for_each(|number| {
            one_source(&trial, seed ^ number, told).with_context(|| format!("source {number}"))?;
            trial.expect_traces("b", &clean)
        })
    }));
    reports.push(report("a new migration after them", |_| {
        let done = trial.begin_migration("web", "a", &guest.to_other_host())?.report()?;
        ensure!(done.outcome == Outcome::Completed, "{done:#?}");
        "b".clone_into(&mut guest.host);
        trial.expect_whole(&guest).map(drop)
    }));
    if reports.iter().all(|report| report.error.is_none()) {
        trial.finish()?;
    }
    Ok(reports)
}

fn report(what: &str, tried: impl FnOnce(&mut Vec<String>) -> Result<()>) -> LieReport {
    let mut told = Vec::new();
    let error = tried(&mut told).err().map(|error| format!("{error:#}"));
    // Each kind of answer once.
    told.sort();
    told.dedup();
    LieReport { what: what.to_owned(), told, error }
}

/// A migration to a destination that lies.
fn one_destination(trial: &Trial, guest: &Guest, told: &mut Vec<String>) -> Result<()> {
    let agent = trial.agent_process("a")?;
    let report = trial.begin_migration("web", "a", &request_to(LIAR, EngineKind::Godwit))?.report()?;
    let error = report.error.as_ref().with_context(|| format!("it fell for it: {report:#?}"))?;
    ensure!(report.outcome == Outcome::Failed && !error.message.is_empty(), "{report:#?}");
    told.push(error.code.clone());
    ensure!(agent.is_alive(), "the source's agent died");
    trial.expect_whole(guest).map(drop)
}

/// Answers HTTP as an agent does that takes everything, and on the lane says anything. For a thread within the namespace, to its end.
fn answer_all(address: IpAddr, seed: u64) -> Result<()> {
    let http = TcpListener::bind((address, PORT))?;
    for (number, stream) in (0_u64..).zip(http.incoming().flatten()) {
        if let Err(error) = answer(&stream, address, seed ^ (number << 32)) {
            eprintln!("  the lying destination: {error:#}");
        }
    }
    Ok(())
}

/// One request a connection, as the agents' client makes them.
fn answer(mut stream: &TcpStream, address: IpAddr, seed: u64) -> Result<()> {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut body_bytes = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        if header.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            body_bytes = value.trim().parse()?;
        }
    }
    std::io::copy(&mut reader.take(body_bytes), &mut std::io::sink())?;
    if !request.starts_with("POST") {
        write!(stream, "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n")?;
        return Ok(());
    }
    let lane = godwit_lanes::listen(SocketAddr::new(address, 0))?;
    let id = "0123456789abcdef".repeat(2);
    let body = format!("{{\"id\":\"{id}\",\"addresses\":[\"{}\"]}}", lane.local_addr()?);
    write!(stream, "HTTP/1.1 201 Created\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
    std::thread::spawn(move || {
        let listeners = [lane];
        while let Ok(Some(stream)) = godwit_lanes::accept(&listeners, SILENCE) {
            std::thread::spawn(move || drop(lie_to_source(&stream, seed)));
        }
    });
    Ok(())
}

/// The destination's side of a stream: welcomes it, says that the shadow fits, then anything.
fn lie_to_source(stream: &Stream, seed: u64) -> Result<()> {
    stream.limit_silence(SILENCE)?;
    let (mut sender, mut receiver) = (stream.sender(), stream.receiver());
    let Incoming::Message(Message::Hello { stream: number, .. }) = receiver.receive()? else { return Ok(()) };
    sender.send(&Message::Welcome { version: SUPPORTED.newest })?;
    if number == CONTROL_STREAM {
        // Begin, and pings.
        while !matches!(receiver.receive()?, Incoming::Message(Message::Begin(_))) {}
        sender.send(&Message::Ready)?;
    }
    say_anything(&mut sender, &mut Random(seed ^ u64::from(number)))?;
    stream.close();
    Ok(())
}

/// A migration from a source that lies.
fn one_source(trial: &Trial, seed: u64, told: &mut Vec<String>) -> Result<()> {
    let agent = trial.agent_process("b")?;
    let record = std::fs::read_to_string(trial.paths().host("a").join("state/vms/web/vm.json"))?;
    let record: serde_json::Value = serde_json::from_str(&record)?;
    let mut spec: ResolvedSpec = serde_json::from_value(record["spec"].clone())?;
    LIAR.clone_into(&mut spec.name);
    let block_pages =
        spec.memory.iter().map(|block| block.size.bytes() / u64::from(godwit_wire::PAGE_SIZE)).collect();
    // As another release would write it: what it leaves out is left to the agent.
    let request = serde_json::json!({
        "spec": spec, "epoch": 2, "from": "a", "qemu_version": "7.2.0", "engine": EngineKind::Godwit,
    });
    let accepted: IncomingAccepted = trial.ask(trial.agent("b").post("/v1/incoming", &request))?;
    let migration: MigrationId = accepted.id.parse().ok().context("no id")?;
    let to = *accepted.addresses.first().context("no address")?;
    let begin = Message::Begin(Begin { epoch: 2, run: true, block_pages });
    // What is said may end it at any word.
    let _ = in_namespace(&trial.namespace("a"), || lie_to_destination(to, migration, &begin, seed))?;
    let path = format!("/v1/incoming/{}", accepted.id);
    let status = until("the destination has decided", LIMIT, || {
        let status: IncomingStatus = trial.ask(trial.agent("b").get(&path))?;
        Ok((status.state != IncomingState::Receiving).then_some(status))
    })?;
    ensure!(status.state == IncomingState::Refused, "it fell for it: {status:#?}");
    told.push(status.failure.context("no reason")?.code);
    ensure!(agent.is_alive(), "the destination's agent died");
    Ok(())
}

fn lie_to_destination(to: SocketAddr, migration: MigrationId, begin: &Message, seed: u64) -> Result<()> {
    let open = |number: u16| -> Result<Stream> {
        let stream = godwit_lanes::connect(Lane { from: None, to }, SILENCE)?;
        stream.limit_silence(SILENCE)?;
        let hello = Hello { migration, stream: number, versions: SUPPORTED };
        say_hello(&mut stream.sender(), &mut stream.receiver(), hello)?;
        Ok(stream)
    };
    let control = open(CONTROL_STREAM)?;
    let mut sender = control.sender();
    sender.send(begin)?;
    let mut receiver = control.receiver();
    while !matches!(receiver.receive()?, Incoming::Message(Message::Ready)) {}
    let mut random = Random(seed);
    // On a data stream or a page-in stream as well, or on the control stream alone.
    let further = [Some(1), Some(PAGE_IN_STREAM), None][random.below(3)];
    let mut streams = vec![control];
    if let Some(number) = further {
        streams.push(open(number)?);
    }
    for stream in streams.iter().rev() {
        say_anything(&mut stream.sender(), &mut random)?;
    }
    Ok(())
}

fn say_anything(sender: &mut StreamSender, random: &mut Random) -> Result<()> {
    for _ in 0..1 + random.next() % MESSAGES {
        sender.send(&anything(random))?;
    }
    Ok(())
}

/// A message of any kind but those of pages, whose bytes follow it, with small numbers and with any. Nobody refuses or cancels: that
/// would be no lie.
fn anything(random: &mut Random) -> Message {
    let stream = u16::try_from(random.number() % 1100).unwrap_or(0);
    let runs = |random: &mut Random| {
        let run = |random: &mut Random| BlockRun {
            block: u16::try_from(random.next() % 3).unwrap_or(0),
            first: random.number(),
            count: random.number().max(1),
        };
        (0..1 + random.below(5)).map(|_| run(random)).collect::<Vec<_>>()
    };
    match random.below(21) {
        0 => Message::Welcome { version: stream },
        1 => Message::Begin(Begin { epoch: random.number(), run: true, block_pages: vec![random.number()] }),
        2 => Message::Ready,
        3 => Message::Zeros(Zeros { round: stream.into(), runs: runs(random) }),
        4 => Message::UnitEnd,
        5 => Message::UnitsApplied { stream, units: random.number() },
        6 => Message::CloseStream { stream },
        7 => Message::StreamClosed { stream, units: random.number() },
        8 => Message::PagesEnd(PagesEnd {
            pages: random.number(),
            units: vec![random.number(); random.below(4)],
        }),
        9 => Message::Ping { sent_ns: random.number() },
        10 => Message::Pong { sent_ns: random.number(), answered_ns: random.number() },
        11 => Message::DeviceState(vec![0x5a; 1 + random.below(1000)]),
        12 => Message::DeviceStateEnd { bytes: random.number() },
        13 => Message::Commit { epoch: 2 },
        14 => Message::Running(Running {
            commit_ns: 1,
            loaded_ns: random.number(),
            running_ns: random.number(),
        }),
        15 => Message::Padding { bytes: 1 + u32::from(stream) },
        16 => Message::Missing { runs: runs(random) },
        17 => Message::PreparePageIn,
        18 => Message::PageInReady { able: random.below(2) == 0 },
        19 => Message::Remaining { runs: runs(random) },
        _ => Message::RemainingEnd { pages: random.number() },
    }
}
