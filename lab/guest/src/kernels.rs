//! Three small computations whose speed depends on the CPU's features: vectors, AES, integers. They
//! measure the cost of a CPU baseline.
//!
//! Each comes from a library that queries CPUID and uses the widest instructions available, as
//! programs in guests do:
//! - vector: BLAKE3 over 256 KiB, which the `blake3` crate computes with AVX-512, AVX2, SSE4.1 or
//!   SSE2, many lanes at once;
//! - crypto: AES-256-GCM over 16 KiB, which `ring` computes with VAES or AES-NI and carry-less
//!   multiplication, or without either;
//! - integer: sorting 65,536 numbers, for which no extension is of much use: the yardstick for the
//!   other two.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use serde::{Deserialize, Serialize};

use crate::pattern::mix;

/// Bytes that one operation hashes.
pub const VECTOR_BYTES: usize = 256 << 10;
/// Bytes that one operation encrypts: the longest record of TLS.
pub const CRYPTO_BYTES: usize = 16 << 10;
/// Numbers that one operation sorts.
pub const INTEGER_NUMBERS: usize = 1 << 16;
/// Longest run of each kernel that may be requested, in milliseconds.
pub const MOST_MILLIS: u64 = 20_000;

/// Operations per second of each kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelRates {
    /// Rate of hashing [`VECTOR_BYTES`].
    pub vector_per_s: f64,
    /// Rate of encrypting [`CRYPTO_BYTES`].
    pub crypto_per_s: f64,
    /// Rate of sorting [`INTEGER_NUMBERS`].
    pub integer_per_s: f64,
}

/// Runs the kernels one after the other, each for about that long, on one vCPU.
///
/// # Errors
/// The library refuses to encrypt, which is not expected.
pub fn measure(each: Duration) -> anyhow::Result<KernelRates> {
    let mut hashed = numbers(VECTOR_BYTES / 8).flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
    let vector_per_s = rate(each, || {
        let digest = blake3::hash(black_box(&hashed));
        // The next input depends on this result, so no part can be optimised away.
        hashed[0] = digest.as_bytes()[0];
        Ok(())
    })?;
    let crypto_per_s = crypto(each)?;
    let unsorted: Vec<u64> = numbers(INTEGER_NUMBERS).collect();
    let mut sorted = unsorted.clone();
    let integer_per_s = rate(each, || {
        sorted.copy_from_slice(black_box(&unsorted));
        sorted.sort_unstable();
        black_box(&mut sorted);
        Ok(())
    })?;
    Ok(KernelRates { vector_per_s, crypto_per_s, integer_per_s })
}

fn crypto(each: Duration) -> anyhow::Result<f64> {
    let refused = |_| anyhow::anyhow!("the library refuses to encrypt");
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(refused)?);
    let mut record = vec![0; CRYPTO_BYTES];
    let mut count: u64 = 0;
    rate(each, || {
        count += 1;
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&count.to_le_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = key
            .seal_in_place_separate_tag(nonce, Aad::empty(), black_box(&mut record))
            .map_err(refused)?;
        black_box(tag.as_ref());
        Ok(())
    })
}

/// Returns how often per second `once` can run.
fn rate(each: Duration, mut once: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    // One run warms caches and the translations of an emulated CPU.
    once()?;
    let begun = Instant::now();
    let mut done: u32 = 0;
    while begun.elapsed() < each {
        once()?;
        done = done.saturating_add(1);
    }
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

/// Returns numbers in no order.
fn numbers(count: usize) -> impl Iterator<Item = u64> {
    (0_u64..).map(mix).take(count)
}

/// Returns which extensions used by these kernels the CPU has, from the flags in /proc/cpuinfo.
#[must_use]
pub fn extensions(cpuinfo: &str) -> Vec<String> {
    const USED: [&str; 8] =
        ["sse2", "sse4_1", "avx", "avx2", "avx512f", "aes", "pclmulqdq", "vaes"];
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let flags: Vec<&str> = flags.split_whitespace().collect();
    USED.iter().filter(|flag| flags.contains(*flag)).map(|&flag| flag.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_them_is_done() {
        let rates = measure(Duration::from_millis(1)).unwrap();
        assert!(
            rates.vector_per_s > 0.0 && rates.crypto_per_s > 0.0 && rates.integer_per_s > 0.0,
            "{rates:?}"
        );
    }

    #[test]
    fn the_flags_of_the_first_processor_count() {
        let cpuinfo = "processor\t: 0\nflags\t\t: fpu sse2 aes avx2x\nbugs\t\t:\n\nprocessor\t: \
            1\nflags\t\t: avx2\n";
        assert_eq!(extensions(cpuinfo), ["sse2", "aes"]);
        assert_eq!(extensions(""), Vec::<String>::new());
    }
}
