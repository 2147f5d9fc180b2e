//! Heartbeats of other hosts that an agent reads and opens for the manager.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;

use godwit_api::{
    Client, ClientError, ErrorCode, HeartbeatReading, HeartbeatSlot, MOST_HEARTBEATS_READ,
    OpenHeartbeat, ReadHeartbeats,
};
use godwit_qemu::Uuid;
use support::{TestHost, until};

fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> ErrorCode {
    match answer.unwrap_err() {
        ClientError::Refused(error) => error.code,
        error => panic!("{error}"),
    }
}

/// Waits until the agent knows its datastore, and returns the datastore's identity.
async fn datastore(client: &Client, host: &TestHost) -> Uuid {
    let mut found = None;
    until("the datastore's identity", async || {
        let info = client.host().await.unwrap();
        let own = info.datastores.get(host.path());
        found = own.and_then(|own| own.identity.as_ref()?.parse().ok());
        found.is_some()
    })
    .await;
    found.unwrap()
}

#[test]
fn an_agent_reads_and_opens_heartbeats_on_its_own_datastores() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let datastore = datastore(&client, &host).await;
        let slot = HeartbeatSlot { cluster: Uuid::new_v4(), host: Uuid::new_v4(), datastore };
        let elsewhere = HeartbeatSlot { datastore: Uuid::new_v4(), ..slot };
        let open = |slot, term| OpenHeartbeat { slot, term };
        assert_eq!(code(client.ha_open_heartbeat(&open(slot, 0)).await), ErrorCode::InvalidRequest);
        let answer = client.ha_open_heartbeat(&open(elsewhere, 1)).await;
        assert_eq!(code(answer), ErrorCode::NotFound);
        assert!(!host.path().join(".godwit").exists(), "nothing is made for a wrong request");

        client.ha_open_heartbeat(&open(slot, 2)).await.unwrap();
        client.ha_open_heartbeat(&open(slot, 2)).await.unwrap();
        assert_eq!(code(client.ha_open_heartbeat(&open(slot, 1)).await), ErrorCode::WrongState);
        let folder = host.path().join(".godwit/heartbeats").join(slot.cluster.to_string());
        assert_eq!(fs::metadata(folder.join(slot.host.to_string())).unwrap().len(), 4096);

        let request = ReadHeartbeats { slots: vec![elsewhere, slot] };
        let readings = client.ha_read_heartbeats(&request).await.unwrap();
        assert!(matches!(readings[0], HeartbeatReading::Failed { .. }), "{readings:?}");
        assert_eq!(readings[1], HeartbeatReading::Block { term: 2, sequence: 0 });
        let most = ReadHeartbeats { slots: vec![slot; MOST_HEARTBEATS_READ] };
        let readings = client.ha_read_heartbeats(&most).await.unwrap();
        assert_eq!(readings, vec![readings[0].clone(); MOST_HEARTBEATS_READ]);
        let more = ReadHeartbeats { slots: vec![slot; MOST_HEARTBEATS_READ + 1] };
        assert_eq!(code(client.ha_read_heartbeats(&more).await), ErrorCode::InvalidRequest);
        // The files are no images.
        let disks = client.disks().await.unwrap();
        assert!(!serde_json::to_string(&disks).unwrap().contains("heartbeats"), "{disks:?}");
    });
}
