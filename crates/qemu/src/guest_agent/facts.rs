//! What a guest's agent says of the guest, cleaned and bounded.

use std::net::IpAddr;

use serde_json::Value;

/// Longest text that is kept, in characters: a host name has at most 253.
const MOST_TEXT_CHARS: usize = 255;
/// Most interfaces that are kept.
const MOST_INTERFACES: usize = 64;
/// Most addresses of an interface that are kept.
const MOST_ADDRESSES: usize = 32;

/// What a guest says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestFacts {
    /// Version of the agent.
    pub agent_version: Option<String>,
    pub host_name: Option<String>,
    /// Name and version of the operating system.
    pub os: Option<String>,
    /// Version of its kernel.
    pub kernel: Option<String>,
    /// Network interfaces, without the loopback.
    pub interfaces: Vec<GuestInterface>,
}

/// A network interface as the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestInterface {
    pub name: String,
    pub mac: Option<String>,
    /// Addresses, each with the length of its network's prefix.
    pub addresses: Vec<(IpAddr, u8)>,
}

/// Returns a text without the characters that could change how a terminal or a page shows it, cut
/// to a length; `None` if nothing is left.
pub(crate) fn text(value: &Value) -> Option<String> {
    let is_shown = |c: &char| {
        !c.is_control()
            && !matches!(
                *c,
                '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            )
    };
    let text: String = value.as_str()?.chars().filter(is_shown).take(MOST_TEXT_CHARS).collect();
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Returns the name of the operating system in an answer to `guest-get-osinfo`.
pub(crate) fn os_name(answer: &Value) -> Option<String> {
    text(&answer["pretty-name"]).or_else(|| {
        let name = text(&answer["name"]).or_else(|| text(&answer["id"]))?;
        Some(text(&answer["version"]).map_or(name.clone(), |version| format!("{name} {version}")))
    })
}

/// Returns the interfaces in an answer to `guest-network-get-interfaces`.
pub(crate) fn interfaces(answer: &Value) -> Vec<GuestInterface> {
    let all = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let kept = all.iter().filter_map(interface).filter(|interface| interface.name != "lo");
    kept.take(MOST_INTERFACES).collect()
}

fn interface(value: &Value) -> Option<GuestInterface> {
    let addresses = value["ip-addresses"].as_array().map(Vec::as_slice).unwrap_or_default();
    let address = |value: &Value| {
        let address: IpAddr = value["ip-address"].as_str()?.parse().ok()?;
        let prefix = u8::try_from(value["prefix"].as_u64()?).ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= most).then_some((address, prefix))
    };
    Some(GuestInterface {
        name: text(&value["name"])?,
        mac: text(&value["hardware-address"]),
        addresses: addresses.iter().filter_map(address).take(MOST_ADDRESSES).collect(),
    })
}
