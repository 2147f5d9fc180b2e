//! Implements `godwit control networks`: networks that hosts share.

use godwit_api::control::{ManagedNetwork, ManagerClient};

use crate::exit::Failure;
use crate::output::{Output, table};

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

fn listed(all: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = all.collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}
