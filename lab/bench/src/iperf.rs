//! iperf3 between two hosts of a lab: what the way between them carries.

use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use godwit_lab::trial::{Trial, until};
use serde_json::Value;

/// How long the server may take to listen.
const LISTEN_LIMIT: Duration = Duration::from_secs(10);

/// Bytes a second that arrive on so many streams in so many seconds, the first one not counted.
pub(crate) fn bytes_per_s(
    trial: &Trial,
    from: &str,
    to: &str,
    to_address: IpAddr,
    streams: u32,
    seconds: u32,
) -> Result<f64> {
    let in_namespace = |host: &str| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &trial.namespace(host), "iperf3"]);
        command
    };
    let mut server = in_namespace(to)
        .args(["--server", "--one-off"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("iperf3 can't be started; `make deps` installs it")?;
    let measured = until("iperf3 listens", LISTEN_LIMIT, || {
        let output = in_namespace(from)
            .args(["--client", &to_address.to_string(), "--json", "--omit", "1"])
            .args(["--time", &seconds.to_string(), "--parallel", &streams.to_string()])
            .output()
            .context("iperf3 can't be started")?;
        let answer: Value = serde_json::from_slice(&output.stdout).context("iperf3's answer")?;
        if let Some(error) = answer["error"].as_str() {
            bail!("iperf3: {error}");
        }
        Ok(answer["end"]["sum_received"]["bits_per_second"].as_f64())
    });
    // It ends with its client; where there was none it is ended.
    if measured.is_err() {
        let _ = server.kill();
    }
    server.wait()?;
    Ok(measured? / 8.0)
}
