use godwit_api::{HostEvent, HostLoad, VmInfo};
use proptest::prelude::*;

use super::*;
use crate::rig;

const MINUTE_MS: u64 = 60_000;
/// Begin of an hour.
const BEGIN_MS: u64 = 498_000 * 60 * MINUTE_MS;

fn vm(name: &str, host: &str, uuid: u128) -> VmInfo {
    let mut info = rig::vm(name, host, None);
    info.spec.uuid = Some(Uuid::from_u128(uuid));
    info
}

fn state(hosts: Vec<(&str, Vec<VmInfo>)>) -> Arc<State> {
    let state = Arc::<State>::default();
    for (host, vms) in hosts {
        state.change(|inventory| {
            rig::put_host(inventory, rig::host(host, None), &[], vms);
            None
        });
    }
    state
}

fn archive(dir: &Path, state: &Arc<State>) -> Archive {
    Archive::new(Files::open(dir).unwrap(), Arc::clone(state))
}

fn sample(vms: &[(&str, u128, u64)]) -> Arc<LoadSample> {
    let vm = |&(name, uuid, used): &(&str, u128, u64)| VmLoad {
        name: name.to_owned(),
        uuid: Uuid::from_u128(uuid),
        cpu_used_millicores: used,
        ..VmLoad::default()
    };
    let host = HostLoad { cpu_used_millicores: 100, ..HostLoad::default() };
    let vms = vms.iter().map(vm).collect();
    Arc::new(LoadSample { interval_ms: LOAD_INTERVAL_MS, host, vms, ..LoadSample::default() })
}

/// Feeds a sample of a host every five seconds between two minutes after [`BEGIN_MS`].
fn feed(archive: &mut Archive, host: &str, minutes: std::ops::Range<u64>, what: &Arc<LoadSample>) {
    let ends = BEGIN_MS + minutes.end * MINUTE_MS;
    let mut at_ms = BEGIN_MS + minutes.start * MINUTE_MS;
    while at_ms < ends {
        at_ms += LOAD_INTERVAL_MS;
        archive.take(host, at_ms, what);
    }
}

/// Returns the CPU used in each minute after [`BEGIN_MS`].
fn minutes(archive: &mut Archive, object: &Object) -> Vec<(u64, u64)> {
    let begin = BEGIN_MS / MINUTE_MS;
    let read = Read {
        object: object.clone(),
        resolution: LoadResolution::Minute,
        first: begin,
        end: begin + 1_000,
        now_ms: BEGIN_MS + 1_000 * MINUTE_MS,
    };
    let rows = archive.read(&read).unwrap();
    rows.iter().map(|(at, row)| (at - begin, row.mean[0].value().unwrap())).collect()
}

#[test]
fn history_follows_a_vm_to_another_host_and_name_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let state = state(vec![("a", vec![vm("web", "a", 7)]), ("b", vec![])]);
    let object = Object::Vm(Uuid::from_u128(7));
    let mut before = archive(dir.path(), &state);
    feed(&mut before, "a", 0..2, &sample(&[("web", 7, 100)]));
    // The minute in progress is shown, too.
    assert_eq!(minutes(&mut before, &object), [(0, 100), (1, 100)]);
    before.forget(Duration::ZERO);
    let gone = HostEvent::VmGone("web".into());
    state.apply("a", gone);
    state.apply("b", HostEvent::Vm(Box::new(vm("www", "b", 7))));
    let mut after = archive(dir.path(), &state);
    feed(&mut after, "b", 4..5, &sample(&[("www", 7, 300)]));
    assert_eq!(minutes(&mut after, &object), [(0, 100), (1, 100), (4, 300)]);
}

#[test]
fn a_host_speaks_only_for_its_own_vms() {
    let dir = tempfile::tempdir().unwrap();
    let own = vec![vm("web", "a", 7)];
    // Host b has a VM with the UUID of one of host a.
    let state = state(vec![("a", own), ("b", vec![vm("copy", "b", 7), vm("db", "b", 8)])]);
    let mut archive = archive(dir.path(), &state);
    feed(&mut archive, "a", 0..1, &sample(&[("web", 7, 100)]));
    let lies = sample(&[("web", 7, 900), ("copy", 7, 900), ("db", 9, 900), ("none", 10, 900)]);
    feed(&mut archive, "b", 1..2, &lies);
    assert_eq!(minutes(&mut archive, &Object::Vm(Uuid::from_u128(7))), [(0, 100)]);
    for uuid in [8, 9, 10] {
        assert!(minutes(&mut archive, &Object::Vm(Uuid::from_u128(uuid))).is_empty());
    }
    archive.forget(Duration::ZERO);
    let mut names: Vec<String> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.retain(|name| name.starts_with("vm-"));
    assert_eq!(names, [file_name(&Object::Vm(Uuid::from_u128(7)))]);
}

#[test]
fn the_cluster_is_the_sum_of_its_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let state = state(vec![("a", vec![]), ("b", vec![])]);
    let mut archive = archive(dir.path(), &state);
    let mut at_ms = BEGIN_MS;
    while at_ms < BEGIN_MS + 3 * MINUTE_MS {
        at_ms += LOAD_INTERVAL_MS;
        archive.take("a", at_ms, &sample(&[]));
        // Host b is gone after the first minute.
        if at_ms <= BEGIN_MS + MINUTE_MS {
            archive.take("b", at_ms + 1, &sample(&[]));
        }
    }
    let cluster = minutes(&mut archive, &Object::Cluster);
    assert_eq!((cluster[0].1, cluster[2].1), (200, 100), "{cluster:?}");
    assert_eq!(minutes(&mut archive, &Object::Host("b".into())).len(), 1);
}

#[test]
fn files_of_objects_that_are_gone_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let state = state(vec![("a", vec![vm("web", "a", 7)])]);
    let mut archive = archive(dir.path(), &state);
    feed(&mut archive, "a", 0..2, &sample(&[("web", 7, 100)]));
    archive.forget(Duration::ZERO);
    state.apply("a", HostEvent::VmGone("web".into()));
    let gone = dir.path().join(file_name(&Object::Vm(Uuid::from_u128(7))));
    archive.remove_files();
    assert!(gone.exists());
    let long_ago = SystemTime::now() - KEPT_AFTER_END - Duration::from_secs(1);
    std::fs::File::options().write(true).open(&gone).unwrap().set_modified(long_ago).unwrap();
    archive.remove_files();
    assert!(!gone.exists() && !archive.files.has(&Object::Vm(Uuid::from_u128(7))));
    assert!(archive.files.has(&Object::Host("a".into())));
}

#[test]
fn the_thread_answers_and_writes_everything_at_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let state = state(vec![("a", vec![vm("web", "a", 7)])]);
    let queue = begin(dir.path(), Arc::clone(&state)).unwrap();
    let at_ms = BEGIN_MS + LOAD_INTERVAL_MS;
    let sample = sample(&[("web", 7, 100)]);
    queue.send(Work::Sample { host: "a".into(), at_ms, sample }).unwrap();
    let (done, written) = oneshot::channel();
    queue.send(Work::Flush(done)).unwrap();
    written.blocking_recv().unwrap();
    let object = Object::Vm(Uuid::from_u128(7));
    let mut later = archive(dir.path(), &state);
    assert_eq!(minutes(&mut later, &object), [(0, 100)]);
    let (answer, rows) = oneshot::channel();
    let read = Read {
        object,
        resolution: LoadResolution::FiveSeconds,
        first: 0,
        end: u64::MAX,
        now_ms: at_ms,
    };
    queue.send(Work::Read(read, answer)).unwrap();
    assert_eq!(rows.blocking_recv().unwrap().unwrap().len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    /// Whenever the process ends, what a flush had written is there, and nothing else.
    #[test]
    fn a_kill_loses_at_most_the_minute_in_progress(ends in prop::collection::vec(1..50_u64, 1..6)) {
        let dir = tempfile::tempdir().unwrap();
        let state = state(vec![("a", vec![vm("web", "a", 7)])]);
        let object = Object::Vm(Uuid::from_u128(7));
        let mut begin = 0;
        let mut wanted = Vec::new();
        for minutes in ends {
            let mut killed = archive(dir.path(), &state);
            feed(&mut killed, "a", begin..begin + minutes, &sample(&[("web", 7, minutes)]));
            // The last minute is in memory alone.
            wanted.extend((begin..begin + minutes - 1).map(|minute| (minute, minutes)));
            begin += minutes + 1;
        }
        prop_assert_eq!(minutes(&mut archive(dir.path(), &state), &object), wanted);
    }
}
