//! What a VM's QEMU says to the agent's NBD server when it mirrors the VM's disks.

use std::io::{self, Read, Write};

use godwit_nbd::{NbdRequest, NbdServer};

const DISK_BYTES: u64 = 1 << 20;

/// A client that has said all that it will say.
struct Said<'a>(&'a [u8]);

impl Read for Said<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Said<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub fn run(data: &[u8]) {
    let exports = ["disk0", "disk1"].map(|name| (name.to_owned(), DISK_BYTES));
    let Ok(mut server) = NbdServer::accept(Said(data), &exports) else { return };
    assert!(server.export() < exports.len());
    while let Ok(Some((cookie, request))) = server.next_request() {
        let (at, bytes) = match request {
            NbdRequest::Write { at, bytes } => (at, bytes.len() as u64),
            NbdRequest::Zeros { at, bytes } => (at, bytes),
            NbdRequest::Flush => continue,
        };
        assert!(bytes > 0 && at + bytes <= DISK_BYTES, "beyond the disk");
        server.reply(cookie, true).expect("it takes all answers");
    }
}
