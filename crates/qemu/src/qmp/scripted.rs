//! A scripted QEMU for tests of the client.

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::Qmp;

pub(crate) const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": ["oob"], "later": {}}}"#;

/// The peer of a connection after its negotiation.
pub(crate) struct FakeQemu {
    pub(crate) stream: BufReader<UnixStream>,
}

impl FakeQemu {
    pub(crate) async fn connected() -> (Qmp, FakeQemu) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut fake = FakeQemu { stream: BufReader::new(theirs) };
        let negotiate = tokio::spawn(Qmp::negotiate(ours));
        fake.send(GREETING).await;
        let request = fake.read().await;
        assert_eq!(request["execute"], "qmp_capabilities");
        fake.send(r#"{"event": "EARLY", "timestamp": {"seconds": 1, "microseconds": 2}}"#).await;
        fake.return_empty(&request).await;
        (negotiate.await.unwrap().unwrap(), fake)
    }

    pub(crate) async fn send(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
    }

    pub(crate) async fn read(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    pub(crate) async fn return_empty(&mut self, request: &Value) {
        self.send(&json!({"return": {}, "id": request["id"]}).to_string()).await;
    }

    /// Answers requests until the client closes the connection. `answer` returns a result or the
    /// description of an error.
    pub(crate) async fn answer_all(
        &mut self,
        mut answer: impl FnMut(&Value) -> Result<Value, &'static str>,
    ) {
        let mut line = String::new();
        while self.stream.read_line(&mut line).await.unwrap() > 0 {
            let request: Value = serde_json::from_str(&line).unwrap();
            let response = match answer(&request) {
                Ok(value) => json!({"return": value, "id": request["id"]}),
                Err(desc) => {
                    let error = json!({"class": "GenericError", "desc": desc});
                    json!({"error": error, "id": request["id"]})
                }
            };
            self.send(&response.to_string()).await;
            line.clear();
        }
    }
}
