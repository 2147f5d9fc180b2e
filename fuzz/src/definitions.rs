//! Definitions of VMs of other platforms, the headers of their images and archives.

use std::io;

use godwit_import::{Kind, Manifest, kind_of, ova_members, read, read_vmdk};
use godwit_nbd::NbdExport;

/// A server that has said all that it will say.
struct Said<'a>(&'a [u8]);

impl io::Read for Said<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl io::Write for Said<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn run(data: &[u8]) {
    if let Ok(kind) = kind_of(data) {
        let _ = read(kind, data);
    }
    for kind in [Kind::Libvirt, Kind::Proxmox, Kind::Ovf] {
        if let Ok(imported) = read(kind, data) {
            assert_eq!(imported.spec.disks.len(), imported.disks.len());
        }
    }
    let read_at = |at: u64, buffer: &mut [u8]| -> io::Result<usize> {
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(data.len());
        let length = buffer.len().min(data.len() - at);
        buffer[..length].copy_from_slice(&data[at..at + length]);
        Ok(length)
    };
    let _ = read_vmdk(&read_at, data.len() as u64);
    if let Ok(ova) = ova_members(&read_at, data.len() as u64) {
        for member in ova.members() {
            assert!(member.at + member.bytes <= data.len() as u64);
        }
    }
    if let Ok(mut export) = NbdExport::open(Said(data), "disk") {
        let _ = export.read_at(0, &mut [0; 512]);
    }
    let contexts = ["base:allocation", "qemu:dirty-bitmap:b0"];
    if let Ok(mut export) = NbdExport::open_with(Said(data), "disk", &contexts) {
        let _ = export.read_at(0, &mut [0; 512]);
        let _ = export.extents(1, 0, 1 << 30);
        let _ = export.write_zeroes(0, 4096);
    }
    let _ = Manifest::parse(&String::from_utf8_lossy(data));
}
