//! Screens of VMs: viewers, whose connections go to QEMU's VNC server, and pictures.

use std::os::fd::AsFd;
use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{Picture, PictureError, VmName};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::agent::Agent;
use crate::failure::{host_failed, task_failed};
use crate::vm::{Condition, Vm};
use crate::whole::whole;

/// Most viewers of one screen. QEMU keeps a copy of the picture for each.
pub(super) const MOST_VIEWERS_OF_VM: usize = 8;
/// Most viewers of this host's screens.
const MOST_VIEWERS: usize = 64;
/// Most pictures at once: each is in memory twice, up to 32 MiB.
const MOST_PICTURES: usize = 2;

/// Places for viewers and pictures of all VMs.
#[derive(Debug)]
pub(super) struct Screens {
    viewers: Arc<Semaphore>,
    pictures: Arc<Semaphore>,
}

impl Default for Screens {
    fn default() -> Screens {
        Screens {
            viewers: Arc::new(Semaphore::new(MOST_VIEWERS)),
            pictures: Arc::new(Semaphore::new(MOST_PICTURES)),
        }
    }
}

/// Place of one viewer, free again when dropped.
#[derive(Debug)]
pub(crate) struct ViewerPlace {
    _of_vm: OwnedSemaphorePermit,
    _of_host: OwnedSemaphorePermit,
}

impl Agent {
    /// Opens a VM's screen: the viewer speaks RFB on the returned socket.
    ///
    /// # Errors
    /// The VM has no screen, does not run here, or has too many viewers.
    pub(crate) async fn open_screen(
        self: &Arc<Self>,
        name: &VmName,
    ) -> Result<(UnixStream, ViewerPlace), ApiError> {
        let (vm, of_vm) = self.screen_of(name)?;
        let taken = |_| {
            let message =
                format!("cannot open the screen of VM \"{name}\": it has too many viewers");
            let remedy = format!(
                "close another viewer; a VM has {MOST_VIEWERS_OF_VM} at most, a host {MOST_VIEWERS}"
            );
            ApiError::new(ErrorCode::Busy, message, remedy)
        };
        let place = ViewerPlace {
            _of_vm: of_vm.try_acquire_owned().map_err(taken)?,
            _of_host: Arc::clone(&self.screens.viewers).try_acquire_owned().map_err(taken)?,
        };
        let (ours, its) = pair().map_err(|error| {
            host_failed(&format!("cannot open the screen of VM \"{name}\""), &error)
        })?;
        // In a task of its own: a client that disconnects leaves no descriptor in QEMU.
        let added = whole(async move {
            let added = vm.process.qmp.add_viewer(its.as_fd()).await;
            added.map_err(|why| vm.hypervisor_failed("open the screen", &why))
        });
        added.await?;
        Ok((ours, place))
    }

    /// Takes a picture of a VM's screen; returns it as PNG.
    ///
    /// # Errors
    /// The VM has no screen or does not run here, or QEMU fails.
    pub(crate) async fn screenshot(self: &Arc<Self>, name: &VmName) -> Result<Vec<u8>, ApiError> {
        let turn = Arc::clone(&self.screens.pictures).acquire_owned().await;
        let (vm, _) = self.screen_of(name)?;
        whole(async move {
            let _turn = turn;
            let picture = vm.process.qmp.picture().await.map_err(|why| match why {
                PictureError::Qemu(why) => vm.hypervisor_failed("take a picture", &why),
                other => {
                    host_failed(&format!("cannot take a picture of VM \"{}\"", vm.name), &other)
                }
            })?;
            tokio::task::spawn_blocking(move || png(&picture))
                .await
                .map_err(|why| task_failed(&why))?
                .map_err(|why| host_failed("cannot make a PNG of a picture", &why))
        })
        .await
    }

    /// Returns a VM whose screen can be seen now, with the places for its viewers.
    fn screen_of(&self, name: &VmName) -> Result<(Arc<Vm>, Arc<Semaphore>), ApiError> {
        let table = self.table();
        let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
        if slot.spec.video.is_none() {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                format!("VM \"{name}\" has no screen: it has no video device"),
                "stop it and give it one: `godwit vm set NAME --video vga`",
            ));
        }
        let condition = slot.condition.shown();
        match (&slot.vm, condition) {
            (Some(vm), condition) if has_its_guest(condition) => {
                Ok((Arc::clone(vm), Arc::clone(&slot.viewers)))
            }
            (Some(_), Condition::MigratingIn { from }) => Err(ApiError::new(
                ErrorCode::WrongState,
                format!("VM \"{name}\" has no screen here yet: its guest runs on host {from}"),
                "open it on that host, or wait until the migration ends",
            )),
            _ => Err(condition.without("screen", name)),
        }
    }
}

/// Returns two connected sockets: the agent's and QEMU's.
fn pair() -> std::io::Result<(UnixStream, std::os::unix::net::UnixStream)> {
    let (ours, its) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, its))
}

/// Whether the guest is in this host's QEMU, so that its screen is the guest's.
fn has_its_guest(condition: &Condition) -> bool {
    matches!(
        condition,
        Condition::Running
            | Condition::Paused
            | Condition::MigratingOut { .. }
            | Condition::Stopping
    )
}

fn png(picture: &Picture) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, picture.width, picture.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    encoder.write_header()?.write_image_data(&picture.pixels)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_becomes_a_png_of_the_same_pixels() {
        let pixels: Vec<u8> = (0..=250).cycle().take(64 * 48 * 3).collect();
        let picture = Picture { width: 64, height: 48, pixels };
        let bytes = png(&picture).unwrap();
        let mut read = png::Decoder::new(std::io::Cursor::new(&bytes)).read_info().unwrap();
        let mut pixels = vec![0; read.output_buffer_size().unwrap()];
        let info = read.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (64, 48));
        assert_eq!(pixels, picture.pixels);
    }

    #[test]
    fn only_a_guest_that_is_here_has_a_screen_here() {
        let migration = String::new();
        assert!(has_its_guest(&Condition::Running));
        assert!(has_its_guest(&Condition::MigratingOut { migration }));
        for other in [
            Condition::Stopped,
            Condition::Starting,
            Condition::Failed,
            Condition::InDoubt { keeps_pages_for: None },
            Condition::MigratingIn { from: "a".to_owned() },
        ] {
            assert!(!has_its_guest(&other), "{other:?}");
        }
    }
}
