//! The hand-over beyond the two state machines: what a host records about a VM, what it concludes
//! from the record when its agent restarts, and what it concludes from another host's record. No
//! I/O. docs/handover.md describes it, and `lab/sim/tests/handover_model.rs` checks every order of
//! crashes, losses and delays.
//!
//! Epochs count changes of ownership, and no number is used twice. An owner of epoch `n` hands over
//! as `n + 1` ([`Ownership::offered`]). An owner that has recorded this and takes the guest back
//! continues as `n + 2` ([`Ownership::taken_back`]). So a message of a finished attempt is
//! recognised by its number, however late it arrives.
//!
//! Epochs count within one life of a VM. A VM that is created again under its old name and uuid
//! begins a new life, with an [`Incarnation`] of its own, at the first epoch. An [`Ownership`]
//! consists of both, and a record of another life is ignored.

use godwit_types::Ownership;
use serde::{Deserialize, Serialize};

/// Owner of a guest, as far as a host has recorded. The host records it before any action that it
/// permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The guest belongs to this host.
    Owner,
    /// The guest belongs to another host, and its memory arrives here. It cannot run here yet.
    Shadow,
    /// The guest may run here from now on, if its source hands it over.
    TakingOver,
    /// The guest may run at another host from now on, if this host hands it over.
    HandingOver,
    /// The guest ran here and cannot continue: QEMU's own post-copy broke off, and part of its
    /// memory is at its source.
    Stranded,
}

/// Record that a host keeps of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Standing {
    pub role: Role,
    /// This host's ownership, or the one that it would get.
    #[serde(flatten)]
    pub ownership: Ownership,
}

/// State of a VM's hypervisor as a restarted agent finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Found {
    /// There is no process.
    Gone,
    /// There is no process, and the guest has not run in it: it was not started since this host
    /// booted.
    GoneUnrun,
    /// The guest is stopped, and nothing indicates that it has ever run in this process.
    Still,
    /// The guest runs, or has run.
    Ran,
}

/// Action of a restarted agent on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Keep the state: running, paused, failed or stranded.
    Keep,
    /// The guest was started here: it belongs to this host.
    TakeOver,
    /// The guest had been offered and was not stopped, or was resumed: it belongs to this host, in
    /// a new epoch.
    TakeBack,
    /// The guest cannot have run here and never will: end what is left.
    Discard,
    /// The destination may run the guest. It stays paused until that is known.
    AskDestination,
    /// The guest may have run here and is gone. The source may take it back if it has not given it
    /// away.
    AskSource,
}

/// Returns what to do with a VM after an agent's start. A running guest is never stopped, and a
/// stopped one never resumed, on a guess.
#[must_use]
pub fn recover(role: Role, found: Found) -> Recovery {
    match (role, found) {
        (Role::Owner | Role::Stranded, _) => Recovery::Keep,
        // The guest runs only after the commit: only the record came too late.
        (Role::Shadow | Role::TakingOver, Found::Ran) => Recovery::TakeOver,
        (Role::Shadow, Found::Still | Found::Gone | Found::GoneUnrun)
        | (Role::TakingOver, Found::Still | Found::GoneUnrun) => Recovery::Discard,
        (Role::TakingOver, Found::Gone) => Recovery::AskSource,
        // After the commit, the guest is resumed only on the destination's refusal.
        (Role::HandingOver, Found::Ran) => Recovery::TakeBack,
        (Role::HandingOver, Found::Still | Found::Gone | Found::GoneUnrun) => {
            Recovery::AskDestination
        }
    }
}

/// A host's answer about a VM to another host: everything that it ever recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Known {
    /// It has a record of the VM.
    Has(Standing),
    /// Its last ownership of the VM, which has ended.
    Gone(Ownership),
    /// It never owned the VM.
    Never,
}

/// A source's conclusion about the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OfDestination {
    /// The destination owns the guest, or did: the guest has left the source.
    Took,
    /// The destination does not and will not run the guest: it stays at the source.
    Refused,
    /// The destination does not know yet.
    Open,
}

/// Returns what the destination has made of the guest that it was offered as `offered`.
#[must_use]
pub fn of_destination(known: Known, offered: Ownership) -> OfDestination {
    match known {
        Known::Has(Standing { role: Role::Owner | Role::HandingOver, ownership })
        | Known::Gone(ownership)
            if ownership.follows(offered) =>
        {
            OfDestination::Took
        }
        Known::Has(Standing {
            role: Role::Shadow | Role::TakingOver | Role::Stranded,
            ownership,
        }) if ownership.follows(offered) => OfDestination::Open,
        // Its record is older than the offer, or of another life: it had discarded the shadow.
        Known::Has(_) | Known::Gone(_) | Known::Never => OfDestination::Refused,
    }
}

/// What a source does with the pages that it keeps of a guest, if its destination opens no session
/// for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeptPagesFate {
    /// The destination's guest needs them, or may need them: the source asks again.
    AskAgain,
    /// The guest ran there, and that host no longer has it, or has had all of its memory since: the
    /// pages will never be requested.
    NotNeeded,
    /// The guest never ran there, and never will.
    Refused,
}

/// Returns what becomes of the pages kept for a guest that was offered as `offered`.
#[must_use]
pub fn fate_of_kept_pages(known: Known, offered: Ownership) -> KeptPagesFate {
    match (of_destination(known, offered), known) {
        (OfDestination::Refused, _) => KeptPagesFate::Refused,
        (OfDestination::Took, Known::Gone(_)) => KeptPagesFate::NotNeeded,
        // A guest that lacks pages does not leave. That it left and came back shows that it had all
        // of them.
        (OfDestination::Took, Known::Has(Standing { ownership, .. }))
            if ownership.epoch > offered.epoch =>
        {
            KeptPagesFate::NotNeeded
        }
        (OfDestination::Took | OfDestination::Open, _) => KeptPagesFate::AskAgain,
    }
}

/// Conclusion of a destination that may have run a guest which is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OfSource {
    /// The source has taken the guest back: it never ran here.
    TookBack,
    /// The source has released the guest because it learned that the guest ran here: it did, and
    /// belongs to this host.
    LetGo,
    /// The source does not know either.
    Open,
}

/// Returns what the source has made of the guest that it had offered as `offered`.
#[must_use]
pub fn of_source(known: Known, offered: Ownership) -> OfSource {
    match known {
        // Another life of the VM: it says nothing about this one.
        Known::Has(Standing { ownership, .. }) | Known::Gone(ownership)
            if ownership.incarnation != offered.incarnation =>
        {
            OfSource::Open
        }
        Known::Has(Standing { ownership, .. }) if ownership.epoch > offered.epoch => {
            OfSource::TookBack
        }
        // The source last owned it before the offer.
        Known::Gone(ownership) if ownership.epoch < offered.epoch => OfSource::LetGo,
        // Another host has owned it since.
        Known::Gone(_) => OfSource::TookBack,
        // Still owner of the epoch before, although it had offered the guest: this offer was never
        // recorded, and so never made.
        Known::Has(Standing { role: Role::Owner, .. }) => OfSource::TookBack,
        Known::Has(_) | Known::Never => OfSource::Open,
    }
}

#[cfg(test)]
mod tests {
    use godwit_types::Incarnation;

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
    fn a_message_older_than_the_offer_does_not_answer_it() {
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
    fn pages_are_kept_until_no_request_can_come_and_a_guest_that_ran_elsewhere_is_not_resumed() {
        let has = |role, epoch| Known::Has(Standing { role, ownership: at(epoch) });
        // It ran there: deleted, moved on, or moved on and back. Its memory here is old in any
        // case.
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
    fn a_source_that_resumed_has_taken_the_guest_back() {
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
    fn a_start_releases_nothing_that_may_run_elsewhere() {
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
    fn a_record_of_another_incarnation_is_not_an_answer() {
        // Every record that would decide if it were of this life.
        let roles =
            [Role::Owner, Role::Shadow, Role::TakingOver, Role::HandingOver, Role::Stranded];
        for epoch in 0..8 {
            for other in
                [of_life(2, epoch), Ownership { incarnation: Incarnation::UNRECORDED, epoch }]
            {
                let records = roles.map(|role| Known::Has(Standing { role, ownership: other }));
                for known in records.into_iter().chain([Known::Gone(other)]) {
                    assert_eq!(
                        of_destination(known, at(4)),
                        of_destination(Known::Never, at(4)),
                        "{known:?}"
                    );
                    assert_eq!(
                        of_source(known, at(4)),
                        of_source(Known::Never, at(4)),
                        "{known:?}"
                    );
                    let fate = fate_of_kept_pages(known, at(4));
                    assert_eq!(fate, fate_of_kept_pages(Known::Never, at(4)), "{known:?}");
                }
            }
        }
    }

    #[test]
    fn reports_of_older_agents_apply_to_the_unrecorded_incarnation() {
        let known: Known = serde_json::from_str(r#"{"has":{"role":"owner","epoch":3}}"#).unwrap();
        let ownership = Ownership { incarnation: Incarnation::UNRECORDED, epoch: 3 };
        assert_eq!(known, Known::Has(Standing { role: Role::Owner, ownership }));
        assert_eq!(serde_json::to_string(&known).unwrap(), r#"{"has":{"role":"owner","epoch":3}}"#);
        let known: Known = serde_json::from_str(r#"{"gone":{"epoch":5}}"#).unwrap();
        assert_eq!(known, Known::Gone(Ownership { epoch: 5, ..ownership }));
        let named = Known::Gone(at(5));
        assert_eq!(
            serde_json::from_str::<Known>(&serde_json::to_string(&named).unwrap()).unwrap(),
            named
        );
    }
}
