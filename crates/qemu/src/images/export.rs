//! Export of an image by the image tool: this process reads or writes the disk, QEMU its format.

use std::fs::Permissions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use futures::future::{join, join_all};
use serde_json::json;

use super::{Access, ImageTool, ImageToolError};
use crate::launch::OpenLayer;

/// ID and name of the export.
const EXPORT: &str = "disk";

/// What a tool has open for its export.
#[derive(Debug)]
pub(super) struct Exported {
    /// Block nodes, the lowest first.
    nodes: Vec<String>,
    /// Descriptor sets of the files.
    sets: Vec<i64>,
}

impl ImageTool {
    /// Opens an image read-write and returns a connection to its only export, `disk`: once in the
    /// life of a tool. `layers`: the image and its backing files. Nobody else can connect.
    ///
    /// # Errors
    /// QEMU refuses, for example a damaged image or one that another QEMU writes.
    pub async fn export(&self, layers: &[OpenLayer]) -> Result<UnixStream, ImageToolError> {
        self.export_for(layers, Access::Write).await
    }

    /// Opens an image to read it, as [`ImageTool::export`], but without locks: others may write it
    /// before and meanwhile. What is read must be verified.
    ///
    /// # Errors
    /// QEMU refuses, for example a damaged image.
    pub async fn export_to_read(&self, layers: &[OpenLayer]) -> Result<UnixStream, ImageToolError> {
        self.export_for(layers, Access::ReadUnlocked).await
    }

    async fn export_for(
        &self,
        layers: &[OpenLayer],
        access: Access,
    ) -> Result<UnixStream, ImageToolError> {
        let failed = |error: io::Error| ImageToolError::Export(error.to_string());
        let (parts, sets) = self.open_parts(EXPORT, layers, access).await?;
        let names = parts.nodes.iter().filter_map(|node| node["node-name"].as_str());
        let nodes = names.map(str::to_owned).collect();
        *self.exported.lock() = Some(Exported { nodes, sets });
        let (listener, stream) = connected().map_err(failed)?;
        if !self.qmp.start_nbd(listener.as_fd(), 1).await? {
            return Err(ImageToolError::Export("this QEMU has exported one before".to_owned()));
        }
        let is_writable = access == Access::Write;
        self.qmp.add_export(EXPORT, &parts.top, &[], is_writable).await?;
        Ok(stream)
    }

    /// Ends the export, its connection with it, and closes the image: its locks are gone, and what
    /// QEMU held of it is written. Flush before, for what must be on the disk.
    ///
    /// # Errors
    /// QEMU refuses or does not respond. The tool's end closes the image in any case.
    pub async fn end_export(&self) -> Result<(), ImageToolError> {
        let Some(exported) = self.exported.lock().take() else { return Ok(()) };
        self.qmp.remove_export(EXPORT).await?;
        // QEMU gets all of it at once and carries it out in this order: a guest may wait for it.
        let closing = exported.nodes.iter().rev().map(|node| self.close(node));
        let removing = exported.sets.iter().map(|set| async move {
            self.qmp.execute("remove-fd", json!({"fdset-id": set})).await
        });
        let (closed, removed) = join(join_all(closing), join_all(removing)).await;
        for error in removed.into_iter().filter_map(Result::err) {
            tracing::debug!(%error, "a descriptor is not removed from QEMU");
        }
        closed.into_iter().collect()
    }
}

/// Returns a listening socket and a connection to it. It had a name in a directory of this user
/// alone, and has none any more.
fn connected() -> io::Result<(UnixListener, UnixStream)> {
    let only_ours = Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix("godwit-nbd-").permissions(only_ours).tempdir()?;
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path)?;
    let stream = UnixStream::connect(&path)?;
    Ok((listener, stream))
}

#[cfg(test)]
mod tests;
