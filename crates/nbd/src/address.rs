//! Addresses of exports.

use std::path::PathBuf;

/// Default port.
const PORT: u16 = 10809;
/// Longest name of an export.
const MOST_NAME_BYTES: usize = 1024;

/// Where an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// Name or address of a host, and its port.
    Tcp(String, u16),
    Unix(PathBuf),
}

/// Parses `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`; returns where the
/// export is, and its name. `None`: it is neither.
#[must_use]
pub fn parse_nbd(uri: &str) -> Option<(NbdAddress, String)> {
    if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
        let (name, socket) = rest.split_once("?socket=")?;
        let (name, socket) = (decoded(name)?, PathBuf::from(decoded(socket)?));
        return socket.is_absolute().then_some((NbdAddress::Unix(socket), name));
    }
    let rest = uri.strip_prefix("nbd://")?;
    let (place, name) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = match place.strip_prefix('[') {
        Some(v6) => {
            let (host, port) = v6.split_once(']')?;
            (host, port.strip_prefix(':'))
        }
        None => match place.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let port = port.map_or(Some(PORT), |port| port.parse().ok())?;
    let is_host = |c: char| c.is_ascii_alphanumeric() || ".-:%".contains(c);
    let is_good = !host.is_empty() && host.chars().all(is_host);
    is_good.then_some((NbdAddress::Tcp(host.to_owned(), port), decoded(name)?))
}

/// Decodes `%20` and the like; `None` if that is no name or path.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at_checked(2)?;
        if !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend(rest.as_bytes());
    }
    let text = String::from_utf8(bytes).ok()?;
    let is_good = text.len() <= MOST_NAME_BYTES && !text.chars().any(char::is_control);
    is_good.then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        let tcp = |host: &str, port| NbdAddress::Tcp(host.to_owned(), port);
        let found = |text| parse_nbd(text).unwrap();
        assert_eq!(found("nbd://10.0.0.5/web"), (tcp("10.0.0.5", PORT), "web".to_owned()));
        assert_eq!(found("nbd://esx.lan:1234"), (tcp("esx.lan", 1234), String::new()));
        assert_eq!(found("nbd://[fd00::5]:1/a%20b"), (tcp("fd00::5", 1), "a b".to_owned()));
        let unix = NbdAddress::Unix("/run/nbd.sock".into());
        assert_eq!(found("nbd+unix:///web?socket=/run/nbd.sock"), (unix, "web".to_owned()));
        for wrong in [
            "nbd://",
            "nbd://a b/x",
            "nbd+unix:///x",
            "http://a/",
            "/srv/a.img",
            "nbd+unix:///x?socket=relative",
            "nbd://a:99999/x",
            "nbd://a/50%",
            "nbd://a/%+5",
            "nbd://a/%ff",
            "nbd://a/%0a",
        ] {
            assert_eq!(parse_nbd(wrong), None, "{wrong}");
        }
    }
}
