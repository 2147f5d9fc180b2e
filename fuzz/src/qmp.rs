//! QEMU's messages.

pub fn run(data: &[u8]) {
    let lines = godwit_qemu::fuzzing::read_qmp(data);
    assert!(lines <= data.iter().filter(|byte| **byte == b'\n').count());
}
