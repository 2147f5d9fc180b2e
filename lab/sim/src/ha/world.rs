//! Hosts, a manager with its store, datastores, and everything between them.

use std::time::Duration;

use godwit_ha::{
    Action, Answer, Facts, Fencing, Grant, Judge, Mark, Phase, Record, Renewal, Term, Timing,
};

use super::choices::Choice;
use super::host::{Host, Write, drifted};
use super::rules::Rule;

/// Parameters of a world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    pub timing: Timing,
    /// True time of a tick.
    pub tick: Duration,
    /// Number of ticks.
    pub ticks: u32,
    /// Error of each host's clock, and its facts. The guest begins on the first host.
    pub hosts: Vec<(i32, Facts)>,
    /// Error of the manager's clock.
    pub manager_drift_ppm: i32,
    /// The first of the hosts without faults, which exchange everything at each tick.
    pub calm_from: usize,
    /// Most renewals and answers of a host on their way.
    pub letters: usize,
    /// Whether a copy of the request to start the guest is still on its way at the beginning.
    pub has_late_start: bool,
    /// The rule that is left out.
    pub without: Option<Rule>,
}

impl Options {
    pub(super) fn follows(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }
}

/// Numbers of faults that are yet to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limits {
    pub freezes: u32,
    pub agent_kills: u32,
    pub power_cuts: u32,
    pub takeovers: u32,
    pub lies: u32,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Word {
    /// From a guard to the judge.
    Renewal { sent_at: Duration, renewal: Renewal },
    /// From the judge to a guard.
    Answer { sent_at: Duration, answer: Answer },
    /// From a reader to the judge.
    Reading { datastore: usize, began: Duration, mark: Option<Mark> },
    /// From the manager to an agent.
    Start { term: Term },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Letter {
    /// The host that it is about.
    pub(super) host: usize,
    pub(super) word: Word,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub(super) options: Options,
    pub(super) limits: Limits,
    pub(super) now: u32,
    pub(super) manager_clock: Duration,
    pub(super) hosts: Vec<Host>,
    pub(super) judges: Vec<Judge>,
    /// Judges of a manager that no longer leads, if it still answers.
    pub(super) former: Option<Vec<Judge>>,
    /// The blocks of hosts on their datastores.
    pub(super) blocks: Vec<Vec<Option<Mark>>>,
    /// Where the guest is to run, as the leader and as the store have it.
    pub(super) placed: (usize, Term),
    recorded: (usize, Term),
    pub(super) letters: Vec<Letter>,
    pub(super) restarts: u32,
    pub(super) released: u32,
    violation: Option<&'static str>,
}

impl World {
    /// Creates a world in which each host holds its first term and the first one runs the guest.
    #[must_use]
    pub fn new(options: Options, limits: Limits) -> Self {
        let new = |(drift_ppm, facts): &(i32, Facts)| Host::new(&options, *drift_ppm, *facts);
        let hosts: Vec<Host> = options.hosts.iter().map(new).collect();
        let judge = Judge::new(options.judge_timing(), Record::NEW, Duration::ZERO);
        let mut world = World {
            judges: vec![judge; hosts.len()],
            blocks: hosts.iter().map(|host| vec![None; host.facts.datastores]).collect(),
            hosts,
            limits,
            now: 0,
            manager_clock: Duration::ZERO,
            former: None,
            placed: (0, Term(1)),
            recorded: (0, Term(1)),
            letters: Vec::new(),
            restarts: 0,
            released: 0,
            violation: None,
            options,
        };
        for host in 0..world.hosts.len() {
            world.exchange(host);
        }
        world.hosts[0].start(&world.options, Term(1));
        if world.options.has_late_start {
            world.letters.push(Letter { host: 0, word: Word::Start { term: Term(1) } });
        }
        world
    }

    /// Returns what is wrong.
    #[must_use]
    pub fn violation(&self) -> Option<&'static str> {
        self.violation
    }

    /// Returns how often the guest was started elsewhere.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Returns the facts of a host for its next term, as the judge has them.
    fn facts(&self, host: usize) -> Facts {
        let mut facts = self.hosts[host].facts;
        facts.watchdog |= !self.options.follows(Rule::NeedsAssurance);
        facts.fencing &= self.options.follows(Rule::NeedsAssurance);
        if !self.options.follows(Rule::ReadsHeartbeats) {
            facts.datastores = 0;
        }
        facts
    }

    pub(super) fn may_renew(&self, host: usize) -> bool {
        let of_host = |letter: &&Letter| {
            letter.host == host && matches!(letter.word, Word::Renewal { .. } | Word::Answer { .. })
        };
        let on_their_way = self.letters.iter().filter(of_host).count();
        self.hosts[host].renewed_tick != Some(self.now) && on_their_way < self.options.letters
    }

    /// Returns the mark that a host would write now; `None` if it holds no term, or has written in
    /// this tick.
    pub(super) fn next_mark(&self, host: usize, datastore: usize) -> Option<Mark> {
        let of = &self.hosts[host];
        of.guard.deadline()?;
        let mark = Mark { term: of.guard.term(), sequence: u64::from(self.now) };
        (self.blocks[host][datastore] != Some(mark)).then_some(mark)
    }

    /// Returns whether the device of a host that is being fenced may lie; `None` if it is not.
    pub(super) fn hosts_being_fenced(&self, host: usize) -> Option<bool> {
        let is_guarded = self.hosts[host].facts.watchdog;
        (self.judges[host].phase() == Phase::Fencing).then_some(is_guarded && self.limits.lies > 0)
    }

    pub(super) fn is_doubtful(&self, host: usize) -> bool {
        self.judges[host].phase() == Phase::Doubtful
    }

    /// Applies an event.
    pub fn apply(&mut self, choice: Choice) {
        match choice {
            Choice::Tick => self.tick(),
            Choice::Renew(host) => self.renew(host),
            Choice::Write(host, datastore) => self.write(host, datastore),
            Choice::Land(host, datastore) => self.land(host, datastore),
            Choice::Confirm(host, datastore) => {
                self.hosts[host].confirm(&self.options, datastore);
            }
            Choice::FailWrite(host, datastore) => self.hosts[host].writes[datastore] = None,
            Choice::Read(host, datastore) => {
                let mark = self.blocks[host][datastore];
                self.reading(host, datastore, mark);
            }
            Choice::MisreadFailure(host, datastore) => {
                let term = self.judges[host].record().term;
                self.reading(host, datastore, Some(Mark { term, sequence: u64::MAX }));
            }
            Choice::Deliver(place) => {
                let letter = self.letters.remove(place);
                self.deliver(letter);
            }
            Choice::DeliverToFormer(place) => self.deliver_to_former(place),
            Choice::Lose(place) => drop(self.letters.remove(place)),
            Choice::EndGuest(host) => self.hosts[host].end_guest(&self.options),
            Choice::Fence(_) | Choice::FailFencing(_) | Choice::Lie(_) | Choice::Confirmed(_) => {
                self.end_doubt(choice);
            }
            fault => self.fault(fault),
        }
        self.check();
    }

    fn fault(&mut self, choice: Choice) {
        match choice {
            Choice::Freeze(host) => {
                self.limits.freezes = self.limits.freezes.saturating_sub(1);
                self.hosts[host].is_frozen = true;
            }
            Choice::Release(host) => self.hosts[host].is_frozen = false,
            Choice::KillAgent(host) => {
                self.limits.agent_kills = self.limits.agent_kills.saturating_sub(1);
                self.hosts[host].has_agent = false;
            }
            Choice::StartAgent(host) => self.hosts[host].start_agent(&self.options),
            Choice::PowerOff(host) => {
                self.limits.power_cuts = self.limits.power_cuts.saturating_sub(1);
                self.hosts[host].power_off();
            }
            Choice::PowerOn(host) => {
                self.letters.retain(|letter| {
                    letter.host != host || !matches!(letter.word, Word::Answer { .. })
                });
                self.hosts[host].power_on(&self.options);
            }
            _ => self.take_over(),
        }
    }

    fn tick(&mut self) {
        self.now += 1;
        let (tick, drift) = (self.options.tick, self.options.manager_drift_ppm);
        self.manager_clock += drifted(tick, drift);
        for host in &mut self.hosts {
            host.tick(&self.options);
        }
        for host in self.options.calm_from..self.hosts.len() {
            self.exchange(host);
        }
        self.judge();
        self.send_start();
    }

    /// Lets each judge act on the time.
    pub(super) fn judge(&mut self) {
        for host in 0..self.hosts.len() {
            let action = self.judges[host].check(self.manager_clock);
            self.carry_out(host, action);
        }
    }

    fn carry_out(&mut self, host: usize, action: Option<Action>) {
        match action {
            Some(Action::Release(term)) => {
                self.released += 1;
                let of = &self.hosts[host];
                if of.is_on && of.runs == Some(term) {
                    self.violation = Some("a term was ended while the guest may run in it");
                }
                self.place();
            }
            Some(Action::Fence(_) | Action::AskOperator(_)) | None => {}
        }
    }

    /// Places the guest if its term is over and a host is there for it.
    fn place(&mut self) {
        let (host, term) = self.placed;
        if !self.judges[host].is_over(term) {
            return;
        }
        let open = |judge: &Judge| judge.open_term();
        let target =
            self.judges.iter().enumerate().find_map(|(at, judge)| Some((at, open(judge)?)));
        let Some(target) = target else { return };
        self.placed = target;
        if self.options.follows(Rule::PlacementIsRecorded) {
            self.recorded = target;
        }
        self.restarts += 1;
        self.send_start();
    }

    /// Requests the start of the guest, unless it runs or was requested.
    fn send_start(&mut self) {
        self.place_if_over();
        let (host, term) = self.placed;
        let letter = Letter { host, word: Word::Start { term } };
        let is_needed = self.judges[host].open_term() == Some(term)
            && self.hosts[host].runs.is_none()
            && !self.letters.contains(&letter);
        if is_needed && host >= self.options.calm_from {
            self.hosts[host].start(&self.options, term);
        } else if is_needed {
            self.letters.push(letter);
        }
    }

    fn place_if_over(&mut self) {
        let (host, term) = self.placed;
        if self.judges[host].is_over(term) && self.judges.iter().any(|of| of.open_term().is_some())
        {
            self.place();
        }
    }

    fn renew(&mut self, host: usize) {
        let (options, of) = (&self.options, &mut self.hosts[host]);
        of.renewed_tick = Some(self.now);
        let word = Word::Renewal { sent_at: of.clock, renewal: of.renewal(options) };
        self.letters.push(Letter { host, word });
    }

    fn write(&mut self, host: usize, datastore: usize) {
        let Some(mark) = self.next_mark(host, datastore) else { return };
        let of = &mut self.hosts[host];
        of.writes[datastore] = Some(Write { started_at: of.clock, mark, landed: false });
    }

    fn land(&mut self, host: usize, datastore: usize) {
        if let Some(write) = &mut self.hosts[host].writes[datastore] {
            write.landed = true;
            self.blocks[host][datastore] = Some(write.mark);
        }
    }

    fn reading(&mut self, host: usize, datastore: usize, mark: Option<Mark>) {
        let word = Word::Reading { datastore, began: self.manager_clock, mark };
        self.letters.push(Letter { host, word });
    }

    pub(super) fn deliver(&mut self, letter: Letter) {
        let (host, now) = (letter.host, self.manager_clock);
        match letter.word {
            Word::Renewal { sent_at, renewal } => {
                let answer = self.answer(host, renewal);
                self.letters.push(Letter { host, word: Word::Answer { sent_at, answer } });
            }
            Word::Answer { sent_at, answer } => {
                if self.hosts[host].acts() {
                    self.hosts[host].answered(&self.options, sent_at, answer);
                }
            }
            Word::Reading { datastore, began, mark } => {
                let is_exact = self.options.follows(Rule::ReadingCountsFromStart);
                self.judges[host].read(if is_exact { began } else { now }, now, datastore, mark);
            }
            Word::Start { term } => self.hosts[host].start(&self.options, term),
        }
    }

    /// Answers a renewal, and does what its judge may do then.
    pub(super) fn answer(&mut self, host: usize, renewal: Renewal) -> Answer {
        let (facts, before) = (self.facts(host), self.judges[host].record().term);
        let answer = self.judges[host].renewal(self.manager_clock, renewal, facts);
        if self.judges[host].record().term > before {
            self.carry_out(host, Some(Action::Release(before)));
        }
        match answer {
            // The guard knows its datastores, also if the judge ignores them.
            Answer::Granted(grant) => {
                let datastores = self.hosts[host].facts.datastores;
                Answer::Granted(Grant { datastores, ..grant })
            }
            other => other,
        }
    }

    fn deliver_to_former(&mut self, place: usize) {
        let (now, Letter { host, word }) = (self.manager_clock, self.letters.remove(place));
        let facts = self.facts(host);
        if let (Word::Renewal { sent_at, renewal }, Some(former)) = (word, &mut self.former) {
            let answer = former[host].renewal(now, renewal, facts);
            self.letters.push(Letter { host, word: Word::Answer { sent_at, answer } });
        }
    }

    /// Applies what a fencing device or an operator does.
    fn end_doubt(&mut self, choice: Choice) {
        let (host, result) = match choice {
            Choice::Fence(host) => (host, Fencing::Off),
            Choice::Lie(host) => {
                self.limits.lies = self.limits.lies.saturating_sub(1);
                (host, Fencing::Off)
            }
            Choice::FailFencing(host) => (host, Fencing::Failed),
            Choice::Confirmed(host) => {
                self.hosts[host].power_off();
                let term = self.judges[host].record().term;
                let action = self.judges[host].confirmed_off(term);
                return self.carry_out(host, action);
            }
            _ => return,
        };
        if matches!(choice, Choice::Fence(_)) {
            self.hosts[host].power_off();
        }
        let term = self.judges[host].record().term;
        let action = self.judges[host].fenced(term, result);
        self.carry_out(host, action);
    }

    /// Lets another manager lead, with what the store has.
    fn take_over(&mut self) {
        self.limits.takeovers = self.limits.takeovers.saturating_sub(1);
        let is_counted = self.options.follows(Rule::CountsFromTakeover);
        let from = if is_counted { self.manager_clock } else { Duration::ZERO };
        let timing = self.options.judge_timing();
        let judges = self.judges.iter().map(|judge| Judge::new(timing, judge.record(), from));
        let judges: Vec<Judge> = judges.collect();
        let former = std::mem::replace(&mut self.judges, judges);
        self.former = (!self.options.follows(Rule::OnlyLeaderGrants)).then_some(former);
        self.letters.retain(|letter| !matches!(letter.word, Word::Reading { .. }));
        self.placed = self.recorded;
        self.place_if_over();
    }

    fn check(&mut self) {
        if self.hosts.iter().filter(|host| host.runs_guest()).count() > 1 {
            self.violation = Some("the guest runs on two hosts");
        }
    }
}

impl Options {
    /// Returns the durations as judges have them.
    fn judge_timing(&self) -> Timing {
        let mut timing = self.timing;
        if !self.follows(Rule::WaitsForDrift) {
            timing.drift_ppm = 0;
        }
        if !self.follows(Rule::WaitsForGrace) {
            timing.grace = Duration::ZERO;
        }
        if !self.follows(Rule::FencingShortensNoWait) {
            (timing.lease, timing.grace) = (timing.interval, Duration::ZERO);
        }
        timing
    }
}
