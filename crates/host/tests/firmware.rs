//! UEFI firmware on a host: images that are missing or of another size, and the variables' file.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use godwit_api::{ApiError, Client, ClientError, CreateVm, ErrorCode, StopVm};
use godwit_qemu::{AccelProbe, Firmware, FirmwareImages, VmSpec};
use serde_json::{Value, json};
use support::TestHost;

/// A host whose firmware consists of images of these sizes.
fn host_with(code_bytes: usize, variables_bytes: usize) -> Option<TestHost> {
    let mut host = TestHost::new()?;
    let make = |name: &str, bytes| {
        let path = host.path().join(name);
        fs::write(&path, vec![0xff; bytes]).unwrap();
        path
    };
    let (code, variables) = (make("code.fd", code_bytes), make("vars.fd", variables_bytes));
    host.config.firmware.uefi = Some(FirmwareImages { code, variables });
    Some(host)
}

fn spec(host: &TestHost) -> VmSpec {
    VmSpec { firmware: Firmware::Uefi, ..host.spec("web") }
}

fn variables(host: &TestHost) -> PathBuf {
    host.config.state_dir.join("vms/web/uefi.variables")
}

fn refusal<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> ApiError {
    match answer.unwrap_err() {
        ClientError::Refused(error) => error,
        error => panic!("{error}"),
    }
}

fn create(spec: VmSpec) -> CreateVm {
    CreateVm::new(spec, false)
}

#[test]
fn a_missing_image_is_refused_at_creation_with_the_remedy() {
    let Some(mut host) = host_with(8192, 4096) else { return };
    fs::remove_file(host.path().join("code.fd")).unwrap();
    host.config.networks.clear();
    host.with_agent(async |client| {
        let error = refusal(client.create_vm(&create(spec(&host))).await);
        assert_eq!(error.code, ErrorCode::NotFound);
        assert!(error.message.contains("code.fd") && error.remedy.contains("ovmf"), "{error}");
        assert!(client.vms().await.unwrap().is_empty());
    });
}

#[test]
fn variables_are_a_file_of_the_vm() {
    let Some(host) = host_with(8192, 4096) else { return };
    host.with_agent(async |client| {
        client.create_vm(&create(spec(&host))).await.unwrap();
        client.start_vm("web").await.unwrap();
        assert_eq!(fs::read(variables(&host)).unwrap(), vec![0xff; 4096]);
        let mode = fs::metadata(variables(&host)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let stop = StopVm { force: true, grace_ms: None };
        client.stop_vm("web", stop).await.unwrap();
        // The template changes nothing for a VM that has variables, unless its size does.
        fs::write(variables(&host), vec![0x11; 4096]).unwrap();
        client.start_vm("web").await.unwrap();
        client.stop_vm("web", stop).await.unwrap();
        assert_eq!(fs::read(variables(&host)).unwrap(), vec![0x11; 4096]);
        fs::write(host.path().join("vars.fd"), vec![0xff; 8192]).unwrap();
        let error = refusal(client.start_vm("web").await);
        assert!(error.message.contains("8192") && error.message.contains("4096"), "{error}");
        client.delete_vm("web").await.unwrap();
        assert!(!variables(&host).exists());
    });
}

#[test]
fn a_destination_with_other_images_refuses_before_anything_starts() {
    let Some(host) = host_with(8192, 4096) else { return };
    host.with_agent(async |client| {
        let qemu = godwit_qemu::inspect(&host.config.qemu, None).await.unwrap();
        let probe = AccelProbe { kvm: false, reason: String::new() };
        let spec = spec(&host).resolve(&qemu, &probe).unwrap();
        let ask = async |client: &Client, firmware: Value| {
            let mut incoming = json!({
                "spec": &spec, "incarnation": "00000000000000000000000000000007", "epoch": 2,
                "from": "b", "qemu_version": qemu.version_text(), "engine": "godwit",
            });
            incoming["firmware"] = firmware;
            client.post::<_, Value>("/v1/incoming/checks", &incoming).await
        };
        let sizes = |code, variables| json!({ "code_bytes": code, "variables_bytes": variables });
        let error = refusal(ask(&client, sizes(12288, 4096)).await);
        for part in ["12288", "8192", "host b", "host a", "code.fd"] {
            assert!(error.code == ErrorCode::Preflight && error.message.contains(part), "{error}");
        }
        let error = refusal(ask(&client, sizes(8192, 8192)).await);
        assert!(error.message.contains("variables"), "{error}");
        assert_eq!(refusal(ask(&client, Value::Null).await).code, ErrorCode::Preflight);
    });
}
