//! The hand-over beyond the two machines: what a host has written down of a VM, what it makes of that when its agent is started
//! anew, and what it concludes from what another host has written down. No I/O; docs/handover.md tells it in words, and
//! `tests/handover_model.rs` tries every order of crashes, losses and delays on it.
//!
//! Epochs count changes of ownership, and no number is used twice: an owner of epoch `n` hands over as `n + 1`
//! ([`Standing::offered`]); one that has written that down and takes the guest back goes on as `n + 2` ([`Standing::taken_back`]). So a
//! word of an attempt that is over, however late it comes, is known by its number.

mod incarnation;

use serde::{Deserialize, Serialize};

pub use incarnation::{Incarnation, IncarnationError};

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
    /// The generation of its ownership: this host's, or the one that it would get.
    pub epoch: u64,
}

impl Standing {
    /// The epoch that another host gets from an owner.
    #[must_use]
    pub fn offered(epoch: u64) -> u64 {
        epoch + 1
    }

    /// The epoch of an owner that takes a guest back which it had offered.
    #[must_use]
    pub fn taken_back(epoch: u64) -> u64 {
        epoch + 2
    }
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
    /// It owned it last in this epoch, and has it no more.
    Gone {
        /// That.
        epoch: u64,
    },
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
pub fn of_destination(known: Known, offered: u64) -> OfDestination {
    match known {
        Known::Has(Standing { role: Role::Owner | Role::HandingOver, epoch }) | Known::Gone { epoch }
            if is_lineage(epoch, offered) =>
        {
            OfDestination::Took
        }
        Known::Has(Standing { role: Role::Shadow | Role::TakingOver | Role::Stranded, epoch })
            if is_lineage(epoch, offered) =>
        {
            OfDestination::Open
        }
        // What it has is older than the offer: it had let go of the shadow.
        Known::Has(_) | Known::Gone { .. } | Known::Never => OfDestination::Refused,
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
pub fn fate_of_kept_pages(known: Known, offered: u64) -> KeptPagesFate {
    match (of_destination(known, offered), known) {
        (OfDestination::Refused, _) => KeptPagesFate::Refused,
        (OfDestination::Took, Known::Gone { .. }) => KeptPagesFate::NotNeeded,
        // A guest that lacks pages does not leave: that it left and came back says that it had all of them.
        (OfDestination::Took, Known::Has(Standing { epoch, .. })) if epoch > offered => {
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
pub fn of_source(known: Known, offered: u64) -> OfSource {
    match known {
        Known::Has(Standing { epoch, .. }) if epoch > offered => OfSource::TookBack,
        // It owned it last before it was offered.
        Known::Gone { epoch } if epoch < offered => OfSource::LetGo,
        // It is another one's since.
        Known::Gone { .. } => OfSource::TookBack,
        // Still owner of the epoch before, though it had offered it: this offer was never written down, so never made.
        Known::Has(Standing { role: Role::Owner, .. }) => OfSource::TookBack,
        Known::Has(_) | Known::Never => OfSource::Open,
    }
}

/// Whether an ownership of `epoch` is that of the offer, or of one that followed from it.
fn is_lineage(epoch: u64, offered: u64) -> bool {
    epoch >= offered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_the_offer_is_no_answer_to_it() {
        let has = |role, epoch| Known::Has(Standing { role, epoch });
        for took in [has(Role::Owner, 4), has(Role::HandingOver, 6), Known::Gone { epoch: 4 }] {
            assert_eq!(of_destination(took, 4), OfDestination::Took, "{took:?}");
        }
        for open in [has(Role::Shadow, 4), has(Role::TakingOver, 4), has(Role::Stranded, 4)] {
            assert_eq!(of_destination(open, 4), OfDestination::Open, "{open:?}");
        }
        for refused in
            [has(Role::Owner, 3), has(Role::HandingOver, 1), Known::Gone { epoch: 2 }, Known::Never]
        {
            assert_eq!(of_destination(refused, 4), OfDestination::Refused, "{refused:?}");
        }
    }

    #[test]
    fn pages_are_kept_until_nobody_will_ask_and_a_guest_that_ran_elsewhere_is_not_resumed() {
        let has = |role, epoch| Known::Has(Standing { role, epoch });
        // It ran there: deleted, moved on, or moved on and back. Its memory here is old in any case.
        for over in [Known::Gone { epoch: 4 }, Known::Gone { epoch: 6 }, has(Role::Owner, 6)] {
            assert_eq!(fate_of_kept_pages(over, 4), KeptPagesFate::NotNeeded, "{over:?}");
        }
        for open in [has(Role::Owner, 4), has(Role::HandingOver, 4), has(Role::TakingOver, 4)] {
            assert_eq!(fate_of_kept_pages(open, 4), KeptPagesFate::AskAgain, "{open:?}");
        }
        for refused in [Known::Never, Known::Gone { epoch: 2 }, has(Role::Owner, 3)] {
            assert_eq!(fate_of_kept_pages(refused, 4), KeptPagesFate::Refused, "{refused:?}");
        }
    }

    #[test]
    fn a_source_that_has_gone_on_has_taken_it_back() {
        let has = |role, epoch| Known::Has(Standing { role, epoch });
        for back in
            [has(Role::Owner, 5), has(Role::HandingOver, 5), Known::Gone { epoch: 5 }, has(Role::Owner, 3)]
        {
            assert_eq!(of_source(back, 4), OfSource::TookBack, "{back:?}");
        }
        assert_eq!(of_source(Known::Gone { epoch: 3 }, 4), OfSource::LetGo);
        for open in [has(Role::HandingOver, 3), Known::Never] {
            assert_eq!(of_source(open, 4), OfSource::Open, "{open:?}");
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
}
