//! Implements `godwit datastore`: datastores of the cluster through the manager, and those of a
//! host through its agent.

mod drains;

use std::path::Path;

use godwit_api::DatastoreInfo;
use godwit_api::control::{
    DatastoreAtHost, DatastoreDetails, ManagedDatastore, ManagerClient, UpdateDatastore,
};
use godwit_types::{DatastoreHealth, DatastoreSpeed};

use crate::args::{DatastoreCommand, ManagerPlace, SetDatastoreArgs, Switch};
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::manager;
use crate::output::{Output, fields, table};
use crate::units::{byte_count, millis};

pub(crate) async fn run(
    command: DatastoreCommand,
    place: &ManagerPlace,
    hosts_file: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    match (&command, only) {
        (DatastoreCommand::List { tag: None }, Some(_)) if !place.is_named() => {
            return of_agent(hosts_file, only, output).await;
        }
        (DatastoreCommand::List { .. }, _) | (_, None) => {}
        (_, Some(host)) => {
            let message =
                format!("cannot use --host {host} with this command: the manager answers it");
            return Err(Failure::usage(message, "omit --host"));
        }
    }
    let manager = manager::client(place, hosts_file)?;
    match command {
        DatastoreCommand::List { tag } => {
            list(&manager, tag.as_deref(), only, output).await?;
        }
        DatastoreCommand::Show { datastore } => {
            let shown = manager.datastore(&datastore).await?;
            output.result(&shown, || details_text(&shown))?;
        }
        DatastoreCommand::Set(options) => {
            let request = change(&options);
            if request == UpdateDatastore::default() {
                let remedy = "give --name, --description, --tag, --no-tags or --reset";
                return Err(Failure::usage("nothing is to be changed", remedy));
            }
            let set = manager.update_datastore(&options.datastore, &request).await?;
            print(&set, output)?;
        }
        DatastoreCommand::Maintenance { datastore, switch } => {
            let maintenance = Some(switch == Switch::On);
            let request = UpdateDatastore { maintenance, ..UpdateDatastore::default() };
            print(&manager.update_datastore(&datastore, &request).await?, output)?;
        }
        DatastoreCommand::Drain(options) => return drains::run(options, &manager, output).await,
        DatastoreCommand::Drains => return drains::list(&manager, output).await,
    }
    Ok(Exit::Ok)
}

/// Lists datastores of the cluster.
pub(crate) async fn list(
    manager: &ManagerClient,
    tag: Option<&str>,
    host: Option<&str>,
    output: Output,
) -> Result<(), Failure> {
    let mut datastores = manager.datastores().await?;
    datastores.retain(|one| {
        tag.is_none_or(|tag| one.tags.contains(tag))
            && host.is_none_or(|host| one.hosts.iter().any(|at| at.host == host))
    });
    output.result(&datastores, || {
        let rows: Vec<_> = datastores.iter().map(row).collect();
        let heads = [
            "datastore",
            "kind",
            "state",
            "free",
            "total",
            "provisioned",
            "latency",
            "vms",
            "hosts",
        ];
        table(&heads, &rows)
    })
}

/// Lists the datastores of one host, as its agent reports them.
async fn of_agent(
    hosts_file: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let hosts = Hosts::load(hosts_file)?;
    let (_, client) = hosts.one(only)?;
    let datastores = client.host().await?.datastores;
    output.result(&datastores, || {
        let rows: Vec<_> = datastores.iter().map(|(path, info)| row_of_agent(path, info)).collect();
        table(&["datastore", "kind", "state", "free", "total", "provisioned", "latency"], &rows)
    })?;
    Ok(Exit::Ok)
}

fn row_of_agent(path: &Path, info: &DatastoreInfo) -> Vec<String> {
    let is_known = info.total_bytes > 0;
    let size = |bytes| if is_known { byte_count(bytes) } else { unknown() };
    vec![
        path.display().to_string(),
        info.kind.clone().unwrap_or_else(unknown),
        info.health.map_or_else(unknown, |health| health.to_string()),
        size(info.free_bytes),
        size(info.total_bytes),
        info.promised_bytes.map_or_else(unknown, byte_count),
        latency(info.speed.as_ref()),
    ]
}

fn row(datastore: &ManagedDatastore) -> Vec<String> {
    let hosts: Vec<&str> = datastore.hosts.iter().map(|at| at.host.as_str()).collect();
    vec![
        datastore.name.clone(),
        datastore.kind.clone().unwrap_or_else(unknown),
        state(datastore.health, datastore.maintenance),
        datastore.free_bytes.map_or_else(unknown, byte_count),
        datastore.total_bytes.map_or_else(unknown, byte_count),
        datastore.promised_bytes.map_or_else(unknown, byte_count),
        latency(slowest(datastore)),
        datastore.vms.to_string(),
        if hosts.is_empty() { "none".to_owned() } else { hosts.join(", ") },
    ]
}

/// Returns the speed at the host that sees the slowest writes.
fn slowest(datastore: &ManagedDatastore) -> Option<&DatastoreSpeed> {
    let speeds = datastore.hosts.iter().filter_map(|at| at.speed.as_ref());
    speeds.max_by_key(|speed| speed.write_us)
}

fn state(health: Option<DatastoreHealth>, maintenance: bool) -> String {
    let health = health.map_or_else(unknown, |health| health.to_string());
    if maintenance { format!("{health}, maintenance") } else { health }
}

fn unknown() -> String {
    "-".to_owned()
}

fn latency(speed: Option<&DatastoreSpeed>) -> String {
    speed.map_or_else(unknown, |speed| us(speed.write_us))
}

#[expect(clippy::cast_precision_loss, reason = "for people: three digits are shown")]
fn us(us: u64) -> String {
    millis(us as f64 / 1e3)
}

fn change(options: &SetDatastoreArgs) -> UpdateDatastore {
    if options.reset {
        return UpdateDatastore {
            name: Some(String::new()),
            description: Some(String::new()),
            tags: Some(std::collections::BTreeSet::new()),
            maintenance: Some(false),
        };
    }
    let has_tags = options.no_tags || !options.tags.is_empty();
    UpdateDatastore {
        name: options.name.clone(),
        description: options.description.clone(),
        tags: has_tags.then(|| options.tags.iter().cloned().collect()),
        maintenance: None,
    }
}

fn print(datastore: &ManagedDatastore, output: Output) -> Result<(), Failure> {
    output.result(datastore, || text(datastore))
}

fn text(datastore: &ManagedDatastore) -> String {
    let mut lines = vec![("datastore", datastore.name.clone()), ("id", datastore.id.clone())];
    if !datastore.description.is_empty() {
        lines.push(("description", datastore.description.clone()));
    }
    if !datastore.tags.is_empty() {
        let tags: Vec<&str> = datastore.tags.iter().map(String::as_str).collect();
        lines.push(("tags", tags.join(", ")));
    }
    lines.extend([
        ("kind", datastore.kind.clone().unwrap_or_else(unknown)),
        ("state", state(datastore.health, datastore.maintenance)),
        ("capacity", capacity(datastore)),
        ("vms", format!("{}, with {}", datastore.vms, disks_text(datastore.disks))),
    ]);
    fields(&lines)
}

fn disks_text(disks: u64) -> String {
    if disks == 1 { "1 disk".to_owned() } else { format!("{disks} disks") }
}

#[expect(clippy::cast_precision_loss, reason = "for people: three digits are shown")]
fn capacity(datastore: &ManagedDatastore) -> String {
    let (Some(free), Some(total)) = (datastore.free_bytes, datastore.total_bytes) else {
        return unknown();
    };
    let space = format!("{} free of {}", byte_count(free), byte_count(total));
    match datastore.promised_bytes.filter(|_| total > 0) {
        Some(promised) => {
            let ratio = promised as f64 / total as f64;
            format!("{space}; {} provisioned ({ratio:.2} of it)", byte_count(promised))
        }
        None => space,
    }
}

fn details_text(details: &DatastoreDetails) -> String {
    let hosts: Vec<_> = details.datastore.hosts.iter().map(host_row).collect();
    let heads = ["host", "path", "state", "free", "write", "read", "writes/s", "reads/s"];
    let mut shown = format!("{}\n\n{}", text(&details.datastore), table(&heads, &hosts));
    let problems = details.datastore.hosts.iter();
    for (host, problem) in problems.filter_map(|at| Some((&at.host, at.problem.as_ref()?))) {
        shown = format!("{shown}\nwarning: host {host}: {problem}");
    }
    if details.used_by.is_empty() {
        return shown;
    }
    let disks = details.used_by.iter();
    let disks: Vec<_> =
        disks.map(|disk| vec![disk.vm.clone(), disk.host.clone(), disk.path.clone()]).collect();
    format!("{shown}\n\n{}", table(&["vm", "host", "disk"], &disks))
}

fn host_row(at: &DatastoreAtHost) -> Vec<String> {
    let health = at.health.map_or_else(unknown, |health| health.to_string());
    let rate = |bytes: Option<u64>| bytes.map_or_else(unknown, byte_count);
    vec![
        at.host.clone(),
        at.path.clone(),
        if at.is_current { health } else { format!("{health} (host is away)") },
        at.free_bytes.map_or_else(unknown, byte_count),
        latency(at.speed.as_ref()),
        at.speed.map_or_else(unknown, |speed| us(speed.read_us)),
        rate(at.speed.map(|speed| speed.write_bytes_per_s)),
        rate(at.speed.map(|speed| speed.read_bytes_per_s)),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn datastore() -> ManagedDatastore {
        serde_json::from_value(json!({
            "id": "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10", "name": "fast", "path": "/srv",
            "tags": ["ssd"], "maintenance": true, "kind": "nfs", "total_bytes": 100_u64 << 30,
            "free_bytes": 40_u64 << 30, "promised_bytes": 250_u64 << 30, "health": "ok",
            "hosts": [{ "host": "a", "path": "/srv", "is_current": true, "health": "ok",
                "problem": "its marker is a copy",
                "speed": { "write_us": 700, "read_us": 350, "write_bytes_per_s": 1_u64 << 29,
                    "read_bytes_per_s": 1_u64 << 30, "measured_unix_ms": 1 } }],
            "vms": 1, "disks": 2,
        }))
        .unwrap()
    }

    #[test]
    fn an_unknown_size_of_a_pool_is_not_zero() {
        let known = json!({ "total_bytes": 0, "free_bytes": 0, "kind": "ceph-rbd" });
        let known: DatastoreInfo = serde_json::from_value(known).unwrap();
        let row = row_of_agent(Path::new("rbd:vms"), &known).join(" ");
        assert_eq!(row, "rbd:vms ceph-rbd - - - - -");
        let known = DatastoreInfo { total_bytes: 2 << 30, free_bytes: 1 << 30, ..known };
        let row = row_of_agent(Path::new("rbd:vms"), &known).join(" ");
        assert!(row.contains("1.0 GiB 2.0 GiB"), "{row}");
    }

    #[test]
    fn a_datastore_is_shown_with_its_hosts_and_disks() {
        let row = row(&datastore()).join(" | ");
        let expected = "fast | nfs | ok, maintenance | 40 GiB | 100 GiB | 250 GiB | 0.7 ms | 1 | a";
        assert_eq!(row, expected);
        let disk = json!([{ "vm": "web", "host": "a", "path": "/srv/web.raw" }]);
        let details = DatastoreDetails {
            datastore: datastore(),
            used_by: serde_json::from_value(disk).unwrap(),
        };
        let text = details_text(&details);
        for part in ["2.50 of it", "512 MiB", "/srv/web.raw", "warning: host a: its marker"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
