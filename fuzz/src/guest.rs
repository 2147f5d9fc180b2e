//! Answers of the agent in a guest.

/// Most addresses of all interfaces that are kept.
const MOST_ADDRESSES: usize = 64 * 32;

pub fn run(data: &[u8]) {
    assert!(godwit_qemu::fuzzing::read_guest_answer(data) <= MOST_ADDRESSES);
}
