//! Isolation on one host: the agent's socket, a VM's user, the tracker's socket, keys.
//! docs/boundaries.md names these tests.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use godwit_api::{Client, CreateVm, ErrorCode, VmInfo};
use godwit_host::{Agent, RunError, TlsConfig};
use godwit_pki::{Authority, Grant, Role};
use godwit_qemu::{
    Accel, AccelProbe, Disk, DiskFormat, QemuLimits, ResolvedSpec, RunningProcess, VmSpec,
    ends_within,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use rustix::process::{DumpableBehavior, Gid, Pid, Resource, Uid};
use support::{LIMIT, TestHost, arriving, until};

/// A user on the host without a VM.
const SOMEBODY: u32 = 1_999_960_000;

/// Runs a function as another user, without any rights of root.
fn as_user<T: Send>(id: u32, act: impl FnOnce() -> T + Send) -> T {
    let become_user = || {
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_gid(Gid::from_raw(id)).unwrap();
        rustix::thread::set_thread_uid(Uid::from_raw(id)).unwrap();
    };
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            become_user();
            act()
        });
        acting.join().unwrap()
    })
}

fn open_wide(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
}

/// Returns the first line of the agent's answer to a request on its socket.
fn ask(socket: &Path, request: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(
        format!("{request} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

async fn started(client: &Client, host: &TestHost, name: &str) -> VmInfo {
    client.create_vm(&CreateVm::new(host.spec(name), true)).await.unwrap()
}

/// Returns the fields of a key in a process's kernel status.
fn status(pid: i32, key: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

fn user_of(vm: &VmInfo) -> u32 {
    status(vm.pid.unwrap(), "Uid")[0].parse().unwrap()
}

/// Asks a tracker for a userfaultfd; returns the length of its answer.
fn ask_tracker(socket: &Path) -> Result<usize, Errno> {
    let connection = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    rustix::net::connect(&connection, &SocketAddrUnix::new(socket)?)?;
    // A tracker that has already closed the connection accepts no request.
    let sent = rustix::net::send(&connection, b"GWTK\x01\0\0\0", SendFlags::NOSIGNAL);
    let mut answer = [0; 16];
    let received = rustix::net::recv(&connection, &mut answer, RecvFlags::empty());
    sent.and(received).map(|(length, _)| length).or_else(|errno| match errno {
        Errno::PIPE | Errno::CONNRESET => Ok(0),
        errno => Err(errno),
    })
}

#[test]
fn the_agents_socket_answers_root_alone_whatever_its_mode() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let socket = &host.config.socket;
        assert_eq!(fs::metadata(socket).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&host.config.run_dir).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(&host.config.state_dir).unwrap().mode() & 0o777, 0o700);
        let refused = as_user(SOMEBODY, || ask(socket, "GET /v1/host")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        open_wide(host.path());
        open_wide(socket);
        for request in ["GET /v1/host", "GET /v1/vms", "DELETE /v1/vms/web", "GET /v1/nonsense"] {
            let answer = as_user(SOMEBODY, || ask(socket, request)).unwrap();
            assert!(answer.contains(" 403 "), "{request}: {answer}");
        }
        assert_eq!(client.host().await.unwrap().name, "a");
    });
}

#[test]
fn each_qemu_has_a_user_of_its_own_and_gives_up_what_it_never_needs() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let vms = [started(&client, &host, "web").await, started(&client, &host, "db").await];
        let users = [user_of(&vms[0]), user_of(&vms[1])];
        assert_ne!(users[0], users[1]);
        for (vm, user) in vms.iter().zip(users) {
            let pid = vm.pid.unwrap();
            for key in ["Uid", "Gid"] {
                assert_eq!(status(pid, key), vec![user.to_string(); 4], "{key}");
            }
            assert!(user > 65_535 && status(pid, "Groups").is_empty());
            assert!(
                ["CapInh", "CapPrm", "CapEff", "CapAmb"]
                    .iter()
                    .all(|key| status(pid, key)[0].trim_matches('0').is_empty())
            );
            assert_eq!(
                (status(pid, "Seccomp"), status(pid, "NoNewPrivs")),
                (vec!["2".to_owned()], vec!["1".to_owned()])
            );
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
            let cores = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
            assert_eq!(
                cores.split_whitespace().skip(4).take(2).collect::<Vec<_>>(),
                ["0", "0"],
                "{cores}"
            );
            // There is no cgroup to limit its memory here, so its address space is limited.
            let record =
                fs::read(host.config.state_dir.join("vms").join(&vm.name).join("vm.json")).unwrap();
            let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
            let most = QemuLimits::of(&serde_json::from_value(record["spec"].clone()).unwrap());
            for (name, most) in [
                ("Max address space", most.address_space_bytes),
                ("Max processes", most.tasks),
                ("Max open files", most.open_files),
            ] {
                let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                let set: Vec<&str> = line.split_whitespace().take(2).collect();
                assert_eq!(set, [most.to_string(), most.to_string()], "{name}");
            }
            let filter = fs::read_to_string(format!("/proc/{pid}/coredump_filter")).unwrap();
            assert_eq!(filter.trim().trim_start_matches('0'), "", "a core would hold memory");
        }
        // After a restart, the VM has a user that no other VM has.
        client.stop_vm("web", godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
        assert!(!host.config.run_dir.join("vms/web/qemu.user").exists());
        let again = client.start_vm("web").await.unwrap();
        assert_ne!(user_of(&again), users[1]);
    });
}

#[test]
fn no_core_of_the_agent_holds_memory() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |_| {
        assert_eq!(rustix::process::dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        let filter = fs::read_to_string("/proc/self/coredump_filter").unwrap();
        assert_eq!(filter.trim().trim_start_matches('0'), "", "a core would hold memory");
        let limit = rustix::process::getrlimit(Resource::Core);
        assert_eq!((limit.current, limit.maximum), (Some(0), Some(0)));
    });
}

#[test]
fn a_vms_user_reaches_nothing_of_another_vm_or_of_the_agent() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let (web, db) = (started(&client, &host, "web").await, started(&client, &host, "db").await);
        let (user, other) = (user_of(&web), db.pid.unwrap());
        // The worst case: the directory above all of these is open.
        open_wide(host.path());
        let run = &host.config.run_dir;
        let files = [
            "vms/db/qemu.log",
            "vms/db/console.log",
            "vms/db/qemu.pid",
            "vms/db/qemu.user",
            "ram/db.0.ram",
        ];
        let mut closed: Vec<PathBuf> = files.iter().map(|file| run.join(file)).collect();
        closed.push(host.config.state_dir.join("vms/db/vm.json"));
        let dirs = ["", "vms", "vms/db", "ram"].map(|dir| run.join(dir));
        let dirs = dirs
            .into_iter()
            .chain(["", "vms", "vms/db"].map(|dir| host.config.state_dir.join(dir)));
        let dirs: Vec<PathBuf> = dirs.collect();
        assert!(closed.iter().all(|path| path.exists()), "{closed:?}");
        closed.extend(
            ["mem", "maps", "environ", "fd", "pagemap"]
                .map(|file| format!("/proc/{other}/{file}").into()),
        );
        let opened = |paths: &[PathBuf]| -> Vec<PathBuf> {
            let open = |path: &&PathBuf| fs::File::open(path).is_ok();
            as_user(user, || paths.iter().filter(open).cloned().collect())
        };
        assert_eq!((opened(&closed), opened(&dirs)), (Vec::new(), Vec::new()));
        // The VM's memory belongs to its user, and no one else can read it even with access to its
        // directory.
        let memory = fs::metadata(run.join("ram/web.0.ram")).unwrap();
        assert_eq!((memory.uid(), memory.mode() & 0o777), (user, 0o600));
        // Each file is also closed by itself, even if all directories were open.
        for wide in [false, true] {
            if wide {
                dirs.iter().chain([&run.join("vms/web")]).for_each(|dir| open_wide(dir));
                assert_eq!((opened(&closed), opened(&dirs)), (Vec::new(), dirs.clone()));
            }
            for socket in ["vms/db/qmp.sock", "vms/db/serial.sock", "vms/web/qmp.sock"] {
                let refused = as_user(user, || UnixStream::connect(run.join(socket))).unwrap_err();
                assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied, "{socket}");
            }
        }
        let signal =
            as_user(user, || rustix::process::test_kill_process(Pid::from_raw(other).unwrap()));
        assert_eq!(signal, Err(Errno::PERM));
    });
}

#[test]
fn a_vms_user_has_kvm_while_its_vm_runs_and_no_longer() {
    let Some(host) = TestHost::new() else { return };
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        eprintln!("skipped: /dev/kvm: {error}");
        return;
    }
    // A guest that needs nothing of KVM: QEMU opens the device for any guest.
    let spec = VmSpec {
        accel: Accel::Kvm,
        cpu_model: Some("qemu32,enforce=off".to_owned()),
        ..host.spec("web")
    };
    let list = || {
        let mut list = vec![0; 4096];
        let length =
            rustix::fs::getxattr("/dev/kvm", "system.posix_acl_access", &mut list).unwrap_or(0);
        list.truncate(length);
        list
    };
    host.with_agent(async |client| {
        let vm = client.create_vm(&CreateVm::new(spec, true)).await.unwrap();
        let (pid, user) = (vm.pid.unwrap(), user_of(&vm));
        assert_ne!(user, 0);
        let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let opened = files
            .filter_map(|file| fs::read_link(file.path()).ok())
            .any(|path| path == Path::new("/dev/kvm"));
        assert!(opened, "QEMU runs without /dev/kvm");
        client.stop_vm("web", godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
        let has_entry = list().windows(4).any(|bytes| bytes == user.to_le_bytes());
        assert!(!has_entry, "the VM's user can still open /dev/kvm");
    });
}

#[test]
fn a_tracker_answers_its_agents_user_alone() {
    let Some(mut host) = TestHost::new() else { return };
    let library =
        std::env::current_exe().unwrap().with_file_name("").join("../libgodwit_tracker.so");
    if !library.exists() {
        eprintln!("skipped: no tracker library has been built");
        return;
    }
    host.config.tracker = Some(library.canonicalize().unwrap());
    host.with_agent(async |client| {
        let web = started(&client, &host, "web").await;
        let (trackers, socket) =
            (host.config.run_dir.join("trackers"), host.config.run_dir.join("trackers/web.sock"));
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
        assert_eq!(as_user(SOMEBODY, || ask_tracker(&socket)), Err(Errno::ACCESS));
        for path in [host.path(), &host.config.run_dir, &trackers, &socket] {
            open_wide(path);
        }
        // The tracker closes the connections of strangers and of a guest that escaped from this
        // very VM.
        for user in [SOMEBODY, user_of(&web)] {
            assert_eq!(as_user(user, || ask_tracker(&socket)), Ok(0), "user {user} had an answer");
        }
        assert_eq!(ask_tracker(&socket), Ok(8));
    });
}

#[test]
fn a_key_that_others_may_read_keeps_the_agent_from_starting() {
    let Some(mut host) = TestHost::new() else { return };
    let authority = Authority::create(&host.path().join("pki"), "test", 30).unwrap();
    let grant = Grant { name: "a".to_owned(), role: Role::Host, addresses: Vec::new(), days: 30 };
    let own = authority.issue(&grant).unwrap();
    fs::set_permissions(&own.key, Permissions::from_mode(0o644)).unwrap();
    host.config.insecure = false;
    host.config.peers.clear();
    host.config.tls = Some(TlsConfig {
        authority: authority.certificate(),
        certificate: own.certificate,
        key: own.key,
        revoked: None,
    });
    host.run(async {
        let RunError::State(error) = godwit_host::run(host.config.clone()).await.unwrap_err()
        else {
            panic!("another error");
        };
        assert!(
            error.message.contains("can be read by others") && error.remedy.contains("chmod 600"),
            "{error}"
        );
        assert_eq!(error.code, ErrorCode::InvalidRequest);
    });
}

#[test]
fn another_host_names_no_file_that_is_not_for_vms() {
    let Some(mut host) = TestHost::new() else { return };
    let (images, elsewhere) = (host.path().join("images"), host.path().join("elsewhere"));
    for dir in [&images, &elsewhere] {
        fs::create_dir(dir).unwrap();
        fs::write(dir.join("disk"), vec![0; 1 << 20]).unwrap();
        fs::copy(host.path().join("guest"), dir.join("guest")).unwrap();
    }
    std::os::unix::fs::symlink(elsewhere.join("disk"), images.join("link")).unwrap();
    host.config.vm_dirs = vec![images.clone()];
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let guest = async |kernel: PathBuf, disk: Option<PathBuf>, readonly| {
            let disks = disk
                .into_iter()
                .map(|path| Disk { readonly, ..Disk::new(path, DiskFormat::Raw) })
                .collect();
            let spec = VmSpec { kernel: Some(kernel), disks, ..host.spec("web") };
            agent.resolve(spec).await.unwrap()
        };
        let (ours, theirs) = (images.join("guest"), elsewhere.join("guest"));
        for (kernel, disk, readonly) in [
            (&ours, Some(elsewhere.join("disk")), false),
            (&ours, Some(elsewhere.join("disk")), true),
            (&ours, Some(images.join("link")), false),
            (&theirs, None, false),
        ] {
            let spec = guest(kernel.clone(), disk.clone(), readonly).await;
            let refused =
                agent.prepare_incoming(spec, arriving(2), "b", false, None).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::Preflight, "{kernel:?} {disk:?}");
            let not_for_vms = "does not open it for a guest of another host";
            assert!(refused.message.contains(not_for_vms), "{refused}");
            assert!(refused.remedy.contains("vm_dirs"), "{refused}");
        }
        // A file that every user of the host can read may be read, but not written.
        open_wide(host.path());
        for path in [&elsewhere, &elsewhere.join("disk"), &elsewhere.join("guest")] {
            open_wide(path);
        }
        let spec = guest(ours.clone(), Some(elsewhere.join("disk")), false).await;
        assert!(agent.prepare_incoming(spec, arriving(2), "b", false, None).await.is_err());
        for (kernel, disk) in [(&theirs, elsewhere.join("disk")), (&ours, images.join("disk"))] {
            let readonly = disk.starts_with(&elsewhere);
            let spec = guest(kernel.clone(), Some(disk), readonly).await;
            let shadow = agent.prepare_incoming(spec, arriving(2), "b", false, None).await.unwrap();
            agent.discard(&shadow).await;
        }
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_program_that_others_may_change_is_not_started_as_qemu() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let program = host.path().join("qemu");
        fs::copy("/usr/bin/qemu-system-x86_64", &program).unwrap();
        // /tmp is open to everybody, so what is below it can be replaced.
        let mut spec = host.spec("web");
        spec.qemu = Some(program);
        let refused = client.create_vm(&CreateVm::new(spec, false)).await.unwrap_err();
        assert!(refused.to_string().contains("other than root can change it"), "{refused}");
    });
}

#[test]
fn another_host_names_no_program_but_those_that_are_for_it() {
    let Some(mut host) = TestHost::new() else { return };
    // Owned by root, like any script of the host; /tmp is open to everybody.
    let folder = tempfile::Builder::new().prefix("godwit-test").tempdir_in("/var/lib").unwrap();
    let (script, ran) = (folder.path().join("script"), host.path().join("ran"));
    fs::write(&script, format!("#!/bin/sh\necho ran >> {}\n", ran.display())).unwrap();
    fs::write(&ran, "").unwrap();
    for path in [folder.path(), &script, host.path(), &ran] {
        let mode = if path == ran { 0o666 } else { 0o755 };
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    let (swapped, qemu) =
        (host.path().join("swapped"), PathBuf::from("/usr/bin/qemu-system-x86_64"));
    std::os::unix::fs::symlink(&script, &swapped).unwrap();
    host.config.migration_addresses = vec!["127.0.0.1".parse().unwrap()];
    let spec = host.spec("web");
    let ask = async |client: &Client, program: &Path| {
        let own = godwit_qemu::inspect(&qemu, None).await.unwrap();
        let resolved =
            spec.clone().resolve(&own, &AccelProbe { kvm: false, reason: String::new() }).unwrap();
        let arriving = ResolvedSpec { qemu: Some(program.to_owned()), ..resolved };
        let incoming = serde_json::json!({
            "spec": arriving, "epoch": 2, "from": "b", "qemu_version": "7.2.0", "engine": "godwit",
        });
        client.post::<_, serde_json::Value>("/v1/incoming/checks", &incoming).await
    };
    host.with_agent(async |client| {
        for program in [&script, &swapped, &host.path().join("missing")] {
            let refused = ask(&client, program).await.unwrap_err();
            assert_eq!(refused.code(), Some(ErrorCode::Preflight), "{refused}");
            assert!(
                refused.to_string().contains("it is not in qemu_programs of host"),
                "{refused}"
            );
        }
        // A bare name would be looked up in PATH.
        let refused = ask(&client, Path::new("sh")).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::InvalidRequest), "{refused}");
        assert_eq!(fs::read_to_string(&ran).unwrap(), "");
        ask(&client, &qemu).await.unwrap();
    });
    host.config.qemu_programs = vec![script.clone()];
    host.with_agent(async |client| {
        let refused = ask(&client, &swapped).await.unwrap_err();
        assert!(refused.to_string().contains("does not answer as QEMU does"), "{refused}");
        assert_eq!(fs::read_to_string(&ran).unwrap(), "ran\n");
    });
}

#[test]
fn a_strangers_process_keeps_no_vm_from_starting() {
    let Some(host) = TestHost::new() else { return };
    let program = host.path().join("qemu-system-x86_64");
    fs::copy("/usr/bin/tail", &program).unwrap();
    open_wide(host.path());
    let files = ["run/vms/web/qmp.sock", "run/ram/web.0.ram"].map(|file| host.path().join(file));
    let mut stranger = Command::new(&program)
        .args(["-f", "/dev/null"])
        .args(files)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .uid(SOMEBODY)
        .spawn()
        .unwrap();
    host.with_agent(async |client| {
        let vm = started(&client, &host, "web").await;
        assert_ne!(vm.pid.unwrap(), stranger.id().cast_signed());
        let force = godwit_api::StopVm { force: true, grace_ms: None };
        client.stop_vm("web", force).await.unwrap();
        client.start_vm("web").await.unwrap();
        client.stop_vm("web", force).await.unwrap();
        client.delete_vm("web").await.unwrap();
    });
    assert!(stranger.try_wait().unwrap().is_none(), "the process of another user was ended");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn an_invalid_vm_name_reaches_no_file() {
    let Some(host) = TestHost::new() else { return };
    let uuid = "uuid=00000000-0000-0000-0000-000000000001";
    host.with_agent(async |_| {
        // The files that a VM of that name would have if a name could leave its directory.
        fs::create_dir_all(host.config.run_dir.join("passwd")).unwrap();
        fs::write(host.config.run_dir.join("passwd/console.log"), "secret").unwrap();
        for name in ["%2Fetc%2Fpasswd", "..%2Fpasswd", "%2e%2e", "a%00b", "a%2F..%2F..%2Fpasswd"] {
            for request in [
                format!("GET /v1/hand-overs/{name}?{uuid}"),
                format!("DELETE /v1/hand-overs/{name}?from=b&{uuid}"),
                format!("POST /v1/page-ins/{name}"),
                format!("GET /v1/vms/{name}"),
                format!("DELETE /v1/vms/{name}"),
                format!("GET /v1/vms/{name}/log"),
                format!("GET /v1/vms/{name}/console"),
                format!("POST /v1/vms/{name}/start"),
                format!("POST /v1/vms/{name}/stop"),
                format!("POST /v1/vms/{name}/resolve"),
                format!("POST /v1/vms/{name}/migrations"),
                format!("POST /v1/vms/{name}/migrations/dry-run"),
            ] {
                let answer = ask(&host.config.socket, &request).unwrap();
                assert!(answer.contains(" 400 "), "{request}: {answer}");
            }
        }
    });
}

/// Environment variable with the path of the configuration for
/// [`an_agent_in_a_process_of_its_own`].
const AGENTS_CONFIG: &str = "GODWIT_TEST_AGENT";

/// Not a test by itself: another test starts it as a process, to kill it.
#[test]
fn an_agent_in_a_process_of_its_own() {
    let Some(path) = std::env::var_os(AGENTS_CONFIG).map(PathBuf::from) else { return };
    let config = godwit_host::Config::parse(&fs::read_to_string(&path).unwrap(), &path).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(godwit_host::run(config)).unwrap();
}

#[test]
fn a_query_of_an_agent_ends_with_it_when_it_is_killed() {
    let Some(host) = TestHost::new() else { return };
    // A QEMU that never answers, in a directory of root, as required.
    let folder = tempfile::Builder::new().prefix("godwit-test").tempdir_in("/var/lib").unwrap();
    let (script, note) = (folder.path().join("qemu"), host.path().join("asked"));
    fs::write(&script, format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", note.display()))
        .unwrap();
    fs::write(&note, "").unwrap();
    [folder.path(), &script, host.path(), &note].into_iter().for_each(open_wide);
    let (at, config) = (host.path().display(), host.path().join("agent.toml"));
    let text = format!(
        "name = \"a\"\nsocket = \"{at}/agent.sock\"\nstate_dir = \"{at}/state\"\n\
         run_dir = \"{at}/run\"\nqemu = \"{}\"\n",
        script.display()
    );
    fs::write(&config, text).unwrap();
    let mut agent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "an_agent_in_a_process_of_its_own", "--nocapture"])
        .env(AGENTS_CONFIG, &config)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let asked = || fs::read_to_string(&note).unwrap().trim().parse::<i32>().ok();
    host.run(until("the agent queries its QEMU", async || asked().is_some()));
    let asked = RunningProcess::of(asked().unwrap()).unwrap();
    agent.kill().unwrap();
    agent.wait().unwrap();
    assert!(ends_within(asked.pid, asked.start_time, LIMIT), "process {} still runs", asked.pid);
}

/// Starts a process that names an ended process as the agent that queried it.
fn left_over(user: u32) -> Child {
    let asker = format!("{}.1", std::process::id());
    let mut command = Command::new("/bin/sleep");
    let child = command.arg("1000").env("GODWIT_ASKED_BY", asker).uid(user).spawn().unwrap();
    // The process exists before the kernel has set up its environment.
    let asked_by =
        || RunningProcess::of(child.id().cast_signed()).unwrap().variable("GODWIT_ASKED_BY");
    while asked_by().is_none() {
        std::thread::yield_now();
    }
    child
}

#[test]
fn the_next_agent_ends_what_an_older_one_left_and_nothing_of_strangers() {
    let Some(mut host) = TestHost::new() else { return };
    host.config.qemu_users = Some("1999930000-1999930009".parse().unwrap());
    let (mut roots, mut users, mut stranger) =
        (left_over(0), left_over(1_999_930_004), left_over(SOMEBODY));
    host.with_agent(async |_| {
        for left in [&roots, &users] {
            let pid = left.id().cast_signed();
            until("the process has ended", async || RunningProcess::of(pid).is_none()).await;
        }
    });
    for left in [&mut roots, &mut users] {
        // The agent, which runs in this process, may have reaped it.
        let _ = left.wait();
    }
    assert!(stranger.try_wait().unwrap().is_none(), "the process of another user was ended");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}
