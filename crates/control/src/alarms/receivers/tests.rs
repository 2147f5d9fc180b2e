//! Receivers as they are in a network: an HTTP server and a mail server, with TLS and without.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use godwit_api::control::{Alarm, AlarmKind};
use godwit_pki::{Authority, Grant, Role, web_server};
use ring::hmac;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::alarms::{MailConfig, MailTls, WebhookConfig};

/// Every kind of alarm, and the test.
const KINDS: [AlarmKind; 11] = [
    AlarmKind::HostAway,
    AlarmKind::VmDown,
    AlarmKind::RuleBroken,
    AlarmKind::DatastoreFilling,
    AlarmKind::CertificateEnding,
    AlarmKind::MoveStuck,
    AlarmKind::HaDoubtful,
    AlarmKind::HaUnprotected,
    AlarmKind::HaShortfall,
    AlarmKind::HaTrouble,
    AlarmKind::Test,
];
const KEY: &str = "shared key";
const PASSWORD: &str = "hunter2";
const SOON: Duration = Duration::from_millis(10);

fn notice(kind: AlarmKind, change: AlarmChange, severity: AlarmSeverity) -> AlarmNotice {
    let alarm = Alarm {
        id: format!("a-{}", kind.name()),
        kind,
        severity,
        object: "host:a".to_owned(),
        text: format!("wörds about {}", kind.name()),
        remedy: "look at it".to_owned(),
        raised_unix_ms: 1_795_444_970_253,
        cleared_unix_ms: None,
        acknowledged: None,
    };
    AlarmNotice { change, manager: "m1".to_owned(), unix_ms: 1_795_444_970_253, alarm }
}

fn raised(kind: AlarmKind) -> AlarmNotice {
    notice(kind, AlarmChange::Raised, AlarmSeverity::Warning)
}

/// Authority for web servers, and the acceptor of a server at 127.0.0.1.
pub(in crate::alarms) fn tls(dir: &Path) -> (PathBuf, TlsAcceptor) {
    let authority = Authority::create_web(dir, "test", 30).unwrap();
    let grant = Grant {
        name: "receiver".to_owned(),
        role: Role::Web,
        addresses: vec![IpAddr::from(Ipv4Addr::LOCALHOST)],
        days: 30,
    };
    let issued = authority.issue(&grant).unwrap();
    let config = web_server(None, &issued.certificate, &issued.key).unwrap();
    (authority.certificate(), TlsAcceptor::from(config))
}

/// A request that an HTTP server has received.
pub(in crate::alarms) struct Received {
    /// Request line and headers, in lower case.
    head: String,
    body: Vec<u8>,
}

impl Received {
    /// Returns the notice in the body, after a check of its signature.
    pub(in crate::alarms) fn notice(&self) -> AlarmNotice {
        let named = self.head.lines().find_map(|line| line.strip_prefix("x-godwit-signature: "));
        let digits = named.unwrap().strip_prefix("sha256=").unwrap();
        let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        let tag: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
        let key = hmac::Key::new(hmac::HMAC_SHA256, KEY.as_bytes());
        hmac::verify(&key, &self.body, &tag).unwrap();
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// An HTTP server that answers the first requests with these statuses, and the others with 204.
pub(in crate::alarms) struct HttpServer {
    pub(in crate::alarms) port: u16,
    pub(in crate::alarms) requests: mpsc::Receiver<Received>,
    _task: JoinSet<()>,
}

impl HttpServer {
    pub(in crate::alarms) async fn begin(
        tls: Option<TlsAcceptor>,
        statuses: &'static [u16],
    ) -> HttpServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, requests) = mpsc::channel(100);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut statuses = statuses.iter();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let status = statuses.next().copied().unwrap_or(204);
                match &tls {
                    None => answer(socket, status, &sender).await,
                    // A client that does not trust the certificate ends the connection.
                    Some(tls) => match tls.accept(socket).await {
                        Ok(stream) => answer(stream, status, &sender).await,
                        Err(_) => continue,
                    },
                }
            }
        });
        HttpServer { port, requests, _task: task }
    }

    pub(in crate::alarms) fn config(
        &self,
        scheme: &str,
        authority: Option<&Path>,
    ) -> WebhookConfig {
        WebhookConfig {
            name: "hook".to_owned(),
            url: format!("{scheme}://127.0.0.1:{}/alarms?team=a", self.port),
            key_file: None,
            authority: authority.map(Path::to_owned),
            least: AlarmSeverity::Warning,
        }
    }

    fn receiver(&self, scheme: &str, authority: Option<&Path>) -> Arc<Receiver> {
        let webhook = Webhook::open(&self.config(scheme, authority), Some(KEY)).unwrap();
        Arc::new(Receiver::webhook("hook", AlarmSeverity::Warning, webhook))
    }
}

async fn answer(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    status: u16,
    requests: &mpsc::Sender<Received>,
) {
    let mut bytes = Vec::new();
    let end = loop {
        let byte = stream.read_u8().await.unwrap();
        bytes.push(byte);
        if bytes.ends_with(b"\r\n\r\n") {
            break bytes.len();
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.unwrap().parse().unwrap()];
    stream.read_exact(&mut body).await.unwrap();
    let text = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    requests.send(Received { head, body }).await.unwrap();
}

/// A message that a mail server has received.
pub(in crate::alarms) struct ReceivedMail {
    headers: String,
    pub(in crate::alarms) body: String,
    recipients: Vec<String>,
    /// Argument of the command AUTH.
    auth: Option<String>,
    is_encrypted: bool,
}

/// How a mail server of a test behaves.
#[derive(Clone, Copy, Default)]
struct Manners {
    has_starttls: bool,
    /// Whether it refuses passwords, and repeats them in its answer.
    refuses_passwords: bool,
    /// Whether it keeps silent when the client says goodbye.
    is_rude: bool,
}

/// A small mail server (RFC 5321).
pub(in crate::alarms) struct SmtpServer {
    pub(in crate::alarms) port: u16,
    pub(in crate::alarms) mails: mpsc::Receiver<ReceivedMail>,
    _task: JoinSet<()>,
}

impl SmtpServer {
    /// Starts a server without encryption.
    pub(in crate::alarms) async fn plain() -> SmtpServer {
        SmtpServer::begin(None, false, Manners::default()).await
    }

    async fn begin(tls: Option<TlsAcceptor>, at_once: bool, manners: Manners) -> SmtpServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, mails) = mpsc::channel(100);
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                serve(socket, tls.as_ref(), at_once, manners, &sender).await;
            }
        });
        SmtpServer { port, mails, _task: task }
    }

    pub(in crate::alarms) fn config(&self, tls: MailTls, authority: Option<&Path>) -> MailConfig {
        MailConfig {
            name: "mail".to_owned(),
            server: "127.0.0.1".to_owned(),
            port: Some(self.port),
            tls,
            authority: authority.map(Path::to_owned),
            user: None,
            password_file: None,
            from: "godwit@m1.example".to_owned(),
            to: vec!["ops@x.example".to_owned(), "night@x.example".to_owned()],
            least: AlarmSeverity::Warning,
        }
    }

    fn receiver(&self, tls: MailTls, authority: Option<&Path>) -> Arc<Receiver> {
        let mut config = self.config(tls, authority);
        let has_user = tls != MailTls::None;
        config.user = has_user.then(|| "me".to_owned());
        let mail = Mail::open(&config, has_user.then(|| PASSWORD.to_owned())).unwrap();
        Arc::new(Receiver::mail("mail", AlarmSeverity::Warning, mail))
    }
}

async fn serve(
    socket: TcpStream,
    tls: Option<&TlsAcceptor>,
    at_once: bool,
    manners: Manners,
    mails: &mpsc::Sender<ReceivedMail>,
) {
    if at_once {
        let Ok(mut stream) = tls.unwrap().accept(socket).await else { return };
        write(&mut stream, "220 mail\r\n").await;
        commands(&mut stream, true, manners, mails).await;
        return;
    }
    let mut socket = socket;
    write(&mut socket, "220 mail\r\n").await;
    if commands(&mut socket, false, manners, mails).await
        && let Ok(mut stream) = tls.unwrap().accept(socket).await
    {
        commands(&mut stream, true, manners, mails).await;
    }
}

async fn write(stream: &mut (impl AsyncWrite + Unpin), text: &str) {
    // The client may be gone.
    let _ = stream.write_all(text.as_bytes()).await;
    let _ = stream.flush().await;
}

/// Reads a line without its end. `None`: the client is gone.
async fn line(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n") {
        bytes.push(stream.read_u8().await.ok()?);
    }
    bytes.truncate(bytes.len() - 2);
    Some(String::from_utf8(bytes).unwrap())
}

/// Carries out commands. Returns true for STARTTLS.
async fn commands(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    is_encrypted: bool,
    manners: Manners,
    mails: &mpsc::Sender<ReceivedMail>,
) -> bool {
    let (mut auth, mut recipients) = (None, Vec::new());
    while let Some(command) = line(stream).await {
        let offer = if manners.has_starttls && !is_encrypted { "250-STARTTLS\r\n" } else { "" };
        match command.split(' ').next().unwrap() {
            "EHLO" => {
                let text = format!("250-mail\r\n{offer}250-AUTH PLAIN LOGIN\r\n250 8BITMIME\r\n");
                write(stream, &text).await;
            }
            "STARTTLS" => {
                write(stream, "220 go on\r\n").await;
                return true;
            }
            "AUTH" => {
                let word = command.rsplit(' ').next().unwrap().to_owned();
                let plain = String::from_utf8_lossy(&STANDARD.decode(&word).unwrap()).into_owned();
                let text = match manners.refuses_passwords {
                    true => format!("535 wrong: {}\r\n", plain.replace('\0', " ")),
                    false => "235 welcome\r\n".to_owned(),
                };
                auth = Some(plain);
                write(stream, &text).await;
            }
            "RCPT" => {
                recipients.push(command);
                write(stream, "250 ok\r\n").await;
            }
            "DATA" => {
                write(stream, "354 go on\r\n").await;
                let mut lines = Vec::new();
                while let Some(one) = line(stream).await.filter(|one| one != ".") {
                    lines.push(one);
                }
                let text = lines.join("\r\n");
                let (headers, encoded) = text.split_once("\r\n\r\n").unwrap();
                let encoded: String = encoded.split_whitespace().collect();
                let body = String::from_utf8(STANDARD.decode(encoded).unwrap()).unwrap();
                write(stream, "250 ok\r\n").await;
                let mail = ReceivedMail {
                    headers: headers.to_owned(),
                    body,
                    recipients: std::mem::take(&mut recipients),
                    auth: auth.clone(),
                    is_encrypted,
                };
                mails.send(mail).await.unwrap();
            }
            "QUIT" if manners.is_rude => {}
            "QUIT" => {
                write(stream, "221 bye\r\n").await;
                return false;
            }
            _ => write(stream, "250 ok\r\n").await,
        }
    }
    false
}

#[tokio::test]
async fn a_webhook_gets_each_kind_of_alarm_with_a_signature() {
    let mut server = HttpServer::begin(None, &[]).await;
    let outbox = Outbox::with_pause(vec![server.receiver("http", None)], SOON);
    for kind in KINDS {
        outbox.push(&raised(kind));
    }
    for kind in KINDS {
        let request = server.requests.recv().await.unwrap();
        assert!(request.head.starts_with("post /alarms?team=a http/1.1\r\n"), "{}", request.head);
        assert!(request.head.contains("content-type: application/json\r\n"), "{}", request.head);
        assert_eq!(request.notice(), raised(kind));
    }
}

#[tokio::test]
async fn a_webhook_over_tls_must_show_a_certificate_of_its_authority() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, acceptor) = tls(&dir.path().join("right"));
    let (other, _) = tls(&dir.path().join("wrong"));
    let mut server = HttpServer::begin(Some(acceptor), &[]).await;
    let refused = server.receiver("https", Some(&other)).test(&raised(AlarmKind::Test)).await;
    assert!(!refused.delivered && refused.error.is_some(), "{refused:?}");
    let accepted = server.receiver("https", Some(&authority)).test(&raised(AlarmKind::Test)).await;
    assert_eq!((accepted.delivered, accepted.kind), (true, ReceiverKind::Webhook), "{accepted:?}");
    assert_eq!(server.requests.recv().await.unwrap().notice(), raised(AlarmKind::Test));
}

#[tokio::test]
async fn a_webhook_that_fails_is_tried_again_and_one_that_refuses_is_not() {
    let mut server = HttpServer::begin(None, &[503, 429, 200, 400]).await;
    let outbox = Outbox::with_pause(vec![server.receiver("http", None)], SOON);
    let all = [AlarmKind::HostAway, AlarmKind::VmDown, AlarmKind::RuleBroken];
    for kind in all {
        outbox.push(&raised(kind));
    }
    let mut kinds = Vec::new();
    for _ in 0..5 {
        kinds.push(server.requests.recv().await.unwrap().notice().alarm.kind);
    }
    assert_eq!(kinds, [all[0], all[0], all[0], all[1], all[2]]);
}

#[tokio::test]
async fn an_unreachable_receiver_delays_no_other() {
    let gone = HttpServer::begin(None, &[]).await;
    let mut server = HttpServer::begin(None, &[]).await;
    let receivers = vec![gone.receiver("http", None), server.receiver("http", None)];
    drop(gone);
    let outbox = Outbox::with_pause(receivers, Duration::from_secs(3600));
    for _ in 0..3 {
        outbox.push(&raised(AlarmKind::VmDown));
    }
    for _ in 0..3 {
        server.requests.recv().await.unwrap();
    }
    // What exceeds the queue is dropped without waiting.
    for _ in 0..WAITING_NOTICES + 10 {
        outbox.push(&raised(AlarmKind::VmDown));
    }
}

#[test]
fn a_receiver_of_critical_alarms_learns_when_they_become_less() {
    let server = WebhookConfig {
        name: "hook".to_owned(),
        url: "http://127.0.0.1/".to_owned(),
        key_file: None,
        authority: None,
        least: AlarmSeverity::Critical,
    };
    let webhook = Webhook::open(&server, None).unwrap();
    let receiver = Receiver::webhook("hook", server.least, webhook);
    let (warning, critical) = (AlarmSeverity::Warning, AlarmSeverity::Critical);
    for (change, severity, expected) in [
        (AlarmChange::Raised, warning, false),
        (AlarmChange::Raised, critical, true),
        (AlarmChange::Changed, warning, true),
        (AlarmChange::Cleared, warning, false),
        (AlarmChange::Test, warning, true),
    ] {
        assert_eq!(receiver.wants(&notice(AlarmKind::VmDown, change, severity)), expected);
    }
}

#[tokio::test]
async fn mail_goes_out_for_each_kind_of_alarm_over_starttls_with_a_password() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, acceptor) = tls(&dir.path().join("ca"));
    let manners = Manners { has_starttls: true, ..Manners::default() };
    let mut server = SmtpServer::begin(Some(acceptor), false, manners).await;
    let receiver = server.receiver(MailTls::Starttls, Some(&authority));
    for kind in KINDS {
        receiver.deliver(&[raised(kind)], SOON).await;
        let mail = server.mails.recv().await.unwrap();
        assert!(mail.is_encrypted);
        assert_eq!(mail.auth.as_deref(), Some("\0me\0hunter2"));
        assert_eq!(mail.recipients, ["RCPT TO:<ops@x.example>", "RCPT TO:<night@x.example>"]);
        assert!(mail.headers.contains("From: godwit@m1.example"), "{}", mail.headers);
        let text = format!("wörds about {}", kind.name());
        assert!(mail.body.contains(&text) && mail.body.contains("look at it"), "{}", mail.body);
    }
}

#[tokio::test]
async fn mail_goes_out_over_tls_and_without() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, acceptor) = tls(&dir.path().join("ca"));
    let mut server = SmtpServer::begin(Some(acceptor), true, Manners::default()).await;
    let receiver = server.receiver(MailTls::Tls, Some(&authority));
    let sent = receiver.test(&raised(AlarmKind::Test)).await;
    assert_eq!((sent.delivered, sent.kind, sent.error), (true, ReceiverKind::Mail, None));
    assert!(server.mails.recv().await.unwrap().is_encrypted);
    // It has accepted the message, and then keeps silent.
    let rude = Manners { is_rude: true, ..Manners::default() };
    let mut server = SmtpServer::begin(None, false, rude).await;
    let sent = server.receiver(MailTls::None, None).test(&raised(AlarmKind::Test)).await;
    assert!(sent.delivered, "{sent:?}");
    let mail = server.mails.recv().await.unwrap();
    assert_eq!((mail.is_encrypted, mail.auth), (false, None));
}

#[tokio::test]
async fn a_password_goes_to_no_server_without_a_trusted_certificate_and_into_no_message() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, acceptor) = tls(&dir.path().join("right"));
    let (other, _) = tls(&dir.path().join("wrong"));
    let polite = Manners { has_starttls: true, ..Manners::default() };
    let test = raised(AlarmKind::Test);
    // It offers no STARTTLS.
    let server = SmtpServer::begin(None, false, Manners::default()).await;
    let failed = server.receiver(MailTls::Starttls, Some(&authority)).test(&test).await;
    assert!(failed.error.unwrap().contains("STARTTLS"));
    // Another authority has signed its certificate.
    let server = SmtpServer::begin(Some(acceptor.clone()), false, polite).await;
    let failed = server.receiver(MailTls::Starttls, Some(&other)).test(&test).await;
    assert!(!failed.delivered, "{failed:?}");
    // It repeats the password in its refusal, which is final.
    let liar = Manners { refuses_passwords: true, ..polite };
    let server = SmtpServer::begin(Some(acceptor), false, liar).await;
    let receiver = server.receiver(MailTls::Starttls, Some(&authority));
    let failed = receiver.deliver_once(&[test]).await.unwrap_err();
    assert!(failed.is_final && failed.why.contains("535"), "{failed:?}");
    assert!(!failed.why.contains(PASSWORD), "{failed:?}");
}

#[tokio::test]
async fn a_mail_server_that_sends_a_line_without_end_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = SmtpServer::plain().await.config(MailTls::None, None);
    config.port = Some(listener.local_addr().unwrap().port());
    let liar = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut sent = 0_usize;
        while socket.write_all(&[b'2'; 4096]).await.is_ok() {
            sent += 4096;
        }
        sent
    });
    let mail = Mail::open(&config, None).unwrap();
    let receiver = Receiver::mail("mail", AlarmSeverity::Warning, mail);
    let failed = receiver.deliver_once(&[raised(AlarmKind::Test)]).await.unwrap_err();
    assert!(failed.why.contains("sends too much") && !failed.is_final, "{failed:?}");
    // The connection is closed: the server can send no more.
    assert!(liar.await.unwrap() > 0);
}

#[tokio::test]
async fn many_alarms_at_once_are_few_mails() {
    let mut server = SmtpServer::plain().await;
    let receiver = server.receiver(MailTls::None, None);
    let (queue, waiting) = mpsc::channel(WAITING_NOTICES);
    for _ in 0..2 * message::MOST_NOTICES {
        queue.try_send(raised(AlarmKind::VmDown)).unwrap();
    }
    drop(queue);
    deliver_all(receiver, waiting, SOON).await;
    for _ in 0..2 {
        let mail = server.mails.recv().await.unwrap();
        assert_eq!(mail.body.matches("wörds about vm-down").count(), message::MOST_NOTICES);
    }
    assert!(server.mails.try_recv().is_err());
}
