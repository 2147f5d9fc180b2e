//! Protocol between the agent and the library: one request and one answer, each of [`MESSAGE_LEN`]
//! bytes.
//!
//! The file is compiled into both (`crates/ram` includes it by path), so that they cannot diverge.
//! The library must not be linked into the agent, because it would then serve the agent's process.
//!
//! Request: [`MAGIC`], a version, the kind of request (see [`Request`]), two zero bytes. It may
//! carry one descriptor by `SCM_RIGHTS`: an open /dev/userfaultfd. The version is [`VERSION`] for
//! requests that a library of that version supports, so that an agent works with a QEMU that an
//! earlier agent started. It is [`KEEPING_VERSION`] for the others, which such a library refuses
//! with `EPROTO`.
//!
//! Answer: [`MAGIC`], [`VERSION`], the origin of the userfaultfd (see [`Origin`]), and errno as a
//! little-endian 16-bit number. The errno is zero if a descriptor comes along by `SCM_RIGHTS`,
//! otherwise the reason why there is none: `ENOENT` if none was kept. The answer to
//! [`Request::DropKept`] has neither.

/// Variable with the number of the inherited, listening socket.
pub const ENV_LISTENER: &str = "GODWIT_TRACKER_FD";
/// Variable with the only uid that is answered.
pub const ENV_PEER_UID: &str = "GODWIT_TRACKER_PEER_UID";
/// Variable that, set to `1`, makes the library open /dev/userfaultfd before QEMU drops its
/// privileges.
pub const ENV_OPEN: &str = "GODWIT_TRACKER_OPEN";

/// Length of a request and of an answer, in bytes.
pub const MESSAGE_LEN: usize = 8;
/// First four bytes of requests and answers.
pub const MAGIC: [u8; 4] = *b"GWTK";
/// Version of answers, and of requests for a new userfaultfd.
pub const VERSION: u8 = 1;
/// Version of requests that concern the copy that the library keeps.
pub const KEEPING_VERSION: u8 = 2;

/// Request of the agent. The library keeps at most one copy. While it keeps one, the memory that
/// the userfaultfd governs stays governed, whatever becomes of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Request {
    /// Create a userfaultfd.
    New = 0,
    /// Create a userfaultfd and keep a copy of it, in place of the previous copy.
    NewKept = 1,
    /// Return the copy that the library keeps; the library goes on keeping it.
    Kept = 2,
    /// Return no userfaultfd: the library closes its copy, if it has one.
    DropKept = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Origin {
    /// No userfaultfd.
    None = 0,
    /// /dev/userfaultfd, sent by the agent or opened by the library's constructor.
    Device = 1,
    /// The system call, with the right to handle the kernel's own faults.
    Syscall = 2,
    /// The system call with `UFFD_USER_MODE_ONLY` (Linux 5.11): enough for dirty tracking, where no
    /// fault is ever delivered to user space; not enough for page-in.
    UserModeOnly = 3,
}

/// Encodes the agent's request.
pub fn request(request: Request) -> [u8; MESSAGE_LEN] {
    let [a, b, c, d] = MAGIC;
    let version = match request {
        Request::New => VERSION,
        Request::NewKept | Request::Kept | Request::DropKept => KEEPING_VERSION,
    };
    [a, b, c, d, version, request as u8, 0, 0]
}

/// Decodes a request. Returns `None` if it has neither of these versions.
pub fn parse_request(bytes: &[u8; MESSAGE_LEN]) -> Option<Request> {
    let [a, b, c, d, version, wanted, 0, 0] = *bytes else { return None };
    if [a, b, c, d] != MAGIC {
        return None;
    }
    match (version, wanted) {
        (VERSION | KEEPING_VERSION, 0) => Some(Request::New),
        (KEEPING_VERSION, 1) => Some(Request::NewKept),
        (KEEPING_VERSION, 2) => Some(Request::Kept),
        (KEEPING_VERSION, 3) => Some(Request::DropKept),
        _ => None,
    }
}

/// Encodes the library's answer.
pub fn answer(origin: Origin, errno: u16) -> [u8; MESSAGE_LEN] {
    let [a, b, c, d] = MAGIC;
    let [low, high] = errno.to_le_bytes();
    [a, b, c, d, VERSION, origin as u8, low, high]
}

/// Decodes an answer. Returns `None` if it has another version.
pub fn parse_answer(bytes: &[u8; MESSAGE_LEN]) -> Option<(Origin, u16)> {
    let [a, b, c, d, version, origin, low, high] = *bytes;
    if [a, b, c, d] != MAGIC || version != VERSION {
        return None;
    }
    let origin = match origin {
        0 => Origin::None,
        1 => Origin::Device,
        2 => Origin::Syscall,
        3 => Origin::UserModeOnly,
        _ => return None,
    };
    Some((origin, u16::from_le_bytes([low, high])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_reads_back() {
        for origin in [Origin::None, Origin::Device, Origin::Syscall, Origin::UserModeOnly] {
            assert_eq!(parse_answer(&answer(origin, 0x1234)), Some((origin, 0x1234)));
        }
    }

    #[test]
    fn an_invalid_answer_is_refused() {
        let good = answer(Origin::Device, 0);
        for (index, value) in [(0, b'x'), (4, VERSION + 1), (5, 9)] {
            let mut bytes = good;
            bytes[index] = value;
            assert_eq!(parse_answer(&bytes), None);
        }
    }

    #[test]
    fn a_request_reads_back() {
        for wanted in [Request::New, Request::NewKept, Request::Kept, Request::DropKept] {
            assert_eq!(parse_request(&request(wanted)), Some(wanted));
        }
        // In the form of the first version: a library of that version compares only these five
        // bytes.
        assert_eq!(request(Request::New), *b"GWTK\x01\0\0\0");
    }

    #[test]
    fn an_invalid_request_is_refused() {
        let good = request(Request::NewKept);
        for (index, value) in
            [(0, b'x'), (4, VERSION), (4, 0), (4, KEEPING_VERSION + 1), (5, 4), (6, 1), (7, 1)]
        {
            let mut bytes = good;
            bytes[index] = value;
            assert_eq!(parse_request(&bytes), None);
        }
    }
}
