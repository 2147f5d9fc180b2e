//! `godwit pki`: an authority and its certificates.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use godwit_pki::Serial;

#[derive(Debug, Subcommand)]
pub(crate) enum PkiCommand {
    /// Make an authority
    #[command(after_help = "Example:
  godwit pki init --dir /etc/godwit/pki --name lab
  godwit pki init --web --dir /etc/godwit/web-pki --name lab-web")]
    Init {
        #[command(flatten)]
        place: PkiPlace,
        /// What it is called
        #[arg(long, default_value = "godwit")]
        name: String,
        /// For browsers: it signs what the manager shows them, and nothing for the cluster
        #[arg(long)]
        web: bool,
        /// How long it is good for
        #[arg(long, value_name = "DAYS", default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
    },
    /// Issue a host's certificate, an operator's, or one for monitoring
    #[command(after_help = "Examples:
  godwit pki issue a --address 10.77.0.11 --address fd77::11 --dir /etc/godwit/pki
  godwit pki issue admin --operator --days 30 --dir /etc/godwit/pki
  godwit pki issue prometheus --monitor --dir /etc/godwit/pki
  godwit pki issue m1.example --address 192.0.2.5 --dir /etc/godwit/web-pki")]
    Issue {
        /// What the configurations call the host
        name: String,
        #[command(flatten)]
        place: PkiPlace,
        /// An address that it also stands for (repeatable)
        #[arg(long = "address", value_name = "IP")]
        addresses: Vec<IpAddr>,
        /// For a person or a program that may do everything, not for a host
        #[arg(long)]
        operator: bool,
        /// For Prometheus: it may read the hosts' metrics, and nothing else
        #[arg(long, conflicts_with = "operator")]
        monitor: bool,
        /// How long it is good for
        #[arg(long, value_name = "DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// Issue a certificate anew, with a new key
    #[command(after_help = "Example:
  godwit pki renew a --dir /etc/godwit/pki")]
    Renew {
        /// Whose
        name: String,
        #[command(flatten)]
        place: PkiPlace,
        /// How long it is good for
        #[arg(long, value_name = "DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// Add certificates to the authority's list of revoked ones, where there is no manager that does
    #[command(after_help = "Examples:
  godwit pki revoke --cert /etc/godwit/pki/b.pem --dir /etc/godwit/pki
  godwit pki revoke --serial 5f0c9a3b77d24e1f8a6b3c2d1e0f9a8b

The list is crl.pem beside ca.pem. Give it to each agent: [tls] revoked = FILE in its configuration; a changed file is read \
without a restart. With a manager: godwit control certificate revoke.")]
    Revoke {
        /// A certificate's file (repeatable)
        #[arg(long = "cert", value_name = "FILE", required_unless_present = "serials")]
        files: Vec<PathBuf>,
        /// A serial number, as `godwit pki show` prints it (repeatable)
        #[arg(long = "serial", value_name = "HEX")]
        serials: Vec<Serial>,
        #[command(flatten)]
        place: PkiPlace,
    },
    /// Write the authority's list of revoked certificates anew and print it
    #[command(after_help = "Example:
  godwit pki crl --dir /etc/godwit/pki >revoked.pem")]
    Crl {
        #[command(flatten)]
        place: PkiPlace,
    },
    /// Show what a certificate says
    #[command(after_help = "Example:
  godwit pki show /etc/godwit/pki/a.pem")]
    Show {
        /// The certificate's file
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PkiPlace {
    /// The authority's directory
    #[arg(long, value_name = "DIR", default_value = "/etc/godwit/pki")]
    pub(crate) dir: PathBuf,
}
