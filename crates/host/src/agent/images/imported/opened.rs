//! A disk of another platform that is open to be copied.

use std::os::fd::AsFd;

use godwit_qemu::{ImageTool, ImageToolError, OpenFile, OpenLayer, OpenSource};

/// A disk that is open to be copied.
pub(super) enum Opened {
    /// It has no content.
    Empty,
    Layers(Vec<OpenLayer>),
    /// An image that refers to no other file.
    Foreign {
        file: OpenFile,
        driver: &'static str,
        window: Option<(u64, u64)>,
    },
}

impl Opened {
    /// Returns the name of its format.
    pub(super) fn format(&self) -> &'static str {
        match self {
            Opened::Layers(layers) => layers.first().map_or("raw", |layer| layer.format.name()),
            Opened::Foreign { driver, .. } => driver,
            Opened::Empty => "empty",
        }
    }

    /// Opens it in a QEMU; `None` if it is empty.
    pub(super) async fn open_in(
        &self,
        tool: &ImageTool,
    ) -> Result<Option<OpenSource>, ImageToolError> {
        Ok(Some(match self {
            Opened::Empty => return Ok(None),
            Opened::Layers(layers) => tool.open_source(layers).await?,
            Opened::Foreign { file, driver, window } => {
                tool.open_foreign(file.as_fd(), driver, *window).await?
            }
        }))
    }
}
