//! Decides whether an image may be removed that stayed here when its disk moved. No I/O, no clock.
//!
//! The destination's word counts only about its own VM: the ownership that this host offered, or
//! one that followed from it. An answer that is older, of another life of the VM or incomplete
//! removes nothing.

use std::path::{Path, PathBuf};

use godwit_api::{DatastoreInfo, HostInfo, VmInfo, VmState};
use godwit_migration::handover::{Known, OfDestination, Role, Standing, of_destination};
use godwit_qemu::Uuid;
use godwit_types::{DatastoreHealth, Ownership};

use crate::store::kept_disks::SavedKeptDisk;

/// Kinds of file systems that one host has for itself.
const LOCAL_KINDS: [&str; 7] = ["btrfs", "ext4", "lvm-thin", "overlay", "tmpfs", "xfs", "zfs"];

/// What this host finds under the name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileHere {
    Gone,
    /// Another file has the name.
    Another,
    Same,
    /// Why it is unknown.
    Unknown(String),
}

/// Whether a VM of this host uses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseHere {
    Unused,
    /// Only the VM that has moved, whose entry is still here.
    Leaving,
    /// A VM uses it since the move.
    Again,
}

/// What follows from a look at this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// It is no longer an image that a move has left; why.
    Ends(&'static str),
    /// It stays for now; why, if it cannot be removed.
    Stays(Option<String>),
    /// The destination decides.
    Ask,
}

/// The datastore of an image, which this host has for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnStorage {
    pub(super) root: PathBuf,
    pub(super) identity: String,
}

/// What the destination of a move says.
#[derive(Clone, Debug)]
pub(super) struct There {
    /// What it has recorded about the owner of the guest.
    pub(super) known: Known,
    /// Its VM of that name, if it has one.
    pub(super) vm: Option<VmThere>,
    /// Its directories with disks, with their identities.
    pub(super) datastores: Vec<(PathBuf, Option<String>)>,
}

/// A VM of the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VmThere {
    pub(super) uuid: Option<Uuid>,
    pub(super) ownership: Ownership,
    /// Whether it is neither failed nor in doubt.
    pub(super) is_sound: bool,
    pub(super) disks: Vec<PathBuf>,
}

impl There {
    pub(super) fn new(known: Known, host: &HostInfo, vm: Option<&VmInfo>) -> There {
        let stores = host.datastores.iter();
        There {
            known,
            vm: vm.map(VmThere::of),
            datastores: stores.map(|(dir, info)| (dir.clone(), info.identity.clone())).collect(),
        }
    }
}

impl VmThere {
    fn of(vm: &VmInfo) -> VmThere {
        VmThere {
            uuid: vm.spec.uuid,
            ownership: Ownership { incarnation: vm.incarnation, epoch: vm.epoch },
            is_sound: !vm.in_doubt && vm.state != VmState::Failed,
            disks: vm.spec.disks.iter().map(|disk| disk.path.clone()).collect(),
        }
    }
}

/// Returns what follows from a look at this host.
pub(super) fn look(file: FileHere, user: UseHere, is_due: bool) -> Look {
    match (file, user) {
        (FileHere::Gone, _) => Look::Ends("the image is gone"),
        (FileHere::Another, _) => Look::Ends("another file has its name"),
        (FileHere::Same | FileHere::Unknown(_), UseHere::Again) => {
            Look::Ends("a VM of this host uses it")
        }
        (FileHere::Unknown(why), UseHere::Unused | UseHere::Leaving) => Look::Stays(Some(why)),
        (FileHere::Same, UseHere::Leaving) => {
            Look::Stays(Some("the VM has not left this host yet".to_owned()))
        }
        (FileHere::Same, UseHere::Unused) if is_due => Look::Ask,
        (FileHere::Same, UseHere::Unused) => Look::Stays(None),
    }
}

/// Returns the datastore of an image. `root`: its directory for VMs.
///
/// # Errors
/// Why other hosts may use the image, or why that is unknown.
pub(super) fn own_storage(root: &Path, info: Option<&DatastoreInfo>) -> Result<OwnStorage, String> {
    let dir = root.display();
    let info = info.ok_or_else(|| format!("datastore {dir} has not been examined yet"))?;
    if info.health == Some(DatastoreHealth::NoAnswer) {
        return Err(format!("datastore {dir} does not answer"));
    }
    let kind = info.kind.as_deref().unwrap_or("unknown");
    if !LOCAL_KINDS.contains(&kind) {
        return Err(format!("other hosts may use datastore {dir} (kind {kind})"));
    }
    let identity = info.identity.clone();
    let identity = identity.ok_or_else(|| format!("datastore {dir} has no identity"))?;
    Ok(OwnStorage { root: root.to_owned(), identity })
}

/// Decides whether an image may be removed.
///
/// # Errors
/// Why it stays.
pub(super) fn may_remove(
    kept: &SavedKeptDisk,
    storage: &OwnStorage,
    there: &There,
) -> Result<(), String> {
    let to = &kept.to;
    if there.datastores.is_empty() {
        return Err(format!("host {to} does not know its datastores yet"));
    }
    let is_it = |(dir, identity): &(PathBuf, Option<String>)| match identity {
        Some(identity) => *identity == storage.identity,
        None => *dir == storage.root,
    };
    if there.datastores.iter().any(is_it) {
        return Err(format!("host {to} shares its datastore"));
    }
    match of_destination(there.known, kept.offered) {
        OfDestination::Took => {}
        OfDestination::Open => return Err(format!("host {to} does not own VM {} yet", kept.vm)),
        OfDestination::Refused => return Err(format!("host {to} does not know VM {}", kept.vm)),
    }
    match there.known {
        // The guest ran there with its new disks, and has left that host since or was deleted.
        Known::Gone(_) => Ok(()),
        Known::Has(Standing { role: Role::Owner, ownership }) => {
            check_vm(kept, ownership, there.vm.as_ref())
        }
        Known::Has(_) | Known::Never => Err(format!("VM {} is leaving host {to}", kept.vm)),
    }
}

/// Checks the VM at a destination that owns it as `ownership`.
fn check_vm(
    kept: &SavedKeptDisk,
    ownership: Ownership,
    vm: Option<&VmThere>,
) -> Result<(), String> {
    let SavedKeptDisk { to, moved_to, .. } = kept;
    let is_it = |vm: &&VmThere| vm.uuid == Some(kept.uuid) && vm.ownership == ownership;
    let vm = vm.filter(is_it).ok_or_else(|| format!("host {to} shows another VM {}", kept.vm))?;
    if !vm.is_sound {
        return Err(format!("VM {} has failed on host {to}, or is in doubt", kept.vm));
    }
    // Later its disk may have moved on, with the VM or by itself.
    if ownership == kept.offered && !vm.disks.contains(moved_to) {
        let moved_to = moved_to.display();
        return Err(format!("VM {} on host {to} does not use {moved_to}", kept.vm));
    }
    Ok(())
}

#[cfg(test)]
impl There {
    /// Returns the answer of a destination whose VM has its new disk.
    pub(super) fn honest(kept: &SavedKeptDisk) -> There {
        let vm = VmThere {
            uuid: Some(kept.uuid),
            ownership: kept.offered,
            is_sound: true,
            disks: vec![kept.moved_to.clone()],
        };
        There {
            known: Known::Has(Standing { role: Role::Owner, ownership: kept.offered }),
            vm: Some(vm),
            datastores: vec![("/ssd".into(), Some("theirs".to_owned()))],
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::VmName;
    use godwit_types::Incarnation;
    use proptest::prelude::*;

    use super::*;
    use crate::store::kept_disks::LeftBy;

    const UUID: Uuid = Uuid::from_u128(0x5eed);
    const MOVED_TO: &str = "/ssd/web.raw";

    /// Returns an ownership of the VM, or of another life.
    fn at(incarnation: u128, epoch: u64) -> Ownership {
        Ownership { incarnation: Incarnation::new(incarnation), epoch }
    }

    fn kept() -> SavedKeptDisk {
        let left_by = LeftBy {
            vm: VmName::new("web").unwrap(),
            uuid: UUID,
            offered: at(1, 4),
            to: "b".to_owned(),
            since_unix_s: 100,
            until_unix_s: Some(200),
        };
        SavedKeptDisk::new(&left_by, ("/srv/web.raw".into(), MOVED_TO.into()), (7, 8), 4096)
    }

    fn storage() -> OwnStorage {
        OwnStorage { root: "/srv".into(), identity: "mine".to_owned() }
    }

    #[test]
    fn an_image_goes_when_the_vm_has_its_new_disk_or_has_moved_on() {
        let (kept, storage) = (kept(), storage());
        may_remove(&kept, &storage, &There::honest(&kept)).unwrap();
        let gone = There { known: Known::Gone(at(1, 6)), vm: None, ..There::honest(&kept) };
        may_remove(&kept, &storage, &gone).unwrap();
        // It was away, and is back with another disk.
        let vm = VmThere {
            uuid: Some(UUID),
            ownership: at(1, 6),
            is_sound: true,
            disks: vec!["/ssd/web-1.raw".into()],
        };
        let known = Known::Has(Standing { role: Role::Owner, ownership: at(1, 6) });
        may_remove(&kept, &storage, &There { known, vm: Some(vm), ..There::honest(&kept) })
            .unwrap();
    }

    #[test]
    fn a_datastore_must_be_of_this_host_alone() {
        let info = DatastoreInfo {
            kind: Some("ext4".to_owned()),
            identity: Some("mine".to_owned()),
            health: Some(DatastoreHealth::Full),
            ..DatastoreInfo::default()
        };
        let of = |info: &DatastoreInfo| own_storage(Path::new("/srv"), Some(info));
        assert_eq!(of(&info), Ok(storage()));
        for (other, why) in [
            (DatastoreInfo { kind: Some("nfs".to_owned()), ..info.clone() }, "kind nfs"),
            (DatastoreInfo { kind: Some("directory".to_owned()), ..info.clone() }, "directory"),
            (DatastoreInfo { kind: None, ..info.clone() }, "kind unknown"),
            (DatastoreInfo { identity: None, ..info.clone() }, "no identity"),
            (
                DatastoreInfo { health: Some(DatastoreHealth::NoAnswer), ..info.clone() },
                "does not answer",
            ),
        ] {
            assert!(of(&other).unwrap_err().contains(why), "{other:?}");
        }
        assert!(own_storage(Path::new("/srv"), None).is_err());
    }

    fn ownership() -> impl Strategy<Value = Ownership> {
        (1..3_u128, 2..7_u64).prop_map(|(incarnation, epoch)| at(incarnation, epoch))
    }

    fn known() -> impl Strategy<Value = Known> {
        let role = prop_oneof![
            4 => Just(Role::Owner),
            1 => Just(Role::Shadow),
            1 => Just(Role::TakingOver),
            1 => Just(Role::HandingOver),
            1 => Just(Role::Stranded),
        ];
        let has = (role, ownership());
        prop_oneof![
            4 => has.prop_map(|(role, ownership)| Known::Has(Standing { role, ownership })),
            2 => ownership().prop_map(Known::Gone),
            1 => Just(Known::Never),
        ]
    }

    fn vm() -> impl Strategy<Value = VmThere> {
        let uuid = prop_oneof![
            4 => Just(Some(UUID)),
            1 => Just(None),
            1 => Just(Some(Uuid::from_u128(9))),
        ];
        let disks = prop_oneof![Just(MOVED_TO), Just("/ssd/web-1.raw"), Just("/srv/web.raw")];
        (uuid, ownership(), prop::bool::weighted(0.8), disks).prop_map(
            |(uuid, ownership, is_sound, disk)| VmThere {
                uuid,
                ownership,
                is_sound,
                disks: vec![disk.into()],
            },
        )
    }

    fn datastores() -> impl Strategy<Value = Vec<(PathBuf, Option<String>)>> {
        let dir = prop_oneof![Just("/ssd"), Just("/srv"), Just("/data")];
        let identity = prop_oneof![
            6 => Just(Some("theirs")),
            1 => Just(Some("mine")),
            1 => Just(None::<&str>),
        ];
        let store = (dir, identity);
        let store =
            store.prop_map(|(dir, identity)| (PathBuf::from(dir), identity.map(str::to_owned)));
        prop::collection::vec(store, 0..3)
    }

    fn file() -> impl Strategy<Value = FileHere> {
        prop_oneof![
            4 => Just(FileHere::Same),
            1 => Just(FileHere::Gone),
            1 => Just(FileHere::Another),
            1 => Just(FileHere::Unknown("storage".to_owned())),
        ]
    }

    fn user() -> impl Strategy<Value = UseHere> {
        prop_oneof![
            4 => Just(UseHere::Unused),
            1 => Just(UseHere::Leaving),
            1 => Just(UseHere::Again),
        ]
    }

    proptest! {
        /// Whatever this host finds and the destination says: an image goes only if it is the file
        /// that the move has left, its time is over, nothing here uses it, no other host has its
        /// datastore, and the guest went on from what was offered.
        #[test]
        fn nothing_is_removed_that_may_be_needed(
            file in file(), user in user(), is_due in any::<bool>(),
            known in known(), vm in prop::option::weighted(0.8, vm()), datastores in datastores(),
        ) {
            let (kept, there) = (kept(), There { known, vm, datastores });
            let asks = look(file.clone(), user, is_due) == Look::Ask;
            let goes = asks && may_remove(&kept, &storage(), &there).is_ok();
            if !goes {
                return Ok(());
            }
            prop_assert!(file == FileHere::Same && user == UseHere::Unused && is_due);
            for (dir, identity) in &there.datastores {
                prop_assert!(identity.as_deref() != Some("mine"));
                prop_assert!(identity.is_some() || dir != Path::new("/srv"));
            }
            let (is_owner, ownership) = match there.known {
                Known::Has(standing) => (standing.role == Role::Owner, standing.ownership),
                Known::Gone(ownership) => (false, ownership),
                Known::Never => return Err(TestCaseError::fail("it never had the guest")),
            };
            prop_assert!(ownership.incarnation == Incarnation::new(1) && ownership.epoch >= 4);
            if !is_owner {
                prop_assert!(matches!(there.known, Known::Gone(_)));
                return Ok(());
            }
            let vm = there.vm.unwrap();
            prop_assert!(vm.uuid == Some(UUID) && vm.ownership == ownership && vm.is_sound);
            prop_assert!(ownership.epoch > 4 || vm.disks == [PathBuf::from(MOVED_TO)]);
        }
    }
}
