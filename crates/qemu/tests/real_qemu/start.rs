//! Tests of start, end, adoption and failure.

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;

use godwit_qemu::{
    AdoptError, ByteSize, Exit, MemoryBlock, QMP_SOCKET, QemuProcess, RunState, StartError,
    Tracker, is_alive, wait_for_event,
};

use crate::bench::{Bench, LIMIT, written};

#[tokio::test]
async fn a_guest_starts_runs_stops_and_ends() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let vm = bench.start("a", &bench.spec(|_| {})).await.unwrap();
    assert!(is_alive(vm.pid, vm.start_time));
    assert_eq!(vm.qmp.status().await.unwrap(), RunState::Prelaunch);
    let socket = std::fs::metadata(vm.run_dir.join(QMP_SOCKET)).unwrap();
    assert!(socket.file_type().is_socket() && socket.mode() & 0o777 == 0o600);
    let session: i32 = std::fs::read_to_string(format!("/proc/{}/stat", vm.pid))
        .unwrap()
        .rsplit_once(')')
        .unwrap()
        .1
        .split_ascii_whitespace()
        .nth(3)
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(session, vm.pid, "it has no session of its own");
    let mut events = vm.qmp.events();
    vm.qmp.resume().await.unwrap();
    wait_for_event(&mut events, "RESUME", LIMIT, |event| event.name == "RESUME").await.unwrap();
    written(&vm.run_dir, 0).await;
    vm.qmp.stop().await.unwrap();
    assert_eq!(vm.qmp.status().await.unwrap(), RunState::Paused);
    vm.quit().await;
    assert_eq!(vm.exited().await, Exit::Code(0));
    assert!(!is_alive(vm.pid, vm.start_time));
    vm.quit().await;
    let adopted = QemuProcess::adopt(vm.run_dir.clone(), vm.pid, vm.start_time).await;
    assert_eq!(adopted.unwrap_err(), AdoptError::Gone { pid: vm.pid });
}

#[tokio::test]
async fn a_qemu_that_ends_at_its_start_reports_why() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let spec = bench.spec(|spec| spec.extra_devices = vec!["no-such-device".into()]);
    let error = bench.start("a", &spec).await.unwrap_err();
    let StartError::Exited { exit: Exit::Code(1), last_words } = &error else {
        panic!("{error:?}")
    };
    assert!(
        last_words.contains("no-such-device") && last_words.contains("not a valid device model"),
        "{error}"
    );
    assert!(error.remedy().contains("device"));
    std::fs::write(bench.path("vmlinuz"), "no kernel").unwrap();
    let spec = bench.spec(|spec| {
        spec.disks.clear();
        spec.kernel = Some(bench.path("vmlinuz"));
    });
    let error = bench.start("a", &spec).await.unwrap_err();
    assert!(error.remedy().contains("kernel"), "{error}: {}", error.remedy());
    // The log of the earlier failure is not reported again.
    assert!(!error.to_string().contains("no-such-device"), "{error}");
}

#[tokio::test]
async fn a_missing_binary_or_directory_is_reported() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let spec = bench.spec(|_| {});
    let mut launch = bench.launch("a", &spec);
    launch.qemu = "/nowhere/qemu".into();
    assert_eq!(bench.begin(launch).await.unwrap_err().code(), "qemu-not-found");
    let mut launch = bench.launch("a", &spec);
    launch.run_dir = bench.path("missing");
    assert_eq!(bench.begin(launch).await.unwrap_err().code(), "qemu-not-prepared");
    let mut launch = bench.launch("a", &spec);
    launch.qemu = "/bin/true".into();
    let error = bench.begin(launch).await.unwrap_err();
    assert!(matches!(error, StartError::Exited { exit: Exit::Code(0), .. }), "{error:?}");
}

#[tokio::test]
async fn the_next_agent_adopts_it() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let first = bench.start("a", &bench.spec(|_| {})).await.unwrap();
    first.qmp.resume().await.unwrap();
    let (pid, start_time, run_dir) = (first.pid, first.start_time, first.run_dir.clone());
    let other = QemuProcess::adopt(run_dir.clone(), pid, start_time + 1).await;
    assert_eq!(other.unwrap_err(), AdoptError::Gone { pid });
    drop(first);
    let second = QemuProcess::adopt(run_dir.clone(), pid, start_time).await.unwrap();
    assert_eq!(second.qmp.status().await.unwrap(), RunState::Running);
    written(&run_dir, 0).await;
    second.kill().await;
    assert!(second.exit().is_some());
    assert!(!is_alive(pid, start_time));
    assert_eq!(second.qmp.closed().await, "QEMU closed it");
}

#[tokio::test]
async fn an_image_in_use_is_refused() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let spec = bench.spec(|_| {});
    let first = bench.start("a", &spec).await.unwrap();
    let error = bench.start("b", &spec).await.unwrap_err();
    assert!(error.remedy().contains("uses this disk image"), "{error}");
    first.quit().await;
    bench.start("b", &spec).await.unwrap().quit().await;
}

#[tokio::test]
async fn odd_blocks_and_several_vcpus_are_accepted() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let block = |bytes| MemoryBlock::shared(ByteSize::from_bytes(bytes));
    let spec = bench.spec(|spec| {
        spec.vcpus = 2;
        spec.memory = vec![block((16 << 20) + 4096), block((24 << 20) + (3 * 4096))];
    });
    let vm = bench.start("a", &spec).await.unwrap();
    vm.qmp.resume().await.unwrap();
    written(&vm.run_dir, 0).await;
    vm.quit().await;
}

#[tokio::test]
async fn qemu_can_run_as_another_user_and_inherits_the_tracker() {
    let Some(bench) = Bench::new().await else { return };
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start QEMU as another user");
        return;
    }
    let (uid, gid) = (65534, 65534);
    bench.disk();
    let mut launch = bench.launch("a", &bench.spec(|_| {}));
    // Everything else is root's, in a directory that is closed to others.
    for path in &launch.ram_files {
        chown(path, Some(uid), Some(gid)).unwrap();
    }
    let (library, listener) = (bench.path("library.so"), bench.path("tracker.sock"));
    // The dynamic linker reports that it is not a library and continues.
    std::fs::write(&library, "").unwrap();
    std::fs::set_permissions(&library, PermissionsExt::from_mode(0o644)).unwrap();
    let listener = UnixListener::bind(listener).unwrap();
    let number = listener.as_raw_fd();
    launch.user = Some((uid, gid));
    launch.tracker =
        Some(Tracker { library: library.clone(), listener: listener.into(), peer_uid: 7 });
    let vm = bench.begin(launch).await.unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid)).unwrap();
    let ids = |name: &str| -> Vec<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().map(|id| id.parse().unwrap()).collect()
    };
    assert_eq!((ids("Uid:"), ids("Gid:"), ids("Groups:")), (vec![uid; 4], vec![gid; 4], vec![]));
    let environment = std::fs::read(format!("/proc/{}/environ", vm.pid)).unwrap();
    let variables: Vec<&str> = environment
        .split(|&byte| byte == 0)
        .map(|text| std::str::from_utf8(text).unwrap())
        .collect();
    for expected in [format!("GODWIT_TRACKER_FD={number}"), "GODWIT_TRACKER_PEER_UID=7".to_owned()]
    {
        assert!(variables.contains(&expected.as_str()), "{expected} not in {variables:?}");
    }
    let preloaded =
        variables.iter().find_map(|variable| variable.strip_prefix("LD_PRELOAD=/proc/self/fd/"));
    let preloaded = format!("/proc/{}/fd/{}", vm.pid, preloaded.unwrap());
    assert_eq!(std::fs::read_link(preloaded).unwrap(), library.canonicalize().unwrap());
    assert!(status.lines().any(|line| line == "Seccomp:\t2"), "no sandbox: {status}");
    assert!(status.lines().any(|line| line == "NoNewPrivs:\t1"), "{status}");
    let inherited = std::fs::read_link(format!("/proc/{}/fd/{number}", vm.pid)).unwrap();
    assert!(inherited.to_string_lossy().starts_with("socket:"));
    vm.qmp.resume().await.unwrap();
    written(&vm.run_dir, 0).await;
    vm.quit().await;
}
