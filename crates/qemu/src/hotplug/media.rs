//! Media of CD-ROM drives, inserted and ejected while the guest runs.

use std::os::fd::AsFd;

use serde_json::{Value, json};

use super::{PlugError, is_refusal};
use crate::drives;
use crate::launch::OpenLayer;
use crate::qmp::{Qmp, QmpError};
use crate::spec::Cdrom;

/// Most times that a tray is opened for one command: the guest may close it each time, or have
/// locked it, which looks the same.
const MOST_OPENINGS: u32 = 20;

impl Qmp {
    /// Inserts an image into a CD-ROM drive, in place of the one in it. With `force`, also if the
    /// guest has locked the tray.
    ///
    /// # Errors
    /// QEMU refuses, or the guest has locked the tray. The old medium is still in the drive after
    /// [`PlugError::TrayLocked`] alone.
    pub async fn insert_medium(
        &self,
        drive: &Cdrom,
        image: &OpenLayer,
        force: bool,
    ) -> Result<(), PlugError> {
        self.eject_medium(drive, force).await?;
        let (id, name) = (drives::cdrom_id(drive), drives::medium_name(drive));
        let insert = async {
            let set = self.add_set(&name, image.file.as_fd()).await?;
            self.add_parts(&drives::medium_parts(&name, set)).await?;
            let medium = json!({"id": id, "node-name": name});
            // A lock of an empty drive protects nothing.
            self.execute_with_open_tray(&id, true, "blockdev-insert-medium", &medium).await
        };
        if let Err(error) = insert.await {
            if is_refusal(&error) {
                self.remove_parts(&name, &drives::medium_parts(&name, 0)).await;
            }
            return Err(error.into());
        }
        match self.execute("blockdev-close-tray", json!({"id": id})).await {
            // The medium is in the drive, and the guest can close the tray.
            Err(error) if is_refusal(&error) => {
                tracing::warn!(drive = id, %error, "the tray of a CD-ROM drive stays open");
            }
            closed => drop(closed?),
        }
        Ok(())
    }

    /// Ejects what is in a CD-ROM drive, if anything. The tray is open afterwards, unless the guest
    /// closes it.
    ///
    /// # Errors
    /// QEMU refuses, or the guest has locked the tray.
    pub async fn eject_medium(&self, drive: &Cdrom, force: bool) -> Result<(), PlugError> {
        let (id, name) = (drives::cdrom_id(drive), drives::medium_name(drive));
        let medium = json!({"id": id});
        let removed = self.execute_with_open_tray(&id, force, "blockdev-remove-medium", &medium);
        match removed.await {
            // A locked tray is refused; the guest learns that somebody pressed the button. Or
            // `blockdev-open-tray` succeeds, and the tray stays closed.
            Err(error) if is_refused_for(&error, "is locked") || is_closed_tray(&error) => {
                return Err(PlugError::TrayLocked);
            }
            removed => removed?,
        }
        self.remove_parts(&name, &drives::medium_parts(&name, 0)).await;
        Ok(())
    }

    /// Opens a tray and executes a command that needs it open. Does both again if the guest closes
    /// the tray in between: Linux closes it whenever a program opens the drive.
    async fn execute_with_open_tray(
        &self,
        id: &str,
        force: bool,
        command: &str,
        arguments: &Value,
    ) -> Result<(), QmpError> {
        let tray = json!({"id": id, "force": force});
        let mut openings = 1;
        loop {
            self.execute("blockdev-open-tray", tray.clone()).await?;
            match self.execute(command, arguments.clone()).await {
                Err(error) if is_closed_tray(&error) && openings < MOST_OPENINGS => openings += 1,
                executed => return executed.map(drop),
            }
        }
    }
}

/// Whether QEMU refused a command because a tray is not open.
fn is_closed_tray(error: &QmpError) -> bool {
    is_refused_for(error, "Tray of ") && is_refused_for(error, "is not open")
}

/// Whether QEMU refused a command with a message that contains `words`.
fn is_refused_for(error: &QmpError, words: &str) -> bool {
    matches!(error, QmpError::Command { desc, .. } if desc.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{NewDrive, OpenFiles};
    use crate::qmp::scripted::FakeQemu;

    const NOT_OPEN: &str = "Tray of the device is not open";

    /// A drive with a medium, and a guest that closes the open tray.
    struct Drive {
        /// Times that the guest does so before a medium can be removed, and before one can be
        /// inserted.
        closings: [u32; 2],
        openings: u32,
        failures: u32,
        has_medium: bool,
    }

    impl Drive {
        fn answer(&mut self, request: &Value) -> Result<Value, &'static str> {
            match request["execute"].as_str().unwrap_or_default() {
                "blockdev-open-tray" => self.openings += 1,
                command @ ("blockdev-remove-medium" | "blockdev-insert-medium") => {
                    let inserts = command == "blockdev-insert-medium";
                    if self.failures < self.closings[usize::from(inserts)] {
                        self.failures += 1;
                        return Err(NOT_OPEN);
                    }
                    self.failures = 0;
                    self.has_medium = inserts;
                }
                "add-fd" => return Ok(json!({"fdset-id": 7, "fd": 3})),
                "query-fdsets" => return Ok(json!([])),
                _ => {}
            }
            Ok(json!({}))
        }
    }

    async fn inserted(closings: [u32; 2]) -> (Result<(), PlugError>, Drive) {
        let (qmp, mut fake) = FakeQemu::connected().await;
        let insert = tokio::spawn(async move {
            let image = tempfile::NamedTempFile::new().unwrap();
            let path = image.path().to_owned();
            let opened = OpenFiles::open_drive(&NewDrive::Medium(&path), &|_| true);
            let image = opened.unwrap().pop().unwrap();
            qmp.insert_medium(&Cdrom::default(), &image, false).await
        });
        let mut drive = Drive { closings, openings: 0, failures: 0, has_medium: true };
        fake.answer_all(|request| drive.answer(request)).await;
        (insert.await.unwrap(), drive)
    }

    #[tokio::test]
    async fn a_guest_that_closes_the_tray_does_not_prevent_an_insertion() {
        for closings in [0, 1, 5] {
            let (result, drive) = inserted([closings; 2]).await;
            result.unwrap();
            assert!(drive.has_medium);
            assert_eq!(drive.openings, 2 * (1 + closings));
        }
    }

    #[tokio::test]
    async fn a_guest_that_closes_the_tray_forever_keeps_its_medium() {
        let (result, drive) = inserted([u32::MAX, 0]).await;
        assert_eq!(result, Err(PlugError::TrayLocked));
        assert!(drive.has_medium);
        assert_eq!(drive.openings, MOST_OPENINGS);
    }

    #[tokio::test]
    async fn an_empty_drive_is_not_reported_as_locked() {
        let (result, drive) = inserted([0, u32::MAX]).await;
        // `TrayLocked` would mean that the old medium is still in the drive.
        assert!(matches!(result, Err(PlugError::Qmp(QmpError::Command { .. }))), "{result:?}");
        assert!(!drive.has_medium);
        assert_eq!(drive.openings, 1 + MOST_OPENINGS);
    }
}
