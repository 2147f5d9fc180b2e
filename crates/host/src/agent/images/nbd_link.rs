//! Connections to NBD servers. A server that gives a byte now and then is silent: the limit is for
//! all of an answer. A request to end the job ends a wait.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use godwit_nbd::NbdAddress;
use tokio::sync::watch;

/// Longest time to connect, and that of the handshake or of a read.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval at which a wait looks for a request to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// A stream with a time limit of [`LOOK_INTERVAL`] for each call.
trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// A connection to a server.
pub(super) struct NbdLink {
    stream: Box<dyn Stream>,
    limit: Duration,
    /// End of the limit of what goes on.
    until: Instant,
    cancelled: watch::Receiver<bool>,
}

impl NbdLink {
    /// Connects; the limit for the handshake begins.
    pub(super) fn connect(
        address: &NbdAddress,
        cancelled: watch::Receiver<bool>,
    ) -> io::Result<NbdLink> {
        let stream: Box<dyn Stream> = match address {
            NbdAddress::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(LOOK_INTERVAL))?;
                stream.set_write_timeout(Some(LOOK_INTERVAL))?;
                Box::new(stream)
            }
            NbdAddress::Tcp(host, port) => {
                let stream = connect_tcp(host, *port)?;
                stream.set_read_timeout(Some(LOOK_INTERVAL))?;
                stream.set_write_timeout(Some(LOOK_INTERVAL))?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        Ok(NbdLink { stream, limit: LIMIT, until: Instant::now() + LIMIT, cancelled })
    }

    /// Begins the limit of another read.
    pub(super) fn begin(&mut self) {
        self.until = Instant::now() + self.limit;
    }

    /// Repeats a call until it is not for want of time that it fails.
    fn wait<T>(&mut self, mut call: impl FnMut(&mut dyn Stream) -> io::Result<T>) -> io::Result<T> {
        loop {
            if *self.cancelled.borrow() {
                return Err(io::Error::other("cancelled"));
            }
            if Instant::now() >= self.until {
                let why = format!("it has not answered in {} s", self.limit.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            match call(&mut *self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

impl Read for NbdLink {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(|stream| stream.read(buffer))
    }
}

impl Write for NbdLink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let until = Instant::now() + LIMIT;
    let mut last = io::Error::other("the host has no address");
    for address in (host, port).to_socket_addrs()? {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(limit: Duration) -> (NbdLink, UnixStream, watch::Sender<bool>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let (cancel, cancelled) = watch::channel(false);
        let until = Instant::now() + limit;
        (NbdLink { stream: Box::new(ours), limit, until, cancelled }, theirs, cancel)
    }

    #[test]
    fn a_server_that_trickles_is_given_up() {
        let (mut link, mut theirs, _cancel) = link(Duration::from_millis(200));
        let server = std::thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        });
        let error = link.read_exact(&mut vec![0; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        link.limit = Duration::from_secs(60);
        link.begin();
        link.read_exact(&mut [0; 1]).unwrap();
        drop(link);
        server.join().unwrap();
    }

    #[test]
    fn a_request_to_end_ends_a_wait() {
        let (mut link, theirs, cancel) = link(Duration::from_secs(600));
        let reading = std::thread::spawn(move || link.read_exact(&mut [0; 4]).unwrap_err());
        cancel.send_replace(true);
        assert_eq!(reading.join().unwrap().to_string(), "cancelled");
        drop(theirs);
    }
}
