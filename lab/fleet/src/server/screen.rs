//! Screen of a simulated agent: a small RFB server (RFC 6143) that shows a plain picture in a
//! colour of the host's, and the same picture as PNG. It ends when the VM has left the host.

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::header::{CONNECTION, CONTENT_TYPE, UPGRADE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use godwit_api::{ApiError, ErrorCode, HostEvent};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::console::is_open;
use super::{Agent, Refusal, no_host};

/// Size of the picture: a multiple of the bands of [`colour`].
const WIDTH: u16 = 320;
const HEIGHT: u16 = 200;
/// A stored block of deflate has at most this many bytes (RFC 1951, section 3.2.4).
const STORED_BYTES: usize = 0xffff;

type Client = TokioIo<Upgraded>;

/// Serves `GET /v1/vms/{name}/screen` with `Upgrade: godwit-screen`.
pub(super) async fn open(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    mut request: Request,
) -> Result<Response, Refusal> {
    let at = place(&agent, &name)?;
    let events = agent.shared.world().watch(agent.at).ok_or_else(no_host)?;
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(client) = upgrade.await {
            let mut client = TokioIo::new(client);
            tokio::select! {
                // Either side may close the screen at any time.
                _ = serve(&mut client, &name, at) => {}
                () = left(&name, events) => {}
            }
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static("godwit-screen"));
    Ok(response)
}

/// Serves `GET /v1/vms/{name}/screenshot`.
pub(super) async fn picture(
    State(agent): State<Agent>,
    Path(name): Path<String>,
) -> Result<Response, Refusal> {
    let at = place(&agent, &name)?;
    Ok(([(CONTENT_TYPE, "image/png")], png(at)).into_response())
}

/// Returns the number of the host, on which the VM must run and have a screen.
fn place(agent: &Agent, name: &str) -> Result<usize, Refusal> {
    let world = agent.shared.world();
    let host = world.host(agent.at).ok_or_else(no_host)?;
    let has_screen = |vm: &&godwit_api::VmInfo| is_open(vm.state) && !vm.spec.video.is_none();
    if host.vms.get(name).filter(has_screen).is_none() {
        let message = format!("VM \"{name}\" has no screen on host {}", host.info.name);
        return Err(ApiError::new(ErrorCode::WrongState, message, "start it").into());
    }
    Ok(agent.at)
}

/// Waits until the VM has left the host or has stopped.
async fn left(vm: &str, mut events: mpsc::Receiver<HostEvent>) {
    while let Some(event) = events.recv().await {
        match event {
            HostEvent::VmGone(gone) if gone == vm => return,
            HostEvent::Vm(info) if info.name == vm && !is_open(info.state) => return,
            _ => {}
        }
    }
}

/// Returns red, green and blue of a row: bands in a colour that differs between neighbouring hosts.
fn colour(at: usize, row: u16) -> [u8; 3] {
    let [base, band] = [at % 4 * 50, usize::from(row / 20 * 12)]
        .map(|value| u8::try_from(value).unwrap_or(u8::MAX));
    [40u8.saturating_add(base), 100u8.saturating_add(band), 220u8.saturating_sub(base)]
}

/// Serves one client: version 3.8, no password, raw pixels in the server's format.
async fn serve(client: &mut Client, vm: &str, at: usize) -> std::io::Result<()> {
    client.write_all(b"RFB 003.008\n").await?;
    read(client, 12).await?;
    client.write_all(&[1, 1]).await?;
    read(client, 1).await?;
    client.write_all(&[0; 4]).await?;
    read(client, 1).await?;
    let mut init = Vec::new();
    init.extend(WIDTH.to_be_bytes());
    init.extend(HEIGHT.to_be_bytes());
    // 32 bits a pixel, 24 of them in use, little endian, true colour: blue, green, red, nothing.
    init.extend([32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0]);
    init.extend(u32::try_from(vm.len()).unwrap_or(0).to_be_bytes());
    init.extend(vm.as_bytes());
    client.write_all(&init).await?;
    let mut shifts = [16, 8, 0];
    loop {
        match client.read_u8().await? {
            0 => {
                let format = read(client, 19).await?;
                shifts.copy_from_slice(&format[13..16]);
            }
            2 => {
                let head = read(client, 3).await?;
                read(client, usize::from(u16::from_be_bytes([head[1], head[2]])) * 4).await?;
            }
            3 => {
                let asked = read(client, 9).await?;
                // The picture does not change.
                if asked[0] == 0 {
                    client.write_all(&frame(at, shifts)).await?;
                }
            }
            4 => drop(read(client, 7).await?),
            5 => drop(read(client, 5).await?),
            6 => {
                let head = read(client, 7).await?;
                let length = u32::from_be_bytes([head[3], head[4], head[5], head[6]]);
                read(client, usize::try_from(length.min(1 << 16)).unwrap_or(0)).await?;
            }
            _ => return Ok(()),
        }
    }
}

async fn read(client: &mut Client, bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut read = vec![0; bytes];
    client.read_exact(&mut read).await?;
    Ok(read)
}

/// Returns an update of the whole picture in one rectangle.
fn frame(at: usize, shifts: [u8; 3]) -> Vec<u8> {
    let mut update = vec![0, 0, 0, 1, 0, 0, 0, 0];
    update.extend(WIDTH.to_be_bytes());
    update.extend(HEIGHT.to_be_bytes());
    update.extend([0; 4]);
    for row in 0..HEIGHT {
        let parts = colour(at, row).into_iter().zip(shifts);
        let pixel = parts.fold(0, |pixel, (part, shift)| {
            pixel | u32::from(part).checked_shl(shift.into()).unwrap_or(0)
        });
        update.extend(std::iter::repeat_n(pixel.to_le_bytes(), WIDTH.into()).flatten());
    }
    update
}

/// Returns the picture as PNG, without compression.
fn png(at: usize) -> Vec<u8> {
    let mut rows = Vec::new();
    for row in 0..HEIGHT {
        rows.push(0);
        rows.extend(std::iter::repeat_n(colour(at, row), WIDTH.into()).flatten());
    }
    let mut packed = vec![0x78, 0x01];
    let last = rows.len().div_ceil(STORED_BYTES) - 1;
    for (index, piece) in rows.chunks(STORED_BYTES).enumerate() {
        let length = u16::try_from(piece.len()).unwrap_or(0);
        packed.push(u8::from(index == last));
        packed.extend(length.to_le_bytes());
        packed.extend((!length).to_le_bytes());
        packed.extend(piece);
    }
    packed.extend(adler32(&rows).to_be_bytes());
    let mut head = Vec::new();
    head.extend(u32::from(WIDTH).to_be_bytes());
    head.extend(u32::from(HEIGHT).to_be_bytes());
    head.extend([8, 2, 0, 0, 0]);
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (kind, data) in [(b"IHDR", head), (b"IDAT", packed), (b"IEND", Vec::new())] {
        file.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
        let start = file.len();
        file.extend(kind);
        file.extend(&data);
        file.extend(crc32(&file[start..]).to_be_bytes());
    }
    file
}

fn adler32(bytes: &[u8]) -> u32 {
    let (low, high) = bytes.iter().fold((1_u32, 0_u32), |(low, high), byte| {
        let low = (low + u32::from(*byte)) % 65_521;
        (low, (high + low) % 65_521)
    });
    high << 16 | low
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sums_of_a_png_are_those_of_its_standard() {
        assert_eq!(crc32(b"IEND"), 0xae42_6082);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
        let picture = png(1);
        assert!(picture.starts_with(b"\x89PNG") && picture.ends_with(&[0xae, 0x42, 0x60, 0x82]));
    }
}
