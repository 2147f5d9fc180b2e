//! Whom QEMUs run as: each as a user of its own, out of a range of numbers that belong to nobody else.
//!
//! A guest that broke out of its QEMU is then a stranger to every other VM, to the agent and to the host's users. Which number a VM
//! has is noted beside its other files, where root alone can write: so the next agent knows, and it is free again when these go.
//! On another host the VM has another number, and nothing depends on it: what its QEMU needs of the host it gets opened.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{Accelerator, VmName};
use serde::Deserialize;

use crate::config::Config;

/// Numbers that no distribution, no directory service by its defaults and no container manager gives out: between systemd's
/// last (`UIDS-GIDS.md`: 1879048191) and those that some programs take for negative, above SSSD's last (2000200000).
pub const DEFAULT_USERS: UserRange = UserRange { first: 0x7f00_0000, last: 0x7f00_ffff };
/// The file in a VM's run directory with the number of its user.
const NOTE: &str = "qemu.user";

/// Numbers of users, and of groups of the same numbers; both ends are in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct UserRange {
    first: u32,
    last: u32,
}

impl UserRange {
    fn contains(self, id: u32) -> bool {
        (self.first..=self.last).contains(&id)
    }

    /// Every number once, beginning at a place that is the VM's own: what a user left behind its VM finds again, as a rule, and no other.
    fn beginning_for(self, vm: &str) -> impl Iterator<Item = u32> {
        let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let hash = vm.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
        let count = u64::from(self.last - self.first) + 1;
        let start = self.first + u32::try_from(hash % count).unwrap_or(0);
        (start..=self.last).chain(self.first..start)
    }
}

impl fmt::Display for UserRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for UserRange {
    type Err = String;

    fn from_str(text: &str) -> Result<UserRange, String> {
        let parsed = text.split_once('-').and_then(|(first, last)| {
            Some((first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?))
        });
        let Some((first, last)) = parsed else {
            return Err(format!(
                "\"{text}\" is no range of users: write FIRST-LAST, as {DEFAULT_USERS}"
            ));
        };
        if first < 1000 || last < first || last >= u32::MAX - 1 {
            return Err(format!(
                "{text} can't be users: from 1000 on, upwards, below {}",
                u32::MAX - 1
            ));
        }
        let range = UserRange { first, last };
        match [65534, 65535].into_iter().find(|id| range.contains(*id)) {
            Some(id) => {
                Err(format!("{text} has {id} in it, which the system uses itself: leave it out"))
            }
            None => Ok(range),
        }
    }
}

impl TryFrom<String> for UserRange {
    type Error = String;

    fn try_from(text: String) -> Result<UserRange, String> {
        text.parse()
    }
}

/// A user and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Whom this host's QEMUs run as.
#[derive(Debug)]
pub(crate) enum QemuUsers {
    Shared(User),
    /// Each as one of these. The lock is held while one is chosen.
    Each(UserRange, Mutex<()>),
}

impl QemuUsers {
    /// As configured.
    ///
    /// # Errors
    /// The user is not there, or the range is somebody's, or not to be had on this host.
    pub(crate) fn of(config: &Config) -> Result<QemuUsers, ApiError> {
        let refused = |key: &str, why: String, remedy: &str| {
            ApiError::new(ErrorCode::InvalidRequest, format!("{key}: {why}"), remedy)
        };
        if let Some(user) = &config.qemu_user {
            let user = look_up(user).map_err(|why| {
                refused("qemu_user", why, "correct qemu_user in the configuration")
            })?;
            let what = if user.uid == 0 {
                "root: a guest that breaks out owns the host"
            } else {
                "one user"
            };
            tracing::warn!(uid = user.uid, "all QEMUs of this host run as {what}");
            return Ok(QemuUsers::Shared(user));
        }
        let range = config.qemu_users.unwrap_or(DEFAULT_USERS);
        let problem = ["/etc/passwd", "/etc/group"].into_iter().find_map(|path| {
            somebodys(range, &fs::read_to_string(path).ok()?).map(|who| (path, who.to_owned()))
        });
        if let Some((path, who)) = problem {
            let why = format!("{range} has the number of \"{who}\" of {path} in it");
            return Err(refused(
                "qemu_users",
                why,
                "name a range of numbers that belong to nobody",
            ));
        }
        for path in ["/proc/self/uid_map", "/proc/self/gid_map"] {
            let map = fs::read_to_string(path).unwrap_or_default();
            if !map.is_empty() && !is_mapped(range, &map) {
                let why = format!("{range} is not to be had in this user namespace ({path})");
                return Err(refused(
                    "qemu_users",
                    why,
                    "name a range that is mapped there and belongs to nobody",
                ));
            }
        }
        // What VMs had that ended while no agent ran.
        if let Ok(running) = running_users(range) {
            crate::kvm::keep_out(|uid| range.contains(uid) && !running.contains(&uid));
        }
        Ok(QemuUsers::Each(range, Mutex::new(())))
    }

    /// Takes a user for a VM, and notes it in the VM's run directory, which is there: no other VM below `vms` has it until that note
    /// is gone, and no process on this machine at this moment.
    ///
    /// # Errors
    /// The note can't be written; [`io::ErrorKind::QuotaExceeded`] where none is free.
    pub(crate) fn claim(&self, vms: &Path, vm: &VmName) -> io::Result<User> {
        let (range, lock) = match self {
            QemuUsers::Shared(user) => return Ok(*user),
            QemuUsers::Each(range, lock) => (*range, lock),
        };
        let _alone = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = running_users(range)?;
        for entry in fs::read_dir(vms)? {
            taken.extend(noted(&entry?.path()));
        }
        let free = range.beginning_for(vm).find(|uid| !taken.contains(uid));
        let uid = free.ok_or_else(|| {
            io::Error::new(io::ErrorKind::QuotaExceeded, format!("all users of {range} are taken"))
        })?;
        fs::write(vms.join(vm).join(NOTE), uid.to_string())?;
        Ok(User { uid, gid: uid })
    }
}

impl QemuUsers {
    /// The user that all QEMUs run as. `None`: each has its own.
    pub(crate) fn shared(&self) -> Option<u32> {
        match self {
            QemuUsers::Shared(user) => Some(user.uid),
            QemuUsers::Each(..) => None,
        }
    }

    /// Whether QEMUs run as that user, those of VMs or those that are asked something.
    pub(crate) fn include(&self, uid: u32) -> bool {
        match self {
            QemuUsers::Shared(user) => user.uid == uid,
            QemuUsers::Each(range, _) => range.contains(uid),
        }
    }

    /// Whom a QEMU is asked as what it is: one that no VM has at the moment.
    pub(crate) fn of_question(&self) -> User {
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
    /// Whom a QEMU is asked as what it can by an accelerator. [`QemuUsers::end_question`] takes back what that takes.
    pub(crate) fn of_question_by(&self, accel: Accelerator) -> User {
        let user = self.of_question();
        match self {
            QemuUsers::Each(..) if accel == Accelerator::Kvm => crate::kvm::let_in(user),
            QemuUsers::Each(..) | QemuUsers::Shared(_) => user,
        }
    }

    /// The question is over: its user has no access to /dev/kvm any more, unless a VM of those below `vms` has got that user meanwhile.
    pub(crate) fn end_question(&self, vms: &Path, user: User) {
        let QemuUsers::Each(_, lock) = self else { return };
        let _alone = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let is_noted = |entry: io::Result<fs::DirEntry>| {
            entry.is_ok_and(|entry| noted(&entry.path()) == Some(user.uid))
        };
        if !fs::read_dir(vms).is_ok_and(|mut entries| entries.any(is_noted)) {
            crate::kvm::keep_out(|uid| uid == user.uid);
        }
    }
}

/// The user that a VM's QEMU has, by the note in its run directory; none: there is no such note.
pub(crate) fn noted(vm_dir: &Path) -> Option<u32> {
    fs::read_to_string(vm_dir.join(NOTE)).ok()?.trim().parse().ok()
}

/// Gives a VM's user back: its QEMU is gone.
pub(crate) fn forget(vm_dir: &Path) -> io::Result<()> {
    fs::remove_file(vm_dir.join(NOTE))
}

/// Users of the range that a process of this machine has: also one that another agent started.
fn running_users(range: UserRange) -> io::Result<BTreeSet<u32>> {
    Ok(godwit_qemu::users_of_processes()?.filter(|uid| range.contains(*uid)).collect())
}

/// Whose number is in the range, by a file as /etc/passwd and /etc/group are: name, password, number.
fn somebodys(range: UserRange, file: &str) -> Option<&str> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let id = fields.nth(1)?.parse().ok()?;
        range.contains(id).then_some(name)
    })
}

/// Whether a user namespace has all numbers of the range (user_namespaces(7): first inside, first outside, count).
fn is_mapped(range: UserRange, map: &str) -> bool {
    map.lines().any(|line| {
        let mut numbers =
            line.split_ascii_whitespace().map(|number| number.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        let (first, count) = (first.unwrap_or(0), count.unwrap_or(0));
        u64::from(range.first) >= first && u64::from(range.last) < first + count
    })
}

/// Looks a user up: `name` of /etc/passwd or `UID:GID`. Only local users: the agent must start without a name service.
fn look_up(user: &str) -> Result<User, String> {
    let passwd = fs::read_to_string("/etc/passwd")
        .map_err(|error| format!("/etc/passwd can't be read: {error}"))?;
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
    fn a_name_or_two_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65533:nobody:/:/sbin/nologin\n";
        assert_eq!(find("nobody", passwd), Some(User { uid: 65534, gid: 65533 }));
        assert_eq!(find("107:108", passwd), Some(User { uid: 107, gid: 108 }));
        assert_eq!(find("nob", passwd), None);
        assert_eq!(find("107:", passwd), None);
    }

    #[test]
    fn a_range_is_of_numbers_that_are_nobodys() {
        let range: UserRange = "100000-165535".parse().unwrap();
        assert_eq!(range.to_string(), "100000-165535");
        assert_eq!(DEFAULT_USERS.to_string().parse(), Ok(DEFAULT_USERS));
        for bad in
            ["", "7", "10-20", "0-100000", "3000-2000", "60000-70000", "5000-4294967295", "a-b"]
        {
            assert!(bad.parse::<UserRange>().is_err(), "{bad}");
        }
        assert_eq!(
            somebodys(range, "root:x:0:0::/:/bin/sh\nweb:x:100007:5::/:/bin/sh"),
            Some("web")
        );
        assert_eq!(somebodys(range, "kvm:x:110:me\n"), None);
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
            // An agent of its own each time: what is taken is known by the notes alone.
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
        let freed = noted(&folder.path().join("c")).unwrap();
        forget(&folder.path().join("c")).unwrap();
        assert_eq!(claim("e").unwrap(), User { uid: freed, gid: freed });
    }

    #[test]
    fn a_user_whose_process_runs_is_not_given_out() {
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
