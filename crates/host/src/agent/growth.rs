//! Changes of the specification of a running VM: more vCPUs and memory, up to what it declares, and
//! what no device sees. Everything else needs a stop, and the answer lists it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use godwit_api::{ApiError, ChangeVm, ErrorCode};
use godwit_qemu::{Backing, ResolvedSpec, SpecError, VmSpec};
use godwit_ram::Region;
use serde_json::{Map, Value};

use crate::agent::plug::{plug_failed, refuse_adopted};
use crate::agent::{Agent, Begun};
use crate::failure::{host_failed, ram_failed, spec_refused};
use crate::vm::Vm;

/// Keys of a specification that change while a VM runs, if their new value allows it.
const WHILE_RUNNING: [&str; 8] = [
    "memory",
    "vcpus",
    "refuses_page_in",
    "description",
    "tags",
    "autostart",
    "on_crash",
    "protect",
];

impl Agent {
    /// Changes a running VM. All of the change is checked before any of it is made.
    pub(super) async fn change_running(
        self: &Arc<Self>,
        begun: &Begun,
        request: &ChangeVm,
    ) -> Result<(), ApiError> {
        let Some(vm) = &begun.vm else { return Err(self.no_vm(&begun.spec.name)) };
        let old = begun.spec.as_ref();
        let wanted = self.wanted(old, request)?;
        let _protected = self.admit_protection(vm, old, &wanted)?;
        let ending = self.admit_unprotection(begun, &wanted).await?;
        self.make_change(vm, begun, wanted).await?;
        if let Some(ending) = ending {
            ending.ended();
        }
        Ok(())
    }

    async fn make_change(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        begun: &Begun,
        wanted: VmSpec,
    ) -> Result<(), ApiError> {
        let old = begun.spec.as_ref();
        if wanted.differs_in_settings_alone(&old.to_vm_spec()) {
            return self.save_settings(begun, &wanted);
        }
        refuse_adopted(old)?;
        let settings = wanted.clone();
        let wanted = self.resolve_choices(wanted).await?;
        let growth = Growth::of(old, &wanted)?;
        self.check_order_of_start(&wanted)?;
        let mut now = old.clone();
        if let Some(grown) = growth.memory {
            self.add_memory(vm, old, &grown).await?;
            now = grown;
        }
        now.refuses_page_in = wanted.refuses_page_in;
        now = now.with_settings_of(&settings);
        if let Some(vcpus) = growth.vcpus {
            let plugged = vm.process.qmp.plug_vcpus(vcpus).await;
            // What QEMU has counts, also if it refused one of several.
            let has = match &plugged {
                Ok(()) => Some(vcpus),
                Err(_) => vm.process.qmp.vcpu_count().await.ok(),
            };
            now.vcpus = has.unwrap_or(now.vcpus).clamp(1, now.most_vcpus());
            self.save_plugged(vm, now)?;
            plugged.map_err(|error| plug_failed("add", "vCPUs", &vm.name, &error))?;
        } else if now != *vm.spec() {
            self.save_plugged(vm, now)?;
        }
        tracing::info!(vm = vm.name.as_str(), "specification changed while it runs");
        Ok(())
    }

    /// Gives a running VM its last memory block as a module. If that fails, nothing of it remains.
    async fn add_memory(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        old: &ResolvedSpec,
        new: &ResolvedSpec,
    ) -> Result<(), ApiError> {
        if self.page_ins().state(&vm.name).is_some() || vm.files.missing().exists() {
            let message = format!(
                "cannot add memory to VM \"{}\": pages of its memory are still on another host",
                vm.name
            );
            return Err(ApiError::new(ErrorCode::Busy, message, "wait until they have arrived"));
        }
        // Promised from now on: of two VMs that grow at the same time, at most one gets the last.
        self.set_spec(&vm.name, Arc::new(new.clone()));
        let undo = |error: ApiError| {
            self.set_spec(&vm.name, Arc::new(old.clone()));
            vm.set_spec(Arc::new(old.clone()));
            error
        };
        let lacking = self.check_growth(new, vm.memory_taken_bytes()).map_err(undo)?;
        if lacking > 0 {
            tokio::task::block_in_place(|| self.references().free(lacking, &vm.name));
        }
        let index = old.memory.len();
        let region = tokio::task::block_in_place(|| make_block(vm, new, index)).map_err(undo)?;
        let remove = || {
            if let Err(error) = fs::remove_file(vm.files.memory(index))
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(vm = vm.name.as_str(), %error, "a memory file stays");
            }
        };
        if let Err(error) = self.save_plugged(vm, new.clone()) {
            remove();
            return Err(undo(error));
        }
        let (region, file) = region.unzip();
        let file = file.as_ref().map(AsFd::as_fd);
        let plugged = vm.process.qmp.plug_memory(new, index, file).await;
        let Err(error) = plugged else {
            region.into_iter().for_each(|region| vm.add_region(region));
            return Ok(());
        };
        let failed = plug_failed("add", "memory", &vm.name, &error);
        if error.is_unknown() {
            // A restarted agent asks QEMU, and corrects the definition.
            region.into_iter().for_each(|region| vm.add_region(region));
            let remedy = format!("{}; restart this host's agent", failed.remedy);
            return Err(ApiError { remedy, ..failed });
        }
        if let Err(unsaved) = self.save_plugged(vm, old.clone()) {
            tracing::error!(vm = vm.name.as_str(), %unsaved, "the record names too much memory");
        }
        remove();
        Err(failed)
    }
}

/// Creates the file of a shared memory block, for the user that has the others.
fn make_block(
    vm: &Vm,
    spec: &ResolvedSpec,
    index: usize,
) -> Result<Option<(Arc<Region>, File)>, ApiError> {
    let Some(block) = spec.memory.get(index).filter(|block| block.backing == Backing::Shared)
    else {
        return Ok(None);
    };
    let failed = |error: io::Error| host_failed("cannot create a memory file", &error);
    let first = fs::metadata(vm.files.memory(0)).map_err(failed)?;
    let path = vm.files.memory(index);
    // One that an agent left that ended while it added memory, and that QEMU does not have.
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let owner = Some((first.uid(), first.gid()));
    let region = Region::create(&path, block.size.bytes(), owner);
    let region = region.map(Arc::new).map_err(|error| ram_failed(&error))?;
    match File::options().read(true).write(true).open(&path) {
        Ok(file) => Ok(Some((region, file))),
        Err(error) => {
            // The first error says more.
            let _ = fs::remove_file(&path);
            Err(failed(error))
        }
    }
}

/// What a running VM is to get.
#[derive(Debug, PartialEq)]
struct Growth {
    /// The VM with its new memory block.
    memory: Option<ResolvedSpec>,
    /// New number of vCPUs.
    vcpus: Option<u32>,
}

impl Growth {
    /// Compares a running VM with what it is to become.
    fn of(old: &ResolvedSpec, new: &ResolvedSpec) -> Result<Growth, ApiError> {
        let differing = differing_keys(&old.to_vm_spec(), &new.to_vm_spec());
        let is_size = matches!(&new.memory[..], [block] if block.address.is_none()
            && old.memory.first().is_some_and(|first| first.backing == block.backing));
        let needs_stop: Vec<&str> = differing
            .iter()
            .map(String::as_str)
            .filter(|key| !WHILE_RUNNING.contains(key) || (*key == "memory" && !is_size))
            .collect();
        if !needs_stop.is_empty() {
            let why = format!("it has {} from its start", needs_stop.join(", "));
            return Err(refused(
                old,
                &why,
                "stop it first; a running VM takes more vcpus (up to max_cpus), a larger size of \
                 memory (up to max_memory), refuses_page_in, description, tags, autostart, \
                 on_crash and protect, and has commands for disks, CDs and NICs",
            ));
        }
        let hotplug = |error: &SpecError| {
            let ApiError { message, .. } = spec_refused(error);
            refused(old, &message, "stop it first; docs/hotplug.md says what a running VM takes")
        };
        let memory = match old.memory != new.memory {
            false => None,
            true if new.memory_bytes() == old.memory_bytes() => None,
            true if new.memory_bytes() < old.memory_bytes() => {
                return Err(refused(old, "a running VM keeps its memory", "stop it first"));
            }
            true => {
                let grown = old.with_more_memory(new.memory_bytes());
                Some(grown.map_err(|error| hotplug(&error))?)
            }
        };
        let vcpus = match new.vcpus {
            vcpus if vcpus == old.vcpus => None,
            vcpus if vcpus < old.vcpus => {
                let remedy = "stop it first, or take vCPUs offline in the guest";
                return Err(refused(old, "a running VM keeps its vCPUs", remedy));
            }
            vcpus if vcpus > old.most_vcpus() => {
                let why = format!("it declares no max_cpus, or less than {vcpus}");
                let remedy = "stop it, then set it with `godwit vm set VM --max-cpus N`";
                return Err(refused(old, &why, remedy));
            }
            vcpus => Some(vcpus),
        };
        Ok(Growth { memory, vcpus })
    }
}

fn refused(spec: &ResolvedSpec, why: &str, remedy: &str) -> ApiError {
    let message = format!("cannot change running VM \"{}\": {why}", spec.name);
    ApiError::new(ErrorCode::WrongState, message, remedy)
}

/// Returns the keys whose values differ.
fn differing_keys(old: &VmSpec, new: &VmSpec) -> Vec<String> {
    let keys = |spec: &VmSpec| -> Map<String, Value> {
        match serde_json::to_value(spec) {
            Ok(Value::Object(keys)) => keys,
            _ => Map::new(),
        }
    };
    let (old, new) = (keys(old), keys(new));
    let mut differing: Vec<String> = old
        .iter()
        .filter(|(key, value)| new.get(*key) != Some(value))
        .map(|(key, _)| key.clone())
        .collect();
    differing.extend(new.keys().filter(|key| !old.contains_key(*key)).cloned());
    differing.sort_unstable();
    differing
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{ByteSize, MemoryBlock};
    use serde_json::json;

    use super::*;

    fn spec() -> ResolvedSpec {
        serde_json::from_value(json!({
            "name": "web", "memory": [{"size": "256MiB"}], "max_memory": "1GiB", "vcpus": 1,
            "max_cpus": 3, "cpu_model": "Westmere-v1", "machine": "pc-q35-7.2", "accel": "tcg",
            "kernel": "/k", "hotplug_slots": 1,
        }))
        .unwrap()
    }

    fn growth(change: impl FnOnce(&mut ResolvedSpec)) -> Result<Growth, String> {
        let mut new = spec();
        change(&mut new);
        Growth::of(&spec(), &new).map_err(|error| error.message)
    }

    #[test]
    fn what_a_running_vm_takes_is_distinguished() {
        let size = |mib| vec![MemoryBlock::shared(ByteSize::from_mib(mib))];
        assert_eq!(growth(|_| {}), Ok(Growth { memory: None, vcpus: None }));
        let grown = growth(|spec| (spec.memory, spec.vcpus) = (size(512), 3)).unwrap();
        assert_eq!(grown.vcpus, Some(3));
        let memory = grown.memory.unwrap().memory;
        assert_eq!((memory.len(), memory[1].size), (2, ByteSize::from_mib(256)));
        growth(|spec| spec.refuses_page_in = true).unwrap();
        for (change, word) in [
            (
                &(|spec: &mut ResolvedSpec| spec.memory = size(128)) as &dyn Fn(&mut ResolvedSpec),
                "keeps its memory",
            ),
            (&|spec| spec.memory = size(300), "128 MiB"),
            (&|spec| spec.memory = size(2048), "max_memory"),
            (&|spec| spec.memory = [size(128), size(256)].concat(), "memory from its start"),
            (&|spec| spec.vcpus = 4, "max_cpus"),
            (&|spec| (spec.kernel, spec.hotplug_slots) = (None, 2), "hotplug_slots, kernel"),
            (&|spec| spec.max_cpus = Some(8), "max_cpus from its start"),
        ] {
            let error = growth(|spec| change(spec)).unwrap_err();
            assert!(error.contains(word), "{word}: {error}");
        }
        let mut two = spec();
        two.vcpus = 2;
        assert!(Growth::of(&two, &spec()).unwrap_err().message.contains("keeps its vCPUs"));
    }
}
