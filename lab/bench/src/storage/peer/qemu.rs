//! A QEMU in a host's namespace that Godwit does not know, and its monitor.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::LAN_BRIDGE;
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{Qmp, QmpEvent, wait_for_event};
use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;

use crate::storage::images::Image;

/// The guest's tap, on both hosts.
const TAP: &str = "peer0";

/// Returns the name of a disk's node.
pub(super) fn node(number: usize) -> String {
    format!("disk{number}")
}

/// Makes the guest's tap on a host.
pub(super) fn make_tap(trial: &Trial, host: &str) -> Result<()> {
    let namespace = trial.namespace(host);
    for arguments in [
        ["tuntap", "add", TAP, "mode", "tap"].as_slice(),
        &["link", "set", TAP, "master", LAN_BRIDGE, "up"],
    ] {
        let ended = Command::new("ip").args(["-n", &namespace]).args(arguments).status()?;
        ensure!(ended.success(), "ip {arguments:?} failed");
    }
    Ok(())
}

/// Running QEMU. It is killed when this is dropped.
pub(super) struct Qemu {
    process: Child,
    qmp: Qmp,
    log: PathBuf,
}

impl Qemu {
    /// Starts a QEMU with a plan's guest, or for a guest that arrives.
    pub(super) fn start(
        trial: &Trial,
        host: &str,
        plan: &GuestPlan,
        images: &[Image],
        folder: &Path,
        is_arriving: bool,
    ) -> Result<Qemu> {
        let (socket, log) = (folder.join("qmp"), folder.join("qemu.log"));
        if socket.exists() {
            fs::remove_file(&socket)?;
        }
        let spec = plan.spec(trial.image());
        let kib = plan.memory.iter().map(|size| size.bytes()).sum::<u64>() >> 10;
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &trial.namespace(host), "qemu-system-x86_64"])
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-machine", "q35,usb=off", "-accel", "tcg,thread=multi"])
            .args(["-cpu", "Westmere-v1", "-smp", "1", "-m", &format!("{kib}K")])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(["-serial", &format!("file:{}", folder.join("console").display())])
            .args(["-netdev", &format!("tap,id=lan,ifname={TAP},script=no,downscript=no")])
            .args(["-device", "virtio-net-pci,netdev=lan,addr=0x4,mac=52:54:00:ad:10:01"]);
        for (number, image) in images.iter().enumerate() {
            command.args(disk_arguments(number, image));
        }
        command
            .arg("-kernel")
            .arg(spec.kernel.context("the guest has no kernel")?)
            .arg("-initrd")
            .arg(spec.initrd.context("the guest has no initramfs")?)
            .arg("-append")
            .arg(spec.cmdline.unwrap_or_default());
        if is_arriving {
            command.args(["-incoming", "defer"]);
        }
        let stderr = File::create(&log)?;
        let process = command.stdin(Stdio::null()).stdout(stderr.try_clone()?).stderr(stderr);
        let mut process = process.spawn().context("cannot start QEMU")?;
        let connected =
            until("the QEMU has a monitor", LIMIT, || Ok(Some(trial.ask(Qmp::connect(&socket))?)));
        match connected {
            Ok(qmp) => Ok(Qemu { process, qmp, log }),
            Err(error) => {
                // It may have ended already.
                let _ = process.kill();
                let _ = process.wait();
                Err(error.context(fs::read_to_string(&log).unwrap_or_default()))
            }
        }
    }

    /// Runs a command of its monitor.
    pub(super) fn execute(&self, trial: &Trial, command: &str, arguments: Value) -> Result<Value> {
        trial.ask(self.qmp.execute(command, arguments)).with_context(|| {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            format!("{command}; its log: {}", log.trim())
        })
    }

    /// Subscribes to its events from now on.
    pub(super) fn events(&self) -> Events {
        Events(self.qmp.events())
    }

    /// Makes it end, and waits until it has.
    pub(super) fn quit(&mut self, trial: &Trial) -> Result<()> {
        // Its answer may be lost with the connection.
        let _ = trial.ask(self.qmp.execute("quit", json!({})));
        until("the QEMU ends", LIMIT, || Ok(self.process.try_wait()?.map(drop)))
    }

    /// Ends it hard.
    pub(super) fn kill(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Events of a QEMU.
pub(super) struct Events(Receiver<QmpEvent>);

impl Events {
    /// Waits for the next event that is wanted; others are skipped.
    pub(super) fn wait(
        &mut self,
        trial: &Trial,
        what: &str,
        limit: Duration,
        wanted: impl FnMut(&QmpEvent) -> bool,
    ) -> Result<QmpEvent> {
        Ok(trial.ask(wait_for_event(&mut self.0, what, limit, wanted))?)
    }
}

/// Returns the arguments for a disk: its nodes and its device.
fn disk_arguments(number: usize, image: &Image) -> Vec<String> {
    let (node, format) = (node(number), image.format.name());
    let file = format!("{node}-file");
    let file_node = json!({
        "driver": "file",
        "node-name": file,
        "filename": image.path,
        "discard": "unmap",
    });
    let image_node =
        json!({ "driver": format, "node-name": node, "file": file, "discard": "unmap" });
    let device = format!("virtio-blk-pci,drive={node},addr={:#x}", 5 + number);
    ["-blockdev", &file_node.to_string(), "-blockdev", &image_node.to_string(), "-device", &device]
        .map(str::to_owned)
        .to_vec()
}

#[cfg(test)]
mod tests {
    use godwit_qemu::DiskFormat;

    use super::*;

    #[test]
    fn a_disk_has_two_nodes_and_a_device() {
        let image = Image { path: "/d/a/data.raw".into(), format: DiskFormat::Raw };
        let arguments = disk_arguments(1, &image);
        assert_eq!(arguments.len(), 6);
        assert!(arguments[1].contains("\"filename\":\"/d/a/data.raw\""), "{arguments:?}");
        assert!(arguments[3].contains("\"file\":\"disk1-file\""), "{arguments:?}");
        assert_eq!(arguments[5], "virtio-blk-pci,drive=disk1,addr=0x6");
    }
}
