//! Images for disks that travel to this host with a VM: they are made, claimed for that VM, found
//! again by the next agent, and removed if the VM does not come. They are files, images in a pool
//! of Ceph ([`pooled`]), volumes in a thin pool of LVM ([`thin`]), or block devices that exist
//! ([`devices`]); [`destination`] decides which.
//!
//! 1. The images are made without their names, and the transfer is recorded.
//! 2. The images get their names. From here on the next agent knows them by their files' numbers.
//! 3. The source fills them ([`crate::migration`]). A source that returns goes on where it was.
//! 4. Everything has arrived. The record goes: from here on the guest may write the images, and
//!    only the record of its VM counts. If the VM does not come after all, they are removed, except
//!    by an agent that starts just then.
//!
//! Nothing is removed that the record of a VM names, or that is another file than was made. A
//! source that does not return has its images removed after a day.

mod alike;
mod bases;
mod destination;
mod devices;
mod identity;
mod opened;
mod pooled;
mod removal;
mod thin;
mod turns;

use std::any::Any;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

use godwit_api::{
    ApiError, ArrivingDisk, ArrivingDisks, ArrivingImage, ErrorCode, IncomingRequest,
    MOST_TRAVELLING_DISKS,
};
use godwit_qemu::{
    ByteSize, Disk, DiskFormat, OpenLayer, RbdImage, ResolvedDisk, VmName, check_image_bytes,
    is_rbd,
};
use godwit_types::EngineKind;
use godwit_wire::MigrationId;

use crate::agent::images::in_work::{self, WriteClaim};
use crate::agent::images::staged::{name_all, named_images};
use crate::agent::images::{Place, room_of};
use crate::agent::{Agent, Slot};
use crate::disk_arrivals::{
    ArrivalLoad, Beginning, DiskArrival, PreparedArrival, PresentMap, now_unix_s,
};
use crate::hold::hold;
use crate::store::{SavedArrival, SavedArrivingDisk};
use crate::vm::Condition;
use destination::Destination;
use identity::is_ours;
use removal::disconnect;

pub(in crate::agent::images) use identity::{identity_of, mark_new};

/// Most transfers that are remembered.
const MOST_TRANSFERS: usize = 256;
/// Most disks that are open to be filled at once. Each in qcow2 format or in a pool takes a QEMU.
const MOST_OPEN_DISKS: usize = 64;
/// Most names that are tried for a new image.
const MOST_NAMES: usize = 100;

/// Claims of the images and backing files of a transfer.
type Claims = Vec<Box<dyn Any + Send + Sync>>;

impl Agent {
    /// Returns the images that [`Agent::prepare_arriving_disks`] would make. Changes nothing.
    ///
    /// # Errors
    /// Those of that function.
    pub(crate) async fn check_arriving_disks(
        &self,
        request: &ArrivingDisks,
    ) -> Result<Vec<ArrivingImage>, ApiError> {
        let id = self.check_arrival(request)?;
        // Backing files may be on storage that hangs: only so many requests wait for it.
        let _turn = self.check_turn(id, request).await?;
        let bases = tokio::task::block_in_place(|| self.find_bases(request))?;
        let _storage = self.storage_turn(&request.vm, self.storages_of(request)).await?;
        match Destination::of(request) {
            Destination::Ceph(pool) => self.images_in_pool(request, pool).await,
            Destination::ThinPool(pool) => self.images_in_thin_pool(request, &pool).await,
            Destination::Devices => tokio::task::block_in_place(|| self.images_on_devices(request)),
            Destination::Files => tokio::task::block_in_place(|| self.images_of(request, &bases)),
        }
    }

    /// Returns the files that a transfer would make. Changes nothing.
    fn images_of(
        &self,
        request: &ArrivingDisks,
        bases: &[Vec<OpenLayer>],
    ) -> Result<Vec<ArrivingImage>, ApiError> {
        let places = self.places_to_arrive(request)?;
        check_room(&places, &request.disks)?;
        let images = places.iter().zip(bases).map(|((place, _), base)| ArrivingImage {
            path: place.path.clone(),
            backing: base.iter().map(OpenLayer::as_backing).collect(),
            cluster: None,
            present: Vec::new(),
            identity: None,
        });
        Ok(images.collect())
    }

    /// Makes the images for the disks of a VM, or finds those of a transfer that was interrupted.
    /// Nothing writes them. An earlier transfer of the VM is given up.
    ///
    /// # Errors
    /// The request is invalid, the VM cannot arrive, a backing file or room is missing, the storage
    /// does not answer. Nothing of a new transfer remains.
    pub(crate) async fn prepare_arriving_disks(
        &self,
        request: &ArrivingDisks,
    ) -> Result<PreparedArrival, ApiError> {
        let id = self.check_arrival(request)?;
        let turn = self.arrival_turn(id, request).await?;
        // Other transfers do not wait until large files are read.
        let bases = tokio::task::block_in_place(|| self.find_bases(request))?;
        let storages = self.storages_for(id, request);
        let _storage = self.storage_turn(&request.vm, storages).await?;
        turn.refuse_cancelled(&request.vm)?;
        self.check_load(&turn.beginning, request)?;
        let known = tokio::task::block_in_place(|| match self.arrivals.find(id) {
            Some(known) if self.goes_on(&known, request, &bases)? => Ok(Some(known)),
            _ => Ok::<_, ApiError>(None),
        })?;
        if let Some(known) = known
            && self.has_pool_images(&known.record).await?
        {
            known.note_bases(request);
            return Ok(PreparedArrival { arrival: known, is_new: false, turn });
        }
        tokio::task::block_in_place(|| {
            self.refuse_unfound(id, request)?;
            self.give_up_earlier(id, request)
        })?;
        let made = match Destination::of(request) {
            Destination::Ceph(pool) => self.make_arrival_in_pool(id, request, pool).await?,
            Destination::ThinPool(pool) => {
                self.make_arrival_in_thin_pool(id, request, &pool).await?
            }
            Destination::Devices => {
                tokio::task::block_in_place(|| self.make_arrival_on_devices(id, request))?
            }
            Destination::Files => {
                tokio::task::block_in_place(|| self.make_arrival(id, request, &bases))?
            }
        };
        let arrival = Arc::new(made);
        arrival.note_bases(request);
        self.arrivals.add(Arc::clone(&arrival));
        Ok(PreparedArrival { arrival, is_new: true, turn })
    }

    /// Refuses a transfer that has a record whose images this agent did not find: another record
    /// would replace it, and nothing would remove its images.
    fn refuse_unfound(&self, id: MigrationId, request: &ArrivingDisks) -> Result<(), ApiError> {
        if self.arrivals.find(id).is_some() {
            return Ok(());
        }
        let mut recorded = self.store.arrivals().into_iter();
        let Some((_, record)) = recorded.find(|(known, _)| *known == id) else { return Ok(()) };
        let (does, remedy) = match record.has_left_volumes() {
            true => ("has not removed", "check that LVM answers there, and wait ten minutes"),
            false => ("cannot open", "mount their datastore there, and restart that host's agent"),
        };
        let message = format!(
            "cannot accept the disks of VM \"{}\": host {} {does} the images that it made for them \
             before",
            request.vm,
            self.config().name
        );
        Err(ApiError::new(ErrorCode::Busy, message, remedy))
    }

    /// Checks what needs no look at files; returns the ID.
    fn check_arrival(&self, request: &ArrivingDisks) -> Result<MigrationId, ApiError> {
        let refused = |why: &str| {
            let message = format!("cannot accept the disks of VM \"{}\": {why}", request.vm);
            let remedy = "both agents must run compatible releases";
            ApiError::new(ErrorCode::InvalidRequest, message, remedy)
        };
        let id = request.transfer.parse::<MigrationId>().ok();
        let id = id.filter(|id| id.to_string() == request.transfer);
        let id = id.ok_or_else(|| refused("invalid transfer ID"))?;
        if request.disks.is_empty() || request.disks.len() > MOST_TRAVELLING_DISKS {
            return Err(refused(&format!("it has none, or more than {MOST_TRAVELLING_DISKS}")));
        }
        destination::check(request).map_err(refused)?;
        for (index, disk) in request.disks.iter().enumerate() {
            let path = disk.path.display();
            check_image_bytes(disk.virtual_bytes)
                .map_err(|why| refused(&format!("the size of {path} is invalid: {why}")))?;
            if disk.format == DiskFormat::Raw && !disk.base.is_empty() {
                return Err(refused(&format!("{path} is raw and has a backing file")));
            }
            if request.disks[..index].iter().any(|other| other.path == disk.path) {
                return Err(refused(&format!("two disks have the image {path}")));
            }
        }
        let is_coming = self.table().get(&request.vm).is_some_and(|slot| {
            let is_shadow =
                matches!(&slot.condition, Condition::MigratingIn { from } if *from == request.from);
            is_shadow && slot.spec.uuid == request.uuid
        });
        // A shadow waits for the source whose link was cut.
        if !is_coming || self.arrivals.find(id).is_none() {
            self.check_name(&request.vm)?;
        }
        let other = {
            let table = self.table();
            let has_uuid = |(name, slot): &(&VmName, &Slot)| {
                !request.uuid.is_nil() && slot.spec.uuid == request.uuid && **name != request.vm
            };
            table.iter().find(has_uuid).map(|(name, _)| name.clone())
        };
        if let Some(other) = other {
            let message = format!(
                "cannot accept VM \"{}\" on host {}: VM \"{other}\" there has the same uuid",
                request.vm,
                self.config().name
            );
            let remedy = "delete one of the two, or create this one with another uuid";
            return Err(ApiError::new(ErrorCode::AlreadyExists, message, remedy));
        }
        Ok(id)
    }

    /// Refuses more than this host fills at once.
    fn check_load(&self, beginning: &Beginning, request: &ArrivingDisks) -> Result<(), ApiError> {
        let most = ArrivalLoad { transfers: MOST_TRANSFERS, open_disks: MOST_OPEN_DISKS };
        let stays = |known: &DiskArrival| !known.is_of(&request.vm, request.uuid);
        self.arrivals.reserve(beginning, request.disks.len(), most, stays).map_err(|others| {
            let message = format!(
                "cannot accept the disks of VM \"{}\": {} disks of {} VMs arrive on host {}",
                request.vm,
                others.open_disks,
                others.transfers,
                self.config().name
            );
            ApiError::new(ErrorCode::Busy, message, "wait until some have arrived")
        })
    }

    /// Returns a free place for each image, and the right to create it.
    fn places_to_arrive(
        &self,
        request: &ArrivingDisks,
    ) -> Result<Vec<(Place, WriteClaim)>, ApiError> {
        let place = |disk: &ArrivingDisk| self.place_to_arrive(request.to.as_deref(), &disk.path);
        request.disks.iter().map(place).collect()
    }

    fn place_to_arrive(
        &self,
        to: Option<&Path>,
        source: &Path,
    ) -> Result<(Place, WriteClaim), ApiError> {
        let dir = to.or_else(|| source.parent()).unwrap_or(Path::new("/"));
        let name = source.file_name().unwrap_or(OsStr::new("disk"));
        let stem = source.file_stem().unwrap_or(name).to_string_lossy();
        let end = source.extension().map(|end| format!(".{}", end.to_string_lossy()));
        let end = end.unwrap_or_default();
        for number in 0..MOST_NAMES {
            let path = match number {
                0 => dir.join(name),
                number => dir.join(format!("{stem}-{number}{end}")),
            };
            let place = self.place(&path, "create")?;
            place.check_name()?;
            if !place.exists()
                && let Ok(claim) = place.claim()
            {
                return Ok((place, claim));
            }
        }
        let (source, dir) = (source.display(), dir.display());
        let why = format!("there are {MOST_NAMES} images of its name in {dir}");
        let message = format!("cannot accept disk {source}: {why}");
        Err(ApiError::new(ErrorCode::AlreadyExists, message, "delete those that no VM uses"))
    }

    fn make_arrival(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
        bases: &[Vec<OpenLayer>],
    ) -> Result<DiskArrival, ApiError> {
        let places = self.places_to_arrive(request)?;
        check_room(&places, &request.disks)?;
        let mut held = read_bases(bases.iter().map(Vec::as_slice))?;
        let (places, claims): (Vec<Place>, Vec<WriteClaim>) = places.into_iter().unzip();
        for claim in claims {
            claim.reserve_for(&request.vm);
            held.push(Box::new(claim));
        }
        let (mut staged, mut disks) = (Vec::new(), Vec::new());
        for ((place, disk), base) in places.iter().zip(&request.disks).zip(bases) {
            let failed = |error: io::Error| place.failed("create", &error);
            let file = place.stage().map_err(failed)?;
            match base.is_empty() {
                true => file.write(disk.format, disk.virtual_bytes, None)?,
                false => file.write_layer(disk.virtual_bytes, base)?,
            }
            mark_new(&file.file);
            let (inode, born_unix_ns) = identity_of(&file.file).map_err(failed)?;
            disks.push(SavedArrivingDisk {
                source: disk.path.clone(),
                path: place.path.clone(),
                format: disk.format,
                virtual_bytes: disk.virtual_bytes,
                inode,
                born_unix_ns,
                backing: base.iter().map(OpenLayer::as_backing).collect(),
                unnamed: None,
                device: None,
                thin: None,
            });
            staged.push(file);
        }
        let vm = (request.vm.clone(), request.uuid);
        let record = SavedArrival::new(id, vm, request.from.clone(), now_unix_s(), disks);
        self.store.save_arrival(&record)?;
        hold("disks-recorded");
        let named = name_all(staged);
        let images = places.iter().map(|place| place.real.clone()).collect();
        match named_images(places, named) {
            Ok(made) => made.keep(),
            Err(error) => {
                self.forget_record(id);
                return Err(error);
            }
        }
        let present = self.map_of(id, &record, true);
        tracing::info!(vm = request.vm.as_str(), from = request.from, "images for disks made");
        Ok(DiskArrival::new(id, record, images, present, held))
    }

    fn map_of(&self, id: MigrationId, record: &SavedArrival, is_new: bool) -> PresentMap {
        let sizes: Vec<u64> = record.disks.iter().map(|disk| disk.virtual_bytes).collect();
        PresentMap::open(&self.store.present_path(id), &sizes, is_new)
    }

    /// Whether a transfer can go on. Ends its present connection.
    ///
    /// # Errors
    /// It is another's, or what it writes does not end.
    fn goes_on(
        &self,
        known: &DiskArrival,
        request: &ArrivingDisks,
        bases: &[Vec<OpenLayer>],
    ) -> Result<bool, ApiError> {
        let record = &known.record;
        if record.from != request.from || record.vm != request.vm || record.uuid != request.uuid {
            let message = format!(
                "cannot accept the disks of VM \"{}\" of host {}: another VM or host has a \
                 transfer with this ID",
                request.vm, request.from
            );
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, "start a new transfer"));
        }
        disconnect(known)?;
        let is_same = |saved: &SavedArrivingDisk, disk: &ArrivingDisk, base: &[OpenLayer]| {
            saved.source == disk.path
                && saved.format == disk.format
                && saved.virtual_bytes == disk.virtual_bytes
                && base.iter().map(OpenLayer::as_backing).eq(saved.backing.iter().cloned())
        };
        let mut disks = record.disks.iter().zip(&request.disks).zip(bases);
        let are_same = record.disks.len() == request.disks.len()
            && disks.all(|((saved, disk), base)| is_same(saved, disk, base));
        Ok(are_same && !known.has_ended() && record.disks.iter().all(|disk| self.has_image(disk)))
    }

    /// Whether an image that was made is still there. One in a pool of Ceph is looked for later.
    fn has_image(&self, disk: &SavedArrivingDisk) -> bool {
        if is_rbd(&disk.path) {
            return true;
        }
        if let Some(device) = &disk.device {
            return devices::is_still(&disk.path, device).unwrap_or(false);
        }
        let place = self.place(&disk.path, "use");
        place.is_ok_and(|place| is_ours(&place, disk).unwrap_or(false))
    }

    /// Removes the record of a transfer that has brought everything, before the guest may write the
    /// images: nothing removes them by that record any more. Blocks.
    ///
    /// # Errors
    /// The record cannot be removed, and the guest may not run.
    pub(crate) fn take_disks(&self, arrival: &DiskArrival) -> Result<(), ApiError> {
        arrival.seal();
        let _alone = arrival.recording.lock();
        Ok(self.store.remove_arrival(arrival.id)?)
    }

    /// Forgets a transfer: a VM of this host has its images.
    pub(crate) fn forget_disk_arrival(&self, arrival: &DiskArrival) {
        arrival.seal();
        // Otherwise it is tried again later.
        if self.forget_record(arrival.id) {
            self.arrivals.remove(arrival.id);
        }
    }

    fn forget_record(&self, id: MigrationId) -> bool {
        let removed = tokio::task::block_in_place(|| self.store.remove_arrival(id));
        let failed = |error| tracing::error!(%error, "the record of arriving disks stays");
        removed.map_err(failed).is_ok()
    }

    /// Saves that the source of a transfer is connected, or was until now.
    pub(crate) fn note_seen(&self, arrival: &DiskArrival) {
        let _alone = arrival.recording.lock();
        // A record that has been removed must not come back.
        let is_known = self.arrivals.find(arrival.id);
        let is_known = is_known.is_some_and(|known| std::ptr::eq(&raw const *known, arrival));
        if !is_known || arrival.has_ended() {
            return;
        }
        if let Err(error) = self.store.save_arrival(&arrival.seen()) {
            tracing::warn!(%error, "cannot record when disks arrived last");
        }
    }

    /// At the agent's start, once the VMs are known: finds the transfers of its predecessors.
    pub(in crate::agent) fn find_disk_arrivals(&self) {
        self.store.remove_stray_maps();
        for (id, record) in self.store.arrivals() {
            let vm = record.vm.clone();
            match self.find_arrival(id, &record) {
                Ok(Some(arrival)) => self.arrivals.add(Arc::new(arrival)),
                // Not now: LVM may not answer.
                Ok(None) if record.has_volumes() => {
                    if let Err(error) = self.store.save_arrival(&record.ended()) {
                        tracing::warn!(%error, "cannot record that a transfer has ended");
                    }
                }
                Ok(None) => {
                    record.disks.iter().for_each(|disk| self.remove_arrived(disk, None));
                    self.forget_record(id);
                }
                // Its datastore may only not be mounted yet.
                Err(error) => {
                    tracing::warn!(vm = vm.as_str(), %error, "disks that arrived are left alone");
                }
            }
        }
        self.sweep_disk_arrivals();
    }

    /// Finds the images of a transfer; `None` if one is not there any more, or if the last agent
    /// ended while it made them in a pool.
    ///
    /// # Errors
    /// Their directory is not there, or not one for VMs any more.
    fn find_arrival(
        &self,
        id: MigrationId,
        record: &SavedArrival,
    ) -> Result<Option<DiskArrival>, ApiError> {
        let (mut images, mut held) = (Vec::new(), Claims::new());
        let mut bases = Vec::new();
        for disk in &record.disks {
            if let Some(image) = RbdImage::of(&disk.path) {
                if disk.inode == 0 {
                    return Ok(None);
                }
                // The cluster may be away now. Its source's next request looks for the image.
                let claim = self.pooled(image)?.claim("find")?;
                claim.reserve_for(&record.vm);
                held.push(Box::new(claim));
                images.push(disk.path.clone());
                continue;
            }
            if disk.thin.is_some() && disk.device.is_none() {
                return Ok(None);
            }
            if let Some(device) = &disk.device {
                let found = self.find_device(&record.vm, disk, device)?;
                let Some((claim, real)) = found else { return Ok(None) };
                claim.reserve_for(&record.vm);
                held.push(Box::new(claim));
                images.push(real);
                continue;
            }
            let place = self.place(&disk.path, "find")?;
            if !is_ours(&place, disk).map_err(|error| place.failed("find", &error))? {
                return Ok(None);
            }
            let claim = place.claim()?;
            claim.reserve_for(&record.vm);
            held.push(Box::new(claim));
            images.push(place.real.clone());
            // The next connection of the source compares them again.
            if let Ok(layers) = self.open_image(&as_disk(disk, &place.real)) {
                bases.push(layers.into_iter().skip(1).collect::<Vec<_>>());
            }
        }
        held.append(&mut read_bases(bases.iter().map(Vec::as_slice))?);
        let present = self.map_of(id, record, false);
        Ok(Some(DiskArrival::new(id, record.clone(), images, present, held)))
    }

    /// Returns the transfer that an arriving VM names, with whose images it comes.
    ///
    /// # Errors
    /// There is none, it is of another VM or host, its source is not connected, or the
    /// specification names other images. Also if a VM names images of a transfer that is not its
    /// own.
    pub(crate) fn disks_of_arriving(
        &self,
        request: &IncomingRequest,
    ) -> Result<Option<Arc<DiskArrival>>, ApiError> {
        let spec = &request.spec;
        let refused = |why: &str| {
            let message =
                format!("cannot accept VM \"{}\" on host {}: {why}", spec.name, self.config().name);
            ApiError::new(ErrorCode::Preflight, message, "migrate again")
        };
        let wanted = match &request.disks {
            None => None,
            Some(id) => {
                let known = id.parse::<MigrationId>().ok().and_then(|id| self.arrivals.find(id));
                Some(known.ok_or_else(|| refused("its disks do not arrive here"))?)
            }
        };
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let named: Vec<_> = spec.images().map(real).collect();
        let others = self
            .arrivals
            .all()
            .into_iter()
            .filter(|known| wanted.as_ref().is_none_or(|wanted| !Arc::ptr_eq(wanted, known)));
        for other in others {
            if let Some(image) = other.images.iter().find(|image| named.contains(image)) {
                let why = format!("{} is being written for another VM", image.display());
                return Err(refused(&why));
            }
        }
        let Some(arrival) = wanted else { return Ok(None) };
        let record = &arrival.record;
        if record.from != request.from || record.vm != spec.name || record.uuid != spec.uuid {
            return Err(refused("the disks that arrive are another VM's"));
        }
        if request.engine != EngineKind::Godwit || request.relayed {
            return Err(refused("disks travel with the godwit engine alone"));
        }
        let is_it = |saved: &SavedArrivingDisk, disk: &ResolvedDisk| {
            disk.path == saved.path
                && disk.format == saved.format
                && !disk.readonly
                && disk.backing.as_deref().unwrap_or_default() == saved.backing
        };
        for saved in &record.disks {
            if spec.disks.iter().filter(|disk| is_it(saved, disk)).count() != 1 {
                let why = format!("image {} is not one of its disks", saved.path.display());
                return Err(refused(&why));
            }
        }
        if arrival.is_sealed() || !arrival.is_connected() {
            // After a cut its source may be about to connect them.
            let unconnected = refused("the streams of its disks are not connected");
            return Err(ApiError { code: ErrorCode::Busy, ..unconnected });
        }
        tokio::task::block_in_place(|| self.compare_bases_again(&arrival))
            .map_err(|why| refused(&format!("a backing file has changed meanwhile: {why}")))?;
        Ok(Some(arrival))
    }
}

/// Keeps backing files from being merged.
fn read_bases<'a>(bases: impl Iterator<Item = &'a [OpenLayer]>) -> Result<Claims, ApiError> {
    let mut held = Claims::new();
    for base in bases {
        let reading = in_work::read(base).map_err(|path| {
            let why = in_work::being_merged(&path);
            let message = format!("cannot use base {}: {why}", path.display());
            ApiError::new(ErrorCode::Busy, message, "wait until that ends, then try again")
        })?;
        held.push(Box::new(reading));
    }
    Ok(held)
}

/// Refuses disks for which the file systems have no room.
fn check_room(places: &[(Place, WriteClaim)], disks: &[ArrivingDisk]) -> Result<(), ApiError> {
    let mut needed: Vec<(u64, u64, &Place)> = Vec::new();
    for ((place, _), disk) in places.iter().zip(disks) {
        let found = rustix::fs::fstat(&place.dir);
        let device = found.map_err(|error| place.failed("create", &error.into()))?.st_dev;
        let used = disk.used_bytes.min(disk.virtual_bytes);
        match needed.iter_mut().find(|(known, ..)| *known == device) {
            Some((_, bytes, _)) => *bytes = bytes.saturating_add(used),
            None => needed.push((device, used, place)),
        }
    }
    for (_, bytes, place) in needed {
        let room = room_of(&place.dir).map_err(|error| place.failed("create", &error))?;
        if bytes > room {
            let (bytes, room) = (ByteSize::from_bytes(bytes), ByteSize::from_bytes(room));
            let dir = place.path.parent().unwrap_or(Path::new("/")).display();
            let why = format!("the disks need {bytes}, and {dir} has room for {room}");
            let remedy = "free space there, or give another directory (--disks-to)";
            return Err(place.refused("create", ErrorCode::HostFailed, &why, remedy));
        }
    }
    Ok(())
}

/// Returns the disk of an image that arrives.
fn as_disk(saved: &SavedArrivingDisk, real: &Path) -> ResolvedDisk {
    let disk = ResolvedDisk::from(Disk::new(real, saved.format));
    let backing = (saved.format == DiskFormat::Qcow2).then(|| saved.backing.clone());
    ResolvedDisk { backing, ..disk }
}

#[cfg(test)]
mod tests;
