//! Disk images: new ones, the heads of existing ones, copies and changes of size.
//!
//! A new image is written here: no program reads a name or a header for it. Copies and changes of
//! size are the work of a QEMU without a guest. It gets open descriptors, runs as a user without
//! rights in its sandbox, and ends with this process.

mod export;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use godwit_ram::{ChildLimits, limit_child};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::sync::broadcast::error::RecvError;

use crate::drives::{self, DriveParts};
use crate::helper::{helper, spawn};
use crate::launch::{ImageError, OpenLayer, format_of, qcow2_backing, qcow2_bytes};
use crate::process::SANDBOX;
use crate::qmp::{Qmp, QmpError};
use crate::spec::{Disk, DiskFormat, ResolvedDisk};

/// Largest disk that is created: 64 TiB.
pub const MOST_IMAGE_BYTES: u64 = 64 << 40;
/// Size of a disk is a multiple of this.
const SECTOR_BYTES: u64 = 512;
/// Longest time until an image in a pool is created.
const CREATE_LIMIT: Duration = Duration::from_secs(60);
/// Longest time until a tool has ended.
const END_LIMIT: Duration = Duration::from_secs(15);
/// Longest time of a copy.
const COPY_LIMIT: Duration = Duration::from_secs(6 * 3600);
/// Address space of the QEMU that copies: without a guest it uses a twentieth of it, and a fifth
/// for each image in a pool of Ceph, whose client has about 20 threads.
const TOOL_ADDRESS_SPACE_BYTES: u64 = 16 << 30;
/// Interval at which the progress of a copy is asked for.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// Descriptors that it may open.
const TOOL_OPEN_FILES: u64 = 256;
/// Bytes of the head that is read: the header, its extensions and the name of a backing file, as
/// QEMU writes them.
const HEAD_BYTES: usize = 64 << 10;

/// Bits of a cluster in new images: 64 KiB, QEMU's default.
const CLUSTER_BITS: u32 = 16;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
/// Bytes of the disk that one entry of the first table covers: a cluster of 8-byte entries.
const L1_ENTRY_BYTES: u64 = CLUSTER_BYTES * (CLUSTER_BYTES / 8);
/// Length of the header (version 3).
const HEADER_BYTES: u32 = 104;
/// Cluster of the first table, behind the header, the reference counts' table and their block.
const L1_CLUSTER: u64 = 3;
/// Header extension with the format of the backing file.
const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Longest name of a backing file.
const MOST_NAME_BYTES: usize = 1023;

/// What the head of an image says. Its author may have written anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageHead {
    pub format: DiskFormat,
    /// Size of the disk.
    pub virtual_bytes: u64,
    /// Name of the backing file, as the header has it.
    pub backing: Option<String>,
}

/// Reads the head of an image whose format is unknown. A file without a known header is raw.
///
/// # Errors
/// It cannot be read, or its header is damaged or of another format.
pub fn image_head(file: &File) -> Result<ImageHead, ImageError> {
    let mut head = vec![0; HEAD_BYTES];
    let mut length = 0;
    while length < head.len() {
        match file.read_at(&mut head[length..], length as u64)? {
            0 => break,
            read => length += read,
        }
    }
    head.truncate(length);
    match format_of(&head) {
        None => {
            // The end of a block device, too.
            let end = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0));
            let virtual_bytes = end.map_err(io::Error::from)?;
            Ok(ImageHead { format: DiskFormat::Raw, virtual_bytes, backing: None })
        }
        Some("qcow2") => Ok(ImageHead {
            format: DiskFormat::Qcow2,
            virtual_bytes: qcow2_bytes(&head)?,
            backing: qcow2_backing(&head)?.map(|backing| backing.file),
        }),
        Some(format) => Err(ImageError::NotRaw { format }),
    }
}

/// Checks the size of a new disk.
///
/// # Errors
/// What is wrong with it.
pub fn check_image_bytes(bytes: u64) -> Result<(), String> {
    match bytes {
        0 => Err("it is empty".to_owned()),
        bytes if !bytes.is_multiple_of(SECTOR_BYTES) => {
            Err(format!("it is not a multiple of {SECTOR_BYTES} bytes"))
        }
        bytes if bytes > MOST_IMAGE_BYTES => Err("it is more than 64 TiB".to_owned()),
        _ => Ok(()),
    }
}

/// Writes a new image into an empty file.
///
/// # Errors
/// The file cannot be written, the size is invalid, or the path of the backing file too long.
pub fn write_image(
    file: &File,
    format: DiskFormat,
    bytes: u64,
    backing: Option<(&Path, DiskFormat)>,
) -> io::Result<()> {
    check_image_bytes(bytes).map_err(io::Error::other)?;
    match (format, backing) {
        (DiskFormat::Raw, None) => file.set_len(bytes),
        (DiskFormat::Raw, Some(_)) => Err(io::Error::other("a raw image has no backing file")),
        (DiskFormat::Qcow2, backing) => write_qcow2(file, bytes, backing),
    }
}

/// Writes an empty qcow2 image of version 3 (QEMU's docs/interop/qcow2.txt).
fn write_qcow2(
    mut file: &File,
    bytes: u64,
    backing: Option<(&Path, DiskFormat)>,
) -> io::Result<()> {
    let entries = bytes.div_ceil(L1_ENTRY_BYTES);
    let clusters = L1_CLUSTER + (entries * 8).div_ceil(CLUSTER_BYTES);
    let mut extensions = Vec::new();
    let mut name = "";
    if let Some((path, format)) = backing {
        name = path.to_str().filter(|name| name.len() <= MOST_NAME_BYTES).ok_or_else(|| {
            io::Error::other("the path of the backing file is too long or not UTF-8")
        })?;
        let text = format.name().as_bytes();
        extensions.extend(BACKING_FORMAT.to_be_bytes());
        extensions.extend(u32::try_from(text.len()).unwrap_or_default().to_be_bytes());
        extensions.extend(text);
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    // The end of the extensions.
    extensions.extend([0; 8]);
    let name_at = if name.is_empty() { 0 } else { HEADER_BYTES as usize + extensions.len() };
    let mut head: Vec<u8> = Vec::new();
    head.extend(b"QFI\xfb");
    head.extend(3_u32.to_be_bytes());
    head.extend((name_at as u64).to_be_bytes());
    head.extend(u32::try_from(name.len()).unwrap_or_default().to_be_bytes());
    head.extend(CLUSTER_BITS.to_be_bytes());
    head.extend(bytes.to_be_bytes());
    // No encryption.
    head.extend(0_u32.to_be_bytes());
    head.extend(u32::try_from(entries).map_err(io::Error::other)?.to_be_bytes());
    head.extend((L1_CLUSTER * CLUSTER_BYTES).to_be_bytes());
    // The table of reference counts, in one cluster.
    head.extend(CLUSTER_BYTES.to_be_bytes());
    head.extend(1_u32.to_be_bytes());
    // No snapshots, no features.
    head.extend([0; 4 + 8 + 3 * 8]);
    // Reference counts of 16 bits.
    head.extend(4_u32.to_be_bytes());
    head.extend(HEADER_BYTES.to_be_bytes());
    head.extend(extensions);
    head.extend(name.as_bytes());
    head.resize(usize::try_from(CLUSTER_BYTES).map_err(io::Error::other)?, 0);
    file.write_all(&head)?;
    // The table's only entry is the block behind it, which counts each cluster once.
    file.write_all_at(&(2 * CLUSTER_BYTES).to_be_bytes(), CLUSTER_BYTES)?;
    let counts: Vec<u8> = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.write_all_at(&counts, 2 * CLUSTER_BYTES)?;
    file.set_len(clusters * CLUSTER_BYTES)
}

/// Why QEMU did not copy an image or change its size.
#[derive(Debug, thiserror::Error)]
pub enum ImageToolError {
    /// QEMU cannot be started.
    #[error("cannot start QEMU: {0}")]
    CannotStart(#[from] io::Error),
    /// QEMU refuses, or ended.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The copy failed.
    #[error("the copy failed: {0}")]
    Copy(String),
    /// The image cannot be created in its pool.
    #[error("its pool refuses: {0}")]
    Pool(String),
    /// The image cannot be given to this process to write it.
    #[error("cannot export the image: {0}")]
    Export(String),
}

impl ImageToolError {
    /// Whether an image in a pool was not created because there is one of its name.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        matches!(self, ImageToolError::Pool(why) if why.contains("File exists"))
    }

    /// Whether an image in a pool was not opened because there is none of its name.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        let missing = |desc: &str| desc.contains("No such file or directory");
        matches!(self, ImageToolError::Qmp(QmpError::Command { desc, .. }) if missing(desc))
    }
}

/// A QEMU without a guest that works on images.
#[derive(Debug)]
pub struct ImageTool {
    qmp: Qmp,
    /// The image that is exported.
    exported: Mutex<Option<export::Exported>>,
    /// Ended when dropped.
    child: Child,
}

/// How a tool opens an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Write,
    Read,
    /// Reads without locks: others may write the image meanwhile, and what is read may be anything.
    ReadUnlocked,
}

/// An image that an [`ImageTool`] has open to copy it.
#[derive(Clone, Debug)]
pub struct OpenSource {
    node: String,
    /// Size of the disk.
    pub bytes: u64,
}

impl ImageTool {
    /// Starts the QEMU program `qemu` as `user`.
    ///
    /// # Errors
    /// It cannot be started, or does not answer.
    pub async fn start(qemu: &Path, user: Option<(u32, u32)>) -> Result<ImageTool, ImageToolError> {
        let (ours, theirs) = StdUnixStream::pair()?;
        let mut command = helper(qemu, user);
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-S", "-machine", "none"])
            .args(["-accel", "tcg", "-sandbox", SANDBOX])
            // A socket, not stdio: descriptors arrive only over a socket.
            .args(["-chardev", "socket,id=qmp,fd=0,server=off", "-mon", "chardev=qmp,mode=control"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let limits = ChildLimits {
            address_space_bytes: Some(TOOL_ADDRESS_SPACE_BYTES),
            tasks: None,
            open_files: Some(TOOL_OPEN_FILES),
            file_bytes: None,
        };
        limit_child(command.as_std_mut(), limits);
        let child = spawn(command).await?;
        ours.set_nonblocking(true)?;
        let qmp = Qmp::negotiate(UnixStream::from_std(ours)?).await?;
        Ok(ImageTool { qmp, exported: Mutex::new(None), child })
    }

    /// Ends the tool in order, with its images closed. One that is dropped is killed: enough for
    /// files, but a pool of Ceph takes a killed client for alive during 30 s, and others that work
    /// on its images wait for it (Ceph 16).
    pub async fn end(mut self) {
        let ended = async {
            // Whatever it answers, what counts is that it ends.
            let _ = self.qmp.quit().await;
            self.child.wait().await
        };
        if tokio::time::timeout(END_LIMIT, ended).await.is_err() {
            tracing::debug!("a QEMU without a guest is killed");
        }
    }

    /// Creates an image in a pool of Ceph.
    ///
    /// # Errors
    /// The cluster refuses or does not respond. [`ImageToolError::is_taken`]: there is one already.
    pub async fn create_in_pool(
        &self,
        layer: &OpenLayer,
        bytes: u64,
    ) -> Result<(), ImageToolError> {
        let Some(rbd) = &layer.rbd else {
            return Err(ImageToolError::Pool("it is the path of a file".to_owned()));
        };
        let conf = self.qmp.add_descriptor("create", layer.file.as_fd(), "fd").await?;
        let options = json!({"driver": "rbd", "location": rbd.location(conf), "size": bytes});
        let mut events = self.qmp.events();
        let job = json!({"job-id": "create", "options": options});
        self.qmp.execute("blockdev-create", job).await?;
        let ended = async {
            loop {
                match events.recv().await {
                    Ok(event)
                        if event.name == "JOB_STATUS_CHANGE"
                            && event.data["id"] == "create"
                            && event.data["status"] == "concluded" =>
                    {
                        return Ok(());
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => {
                        return Err(QmpError::Closed { why: self.qmp.closed().await });
                    }
                }
            }
        };
        let late = || QmpError::Timeout { command: "blockdev-create".into(), limit: CREATE_LIMIT };
        tokio::time::timeout(CREATE_LIMIT, ended).await.map_err(|_| late())??;
        let jobs = self.qmp.execute("query-jobs", Value::Null).await?;
        let error = jobs[0]["error"].as_str().map(str::to_owned);
        self.qmp.execute("job-dismiss", json!({"id": "create"})).await?;
        error.map_or(Ok(()), |error| Err(ImageToolError::Pool(error)))
    }

    /// Changes the size of an image's disk. `layers`: the image and its backing files.
    ///
    /// # Errors
    /// QEMU refuses, for example a damaged image.
    pub async fn resize(&self, layers: &[OpenLayer], bytes: u64) -> Result<(), ImageToolError> {
        let top = self.open("image", layers, false).await?;
        let size = json!({"node-name": top, "size": bytes});
        self.qmp.execute("block_resize", size).await?;
        self.close_image(&top).await
    }

    /// Copies the disk of one image to another of the same size, then gives it `bytes`.
    ///
    /// # Errors
    /// QEMU refuses, or cannot read or write an image.
    pub async fn copy(
        &self,
        from: &[OpenLayer],
        to: &[OpenLayer],
        bytes: u64,
    ) -> Result<(), ImageToolError> {
        let source = self.open("from", from, true).await?;
        let target = self.open("to", to, false).await?;
        self.backup(&source, &target, "full").await?;
        self.qmp.execute("block_resize", json!({"node-name": target, "size": bytes})).await?;
        self.close_image(&target).await
    }

    /// Copies the disk of an open source to an image of the same size. `progress` gets the bytes
    /// that are copied.
    ///
    /// # Errors
    /// QEMU refuses, or cannot read or write an image.
    pub async fn copy_source(
        &self,
        source: &OpenSource,
        to: &[OpenLayer],
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImageToolError> {
        self.copy_parts(source, to, "full", progress).await
    }

    /// Copies what the image of an open source has itself to a layer of the same size. `to`: the
    /// layer and its backing files, which have what the source's have.
    ///
    /// # Errors
    /// As [`ImageTool::copy_source`].
    pub async fn copy_layer(
        &self,
        source: &OpenSource,
        to: &[OpenLayer],
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImageToolError> {
        self.copy_parts(source, to, "top", progress).await
    }

    async fn copy_parts(
        &self,
        source: &OpenSource,
        to: &[OpenLayer],
        sync: &str,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImageToolError> {
        let target = self.open("to", to, false).await?;
        tokio::select! {
            copied = self.backup(&source.node, &target, sync) => copied?,
            () = self.report(progress) => {}
        }
        self.close_image(&target).await
    }

    /// Reports the progress of the copy, without end.
    async fn report(&self, progress: &(dyn Fn(u64) + Send + Sync)) {
        loop {
            tokio::time::sleep(PROGRESS_INTERVAL).await;
            let Ok(jobs) = self.qmp.execute("query-block-jobs", Value::Null).await else {
                // The copy itself will fail.
                return std::future::pending().await;
            };
            if let Some(bytes) = jobs[0]["offset"].as_u64() {
                progress(bytes);
            }
        }
    }

    /// Opens an image and its backing files, to copy it.
    ///
    /// # Errors
    /// QEMU refuses, for example an image that another QEMU writes.
    pub async fn open_source(&self, layers: &[OpenLayer]) -> Result<OpenSource, ImageToolError> {
        let node = self.open("from", layers, true).await?;
        self.source(node).await
    }

    /// Opens an image of another format, which must not refer to other files. `driver`: QEMU's
    /// block driver. `window`: offset and length of the image in the file, if it is not all of it.
    ///
    /// # Errors
    /// QEMU refuses, for example a damaged image.
    pub async fn open_foreign(
        &self,
        file: BorrowedFd<'_>,
        driver: &str,
        window: Option<(u64, u64)>,
    ) -> Result<OpenSource, ImageToolError> {
        let added = self.qmp.execute_with_fd("add-fd", Value::Null, file).await?;
        let set = added["fdset-id"].as_i64().unwrap_or_default();
        let add = async |node: Value| self.qmp.execute("blockdev-add", node).await;
        add(json!({"driver": "file", "node-name": "from-file", "locking": "on",
            "filename": format!("/dev/fdset/{set}"), "read-only": true}))
        .await?;
        let mut below = "from-file";
        if let Some((offset, size)) = window {
            below = "from-window";
            add(json!({"driver": "raw", "node-name": below, "file": "from-file",
                "offset": offset, "size": size, "read-only": true}))
            .await?;
        }
        let mut node = json!({"driver": driver, "node-name": "from", "file": below,
            "read-only": true});
        if driver == "vmdk" {
            node["backing"] = Value::Null;
        }
        add(node).await?;
        self.source("from".to_owned()).await
    }

    async fn source(&self, node: String) -> Result<OpenSource, ImageToolError> {
        let nodes = self.qmp.execute("query-named-block-nodes", json!({"flat": true})).await?;
        let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
        let found = nodes.iter().find(|found| found["node-name"] == node.as_str());
        let bytes = found.and_then(|found| found["image"]["virtual-size"].as_u64());
        let bytes = bytes.ok_or_else(|| ImageToolError::Copy("it has no size".to_owned()))?;
        Ok(OpenSource { node, bytes })
    }

    /// Writes what a layer has of its own into the image below it, which grows to `bytes`. `top`:
    /// the layer; `below`: that image and its backing files.
    ///
    /// # Errors
    /// QEMU refuses, or cannot read or write an image. The layer still covers all that was written.
    pub async fn merge(
        &self,
        top: &[OpenLayer],
        below: &[OpenLayer],
        bytes: u64,
    ) -> Result<(), ImageToolError> {
        // Without its backing file, only what the layer has itself is allocated in it.
        let source = self.open("from", &top[..top.len().min(1)], true).await?;
        let target = self.open("to", below, false).await?;
        self.qmp.execute("block_resize", json!({"node-name": target, "size": bytes})).await?;
        self.backup(&source, &target, "top").await?;
        self.close_image(&target).await
    }

    /// Copies one open image to another; `sync`: all of it, or only what it has itself.
    async fn backup(&self, source: &str, target: &str, sync: &str) -> Result<(), ImageToolError> {
        let mut events = self.qmp.events();
        let job = json!({"job-id": "copy", "device": source, "target": target, "sync": sync});
        self.qmp.execute("blockdev-backup", job).await?;
        let ended = async {
            loop {
                match events.recv().await {
                    Ok(event) if event.name == "BLOCK_JOB_COMPLETED" => {
                        return match event.data["error"].as_str() {
                            Some(error) => Err(ImageToolError::Copy(error.to_owned())),
                            None => Ok(()),
                        };
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => {
                        return Err(QmpError::Closed { why: self.qmp.closed().await }.into());
                    }
                }
            }
        };
        let late = || QmpError::Timeout { command: "blockdev-backup".into(), limit: COPY_LIMIT };
        tokio::time::timeout(COPY_LIMIT, ended).await.map_err(|_| late())?
    }

    /// Opens an image; returns its node.
    async fn open(
        &self,
        name: &str,
        layers: &[OpenLayer],
        readonly: bool,
    ) -> Result<String, ImageToolError> {
        let access = if readonly { Access::Read } else { Access::Write };
        Ok(self.open_parts(name, layers, access).await?.0.top)
    }

    /// Opens an image; returns its nodes and the descriptor sets of its files.
    async fn open_parts(
        &self,
        name: &str,
        layers: &[OpenLayer],
        access: Access,
    ) -> Result<(DriveParts, Vec<i64>), ImageToolError> {
        let format = layers.first().map_or(DiskFormat::Raw, |layer| layer.format);
        let readonly = access != Access::Write;
        let disk = ResolvedDisk { readonly, ..Disk::new("", format).into() };
        let passed = self.qmp.add_layers(name, layers).await?;
        let mut parts = drives::disk_parts(name, &disk, &passed);
        if access == Access::ReadUnlocked {
            parts.nodes.iter_mut().for_each(|node| node["force-share"] = true.into());
        }
        for node in &parts.nodes {
            self.qmp.execute("blockdev-add", node.clone()).await?;
        }
        // Images in pools take no descriptor set.
        let sets = passed.iter().filter(|layer| layer.rbd.is_none()).map(|layer| layer.number);
        Ok((parts, sets.collect()))
    }

    /// Closes an image and what it is in, which writes what QEMU still holds. A pool of Ceph takes
    /// a client that ends without that for alive during 30 s (Ceph 16).
    async fn close_image(&self, image: &str) -> Result<(), ImageToolError> {
        self.close(image).await?;
        self.close(&format!("{image}-file")).await
    }

    /// Closes a node.
    async fn close(&self, node: &str) -> Result<(), ImageToolError> {
        self.qmp.execute("blockdev-del", json!({"node-name": node})).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(
        format: DiskFormat,
        bytes: u64,
        backing: Option<(&Path, DiskFormat)>,
    ) -> io::Result<File> {
        let file = tempfile::tempfile()?;
        write_image(&file, format, bytes, backing)?;
        Ok(file)
    }

    #[test]
    fn a_new_image_has_its_size_and_backing_file() {
        let base = Some((Path::new("/srv/base.img"), DiskFormat::Raw));
        let head = |format, backing| image_head(&written(format, 3 << 30, backing).unwrap());
        let wanted = ImageHead {
            format: DiskFormat::Qcow2,
            virtual_bytes: 3 << 30,
            backing: Some("/srv/base.img".to_owned()),
        };
        assert_eq!(head(DiskFormat::Qcow2, base).unwrap(), wanted);
        let whole = ImageHead { backing: None, ..wanted };
        assert_eq!(head(DiskFormat::Qcow2, None).unwrap(), whole);
        let raw = ImageHead { format: DiskFormat::Raw, ..whole };
        assert_eq!(head(DiskFormat::Raw, None).unwrap(), raw);
        assert!(written(DiskFormat::Raw, 512, base).is_err());
        let long = format!("/{}", "x".repeat(MOST_NAME_BYTES));
        let long = Some((Path::new(&long), DiskFormat::Raw));
        assert!(written(DiskFormat::Qcow2, 512, long).is_err());
    }

    #[test]
    fn qemu_finds_no_fault_with_a_new_image() {
        if !Path::new("/usr/bin/qemu-img").exists() {
            eprintln!("skipped: no qemu-img (apt-get install qemu-utils)");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for bytes in [512, 20 << 30, (5 << 40) + 512, MOST_IMAGE_BYTES] {
            let path = folder.path().join("new.qcow2");
            write_image(&File::create(&path).unwrap(), DiskFormat::Qcow2, bytes, None).unwrap();
            let check = std::process::Command::new("qemu-img").arg("check").arg(&path).output();
            let check = check.unwrap();
            assert!(check.status.success(), "{bytes}: {check:?}");
            let info = std::process::Command::new("qemu-img")
                .args(["info", "--output=json"])
                .arg(&path)
                .output()
                .unwrap();
            let info: Value = serde_json::from_slice(&info.stdout).unwrap();
            assert_eq!(info["virtual-size"].as_u64(), Some(bytes));
        }
    }

    #[test]
    fn sizes_have_bounds() {
        for bytes in [0, 511, MOST_IMAGE_BYTES + 512] {
            assert!(check_image_bytes(bytes).is_err(), "{bytes}");
        }
    }

    proptest! {
        #[test]
        fn reading_any_head_does_not_panic(
            changes in prop::collection::vec((0_u64..300, any::<u8>()), 0..20),
            length in 0_u64..4096,
        ) {
            let backing = Some((Path::new("/base"), DiskFormat::Qcow2));
            let file = written(DiskFormat::Qcow2, 1 << 30, backing).unwrap();
            for (at, byte) in changes {
                file.write_all_at(&[byte], at).unwrap();
            }
            file.set_len(length).unwrap();
            let _ = image_head(&file);
        }
    }
}
