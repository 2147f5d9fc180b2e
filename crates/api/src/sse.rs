//! Parser of server-sent events: bytes in, events out, no I/O.
//! Format: the WHATWG HTML standard, section 9.2.

/// Limit of an event. A longer one does not come from an agent.
const MAX_EVENT_BYTES: usize = 16 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The `event:` field; `message` where it is absent.
    pub name: String,
    /// The `data:` fields, joined by newlines.
    pub data: String,
}

/// Assembles events from chunks of any size.
#[derive(Debug)]
pub struct EventParser {
    most_bytes: usize,
    line: Vec<u8>,
    name: String,
    data: String,
    has_data: bool,
}

impl Default for EventParser {
    fn default() -> EventParser {
        EventParser::with_events_of_at_most(MAX_EVENT_BYTES)
    }
}

impl EventParser {
    /// Refuses events longer than `bytes`; the limit is at most [`MAX_EVENT_BYTES`].
    #[must_use]
    pub fn with_events_of_at_most(bytes: usize) -> EventParser {
        EventParser {
            most_bytes: bytes.min(MAX_EVENT_BYTES),
            line: Vec::new(),
            name: String::new(),
            data: String::new(),
            has_data: false,
        }
    }

    /// Adds the next bytes and returns the events they complete; `Err` if an event is too long.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, EventTooLong> {
        let mut events = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.len() + self.name.len() + self.data.len() >= self.most_bytes {
                    return Err(EventTooLong { most_bytes: self.most_bytes });
                }
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = String::from_utf8_lossy(&line);
            if let Some(event) = self.line(line.trim_end_matches('\r')) {
                events.push(event);
            }
        }
        Ok(events)
    }

    fn line(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            let name = std::mem::take(&mut self.name);
            return std::mem::take(&mut self.has_data).then(|| Event {
                name: if name.is_empty() { "message".into() } else { name },
                data,
            });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.name = value.to_owned(),
            "data" => {
                if self.has_data {
                    self.data.push('\n');
                }
                self.has_data = true;
                self.data.push_str(value);
            }
            // Comments (an empty field), IDs and retry times have no meaning here.
            _ => {}
        }
        None
    }
}

/// The stream sent an event that exceeds the limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {most_bytes} bytes")]
pub struct EventTooLong {
    most_bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_assembled_from_chunks_of_any_size() {
        let stream = concat!(
            ": hello\n\nevent: progress\ndata: {\"a\":1}\n\n",
            "event: report\r\ndata: x\r\ndata: y\r\n\r\n",
        );
        let expected = vec![
            Event { name: "progress".into(), data: "{\"a\":1}".into() },
            Event { name: "report".into(), data: "x\ny".into() },
        ];
        for size in 1..stream.len() {
            let mut parser = EventParser::default();
            let mut events = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                events.extend(parser.push(piece).unwrap());
            }
            assert_eq!(events, expected, "in pieces of {size}");
        }
    }

    #[test]
    fn an_event_without_data_is_ignored() {
        let mut parser = EventParser::default();
        assert_eq!(parser.push(b"event: progress\n\ndata\n\n").unwrap().len(), 1);
    }

    #[test]
    fn an_event_without_end_is_refused() {
        for piece in [
            vec![b'x'; 1 << 20],
            b"data: ".iter().chain(&[b'x'; 1 << 20]).chain(b"\n").copied().collect(),
        ] {
            let mut parser = EventParser::default();
            let mut last = Ok(Vec::new());
            for _ in 0..17 {
                last = parser.push(&piece);
            }
            assert_eq!(last, Err(EventTooLong { most_bytes: MAX_EVENT_BYTES }));
        }
    }
}
