//! BMCs of the hosts: a program that the manager takes for `ipmitool`.

use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cells::Means;

const PROGRAM: &str = include_str!("bmc.sh");

/// BMCs in a folder.
#[derive(Debug)]
pub(super) struct Bmcs {
    folder: PathBuf,
}

impl Bmcs {
    /// Makes the BMCs of hosts, in a new folder.
    pub(super) fn make(folder: PathBuf, hosts: &[&str], means: Means) -> Result<Bmcs> {
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let program = folder.join("ipmitool");
        fs::write(&program, PROGRAM)?;
        fs::set_permissions(&program, Permissions::from_mode(0o700))?;
        let bmcs = Bmcs { folder };
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        std::io::Write::write_all(&mut options.open(bmcs.password())?, b"secret\n")?;
        for host in hosts {
            fs::write(bmcs.file(host, "mode"), means.mode())?;
        }
        Ok(bmcs)
    }

    /// Returns the folder, for the manager's PATH.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the manager's settings with the BMCs of hosts.
    pub(super) fn settings(&self, hosts: &[&str]) -> String {
        let mut text = String::new();
        for host in hosts {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "[ha.fencing.{host}]\naddress = \"{host}\"\nuser = \"godwit\"\npassword_file = \
                 \"{}\"",
                self.password().display()
            );
        }
        text
    }

    /// Connects a BMC with its host, whose network namespace this is.
    pub(super) fn connect(&self, host: &str, namespace: &str) -> Result<()> {
        Ok(fs::write(self.file(host, "namespace"), namespace)?)
    }

    /// Returns whether a BMC says that its host is off.
    pub(super) fn says_off(&self, host: &str) -> bool {
        self.file(host, "off").exists()
    }

    /// Switches a host on again.
    pub(super) fn switch_on(&self, host: &str) -> Result<()> {
        match fs::remove_file(self.file(host, "off")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn password(&self) -> PathBuf {
        self.folder.join("password")
    }

    fn file(&self, host: &str, what: &str) -> PathBuf {
        self.folder.join(format!("{host}.{what}"))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn ask(bmcs: &Bmcs, words: &[&str]) -> (bool, String) {
        let mut command = Command::new(bmcs.folder().join("ipmitool"));
        command.args(["-I", "lanplus", "-H", "b", "-p", "623", "-U", "godwit", "-E"]);
        let output = command.args(["chassis", "power"]).args(words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        (output.status.success(), text)
    }

    #[test]
    fn a_bmc_that_lies_says_off_and_one_that_fails_says_nothing() {
        let root = tempfile::tempdir().unwrap();
        let lying = Bmcs::make(root.path().join("lies"), &["b"], Means::LyingBmc).unwrap();
        assert_eq!(ask(&lying, &["status"]), (true, "Chassis Power is on".to_owned()));
        assert!(ask(&lying, &["off"]).0 && lying.says_off("b"));
        assert_eq!(ask(&lying, &["status"]), (true, "Chassis Power is off".to_owned()));
        lying.switch_on("b").unwrap();
        lying.switch_on("b").unwrap();
        assert!(!lying.says_off("b"));
        let failing = Bmcs::make(root.path().join("fails"), &["b"], Means::FailingBmc).unwrap();
        assert_eq!(ask(&failing, &["off"]), (false, String::new()));
        assert!(failing.settings(&["b"]).contains("[ha.fencing.b]\naddress = \"b\""));
    }
}
