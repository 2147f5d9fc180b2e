//! iperf3 between two hosts of a lab: the maximum throughput of TCP on its links.

use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::namespace::in_namespace;

/// Port for the first address; the others follow.
const FIRST_PORT: u16 = 5201;

/// Parameters of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Iperf<'a> {
    /// The network namespace that sends.
    pub from: &'a str,
    /// The network namespace that receives.
    pub to: &'a str,
    /// The receiver's addresses, one per lane; data is sent to all of them at the same time.
    pub addresses: &'a [IpAddr],
    /// TCP streams to each address.
    pub streams: u32,
    /// Duration in whole seconds.
    pub duration: Duration,
    /// Time before that which is not counted, in whole seconds: TCP's slow start.
    pub omitted: Duration,
    /// Congestion control; `None` is the host's.
    pub congestion: Option<&'a str>,
}

impl Iperf<'_> {
    /// Measures TCP's goodput in bit/s as the receiver counts it, the sum of all lanes.
    ///
    /// # Errors
    /// iperf3 is missing, or its own error.
    pub fn goodput(&self) -> Result<f64> {
        let lanes = || (FIRST_PORT..).zip(self.addresses);
        let _servers = lanes()
            .map(|(port, _)| Server::start(self.to, port))
            .collect::<Result<Vec<Server>>>()?;
        let clients = lanes().map(|(port, address)| self.send(port, *address));
        let clients = clients.collect::<Result<Vec<Child>>>()?;
        clients.into_iter().map(received).sum()
    }

    fn send(&self, port: u16, to: IpAddr) -> Result<Child> {
        let mut command = Command::new("iperf3");
        command.args([
            "-c",
            &to.to_string(),
            "-p",
            &port.to_string(),
            "-P",
            &self.streams.to_string(),
        ]);
        command.args([
            "-t",
            &self.duration.as_secs().to_string(),
            "-O",
            &self.omitted.as_secs().to_string(),
        ]);
        command.args(["-J", "--connect-timeout", "5000"]);
        if let Some(congestion) = self.congestion {
            command.args(["-C", congestion]);
        }
        start(self.from, command)
    }
}

/// Reads the receiver's figure from a client's report.
fn received(client: Child) -> Result<f64> {
    let output = client.wait_with_output()?;
    let report: Value = serde_json::from_slice(&output.stdout).context("iperf3 gave no report")?;
    if let Some(error) = report["error"].as_str() {
        bail!("iperf3: {error}");
    }
    report["end"]["sum_received"]["bits_per_second"].as_f64().context("iperf3 reported nothing")
}

/// Server for one test; ended when dropped.
struct Server {
    process: Child,
    /// Read until the server listens, and kept open: a server that cannot write ends.
    output: BufReader<std::process::ChildStdout>,
}

impl Server {
    /// Starts the server and waits until it listens: a client tries only once.
    fn start(namespace: &str, port: u16) -> Result<Server> {
        let mut command = Command::new("iperf3");
        command.args(["-s", "-1", "-i", "0", "--forceflush", "-p", &port.to_string()]);
        let mut process = start(namespace, command)?;
        let output = process.stdout.take().context("no standard output")?;
        let mut server = Server { process, output: BufReader::new(output) };
        let mut line = String::new();
        while !line.contains("listening") {
            line.clear();
            if server.output.read_line(&mut line)? == 0 {
                bail!("iperf3 does not listen on port {port} in {namespace}");
            }
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended by itself if the test took place.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn start(namespace: &str, mut command: Command) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    in_namespace(namespace, || command.spawn())?
        .context("cannot start iperf3; install it with: apt-get install iperf3")
}
