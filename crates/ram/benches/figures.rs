//! Measures the figures that this crate promises: `cargo bench -p godwit-ram`. It prints medians.
//! Other load on the machine affects them.
#![allow(
    unsafe_code,
    clippy::expect_used,
    reason = "mount namespaces; a benchmark that cannot run ends"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use godwit_ram::{DirtyTracker, PAGE_SIZE, PageRange, Region};
use support::{Bench, Start, Writer};

const PAGES: u64 = (1 << 30) / PAGE_SIZE;
const REPEATS: usize = 7;

fn median_ms(mut run: impl FnMut() -> f64) -> f64 {
    let mut times: Vec<f64> = (0..REPEATS).map(|_| run()).collect();
    times.sort_by(f64::total_cmp);
    times[REPEATS / 2]
}

fn timed<T>(what: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    black_box(what());
    start.elapsed().as_secs_f64() * 1e3
}

fn print(what: &str, ms: f64) {
    println!("{what:<58} {ms:>9.2} ms per GiB {:>9.2} GB/s", 1_073.741_824 / ms);
}

fn main() {
    let Some(bench) = Bench::tracking() else { return };
    println!(
        "1 GiB of guest RAM, huge pages: {}",
        if bench.ram.huge_pages() { "yes" } else { "no" }
    );
    memory(&bench);
    tracking(&bench);
}

fn memory(bench: &Bench) {
    // A virtual machine gets memory that it never used before from its host, slowly. The figure
    // must not include that.
    remove(&touched(bench, "warm-up").0);
    let (region, allocated, touched) = touched(bench, "memory");
    print("allocate", allocated);
    print("first touch of allocated pages, by copy_in of 1 MiB", touched);
    let all = region.all_pages();
    region.is_range_zero(all);
    print("zero check, zero pages in memory", median_ms(|| timed(|| region.is_range_zero(all))));
    let few = PageRange::new(0, 32);
    let cached = median_ms(|| timed(|| (0..8192).all(|_| region.is_range_zero(black_box(few)))));
    print("zero check, zero pages in cache", cached);
    write_all(&region, 0x5a);
    print("zero check, pages of data", median_ms(|| timed(|| all_data(&region))));
    let mut staging = vec![0; 4096];
    print("copy_out, a page at a time", median_ms(|| timed(|| copy_pages(&region, &mut staging))));
    let copy_data =
        |page| region.copy_data_out(page * PAGE_SIZE, &mut vec![0; 4096]).expect("in bounds");
    print(
        "copy_data_out, a page at a time",
        median_ms(|| timed(|| (0..PAGES).for_each(copy_data))),
    );
    let to = bench.region("to", PAGES);
    to.allocate(all).expect("1 GiB is free");
    print("send and receive over a unix socket", median_ms(|| timed(|| send(&region, &to))));
    remove(&region);
    remove(&to);
}

/// Returns a region whose pages were all allocated and then written, and the time of each step.
fn touched(bench: &Bench, name: &str) -> (Arc<Region>, f64, f64) {
    let region = bench.region(name, PAGES);
    let allocated = timed(|| region.allocate(region.all_pages()).expect("1 GiB is free"));
    let touched = timed(|| write_all(&region, 0));
    (region, allocated, touched)
}

fn remove(region: &Region) {
    std::fs::remove_file(region.path()).expect("ours");
}

fn write_all(region: &Region, byte: u8) {
    let chunk = vec![byte; 1 << 20];
    for offset in (0..region.size_bytes()).step_by(1 << 20) {
        region.copy_in(offset, &chunk).expect("in bounds");
    }
}

fn all_data(region: &Region) -> bool {
    (0..PAGES).all(|page| !region.is_zero(page))
}

fn copy_pages(region: &Region, staging: &mut [u8]) {
    for page in 0..PAGES {
        region.copy_out(page * PAGE_SIZE, staging).expect("in bounds");
    }
}

fn send(from: &Region, to: &Region) {
    let (mut left, right) = UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut staging = vec![0; 256 << 10];
            for offset in (0..from.size_bytes()).step_by(staging.len()) {
                from.copy_data_out(offset, &mut staging).expect("in bounds");
                left.write_all(&staging).expect("sends");
            }
        });
        for run in to.all_pages().chunks(256) {
            to.receive(right.as_fd(), run).expect("receives");
        }
    });
}

fn tracking(bench: &Bench) {
    let region = bench.region("tracked", PAGES);
    let regions = [region];
    let mut writer = Writer::start(bench, "tracker", &[regions[0].path()], Start::default());
    writer.run("write", 0, 0, PAGES);
    let attach = || DirtyTracker::attach(&writer.socket, writer.pid(), &regions).expect("attaches");
    print(
        "attach",
        median_ms(|| {
            let start = Instant::now();
            let tracker = attach();
            let ms = start.elapsed().as_secs_f64() * 1e3;
            drop(tracker);
            ms
        }),
    );
    let mut tracker = attach();
    print("start (protect all)", median_ms(|| timed(|| tracker.start().expect("starts"))));
    print("count_dirty, nothing dirty", median_ms(|| timed(|| tracker.count_dirty())));
    let cases = [
        ("take_dirty, nothing dirty", 0, 1),
        ("take_dirty, every 256th page dirty", PAGES, 256),
        ("take_dirty, every other page dirty", PAGES, 2),
        ("take_dirty, 64 MiB in one piece dirty", 16384, 1),
        ("take_dirty, all dirty", PAGES, 1),
    ];
    for (name, count, step) in cases {
        let take = || {
            writer.scatter(0, 0, count, step);
            let mut out = Vec::new();
            let all = PageRange::new(0, PAGES);
            let ms = timed(|| tracker.take_dirty(0, all, u64::MAX, &mut out).expect("takes"));
            assert_eq!(godwit_ram::pages::page_count(&out), count / step as u64);
            ms
        };
        print(name, median_ms(take));
    }
    let dropping = timed(|| drop(tracker));
    print("drop (unprotect all)", dropping);
}
