//! Many consecutive random moves: guests that write more than the link carries and guests that
//! write less, with and without page-in, with cuts of the link while pages are missing, dirty pages
//! found by scans or by faults. The guest writes memory, writes and reads disks on two buses (it
//! has no driver for the third), and answers a thousand packets a second, while memory changes from
//! one protection to the other.
//! `GODWIT_SOAK_MOVES` sets the number of moves (10; `make soak-mixed` makes 100),
//! `GODWIT_SOAK_SEED` the seed. A run prints its seed, which repeats the run.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::random::Random;
use godwit_lab::trial::{Guest, GuestPlan, MOVE_LIMIT, Trial, other_host};
use godwit_lab::{LabOptions, image};
use godwit_qemu::{ByteSize, Disk, DiskBus, DiskFormat};
use godwit_types::{Outcome, PageInUse, Phase, TrackingMeans, TrackingUse};

use crate::check_report;
use crate::drives::{expect_blocks, image_at};
use crate::soak::{moves, seed};

/// Link on which no move takes long: 64 MiB take two seconds.
const LINK: &str = "300mbit";
/// 80 MB/s of incompressible pages: twice what the link carries.
const TOO_MUCH: &str = "dirty:rate=20000,ws=48M,order=random,zero=0,compressible=0";
/// 20 MB/s of all kinds of pages. The link carries them, but some are missing when each has been
/// sent once.
const ENOUGH: &str = "dirty:rate=5000,ws=48M,order=random,zero=15,compressible=40";
/// All kinds of pages, parts of pages, far less than the link carries.
const BEARABLE: &str = "dirty:rate=300,ws=48M,order=random,zero=15,compressible=40,touch=words:24";
/// Disks of the guest, and whether it writes to them.
const DISKS: [(DiskBus, &str, bool); 3] = [
    (DiskBus::Virtio, "virtio.img", true),
    (DiskBus::Scsi, "scsi.img", true),
    (DiskBus::Sata, "sata.img", false),
];
/// Default number of moves.
const DEFAULT_MOVES: u32 = 10;
const SHORTEST_CUT_MS: u64 = 1000;
const LONGEST_CUT_MS: u64 = 5000;

/// Properties of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Draw {
    /// The guest writes more than the link carries, and its writers are slowed.
    throttle: bool,
    page_in: bool,
    /// Duration of a link cut while pages are missing at the destination.
    cut: Option<Duration>,
    tracking: TrackingUse,
}

impl Draw {
    fn workload(self) -> &'static str {
        match self {
            Draw { throttle: true, .. } => TOO_MUCH,
            Draw { page_in: true, .. } => ENOUGH,
            _ => BEARABLE,
        }
    }
}

/// Draws a move. Every draw consumes the same count of random numbers, so that one move does not
/// change the next.
fn draw(random: &mut Random) -> Draw {
    let (throttle, page_in, is_cut) = (random.coin(), random.coin(), random.coin());
    let cut_ms = SHORTEST_CUT_MS + random.next() % (LONGEST_CUT_MS - SHORTEST_CUT_MS + 1);
    let tracking = if random.coin() { TrackingUse::Faults } else { TrackingUse::Scans };
    let cut = (page_in && is_cut).then(|| Duration::from_millis(cut_ms));
    Draw { throttle, page_in, cut, tracking }
}

#[test]
fn moves_drawn_at_random_lose_nothing_and_leave_nothing() -> Result<()> {
    let moves = moves(DEFAULT_MOVES)?;
    let seed = seed()?;
    let options = LabOptions { link: Some(LINK.parse()?), ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("soak-mixed", options)? else { return Ok(()) };
    if !Path::new("/usr/bin/qemu-img").exists() {
        eprintln!("skipped: moves drawn at random: no qemu-img (apt-get install qemu-utils)");
        return trial.finish();
    }
    let clean = [trial.traces("a")?, trial.traces("b")?];
    eprintln!("  {moves} moves of seed {seed} (GODWIT_SOAK_SEED={seed} repeats them)");
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let disk = |(bus, name, _): &(DiskBus, &str, bool)| {
        Ok(Disk { bus: *bus, ..image_at(&folder.path().join(name), DiskFormat::Raw)? })
    };
    let plan = GuestPlan {
        workload: BEARABLE.to_owned(),
        fill: ByteSize::from_mib(64),
        disks: DISKS.iter().map(disk).collect::<Result<_>>()?,
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new("soak")
    };
    let mut guest = trial.guest("a", &plan)?;
    let mut random = Random::new(seed);
    let mut seen = Seen::default();
    for number in 1..=moves {
        let draw = draw(&mut random);
        one_move(&trial, &mut guest, draw, &mut seen)
            .with_context(|| format!("move {number} of {moves} of seed {seed}: {draw:?}"))?;
        let left = other_host(&guest.host);
        trial.expect_traces(left, &clean[usize::from(left == "b")])?;
    }
    eprintln!(
        "  {} were throttled, {} paged in, {} of them over a cut; dirty pages of {} by faults",
        seen.throttled, seen.paged_in, seen.cut, seen.by_faults
    );
    trial.delete(&guest.host, "soak")?;
    for (_, name, _) in DISKS.into_iter().filter(|(_, _, is_written)| *is_written) {
        expect_blocks(&folder.path().join(name))?;
    }
    trial.expect_traces("a", &clean[0])?;
    trial.expect_traces("b", &clean[1])?;
    trial.finish()
}

/// Counts of what happened in the moves.
#[derive(Debug, Default)]
struct Seen {
    throttled: usize,
    paged_in: usize,
    cut: usize,
    by_faults: usize,
}

fn one_move(trial: &Trial, guest: &mut Guest, draw: Draw, seen: &mut Seen) -> Result<()> {
    guest.workload(draw.workload())?;
    let destination = other_host(&guest.host);
    let request = request(guest, draw);
    let mut cut = draw.cut.map(|lasts| Cut { trial, destination, lasts });
    let mut was_cut = Ok(false);
    let watched = trial.migrate_followed(guest, &request, MOVE_LIMIT, |progress| {
        if progress.phase == Phase::PageIn
            && let Some(cut) = cut.take()
        {
            was_cut = cut.happen().map(|()| true);
        }
    })?;
    let report = &watched.report;
    ensure!(report.tracking.is_none_or(|tracking| tracking.unnoted_pages == 0), "{report:#?}");
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    check_report(report)?;
    // The guest reads its disks again as it writes them: what is wrong is a problem of the guest.
    trial.expect_whole(guest)?;
    let (was_cut, paged_in) = (was_cut?, report.page_in.is_some());
    // Faults without a limit are not throttling.
    let throttled = report.rounds.iter().any(|round| round.throttled_to_pages_per_s.is_some());
    seen.throttled += usize::from(throttled);
    seen.paged_in += usize::from(paged_in);
    seen.cut += usize::from(was_cut);
    let by_faults =
        report.tracking.as_ref().is_some_and(|used| used.means == TrackingMeans::Faults);
    seen.by_faults += usize::from(by_faults);
    eprintln!(
        "  {} to {}: {:.0} ms, switchover {:.1} ms, {} rounds, by {}{}{}{}",
        report.from,
        report.to,
        report.migration_time_ms,
        report.switchover_ms.unwrap_or_default(),
        report.rounds.len(),
        if by_faults { "faults" } else { "scans" },
        if throttled { ", throttled" } else { "" },
        if paged_in { ", paged in" } else { "" },
        if was_cut {
            format!(", cut for {:.1} s", draw.cut.unwrap_or_default().as_secs_f64())
        } else {
            String::new()
        },
    );
    Ok(())
}

/// Returns the request for a draw.
fn request(guest: &Guest, draw: Draw) -> MigrationRequest {
    let page_in = if draw.page_in { PageInUse::Now } else { PageInUse::Never };
    MigrationRequest { page_in, tracking: draw.tracking, ..guest.to_other_host() }
}

/// Cut of the destination's migration networks for a while.
struct Cut<'a> {
    trial: &'a Trial,
    destination: &'static str,
    lasts: Duration,
}

impl Cut<'_> {
    fn happen(self) -> Result<()> {
        self.trial.cut_lanes(self.destination, true)?;
        #[expect(clippy::disallowed_methods, reason = "the duration of the cut")]
        std::thread::sleep(self.lasts);
        self.trial.cut_lanes(self.destination, false)
    }
}

#[test]
fn a_seed_draws_the_same_moves_and_all_kinds_of_them() {
    let draws = |seed| {
        let mut random = Random::new(seed);
        (0..100).map(|_| draw(&mut random)).collect::<Vec<Draw>>()
    };
    assert_eq!(draws(7), draws(7));
    assert_ne!(draws(7), draws(8));
    let draws = draws(7);
    let kinds: [fn(&Draw) -> bool; 4] = [
        |draw| draw.throttle,
        |draw| draw.page_in,
        |draw| !draw.page_in,
        |draw| draw.cut.is_some(),
    ];
    for is_wanted in kinds {
        let count = draws.iter().filter(|draw| is_wanted(draw)).count();
        assert!((15..=85).contains(&count), "{draws:?}");
    }
    assert!(draws.iter().all(|draw| draw.page_in || draw.cut.is_none()));
    let lasts = |draw: &Draw| draw.cut.map(|lasts| lasts.as_millis());
    assert!(draws.iter().filter_map(lasts).all(|ms| (1000..=5000).contains(&ms)));
}
