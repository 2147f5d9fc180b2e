//! The guest's control protocol: TCP port 7000, one JSON object a line in each direction.
//!
//! `{"cmd":"status"}`, `{"cmd":"workload","spec":"dirty:rate=5000"}`, `{"cmd":"verify"}`, `{"cmd":"kernels","millis":2000}`,
//! `{"cmd":"poweroff"}`.
//! Every answer carries `ok`; where it is false, `error` says why. `verify` answers `ok: false` also when a page
//! or a count is wrong, so that a careless caller notices.

use std::io::{self, BufRead, BufReader, Read, Write};

use serde::{Deserialize, Serialize};

use crate::kernels::KernelRates;

/// TCP port of the control protocol.
pub const CONTROL_PORT: u16 = 7000;
/// UDP port of the echo.
pub const ECHO_PORT: u16 = 7;
/// Longest line that either side takes.
pub const LINE_BYTES: u64 = 64 << 10;

/// What the guest can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// How is it going?
    Status {},
    /// Do this from now on.
    Workload {
        /// Text of a [`crate::workload::Workload`].
        spec: String,
    },
    /// Check every page and every count; takes as long as it takes.
    Verify {},
    /// Compute for so long each, beside the workload, and tell how fast that is.
    Kernels {
        /// Of each of [`crate::kernels`], at most [`crate::kernels::MOST_MILLIS`].
        millis: u64,
    },
    /// Switch the machine off.
    Poweroff {},
}

/// The guest's answer; fields that the request does not concern are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// The request was carried out and nothing was found wrong.
    pub ok: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The first fill of the memory is done.
    pub ready: bool,
    /// The current workload.
    pub workload: String,
    /// Pages of checked memory; in the answer to `verify`: pages checked.
    pub pages: u64,
    /// Writes of pages since boot, the first fill included.
    pub writes: u64,
    /// Writes a second over the last whole second.
    pub writes_per_s: u64,
    /// Rounds of the computing workload since boot.
    pub iterations: u64,
    /// Rounds a second over the last whole second.
    pub iterations_per_s: u64,
    /// Seconds since boot by the guest's clock.
    pub uptime_s: f64,
    /// Writes that found their page not holding what it must.
    pub stale_on_write: u64,
    /// What the guest's memory is used for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryUse>,
    /// What went wrong in the guest since boot: bad options, modules that did not load, threads that panicked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Answer to `verify`: pages that do not hold what they must.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrong: Option<u64>,
    /// The first wrong page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<WrongPage>,
    /// Answer to `kernels`: how fast they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<KernelRates>,
    /// Answer to `kernels`: what of the CPU they use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<String>,
    /// How long the check took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
}

/// What the guest's kernel says of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// All that the kernel hands out.
    pub total_bytes: u64,
    /// Not used for anything.
    pub free_bytes: u64,
    /// Contents of files, and what the kernel keeps of their names.
    pub cached_bytes: u64,
}

impl MemoryUse {
    /// Reads /proc/meminfo; none where it lacks a line.
    pub fn parse(meminfo: &str) -> Option<MemoryUse> {
        let bytes = |name| Some(meminfo_kib(meminfo, name)? << 10);
        let cached = ["Buffers", "Cached", "SReclaimable"].map(bytes);
        Some(MemoryUse {
            total_bytes: bytes("MemTotal")?,
            free_bytes: bytes("MemFree")?,
            cached_bytes: cached.into_iter().sum::<Option<u64>>()?,
        })
    }

    /// The rest: programs and the kernel.
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes).saturating_sub(self.cached_bytes)
    }
}

/// A line of /proc/meminfo.
pub fn meminfo_kib(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

/// A page that does not hold what it must.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongPage {
    /// Its index in the checked memory.
    pub page: u64,
    /// What is wrong with it.
    pub why: String,
}

/// Asks the guest over an open connection (give it time limits first; `verify` of a gigabyte takes seconds).
pub fn ask<S: Read + Write>(connection: &mut S, request: &Request) -> io::Result<Answer> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    connection.write_all(&line)?;
    let mut answer = String::new();
    // One answer follows one request, so that nothing is lost in the buffer.
    BufReader::new(Read::by_ref(connection).take(LINE_BYTES)).read_line(&mut answer)?;
    if !answer.ends_with('\n') {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the guest closed the connection without an answer",
        ));
    }
    Ok(serde_json::from_str(&answer)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that answers with a fixed text.
    struct Canned {
        answer: io::Cursor<Vec<u8>>,
        asked: Vec<u8>,
    }

    impl Read for Canned {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            self.answer.read(to)
        }
    }

    impl Write for Canned {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.asked.write(from)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn canned(answer: &str) -> Canned {
        Canned { answer: io::Cursor::new(answer.as_bytes().to_vec()), asked: Vec::new() }
    }

    #[test]
    fn requests_are_the_documented_lines() {
        for (request, line) in [
            (Request::Status {}, r#"{"cmd":"status"}"#),
            (Request::Verify {}, r#"{"cmd":"verify"}"#),
            (Request::Kernels { millis: 5 }, r#"{"cmd":"kernels","millis":5}"#),
            (Request::Workload { spec: "idle".to_owned() }, r#"{"cmd":"workload","spec":"idle"}"#),
        ] {
            assert_eq!(serde_json::to_string(&request).unwrap(), line);
            assert_eq!(serde_json::from_str::<Request>(line).unwrap(), request);
        }
        assert!(serde_json::from_str::<Request>(r#"{"cmd":"reformat"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"cmd":"workload"}"#).is_err());
    }

    #[test]
    fn an_answer_is_read_also_with_fields_of_a_later_guest() {
        let mut peer = canned("{\"ok\":true,\"pages\":5,\"wrong\":0,\"colour\":\"red\"}\n");
        let answer = ask(&mut peer, &Request::Verify {}).unwrap();
        assert_eq!((answer.ok, answer.pages, answer.wrong), (true, 5, Some(0)));
        assert_eq!(peer.asked, b"{\"cmd\":\"verify\"}\n");
    }

    #[test]
    fn what_the_memory_is_used_for() {
        let meminfo = "MemTotal:        2000 kB\nMemFree:          100 kB\nMemAvailable:    1500 kB\nBuffers:           10 kB\n\
                       Cached:          1400 kB\nSwapCached:         0 kB\nSReclaimable:      90 kB\n";
        let memory = MemoryUse::parse(meminfo).unwrap();
        assert_eq!(
            (memory.total_bytes, memory.free_bytes, memory.cached_bytes),
            (2000 << 10, 100 << 10, 1500 << 10)
        );
        assert_eq!(memory.used_bytes(), 400 << 10);
        assert_eq!(MemoryUse::parse("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn a_cut_connection_is_an_error() {
        let error = ask(&mut canned("{\"ok\":tr"), &Request::Status {}).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
