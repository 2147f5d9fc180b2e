//! Workloads of the guest, as text: `idle`, `compute`, `dirty:rate=5000,ws=256M,order=random,…`.
//!
//! Every part of `dirty` has a default. `Display` writes a text that parses back to the same
//! workload.

use std::{fmt, str::FromStr};

use crate::pattern::{BODY_WORDS, Kind, below};

/// Use of the guest's vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Workload {
    /// Nothing.
    #[default]
    Idle,
    /// Integer arithmetic that touches almost no memory; counts iterations.
    Compute,
    /// Writes pages.
    Dirty(Dirty),
}

/// How pages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dirty {
    /// Pages per second; `None`: as many as the vCPU manages.
    pub rate_pages_per_s: Option<u64>,
    /// Working set in bytes, from the start of the memory; `None`: all of it.
    pub working_set_bytes: Option<u64>,
    /// Order of the pages.
    pub order: Order,
    /// Content that is written.
    pub mix: Mix,
    /// Extent of each write.
    pub touch: Touch,
    /// Whether another thread computes meanwhile.
    pub computes: bool,
}

impl Default for Dirty {
    fn default() -> Dirty {
        Dirty {
            rate_pages_per_s: Some(5000),
            working_set_bytes: None,
            order: Order::Random,
            mix: Mix::default(),
            touch: Touch::Whole,
            computes: false,
        }
    }
}

/// Order in which pages of the working set are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Random,
    /// Sequentially, over and over.
    Sequential,
}

/// Shares of page kinds in percent; the rest is random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    zero_percent: u8,
    compressible_percent: u8,
}

impl Default for Mix {
    fn default() -> Mix {
        Mix { zero_percent: 10, compressible_percent: 40 }
    }
}

impl Mix {
    /// Creates shares in percent. Their sum may be at most 100.
    pub fn new(zero_percent: u8, compressible_percent: u8) -> Result<Mix, ParseError> {
        if u16::from(zero_percent) + u16::from(compressible_percent) > 100 {
            let found = format!("zero={zero_percent},compressible={compressible_percent}");
            return Err(ParseError::new(found, "shares whose sum is at most 100"));
        }
        Ok(Mix { zero_percent, compressible_percent })
    }

    /// Returns the kind for a number drawn uniformly from all of `u64`.
    pub fn pick(self, draw: u64) -> Kind {
        let percent = below(100, draw);
        if percent < u64::from(self.zero_percent) {
            Kind::Zero
        } else if percent < u64::from(self.zero_percent) + u64::from(self.compressible_percent) {
            Kind::Compressible
        } else {
            Kind::Random
        }
    }
}

impl FromStr for Mix {
    type Err = ParseError;

    /// Parses `zero=10,compressible=40`; an omitted share is 0.
    fn from_str(text: &str) -> Result<Mix, ParseError> {
        let (mut zero, mut compressible) = (0, 0);
        for part in text.split(',').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("zero", value)) => zero = parse_percent(value)?,
                Some(("compressible", value)) => compressible = parse_percent(value)?,
                _ => return Err(ParseError::new(part, "zero=PERCENT or compressible=PERCENT")),
            }
        }
        Mix::new(zero, compressible)
    }
}

/// Extent of one write to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// The whole page.
    Whole,
    /// The header and this many words of the body.
    Words(u16),
}

/// Error for a text that could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    found: String,
    wanted: &'static str,
}

impl ParseError {
    pub(crate) fn new(found: impl Into<String>, wanted: &'static str) -> ParseError {
        ParseError { found: found.into(), wanted }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot read {:?}: give {}", self.found, self.wanted)
    }
}

impl std::error::Error for ParseError {}

impl FromStr for Workload {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Workload, ParseError> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        match name {
            "idle" if settings.is_empty() => Ok(Workload::Idle),
            "compute" if settings.is_empty() => Ok(Workload::Compute),
            "dirty" => settings.parse().map(Workload::Dirty),
            _ => Err(ParseError::new(text, "idle, compute or dirty[:SETTING=VALUE,…]")),
        }
    }
}

impl FromStr for Dirty {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Dirty, ParseError> {
        const WANTED: &str =
            "rate=, ws=, order=, zero=, compressible=, touch= or compute= with a value";
        let mut dirty = Dirty::default();
        let (mut zero, mut compressible) = (dirty.mix.zero_percent, dirty.mix.compressible_percent);
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| ParseError::new(part, WANTED))?;
            match key {
                "rate" => dirty.rate_pages_per_s = parse_rate(value)?,
                "ws" => dirty.working_set_bytes = Some(parse_bytes(value)?),
                "order" => dirty.order = parse_order(value)?,
                "zero" => zero = parse_percent(value)?,
                "compressible" => compressible = parse_percent(value)?,
                "touch" => dirty.touch = parse_touch(value)?,
                "compute" => dirty.computes = parse_yes(value)?,
                _ => return Err(ParseError::new(part, WANTED)),
            }
        }
        dirty.mix = Mix::new(zero, compressible)?;
        Ok(dirty)
    }
}

fn parse_rate(text: &str) -> Result<Option<u64>, ParseError> {
    match text {
        "max" | "0" => Ok(None),
        _ => text.parse().map(Some).map_err(|_| ParseError::new(text, "pages a second, or max")),
    }
}

fn parse_percent(text: &str) -> Result<u8, ParseError> {
    let read = text.parse::<u8>().ok().filter(|percent| *percent <= 100);
    read.ok_or_else(|| ParseError::new(text, "a percentage, 0 to 100"))
}

fn parse_yes(text: &str) -> Result<bool, ParseError> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(ParseError::new(text, "yes or no")),
    }
}

fn parse_order(text: &str) -> Result<Order, ParseError> {
    match text {
        "random" => Ok(Order::Random),
        "sequential" => Ok(Order::Sequential),
        _ => Err(ParseError::new(text, "random or sequential")),
    }
}

fn parse_touch(text: &str) -> Result<Touch, ParseError> {
    if matches!(text, "full" | "whole") {
        return Ok(Touch::Whole);
    }
    let words = text.strip_prefix("words:").and_then(|count| count.parse::<u16>().ok());
    words
        .filter(|words| (1..=BODY_WORDS).contains(&usize::from(*words)))
        .map(Touch::Words)
        .ok_or_else(|| ParseError::new(text, "full or words:N with N from 1 to 504"))
}

/// Parses bytes: a number with an optional unit of powers of 1024 (`K`, `M`, `G`, also as `MiB` or
/// `MB`).
pub fn parse_bytes(text: &str) -> Result<u64, ParseError> {
    const WANTED: &str = "a size such as 512M, 1GiB or 4096";
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return Err(ParseError::new(text, WANTED)),
    };
    let number: u64 = number.parse().map_err(|_| ParseError::new(text, WANTED))?;
    number.checked_mul(factor).ok_or_else(|| ParseError::new(text, WANTED))
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Workload::Idle => f.write_str("idle"),
            Workload::Compute => f.write_str("compute"),
            Workload::Dirty(dirty) => write!(f, "dirty:{dirty}"),
        }
    }
}

impl fmt::Display for Dirty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rate_pages_per_s {
            Some(rate) => write!(f, "rate={rate}")?,
            None => write!(f, "rate=max")?,
        }
        if let Some(bytes) = self.working_set_bytes {
            write!(f, ",ws={bytes}")?;
        }
        let order = if self.order == Order::Random { "random" } else { "sequential" };
        let Mix { zero_percent, compressible_percent } = self.mix;
        write!(f, ",order={order},zero={zero_percent},compressible={compressible_percent},touch=")?;
        match self.touch {
            Touch::Whole => f.write_str("full"),
            Touch::Words(words) => write!(f, "words:{words}"),
        }?;
        f.write_str(if self.computes { ",compute=yes" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dirty() -> impl Strategy<Value = Workload> {
        let mix = (0u8..=100).prop_flat_map(|zero| (Just(zero), 0..=100 - zero));
        let touch = prop_oneof![Just(Touch::Whole), (1u16..=504).prop_map(Touch::Words)];
        let order = prop_oneof![Just(Order::Random), Just(Order::Sequential)];
        let rate = proptest::option::of(1u64..);
        (rate, proptest::option::of(any::<u64>()), order, mix, touch, any::<bool>()).prop_map(
            |(
                rate_pages_per_s,
                working_set_bytes,
                order,
                (zero, compressible),
                touch,
                computes,
            )| {
                let mix = Mix { zero_percent: zero, compressible_percent: compressible };
                Workload::Dirty(Dirty {
                    rate_pages_per_s,
                    working_set_bytes,
                    order,
                    mix,
                    touch,
                    computes,
                })
            },
        )
    }

    proptest! {
        #[test]
        fn text_and_back(
            workload in prop_oneof![Just(Workload::Idle), Just(Workload::Compute), dirty()]
        ) {
            prop_assert_eq!(workload.to_string().parse::<Workload>(), Ok(workload));
        }

        #[test]
        fn any_text_is_read_or_refused_without_a_panic(text in ".{0,40}") {
            let _ = text.parse::<Workload>();
            let _ = format!("dirty:{text}").parse::<Workload>();
            let _ = parse_bytes(&text);
        }
    }

    #[test]
    fn the_forms_of_the_guide() {
        let text = concat!(
            "dirty:rate=5000,ws=256M,order=sequential,zero=10,compressible=40,",
            "touch=words:16,compute=yes",
        );
        let expected = Dirty {
            rate_pages_per_s: Some(5000),
            working_set_bytes: Some(256 << 20),
            order: Order::Sequential,
            mix: Mix { zero_percent: 10, compressible_percent: 40 },
            touch: Touch::Words(16),
            computes: true,
        };
        assert_eq!(text.parse(), Ok(Workload::Dirty(expected)));
        assert_eq!("dirty".parse(), Ok(Workload::Dirty(Dirty::default())));
        let unlimited: Dirty = "rate=max".parse().unwrap();
        assert_eq!(unlimited.rate_pages_per_s, None);
        // Shares that are valid only together are accepted in any order.
        let all_zero: Dirty = "zero=100,compressible=0".parse().unwrap();
        assert_eq!(all_zero.mix, Mix { zero_percent: 100, compressible_percent: 0 });
    }

    #[test]
    fn what_is_refused() {
        for text in [
            "",
            "run",
            "idle:x",
            "dirty:rate",
            "dirty:rate=-1",
            "dirty:zero=70,compressible=40",
            "dirty:zero=101",
            "dirty:touch=words:0",
            "dirty:touch=words:505",
            "dirty:ws=5T",
            "dirty:ws=99999999999G",
            "dirty:speed=4",
            "dirty:compute=1",
        ] {
            let refused = text.parse::<Workload>();
            assert!(refused.is_err(), "{text} gave {refused:?}");
        }
    }

    #[test]
    fn a_mix_has_its_shares() {
        let mix = Mix::new(10, 40).unwrap();
        let draws: Vec<Kind> = (0..1000u64).map(|i| mix.pick(i * (u64::MAX / 1000))).collect();
        let count = |kind| draws.iter().filter(|drawn| **drawn == kind).count();
        assert!((99..=101).contains(&count(Kind::Zero)));
        assert!((399..=401).contains(&count(Kind::Compressible)));
    }
}
