//! Announcements of a destination: what this host holds, and what other guests bring meanwhile, so
//! that the source can send pages by reference.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use godwit_lanes::StreamSender;
use godwit_ram::PageRange;
use godwit_wire::{Digests, Message, Place};
use parking_lot::{Mutex, RwLock};

use crate::board::CHUNK_PAGES;
use crate::reference::{Arrivals, Content, DIGEST_PAGES};
use godwit_types::ContentKind;

/// Pieces of digests sent in a row without a pause. Messages in between, answers to pings above
/// all, wait no longer than these few KiB take.
const PIECES_IN_A_ROW: usize = 8;
const PAUSE: Duration = Duration::from_millis(1);
/// Poll interval for the progress of guests that arrive at the same time.
const ARRIVALS_INTERVAL: Duration = Duration::from_millis(10);
// A unit of round 0 brings one piece.
const _: () = assert!(CHUNK_PAGES == DIGEST_PAGES);

/// Content that a destination offers for references, in addition to the guest's own pages.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Memory on this host, the most promising first.
    pub contents: Vec<Arc<Content>>,
    /// Maximum pages that are announced to the source, without those of images of disks.
    pub most_pages: u64,
    /// Maximum pages of images that are announced.
    pub most_disk_pages: u64,
    /// Maximum pages announced before the source begins, if that needs no work. The rest is
    /// announced while pages arrive.
    pub first_pages: u64,
    /// Guests that arrive here at the same time. Their content is announced as it arrives.
    pub beside: Option<Beside>,
}

/// Guests that arrive at the same time as another one.
#[derive(Clone, Debug)]
pub struct Beside {
    /// The guest in question. The sources of the others learn what has arrived of it.
    pub own: Arc<Content>,
    /// Guests whose arrival began before.
    pub others: Vec<Arc<Content>>,
    /// Where later arrivals are registered.
    pub arrivals: Arc<Arrivals>,
    /// Number of arrivals registered before this one ([`Arrivals::since`]).
    pub begun: u64,
}

impl Beside {
    /// Registers a guest whose arrival begins now.
    #[must_use]
    pub fn begin(arrivals: &Arc<Arrivals>, own: Arc<Content>) -> Beside {
        arrivals.begin(&own);
        let (all, begun) = arrivals.since(0);
        let is_other =
            |content: &Arc<Content>| content.is_arriving() && !Arc::ptr_eq(content, &own);
        let others = all.into_iter().filter(is_other).collect();
        Beside { own, others, arrivals: Arc::clone(arrivals), begun }
    }

    /// Returns the guests whose arrival began since the last call.
    fn more(&mut self) -> Vec<Arc<Content>> {
        let (new, begun) = self.arrivals.since(self.begun);
        self.begun = begun;
        self.others.drain(..).chain(new).collect()
    }
}

/// All content that a source may refer to, indexed by its number less one. It grows during the
/// migration.
#[derive(Clone, Debug)]
pub(super) struct Offered(Arc<RwLock<Vec<Arc<Content>>>>);

impl Offered {
    pub(super) fn new(contents: Vec<Arc<Content>>) -> Offered {
        Offered(Arc::new(RwLock::new(contents)))
    }

    pub(super) fn find(&self, number: u16) -> Option<Arc<Content>> {
        let contents = self.0.read();
        contents.get(usize::from(number.checked_sub(1)?)).cloned()
    }

    fn has(&self, content: &Arc<Content>) -> bool {
        let contents = self.0.read();
        contents.iter().any(|offered| Arc::ptr_eq(offered, content))
    }

    /// Returns the number of a new content, or `None` if all numbers are used.
    fn add(&self, content: Arc<Content>) -> Option<u16> {
        let mut contents = self.0.write();
        let number = u16::try_from(contents.len() + 1).ok()?;
        contents.push(content);
        Some(number)
    }
}

/// Announces to a source what this host holds, and what arrives beside.
pub(super) struct Announcer {
    /// Content that was here before, indexed by its number less one.
    contents: Vec<Arc<Content>>,
    /// Its pieces, from the first that was not announced before the source began.
    pieces: Box<dyn Iterator<Item = Piece> + Send>,
    /// Pieces announced before the source began.
    announced_first: HashSet<(u16, u16, u64)>,
    beside: Option<Beside>,
    offered: Offered,
    /// Guests that arrive at the same time, by their content's number, and how many pieces of each
    /// have been announced.
    followed: Vec<(u16, Arc<Content>, usize)>,
    /// Images of disks, likewise: they are indexed meanwhile.
    disks: Vec<(u16, Arc<Content>, usize)>,
    left: u64,
    disks_left: u64,
    first: u64,
}

struct Piece {
    number: u16,
    content: Arc<Content>,
    block: u16,
    pages: PageRange,
}

impl Piece {
    fn key(&self) -> (u16, u16, u64) {
        (self.number, self.block, self.pages.first)
    }
}

/// Returns all pieces of several contents, which are numbered from 1 on, without images of disks.
fn pieces(contents: Vec<Arc<Content>>) -> impl Iterator<Item = Piece> + Send {
    let in_memory = |(_, content): &(u16, Arc<Content>)| content.kind() != ContentKind::Disk;
    (1..=u16::MAX).zip(contents).filter(in_memory).flat_map(|(number, content)| {
        let pieces: Vec<_> = content.pieces().collect();
        let piece =
            move |(block, pages)| Piece { number, content: Arc::clone(&content), block, pages };
        pieces.into_iter().map(piece)
    })
}

/// Returns a few pieces of each content that have not been announced.
fn new_pieces(followed: &mut [(u16, Arc<Content>, usize)]) -> Vec<Piece> {
    let mut all = Vec::new();
    for (number, content, announced) in followed {
        let new = content.arrived_since(*announced, PIECES_IN_A_ROW);
        *announced += new.len();
        let piece =
            |(block, pages)| Piece { number: *number, content: Arc::clone(content), block, pages };
        all.extend(new.into_iter().map(piece));
    }
    all
}

impl Announcer {
    /// Creates an announcer. `offered`: the contents of the offer, extended by what arrives beside.
    pub(super) fn new(offer: Offer, offered: Offered) -> Announcer {
        let Offer { contents, most_pages, most_disk_pages, first_pages, beside } = offer;
        let pieces = Box::new(pieces(contents.clone()));
        let (announced_first, followed) = (HashSet::new(), Vec::new());
        let (left, disks_left, first) = (most_pages, most_disk_pages, first_pages);
        let disks = (1..=u16::MAX)
            .zip(&contents)
            .filter(|(_, content)| content.kind() == ContentKind::Disk)
            .map(|(number, content)| (number, Arc::clone(content), 0))
            .collect();
        Announcer {
            contents,
            pieces,
            announced_first,
            beside,
            offered,
            followed,
            disks,
            left,
            disks_left,
            first,
        }
    }

    /// Announces, before the source begins, what needs no work and is small enough not to delay it.
    pub(super) fn begin(&mut self, sender: &Mutex<StreamSender>) {
        let least_left = self.left.saturating_sub(self.first);
        let is_known = |piece: &Piece| piece.content.is_worked_out(piece.block, piece.pages);
        for piece in pieces(std::mem::take(&mut self.contents)).filter(is_known) {
            if self.left <= least_left {
                break;
            }
            let Some(announced) = self.announce(&piece, sender) else { return };
            self.left = self.left.saturating_sub(announced);
            self.announced_first.insert(piece.key());
        }
        let most_disk_pages = self.disks_left;
        while most_disk_pages - self.disks_left < self.first {
            let new = new_pieces(&mut self.disks);
            if new.is_empty() || !new.iter().all(|piece| self.announce_disk(piece, sender)) {
                return;
            }
        }
    }

    /// Announces the rest, and what arrives beside, until the migration ends: `end` is disconnected
    /// then, or `is_over` returns true.
    pub(super) fn go_on<T>(
        mut self,
        sender: &Mutex<StreamSender>,
        end: &Receiver<T>,
        is_over: impl Fn() -> bool,
    ) {
        loop {
            let disks = new_pieces(&mut self.disks);
            let mut pieces = self.arrivals();
            let pause = if pieces.is_empty() {
                let announced = &self.announced_first;
                let more = self.pieces.by_ref().filter(|piece| !announced.contains(&piece.key()));
                pieces.extend(more.take(PIECES_IN_A_ROW));
                if pieces.is_empty() { ARRIVALS_INTERVAL } else { PAUSE }
            } else {
                PAUSE
            };
            if pieces.is_empty() && self.beside.is_none() && self.disks.is_empty() {
                return;
            }
            let pause = if disks.is_empty() { pause } else { PAUSE };
            for piece in disks {
                if is_over() || !self.announce_disk(&piece, sender) {
                    return;
                }
            }
            for piece in pieces {
                if self.left == 0 {
                    break;
                }
                if is_over() {
                    return;
                }
                let Some(announced) = self.announce(&piece, sender) else { return };
                self.left = self.left.saturating_sub(announced);
            }
            if self.left == 0 && self.disks.is_empty() {
                return;
            }
            if is_over() || matches!(end.recv_timeout(pause), Err(RecvTimeoutError::Disconnected)) {
                return;
            }
        }
    }

    /// Returns a few new pieces of each guest that arrives beside this one.
    fn arrivals(&mut self) -> Vec<Piece> {
        for content in self.beside.as_mut().map(Beside::more).unwrap_or_default() {
            if let Some(number) = self.offered.add(Arc::clone(&content)) {
                self.followed.push((number, content, 0));
            }
        }
        new_pieces(&mut self.followed)
    }

    /// Announces a piece of an image of a disk, if there is room for it. Returns false if the
    /// source is unreachable.
    fn announce_disk(&mut self, piece: &Piece, sender: &Mutex<StreamSender>) -> bool {
        if self.disks_left < piece.pages.count {
            self.disks.clear();
            return true;
        }
        let announced = self.announce(piece, sender);
        self.disks_left -= announced.unwrap_or(0);
        announced.is_some()
    }

    /// Announces a piece. Returns the number of its announced pages; `None` if the source is
    /// unreachable.
    fn announce(&self, piece: &Piece, sender: &Mutex<StreamSender>) -> Option<u64> {
        let Piece { number, content, block, pages } = piece;
        // Content that can no longer be read is not announced.
        let news =
            content.news(*block, *pages, |origin| self.offered.has(origin)).unwrap_or_default();
        let Some((page, prefixes)) = news else { return Some(0) };
        let place = Place { content: *number, block: *block, page };
        let sent = sender.lock().send(&Message::Digests(Digests { place, prefixes }));
        sent.is_ok().then_some(pages.count)
    }
}
