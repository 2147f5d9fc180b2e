//! Long random lives of a cluster, by seed.

use std::time::Duration;

use godwit_ha::{Facts, Standing, Timing};

use super::choices::Choice;
use super::rules::Rule;
use super::world::{Letter, Limits, Options, Word, World};
use crate::dice::Dice;

const TICK: Duration = Duration::from_millis(250);
/// Ticks between two renewals, heartbeats and readings: an interval.
const INTERVAL_TICKS: u32 = 4;
/// Ticks of a run: five minutes.
const TICKS: u32 = 1_200;
/// Time after which a path that works has renewed a lease, whatever was before.
const WELL_TICKS: u32 = 4 * 12;

/// Statistics of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Number of events.
    pub steps: u64,
    /// Number of faults among them, with those of networks.
    pub faults: u64,
    /// Number of guards that stopped their VMs.
    pub stopped: u64,
    /// Number of terms that ended.
    pub ended: u64,
    /// Number of times the guest was placed again.
    pub restarts: u64,
}

/// Last tick in which a path of a host did not work.
#[derive(Clone, Copy, Default)]
struct Paths {
    manager_failed: u32,
    storage_failed: u32,
    held: bool,
}

struct Driver {
    world: World,
    dice: Dice,
    figures: Figures,
    paths: Vec<Paths>,
    /// Copies of letters that arrive late.
    late: Vec<Letter>,
    /// Whether readers have no access to storage.
    is_unreadable: bool,
    fault_every: u64,
    log: Vec<String>,
}

/// Lets a cluster live through faults.
///
/// # Errors
/// The violation, and all events that led to it.
pub fn simulate(seed: u64, without: Option<Rule>) -> Result<Figures, String> {
    let mut dice = Dice(seed);
    let options = options(&mut dice, without);
    let few = |dice: &mut Dice, most: u64| u32::try_from(dice.below(most + 1)).unwrap_or(0);
    let limits = Limits {
        freezes: few(&mut dice, 4),
        agent_kills: few(&mut dice, 4),
        power_cuts: few(&mut dice, 3),
        takeovers: few(&mut dice, 3),
        lies: few(&mut dice, 3),
    };
    let hosts = options.hosts.len();
    let mut driver = Driver {
        world: World::new(options, limits),
        fault_every: 20 + dice.below(200),
        dice,
        figures: Figures::default(),
        paths: vec![Paths::default(); hosts],
        late: Vec::new(),
        is_unreadable: false,
        log: Vec::new(),
    };
    driver.run().map_err(|why| format!("{why}\nafter:\n{}", driver.log.join("\n")))?;
    Ok(driver.figures)
}

fn options(dice: &mut Dice, without: Option<Rule>) -> Options {
    let drift = |dice: &mut Dice| i32::try_from(dice.below(2001)).unwrap_or(0) - 1000;
    let hosts = (0..2 + dice.below(3)).map(|_| {
        let kind = dice.below(8);
        let facts = Facts { datastores: dice.place(4), watchdog: kind < 5, fencing: kind % 2 == 1 };
        (drift(dice), facts)
    });
    let hosts: Vec<_> = hosts.collect();
    Options {
        timing: Timing::default(),
        tick: TICK,
        ticks: TICKS,
        calm_from: hosts.len(),
        hosts,
        manager_drift_ppm: drift(dice),
        letters: 64,
        has_late_start: false,
        without,
    }
}

impl Driver {
    fn run(&mut self) -> Result<(), String> {
        while self.world.now < TICKS {
            self.apply(Choice::Tick)?;
            self.change_networks();
            self.break_something()?;
            for host in 0..self.world.hosts.len() {
                self.host(host)?;
            }
            self.letters()?;
            self.check_needless()?;
        }
        self.figures.ended = u64::from(self.world.released);
        self.figures.restarts = u64::from(self.world.restarts);
        self.world.heals()
    }

    fn apply(&mut self, choice: Choice) -> Result<(), String> {
        if choice != Choice::Tick {
            self.log.push(format!("{} {choice:?}", self.world.now));
        }
        self.figures.steps += 1;
        self.figures.faults += u64::from(choice.is_fault());
        self.world.apply(choice);
        if let Choice::PowerOn(host) = choice {
            // It stopped nothing: it was off.
            self.paths[host].held = false;
        }
        self.world.violation().map_or(Ok(()), |violation| Err(violation.to_owned()))
    }

    fn is(&mut self, one_in: u64) -> bool {
        self.dice.below(one_in) == 0
    }

    /// Most things happen soon.
    fn soon(&mut self) -> bool {
        self.dice.below(4) > 0
    }

    fn change_networks(&mut self) {
        for host in 0..self.world.hosts.len() {
            let (cut, heal) = (self.fault_every * 2, 80);
            let of = &self.world.hosts[host];
            let flips = [of.is_cut_off, of.lacks_storage]
                .map(|is_cut| self.dice.below(if is_cut { heal } else { cut }) == 0);
            let of = &mut self.world.hosts[host];
            of.is_cut_off ^= flips[0];
            of.lacks_storage ^= flips[1];
            for (flipped, what) in flips.into_iter().zip(["cut off", "storage"]) {
                if flipped {
                    self.figures.faults += 1;
                    self.log.push(format!("{} {what} of {host} changes", self.world.now));
                }
            }
        }
        let flips = if self.is_unreadable { 60 } else { self.fault_every * 4 };
        self.is_unreadable ^= self.is(flips);
    }

    fn break_something(&mut self) -> Result<(), String> {
        if !self.is(self.fault_every) {
            return Ok(());
        }
        let faults = self.world.choices().into_iter().filter(|choice| {
            choice.is_fault() && !matches!(choice, Choice::Lie(_) | Choice::FailFencing(_))
        });
        let faults: Vec<_> = faults.collect();
        let place = self.dice.place(faults.len());
        faults.get(place).map_or(Ok(()), |fault| self.apply(*fault))
    }

    /// Lets a host, its device and its operator act.
    fn host(&mut self, host: usize) -> Result<(), String> {
        let is_due = self.world.now % INTERVAL_TICKS == u32::try_from(host).unwrap_or(0);
        for choice in self.world.choices() {
            let is_now = match choice {
                Choice::Renew(of) if of == host => is_due,
                Choice::Write(of, _) | Choice::Read(of, _) | Choice::MisreadFailure(of, _)
                    if of == host =>
                {
                    is_due && self.may_access(choice)
                }
                Choice::EndGuest(of) if of == host => self.is(4),
                Choice::Release(of) | Choice::PowerOn(of) if of == host => self.is(100),
                Choice::StartAgent(of) if of == host => self.is(20),
                Choice::Confirmed(of) if of == host => self.is(40),
                Choice::Fence(of) | Choice::FailFencing(of) | Choice::Lie(of) if of == host => {
                    self.world.hosts_being_fenced(host).is_some() && self.is(8)
                }
                _ => false,
            };
            if is_now {
                self.apply(choice)?;
            }
        }
        (0..self.world.hosts[host].facts.datastores)
            .try_for_each(|datastore| self.storage(host, datastore))
    }

    fn may_access(&mut self, choice: Choice) -> bool {
        match choice {
            Choice::Write(..) => true,
            Choice::Read(..) => !self.is_unreadable,
            _ => self.is_unreadable,
        }
    }

    /// Lets a heartbeat go on.
    fn storage(&mut self, host: usize, datastore: usize) -> Result<(), String> {
        let Some(write) = self.world.hosts[host].writes[datastore] else { return Ok(()) };
        if self.world.hosts[host].lacks_storage || self.is(60) {
            // It hangs, fails, or lands unnoticed.
            return match self.dice.below(6) {
                0 => self.apply(Choice::FailWrite(host, datastore)),
                1 if !write.landed && self.is(8) => self.apply(Choice::Land(host, datastore)),
                _ => Ok(()),
            };
        }
        if !write.landed && self.soon() {
            self.apply(Choice::Land(host, datastore))?;
        }
        let is_landed = self.world.hosts[host].writes[datastore].is_some_and(|write| write.landed);
        if is_landed && self.world.hosts[host].acts() && self.soon() {
            self.apply(Choice::Confirm(host, datastore))?;
        }
        Ok(())
    }

    fn letters(&mut self) -> Result<(), String> {
        if !self.late.is_empty() && self.is(100) {
            let place = self.dice.place(self.late.len());
            let letter = self.late.swap_remove(place);
            self.world.letters.push(letter);
        }
        for place in (0..self.world.letters.len()).rev() {
            let letter = self.world.letters[place];
            let needs_manager = !matches!(letter.word, Word::Reading { .. });
            if needs_manager && self.world.hosts[letter.host].is_cut_off {
                self.apply(Choice::Lose(place))?;
            } else if self.soon() {
                if self.late.len() < 16 && self.is(50) {
                    self.late.push(letter);
                }
                let to_former = self.world.former.is_some()
                    && matches!(letter.word, Word::Renewal { .. })
                    && self.is(2);
                self.apply(match to_former {
                    true => Choice::DeliverToFormer(place),
                    false => Choice::Deliver(place),
                })?;
            }
        }
        Ok(())
    }

    /// A guard that stops its VMs has lost all its paths before.
    fn check_needless(&mut self) -> Result<(), String> {
        let now = self.world.now;
        for (host, paths) in self.world.hosts.iter().zip(&mut self.paths) {
            if !host.acts() || host.is_cut_off {
                paths.manager_failed = now;
            }
            if !host.acts() || host.lacks_storage || host.facts.datastores == 0 {
                paths.storage_failed = now;
            }
            let held = matches!(host.guard.standing(), Standing::Held(_));
            if host.acts() && paths.held && !held {
                self.figures.stopped += 1;
                let is_well = |failed: u32| now - failed > WELL_TICKS;
                if is_well(paths.manager_failed) || is_well(paths.storage_failed) {
                    return Err("a guard stopped its VMs although it had a witness".to_owned());
                }
            }
            paths.held = held;
        }
        Ok(())
    }
}
