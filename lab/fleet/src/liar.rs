//! Lying host: an agent with valid rights whose every message is a lie, drawn from a seed. It
//! claims other hosts' VMs, reports migrations of them, gives impossible values to every field, and
//! sends invalid responses to requests.

use std::io;
use std::net::Ipv4Addr;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use crate::FleetPlan;

/// Capacity of the queue of messages to the manager.
const WAITING: usize = 256;
/// Largest epoch that an agent may report.
const LARGEST_EPOCH: u64 = 1 << 48;
/// Longest text of a message, in bytes.
const LONGEST_TEXT: usize = 200 << 10;

/// Subject of a lie, and how a manager has to show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Claim of a VM of this name, which another host holds. Shown as a conflict.
    Claim(String),
    /// Value that no agent reports. Shown as a faulty host.
    Impossible(String),
    /// Statement about the host itself, or silence about another host's VM. Not detectable.
    OfItself,
}

/// Random numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, most: usize) -> usize {
        let most = u64::try_from(most.max(1)).unwrap_or(u64::MAX);
        usize::try_from(self.next() % most).unwrap_or(0)
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len()))
    }
}

/// Running lying agent. It ends when this is dropped.
#[derive(Debug)]
pub struct Liar {
    name: String,
    address: String,
    draw: Draw,
    plan: FleetPlan,
    /// VMs of other hosts.
    victims: Vec<String>,
    others: Vec<String>,
    messages: broadcast::Sender<Bytes>,
    lies: u64,
    last: Bytes,
    _tasks: JoinSet<()>,
}

#[derive(Clone)]
struct Served {
    messages: broadcast::Sender<Bytes>,
    /// First message.
    first: Bytes,
}

impl Liar {
    /// Starts a liar on a free port, among the hosts and VMs of a fleet.
    ///
    /// # Errors
    /// No port is free.
    pub async fn begin(name: &str, seed: u64, plan: FleetPlan) -> io::Result<Liar> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = format!("http://{}", listener.local_addr()?);
        let messages = broadcast::channel(WAITING).0;
        let mut liar = Liar {
            name: name.to_owned(),
            address,
            draw: Draw(seed),
            victims: (0..plan.vms).map(|number| plan.vm_name(number)).collect(),
            others: (0..plan.hosts).map(|number| plan.host_name(number)).collect(),
            plan,
            messages: messages.clone(),
            lies: 0,
            last: Bytes::new(),
            _tasks: JoinSet::new(),
        };
        let first = [liar.mark(0)?, event("known", "null")].concat();
        let served = Served { messages, first: first.into() };
        let app = Router::new().route("/v1/watch", get(watch)).fallback(answer).with_state(served);
        liar._tasks.spawn(async move {
            // The server does not end by itself.
            let _ = axum::serve(listener, app).await;
        });
        Ok(liar)
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the liar's address.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns whether a manager listens.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.messages.receiver_count() > 0
    }

    /// Repeats the last message, for a manager that has connected since.
    pub fn repeat(&self) {
        let _ = self.messages.send(self.last.clone());
    }

    /// Sends the next lie, followed by its number as the host's load, which shows that the manager
    /// has read the lie.
    ///
    /// # Errors
    /// The lie cannot be serialised.
    pub fn lie(&mut self) -> io::Result<(Lie, u64)> {
        self.lies += 1;
        let (lie, text) = self.drawn().map_err(io::Error::other)?;
        let text = [text, self.mark(self.lies)?].concat();
        // Without a listener the message is dropped.
        self.last = text.into();
        let _ = self.messages.send(self.last.clone());
        Ok((lie, self.lies))
    }

    /// Returns its own state, which nobody can refute.
    fn host(&self, load: u64) -> Result<Value, serde_json::Error> {
        let mut info = serde_json::to_value(self.plan.host(0)?)?;
        info["name"] = json!(self.name);
        info["load_average_1min"] = json!(load);
        Ok(info)
    }

    fn mark(&self, number: u64) -> io::Result<Vec<u8>> {
        Ok(event("host", &self.host(number).map_err(io::Error::other)?.to_string()))
    }

    fn vm(&mut self, name: &str) -> Result<Value, serde_json::Error> {
        let mut info = serde_json::to_value(self.plan.vm(0, &self.name)?)?;
        (info["name"], info["spec"]["name"]) = (json!(name), json!(name));
        let states = [
            "running",
            "stopped",
            "failed",
            "starting",
            "paused",
            "stopping",
            "migrating-in",
            "migrating-out",
        ];
        info["state"] = json!(self.draw.of(&states));
        info["epoch"] = json!(self.draw.next() % LARGEST_EPOCH);
        info["incarnation"] = json!(format!("{:016x}{:016x}", self.draw.next(), self.draw.next()));
        info["in_doubt"] = json!(self.draw.below(4) == 0);
        info["memory_bytes"] = json!(self.draw.next() >> 16);
        info["vcpus"] = json!(self.draw.below(4096));
        info["host"] = json!(self.draw.of(&self.others.clone()));
        info["migration"] = json!(format!("v{:x}-1", self.draw.next()));
        info["page_in"] =
            json!({ "missing_pages": self.draw.next(), "connected": self.draw.below(2) == 0 });
        Ok(info)
    }

    fn drawn(&mut self) -> Result<(Lie, Vec<u8>), serde_json::Error> {
        let victim = self.draw.of(&self.victims.clone()).cloned().unwrap_or_default();
        match self.draw.below(20) {
            0..=6 => {
                let info = self.vm(&victim)?;
                // An arriving VM claims nothing: it is listed beside the holder.
                let claims = info["state"] != "migrating-in";
                let lie = if claims { Lie::Claim(victim) } else { Lie::OfItself };
                Ok((lie, event("vm", &info.to_string())))
            }
            7..=10 => self.bent("vm", &victim),
            11..=13 => self.bent("host", &victim),
            14 => self.bent("migration", &victim),
            15 => {
                let mut status = self.migration(&victim)?;
                status["from"] = json!(self.draw.of(&self.others.clone()));
                let what = format!("a migration of {victim} that leaves another host");
                Ok((Lie::Impossible(what), event("migration", &status.to_string())))
            }
            16 => Ok((Lie::OfItself, event("migration", &self.migration(&victim)?.to_string()))),
            17 => Ok((Lie::OfItself, event("vm-gone", &json!(victim).to_string()))),
            18 => {
                let name = format!("own-{:x}", self.draw.next());
                Ok((Lie::OfItself, event("vm", &self.vm(&name)?.to_string())))
            }
            _ => {
                let broken = ["{", "\"", "[[[[", "nul", "{\"name\":", "\u{fffd}"];
                let data = self.draw.of(&broken).copied().unwrap_or_default();
                let kind = self.draw.of(&["vm", "host", "migration"]).copied().unwrap_or_default();
                Ok((Lie::Impossible(format!("{kind}: {data}")), event(kind, data)))
            }
        }
    }

    /// Returns a migration that allegedly leaves this host.
    fn migration(&mut self, vm: &str) -> Result<Value, serde_json::Error> {
        let progress = serde_json::to_value(godwit_types::Progress::begin(self.draw.next() >> 12))?;
        Ok(json!({
            "id": format!("v{:x}-1", self.draw.next()), "vm": vm, "from": self.name,
            "to": self.draw.of(&self.others.clone()), "engine": "godwit",
            "started_unix_ms": self.draw.next(),
            "progress": progress, "report": null,
        }))
    }

    /// Returns a message in which one field has a value that no agent reports.
    fn bent(&mut self, kind: &str, victim: &str) -> Result<(Lie, Vec<u8>), serde_json::Error> {
        let mut message = match kind {
            "vm" => self.vm(victim)?,
            "host" => self.host(self.lies)?,
            _ => self.migration(victim)?,
        };
        let mut paths = Vec::new();
        leaves(&message, &mut String::new(), &mut paths);
        let path = self.draw.of(&paths).cloned().unwrap_or_default();
        let Some(field) = message.pointer_mut(&path) else { return self.drawn() };
        let was = field.clone();
        *field = match (&was, self.draw.below(4)) {
            // The manager cuts it and does not refuse it.
            (Value::String(_), 0) if !path.ends_with("reason") => {
                json!("x".repeat((64 << 10) + self.draw.below(LONGEST_TEXT - (64 << 10))))
            }
            (Value::Number(_), 0) => json!(-1.5e300),
            (Value::Array(_), 0) => json!(vec![json!({ "lie": 1 }); 20_000]),
            (_, 1) => json!([[["lie"]]]),
            _ => json!({ "lie": "x".repeat(self.draw.below(1 << 10)) }),
        };
        Ok((Lie::Impossible(format!("{kind}{path}")), event(kind, &message.to_string())))
    }
}

/// Collects the paths of all values that are not objects, where a wrong type is always detected.
fn leaves(value: &Value, path: &mut String, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let length = path.len();
                path.push('/');
                path.push_str(&name.replace('~', "~0").replace('/', "~1"));
                leaves(value, path, found);
                path.truncate(length);
            }
        }
        _ => found.push(path.clone()),
    }
}

fn event(kind: &str, data: &str) -> Vec<u8> {
    format!("event: {kind}\ndata: {data}\n\n").into_bytes()
}

async fn watch(State(served): State<Served>) -> Response {
    let listens = served.messages.subscribe();
    let messages = stream::unfold((Some(served.first), listens), async |(first, mut listens)| {
        let bytes = match first {
            Some(first) => first,
            // A client that is too slow has to reconnect.
            None => listens.recv().await.ok()?,
        };
        Some((Ok::<_, io::Error>(bytes), (None, listens)))
    });
    Body::from_stream(messages).into_response()
}

/// Answers any request with one of several invalid responses.
async fn answer(request: axum::extract::Request) -> Response {
    match request.uri().path().len() % 4 {
        0 => (StatusCode::OK, "{}".to_owned()).into_response(),
        1 => (StatusCode::CONFLICT, "x".repeat(1 << 20)).into_response(),
        2 => (StatusCode::OK, "[".repeat(8 << 20)).into_response(),
        _ => {
            let refusal = json!({ "code": "busy", "message": "m".repeat(60 << 10), "remedy": "" });
            (StatusCode::CONFLICT, refusal.to_string()).into_response()
        }
    }
}
