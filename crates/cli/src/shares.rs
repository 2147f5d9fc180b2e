//! Implements `godwit control networks` and `godwit control datastores`: resources that hosts
//! share.

use godwit_api::control::{DatastoreAtHost, ManagedDatastore, ManagedNetwork, ManagerClient};

use crate::exit::Failure;
use crate::output::{Output, table};
use crate::units::byte_count;

pub(crate) async fn networks(manager: &ManagerClient, output: Output) -> Result<(), Failure> {
    let networks = manager.networks().await?;
    output.result(&networks, || {
        let rows: Vec<_> = networks.iter().map(network_row).collect();
        table(&["network", "vms", "hosts (bridge)"], &rows)
    })
}

fn network_row(network: &ManagedNetwork) -> Vec<String> {
    let hosts = network.hosts.iter().map(|at| format!("{} ({})", at.host, at.bridge));
    vec![network.name.clone(), network.vms.to_string(), listed(hosts)]
}

pub(crate) async fn datastores(manager: &ManagerClient, output: Output) -> Result<(), Failure> {
    let datastores = manager.datastores().await?;
    output.result(&datastores, || {
        let rows: Vec<_> = datastores.iter().map(datastore_row).collect();
        table(&["datastore", "vms", "hosts (free of all)"], &rows)
    })
}

fn datastore_row(datastore: &ManagedDatastore) -> Vec<String> {
    vec![
        datastore.name.clone(),
        datastore.vms.to_string(),
        listed(datastore.hosts.iter().map(at_host)),
    ]
}

fn at_host(at: &DatastoreAtHost) -> String {
    match (at.free_bytes, at.total_bytes) {
        (Some(free), Some(total)) => {
            format!("{} ({} of {})", at.host, byte_count(free), byte_count(total))
        }
        _ => format!("{} (not reported)", at.host),
    }
}

fn listed(all: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = all.collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}
