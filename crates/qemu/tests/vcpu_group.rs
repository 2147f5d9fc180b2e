//! A test with a thread of this process as a vCPU, in a group of this machine's own hierarchy.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use godwit_qemu::{VcpuGroup, VcpuGroupError, VmName, put_back_vcpus};

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

/// A thread that computes all the time, and ends when this is dropped.
struct Busy {
    thread: u32,
    over: Arc<AtomicBool>,
}

impl Busy {
    fn start() -> Busy {
        let over = Arc::new(AtomicBool::new(false));
        let (sender, id) = mpsc::channel();
        let until = Arc::clone(&over);
        std::thread::spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            while !until.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Busy { thread: u32::try_from(id.recv().unwrap()).unwrap(), over }
    }

    fn task(&self) -> String {
        format!("/proc/{}/task/{}", own_pid(), self.thread)
    }

    fn groups(&self) -> String {
        fs::read_to_string(format!("{}/cgroup", self.task())).unwrap()
    }

    fn ran(&self) -> Duration {
        let text = fs::read_to_string(format!("{}/schedstat", self.task())).unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    }

    /// Measures its share of a CPU over a time.
    fn share(&self, time: Duration) -> f64 {
        let (begun, before) = (Instant::now(), self.ran());
        // Nothing is sent: this waits for the time to pass.
        let (_keep, nothing) = mpsc::channel::<()>();
        let _ = nothing.recv_timeout(time);
        (self.ran() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Returns a group with this share; `None`, with the reason printed, if this machine offers none.
fn group_at(busy: &Busy, share: f64) -> Option<VcpuGroup> {
    let mut group = VcpuGroup::new(&VmName::new("test").unwrap(), own_pid(), vec![busy.thread]);
    match group.set_share(Some(share)) {
        Ok(()) => Some(group),
        Err(error @ VcpuGroupError::NoController { .. }) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(VcpuGroupError::Io { path, source, .. })
            if matches!(source.raw_os_error(), Some(1 | 13 | 30)) =>
        {
            eprintln!("skipped: {}: {source}", path.display());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_thread_is_slowed_and_released() {
    let busy = Busy::start();
    let before = busy.groups();
    let main = || fs::read_to_string(format!("/proc/{0}/task/{0}/cgroup", own_pid())).unwrap();
    let main_before = main();
    let Some(mut group) = group_at(&busy, 0.1) else { return };
    let name = format!("godwit.test.{}", own_pid());
    assert!(busy.groups().contains(&name), "{}", busy.groups());
    assert_eq!(main(), main_before, "the other threads stay where they are");
    // The rest of its time slice from before the limit is used up after a period or two.
    busy.share(Duration::from_millis(200));
    let share = busy.share(Duration::from_secs(1));
    assert!(share < 0.15, "{share} of a CPU at a tenth");
    group.set_share(None).unwrap();
    // Other programs may leave it little of the CPUs for a while.
    let until = Instant::now() + Duration::from_secs(60);
    while busy.share(Duration::from_millis(200)) < 0.15 {
        assert!(Instant::now() < until, "no more of a CPU without a limit");
    }
    drop(group);
    assert_eq!(busy.groups(), before);
    // An agent dies while the next group is in use.
    let group = group_at(&busy, 0.1).unwrap();
    std::mem::forget(group);
    assert!(put_back_vcpus(own_pid()).unwrap());
    assert_eq!(busy.groups(), before);
    assert!(!put_back_vcpus(own_pid()).unwrap());
    ends_with_its_threads(busy);
}

/// Ends the threads as an ending QEMU does. The empty group that this leaves is removed as well.
fn ends_with_its_threads(busy: Busy) {
    let mut group = group_at(&busy, 1.0).unwrap();
    group.set_share(Some(0.5)).unwrap();
    let of_cpu = |line: &str| line.contains(":cpu:") || line.starts_with("0::");
    let name = format!("godwit.test.{}", own_pid());
    assert!(busy.groups().lines().any(|line| of_cpu(line) && line.ends_with(&name)));
    let directory = Path::new("/sys/fs/cgroup/cpu").join(&name);
    let task = busy.task();
    drop(busy);
    while Path::new(&task).exists() {
        std::thread::yield_now();
    }
    drop(group);
    assert!(!directory.exists());
}
