//! A VM's log as a stream. With `follow`, it continues until the reader or the VM ends.

use std::io::{Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::Response;
use godwit_api::{ApiError, ErrorCode, LogSource};
use godwit_qemu::{MOST_SERIAL_PORTS, VmName};
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use rustix::fs::inotify;
use tokio::fs::File;
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use crate::agent::{Agent, no_serial_port};
use crate::failure::host_failed;

const PIECE_BYTES: usize = 64 << 10;

/// Streams a VM's log from its beginning, or from `tail_bytes` before its end. For the console, it
/// is that of a serial port.
pub(super) fn stream(
    agent: &Arc<Agent>,
    name: &VmName,
    (source, port): (LogSource, u32),
    follow: bool,
    tail_bytes: Option<u64>,
) -> Result<Response, ApiError> {
    let files = agent.files(name)?;
    let path = match source {
        LogSource::Console if !(1..=MOST_SERIAL_PORTS).contains(&port) => {
            return Err(no_serial_port(name, port, MOST_SERIAL_PORTS));
        }
        LogSource::Console => files.serial_log(port),
        LogSource::Qemu => files.qemu_log(),
    };
    let mut file = std::fs::File::open(&path).map_err(|_| {
        ApiError::new(
            ErrorCode::NotFound,
            format!("VM \"{name}\" has no {} log on this host", source.name()),
            "the log exists from the VM's first start here until it is deleted or migrates away",
        )
    })?;
    if let Some(bytes) = tail_bytes {
        skip_to_tail(&mut file, bytes)
            .map_err(|error| host_failed("cannot read the log", &error))?;
    }
    // The log ends with the process.
    let writer = if follow { agent.vm(name)? } else { None };
    let growth = match &writer {
        Some(_) => {
            Some(watch(&path).map_err(|error| host_failed("cannot follow the log", &error))?)
        }
        None => None,
    };
    let (pieces, body) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut file = File::from_std(file);
        while send_rest(&mut file, &pieces).await.is_ok() {
            let (Some(growth), Some(writer)) = (&growth, &writer) else {
                return;
            };
            tokio::select! {
                () = pieces.closed() => return,
                _ = writer.process.exited() => {
                    let _ = send_rest(&mut file, &pieces).await;
                    return;
                }
                grown = wait_for_growth(growth) => if grown.is_err() { return },
            }
        }
    });
    let mut response =
        Response::new(Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(body)));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    Ok(response)
}

fn skip_to_tail(file: &mut std::fs::File, bytes: u64) -> std::io::Result<()> {
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(bytes))).map(drop)
}

#[expect(
    deprecated,
    reason = "it is deprecated for types whose descriptor may change; an OwnedFd keeps its own"
)]
fn watch(path: &Path) -> std::io::Result<AsyncFd<OwnedFd>> {
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watch, path, inotify::WatchFlags::MODIFY)?;
    AsyncFd::new(watch)
}

/// Returns when the log has grown since the last call. The content of the events does not matter
/// and is discarded.
async fn wait_for_growth(watch: &AsyncFd<OwnedFd>) -> std::io::Result<()> {
    let mut events = [0; 4096];
    loop {
        let mut ready = watch.readable().await?;
        if let Ok(read) = ready.try_io(|watch| Ok(rustix::io::read(watch.get_ref(), &mut events)?))
        {
            return read.map(drop);
        }
    }
}

async fn send_rest(
    file: &mut File,
    pieces: &mpsc::Sender<std::io::Result<Bytes>>,
) -> Result<(), ()> {
    loop {
        let mut piece = vec![0; PIECE_BYTES];
        match file.read(&mut piece).await {
            Ok(0) => return Ok(()),
            Ok(bytes) => {
                piece.truncate(bytes);
                pieces.send(Ok(piece.into())).await.map_err(drop)?;
            }
            Err(error) => {
                let _ = pieces.send(Err(error)).await;
                return Err(());
            }
        }
    }
}
