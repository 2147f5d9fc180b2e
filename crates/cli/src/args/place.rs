//! Options that say whom a command asks: the manager, or no host.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use godwit_api::Endpoint;

use crate::exit::Failure;

/// ID of `--host` for clap: [`NoHost`] overrides it. No other argument uses this ID.
pub(super) const ONE_HOST: &str = "one_host";

/// Address of the manager. The environment is read here and not by clap, which would otherwise show
/// these options as required in its usage line.
#[derive(Debug, Args)]
pub(crate) struct ManagerPlace {
    /// Address of the manager, unix:PATH or https://HOST:PORT [env: GODWIT_MANAGER] [default: that
    /// in the hosts file; without one, `vm`, `disk` and `job` ask the hosts, and other commands the
    /// socket /run/godwit-control/control.sock]
    #[arg(long, global = true, value_name = "URL")]
    manager: Option<Endpoint>,
    /// Certificate of the authority that verifies an https:// address [env: GODWIT_CA]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
}

fn of_environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

impl ManagerPlace {
    /// Returns whether a manager is named, even by an invalid address.
    pub(crate) fn is_named(&self) -> bool {
        self.manager.is_some() || of_environment("GODWIT_MANAGER").is_some()
    }

    /// Returns the address of the named manager.
    pub(crate) fn manager(&self) -> Result<Option<Endpoint>, Failure> {
        let Some(named) = of_environment("GODWIT_MANAGER").filter(|_| self.manager.is_none())
        else {
            return Ok(self.manager.clone());
        };
        let endpoint = named.to_string_lossy().parse::<Endpoint>();
        endpoint.map(Some).map_err(|error| {
            Failure::usage(format!("GODWIT_MANAGER: {}", error.message), error.remedy)
        })
    }

    /// Returns the file of the named certificate.
    pub(crate) fn authority(&self) -> Option<PathBuf> {
        self.ca.clone().or_else(|| of_environment("GODWIT_CA").map(PathBuf::from))
    }
}

/// For commands that query no host by themselves: `--host` is hidden there, and refused instead of
/// ignored.
#[derive(Debug, Args)]
pub(crate) struct NoHost {
    #[arg(
        id = ONE_HOST,
        long = "host",
        global = true,
        hide = true,
        value_name = "NAME",
        value_parser = refuse_host
    )]
    pub(super) named: Option<String>,
}

pub(super) const NO_HOST: &str = "this command sends no request to a host: omit --host";

fn refuse_host(_: &str) -> Result<String, String> {
    Err(NO_HOST.to_owned())
}
