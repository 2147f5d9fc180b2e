//! Certificates are issued, renewed and refused.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use godwit_pki::{
    Authority, Grant, Identity, Issued, Peer, PkiError, RevocationList, Role, Serial, Trust,
    describe, web_server,
};
use rustls::{ClientConfig, ClientConnection, ServerConnection, StreamOwned};

fn grant(name: &str) -> Grant {
    Grant {
        name: name.to_owned(),
        role: Role::Host,
        addresses: vec!["10.0.0.1".parse().unwrap()],
        days: 30,
    }
}

fn identity(authority: &Authority, issued: &Issued) -> Identity {
    Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap()
}

fn made(dir: &Path) -> (Authority, Identity, Identity) {
    let authority = Authority::create(dir, "test", 365).unwrap();
    let a = identity(&authority, &authority.issue(&grant("a")).unwrap());
    let operator = Grant { role: Role::Operator, ..grant("root") };
    let b = identity(&authority, &authority.issue(&operator).unwrap());
    (authority, a, b)
}

/// Connects both ends. Returns the peer that each end sees, or the error.
fn connect(client: &Identity, server: &Identity, expected: &str) -> Result<(Peer, Peer), String> {
    let (seen, served) = connect_by(client.client(), server, expected)?;
    Ok((seen, served.unwrap()))
}

/// Connects a client with the certificate and the trust that it has. A client without a certificate
/// has no name.
fn connect_by(
    client: &Arc<ClientConfig>,
    server: &Identity,
    expected: &str,
) -> Result<(Peer, Option<Peer>), String> {
    // A manager's listener requests a certificate but does not require one.
    let asks = if client.client_auth_cert_resolver.has_certs() {
        server.server()
    } else {
        server.server_for_users()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let (socket, _) = listener.accept().unwrap();
            let connection = ServerConnection::new(asks.clone()).unwrap();
            let mut stream = StreamOwned::new(connection, socket);
            let mut word = [0; 5];
            stream.read_exact(&mut word).map_err(|error| error.to_string())?;
            stream.write_all(b"world").map_err(|error| error.to_string())?;
            Ok::<_, String>(Peer::of(stream.conn.peer_certificates()))
        });
        let name = Identity::server_name(expected).unwrap();
        let connection = ClientConnection::new(Arc::clone(client), name).unwrap();
        let mut stream = StreamOwned::new(connection, TcpStream::connect(to).unwrap());
        let mut word = [0; 5];
        let result = stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut word));
        let seen = Peer::of(stream.conn.peer_certificates());
        drop(stream);
        let served = serving.join().unwrap();
        result.map_err(|error| error.to_string())?;
        Ok((seen.unwrap(), served?))
    })
}

#[test]
fn both_ends_know_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (_, a, b) = made(dir.path());
    let (seen_by_client, seen_by_server) = connect(&b, &a, "a").unwrap();
    assert_eq!((seen_by_client.name.as_str(), seen_by_client.role), ("a", Role::Host));
    assert_eq!((seen_by_server.name.as_str(), seen_by_server.role), ("root", Role::Operator));
    assert_eq!(seen_by_client.serial, *a.serial());
    assert_eq!(a.name(), "a");
}

#[test]
fn a_monitor_certificate_can_query_but_not_act_as_a_host() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, a, _) = made(dir.path());
    let issued = authority.issue(&Grant { role: Role::Monitor, ..grant("prometheus") }).unwrap();
    assert_eq!(describe(&issued.certificate).unwrap().role, Role::Monitor);
    let monitor = identity(&authority, &issued);
    let (_, seen) = connect(&monitor, &a, "a").unwrap();
    assert_eq!((seen.name.as_str(), seen.role), ("prometheus", Role::Monitor));
    connect(&a, &monitor, "prometheus").unwrap_err();
}

#[test]
fn no_host_passes_for_a_manager_whatever_its_certificate_names() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, _, m1) = made(dir.path());
    let issued = authority.issue(&Grant { role: Role::Operator, ..grant("m2") }).unwrap();
    let m2 = identity(&authority, &issued);
    connect_by(m1.client_of_managers(), &m2, "m2").unwrap();
    std::fs::remove_file(&issued.certificate).unwrap();
    std::fs::remove_file(&issued.key).unwrap();
    // A host's certificate with a manager's name.
    let liar = identity(&authority, &authority.issue(&grant("m2")).unwrap());
    connect(&m1, &liar, "m2").unwrap();
    let refused = connect_by(m1.client_of_managers(), &liar, "m2").unwrap_err();
    assert!(refused.contains("not a manager's"), "{refused}");
    let trust = Trust::load(&authority.certificate()).unwrap();
    assert!(connect_by(trust.client(), &liar, "m2").unwrap_err().contains("not a manager's"));
}

#[test]
fn browsers_trust_an_authority_that_signs_no_hosts() {
    let (dir, web_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (cluster, a, _) = made(dir.path());
    let web = Authority::create_web(web_dir.path(), "web", 365).unwrap();
    assert!(web.is_web() && !cluster.is_web() && Authority::open(web_dir.path()).unwrap().is_web());
    for role in [Role::Host, Role::Operator, Role::Monitor] {
        let refused = web.issue(&Grant { role, ..grant("x") }).unwrap_err();
        assert!(matches!(refused, PkiError::OtherAuthority { .. }), "{refused}");
    }
    let request = godwit_pki::request(&dir.path().join("new.key")).unwrap();
    assert!(matches!(web.sign(&request, &grant("x")), Err(PkiError::OtherAuthority { .. })));
    let for_web = Grant { role: Role::Web, ..grant("m1.example") };
    assert!(matches!(cluster.issue(&for_web), Err(PkiError::OtherAuthority { .. })));
    let shown = web.issue(&for_web).unwrap();
    let ca = cluster.certificate();
    web_server(Some(&ca), &shown.certificate, &shown.key).unwrap();
    // The cluster's authority must not issue certificates for browsers.
    let (certificate, key) = (dir.path().join("root.pem"), dir.path().join("root.key"));
    let refused = web_server(Some(&ca), &certificate, &key).unwrap_err();
    assert!(matches!(refused, PkiError::ClusterAuthority { .. }), "{refused}");
    // The cluster refuses what the web authority issues, even if a peer trusts that authority by
    // mistake.
    let mistaken = Identity::load(&web.certificate(), &shown.certificate, &shown.key).unwrap();
    connect(&mistaken, &a, "a").unwrap_err();
    let refused = connect_by(mistaken.client_of_managers(), &mistaken, "m1.example").unwrap_err();
    assert!(refused.contains("not a manager's"), "{refused}");
}

#[test]
fn a_revoked_certificate_is_refused_in_both_directions_from_the_next_handshake_on() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, a, root) = made(dir.path());
    let b = identity(&authority, &authority.issue(&grant("b")).unwrap());
    connect(&a, &b, "b").unwrap();
    let list = authority.list(1, [(b.serial().clone(), 0)].into()).unwrap();
    let list = RevocationList::read(list.pem(), &authority.certificate()).unwrap();
    assert!(a.revocations().accept(list.clone()).unwrap());
    assert!(!a.revocations().accept(list).unwrap(), "it has that one");
    // As a server, as a manager's server and as a client.
    assert!(connect(&a, &b, "b").unwrap_err().contains("Revoked"));
    assert!(connect_by(a.client_of_managers(), &b, "b").is_err());
    let refused = connect(&b, &a, "a").unwrap_err();
    assert!(refused.contains("Revoked") || refused.contains("alert"), "{refused}");
    // Others still connect, also with peers that do not have the list yet.
    connect(&root, &a, "a").unwrap();
    connect(&a, &root, "root").unwrap();
    connect(&root, &b, "b").unwrap();
    // A list from the configuration has the same effect, also at listeners for people.
    let own = authority.revoke([b.serial().clone()]).unwrap();
    root.revocations().configure(Some(own));
    connect(&root, &b, "b").unwrap_err();
}

#[test]
fn an_older_or_foreign_list_replaces_nothing() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (authority, a, _) = made(dir.path());
    let foreign = Authority::create(elsewhere.path(), "test", 30).unwrap();
    let ca = authority.certificate();
    let of = |serial: &Serial| BTreeMap::from([(serial.clone(), 0)]);
    let newest = authority.list(7, of(a.serial())).unwrap();
    a.revocations().accept(RevocationList::read(newest.pem(), &ca).unwrap()).unwrap();
    for number in [0, 6, 7] {
        let older =
            RevocationList::read(authority.list(number, BTreeMap::new()).unwrap().pem(), &ca)
                .unwrap();
        let refused = a.revocations().accept(older).unwrap_err();
        assert!(matches!(refused, PkiError::OldList { newest: 7, .. }), "{refused}");
        assert!(a.revocations().has(a.serial()));
    }
    // Lists of another authority with the same name, and of a host with the authority's name.
    let host = Authority::load(&dir.path().join("a.pem"), &dir.path().join("a.key")).unwrap();
    let mut forged = vec![foreign.list(9, BTreeMap::new()).unwrap().pem().to_owned()];
    forged.extend(host.list(9, BTreeMap::new()).ok().map(|list| list.pem().to_owned()));
    forged.push(String::new());
    forged.push(std::fs::read_to_string(&ca).unwrap());
    forged.push(newest.pem().replacen('A', "B", 1));
    forged.push("x".repeat(godwit_pki::MOST_LIST_BYTES + 1));
    for text in forged {
        let refused = RevocationList::read(&text, &ca).unwrap_err();
        assert!(matches!(refused, PkiError::BadList { .. }), "{refused}");
    }
    let many =
        (1..=5001).map(|n: u32| (format!("{n:08x}").parse::<Serial>().unwrap(), 0)).collect();
    assert!(matches!(authority.list(8, many), Err(PkiError::BadList { .. })));
}

#[test]
fn an_altered_or_truncated_list_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, a, _) = made(dir.path());
    let ca = authority.certificate();
    let list = authority.list(7, [(a.serial().clone(), 0)].into()).unwrap();
    let (begin, end) = ("-----BEGIN X509 CRL-----", "-----END X509 CRL-----");
    let body = list.pem().split_once(begin).unwrap().1.split_once(end).unwrap().0;
    let body: String = body.split_whitespace().collect();
    let read = |body: &str| RevocationList::read(&format!("{begin}\n{body}\n{end}\n"), &ca);
    assert_eq!(read(&body).unwrap().revoked(), list.revoked());
    let mut refused = 0;
    for at in 0..body.len() {
        for other in ["A", "b", "7", "/"] {
            let mut altered = body.clone();
            altered.replace_range(at..=at, other);
            // The signature covers the list's content, but not every byte around it.
            match read(&altered) {
                Ok(read) => {
                    assert_eq!(
                        (read.number(), read.revoked()),
                        (7, list.revoked()),
                        "{at} {other}"
                    );
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > body.len() * 3, "{refused}");
    for length in (0..body.len()).step_by(4) {
        assert!(read(&body[..length]).is_err(), "{length}");
    }
}

#[test]
fn an_authority_keeps_its_own_list_and_a_full_one_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, a, root) = made(dir.path());
    assert!(authority.own_list().unwrap().is_none());
    let first = authority.revoke([a.serial().clone()]).unwrap();
    let second = authority.revoke([root.serial().clone()]).unwrap();
    assert!(second.number() > first.number());
    let kept = authority.own_list().unwrap().unwrap();
    assert_eq!(kept, second);
    assert!(
        [a.serial(), root.serial()].into_iter().all(|serial| kept.revoked().contains_key(serial))
    );
    let serial = |n: usize| format!("{n:040x}").replacen("00", "41", 1).parse::<Serial>().unwrap();
    let full =
        authority.list(1, (0..godwit_pki::MOST_REVOKED).map(|n| (serial(n), 0)).collect()).unwrap();
    assert!(full.pem().len() <= godwit_pki::MOST_LIST_BYTES, "{}", full.pem().len());
    let read = RevocationList::read(full.pem(), &authority.certificate()).unwrap();
    assert_eq!(read.revoked().len(), godwit_pki::MOST_REVOKED);
}

#[test]
fn another_host_and_another_authority_are_refused() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, a, b) = made(dir.path());
    let (_, foreign, _) = made(elsewhere.path());
    assert!(connect(&b, &a, "c").unwrap_err().contains("not valid for"), "the name is checked");
    for refused in [connect(&foreign, &a, "a"), connect(&b, &foreign, "a")] {
        let why = refused.unwrap_err();
        assert!(why.contains("certificate") || why.contains("alert"), "{why}");
    }
}

#[test]
fn keys_are_private_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, ..) = made(dir.path());
    for key in ["ca.key", "a.key"] {
        let mode = std::fs::metadata(dir.path().join(key)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
    assert!(matches!(Authority::create(dir.path(), "again", 1), Err(PkiError::Exists { .. })));
    assert!(matches!(authority.issue(&grant("a")), Err(PkiError::Exists { .. })));
    assert!(matches!(Authority::open(&dir.path().join("none")), Err(PkiError::NoAuthority { .. })));
    for name in ["", "ca", "a b", "../x", "-a", "a..b"] {
        assert!(matches!(authority.issue(&grant(name)), Err(PkiError::BadName { .. })), "{name}");
    }
}

#[test]
fn a_key_that_others_may_read_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, ..) = made(dir.path());
    let (certificate, key) = (dir.path().join("a.pem"), dir.path().join("a.key"));
    for mode in [0o604, 0o640, 0o660, 0o644] {
        std::fs::set_permissions(&key, PermissionsExt::from_mode(mode)).unwrap();
        let refused = Identity::load(&authority.certificate(), &certificate, &key).unwrap_err();
        assert!(matches!(refused, PkiError::OpenKey { .. }), "{refused}");
        assert!(refused.remedy().contains("chmod 600"), "{refused}");
    }
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o400)).unwrap();
    assert!(Identity::load(&authority.certificate(), &certificate, &key).is_ok());
    std::fs::set_permissions(dir.path().join("ca.key"), PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(Authority::open(dir.path()), Err(PkiError::OpenKey { .. })));
}

#[test]
fn a_renewed_certificate_has_the_same_content_for_longer() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, ..) = made(dir.path());
    let path = dir.path().join("a.pem");
    let (before, key) =
        (describe(&path).unwrap(), std::fs::read(dir.path().join("a.key")).unwrap());
    let renewed = authority.renew("a", 60).unwrap();
    let after = describe(&path).unwrap();
    assert_eq!(
        (&after.name, after.role, &after.addresses),
        (&before.name, before.role, &before.addresses)
    );
    assert!(after.not_after > before.not_after);
    assert_ne!(std::fs::read(&renewed.key).unwrap(), key);
    assert!(matches!(authority.renew("nobody", 1), Err(PkiError::File { .. })));
}

#[test]
fn expired_and_mismatched_certificates_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, ..) = made(dir.path());
    let ended = authority.issue(&Grant { days: 0, ..grant("old") }).unwrap();
    std::thread::yield_now();
    let refused =
        Identity::load(&authority.certificate(), &ended.certificate, &ended.key).unwrap_err();
    assert!(
        matches!(refused, PkiError::OutOfDate { .. }) && refused.remedy().contains("renew"),
        "{refused}"
    );
    let other = dir.path().join("a.key");
    let refused =
        Identity::load(&authority.certificate(), &dir.path().join("root.pem"), &other).unwrap_err();
    assert!(matches!(refused, PkiError::Mismatch { .. }), "{refused}");
    let none = Identity::load(&authority.certificate(), &other, &other).unwrap_err();
    assert!(matches!(none, PkiError::Unreadable { .. }), "{none}");
}

#[test]
fn a_request_gets_only_what_its_grant_allows() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "test", 30).unwrap();
    let key = dir.path().join("new.key");
    let request = godwit_pki::request(&key).unwrap();
    // The same key again, which only its owner can read.
    let again = godwit_pki::request(&key).unwrap();
    assert_eq!(godwit_pki::requested_key(&request), godwit_pki::requested_key(&again));
    assert!(godwit_pki::requested_key(&request).is_some());
    let address = "10.0.0.7".parse().unwrap();
    let grant = Grant { name: "c".into(), role: Role::Host, addresses: vec![address], days: 30 };
    let signed = authority.sign(&request, &grant).unwrap();
    let certificate = dir.path().join("new.pem");
    std::fs::write(&certificate, &signed.certificate).unwrap();
    let described = describe(&certificate).unwrap();
    assert_eq!(
        (described.name.as_str(), described.role, described.addresses),
        ("c", Role::Host, vec![address])
    );
    // The certificate works for TLS, with that key and this authority.
    Identity::load(&authority.certificate(), &certificate, &key).unwrap();
    assert_eq!(signed.authority, std::fs::read_to_string(authority.certificate()).unwrap());
}

#[test]
fn a_request_without_proof_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "test", 30).unwrap();
    let request = godwit_pki::request(&dir.path().join("new.key")).unwrap();
    let grant = Grant { name: "c".into(), role: Role::Host, addresses: vec![], days: 30 };
    // The signature comes last: with another one there, the proof belongs to another key.
    let mut lines: Vec<String> = request.lines().map(str::to_owned).collect();
    let last = lines.len() - 3;
    lines[last] = lines[last].chars().map(|c| if c == 'A' { 'B' } else { 'A' }).collect();
    for broken in
        ["", "no request", &request.replace("REQUEST", "NOTHING")[..60], &lines.join("\n")]
    {
        let refused = authority.sign(broken, &grant).unwrap_err();
        assert!(matches!(refused, PkiError::BadRequest { .. }), "{refused}");
    }
}
