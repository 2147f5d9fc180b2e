use proptest::prelude::*;

use super::*;
use crate::spec::{Backing, Firmware, MemoryBlock, VmSpec};
use crate::{Accelerator, ByteSize, Uuid};

fn spec(settings: &Value, nics: usize) -> ResolvedSpec {
    let nics: Vec<Value> = (0..nics)
        .map(|index| json!({ "network": "lan", "mac": format!("52:54:00:00:00:{index:02x}") }))
        .collect();
    serde_json::from_value(json!({
        "name": "web", "memory": [{ "size": "64MiB" }], "vcpus": 1, "cpu_model": "Westmere-v1",
        "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/k", "nics": nics,
        "cloud_init": settings, "uuid": Uuid::from_u128(7),
    }))
    .unwrap()
}

fn file(spec: &ResolvedSpec, name: &str) -> String {
    let mut files = seed_files(spec).into_iter();
    files.find(|file| file.name == name).unwrap_or_else(|| panic!("{name}")).content
}

/// Reads YAML that is also JSON.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text.strip_prefix("#cloud-config\n").unwrap_or(text)).unwrap()
}

#[test]
fn the_files_have_the_settings() {
    let settings = json!({
        "user": "deploy", "ssh_keys": ["ssh-ed25519 AAAA a\": b"],
        "password_hash": "$6$salt$0123456789abcdefghijkl",
        "network": [
            { "addresses": ["10.0.0.5/24", "fd00::5/64"], "gateways": ["10.0.0.1", "fd00::1"],
              "dns": ["10.0.0.2"] },
        ],
    });
    let spec = spec(&settings, 2);
    spec.validate().unwrap();
    assert!(file(&spec, "user-data").starts_with("#cloud-config\n{"));
    let expected = json!({
        "hostname": "web", "manage_etc_hosts": true, "user": "deploy",
        "password": "$6$salt$0123456789abcdefghijkl", "chpasswd": { "expire": false },
        "ssh_authorized_keys": ["ssh-ed25519 AAAA a\": b"],
    });
    assert_eq!(parsed(&file(&spec, "user-data")), expected);
    let meta = json!({
        "instance-id": "00000000-0000-0000-0000-000000000007", "local-hostname": "web"
    });
    assert_eq!(parsed(&file(&spec, "meta-data")), meta);
    let network = json!({ "version": 2, "ethernets": {
        "nic0": {
            "match": { "macaddress": "52:54:00:00:00:00" }, "dhcp4": false,
            "addresses": ["10.0.0.5/24", "fd00::5/64"],
            "routes": [{ "to": "0.0.0.0/0", "via": "10.0.0.1" },
                { "to": "::/0", "via": "fd00::1" }],
            "nameservers": { "addresses": ["10.0.0.2"] },
        },
        "nic1": { "match": { "macaddress": "52:54:00:00:00:01" }, "dhcp4": true },
    }});
    assert_eq!(parsed(&file(&spec, "network-config")), network);
}

#[test]
fn user_data_is_a_file_of_its_own() {
    let script = "#!/bin/sh\necho \"it's: here\"\n";
    let spec = spec(&json!({ "user_data": script, "hostname": "front" }), 0);
    assert_eq!(file(&spec, "user-data"), script);
    assert_eq!(parsed(&file(&spec, "vendor-data"))["hostname"], "front");
    assert_eq!(seed_files(&spec).len(), 3, "no network without a NIC");
}

#[test]
fn the_disk_is_a_file_system_with_the_same_bytes_every_time() {
    let largest = json!({
        "user_data": "\u{e4}".repeat(32 << 10),
        "ssh_keys": vec![format!("ssh-rsa {}", "\\".repeat(4000)); 32],
    });
    for settings in [json!({}), largest] {
        let spec = spec(&settings, 2);
        spec.validate().unwrap();
        let image = seed_image(&spec).unwrap().unwrap();
        assert_eq!(image.len(), SEED_BYTES);
        assert_eq!(seed_image(&spec).unwrap().unwrap(), image);
        assert_eq!(&image[43..54], b"CIDATA     ");
        let read = read_seed(Cursor::new(image)).unwrap();
        let expected: Vec<_> = seed_files(&spec)
            .into_iter()
            .map(|file| (file.name.to_owned(), file.content))
            .collect();
        assert_eq!(read, expected);
    }
    let none: ResolvedSpec = serde_json::from_value(json!({
        "name": "web", "memory": [{ "size": "64MiB" }], "vcpus": 1, "cpu_model": "a",
        "machine": "pc-q35-7.2", "accel": "tcg",
    }))
    .unwrap();
    assert!(seed_image(&none).unwrap().is_none());
    assert_eq!((none.accel, none.firmware), (Accelerator::Tcg, Firmware::Bios));
    assert_eq!(none.memory[0], MemoryBlock::shared(ByteSize::from_mib(64)));
    assert_eq!(none.memory[0].backing, Backing::Shared);
}

#[test]
fn the_open_disk_cannot_be_changed() {
    let opened = open_seed(&spec(&json!({ "user": "deploy" }), 0)).unwrap().unwrap();
    let mut head = [0; 64];
    assert_eq!(rustix::io::pread(&opened, &mut head[..], 0).unwrap(), 64);
    assert_eq!(&head[43..49], b"CIDATA");
    assert!(rustix::io::write(&opened, b"x").is_err());
    let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
    let written = std::fs::OpenOptions::new().write(true).open(link);
    assert!(written.and_then(|mut file| file.write_all(b"x")).is_err(), "it is sealed");
}

proptest! {
    /// Whatever is accepted comes out as it was given; the rest is refused.
    #[test]
    fn no_value_leaves_its_place(
        user in "\\PC{0,40}|[a-z_][a-z0-9_\\-.:{}\n\"']{0,20}",
        key in "ssh-rsa \\PC{0,60}|ssh-rsa [ -~\n\t]{0,60}",
        hostname in "[a-z0-9.\\-\n:#]{1,20}|\\PC{0,20}",
    ) {
        let value = json!({ "user": user, "ssh_keys": [key], "hostname": hostname });
        let spec = spec(&value, 0);
        let checked = VmSpec { uuid: None, ..spec.to_vm_spec() }.validate();
        if checked.is_ok() {
            let text = file(&spec, "user-data");
            prop_assert!(text.bytes().all(|byte| matches!(byte, b'\n' | b' '..=b'~')));
            let config = parsed(&text);
            prop_assert_eq!(&config["user"], &value["user"]);
            prop_assert_eq!(&config["ssh_authorized_keys"], &value["ssh_keys"]);
            prop_assert_eq!(&config["hostname"], &value["hostname"]);
        } else {
            prop_assert!(spec.validate().is_err());
        }
    }
}
