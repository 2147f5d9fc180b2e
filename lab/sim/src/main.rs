//! `godwit-sim`: simulates lives of a guest or of a cluster by seed, until something is wrong.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use godwit_sim::{Figures, Plan, Rules, ha, simulate};
use parking_lot::Mutex;

/// Runs guests through random migrations and faults, with real state machines in a simulated world.
#[derive(Debug, Parser)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  godwit-sim --seeds 10000
  godwit-sim --first 4711 --seeds 1     (replays one)
  godwit-sim --hours 2                  (until the time is over)
  godwit-sim ha --seeds 10000           (failures of hosts)"
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    seeds: Seeds,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs clusters through failures of hosts, networks and storage, with real leases
    Ha(Seeds),
}

#[derive(Debug, Args)]
struct Seeds {
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
    match arguments.command {
        None => arguments.seeds.run("godwit-sim", add, describe, |seed| {
            simulate(Plan { seed, rules: Rules::default() })
        }),
        Some(Command::Ha(seeds)) => {
            seeds.run("godwit-sim ha", add_ha, describe_ha, |seed| ha::simulate(seed, None))
        }
    }
}

impl Seeds {
    /// Runs the seeds in all threads, and prints what came of them.
    fn run<F: Default + Send>(
        &self,
        program: &str,
        add: fn(&mut F, F),
        describe: fn(&F) -> String,
        simulate: impl Fn(u64) -> Result<F, String> + Sync,
    ) -> ExitCode {
        let begun = Instant::now();
        let end = self.hours.map(|hours| begun + Duration::from_secs_f64(hours * 3600.0));
        let (next, failed) = (AtomicU64::new(self.first), AtomicBool::new(false));
        let all = Mutex::new((F::default(), 0_u64, None::<(u64, String)>));
        let last = self.first.saturating_add(self.seeds);
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                let is_over = end.map_or(seed >= last, |end| Instant::now() >= end);
                if is_over {
                    return;
                }
                let came = simulate(seed);
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
        std::thread::scope(|scope| (0..self.threads.max(1)).for_each(|_| drop(scope.spawn(work))));
        let (figures, seeds, failure) = all.into_inner();
        println!(
            "{seeds} seeds from {} in {:.1} s: {}",
            self.first,
            begun.elapsed().as_secs_f64(),
            describe(&figures)
        );
        match failure {
            None => {
                println!("0 violations");
                ExitCode::SUCCESS
            }
            Some((seed, why)) => {
                println!("seed {seed}: {why}\nreplay it: {program} --first {seed} --seeds 1");
                ExitCode::FAILURE
            }
        }
    }
}

fn describe(figures: &Figures) -> String {
    format!(
        "{} migrations begun, {} completed, {} cuts resumed, {} faults, {} doubts settled, {} \
         guests lost to a fault, {} VMs created again, {} steps",
        figures.begun,
        figures.completed,
        figures.resumed,
        figures.faults,
        figures.settled,
        figures.dead,
        figures.created,
        figures.steps
    )
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

fn describe_ha(figures: &ha::Figures) -> String {
    format!(
        "{} faults, {} leases run out, {} terms ended, {} restarts of guests, {} steps",
        figures.faults, figures.stopped, figures.ended, figures.restarts, figures.steps
    )
}

fn add_ha(all: &mut ha::Figures, one: ha::Figures) {
    all.steps += one.steps;
    all.faults += one.faults;
    all.stopped += one.stopped;
    all.ended += one.ended;
    all.restarts += one.restarts;
}
