//! Start of VMs with their host, once for each boot: by order, with a delay after each. A restart
//! of the agent starts nothing.
//!
//! A VM that may run on another host is not started; what is not clear is asked again for a while.
//! A start that fails is repeated for as long, because storage may become available late. A VM that
//! starts after others waits until each of them has started, or is tried no more.
//!
//! `STATE_DIR/autostart.json` has the boot of the last agent and the VMs that it had still to
//! start, so that an agent that was ended in between continues.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use godwit_api::{ApiError, Endpoint, ErrorCode, VmState};
use godwit_qemu::{Autostart, ResolvedSpec, Uuid, VmName};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;

use crate::agent::{Agent, Slot};
use crate::vm::Condition;
use crate::whole::whole;

/// Identity of the host's boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Time for one other host to tell whether it runs a VM.
const PEER_LIMIT: Duration = Duration::from_secs(5);
/// Hosts asked at once.
const PEERS_AT_ONCE: usize = 32;
/// Time from a VM's first try to its last.
const TRY_LIMIT: Duration = Duration::from_secs(15 * 60);
/// Interval between two queries of the other hosts.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// First and longest interval between two starts that fail.
const START_AGAIN: Duration = Duration::from_secs(5);
const START_AGAIN_MOST: Duration = Duration::from_secs(60);

/// Returns the identity of the host's boot; empty if the kernel does not say it.
pub(super) fn boot_id() -> String {
    let text = std::fs::read_to_string(BOOT_ID);
    text.map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// What another host says of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It has a VM of that name with a process, or in doubt. `will_change`: it is the same VM, and
    /// arrives there or is in doubt.
    Runs { host: String, will_change: bool },
    /// It has none, or one without a process.
    HasNot,
    /// Nothing listens there.
    Unreachable { host: String },
    /// It answered with something else or not at all, or refused: it may run the VM.
    Unclear { host: String, why: String },
}

/// What follows from the answers of all other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Start,
    Later(String),
    Never(String),
}

impl Verdict {
    pub(super) fn of(answers: &[Answer]) -> Verdict {
        let mut later = None;
        let mut away = None;
        for answer in answers {
            match answer {
                Answer::Runs { host, will_change: false } => {
                    return Verdict::Never(format!("host {host} runs a VM of that name"));
                }
                Answer::Runs { host, .. } => {
                    later = Some(format!("it arrives at host {host}, or is in doubt there"));
                }
                Answer::Unclear { host, why } => {
                    let why = format!("whether host {host} runs it is unknown: {why}");
                    later = later.or(Some(why));
                }
                Answer::Unreachable { host } => away = away.or(Some(host)),
                Answer::HasNot => {}
            }
        }
        match (later, away) {
            (Some(why), _) => Verdict::Later(why),
            // A host that reaches no other may be the one that is cut off.
            (None, Some(host)) if !answers.contains(&Answer::HasNot) => Verdict::Later(format!(
                "no other host is reachable, and one may run it (host {host})"
            )),
            (None, _) => Verdict::Start,
        }
    }
}

/// A VM that is still to be started.
#[derive(Debug)]
struct Try {
    name: VmName,
    due: Instant,
    /// Interval to the next start, if this one fails.
    wait: Duration,
    tried: Option<Tried>,
}

/// What an earlier try of a VM left.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tried {
    /// End of the tries.
    until: Instant,
    autostart: Autostart,
    /// The VM's reason. Another one shows that someone else has done something with the VM.
    noted: String,
}

/// What a try ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Asking,
    Start,
}

/// Outcome of a try.
#[derive(Debug)]
enum Outcome {
    Started(Autostart),
    Later { after: After, why: String, autostart: Autostart },
    Never,
}

/// Saved progress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Progress {
    boot_id: String,
    /// VMs to start, in order.
    waiting: Vec<VmName>,
}

impl Agent {
    /// Starts the VMs that start with the host, if this is the first agent since its boot, in the
    /// background. All VMs are in the table.
    pub(super) fn start_with_host(self: &Arc<Self>) {
        let boot_id = boot_id();
        if boot_id.is_empty() {
            return tracing::error!("boot of the host unknown: no VM starts with it");
        }
        let known = self.read_progress().filter(|known| known.boot_id == boot_id);
        let progress = match known {
            Some(known) => known,
            None => {
                let waiting = in_order(self.starting_with_host());
                let new = Progress { boot_id, waiting };
                // Saved first: an agent that fails on one of these VMs does not start all of them
                // again.
                if let Err(error) = self.save_progress(&new) {
                    return tracing::error!(%error, "not saved: no VM starts with the host");
                }
                new
            }
        };
        if !progress.waiting.is_empty() {
            tokio::spawn(self.clone().start_waiting(progress));
        }
    }

    async fn start_waiting(self: Arc<Self>, mut progress: Progress) {
        let new = |name: &VmName| Try {
            name: name.clone(),
            due: Instant::now(),
            wait: START_AGAIN,
            tried: None,
        };
        let mut queue: Vec<Try> = progress.waiting.iter().map(new).collect();
        while let Some(at) = next(&queue, |name| self.starts_after(name)) {
            tokio::time::sleep_until(queue[at].due).await;
            let mut delay = Duration::ZERO;
            match self.try_with_host(&queue[at]).await {
                Outcome::Later { after, why, autostart }
                    if self.will_try_again(&mut queue[at], after, &why, &autostart) =>
                {
                    continue;
                }
                Outcome::Later { why, .. } => self.note_not_started(&queue[at].name, &why),
                Outcome::Started(autostart) => delay = autostart.delay(),
                Outcome::Never => {}
            }
            queue.remove(at);
            progress.waiting = queue.iter().map(|one| one.name.clone()).collect();
            if let Err(error) = self.save_progress(&progress) {
                tracing::error!(%error, "cannot save which VMs have started with the host");
            }
            if !queue.is_empty() {
                tokio::time::sleep(delay).await;
            }
        }
        tracing::info!("all VMs that start with the host have been started");
    }

    async fn try_with_host(self: &Arc<Self>, one: &Try) -> Outcome {
        let name = &one.name;
        let Some((autostart, uuid)) = self.may_start_with_host(name, one.tried.as_ref()) else {
            return Outcome::Never;
        };
        match Verdict::of(&self.answers_of_peers(name, uuid).await) {
            Verdict::Never(why) => {
                self.note_not_started(name, &why);
                return Outcome::Never;
            }
            Verdict::Later(why) => {
                return Outcome::Later { after: After::Asking, why, autostart };
            }
            Verdict::Start => {}
        }
        // The answers took time.
        if self.may_start_with_host(name, one.tried.as_ref()).is_none() {
            return Outcome::Never;
        }
        let (agent, vm) = (self.clone(), name.clone());
        match whole(async move { agent.start_now(&vm).await }).await {
            Ok(()) => {
                tracing::info!(vm = name.as_str(), "started with the host");
                Outcome::Started(autostart)
            }
            Err(error) => Outcome::Later { after: After::Start, why: error.to_string(), autostart },
        }
    }

    /// Whether a VM will be tried again; shows why it has not started yet.
    fn will_try_again(
        &self,
        one: &mut Try,
        after: After,
        why: &str,
        autostart: &Autostart,
    ) -> bool {
        let until = one.tried.as_ref().map_or_else(|| Instant::now() + TRY_LIMIT, |one| one.until);
        let wait = if after == After::Start { one.wait } else { ASK_AGAIN };
        one.due = Instant::now() + wait;
        if one.due > until {
            return false;
        }
        if after == After::Start {
            one.wait = (one.wait * 2).min(START_AGAIN_MOST);
        }
        tracing::warn!(vm = one.name.as_str(), why, ?wait, "not started with the host yet");
        let noted = format!("it has not started with the host yet, trying again: {why}");
        self.note_reason(&one.name, &noted);
        one.tried = Some(Tried { until, autostart: autostart.clone(), noted });
        true
    }

    /// Shows why a VM was not started.
    fn note_not_started(&self, name: &VmName, why: &str) {
        tracing::error!(vm = name.as_str(), why, "cannot start a VM with the host");
        let remedy = format!("start it with `godwit vm start {name}` if no other host runs it");
        self.note_reason(name, &format!("it did not start with the host: {why}; {remedy}"));
    }

    fn note_reason(&self, name: &VmName, reason: &str) {
        if let Some(slot) = self.table().get_mut(name)
            && is_off(&slot.condition)
        {
            slot.reason = Some(reason.to_owned());
        }
    }

    /// Asks every other host for a VM of that name: it may have been created anew there while this
    /// host was away.
    pub(super) async fn answers_of_peers(&self, name: &VmName, uuid: Uuid) -> Vec<Answer> {
        let others = self.peer_names().filter(|host| *host != self.config.name);
        let asked = futures::stream::iter(others).map(|host| self.answer_of(host, name, uuid));
        asked.buffer_unordered(PEERS_AT_ONCE).collect().await
    }

    async fn answer_of(&self, host: String, name: &VmName, uuid: Uuid) -> Answer {
        let peer = match self.peer(&host) {
            Ok(peer) => peer,
            Err(error) => return Answer::Unclear { host, why: error.message },
        };
        // Only a failure before TLS shows that no agent is there: an agent that regards this host's
        // certificate as revoked also closes the connection.
        if let Err(error) = reach(peer.endpoint()).await {
            return match is_away(&error) {
                true => Answer::Unreachable { host },
                false => Answer::Unclear { host, why: error.to_string() },
            };
        }
        match tokio::time::timeout(PEER_LIMIT, peer.vm(name)).await {
            Ok(Ok(vm)) if vm.in_doubt || !vm.state.is_off() => {
                let unsettled = vm.in_doubt || vm.state == VmState::MigratingIn;
                Answer::Runs { host, will_change: unsettled && vm.spec.uuid == Some(uuid) }
            }
            Ok(Ok(_)) => Answer::HasNot,
            Ok(Err(error)) if error.code() == Some(ErrorCode::NotFound) => Answer::HasNot,
            Ok(Err(error)) => Answer::Unclear { host, why: error.detail() },
            Err(_) => Answer::Unclear { host, why: format!("no answer within {PEER_LIMIT:?}") },
        }
    }

    /// Returns the setting and the UUID of a VM that starts with the host and may: it is this
    /// host's, does not run, and is as an earlier try left it.
    fn may_start_with_host(
        &self,
        name: &VmName,
        tried: Option<&Tried>,
    ) -> Option<(Autostart, Uuid)> {
        let table = self.table();
        let slot = table.get(name)?;
        let autostart = autostart_of(slot)?;
        let is_as_left = tried.is_none_or(|tried| {
            tried.autostart == autostart && slot.reason.as_ref() == Some(&tried.noted)
        });
        if is_off(&slot.condition) && is_as_left {
            return Some((autostart, slot.spec.uuid));
        }
        let state = slot.condition.state();
        let in_doubt = slot.condition.is_in_doubt();
        tracing::info!(vm = name.as_str(), %state, in_doubt, "not started with the host");
        None
    }

    fn starting_with_host(&self) -> Vec<(VmName, Autostart)> {
        let table = self.table();
        let all = table.iter();
        all.filter_map(|(name, slot)| Some((name.clone(), autostart_of(slot)?))).collect()
    }

    /// Returns the VMs that a VM starts after.
    fn starts_after(&self, name: &VmName) -> BTreeSet<VmName> {
        let table = self.table();
        let autostart = table.get(name).and_then(|slot| slot.spec.autostart.as_ref());
        autostart.map(|autostart| autostart.after.clone()).unwrap_or_default()
    }

    /// Checks that a VM does not start after one that starts after it.
    pub(super) fn check_order_of_start(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        let Some(autostart) = &spec.autostart else { return Ok(()) };
        let leads_back = |other: &&VmName| leads_to(other, &spec.name, |vm| self.starts_after(vm));
        let Some(other) = autostart.after.iter().find(leads_back) else { return Ok(()) };
        let name = &spec.name;
        Err(ApiError::new(
            ErrorCode::InvalidRequest,
            format!("VM \"{name}\" cannot start after VM \"{other}\", which starts after it"),
            "leave one of the two out; `godwit vm show` shows what a VM starts after",
        ))
    }

    fn progress_path(&self) -> PathBuf {
        self.config.state_dir.join("autostart.json")
    }

    fn read_progress(&self) -> Option<Progress> {
        let text = std::fs::read_to_string(self.progress_path()).ok()?;
        let read = serde_json::from_str(&text);
        read.inspect_err(|error| tracing::warn!(%error, "unreadable autostart.json")).ok()
    }

    fn save_progress(&self, progress: &Progress) -> io::Result<()> {
        let content = serde_json::to_vec(progress)?;
        tokio::task::block_in_place(|| self.store.disk.replace(&self.progress_path(), &content))
    }
}

/// Returns how a VM starts with the host. The manager starts protected VMs, in a term of the host.
fn autostart_of(slot: &Slot) -> Option<Autostart> {
    slot.spec.autostart.clone().filter(|_| slot.spec.protect.is_none())
}

/// Whether a VM of this host has no process and no operation in progress. One in doubt, or one that
/// arrives or leaves, is in another condition.
fn is_off(condition: &Condition) -> bool {
    matches!(condition, Condition::Stopped | Condition::Failed | Condition::Suspended)
}

/// Connects to an agent, and closes the connection.
async fn reach(endpoint: &Endpoint) -> io::Result<()> {
    let connected = async {
        match endpoint {
            Endpoint::Unix(path) => UnixStream::connect(path).await.map(drop),
            Endpoint::Tcp(authority) | Endpoint::Tls(authority) => {
                TcpStream::connect(authority).await.map(drop)
            }
        }
    };
    let limited = tokio::time::timeout(PEER_LIMIT, connected).await;
    limited.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Whether a failed connection shows that no agent is there.
fn is_away(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::TimedOut
    )
}

/// Returns which VM of a queue is tried next: among those that wait for no other one in it, the
/// first that is due. VMs that arrived here may wait for each other; then their order alone counts.
fn next(queue: &[Try], after: impl Fn(&VmName) -> BTreeSet<VmName>) -> Option<usize> {
    let waits = |one: &Try| {
        let others = after(&one.name);
        queue.iter().any(|other| other.name != one.name && others.contains(&other.name))
    };
    let free: Vec<usize> = (0..queue.len()).filter(|at| !waits(&queue[*at])).collect();
    let free = if free.is_empty() { (0..queue.len()).collect() } else { free };
    let now = Instant::now();
    let due = free.iter().copied().find(|at| queue[*at].due <= now);
    due.or_else(|| free.into_iter().min_by_key(|at| queue[*at].due))
}

/// Whether a VM starts after another one, or after one that does.
fn leads_to(from: &VmName, to: &VmName, after: impl Fn(&VmName) -> BTreeSet<VmName>) -> bool {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(name) = open.pop() {
        if name == *to {
            return true;
        }
        if seen.insert(name.clone()) {
            open.extend(after(&name));
        }
    }
    false
}

fn in_order(mut vms: Vec<(VmName, Autostart)>) -> Vec<VmName> {
    vms.sort_by(|(a, one), (b, other)| (one.place(), a).cmp(&(other.place(), b)));
    vms.into_iter().map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn vms_start_by_order_then_by_name() {
        let vm = |name: &str, order| {
            (VmName::new(name).unwrap(), Autostart { order, ..Autostart::default() })
        };
        let vms = vec![vm("zoo", None), vm("app", Some(2)), vm("api", Some(2)), vm("db", Some(1))];
        let order: Vec<String> = in_order(vms).iter().map(ToString::to_string).collect();
        assert_eq!(order, ["db", "api", "app", "zoo"]);
    }

    fn named(name: &str) -> VmName {
        VmName::new(name).unwrap()
    }

    fn try_of(name: &str, due: Instant) -> Try {
        Try { name: named(name), due, wait: START_AGAIN, tried: None }
    }

    /// Returns what each VM starts after: pairs of a VM and another.
    fn order(pairs: &[(&str, &str)]) -> impl Fn(&VmName) -> BTreeSet<VmName> {
        let pairs: Vec<_> = pairs.iter().map(|(vm, other)| (named(vm), named(other))).collect();
        move |vm| {
            let others = pairs.iter().filter(|(of, _)| of == vm);
            others.map(|(_, other)| other.clone()).collect()
        }
    }

    #[test]
    fn a_vm_waits_for_those_that_are_still_to_be_started() {
        let now = Instant::now();
        let later = now + Duration::from_secs(600);
        let started = |queue: &mut Vec<Try>, pairs: &[(&str, &str)]| {
            let mut names = Vec::new();
            while let Some(at) = next(queue, order(pairs)) {
                names.push(queue.remove(at).name.to_string());
            }
            names
        };
        let pairs = [("web", "app"), ("app", "db"), ("app", "gone"), ("web", "off")];
        let mut queue = vec![try_of("web", now), try_of("app", now), try_of("db", now)];
        assert_eq!(started(&mut queue, &pairs), ["db", "app", "web"]);
        // A VM that is tried again later holds back those that start after it, and no others.
        let mut queue = vec![
            try_of("app", now),
            try_of("db", later),
            try_of("other", now),
            try_of("last", now),
        ];
        assert_eq!(started(&mut queue, &pairs), ["other", "last", "db", "app"]);
        // VMs that came from other hosts may wait for each other.
        let circle = [("web", "app"), ("app", "web"), ("self", "self")];
        let mut queue = vec![try_of("web", now), try_of("app", now), try_of("self", now)];
        assert_eq!(started(&mut queue, &circle), ["self", "web", "app"]);
        assert_eq!(next(&[], order(&circle)), None);
    }

    #[test]
    fn a_circle_of_starts_is_found() {
        let pairs = [("web", "app"), ("app", "db"), ("x", "y"), ("y", "x")];
        let leads = |from: &str, to: &str| leads_to(&named(from), &named(to), order(&pairs));
        assert!(leads("web", "db") && leads("app", "db") && leads("db", "db"));
        assert!(!leads("db", "web") && !leads("x", "db"));
    }

    proptest! {
        #[test]
        fn every_vm_is_started_once_and_after_the_others(
            pairs in prop::collection::vec((0_usize..8, 0_usize..8), 0..20),
            is_circle_allowed in any::<bool>(),
        ) {
            let names: Vec<String> = (0..8).map(|number| format!("vm{number}")).collect();
            // A VM that starts only after VMs with a higher number cannot be in a circle.
            let pairs: Vec<(&str, &str)> = pairs
                .iter()
                .filter(|(vm, other)| is_circle_allowed || vm < other)
                .map(|(vm, other)| (names[*vm].as_str(), names[*other].as_str()))
                .collect();
            let due = Instant::now();
            let mut queue: Vec<Try> = names.iter().map(|name| try_of(name, due)).collect();
            let mut started: Vec<VmName> = Vec::new();
            while let Some(at) = next(&queue, order(&pairs)) {
                let name = queue.remove(at).name;
                for other in order(&pairs)(&name) {
                    prop_assert!(is_circle_allowed || started.contains(&other));
                }
                started.push(name);
            }
            prop_assert_eq!(started.len(), names.len());
        }
    }

    #[test]
    fn a_vm_starts_only_if_it_certainly_runs_nowhere_else() {
        let host = || "b".to_owned();
        let runs = |will_change| Answer::Runs { host: host(), will_change };
        let away = || Answer::Unreachable { host: host() };
        let unclear = || Answer::Unclear { host: host(), why: "refused".to_owned() };
        for start in [vec![], vec![Answer::HasNot], vec![away(), Answer::HasNot, away()]] {
            assert_eq!(Verdict::of(&start), Verdict::Start, "{start:?}");
        }
        for later in [
            vec![away()],
            vec![away(), away()],
            vec![unclear(), Answer::HasNot],
            vec![Answer::HasNot, runs(true)],
        ] {
            assert!(matches!(Verdict::of(&later), Verdict::Later(_)), "{later:?}");
        }
        for never in [vec![runs(false)], vec![unclear(), Answer::HasNot, runs(false), runs(true)]] {
            assert!(matches!(Verdict::of(&never), Verdict::Never(_)), "{never:?}");
        }
    }

    #[tokio::test]
    async fn only_a_host_without_a_listener_is_away() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
        reach(&endpoint).await.unwrap();
        // A port that is taken and where nothing listens: that of a closed listener may still be
        // open in a child that another test has just forked.
        let taken = tokio::net::TcpSocket::new_v4().unwrap();
        taken.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let endpoint = Endpoint::Tcp(taken.local_addr().unwrap().to_string());
        assert!(is_away(&reach(&endpoint).await.unwrap_err()));
        assert!(!is_away(&io::Error::other("a name without an address")));
    }

    #[test]
    fn only_a_vm_that_is_certainly_this_hosts_starts() {
        for condition in [Condition::Stopped, Condition::Failed, Condition::Suspended] {
            assert!(is_off(&condition));
        }
        for condition in [
            Condition::InDoubt { keeps_pages_for: None },
            Condition::KeepsPages { to: "b".into() },
            Condition::LacksPages { from: "b".into() },
            Condition::MigratingIn { from: "b".into() },
            Condition::MigratingOut { migration: "m1".into() },
            Condition::Adopting,
            Condition::Paused,
            Condition::Running,
            Condition::Starting,
        ] {
            assert!(!is_off(&condition), "{condition:?}");
        }
    }
}
