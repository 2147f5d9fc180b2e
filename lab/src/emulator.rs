//! The link emulator: a switch in user space for each of the lab's migration networks. It provides
//! delay, rate and loss on a kernel without netem, and limits each TCP flow to a cap.
//!
//! Each host's migration NICs are TAP devices in that host's namespace; this process holds the
//! other end of all of them. Frames pass as trains of up to 64 KiB (TSO, USO) with their
//! `virtio_net_hdr`, so one system call moves what would otherwise need 45 packets. With loss,
//! offloads are off: a loss must hit one packet, not a train.
//!
//! [`switch`] holds the model and is pure; this file is the thin shell that reads, waits and
//! writes.

pub mod frame;
mod orders;
pub mod switch;

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use godwit_prober::clock::{self, PROBER_PRIORITY};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::emulator::frame::Mac;
use crate::emulator::switch::{LinkModel, Switch};
use crate::namespace::in_namespace;
use crate::units::{BitRate, Loss, Rtt};

pub use orders::{Order, give};

/// Size of a whole train: 64 KiB of IP packet, Ethernet and virtio header, rounded up.
const BUFFER_BYTES: usize = 66 << 10;
/// Frames above this size keep the buffer that they were read into; smaller ones are copied.
const COPY_BELOW_BYTES: usize = 16 << 10;
/// Maximum spare buffers for trains: 64 MiB.
const MAX_SPARE_BUFFERS: usize = 1000;
/// Frames read from one port before due ones are sent: about 100 µs of copying.
const READ_BATCH: usize = 8;
/// Frames that the kernel queues while this process is not scheduled: for trains, and for single
/// packets.
const DEVICE_QUEUE_TRAINS: u32 = 2000;
const DEVICE_QUEUE_PACKETS: u32 = 8000;

/// Real-time priority: links stay as fast while hosts are busy, but the prober goes first.
const PRIORITY: u8 = PROBER_PRIORITY - 1;

/// Configuration of the emulator's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmulatorConfig {
    /// The migration networks, each with a switch of its own.
    pub lanes: Vec<LaneConfig>,
    /// Round-trip time between two hosts.
    pub rtt: Rtt,
    /// Loss of each direction.
    pub loss: Loss,
    /// Maximum rate of each TCP flow.
    pub flow_cap: Option<BitRate>,
    /// Unix socket on which the counters are reported.
    pub socket: PathBuf,
    /// Unix datagram socket on which [`Order`]s are accepted.
    pub orders: PathBuf,
}

/// A migration network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneConfig {
    /// One port per host.
    pub ports: Vec<PortConfig>,
    /// Rate at which each port sends to its host.
    pub rate: Option<BitRate>,
}

/// A host's end of its link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortConfig {
    /// The host's network namespace.
    pub namespace: String,
    /// Name of the TAP device there.
    pub device: String,
    /// Its address.
    pub mac: Mac,
    /// Its MTU in bytes.
    pub mtu: u16,
}

/// Counters of the link towards one NIC of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// The host's network namespace.
    pub namespace: String,
    /// The NIC.
    pub device: String,
    /// Frames (or trains) delivered.
    pub frames: u64,
    /// Bytes delivered, counted as on the wire.
    pub wire_bytes: u64,
    /// Frames dropped because the queue was full.
    pub dropped: u64,
    /// Frames lost deliberately.
    pub lost: u64,
    /// Frames that the host's kernel refused.
    pub refused: u64,
}

/// Creates the TAP devices, calls `ready`, then switches frames until a device disappears with its
/// namespace.
///
/// # Errors
/// A device cannot be created (no /dev/net/tun, no rights, name taken), or reading fails.
pub fn run(config: &EmulatorConfig, ready: impl FnOnce() -> Result<()>) -> Result<()> {
    let offload = config.loss.is_none();
    let lane = |lane| LaneSwitch::new(lane, config, offload);
    let lanes = config.lanes.iter().map(lane).collect::<Result<Vec<_>>>()?;
    let listener = listen(&config.socket)?;
    let orders = take_orders(&config.orders)?;
    clock::be_punctual(PRIORITY);
    let mut emulator = Emulator {
        lanes,
        listener,
        orders,
        corrupting: None,
        offload,
        spare: Vec::new(),
        scratch: vec![0; BUFFER_BYTES],
    };
    ready()?;
    emulator.switch_frames()
}

/// Queries the counters of the emulator that listens on `socket`.
///
/// # Errors
/// It does not run, or its answer is invalid.
pub fn counters(socket: &Path) -> Result<Vec<LinkCounters>> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("the link emulator does not answer on {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("the link emulator's counters were cut off")?;
    serde_json::from_str(&text).context("the link emulator's counters are not readable")
}

fn open_port(port: &PortConfig, offload: bool) -> Result<SyncDevice> {
    let queue = if offload { DEVICE_QUEUE_TRAINS } else { DEVICE_QUEUE_PACKETS };
    // A TAP device is created in the namespace of the thread that opens /dev/net/tun.
    let device = in_namespace(&port.namespace, || {
        DeviceBuilder::new()
            .name(&port.device)
            .layer(Layer::L2)
            .mac_addr(port.mac)
            .mtu(port.mtu)
            .tx_queue_len(queue)
            .offload(offload)
            .enable(false)
            .build_sync()
    })?
    .with_context(|| {
        format!(
            "cannot make the TAP device {} in namespace {}; it needs root and the kernel's tun \
             module",
            port.device, port.namespace
        )
    })?;
    device.set_nonblocking(true)?;
    Ok(device)
}

fn remove_old(socket: &Path) -> Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            bail!("cannot replace {}: {error}", socket.display())
        }
        _ => Ok(()),
    }
}

fn take_orders(socket: &Path) -> Result<UnixDatagram> {
    remove_old(socket)?;
    let orders =
        UnixDatagram::bind(socket).with_context(|| format!("cannot bind {}", socket.display()))?;
    orders.set_nonblocking(true)?;
    Ok(orders)
}

fn listen(socket: &Path) -> Result<UnixListener> {
    remove_old(socket)?;
    let listener = UnixListener::bind(socket)
        .with_context(|| format!("cannot listen on {}", socket.display()))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Frame in its buffer, including `virtio_net_hdr` if offloads are on.
struct Buffer {
    bytes: Vec<u8>,
    length: usize,
}

/// Switch of a migration network with its devices, in the order of its ports.
struct LaneSwitch<'a> {
    config: &'a LaneConfig,
    devices: Vec<SyncDevice>,
    switch: Switch<Buffer>,
    refused: Vec<u64>,
}

impl<'a> LaneSwitch<'a> {
    fn new(config: &'a LaneConfig, all: &EmulatorConfig, offload: bool) -> Result<LaneSwitch<'a>> {
        let devices =
            config.ports.iter().map(|port| open_port(port, offload)).collect::<Result<Vec<_>>>()?;
        let model =
            LinkModel { rate: config.rate, rtt: all.rtt, loss: all.loss, flow_cap: all.flow_cap };
        let switch = Switch::new(devices.len(), model, clock::monotonic_ns());
        Ok(LaneSwitch { config, refused: vec![0; devices.len()], devices, switch })
    }

    fn counters(&self) -> impl Iterator<Item = LinkCounters> {
        let counted = self.switch.counters().into_iter();
        self.config.ports.iter().zip(counted).zip(&self.refused).map(
            |((port, counters), refused)| LinkCounters {
                namespace: port.namespace.clone(),
                device: port.device.clone(),
                frames: counters.frames,
                wire_bytes: counters.wire_bytes,
                dropped: counters.dropped,
                lost: counters.lost,
                refused: *refused,
            },
        )
    }
}

struct Emulator<'a> {
    lanes: Vec<LaneSwitch<'a>>,
    listener: UnixListener,
    orders: UnixDatagram,
    /// Host whose next train is to be changed, and the payload that it must have.
    corrupting: Option<(String, usize)>,
    offload: bool,
    spare: Vec<Vec<u8>>,
    scratch: Vec<u8>,
}

impl Emulator<'_> {
    fn switch_frames(&mut self) -> Result<()> {
        // Every port, by its lane and its position there, in the order of `wait`'s result.
        let lanes = self.lanes.iter().enumerate();
        let places: Vec<(usize, usize)> = lanes
            .flat_map(|(lane, of)| (0..of.devices.len()).map(move |port| (lane, port)))
            .collect();
        loop {
            self.send_due();
            let readable = self.wait()?;
            let [counters_asked, ordered, ports @ ..] = &readable[..] else {
                bail!("nothing polled")
            };
            for ((lane, port), _) in places.iter().zip(ports).filter(|(_, readable)| **readable) {
                if !self.read_port(*lane, *port)? {
                    return Ok(());
                }
                self.send_due();
            }
            if *counters_asked {
                self.send_counters();
            }
            if *ordered
                && let Some(Order::CorruptNext { namespace, payload_bytes }) =
                    orders::receive(&self.orders)
            {
                self.corrupting = Some((namespace, payload_bytes));
            }
        }
    }

    /// Waits for frames or until the next one is due. Returns which of listener and devices are
    /// readable.
    fn wait(&self) -> Result<Vec<bool>> {
        let next_due_ns = self.lanes.iter().filter_map(|lane| lane.switch.next_due_ns()).min();
        let timeout =
            next_due_ns.map(|due| clock::timespec(due.saturating_sub(clock::monotonic_ns())));
        let listener =
            [PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.orders, PollFlags::IN)]
                .into_iter();
        let devices = self.lanes.iter().flat_map(|lane| &lane.devices);
        let mut fds: Vec<PollFd<'_>> = listener
            .chain(devices.map(|device| PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN)))
            .collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(error) => Err(error).context("waiting for frames failed"),
        }
    }

    /// Reads a batch from one device. Returns false if the device is gone.
    fn read_port(&mut self, lane: usize, port: usize) -> Result<bool> {
        for _ in 0..READ_BATCH {
            let length = match self.lanes[lane].devices[port].recv(&mut self.scratch) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if device_is_gone(&error) => return Ok(false),
                Err(error) => {
                    let port = &self.lanes[lane].config.ports[port];
                    return Err(error).with_context(|| {
                        format!("cannot read {} of {}", port.device, port.namespace)
                    });
                }
            };
            let now_ns = clock::monotonic_ns();
            let Some(header) = frame::parse(&self.scratch[..length], self.offload) else {
                continue;
            };
            self.corrupt(lane, port, length);
            let buffer = self.take_frame(length);
            self.lanes[lane].switch.accept(now_ns, port, &header, buffer);
        }
        Ok(true)
    }

    /// Changes the frame just read, if that was ordered and the frame matches.
    fn corrupt(&mut self, lane: usize, port: usize, length: usize) {
        let sender = &self.lanes[lane].config.ports[port].namespace;
        let Some((_, least)) =
            self.corrupting.as_ref().filter(|(namespace, _)| namespace == sender)
        else {
            return;
        };
        if frame::corrupt(&mut self.scratch[..length], self.offload, *least) {
            eprintln!("a byte of a frame from {sender} is changed");
            self.corrupting = None;
        }
    }

    /// Takes the frame just read: a train takes the buffer along, a small one is copied.
    fn take_frame(&mut self, length: usize) -> Buffer {
        if length < COPY_BELOW_BYTES {
            return Buffer { bytes: self.scratch[..length].to_vec(), length };
        }
        let fresh = self.spare.pop().unwrap_or_else(|| vec![0; BUFFER_BYTES]);
        Buffer { bytes: std::mem::replace(&mut self.scratch, fresh), length }
    }

    fn send_due(&mut self) {
        for lane in &mut self.lanes {
            while let Some((port, frame)) = lane.switch.take_due(clock::monotonic_ns()) {
                // A host that is down refuses its frames, as a cable to a host that is off would
                // lose them.
                if lane.devices[port].send(&frame.bytes[..frame.length]).is_err() {
                    lane.refused[port] += 1;
                }
                if let Ok(buffer) = Rc::try_unwrap(frame)
                    && buffer.bytes.len() == BUFFER_BYTES
                    && self.spare.len() < MAX_SPARE_BUFFERS
                {
                    self.spare.push(buffer.bytes);
                }
            }
        }
    }

    fn send_counters(&self) {
        let links: Vec<LinkCounters> = self.lanes.iter().flat_map(LaneSwitch::counters).collect();
        let Ok((mut stream, _)) = self.listener.accept() else {
            return;
        };
        let Ok(text) = serde_json::to_vec(&links) else {
            return;
        };
        // A few hundred bytes fit the socket's buffer; a client that hangs up does not matter.
        if stream.set_nonblocking(true).is_ok() {
            drop(stream.write_all(&text));
        }
    }
}

/// Tests for EBADFD or ENODEV, the errors of reading a TAP device whose namespace is gone.
fn device_is_gone(error: &io::Error) -> bool {
    [Errno::BADFD, Errno::NODEV]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
