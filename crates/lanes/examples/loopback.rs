//! Measures the cost of a stream: sends pages of one memory file to another over loopback, in the
//! clear and over TLS. The files are in a tmpfs that is mounted as agents mount it, which needs
//! root. For each shape of the data it prints GB/s and the CPU time per GB at both ends, as medians
//! of several rounds, and what TLS adds, as a multiple of AES-128-GCM alone.
//!
//! `cargo run --release -p godwit-lanes --example loopback [MIB [ROUNDS]]`

use std::error::Error;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Packing, Stream, UnitPages, accept, connect, listen};
use godwit_pki::{Authority, Grant, Identity, Role};
use godwit_ram::{PageRange, RamDir, Region};
use godwit_types::Lane;
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustix::mount::UnmountFlags;
use rustix::time::{ClockId, clock_gettime};

/// Pages of one unit, as in a migration.
const UNIT_PAGES: u64 = 512;
const LIMIT: Duration = Duration::from_secs(5);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mebibytes: u64 = arguments.next().map_or(Ok(512), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(9), |text| text.parse())?;
    let folder = tempfile::tempdir()?;
    let ram = RamDir::open(&folder.path().join("ram"))?;
    println!("huge pages: {}", ram.huge_pages());
    let measured = measure(&ram, folder.path(), mebibytes, rounds);
    // Nothing maps its files any more.
    let unmounted = rustix::mount::unmount(ram.path(), UnmountFlags::empty());
    measured.and(unmounted.map_err(Into::into))
}

/// Measures each shape of the data.
fn measure(ram: &RamDir, folder: &Path, mebibytes: u64, rounds: usize) -> Result<()> {
    let region = |name: &str| -> Result<Region> {
        let region = Region::create(&ram.path().join(name), mebibytes << 20, None)?;
        region.allocate(region.all_pages())?;
        Ok(region)
    };
    let (from, to) = (region("from")?, region("to")?);
    fill(&from)?;
    let alone = cipher_alone(rounds)?;
    println!("AES-128-GCM alone: {alone:.3} s of CPU a GB to seal and to open");
    // All pages; runs of 8 with gaps of 8; every other page.
    for (shape, run, gap) in
        [("2 MiB runs", UNIT_PAGES, 0), ("32 KiB runs", 8, 8), ("single pages", 1, 1)]
    {
        let mut totals = Vec::new();
        for sealed in [false, true] {
            let (near, far) = if sealed { sealed_streams(folder)? } else { streams()? };
            let mut costs = Vec::new();
            for _ in 0..rounds {
                costs.push(send(&near, &far, &from, &to, (run, gap))?);
            }
            let of = |which: fn(&Cost) -> f64| median(costs.iter().map(which));
            totals.push(of(|cost| (cost.sending + cost.receiving) / cost.gigabytes));
            println!(
                "{shape:13} {:7} {:.2} GB/s, CPU a GB: {:.3} s to send, {:.3} s to receive",
                if sealed { "sealed" } else { "clear" },
                of(|cost| cost.gigabytes / cost.seconds),
                of(|cost| cost.sending / cost.gigabytes),
                of(|cost| cost.receiving / cost.gigabytes),
            );
        }
        let added = totals[1] - totals[0];
        println!("{shape:13} TLS adds {added:.3} s a GB, {:.2} times the cipher", added / alone);
    }
    Ok(())
}

/// Fills the memory with noise.
fn fill(from: &Region) -> Result<()> {
    let mut noise = 1_u64;
    for piece in from.all_pages().chunks(UNIT_PAGES) {
        let words = std::iter::repeat_with(|| {
            noise = noise
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            noise
        });
        let bytes: Vec<u8> =
            words.flat_map(u64::to_le_bytes).take(usize::try_from(piece.len_bytes())?).collect();
        from.copy_in(piece.offset_bytes(), &bytes)?;
    }
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the CPU seconds that the cipher takes to seal a GB in records, and to open it.
fn cipher_alone(rounds: usize) -> Result<f64> {
    const RECORD_BYTES: usize = 16 << 10;
    const RECORDS: usize = (1 << 28) / RECORD_BYTES;
    let key = UnboundKey::new(&AES_128_GCM, &[7; 16]).map_err(|_| "cannot make a key")?;
    let key = LessSafeKey::new(key);
    let nonce = || Nonce::assume_unique_for_key([0; NONCE_LEN]);
    let mut record = vec![1; RECORD_BYTES];
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        let before = thread_seconds();
        for _ in 0..RECORDS {
            let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record);
            let tag = tag.map_err(|_| "cannot seal")?;
            record.extend_from_slice(tag.as_ref());
            key.open_in_place(nonce(), Aad::empty(), &mut record).map_err(|_| "cannot open")?;
            record.truncate(RECORD_BYTES);
        }
        seconds.push(thread_seconds() - before);
    }
    #[expect(clippy::cast_precision_loss, reason = "less than a GB")]
    let gigabytes = (RECORDS * RECORD_BYTES) as f64 / 1e9;
    Ok(median(seconds.into_iter()) / gigabytes)
}

struct Cost {
    gigabytes: f64,
    seconds: f64,
    sending: f64,
    receiving: f64,
}

fn streams() -> Result<(Stream, Stream)> {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into())?;
    let near = connect(Lane { from: None, to: listener.local_addr()? }, LIMIT)?;
    let far = accept(&[listener], LIMIT)?.ok_or("no connection came")?;
    Ok((near, far))
}

fn sealed_streams(folder: &Path) -> Result<(Stream, Stream)> {
    let folder = tempfile::tempdir_in(folder)?;
    let authority = Authority::create(folder.path(), "test", 1)?;
    let identity = |name: &str| -> Result<Identity> {
        let grant =
            Grant { name: name.to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
        let issued = authority.issue(&grant)?;
        Ok(Identity::load(&authority.certificate(), &issued.certificate, &issued.key)?)
    };
    let (a, b) = (identity("a")?, identity("b")?);
    let (near, far) = streams()?;
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| far.secure_accepted(&b));
        let near = near.secure(&a, "b")?;
        let (far, _) = accepting.join().map_err(|_| "a thread panicked")??;
        Ok((near, far))
    })
}

/// Sends each unit's runs once.
fn send(
    near: &Stream,
    far: &Stream,
    from: &Region,
    to: &Region,
    (run, gap): (u64, u64),
) -> Result<Cost> {
    let units: Vec<Vec<PageRange>> = from
        .all_pages()
        .chunks(UNIT_PAGES)
        .map(|unit| {
            unit.chunks(run + gap)
                .map(|piece| PageRange { first: piece.first, count: piece.count.min(run) })
                .collect()
        })
        .collect();
    let bytes: u64 = units.iter().flatten().map(|run| run.len_bytes()).sum();
    let begun = Instant::now();
    let (sending, receiving) = std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let before = thread_seconds();
            let mut sender = near.sender();
            for pages in &units {
                let unit = UnitPages { round: 0, block: 0, region: from, pages, zeros: &[] };
                sender.unit(&unit, Packing::default(), None)?;
            }
            Ok::<_, LaneError>(thread_seconds() - before)
        });
        let before = thread_seconds();
        let mut receiver = far.receiver();
        let mut left = units.len();
        while left > 0 {
            match receiver.receive()? {
                Incoming::Pages(header) => receiver.pages(to, header)?,
                Incoming::Message(_) => left -= 1,
            }
        }
        let receiving = thread_seconds() - before;
        let sending = sending.join().map_err(|_| "a thread panicked")??;
        Ok::<_, Box<dyn Error + Send + Sync>>((sending, receiving))
    })?;
    #[expect(clippy::cast_precision_loss, reason = "a few GB")]
    let gigabytes = bytes as f64 / 1e9;
    Ok(Cost { gigabytes, seconds: begun.elapsed().as_secs_f64(), sending, receiving })
}

fn thread_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    #[expect(clippy::cast_precision_loss, reason = "a few seconds")]
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    seconds
}
