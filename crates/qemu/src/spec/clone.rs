//! The specification of a clone: that of its source, with an identity of its own.

use std::net::IpAddr;

use uuid::Uuid;

use crate::mac::MacAddress;
use crate::spec::VmSpec;
use crate::spec::cloud_init::{AddressWithPrefix, GuestNetwork};
use crate::spec::error::SpecError;
use crate::spec::nic::NicFilter;

impl VmSpec {
    /// Returns the specification of a clone: another name, UUID and hardware addresses, and
    /// `addresses` for the interfaces in their order. cloud-init in the clone gets the clone's
    /// name as host name, and the given address in place of a static one. It does not start with
    /// its host, and agents do not protect it. The disks are still those of the source.
    ///
    /// # Errors
    /// There are more addresses than interfaces, or cloud-init or a filter would give the clone an
    /// address of the source.
    pub fn cloned(
        &self,
        name: &str,
        uuid: Uuid,
        addresses: &[IpAddr],
    ) -> Result<VmSpec, SpecError> {
        if addresses.len() > self.nics.len() {
            return Err(SpecError::Nic { why: "there are more addresses than interfaces" });
        }
        let name = name.to_owned();
        let mut spec = VmSpec {
            name,
            uuid: Some(uuid),
            autostart: None,
            protect_by_agents: false,
            ..self.clone()
        };
        // The name may have been the source's before a rename: the UUID never was another VM's.
        let key = uuid.to_string();
        for (index, nic) in spec.nics.iter_mut().enumerate() {
            nic.mac = Some(MacAddress::derived(&key, index).to_string());
            nic.address = addresses.get(index).copied();
            // A filter must not let the source's addresses pass.
            nic.addresses.clear();
            if nic.filter == Some(NicFilter::MacIp) && nic.address.is_none() {
                let why = "the clone needs an address for its filter mac-ip";
                return Err(SpecError::Nic { why });
            }
        }
        if let Some(settings) = &mut spec.cloud_init {
            settings.hostname = None;
            // Settings are for the interfaces without a slot, in their order.
            let from_start = spec.nics.iter().filter(|nic| nic.slot.is_none());
            let addresses: Vec<Option<IpAddr>> = from_start.map(|nic| nic.address).collect();
            for (network, address) in settings.network.iter_mut().zip(addresses) {
                replace_address(network, address)?;
            }
        }
        Ok(spec)
    }
}

/// Gives a network the clone's address, with the prefix of the source's.
fn replace_address(network: &mut GuestNetwork, address: Option<IpAddr>) -> Result<(), SpecError> {
    if network.addresses.is_empty() {
        return Ok(());
    }
    let same_family = |known: &&AddressWithPrefix| {
        address.is_some_and(|address| address.is_ipv4() == known.address.is_ipv4())
    };
    let prefix = network.addresses.iter().find(same_family).map(|known| known.prefix);
    let (Some(address), Some(prefix)) = (address, prefix) else {
        return Err(SpecError::CloudInit {
            what: "network",
            why: "the clone needs an address in place of the source's static one, of the same \
                  family",
        });
    };
    network.addresses = vec![AddressWithPrefix { address, prefix }];
    network.gateways.retain(|gateway| gateway.is_ipv4() == address.is_ipv4());
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn source() -> VmSpec {
        serde_json::from_value(json!({
            "name": "gold", "uuid": "8a0e6c1e-0000-4000-8000-000000000001",
            "disks": [{ "path": "/srv/gold.qcow2", "format": "qcow2" }],
            "nics": [
                { "network": "lan", "mac": "52:54:00:12:34:56", "address": "10.0.0.5",
                  "link": "down" },
                { "network": "lan" },
            ],
            "cloud_init": { "hostname": "gold", "network": [
                { "addresses": ["10.0.0.5/24", "fd00::5/64"],
                  "gateways": ["10.0.0.1", "fd00::1"] },
            ] },
        }))
        .unwrap()
    }

    #[test]
    fn a_clone_has_an_identity_of_its_own() {
        let uuid = Uuid::new_v4();
        let clone = source().cloned("web", uuid, &["10.0.0.9".parse().unwrap()]).unwrap();
        assert_eq!((clone.name.as_str(), clone.uuid), ("web", Some(uuid)));
        assert_eq!(clone.disks, source().disks);
        let macs = clone.resolved_nics().unwrap();
        assert!(source().resolved_nics().unwrap().iter().all(|nic| nic.mac != macs[0].mac));
        assert_eq!(clone.nics[0].address, Some("10.0.0.9".parse().unwrap()));
        assert!(!clone.nics[0].link.is_up() && clone.nics[1].address.is_none());
        let settings = clone.cloud_init.clone().unwrap();
        assert_eq!(settings.hostname, None);
        assert_eq!(settings.network[0].addresses[0].to_string(), "10.0.0.9/24");
        assert_eq!(settings.network[0].addresses.len(), 1);
        assert_eq!(settings.network[0].gateways, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        clone.validate().unwrap();
    }

    #[test]
    fn a_clone_passes_no_filter_with_the_address_of_its_source() {
        let mut source = source();
        source.cloud_init = None;
        source.nics[0].filter = Some(NicFilter::MacIp);
        source.nics[0].addresses = ["10.0.0.6".parse().unwrap()].into();
        source.autostart = Some(crate::Autostart::default());
        source.protect_by_agents = true;
        let cloned = |addresses: &[IpAddr]| source.cloned("web", Uuid::new_v4(), addresses);
        assert!(cloned(&[]).is_err());
        let clone = cloned(&["10.0.0.9".parse().unwrap()]).unwrap();
        assert!(clone.nics[0].addresses.is_empty() && clone.autostart.is_none());
        assert!(!clone.protect_by_agents);
    }

    #[test]
    fn a_clone_never_gets_the_static_address_of_its_source() {
        let cloned = |addresses: &[&str]| {
            let addresses: Vec<IpAddr> =
                addresses.iter().map(|address| address.parse().unwrap()).collect();
            source().cloned("web", Uuid::new_v4(), &addresses)
        };
        assert!(cloned(&[]).is_err());
        assert!(cloned(&["10.0.0.9", "10.0.0.10", "10.0.0.11"]).is_err());
        assert!(cloned(&["10.0.0.9", "10.0.0.10"]).is_ok());
    }
}
