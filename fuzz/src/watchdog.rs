//! Messages to the watchdog process, which root alone may send.

pub fn run(data: &[u8]) {
    if let Some(written) = godwit_host::fuzzing::watchdog(data) {
        assert_eq!(godwit_host::fuzzing::watchdog(&written), Some(written));
    }
}
