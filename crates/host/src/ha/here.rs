//! Protected VMs of this host, as renewals name them. A VM that is new to this host gets a process
//! only after an answer to a renewal that names it. So a manager that hears this host no longer
//! knows which VMs it cannot have.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::MOST_HERE;
use godwit_qemu::Uuid;
use tokio::sync::watch;

use super::named::Named;

#[derive(Debug, Default)]
pub(super) struct Here {
    /// Number of the last naming or use of one.
    last: u64,
    vms: BTreeMap<Uuid, Naming>,
    /// Whether the last list had all protected VMs.
    is_whole: bool,
}

#[derive(Debug)]
struct Naming {
    number: u64,
    /// When a start last began or ended. A list that was begun before may lack the VM.
    used: u64,
    /// Starts that wait or are in progress.
    starts: usize,
    /// Whether a renewal that named it has been answered.
    confirmed: watch::Sender<bool>,
}

impl Here {
    /// Must be called before the protected VMs are listed for [`Here::list`].
    pub(super) fn begin_list(&self) -> u64 {
        self.last
    }

    /// Takes the protected VMs that this host has; `None`: not all are known. `begun` is what
    /// [`Here::begin_list`] returned.
    pub(super) fn list(&mut self, begun: u64, all: Option<BTreeSet<Uuid>>) {
        self.is_whole = all.is_some();
        let Some(all) = all else { return };
        self.vms.retain(|vm, naming| naming.starts > 0 || naming.used > begun || all.contains(vm));
        for vm in all {
            self.naming(vm);
        }
    }

    /// Returns the naming of a VM, which begins if there is none.
    fn naming(&mut self, vm: Uuid) -> &mut Naming {
        let last = &mut self.last;
        self.vms.entry(vm).or_insert_with(|| {
            *last += 1;
            Naming { number: *last, used: 0, starts: 0, confirmed: watch::Sender::new(false) }
        })
    }

    /// Returns what a renewal that is made now confirms when it is answered.
    pub(super) fn named(&self) -> Vec<Named> {
        self.vms.iter().map(|(vm, naming)| (*vm, naming.number)).collect()
    }

    /// Returns what a renewal says; `None`: this host may have others.
    pub(super) fn shown(&self) -> Option<Vec<Uuid>> {
        let is_known = self.is_whole && self.vms.len() <= MOST_HERE;
        is_known.then(|| self.vms.keys().copied().collect())
    }

    /// Takes the answer to a renewal that named these VMs.
    pub(super) fn confirmed(&mut self, named: &[Named]) {
        for (vm, number) in named {
            if let Some(naming) = self.vms.get(vm).filter(|naming| naming.number == *number) {
                naming.confirmed.send_replace(true);
            }
        }
    }

    /// Whether renewals name a VM, and none of them has been answered.
    pub(super) fn is_unconfirmed(&self, vm: Uuid) -> bool {
        self.vms.get(&vm).is_some_and(|naming| !*naming.confirmed.borrow())
    }

    /// Names a VM whose start begins. [`Here::end`] has to follow. Returns whether it is confirmed,
    /// now and later.
    pub(super) fn begin(&mut self, vm: Uuid) -> watch::Receiver<bool> {
        self.last += 1;
        let used = self.last;
        let naming = self.naming(vm);
        (naming.used, naming.starts) = (used, naming.starts.saturating_add(1));
        naming.confirmed.subscribe()
    }

    /// Notes that a start has ended, however it has ended. The VM is named until a later list.
    pub(super) fn end(&mut self, vm: Uuid) {
        self.last += 1;
        let used = self.last;
        if let Some(naming) = self.vms.get_mut(&vm) {
            (naming.used, naming.starts) = (used, naming.starts.saturating_sub(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WEB: Uuid = Uuid::from_u128(1);

    #[test]
    fn a_start_is_confirmed_by_the_answer_to_a_renewal_that_names_it() {
        let mut here = Here::default();
        assert_eq!(here.shown(), None, "nothing is listed yet");
        let begun = here.begin_list();
        here.list(begun, Some(BTreeSet::new()));
        assert_eq!(here.shown(), Some(Vec::new()));
        let early = here.named();
        assert!(!here.is_unconfirmed(WEB), "it is not named");
        let confirmed = here.begin(WEB);
        here.confirmed(&early);
        assert!(!*confirmed.borrow() && here.is_unconfirmed(WEB));
        assert_eq!(here.shown(), Some(vec![WEB]));
        let named = here.named();
        here.confirmed(&named);
        assert!(*confirmed.borrow() && !here.is_unconfirmed(WEB));
        // A list that was begun before the start has ended may lack it.
        here.end(WEB);
        here.list(begun, Some(BTreeSet::new()));
        assert_eq!(here.shown(), Some(vec![WEB]));
        here.list(here.begin_list(), Some(BTreeSet::from([WEB])));
        assert!(*here.begin(WEB).borrow(), "it is named without a break");
        here.end(WEB);
        here.list(here.begin_list(), None);
        assert_eq!(here.shown(), None);
        here.list(here.begin_list(), Some(BTreeSet::new()));
        assert_eq!(here.shown(), Some(Vec::new()));
        // It returns: a late answer says nothing about it.
        let confirmed = here.begin(WEB);
        here.confirmed(&named);
        assert!(!*confirmed.borrow());
    }

    #[test]
    fn too_many_vms_are_not_named() {
        let mut here = Here::default();
        let most = u128::try_from(MOST_HERE).unwrap();
        here.list(here.begin_list(), Some((0..most).map(Uuid::from_u128).collect()));
        assert_eq!(here.shown().unwrap().len(), MOST_HERE);
        here.list(here.begin_list(), Some((0..=most).map(Uuid::from_u128).collect()));
        assert_eq!(here.shown(), None);
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// The VM gets a definition, or loses it.
        Defined(bool),
        BeginList,
        List,
        Begin,
        End,
        Renewal,
        /// An answer to one of the renewals.
        Answer(usize),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            any::<bool>().prop_map(Event::Defined),
            Just(Event::BeginList),
            Just(Event::List),
            Just(Event::Begin),
            Just(Event::End),
            Just(Event::Renewal),
            (0..6_usize).prop_map(Event::Answer),
        ]
    }

    proptest! {
        /// The manager knows the newest renewal of those whose answers arrived. A VM that may run
        /// here is in it, and in all later ones.
        #[test]
        fn what_may_run_is_in_each_renewal_since_the_confirmed_one(
            events in prop::collection::vec(event(), 1..80),
        ) {
            let mut here = Here::default();
            let (mut is_defined, mut starts, mut listed) = (false, 0, None);
            // What each renewal said, what it confirms, and which of them a running VM counts from.
            let mut renewals: Vec<(Vec<Uuid>, Vec<Named>)> = Vec::new();
            let mut runs_since: Option<usize> = None;
            for event in events {
                match event {
                    Event::Defined(defined) => {
                        // A VM that runs or starts is in the table.
                        is_defined = defined || starts > 0;
                        if !is_defined {
                            runs_since = None;
                        }
                    }
                    Event::BeginList => {
                        let all: BTreeSet<Uuid> = is_defined.then_some(WEB).into_iter().collect();
                        listed = Some((here.begin_list(), all));
                    }
                    Event::List => {
                        if let Some((begun, all)) = listed.take() {
                            here.list(begun, Some(all));
                        }
                    }
                    Event::Begin => {
                        is_defined = true;
                        starts += 1;
                        here.begin(WEB);
                    }
                    Event::End if starts > 0 => {
                        starts -= 1;
                        here.end(WEB);
                    }
                    Event::End => {}
                    Event::Renewal => {
                        let named = here.named();
                        let said = named.iter().map(|(vm, _)| *vm).collect();
                        renewals.push((said, named));
                    }
                    Event::Answer(back) => {
                        if let Some((_, named)) = renewals.iter().rev().nth(back) {
                            here.confirmed(named);
                        }
                    }
                }
                let is_confirmed =
                    here.vms.get(&WEB).is_some_and(|naming| *naming.confirmed.borrow());
                if starts > 0 && is_confirmed && runs_since.is_none() {
                    let first = renewals.iter().rposition(|(said, _)| !said.contains(&WEB));
                    let since = first.map_or(0, |at| at + 1);
                    prop_assert!(since < renewals.len(), "no renewal named it");
                    runs_since = Some(since);
                }
                if let Some(since) = runs_since {
                    let mut later = renewals.iter().skip(since);
                    prop_assert!(later.all(|(said, _)| said.contains(&WEB)));
                }
            }
        }
    }
}
