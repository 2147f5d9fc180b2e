//! The guest's options on the kernel command line: `godwit.ip=10.88.0.21/24 godwit.fill=512M …`.
//!
//! A guest that does not boot gives no explanation, so a bad option is reported and ignored, and
//! never fatal.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use crate::{
    pattern::mix,
    workload::{Dirty, Mix, ParseError, Workload, parse_bytes},
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `godwit.ip=ADDRESS/PREFIX`: IPv4 address of eth0.
    pub ip: Option<Cidr<Ipv4Addr>>,
    /// `godwit.ip6=ADDRESS/PREFIX`: IPv6 address of eth0.
    pub ip6: Option<Cidr<Ipv6Addr>>,
    /// `godwit.fill=SIZE`: bytes of memory that hold the pattern; `None` is half of the free
    /// memory.
    pub fill_bytes: Option<u64>,
    /// `godwit.mix=zero=P,compressible=P`: shares of kinds in the first fill; `None` uses the
    /// workload's.
    pub mix: Option<Mix>,
    /// `godwit.seed=NUMBER`: makes the content of two guests differ, or agree; `None` derives it
    /// from the addresses.
    pub seed: Option<u64>,
    /// `godwit.workload=SPEC`: workload after the memory is filled.
    pub workload: Workload,
    /// `godwit.root=DEVICE`: disk with a user space, which is booted; the guest's program is a
    /// service in it.
    pub root: Option<String>,
    /// `godwit.read=FOLDER`: once the user space has booted and before the guest is ready, the
    /// files below the folder are read until most of the memory is in use.
    pub read: Option<String>,
    /// `godwit.drives=on`: every disk is written and read again, and what is in a CD-ROM drive is
    /// shown on the console.
    pub drives: bool,
    /// `godwit.ledger=DEVICE`: the disk has a ledger of the guest's boots, which is written all the
    /// time.
    pub ledger: Option<String>,
    /// `godwit.plug=on`: vCPUs and memory that come are used, and what there is is shown on the
    /// console.
    pub plug: bool,
}

impl Options {
    /// Parses a kernel command line. The second part of the result lists what could not be parsed.
    pub fn parse(command_line: &str) -> (Options, Vec<ParseError>) {
        let mut options = Options::default();
        let words = command_line.split_ascii_whitespace();
        let problems = words
            .filter_map(|word| word.strip_prefix("godwit."))
            .filter_map(|word| options.set(word).err())
            .collect();
        (options, problems)
    }

    /// Returns the shares of page kinds in the first fill.
    pub fn fill_mix(&self) -> Mix {
        self.mix.unwrap_or(match self.workload {
            Workload::Dirty(Dirty { mix, .. }) => mix,
            Workload::Idle | Workload::Compute => Mix::default(),
        })
    }

    /// Returns the seed of the pattern.
    pub fn seed(&self) -> u64 {
        let v4 = self.ip.map_or(0, |cidr| u64::from(u32::from(cidr.address)));
        let groups = self.ip6.map_or([0; 8], |cidr| cidr.address.segments());
        self.seed.unwrap_or_else(|| {
            groups.iter().fold(mix(v4), |seed, group| mix(seed ^ u64::from(*group)))
        })
    }

    fn set(&mut self, word: &str) -> Result<(), ParseError> {
        let unknown = || {
            ParseError::new(
                word,
                "ip=, ip6=, fill=, mix=, seed=, workload=, root=, read=, drives=, ledger= or \
                 plug=",
            )
        };
        let (key, value) = word.split_once('=').ok_or_else(unknown)?;
        match key {
            "ip" => self.ip = Some(value.parse()?),
            "ip6" => self.ip6 = Some(value.parse()?),
            "fill" => self.fill_bytes = Some(parse_bytes(value)?),
            "mix" => self.mix = Some(value.parse()?),
            "seed" => {
                self.seed = Some(value.parse().map_err(|_| ParseError::new(value, "a number"))?);
            }
            "workload" => self.workload = value.parse()?,
            "root" => self.root = Some(absolute(value)?),
            "read" => self.read = Some(absolute(value)?),
            "drives" => self.drives = value == "on",
            "ledger" => self.ledger = Some(device(value)?),
            "plug" => self.plug = value == "on",
            _ => return Err(unknown()),
        }
        Ok(())
    }
}

fn device(name: &str) -> Result<String, ParseError> {
    if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()) {
        Ok(name.to_owned())
    } else {
        Err(ParseError::new(name, "the name of a disk"))
    }
}

fn absolute(path: &str) -> Result<String, ParseError> {
    if path.starts_with('/') {
        Ok(path.to_owned())
    } else {
        Err(ParseError::new(path, "an absolute path"))
    }
}

/// Address and the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr<A> {
    pub address: A,
    /// Length of the network's prefix in bits.
    pub prefix_bits: u8,
}

impl<A: FromStr + Into<IpAddr> + Copy> FromStr for Cidr<A> {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Cidr<A>, ParseError> {
        let wanted = || ParseError::new(text, "ADDRESS/PREFIX of the option's address family");
        let (address, prefix) = text.split_once('/').ok_or_else(wanted)?;
        let address: A = address.parse().map_err(|_| wanted())?;
        let longest = if address.into().is_ipv4() { 32 } else { 128 };
        let prefix = prefix.parse::<u8>().ok().filter(|bits| *bits <= longest);
        Ok(Cidr { address, prefix_bits: prefix.ok_or_else(wanted)? })
    }
}

impl<A: fmt::Display> fmt::Display for Cidr<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_whole_command_line() {
        let line = "console=ttyS0 quiet godwit.ip=10.88.0.21/24 godwit.ip6=fd88::21/64 \
            godwit.fill=512M \
                    godwit.mix=zero=50 godwit.seed=9 godwit.workload=dirty:rate=100,ws=1M \
                    godwit.root=/dev/vda godwit.read=/usr\n";
        let (options, problems) = Options::parse(line);
        assert_eq!(problems, []);
        assert_eq!(options.ip.unwrap().to_string(), "10.88.0.21/24");
        assert_eq!(options.ip6.unwrap().to_string(), "fd88::21/64");
        assert_eq!(options.fill_bytes, Some(512 << 20));
        assert_eq!(options.fill_mix(), Mix::new(50, 0).unwrap());
        assert_eq!(options.seed(), 9);
        assert_eq!(
            (options.root.as_deref(), options.read.as_deref()),
            (Some("/dev/vda"), Some("/usr"))
        );
        let Workload::Dirty(dirty) = options.workload else { panic!("{:?}", options.workload) };
        assert_eq!((dirty.rate_pages_per_s, dirty.working_set_bytes), (Some(100), Some(1 << 20)));
    }

    #[test]
    fn bad_options_are_reported_and_left_out() {
        let line = "godwit.ip=10.0.0.1 godwit.ip6=10.0.0.1/8 godwit.ip=10.0.0.1/33 \
            godwit.colour=red godwit.fill \
                    godwit.root=vda godwit.seed=7";
        let (options, problems) = Options::parse(line);
        assert_eq!(problems.len(), 6, "{problems:?}");
        assert_eq!(options, Options { seed: Some(7), ..Options::default() });
    }

    #[test]
    fn guests_differ_by_their_addresses() {
        let seed = |line| Options::parse(line).0.seed();
        assert_ne!(seed("godwit.ip=10.88.0.21/24"), seed("godwit.ip=10.88.0.22/24"));
        assert_ne!(seed("godwit.ip6=fd88::21/64"), seed("godwit.ip6=fd88::22/64"));
    }

    proptest! {
        #[test]
        fn any_command_line_is_parsed_without_a_panic(
            line in "(godwit\\.(ip|fill|mix|workload)=.{0,12} ?){0,5}"
        ) {
            let _ = Options::parse(&line);
        }
    }
}
