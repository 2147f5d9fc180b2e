//! Implements `godwit vm set`.

use std::collections::BTreeMap;

use godwit_api::ChangeVm;
use godwit_api::control::ChangeManagedVm;
use godwit_qemu::SpecPatch;

use super::create::{from_file, patch};
use super::drives::is_new;
use super::settings;
use crate::args::SetArgs;
use crate::exit::Failure;

/// Returns the request for the manager.
pub(super) fn managed(options: &SetArgs) -> Result<ChangeManagedVm, Failure> {
    let ChangeVm { spec, replace, .. } = of_spec(options)?;
    let added = options.labels.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
    let removed = options.removed_labels.iter().map(|key| (key.clone(), None));
    let labels: BTreeMap<_, _> = removed.chain(added).collect();
    if !replace && spec.is_empty() && labels.is_empty() {
        return Err(nothing_to_change());
    }
    Ok(ChangeManagedVm { spec, replace, labels })
}

/// Returns the request for a host's agent, which knows no labels.
pub(super) fn of_host(options: &SetArgs) -> Result<ChangeVm, Failure> {
    if !options.labels.is_empty() || !options.removed_labels.is_empty() {
        return Err(Failure::usage(
            "cannot change labels: a host does not have them",
            "name a manager (--manager, or [manager] in the hosts file), and no --host",
        ));
    }
    let change = of_spec(options)?;
    if !change.replace && change.spec.is_empty() {
        return Err(nothing_to_change());
    }
    Ok(change)
}

fn of_spec(options: &SetArgs) -> Result<ChangeVm, Failure> {
    if let Some(path) = &options.file {
        let mut spec = from_file(path, Some(&options.name))?;
        // The VM keeps its own. `vm show --json` prints it in each specification.
        spec.uuid = None;
        spec.validate().map_err(|error| Failure::usage(error.to_string(), error.remedy()))?;
        let spec = SpecPatch::of(&spec)
            .map_err(|error| Failure::usage(error.to_string(), "use paths in UTF-8"))?;
        return Ok(ChangeVm { spec, replace: true, ..ChangeVm::default() });
    }
    if options.spec.private_memory && options.spec.memory.is_empty() {
        return Err(Failure::usage(
            "cannot make the memory private: its size is missing",
            "give --memory with --private-memory",
        ));
    }
    if let Some(disk) = options.spec.disk.iter().find(|disk| is_new(disk)) {
        return Err(Failure::usage(
            format!("--disk {disk}: only a new VM's disks are created"),
            "create it with `godwit disk create`, then name its path and format",
        ));
    }
    let mut spec = patch(&options.spec, &options.cloud_init)?;
    settings::add(&mut spec, &options.settings)?;
    for option in &options.unset {
        spec.unset(option.key());
    }
    Ok(ChangeVm { spec, ..ChangeVm::default() })
}

fn nothing_to_change() -> Failure {
    Failure::usage("nothing to change", "name at least one option; see `godwit vm set --help`")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::args::{Cli, Command, VmCommand};

    fn options(line: &str) -> SetArgs {
        let words = ["godwit", "vm", "set"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Vm { command: VmCommand::Set(options), .. } => *options,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_named_options_change() {
        let line = "web --vcpus 4 --unset append --label a=b --remove-label c --label c=d";
        let request = managed(&options(line)).unwrap();
        let expected = json!({
            "spec": { "vcpus": 4, "cmdline": null }, "replace": false,
            "labels": { "a": "b", "c": "d" }
        });
        assert_eq!(serde_json::to_value(request).unwrap(), expected);
        let protect = |line| serde_json::to_value(of_host(&options(line)).unwrap().spec).unwrap();
        assert_eq!(protect("web --protect high"), json!({ "protect": "high" }));
        assert_eq!(protect("web --unset protect"), json!({ "protect": null }));
        assert_eq!(
            protect("web --unset protect --protect-by-agents"),
            json!({ "protect": null, "protect_by_agents": true })
        );
        assert_eq!(protect("web --unset protect-by-agents"), json!({ "protect_by_agents": null }));
        let memory = of_host(&options("web --memory 2GiB --private-memory")).unwrap();
        assert_eq!(
            serde_json::to_value(memory.spec).unwrap(),
            json!({ "memory": [{ "size": "2GiB", "backing": "private" }] })
        );
    }

    #[test]
    fn a_file_replaces_everything_but_the_identity() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("web.toml");
        std::fs::write(&file, "name = \"old\"\nkernel = \"/k\"\n").unwrap();
        let change = of_host(&options(&format!("web -f {}", file.display()))).unwrap();
        let value = serde_json::to_value(change).unwrap();
        assert_eq!((&value["spec"]["name"], &value["replace"]), (&json!("web"), &json!(true)));
        assert_eq!(value["spec"].get("uuid"), None);
    }

    #[test]
    fn wrong_requests_are_named_with_the_remedy() {
        for (line, word) in [
            ("web", "nothing to change"),
            ("web --private-memory", "size is missing"),
            ("web --label a=b", "labels"),
            ("web -f /nonexistent", "/nonexistent"),
        ] {
            let failure = of_host(&options(line)).unwrap_err();
            assert!(failure.fault.message.contains(word), "{line}: {failure}");
            assert!(!failure.fault.remedy.is_empty());
        }
        assert!(managed(&options("web")).is_err());
    }
}
