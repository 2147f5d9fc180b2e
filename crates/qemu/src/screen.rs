//! The screen of a VM: QEMU's arguments, viewers and pictures.
//!
//! QEMU's VNC server listens nowhere. For each viewer the agent hands QEMU one end of a socket pair
//! over the monitor. A picture goes to a memory file that the agent has opened. So a screen needs
//! no path, no port and no password.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::json;

use crate::process::path_in_qemu;
use crate::qmp::{Qmp, QmpError};
use crate::spec::Video;

/// Memory of the VGA adapter, in MiB: enough for 2560x1600 in true colour. It travels in QEMU's own
/// stream. A resolution that needs more is not offered to the guest.
const VGA_MEMORY_MIB: u32 = 16;
/// Most bytes of a picture as QEMU writes it (PPM): more than 3840x2160 needs.
pub const MOST_PICTURE_BYTES: u64 = 32 << 20;
/// Most pixels of a side.
const MOST_SIDE_PIXELS: u32 = 16_384;
/// Longest head of a picture that is read: three numbers and the format's name.
const MOST_HEAD_BYTES: usize = 64;

/// Distinguishes the descriptors of viewers at one monitor.
static NEXT_VIEWER: AtomicU64 = AtomicU64::new(0);

/// Returns QEMU's arguments for a screen: pairs of option and value.
pub(crate) fn arguments(video: Video) -> Vec<(&'static str, String)> {
    let adapter = match video {
        Video::None => return Vec::new(),
        Video::Vga => json!({"driver": "VGA", "id": "video", "vgamem_mb": VGA_MEMORY_MIB}),
        Video::Virtio => json!({"driver": "virtio-vga", "id": "video", "max_outputs": 1}),
    };
    // A tablet reports where the pointer is, so viewers need not capture it. The keyboard is the
    // machine's own (PS/2), which every firmware and guest knows.
    vec![
        ("-vnc", "none,share=force-shared".to_owned()),
        ("-device", adapter.to_string()),
        ("-device", json!({"driver": "qemu-xhci", "id": "usb"}).to_string()),
        ("-device", json!({"driver": "usb-tablet", "id": "tablet", "bus": "usb.0"}).to_string()),
    ]
}

/// Why there is no picture of a screen.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// QEMU writes none.
    #[error(transparent)]
    Qemu(#[from] QmpError),
    /// The memory file cannot be created or read.
    #[error("cannot read the picture: {0}")]
    Read(#[from] std::io::Error),
    /// What QEMU wrote is not a picture within the bounds.
    #[error("QEMU wrote no valid picture: {why}")]
    Invalid {
        /// What is wrong with it.
        why: &'static str,
    },
}

/// Picture of a screen: 8 bits each of red, green and blue, row by row from the top.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    /// Exactly `width * height * 3` bytes.
    pub pixels: Vec<u8>,
}

impl Qmp {
    /// Hands QEMU a connected stream socket on which a viewer speaks RFB, the protocol of VNC.
    /// QEMU gets a duplicate; the caller drops its own.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also, the VM has no screen.
    pub async fn add_viewer(&self, socket: BorrowedFd<'_>) -> Result<(), QmpError> {
        let name = format!("viewer-{}", NEXT_VIEWER.fetch_add(1, Ordering::Relaxed));
        self.execute_with_fd("getfd", json!({"fdname": name}), socket).await?;
        let added = self
            .execute(
                "add_client",
                json!({"protocol": "vnc", "fdname": name, "skipauth": true, "tls": false}),
            )
            .await;
        if added.is_err() {
            // QEMU keeps a descriptor that nothing has taken.
            let _ = self.execute("closefd", json!({"fdname": name})).await;
        }
        added.map(drop)
    }

    /// Takes a picture of the screen.
    ///
    /// # Errors
    /// QEMU refuses, or writes something else than a picture.
    pub async fn picture(&self) -> Result<Picture, PictureError> {
        let file = memory_file()?;
        // QEMU picks the descriptor of a set whose access fits, and writes only.
        let path = path_in_qemu(file.as_raw_fd());
        let written: OwnedFd = File::options().write(true).open(path)?.into();
        let set = self.add_set("picture", written.as_fd()).await?;
        drop(written);
        let path = format!("/dev/fdset/{set}");
        let dumped = self.execute("screendump", json!({"filename": path})).await;
        let removed = self.execute("remove-fd", json!({"fdset-id": set})).await;
        dumped?;
        removed?;
        read_blocking(file).await
    }
}

fn memory_file() -> std::io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(rustix::fs::memfd_create("godwit-picture", flags)?))
}

async fn read_blocking(file: File) -> Result<Picture, PictureError> {
    match tokio::task::spawn_blocking(move || read(&file)).await {
        Ok(picture) => picture,
        Err(error) => Err(std::io::Error::other(error).into()),
    }
}

/// Reads what QEMU wrote, which from then on cannot change.
fn read(file: &File) -> Result<Picture, PictureError> {
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(file, seals).map_err(std::io::Error::from)?;
    let length = file.metadata()?.len();
    if length > MOST_PICTURE_BYTES {
        return Err(PictureError::Invalid { why: "it is too large" });
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Picture::parse(bytes)
}

impl Picture {
    /// Parses a picture in the form that QEMU writes: binary PPM with 255 levels.
    ///
    /// # Errors
    /// It is in another form, or its length does not match its size.
    pub fn parse(mut bytes: Vec<u8>) -> Result<Picture, PictureError> {
        let invalid = |why| PictureError::Invalid { why };
        let head = &bytes[..bytes.len().min(MOST_HEAD_BYTES)];
        let (width, height, start) = head_of(head).ok_or_else(|| invalid("it is not a PPM"))?;
        let sides = 1..=MOST_SIDE_PIXELS;
        if !sides.contains(&width) || !sides.contains(&height) {
            return Err(invalid("its size is out of range"));
        }
        bytes.drain(..start);
        if bytes.len() as u64 != u64::from(width) * u64::from(height) * 3 {
            return Err(invalid("its length does not match its size"));
        }
        Ok(Picture { width, height, pixels: bytes })
    }
}

/// Parses `P6 WIDTH HEIGHT 255` with one character between the words and after the last one, as
/// QEMU writes it; returns the size and the length of the head.
fn head_of(head: &[u8]) -> Option<(u32, u32, usize)> {
    let mut words = head.splitn(5, u8::is_ascii_whitespace);
    let mut word = || words.next().and_then(|word| std::str::from_utf8(word).ok());
    let (kind, width, height, levels) = (word()?, word()?, word()?, word()?);
    words.next()?;
    let start = kind.len() + width.len() + height.len() + levels.len() + 4;
    let is_known = kind == "P6" && levels == "255";
    let number = |text: &str| text.parse().ok().filter(|_| !text.starts_with('+'));
    is_known.then_some((number(width)?, number(height)?, start))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn parse(head: &str, pixels: usize) -> Result<Picture, PictureError> {
        let mut bytes = head.as_bytes().to_vec();
        bytes.resize(head.len() + pixels, 7);
        Picture::parse(bytes)
    }

    #[test]
    fn a_picture_of_qemu_is_read() {
        let picture = parse("P6\n4 2\n255\n", 24).unwrap();
        assert_eq!((picture.width, picture.height), (4, 2));
        assert_eq!(picture.pixels, [7; 24]);
        // A first pixel that looks like white space belongs to the picture.
        let picture = Picture::parse(b"P6\n1 1\n255\n\n\n\n".to_vec()).unwrap();
        assert_eq!(picture.pixels, b"\n\n\n");
    }

    #[test]
    fn anything_else_is_refused() {
        for (head, pixels) in [
            ("", 0),
            ("P6", 0),
            ("P6\n4 2\n255", 0),
            ("P5\n4 2\n255\n", 24),
            ("P6\n4 2\n65535\n", 24),
            ("P6\n4 2\n255\n", 23),
            ("P6\n4 2\n255\n", 25),
            ("P6\n0 2\n255\n", 0),
            ("P6\n-4 -2\n255\n", 24),
            ("P6\n+4 2\n255\n", 24),
            ("P6\n99999 1\n255\n", 299_997),
            ("P6\n4294967296 1\n255\n", 24),
            ("P6\n4  2\n255\n", 24),
            ("P6\n# a comment\n4 2\n255\n", 24),
        ] {
            assert!(parse(head, pixels).is_err(), "{head:?} {pixels}");
        }
    }

    #[test]
    fn a_file_is_bounded_and_cannot_change_any_more() {
        let mut file = memory_file().unwrap();
        file.write_all(b"P6\n1 1\n255\nabc").unwrap();
        assert_eq!(read(&file).unwrap().pixels, b"abc");
        assert!(file.write_all(b"more").is_err(), "it can still be written");
        let huge = memory_file().unwrap();
        huge.set_len(MOST_PICTURE_BYTES + 1).unwrap();
        assert!(matches!(read(&huge), Err(PictureError::Invalid { .. })));
    }

    #[test]
    fn a_vm_without_a_screen_has_none_of_its_devices() {
        assert!(arguments(Video::None).is_empty());
        for video in [Video::Vga, Video::Virtio] {
            assert_eq!(arguments(video)[0].1, "none,share=force-shared");
        }
    }
}
