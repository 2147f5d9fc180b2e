//! Fencing with programs that act as `ipmitool` of devices that work, lie and fail.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_ha::Fencing;
use tempfile::TempDir;

use super::ipmitool::Device;
use super::{Devices, Fault, FencingConfig, Pace, Power};

const PASSWORD: &str = "hunter2";
/// A device that works: its power is in a file.
const HONEST: &str = "case \"$*\" in\n\
    *'power off') echo off >\"$0.power\"; echo 'Chassis Power Control: Down/Off' ;;\n\
    *'power status') echo \"Chassis Power is $(cat \"$0.power\")\" ;;\n\
    esac";

/// Devices with one of host `a`, which is the script `ipmitool` in a folder of its own.
struct Rig {
    devices: Devices,
    program: PathBuf,
    _folder: TempDir,
}

impl Rig {
    /// Creates the device. The script appends its arguments to `ipmitool.log` first.
    fn new(script: &str) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("source"), folder.path().join("ipmitool"));
        fs::write(&source, format!("#!/bin/sh\necho \"$*\" >>\"$0.log\"\n{script}\n")).unwrap();
        fs::write(beside(&program, "power"), "on\n").unwrap();
        // Another process writes it: a program that anyone has open for writing does not start.
        let mut install = std::process::Command::new("install");
        assert!(install.args(["-m", "755"]).args([&source, &program]).status().unwrap().success());
        let devices = devices_of(&program, "bmc-a", 623, "fence", Pace::QUICK);
        Rig { devices, program, _folder: folder }
    }

    fn with(script: &str, pace: Pace) -> Rig {
        let mut rig = Rig::new(script);
        rig.devices.pace = pace;
        rig
    }

    fn read(&self, what: &str) -> String {
        fs::read_to_string(beside(&self.program, what)).unwrap_or_default()
    }
}

async fn fault_of_cut(devices: &Devices) -> Fault {
    assert_eq!(devices.cut("a").await, Fencing::Failed);
    devices.fault("a").unwrap()
}

/// Returns the first fault other than silence: a busy machine may be too slow for the limit.
async fn fault_in_words(devices: &Devices) -> Fault {
    loop {
        let fault = fault_of_cut(devices).await;
        if fault != Fault::NoAnswer {
            return fault;
        }
    }
}

impl Pace {
    /// Short pauses, and limits that a working device does not reach.
    pub(super) const QUICK: Pace = Pace {
        command: Duration::from_secs(60),
        cut: Duration::from_secs(60),
        between: Duration::from_millis(1),
    };
    /// Limits that are reached soon.
    const SHORT: Pace = Pace {
        command: Duration::from_millis(200),
        cut: Duration::from_millis(500),
        between: Duration::from_millis(1),
    };
}

fn beside(program: &Path, what: &str) -> PathBuf {
    program.with_extension(what)
}

/// Returns the devices of a cluster in which host `a` alone has one.
pub(super) fn devices_of(
    program: &Path,
    address: &str,
    port: u16,
    user: &str,
    pace: Pace,
) -> Devices {
    let config = FencingConfig {
        address: address.to_owned(),
        port,
        user: user.to_owned(),
        password_file: "/nonexistent".into(),
        cipher: Some(3),
    };
    let mut device = Device::new(&config, PASSWORD.to_owned());
    device.program = program.display().to_string();
    Devices { devices: [("a".to_owned(), device)].into(), pace, ..Devices::default() }
}

/// Returns devices of which a host has one that works, and the folder with its `ipmitool.log`.
pub(in crate::ha) fn working_device_of(host: &str) -> (Devices, TempDir) {
    device_of(host, HONEST)
}

/// Returns devices of which a host has one that hangs, and the folder with the process ID of its
/// newest command, `ipmitool.pid`.
pub(in crate::ha) fn hanging_device_of(host: &str) -> (Devices, TempDir) {
    device_of(host, "echo $$ >\"$0.pid\"; exec sleep 1000")
}

fn device_of(host: &str, script: &str) -> (Devices, TempDir) {
    let Rig { mut devices, _folder: folder, .. } = Rig::new(script);
    let device = devices.devices.remove("a").unwrap();
    devices.devices.insert(host.to_owned(), device);
    (devices, folder)
}

#[tokio::test]
async fn a_host_is_off_when_two_answers_in_a_row_say_so() {
    let rig = Rig::new(HONEST);
    assert_eq!(rig.devices.status("a").await, Ok(Power::On));
    assert_eq!(rig.devices.cut("a").await, Fencing::Off);
    assert_eq!((rig.devices.fault("a"), rig.read("power").trim()), (None, "off"));
    let log = rig.read("log");
    let requests: Vec<_> = log.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
    assert_eq!(requests, ["status", "off", "status", "status"]);
}

#[tokio::test]
async fn a_host_that_is_off_already_is_off_though_the_device_refuses() {
    let rig = Rig::new(
        "case \"$*\" in *'power off') echo 'Command not supported in present state' >&2; exit 1;;\n\
        *) echo 'Chassis Power is off';; esac",
    );
    assert_eq!(rig.devices.cut("a").await, Fencing::Off);
    assert_eq!(rig.devices.fault("a"), None);
}

#[tokio::test]
async fn a_device_that_says_off_and_then_on_has_failed() {
    // Each second answer is a lie.
    let rig = Rig::with(
        "case \"$*\" in *status)\n\
        if [ -e \"$0.lied\" ]; then rm \"$0.lied\"; echo 'Chassis Power is on'\n\
        else : >\"$0.lied\"; echo 'Chassis Power is off'; fi;; esac",
        Pace { command: Duration::from_secs(60), ..Pace::SHORT },
    );
    assert_eq!(rig.devices.cut("a").await, Fencing::Failed);
}

#[tokio::test]
async fn a_host_that_stays_on_is_a_failure_with_its_reason() {
    let on = "case \"$*\" in *status) echo 'Chassis Power is on';; esac";
    let pace =
        Pace { command: Duration::from_secs(60), cut: Duration::from_secs(2), ..Pace::QUICK };
    assert_eq!(fault_in_words(&Rig::with(on, pace).devices).await, Fault::StillOn);
    let refuses = format!("{on}\ncase \"$*\" in *off) echo 'no privilege' >&2; exit 1;; esac");
    let fault = fault_in_words(&Rig::with(&refuses, pace).devices).await;
    assert_eq!(fault, Fault::Refused("no privilege".to_owned()));
}

#[tokio::test]
async fn only_the_exact_answer_of_a_command_that_succeeded_counts() {
    for script in [
        "echo 'Chassis Power is off'; exit 1",
        "echo 'Chassis Power is off'; kill -9 $$",
        "echo 'Chassis Power is off'; echo 'Chassis Power is on'",
        "echo 'Chassis Power is offline'",
        "echo 'Chassis Power is off' >&2",
        "echo off",
        "exit 0",
        "printf '\\377\\376'",
    ] {
        let rig = Rig::new(script);
        let answer = rig.devices.status("a").await;
        assert!(
            matches!(answer, Err(Fault::Refused(_) | Fault::Unclear(_))),
            "{script}: {answer:?}"
        );
    }
}

#[tokio::test]
async fn a_command_that_hangs_is_ended_with_its_children() {
    let hangs = "echo $$ >\"$0.pid\"; trap '' TERM; sleep 1000 & echo $! >\"$0.child\"; wait";
    let rig = Rig::with(hangs, Pace { cut: Duration::from_secs(60), ..Pace::SHORT });
    let mut answer = rig.devices.status("a").await;
    // A machine that is busy may not have started the script in that time.
    while rig.read("child").trim().is_empty() {
        answer = rig.devices.status("a").await;
    }
    assert_eq!(answer, Err(Fault::NoAnswer));
    for what in ["pid", "child"] {
        until_gone(rig.read(what).trim()).await;
    }
    let cut = Rig::with(hangs, Pace::SHORT);
    assert_eq!(fault_of_cut(&cut.devices).await, Fault::NoAnswer);
}

#[tokio::test]
async fn a_cut_that_nobody_waits_for_ends_its_command() {
    let rig = Rig::new("echo $$ >\"$0.pid\"; exec sleep 1000");
    {
        let mut cut = std::pin::pin!(rig.devices.cut("a"));
        while rig.read("pid").trim().is_empty() {
            let turn = tokio::time::timeout(Duration::from_millis(10), cut.as_mut()).await;
            assert!(turn.is_err());
        }
    }
    until_gone(rig.read("pid").trim()).await;
}

/// Returns whether a process has not ended.
pub(in crate::ha) fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.len() > 1 && !rest.starts_with(" Z"))
}

/// Waits until a process has ended, whether or not it has been waited for.
pub(in crate::ha) async fn until_gone(pid: &str) {
    assert!(!pid.is_empty());
    while is_alive(pid) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn endless_output_is_a_failure_and_is_not_kept() {
    for script in ["exec yes", "exec yes >&2"] {
        let fault = Rig::new(script).devices.status("a").await.unwrap_err();
        assert_eq!(fault, Fault::Unclear("its output is too long".to_owned()), "{script}");
    }
}

#[tokio::test]
async fn no_text_has_the_password_and_no_argument_either() {
    let rig = Rig::new("echo \"user fence, password $IPMI_PASSWORD\" >&2; exit 1");
    let fault = rig.devices.status("a").await.unwrap_err();
    assert_eq!(fault, Fault::Refused("user fence, password ***".to_owned()));
    let log = rig.read("log");
    assert!(log.contains("-U fence -E") && !log.contains(PASSWORD), "{log}");
    let rig = Rig::new("printf 'Chassis\\033[2J %s\\n' \"$IPMI_PASSWORD\"");
    let fault = rig.devices.status("a").await.unwrap_err();
    assert_eq!(fault, Fault::Unclear("Chassis [2J ***".to_owned()));
    let rig = Rig::new("head -c 9000 /dev/zero | tr '\\0' x; exit 1");
    let Err(Fault::Refused(text)) = rig.devices.status("a").await else { panic!() };
    assert!(text.len() < 200, "{text}");
    assert!(!format!("{:?}", rig.devices).contains(PASSWORD));
}

#[tokio::test]
async fn a_program_that_is_missing_is_a_failure_that_names_the_package() {
    let program = Path::new("/nonexistent/ipmitool");
    let pace = Pace { cut: Duration::from_millis(50), ..Pace::QUICK };
    let devices = devices_of(program, "bmc-a", 623, "fence", pace);
    let fault = fault_in_words(&devices).await;
    assert!(matches!(fault, Fault::NotRun(_)) && fault.remedy().contains("package ipmitool"));
}

#[tokio::test]
async fn a_host_without_a_device_is_never_off() {
    let devices = Devices::default();
    assert!(!devices.has("a"));
    assert_eq!(devices.cut("a").await, Fencing::Failed);
    assert_eq!(devices.status("a").await, Err(Fault::NoDevice));
    assert!(devices.test().await.hosts.is_empty());
}

#[tokio::test]
async fn a_fault_counts_at_the_second_check_and_ends_when_the_device_works() {
    let rig = Rig::new(HONEST);
    let mut doubted = BTreeSet::new();
    // The host responds while its device reports that it is off: another machine's, or a liar.
    fs::write(beside(&rig.program, "power"), "off\n").unwrap();
    rig.devices.check_all(|_| true, &mut doubted).await;
    assert_eq!(rig.devices.fault("a"), None);
    rig.devices.check_all(|_| true, &mut doubted).await;
    assert_eq!(rig.devices.fault("a"), Some(Fault::Contradicted));
    let troubles = rig.devices.troubles();
    assert_eq!((troubles.len(), troubles[0].object.as_str()), (1, "host:a"));
    assert!(troubles[0].text.contains("the host responds"), "{troubles:?}");
    fs::write(beside(&rig.program, "power"), "on\n").unwrap();
    rig.devices.check_all(|_| true, &mut doubted).await;
    assert_eq!(rig.devices.fault("a"), None);
    // A host that does not respond may be off.
    fs::write(beside(&rig.program, "power"), "off\n").unwrap();
    for _ in 0..2 {
        rig.devices.check_all(|_| false, &mut doubted).await;
    }
    assert_eq!((rig.devices.fault("a"), doubted.len()), (None, 0));
    fs::write(beside(&rig.program, "power"), "unknown\n").unwrap();
    for _ in 0..2 {
        rig.devices.check_all(|_| false, &mut doubted).await;
    }
    assert!(matches!(rig.devices.fault("a"), Some(Fault::Unclear(_))));
}

#[tokio::test]
async fn a_test_shows_each_devices_answer_and_switches_nothing() {
    let rig = Rig::new(HONEST);
    assert_eq!(rig.devices.test().await.hosts["a"], "on");
    fs::write(beside(&rig.program, "power"), "humming\n").unwrap();
    let shown = rig.devices.test().await.hosts["a"].clone();
    assert!(shown.contains("humming") && shown.contains("firmware"), "{shown}");
    assert!(!rig.read("log").contains("power off"), "{}", rig.read("log"));
}
