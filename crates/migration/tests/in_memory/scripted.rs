//! One machine alone, with a script of events.

use super::*;

fn counted(pages: u64) -> SourceEvent {
    SourceEvent::RemainingCounted(Counted {
        pages,
        filled_pages: 0,
        round_trip: Duration::ZERO,
        limit_bytes_per_s: None,
        scan: Duration::ZERO,
        search: Duration::ZERO,
    })
}

fn plan() -> Plan {
    let policy = Policy::default();
    Plan { policy, preflight: Duration::ZERO, resumes: false, settles: false }
}

fn begin() -> Begin {
    Begin { epoch: EPOCH, incarnation: LIFE, run: true, block_pages: vec![PAGES as u64] }
}

#[test]
fn an_unknown_fact_is_not_a_refusal() {
    let mut source = Source::new(&Plan {
        policy: Policy { page_in: PageIn::Now, switchover_budget: BUDGET, ..Policy::default() },
        preflight: Duration::ZERO,
        resumes: false,
        settles: false,
    });
    let second = Duration::from_secs(1);
    let sent = SentTotals { pages: 90_000, bytes: 90_000 * 4128, ..SentTotals::default() };
    let script = [
        SourceEvent::Connected,
        SourceEvent::PeerReady,
        counted(9),
        SourceEvent::RoundSent(sent),
        counted(90_000),
        SourceEvent::PageInReady { able: true },
        SourceEvent::RoundApplied { round: 0, padding_bytes: 0 },
        SourceEvent::GuestStopped,
        SourceEvent::DeviceStateEnded,
        SourceEvent::RemainingAnnounced { pages: 90_000 },
    ];
    let seconds = (1..).map(Duration::from_secs);
    let actions: Vec<_> =
        seconds.zip(script).flat_map(|(now, event)| source.on(now, event)).collect();
    assert_eq!(actions.last(), Some(&SourceAction::SendCommit), "{actions:?}");
    assert_eq!(source.on(second, SourceEvent::CommitSent), []);
    let lost = Failure::new(FailureCode::Internal, "the thread is gone");
    // Before it is known who runs the guest: recorded until it is.
    assert_eq!(source.on(second, SourceEvent::PagedIn(Err(NotServed::Lost(lost)))), []);
    source.on(second, SourceEvent::LaneLost(Failure::new(FailureCode::LaneLost, "cut")));
    let actions = source.on(second, SourceEvent::Verdict(Verdict::Unknown));
    assert_eq!(actions.last(), Some(&SourceAction::Finish), "{actions:?}");
    assert!(!actions.contains(&SourceAction::ResumeGuest), "{actions:?}");
    assert_eq!(source.ending().unwrap().0, Outcome::InDoubt);
}

#[test]
fn silence_after_the_commit_is_doubt() {
    let mut source = Source::new(&plan());
    let second = Duration::from_secs(1);
    let sent = SentTotals { pages: 1, bytes: 5000, ..SentTotals::default() };
    let script = [
        SourceEvent::Connected,
        SourceEvent::PeerReady,
        counted(1),
        SourceEvent::RoundSent(sent),
        counted(1),
        SourceEvent::RoundApplied { round: 0, padding_bytes: 0 },
        counted(1),
        SourceEvent::GuestStopped,
        SourceEvent::LastPagesSent(sent),
        SourceEvent::DeviceStateEnded,
        SourceEvent::LastPagesSent(sent),
    ];
    let actions: Vec<_> = script.into_iter().flat_map(|event| source.on(second, event)).collect();
    assert_eq!(actions.last(), Some(&SourceAction::SendCommit));
    assert_eq!(source.on(second, SourceEvent::CommitSent), []);
    let lost = Failure::new(FailureCode::LaneLost, "cut");
    assert_eq!(source.on(second, SourceEvent::LaneLost(lost)), [SourceAction::AskVerdict]);
    assert_eq!(source.on(second, SourceEvent::CancelRequested), []);
    assert_eq!(source.on(second, SourceEvent::Verdict(Verdict::Unknown)), [SourceAction::Finish]);
    assert_eq!(source.ending().unwrap().0, Outcome::InDoubt);
}

#[test]
fn the_device_state_passes_after_what_the_devices_wrote() {
    let second = Duration::from_secs(1);
    let sent = SentTotals { pages: 1, bytes: 5000, ..SentTotals::default() };
    let last = || SourceEvent::LastPagesSent(sent);
    let sweep = || vec![SourceAction::SendLastPages { round: 1 }];
    let pass = || vec![SourceAction::PassDeviceState];
    let both = || [pass(), sweep()].concat();
    // Each event with the actions that follow it; the commit follows the last one.
    let scripts = [
        vec![
            (last(), vec![]),
            (SourceEvent::DevicesStopped, sweep()),
            (last(), pass()),
            (SourceEvent::DeviceStateEnded, sweep()),
        ],
        // The first sweep takes long.
        vec![
            (SourceEvent::DevicesStopped, vec![]),
            (last(), sweep()),
            (SourceEvent::DeviceStateEnded, vec![]),
            (last(), both()),
        ],
        // It takes longer than the device state.
        vec![
            (SourceEvent::DevicesStopped, vec![]),
            (SourceEvent::DeviceStateEnded, vec![]),
            (last(), sweep()),
        ],
        vec![(last(), vec![]), (SourceEvent::DeviceStateEnded, sweep())],
    ];
    for (number, script) in scripts.into_iter().enumerate() {
        let mut source = Source::new(&plan());
        let prelude = [
            SourceEvent::Connected,
            SourceEvent::PeerReady,
            counted(1),
            SourceEvent::RoundSent(sent),
            counted(1),
            SourceEvent::RoundApplied { round: 0, padding_bytes: 0 },
            counted(1),
            SourceEvent::GuestStopped,
        ];
        prelude.into_iter().for_each(|event| drop(source.on(second, event)));
        for (event, actions) in script {
            assert_eq!(source.on(second, event.clone()), actions, "{number}: {event:?}");
        }
        let actions = source.on(second, last());
        assert_eq!(actions.last(), Some(&SourceAction::SendCommit), "{number}");
    }
}

#[test]
fn a_message_out_of_order_discards_the_shadow() {
    let mut destination = Destination::new(vec![PAGES as u64], OWNERSHIP);
    let actions = destination.on(DestinationEvent::Commit { ownership: OWNERSHIP });
    assert!(matches!(actions[0], DestinationAction::Discard(_)));
    assert!(matches!(
        &actions[1],
        DestinationAction::Refuse(failure) if failure.code == FailureCode::ProtocolBroken
    ));
}

#[test]
fn a_device_state_before_all_pages_discards_the_shadow() {
    let mut destination = Destination::new(vec![PAGES as u64], OWNERSHIP);
    destination.on(DestinationEvent::Begin(begin()));
    let actions = destination.on(DestinationEvent::DeviceStateEnd { bytes: 0 });
    assert!(matches!(actions[0], DestinationAction::Discard(_)));
}

#[test]
fn an_answer_out_of_order_ends_the_move_and_keeps_the_guest() {
    let running = Running { commit_ns: 0, loaded_ns: 0, running_ns: 0 };
    for early in [
        SourceEvent::PeerRunning(running),
        SourceEvent::RoundApplied { round: 9, padding_bytes: 0 },
    ] {
        let mut source = Source::new(&plan());
        source.on(Duration::ZERO, SourceEvent::Connected);
        source.on(Duration::ZERO, SourceEvent::PeerReady);
        let actions = source.on(Duration::ZERO, early);
        assert_eq!(actions.last(), Some(&SourceAction::Finish));
        assert_eq!(source.ending().unwrap().0, Outcome::Failed);
    }
}

#[test]
fn a_lost_page_is_noticed_before_the_guest_runs() {
    let mut destination = Destination::new(vec![PAGES as u64], OWNERSHIP);
    assert_eq!(destination.on(DestinationEvent::Begin(begin())), [DestinationAction::SendReady]);
    let actions = destination.on(DestinationEvent::PagesComplete { sent: 6, applied: 5 });
    assert!(matches!(actions[0], DestinationAction::Discard(_)));
}

/// Returns a source that settles what moves with its guest.
fn settling(page_in: PageIn) -> Source {
    let is_paged_in = page_in == PageIn::Now;
    let budget = if is_paged_in { BUDGET } else { Policy::default().switchover_budget };
    let policy = Policy { page_in, switchover_budget: budget, ..Policy::default() };
    let mut source = Source::new(&Plan { policy, settles: true, ..plan() });
    let pages = if is_paged_in { 90_000 } else { 1 };
    let sent = SentTotals { pages, bytes: pages * 4128, ..SentTotals::default() };
    let mut script = vec![
        SourceEvent::Connected,
        SourceEvent::PeerReady,
        counted(pages),
        SourceEvent::RoundSent(sent),
        counted(pages),
    ];
    script.extend(is_paged_in.then_some(SourceEvent::PageInReady { able: true }));
    script.push(SourceEvent::RoundApplied { round: 0, padding_bytes: 0 });
    script.extend((!is_paged_in).then(|| counted(pages)));
    let time = |place: u64| Duration::from_secs(if is_paged_in { place } else { 1 });
    let events = (1..).zip(script);
    let actions: Vec<_> = events.flat_map(|(place, event)| source.on(time(place), event)).collect();
    assert_eq!(actions.last(), Some(&SourceAction::Settle), "{actions:?}");
    assert_eq!(source.state(), State::Settling);
    source
}

#[test]
fn a_guest_is_stopped_only_when_what_moves_with_it_is_settled() {
    let now = Duration::from_secs(20);
    for (page_in, is_paged_in) in [(PageIn::default(), false), (PageIn::Now, true)] {
        let mut source = settling(page_in);
        let begin = SourceAction::BeginSwitchover { page_in: is_paged_in };
        assert_eq!(source.on(now, SourceEvent::Settled), [begin]);
        assert_eq!((source.state(), source.round()), (State::Stopping, 1));
        // An answer that comes twice changes nothing.
        assert_eq!(source.on(now, SourceEvent::PutOff), []);
    }
}

#[test]
fn a_stop_that_is_put_off_is_preceded_by_another_round() {
    let now = Duration::from_secs(20);
    let mut source = settling(PageIn::default());
    let actions = source.on(now, SourceEvent::PutOff);
    assert_eq!(actions, [SourceAction::SendRound { round: 1, brief: false }]);
    // Both ends are prepared for a page-in, which needs no other round.
    let mut source = settling(PageIn::Now);
    assert_eq!(source.on(now, SourceEvent::PutOff), [SourceAction::Settle]);
    assert_eq!(source.state(), State::Settling);
}

#[test]
fn a_cut_before_the_stop_is_one_that_can_be_waited_for() {
    let now = Duration::from_secs(20);
    let lost = || SourceEvent::LaneLost(Failure::new(FailureCode::LaneLost, "cut"));
    for page_in in [PageIn::default(), PageIn::Now] {
        let mut source = settling(page_in);
        let actions = source.on(now, lost());
        assert!(!actions.contains(&SourceAction::ResumeGuest), "{actions:?}");
        assert!(source.is_cut() && source.state() == State::Ended);
        // The answer comes after it.
        assert_eq!(source.on(now, SourceEvent::Settled), []);
        let mut source = settling(page_in);
        source.on(now, SourceEvent::Settled);
        let actions = source.on(now, lost());
        assert_eq!(actions.first(), Some(&SourceAction::ResumeGuest), "{actions:?}");
        assert!(!source.is_cut());
    }
}
