//! The unprivileged user that QEMU runs as: `name` of /etc/passwd or `UID:GID`.

use std::fs;

/// Looks a user up. Only local users: the agent must start without a name service.
pub(crate) fn look_up(user: &str) -> Result<(u32, u32), String> {
    let passwd =
        fs::read_to_string("/etc/passwd").map_err(|error| format!("/etc/passwd can't be read: {error}"))?;
    find(user, &passwd).ok_or_else(|| format!("there is no user \"{user}\" in /etc/passwd"))
}

fn find(user: &str, passwd: &str) -> Option<(u32, u32)> {
    if let Some((uid, gid)) = user.split_once(':') {
        return Some((uid.parse().ok()?, gid.parse().ok()?));
    }
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == user).then_some(())?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some((uid, gid))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_or_two_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65533:nobody:/:/sbin/nologin\n";
        assert_eq!(find("nobody", passwd), Some((65534, 65533)));
        assert_eq!(find("107:108", passwd), Some((107, 108)));
        assert_eq!(find("nob", passwd), None);
        assert_eq!(find("107:", passwd), None);
    }
}
