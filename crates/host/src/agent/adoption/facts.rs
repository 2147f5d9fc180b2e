//! What another program's QEMU says of itself: what its arguments do not say, because it was
//! changed since its start.

use std::collections::BTreeSet;
use std::path::Path;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{ByteSize, Disk, ForeignVm, Part, Properties, QemuInfo};
use godwit_types::Fault;
use serde_json::{Value, json};

use crate::agent::adoption::monitor::Monitor;

/// Answers of the other QEMU.
pub(super) struct Facts {
    /// Versioned machine type.
    pub(super) machine: String,
    pub(super) version: (u32, u32, u32),
    /// What prevents an adoption whatever its arguments say.
    pub(super) findings: Vec<Fault>,
    vcpus: usize,
    /// IDs of devices.
    devices: BTreeSet<String>,
    devices_without_id: usize,
    blocks: Value,
}

fn finding(message: impl Into<String>, remedy: &str) -> Fault {
    Fault::new("adoption-state", message, remedy)
}

impl Facts {
    /// Asks the other QEMU. Changes nothing there.
    pub(super) async fn ask(monitor: &Monitor) -> Result<Facts, ApiError> {
        let version = version_of(&monitor.ask("query-version").await?)?;
        let machine = json!({"path": "/machine", "property": "type"});
        let machine = monitor.execute("qom-get", machine).await?;
        let machine = machine.as_str().ok_or_else(|| odd("qom-get"))?;
        let (devices, _) = children(monitor, "/machine/peripheral").await?;
        let (_, devices_without_id) = children(monitor, "/machine/peripheral-anon").await?;
        let mut findings = Vec::new();
        let state = monitor.ask("query-status").await?;
        if state["status"] != "running" {
            let state = state["status"].as_str().unwrap_or("unknown");
            findings.push(finding(
                format!("the guest does not run: its QEMU is in state {state}"),
                "resume it first; a stopped guest comes by `godwit vm import`",
            ));
        }
        let migration = monitor.ask("query-migrate").await?;
        let status = migration["status"].as_str().unwrap_or("none");
        if !matches!(status, "none" | "completed" | "failed" | "cancelled") {
            let message = format!("the guest is being migrated: its QEMU says {status}");
            findings.push(finding(message, "wait for the end of that migration"));
        }
        for reason in migration["blocked-reasons"].as_array().into_iter().flatten() {
            let reason = reason.as_str().unwrap_or("unknown");
            findings.push(finding(
                format!("its QEMU cannot migrate it: {reason}"),
                "remove that device or option, or shut the guest down and import it",
            ));
        }
        if monitor
            .ask("query-memory-devices")
            .await?
            .as_array()
            .is_none_or(|devices| !devices.is_empty())
        {
            let message = "it has hot-plugged memory, which cannot be adopted";
            findings.push(finding(message, "unplug it, or stop the guest and import it"));
        }
        if monitor.ask("query-block-jobs").await?.as_array().is_none_or(|jobs| !jobs.is_empty()) {
            let message = "a job works on one of its disks (a copy, a backup, a merge)";
            findings.push(finding(message, "wait for its end"));
        }
        let vcpus = monitor.ask("query-cpus-fast").await?.as_array().map_or(0, Vec::len);
        Ok(Facts {
            machine: machine.strip_suffix("-machine").unwrap_or(machine).to_owned(),
            version,
            findings,
            vcpus,
            devices,
            devices_without_id,
            blocks: monitor.ask("query-block").await?,
        })
    }

    /// Checks that this host's QEMU loads what the other one sends: it is not older, and has the
    /// machine type.
    pub(super) fn check_versions(&self, ours: &QemuInfo) -> Result<(), ApiError> {
        if ours.version >= self.version {
            return Ok(());
        }
        let (major, minor, micro) = self.version;
        let message = format!(
            "the guest runs on QEMU {major}.{minor}.{micro}, and this host's QEMU for Godwit, {}, \
             is {}: an older one does not load its state",
            ours.path.display(),
            ours.version_text()
        );
        let remedy = "set qemu in the host's configuration to the QEMU that the guest has";
        Err(ApiError::new(ErrorCode::Preflight, message, remedy))
    }

    /// Compares the VM of the arguments with what its QEMU has now, and adds the limits of its
    /// disks. Returns the differences that prevent an adoption.
    pub(super) fn compare(&self, vm: &mut ForeignVm) -> Vec<Fault> {
        let mut findings = Vec::new();
        if self.vcpus != vm.spec.vcpus as usize {
            findings.push(finding(
                format!("it was started with {} vCPUs and has {}", vm.spec.vcpus, self.vcpus),
                "unplug or plug vCPUs, so that it has those that it was started with",
            ));
        }
        let parts = vm.spec.topology.as_ref().map(|topology| topology.parts.as_slice());
        let devices: Vec<&Properties> = parts.into_iter().flatten().filter_map(device_of).collect();
        let known: BTreeSet<String> =
            devices.iter().filter_map(|device| device.get("id")).collect();
        for id in self.devices.difference(&known) {
            let message = format!("device {id} was plugged in while the guest ran");
            findings.push(finding(message, "unplug it, or stop the guest and import it"));
        }
        for id in known.difference(&self.devices) {
            let message = format!("device {id} was unplugged while the guest ran");
            findings.push(finding(message, "plug it in again, or stop the guest and import it"));
        }
        let without_id = devices.iter().filter(|device| device.get("id").is_none()).count();
        if without_id != self.devices_without_id {
            let message = "devices without an id came or went while the guest ran";
            findings.push(finding(message, "stop the guest and import it"));
        }
        findings.extend(self.compare_images(vm));
        findings
    }

    /// Compares the images of the arguments with those that are in use: a snapshot, or another CD,
    /// has replaced some.
    fn compare_images(&self, vm: &mut ForeignVm) -> Vec<Fault> {
        let mut findings = Vec::new();
        // A device is named by its ID or, without one, by its path. Flash is the machine's own, and
        // its content is in QEMU's stream.
        let of_device = |block: &&Value| {
            let device = block["qdev"].as_str().unwrap_or("/");
            let is_plugged = !device.starts_with('/') || device.starts_with("/machine/peripheral");
            is_plugged && block["inserted"].is_object()
        };
        let in_use = self.blocks.as_array().into_iter().flatten().filter(of_device);
        let mut names = Vec::new();
        for block in in_use {
            let inserted = &block["inserted"];
            let name = inserted["image"]["filename"].as_str().unwrap_or_default();
            let name = name.strip_prefix("file:").unwrap_or(name).to_owned();
            match limits(inserted) {
                Ok((None, None)) => {}
                Ok((iops, bytes)) => {
                    let of_image = |disk: &&mut Disk| disk.path == Path::new(&name);
                    if let Some(disk) = vm.spec.disks.iter_mut().find(of_image) {
                        disk.iops = iops;
                        disk.bytes_per_second = bytes.map(ByteSize::from_bytes);
                    }
                }
                Err(key) => findings.push(finding(
                    format!("disk {name} has limit {key}: Godwit limits all requests together"),
                    "set total limits instead: `virsh blkdeviotune`",
                )),
            }
            names.push(name);
        }
        let mut wanted: Vec<String> =
            vm.spec.images().map(|path| path.to_string_lossy().into_owned()).collect();
        names.sort();
        wanted.sort();
        for (missing, found) in [(&wanted, &names), (&names, &wanted)] {
            for name in missing.iter().filter(|name| !found.contains(name)) {
                findings.push(finding(
                    format!("image {name} was exchanged since its QEMU started (a snapshot, a CD)"),
                    "undo that (`virsh blockcommit`, `virsh change-media`), or stop the guest and \
                     import it",
                ));
            }
        }
        findings
    }
}

/// Reads QEMU's answer to `query-version`.
pub(super) fn version_of(answer: &Value) -> Result<(u32, u32, u32), ApiError> {
    let number = |key: &str| answer["qemu"][key].as_u64().and_then(|n| u32::try_from(n).ok());
    match (number("major"), number("minor"), number("micro")) {
        (Some(major), Some(minor), Some(micro)) => Ok((major, minor, micro)),
        _ => Err(odd("query-version")),
    }
}

/// Returns the device in a part of a topology.
fn device_of(part: &Part) -> Option<&Properties> {
    match part {
        Part::Device(device) | Part::Disk { device, .. } | Part::Cdrom { device, .. } => {
            Some(device)
        }
        _ => None,
    }
}

/// Limits of a disk: requests and bytes a second of all requests together.
type TotalLimits = (Option<u64>, Option<u64>);

/// Returns the total limits of a disk, or the name of another limit that it has.
fn limits(inserted: &Value) -> Result<TotalLimits, &'static str> {
    let number = |key: &str| inserted[key].as_u64().filter(|limit| *limit > 0);
    let others = ["bps_rd", "bps_wr", "iops_rd", "iops_wr"];
    match others.into_iter().find(|key| number(key).is_some()) {
        Some(key) => Err(key),
        None => Ok((number("iops"), number("bps"))),
    }
}

/// Returns the names of the children of an object that are devices, and their number.
async fn children(monitor: &Monitor, path: &str) -> Result<(BTreeSet<String>, usize), ApiError> {
    let children = monitor.execute("qom-list", json!({ "path": path })).await?;
    let children = children.as_array().ok_or_else(|| odd("qom-list"))?;
    let devices = children
        .iter()
        .filter(|child| child["type"].as_str().is_some_and(|kind| kind.starts_with("child<")));
    let names: Vec<&str> = devices.filter_map(|child| child["name"].as_str()).collect();
    Ok((names.iter().map(|name| (*name).to_owned()).collect(), names.len()))
}

fn odd(command: &str) -> ApiError {
    let message = format!("the guest's QEMU returned an invalid response to {command}");
    ApiError::new(ErrorCode::HypervisorFailed, message, "see the log of the guest's QEMU")
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{DiskFormat, VmSpec};

    use super::*;

    fn facts(blocks: Value) -> Facts {
        Facts {
            machine: "pc-q35-7.2".to_owned(),
            version: (7, 2, 0),
            findings: Vec::new(),
            vcpus: 1,
            devices: BTreeSet::new(),
            devices_without_id: 0,
            blocks,
        }
    }

    fn vm() -> ForeignVm {
        let disks = vec![Disk::new("/srv/web.img", DiskFormat::Raw)];
        ForeignVm { spec: VmSpec { disks, ..VmSpec::new("web") }, nics: Vec::new(), firmware: None }
    }

    fn block(name: &str, limits: &Value) -> Value {
        let mut inserted = json!({"image": {"filename": name}});
        for (key, value) in limits.as_object().into_iter().flatten() {
            inserted[key] = value.clone();
        }
        json!({"qdev": "/machine/peripheral/d/virtio-backend", "device": "", "inserted": inserted})
    }

    #[test]
    fn what_changed_since_the_start_is_found() {
        let text = |facts: &Facts, vm: &mut ForeignVm| {
            let found = facts.compare(vm);
            found.into_iter().map(|fault| fault.message).collect::<Vec<_>>().join("; ")
        };
        let same = || json!([block("/srv/web.img", &json!({}))]);
        assert_eq!(text(&facts(same()), &mut vm()), "");
        let mut with_id = block("/srv/web.img", &json!({}));
        with_id["qdev"] = json!("scsi0-0-0-0");
        assert_eq!(text(&facts(json!([with_id])), &mut vm()), "");
        let snapshot = facts(json!([block("/srv/web.snap1", &json!({}))]));
        assert!(text(&snapshot, &mut vm()).contains("/srv/web.snap1 was exchanged"));
        let plugged = Facts { devices: ["hot".to_owned()].into(), ..facts(same()) };
        assert!(text(&plugged, &mut vm()).contains("device hot was plugged in"));
        let more = Facts { vcpus: 2, ..facts(same()) };
        assert!(text(&more, &mut vm()).contains("1 vCPUs and has 2"));
        let mut limited = vm();
        let total = facts(json!([block("/srv/web.img", &json!({"iops": 500, "bps": 0}))]));
        assert_eq!(text(&total, &mut limited), "");
        assert_eq!(limited.spec.disks[0].iops, Some(500));
        let reads = facts(json!([block("/srv/web.img", &json!({"iops_rd": 5}))]));
        assert!(text(&reads, &mut vm()).contains("limit iops_rd"));
    }
}
