//! Images in pools of Ceph. A QEMU without a guest looks at them, creates them and makes them
//! larger. Ceph's own programs, if they are installed, list, rename and delete them, and know the
//! room in a pool.
//!
//! A QEMU that opens such an image waits for the cluster, up to the limit that the access sets. So
//! an image is opened here before the QEMU of a running guest gets it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, CreateDisk, DiskInfo, ErrorCode, NewDisk};
use godwit_qemu::{
    ByteSize, CephAccess, Disk, DiskFormat, ImageToolError, OpenFiles, OpenLayer, PoolToolError,
    RbdImage, ResolvedDisk, Uuid, VmName, check_image_bytes, delete_pool_image, is_rbd, list_pool,
    pool_image_id, pool_room, pool_stem, rename_pool_image,
};

use super::in_work::{self, WriteClaim};
use super::{COPIES, MOST_LISTED, tool_failed};
use crate::agent::{Agent, Begun};
use crate::failure::image_unusable;
use crate::vm::Operation;

/// Most names that are tried for a new image.
const MOST_NAMES: usize = 100;

/// Attempts to delete an image that a QEMU may still have open, and the time between.
const REMOVALS: u32 = 10;
const REMOVAL_INTERVAL: Duration = Duration::from_secs(5);

/// An image in a pool, and how this host reaches it.
#[derive(Clone, Debug)]
pub(super) struct Pooled {
    pub(super) image: RbdImage,
    /// Name of the image, where others have a path.
    pub(super) path: PathBuf,
    access: CephAccess,
    /// User that `rbd` runs as.
    user: (u32, u32),
}

impl Pooled {
    /// Opens the image for a QEMU.
    pub(super) fn open(&self, readonly: bool) -> Result<Vec<OpenLayer>, ApiError> {
        let disk = Disk { readonly, ..Disk::new(&self.path, DiskFormat::Raw) };
        let layer = OpenLayer::in_pool(&ResolvedDisk::from(disk), &self.image, &self.access);
        Ok(vec![layer.map_err(|error| image_unusable(&error))?])
    }

    pub(super) fn refused(&self, verb: &str, code: ErrorCode, why: &str, remedy: &str) -> ApiError {
        ApiError::new(code, format!("cannot {verb} disk {}: {why}", self.image), remedy)
    }

    pub(super) fn tool_refused(&self, verb: &str, error: &PoolToolError) -> ApiError {
        let code = match error {
            PoolToolError::Refused(_) => ErrorCode::WrongState,
            _ => ErrorCode::HostFailed,
        };
        self.refused(verb, code, &error.to_string(), error.remedy())
    }

    /// Begins the only work on this image here.
    pub(super) fn claim(&self, verb: &str) -> Result<WriteClaim, ApiError> {
        in_work::claim(&self.path).ok_or_else(|| {
            let why = "it is being created, written or deleted";
            self.refused(verb, ErrorCode::Busy, why, "wait until that ends")
        })
    }

    /// Returns the identity of its cluster.
    pub(super) fn cluster(&self) -> Uuid {
        self.access.fsid
    }

    /// Returns the image under the name that it has while it is made, which nobody else's has.
    pub(super) fn unnamed(&self, id: Uuid) -> Pooled {
        let image = RbdImage { image: format!("godwit-new-{id}"), ..self.image.clone() };
        Pooled { path: image.path(), image, ..self.clone() }
    }

    /// Gives the image that was made under its name of [`Pooled::unnamed`] this name, unless
    /// another has it.
    pub(super) async fn name_it(&self, id: Uuid) -> Result<(), ApiError> {
        let unnamed = self.unnamed(id);
        let images = (&unnamed.image, &self.image);
        let renamed = rename_pool_image(&self.access, images, self.user).await;
        renamed.map_err(|error| match error.is_taken() {
            true => self.just_taken(),
            false => self.tool_refused("create", &error),
        })
    }

    pub(super) fn just_taken(&self) -> ApiError {
        let why = "another host has just created it";
        self.refused("create", ErrorCode::Busy, why, "try again")
    }

    /// Returns why so many bytes do not fit into the pool; `None` if they do, or if its room is
    /// unknown.
    pub(super) async fn lacks_room(&self, bytes: u64) -> Option<String> {
        let pool = &self.image.pool;
        let room = pool_room(&self.access, pool, self.user).await.unwrap_or_else(|error| {
            tracing::info!(pool, %error, "the room in a pool is unknown");
            None
        })?;
        let (needed, has) = (ByteSize::from_bytes(bytes), ByteSize::from_bytes(room));
        (bytes > room).then(|| format!("{needed} are needed, and pool {pool} has room for {has}"))
    }

    async fn delete(&self) -> Result<(), PoolToolError> {
        delete_pool_image(&self.access, &self.image, self.user).await
    }

    /// Deletes the image if it has this number; returns whether it had. `None`: whatever it has.
    async fn delete_if(&self, id: Option<u64>) -> Result<bool, PoolToolError> {
        if let Some(id) = id
            && (id == 0 || self.number().await? != id)
        {
            return Ok(false);
        }
        self.delete().await.map(|()| true)
    }

    /// Deletes the image, which was created for a VM and is not used. One that cannot be deleted
    /// stays. A QEMU may have it open a little longer; that of a QEMU that has ended counts as open
    /// for 30 s (Ceph 16). `id`: the number that it must have, each time: meanwhile, another image
    /// may have got its name.
    async fn remove(&self, id: Option<u64>) {
        for attempt in 1..=REMOVALS {
            match self.delete_if(id).await {
                Ok(true) => {
                    tracing::info!(image = %self.image, "unused new image deleted");
                    return;
                }
                Ok(false) => {
                    tracing::warn!(image = %self.image, "an image may be left of a move");
                    return;
                }
                Err(error) if error.is_missing() => {
                    tracing::debug!(image = %self.image, "a new image is gone");
                    return;
                }
                Err(PoolToolError::Refused(_)) if attempt < REMOVALS => {
                    tokio::time::sleep(REMOVAL_INTERVAL).await;
                }
                Err(error) => {
                    tracing::warn!(image = %self.image, %error, "a new image stays");
                    return;
                }
            }
        }
    }

    /// Deletes the image, as [`Pooled::remove`] does, in a task of its own. `id`: the number that
    /// it must have.
    pub(super) fn remove_later(&self, id: Option<u64>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let pooled = self.clone();
        runtime.spawn(async move { pooled.remove(id).await });
    }

    /// Deletes an image that was made for a transfer, with its name and without, in a task of its
    /// own. `number`: the one that it must have; 0 if it is unknown. Keeps `held` until then.
    pub(super) fn remove_made(
        &self,
        number: u64,
        unnamed: Option<Uuid>,
        held: impl Send + 'static,
    ) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let pooled = self.clone();
        runtime.spawn(async move {
            if let Some(id) = unnamed {
                pooled.unnamed(id).remove(Some(number).filter(|number| *number != 0)).await;
            }
            // Without a number it has not got its name.
            if number != 0 || unnamed.is_none() {
                pooled.remove(Some(number)).await;
            }
            drop(held);
        });
    }

    /// Returns the number that the image has and no other had in its pool.
    pub(super) async fn number(&self) -> Result<u64, PoolToolError> {
        pool_image_id(&self.access, &self.image, self.user).await
    }

    /// Returns the number of the image; 0 if `rbd` does not tell it.
    pub(super) async fn id(&self) -> u64 {
        match self.number().await {
            Ok(id) => id,
            Err(error) => {
                tracing::debug!(image = %self.image, %error, "its number is unknown");
                0
            }
        }
    }
}

/// An image in a pool that was created for a VM.
#[derive(Debug)]
pub(super) struct NewPooled {
    pooled: Pooled,
    /// Its number in the pool; 0 if that is unknown.
    number: u64,
}

impl NewPooled {
    pub(super) fn path(&self) -> &PathBuf {
        &self.pooled.path
    }

    /// Deletes the image in a task of its own. One whose number is unknown stays, and so does one
    /// that something else works on by now. Until it is deleted, no VM gets it.
    pub(super) fn remove_later(&self) {
        match self.pooled.claim("delete") {
            Ok(claim) => self.pooled.remove_made(self.number, None, claim),
            Err(error) => tracing::warn!(%error, "a new image stays"),
        }
    }
}

/// Returns the image in a pool that a disk of a new VM is to have; `None` if it is to be a file.
///
/// # Errors
/// Its name is not well formed.
pub(super) fn image_of_new(
    new: &NewDisk,
    vm: &VmName,
    index: usize,
) -> Result<Option<RbdImage>, ApiError> {
    let pool = new.datastore.as_deref().filter(|wanted| is_rbd(Path::new(wanted)));
    let Some(pool) = pool else { return Ok(None) };
    let number = if index == 0 { String::new() } else { format!("-{index}") };
    pool_image(Path::new(&format!("{pool}/{}{number}", vm.as_str())))
}

/// Returns the image in a pool that a request names; `None` if it names a file.
///
/// # Errors
/// Its name is not well formed.
pub(super) fn pool_image(path: &Path) -> Result<Option<RbdImage>, ApiError> {
    let image = RbdImage::of(path);
    if image.is_none() && is_rbd(path) {
        let wanted = "rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE";
        let message = format!("invalid disk {}: its name is not {wanted}", path.display());
        let remedy = "use names of letters, digits, \"-\", \"_\" and \".\"";
        return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
    }
    Ok(image)
}

impl Agent {
    /// Returns an image in a pool of this host.
    pub(super) fn pooled(&self, image: RbdImage) -> Result<Pooled, ApiError> {
        let access = self.ceph_access(&image).map_err(|error| image_unusable(&error))?;
        Ok(Pooled { path: image.path(), image, access, user: self.query_user() })
    }

    /// Checks that the images of a VM in pools of Ceph can be opened.
    pub(in crate::agent) async fn check_pools(
        &self,
        vm: &str,
        files: &OpenFiles,
    ) -> Result<(), ApiError> {
        for layers in &files.disks {
            self.check_pool_image(vm, layers).await?;
        }
        Ok(())
    }

    /// Checks that an image can be opened, if it is one in a pool of Ceph.
    pub(in crate::agent) async fn check_pool_image(
        &self,
        vm: &str,
        layers: &[OpenLayer],
    ) -> Result<(), ApiError> {
        let Some(rbd) = layers.first().and_then(|layer| layer.rbd.as_ref()) else { return Ok(()) };
        self.probe_image(layers).await?.map(|_| ()).map_err(|error| {
            let host = &self.config().name;
            let message =
                format!("VM \"{vm}\": cannot open disk {} on host {host}: {error}", rbd.image);
            let remedy = "check its name with `rbd info`, the rights of the user with `ceph auth \
                          get`, and the cluster with `ceph status`; QEMU's driver is in the \
                          package qemu-block-extra";
            ApiError::new(ErrorCode::NotFound, message, remedy)
        })
    }

    /// Describes an image in a pool.
    pub(super) async fn pool_disk(&self, image: RbdImage) -> Result<DiskInfo, ApiError> {
        let pooled = self.pooled(image)?;
        let layers = pooled.open(true)?;
        let bytes = self.probe_image(&layers).await?;
        let bytes = bytes.map_err(|error| tool_failed("show", &pooled.path, &error))?;
        Ok(self.info_of(pooled.path, bytes))
    }

    /// Opens an image in a pool to read it; returns the size of its disk.
    async fn probe_image(
        &self,
        layers: &[OpenLayer],
    ) -> Result<Result<u64, ImageToolError>, ApiError> {
        let tool = self.image_tool().await?;
        let opened = tool.open_source(layers).await;
        tool.end().await;
        Ok(opened.map(|source| source.bytes))
    }

    fn info_of(&self, path: PathBuf, virtual_bytes: u64) -> DiskInfo {
        let users = self.users_of_image(&path);
        DiskInfo {
            format: Some(DiskFormat::Raw),
            virtual_bytes,
            used_bytes: 0,
            backing: None,
            vms: users.into_iter().map(|(name, _)| name.to_string()).collect(),
            placed: None,
            path,
        }
    }

    /// Lists the images in this host's pools, as far as they can be listed.
    pub(super) async fn pool_disks(&self) -> Vec<DiskInfo> {
        let mut all = Vec::new();
        for cluster in &self.config().ceph {
            for place in &cluster.pools {
                let Some(any) = RbdImage::of(format!("rbd:{place}/any").as_ref()) else { continue };
                let Ok(pooled) = self.pooled(any) else { continue };
                match list_pool(&pooled.access, place, self.query_user()).await {
                    Ok(found) => all.extend(
                        found
                            .into_iter()
                            .map(|found| self.info_of(found.image.path(), found.bytes)),
                    ),
                    Err(error) => {
                        tracing::warn!(pool = place, %error, "its images are not listed");
                        // The list would wait for each of its pools.
                        if error.is_silent() {
                            break;
                        }
                    }
                }
            }
        }
        all.truncate(MOST_LISTED);
        all
    }

    /// Creates an image in a pool.
    pub(super) async fn create_in_pool(
        &self,
        image: RbdImage,
        request: &CreateDisk,
    ) -> Result<DiskInfo, ApiError> {
        let pooled = self.pooled(image)?;
        let refuse = |why: &str, remedy: &str| {
            Err(pooled.refused("create", ErrorCode::InvalidRequest, why, remedy))
        };
        if request.format.is_some_and(|format| format != DiskFormat::Raw) {
            return refuse("an image in a pool of Ceph has format raw", "leave the format out");
        }
        if request.base.is_some() && !request.full_copy {
            return refuse("a raw image has no backing file", "use a full copy");
        }
        if request.full_copy && request.base.is_none() {
            return refuse("there is no base to copy", "name the base");
        }
        let base = request.base.as_deref().map(|base| self.open_base(base, request)).transpose()?;
        let base_bytes = base.as_ref().map_or(0, |base| base.bytes);
        let bytes = request.size.map_or(base_bytes, ByteSize::bytes);
        if let Err(why) = check_image_bytes(bytes) {
            return refuse(&format!("its size is invalid: {why}"), "give another size");
        }
        if bytes < base_bytes {
            let why = format!("its base has {base_bytes} bytes, and it would have {bytes}");
            return refuse(&why, "give at least the size of the base");
        }
        let _claim = pooled.claim("create")?;
        let from = base.as_ref().map_or(bytes, |base| base.bytes);
        self.make_in_pool(&pooled, from).await?;
        if let Some(base) = &base {
            let copied = async {
                let _turn = COPIES.acquire().await;
                let (tool, target) = (self.image_tool().await?, pooled.open(false)?);
                let copied = tool.copy(&base.layers, &target, bytes).await;
                tool.end().await;
                copied.map_err(|error| tool_failed("create", &pooled.path, &error))
            };
            if let Err(error) = copied.await {
                pooled.remove(None).await;
                return Err(error);
            }
        }
        tracing::info!(image = %pooled.image, "disk image created");
        Ok(self.info_of(pooled.path, bytes))
    }

    /// Creates the image of a new VM's disk in a pool; returns it with the disk.
    pub(super) async fn make_disk_in_pool(
        &self,
        image: RbdImage,
        new: &NewDisk,
    ) -> Result<(NewPooled, Disk), ApiError> {
        let pooled = self.pooled(image.clone())?;
        let create = CreateDisk {
            path: pooled.path.clone(),
            size: new.size,
            format: new.format,
            base: new.base.clone(),
            base_format: new.base_format,
            full_copy: new.full_copy,
        };
        self.create_in_pool(image, &create).await?;
        let disk = Disk { bus: new.bus, ..Disk::new(&pooled.path, DiskFormat::Raw) };
        let number = pooled.id().await;
        Ok((NewPooled { pooled, number }, disk))
    }

    /// Creates an empty image in a pool.
    ///
    /// # Errors
    /// [`ErrorCode::AlreadyExists`]: there is one already. Or the cluster refuses.
    pub(super) async fn make_in_pool(&self, pooled: &Pooled, bytes: u64) -> Result<(), ApiError> {
        let layers = pooled.open(false)?;
        let tool = self.image_tool().await?;
        for layer in &layers {
            tool.create_in_pool(layer, bytes).await.map_err(|error| match error.is_taken() {
                true => {
                    let taken = ErrorCode::AlreadyExists;
                    pooled.refused("create", taken, "it exists", "give another name")
                }
                false => tool_failed("create", &pooled.path, &error),
            })?;
        }
        Ok(())
    }

    /// Returns an image of a name that its pool does not have: `stem`, or that with a number.
    pub(super) async fn free_in_pool(
        &self,
        place: &str,
        stem: &str,
    ) -> Result<(Pooled, WriteClaim), ApiError> {
        let stem = pool_stem(stem);
        for number in 0..MOST_NAMES {
            let number = if number == 0 { String::new() } else { format!("-{number}") };
            let path = PathBuf::from(format!("rbd:{place}/{stem}{number}"));
            let image = RbdImage::of(&path).ok_or_else(|| {
                let message = format!("cannot create disk {}: invalid name", path.display());
                let remedy = "give a pool as rbd:POOL or rbd:POOL/NAMESPACE";
                ApiError::new(ErrorCode::InvalidRequest, message, remedy)
            })?;
            let pooled = self.pooled(image)?;
            let Ok(claim) = pooled.claim("create") else { continue };
            match self.probe_image(&pooled.open(true)?).await? {
                Ok(_) => {}
                Err(error) if error.is_missing() => return Ok((pooled, claim)),
                Err(error) => return Err(tool_failed("create", &pooled.path, &error)),
            }
        }
        let message =
            format!("cannot create disk {stem} in pool {place}: it has {MOST_NAMES} of its name");
        Err(ApiError::new(ErrorCode::AlreadyExists, message, "delete those that no VM uses"))
    }

    /// Makes a disk in a pool larger. The guest of a running VM notices.
    pub(super) async fn resize_in_pool(
        self: &Arc<Self>,
        image: RbdImage,
        bytes: u64,
    ) -> Result<DiskInfo, ApiError> {
        let pooled = self.pooled(image)?;
        let invalid = ErrorCode::InvalidRequest;
        check_image_bytes(bytes).map_err(|why| {
            let why = format!("the size is invalid: {why}");
            pooled.refused("resize", invalid, &why, "give another")
        })?;
        let user = self.users_of_image(&pooled.path).into_iter().next();
        match user {
            None => {
                let _claim = pooled.claim("resize")?;
                self.resize_unused(&pooled, bytes).await?;
            }
            Some((vm, _)) => {
                if let Ok(begun) = self.begin(&vm, &Operation::Plug) {
                    let resized = self.resize_pooled_of_running(&begun, &pooled, bytes).await;
                    self.end_plug(&begun).await;
                    resized?;
                } else {
                    let begun = self.begin(&vm, &Operation::Change)?;
                    let resized = self.resize_unused(&pooled, bytes).await;
                    self.settle(&vm, begun.before, begun.vm, begun.reason);
                    resized?;
                }
            }
        }
        tracing::info!(image = %pooled.image, bytes, "disk resized");
        Ok(self.info_of(pooled.path, bytes))
    }

    async fn resize_pooled_of_running(
        &self,
        begun: &Begun,
        pooled: &Pooled,
        bytes: u64,
    ) -> Result<(), ApiError> {
        let Some(vm) = &begun.vm else { return Err(self.no_vm(&begun.spec.name)) };
        let disks = &begun.spec.disks;
        let index = disks.iter().position(|disk| disk.path == pooled.path);
        let index = index.ok_or_else(|| {
            let why = format!("VM \"{}\" has just been changed", begun.spec.name);
            pooled.refused("resize", ErrorCode::Busy, &why, "see the VM, then try again")
        })?;
        vm.process.qmp.resize_disk(disks, index, bytes).await.map_err(|error| {
            let code = ErrorCode::WrongState;
            pooled.refused("resize", code, &error.to_string(), &error.remedy())
        })
    }

    async fn resize_unused(&self, pooled: &Pooled, bytes: u64) -> Result<(), ApiError> {
        let failed = |error| tool_failed("resize", &pooled.path, &error);
        let now = self.probe_image(&pooled.open(true)?).await?.map_err(failed)?;
        if bytes < now {
            let why = format!("it has {now} bytes, and a smaller disk would lose data");
            let invalid = ErrorCode::InvalidRequest;
            return Err(pooled.refused("resize", invalid, &why, "give a larger size"));
        }
        let (tool, layers) = (self.image_tool().await?, pooled.open(false)?);
        let resized = tool.resize(&layers, bytes).await;
        tool.end().await;
        resized.map_err(failed)
    }

    /// Deletes an image in a pool that no VM of this host uses. Ceph refuses one that a client of
    /// another host has open.
    pub(super) async fn delete_from_pool(&self, image: RbdImage) -> Result<(), ApiError> {
        let pooled = self.pooled(image)?;
        let _claim = pooled.claim("delete")?;
        if let Some((vm, _)) = self.users_of_image(&pooled.path).first() {
            let why = format!("VM \"{vm}\" uses it");
            let remedy = "detach it from the VM, or delete the VM first";
            return Err(pooled.refused("delete", ErrorCode::WrongState, &why, remedy));
        }
        let deleted = pooled.delete().await;
        deleted.map_err(|error| pooled.tool_refused("delete", &error))?;
        tracing::info!(image = %pooled.image, "disk image deleted");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_disk_is_in_a_pool_only_if_the_request_names_one() {
        let vm = VmName::new("web").unwrap();
        let image = |datastore: Option<&str>, index| {
            let datastore = datastore.map(str::to_owned);
            image_of_new(&NewDisk { datastore, ..NewDisk::default() }, &vm, index)
        };
        for file in [None, Some("auto"), Some("/srv"), Some("fast")] {
            assert_eq!(image(file, 0).unwrap(), None, "{file:?}");
        }
        for (pool, index, name) in
            [("rbd:vms", 0, "rbd:vms/web"), ("rbd:vms/shop", 2, "rbd:vms/shop/web-2")]
        {
            let found = image(Some(pool), index).unwrap().unwrap();
            assert_eq!(found.path(), Path::new(name));
        }
        for bad in ["rbd:", "rbd:vms/", "rbd:vms/a/b", "rbd:../vms", "rbd:v ms"] {
            let error = image(Some(bad), 0).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidRequest, "{bad}: {error}");
        }
    }
}
