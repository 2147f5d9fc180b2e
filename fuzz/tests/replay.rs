//! Replay of the committed corpus, of seeded mutations of it and of the worst inputs of peers, on
//! any toolchain: nothing panics, and nothing allocates more than docs/fuzzing.md allows.
//! `FUZZ_MUTATIONS` sets the mutations per target (2000).

use std::alloc::System;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use cap::Cap;
use godwit_fuzz::{TARGETS, Target, target};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// The measurement covers the whole process, so tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

const DOCUMENT: &str = include_str!("../../docs/fuzzing.md");

/// Runs an input and fails if it exceeds its target's limit.
fn run(target: Target, input: &[u8]) {
    let before = MEMORY.allocated();
    MEMORY.set_limit(before + (target.most_mib << 20)).expect("more than there is");
    (target.run)(input);
    MEMORY.set_limit(usize::MAX).expect("no limit");
}

fn corpus(target: Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("a corpus").map(|file| file.expect("a file").path()).collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a file")).collect()
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).expect("small")
    }
}

/// One to four changes: bytes, bits, cuts, repeats, and parts of another input.
fn mutated(random: &mut Random, corpus: &[Vec<u8>], longest: usize) -> Vec<u8> {
    let mut input = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(input.len());
        match random.below(6) {
            _ if input.is_empty() => input.push(random.next() as u8),
            0 => input[at] = random.next() as u8,
            1 => input[at] ^= 1 << random.below(8),
            2 => input.truncate(at),
            3 => input[at] = [0, 1, 0x7f, 0x80, 0xff, b'{', b'['][random.below(7)],
            4 => {
                let part = input[at..].iter().take(random.below(64)).copied().collect::<Vec<_>>();
                input.splice(at..at, part);
            }
            _ => {
                let other = &corpus[random.below(corpus.len())];
                let from = random.below(other.len());
                input.splice(at.., other[from..].iter().copied());
            }
        }
    }
    input.truncate(longest);
    input
}

#[test]
fn the_corpus_and_mutations_of_it_do_no_harm() {
    let _alone = ALONE.lock().expect("no other test failed");
    let mutations =
        std::env::var("FUZZ_MUTATIONS").map_or(2000, |text| text.parse().expect("a number"));
    for target in TARGETS {
        let corpus = corpus(target);
        assert!(!corpus.is_empty(), "{}", target.name);
        // Excludes what is initialised once.
        (target.run)(&corpus[0]);
        corpus.iter().for_each(|input| run(target, input));
        let mut random = Random(1);
        for _ in 0..mutations {
            run(target, &mutated(&mut random, &corpus, target.longest_input));
        }
        println!("{}: {} inputs and {mutations} mutations", target.name, corpus.len());
    }
}

#[test]
fn the_corpus_is_small() {
    for target in TARGETS {
        let corpus = corpus(target);
        let bytes: usize = corpus.iter().map(Vec::len).sum();
        assert!(
            corpus.len() <= 200 && bytes <= 300 << 10,
            "{}: {} files, {bytes} bytes",
            target.name,
            corpus.len()
        );
    }
}

/// Returns the longest inputs of the shapes that grow most when parsed.
fn worst() -> Vec<(&'static str, Vec<u8>)> {
    let filled = |first: &[u8], unit: &[u8], last: &[u8], most: usize| {
        let mut bytes = first.to_vec();
        while bytes.len() + unit.len() + last.len() <= most {
            bytes.extend(unit);
        }
        bytes.extend(last);
        bytes
    };
    let line = (1 << 20) - 1;
    let body = 1 << 20;
    vec![
        ("runs", filled(&[1], &[0, 0, 1], &[], 65_536)),
        ("qmp", filled(b"{\"return\":[", b"{\"\":0},", b"0]}\n", line)),
        ("qmp", filled(b"{\"return\":[", b"[0],", b"0]}\n", line)),
        ("qmp", filled(b"{\"event\":\"A\",\"data\":{\"a\":[", b"\"\",", b"0]}}\n", line)),
        ("qmp", vec![b' '; 4 << 20]),
        ("guest", filled(b"{\"return\":[", b"{\"\":0},", b"0]}", 1 << 18)),
        ("guest", filled(b"{\"return\":[", b"{\"name\":\"e\"},", b"0]}", 1 << 18)),
        (
            "api",
            filled(b"\0{\"spec\":{\"name\":\"a\",\"extra_devices\":[", b"\"\",", b"\"\"]}}", body),
        ),
        (
            "api",
            filled(
                b"\0{\"spec\":{\"name\":\"a\",\"nics\":[",
                b"{\"network\":\"\"},",
                b"{\"network\":\"\"}]}}",
                body,
            ),
        ),
        (
            "api",
            filled(
                b"\0{\"spec\":{\"name\":\"a\",\"memory\":[",
                b"{\"size\":1},",
                b"{\"size\":1}]}}",
                body,
            ),
        ),
        (
            "api",
            filled(
                b"\x06{\"spec\":{\"name\":\"a\",\"extra_devices\":[",
                b"\"\",",
                b"\"\"]}}",
                body,
            ),
        ),
        (
            "api",
            filled(
                b"\x06{\"spec\":{\"name\":\"a\",\"disks\":[",
                b"{\"path\":\"\",\"format\":\"raw\"},",
                b"{\"path\":\"\",\"format\":\"raw\"}]}}",
                body,
            ),
        ),
        (
            "api",
            filled(
                b"\x06{\"spec\":{\"name\":\"a\",\"memory\":[",
                b"{\"size\":1},",
                b"{\"size\":1}]}}",
                body,
            ),
        ),
        (
            "images",
            filled(
                b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\xff\x00\0\0\x03\xff",
                b"\0\0\0\x01\0\0\0\0",
                b"",
                65_536,
            ),
        ),
        (
            "api",
            filled(
                b"\x0a{\"id\":\"\",\"addresses\":[",
                b"\"1.1.1.1:1\",",
                b"\"1.1.1.1:1\"]}",
                body,
            ),
        ),
        (
            "api",
            filled(
                b"\x14{\"host\":\"none\",\"migration\":\"none\",\"lanes\":{",
                b"\"::1\":\"none\",",
                b"\"::1\":\"none\"}}",
                body,
            ),
        ),
        ("api", filled(b"\x17", b"data:\n", b"\n", body)),
        ("reports", filled(b"", b"event:vm-gone\ndata:\"a\"\n\n", b"", body)),
        (
            "reports",
            filled(b"event:host\ndata:{\"peers\":{", b"\"a\":\"\",", b"\"a\":\"\"}}\n\n", body),
        ),
        (
            "reports",
            filled(b"event:vm\ndata:{\"addresses\":[", b"\"::1\",", b"\"::1\"]}\n\n", body),
        ),
        (
            "answers",
            filled(b"{\"guest\":{\"samples\":[", b"{\"ms\":1,\"pages\":1},", b"{}]}}", body),
        ),
        ("outcomes", filled(b"\0{\"report\":{\"rounds\":[", b"{\"round\":1},", b"{}]}}", body)),
        ("outcomes", filled(b"\x03{\"addresses\":[", b"\"::1\",", b"\"::1\"]}", body)),
        ("outcomes", filled(b"\x05{\"peers\":{", b"\"a\":\"\",", b"\"a\":\"\"}}", body)),
        ("joins", filled(b"{\"addresses\":[", b"\"::1\",", b"\"::1\"]}", 65_536)),
        ("loads", filled(b"", b"\xff", b"", 300_000)),
        ("settings", filled(b"\x01", b"[[nics]]\n", b"", 65_536)),
        ("settings", filled(b"\0[networks]\n", b"[a.a]\n", b"", 65_536)),
        ("settings", filled(b"\0a = [", b"{},", b"]", 65_536)),
    ]
}

#[test]
fn the_worst_inputs_of_peers_stay_within_the_limits() {
    let _alone = ALONE.lock().expect("no other test failed");
    for (name, input) in worst() {
        run(target(name), &input);
    }
    // Frames of every kind with the maximum length, and one byte longer.
    for kind in godwit_wire::Kind::ALL {
        let (_, most) = kind.bounds();
        for length in [most, most + 1] {
            let length = usize::try_from(length).expect("small").min(300_000);
            for byte in [0, 1, 0xff] {
                let bytes = u32::try_from(length).expect("small").to_le_bytes();
                let frame = [&[*kind as u8, bytes[0], bytes[1], bytes[2]], &vec![byte; length][..]]
                    .concat();
                run(target("frames"), &frame);
            }
        }
    }
}

#[test]
fn the_table_of_the_document_lists_the_targets() {
    let rows: Vec<(&str, &str)> = DOCUMENT
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let name = cells.first()?.strip_prefix('`')?.strip_suffix('`')?;
            Some((name, *cells.get(3)?))
        })
        .collect();
    let targets: Vec<_> =
        TARGETS.iter().map(|target| (target.name, target.most_mib.to_string())).collect();
    let documented: Vec<_> = rows.iter().map(|(name, most)| (*name, (*most).to_owned())).collect();
    assert_eq!(documented, targets);
}
