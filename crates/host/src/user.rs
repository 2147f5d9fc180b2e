//! Users that QEMUs may run as: a user, and a range of IDs.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// Default IDs. No distribution, no directory service by its defaults and no container manager
/// assigns them. They are between systemd's last (`UIDS-GIDS.md`: 1879048191) and those that some
/// programs read as negative, and below SSSD's default range (which ends at 2000200000).
pub const DEFAULT_USERS: UserRange = UserRange { first: 0x7f00_0000, last: 0x7f00_ffff };

/// Range of user IDs, and of group IDs of the same numbers; both ends are included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct UserRange {
    pub(crate) first: u32,
    pub(crate) last: u32,
}

impl UserRange {
    /// Returns whether the range includes an ID.
    pub(crate) fn contains(self, id: u32) -> bool {
        (self.first..=self.last).contains(&id)
    }

    /// Returns every ID once, starting at an ID derived from the VM's name: what a user left behind
    /// is then usually found by the same VM and by no other.
    pub(crate) fn beginning_for(self, vm: &str) -> impl Iterator<Item = u32> {
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
                "\"{text}\" is not a range of users: write FIRST-LAST, such as {DEFAULT_USERS}"
            ));
        };
        if first < 1000 || last < first || last >= u32::MAX - 1 {
            return Err(format!(
                "{text} is not a valid range of users: use ascending IDs from 1000 on, below {}",
                u32::MAX - 1
            ));
        }
        let range = UserRange { first, last };
        match [65534, 65535].into_iter().find(|id| range.contains(*id)) {
            Some(id) => {
                Err(format!("{text} contains {id}, which the system itself uses: leave it out"))
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
