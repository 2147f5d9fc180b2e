//! Command line of `godwit pki`: a certificate authority and its certificates.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use godwit_pki::Serial;

#[derive(Debug, Subcommand)]
pub(crate) enum PkiCommand {
    /// Create a certificate authority
    #[command(after_help = "Example:
  godwit pki init --dir /etc/godwit/pki --name lab
  godwit pki init --web --dir /etc/godwit/web-pki --name lab-web")]
    Init {
        #[command(flatten)]
        place: PkiPlace,
        /// Name of the authority
        #[arg(long, default_value = "godwit")]
        name: String,
        /// Authority for browsers: it signs the certificate of the manager's web interface, and
        /// nothing for the cluster
        #[arg(long)]
        web: bool,
        /// Validity
        #[arg(
            long,
            value_name = "DAYS",
            default_value_t = 3650,
            value_parser = clap::value_parser!(u32).range(1..=36500)
        )]
        days: u32,
    },
    /// Issue a certificate for a host, an operator or a monitoring system
    #[command(after_help = "Examples:
  godwit pki issue a --address 10.77.0.11 --address fd77::11 --dir /etc/godwit/pki
  godwit pki issue admin --operator --days 30 --dir /etc/godwit/pki
  godwit pki issue prometheus --monitor --dir /etc/godwit/pki
  godwit pki issue m1.example --address 192.0.2.5 --dir /etc/godwit/web-pki")]
    Issue {
        /// Name of the host, as in the configurations
        name: String,
        #[command(flatten)]
        place: PkiPlace,
        /// IP address to include in the certificate (repeatable)
        #[arg(long = "address", value_name = "IP")]
        addresses: Vec<IpAddr>,
        /// Issue a certificate for a person or program with all permissions, not for a host
        #[arg(long)]
        operator: bool,
        /// Issue a certificate for Prometheus that can only read the metrics of hosts
        #[arg(long, conflicts_with = "operator")]
        monitor: bool,
        /// Validity
        #[arg(
            long,
            value_name = "DAYS",
            default_value_t = 365,
            value_parser = clap::value_parser!(u32).range(1..=3650)
        )]
        days: u32,
    },
    /// Reissue a certificate with a new key
    #[command(after_help = "Example:
  godwit pki renew a --dir /etc/godwit/pki")]
    Renew {
        /// Name of the holder
        name: String,
        #[command(flatten)]
        place: PkiPlace,
        /// Validity
        #[arg(
            long,
            value_name = "DAYS",
            default_value_t = 365,
            value_parser = clap::value_parser!(u32).range(1..=3650)
        )]
        days: u32,
    },
    /// Add certificates to the authority's revocation list, in a cluster without a manager
    #[command(after_help = "Examples:
  godwit pki revoke --cert /etc/godwit/pki/b.pem --dir /etc/godwit/pki
  godwit pki revoke --serial 5f0c9a3b77d24e1f8a6b3c2d1e0f9a8b

The list is crl.pem beside ca.pem. Set `revoked = FILE` in [tls] of each agent's configuration. \
The agent reloads a changed file without a restart. With a manager, use `godwit control \
certificate revoke` instead.")]
    Revoke {
        /// Certificate file (repeatable)
        #[arg(long = "cert", value_name = "FILE", required_unless_present = "serials")]
        files: Vec<PathBuf>,
        /// Serial number, as `godwit pki show` prints it (repeatable)
        #[arg(long = "serial", value_name = "HEX")]
        serials: Vec<Serial>,
        #[command(flatten)]
        place: PkiPlace,
    },
    /// Renew and print the authority's revocation list
    #[command(after_help = "Example:
  godwit pki crl --dir /etc/godwit/pki >revoked.pem")]
    Crl {
        #[command(flatten)]
        place: PkiPlace,
    },
    /// Show the contents of a certificate
    #[command(after_help = "Example:
  godwit pki show /etc/godwit/pki/a.pem")]
    Show {
        /// Certificate file
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PkiPlace {
    /// Directory of the authority
    #[arg(long, value_name = "DIR", default_value = "/etc/godwit/pki")]
    pub(crate) dir: PathBuf,
}
