//! Where a content's pages are: a guest's memory, an image of a disk, or a file of this host that
//! retained pages were moved to. All three are files, and are read in the same way.

use std::fmt;
use std::fs::File;
use std::path::Path;

use godwit_ram::{PAGE_SIZE, PageFile, PageRange, RamError, Region};
use godwit_wire::PAGE_SIZE as PAGE_BYTES;

/// Pages of a block of content.
#[derive(Debug)]
pub(super) enum Store {
    /// As they are in a file.
    Plain(PageFile),
    /// Encrypted in a file that was written here.
    Sealed(SealedFile),
}

impl Store {
    pub(super) fn of_region(region: &Region) -> Result<Store, RamError> {
        PageFile::of(region).map(Store::Plain)
    }

    fn file(&self) -> &PageFile {
        match self {
            Store::Plain(file) => file,
            Store::Sealed(SealedFile { file, .. }) => file,
        }
    }

    pub(super) fn pages(&self) -> u64 {
        self.file().pages()
    }

    pub(super) fn taken_bytes(&self) -> u64 {
        self.file().taken_bytes()
    }

    pub(super) fn copy_out(&self, page: u64, to: &mut [u8]) -> Result<(), RamError> {
        self.file().copy_out(page, to)?;
        if let Store::Sealed(sealed) = self {
            sealed.turn(page, to);
        }
        Ok(())
    }

    /// Writes pages to a sealed file; each page is written once.
    pub(super) fn copy_in(&self, page: u64, pages: &mut [u8]) -> Result<(), RamError> {
        let Store::Sealed(sealed) = self else { return Ok(()) };
        sealed.turn(page, pages);
        sealed.file.write_through(page, pages)
    }

    pub(super) fn data_from(&self, page: u64) -> Result<Option<u64>, RamError> {
        self.file().data_from(page)
    }

    pub(super) fn empty(&self, step_bytes: u64) -> Result<(), RamError> {
        self.file().empty(step_bytes)
    }

    pub(super) fn punch(&self, pages: PageRange) -> Result<(), RamError> {
        self.file().punch(pages)
    }
}

/// File whose pages are encrypted with a key that only this process has, so that they are worth
/// nothing on the disk when it has ended.
///
/// The key stream of a page is BLAKE3 with the key, of the page's number, extended to the page's
/// length. A page is written once, so no part of the stream is used twice. What somebody changes in
/// the file is noticed by the page's digest.
pub(super) struct SealedFile {
    file: PageFile,
    key: [u8; blake3::KEY_LEN],
}

impl fmt::Debug for SealedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedFile").field("file", &self.file).finish_non_exhaustive()
    }
}

impl SealedFile {
    /// Takes an empty file for so many pages.
    pub(super) fn new(file: File, path: &Path, pages: u64) -> Result<SealedFile, RamError> {
        let mut key = [0; blake3::KEY_LEN];
        let mut filled = 0;
        while let Some(rest) = key.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let flags = rustix::rand::GetRandomFlags::empty();
            filled += rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut *rest, flags))
                .map_err(|errno| RamError::Io {
                    what: "make a key for",
                    path: path.to_owned(),
                    source: errno.into(),
                })?;
        }
        Ok(SealedFile { file: PageFile::empty_file(file, path, pages), key })
    }

    /// Encrypts pages from `page` on, or decrypts them.
    fn turn(&self, page: u64, pages: &mut [u8]) {
        let mut stream = [0; PAGE_BYTES as usize];
        for (number, page) in (page..).zip(pages.chunks_mut(PAGE_BYTES as usize)) {
            let mut hasher = blake3::Hasher::new_keyed(&self.key);
            hasher.update(&number.to_le_bytes());
            hasher.finalize_xof().fill(&mut stream);
            page.iter_mut().zip(&stream).for_each(|(byte, key)| *byte ^= key);
        }
    }
}

const _: () = assert!(PAGE_SIZE == PAGE_BYTES as u64);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn the_file_does_not_show_what_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let file = tempfile::tempfile_in(folder.path()).unwrap();
        let on_disk = file.try_clone().unwrap();
        let store = Store::Sealed(SealedFile::new(file, folder.path(), 8).unwrap());
        store.copy_in(2, &mut [7; 2 * 4096]).unwrap();
        store.copy_in(4, &mut [7; 4096]).unwrap();
        let mut pages = [0; 3 * 4096];
        store.copy_out(2, &mut pages).unwrap();
        assert_eq!(pages, [7; 3 * 4096]);
        let mut one = [0; 4096];
        store.copy_out(3, &mut one).unwrap();
        assert_eq!(one, [7; 4096]);
        on_disk.read_exact_at(&mut pages, 2 * 4096).unwrap();
        // Equal pages differ, and none of them has more equal bytes than chance gives.
        let chunks: Vec<_> = pages.chunks(4096).collect();
        assert!(chunks[0] != chunks[1] && chunks[1] != chunks[2]);
        assert!(pages.iter().filter(|byte| **byte == 7).count() < 3 * 4096 / 64);
    }
}
