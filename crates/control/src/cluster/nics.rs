//! What a host must offer for the NICs of a VM, beside their networks.

use godwit_api::HostInfo;
use godwit_qemu::VmSpec;

/// Returns what the host lacks for VLANs and filters of NICs. An older agent does not report it.
pub(crate) fn lacks_for_nics(info: &HostInfo, spec: &VmSpec) -> Option<String> {
    let unfiltered = spec.nics.iter().filter(|nic| nic.vlan.is_some() || !nic.trunk.is_empty());
    let mut unfiltered = unfiltered.filter_map(|nic| Some((nic, info.networks.get(&nic.network)?)));
    if let Some((nic, there)) = unfiltered.find(|(_, there)| there.vlans == Some(false)) {
        let (bridge, network) = (&there.bridge, &nic.network);
        return Some(format!("its bridge {bridge} of network {network} does not filter VLANs"));
    }
    let wants_filter = spec.nics.iter().any(|nic| nic.filter.is_some());
    (wants_filter && info.nic_filters == Some(false))
        .then(|| "it cannot filter what NICs send: nft is not installed".to_owned())
}
