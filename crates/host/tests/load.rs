//! Samples of the load of a host with a real QEMU.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs::File;

use godwit_api::{Client, CreateVm, HostEvent, LoadSample, VmLoad};
use godwit_qemu::{Disk, DiskFormat, VmSpec};
use rustix::process::{Pid, Signal, kill_process};
use support::{TestHost, until};

fn web(sample: &LoadSample) -> Option<&VmLoad> {
    sample.vms.iter().find(|vm| vm.name == "web")
}

/// Waits for a sample with such a load of the VM, and returns it.
async fn sample(client: &Client, what: &str, is_it: impl Fn(&VmLoad) -> bool) -> LoadSample {
    let mut found = None;
    until(what, async || {
        let newest = client.load().await.ok();
        found = newest.filter(|newest| web(newest).is_some_and(&is_it));
        found.is_some()
    })
    .await;
    found.unwrap()
}

fn send(host: &TestHost, signal: Signal) {
    for pid in host.qemus() {
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }
}

#[test]
fn a_running_vm_is_measured_also_while_its_qemu_hangs() {
    let Some(host) = TestHost::new() else { return };
    let path = host.path().join("disk.raw");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let disks = vec![Disk::new(path.clone(), DiskFormat::Raw)];
    let spec = VmSpec { disks, ..host.spec("web") };
    host.with_agent(async |client| {
        let vm = client.create_vm(&CreateVm::new(spec, true)).await.unwrap();
        let first = sample(&client, "the disk's figures", |vm| vm.disks.is_some()).await;
        let web = web(&first).unwrap();
        assert_eq!(Some(web.uuid), vm.spec.uuid);
        assert!(web.memory_used_bytes > 0, "{web:?}");
        let disks = web.disks.as_ref().unwrap();
        assert_eq!((disks.len(), disks[0].path.as_str()), (1, path.to_str().unwrap()));
        let directory = path.parent().unwrap().to_str().unwrap();
        assert!(first.host.directories.contains_key(directory), "{first:?}");
        assert!(first.host.cores > 0 && first.host.memory_used_bytes > 0, "{first:?}");

        send(&host, Signal::STOP);
        let silent = sample(&client, "a sample without", |vm| vm.disks.is_none()).await;
        send(&host, Signal::CONT);
        assert!(silent.at_unix_ms > first.at_unix_ms);
        sample(&client, "the disk's figures again", |vm| vm.disks.is_some()).await;

        let mut events = client.watch().await.unwrap();
        let mut is_known = false;
        let streamed = loop {
            match events.next().await.unwrap().expect("the agent runs") {
                HostEvent::Known => is_known = true,
                HostEvent::Load(sample) => break sample,
                _ => {}
            }
        };
        assert!(is_known && streamed.at_unix_ms > silent.at_unix_ms);
    });
}
