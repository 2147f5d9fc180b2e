//! Fake peer, not an agent of this release: it answers HTTP and the lane as a test requires,
//! according to docs/protocol.md only.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context, Result};
use crc_fast::crc32_iscsi;
use godwit_lab::fake_http::answer_one;
use godwit_lab::in_namespace;

/// Behaviour on the lane after the source's hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// The port belongs to another program, which does not answer as an agent.
    Stranger,
    /// Has no protocol version in common and answers Refused with code 1, as the protocol requires.
    RefusesVersion,
    /// Answers Welcome with a version that the source did not offer.
    WelcomesInVersion99,
    /// Sends bytes that are not a frame.
    Garbage,
    /// Closes the connection without an answer.
    HangsUp,
}

/// Port in its host's namespace.
pub(crate) const PORT: u16 = 7799;

/// Starts the peer on an address in a namespace. Its threads end with the test's process or with
/// the namespace.
pub(crate) fn start(namespace: &str, address: &str, manner: Manner) -> Result<()> {
    let bind = |port| {
        in_namespace(namespace, || TcpListener::bind((address, port)))?.context("cannot listen")
    };
    let (http, lane) = (bind(PORT)?, bind(0)?);
    let lane_address = lane.local_addr()?.to_string();
    std::thread::spawn(move || {
        for stream in http.incoming().flatten() {
            drop(answer_http(&stream, manner, &lane_address));
        }
    });
    std::thread::spawn(move || {
        for stream in lane.incoming().flatten() {
            drop(answer_lane(&stream, manner));
        }
    });
    Ok(())
}

/// Answers one request per connection, as the agents' client sends them.
fn answer_http(stream: &TcpStream, manner: Manner, lane_address: &str) -> Result<()> {
    answer_one(&mut &*stream, |request| {
        Ok(match manner {
            Manner::Stranger => ("404 Not Found", "<html>no such page</html>".to_owned()),
            _ if request.starts_with("POST") => {
                let id = "0123456789abcdef".repeat(2);
                ("201 Created", format!("{{\"id\":\"{id}\",\"addresses\":[\"{lane_address}\"]}}"))
            }
            _ => ("204 No Content", String::new()),
        })
    })
}

fn answer_lane(mut stream: &TcpStream, manner: Manner) -> Result<()> {
    // Hello: 12 bytes of header, 30 of payload.
    let mut hello = [0; 12 + 30];
    stream.read_exact(&mut hello)?;
    anyhow::ensure!(hello[0] == 1 && &hello[12..20] == b"GODWIT\r\n", "no hello: {hello:?}");
    match manner {
        Manner::RefusesVersion => {
            let text = b"this host speaks versions 98 to 99";
            let payload = [&1_u16.to_le_bytes()[..], &[0], text].concat();
            stream.write_all(&frame(15, &payload)?)?;
        }
        Manner::WelcomesInVersion99 => stream.write_all(&frame(2, &99_u16.to_le_bytes())?)?,
        Manner::Garbage => stream.write_all(b"220 mail.example.org ESMTP ready\r\n")?,
        Manner::Stranger | Manner::HangsUp => return Ok(()),
    }
    // Waits until the source has read it and closes the connection.
    std::io::copy(&mut stream, &mut std::io::sink())?;
    Ok(())
}

fn frame(kind: u8, payload: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(payload.len())?.to_le_bytes();
    let sum = |bytes: &[u8]| crc32_iscsi(bytes).to_le_bytes();
    let header = [&[kind][..], &length[..3], &sum(payload)].concat();
    Ok([&header[..], &sum(&header), payload].concat())
}
