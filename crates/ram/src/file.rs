//! A file of pages that is not mapped: a guest's memory, an image of a disk, or a file for retained
//! pages. All or part of it may be given back, or change, at any time without harm to the reader.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::error::RamError;
use crate::pages::{PAGE_SIZE, PageRange};
use crate::region::Region;

/// Open file of pages. It keeps its data after its name is removed, until it is dropped or emptied.
#[derive(Debug)]
pub struct PageFile {
    file: File,
    path: PathBuf,
    pages: u64,
}

impl PageFile {
    /// Opens the file of a region once more.
    ///
    /// # Errors
    /// [`RamError::Io`] if the process has no free descriptors.
    pub fn of(region: &Region) -> Result<PageFile, RamError> {
        let file = region
            .file()
            .try_clone()
            .map_err(|source| RamError::io("open once more", region.path(), source))?;
        Ok(PageFile { file, path: region.path().to_owned(), pages: region.pages() })
    }

    /// Takes an open file, or a block device, of which at most so many pages are read. What follows
    /// the last whole page is left out.
    ///
    /// # Errors
    /// [`RamError::Io`]: its size cannot be determined.
    pub fn of_file(file: File, path: &Path, most_pages: u64) -> Result<PageFile, RamError> {
        let end = rustix::fs::seek(&file, SeekFrom::End(0))
            .map_err(|errno| RamError::io("find the end of", path, errno))?;
        Ok(PageFile { file, path: path.to_owned(), pages: (end / PAGE_SIZE).min(most_pages) })
    }

    /// Takes an empty file that so many pages may be written to.
    #[must_use]
    pub fn empty_file(file: File, path: &Path, pages: u64) -> PageFile {
        PageFile { file, path: path.to_owned(), pages }
    }

    /// Returns the size in pages at the time of opening.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the memory that the file occupies now, bytes.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// Copies whole pages, from `page` on, into `to`. A hole reads as zeros and stays a hole.
    ///
    /// # Errors
    /// [`RamError::Io`] if the file is shorter than that (it was emptied).
    pub fn copy_out(&self, page: u64, to: &mut [u8]) -> Result<(), RamError> {
        let at = page.checked_mul(PAGE_SIZE).ok_or(io::ErrorKind::InvalidInput.into());
        at.and_then(|at| self.file.read_exact_at(to, at))
            .map_err(|source| RamError::io("read pages of", &self.path, source))
    }

    /// Writes whole pages from `page` on, and has the disk take them: the kernel's cache does not
    /// fill with them.
    ///
    /// # Errors
    /// [`RamError::Io`]: the disk is full, or fails.
    pub fn write_through(&self, page: u64, from: &[u8]) -> Result<(), RamError> {
        let failed = |source| RamError::io("write pages to", &self.path, source);
        let at = page.checked_mul(PAGE_SIZE).ok_or(io::ErrorKind::InvalidInput.into());
        at.and_then(|at| self.file.write_all_at(from, at)).map_err(failed)?;
        self.file.sync_data().map_err(failed)?;
        let (at, length) = (page * PAGE_SIZE, std::num::NonZeroU64::new(from.len() as u64));
        // Advice: without it the pages stay in the cache for a while.
        let _ = rustix::fs::fadvise(&self.file, at, length, Advice::DontNeed);
        Ok(())
    }

    /// Returns the first page from `page` on that may hold data other than zeros, or `None` if only
    /// zeros follow.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn data_from(&self, page: u64) -> Result<Option<u64>, RamError> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(page.saturating_mul(PAGE_SIZE))) {
            Ok(data) => Ok(Some(data / PAGE_SIZE).filter(|data| *data < self.pages)),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(RamError::io("look for data in", &self.path, errno)),
        }
    }

    /// Returns all of the file's memory to the kernel, `step_bytes` at a time, even if other
    /// processes have the file open. Use it only on files that no hypervisor maps: a hypervisor
    /// would be killed.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn empty(&self, step_bytes: u64) -> Result<(), RamError> {
        let failed = |source| RamError::io("give back the memory of", &self.path, source);
        let mut length = self.file.metadata().map_err(failed)?.len();
        while length > 0 {
            length = length.saturating_sub(step_bytes.max(PAGE_SIZE));
            self.file.set_len(length).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the memory of these pages to the kernel. They read as zeros from then on, so the
    /// caller must know that they are gone. As with [`PageFile::empty`], no hypervisor may map the
    /// file.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn punch(&self, pages: PageRange) -> Result<(), RamError> {
        // The file's size stays, also where these pages are its end.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punch =
            || rustix::fs::fallocate(&self.file, flags, pages.offset_bytes(), pages.len_bytes());
        if pages.is_empty() {
            return Ok(());
        }
        rustix::io::retry_on_intr(punch)
            .map_err(|errno| RamError::io("give back memory of", &self.path, errno))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_given_back_and_the_rest_stays() {
        let folder = tempfile::tempdir().unwrap();
        let region = Region::create(&folder.path().join("ram"), 8 * PAGE_SIZE, None).unwrap();
        region.copy_in(0, &[7; 8 * 4096]).unwrap();
        let file = PageFile::of(&region).unwrap();
        drop(region);
        let before = file.taken_bytes();
        file.punch(PageRange::new(2, 0)).unwrap();
        file.punch(PageRange::new(0, 3)).unwrap();
        file.punch(PageRange::new(6, 2)).unwrap();
        assert_eq!(before - file.taken_bytes(), 5 * PAGE_SIZE);
        let mut pages = [1; 8 * 4096];
        file.copy_out(0, &mut pages).unwrap();
        let expected = [0, 0, 0, 7, 7, 7, 0, 0];
        assert!(
            pages.chunks(4096).zip(expected).all(|(page, byte)| page == [byte; 4096]),
            "what is left is as it was"
        );
        assert_eq!((file.data_from(0).unwrap(), file.data_from(6).unwrap()), (Some(3), None));
    }

    #[test]
    fn it_holds_the_memory_until_it_is_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ram");
        let region = Region::create(&path, 8 * PAGE_SIZE, None).unwrap();
        region.copy_in(5 * PAGE_SIZE, &[7; 4096]).unwrap();
        let file = PageFile::of(&region).unwrap();
        drop(region);
        std::fs::remove_file(&path).unwrap();
        let mut page = [0; 4096];
        file.copy_out(5, &mut page).unwrap();
        assert_eq!((page, file.pages(), file.data_from(6).unwrap()), ([7; 4096], 8, None));
        assert!(file.taken_bytes() > 0);
        assert!(
            file.copy_out(8, &mut page).is_err() && file.copy_out(u64::MAX, &mut page).is_err()
        );
        file.empty(2 * PAGE_SIZE).unwrap();
        assert_eq!(file.taken_bytes(), 0);
        assert!(file.copy_out(5, &mut page).is_err());
    }

    #[test]
    fn a_file_has_its_whole_pages_up_to_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, [vec![1; 4096], vec![2; 4096], vec![3; 100]].concat()).unwrap();
        let open = |most| PageFile::of_file(File::open(&path).unwrap(), &path, most).unwrap();
        assert_eq!((open(9).pages(), open(1).pages()), (2, 1));
        let mut page = [0; 4096];
        open(9).copy_out(1, &mut page).unwrap();
        assert_eq!(page, [2; 4096]);
        // It was truncated after it was opened.
        let image = open(9);
        File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert!(image.copy_out(1, &mut page).is_err());
    }

    #[test]
    fn written_pages_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = tempfile::tempfile_in(folder.path()).unwrap();
        let file = PageFile::empty_file(file, folder.path(), 8);
        file.write_through(3, &[7; 2 * 4096]).unwrap();
        let mut pages = [1; 2 * 4096];
        file.copy_out(3, &mut pages).unwrap();
        assert_eq!((pages, file.taken_bytes()), ([7; 2 * 4096], 2 * PAGE_SIZE));
        assert!(file.copy_out(7, &mut pages).is_err(), "nothing was written there");
    }

    /// Checks that a reader survives: a destination that discards a shadow empties its files while
    /// a reader may still be handling zero pages.
    #[test]
    fn zeros_for_an_emptied_file_kill_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let region = Region::create(&folder.path().join("ram"), 8 * PAGE_SIZE, None).unwrap();
        region.copy_in(0, &[7; 8 * 4096]).unwrap();
        // A page that held data once counts as data from then on.
        region.data_ranges(region.all_pages(), &mut Vec::new()).unwrap();
        PageFile::of(&region).unwrap().empty(PAGE_SIZE).unwrap();
        let _ = region.zero(region.all_pages());
    }
}
