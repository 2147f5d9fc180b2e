//! Where the new image of a move goes: a file in a directory for VMs, or an image in a pool of
//! Ceph.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use godwit_api::ApiError;
use godwit_qemu::{OpenLayer, RbdImage};

use crate::agent::images::Place;
use crate::agent::images::pools::Pooled;
use crate::agent::images::staged::Staged;

/// Place of the new image.
#[derive(Debug)]
pub(super) enum Target {
    File(Place),
    Pool(Pooled),
}

impl Target {
    /// Removes the image, which nothing uses. One in a pool is removed a little later, if it still
    /// has this number; 0: its number is unknown.
    pub(super) fn remove(&self, number: u64) {
        match self {
            Target::File(place) => place.remove(),
            Target::Pool(pooled) => pooled.remove_later((number != 0).then_some(number)),
        }
    }

    /// Whether the image with this path is there already.
    pub(super) fn has(&self, path: &Path) -> bool {
        match self {
            Target::File(place) => {
                path.canonicalize().is_ok_and(|real| real.parent() == place.real.parent())
            }
            Target::Pool(pooled) => {
                RbdImage::of(path).is_some_and(|image| image.place() == pooled.image.place())
            }
        }
    }
}

/// A new image; removed when dropped, unless it was named.
#[derive(Debug)]
pub(super) struct NewImage<'a> {
    pub(super) target: &'a Target,
    /// The file without its name. An image in a pool has its name from the start.
    staged: Option<Staged<'a>>,
    /// Number of an image in a pool.
    pool_id: u64,
    is_named: bool,
}

impl<'a> NewImage<'a> {
    pub(super) fn file(target: &'a Target, staged: Staged<'a>) -> NewImage<'a> {
        NewImage { target, staged: Some(staged), pool_id: 0, is_named: false }
    }

    /// Returns an image that was created in a pool, opened for a QEMU, too.
    pub(super) async fn in_pool(
        target: &'a Target,
        pooled: &Pooled,
    ) -> Result<(NewImage<'a>, Vec<OpenLayer>), ApiError> {
        let mut new = NewImage { target, staged: None, pool_id: 0, is_named: false };
        new.pool_id = pooled.id().await;
        let layers = pooled.open(false)?;
        Ok((new, layers))
    }

    /// Returns a number that no later image of its name has; 0 if it is unknown.
    pub(super) fn id(&self) -> Result<u64, ApiError> {
        let Some(staged) = &self.staged else { return Ok(self.pool_id) };
        let data = staged.file.metadata().map_err(|error| staged.place.failed("create", &error))?;
        Ok(data.ino())
    }

    /// Waits until copies have used up the room of its directory; returns that error. A pool
    /// refuses the copy itself.
    pub(super) async fn until_full(&self) -> ApiError {
        match &self.staged {
            Some(staged) => staged.until_full().await,
            None => std::future::pending().await,
        }
    }

    /// Gives it its name, unless another one has it by now.
    pub(super) fn name_it(mut self) -> Result<(), ApiError> {
        self.is_named = true;
        self.staged.take().map_or(Ok(()), Staged::name_it)
    }
}

impl Drop for NewImage<'_> {
    fn drop(&mut self) {
        if !self.is_named && matches!(self.target, Target::Pool(_)) {
            self.target.remove(self.pool_id);
        }
    }
}
