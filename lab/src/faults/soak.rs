//! Soak: many moves of several guests at once under random faults. No guest may be lost or doubled,
//! and no page may be wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_qemu::ByteSize;
use godwit_types::{EngineKind, TrackingUse};

use super::Fault;
use super::blow::Blow;
use super::moving::Moving;
use super::verdict::{remove_ended, settled};
use crate::options::{Hooks, LabOptions};
use crate::random::Random;
use crate::trial::{Guest, GuestPlan, Trial, VcpuWatch, other_host, request_to};

/// Rate of a host's link.
const LINK: &str = "1gbit";
/// Workload that writes all the time, far less than the link carries for all guests.
const BUSY: &str = "dirty:rate=300,ws=4M,order=random,zero=15,compressible=40,touch=words:24";
/// Longest wait for a hold point, which need not be reached.
const POINT_LIMIT: Duration = Duration::from_secs(20);
/// Longest duration of a wave's migrations once nothing disturbs them.
const WAVE_LIMIT: Duration = Duration::from_secs(120);
/// Hold points at which a fault is injected into the agents of either host.
const POINTS: [&str; 12] = [
    "host.preflight",
    "host.incoming-prepared",
    "source.send-first-round",
    "source.send-round",
    "source.write-device-state",
    "source.send-commit",
    "source.release-guest",
    "destination.finish-load",
    "destination.run-guest",
    "destination.promote",
    "host.promoted",
    "destination.send-running",
];
/// Faults of the drawn host, source or destination, of a guest there, or of the command that moves
/// the first guest.
const FAULTS: [Fault; 7] = [
    Fault::KillSourceAgent,
    Fault::KillSourceQemu,
    Fault::CutBriefly,
    Fault::CutForGood,
    Fault::SilentSource,
    Fault::SourceDiskFull,
    Fault::KillCli,
];
/// Number of additional draws without a fault.
const QUIET: usize = 2;

/// Parameters of a soak.
#[derive(Debug, Clone, Copy)]
pub struct SoakPlan {
    /// Number of moves to make.
    pub moves: u32,
    /// Seed that selects the faults and their times.
    pub seed: u64,
    /// Number of guests that move at once.
    pub guests: u8,
}

/// Result of a soak. A lost, doubled or wrong guest ends the soak with an error.
#[derive(Debug, Clone, Default)]
pub struct SoakReport {
    /// Guests that arrived with correct memory.
    pub moves: u32,
    /// Migrations undone by a fault, with the guest whole at its source.
    pub undone: u32,
    /// Guests whose QEMU was killed while it ran them. They ended, and the agents reported that.
    pub ended: u32,
    /// Count of each injected fault. The names reflect the role of the struck host for the guests.
    pub faults: BTreeMap<String, u32>,
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SoakReport { moves, undone, ended, faults } = self;
        let faults: Vec<String> =
            faults.iter().map(|(name, count)| format!("{name} {count}")).collect();
        write!(
            f,
            "{moves} moves, {undone} undone, {ended} ended with a QEMU that was killed; 0 lost, 0 \
             doubled, 0 wrong pages; faults: {}",
            if faults.is_empty() { "none".to_owned() } else { faults.join(", ") }
        )
    }
}

/// Fault of a wave: on one host, when its agent reaches a point. `None` means no fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Draw {
    fault: Option<Fault>,
    host: &'static str,
    point: &'static str,
    /// Guest whose QEMU is killed, if the fault is that.
    guest: usize,
}

impl Draw {
    /// Draws a fault. Every draw consumes the same count of random numbers.
    fn of(random: &mut Random, guests: usize) -> Draw {
        let (fault, host) = (random.below(FAULTS.len() + QUIET), random.below(2));
        let (point, guest) = (random.below(POINTS.len()), random.below(guests));
        Draw {
            fault: FAULTS.get(fault).copied(),
            host: ["a", "b"][host],
            point: POINTS[point],
            guest,
        }
    }
}

impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            None => f.write_str("no fault"),
            Some(fault) => write!(f, "{} of host {} at {}", fault.name(), self.host, self.point),
        }
    }
}

/// Moves guests back and forth under faults until the requested number of moves is reached. Calls
/// `say` after each wave. Returns `None` if this machine cannot run a lab.
///
/// # Errors
/// A guest is lost, doubled or has a wrong page, something is left over, or the lab cannot be
/// started.
pub fn soak(name: &str, plan: SoakPlan, mut print: impl FnMut(&str)) -> Result<Option<SoakReport>> {
    let options = LabOptions {
        link: Some(LINK.parse()?),
        hooks: Hooks { holds: true, small_state: true, ..Hooks::default() },
        ..LabOptions::default()
    };
    let Some(trial) = Trial::begin_with(name, options)? else { return Ok(None) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let plans: Vec<GuestPlan> = (0..plan.guests).map(plan_of).collect();
    let guests = trial.guests("a", &plans)?;
    let mut soak = Soak { trial: &trial, guests, plans, report: SoakReport::default() };
    let mut random = Random::new(plan.seed);
    for wave in 1.. {
        if soak.report.moves >= plan.moves {
            break;
        }
        let draw = Draw::of(&mut random, soak.guests.len());
        let begun = Instant::now();
        soak.wave(draw).with_context(|| {
            format!("wave {wave} of seed {}: {draw}; so far {}", plan.seed, soak.report)
        })?;
        print(&format!(
            "wave {wave}: {draw}, {:.0} s; {}",
            begun.elapsed().as_secs_f64(),
            soak.report
        ));
    }
    let Soak { report, guests, .. } = soak;
    for guest in &guests {
        trial.delete(&guest.host, &guest.name)?;
    }
    for (host, clean) in ["a", "b"].iter().zip(&clean) {
        trial.expect_traces(host, clean)?;
    }
    trial.finish()?;
    Ok(Some(report))
}

/// Returns the name of a host's fault, by whether the guests concerned leave the host or arrive
/// there. `from` lists where the guests were.
fn name_of<'a>(
    fault: Fault,
    host: &str,
    mut from: impl Iterator<Item = &'a str> + Clone,
) -> String {
    let (source, destination) = (fault.name(), fault.at_destination().name());
    let any_leaves = from.clone().any(|from| from == host);
    let all_leave = from.all(|from| from == host);
    match (any_leaves, all_leave) {
        _ if source == destination => source.to_owned(),
        (true, true) => source.to_owned(),
        (true, false) => format!("{source}+{destination}"),
        (false, _) => destination.to_owned(),
    }
}

fn plan_of(number: u8) -> GuestPlan {
    GuestPlan {
        number: 21 + number,
        memory: vec![ByteSize::from_bytes((128 << 20) + (64 << 10))],
        fill: ByteSize::from_mib(8),
        workload: BUSY.to_owned(),
        ..GuestPlan::new(&format!("soak{number}"))
    }
}

struct Soak<'a> {
    trial: &'a Trial,
    guests: Vec<Guest>,
    plans: Vec<GuestPlan>,
    report: SoakReport,
}

impl Soak<'_> {
    /// Moves all guests to the other host at once and injects the drawn fault.
    fn wave(&mut self, draw: Draw) -> Result<()> {
        let watches: Vec<VcpuWatch> =
            self.guests.iter().map(|guest| self.trial.watch_vcpus(&guest.name)).collect();
        for (guest, watch) in self.guests.iter().zip(&watches) {
            watch.until_seen(&guest.host).with_context(|| format!("VM {}", guest.name))?;
        }
        let killed = self.move_all(draw)?;
        let mut anew = BTreeSet::new();
        for (number, watch) in watches.into_iter().enumerate() {
            let name = self.guests[number].name.clone();
            let mut reasons = Vec::new();
            let host =
                settled(self.trial, &name, &mut reasons).with_context(|| format!("VM {name}"))?;
            let seen = host.as_ref().map_or(Ok(()), |host| watch.until_seen(host));
            seen.and_then(|()| watch.end()).with_context(|| format!("VM {name}"))?;
            match host {
                None => {
                    ensure!(
                        killed == Some(number),
                        "LOST: VM {name} runs nowhere: {}",
                        reasons.join("; ")
                    );
                    remove_ended(self.trial, &name)?;
                    self.report.ended += 1;
                    anew.insert(number);
                }
                Some(host) => self.arrived(number, host)?,
            }
        }
        self.expect_nothing_more(&anew)?;
        for number in anew {
            self.guests[number] = self.trial.guest("a", &self.plans[number])?;
        }
        Ok(())
    }

    fn arrived(&mut self, number: usize, host: String) -> Result<()> {
        let guest = &mut self.guests[number];
        let count =
            if host == guest.host { &mut self.report.undone } else { &mut self.report.moves };
        guest.host = host;
        // A loaded machine may delay the answer.
        crate::trial::until("the guest answers", crate::trial::LIMIT, || guest.status().map(Some))
            .with_context(|| format!("LOST: VM {} at host {}", guest.name, guest.host))?;
        self.trial.expect_whole(guest).with_context(|| format!("WRONG: VM {}", guest.name))?;
        *count += 1;
        Ok(())
    }

    /// Starts all moves, injects the fault and waits. Returns the guest whose QEMU was killed.
    fn move_all(&mut self, draw: Draw) -> Result<Option<usize>> {
        let trial = self.trial;
        let held = draw.fault.map(|_| trial.hold(draw.host, draw.point)).transpose()?;
        let begin = |(number, guest): (usize, &Guest)| {
            // Half of the guests by each means.
            let tracking = if number % 2 == 0 { TrackingUse::Faults } else { TrackingUse::Scans };
            let request = MigrationRequest {
                tracking,
                ..request_to(other_host(&guest.host), EngineKind::Godwit)
            };
            let by_cli = number == 0 && draw.fault == Some(Fault::KillCli);
            Moving::begin(trial, &guest.name, &guest.host, &request, by_cli)
        };
        let mut all =
            self.guests.iter().enumerate().map(begin).collect::<Result<Vec<Moving<'_>>>>()?;
        let mut killed = None;
        if let (Some(fault), Some(held)) = (draw.fault, held)
            // All migrations may end without reaching the point.
            && held.reached(POINT_LIMIT).is_ok()
        {
            let first = all.first_mut().context("no guests")?;
            let struck = match fault {
                // That host may have no QEMU of this guest.
                Fault::KillSourceQemu => {
                    let name = &self.guests[draw.guest].name;
                    killed = trial.kill_hypervisor(draw.host, name).is_ok().then_some(draw.guest);
                    drop(held);
                    killed.is_some()
                }
                // The command may have ended with its migration.
                Fault::KillCli => {
                    let is_killed = first.kill_cli().is_ok();
                    drop(held);
                    is_killed
                }
                _ => {
                    let mut blow = Blow::new(trial, fault, draw.host, other_host(draw.host));
                    blow.strike(first)?;
                    drop(held);
                    // The fault may have come too late to have an effect.
                    blow.last(first);
                    blow.repair()?;
                    true
                }
            };
            if struck {
                let concerned = match fault {
                    Fault::KillSourceQemu => &self.guests[draw.guest..=draw.guest],
                    _ => &self.guests[..],
                };
                let name =
                    name_of(fault, draw.host, concerned.iter().map(|guest| guest.host.as_str()));
                *self.report.faults.entry(name).or_default() += 1;
            }
        }
        let deadline = Instant::now() + WAVE_LIMIT;
        for moving in &all {
            moving.report(deadline.saturating_duration_since(Instant::now()));
        }
        Ok(killed)
    }

    /// Checks that each host has the QEMUs of the guests that run there, and no others.
    fn expect_nothing_more(&self, ended: &BTreeSet<usize>) -> Result<()> {
        for host in self.trial.hosts() {
            let guests = self.guests.iter().enumerate();
            let wanted = guests
                .filter(|(number, guest)| guest.host == host && !ended.contains(number))
                .count();
            crate::trial::until(
                &format!("host {host} has {wanted} QEMUs"),
                crate::trial::LIMIT,
                || {
                    let found = self.trial.hypervisors(&host)?.len();
                    let vms = self.trial.ask(self.trial.agent(&host).vms())?.len();
                    ensure!(found == wanted && vms == wanted, "found {found} QEMUs and {vms} VMs");
                    Ok(Some(()))
                },
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_named_by_what_its_host_was_to_the_guests() {
        let name = |fault, from: &[&'static str]| name_of(fault, "a", from.iter().copied());
        assert_eq!(name(Fault::KillSourceAgent, &["a", "a"]), "kill-source-agent");
        assert_eq!(name(Fault::KillSourceAgent, &["b", "b"]), "kill-destination-agent");
        assert_eq!(name(Fault::SilentSource, &["a", "b"]), "silent-source+silent-destination");
        assert_eq!(name(Fault::CutBriefly, &["a", "b"]), "cut-briefly");
    }

    #[test]
    fn a_seed_draws_the_same_faults_and_all_kinds_of_them() {
        let draws = |seed| {
            let mut random = Random::new(seed);
            (0..200).map(|_| Draw::of(&mut random, 8)).collect::<Vec<Draw>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        for fault in FAULTS {
            assert!(
                draws(7).iter().filter(|draw| draw.fault == Some(fault)).count() >= 8,
                "{fault:?}"
            );
        }
        assert!(draws(7).iter().any(|draw| draw.fault.is_none()));
    }
}
