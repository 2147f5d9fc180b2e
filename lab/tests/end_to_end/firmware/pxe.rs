//! A boot from the network: a DHCP server and a TFTP server on the lab's bridge give a VM without
//! disks a program, which the VM's boot ROM (iPXE) loads and runs.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::in_namespace;
use godwit_lab::trial::{LIMIT, Trial, until};
use godwit_qemu::{ByteSize, MemoryBlock, Nic, VmSpec};

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 250);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 77);
const FILE: &[u8] = b"godwit-boot";
/// How long a server waits for a message before it looks whether the boot is done.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// What the program writes to the serial port.
const WORDS: &[u8] = b"started from the network\r\n";
/// Offset of the client's hardware address in a message of DHCP (RFC 2131, section 2), and of the
/// options behind their mark.
const HARDWARE_ADDRESS: usize = 28;
const OPTIONS: usize = 240;

/// Boots a VM from the network.
pub(super) fn boot(trial: &Trial) -> Result<()> {
    let namespace = trial.namespace("a");
    for arguments in [
        ["addr", "add", &format!("{SERVER}/24"), "dev", "br-lan"],
        ["route", "add", "255.255.255.255", "dev", "br-lan"],
    ] {
        let ended = Command::new("ip").args(["-n", &namespace]).args(arguments).status()?;
        ensure!(ended.success(), "ip {arguments:?} failed");
    }
    let bind =
        |port: u16| in_namespace(&namespace, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)));
    let (dhcp, tftp) = (bind(67)??, bind(69)??);
    dhcp.set_broadcast(true)?;
    for socket in [&dhcp, &tftp] {
        socket.set_read_timeout(Some(POLL_INTERVAL))?;
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| serve(&dhcp, answer_dhcp, &done));
        scope.spawn(|| serve(&tftp, answer_tftp, &done));
        let booted = boot_from(trial);
        done.store(true, Ordering::Relaxed);
        booted
    })
}

/// Boots a VM whose only device to boot from is its NIC.
fn boot_from(trial: &Trial) -> Result<()> {
    let nic = Nic { network: "lan".to_owned(), boot_order: Some(1), ..Nic::default() };
    let spec = VmSpec {
        memory: vec![MemoryBlock::shared(ByteSize::from_mib(64))],
        nics: vec![nic],
        ..VmSpec::new("pxe")
    };
    trial.create("a", spec)?;
    let words = String::from_utf8_lossy(WORDS);
    until("the program of the network starts", LIMIT, || {
        Ok(trial.console("a", "pxe")?.contains(words.trim_end()).then_some(()))
    })?;
    eprintln!("  pxe: a program was loaded by DHCP and TFTP, and started");
    trial.delete("a", "pxe").context("cannot delete the VM")
}

type Answer = fn(&[u8], SocketAddr) -> Option<(Vec<u8>, SocketAddr)>;

/// Answers messages until the boot is done.
fn serve(socket: &UdpSocket, answer: Answer, done: &AtomicBool) {
    let mut message = [0; 2048];
    while !done.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut message) else { continue };
        if let Some((reply, to)) = answer(&message[..length], from) {
            // The client asks again if it is lost.
            let _ = socket.send_to(&reply, to);
        }
    }
}

/// Answers a DISCOVER with an OFFER and a REQUEST with an ACK (RFC 2131; options in RFC 2132).
fn answer_dhcp(asked: &[u8], _: SocketAddr) -> Option<(Vec<u8>, SocketAddr)> {
    let mut options = asked.get(OPTIONS..)?;
    let kind = loop {
        match *options {
            [53, 1, kind, ..] => break kind,
            [0, ref rest @ ..] => options = rest,
            [_, length, ref rest @ ..] => options = rest.get(usize::from(length)..)?,
            _ => return None,
        }
    };
    let reply = if kind == 1 { 2 } else { 5 };
    let mut answer = vec![0; OPTIONS];
    answer[..4].copy_from_slice(&[2, 1, 6, 0]);
    answer[4..8].copy_from_slice(&asked[4..8]);
    answer[16..20].copy_from_slice(&CLIENT.octets());
    answer[20..24].copy_from_slice(&SERVER.octets());
    answer[HARDWARE_ADDRESS..HARDWARE_ADDRESS + 6]
        .copy_from_slice(&asked[HARDWARE_ADDRESS..HARDWARE_ADDRESS + 6]);
    answer[108..108 + FILE.len()].copy_from_slice(FILE);
    answer[236..OPTIONS].copy_from_slice(&[99, 130, 83, 99]);
    answer.extend([53, 1, reply, 51, 4, 0, 0, 14, 16, 1, 4, 255, 255, 255, 0, 54, 4]);
    answer.extend(SERVER.octets());
    answer.push(255);
    Some((answer, (Ipv4Addr::BROADCAST, 68).into()))
}

/// Answers a request for the program with its only block (RFC 1350), and takes no options.
fn answer_tftp(asked: &[u8], from: SocketAddr) -> Option<(Vec<u8>, SocketAddr)> {
    asked.strip_prefix(&[0, 1])?.strip_prefix(FILE)?.strip_prefix(&[0])?;
    Some(([&[0, 3, 0, 1][..], &program()].concat(), from))
}

/// Returns the program, which runs at 0000:7C00 in real mode: it writes to the first serial port
/// and stops.
fn program() -> Vec<u8> {
    let code = [
        0xfa, // cli
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0xfc, // cld
        0xbe, 0x17, 0x7c, // mov si, 0x7c17: the words
        0xb9, 26, 0, // mov cx, 26: their length
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xf3, 0x6e, // rep outsb
        0xf4, // hlt
        0xeb, 0xfd, // jmp to hlt
        0x90, 0x90, 0x90,
    ];
    [code.as_slice(), WORDS].concat()
}

#[test]
fn the_program_has_its_words_where_it_looks_for_them() {
    let program = program();
    assert_eq!(program.len() - WORDS.len(), 0x17);
    assert_eq!(WORDS.len(), 26);
    assert!(program.len() < 512, "one block");
    assert_eq!(&program[0x17..], WORDS);
}
