//! QEMU's whole migration stream, memory included, between two agents: from another program's QEMU
//! that an adoption moves to a shadow's QEMU at another host. It travels in pieces over one lane,
//! which has TLS, checksums and bounds. Neither agent interprets it.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use godwit_lanes::{Incoming, Stream};
use godwit_migration::drive::lane_failure;
use godwit_migration::{Failure, hold};
use godwit_types::FailureCode;
use godwit_wire::{MAX_DEVICE_STATE_CHUNK, Message};

/// Time for which the destination may accept nothing.
const SEND_LIMIT: Duration = Duration::from_secs(5);
/// Time for which QEMU may accept nothing.
const FEED_LIMIT: Duration = Duration::from_secs(30);
/// Silence of QEMU after which a ping shows that the lane is not cut.
const PING_INTERVAL: Duration = Duration::from_secs(2);

/// Passes on what QEMU writes until it closes its end.
///
/// # Errors
/// The lane broke, or its peer accepts nothing.
pub(crate) fn send(lane: &Stream, qemu: &UnixStream) -> Result<(), Failure> {
    let unreadable = |error: std::io::Error| {
        let detail = format!("cannot read what the guest's QEMU sends: {error}");
        Failure::new(FailureCode::HypervisorFailed, detail)
    };
    qemu.set_read_timeout(Some(PING_INTERVAL)).map_err(unreadable)?;
    lane.limit_sending(SEND_LIMIT).map_err(|error| lane_failure(&error))?;
    let (mut reader, mut sender) = (qemu, lane.sender());
    let mut piece = vec![0; MAX_DEVICE_STATE_CHUNK as usize];
    let mut bytes = 0;
    loop {
        let message = match reader.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => {
                bytes += read as u64;
                Message::DeviceState(piece[..read].to_vec())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Message::Ping { sent_ns: 0 }
            }
            Err(error) => return Err(unreadable(error)),
        };
        sender.send(&message).map_err(|error| lane_failure(&error))?;
        hold::at("host", "adoption-sends");
    }
    sender.send(&Message::DeviceStateEnd { bytes }).map_err(|error| lane_failure(&error))?;
    lane.finish_sending();
    Ok(())
}

/// Passes the pieces on to QEMU until the peer says that they were all, or until `is_over`. A QEMU
/// that has loaded the guest may close its end before the stream does; what follows is discarded.
/// Whether it has loaded the guest, or failed, QEMU itself reports.
///
/// # Errors
/// The lane broke, the peer sent something else, or QEMU accepts nothing.
pub(crate) fn receive(
    lane: &Stream,
    qemu: &UnixStream,
    is_over: &dyn Fn() -> bool,
) -> Result<(), Failure> {
    let refused = |error: std::io::Error| {
        let detail = format!("QEMU does not accept its stream: {error}");
        Failure::new(FailureCode::HypervisorFailed, detail)
    };
    let broken = |what: &str| Err(Failure::new(FailureCode::ProtocolBroken, what));
    qemu.set_write_timeout(Some(FEED_LIMIT)).map_err(refused)?;
    let (mut writer, mut receiver) = (qemu, lane.receiver());
    let (mut bytes, mut is_closed) = (0, false);
    while !is_over() {
        match receiver.receive().map_err(|error| lane_failure(&error))? {
            Incoming::Message(Message::DeviceState(piece)) => {
                bytes += piece.len() as u64;
                if !is_closed && let Err(error) = writer.write_all(&piece) {
                    is_closed = has_closed(&error);
                    if !is_closed {
                        return Err(refused(error));
                    }
                }
            }
            Incoming::Message(Message::Ping { .. }) => {}
            Incoming::Message(Message::DeviceStateEnd { bytes: sent }) if sent == bytes => {
                // A QEMU that has loaded everything may have closed its end.
                let _ = qemu.shutdown(Shutdown::Write);
                return Ok(());
            }
            Incoming::Message(Message::DeviceStateEnd { .. }) => {
                return broken("QEMU's stream has another length than the source says");
            }
            Incoming::Message(_) | Incoming::Pages(_) => {
                return broken("a message has no place in QEMU's stream");
            }
        }
    }
    Err(Failure::new(FailureCode::Cancelled, "the guest is not awaited any more"))
}

/// Whether QEMU has closed its end of the stream.
fn has_closed(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};

    use godwit_types::Lane;

    use super::*;

    /// Returns both ends of a lane.
    fn lane() -> (Stream, Stream) {
        let listener = godwit_lanes::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let lane = Lane { from: None, to: listener.local_addr().unwrap() };
        let near = godwit_lanes::connect(lane, Duration::from_secs(30)).unwrap();
        let far = godwit_lanes::accept(&[listener], Duration::from_secs(30)).unwrap().unwrap();
        (near, far)
    }

    /// Returns what a QEMU gets of what arrives, and how that ended.
    fn received(far: &Stream) -> (Vec<u8>, Result<(), Failure>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let qemu = scope.spawn(move || {
                let mut content = Vec::new();
                (&theirs).read_to_end(&mut content).unwrap();
                content
            });
            let ended = receive(far, &ours, &|| false);
            drop(ours);
            (qemu.join().unwrap(), ended)
        })
    }

    #[test]
    fn what_qemu_writes_arrives_whole() {
        let (near, far) = lane();
        let content: Vec<u8> = (0..=250).cycle().take(3_000_000).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| send(&near, &ours));
            let writing = scope.spawn(|| {
                // The stream ends with QEMU's end of the socket.
                let theirs = theirs;
                (&theirs).write_all(&content).unwrap();
            });
            let (arrived, ended) = received(&far);
            writing.join().unwrap();
            sending.join().unwrap().unwrap();
            ended.unwrap();
            assert!(arrived == content);
        });
    }

    #[test]
    fn a_qemu_that_has_enough_does_not_break_the_lane() {
        let (near, far) = lane();
        let mut sender = near.sender();
        for message in [
            Message::DeviceState(vec![7; 3]),
            Message::DeviceState(vec![7; 3]),
            Message::DeviceStateEnd { bytes: 6 },
        ] {
            sender.send(&message).unwrap();
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        receive(&far, &ours, &|| false).unwrap();
    }

    #[test]
    fn a_source_that_lies_ends_the_stream() {
        for lie in [
            Message::DeviceStateEnd { bytes: 4 },
            Message::Commit { epoch: 2, incarnation: 0 },
            Message::Padding { bytes: 1 },
        ] {
            let (near, far) = lane();
            let mut sender = near.sender();
            sender.send(&Message::DeviceState(vec![7; 3])).unwrap();
            sender.send(&lie).unwrap();
            let (arrived, ended) = received(&far);
            assert_eq!(ended.unwrap_err().code, FailureCode::ProtocolBroken, "{lie:?}");
            assert_eq!(arrived, [7; 3]);
        }
        // No frame at all, and a source that is gone.
        let listener = godwit_lanes::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let mut liar = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = godwit_lanes::accept(&[listener], Duration::from_secs(30)).unwrap().unwrap();
        liar.write_all(&[0xff; 4096]).unwrap();
        assert!(received(&far).1.is_err());
        let (near, far) = lane();
        near.close();
        assert!(received(&far).1.is_err());
    }

    #[test]
    fn a_source_that_only_pings_is_not_awaited_for_ever() {
        let (near, far) = lane();
        near.sender().send(&Message::Ping { sent_ns: 0 }).unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let asked = std::cell::Cell::new(0);
        let is_over = || asked.replace(asked.get() + 1) > 0;
        let ended = receive(&far, &ours, &is_over).unwrap_err();
        assert_eq!(ended.code, FailureCode::Cancelled);
    }

    #[test]
    fn a_destination_that_is_gone_ends_the_stream() {
        let (near, far) = lane();
        drop(far);
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let sent = send(&near, &ours);
                let _ = ours.shutdown(Shutdown::Both);
                sent
            });
            // QEMU notices by its end of the socket.
            while (&theirs).write_all(&[7; 65_536]).is_ok() {}
            assert!(sending.join().unwrap().is_err());
        });
    }
}
