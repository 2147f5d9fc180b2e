//! Known hosts, and the location of a VM.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use futures::future::join_all;
use godwit_api::{Client, ClientError, DEFAULT_SOCKET, Endpoint, ErrorCode, VmInfo, VmState};
use godwit_pki::Identity;
use serde::Deserialize;

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Default hosts files, in this order, if neither --hosts nor GODWIT_HOSTS names one.
const HOSTS_FILES: [&str; 2] = ["/etc/godwit/hosts.toml", "/run/godwit-lab/hosts.toml"];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostsFile {
    #[serde(default)]
    hosts: BTreeMap<String, HostEntry>,
    watch: Option<WatchEntry>,
    /// Default manager.
    manager: Option<HostEntry>,
    /// Operator certificate to present to hosts with https:// addresses.
    tls: Option<TlsEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsEntry {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostEntry {
    api: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WatchEntry {
    /// Socket of the prober that measures blackouts.
    pub(crate) socket: PathBuf,
    /// Network namespace that `godwit watch` probes from; `None` for the command's own.
    pub(crate) namespace: Option<String>,
}

/// Hosts known to this command.
#[derive(Debug)]
pub(crate) struct Hosts {
    clients: BTreeMap<String, Client>,
    /// Where guests are probed from, if the hosts file says so.
    pub(crate) watch: Option<WatchEntry>,
    /// Path of the hosts file; `None` for the agent of this machine without a hosts file.
    file: Option<PathBuf>,
}

/// A VM and its host.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    pub(crate) host: &'a str,
    pub(crate) client: &'a Client,
    pub(crate) vm: VmInfo,
}

/// Returns the `named` hosts file, or the first default one that exists.
fn hosts_file(named: Option<&Path>) -> Option<PathBuf> {
    let default = || HOSTS_FILES.iter().map(PathBuf::from).find(|path| path.exists());
    named.map(Path::to_owned).or_else(default)
}

/// Reads the `named` hosts file or a default one and returns its path; `None` if it does not exist.
fn read(named: Option<&Path>) -> Result<Option<(HostsFile, PathBuf)>, Failure> {
    let Some(path) = hosts_file(named) else { return Ok(None) };
    let text = std::fs::read_to_string(&path).map_err(|error| wrong(&path, &error.to_string()))?;
    let file = toml::from_str(&text).map_err(|error| wrong(&path, error.message()))?;
    Ok(Some((file, path)))
}

fn wrong(path: &Path, why: &str) -> Failure {
    Failure::usage(format!("cannot use hosts file {}: {why}", path.display()), "see docs/cli.md")
}

/// Returns the manager in the hosts file (`named` or default); `None` if there is none.
pub(crate) fn manager_of(named: Option<&Path>) -> Result<Option<Endpoint>, Failure> {
    let Some((HostsFile { manager: Some(manager), .. }, path)) = read(named)? else {
        return Ok(None);
    };
    manager.api.parse().map(Some).map_err(|error| wrong(&path, &format!("manager.api: {error}")))
}

/// Returns the authority in the hosts file; `None` if there is none.
pub(crate) fn authority_of(named: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    Ok(read(named)?.and_then(|(file, _)| Some(file.tls?.authority)))
}

impl Hosts {
    /// Reads the hosts file (`named` or default). Without one, only the agent of this machine is
    /// known.
    pub(crate) fn load(named: Option<&Path>) -> Result<Hosts, Failure> {
        let Some(path) = hosts_file(named) else {
            let client = Client::new(Endpoint::Unix(DEFAULT_SOCKET.into()));
            return Ok(Hosts {
                clients: BTreeMap::from([("local".to_owned(), client)]),
                watch: None,
                file: None,
            });
        };
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let remedy = "name an existing file with --hosts or GODWIT_HOSTS";
            Failure::new(
                Exit::NotFound,
                format!("cannot read the hosts file {}: {error}", path.display()),
                remedy,
            )
        })?;
        Hosts::parse(&text, path)
    }

    fn parse(text: &str, path: PathBuf) -> Result<Hosts, Failure> {
        let wrong = |why: String| {
            let remedy = "write [hosts.NAME] with api = \"unix:/path\" or \
                          \"https://address:port\", see docs/cli.md";
            Failure::usage(format!("cannot use hosts file {}: {why}", path.display()), remedy)
        };
        let file: HostsFile = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            wrong(format!("line {line}: {}", error.message().trim()))
        })?;
        let identity = match &file.tls {
            Some(tls) => Some(Identity::load(&tls.authority, &tls.certificate, &tls.key)?),
            None => None,
        };
        let mut clients = BTreeMap::new();
        for (name, entry) in file.hosts {
            let endpoint: Endpoint =
                entry.api.parse().map_err(|error| wrong(format!("hosts.{name}.api: {error}")))?;
            let client = match (&endpoint, &identity) {
                (Endpoint::Tls(_), None) => {
                    return Err(wrong(format!(
                        "hosts.{name}.api: https:// needs [tls] with an operator's certificate"
                    )));
                }
                (Endpoint::Tls(_), Some(identity)) => Client::secure(endpoint, identity, &name),
                _ => Client::new(endpoint),
            };
            clients.insert(name, client);
        }
        if clients.is_empty() {
            return Err(wrong("it lists no hosts".to_owned()));
        }
        Ok(Hosts { clients, watch: file.watch, file: Some(path) })
    }

    /// Returns the hosts to query: all, or the named one.
    pub(crate) fn chosen(&self, only: Option<&str>) -> Result<Vec<(&str, &Client)>, Failure> {
        match only {
            None => Ok(self.clients.iter().map(|(name, client)| (name.as_str(), client)).collect()),
            Some(name) => {
                let (name, client) =
                    self.clients.get_key_value(name).ok_or_else(|| self.unknown(name))?;
                Ok(vec![(name, client)])
            }
        }
    }

    /// Returns the named host, or the only one.
    pub(crate) fn one(&self, only: Option<&str>) -> Result<(&str, &Client), Failure> {
        let chosen = self.chosen(only)?;
        match chosen[..] {
            [one] => Ok(one),
            _ => Err(Failure::usage(
                "cannot choose a host: several are known",
                format!("select one with --host: {}", self.names()),
            )),
        }
    }

    /// Returns the source for a migration to `to`: the named host, else the only other one, else
    /// the one of this machine.
    pub(crate) fn other(&self, to: &str, named: Option<&str>) -> Result<(&str, &Client), Failure> {
        if named.is_some() {
            return self.one(named);
        }
        let others: Vec<(&str, &Client)> = self
            .clients
            .iter()
            .filter(|(name, _)| *name != to)
            .map(|(name, client)| (name.as_str(), client))
            .collect();
        let is_here = |client: &Client| matches!(client.endpoint(), Endpoint::Unix(_));
        let here: Vec<(&str, &Client)> =
            others.iter().copied().filter(|(_, client)| is_here(client)).collect();
        match (&others[..], &here[..]) {
            ([one], _) | (_, [one]) => Ok(*one),
            _ => Err(Failure::usage(
                "cannot choose the source host: several are possible",
                format!("select one with --from: {}", self.names()),
            )),
        }
    }

    /// Returns an error if the host is unknown.
    pub(crate) fn check(&self, name: &str) -> Result<(), Failure> {
        // Without a hosts file, only the agent knows its peers.
        if self.file.is_none() || self.clients.contains_key(name) {
            Ok(())
        } else {
            Err(self.unknown(name))
        }
    }

    fn unknown(&self, name: &str) -> Failure {
        let place = self
            .file
            .as_ref()
            .map_or("without a hosts file".to_owned(), |path| format!("in {}", path.display()));
        Failure::new(
            Exit::NotFound,
            format!("cannot find host \"{name}\" {place}"),
            format!("known hosts: {}", self.names()),
        )
    }

    fn names(&self) -> String {
        self.clients.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// Queries hosts concurrently. Unreachable hosts are reported as notes; the result is an error
    /// only if no host answers.
    pub(crate) async fn ask_all<'a, T, F>(
        &'a self,
        only: Option<&str>,
        output: Output,
        ask: impl Fn(&'a Client) -> F,
    ) -> Result<(Vec<(&'a str, T)>, Vec<&'a str>), Failure>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let chosen = self.chosen(only)?;
        let answers = join_all(chosen.iter().map(|(_, client)| ask(client))).await;
        let (mut answered, mut silent, mut last) = (Vec::new(), Vec::new(), None);
        for ((name, _), answer) in chosen.into_iter().zip(answers) {
            match answer {
                Ok(answer) => answered.push((name, answer)),
                Err(ClientError::Refused(error)) => return Err(error.into()),
                Err(error) => {
                    silent.push(name);
                    last = Some((name, error));
                }
            }
        }
        match last {
            Some((_, error)) if answered.is_empty() => return Err(error.into()),
            Some(_) => output.note(&format!("note: host {} does not respond", silent.join(", "))),
            None => {}
        }
        Ok((answered, silent))
    }

    /// Finds the host of a VM. An arriving or leaving VM counts only if nothing else is found.
    pub(crate) async fn find<'a>(
        &'a self,
        vm: &str,
        only: Option<&str>,
        output: Output,
    ) -> Result<Found<'a>, Failure> {
        let ask = |client: &'a Client| {
            let (client, vm) = (client.clone(), vm.to_owned());
            async move {
                match client.vm(&vm).await {
                    Ok(vm) => Ok(Some(vm)),
                    Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        };
        let (answers, silent) = self.ask_all(only, output, ask).await?;
        let mut found: Vec<(&str, VmInfo)> =
            answers.into_iter().filter_map(|(host, vm)| vm.map(|vm| (host, vm))).collect();
        // During a migration, a VM is briefly on two hosts: as a shadow VM, or while the source
        // releases it.
        let passing = |vm: &VmInfo| matches!(vm.state, VmState::MigratingIn | VmState::Stopping);
        if found.iter().any(|(_, vm)| !passing(vm)) {
            found.retain(|(_, vm)| !passing(vm));
        }
        // The VM was handed over: its source only serves the pages that are still missing there.
        let runs = |vm: &VmInfo| vm.state == VmState::Running && !vm.in_doubt;
        let only_one_runs = found.iter().filter(|(_, vm)| runs(vm)).count() == 1;
        if only_one_runs
            && found.iter().all(|(_, vm)| runs(vm) || vm.state == VmState::MigratingOut)
        {
            found.retain(|(_, vm)| runs(vm));
        }
        if found.len() > 1 {
            let places: Vec<String> =
                found.iter().map(|(host, vm)| format!("{host} ({})", vm.state)).collect();
            let message = format!("VM \"{vm}\" is on several hosts: {}", places.join(", "));
            return Err(Failure::new(Exit::Conflict, message, "select one with --host"));
        }
        match found.pop() {
            Some((host, vm)) => Ok(Found { host, client: &self.clients[host], vm }),
            None if silent.is_empty() => {
                let asked = only.map_or_else(|| self.names(), str::to_owned);
                Err(Failure::new(
                    Exit::NotFound,
                    format!("cannot find VM \"{vm}\" (searched: {asked})"),
                    "list the VMs with `godwit vm list`",
                ))
            }
            None => Err(Failure::new(
                Exit::Unreachable,
                format!("cannot find VM \"{vm}\" on any host that responds"),
                format!("start the agents that do not respond: {}", silent.join(", ")),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Hosts, Failure> {
        Hosts::parse(text, "/etc/godwit/hosts.toml".into())
    }

    #[test]
    fn a_hosts_file_is_read() {
        let hosts = parse(
            "[hosts.a]\napi = \"unix:/run/a.sock\"\n[hosts.b]\napi = \"http://10.0.0.2:7700\"\n\
             [watch]\nsocket = \"/run/c.sock\"\nnamespace = \"c\"",
        )
        .unwrap();
        assert_eq!(hosts.chosen(None).unwrap().len(), 2);
        assert_eq!(hosts.chosen(Some("b")).unwrap()[0].0, "b");
        let watch = hosts.watch.as_ref().unwrap();
        assert_eq!(
            (watch.socket.as_path(), watch.namespace.as_deref()),
            (Path::new("/run/c.sock"), Some("c"))
        );
        assert_eq!(hosts.one(None).unwrap_err().exit, Exit::Usage);
        let unknown = hosts.chosen(Some("c")).unwrap_err();
        assert_eq!(unknown.exit, Exit::NotFound);
        assert!(unknown.fault.remedy.contains("a, b"));
    }

    #[test]
    fn the_host_to_leave_is_found_where_it_is_clear() {
        let two =
            "[hosts.a]\napi = \"unix:/run/a.sock\"\n[hosts.b]\napi = \"http://10.0.0.2:7700\"\n";
        let three = format!("{two}[hosts.c]\napi = \"http://10.0.0.3:7700\"\n");
        let both_here = format!("{three}[hosts.d]\napi = \"unix:/run/d.sock\"\n");
        let other = |text: &str, to, named| {
            parse(text)
                .unwrap()
                .other(to, named)
                .map(|(name, _)| name.to_owned())
                .map_err(|failure| failure.exit)
        };
        assert_eq!(other(two, "a", None), Ok("b".to_owned()));
        assert_eq!(other(&three, "b", None), Ok("a".to_owned()));
        assert_eq!(other(&three, "b", Some("c")), Ok("c".to_owned()));
        assert_eq!(other(&three, "a", None), Err(Exit::Usage));
        assert_eq!(other(&both_here, "b", None), Err(Exit::Usage));
        assert_eq!(other(two, "b", Some("z")), Err(Exit::NotFound));
    }

    #[test]
    fn an_error_names_its_place() {
        for (text, word) in [
            ("[hosts.a]\nurl = \"x\"", "line 2"),
            ("[hosts.a]\napi = \"10.0.0.1:7700\"", "hosts.a.api"),
            ("", "no host"),
        ] {
            let failure = parse(text).unwrap_err();
            assert!(failure.fault.message.contains(word), "{failure}");
            assert_eq!(failure.exit, Exit::Usage);
        }
    }
}
