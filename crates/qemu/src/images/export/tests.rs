//! Tests with the installed QEMU.

use std::fs::File;
use std::path::Path;

use godwit_nbd::{DIRTY, Extent, HOLE, NbdError, NbdExport};

use super::*;
use crate::images::write_image;
use crate::inspect::find_program;
use crate::spec::DiskFormat;

const MIB: u64 = 1 << 20;

/// Starts a tool; `None` without QEMU.
async fn tool() -> Option<ImageTool> {
    let Ok(qemu) = find_program(Path::new("qemu-system-x86_64")) else {
        eprintln!("skipped: no qemu-system-x86_64");
        return None;
    };
    Some(ImageTool::start(&qemu, None).await.unwrap())
}

fn layer(path: &Path, format: DiskFormat) -> OpenLayer {
    let file = File::options().read(true).write(true).open(path).unwrap();
    OpenLayer::new(file.into(), path, format)
}

/// Opens the only layer of an image with another tool.
async fn opens(path: &Path) -> bool {
    let other = tool().await.unwrap();
    other.export(&[layer(path, DiskFormat::Qcow2)]).await.is_ok()
}

#[tokio::test]
async fn an_image_is_written_and_closed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new.qcow2");
    write_image(&File::create(&path).unwrap(), DiskFormat::Qcow2, 64 * MIB, None).unwrap();
    let Some(first) = tool().await else { return };
    let stream = first.export(&[layer(&path, DiskFormat::Qcow2)]).await.unwrap();
    let mut export = NbdExport::open_with(stream, "disk", &["base:allocation"]).unwrap();
    assert_eq!(export.bytes(), 64 * MIB);
    export.write_at(3 * MIB + 5, &[7; 100_000]).unwrap();
    export.write_at(8 * MIB, &[8; 1 << 20]).unwrap();
    export.write_zeroes(8 * MIB, MIB).unwrap();
    export.flush().unwrap();
    assert!(!opens(&path).await, "the first one has its lock");
    first.end_export().await.unwrap();
    first.end_export().await.unwrap();
    assert!(matches!(export.read_at(0, &mut [0; 512]), Err(NbdError::Io(_))));
    // The first tool has ended nothing but its export.
    let second = tool().await.unwrap();
    let stream = second.export(&[layer(&path, DiskFormat::Qcow2)]).await.unwrap();
    let mut export = NbdExport::open_with(stream, "disk", &["base:allocation"]).unwrap();
    let mut found = vec![0; 100_002];
    export.read_at(3 * MIB + 4, &mut found).unwrap();
    assert!(found[0] == 0 && found[100_001] == 0 && found[1..100_001].iter().all(|b| *b == 7));
    let extents = export.extents(0, 8 * MIB, MIB).unwrap();
    assert!(extents.iter().all(|extent| extent.flags & HOLE != 0), "{extents:?}");
    let other = folder.path().join("other.raw");
    File::create(&other).unwrap().set_len(MIB).unwrap();
    let again = first.export(&[layer(&other, DiskFormat::Raw)]).await;
    assert!(matches!(again, Err(ImageToolError::Export(_))), "{again:?}");
}

#[tokio::test]
async fn an_image_is_read_while_another_program_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new.qcow2");
    write_image(&File::create(&path).unwrap(), DiskFormat::Qcow2, 64 * MIB, None).unwrap();
    let Some(writer) = tool().await else { return };
    let stream = writer.export(&[layer(&path, DiskFormat::Qcow2)]).await.unwrap();
    let mut export = NbdExport::open(stream, "disk").unwrap();
    export.write_at(MIB, &[7; 1 << 16]).unwrap();
    export.flush().unwrap();
    let reader = tool().await.unwrap();
    let file = File::open(&path).unwrap();
    let layer = OpenLayer::new(file.into(), &path, DiskFormat::Qcow2);
    let stream = reader.export_to_read(&[layer]).await.unwrap();
    let mut read = NbdExport::open(stream, "disk").unwrap();
    let mut found = vec![0; 1 << 16];
    read.read_at(MIB, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 7));
    assert!(read.write_at(MIB, &[8; 512]).is_err());
    // It holds no lock.
    writer.end_export().await.unwrap();
    assert!(opens(&path).await);
}

/// Copies parts of a disk to the image at `to`.
fn copy(from: &mut NbdExport<UnixStream>, parts: &[Extent], to: &mut [u8]) {
    for part in parts {
        let start = usize::try_from(part.offset).unwrap();
        let end = start + usize::try_from(part.bytes).unwrap();
        from.read_at(part.offset, &mut to[start..end]).unwrap();
    }
}

#[tokio::test]
async fn rounds_find_all_that_is_written_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let (path, socket) = (folder.path().join("vm.raw"), folder.path().join("socket"));
    File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    let Some(tool) = tool().await else { return };
    let qmp = &tool.qmp;
    let node = tool.open("vm", &[layer(&path, DiskFormat::Raw)], false).await.unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    assert!(qmp.start_nbd(listener.as_fd(), 8).await.unwrap());
    drop(listener);
    let connect = || UnixStream::connect(&socket).unwrap();
    // The guest, which writes a byte to some of its blocks.
    qmp.add_export("guest", &node, &[], true).await.unwrap();
    let mut guest = NbdExport::open(connect(), "guest").unwrap();
    let mut disk = vec![0; 8 << 20];
    let mut write = |round: u8, blocks: &[usize]| {
        for block in blocks {
            let at = block * 65536 + 512;
            disk[at..at + 512].fill(round);
            guest.write_at(at as u64, &[round; 512]).unwrap();
        }
        disk.clone()
    };
    write(1, &[1, 2, 40]);
    qmp.add_bitmap(&node, "b0").await.unwrap();
    qmp.add_export("r", &node, &[], false).await.unwrap();
    assert!(qmp.add_export("enabled", &node, &["b0"], false).await.is_err());
    let mut copied = vec![0; 8 << 20];
    let contexts = ["base:allocation", "qemu:allocation-depth"];
    let mut export = NbdExport::open_with(connect(), "r", &contexts).unwrap();
    let mut used = export.extents(0, 0, 8 * MIB).unwrap();
    used.retain(|extent| extent.flags & HOLE == 0);
    copy(&mut export, &used, &mut copied);
    assert!(copied == write(2, &[]), "all that was there");
    write(2, &[2, 3, 100, 127]);
    for (present, next, blocks) in [("b0", "b1", &[2_u64, 3, 100, 127][..]), ("b1", "b2", &[5][..])]
    {
        let swap = [(node.clone(), present.to_owned(), next.to_owned())];
        qmp.swap_bitmaps(&swap).await.unwrap();
        let all = if present == "b0" { write(3, &[5]) } else { write(3, &[]) };
        qmp.remove_export("r").await.unwrap();
        assert!(export.read_at(0, &mut [0; 512]).is_err());
        qmp.add_export("r", &node, &[present], false).await.unwrap();
        let context = format!("qemu:dirty-bitmap:{present}");
        export = NbdExport::open_with(connect(), "r", &[&context]).unwrap();
        let mut dirty = export.extents(0, 0, 8 * MIB).unwrap();
        dirty.retain(|extent| extent.flags & DIRTY != 0);
        let bytes: u64 = dirty.iter().map(|extent| extent.bytes).sum();
        assert_eq!(bytes, 65536 * blocks.len() as u64);
        let is_dirty = |block: &u64| {
            let at = block * 65536;
            dirty.iter().any(|one| one.offset <= at && at < one.offset + one.bytes)
        };
        assert!(blocks.iter().all(is_dirty), "{dirty:?}");
        copy(&mut export, &dirty, &mut copied);
        if present == "b1" {
            assert!(copied == all);
        }
        assert!(qmp.remove_bitmap(&node, present).await.is_err(), "the export uses it");
    }
    qmp.remove_export("r").await.unwrap();
    qmp.remove_export("r").await.unwrap();
    qmp.remove_bitmap(&node, "b0").await.unwrap();
    qmp.remove_bitmap(&node, "b0").await.unwrap();
    assert_eq!(qmp.bitmaps(&node).await.unwrap().len(), 2);
    // The server stays where it is.
    let other = folder.path().join("other");
    let listener = UnixListener::bind(&other).unwrap();
    assert!(!qmp.start_nbd(listener.as_fd(), 8).await.unwrap());
}

#[tokio::test]
async fn a_connection_that_qemu_keeps_ends_with_its_export() {
    let folder = tempfile::tempdir().unwrap();
    let (path, socket) = (folder.path().join("vm.raw"), folder.path().join("socket"));
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let Some(tool) = tool().await else { return };
    let qmp = &tool.qmp;
    let node = tool.open("vm", &[layer(&path, DiskFormat::Raw)], false).await.unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    assert!(qmp.start_nbd(listener.as_fd(), 8).await.unwrap());
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "thread"})).await.unwrap();
    let export = json!({"type": "nbd", "id": "r", "name": "r", "node-name": node,
        "iothread": "thread"});
    qmp.execute("block-export-add", export).await.unwrap();
    let kept = ["kept-0", "kept-1"];
    for name in kept {
        let stream = UnixStream::connect(&socket).unwrap();
        qmp.getfd(name, stream.as_fd()).await.unwrap();
        let mut client = NbdExport::open(stream, "r").unwrap();
        let mut found = [0; 512];
        client.read_at(4096, &mut found).unwrap();
        assert_eq!(found, [7; 512]);
        // Its end is closed. Otherwise QEMU 7.2 would end.
        drop(client);
    }
    qmp.remove_export("r").await.unwrap();
    for name in kept {
        qmp.closefd(name).await.unwrap();
    }
    tool.close(&node).await.unwrap();
}
