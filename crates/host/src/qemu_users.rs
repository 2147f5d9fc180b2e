//! Users of QEMUs: each QEMU runs as a user of its own, from a range of IDs that nothing else uses.
//!
//! A guest that escapes from its QEMU then has no rights over other VMs, the agent or the host's
//! users. The ID of a VM is recorded beside its other files, where only root can write. So the next
//! agent finds it, and the ID is free again when those files are removed. On another host the VM
//! has another ID. Nothing depends on it: QEMU receives what it needs from the host as open files.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{Accelerator, VmName};
use parking_lot::Mutex;

use crate::config::Config;
use crate::user::{DEFAULT_USERS, User, UserRange};

/// Name of the file in a VM's run directory with the ID of its user.
const NOTE: &str = "qemu.user";
/// Name of the file in a VM's run directory with the ID of its TPM's user.
const TPM_NOTE: &str = "tpm.user";

/// Users of this host's QEMUs.
#[derive(Debug)]
pub(crate) enum QemuUsers {
    Shared(User),
    /// Each QEMU has one of these. The lock is held while one is chosen.
    Each(UserRange, Mutex<()>),
}

impl QemuUsers {
    /// Reads the users from the configuration.
    ///
    /// # Errors
    /// The user does not exist, or the range is in use or not mapped on this host.
    pub(crate) fn of(config: &Config) -> Result<QemuUsers, ApiError> {
        let refused = |key: &str, why: String, remedy: &str| {
            ApiError::new(ErrorCode::InvalidRequest, format!("{key}: {why}"), remedy)
        };
        if let Some(user) = &config.qemu_user {
            let user = look_up(user).map_err(|why| {
                refused("qemu_user", why, "correct qemu_user in the configuration")
            })?;
            let what = if user.uid == 0 {
                "root: a guest that escapes owns the host"
            } else {
                "one shared user"
            };
            tracing::warn!(uid = user.uid, "all QEMUs of this host run as {what}");
            return Ok(QemuUsers::Shared(user));
        }
        let range = config.qemu_users.unwrap_or(DEFAULT_USERS);
        let problem = ["/etc/passwd", "/etc/group"].into_iter().find_map(|path| {
            owner_in(range, &fs::read_to_string(path).ok()?).map(|who| (path, who.to_owned()))
        });
        if let Some((path, who)) = problem {
            let why = format!("{range} contains the ID of \"{who}\" in {path}");
            return Err(refused("qemu_users", why, "use a range of IDs that nothing else uses"));
        }
        for path in ["/proc/self/uid_map", "/proc/self/gid_map"] {
            let map = fs::read_to_string(path).unwrap_or_default();
            if !map.is_empty() && !is_mapped(range, &map) {
                let why = format!("{range} is not mapped in this user namespace ({path})");
                return Err(refused(
                    "qemu_users",
                    why,
                    "use a range that is mapped there and that nothing else uses",
                ));
            }
        }
        // Access that belonged to VMs which ended while no agent ran.
        if let Ok(running) = running_users(range) {
            crate::kvm::revoke(|uid| range.contains(uid) && !running.contains(&uid));
        }
        Ok(QemuUsers::Each(range, Mutex::new(())))
    }

    /// Assigns a user to a VM and records it in the VM's run directory, which must exist. No other
    /// VM below `vms` gets that user until the record is removed, and no process on this machine
    /// has it now.
    ///
    /// # Errors
    /// The record cannot be written; [`io::ErrorKind::QuotaExceeded`] if no user is free.
    pub(crate) fn claim(&self, vms: &Path, vm: &VmName) -> io::Result<User> {
        self.claim_as(vms, vm, NOTE)
    }

    /// Assigns a user to a VM's TPM, as [`QemuUsers::claim`] does to its QEMU. It is another one:
    /// a guest that escapes from its QEMU does not get the secrets of its TPM.
    pub(crate) fn claim_for_tpm(&self, vms: &Path, vm: &VmName) -> io::Result<User> {
        self.claim_as(vms, vm, TPM_NOTE)
    }

    fn claim_as(&self, vms: &Path, vm: &VmName, note: &str) -> io::Result<User> {
        let (range, lock) = match self {
            QemuUsers::Shared(user) => return Ok(*user),
            QemuUsers::Each(range, lock) => (*range, lock),
        };
        let _alone = lock.lock();
        let mut taken = running_users(range)?;
        for entry in fs::read_dir(vms)? {
            let dir = entry?.path();
            taken.extend(noted(&dir).into_iter().chain(read_note(&dir.join(TPM_NOTE))));
        }
        let free = range.beginning_for(vm).find(|uid| !taken.contains(uid));
        let uid = free.ok_or_else(|| {
            io::Error::new(io::ErrorKind::QuotaExceeded, format!("all users of {range} are taken"))
        })?;
        fs::write(vms.join(vm).join(note), uid.to_string())?;
        Ok(User { uid, gid: uid })
    }
}

impl QemuUsers {
    /// Returns the user that all QEMUs run as; `None` if each has its own.
    pub(crate) fn shared(&self) -> Option<u32> {
        match self {
            QemuUsers::Shared(user) => Some(user.uid),
            QemuUsers::Each(..) => None,
        }
    }

    /// Whether QEMUs, of VMs or started for queries, may run as that user.
    pub(crate) fn include(&self, uid: u32) -> bool {
        match self {
            QemuUsers::Shared(user) => user.uid == uid,
            QemuUsers::Each(range, _) => range.contains(uid),
        }
    }

    /// Returns the user of a QEMU that is started for a query; no VM has it at the moment.
    pub(crate) fn for_query(&self) -> User {
        let range = match self {
            QemuUsers::Shared(user) => return *user,
            QemuUsers::Each(range, _) => *range,
        };
        let running = running_users(range).unwrap_or_default();
        let uid = (range.first..=range.last)
            .rev()
            .find(|uid| !running.contains(uid))
            .unwrap_or(range.last);
        User { uid, gid: uid }
    }
}

impl QemuUsers {
    /// Returns the user of a QEMU that is queried for its abilities with an accelerator.
    /// [`QemuUsers::end_query`] revokes the access that this needs.
    pub(crate) fn for_query_with(&self, accel: Accelerator) -> User {
        let user = self.for_query();
        match self {
            QemuUsers::Each(..) if accel == Accelerator::Kvm => crate::kvm::allow(user),
            QemuUsers::Each(..) | QemuUsers::Shared(_) => user,
        }
    }

    /// Ends a query: revokes its user's access to /dev/kvm, unless a VM below `vms` has been
    /// assigned that user meanwhile.
    pub(crate) fn end_query(&self, vms: &Path, user: User) {
        let QemuUsers::Each(_, lock) = self else { return };
        let _alone = lock.lock();
        let is_noted = |entry: io::Result<fs::DirEntry>| {
            entry.is_ok_and(|entry| noted(&entry.path()) == Some(user.uid))
        };
        if !fs::read_dir(vms).is_ok_and(|mut entries| entries.any(is_noted)) {
            crate::kvm::revoke(|uid| uid == user.uid);
        }
    }
}

/// Returns the user of a VM's QEMU, as recorded in its run directory; `None` without a record.
pub(crate) fn noted(vm_dir: &Path) -> Option<u32> {
    read_note(&vm_dir.join(NOTE))
}

fn read_note(note: &Path) -> Option<u32> {
    fs::read_to_string(note).ok()?.trim().parse().ok()
}

/// Releases a VM's user; its QEMU has ended.
pub(crate) fn forget(vm_dir: &Path) -> io::Result<()> {
    fs::remove_file(vm_dir.join(NOTE))
}

/// Returns the users of the range that any process of this machine has, including those of another
/// agent.
fn running_users(range: UserRange) -> io::Result<BTreeSet<u32>> {
    Ok(godwit_qemu::users_of_processes()?.filter(|uid| range.contains(*uid)).collect())
}

/// Returns the owner of an ID in the range, from a file in the format of /etc/passwd and
/// /etc/group: name, password, ID.
fn owner_in(range: UserRange, file: &str) -> Option<&str> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let id = fields.nth(1)?.parse().ok()?;
        range.contains(id).then_some(name)
    })
}

/// Whether a user namespace maps all IDs of the range (user_namespaces(7): first inside, first
/// outside, count).
fn is_mapped(range: UserRange, map: &str) -> bool {
    map.lines().any(|line| {
        let mut numbers =
            line.split_ascii_whitespace().map(|number| number.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        let (first, count) = (first.unwrap_or(0), count.unwrap_or(0));
        u64::from(range.first) >= first && u64::from(range.last) < first + count
    })
}

/// Looks up a user: a name in /etc/passwd or `UID:GID`. Only local users, since the agent must
/// start without a name service.
fn look_up(user: &str) -> Result<User, String> {
    let passwd = fs::read_to_string("/etc/passwd")
        .map_err(|error| format!("cannot read /etc/passwd: {error}"))?;
    find(user, &passwd).ok_or_else(|| format!("there is no user \"{user}\" in /etc/passwd"))
}

fn find(user: &str, passwd: &str) -> Option<User> {
    if let Some((uid, gid)) = user.split_once(':') {
        return Some(User { uid: uid.parse().ok()?, gid: gid.parse().ok()? });
    }
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == user).then_some(())?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(User { uid, gid })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_a_name_or_two_ids() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65533:nobody:/:/sbin/nologin\n";
        assert_eq!(find("nobody", passwd), Some(User { uid: 65534, gid: 65533 }));
        assert_eq!(find("107:108", passwd), Some(User { uid: 107, gid: 108 }));
        assert_eq!(find("nob", passwd), None);
        assert_eq!(find("107:", passwd), None);
    }

    #[test]
    fn a_range_contains_only_unused_ids() {
        let range: UserRange = "100000-165535".parse().unwrap();
        assert_eq!(range.to_string(), "100000-165535");
        assert_eq!(DEFAULT_USERS.to_string().parse(), Ok(DEFAULT_USERS));
        for bad in
            ["", "7", "10-20", "0-100000", "3000-2000", "60000-70000", "5000-4294967295", "a-b"]
        {
            assert!(bad.parse::<UserRange>().is_err(), "{bad}");
        }
        assert_eq!(
            owner_in(range, "root:x:0:0::/:/bin/sh\nweb:x:100007:5::/:/bin/sh"),
            Some("web")
        );
        assert_eq!(owner_in(range, "kvm:x:110:me\n"), None);
        assert!(is_mapped(range, "         0          0 4294967295\n"));
        assert!(is_mapped(range, "0 1000 1\n100000 200000 65536\n"));
        assert!(!is_mapped(range, "0 100000 65536\n"));
    }

    #[test]
    fn no_two_vms_have_one_user() {
        let folder = tempfile::tempdir().unwrap();
        let range: UserRange = "1999990000-1999990003".parse().unwrap();
        let claim = |vm: &str| {
            let vm = &VmName::new(vm).unwrap();
            fs::create_dir_all(folder.path().join(vm)).unwrap();
            // A new agent each time: only the records show which users are taken.
            QemuUsers::Each(range, Mutex::new(())).claim(folder.path(), vm)
        };
        let users: BTreeSet<u32> = ["a", "b", "c", "d"].map(|vm| claim(vm).unwrap().uid).into();
        assert_eq!(
            users.into_iter().collect::<Vec<_>>(),
            (1_999_990_000..=1_999_990_003).collect::<Vec<_>>()
        );
        let error = claim("e").unwrap_err();
        assert!(
            error.to_string().contains("all users of 1999990000-1999990003 are taken"),
            "{error}"
        );
        let web = VmName::new("c").unwrap();
        QemuUsers::Each(range, Mutex::new(())).claim_for_tpm(folder.path(), &web).unwrap_err();
        let freed = noted(&folder.path().join("c")).unwrap();
        forget(&folder.path().join("c")).unwrap();
        assert_eq!(claim("e").unwrap(), User { uid: freed, gid: freed });
        let freed = noted(&folder.path().join("d")).unwrap();
        forget(&folder.path().join("d")).unwrap();
        let tpm = QemuUsers::Each(range, Mutex::new(())).claim_for_tpm(folder.path(), &web);
        assert_eq!(tpm.unwrap().uid, freed);
        claim("d").unwrap_err();
    }

    #[test]
    fn a_user_with_a_running_process_is_not_assigned() {
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can start a process as another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let range: UserRange = "1999980000-1999980001".parse().unwrap();
        let (web, vm) = (VmName::new("web").unwrap(), folder.path().join("web"));
        fs::create_dir(&vm).unwrap();
        let users = QemuUsers::Each(range, Mutex::new(()));
        let first = users.claim(folder.path(), &web).unwrap();
        forget(&vm).unwrap();
        let mut stray =
            std::process::Command::new("/bin/sleep").arg("1000").uid(first.uid).spawn().unwrap();
        assert_ne!(users.claim(folder.path(), &web).unwrap(), first);
        forget(&vm).unwrap();
        stray.kill().unwrap();
        stray.wait().unwrap();
        assert_eq!(users.claim(folder.path(), &web).unwrap(), first);
    }
}
