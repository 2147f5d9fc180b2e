//! The way to the destination of disks that travel: the request for images, and the streams.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{
    ArrivingDisks, ArrivingDisksAccepted, ArrivingImage, Client, ClientError, ErrorCode,
};
use godwit_lanes::Carries;
use godwit_lanes::pacing::MigrationPace;
use godwit_migration::Failure;
use godwit_migration::disks::DiskStreams;
use godwit_qemu::{
    BackingFile, DiskFormat, RbdImage, ResolvedDisk, Uuid, is_pool, is_rbd, is_thin_pool,
};
use godwit_types::{Compression, DiskMeans, FailureCode};
use godwit_wire::MigrationId;
use tokio::runtime::Handle;

use super::ranges::are_valid_runs;
use super::tracking::Tracking;
use super::wires::Wires;
use crate::agent::Agent;
use crate::block_devices::is_device_path;
use crate::network;
use crate::paths::Paths;

/// Streams of all lanes together if their number was not requested, at least one a lane. What each
/// has on its way is sent again after a cut.
const FEW_STREAMS: usize = 2;
const MOST_STREAMS: usize = 8;
/// Time limit for an answer after a cut: over a cut link it never arrives.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// What is added to it for each image in a pool of Ceph, which the destination looks for first.
const POOL_IMAGE_LIMIT: Duration = Duration::from_secs(5);
/// Longest path that a destination may choose.
const MOST_PATH_BYTES: usize = 4096;

/// The destination of a transfer.
pub(super) struct Connecting {
    pub(super) agent: Arc<Agent>,
    pub(super) peer: Client,
    /// Name of the destination.
    pub(super) to: String,
    pub(super) request: ArrivingDisks,
    /// The images that the destination made.
    pub(super) images: Vec<Image>,
    pub(super) pace: MigrationPace,
    pub(super) compression: Compression,
    /// Whether content may be referred to that the destination has.
    pub(super) refers: bool,
    /// Requested streams of each lane.
    pub(super) streams: Option<u32>,
    pub(super) wires: Arc<Wires>,
}

/// An image at the destination, with its backing files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) path: PathBuf,
    backing: Vec<BackingFile>,
    /// Identity of the cluster of Ceph that has it.
    cluster: Option<Uuid>,
    /// What tells it from another image of its path, as far as the destination says.
    identity: Option<(u64, u64)>,
}

impl Image {
    /// Returns a disk with this image.
    pub(super) fn of(&self, disk: &ResolvedDisk) -> ResolvedDisk {
        let is_raw = is_rbd(&self.path) || is_device_path(&self.path);
        let format = if is_raw { DiskFormat::Raw } else { disk.format };
        // A raw image has no chain to record.
        let backing = (format == DiskFormat::Qcow2).then(|| self.backing.clone());
        let cluster = self.cluster;
        ResolvedDisk { cluster, ..disk.with_image(self.path.clone(), format, backing) }
    }

    fn place(&self) -> (&Path, &[BackingFile], Option<Uuid>) {
        (self.path.as_path(), self.backing.as_slice(), self.cluster)
    }
}

/// Checks an answer, which the destination may have made up; returns the images.
///
/// # Errors
/// What is wrong with it.
pub(super) fn images_of(
    request: &ArrivingDisks,
    accepted: &ArrivingDisksAccepted,
) -> Result<Vec<Image>, Failure> {
    let wrong = |what: &str| {
        let detail = format!("the destination's answer about the disks has {what}");
        Err(Failure::new(FailureCode::ProtocolBroken, detail))
    };
    if accepted.disks.len() != request.disks.len() {
        return wrong("another number of disks");
    }
    if accepted.addresses.is_empty() {
        return wrong("no address");
    }
    for (asked, made) in request.disks.iter().zip(&accepted.disks) {
        let is_plain = |path: &Path| {
            let text = path.to_str().filter(|text| text.len() <= MOST_PATH_BYTES);
            path.is_absolute() && text.is_some_and(|text| !text.chars().any(char::is_control))
        };
        let is_image = match request.to.as_deref().filter(|to| is_pool(to)) {
            Some(pool) => is_in_pool(&made.path, pool) && made.cluster.is_some(),
            None => {
                let to_device =
                    asked.onto.is_some() || request.to.as_deref().is_some_and(is_thin_pool);
                is_plain(&made.path)
                    && made.cluster.is_none()
                    && is_device_path(&made.path) == to_device
            }
        };
        if !is_image || !made.backing.iter().all(|file| is_plain(&file.path)) {
            return wrong("an invalid path");
        }
        let formats = made.backing.iter().map(|file| file.format);
        if !formats.eq(asked.base.iter().map(|base| base.format)) {
            return wrong("other backing files");
        }
        if !are_valid_runs(&made.present, asked.virtual_bytes) {
            return wrong("parts that the disk does not have");
        }
    }
    let image = |made: &ArrivingImage| Image {
        path: made.path.clone(),
        backing: made.backing.clone(),
        cluster: made.cluster,
        identity: made.identity,
    };
    Ok(accepted.disks.iter().map(image).collect())
}

/// Whether a transfer can go on with these images. With bitmaps, new ones in the same places will
/// do: what they lack is read again. A mirror sends everything once, so that new images would lack
/// what has been confirmed.
fn go_on(images: &[Image], earlier: &[Image], means: DiskMeans) -> bool {
    let is_same = |(now, before): (&Image, &Image)| {
        let has_content = now.identity.is_some() && now.identity == before.identity;
        now.place() == before.place() && (means == DiskMeans::Bitmaps || has_content)
    };
    images.len() == earlier.len() && images.iter().zip(earlier).all(is_same)
}

/// Returns the time limit for an answer after a cut.
fn answer_limit(request: &ArrivingDisks) -> Duration {
    let to_pool = request.to.as_deref().is_some_and(|to| is_pool(to) || is_thin_pool(to));
    let images = if to_pool { u32::try_from(request.disks.len()).unwrap_or(u32::MAX) } else { 0 };
    ANSWER_LIMIT.saturating_add(POOL_IMAGE_LIMIT.saturating_mul(images))
}

/// Whether a path is that of an image in this pool of Ceph.
fn is_in_pool(path: &Path, pool: &Path) -> bool {
    RbdImage::of(path).is_some_and(|image| Path::new(&format!("rbd:{}", image.place())) == pool)
}

impl Connecting {
    /// Opens the streams of an accepted request. Blocks.
    ///
    /// # Errors
    /// None can be opened: [`FailureCode::LaneLost`] if the destination answered none of them.
    pub(super) fn open(
        &self,
        runtime: &Handle,
        tracking: &Tracking,
        accepted: &ArrivingDisksAccepted,
    ) -> Result<DiskStreams, Failure> {
        let migration: MigrationId = accepted.id.parse().map_err(|_| {
            let detail = "the destination returned an invalid ID for the disks";
            Failure::new(FailureCode::ProtocolBroken, detail)
        })?;
        let ours = runtime.block_on(network::near(&self.agent.config().migration_addresses));
        let paths = Paths {
            lanes: godwit_lanes::pair(&ours, &accepted.addresses),
            host: self.to.clone(),
            identity: self.agent.identity(),
            pace: self.pace.clone(),
        };
        let lanes = paths.lanes.len();
        // Without a lane, none is tried.
        let few = FEW_STREAMS.max(lanes) * lanes.min(1);
        let count = self.streams.map_or(few, |streams| streams as usize * lanes).min(MOST_STREAMS);
        let mut streams = DiskStreams::new(migration, self.compression);
        let mut why = Failure::new(FailureCode::LaneLost, "the destination returned no address");
        let mut opened = 0;
        for number in 1..=count {
            let lane = number % lanes;
            let added =
                paths.data(lane, Carries::Pages, &self.wires.connecting).and_then(|stream| {
                    self.wires.add(&stream);
                    let number = u16::try_from(number).unwrap_or(u16::MAX);
                    streams.add(stream, number, tracking.reader())
                });
            match added {
                Ok(()) => opened += 1,
                Err(failure) => {
                    tracing::warn!(to = self.to, %failure, "a stream of the disks is left out");
                    // The destination's answer to one stream says more than a cut of another.
                    if why.code == FailureCode::LaneLost {
                        why = failure;
                    }
                }
            }
        }
        if self.refers && accepted.references {
            streams.refer();
        }
        if opened == 0 { Err(why) } else { Ok(streams) }
    }

    /// Connects once more after a cut. Blocks.
    ///
    /// # Errors
    /// [`FailureCode::LaneLost`]: not yet. Otherwise the transfer cannot go on.
    pub(super) fn again(
        &self,
        runtime: &Handle,
        tracking: &Tracking,
    ) -> Result<(DiskStreams, ArrivingDisksAccepted), Failure> {
        let asking = self.peer.receive_disks(&self.request);
        let limit = answer_limit(&self.request);
        let answer = runtime.block_on(async { tokio::time::timeout(limit, asking).await });
        let lost = |why: &str| Failure::new(FailureCode::LaneLost, why);
        let accepted = match answer {
            Ok(Ok(accepted)) => accepted,
            // The streams that were cut are still being ended there.
            Ok(Err(ClientError::Refused(error))) if error.code == ErrorCode::Busy => {
                return Err(lost(&error.message));
            }
            Ok(Err(ClientError::Refused(error))) => {
                let detail = format!("host {} does not continue: {}", self.to, error.message);
                return Err(Failure::new(FailureCode::DiskFailed, detail));
            }
            Ok(Err(error)) => return Err(lost(&error.to_string())),
            Err(_) => return Err(lost("the destination does not answer")),
        };
        let images = images_of(&self.request, &accepted)?;
        if !go_on(&images, &self.images, tracking.means()) {
            let detail = format!("host {} has lost the images of the disks", self.to);
            return Err(Failure::new(FailureCode::DiskFailed, detail));
        }
        let streams = self.open(runtime, tracking, &accepted)?;
        Ok((streams, accepted))
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{ArrivingBase, ArrivingDisk, OntoDevice};
    use godwit_qemu::{Disk, Uuid, VmName};

    use super::*;

    fn request() -> ArrivingDisks {
        let base = ArrivingBase {
            path: "/srv/base.raw".into(),
            format: DiskFormat::Raw,
            file_bytes: 4096,
            blake3: "0".repeat(64),
        };
        let disk = ArrivingDisk {
            path: "/srv/web.qcow2".into(),
            format: DiskFormat::Qcow2,
            virtual_bytes: 1 << 20,
            used_bytes: 0,
            base: vec![base],
            onto: None,
        };
        ArrivingDisks {
            transfer: "f".repeat(32),
            vm: VmName::new("web").unwrap(),
            uuid: Uuid::nil(),
            from: "a".into(),
            to: None,
            disks: vec![disk],
        }
    }

    fn accepted() -> ArrivingDisksAccepted {
        let backing = BackingFile { path: "/ssd/base.raw".into(), format: DiskFormat::Raw };
        let image = ArrivingImage {
            path: "/ssd/web-1.qcow2".into(),
            backing: vec![backing],
            cluster: None,
            present: vec![(0, 65536)],
            identity: Some((7, 9)),
        };
        ArrivingDisksAccepted {
            id: "f".repeat(32),
            addresses: vec!["127.0.0.1:7".parse().unwrap()],
            disks: vec![image],
            references: false,
        }
    }

    #[test]
    fn an_image_takes_the_place_of_that_of_the_disk() {
        let images = images_of(&request(), &accepted()).unwrap();
        let disk: ResolvedDisk = Disk::new("/srv/web.qcow2", DiskFormat::Qcow2).into();
        let there = images[0].of(&disk);
        assert_eq!(there.path, Path::new("/ssd/web-1.qcow2"));
        assert_eq!(there.backing, Some(accepted().disks[0].backing.clone()));
        let raw = images[0].of(&Disk::new("/srv/web.raw", DiskFormat::Raw).into());
        assert_eq!(raw.backing, None);
    }

    #[test]
    fn a_mirror_goes_on_only_with_the_images_that_have_what_it_sent() {
        let image = |identity| {
            let mut answer = accepted();
            answer.disks[0].identity = identity;
            images_of(&request(), &answer).unwrap()
        };
        let first = image(Some((7, 9)));
        assert!(go_on(&first, &first, DiskMeans::Mirror));
        for other in [Some((8, 9)), Some((7, 10)), None] {
            assert!(!go_on(&image(other), &first, DiskMeans::Mirror), "{other:?}");
            assert!(go_on(&image(other), &first, DiskMeans::Bitmaps), "{other:?}");
        }
        assert!(!go_on(&image(None), &image(None), DiskMeans::Mirror));
        assert!(!go_on(&[], &first, DiskMeans::Bitmaps));
    }

    #[test]
    fn the_answer_of_a_liar_is_refused() {
        let lies: [fn(&mut ArrivingDisksAccepted); 11] = [
            |answer| answer.disks.clear(),
            |answer| answer.disks.push(answer.disks[0].clone()),
            |answer| answer.addresses.clear(),
            |answer| answer.disks[0].path = "web.qcow2".into(),
            |answer| answer.disks[0].path = "/ssd/web\n.qcow2".into(),
            |answer| answer.disks[0].path = format!("/{}", "x".repeat(5000)).into(),
            |answer| answer.disks[0].path = "rbd:vms/web".into(),
            |answer| answer.disks[0].cluster = Some(Uuid::from_u128(7)),
            |answer| answer.disks[0].backing.clear(),
            |answer| answer.disks[0].backing[0].format = DiskFormat::Qcow2,
            |answer| answer.disks[0].present.push((1 << 20, 1)),
        ];
        for lie in lies {
            let mut answer = accepted();
            lie(&mut answer);
            let failure = images_of(&request(), &answer).unwrap_err();
            assert_eq!(failure.code, FailureCode::ProtocolBroken, "{answer:?}");
        }
    }

    #[test]
    fn only_a_disk_that_was_sent_for_a_device_is_on_one_and_raw() {
        let mut request = request();
        let mut answer = accepted();
        answer.disks[0] = ArrivingImage {
            path: "/dev/vg0/web".into(),
            backing: Vec::new(),
            ..answer.disks[0].clone()
        };
        request.disks[0] =
            ArrivingDisk { format: DiskFormat::Raw, base: Vec::new(), ..request.disks[0].clone() };
        // The device would keep what it has where the disk has nothing.
        let failure = images_of(&request, &answer).unwrap_err();
        assert_eq!(failure.code, FailureCode::ProtocolBroken);
        request.disks[0].onto = Some(OntoDevice { overwrite: true, source: None });
        let images = images_of(&request, &answer).unwrap();
        let disk: ResolvedDisk = Disk::new("/srv/web.qcow2", DiskFormat::Qcow2).into();
        let there = images[0].of(&disk);
        assert_eq!(there.path, Path::new("/dev/vg0/web"));
        assert_eq!((there.format, there.backing), (DiskFormat::Raw, None));
        // A volume that is made for the disk has nothing.
        request.disks[0].onto = None;
        request.to = Some("lvm:vg0/thin0".into());
        images_of(&request, &answer).unwrap();
        for to in ["/srv", "lvm:vg0/thin0"] {
            request.to = Some(to.into());
            request.disks[0].onto =
                (to == "/srv").then_some(OntoDevice { overwrite: true, source: None });
            answer.disks[0].path = "/srv/web.raw".into();
            let failure = images_of(&request, &answer).unwrap_err();
            assert_eq!(failure.code, FailureCode::ProtocolBroken);
        }
    }

    #[test]
    fn an_image_in_a_pool_is_raw_and_in_the_pool_that_was_requested() {
        let mut request = request();
        request.to = Some("rbd:vms/shop".into());
        request.disks[0] =
            ArrivingDisk { format: DiskFormat::Raw, base: Vec::new(), ..request.disks[0].clone() };
        let answer = |path: &str, cluster| {
            let mut answer = accepted();
            answer.disks[0] = ArrivingImage {
                path: path.into(),
                backing: Vec::new(),
                cluster,
                present: Vec::new(),
                identity: None,
            };
            answer
        };
        assert!(answer_limit(&request) > ANSWER_LIMIT);
        let cluster = Some(Uuid::from_u128(7));
        let images = images_of(&request, &answer("rbd:vms/shop/web", cluster)).unwrap();
        let disk: ResolvedDisk = Disk::new("/srv/web.qcow2", DiskFormat::Qcow2).into();
        let there = images[0].of(&disk);
        assert_eq!(there.path, Path::new("rbd:vms/shop/web"));
        assert_eq!((there.format, there.backing, there.cluster), (DiskFormat::Raw, None, cluster));
        for (path, cluster) in [
            ("rbd:vms/shop/web", None),
            ("rbd:vms/web", cluster),
            ("rbd:vms/shop", cluster),
            ("rbd:other/shop/web", cluster),
            ("/srv/web.raw", cluster),
        ] {
            let failure = images_of(&request, &answer(path, cluster)).unwrap_err();
            assert_eq!(failure.code, FailureCode::ProtocolBroken, "{path}");
        }
    }
}
