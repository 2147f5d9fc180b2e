//! `godwit-sim`: simulates lives of a guest by seed, until something is wrong.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use godwit_sim::{Figures, Plan, Rules, simulate};
use parking_lot::Mutex;

/// Runs guests through random migrations and faults, with real state machines in a simulated world.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  godwit-sim --seeds 10000
  godwit-sim --first 4711 --seeds 1     (replays one)
  godwit-sim --hours 2                  (until the time is over)")]
struct Arguments {
    /// The first seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Number of seeds
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// Duration in hours, whatever the number of seeds
    #[arg(long)]
    hours: Option<f64>,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let begun = Instant::now();
    let end = arguments.hours.map(|hours| begun + Duration::from_secs_f64(hours * 3600.0));
    let (next, failed) = (AtomicU64::new(arguments.first), AtomicBool::new(false));
    let all = Mutex::new((Figures::default(), 0_u64, None::<(u64, String)>));
    let last = arguments.first.saturating_add(arguments.seeds);
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_over = end.map_or(seed >= last, |end| Instant::now() >= end);
            if is_over {
                return;
            }
            let came = simulate(Plan { seed, rules: Rules::default() });
            let mut all = all.lock();
            match came {
                Ok(figures) => {
                    all.1 += 1;
                    add(&mut all.0, figures);
                }
                Err(why) => {
                    failed.store(true, Ordering::Relaxed);
                    all.2.get_or_insert((seed, why));
                }
            }
        }
    };
    std::thread::scope(|scope| (0..arguments.threads.max(1)).for_each(|_| drop(scope.spawn(work))));
    let (figures, seeds, failure) = all.into_inner();
    println!(
        "{seeds} seeds from {} in {:.1} s: {} migrations begun, {} completed, {} cuts resumed, {} \
         faults, {} doubts settled, {} guests lost to a fault, {} VMs created again, {} steps",
        arguments.first,
        begun.elapsed().as_secs_f64(),
        figures.begun,
        figures.completed,
        figures.resumed,
        figures.faults,
        figures.settled,
        figures.dead,
        figures.created,
        figures.steps
    );
    match failure {
        None => {
            println!("0 violations");
            ExitCode::SUCCESS
        }
        Some((seed, why)) => {
            println!("seed {seed}: {why}\nreplay it: godwit-sim --first {seed} --seeds 1");
            ExitCode::FAILURE
        }
    }
}

fn add(all: &mut Figures, one: Figures) {
    all.steps += one.steps;
    all.faults += one.faults;
    all.begun += one.begun;
    all.completed += one.completed;
    all.settled += one.settled;
    all.resumed += one.resumed;
    all.dead += one.dead;
    all.created += one.created;
}
