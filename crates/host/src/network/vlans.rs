//! VLANs of a tap on a bridge that filters them (`ip link set BRIDGE type bridge vlan_filtering
//! 1`). A tap that vanishes takes its VLANs along, so nothing has to be removed.

use godwit_qemu::ResolvedNic;
use rtnetlink::packet_route::link::{
    BridgeVlanInfoFlags, InfoBridge, InfoData, LinkAttribute, LinkInfo, LinkMessage,
};
use rtnetlink::{Handle, LinkBridgeVlan, LinkMessageBuilder};

/// A bridge, as the kernel describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bridge {
    pub(super) index: u32,
    /// Whether it keeps the VLANs of its ports apart. Kernels without CONFIG_BRIDGE_VLAN_FILTERING
    /// never do.
    pub(super) filters_vlans: bool,
    /// VLAN that a new port gets; 0 is none.
    default_vlan: u16,
}

impl Bridge {
    pub(super) fn of(link: &LinkMessage) -> Bridge {
        let mut bridge = Bridge { index: link.header.index, ..Bridge::default() };
        let infos = link.attributes.iter().filter_map(|attribute| match attribute {
            LinkAttribute::LinkInfo(infos) => Some(infos),
            _ => None,
        });
        for info in infos.flatten() {
            let LinkInfo::Data(InfoData::Bridge(facts)) = info else { continue };
            for fact in facts {
                match fact {
                    InfoBridge::VlanFiltering(filters) => bridge.filters_vlans = *filters,
                    InfoBridge::VlanDefaultPvid(vlan) => bridge.default_vlan = *vlan,
                    _ => {}
                }
            }
        }
        bridge
    }
}

/// VLANs of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PortVlans {
    /// VLAN of frames without a tag.
    untagged: Option<u16>,
    tagged: Vec<u16>,
}

impl PortVlans {
    /// Returns the VLANs of a guest's tap; `None` leaves those that the bridge gives it.
    pub(super) fn of_guest(nic: &ResolvedNic) -> Option<PortVlans> {
        let tagged = nic.trunk.iter().copied().collect();
        nic.has_vlans().then_some(PortVlans { untagged: nic.vlan, tagged })
    }

    /// Returns the VLANs of a tap of the host that reaches the guest's untagged frames.
    pub(super) fn of_watcher(nic: &ResolvedNic) -> Option<PortVlans> {
        nic.vlan.map(|vlan| PortVlans { untagged: Some(vlan), tagged: Vec::new() })
    }

    /// Returns the VLANs to add to a new port, and the one to remove: a port keeps the bridge's
    /// own VLAN as a member otherwise, and gets what is flooded there.
    fn changes(&self, default_vlan: u16) -> (Vec<(u16, BridgeVlanInfoFlags)>, Option<u16>) {
        let access = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
        let untagged = self.untagged.map(|vlan| (vlan, access));
        let tagged = self.tagged.iter().map(|vlan| (*vlan, BridgeVlanInfoFlags::empty()));
        let added: Vec<_> = untagged.into_iter().chain(tagged).collect();
        let stays = default_vlan == 0 || added.iter().any(|(vlan, _)| *vlan == default_vlan);
        (added, (!stays).then_some(default_vlan))
    }

    /// Gives these VLANs to a port of the bridge, and no others.
    pub(super) async fn set(
        &self,
        netlink: &Handle,
        port: u32,
        bridge: &Bridge,
    ) -> Result<(), rtnetlink::Error> {
        let (added, removed) = self.changes(bridge.default_vlan);
        if let Some(vlan) = removed {
            let message = message(port, &[(vlan, BridgeVlanInfoFlags::empty())]);
            netlink.link().del_with_message(message.build()).execute().await?;
        }
        netlink.link().set(message(port, &added).build()).execute().await
    }
}

fn message(port: u32, vlans: &[(u16, BridgeVlanInfoFlags)]) -> LinkMessageBuilder<LinkBridgeVlan> {
    let message = LinkBridgeVlan::new(port);
    vlans.iter().fold(message, |message, (vlan, flags)| message.vlan(*vlan, *flags))
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::AddressFamily;
    use rtnetlink::packet_route::link::{AfSpecBridge, BridgeVlanInfo};

    use super::*;

    #[test]
    fn a_bridge_tells_whether_it_filters() {
        let mut link = LinkMessage::default();
        link.header.index = 7;
        assert_eq!(Bridge::of(&link), Bridge { index: 7, ..Bridge::default() });
        let facts = vec![InfoBridge::VlanFiltering(true), InfoBridge::VlanDefaultPvid(1)];
        let info = LinkInfo::Data(InfoData::Bridge(facts));
        link.attributes.push(LinkAttribute::LinkInfo(vec![info]));
        let bridge = Bridge { index: 7, filters_vlans: true, default_vlan: 1 };
        assert_eq!(Bridge::of(&link), bridge);
    }

    #[test]
    fn a_port_is_in_its_vlans_alone() {
        let access = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
        let none = BridgeVlanInfoFlags::empty();
        let port = |untagged, tagged: &[u16]| PortVlans { untagged, tagged: tagged.to_vec() };
        for (port, default, added, removed) in [
            (port(Some(20), &[]), 1, vec![(20, access)], Some(1)),
            (port(Some(1), &[]), 1, vec![(1, access)], None),
            (port(Some(20), &[1, 30]), 1, vec![(20, access), (1, none), (30, none)], None),
            // A trunk alone takes no untagged frames.
            (port(None, &[10]), 1, vec![(10, none)], Some(1)),
            (port(Some(20), &[]), 0, vec![(20, access)], None),
        ] {
            assert_eq!(port.changes(default), (added, removed), "{port:?}");
        }
    }

    #[test]
    fn the_kernel_gets_all_vlans_of_a_port() {
        let flags = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
        let message = message(3, &[(20, flags), (30, BridgeVlanInfoFlags::empty())]).build();
        assert_eq!(message.header.interface_family, AddressFamily::Bridge);
        assert_eq!(message.header.index, 3);
        let vlan = |vid, flags| AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid });
        let vlans = vec![vlan(20, flags), vlan(30, BridgeVlanInfoFlags::empty())];
        assert!(
            message.attributes.contains(&LinkAttribute::AfSpecBridge(vlans)),
            "{:?}",
            message.attributes
        );
    }
}
