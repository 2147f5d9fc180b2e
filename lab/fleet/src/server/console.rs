//! Guest console of a simulated agent: prints the host, and echoes input until the VM has left the
//! host.

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use godwit_api::{ApiError, ErrorCode, HostEvent, VmState};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::{Agent, Refusal, no_host};

#[derive(Deserialize)]
pub(super) struct ConsoleQuery {
    /// Serial port, from 1.
    port: Option<u32>,
}

/// Serves `GET /v1/vms/{name}/console` with `Upgrade: godwit-console`.
pub(super) async fn open(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    Query(query): Query<ConsoleQuery>,
    mut request: Request,
) -> Result<Response, Refusal> {
    let (host, events) = {
        let mut world = agent.shared.world();
        let host = world.host(agent.at).ok_or_else(no_host)?;
        let is_here = host.vms.get(&name).is_some_and(|vm| is_open(vm.state));
        if !is_here {
            let message = format!("VM \"{name}\" has no console on host {}", host.info.name);
            return Err(ApiError::new(ErrorCode::WrongState, message, "start it").into());
        }
        (host.info.name.clone(), world.watch(agent.at).ok_or_else(no_host)?)
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(reader) = upgrade.await {
            // Either side may close the console at any time.
            let greeting = greeting(&host, &name, query.port.unwrap_or(1));
            let _ = echo(TokioIo::new(reader), &greeting, &name, events).await;
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static("godwit-console"));
    Ok(response)
}

pub(super) fn is_open(state: VmState) -> bool {
    !matches!(state, VmState::Stopped | VmState::Failed)
}

fn greeting(host: &str, vm: &str, port: u32) -> String {
    let port = if port > 1 { format!(", port {port}") } else { String::new() };
    format!("{vm} at {host}{port}\r\n# ")
}

async fn echo(
    mut reader: TokioIo<Upgraded>,
    greeting: &str,
    vm: &str,
    mut events: mpsc::Receiver<HostEvent>,
) -> std::io::Result<()> {
    reader.write_all(greeting.as_bytes()).await?;
    let mut typed = [0; 4096];
    loop {
        tokio::select! {
            read = reader.read(&mut typed) => match read? {
                0 => return Ok(()),
                bytes => reader.write_all(&typed[..bytes]).await?,
            },
            event = events.recv() => match event {
                Some(HostEvent::VmGone(gone)) if gone == vm => return Ok(()),
                Some(HostEvent::Vm(info)) if info.name == vm && !is_open(info.state) => {
                    return Ok(());
                }
                None => return Ok(()),
                Some(_) => {}
            },
        }
    }
}

/// Serves `GET /v1/vms/{name}/log`.
pub(super) async fn log(
    State(agent): State<Agent>,
    Path(name): Path<String>,
) -> Result<String, Refusal> {
    let world = agent.shared.world();
    let host = world.host(agent.at).ok_or_else(no_host)?;
    if !host.vms.contains_key(&name) {
        let message = format!("VM \"{name}\" has no log on host {}", host.info.name);
        return Err(ApiError::new(ErrorCode::NotFound, message, "").into());
    }
    let lines = (1..=100)
        .map(|line| format!("[{line:4}.000000] {name} at {}: line {line}\n", host.info.name));
    Ok(lines.collect())
}
