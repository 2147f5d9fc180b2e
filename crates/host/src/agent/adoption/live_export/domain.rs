//! libvirt's domain that a VM was, and is to be again.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{
    Accel, Accelerator, MacAddress, Part, ResolvedSpec, Topology, Uuid, VmSpec, read_foreign,
};
use rustix::fs::MemfdFlags;
use serde_json::Value;

use crate::agent::Agent;
use crate::agent::adoption::facts::{Facts, version_of};
use crate::agent::adoption::findings::{pause, refusal};
use crate::agent::adoption::found::{self, ForeignProcess};
use crate::agent::adoption::monitor::Monitor;
use crate::config::LibvirtConfig;
use crate::failure::host_failed;
use crate::libvirt::{self, run_virsh};
use crate::state_stream::is_sound;
use crate::vm::Vm;

/// Time for a QEMU of libvirt to end.
const END_LIMIT: Duration = Duration::from_secs(20);
/// What makes libvirt's QEMU wait for a guest, with the mark of an attempt in its environment.
const WAITING: &str = "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
                       <qemu:arg value='-incoming'/><qemu:arg value='defer'/>\
                       <qemu:env name='MARK' value='ID'/></qemu:commandline>";
/// Variable of that mark.
const MARK: &str = "GODWIT_LIVE_EXPORT";

/// A domain of the host's libvirt.
pub(super) struct Domain {
    pub(super) name: String,
    uuid: Uuid,
    /// Attempt that starts it.
    id: Uuid,
    /// Its definition, for a QEMU that waits.
    text: String,
}

impl Domain {
    /// Reads the domain that a VM was.
    ///
    /// # Errors
    /// It is not defined any more, or it runs.
    pub(super) async fn of(libvirt: &LibvirtConfig, vm: &Vm, id: Uuid) -> Result<Domain, ApiError> {
        let refuse = |why: &str, remedy: &str| {
            let message = format!("cannot give VM \"{}\" to libvirt: {why}", vm.name);
            ApiError::new(ErrorCode::Preflight, message, remedy)
        };
        let uuid = vm.spec().uuid;
        let Some(domain) = Domain::known(libvirt, uuid, id).await? else {
            let why = format!("no domain there has its UUID, {uuid}");
            let remedy = "define its domain again (`virsh define`), with that UUID";
            return Err(refuse(&why, remedy));
        };
        let state = domain.state(libvirt).await?;
        if state != "shut off" {
            let why = format!("domain \"{}\" is {state}", domain.name);
            let remedy = format!("shut the domain down first (`virsh shutdown {}`)", domain.name);
            return Err(refuse(&why, &remedy));
        }
        let uuid = uuid.to_string();
        let arguments = ["dumpxml", "--inactive", "--security-info", "--domain", &uuid];
        let text = run_virsh(libvirt, &arguments, None).await?;
        let text = waiting(&text, id)
            .ok_or_else(|| refuse("its definition lacks `</domain>`", "see `virsh dumpxml`"))?;
        Ok(Domain { text, ..domain })
    }

    /// Returns the domain of that UUID, without its definition; `None` if there is none.
    pub(super) async fn known(
        libvirt: &LibvirtConfig,
        uuid: Uuid,
        id: Uuid,
    ) -> Result<Option<Domain>, ApiError> {
        let found = match libvirt::name_of(libvirt, uuid).await {
            Ok(name) => Some(name),
            // It is not there, or libvirt does not answer.
            Err(_) => {
                let all = libvirt::domains(libvirt).await?;
                all.into_iter().find(|domain| domain.uuid == uuid).map(|domain| domain.name)
            }
        };
        Ok(found.map(|name| Domain { name, uuid, id, text: String::new() }))
    }

    /// Starts it with a QEMU that waits for a guest, and stays paused. Its definition at libvirt
    /// does not change.
    pub(super) async fn start_waiting(&self, libvirt: &LibvirtConfig) -> Result<(), ApiError> {
        let failed = |error: std::io::Error| host_failed("cannot pass a definition on", &error);
        let file = rustix::fs::memfd_create("godwit-domain", MemfdFlags::CLOEXEC);
        let mut file = File::from(file.map_err(|error| failed(error.into()))?);
        file.write_all(self.text.as_bytes()).map_err(failed)?;
        // It is opened anew, and read from its beginning.
        let arguments = ["create", "--paused", "--file", "/proc/self/fd/0"];
        run_virsh(libvirt, &arguments, Some(file.into())).await.map(drop)
    }

    /// Lets libvirt run its guest.
    pub(super) async fn resume(&self, libvirt: &LibvirtConfig) -> Result<(), ApiError> {
        let uuid = self.uuid.to_string();
        run_virsh(libvirt, &["resume", "--domain", &uuid], None).await.map(drop)
    }

    async fn state(&self, libvirt: &LibvirtConfig) -> Result<String, ApiError> {
        let uuid = self.uuid.to_string();
        let state =
            run_virsh(libvirt, &["--readonly", "domstate", "--domain", &uuid], None).await?;
        Ok(state.trim().to_owned())
    }

    /// Returns its QEMU, if this attempt started that.
    fn copy(&self, libvirt: &LibvirtConfig) -> Option<ForeignProcess> {
        let process = found::of_domain(libvirt, &self.name, self.uuid).ok()?;
        let mark = process.variable(MARK)?;
        (mark == self.id.to_string()).then_some(process)
    }

    /// Whether this attempt started its QEMU, and the guest is paused there.
    pub(super) async fn waits(&self, libvirt: &LibvirtConfig) -> Result<bool, ApiError> {
        Ok(self.copy(libvirt).is_some() && self.state(libvirt).await? == "paused")
    }

    /// Ends its QEMU if this attempt started that, and it has not run the guest.
    pub(super) async fn end_copy(&self, libvirt: &LibvirtConfig) -> Result<(), ApiError> {
        let Some(process) = self.copy(libvirt) else { return Ok(()) };
        let failed = |why: &str| {
            let message = format!("cannot end libvirt's copy of \"{}\": {why}", self.name);
            ApiError::new(ErrorCode::HypervisorFailed, message, "see `virsh domstate`")
        };
        let state = self.state(libvirt).await?;
        if state == "running" {
            return Err(failed("it runs the guest"));
        }
        let uuid = self.uuid.to_string();
        let destroyed = run_virsh(libvirt, &["destroy", "--domain", &uuid], None).await;
        let limit = Instant::now() + END_LIMIT;
        while process.lives() {
            if Instant::now() > limit {
                return Err(destroyed.err().unwrap_or_else(|| failed("its QEMU does not end")));
            }
            pause().await;
        }
        Ok(())
    }
}

impl Agent {
    /// Checks that libvirt's QEMU has the devices that a VM has, and can load its state.
    pub(super) async fn compare_devices(&self, vm: &Vm, monitor: &Monitor) -> Result<(), ApiError> {
        let refuse = |why: &str| {
            let message = format!("cannot give VM \"{}\" to libvirt: {why}", vm.name);
            let remedy = format!(
                "give the domain the devices that the VM has, or stop the VM and use `godwit vm \
                 export {} --to DIR --format libvirt`",
                vm.name
            );
            ApiError::new(ErrorCode::Preflight, message, remedy)
        };
        let spec = vm.spec();
        let process = monitor.process().map_err(refusal)?;
        let arguments = process.arguments().map_err(refusal)?;
        let facts = Facts::ask(monitor).await?;
        let version = vm.process.qmp.execute("query-version", Value::Null).await;
        let version = version.map_err(|error| vm.hypervisor_failed("ask the QEMU", &error))?;
        let version = version_of(&version)?;
        if facts.version < version {
            return Err(refuse(
                "libvirt's QEMU is older than the VM's, and does not load its state",
            ));
        }
        if !is_sound(&spec, version) {
            return Err(refuse("under TCG, a QEMU before 9.0 loses writes to the guest's memory"));
        }
        let first = |faults: Vec<godwit_types::Fault>| faults.into_iter().next();
        let mut there =
            read_foreign(&arguments, &facts.machine, Some(vm.name.as_str())).map_err(|faults| {
                refuse(&first(faults).map(|fault| fault.message).unwrap_or_default())
            })?;
        let mut faults = facts.compare(&mut there);
        faults.extend(self.name_networks(&process, &mut there).await);
        if let Some(fault) = first(faults) {
            return Err(refuse(&fault.message));
        }
        match difference(&spec, &there.spec) {
            Some(what) => Err(refuse(&format!("libvirt's domain differs in its {what}"))),
            None => Ok(()),
        }
    }
}

/// Returns a definition whose QEMU waits for a guest.
fn waiting(text: &str, id: Uuid) -> Option<String> {
    let end = text.rfind("</domain>")?;
    let waiting = WAITING.replace("MARK", MARK).replace("ID", &id.to_string());
    Some(format!("{}{waiting}{}", &text[..end], &text[end..]))
}

/// Returns what two machines differ in, if a guest of one cannot go on in the other.
fn difference(here: &ResolvedSpec, there: &VmSpec) -> Option<String> {
    let accel = match there.accel {
        Accel::Kvm => Some(Accelerator::Kvm),
        Accel::Tcg => Some(Accelerator::Tcg),
        Accel::Auto => None,
    };
    let machine = [
        ("machine type", there.machine.as_ref() == Some(&here.machine)),
        ("accelerator", accel == Some(here.accel)),
        ("CPU model", there.cpu_model.as_ref() == Some(&here.cpu_model)),
        ("number of vCPUs", there.vcpus == here.vcpus),
        ("memory", there.memory.iter().map(|b| b.size).eq(here.memory.iter().map(|b| b.size))),
        ("firmware", there.firmware == here.firmware),
    ];
    let other = machine.into_iter().find(|(_, is_same)| !is_same);
    let other = other.map(|(what, _)| what.to_owned());
    other.or_else(|| other_drive(here, there)).or_else(|| other_nic(here, there)).or_else(|| {
        (here.topology != there.topology).then(|| {
            other_part(parts_of(here.topology.as_ref()), parts_of(there.topology.as_ref()))
        })
    })
}

/// Returns the first disk or CD that is not the same in both.
fn other_drive(here: &ResolvedSpec, there: &VmSpec) -> Option<String> {
    let disks: Vec<_> =
        here.disks.iter().map(|disk| (&disk.path, disk.format, disk.readonly)).collect();
    let disks_there: Vec<_> =
        there.disks.iter().map(|disk| (&disk.path, disk.format, disk.readonly)).collect();
    if let Some(at) = first_other(&disks, &disks_there) {
        let (path, ..) = disks.get(at).or_else(|| disks_there.get(at))?;
        return Some(format!("disk {}", path.display()));
    }
    let cds: Vec<_> = here.cdroms.iter().map(|drive| &drive.image).collect();
    let cds_there: Vec<_> = there.cdroms.iter().map(|drive| &drive.image).collect();
    first_other(&cds, &cds_there).map(|at| format!("CD drive {}", at + 1))
}

/// Returns the first NIC that is not the same in both.
fn other_nic(here: &ResolvedSpec, there: &VmSpec) -> Option<String> {
    let mac = |text: &String| text.parse::<MacAddress>().ok();
    let nics: Vec<_> = here.nics.iter().map(|nic| (&nic.network, Some(nic.mac))).collect();
    let nics_there: Vec<_> =
        there.nics.iter().map(|nic| (&nic.network, nic.mac.as_ref().and_then(mac))).collect();
    first_other(&nics, &nics_there).map(|at| format!("NIC {}", at + 1))
}

fn parts_of(topology: Option<&Topology>) -> &[Part] {
    topology.map(|topology| topology.parts.as_slice()).unwrap_or_default()
}

/// Returns the first device or other part that is not the same in both.
fn other_part(here: &[Part], there: &[Part]) -> String {
    let missing = here.iter().find(|part| !there.contains(part));
    match missing.or_else(|| there.iter().find(|part| !here.contains(part))) {
        Some(Part::Machine(_)) => "machine options".to_owned(),
        Some(Part::Option { name, .. }) => format!("option -{name}"),
        Some(Part::Object(object)) => format!("object {}", object.get("id").unwrap_or_default()),
        Some(Part::Memory { id, .. }) => format!("memory {id}"),
        Some(Part::Device(device) | Part::Disk { device, .. } | Part::Cdrom { device, .. }) => {
            let id = device.get("id").or_else(|| device.get("driver"));
            format!("device {}, or the address of that", id.unwrap_or_default())
        }
        Some(
            Part::Netdev { id, .. }
            | Part::Serial { id, .. }
            | Part::GuestAgent { id }
            | Part::Silent { id }
            | Part::Audio { id },
        ) => format!("device {id}"),
        None => "order of devices".to_owned(),
    }
}

/// Returns the first position at which two lists differ.
fn first_other<T: PartialEq>(here: &[T], there: &[T]) -> Option<usize> {
    (0..here.len().max(there.len())).find(|at| here.get(*at) != there.get(*at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_part_that_differs_has_its_name() {
        let audio = |id: &str| Part::Audio { id: id.to_owned() };
        assert_eq!(first_other(&[1, 2], &[1]), Some(1));
        assert_eq!(first_other(&[1, 2], &[1, 2]), None);
        assert_eq!(other_part(&[audio("a"), audio("b")], &[audio("a")]), "device b");
        assert_eq!(other_part(&[audio("a")], &[audio("a"), audio("c")]), "device c");
        assert_eq!(
            other_part(&[audio("a"), audio("b")], &[audio("b"), audio("a")]),
            "order of devices"
        );
    }

    #[test]
    fn a_definition_that_waits_keeps_the_rest() {
        let text = "<domain type='kvm'><name>a &lt;/domain&gt;</name></domain>\n";
        let id = Uuid::from_u128(7);
        let found = waiting(text, id).unwrap();
        assert!(found.ends_with("</qemu:commandline></domain>\n"), "{found}");
        assert!(found.contains(&format!("<qemu:env name='{MARK}' value='{id}'/>")), "{found}");
        let added = WAITING.replace("MARK", MARK).replace("ID", &id.to_string());
        assert_eq!(found.replace(&added, ""), text);
        assert_eq!(waiting("<network/>", id), None);
    }
}
