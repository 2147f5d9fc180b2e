//! `godwit lab guest`: asks the lab's guest over TCP, from inside the client's namespace as its users do.
//! One JSON line a request, one JSON line an answer, port 7000 (lab/guest).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use godwit_lab::in_namespace;
use serde_json::{Value, json};

use crate::args::GuestCommand;
use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::lab::client_namespace;
use crate::output::{Output, fields};

const CONTROL_PORT: u16 = 7000;
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Verifying reads all of the guest's memory, under TCG at some 100 MiB/s.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
const MAX_ANSWER_BYTES: u64 = 1 << 20;

pub(crate) fn run(
    vm: &str,
    address: Option<IpAddr>,
    command: &GuestCommand,
    hosts: Option<&Path>,
    only: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let hosts = Hosts::load(hosts)?;
    let address = match address {
        Some(address) => address,
        None => find_address(vm, &hosts, only, output)?,
    };
    let request = match command {
        GuestCommand::Status => json!({ "cmd": "status" }),
        GuestCommand::Verify => json!({ "cmd": "verify" }),
        GuestCommand::Workload { spec } => json!({ "cmd": "workload", "spec": spec }),
    };
    let socket = SocketAddr::new(address, CONTROL_PORT);
    let connect = || TcpStream::connect_timeout(&socket, CONNECT_LIMIT);
    let connected = match client_namespace(hosts.prober.as_deref()) {
        // The socket belongs to the namespace in which it was made, wherever it is used.
        Some(namespace) => in_namespace(&namespace, connect)?,
        None => connect(),
    };
    let silent = |error: std::io::Error| {
        let mend = "has it booted, and is it the lab's guest? see `godwit vm logs`";
        Failure::new(
            Exit::Unreachable,
            format!("the guest of VM {vm} does not answer at {socket}: {error}"),
            mend,
        )
    };
    let answer = connected.and_then(|stream| ask(&stream, &request)).map_err(silent)?;
    output.result(&answer, || describe(&answer))?;
    Ok(if answer["ok"] == false || answer.get("error").is_some() { Exit::Failure } else { Exit::Ok })
}

fn find_address(vm: &str, hosts: &Hosts, only: Option<&str>, output: Output) -> Result<IpAddr, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(hosts.find(vm, only, output))?;
    found.vm.addresses.first().copied().ok_or_else(|| {
        let mend = "give it one at its creation (--nic network=lan,address=IP), or --address here";
        Failure::new(Exit::NotFound, format!("VM {vm} has no known address"), mend)
    })
}

fn ask(mut stream: &TcpStream, request: &Value) -> std::io::Result<Value> {
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.write_all(format!("{request}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_line(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}

fn describe(answer: &Value) -> String {
    let Some(object) = answer.as_object() else { return answer.to_string() };
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let lines: Vec<(&str, String)> = object.iter().map(|(key, value)| (key.as_str(), plain(value))).collect();
    fields(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_asked_in_lines() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let guest = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut request = String::new();
            BufReader::new(&stream).read_line(&mut request).unwrap();
            (&stream).write_all(b"{\"ok\":true,\"pages\":7}\n").unwrap();
            request
        });
        let answer = ask(&TcpStream::connect(address).unwrap(), &json!({ "cmd": "verify" })).unwrap();
        assert_eq!(guest.join().unwrap(), "{\"cmd\":\"verify\"}\n");
        assert_eq!(describe(&answer), "ok:    true\npages: 7\n");
    }
}
