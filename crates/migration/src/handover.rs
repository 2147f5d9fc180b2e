//! The hand-over beyond the two machines: what a host has written down of a VM, what it makes of that when its agent is started
//! anew, and what it concludes from what another host has written down. No I/O; docs/handover.md tells it in words, and
//! `tests/handover_model.rs` tries every order of crashes, losses and delays on it.
//!
//! Epochs count changes of ownership, and no number is used twice: an owner of epoch `n` hands over as `n + 1`
//! ([`Ownership::offered`]); one that has written that down and takes the guest back goes on as `n + 2` ([`Ownership::taken_back`]). So a
//! word of an attempt that is over, however late it comes, is known by its number.
//!
//! Epochs count within one life of a VM. A VM that is created again under its old name and uuid begins a new life, with an
//! [`Incarnation`] of its own, at the first epoch: an [`Ownership`] is both, and a record of another life is no record.

mod incarnation;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use incarnation::{Incarnation, IncarnationError};

/// One ownership of one VM: which life of the VM, and which generation of its owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ownership {
    /// The life of the VM. Nothing that was recorded of another one says anything of this one.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// The generation: grows with each change of owners within that life.
    pub epoch: u64,
}

impl fmt::Display for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.incarnation.is_unrecorded() {
            true => write!(f, "epoch {}", self.epoch),
            false => write!(f, "epoch {} of incarnation {}", self.epoch, self.incarnation),
        }
    }
}

impl Ownership {
    /// The ownership that another host gets from this owner.
    #[must_use]
    pub fn offered(self) -> Ownership {
        Ownership { epoch: self.epoch + 1, ..self }
    }

    /// The ownership of this owner after it takes back a guest that it had offered.
    #[must_use]
    pub fn taken_back(self) -> Ownership {
        Ownership { epoch: self.epoch + 2, ..self }
    }

    /// Returns whether this is the ownership that was offered, or one that followed from it.
    fn follows(self, offered: Ownership) -> bool {
        self.incarnation == offered.incarnation && self.epoch >= offered.epoch
    }
}

/// Whose a guest is, as far as a host has written down. It is written down before anything that it allows is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// This host's.
    Owner,
    /// Another host's, whose memory arrives here; it can't run here yet.
    Shadow,
    /// It may run here from now on, if its source hands it over.
    TakingOver,
    /// It may run at another host from now on, if this one hands it over.
    HandingOver,
    /// It ran here and can't go on: QEMU's own post-copy broke off, and memory of it is at its source.
    Stranded,
}

/// What a host has written down of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Standing {
    /// Whose it is.
    pub role: Role,
    /// This host's ownership, or the one that it would get.
    #[serde(flatten)]
    pub ownership: Ownership,
}

/// What an agent that was started anew finds of a VM's hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Found {
    /// No process.
    Gone,
    /// No process, and the guest has not run in it: nobody had told it to, since this host came up.
    GoneUnrun,
    /// The guest stands still, and nothing says that it has ever run in this process.
    Still,
    /// It runs, or has run.
    Ran,
}

/// What an agent that was started anew does with a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// It is what it was: running, paused, failed or stranded.
    Keep,
    /// The guest was told to run here: it is this host's.
    TakeOver,
    /// It had been offered and had not been stopped, or was let go again: it is this host's, in a new epoch.
    TakeBack,
    /// It can't have run here, and never will: end what is left.
    Discard,
    /// The destination may run it. It is paused until that is known.
    AskDestination,
    /// It may have run here and is gone: the source may take it back, if it has not given it away.
    AskSource,
}

/// What to do with a VM after an agent's start. A guest that runs is never stopped, and one that stands still never let go, on a guess.
#[must_use]
pub fn recover(role: Role, found: Found) -> Recovery {
    match (role, found) {
        (Role::Owner | Role::Stranded, _) => Recovery::Keep,
        // It runs after the commit alone: only the record came too late.
        (Role::Shadow | Role::TakingOver, Found::Ran) => Recovery::TakeOver,
        (Role::Shadow, Found::Still | Found::Gone | Found::GoneUnrun)
        | (Role::TakingOver, Found::Still | Found::GoneUnrun) => Recovery::Discard,
        (Role::TakingOver, Found::Gone) => Recovery::AskSource,
        // Nobody lets it go after the commit but on the destination's refusal.
        (Role::HandingOver, Found::Ran) => Recovery::TakeBack,
        (Role::HandingOver, Found::Still | Found::Gone | Found::GoneUnrun) => Recovery::AskDestination,
    }
}

/// What a host has to say of a VM when another one asks: all that it ever wrote down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Known {
    /// It has a record of it.
    Has(Standing),
    /// Its last ownership of it, which is over.
    Gone(Ownership),
    /// It never owned it.
    Never,
}

/// What a source concludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OfDestination {
    /// The destination owns the guest, or did: it is gone from here.
    Took,
    /// It does not and will not run it: it stays here.
    Refused,
    /// It does not know itself yet.
    Open,
}

/// What the destination has made of the guest that it was offered as `offered`.
#[must_use]
pub fn of_destination(known: Known, offered: Ownership) -> OfDestination {
    match known {
        Known::Has(Standing { role: Role::Owner | Role::HandingOver, ownership })
        | Known::Gone(ownership)
            if ownership.follows(offered) =>
        {
            OfDestination::Took
        }
        Known::Has(Standing { role: Role::Shadow | Role::TakingOver | Role::Stranded, ownership })
            if ownership.follows(offered) =>
        {
            OfDestination::Open
        }
        // What it has is older than the offer, or of another life: it had let go of the shadow.
        Known::Has(_) | Known::Gone(_) | Known::Never => OfDestination::Refused,
    }
}

/// What a source does with the pages that it keeps of a guest, where its destination gives no session to send them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeptPagesFate {
    /// The destination's guest needs them, or may: it is asked again.
    AskAgain,
    /// The guest ran there, and that host has it no more, or has had all of it since: nobody will ever ask for them.
    NotNeeded,
    /// It never ran there, and never will.
    Refused,
}

/// What becomes of the pages kept for a guest that was offered as `offered`.
#[must_use]
pub fn fate_of_kept_pages(known: Known, offered: Ownership) -> KeptPagesFate {
    match (of_destination(known, offered), known) {
        (OfDestination::Refused, _) => KeptPagesFate::Refused,
        (OfDestination::Took, Known::Gone(_)) => KeptPagesFate::NotNeeded,
        // A guest that lacks pages does not leave: that it left and came back says that it had all of them.
        (OfDestination::Took, Known::Has(Standing { ownership, .. })) if ownership.epoch > offered.epoch => {
            KeptPagesFate::NotNeeded
        }
        (OfDestination::Took | OfDestination::Open, _) => KeptPagesFate::AskAgain,
    }
}

/// What a destination concludes that may have run a guest which is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OfSource {
    /// It has taken it back: it never ran here.
    TookBack,
    /// It has let go of it, as it was told that it ran here: it did, and is this host's.
    LetGo,
    /// It does not know either.
    Open,
}

/// What the source has made of the guest that it had offered as `offered`.
#[must_use]
pub fn of_source(known: Known, offered: Ownership) -> OfSource {
    match known {
        // Another life of the VM: nothing is said of this one.
        Known::Has(Standing { ownership, .. }) | Known::Gone(ownership)
            if ownership.incarnation != offered.incarnation =>
        {
            OfSource::Open
        }
        Known::Has(Standing { ownership, .. }) if ownership.epoch > offered.epoch => OfSource::TookBack,
        // It owned it last before it was offered.
        Known::Gone(ownership) if ownership.epoch < offered.epoch => OfSource::LetGo,
        // It is another one's since.
        Known::Gone(_) => OfSource::TookBack,
        // Still owner of the epoch before, though it had offered it: this offer was never written down, so never made.
        Known::Has(Standing { role: Role::Owner, .. }) => OfSource::TookBack,
        Known::Has(_) | Known::Never => OfSource::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_life(bits: u128, epoch: u64) -> Ownership {
        Ownership { incarnation: Incarnation::new(bits), epoch }
    }

    fn at(epoch: u64) -> Ownership {
        of_life(1, epoch)
    }

    fn gone(epoch: u64) -> Known {
        Known::Gone(at(epoch))
    }

    #[test]
    fn what_is_older_than_the_offer_is_no_answer_to_it() {
        let has = |role, epoch| Known::Has(Standing { role, ownership: at(epoch) });
        for took in [has(Role::Owner, 4), has(Role::HandingOver, 6), gone(4)] {
            assert_eq!(of_destination(took, at(4)), OfDestination::Took, "{took:?}");
        }
        for open in [has(Role::Shadow, 4), has(Role::TakingOver, 4), has(Role::Stranded, 4)] {
            assert_eq!(of_destination(open, at(4)), OfDestination::Open, "{open:?}");
        }
        for refused in [has(Role::Owner, 3), has(Role::HandingOver, 1), gone(2), Known::Never] {
            assert_eq!(of_destination(refused, at(4)), OfDestination::Refused, "{refused:?}");
        }
    }

    #[test]
    fn pages_are_kept_until_nobody_will_ask_and_a_guest_that_ran_elsewhere_is_not_resumed() {
        let has = |role, epoch| Known::Has(Standing { role, ownership: at(epoch) });
        // It ran there: deleted, moved on, or moved on and back. Its memory here is old in any case.
        for over in [gone(4), gone(6), has(Role::Owner, 6)] {
            assert_eq!(fate_of_kept_pages(over, at(4)), KeptPagesFate::NotNeeded, "{over:?}");
        }
        for open in [has(Role::Owner, 4), has(Role::HandingOver, 4), has(Role::TakingOver, 4)] {
            assert_eq!(fate_of_kept_pages(open, at(4)), KeptPagesFate::AskAgain, "{open:?}");
        }
        for refused in [Known::Never, gone(2), has(Role::Owner, 3)] {
            assert_eq!(fate_of_kept_pages(refused, at(4)), KeptPagesFate::Refused, "{refused:?}");
        }
    }

    #[test]
    fn a_source_that_has_gone_on_has_taken_it_back() {
        let has = |role, epoch| Known::Has(Standing { role, ownership: at(epoch) });
        for back in [has(Role::Owner, 5), has(Role::HandingOver, 5), gone(5), has(Role::Owner, 3)] {
            assert_eq!(of_source(back, at(4)), OfSource::TookBack, "{back:?}");
        }
        assert_eq!(of_source(gone(3), at(4)), OfSource::LetGo);
        for open in [has(Role::HandingOver, 3), Known::Never] {
            assert_eq!(of_source(open, at(4)), OfSource::Open, "{open:?}");
        }
    }

    #[test]
    fn nothing_that_may_run_elsewhere_is_let_go_by_a_start() {
        use Found::{Gone, GoneUnrun, Ran, Still};
        for found in [Gone, GoneUnrun, Still] {
            assert_eq!(recover(Role::HandingOver, found), Recovery::AskDestination);
        }
        assert_eq!(recover(Role::HandingOver, Ran), Recovery::TakeBack);
        assert_eq!(recover(Role::TakingOver, Gone), Recovery::AskSource);
        for found in [GoneUnrun, Still] {
            assert_eq!(recover(Role::TakingOver, found), Recovery::Discard);
        }
        for role in [Role::Shadow, Role::TakingOver] {
            assert_eq!(recover(role, Ran), Recovery::TakeOver);
        }
    }

    #[test]
    fn a_record_of_another_life_is_no_answer() {
        // Every record that would decide, did it speak of this life.
        let roles = [Role::Owner, Role::Shadow, Role::TakingOver, Role::HandingOver, Role::Stranded];
        for epoch in 0..8 {
            for other in [of_life(2, epoch), Ownership { incarnation: Incarnation::UNRECORDED, epoch }] {
                let records = roles.map(|role| Known::Has(Standing { role, ownership: other }));
                for known in records.into_iter().chain([Known::Gone(other)]) {
                    assert_eq!(
                        of_destination(known, at(4)),
                        of_destination(Known::Never, at(4)),
                        "{known:?}"
                    );
                    assert_eq!(of_source(known, at(4)), of_source(Known::Never, at(4)), "{known:?}");
                    let fate = fate_of_kept_pages(known, at(4));
                    assert_eq!(fate, fate_of_kept_pages(Known::Never, at(4)), "{known:?}");
                }
            }
        }
    }

    #[test]
    fn what_older_agents_say_is_of_the_unrecorded_life() {
        let known: Known = serde_json::from_str(r#"{"has":{"role":"owner","epoch":3}}"#).unwrap();
        let ownership = Ownership { incarnation: Incarnation::UNRECORDED, epoch: 3 };
        assert_eq!(known, Known::Has(Standing { role: Role::Owner, ownership }));
        assert_eq!(serde_json::to_string(&known).unwrap(), r#"{"has":{"role":"owner","epoch":3}}"#);
        let known: Known = serde_json::from_str(r#"{"gone":{"epoch":5}}"#).unwrap();
        assert_eq!(known, Known::Gone(Ownership { epoch: 5, ..ownership }));
        let named = Known::Gone(at(5));
        assert_eq!(serde_json::from_str::<Known>(&serde_json::to_string(&named).unwrap()).unwrap(), named);
    }
}
