//! Lifecycle of a VM under a real QEMU, across restarts of the agent.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use godwit_api::{Client, CreateVm, ErrorCode, LogSource, StopVm, VmState};
use godwit_qemu::{Disk, DiskFormat, VmSpec};
use support::{TestHost, kill, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const AT_ONCE: StopVm = StopVm { force: true, grace_ms: None };

async fn log(client: &Client, vm: &str) -> String {
    let mut log = client.log(vm, LogSource::Console, false).await.unwrap();
    let mut text = Vec::new();
    while let Some(piece) = log.next().await.unwrap() {
        text.extend_from_slice(&piece);
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn a_vm_outlives_its_agent() {
    let Some(host) = TestHost::new() else { return };
    let pid = host.with_agent(async |client| {
        let vm = client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        assert_eq!((vm.state, vm.host.as_str(), vm.epoch), (VmState::Running, "a", 1));
        assert_eq!(host.taps().len(), 1);
        until("the guest prints", async || log(&client, "web").await.contains('#')).await;
        vm.pid.unwrap()
    });
    assert_eq!(host.qemus(), [pid], "QEMU ended with the agent");
    assert!(!host.config.socket.exists(), "the agent left its socket");
    host.with_agent(async |client| {
        let vm = client.vm("web").await.unwrap();
        assert_eq!((vm.state, vm.pid), (VmState::Running, Some(pid)));

        let mut console = client.console("web").await.unwrap();
        let second = client.console("web").await.unwrap_err();
        assert_eq!(second.code(), Some(ErrorCode::Busy));
        console.write_all(b"ping").await.unwrap();
        let mut echoed = [0; 4];
        console.read_exact(&mut echoed).await.unwrap();
        assert_eq!(&echoed, b"ping");
        drop(console);

        let refused = client.delete_vm("web").await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::WrongState));
        let again = client.start_vm("web").await.unwrap_err();
        assert_eq!(again.code(), Some(ErrorCode::WrongState));

        // The bare guest ignores the power button.
        let stopped =
            client.stop_vm("web", StopVm { force: false, grace_ms: Some(50) }).await.unwrap();
        assert_eq!((stopped.state, stopped.pid), (VmState::Stopped, None));
        assert!(stopped.reason.is_some_and(|reason| reason.contains("power button")));
        assert!(host.qemus().is_empty() && host.taps().is_empty());
        assert!(log(&client, "web").await.contains("ping"), "the log stays");
        assert_eq!(client.start_vm("web").await.unwrap().state, VmState::Running);
        client.stop_vm("web", AT_ONCE).await.unwrap();
        client.delete_vm("web").await.unwrap();
        assert_eq!(client.vm("web").await.unwrap_err().code(), Some(ErrorCode::NotFound));
    });
    assert_eq!(host.remains(), Vec::<String>::new());
}

#[test]
fn a_followed_log_ends_with_its_vm() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        let mut log = client.log("web", LogSource::Console, true).await.unwrap();
        let mut text = Vec::new();
        while !text.contains(&b'#') {
            text.extend_from_slice(&log.next().await.unwrap().unwrap());
        }
        let mut console = client.console("web").await.unwrap();
        console.write_all(b"x").await.unwrap();
        while !text.contains(&b'x') {
            text.extend_from_slice(&log.next().await.unwrap().unwrap());
        }
        client.stop_vm("web", AT_ONCE).await.unwrap();
        while log.next().await.unwrap().is_some() {}
    });
}

#[test]
fn a_failed_start_leaves_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let mut spec = host.spec("web");
        spec.extra_devices = vec!["no-such-device".into()];
        let error = client.create_vm(&CreateVm::new(spec.clone(), true)).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::HypervisorFailed));
        assert!(error.to_string().contains("no-such-device"), "{error}");
        assert_eq!(host.remains(), Vec::<String>::new());
        assert!(client.vms().await.unwrap().is_empty());

        // A VM that was defined without a start stays defined; a failed start does not change its
        // definition.
        client.create_vm(&CreateVm::new(spec, false)).await.unwrap();
        client.start_vm("web").await.unwrap_err();
        assert_eq!(client.vm("web").await.unwrap().state, VmState::Stopped);
        let record = host.path().join("state/vms/web").display().to_string();
        assert_eq!(host.remains(), [record]);
    });
}

#[test]
fn an_invalid_specification_is_refused_and_leaves_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let refused = async |spec| client.create_vm(&CreateVm::new(spec, true)).await.unwrap_err();
        let mut spec = host.spec("web");
        spec.nics[0].network = "wan".into();
        let error = refused(spec).await;
        assert_eq!(error.code(), Some(ErrorCode::NotFound));
        assert!(error.to_string().contains("lan"), "the error names the known networks: {error}");
        let mut spec = host.spec("web");
        spec.nics[0].network = "lost".into();
        assert!(refused(spec).await.to_string().contains("br-lost"));
        let mut spec = host.spec("web");
        spec.kernel = Some("/nonexistent/kernel".into());
        assert_eq!(refused(spec).await.code(), Some(ErrorCode::NotFound));
        let mut spec = host.spec("web");
        spec.memory[0].size = godwit_qemu::ByteSize::from_mib(64 << 20);
        assert_eq!(refused(spec).await.code(), Some(ErrorCode::InsufficientMemory));
        let mut spec = host.spec("web");
        spec.qemu = Some("/bin/true".into());
        assert_eq!(refused(spec).await.code(), Some(ErrorCode::HypervisorFailed));
        assert_eq!(host.remains(), Vec::<String>::new());

        client.create_vm(&CreateVm::new(host.spec("web"), false)).await.unwrap();
        assert_eq!(refused(host.spec("web")).await.code(), Some(ErrorCode::AlreadyExists));
        let nowhere =
            client.migrate("web", &godwit_api::MigrationRequest::to("c")).await.unwrap_err();
        assert_eq!(nowhere.code(), Some(ErrorCode::NotFound));
        let stopped =
            client.migrate("web", &godwit_api::MigrationRequest::to("b")).await.unwrap_err();
        assert_eq!(stopped.code(), Some(ErrorCode::WrongState));
    });
}

#[test]
fn what_another_vm_has_is_refused_and_leaves_nothing() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let images = host.path().join("images");
        std::fs::create_dir(&images).unwrap();
        let disk = |name: &str, readonly| {
            let path = images.join(name);
            let file = std::fs::OpenOptions::new().append(true).create(true).open(&path).unwrap();
            file.set_len(1 << 20).unwrap();
            Disk { readonly, ..Disk::new(path, DiskFormat::Raw) }
        };
        let spec = |name: &str, disks: Vec<Disk>| VmSpec { disks, ..host.spec(name) };
        let create = async |spec| client.create_vm(&CreateVm::new(spec, false)).await;
        let mut first = spec("first", vec![disk("own", false), disk("shared", true)]);
        first.nics[0].address = Some("10.88.0.21".parse().unwrap());
        first.nics[0].mac = Some("52:54:00:00:00:01".into());
        create(first.clone()).await.unwrap();
        std::os::unix::fs::symlink(images.join("own"), images.join("link")).unwrap();
        std::fs::write(images.join("other.qcow2"), b"QFI\xfb and more").unwrap();

        let refused = async |spec, code, word: &str| {
            let error = create(spec).await.unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
            assert_eq!(error.code(), Some(code), "{error}");
        };
        let taken = ErrorCode::AlreadyExists;
        let mut twin = spec("twin", vec![]);
        twin.nics[0].mac.clone_from(&first.nics[0].mac);
        refused(twin.clone(), taken, "52:54:00:00:00:01").await;
        twin.nics[0].mac = None;
        twin.nics[0].address = first.nics[0].address;
        refused(twin, taken, "10.88.0.21").await;
        refused(spec("twin", vec![disk("own", true)]), taken, "\"first\"").await;
        refused(spec("twin", vec![disk("link", true)]), taken, "images/own").await;
        refused(spec("twin", vec![disk("shared", false)]), taken, "images/shared").await;
        let twice = spec("twin", vec![disk("new", false), disk("new", true)]);
        refused(twice, ErrorCode::InvalidRequest, "two of its disks").await;
        let named_as_raw = spec("twin", vec![disk("other.qcow2", false)]);
        refused(named_as_raw, ErrorCode::InvalidRequest, "qcow2 format").await;
        assert_eq!(client.vms().await.unwrap().len(), 1);
        assert_eq!(host.remains(), [host.path().join("state/vms/first").display().to_string()]);

        create(spec("twin", vec![disk("shared", true)])).await.unwrap();
    });
}

#[test]
fn a_qemu_that_dies_is_noticed() {
    let Some(host) = TestHost::new() else { return };
    let pid = host.with_agent(async |client| {
        let vm = client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        kill(vm.pid.unwrap());
        until("the end of QEMU is noticed", async || {
            client.vm("web").await.unwrap().state == VmState::Failed
        })
        .await;
        assert!(client.vm("web").await.unwrap().reason.unwrap().contains("signal 9"));
        until("the memory is freed", async || !host.path().join("run/ram/web.0.ram").exists())
            .await;
        let vm = client.start_vm("web").await.unwrap();
        assert_eq!((vm.state, vm.reason), (VmState::Running, None));
        vm.pid.unwrap()
    });
    // This time no agent is watching.
    kill(pid);
    host.run(until("QEMU has ended", async || host.qemus().is_empty()));
    host.with_agent(async |client| {
        let vm = client.vm("web").await.unwrap();
        assert_eq!(vm.state, VmState::Failed);
        assert!(vm.reason.unwrap().contains("when the agent started"));
        assert!(!host.path().join("run/ram/web.0.ram").exists());
        client.delete_vm("web").await.unwrap();
    });
    assert_eq!(host.remains(), Vec::<String>::new());
}

#[test]
fn concurrent_operations_do_not_interfere() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        client.create_vm(&CreateVm::new(host.spec("web"), false)).await.unwrap();
        let starts = (0..4).map(|_| client.start_vm("web"));
        let outcomes = futures::future::join_all(starts).await;
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
        assert_eq!(host.qemus().len(), 1);
        let (stop, delete) = tokio::join!(client.stop_vm("web", AT_ONCE), client.delete_vm("web"));
        stop.unwrap();
        assert!(delete.is_err());
        client.delete_vm("web").await.unwrap();
    });
    assert_eq!(host.remains(), Vec::<String>::new());
}
