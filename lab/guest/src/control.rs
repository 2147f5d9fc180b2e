//! The guest's control protocol: TCP port 7000, with one JSON object per line in each direction.
//!
//! `{"cmd":"status"}`, `{"cmd":"workload","spec":"dirty:rate=5000"}`, `{"cmd":"verify"}`,
//! `{"cmd":"kernels","millis":2000}`, `{"cmd":"poweroff"}`, `{"cmd":"panic"}`, and for disks
//! `{"cmd":"fill-disks","disks":[{"name":"vda","bytes":1048576}],"version":2}`,
//! `{"cmd":"write-disks","bytes_per_s":5242880,"region_bytes":1048576}`, `{"cmd":"verify-disks"}`.
//! Every answer carries `ok`; if it is false, `error` gives the reason. `verify` and `verify-disks`
//! also answer `ok: false` if a page or a count is wrong, so that a careless caller notices.

use std::io::{self, BufRead, BufReader, Read, Write};

use serde::{Deserialize, Serialize};

use crate::kernels::KernelRates;

/// TCP port of the control protocol.
pub const CONTROL_PORT: u16 = 7000;
/// UDP port of the echo.
pub const ECHO_PORT: u16 = 7;
/// Longest line that either side accepts.
pub const LINE_BYTES: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Report the state.
    Status {},
    Workload {
        /// Text of a [`crate::workload::Workload`].
        spec: String,
    },
    /// Check every page and every count, however long it takes.
    Verify {},
    /// Run each kernel for a while, beside the workload, and report its speed.
    Kernels {
        /// Time for each of [`crate::kernels`], at most [`crate::kernels::MOST_MILLIS`].
        millis: u64,
    },
    /// Fill the beginning of disks with content that can be checked, except where their images
    /// hold that of their base. A disk's place in the list is part of its content.
    #[serde(rename = "fill-disks")]
    FillDisks {
        /// The disks, at most four.
        disks: Vec<DiskFill>,
        /// First version of the content, at least 2. With another one, it differs.
        version: u64,
    },
    /// Rewrite pieces of the filled disks at random, and begin a new measurement of the longest
    /// write. Without a rate, stop and flush.
    #[serde(rename = "write-disks")]
    WriteDisks {
        /// Bytes a second, all disks together; 0: stop.
        bytes_per_s: u64,
        /// Part of each disk that is rewritten: the end of what was filled.
        region_bytes: u64,
    },
    /// Read and check all that the filled disks must hold.
    #[serde(rename = "verify-disks")]
    VerifyDisks {},
    /// Power the machine off.
    Poweroff {},
    /// Panic the kernel.
    Panic {},
}

/// Disk to fill.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFill {
    /// Name of its device, such as `vda`.
    pub name: String,
    /// Bytes from its beginning.
    pub bytes: u64,
}

/// Figures of the filled disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskFigures {
    /// Number of disks.
    pub disks: u64,
    /// Bytes that can be checked, all disks together.
    pub bytes: u64,
    /// Bytes written since `write-disks`.
    pub written_bytes: u64,
    /// Longest write since `write-disks`, by the guest's clock.
    pub longest_write_ms: f64,
    /// Writes that failed since boot.
    pub failed_writes: u64,
}

/// The guest's answer. Fields that do not concern the request are omitted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Whether the request was carried out and nothing was found wrong.
    pub ok: bool,
    /// Reason if not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the first fill of the memory is complete.
    pub ready: bool,
    /// Text of the current workload.
    pub workload: String,
    /// Pages of checked memory; in the answer to `verify`, pages checked.
    pub pages: u64,
    /// Page writes since boot, the first fill included.
    pub writes: u64,
    /// Page writes per second over the last whole second.
    pub writes_per_s: u64,
    /// Rounds of the computing workload since boot.
    pub iterations: u64,
    /// Rounds per second over the last whole second.
    pub iterations_per_s: u64,
    /// Seconds since boot by the guest's clock.
    pub uptime_s: f64,
    /// Writes that found unexpected content in their page.
    pub stale_on_write: u64,
    /// Use of the guest's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryUse>,
    /// Disks that were filled; absent if none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<DiskFigures>,
    /// Problems in the guest since boot: bad options, modules that did not load, threads that
    /// panicked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Answer to `verify` and `verify-disks`: pages with wrong content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrong: Option<u64>,
    /// The first wrong page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<WrongPage>,
    /// Answer to `kernels`: their speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<KernelRates>,
    /// Answer to `kernels`: the CPU extensions that they use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
}

/// Memory use as the guest's kernel reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// All memory that the kernel manages.
    pub total_bytes: u64,
    /// Unused memory.
    pub free_bytes: u64,
    /// Contents of files, and the kernel's caches of their names.
    pub cached_bytes: u64,
}

impl MemoryUse {
    /// Parses /proc/meminfo. Returns `None` if a line is missing.
    pub fn parse(meminfo: &str) -> Option<MemoryUse> {
        let bytes = |name| Some(meminfo_kib(meminfo, name)? << 10);
        let cached = ["Buffers", "Cached", "SReclaimable"].map(bytes);
        Some(MemoryUse {
            total_bytes: bytes("MemTotal")?,
            free_bytes: bytes("MemFree")?,
            cached_bytes: cached.into_iter().sum::<Option<u64>>()?,
        })
    }

    /// Returns the rest: programs and the kernel.
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes).saturating_sub(self.cached_bytes)
    }
}

/// Returns the value of a line of /proc/meminfo, in KiB.
pub fn meminfo_kib(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongPage {
    /// Its index in the checked memory.
    pub page: u64,
    /// Description of the error.
    pub why: String,
}

/// Sends a request to the guest over an open connection. Set time limits on it first; `verify` of a
/// gigabyte takes seconds.
pub fn ask<S: Read + Write>(connection: &mut S, request: &Request) -> io::Result<Answer> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    connection.write_all(&line)?;
    let mut answer = String::new();
    // One answer follows one request, so nothing is lost in the buffer.
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

    /// Peer that answers with a fixed text.
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
            (
                Request::FillDisks {
                    disks: vec![DiskFill { name: "vda".to_owned(), bytes: 9 }],
                    version: 2,
                },
                r#"{"cmd":"fill-disks","disks":[{"name":"vda","bytes":9}],"version":2}"#,
            ),
            (
                Request::WriteDisks { bytes_per_s: 5, region_bytes: 6 },
                r#"{"cmd":"write-disks","bytes_per_s":5,"region_bytes":6}"#,
            ),
            (Request::VerifyDisks {}, r#"{"cmd":"verify-disks"}"#),
            (Request::Panic {}, r#"{"cmd":"panic"}"#),
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
        let meminfo = "MemTotal:        2000 kB\nMemFree:          100 kB\nMemAvailable:    1500 \
            kB\nBuffers:           10 kB\n\
                       Cached:          1400 kB\nSwapCached:         0 kB\nSReclaimable:      90 \
                       kB\n";
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
