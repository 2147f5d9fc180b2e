//! Hosts that share one datastore: guards and judges of production, files of a real directory, and
//! a simulated clock.

use std::fs;

use godwit_api::{HaAnswer, HaVerdict, TermHolder};
use godwit_ha::own::End;
use godwit_ha::{Answer, Grant, Guard, Standing, Term, Timing};
use godwit_qemu::{Disk, DiskFormat, VmSpec};
use proptest::prelude::*;
use tempfile::TempDir;

use super::folder::{Found, LastBlock};
use super::guard::HeldTerm;
use super::*;

const VM: Uuid = Uuid::from_u128(1);
const DATASTORE: Uuid = Uuid::from_u128(2);

#[derive(Debug)]
struct Host {
    id: Uuid,
    /// How far its boot clock is ahead.
    ahead: Duration,
    guard: Guard,
    watched: Watched,
    runs: bool,
    /// Neither its agent nor its guest goes on.
    is_frozen: bool,
    /// When its watchdog has ended everything, on its clock.
    ends_at: Option<Duration>,
    begun: Option<(Term, Duration)>,
    landed: Option<(Term, Duration)>,
    claimed: Option<(Term, Duration)>,
    /// What looks have found that are not taken in yet, and when they began: one of the datastore
    /// and one of the VM alone may be under way at once.
    found: Vec<(Duration, Found)>,
    last: LastBlock,
}

struct World {
    dir: TempDir,
    now: Duration,
    hosts: Vec<Host>,
}

fn watched(place: &Place) -> Watched {
    Watched::new(place.clone(), Duration::ZERO)
}

impl World {
    /// Returns hosts of which the first runs the VM in term 1.
    fn new(hosts: u128) -> World {
        let dir = tempfile::tempdir().unwrap();
        let marker = format!("godwit datastore 1\n{DATASTORE}\n");
        fs::write(dir.path().join(".godwit-datastore"), marker).unwrap();
        let place = Place { directory: dir.path().to_owned(), datastore: DATASTORE, vm: VM };
        let host = |number: u128| Host {
            id: Uuid::from_u128(10 + number),
            ahead: Duration::from_secs(100 * u64::try_from(number).unwrap()),
            guard: Guard::booted(Timing::default(), Term(0)),
            watched: watched(&place),
            runs: false,
            is_frozen: false,
            ends_at: None,
            begun: None,
            landed: None,
            claimed: None,
            found: Vec::new(),
            last: LastBlock::default(),
        };
        let hosts = (0..hosts).map(host).collect();
        let mut world = World { dir, now: Duration::from_secs(50), hosts };
        let first = folder::claim(&place, world.hosts[0].id, (Term(0), true), true).unwrap();
        let spec = VmSpec {
            disks: vec![Disk::new(place.directory.join("web.raw"), DiskFormat::Raw)],
            protect_by_agents: true,
            uuid: Some(VM),
            ..VmSpec::new("web")
        };
        folder::write_record(&place, &OwnRecord::new(spec, 1, "a")).unwrap();
        world.hosts[0].claimed = Some((first, world.clock(0)));
        world.accept(0);
        assert!(world.hosts[0].runs);
        world
    }

    fn place(&self) -> Place {
        Place { directory: self.dir.path().to_owned(), datastore: DATASTORE, vm: VM }
    }

    fn clock(&self, at: usize) -> Duration {
        self.now + self.hosts[at].ahead
    }

    fn note_deadline(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if let Some(deadline) = host.guard.deadline() {
            host.ends_at = host.ends_at.max(Some(deadline + Timing::default().grace));
        }
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        for at in 0..self.hosts.len() {
            if self.hosts[at].ends_at.is_some_and(|end| self.clock(at) >= end) {
                self.reboot(at);
            }
        }
    }

    fn reboot(&mut self, at: usize) {
        let fresh = watched(&self.place());
        let host = &mut self.hosts[at];
        host.guard = Guard::booted(Timing::default(), host.guard.term());
        (host.runs, host.is_frozen, host.ends_at) = (false, false, None);
        (host.begun, host.landed, host.claimed) = (None, None, None);
        host.found.clear();
        host.watched = fresh;
        host.last = LastBlock::default();
    }

    fn begin_beat(&mut self, at: usize) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        if host.guard.check(now) == godwit_ha::Order::Run && host.begun.is_none() {
            host.begun = Some((host.guard.term(), now));
        }
    }

    /// A write takes effect, also if its host is frozen.
    fn land(&mut self, at: usize) {
        let Some((term, began)) = self.hosts[at].begun.take() else { return };
        let least = u64::try_from(began.as_millis()).unwrap();
        let id = self.hosts[at].id;
        let last = &self.hosts[at].last;
        let written = folder::beat(&self.place(), id, (term, least), (true, End::None), last);
        match written {
            Ok(()) => self.hosts[at].landed = Some((term, began)),
            Err(OwnError::Claimed(newer)) if newer > term => {
                let now = self.clock(at);
                self.hosts[at].guard.answered(now, now, Answer::Ended(term));
            }
            Err(_) => {}
        }
    }

    /// Damages the block of the newest term.
    fn damage(&self) {
        let Term(newest) = folder::look(&self.place()).unwrap().unwrap().term;
        let folder = self.dir.path().join(".godwit/protected").join(VM.to_string());
        fs::write(folder.join(format!("term-{newest}")), [0xff_u8; 4096]).unwrap();
    }

    fn confirm(&mut self, at: usize) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        if let Some((term, began)) = host.landed.take() {
            host.guard.written(now, began, term, 0);
        }
        self.note_deadline(at);
    }

    fn look(&mut self, at: usize) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        if host.guard.check(now) == godwit_ha::Order::Stop {
            host.guard.vms_ended();
            (host.runs, host.ends_at) = (false, None);
        }
    }

    /// A look reads the folder; what it has found is taken in later.
    fn read(&mut self, at: usize) {
        let began = self.clock(at);
        if self.hosts[at].found.len() < 2 {
            let found = folder::look(&self.place()).unwrap().unwrap();
            self.hosts[at].found.push((began, found));
        }
    }

    /// A look ends, the first or the last one that has begun, and its host acts.
    fn scan(&mut self, at: usize, is_last: bool) {
        if self.hosts[at].found.is_empty() {
            self.read(at);
        }
        let (now, place) = (self.clock(at), self.place());
        let host = &mut self.hosts[at];
        let which = if is_last { host.found.len() - 1 } else { 0 };
        let (began, found) = host.found.remove(which);
        let is_over = *host.guard.standing() == Standing::Over && host.claimed.is_none();
        host.watched.saw((began, now), found);
        let me = Me { host: host.id, is_over };
        // As in the agent: a claim is made only while the last term is over.
        let Some(after) = host.watched.claim_after(now, me).filter(|_| is_over) else { return };
        if let Ok(term) = folder::claim(&place, host.id, (after, false), true) {
            host.claimed = Some((term, now));
        }
    }

    fn accept(&mut self, at: usize) {
        let now = self.clock(at);
        let host = &mut self.hosts[at];
        let Some((term, sent_at)) = host.claimed.take() else { return };
        if *host.guard.standing() == Standing::Over {
            host.guard = Guard::booted(Timing::default(), Term(0));
            let grant = Grant { term, datastores: 1 };
            host.guard.answered(now, sent_at, Answer::Granted(grant));
            host.runs = host.guard.may_start(now, term);
        }
        self.note_deadline(at);
    }

    /// Carries out a step of a host that is not frozen.
    fn step(&mut self, at: usize, step: Step) {
        match step {
            Step::Land => self.land(at),
            Step::Thaw => self.hosts[at].is_frozen = false,
            Step::Freeze => self.hosts[at].is_frozen = true,
            Step::Reboot => self.reboot(at),
            _ if self.hosts[at].is_frozen => {}
            Step::Begin => self.begin_beat(at),
            Step::Confirm => self.confirm(at),
            Step::Look => self.look(at),
            Step::Read => self.read(at),
            Step::Scan => self.scan(at, true),
            Step::ScanFirst => self.scan(at, false),
            Step::Accept => self.accept(at),
        }
    }

    /// Has a host do all that an agent does in a second.
    fn second(&mut self, at: usize) {
        for step in [Step::Begin, Step::Land, Step::Confirm, Step::Look, Step::Scan, Step::Accept] {
            self.step(at, step);
        }
    }

    fn running(&self) -> Vec<usize> {
        let runs = |at: &usize| self.hosts[*at].runs && !self.hosts[*at].is_frozen;
        (0..self.hosts.len()).filter(runs).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin,
    Land,
    Confirm,
    Look,
    Read,
    Scan,
    ScanFirst,
    Accept,
    Freeze,
    Thaw,
    Reboot,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Pass(u64),
    Second(usize),
    Step(usize, Step),
    Damage,
}

fn event() -> impl Strategy<Value = Event> {
    let step = prop_oneof![
        2 => Just(Step::Begin),
        2 => Just(Step::Land),
        2 => Just(Step::Confirm),
        1 => Just(Step::Look),
        2 => Just(Step::Read),
        3 => Just(Step::Scan),
        1 => Just(Step::ScanFirst),
        2 => Just(Step::Accept),
        2 => Just(Step::Freeze),
        3 => Just(Step::Thaw),
        1 => Just(Step::Reboot),
    ];
    prop_oneof![
        4 => (0_u64..3000).prop_map(Event::Pass),
        3 => (0_usize..3).prop_map(Event::Second),
        3 => (0_usize..3, step).prop_map(|(at, step)| Event::Step(at, step)),
        1 => Just(Event::Damage),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// In any order of steps, pauses, late writes, late claims, looks that take long or overtake
    /// each other, freezes, reboots and damaged blocks, with a watchdog of the kernel on each host.
    #[test]
    fn never_two_hosts_run_the_vm(events in prop::collection::vec(event(), 1..160)) {
        let mut world = World::new(3);
        for event in events {
            match event {
                Event::Pass(millis) => world.pass(millis),
                Event::Second(at) => world.second(at),
                Event::Step(at, step) => world.step(at, step),
                Event::Damage => world.damage(),
            }
            let running = world.running();
            prop_assert!(running.len() <= 1, "{running:?} after {event:?}: {:?}", world.hosts);
        }
    }
}

#[test]
fn a_vm_goes_on_while_its_host_writes_and_starts_elsewhere_after_the_silence() {
    let mut world = World::new(3);
    for _ in 0..30 {
        world.pass(1000);
        (0..3).for_each(|at| world.second(at));
        assert_eq!(world.running(), [0]);
    }
    // Its power is cut.
    world.reboot(0);
    let mut after = 0;
    while world.running().is_empty() {
        after += 1;
        world.pass(1000);
        [1, 2].into_iter().for_each(|at| world.second(at));
        assert!(after < 30, "{:?}", world.hosts);
    }
    assert!((14..=19).contains(&after), "after {after} s");
}

#[test]
fn a_block_that_is_damaged_ends_nothing_while_its_host_is_well() {
    let mut world = World::new(3);
    for second in 0..30 {
        world.pass(1000);
        (0..3).for_each(|at| world.second(at));
        assert_eq!(world.running(), [0]);
        if second % 3 == 0 {
            world.damage();
        }
    }
    // Without its host nobody knows what the block was.
    world.damage();
    world.reboot(0);
    for _ in 0..30 {
        world.pass(1000);
        (0..3).for_each(|at| world.second(at));
    }
    assert!(world.running().is_empty());
}

#[test]
fn a_host_that_is_back_first_starts_its_vm_itself() {
    let mut world = World::new(2);
    world.pass(1000);
    (0..2).for_each(|at| world.second(at));
    world.reboot(0);
    world.pass(1000);
    (0..2).for_each(|at| world.second(at));
    assert_eq!(world.running(), [0]);
    assert_eq!(world.hosts[0].guard.term(), Term(2));
}

#[test]
fn a_claim_that_is_confirmed_late_runs_nothing() {
    let mut world = World::new(2);
    world.reboot(0);
    for _ in 0..20 {
        world.pass(1000);
        world.step(1, Step::Scan);
    }
    assert!(world.hosts[1].claimed.is_some());
    world.pass(9000);
    world.step(1, Step::Accept);
    assert!(world.running().is_empty());
    world.step(1, Step::Scan);
    world.step(1, Step::Accept);
    assert_eq!(world.running(), [1], "the next term");
}

#[test]
fn a_guard_survives_its_agent_and_its_identity_belongs_to_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (state, run) = (dir.path().join("state"), dir.path().join("run"));
    let open = |boot: &str, name: &str| OwnVms::open(&state, &run, boot.to_owned(), name).unwrap();
    let own = open("boot", "a");
    assert!(own.all().is_empty() && !state.join("own").exists(), "nothing is made without a VM");
    let host = own.host().unwrap();
    let guard = own.guard_of(VM, None).unwrap();
    assert!(!guard.is_over(), "what runs must end first");
    guard.settle();
    assert!(guard.is_over() && guard.held().is_none());
    let renewal = guard.guard.renewal();
    let holder = TermHolder { cluster: Uuid::new_v4(), host };
    let verdict = HaVerdict::Granted { term: 7, datastores: vec![DATASTORE] };
    guard.guard.answer(&HaAnswer { nonce: renewal.nonce, holder, verdict }).unwrap();
    let held = HeldTerm { term: Term(7), datastore: DATASTORE };
    assert_eq!(guard.held(), Some(held));

    let again = open("boot", "a");
    assert_eq!(again.host().unwrap(), host);
    assert_eq!(again.known(VM).unwrap().held(), Some(held));
    again.known(VM).unwrap().lose();
    assert!(again.known(VM).unwrap().held().is_none());
    let booted = open("other boot", "a");
    assert!(booted.known(VM).unwrap().held().is_none());
    booted.known(VM).unwrap().settle();
    assert!(booted.known(VM).unwrap().is_over());
    assert_ne!(open("boot", "b").host().unwrap(), host, "a copy of the host's disk");
    booted.forget(VM);
    assert!(open("boot", "a").all().is_empty());
}
