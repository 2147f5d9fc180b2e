//! Both sides of a session as a liar plays them: correct handshakes, TLS with a certificate of the
//! lab's own authority, and then arbitrary bytes.

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use godwit_pki::Identity;
use godwit_wire::{
    CONTROL_STREAM, FrameHeader, HEADER_LEN, Kind, Message, MigrationId, PAGE_IN_STREAM, SUPPORTED,
};
use rustls::{ClientConnection, ServerConnection, StreamOwned};

use super::words::anything;
use crate::fake_http::answer_one;
use crate::random::Random;

/// Longest silence of either end.
const SILENCE: Duration = Duration::from_secs(20);
/// Largest number of lies of one stream.
const LIES: u64 = 40;

/// TLS connection that can carry arbitrary bytes.
trait Secured: Read + Write + Send {
    /// Signals the end of the data.
    fn end(&mut self);
}

impl Secured for StreamOwned<ClientConnection, TcpStream> {
    fn end(&mut self) {
        self.conn.send_close_notify();
        end(self.flush(), &self.sock);
    }
}

impl Secured for StreamOwned<ServerConnection, TcpStream> {
    fn end(&mut self) {
        self.conn.send_close_notify();
        end(self.flush(), &self.sock);
    }
}

/// Shuts down the sending side. A lost connection counts as ended.
fn end(_flushed: std::io::Result<()>, socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Write);
}

fn limit_silence(socket: &TcpStream) -> std::io::Result<()> {
    socket.set_read_timeout(Some(SILENCE))?;
    socket.set_write_timeout(Some(SILENCE))
}

/// Stream of a lane.
pub(super) struct Session(Box<dyn Secured>);

impl Session {
    fn connect(to: SocketAddr, identity: &Identity, host: &str) -> Result<Session> {
        let socket = TcpStream::connect_timeout(&to, SILENCE)?;
        limit_silence(&socket)?;
        let connection =
            ClientConnection::new(Arc::clone(identity.client()), Identity::server_name(host)?)?;
        Ok(Session(Box::new(StreamOwned::new(connection, socket))))
    }

    fn accept(socket: TcpStream, identity: &Identity) -> Result<Session> {
        limit_silence(&socket)?;
        let connection = ServerConnection::new(Arc::clone(identity.server()))?;
        Ok(Session(Box::new(StreamOwned::new(connection, socket))))
    }

    fn send(&mut self, message: &Message) -> Result<()> {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.send_bytes(&frame)
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.write_all(bytes)?;
        Ok(self.0.flush()?)
    }

    /// Receives the next message. A session does not begin with pages.
    fn receive(&mut self) -> Result<Message> {
        let mut header = [0; HEADER_LEN];
        self.0.read_exact(&mut header)?;
        let header = FrameHeader::parse(&header)?;
        ensure!(
            !matches!(header.kind, Kind::Pages | Kind::CompressedPages),
            "unexpected pages at the start of a session"
        );
        let mut payload = vec![0; header.length as usize];
        self.0.read_exact(&mut payload)?;
        Ok(Message::decode(header, &payload)?)
    }

    /// Waits for a message of a kind. Other messages, such as pings, may arrive before it.
    fn until_received(&mut self, kind: Kind) -> Result<()> {
        loop {
            match self.receive().with_context(|| format!("before {kind:?}"))? {
                message if message.kind() == kind => return Ok(()),
                Message::Refused(reason) => bail!("before {kind:?}: refused: {}", reason.detail),
                _ => {}
            }
        }
    }

    /// Sends a number of lies drawn from a seed and returns how many were sent. The peer may end
    /// the connection at any lie; the rest is then not sent.
    fn lie(&mut self, random: &mut Random) -> u64 {
        let lies = 1 + random.next() % LIES;
        (0..lies)
            .take_while(|_| self.send_bytes(&anything(random)).is_ok())
            .fold(0, |lies, _| lies + 1)
    }

    /// Ends the stream so that the peer receives all lies, then reads the peer's data to its end.
    fn finish(mut self) {
        self.0.end();
        // Any kind of end will do.
        let _ = std::io::copy(&mut self.0, &mut std::io::sink());
    }

    /// Finishes the stream on its own thread. The peer may keep a stream open for as long as there
    /// is another one.
    fn finish_later(self) {
        std::thread::spawn(move || self.finish());
    }
}

/// Source of a migration that its destination expects.
pub(super) struct LyingSource<'a> {
    pub(super) identity: &'a Identity,
    pub(super) destination: &'a str,
    pub(super) to: SocketAddr,
    pub(super) migration: MigrationId,
    /// Valid `Begin` message. The destination is ready after it.
    pub(super) begin: &'a Message,
}

impl LyingSource<'_> {
    /// Runs until the destination is ready, and lies from then on. Returns the number of lies sent.
    ///
    /// # Errors
    /// The destination does not become ready, or no lie can be sent.
    pub(super) fn run(&self, seed: u64) -> Result<u64> {
        let mut control = self.open(CONTROL_STREAM).context("the control stream")?;
        control.send(self.begin)?;
        control.until_received(Kind::Ready)?;
        let mut random = Random::new(seed);
        let mut lies = 0;
        match random.below(3) {
            0 => {
                let mut data = self.open(1).context("a data stream")?;
                lies += data.lie(&mut random);
                // The peer reads all of it before anything else is sent. By then it has ended the
                // stream.
                data.finish();
            }
            1 => {
                let (mut page_in, mut random) =
                    (self.open(PAGE_IN_STREAM).context("a page-in stream")?, random.clone());
                // The destination need not read it. It keeps the stream until there is page-in.
                std::thread::spawn(move || {
                    page_in.lie(&mut random);
                    page_in.finish();
                });
            }
            _ => {}
        }
        lies += control.lie(&mut random);
        control.finish();
        ensure!(lies > 0, "no lie was sent");
        Ok(lies)
    }

    fn open(&self, stream: u16) -> Result<Session> {
        let mut session = Session::connect(self.to, self.identity, self.destination)?;
        session.send(&Message::Hello { versions: SUPPORTED, migration: self.migration, stream })?;
        session.until_received(Kind::Welcome)?;
        Ok(session)
    }
}

/// Host that claims to accept every VM and lies to each source.
pub(super) struct LyingDestination {
    pub(super) identity: Identity,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) seed: u64,
    /// Number of control streams on which the liar reported a ready shadow and then lied.
    pub(super) lied: AtomicU64,
}

impl LyingDestination {
    /// Answers as an agent does, until the process ends. Runs on a thread in the host's namespace.
    ///
    /// # Errors
    /// The port cannot be opened.
    pub(super) fn answer_all(self: Arc<Self>) -> Result<()> {
        let http = TcpListener::bind((self.address, self.port))?;
        for (number, socket) in (0_u64..).zip(http.incoming().flatten()) {
            // A probe of the port performs no handshake.
            if let Err(error) = self.answer(socket, self.seed ^ (number << 32)) {
                eprintln!("  the lying destination: {error:#}");
            }
        }
        Ok(())
    }

    fn answer(self: &Arc<Self>, socket: TcpStream, seed: u64) -> Result<()> {
        let mut session = Session::accept(socket, &self.identity)?;
        answer_one(&mut session.0, |request| {
            if !request.starts_with("POST") {
                return Ok(("204 No Content", String::new()));
            }
            let lane = TcpListener::bind((self.address, 0))?;
            let id = "0123456789abcdef".repeat(2);
            let body = format!("{{\"id\":\"{id}\",\"addresses\":[\"{}\"]}}", lane.local_addr()?);
            let liar = Arc::clone(self);
            std::thread::spawn(move || liar.serve_streams(&lane, seed));
            Ok(("201 Created", body))
        })?;
        session.finish_later();
        Ok(())
    }

    /// Accepts streams until the process ends. Many lanes need only a few descriptors.
    fn serve_streams(self: Arc<Self>, lane: &TcpListener, seed: u64) {
        for socket in lane.incoming().flatten() {
            let liar = Arc::clone(&self);
            // A stream that its source drops is no failure.
            std::thread::spawn(move || drop(liar.lie(socket, seed)));
        }
    }

    /// Serves one stream: accepts it, reports that the shadow is ready, then lies.
    fn lie(&self, socket: TcpStream, seed: u64) -> Result<()> {
        let mut session = Session::accept(socket, &self.identity)?;
        let Message::Hello { stream, .. } = session.receive()? else { bail!("no hello") };
        session.send(&Message::Welcome { version: SUPPORTED.newest })?;
        if stream == CONTROL_STREAM {
            session.until_received(Kind::Begin)?;
            session.send(&Message::Ready)?;
        }
        let lies = session.lie(&mut Random::new(seed ^ u64::from(stream)));
        if stream == CONTROL_STREAM && lies > 0 {
            self.lied.fetch_add(1, Ordering::SeqCst);
        }
        session.finish();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use godwit_lanes::Incoming;
    use godwit_migration::drive::{Hello, say_hello, welcome};
    use godwit_pki::{Authority, Grant, Role};
    use godwit_types::Lane;
    use godwit_wire::Begin;

    use super::*;

    const MIGRATION: MigrationId = MigrationId([7; 16]);

    fn identity(authority: &Authority, name: &str) -> Identity {
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        let grant =
            Grant { name: name.to_owned(), role: Role::Host, addresses: vec![address], days: 1 };
        let issued = authority.issue(&grant).unwrap();
        Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap()
    }

    fn begin() -> Message {
        Message::Begin(Begin { epoch: 2, incarnation: 0, run: true, block_pages: vec![1] })
    }

    /// Reads until the stream ends.
    fn hear_all(receiver: &mut godwit_lanes::StreamReceiver) {
        while receiver.receive().is_ok() {}
    }

    #[test]
    fn a_lying_source_is_believed_until_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "test", 1).unwrap();
        let (liar, host) = (identity(&authority, "a"), identity(&authority, "b"));
        let listeners = [godwit_lanes::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap()];
        let to = listeners[0].local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok(Some(stream)) = godwit_lanes::accept(&listeners, SILENCE) {
                let (stream, who) = stream.secure_accepted(&host).unwrap();
                assert_eq!(who.name, "a");
                let welcomed = welcome(stream, MIGRATION, SILENCE).unwrap();
                let stream = welcomed.stream().clone();
                std::thread::spawn(move || {
                    let mut receiver = stream.receiver();
                    if welcomed.number == CONTROL_STREAM {
                        assert!(matches!(
                            receiver.receive(),
                            Ok(Incoming::Message(Message::Begin(_)))
                        ));
                        stream.sender().send(&Message::Ready).unwrap();
                    }
                    hear_all(&mut receiver);
                    stream.close();
                });
            }
        });
        let source = LyingSource {
            identity: &liar,
            destination: "b",
            to,
            migration: MIGRATION,
            begin: &begin(),
        };
        for seed in 0..6 {
            assert!(source.run(seed).unwrap() > 0);
        }
    }

    #[test]
    fn a_lying_destination_is_believed_until_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "test", 1).unwrap();
        let (liar, host) = (identity(&authority, "liar"), identity(&authority, "a"));
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        let liar = Arc::new(LyingDestination {
            identity: liar,
            address,
            port: 0,
            seed: 1,
            lied: AtomicU64::new(0),
        });
        let lane = TcpListener::bind((address, 0)).unwrap();
        let to = lane.local_addr().unwrap();
        let answering = Arc::clone(&liar);
        std::thread::spawn(move || answering.serve_streams(&lane, 1));
        let stream = godwit_lanes::connect(Lane { from: None, to }, SILENCE).unwrap();
        let stream = stream.secure(&host, "liar").unwrap();
        let (mut sender, mut receiver) = (stream.sender(), stream.receiver());
        let hello = Hello { migration: MIGRATION, stream: CONTROL_STREAM, versions: SUPPORTED };
        say_hello(&mut sender, &mut receiver, hello).unwrap();
        sender.send(&begin()).unwrap();
        assert!(matches!(receiver.receive(), Ok(Incoming::Message(Message::Ready))));
        hear_all(&mut receiver);
        // The liar counts the stream after its last lie and before it ends its side.
        stream.close();
        crate::trial::until("the destination has lied", SILENCE, || {
            Ok((liar.lied.load(Ordering::SeqCst) == 1).then_some(()))
        })
        .unwrap();
    }
}
