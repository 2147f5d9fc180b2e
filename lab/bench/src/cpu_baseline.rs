//! Cost of a CPU baseline for a guest: the same computations with the baseline, and with all
//! features of the host.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use godwit_api::HostCpuInfo;
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{Baseline, ByteSize, DEFAULT_CPU_MODEL, HostCpu, VmSpec, common_baseline};
use serde::Serialize;

use crate::figures::{Spread, cell, dash};
use crate::machine::Machine;
use crate::results::{self, as_text};

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Baseline to compare with the host's best CPU: a model, or x86-64-v1 to x86-64-v4
    #[arg(long, value_name = "MODEL", default_value = DEFAULT_CPU_MODEL)]
    baseline: String,
    /// Guests booted with each CPU
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Duration of each of the three computations in each guest
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3,
        value_parser = clap::value_parser!(u64).range(1..=20),
    )]
    seconds: u64,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "320MiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

/// Results of one guest.
#[derive(Debug, Clone, Serialize)]
struct Run {
    /// Extensions used by the computations that the guest found in its CPU.
    extensions: Vec<String>,
    vector_per_s: f64,
    crypto_per_s: f64,
    integer_per_s: f64,
}

/// Results of all guests with one CPU.
#[derive(Debug, Serialize)]
struct Part {
    what: &'static str,
    cpu_model: String,
    features: usize,
    runs: Vec<Run>,
    vector_per_s: Option<Spread>,
    crypto_per_s: Option<Spread>,
    integer_per_s: Option<Spread>,
}

impl Part {
    fn new(what: &'static str, baseline: Baseline) -> Part {
        Part {
            what,
            cpu_model: baseline.cpu_model,
            features: baseline.features.len(),
            runs: Vec::new(),
            vector_per_s: None,
            crypto_per_s: None,
            integer_per_s: None,
        }
    }

    fn sum_up(&mut self) {
        let spread = |of: fn(&Run) -> f64| Spread::of(self.runs.iter().map(of));
        let (vector, crypto) = (spread(|run| run.vector_per_s), spread(|run| run.crypto_per_s));
        let integer = spread(|run| run.integer_per_s);
        (self.vector_per_s, self.crypto_per_s, self.integer_per_s) = (vector, crypto, integer);
    }
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let trial = Trial::begin_with("bench-cpu-baseline", LabOptions::default())?
        .context("cannot start a lab here")?;
    let info = host_cpu(&trial)?;
    let cpu = info.to_host_cpu();
    println!(
        "settings  {} guests with each CPU in turns, {} s per computation; guests by {} on {}\n",
        settings.runs, settings.seconds, info.accel, info.name
    );
    let mut parts = parts(&settings.baseline, &cpu)?;
    for _ in 0..settings.runs {
        // In turns, so that other load on the machine affects both alike.
        for part in &mut parts {
            part.runs.push(measure(settings, &trial, &part.cpu_model)?);
        }
    }
    trial.finish()?;
    parts.iter_mut().for_each(Part::sum_up);
    print(&parts);
    results::write(
        &settings.out,
        "cpu-baseline",
        &machine,
        settings,
        &serde_json::json!({ "host": info, "parts": parts }),
    )?;
    Ok(true)
}

/// Returns the host's CPU, once its agent has determined it.
fn host_cpu(trial: &Trial) -> Result<HostCpuInfo> {
    let agent = trial.agent("a");
    until("the host knows what CPU its guests can have", LIMIT, || Ok(trial.ask(agent.host())?.cpu))
}

fn parts(baseline: &str, cpu: &HostCpu) -> Result<[Part; 2]> {
    let hosts = [("a", cpu)];
    let best = common_baseline(&hosts)?.baseline;
    let baseline = Baseline::named(baseline, &hosts).with_context(|| {
        format!(
            "{baseline} is neither a level nor the best model of its generation on this host; \
            remedy: see `godwit host show`"
        )
    })?;
    let lacking = cpu.lacks_of(&baseline);
    if !lacking.is_empty() {
        let lacking: Vec<String> = lacking.into_iter().collect();
        bail!("this host lacks features of {}: {}", baseline.cpu_model, lacking.join(", "));
    }
    Ok([Part::new("baseline", baseline), Part::new("host's best", best)])
}

/// Boots a guest with that CPU, has it compute, and ends it.
fn measure(settings: &Settings, trial: &Trial, cpu_model: &str) -> Result<Run> {
    let plan = GuestPlan {
        memory: vec![settings.memory],
        fill: ByteSize::from_mib(16),
        ..GuestPlan::new("bench")
    };
    let spec = VmSpec { cpu_model: Some(cpu_model.to_owned()), ..plan.spec(trial.image()) };
    let guest = trial.guest_of("a", &plan, spec)?;
    let answer = guest.kernels(Duration::from_secs(settings.seconds))?;
    let rates = answer.kernels.context("the guest reports no figures")?;
    trial.delete("a", &plan.name)?;
    Ok(Run {
        extensions: answer.extensions,
        vector_per_s: rates.vector_per_s,
        crypto_per_s: rates.crypto_per_s,
        integer_per_s: rates.integer_per_s,
    })
}

fn print(parts: &[Part; 2]) {
    println!(
        "{:12} {:>4} {:>28} {:>28} {:>28}",
        "cpu", "n", "vector, op/s", "crypto, op/s", "integer, op/s"
    );
    for part in parts {
        println!(
            "{:12} {:4} {:>28} {:>28} {:>28}",
            part.what,
            part.runs.len(),
            cell(part.vector_per_s, 0),
            cell(part.crypto_per_s, 0),
            cell(part.integer_per_s, 0)
        );
    }
    let [baseline, best] = parts;
    let share = |of: fn(&Part) -> Option<Spread>| match (of(baseline), of(best)) {
        (Some(baseline), Some(best)) if best.median > 0.0 => {
            format!("{:.2}", baseline.median / best.median)
        }
        _ => dash(),
    };
    println!(
        "{:12} {:4} {:>28} {:>28} {:>28}\n",
        "ratio",
        "",
        share(|part| part.vector_per_s),
        share(|part| part.crypto_per_s),
        share(|part| part.integer_per_s)
    );
    println!(
        "operations: 256 KiB hashed by BLAKE3, 16 KiB encrypted by AES-256-GCM, 65,536 numbers \
         sorted"
    );
    for part in parts {
        let found = part.runs.first().map(|run| run.extensions.join(" ")).unwrap_or_default();
        println!(
            "{}: -cpu {}\n  {} features, used here: {found}",
            part.what, part.cpu_model, part.features
        );
    }
}
