//! What the agent and the library say to each other: one request, one answer, each of [`MESSAGE_LEN`] bytes.
//!
//! The file is compiled into both (`crates/ram` includes it by path), so that they cannot drift apart; the library must
//! not be linked into the agent, whose process it would then serve.
//!
//! Request: [`MAGIC`], a version, what is wanted (see [`Request`]), two bytes of zero; with it, by `SCM_RIGHTS`, at most one
//! descriptor: an open /dev/userfaultfd. The version is [`VERSION`] for what a library of that version can do, so that an
//! agent goes on with a QEMU that an earlier one started, and [`KEEPING_VERSION`] for the rest, which such a library refuses
//! with `EPROTO`.
//!
//! Answer: [`MAGIC`], [`VERSION`], the origin of the userfaultfd (see [`Origin`]), and errno as a little-endian 16-bit
//! number, zero with a descriptor by `SCM_RIGHTS`, else the reason why there is none: `ENOENT` where none was kept. To
//! [`Request::DropKept`] the answer has neither.

/// Name of the variable with the number of the inherited, listening socket.
pub const ENV_LISTENER: &str = "GODWIT_TRACKER_FD";
/// Name of the variable with the only uid that is answered.
pub const ENV_PEER_UID: &str = "GODWIT_TRACKER_PEER_UID";
/// Name of the variable that, set to `1`, makes the library open /dev/userfaultfd before QEMU drops its privileges.
pub const ENV_OPEN: &str = "GODWIT_TRACKER_OPEN";

/// Length of a request and of an answer, in bytes.
pub const MESSAGE_LEN: usize = 8;
/// The first four bytes of both.
pub const MAGIC: [u8; 4] = *b"GWTK";
/// The version of answers, and of requests for a new userfaultfd.
pub const VERSION: u8 = 1;
/// The version of requests that have to do with a copy that the library keeps.
pub const KEEPING_VERSION: u8 = 2;

/// What the agent wants. The library keeps one copy at most: while it has it, memory that the userfaultfd governs stays
/// governed, whatever becomes of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Request {
    /// A new userfaultfd.
    New = 0,
    /// A new one, of which the library keeps a copy, in place of the one that it had.
    NewKept = 1,
    /// The one that the library keeps; it goes on keeping it.
    Kept = 2,
    /// None: the library closes what it keeps, if anything.
    DropKept = 3,
}

/// Where a userfaultfd came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Origin {
    /// There is none.
    None = 0,
    /// /dev/userfaultfd, sent by the agent or opened by the library's constructor.
    Device = 1,
    /// The system call, with the right to handle the kernel's own faults.
    Syscall = 2,
    /// The system call with `UFFD_USER_MODE_ONLY` (Linux 5.11): enough for dirty tracking, where no fault is ever
    /// handed to user space; too little for page-in.
    UserModeOnly = 3,
}

/// The agent's request.
pub fn request(request: Request) -> [u8; MESSAGE_LEN] {
    let [a, b, c, d] = MAGIC;
    let version = match request {
        Request::New => VERSION,
        Request::NewKept | Request::Kept | Request::DropKept => KEEPING_VERSION,
    };
    [a, b, c, d, version, request as u8, 0, 0]
}

/// Reads a request; `None` where it is not one of these versions.
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

/// The library's answer.
pub fn answer(origin: Origin, errno: u16) -> [u8; MESSAGE_LEN] {
    let [a, b, c, d] = MAGIC;
    let [low, high] = errno.to_le_bytes();
    [a, b, c, d, VERSION, origin as u8, low, high]
}

/// Reads an answer; `None` where it is not one of this version.
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
    fn what_is_not_an_answer_is_refused() {
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
        // As the first version had it: a library of that version compares nothing but these five bytes.
        assert_eq!(request(Request::New), *b"GWTK\x01\0\0\0");
    }

    #[test]
    fn what_is_not_a_request_is_refused() {
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
