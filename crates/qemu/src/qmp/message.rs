//! Parser of one line of QMP. Pure.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// A line from QEMU.
#[derive(Debug, PartialEq)]
pub(crate) enum Message {
    /// The first line of a connection.
    Greeting,
    /// An asynchronous event.
    Event { name: String, data: Value, emitted: Option<Duration> },
    /// The response to a command: its return value, or class and description of its error.
    Answer { id: Option<u64>, result: Result<Value, (String, String)> },
    /// An object of an unknown kind, which later versions may send.
    Unknown,
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
    timestamp: Option<Timestamp>,
    // Without the default, a response of `null` would look like no response.
    #[serde(default, rename = "return", deserialize_with = "present")]
    returned: Option<Value>,
    error: Option<ErrorBody>,
    id: Option<Value>,
}

#[derive(Deserialize)]
struct Timestamp {
    seconds: i64,
    microseconds: i64,
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default)]
    class: String,
    #[serde(default)]
    desc: String,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Parses one line.
///
/// # Errors
/// The reason as text: the line is not a JSON object of QMP's forms.
pub(crate) fn parse(line: &[u8]) -> Result<Message, String> {
    let parsed: Line =
        serde_json::from_slice(line).map_err(|why| format!("it sent {}: {why}", shorten(line)))?;
    let id = parsed.id.as_ref().and_then(Value::as_u64);
    if let Some(error) = parsed.error {
        return Ok(Message::Answer { id, result: Err((error.class, error.desc)) });
    }
    if let Some(returned) = parsed.returned {
        return Ok(Message::Answer { id, result: Ok(returned) });
    }
    if let Some(name) = parsed.event {
        let emitted = parsed.timestamp.and_then(|stamp| {
            // QEMU writes -1 where the clock failed.
            let seconds = u64::try_from(stamp.seconds).ok()?;
            let microseconds = u64::try_from(stamp.microseconds).ok()?;
            Duration::from_secs(seconds).checked_add(Duration::from_micros(microseconds))
        });
        return Ok(Message::Event { name, data: parsed.data, emitted });
    }
    Ok(if parsed.greeting.is_some() { Message::Greeting } else { Message::Unknown })
}

/// Returns the start of a line for messages: untrusted input may be long.
pub(super) fn shorten(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned();
    format!("{text:?}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_qemu_are_classified() {
        assert_eq!(
            parse(br#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#),
            Ok(Message::Greeting)
        );
        let event =
            br#"{"timestamp": {"seconds": 5, "microseconds": 7}, "event": "STOP", "new-field": 1}"#;
        let emitted = Some(Duration::from_micros(5_000_007));
        assert_eq!(
            parse(event),
            Ok(Message::Event { name: "STOP".into(), data: Value::Null, emitted })
        );
        let clockless = br#"{"timestamp": {"seconds": -1, "microseconds": -1},
                "event": "X", "data": {"a": 1}}"#;
        let data = json!({"a": 1});
        assert_eq!(parse(clockless), Ok(Message::Event { name: "X".into(), data, emitted: None }));
        let answer = |id, result| Ok(Message::Answer { id, result });
        assert_eq!(parse(br#"{"return": {}, "id": 4}"#), answer(Some(4), Ok(json!({}))));
        assert_eq!(parse(br#"{"return": null, "id": 4}"#), answer(Some(4), Ok(Value::Null)));
        let error = br#"{"error": {"class": "GenericError", "desc": "no", "more": []}, "id": "x"}"#;
        assert_eq!(parse(error), answer(None, Err(("GenericError".into(), "no".into()))));
        assert_eq!(parse(br#"{"surprise": 1}"#), Ok(Message::Unknown));
        for bad in [&b"hello"[..], b"[]", b"", b"{\"return\": ", b"\xff\xff", b"{\"event\": 5}"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
