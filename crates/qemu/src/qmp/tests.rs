//! Tests of the client against a scripted QEMU.

use std::os::fd::AsFd;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

use super::scripted::FakeQemu;
use super::*;

#[tokio::test]
async fn events_and_unknown_messages_may_come_between() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let mut events = qmp.events();
    let call = tokio::spawn(async move { qmp.execute("query-status", Value::Null).await });
    let request = fake.read().await;
    assert!(request.get("arguments").is_none());
    fake.send(r#"{"event": "NEVER_HEARD_OF", "data": {"deep": [1, {"x": null}]}}"#).await;
    fake.send(r#"{"some": "thing new"}"#).await;
    fake.send(r#"{"return": {}, "id": 99999}"#).await;
    fake.send(
        &json!({"return": {"status": "running"}, "id": request["id"], "extra": 1}).to_string(),
    )
    .await;
    assert_eq!(call.await.unwrap().unwrap(), json!({"status": "running"}));
    assert_eq!(events.recv().await.unwrap().name, "NEVER_HEARD_OF");
}

#[tokio::test]
async fn responses_in_any_order_reach_their_command() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let other = qmp.clone();
    let first = tokio::spawn(async move { qmp.execute("one", json!({"a": 1})).await });
    let one = fake.read().await;
    let second = tokio::spawn(async move { other.execute("two", Value::Null).await });
    let two = fake.read().await;
    assert_eq!(one["arguments"], json!({"a": 1}));
    fake.send(&json!({"return": 2, "id": two["id"]}).to_string()).await;
    fake.send(&json!({"return": 1, "id": one["id"]}).to_string()).await;
    assert_eq!(first.await.unwrap().unwrap(), 1);
    assert_eq!(second.await.unwrap().unwrap(), 2);
}

#[tokio::test]
async fn a_refusal_names_the_command() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let call = tokio::spawn(async move { qmp.execute("migrate", Value::Null).await });
    let request = fake.read().await;
    let error =
        json!({"error": {"class": "GenericError", "desc": "no such thing"}, "id": request["id"]});
    fake.send(&error.to_string()).await;
    let error = call.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "QEMU refuses migrate: no such thing");
}

#[tokio::test]
async fn the_end_of_the_connection_reaches_all_callers() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let caller = qmp.clone();
    let call = tokio::spawn(async move { caller.execute("stop", Value::Null).await });
    fake.read().await;
    fake.stream.write_all(b"{\"return\": {").await.unwrap();
    drop(fake);
    assert_eq!(call.await.unwrap().unwrap_err().code(), "qmp-closed");
    assert_eq!(qmp.closed().await, "QEMU closed it");
    assert!(qmp.is_closed());
    assert_eq!(qmp.execute("cont", Value::Null).await.unwrap_err().code(), "qmp-closed");
}

#[tokio::test]
async fn waiting_for_an_event_ends_with_the_connection() {
    let (qmp, fake) = FakeQemu::connected().await;
    let mut events = qmp.events();
    drop(fake);
    let error =
        wait_for_event(&mut events, "STOP", Duration::from_secs(60), |_| true).await.unwrap_err();
    assert_eq!(error.code(), "qmp-closed");
    qmp.closed().await;
    assert!(qmp.events().recv().await.is_err());
}

#[tokio::test]
async fn invalid_qmp_ends_the_connection() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    fake.send("HTTP/1.1 400 Bad Request").await;
    assert!(qmp.closed().await.contains("HTTP/1.1"));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut fake = FakeQemu { stream: BufReader::new(theirs) };
    fake.send(r#"{"event": "STOP"}"#).await;
    assert_eq!(Qmp::negotiate(ours).await.unwrap_err().code(), "qmp-protocol");
}

#[tokio::test]
async fn the_length_of_a_line_is_bounded() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let flood = tokio::spawn(async move {
        let block = vec![b' '; 1 << 20];
        while fake.stream.write_all(&block).await.is_ok() {}
    });
    assert!(qmp.closed().await.contains("a line of more than"));
    drop(qmp);
    flood.await.unwrap();
}

#[tokio::test]
async fn long_and_joined_lines_are_split_at_their_ends() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let mut events = qmp.events();
    let call = tokio::spawn(async move { qmp.execute("query-qmp-schema", Value::Null).await });
    let id = fake.read().await["id"].clone();
    let long = "x".repeat(900_000);
    let text = format!("{{\"return\": \"{long}\", \"id\": {id}}}\r\n{{\"event\": \"B\"}}\r\n");
    for piece in text.as_bytes().chunks(70_001) {
        fake.stream.write_all(piece).await.unwrap();
        fake.stream.flush().await.unwrap();
    }
    assert_eq!(call.await.unwrap().unwrap().as_str().unwrap().len(), 900_000);
    assert_eq!(events.recv().await.unwrap().name, "B");
}

#[tokio::test]
async fn an_event_that_is_too_long_to_keep_is_dropped() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let mut events = qmp.events();
    fake.send(
        &json!({"event": "LONG", "data": {"t": "x".repeat(LONGEST_EVENT_BYTES)}}).to_string(),
    )
    .await;
    // Short as text, but large as values.
    fake.send(
        &json!({"event": "MANY", "data": {"t": vec![json!({"": 0}); MOST_EVENT_VALUES]}})
            .to_string(),
    )
    .await;
    fake.send(r#"{"event": "SHORT"}"#).await;
    assert_eq!(events.recv().await.unwrap().name, "SHORT");
}

#[tokio::test]
async fn the_newest_unread_events_are_kept() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let mut events = qmp.events();
    for _ in 0..4 * EVENTS_KEPT {
        fake.send(r#"{"event": "FLOOD"}"#).await;
    }
    // When this is answered, what comes after them has been read.
    let call = tokio::spawn(async move { qmp.execute("quick", Value::Null).await });
    let quick = fake.read().await;
    fake.return_empty(&quick).await;
    call.await.unwrap().unwrap();
    assert!(matches!(events.recv().await, Err(broadcast::error::RecvError::Lagged(_))));
    let mut kept = 0;
    while events.try_recv().is_ok() {
        kept += 1;
    }
    assert_eq!(kept, EVENTS_KEPT);
}

#[tokio::test]
async fn refused_writes_of_a_copy_take_the_place_of_no_other_event() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let mut events = qmp.events();
    fake.send(r#"{"event": "BEFORE"}"#).await;
    for _ in 0..4 * EVENTS_KEPT {
        fake.send(r#"{"event": "BLOCK_JOB_ERROR"}"#).await;
    }
    fake.send(r#"{"event": "AFTER"}"#).await;
    assert_eq!(events.recv().await.unwrap().name, "BEFORE");
    assert_eq!(events.recv().await.unwrap().name, "AFTER");
}

#[tokio::test]
async fn a_command_without_a_response_times_out() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let error =
        qmp.execute_within("slow", Value::Null, Duration::from_millis(1)).await.unwrap_err();
    assert_eq!(error.code(), "qmp-timeout");
    // Its late response is dropped, and the connection still works.
    let slow = fake.read().await;
    fake.return_empty(&slow).await;
    let call = tokio::spawn(async move { qmp.execute("quick", Value::Null).await });
    let quick = fake.read().await;
    fake.return_empty(&quick).await;
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_descriptor_travels_with_its_command() {
    let (qmp, fake) = FakeQemu::connected().await;
    let (mut left, right) = std::io::pipe().unwrap();
    let call = tokio::spawn(async move {
        let result = qmp.execute_with_fd("getfd", json!({"fdname": "m"}), right.as_fd()).await;
        (qmp, result)
    });
    let stream = fake.stream.into_inner();
    let mut bytes = [0; 4096];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let length = stream
        .async_io(Interest::READABLE, || {
            let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
            Ok(rustix::net::recvmsg(
                &stream,
                &mut parts,
                &mut control,
                rustix::net::RecvFlags::empty(),
            )?
            .bytes)
        })
        .await
        .unwrap();
    let request: Value = serde_json::from_slice(&bytes[..length]).unwrap();
    let mut fds = Vec::new();
    for message in control.drain() {
        if let rustix::net::RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    assert_eq!(fds.len(), 1);
    let mut fake = FakeQemu { stream: BufReader::new(stream) };
    fake.return_empty(&request).await;
    let (_qmp, result) = call.await.unwrap();
    result.unwrap();
    // The caller's own descriptor is gone with its task; the pipe still works through the passed
    // one.
    rustix::io::write(&fds[0], b"hi").unwrap();
    drop(fds);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut left, &mut text).unwrap();
    assert_eq!(text, "hi");
}

#[tokio::test]
async fn the_connection_ends_with_its_last_owner() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    drop(qmp.clone());
    drop(qmp);
    let mut line = String::new();
    assert_eq!(fake.stream.read_line(&mut line).await.unwrap(), 0);
}

#[tokio::test]
async fn an_absent_monitor_is_named() {
    let error = Qmp::connect("/nowhere/qmp.sock").await.unwrap_err();
    assert_eq!(error.code(), "qmp-unreachable");
    assert!(error.to_string().contains("/nowhere/qmp.sock"));
}

/// Answers commands like a QEMU that has not finalized its migration: refuses `cont` `refusals`
/// times, then answers by the state.
async fn answer_cont(mut fake: FakeQemu, refusals: usize, state: &str) -> (FakeQemu, usize) {
    let mut asked = 0;
    loop {
        let request = fake.read().await;
        if request["execute"] == "query-status" {
            let answer = json!({
                "return": {"status": state, "running": state == "running"}, "id": request["id"],
            });
            fake.send(&answer.to_string()).await;
            return (fake, asked);
        }
        assert_eq!(request["execute"], "cont");
        asked += 1;
        if asked <= refusals {
            let error = json!({"class": "GenericError", "desc": "Migration is not finalized yet"});
            fake.send(&json!({"error": error, "id": request["id"]}).to_string()).await;
        } else {
            fake.return_empty(&request).await;
        }
    }
}

#[tokio::test]
async fn a_guest_is_resumed_when_qemu_has_finished_its_migration() {
    for refusals in [0, 1, 5] {
        let (qmp, fake) = FakeQemu::connected().await;
        let answering = tokio::spawn(answer_cont(fake, refusals, "running"));
        qmp.resume().await.unwrap();
        assert_eq!(answering.await.unwrap().1, refusals + 1);
    }
}

#[tokio::test]
async fn a_qemu_that_never_finishes_its_migration_is_named_in_the_error() {
    let (qmp, fake) = FakeQemu::connected().await;
    let answering = tokio::spawn(answer_cont(fake, usize::MAX, "running"));
    let error = qmp.resume_within(Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(error.code(), "qmp-not-resumed");
    assert!(error.to_string().contains("Migration is not finalized yet"), "{error}");
    answering.abort();
}

#[tokio::test]
async fn a_guest_that_stays_paused_after_cont_is_not_resumed() {
    for (state, is_running) in [("paused", false), ("finish-migrate", false), ("io-error", true)] {
        let (qmp, fake) = FakeQemu::connected().await;
        let answering = tokio::spawn(answer_cont(fake, 0, state));
        match qmp.resume().await {
            Ok(()) => assert!(is_running, "{state}"),
            Err(error) => assert!(!is_running && error.to_string().contains(state), "{error}"),
        }
        drop(answering.await.unwrap());
    }
}

#[tokio::test]
async fn other_refusals_are_not_retried() {
    let (qmp, mut fake) = FakeQemu::connected().await;
    let call = tokio::spawn(async move { qmp.resume().await });
    let request = fake.read().await;
    let error = json!({"class": "GenericError", "desc": "Failed to get \"write\" lock"});
    fake.send(&json!({"error": error, "id": request["id"]}).to_string()).await;
    assert_eq!(call.await.unwrap().unwrap_err().code(), "qmp-command");
}

#[tokio::test]
async fn a_shutdown_by_the_guest_is_known_before_what_follows_it() {
    let shutdown = |guest| {
        json!({"event": "SHUTDOWN", "data": {"guest": guest, "reason": "x"},
            "timestamp": {"seconds": 1, "microseconds": 2}})
        .to_string()
    };
    let (qmp, mut fake) = FakeQemu::connected().await;
    let asking = qmp.clone();
    fake.send(&shutdown(false)).await;
    let call = tokio::spawn(async move { asking.execute("query-status", Value::Null).await });
    let request = fake.read().await;
    assert!(!qmp.guest_has_shut_down(), "that is QEMU's own end");
    fake.send(&shutdown(true)).await;
    fake.return_empty(&request).await;
    call.await.unwrap().unwrap();
    assert!(qmp.guest_has_shut_down());
    // Later events of QEMU do not revoke it.
    fake.send(&shutdown(false)).await;
    qmp.until_guest_shuts_down().await;
    drop(fake);
    qmp.closed().await;
    assert!(qmp.guest_has_shut_down());
}

#[tokio::test]
async fn a_crash_is_known_after_the_end_of_qemu() {
    let event = |name: &str, data: Value| {
        json!({"event": name, "data": data, "timestamp": {"seconds": 1, "microseconds": 2}})
            .to_string()
    };
    for (name, data, expected) in [
        ("GUEST_PANICKED", json!({"action": "poweroff"}), Some(CrashSign::Panic)),
        ("GUEST_PANICKED", json!({"action": "pause"}), None),
        ("GUEST_PANICKED", json!({"action": "run"}), None),
        ("WATCHDOG", json!({"action": "poweroff"}), Some(CrashSign::Watchdog)),
        ("WATCHDOG", json!({"action": "reset"}), None),
        ("SHUTDOWN", json!({"guest": true, "reason": "guest-shutdown"}), None),
    ] {
        let (qmp, mut fake) = FakeQemu::connected().await;
        assert_eq!(qmp.crash(), None);
        fake.send(&event(name, data)).await;
        drop(fake);
        qmp.closed().await;
        assert_eq!(qmp.crash(), expected, "{name}");
    }
}
