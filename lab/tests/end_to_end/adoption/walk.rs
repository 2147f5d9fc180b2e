//! The walk-through of docs/adopt.md as a new user follows it: three guests of libvirt become
//! Godwit's, none stops, and all move to a second host. It prints how long each step takes. `make
//! adoption` runs it.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use godwit_lab::image;
use godwit_lab::trial::{Guest, GuestPlan, Trial};
use godwit_qemu::ByteSize;

use super::libvirt::{self, Libvirt, PLAIN, Shape};
use crate::drives::expect_blocks;

const DOCS: &str = include_str!("../../../../docs/adopt.md");
/// Guests of the walk-through, in the order of their adoption.
const GUESTS: [(&str, Shape); 3] = [
    ("web", PLAIN),
    ("db", Shape { disks: &[("virtio", "qcow2"), ("virtio", "raw")], ..PLAIN }),
    ("mail", Shape { machine: "pc", video: Some("vga"), ..PLAIN }),
];

#[test]
fn three_guests_of_libvirt_come_by_the_documented_steps() -> Result<()> {
    let Some((trial, libvirt)) = libvirt::begin("adoption-walk")? else { return Ok(()) };
    let mut guests = boot(&trial, &libvirt)?;
    let walk = Walk { trial: &trial, begun: Instant::now() };

    let listed = walk.follow("godwit vm list --all")?;
    for (name, _) in &GUESTS {
        let row = listed.lines().find(|line| line.split_whitespace().next() == Some(*name));
        ensure!(row.is_some_and(|row| row.contains("possible")), "{name} in {listed}");
    }
    for guest in &guests {
        let checked = walk.follow(&of_guest("godwit vm adopt --libvirt web --dry-run", guest))?;
        ensure!(checked.contains("nothing prevents it"), "{checked}");
    }
    for guest in &guests {
        let adopt = of_guest("godwit vm adopt --libvirt web", guest);
        let adopted = walk.watched(guest, || walk.follow(&adopt))?;
        ensure!(adopted.contains("was adopted"), "{adopted}");
    }
    for guest in &guests {
        walk.follow(&of_guest("godwit vm show web", guest))?;
        trial.expect_whole(guest)?;
    }
    for guest in &mut guests {
        let migrate = of_guest("godwit migrate web --to b", guest);
        walk.watched(guest, || walk.follow(&migrate))?;
        "b".clone_into(&mut guest.host);
        trial.expect_whole(guest)?;
    }
    eprintln!("  all steps: {:.1} s", walk.begun.elapsed().as_secs_f64());
    for ((name, shape), guest) in GUESTS.iter().zip(&guests) {
        ensure!(libvirt.virsh(&["domstate", name])?.contains("shut off"), "libvirt runs {name}");
        ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
        trial.delete("b", name)?;
        for disk in 0..shape.disks.len() {
            expect_blocks(&libvirt.image(name, disk))?;
        }
    }
    drop(libvirt);
    trial.finish()
}

fn boot(trial: &Trial, libvirt: &Libvirt) -> Result<Vec<Guest>> {
    let drives = image::build_with_drives(&image::default_dir())?;
    let mut guests = Vec::new();
    for (number, (name, shape)) in (61..).zip(&GUESTS) {
        let plan = GuestPlan {
            number,
            memory: vec![ByteSize::from_mib(224)],
            workload: "dirty:rate=1000,ws=16M,order=random,zero=10,compressible=40".to_owned(),
            image: Some(drives.clone()),
            words: "godwit.drives=on".to_owned(),
            ..GuestPlan::new(name)
        };
        guests.push(libvirt.boot(trial, &plan, shape)?);
    }
    Ok(guests)
}

/// Returns a command of the walk-through for another of its guests.
fn of_guest(command: &str, guest: &Guest) -> String {
    command.replace("web", &guest.name)
}

struct Walk<'a> {
    trial: &'a Trial,
    begun: Instant,
}

impl Walk<'_> {
    /// Runs a command that the walk-through has, for one of its guests, on host a. Returns its
    /// output.
    fn follow(&self, command: &str) -> Result<String> {
        let documented = GUESTS.iter().any(|(name, _)| {
            let of_web = command.replace(&format!(" {name}"), " web");
            DOCS.contains(&of_web)
        });
        ensure!(documented, "docs/adopt.md has no `{command}`");
        let begun = Instant::now();
        let words = command.strip_prefix("godwit ").context("no command of godwit")?;
        let mut words: Vec<&str> = words.split(' ').collect();
        words.extend(["--host", "a"]);
        if words[0] == "migrate" {
            // The VM is found at its host.
            words.truncate(words.len() - 2);
        }
        let done = self.trial.godwit(&words)?;
        ensure!(done.code == Some(0), "{command}: {}{}", done.stdout, done.stderr);
        eprintln!("  {command}: {:.1} s", begun.elapsed().as_secs_f64());
        Ok(done.stdout)
    }

    /// Takes a step while a client sends packets to a guest, and prints its longest gap.
    fn watched(&self, guest: &Guest, step: impl FnOnce() -> Result<String>) -> Result<String> {
        let since = guest.watch()?;
        let done = step()?;
        let gaps = guest.gaps(since, guest.wait_answer()?)?;
        guest.unwatch()?;
        let longest_ms = gaps.longest_gap_ns.unwrap_or_default() as f64 / 1e6;
        eprintln!("    longest gap of a client of {}: {longest_ms:.1} ms", guest.name);
        Ok(done)
    }
}
