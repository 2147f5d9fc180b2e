//! Lying peers. They follow the session protocol, its handshakes, certificates and frames, and send
//! content drawn from a seed. No agent may accept it: the guest keeps running where it is, the
//! agents survive and refuse the peers for what they sent, and nothing is left over.

mod liar;
mod words;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use godwit_api::{IncomingAccepted, IncomingState, IncomingStatus};
use godwit_pki::{Authority, Grant, Identity, Role};
use godwit_qemu::{ByteSize, ResolvedSpec, VmName};
use godwit_types::{EngineKind, FailureCode, Outcome};
use godwit_wire::{Begin, Message, MigrationId};
use serde::{Deserialize, Serialize};

use liar::{LyingDestination, LyingSource};

use crate::namespace::in_namespace;
use crate::options::LabOptions;
use crate::trial::{Guest, GuestPlan, LIMIT, Trial, request_to, until};

/// Port of the lying destination, in the namespace of host b.
const PORT: u16 = 7799;
/// Name of the lying destination and of the lying source's VM.
const LIAR: &str = "liar";
/// Validity of its certificate, in days.
const CERTIFICATE_DAYS: u32 = 1;
/// Codes with which no lie may be refused. They mean a defect of the agent or an unknown state.
const WRONG_CODES: [FailureCode; 2] = [FailureCode::Internal, FailureCode::InDoubt];

/// Result of the liars of one kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LieReport {
    /// Kind of liar.
    pub what: String,
    /// Codes of the refusals, with their counts.
    #[serde(rename = "told")]
    pub refusals: Vec<String>,
    /// Failed check; `None` if all passed.
    pub error: Option<String>,
}

/// Runs `liars` lying destinations and as many lying sources against an agent, all with valid
/// certificates. Returns an empty list if this machine cannot run a lab.
///
/// # Errors
/// The lab cannot be started.
pub fn lies(seed: u64, liars: u64) -> Result<Vec<LieReport>> {
    let Some(trial) = Trial::begin_with("lies", LabOptions::default())? else {
        return Ok(Vec::new());
    };
    let destination = begin_destination(&trial, seed)?;
    let clean = trial.traces("b")?;
    let plan = GuestPlan {
        memory: vec![ByteSize::from_bytes((160 << 20) + (64 << 10))],
        fill: ByteSize::from_mib(40),
        workload: "dirty:rate=1500,ws=16M,order=random,zero=10,compressible=40".to_owned(),
        ..GuestPlan::new("web")
    };
    let mut guest = trial.guest("a", &plan)?;
    let mut reports = Vec::new();
    reports.push(report(
        &format!("{liars} destinations that say anything within a valid session"),
        |codes| {
            (0..liars).try_for_each(|number| {
                one_destination(&trial, &guest, &destination, codes)
                    .with_context(|| format!("destination {number}"))
            })?;
            expect_refusals(codes, liars)
        },
    ));
    reports.push(report(
        &format!("{liars} sources that say anything within a valid session"),
        |codes| {
            let identity = identity(&trial, "a")?;
            (0..liars).try_for_each(|number| {
                one_source(&trial, &identity, seed ^ number, codes)
                    .with_context(|| format!("source {number}"))?;
                trial.expect_traces("b", &clean)
            })?;
            expect_refusals(codes, liars)
        },
    ));
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

/// Count of each refusal code.
type Codes = BTreeMap<String, u64>;

fn report(what: &str, tried: impl FnOnce(&mut Codes) -> Result<()>) -> LieReport {
    let mut codes = Codes::new();
    let error = tried(&mut codes).err().map(|error| format!("{error:#}"));
    let refusals = codes.into_iter().map(|(code, count)| format!("{code} {count} times")).collect();
    LieReport { what: what.to_owned(), refusals, error }
}

/// Checks that every liar was refused, some for what they sent and not only because they hung up,
/// and none through a defect.
fn expect_refusals(codes: &Codes, liars: u64) -> Result<()> {
    let of = |code: FailureCode| codes.get(code.name()).copied().unwrap_or(0);
    ensure!(codes.values().sum::<u64>() == liars, "{liars} liars, but these refusals: {codes:?}");
    for code in WRONG_CODES {
        ensure!(of(code) == 0, "a lie was refused as {}: {codes:?}", code.name());
    }
    ensure!(of(FailureCode::ProtocolBroken) > 0, "no lie was noticed: {codes:?}");
    Ok(())
}

/// Loads the identity of one of the lab's hosts from its certificate.
fn identity(trial: &Trial, host: &str) -> Result<Identity> {
    let authority = Authority::open(&trial.pki())?.certificate();
    let file = |ending: &str| trial.pki().join(format!("{host}.{ending}"));
    Ok(Identity::load(&authority, &file("pem"), &file("key"))?)
}

/// Starts a lying destination beside the agent of host b, with its own certificate. The agent of
/// host a knows it as a peer.
fn begin_destination(trial: &Trial, seed: u64) -> Result<Arc<LyingDestination>> {
    let address: IpAddr = Ipv4Addr::new(10, 77, 0, 12).into();
    let grant = Grant {
        name: LIAR.to_owned(),
        role: Role::Host,
        addresses: vec![address],
        days: CERTIFICATE_DAYS,
    };
    Authority::open(&trial.pki())?.issue(&grant)?;
    trial.reconfigure("a", |config| {
        if let Some(peers) = config.get_mut("peers").and_then(toml::Value::as_table_mut) {
            peers.insert(LIAR.to_owned(), format!("https://{address}:{PORT}").into());
        }
    })?;
    let identity = identity(trial, LIAR)?;
    let destination =
        LyingDestination { identity, address, port: PORT, seed, lied: AtomicU64::new(0) };
    let destination = Arc::new(destination);
    let (liar, namespace) = (Arc::clone(&destination), trial.namespace("b"));
    // The thread waits for sources until this process ends.
    std::thread::spawn(move || in_namespace(&namespace, || liar.answer_all()));
    until("the lying destination listens", LIMIT, || {
        let connected =
            in_namespace(&trial.namespace("a"), || TcpStream::connect((address, PORT)))?;
        Ok(connected.is_ok().then_some(()))
    })?;
    Ok(destination)
}

/// Migrates to the lying destination and checks the refusal.
fn one_destination(
    trial: &Trial,
    guest: &Guest,
    destination: &LyingDestination,
    codes: &mut Codes,
) -> Result<()> {
    let (agent, lied) = (trial.agent_process("a")?, destination.lied.load(Ordering::SeqCst));
    let report =
        trial.begin_migration("web", "a", &request_to(LIAR, EngineKind::Godwit))?.report()?;
    let error = report.error.as_ref().with_context(|| format!("lie accepted: {report:#?}"))?;
    ensure!(report.outcome == Outcome::Failed && !error.message.is_empty(), "{report:#?}");
    ensure!(destination.lied.load(Ordering::SeqCst) > lied, "no lie was sent: {error:?}");
    *codes.entry(error.code.clone()).or_default() += 1;
    ensure!(agent.is_alive(), "the source's agent died");
    trial.expect_whole(guest).map(drop)
}

/// Migrates from a lying source and checks the refusal.
fn one_source(trial: &Trial, identity: &Identity, seed: u64, codes: &mut Codes) -> Result<()> {
    let agent = trial.agent_process("b")?;
    let record = std::fs::read_to_string(trial.paths().host("a").join("state/vms/web/vm.json"))?;
    let record: serde_json::Value = serde_json::from_str(&record)?;
    let mut spec: ResolvedSpec = serde_json::from_value(record["spec"].clone())?;
    spec.name = VmName::new(LIAR)?;
    let block_pages = spec
        .memory
        .iter()
        .map(|block| block.size.bytes() / u64::from(godwit_wire::PAGE_SIZE))
        .collect();
    // As another release would write it: the agent fills in the missing fields.
    let request = serde_json::json!({
        "spec": spec, "epoch": 2, "from": "a", "qemu_version": "7.2.0",
        "engine": EngineKind::Godwit,
    });
    let accepted: IncomingAccepted = trial.ask(trial.agent("b").post("/v1/incoming", &request))?;
    let migration: MigrationId = accepted.id.parse().ok().context("invalid migration ID")?;
    let to: SocketAddr = *accepted.addresses.first().context("the response has no address")?;
    let begin = Message::Begin(Begin { epoch: 2, incarnation: 0, run: true, block_pages });
    let liar = LyingSource { identity, destination: "b", to, migration, begin: &begin };
    in_namespace(&trial.namespace("a"), || liar.run(seed))??;
    let path = format!("/v1/incoming/{}", accepted.id);
    let status = until("the destination has decided", LIMIT, || {
        let status: IncomingStatus = trial.ask(trial.agent("b").get(&path))?;
        Ok((status.state != IncomingState::Receiving).then_some(status))
    })?;
    ensure!(status.state == IncomingState::Refused, "lie accepted: {status:#?}");
    *codes.entry(status.failure.context("the refusal has no reason")?.code).or_default() += 1;
    ensure!(agent.is_alive(), "the destination's agent died");
    Ok(())
}
