//! Lines from a socket, each of at most [`MOST_LINE_BYTES`] bytes.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

use super::message::MOST_LINE_BYTES;

/// Bytes that were read and are not yet a line.
#[derive(Debug, Default)]
pub(super) struct Lines {
    rest: Vec<u8>,
    /// Bytes at the beginning of `rest` that contain no end of a line.
    searched: usize,
}

impl Lines {
    /// Returns the next line, without its end. A call that is cancelled loses nothing.
    pub(super) async fn next(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
    ) -> io::Result<Vec<u8>> {
        loop {
            if let Some(line) = self.take() {
                return Ok(line);
            }
            if self.rest.len() > MOST_LINE_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is too long"));
            }
            self.rest.reserve(4096);
            if from.read_buf(&mut self.rest).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn take(&mut self) -> Option<Vec<u8>> {
        let unsearched = self.rest.get(self.searched..).unwrap_or_default();
        let Some(end) = unsearched.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.rest.len();
            return None;
        };
        let mut line: Vec<u8> = self.rest.drain(..=self.searched + end).collect();
        line.pop();
        self.searched = 0;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_split_wherever_they_arrive() {
        let mut lines = Lines::default();
        let (first, second) = (&b"one\ntw"[..], &b"o\n\nrest"[..]);
        let mut from = AsyncReadExt::chain(first, second);
        for expected in ["one", "two", ""] {
            assert_eq!(lines.next(&mut from).await.unwrap(), expected.as_bytes());
        }
        let error = lines.next(&mut from).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        let error = lines.next(&mut tokio::io::repeat(b'1')).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(lines.rest.capacity() <= 4 * MOST_LINE_BYTES);
    }
}
