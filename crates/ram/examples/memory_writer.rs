//! A process that maps RAM files as QEMU does and writes to them on command. The tests of dirty
//! tracking track it.
//!
//! Arguments: `shared:PATH` or `private:PATH`, each a mapping, numbered from 0. Each line on
//! standard input is a command:
//!
//! - `write MAPPING PAGE COUNT [STEP]`: writes every STEPth page of COUNT.
//! - `kernel MAPPING PAGE COUNT`: the kernel writes, with read(2).
//! - `read MAPPING PAGE COUNT`
//! - `discard MAPPING PAGE COUNT`: as a balloon does.
//! - `bytes MAPPING PAGE COUNT`: answers with the first byte of each page.
//! - `crowd MAPPING PAGE COUNT THREADS`: as `bytes`, by several threads that begin in different
//!   places. It answers `torn PAGE` if a thread saw a page whose bytes were not all equal.
//! - `environment`
//!
//! Each command is answered with a line when it is done.
#![allow(unsafe_code, reason = "maps memory and writes single bytes of it, as a hypervisor would")]

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, Write};

use godwit_ram::PAGE_SIZE;
use rustix::mm::{Advice, MapFlags, ProtFlags};

struct Mapping {
    base: *mut u8,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mappings =
        std::env::args().skip(1).map(|argument| map(&argument)).collect::<Result<Vec<_>, _>>()?;
    let zeros = File::open("/dev/zero")?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready")?;
    for line in std::io::stdin().lock().lines() {
        let answer = run(&mappings, &zeros, &line?)?;
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn map(argument: &str) -> Result<Mapping, Box<dyn Error>> {
    let (kind, path) = argument.split_once(':').ok_or("shared:PATH or private:PATH")?;
    let flags = match kind {
        "shared" => MapFlags::SHARED,
        _ => MapFlags::PRIVATE,
    };
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let len = usize::try_from(file.metadata()?.len())?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            flags,
            &file,
            0,
        )?
    };
    Ok(Mapping { base: base.cast() })
}

/// Returns the first byte of each page as all threads have seen it, or the deviation that one of
/// them saw.
fn crowd(mapping: &Mapping, first: u64, count: u64, threads: u64) -> String {
    let base = mapping.base.expose_provenance();
    let look = |page: u64| {
        let start = base + usize::try_from(page * PAGE_SIZE).map_err(|error| error.to_string())?;
        let at = |offset: usize| std::ptr::with_exposed_provenance::<u8>(start + offset);
        // SAFETY: as in `run`.
        let bytes = [0, 1777, 4095].map(|offset| unsafe { at(offset).read_volatile() });
        if bytes.iter().all(|byte| *byte == bytes[0]) {
            Ok(bytes[0])
        } else {
            Err(format!("torn {page}"))
        }
    };
    let walk = |thread: u64| {
        let mut seen = vec![0; usize::try_from(count).unwrap_or(0)];
        for step in 0..count {
            let offset = (step + thread * count / threads) % count;
            if let Some(byte) = usize::try_from(offset).ok().and_then(|offset| seen.get_mut(offset))
            {
                *byte = look(first + offset)?;
            }
        }
        Ok(seen.iter().map(u8::to_string).collect::<Vec<_>>().join(" "))
    };
    let answers: Vec<Result<String, String>> = std::thread::scope(|scope| {
        let walks: Vec<_> = (0..threads).map(|thread| scope.spawn(move || walk(thread))).collect();
        let ended = |walk: std::thread::ScopedJoinHandle<'_, _>| {
            walk.join().unwrap_or(Err("died".to_owned()))
        };
        walks.into_iter().map(ended).collect()
    });
    let differ = answers.windows(2).any(|pair| pair[0] != pair[1]);
    match answers.into_iter().next() {
        Some(Ok(seen)) if !differ => seen,
        Some(Err(torn)) => torn,
        _ => "they differ".to_owned(),
    }
}

fn run(mappings: &[Mapping], zeros: &File, line: &str) -> Result<String, Box<dyn Error>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [command, numbers @ ..] = words.as_slice() else {
        return Err("an empty line".into());
    };
    if *command == "environment" {
        let names: Vec<String> = std::env::vars()
            .map(|(name, _)| name)
            .filter(|name| name == "LD_PRELOAD" || name.starts_with("GODWIT_TRACKER_"))
            .collect();
        return Ok(format!("environment {}", names.join(" ")));
    }
    let numbers = numbers.iter().map(|word| word.parse::<u64>()).collect::<Result<Vec<_>, _>>()?;
    if let ("crowd", [mapping, first, count, threads]) = (*command, &numbers[..]) {
        let mapping = mappings.get(usize::try_from(*mapping)?).ok_or("no such mapping")?;
        return Ok(crowd(mapping, *first, *count, *threads));
    }
    let (mapping, first, count, step) = match numbers[..] {
        [mapping, first, count] => (mapping, first, count, 1),
        [mapping, first, count, step] => (mapping, first, count, step),
        _ => return Err("COMMAND MAPPING PAGE COUNT [STEP]".into()),
    };
    let mapping = mappings.get(usize::try_from(mapping)?).ok_or("no such mapping")?;
    if *command == "bytes" {
        let byte = |page: u64| {
            let offset = usize::try_from(page * PAGE_SIZE)?;
            // SAFETY: as below.
            Ok::<_, Box<dyn Error>>(
                unsafe { mapping.base.wrapping_add(offset).read_volatile() }.to_string(),
            )
        };
        return Ok((first..first + count).map(byte).collect::<Result<Vec<_>, _>>()?.join(" "));
    }
    for page in (first..first + count).step_by(usize::try_from(step)?) {
        let address = mapping.base.wrapping_add(usize::try_from(page * PAGE_SIZE)?);
        // SAFETY: the tests name pages of the mapping only, and no reference to its memory exists.
        unsafe {
            match *command {
                "write" => address.write_volatile(address.read_volatile().wrapping_add(1)),
                "read" => {
                    address.read_volatile();
                }
                "kernel" => {
                    rustix::io::read(zeros, std::slice::from_raw_parts_mut(address, 16))?;
                }
                "discard" => {
                    rustix::mm::madvise(
                        address.cast(),
                        usize::try_from(PAGE_SIZE)?,
                        Advice::LinuxRemove,
                    )?;
                }
                _ => return Err("no such command".into()),
            }
        }
    }
    Ok("done".to_owned())
}
