//! An honest agent, and agents that lie.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixListener;

use super::*;

/// Serves each session with `answer`, which gets the command and its arguments and returns the line
/// to send, if any.
fn serve(
    answer: impl Fn(&str, &Value) -> Option<Vec<u8>> + Send + 'static,
) -> (tempfile::TempDir, GuestAgent) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join(GUEST_AGENT_SOCKET);
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (read, mut write) = stream.into_split();
            let mut read = BufReader::new(read);
            let mut line = Vec::new();
            while read.read_until(b'\n', &mut line).await.is_ok_and(|count| count > 0) {
                let start = line.iter().rposition(|byte| *byte == DELIMITER).map_or(0, |at| at + 1);
                let message: Value = serde_json::from_slice(&line[start..]).unwrap();
                let command = message["execute"].as_str().unwrap();
                if let Some(mut sent) = answer(command, &message["arguments"]) {
                    sent.push(b'\n');
                    // The client may be gone.
                    let _ = write.write_all(&sent).await;
                }
                line.clear();
            }
        }
    });
    (dir, GuestAgent::new(socket))
}

fn returns(value: impl Into<Value>) -> Option<Vec<u8>> {
    let value: Value = value.into();
    Some(json!({ "return": value }).to_string().into_bytes())
}

fn synchronized(arguments: &Value) -> Option<Vec<u8>> {
    let mut sent = vec![DELIMITER];
    sent.extend(returns(arguments["id"].clone())?);
    Some(sent)
}

fn honest(command: &str, arguments: &Value) -> Option<Vec<u8>> {
    match command {
        "guest-sync-delimited" => {
            // An answer that an earlier client did not read.
            let mut sent = b"{\"return\": 5}\n\xff{\"return\": 1}\n".to_vec();
            sent.extend(synchronized(arguments)?);
            Some(sent)
        }
        "guest-info" => returns(json!({ "version": "8.0.0", "supported_commands": [] })),
        "guest-get-host-name" => returns(json!({ "host-name": "web\u{1b}[2J\u{202e}-1" })),
        "guest-get-osinfo" => returns(json!({ "name": "Debian", "version": "12" })),
        "guest-network-get-interfaces" => returns(json!([
            { "name": "lo", "ip-addresses": [{ "ip-address": "127.0.0.1", "prefix": 8 }] },
            { "name": "eth0", "hardware-address": "52:54:00:00:00:01", "ip-addresses": [
                { "ip-address-type": "ipv4", "ip-address": "10.0.0.5", "prefix": 24 },
                { "ip-address-type": "ipv4", "ip-address": "10.0.0.6", "prefix": 33 },
                { "ip-address-type": "ipv4", "ip-address": "<b>", "prefix": 24 },
            ]},
        ])),
        "guest-shutdown" => None,
        "guest-fsfreeze-freeze" => returns(json!(2)),
        "guest-fsfreeze-thaw" => returns(json!(0)),
        "guest-fsfreeze-status" => returns(json!("frozen")),
        _ => Some(b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"a\"}}".to_vec()),
    }
}

#[tokio::test]
async fn an_agent_is_asked_for_facts() {
    let (_dir, agent) = serve(honest);
    let facts = agent.facts().await.unwrap();
    assert_eq!(facts.agent_version.as_deref(), Some("8.0.0"));
    assert_eq!(facts.host_name.as_deref(), Some("web[2J-1"));
    assert_eq!((facts.os.as_deref(), &facts.kernel), (Some("Debian 12"), &None));
    let [eth0] = &facts.interfaces[..] else { panic!("{facts:?}") };
    assert_eq!(eth0.addresses, [("10.0.0.5".parse().unwrap(), 24)]);
    agent.shut_down().await.unwrap();
    assert_eq!(agent.freeze().await, Ok(2));
    assert!(agent.is_frozen().await.unwrap());
    agent.thaw().await.unwrap();
    let error = agent.correct_clock().await.unwrap_err();
    assert_eq!(error, GuestAgentError::Refused { command: "guest-get-time" });
}

#[tokio::test]
async fn a_wrong_clock_is_set() {
    for (offset_s, is_wrong) in [(0_i64, false), (-7, true), (7, true)] {
        let set = Arc::new(AtomicU64::new(0));
        let seen = set.clone();
        let (_dir, agent) = serve(move |command, arguments| match command {
            "guest-sync-delimited" => synchronized(arguments),
            "guest-get-time" => {
                let now = i64::try_from(since_1970().as_nanos()).unwrap();
                returns(json!(now + offset_s * 1_000_000_000))
            }
            "guest-set-time" => {
                seen.store(arguments["time"].as_u64().unwrap(), Ordering::SeqCst);
                returns(json!({}))
            }
            other => panic!("{other}"),
        });
        let before = since_1970();
        assert_eq!(agent.correct_clock().await, Ok(is_wrong));
        let set = Duration::from_nanos(set.load(Ordering::SeqCst));
        assert_eq!(!set.is_zero(), is_wrong);
        assert!(!is_wrong || (before..=since_1970()).contains(&set));
    }
}

/// A liar: it synchronizes, and then sends anything.
async fn lied_to(lie: Vec<u8>) -> Result<GuestFacts, GuestAgentError> {
    let (_dir, agent) = serve(move |command, arguments| match command {
        "guest-sync-delimited" => synchronized(arguments),
        _ => Some(lie.clone()),
    });
    agent.facts().await
}

#[tokio::test]
async fn a_liar_is_not_believed_and_costs_little() {
    let garbage = GuestAgentError::Garbage { command: "guest-info" };
    for lie in [
        b"{}".to_vec(),
        b"[1]".to_vec(),
        b"{\"return\": 1, \"error\": {}}".to_vec(),
        b"\xff\xfe".to_vec(),
        b"[".repeat(100_000),
        // Without end, as far as the client reads.
        vec![b'x'; 2 * MOST_LINE_BYTES],
    ] {
        assert_eq!(lied_to(lie).await, Err(garbage));
    }
    // Of the right form, and of wrong types.
    let facts = lied_to(b"{\"return\": [[], 7, {\"name\": 7}]}".to_vec()).await.unwrap();
    assert_eq!(facts, GuestFacts::default());
    let many = json!({ "name": "e".repeat(9000), "ip-addresses":
        vec![json!({ "ip-address": "::1", "prefix": 128 }); 40] });
    let found = interfaces(&json!(vec![many; 100]));
    assert_eq!(found.len(), 64);
    assert_eq!((found[0].name.len(), found[0].addresses.len()), (255, 32));
}

#[tokio::test]
async fn a_guest_without_an_agent_is_silent() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let agent = GuestAgent::new(socket.clone());
    assert_eq!(agent.freeze().await, Err(GuestAgentError::Unreachable));
    let listener = UnixListener::bind(&socket).unwrap();
    let error = agent.freeze().await.unwrap_err();
    assert_eq!(error, GuestAgentError::Silent);
    assert!(error.is_unsent());
    drop(listener);
    // Endless old answers are no synchronization.
    let (_dir, agent) = serve(|_, _| Some(b"\xff{\"return\": 0}\n".repeat(50_000)));
    assert_eq!(agent.facts().await, Err(GuestAgentError::Silent));
}

proptest! {
    #[test]
    fn no_text_of_a_guest_has_control_characters(sent in "\\PC*|[\\x00-\\x20\u{202e}a]{0,400}") {
        if let Some(text) = text(&json!(sent)) {
            let is_bad = |c: char| c.is_control() || c == '\u{202e}';
            prop_assert!(!text.chars().any(is_bad));
            prop_assert!(text.chars().count() <= 255);
        }
    }
}
