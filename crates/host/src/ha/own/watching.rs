//! What a host makes of a VM of others that agents restart among themselves: it judges the VM's
//! newest term as a manager judges a host's, and says when to claim the next one.
//!
//! No I/O, no clock.

use std::time::Duration;

use godwit_api::OwnStanding;
use godwit_ha::own::{End, OwnBlock};
use godwit_ha::{Facts, Judge, Phase, Record, Term, Timing};
use godwit_qemu::Uuid;

use super::folder::{Found, Place};
use super::record::OwnRecord;

/// Number of delays among which hosts are spread, so that one of them usually claims first.
const RANKS: u64 = 3;

/// How this host itself stands to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Me {
    pub(crate) host: Uuid,
    /// Nothing of the VM runs here, and nothing will before the next claim of this host: terms that
    /// this host has claimed are over.
    pub(crate) is_over: bool,
}

/// A VM on a datastore.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) place: Place,
    /// The newest term that was seen; 0: none was claimed.
    pub(crate) term: Term,
    pub(crate) block: Option<OwnBlock>,
    pub(crate) record: Option<OwnRecord>,
    /// Why the folder was not read whole the last time.
    pub(crate) problem: Option<String>,
    /// Whether the folder could be opened the last time.
    pub(crate) answers: bool,
    judge: Judge,
    /// Since when the next term can be claimed.
    free_since: Option<Duration>,
    /// This host claims nothing before.
    not_before: Duration,
    /// Why this host could not start it the last time.
    pub(crate) refused: Option<String>,
    /// An operator has confirmed that nothing runs in this term.
    confirmed: Option<Term>,
}

impl Watched {
    pub(crate) fn new(place: Place, now: Duration) -> Watched {
        Watched {
            place,
            term: Term(0),
            block: None,
            record: None,
            problem: None,
            answers: false,
            judge: judge_of(Term(0), None, now),
            free_since: None,
            not_before: Duration::ZERO,
            refused: None,
            confirmed: None,
        }
    }

    /// Takes what was found in the folder by a look that began at `began` and has ended at `now`.
    pub(crate) fn saw(&mut self, (began, now): (Duration, Duration), found: Found) {
        self.answers = true;
        let (term, problem) = (found.term, &mut self.problem);
        *problem = None;
        let block = found.block.unwrap_or_else(|error| {
            *problem = Some(format!("cannot read its {term}: {error}"));
            None
        });
        match found.record {
            Ok(record) => self.record = record,
            Err(error) => {
                *problem = Some(error.to_string());
                self.record = None;
            }
        }
        // Terms only grow; a folder that was made again differs by its holder.
        let holder = |block: Option<OwnBlock>| block.map(|own| own.block.slot.host);
        let is_other = term != self.term
            || (block.is_some() && holder(block) != holder(self.block))
            || block.map(|own| own.watchdog) != self.block.map(|own| own.watchdog);
        if is_other && (block.is_some() || term != self.term) {
            self.judge = judge_of(term, block, now);
            self.free_since = None;
        }
        self.term = term;
        // A block that cannot be read is no silence, and its last form stays.
        let Some(own) = block else { return };
        self.block = block;
        self.judge.read(began, now, 0, Some(own.block.mark));
        self.judge.check(now);
    }

    /// Notes that nothing of the folder could be read.
    pub(crate) fn failed(&mut self, why: String) {
        self.problem = Some(why);
        self.answers = false;
    }

    /// Returns the term to claim after, if this host should start the VM now.
    pub(crate) fn claim_after(&mut self, now: Duration, me: Me) -> Option<Term> {
        let wants = match self.end() {
            // Nothing of it ever ran, or its claim cannot be read.
            None | Some(End::Stopped) => false,
            Some(End::None | End::Failed | End::Resting) => self.is_free(me),
        };
        if !wants || self.record.is_none() || self.problem.is_some() {
            (self.free_since, self.refused) = (None, None);
            return None;
        }
        let since = *self.free_since.get_or_insert(now);
        let delay = match self.is_of(me.host) {
            true => Duration::ZERO,
            false => Timing::default().interval * rank(self.place.vm, me.host, self.term),
        };
        (now >= since.saturating_add(delay) && now >= self.not_before).then_some(self.term)
    }

    /// Whether the newest term is over: the next one may be claimed.
    pub(crate) fn is_free(&self, me: Me) -> bool {
        let Some(own) = self.current() else {
            // A claim that cannot be read may have succeeded.
            return self.term == Term(0);
        };
        if self.confirmed == Some(self.term) {
            return true;
        }
        match own.end {
            End::Stopped | End::Failed => true,
            End::Resting => false,
            End::None => {
                let is_ours = own.block.slot.host == me.host.into_bytes();
                (is_ours && me.is_over) || self.judge.phase() == Phase::Over
            }
        }
    }

    /// Returns the block of the newest term, if it could be read.
    fn current(&self) -> Option<OwnBlock> {
        self.block.filter(|own| own.block.mark.term == self.term)
    }

    /// Whether this host has claimed the newest term.
    pub(crate) fn is_of(&self, host: Uuid) -> bool {
        self.current().is_some_and(|own| own.block.slot.host == host.into_bytes())
    }

    /// Whether another host has claimed the newest term.
    pub(crate) fn is_of_other(&self, host: Uuid) -> bool {
        self.current().is_some() && !self.is_of(host)
    }

    pub(crate) fn end(&self) -> Option<End> {
        self.current().map(|own| own.end)
    }

    /// Returns the host that claimed the newest term.
    pub(crate) fn holder(&self) -> Option<Uuid> {
        self.current().map(|own| Uuid::from_bytes(own.block.slot.host))
    }

    /// Takes an operator's confirmation that nothing runs in a term. Returns false if it is not
    /// asked for.
    pub(crate) fn confirm_off(&mut self, term: Term) -> bool {
        let is_asked = term == self.term
            && matches!(self.standing(), OwnStanding::Doubtful | OwnStanding::Resting);
        if is_asked {
            self.confirmed = Some(term);
            self.judge.confirmed_off(term);
        }
        is_asked
    }

    /// Notes that this host could not start the VM. It claims nothing before a moment.
    pub(crate) fn refuse(&mut self, why: String, until: Duration) {
        self.refused = Some(why);
        self.not_before = self.not_before.max(until);
    }

    /// Returns how this host stands to a VM of which it holds nothing.
    pub(crate) fn standing(&self) -> OwnStanding {
        match self.end() {
            Some(End::Stopped | End::Failed) => OwnStanding::Stopped,
            Some(End::Resting) => OwnStanding::Resting,
            Some(End::None) if self.judge.phase() == Phase::Doubtful => OwnStanding::Doubtful,
            Some(End::None) | None => OwnStanding::Watched,
        }
    }
}

/// Returns the judge of a term, which counts from `now`.
fn judge_of(term: Term, block: Option<OwnBlock>, now: Duration) -> Judge {
    let watchdog = block.is_some_and(|own| own.watchdog);
    let facts = Facts { datastores: 1, watchdog, fencing: false };
    Judge::new(Timing::default(), Record { term, over: false, facts }, now)
}

/// Returns a host's place among those that would start a VM after a term.
fn rank(vm: Uuid, host: Uuid, term: Term) -> u32 {
    let halves = [vm.as_u64_pair(), host.as_u64_pair()];
    let parts = halves.into_iter().flat_map(|(one, other)| [one, other]).chain([term.0]);
    // FNV-1a, of words.
    let mixed = parts.fold(0xcbf2_9ce4_8422_2325_u64, |mixed, part| {
        (mixed ^ part).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29)
    });
    u32::try_from(mixed % RANKS).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use godwit_ha::Mark;
    use godwit_ha::heartbeat::{Block, Slot};
    use godwit_qemu::{Disk, DiskFormat, VmSpec};

    use super::*;

    const VM: Uuid = Uuid::from_u128(1);
    const HOLDER: Uuid = Uuid::from_u128(2);
    const ME: Me = Me { host: Uuid::from_u128(3), is_over: true };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn watched() -> Watched {
        let place = Place { directory: "/shared".into(), datastore: Uuid::from_u128(4), vm: VM };
        Watched::new(place, at(0))
    }

    fn found(sequence: u64, watchdog: bool, end: End) -> Found {
        let slot = Slot {
            cluster: VM.into_bytes(),
            host: HOLDER.into_bytes(),
            datastore: Uuid::from_u128(4).into_bytes(),
        };
        let block = Block { slot, mark: Mark { term: Term(2), sequence } };
        let spec = VmSpec {
            disks: vec![Disk::new("/shared/web.raw", DiskFormat::Raw)],
            protect_by_agents: true,
            uuid: Some(VM),
            ..VmSpec::new("web")
        };
        Found {
            term: Term(2),
            block: Ok(Some(OwnBlock { block, watchdog, end })),
            record: Ok(Some(OwnRecord::new(spec, 2, "b"))),
        }
    }

    /// Has the host see the same each second; returns when it claims.
    fn claims_at(vm: &mut Watched, from: u64, seen: impl Fn() -> Found) -> Option<u64> {
        (from..from + 40).find(|&second| {
            vm.saw((at(second), at(second)), seen());
            vm.claim_after(at(second), ME) == Some(Term(2))
        })
    }

    #[test]
    fn a_silent_host_with_a_watchdog_is_replaced_after_the_silence() {
        let mut vm = watched();
        for second in 0..60 {
            vm.saw((at(second), at(second)), found(second, true, End::None));
            assert_eq!(vm.claim_after(at(second), ME), None);
        }
        let claimed = claims_at(&mut vm, 60, || found(59, true, End::None)).unwrap();
        assert!((74..=77).contains(&claimed), "{claimed}");
    }

    #[test]
    fn without_a_watchdog_an_operator_decides() {
        let mut vm = watched();
        let seen = || found(9, false, End::None);
        assert_eq!(claims_at(&mut vm, 0, seen), None);
        assert_eq!(vm.standing(), OwnStanding::Doubtful);
        assert!(!vm.confirm_off(Term(1)), "a confirmation of an older term");
        assert!(vm.confirm_off(Term(2)));
        assert!(claims_at(&mut vm, 40, seen).unwrap() <= 43);
    }

    #[test]
    fn what_cannot_be_read_is_no_silence() {
        let mut vm = watched();
        vm.saw((at(0), at(0)), found(9, true, End::None));
        for second in 1..60 {
            let damaged = Found {
                block: Err(super::super::folder::OwnError::TooMany),
                ..found(9, true, End::None)
            };
            vm.saw((at(second), at(second)), damaged);
            assert_eq!(vm.claim_after(at(second), ME), None);
        }
        assert!(vm.answers);
        vm.failed("no answer".to_owned());
        assert!(!vm.answers, "it would be written to in vain");
        assert_eq!(vm.claim_after(at(90), ME), None);
    }

    #[test]
    fn a_stopped_vm_stays_so_and_one_that_could_not_start_is_tried_elsewhere() {
        let mut vm = watched();
        assert_eq!(claims_at(&mut vm, 0, || found(9, true, End::Stopped)), None);
        assert!(vm.is_free(ME), "a user may start it");
        let mut vm = watched();
        assert_eq!(claims_at(&mut vm, 0, || found(9, true, End::Resting)), None);
        assert!(!vm.is_free(ME));
        assert!(vm.confirm_off(Term(2)) && vm.is_free(ME));
        let mut vm = watched();
        vm.refuse("no room".to_owned(), at(30));
        let failed = claims_at(&mut vm, 0, || found(9, true, End::Failed)).unwrap();
        assert!((30..=33).contains(&failed), "{failed}");
    }

    #[test]
    fn a_term_of_this_host_is_over_if_it_says_so() {
        let mut vm = watched();
        vm.saw((at(0), at(0)), found(9, false, End::None));
        let holder = |is_over| Me { host: HOLDER, is_over };
        assert_eq!(vm.claim_after(at(0), holder(false)), None);
        assert_eq!(vm.claim_after(at(0), holder(true)), Some(Term(2)));
        assert_eq!(vm.claim_after(at(0), ME), None);
    }

    #[test]
    fn hosts_have_different_ranks() {
        let ranks = (0..99).map(|host| rank(VM, Uuid::from_u128(host), Term(1)));
        let mut ranks: Vec<u32> = ranks.collect();
        ranks.sort_unstable();
        ranks.dedup();
        assert_eq!(ranks, [0, 1, 2]);
    }
}
