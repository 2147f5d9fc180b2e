//! Images of a guest's two disks, in a folder for each host: a qcow2 image on a base that both
//! folders have, and a raw image.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{MARK, write_base};
use godwit_qemu::{Disk, DiskFormat};

use super::content::FileContent;

/// Name of the base in each folder.
const BASE: &str = "base.raw";
const TOP: &str = "top.qcow2";
const DATA: &str = "data.raw";

/// Sizes of the disks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Size that the guest sees.
    pub(super) virtual_bytes: u64,
    /// Content of the base.
    pub(super) base_bytes: u64,
    /// Content of each disk, without the base.
    pub(super) used_bytes: u64,
}

/// One image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) path: PathBuf,
    pub(super) format: DiskFormat,
}

impl Image {
    pub(super) fn disk(&self) -> Disk {
        Disk::new(&self.path, self.format)
    }

    /// Returns the base, which is beside it.
    fn base(&self) -> Option<PathBuf> {
        (self.format == DiskFormat::Qcow2).then(|| self.path.with_file_name(BASE))
    }

    /// Describes it to QEMU's tools, with the base that it must have.
    fn options(&self) -> String {
        let format = self.format.name();
        let path = self.path.display();
        match self.base() {
            Some(base) => format!(
                "driver={format},file.driver=file,file.filename={path},backing.driver=raw,\
                 backing.file.driver=file,backing.file.filename={}",
                base.display()
            ),
            None => format!("driver={format},file.driver=file,file.filename={path}"),
        }
    }

    /// Describes a part of it to QEMU's tools as if it were a raw image.
    fn part_options(&self, offset: u64, bytes: u64) -> String {
        let format = self.format.name();
        let path = self.path.display();
        let file = match self.format {
            DiskFormat::Raw => format!("file.driver=file,file.filename={path}"),
            DiskFormat::Qcow2 => {
                format!("file.driver={format},file.file.driver=file,file.file.filename={path}")
            }
        };
        format!("driver=raw,offset={offset},size={bytes},{file}")
    }
}

/// Folders of both hosts, `a` and `b`.
#[derive(Debug)]
pub(super) struct Folders {
    root: PathBuf,
    sizes: Sizes,
    /// Content of the disks behind what the guest fills; none: the guest fills everything.
    content: Option<Rc<FileContent>>,
}

impl Folders {
    /// Makes the folders, with the base in both.
    pub(super) fn make(
        root: &Path,
        sizes: Sizes,
        content: Option<Rc<FileContent>>,
    ) -> Result<Folders> {
        fs::create_dir(root)?;
        let folders = Folders { root: root.to_owned(), sizes, content };
        for name in ["a", "b"] {
            let folder = folders.at(name);
            fs::create_dir(&folder)?;
            write_base(&folder.join(BASE), 0, sizes.base_bytes, sizes.base_bytes)?;
        }
        Ok(folders)
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Returns the other folder than that of an image.
    pub(super) fn other(&self, image: &Image) -> &'static str {
        if image.path.starts_with(self.at("a")) { "b" } else { "a" }
    }

    /// Makes two empty images in a folder.
    pub(super) fn make_images(&self, name: &str) -> Result<Vec<Image>> {
        let folder = self.at(name);
        let (top, data) = (folder.join(TOP), folder.join(DATA));
        let base = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", BASE];
        let size = self.sizes.virtual_bytes.to_string();
        qemu_img(Command::new("qemu-img").args(base).arg(&top).arg(size))?;
        let file = File::create_new(&data);
        file.and_then(|file| file.set_len(self.sizes.virtual_bytes))
            .with_context(|| format!("cannot make {}", data.display()))?;
        let images = [(top, DiskFormat::Qcow2), (data, DiskFormat::Raw)];
        Ok(images.map(|(path, format)| Image { path, format }).to_vec())
    }

    /// Makes two images for a guest that boots in a folder, with the files that they hold.
    pub(super) fn make_filled_images(&self, name: &str) -> Result<Vec<Image>> {
        let images = self.make_images(name)?;
        let Some(content) = &self.content else { return Ok(images) };
        let bytes = content.bytes_per_disk;
        let from = Image { path: content.path.clone(), format: DiskFormat::Raw };
        for (number, (image, (_, filled))) in (0_u64..).zip(images.iter().zip(self.fills())) {
            // `-S 0`: zeros are content, too.
            let convert = ["convert", "-n", "-S", "0", "-t", "writeback"];
            let parts =
                [from.part_options(number * bytes, bytes), image.part_options(filled, bytes)];
            let options = ["--image-opts", "--target-image-opts"];
            qemu_img(Command::new("qemu-img").args(convert).args(options).args(parts))
                .with_context(|| format!("cannot fill {}", image.path.display()))?;
        }
        Ok(images)
    }

    /// Removes everything except the bases and the marks of agents.
    pub(super) fn clear(&self) -> Result<()> {
        for name in ["a", "b"] {
            for entry in fs::read_dir(self.at(name))? {
                let path = entry?.path();
                if !path.ends_with(BASE) && !path.ends_with(MARK) {
                    fs::remove_file(&path)
                        .with_context(|| format!("cannot remove {}", path.display()))?;
                }
            }
        }
        Ok(())
    }

    /// Returns the disks that the guest fills, by the names of their devices, and how far.
    pub(super) fn fills(&self) -> [(&'static str, u64); 2] {
        let Sizes { base_bytes, used_bytes, .. } = self.sizes;
        let filled_bytes =
            used_bytes - self.content.as_ref().map_or(0, |content| content.bytes_per_disk);
        [("vda", base_bytes + filled_bytes), ("vdb", filled_bytes)]
    }

    /// Returns the bytes that must travel with the guest.
    pub(super) fn used_bytes(&self) -> u64 {
        2 * self.sizes.used_bytes
    }
}

/// Removes images.
pub(super) fn remove(images: &[Image]) -> Result<()> {
    images.iter().try_for_each(|image| {
        fs::remove_file(&image.path)
            .with_context(|| format!("cannot remove {}", image.path.display()))
    })
}

/// Compares images byte by byte, as guests see them. Nobody may write them.
pub(super) fn expect_same(ones: &[Image], others: &[Image]) -> Result<()> {
    ensure!(!ones.is_empty() && ones.len() == others.len(), "there are no images to compare");
    ones.iter().zip(others).try_for_each(|(one, other)| {
        // `-U`: QEMU has the new image open.
        let compare = ["compare", "-q", "-U", "--image-opts"];
        qemu_img(Command::new("qemu-img").args(compare).args([one.options(), other.options()]))
            .with_context(|| format!("{} and {}", one.path.display(), other.path.display()))
    })
}

fn qemu_img(command: &mut Command) -> Result<()> {
    let output = command.output().context("cannot run qemu-img (apt-get install qemu-utils)")?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img: {} {}", output.status, why.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_described_with_its_base() {
        let image = |name: &str, format| Image { path: Path::new("/d/a").join(name), format };
        assert_eq!(
            image(DATA, DiskFormat::Raw).options(),
            "driver=raw,file.driver=file,file.filename=/d/a/data.raw"
        );
        assert!(
            image(TOP, DiskFormat::Qcow2)
                .options()
                .ends_with(",backing.file.filename=/d/a/base.raw")
        );
        let sizes = Sizes { virtual_bytes: 0, base_bytes: 5, used_bytes: 7 };
        let mut folders = Folders { root: "/d".into(), sizes, content: None };
        assert_eq!(folders.other(&image(TOP, DiskFormat::Qcow2)), "b");
        assert_eq!(folders.fills(), [("vda", 12), ("vdb", 7)]);
        assert_eq!(folders.used_bytes(), 14);
        let content = FileContent { path: "/c".into(), bytes_per_disk: 4, zstd_ratio: 2.0 };
        folders.content = Some(Rc::new(content));
        assert_eq!(folders.fills(), [("vda", 8), ("vdb", 3)]);
        assert_eq!(folders.used_bytes(), 14);
    }

    #[test]
    fn files_are_written_behind_what_the_guest_fills() {
        let image = |name: &str, format| Image { path: Path::new("/d/a").join(name), format };
        assert_eq!(
            image(TOP, DiskFormat::Qcow2).part_options(8, 4),
            "driver=raw,offset=8,size=4,file.driver=qcow2,file.file.driver=file,\
             file.file.filename=/d/a/top.qcow2"
        );
        assert_eq!(
            image(DATA, DiskFormat::Raw).part_options(3, 4),
            "driver=raw,offset=3,size=4,file.driver=file,file.filename=/d/a/data.raw"
        );
    }
}
