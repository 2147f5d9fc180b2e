//! What the agent and the library say to each other: one request, one answer, each of [`MESSAGE_LEN`] bytes.
//!
//! The file is compiled into both (`crates/ram` includes it by path), so that they cannot drift apart; the library must
//! not be linked into the agent, whose process it would then serve.
//!
//! Request: [`MAGIC`], [`VERSION`], three bytes of zero; with it, by `SCM_RIGHTS`, at most one descriptor: an open
//! /dev/userfaultfd. Answer: [`MAGIC`], the origin of the userfaultfd (see [`Origin`]), and errno as a little-endian
//! 16-bit number, zero with a descriptor by `SCM_RIGHTS`, else the reason why there is none.

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
/// The version both sides speak.
pub const VERSION: u8 = 1;

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
pub fn request() -> [u8; MESSAGE_LEN] {
    let [a, b, c, d] = MAGIC;
    [a, b, c, d, VERSION, 0, 0, 0]
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
        assert_eq!(request()[..4], MAGIC);
    }
}
