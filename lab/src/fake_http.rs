//! Minimal HTTP for a peer that is not an agent but answers one: one request per connection, as the
//! agents' client sends them.

use std::io::{BufRead, BufReader, Read, Write};

use anyhow::Result;

/// Reads a request, discards its body, and answers with the status and the body that `answer`
/// returns for its first line.
///
/// # Errors
/// The connection breaks, the request is invalid, or `answer` fails.
pub fn answer_one<S: Read + Write>(
    stream: &mut S,
    answer: impl FnOnce(&str) -> Result<(&'static str, String)>,
) -> Result<()> {
    let request = read_request(stream)?;
    let (status, body) = answer(&request)?;
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
    Ok(stream.flush()?)
}

/// Reads a request and returns its first line.
fn read_request(stream: &mut impl Read) -> Result<String> {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut body_bytes = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        if header.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            body_bytes = value.trim().parse()?;
        }
    }
    std::io::copy(&mut reader.take(body_bytes), &mut std::io::sink())?;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connection with the request and the answer.
    struct Talk(std::io::Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Talk {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(to)
        }
    }

    impl Write for Talk {
        fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
            self.1.write(from)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_request_with_its_body_is_answered() {
        let asked =
            b"POST /v1/incoming HTTP/1.1\r\nContent-Length: 2\r\nhost: b\r\n\r\n{}".to_vec();
        let mut talk = Talk(std::io::Cursor::new(asked), Vec::new());
        answer_one(&mut talk, |line| {
            assert_eq!(line, "POST /v1/incoming HTTP/1.1\r\n");
            Ok(("201 Created", "yes".to_owned()))
        })
        .unwrap();
        assert_eq!(talk.1, b"HTTP/1.1 201 Created\r\ncontent-length: 3\r\n\r\nyes");
    }
}
