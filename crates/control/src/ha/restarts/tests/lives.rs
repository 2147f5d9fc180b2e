//! Any order of failures, lost answers and leaders: a VM never runs twice.

use super::*;

const HOSTS: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The manager takes its next steps.
    Step,
    /// A host answers requests like this from now on.
    Replies(usize, Reply),
    Dies(usize),
    /// The judge ends the term of a dead host.
    Ends(usize),
    Returns(usize),
    /// The manager loses its connection to a host that runs on.
    Lost(usize),
    /// The manager answers a renewal of a host.
    Renews(usize),
    /// The VM moves from a host to another one without the manager. Whether the manager hears of it
    /// from hosts that it reaches.
    Moves(usize, usize, bool),
    /// Somebody starts what a host has, at its agent.
    StartedByHand(usize),
    /// Somebody ends the protection of what a host runs. Whether the manager hears of it.
    Unprotects(usize, bool),
    /// A renewal of a host names no VM.
    Settles(usize),
    /// A request that was delayed arrives.
    Arrives(usize),
    NextLeader,
    Follow,
}

fn event() -> impl Strategy<Value = Event> {
    let reply = prop_oneof![
        Just(Reply::Starts),
        Just(Reply::StartsUnanswered),
        Just(Reply::Delayed),
        Just(Reply::Refuses),
    ];
    let host = 0..HOSTS.len();
    prop_oneof![
        5 => Just(Event::Step),
        3 => (host.clone(), reply).prop_map(|(host, reply)| Event::Replies(host, reply)),
        2 => host.clone().prop_map(Event::Dies),
        3 => host.clone().prop_map(Event::Ends),
        2 => host.clone().prop_map(Event::Returns),
        2 => host.clone().prop_map(Event::StartedByHand),
        2 => host.clone().prop_map(Event::Lost),
        6 => host.clone().prop_map(Event::Renews),
        6 => (host.clone(), host.clone(), any::<bool>())
            .prop_map(|(from, to, heard)| Event::Moves(from, to, heard)),
        1 => (host.clone(), any::<bool>()).prop_map(|(host, heard)| Event::Unprotects(host, heard)),
        1 => host.prop_map(Event::Settles),
        3 => (0..4_usize).prop_map(Event::Arrives),
        1 => Just(Event::NextLeader),
        2 => Just(Event::Follow),
    ]
}

async fn live(events: &[Event]) {
    let mut rig = Rig::begin(&HOSTS).await;
    for event in events {
        happen(&mut rig, *event).await;
        let running: Vec<String> = rig.world().running().into_iter().map(str::to_owned).collect();
        assert!(running.len() <= 1, "{running:?} after {event:?}");
    }
    // When all hosts are well, it runs again.
    for host in HOSTS {
        rig.world().replies.insert(host.to_owned(), Reply::Starts);
        happen(&mut rig, Event::Dies(host_index(host))).await;
        happen(&mut rig, Event::Ends(host_index(host))).await;
        happen(&mut rig, Event::Returns(host_index(host))).await;
    }
    for _ in 0..12 {
        for host in HOSTS {
            rig.renews(host).await;
        }
        rig.restarts.known().returning.clear();
        rig.step().await;
        rig.restarts.follow().await.unwrap();
    }
    assert_eq!(rig.world().running().len(), 1, "{:?}", rig.record());
}

fn host_index(host: &str) -> usize {
    HOSTS.iter().position(|known| *known == host).unwrap()
}

async fn happen(rig: &mut Rig, event: Event) {
    match event {
        Event::Step => drop(rig.step().await),
        Event::Replies(host, reply) => {
            rig.world().replies.insert(HOSTS[host].to_owned(), reply);
        }
        Event::Dies(host) => rig.dies(HOSTS[host]),
        Event::Ends(host) => {
            let is_dead = rig.world().dead.contains(HOSTS[host]);
            if is_dead {
                rig.ends(HOSTS[host]).await;
            }
        }
        Event::Returns(host) => {
            let is_over = rig.terms.is_over(HOSTS[host]);
            if is_over {
                rig.returns(HOSTS[host]).await;
            }
        }
        Event::Lost(host) => rig.loses(HOSTS[host]),
        Event::Renews(host) => rig.renews(HOSTS[host]).await,
        Event::Moves(from, to, is_heard) => move_by_agents(rig, HOSTS[from], HOSTS[to], is_heard),
        Event::StartedByHand(host) => {
            let host = HOSTS[host];
            if gives_up(rig, host) {
                return;
            }
            let mut world = rig.world();
            let key = (host.to_owned(), WEB.to_owned());
            let may_run = world.vms.get(&key).is_some_and(|info| world.may_run(host, info));
            let is_held = world.held.contains(host) && may_run;
            if let Some(info) = world.vms.get_mut(&key).filter(|_| is_held) {
                info.state = VmState::Running;
                let info = info.clone();
                drop(world);
                rig.state().apply(host, HostEvent::Vm(Box::new(info)));
            }
        }
        Event::Unprotects(host, is_heard) => {
            let changed = rig.unprotects(HOSTS[host]).await;
            if let Some(info) = changed.filter(|_| is_heard) {
                rig.state().apply(HOSTS[host], HostEvent::Vm(Box::new(info)));
            }
        }
        Event::Settles(host) => rig.settle(HOSTS[host]).await,
        Event::Arrives(which) => {
            let mut world = rig.world();
            if which < world.delayed.len() {
                let (host, request) = world.delayed.remove(which);
                if let Ok(info) = world.start(&host, &request) {
                    drop(world);
                    rig.state().apply(&host, HostEvent::Vm(Box::new(info)));
                }
            }
        }
        Event::NextLeader => rig.next_leader().await,
        Event::Follow => rig.restarts.follow().await.unwrap(),
    }
}

fn move_by_agents(rig: &Rig, from: &str, to: &str, is_heard: bool) {
    if gives_up(rig, to) {
        return;
    }
    let moved = rig.world().moves_by_agents(from, to);
    let Some(info) = moved else { return };
    let cut = rig.world().cut.clone();
    if !is_heard || cut.contains(to) {
        return;
    }
    if !cut.contains(from) {
        rig.state().apply(from, HostEvent::VmGone(WEB.to_owned()));
    }
    rig.state().apply(to, HostEvent::Vm(Box::new(info)));
}

/// Returns whether a host that holds a term has a definition of a VM that starts, or has started,
/// elsewhere. Its next renewal has it deleted; until then the VM neither starts there by hand nor
/// returns.
fn gives_up(rig: &Rig, host: &str) -> bool {
    let known = rig.restarts.known();
    let restart = known.vms.get(WEB).and_then(|vm| vm.restart.as_ref());
    let attempt = restart.and_then(|restart| restart.attempt.as_ref());
    let is_left = attempt.is_some_and(|attempt| attempt.left_at.iter().any(|at| at.host == host));
    is_left || known.releases.contains_key(&ReleaseKey::new(host, WEB))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn a_vm_never_runs_twice(events in prop::collection::vec(event(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(live(&events));
    }
}
