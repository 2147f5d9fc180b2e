use proptest::prelude::*;

use super::*;
use crate::load::reading::{CpuTicks, Process};

const WEB: Process = (70, 4711);

fn disk(reads: u64, busy_ns: u64) -> DiskCounters {
    DiskCounters { reads, writes: 0, read_bytes: reads * 4096, write_bytes: 0, busy_ns }
}

fn disks(at_s: u64, counters: &[(&str, DiskCounters)]) -> Option<DiskReading> {
    let counters = counters.iter().map(|(path, one)| ((*path).to_owned(), *one)).collect();
    Some(DiskReading { at: Duration::from_secs(at_s), counters })
}

fn tap(rx_bytes: u64, tx_bytes: u64) -> BTreeMap<String, Traffic> {
    BTreeMap::from([("gw0".to_owned(), Traffic { rx_bytes, tx_bytes })])
}

/// Returns a reading of a host with 4 processors and one VM, after that many seconds.
fn reading(at_s: u64, vm: VmReading) -> Reading {
    Reading {
        at: Duration::from_secs(at_s),
        at_unix_ms: 1_000_000 + at_s * 1000,
        host: HostReading {
            cores: 4,
            cpu: Some(CpuTicks { busy: at_s * 100, all: at_s * 400 }),
            memory_total_bytes: 1000,
            memory_available_bytes: 400,
            interfaces: BTreeMap::new(),
        },
        vms: BTreeMap::from([(WEB, VmReading { name: "web".to_owned(), ..vm })]),
    }
}

/// Takes readings one after the other; returns the last sample.
fn last(readings: impl IntoIterator<Item = Reading>) -> Option<LoadSample> {
    let mut sampler = Sampler::default();
    readings.into_iter().fold(None, |_, reading| sampler.take(reading))
}

#[test]
fn two_readings_are_a_sample() {
    let before = VmReading {
        cpu_ns: 1_000_000_000,
        waits_ns: Some(BTreeMap::from([(70, 5_000_000_000), (71, 9)])),
        taps: tap(100, 1000),
        disks: disks(0, &[("/srv/a.raw", disk(10, 0))]),
        ..VmReading::default()
    };
    let now = VmReading {
        vcpus: 2,
        memory_total_bytes: 64,
        memory_used_bytes: 32,
        cpu_ns: 8_500_000_000,
        // Thread 71 has ended, 72 is new.
        waits_ns: Some(BTreeMap::from([(70, 6_000_000_000), (72, 500_000_000)])),
        taps: tap(600, 51_000),
        disks: disks(5, &[("/srv/a.raw", disk(60, 100_000_000)), ("/srv/new.raw", disk(9, 9))]),
        ..VmReading::default()
    };
    assert_eq!(last([reading(0, before.clone())]), None, "one reading is no sample");
    let sample = last([reading(0, before), reading(5, now)]).unwrap();
    assert_eq!((sample.at_unix_ms, sample.interval_ms), (1_005_000, 5000));
    let host = &sample.host;
    assert_eq!((host.cores, host.cpu_used_millicores, host.memory_used_bytes), (4, 1000, 600));
    let vm = &sample.vms[0];
    assert_eq!((vm.name.as_str(), vm.cpu_used_millicores), ("web", 1500));
    assert_eq!(vm.cpu_ready_millicores, Some(300));
    assert_eq!((vm.memory_total_bytes, vm.memory_used_bytes, vm.vcpus), (64, 32, 2));
    // What the tap has sent, the guest has received.
    assert_eq!((vm.rx_bytes_per_s, vm.tx_bytes_per_s), (10_000, 100));
    let load = StorageLoad {
        reads_per_s: 10,
        read_bytes_per_s: 40_960,
        latency_us: Some(2000),
        ..StorageLoad::default()
    };
    assert_eq!(vm.disks, Some(vec![DiskLoad { path: "/srv/a.raw".to_owned(), load }]));
    assert_eq!(host.directories, BTreeMap::from([("/srv".to_owned(), load)]));
}

#[test]
fn counters_that_go_back_count_as_unchanged() {
    let before = VmReading {
        cpu_ns: u64::MAX,
        waits_ns: Some(BTreeMap::from([(70, u64::MAX)])),
        taps: tap(u64::MAX, u64::MAX),
        disks: disks(0, &[("/srv/a.raw", disk(1 << 50, u64::MAX))]),
        ..VmReading::default()
    };
    let now = VmReading {
        cpu_ns: 1,
        waits_ns: Some(BTreeMap::from([(70, 1)])),
        taps: tap(1, 1),
        disks: disks(5, &[("/srv/a.raw", disk(1, 1))]),
        ..VmReading::default()
    };
    let mut after = reading(5, now);
    after.host.cpu = Some(CpuTicks { busy: 0, all: 0 });
    after.host.memory_available_bytes = 5000;
    let mut first = reading(0, before);
    first.host.cpu = Some(CpuTicks { busy: 9, all: 9 });
    let sample = last([first, after]).unwrap();
    assert_eq!((sample.host.cpu_used_millicores, sample.host.memory_used_bytes), (0, 0));
    let vm = &sample.vms[0];
    assert_eq!((vm.cpu_used_millicores, vm.cpu_ready_millicores), (0, Some(0)));
    assert_eq!((vm.rx_bytes_per_s, vm.tx_bytes_per_s), (0, 0));
    let load = vm.disks.as_ref().map(|disks| disks[0].load);
    assert_eq!(load, Some(StorageLoad::default()));
}

#[test]
fn a_vm_with_another_process_is_not_compared_with_the_old_one() {
    let mut restarted = reading(5, VmReading { cpu_ns: 9, ..VmReading::default() });
    let vm = restarted.vms.remove(&WEB).unwrap();
    restarted.vms.insert((70, 5000), vm);
    let sample = last([reading(0, VmReading::default()), restarted]).unwrap();
    assert!(sample.vms.is_empty());
}

#[test]
fn a_silent_qemu_costs_its_disks_in_one_sample() {
    let at = |at_s, reads: Option<u64>| {
        let disks = reads.and_then(|reads| disks(at_s, &[("/srv/a.raw", disk(reads, 0))]));
        reading(at_s, VmReading { cpu_ns: at_s * 1_000_000_000, disks, ..VmReading::default() })
    };
    let mut sampler = Sampler::default();
    sampler.take(at(0, Some(0)));
    let silent = sampler.take(at(5, None)).unwrap();
    assert_eq!((&silent.vms[0].disks, silent.vms[0].cpu_used_millicores), (&None, 1000));
    assert!(silent.host.directories.is_empty());
    // The next answer is compared with the last one: 1000 reads in 10 s.
    let next = sampler.take(at(10, Some(1000))).unwrap();
    let disks = next.vms[0].disks.as_ref().unwrap();
    assert_eq!(disks[0].load.reads_per_s, 100);
}

#[test]
fn directories_add_up_and_weigh_latencies() {
    let at = |at_s, fast: DiskCounters, slow: DiskCounters| {
        let disks = disks(at_s, &[("/srv/fast.raw", fast), ("/srv/slow.raw", slow)]);
        reading(at_s, VmReading { disks, ..VmReading::default() })
    };
    let none = DiskCounters::default();
    let sample = last([at(0, none, none), at(10, disk(30, 30_000), disk(10, 970_000))]).unwrap();
    let sum = sample.host.directories["/srv"];
    assert_eq!((sum.reads_per_s, sum.latency_us), (4, Some(25)));
}

#[test]
fn an_interface_that_was_not_there_before_has_no_traffic_yet() {
    let vm = |taps| VmReading { taps, ..VmReading::default() };
    let mut after = reading(5, vm(tap(1 << 50, 1 << 50)));
    after.host.interfaces = tap(1 << 50, 1 << 50);
    let sample = last([reading(0, vm(BTreeMap::new())), after]).unwrap();
    assert_eq!((sample.host.rx_bytes_per_s, sample.vms[0].tx_bytes_per_s), (0, 0));
}

#[test]
fn a_clock_that_stands_still_gives_no_sample() {
    let vm = VmReading::default;
    assert_eq!(last([reading(5, vm()), reading(5, vm())]), None);
    assert_eq!(last([reading(5, vm()), reading(4, vm())]), None);
}

#[test]
fn a_sample_fits_into_an_event() {
    let paths: Vec<String> =
        (0..80).map(|number| format!("/{}{number:02}", "\"".repeat(900))).collect();
    let odd = ["/srv/\u{7}".to_owned(), format!("/{}", "x".repeat(2000))];
    let counters = |reads| {
        let paths = paths.iter().chain(&odd);
        paths.map(|path| (path.clone(), disk(reads, u64::MAX / 2))).collect()
    };
    let all = |at_s: u64| {
        let at = Duration::from_secs(at_s);
        let disks = DiskReading { at, counters: counters(at_s << 40) };
        let (name, waits_ns) = ("v".repeat(63), Some(BTreeMap::from([(1, at_s << 60)])));
        let vm = VmReading {
            waits_ns,
            name,
            cpu_ns: at_s << 60,
            memory_total_bytes: u64::MAX,
            memory_used_bytes: u64::MAX,
            memory_ballooned_bytes: Some(u64::MAX),
            dirty_bytes_per_s: Some(u64::MAX),
            ..VmReading::default()
        };
        let vms = (0..2_100).map(|pid| {
            let disks = (pid < 20).then(|| disks.clone());
            ((pid, 1), VmReading { disks, ..vm.clone() })
        });
        let vms = vms.collect();
        Reading { vms, ..reading(at_s, VmReading::default()) }
    };
    let sample = last([all(0), all(5)]).unwrap();
    assert_eq!(sample.vms.len(), MOST_SAMPLED_VMS);
    let disks: Vec<_> = sample.vms.iter().filter_map(|vm| vm.disks.as_ref()).collect();
    assert!((1..20).contains(&disks.len()), "{} VMs with disks", disks.len());
    assert_eq!(disks[0].len(), MOST_SAMPLED_DISKS);
    assert!(disks[0].iter().all(|disk| disk.path.starts_with("/\"")));
    let bytes = serde_json::to_vec(&sample).unwrap().len();
    assert!(bytes <= 2 << 20, "{bytes}");
}

proptest! {
    /// Whatever the counters are, the figures are of one interval: no overflow, no panic.
    #[test]
    fn any_counters_make_a_sample(
        numbers in proptest::collection::vec(any::<u64>(), 12), ms in 1_u64..10_000_000
    ) {
        let vm = |numbers: &[u64], at: Duration| {
            let counters = DiskCounters {
                reads: numbers[0],
                writes: numbers[1],
                read_bytes: numbers[2],
                write_bytes: numbers[2],
                busy_ns: numbers[3],
            };
            VmReading {
                cpu_ns: numbers[4],
                waits_ns: Some(BTreeMap::from([(1, numbers[5]), (2, numbers[0])])),
                taps: tap(numbers[1], numbers[2]),
                disks: Some(DiskReading {
                    at,
                    counters: BTreeMap::from([("/srv/a.raw".to_owned(), counters)]),
                }),
                ..VmReading::default()
            }
        };
        let time = Duration::from_millis(ms);
        let mut before = reading(0, vm(&numbers[..6], Duration::ZERO));
        let mut after = Reading { at: time, ..reading(0, vm(&numbers[6..], time)) };
        before.host.cpu = Some(CpuTicks { busy: numbers[0], all: numbers[1] });
        after.host.cpu = Some(CpuTicks { busy: numbers[6], all: numbers[7] });
        let sample = last([before, after]).unwrap();
        prop_assert!(sample.host.cpu_used_millicores <= 4000);
        let vm = &sample.vms[0];
        let used = u128::from(vm.cpu_used_millicores) * u128::from(ms) * 1000;
        prop_assert!(used <= u128::from(numbers[10].saturating_sub(numbers[4])));
        let disk = vm.disks.as_ref().unwrap()[0].load;
        if numbers[6] <= numbers[0] && numbers[7] <= numbers[1] {
            prop_assert_eq!((disk.reads_per_s, disk.writes_per_s, disk.latency_us), (0, 0, None));
        }
    }
}
