//! Access to /dev/kvm for the users of VMs: through the device's group, if that group has access;
//! otherwise through an entry for the user in the device's access list (acl(5)), which is removed
//! with the VM.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::user::User;

const DEVICE: &str = "/dev/kvm";
/// Extended attribute with an access list: linux/posix_acl_xattr.h.
const ATTRIBUTE: &str = "system.posix_acl_access";
const VERSION: u32 = 2;
const VERSION_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// Size limit of a list; more than any device has.
const MOST_BYTES: usize = VERSION_BYTES + ENTRY_BYTES * 4096;
const READ_WRITE: u16 = 6;
/// ID in an entry that names no user or group.
const NO_ID: u32 = u32::MAX;

/// Kinds of entries, in the order that the kernel requires.
const OWNER: u16 = 0x01;
const NAMED_USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const NAMED_GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;

/// Gives a user access to /dev/kvm; returns it with the group to use. On failure QEMU itself
/// reports the missing access.
pub(crate) fn allow(user: User) -> User {
    let device = Path::new(DEVICE);
    let Ok(metadata) = fs::metadata(device) else { return user };
    // With an access list, the mode's group digits are the list's mask and not the group's rights.
    let list = read(device).ok().flatten().unwrap_or_else(|| of_mode(metadata.mode()));
    match by_list(&list, metadata.gid()) {
        Some(Way::Anybody) => return user,
        Some(Way::Group(gid)) => return User { gid, ..user },
        None => {}
    }
    if let Err(error) = change(device, |list| grant(list, user.uid)) {
        tracing::warn!(uid = user.uid, %error, "cannot give a VM's user access to {DEVICE}");
    }
    user
}

/// Revokes the access that [`allow()`] gave, for all users that `is_gone` selects.
pub(crate) fn revoke(is_gone: impl Fn(u32) -> bool) {
    let device = Path::new(DEVICE);
    let goes = |entry: &Entry| entry.kind == NAMED_USER && is_gone(entry.id);
    // Most VMs have no entry. Reading without the lock is safe: no other program adds entries for
    // these users.
    if !matches!(read(device), Ok(Some(list)) if list.iter().any(goes)) {
        return;
    }
    let take_back = |list: &mut Vec<Entry>| {
        list.retain(|entry| !goes(entry));
        drop_unused_mask(list);
    };
    if let Err(error) = change(device, take_back) {
        tracing::warn!(%error, "cannot revoke access to {DEVICE} from users of deleted VMs");
    }
}

/// Access that users other than root have to a device.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    Anybody,
    Group(u32),
}

/// Returns the way in that a list offers. Root's own group is excluded, as it gives access to more
/// than the device.
fn by_list(list: &[Entry], gid: u32) -> Option<Way> {
    let of =
        |kind: u16| list.iter().find(|entry| entry.kind == kind).map(|entry| entry.permissions);
    let has = |permissions: u16| permissions & READ_WRITE == READ_WRITE;
    let of_group = of(GROUP).unwrap_or(0) & of(MASK).unwrap_or(READ_WRITE);
    match () {
        () if has(of(OTHERS).unwrap_or(0)) => Some(Way::Anybody),
        () if has(of_group) && gid != 0 => Some(Way::Group(gid)),
        () => None,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    kind: u16,
    permissions: u16,
    id: u32,
}

/// Adds an entry for a user. The mask bounds the rights of all named users and groups.
fn grant(list: &mut Vec<Entry>, uid: u32) {
    list.retain(|entry| entry.kind != MASK && (entry.kind != NAMED_USER || entry.id != uid));
    list.push(Entry { kind: NAMED_USER, permissions: READ_WRITE, id: uid });
    let bounded =
        list.iter().filter(|entry| matches!(entry.kind, NAMED_USER | GROUP | NAMED_GROUP));
    let mask = bounded.fold(0, |all, entry| all | entry.permissions);
    list.push(Entry { kind: MASK, permissions: mask, id: NO_ID });
    list.sort_by_key(|entry| (entry.kind, entry.id));
}

/// Removes the mask of a list without named users and groups. Such a list is a mode, and its mask
/// would pass for the group's rights.
fn drop_unused_mask(list: &mut Vec<Entry>) {
    if !list.iter().any(|entry| matches!(entry.kind, NAMED_USER | NAMED_GROUP)) {
        list.retain(|entry| entry.kind != MASK);
    }
}

/// Changes a file's list under its lock, which other agents of this machine also take.
fn change(path: &Path, edit: impl FnOnce(&mut Vec<Entry>)) -> io::Result<()> {
    let lock = File::options().read(true).write(true).open(path)?;
    lock.lock()?;
    let mut list = match read(path)? {
        Some(list) => list,
        None => of_mode(fs::metadata(path)?.mode()),
    };
    edit(&mut list);
    Ok(rustix::fs::setxattr(path, ATTRIBUTE, &encode(&list), XattrFlags::empty())?)
}

/// Returns the list that is equivalent to a mode.
fn of_mode(mode: u32) -> Vec<Entry> {
    let entry = |(kind, shift): (u16, u32)| Entry {
        kind,
        permissions: u16::try_from((mode >> shift) & 0o7).unwrap_or(0),
        id: NO_ID,
    };
    [(OWNER, 6), (GROUP, 3), (OTHERS, 0)].map(entry).to_vec()
}

fn read(path: &Path) -> io::Result<Option<Vec<Entry>>> {
    let mut bytes = vec![0; MOST_BYTES];
    match rustix::fs::getxattr(path, ATTRIBUTE, &mut bytes) {
        Ok(length) => {
            bytes.truncate(length);
            decode(&bytes).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
        }
        Err(Errno::NODATA) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn decode(bytes: &[u8]) -> Option<Vec<Entry>> {
    let (version, entries) = bytes.split_at_checked(VERSION_BYTES)?;
    let (entries, rest) = entries.as_chunks::<ENTRY_BYTES>();
    (version == VERSION.to_le_bytes() && rest.is_empty()).then(|| {
        let entry = |[k0, k1, p0, p1, id @ ..]: &[u8; ENTRY_BYTES]| Entry {
            kind: u16::from_le_bytes([*k0, *k1]),
            permissions: u16::from_le_bytes([*p0, *p1]),
            id: u32::from_le_bytes(*id),
        };
        entries.iter().map(entry).collect()
    })
}

fn encode(list: &[Entry]) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for entry in list {
        bytes.extend(entry.kind.to_le_bytes());
        bytes.extend(entry.permissions.to_le_bytes());
        bytes.extend(entry.id.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_used_if_it_has_access_and_is_not_roots() {
        let by_mode = |mode: u32, gid: u32| by_list(&of_mode(mode), gid);
        assert_eq!(by_mode(0o20666, 0), Some(Way::Anybody));
        assert_eq!(by_mode(0o20660, 108), Some(Way::Group(108)));
        assert_eq!(by_mode(0o20660, 0), None);
        assert_eq!(by_mode(0o20640, 108), None);
        assert_eq!(by_mode(0o20600, 0), None);
        // With entries for users, the mode's digits do not describe the group.
        let mut list = of_mode(0o20600);
        grant(&mut list, 7);
        assert_eq!(by_list(&list, 108), None);
        let mut list = of_mode(0o20660);
        grant(&mut list, 7);
        assert_eq!(by_list(&list, 108), Some(Way::Group(108)));
    }

    #[test]
    fn access_is_given_and_revoked() {
        let mut list = of_mode(0o600);
        grant(&mut list, 7);
        grant(&mut list, 5);
        grant(&mut list, 7);
        let kinds: Vec<(u16, u16, u32)> =
            list.iter().map(|entry| (entry.kind, entry.permissions, entry.id)).collect();
        let expected = [
            (OWNER, 6, NO_ID),
            (NAMED_USER, 6, 5),
            (NAMED_USER, 6, 7),
            (GROUP, 0, NO_ID),
            (MASK, 6, NO_ID),
            (OTHERS, 0, NO_ID),
        ];
        assert_eq!(kinds, expected);
        assert_eq!(decode(&encode(&list)), Some(list));
        assert_eq!(decode(b"\x02\0\0\x00123"), None);
        assert_eq!(decode(b"\x01\0\0\0"), None);
    }

    #[test]
    fn the_kernel_accepts_the_list() {
        let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
            eprintln!("skipped: no /dev/shm");
            return;
        };
        match change(file.path(), |list| grant(list, 4711)) {
            Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {
                eprintln!("skipped: no access lists in /dev/shm");
                return;
            }
            changed => changed.unwrap(),
        }
        let list = read(file.path()).unwrap().unwrap();
        assert!(list.iter().any(|entry| (entry.kind, entry.id) == (NAMED_USER, 4711)), "{list:?}");
        let mode = || fs::metadata(file.path()).unwrap().mode() & 0o777;
        assert_eq!(mode(), 0o660, "the mode shows the mask");
        let take_back = |list: &mut Vec<Entry>| {
            list.retain(|entry| entry.id != 4711);
            drop_unused_mask(list);
        };
        change(file.path(), take_back).unwrap();
        assert_eq!((read(file.path()).unwrap(), mode()), (None, 0o600));
    }
}
