//! The source's driver: a thread that carries out the state machine's actions and finds dirty
//! pages, one that reads the destination's answers, and one for each data stream
//! ([`super::dispatch`]).
//!
//! The driver has one loop ([`driver`]): it handles its inputs and timers, and when there is none
//! of them to handle, it takes the next step of the sweep under way.

mod driver;
mod figures;
mod inputs;
pub(super) mod job;
mod joined;
mod lanes;
mod memory;
mod narrow;
mod page_in;
mod peer;
pub mod simulation;
mod streams;
mod switchover;
pub(super) mod windows;
mod worker;

use std::sync::Arc;
use std::sync::mpsc;

use godwit_lanes::Stream;
use godwit_wire::{CONTROL_STREAM, MAX_STREAMS, SUPPORTED};

use super::dispatch::Dispatch;
use super::handshake::Hello;
use super::hypervisor::SourceHypervisor;
use super::inbox::{Events, Inbox};
use super::page_in::KeptPages;
use super::referring::Referring;
use super::tracking::Tracking;
use crate::source::{Plan, Source};
use driver::{Driver, StatePassage};
use inputs::Inputs;
use job::{Kept, SourceJob, SourceResult};
use lanes::Lanes;
use memory::Memory;
use page_in::{MOST_ORDERS, PageInDesk, Server};
use peer::Peer;
use streams::open_streams;
use windows::Windows;

/// Runs a migration at its source until it ends or its lane is cut. After a cut, returns the state
/// for continuing as well. On every outcome except `Completed` and `InDoubt` the guest is in its
/// former state.
pub fn send<H: SourceHypervisor, T: Tracking>(
    mut job: SourceJob<'_, H, T>,
    inbox: &Inbox,
    events: Events,
) -> (SourceResult, Option<Kept<T>>) {
    let control = job.control.clone();
    let (dispatch, regions) = (Dispatch::default(), job.regions.clone());
    let unsent = job.resumes.take().map(|unsent| unsent.0);
    let sends_all = unsent.is_none();
    let referring = Referring::new(
        job.references,
        job.deltas,
        Arc::clone(&job.experience),
        &regions.iter().map(|region| region.pages()).collect::<Vec<_>>(),
        unsent,
    )
    .noting(job.departing.take())
    .describing(std::mem::take(&mut job.contents));
    // The number of each stream comes once.
    let (opener, numbers) = mpsc::sync_channel(usize::from(MAX_STREAMS));
    let kept = KeptPages::new(regions.clone());
    let (orders, ordered) = mpsc::sync_channel(MOST_ORDERS);
    let server = Server {
        kept: &kept,
        connect: job.connect,
        lanes: job.lanes,
        interrupt: &dispatch.connecting,
        hello: Hello { migration: job.migration, stream: CONTROL_STREAM, versions: SUPPORTED },
        again: job.page_in_again,
        inbox,
    };
    let (dispatch, regions, referring) = (&dispatch, &regions, &referring);
    let driver = Driver {
        page_in: PageInDesk::new(orders, &kept),
        machine: Source::new(&Plan {
            policy: job.policy,
            preflight: job.preflight,
            resumes: !sends_all,
            settles: job.hypervisor.settles(),
        }),
        peer: Peer::new(control.clone(), &dispatch.pings, job.begun),
        dispatch,
        memory: Memory::new(regions, referring, sends_all),
        windows: Windows::default(),
        lanes: Lanes::new(dispatch, opener, job.lanes, job.streams.is_some()),
        awaited: None,
        pages_end: None,
        inputs: Inputs::new(inbox, events),
        device_state_bytes: 0,
        state_passage: StatePassage::Held,
        switchover_since: None,
        finished: false,
        job,
    };
    let (result, left) = std::thread::scope(|scope| {
        let _ending = Ending { dispatch, control: control.clone(), kept: &kept };
        scope.spawn(move || server.run(&ordered));
        // It ends before the scope does, and with it the threads that wait for streams to open.
        let mut driver = driver;
        let opening = |shared| open_streams(scope, numbers, shared);
        driver.connect(scope, control.receiver(), regions, opening);
        driver.until_finished();
        let result = driver.result();
        let Driver { machine, job, memory, .. } = driver;
        (result, machine.is_cut().then_some((job.tracker, memory)))
    });
    let kept = left.map(|(tracker, memory)| Kept { tracker, unsent: memory.unsent(dispatch) });
    (result, kept)
}

/// Ends the streams' threads however the driver ends.
struct Ending<'a> {
    dispatch: &'a Dispatch,
    control: Stream,
    kept: &'a KeptPages,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.kept.abandon();
        self.dispatch.end();
        self.control.close();
    }
}
