//! Settings for cloud-init from options.

use std::io::Read;
use std::path::Path;

use godwit_qemu::{GuestNetwork, MOST_USER_DATA_BYTES};
use serde_json::{Map, Value, json};

use crate::args::CloudInitArgs;
use crate::exit::{Exit, Failure};

/// Returns the keys of `cloud_init` that the options set; null if there are none.
pub(super) fn settings(options: &CloudInitArgs) -> Result<Value, Failure> {
    let mut settings = Map::new();
    let mut set = |key: &str, value: Value| {
        if !value.is_null() {
            settings.insert(key.to_owned(), value);
        }
    };
    let mut keys: Vec<String> = Vec::new();
    for path in &options.ssh_key {
        let text = read(path, "--ssh-key")?;
        let lines = text.lines().map(str::trim);
        keys.extend(
            lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned),
        );
    }
    let hash = options.password_hash.as_deref().map(|path| read(path, "--password-hash"));
    let data = options.user_data.as_deref().map(|path| read(path, "--user-data"));
    let networks = options.ip.iter().map(|text| network(text)).collect::<Result<Vec<_>, _>>()?;
    set("user", json!(options.user));
    set("ssh_keys", if options.ssh_key.is_empty() { Value::Null } else { json!(keys) });
    set("password_hash", json!(hash.transpose()?.map(|text| text.trim().to_owned())));
    set("hostname", json!(options.hostname));
    set("network", if networks.is_empty() { Value::Null } else { json!(networks) });
    set("user_data", json!(data.transpose()?));
    let is_used = options.cloud_init || !settings.is_empty();
    Ok(if is_used { Value::Object(settings) } else { Value::Null })
}

/// Reads a small text file; `-` is the standard input.
fn read(path: &Path, option: &str) -> Result<String, Failure> {
    let mut text = Vec::new();
    let most = MOST_USER_DATA_BYTES as u64 + 1;
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_end(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_end(&mut text))
    };
    read.map_err(|error| {
        let message = format!("cannot read {}: {error}", path.display());
        Failure::new(Exit::NotFound, message, format!("name an existing file with {option}"))
    })?;
    let wrong = |why: &str| {
        let message = format!("cannot use {}: {why}", path.display());
        Failure::usage(message, format!("give {option} a text file of at most 64 KiB"))
    };
    if text.len() > MOST_USER_DATA_BYTES {
        return Err(wrong("it has more than 64 KiB"));
    }
    String::from_utf8(text).map_err(|_| wrong("it is not UTF-8"))
}

fn network(text: &str) -> Result<GuestNetwork, Failure> {
    let wrong = |part: &str| {
        Failure::usage(
            format!("--ip {text}: \"{part}\" is not understood"),
            "use dhcp or ADDRESS/PREFIX[,ADDRESS/PREFIX][,gateway=IP][,dns=IP]",
        )
    };
    let mut network = GuestNetwork::default();
    if text == "dhcp" {
        return Ok(network);
    }
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("gateway", ip)) => network.gateways.push(ip.parse().map_err(|_| wrong(part))?),
            Some(("dns", ip)) => network.dns.push(ip.parse().map_err(|_| wrong(part))?),
            Some(_) => return Err(wrong(part)),
            None => network.addresses.push(part.parse().map_err(|_| wrong(part))?),
        }
    }
    Ok(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_settings() {
        assert_eq!(settings(&CloudInitArgs::default()).unwrap(), Value::Null);
        let only = CloudInitArgs { cloud_init: true, ..CloudInitArgs::default() };
        assert_eq!(settings(&only).unwrap(), json!({}));
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key.pub");
        std::fs::write(&key, "# mine\nssh-ed25519 AAAA me\n\nssh-rsa BBBB me\n").unwrap();
        let options = CloudInitArgs {
            user: Some("deploy".to_owned()),
            ssh_key: vec![key.clone()],
            ip: vec!["dhcp".to_owned(), "10.0.0.5/24,gateway=10.0.0.1,dns=10.0.0.2".to_owned()],
            ..CloudInitArgs::default()
        };
        let expected = json!({
            "user": "deploy", "ssh_keys": ["ssh-ed25519 AAAA me", "ssh-rsa BBBB me"],
            "network": [{}, { "addresses": ["10.0.0.5/24"], "gateways": ["10.0.0.1"],
                "dns": ["10.0.0.2"] }],
        });
        assert_eq!(settings(&options).unwrap(), expected);
    }

    #[test]
    fn wrong_files_and_addresses_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let large = dir.path().join("large");
        std::fs::write(&large, vec![b'a'; MOST_USER_DATA_BYTES + 1]).unwrap();
        for (path, word) in [(large, "64 KiB"), (dir.path().join("missing"), "missing")] {
            let options = CloudInitArgs { user_data: Some(path), ..CloudInitArgs::default() };
            let failure = settings(&options).unwrap_err();
            assert!(failure.fault.message.contains(word), "{failure}");
        }
        for text in ["10.0.0.5", "10.0.0.5/24,gw=10.0.0.1", "DHCP", ""] {
            assert!(network(text).is_err(), "{text}");
        }
    }
}
