//! Tests of moves against a model of QEMU: block nodes, a device, and one job.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::*;
use crate::spec::{Disk, DiskBus, DiskFormat};

fn disk() -> ResolvedDisk {
    Disk::new("/srv/web.raw", DiskFormat::Raw).into()
}

fn nodes() -> Value {
    json!([
        {"node-name": "disk0-file", "file": "/dev/fdset/12"},
        {"node-name": "disk0", "file": "/dev/fdset/12"},
        {"node-name": "disk0-m1-file", "file": "/dev/fdset/3"},
        {"node-name": "disk0-m1", "file": "/dev/fdset/3"},
    ])
}

#[test]
fn qemu_says_which_image_a_disk_has() {
    let old = disk();
    let new = old.with_image("/ssd/web.qcow2".into(), DiskFormat::Qcow2, Some(Vec::new()));
    let used = |blocks: &Value, disk: &ResolvedDisk| is_used(blocks, &nodes(), "disk0", disk);
    let block = |node: &str, file: &str| json!([{"inserted": {"node-name": node, "file": file}}]);
    for (blocks, by_old, by_new) in [
        (block("disk0", "/dev/fdset/12"), true, false),
        (block("disk0-m1", "/dev/fdset/3"), false, true),
        (block("disk1", "/dev/fdset/3"), false, false),
        (json!([{"device": "empty"}, 7]), false, false),
        (json!("none"), false, false),
    ] {
        assert_eq!((used(&blocks, &old), used(&blocks, &new)), (by_old, by_new), "{blocks}");
    }
    let limited = |disk: &ResolvedDisk| ResolvedDisk { iops: Some(9), ..disk.clone() };
    for (file, by_new) in [("/dev/fdset/12", false), ("/dev/fdset/3", true)] {
        let blocks = block("disk0-limited", file);
        assert_eq!(used(&blocks, &limited(&new)), by_new);
        assert_eq!(used(&blocks, &limited(&old)), !by_new);
    }
    let pooled = old.with_image("rbd:vms/web".into(), DiskFormat::Raw, None);
    for (file, by_pooled) in [
        ("json:{\"file\": {\"pool\": \"vms\", \"image\": \"web\", \"driver\": \"rbd\"}}", true),
        ("json:{\"file\": {\"pool\": \"vms\", \"image\": \"db\", \"driver\": \"rbd\"}}", false),
        ("/dev/fdset/12", false),
    ] {
        let blocks = block("disk0-limited", file);
        assert_eq!(used(&blocks, &limited(&pooled)), by_pooled, "{file}");
    }
}

#[test]
fn descriptors_of_an_image_are_found_by_its_nodes() {
    let layers = [PassedLayer::file(0, DiskFormat::Raw)];
    let found = |disk: &ResolvedDisk| -> Vec<i64> {
        let wanted = drives::image_nodes("disk0", disk, &layers);
        wanted.iter().filter_map(|node| set_of(&nodes(), node)).collect()
    };
    assert_eq!(found(&disk()), [12]);
    let new = disk().with_image("/b".into(), DiskFormat::Raw, None);
    assert_eq!(found(&new), [3]);
    assert!(found(&new.with_image("/c".into(), DiskFormat::Raw, None)).is_empty());
    assert_eq!(set_of(&json!(null), &json!({"driver": "file", "node-name": "x"})), None);
}

#[test]
fn a_job_that_has_ended_says_why() {
    let jobs = json!([
        {"id": "other", "status": "ready"},
        {"id": "move-disk0", "type": "mirror", "status": "running", "current-progress": 5,
         "total-progress": 9},
        {"id": "move-scsi1", "type": "mirror", "status": "concluded", "current-progress": 5,
         "total-progress": 9, "error": "No space left on device"},
    ]);
    let running = FoundJob::find(&jobs, "move-disk0").unwrap();
    assert_eq!((running.done, running.total, running.is_over()), (5, 9, false));
    let failed = FoundJob::find(&jobs, "move-scsi1").unwrap();
    assert!(failed.is_over() && failed.failure().to_string().contains("No space left"));
    assert_eq!(FoundJob::find(&jobs, "move-disk1"), None);
    assert_eq!(FoundJob::find(&json!({}), "move-disk0"), None);
}

#[test]
fn a_disk_of_a_controller_keeps_its_name() {
    let scsi = ResolvedDisk { bus: DiskBus::Scsi, unit: Some(1), ..disk() };
    let new = scsi.with_image("/b".into(), DiskFormat::Raw, None);
    assert_eq!(drives::disk_name(std::slice::from_ref(&new), 0), "scsi1");
    assert_eq!(new.image_generation, 1);
    let last = ResolvedDisk { image_generation: u16::MAX, ..new };
    assert_eq!(last.with_image("/c".into(), DiskFormat::Raw, None).image_generation, 1);
}

/// A QEMU with one disk.
struct Model {
    /// Files of the block nodes, by name.
    nodes: BTreeMap<String, String>,
    /// Node that the device uses.
    device: String,
    status: Option<&'static str>,
    error: Option<&'static str>,
    target: String,
    /// The copy or the exchange fails.
    fails_at: Option<&'static str>,
    sets: usize,
}

impl Model {
    fn new() -> Model {
        let nodes =
            ["disk0-file", "disk0"].map(|node| (node.to_owned(), "/dev/fdset/40".to_owned()));
        Model {
            nodes: BTreeMap::from(nodes),
            device: "disk0".to_owned(),
            status: None,
            error: None,
            target: String::new(),
            fails_at: None,
            sets: 0,
        }
    }

    fn names(&self) -> Vec<&str> {
        self.nodes.keys().map(String::as_str).collect()
    }

    fn conclude(&mut self, error: Option<&'static str>) {
        (self.status, self.error) = (Some("concluded"), error);
    }

    fn answer(&mut self, command: &str, arguments: &Value) -> Result<Value, &'static str> {
        let name = arguments["node-name"].as_str().unwrap_or_default();
        match (command, self.status) {
            ("query-block", _) => {
                let inserted = json!({"node-name": self.device, "file": self.nodes[&self.device],
                    "image": {"virtual-size": 1 << 20}});
                return Ok(json!([{ "inserted": inserted }]));
            }
            ("query-named-block-nodes", _) => {
                let node =
                    |(name, file): (&String, &String)| json!({"node-name": name, "file": file});
                return Ok(self.nodes.iter().map(node).collect());
            }
            ("query-jobs", status) => {
                let job = status.map(|status| {
                    json!({"id": "move-disk0", "status": status, "error": self.error,
                        "current-progress": 5, "total-progress": 9})
                });
                if status == Some("running") {
                    match self.fails_at {
                        Some("copy") => self.conclude(Some("No space left on device")),
                        _ => self.status = Some("ready"),
                    }
                }
                return Ok(job.into_iter().collect());
            }
            ("add-fd", _) => {
                self.sets += 1;
                return Ok(json!({"fdset-id": self.sets}));
            }
            ("query-fdsets", _) => return Ok(json!([])),
            ("blockdev-add", _) if self.nodes.contains_key(name) => return Err("a second node"),
            ("blockdev-add", _) => {
                let below = arguments["file"].as_str().and_then(|below| self.nodes.get(below));
                let file = below.map(String::as_str).or_else(|| arguments["filename"].as_str());
                let file = file.ok_or("no file")?.to_owned();
                self.nodes.insert(name.to_owned(), file);
            }
            ("blockdev-del", _) if name == self.device => return Err("in use"),
            ("blockdev-del", _) => drop(self.nodes.remove(name).ok_or("no such node")?),
            ("blockdev-mirror", None) => {
                self.target = arguments["target"].as_str().unwrap_or_default().to_owned();
                self.status = Some("running");
            }
            ("job-complete", Some("ready")) => self.status = Some("pending"),
            ("job-finalize", Some("pending")) if self.fails_at == Some("exchange") => {
                self.conclude(Some("Operation not permitted"));
            }
            ("job-finalize", Some("pending")) => {
                self.device.clone_from(&self.target);
                self.conclude(None);
            }
            ("job-cancel", Some("running" | "ready" | "pending")) => {
                self.conclude(Some("Operation canceled"));
            }
            ("job-dismiss", Some("concluded")) => (self.status, self.error) = (None, None),
            ("qmp_capabilities" | "remove-fd", _) => {}
            _ => return Err("not now"),
        }
        Ok(json!({}))
    }
}

/// Connects to a model.
async fn connected(model: Model) -> (Qmp, Arc<Mutex<Model>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let model = Arc::new(Mutex::new(model));
    let served = model.clone();
    tokio::spawn(async move {
        let mut stream = BufReader::new(theirs);
        stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n").await.unwrap();
        let mut line = String::new();
        while stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {
            let request: Value = serde_json::from_str(&line).unwrap();
            line.clear();
            let command = request["execute"].as_str().unwrap();
            let mut answer = match served.lock().answer(command, &request["arguments"]) {
                Ok(value) => json!({"return": value}),
                Err(why) => json!({"error": {"class": "GenericError", "desc": why}}),
            };
            answer["id"] = request["id"].clone();
            stream.write_all(format!("{answer}\r\n").as_bytes()).await.unwrap();
        }
    });
    (Qmp::negotiate(ours).await.unwrap(), model)
}

fn new_disk() -> ResolvedDisk {
    disk().with_image("/ssd/web.qcow2".into(), DiskFormat::Qcow2, Some(Vec::new()))
}

const OLD: [&str; 2] = ["disk0", "disk0-file"];
const NEW: [&str; 2] = ["disk0-m1", "disk0-m1-file"];

async fn begun(qmp: &Qmp) -> DiskMove {
    let file = tempfile::tempfile().unwrap();
    let layers = [OpenLayer::new(file.into(), "/ssd/web.qcow2".as_ref(), DiskFormat::Qcow2)];
    let moving =
        qmp.begin_disk_move((&[disk()], 0), (&new_disk(), &layers), DiskCopy::default()).await;
    moving.unwrap()
}

#[tokio::test]
async fn the_images_are_exchanged_and_the_old_one_is_closed() {
    let (qmp, model) = connected(Model::new()).await;
    assert_eq!(qmp.disk_bytes(&[disk()], 0).await, Ok(1 << 20));
    let moving = begun(&qmp).await;
    let seen = Mutex::new((0, 0));
    moving.until_ready(&|done, total| *seen.lock() = (done, total)).await.unwrap();
    assert_eq!(*seen.lock(), (5, 9));
    moving.hold().await.unwrap();
    assert_eq!(model.lock().device, "disk0");
    assert_eq!(model.lock().nodes.len(), 4);
    moving.finish().await.unwrap();
    let model = model.lock();
    assert_eq!(
        (model.device.as_str(), model.names(), model.status),
        ("disk0-m1", NEW.into(), None)
    );
}

#[tokio::test]
async fn a_move_that_fails_or_is_cancelled_leaves_the_old_image_alone() {
    for fails_at in [Some("copy"), Some("exchange"), None] {
        let (qmp, model) = connected(Model { fails_at, ..Model::new() }).await;
        let moving = begun(&qmp).await;
        let ready = moving.until_ready(&|_, _| {}).await;
        assert_eq!(ready.is_err(), fails_at == Some("copy"), "{ready:?}");
        if let Err(error) = &ready {
            assert_eq!(error.to_string(), "the copy failed: No space left on device");
        }
        if fails_at == Some("exchange") {
            moving.hold().await.unwrap();
            assert!(matches!(moving.finish().await, Err(PlugError::Copy(_))));
        } else {
            assert!(moving.cancel().await);
        }
        let model = model.lock();
        assert_eq!(
            (model.device.as_str(), model.names(), model.status),
            ("disk0", OLD.into(), None)
        );
    }
}

#[tokio::test]
async fn the_next_agent_ends_a_move_as_the_record_says() {
    let settle = async |model: Model, committed| {
        let (qmp, model) = connected(model).await;
        let disk_of = if committed { new_disk() } else { disk() };
        let (old, new) = (disk(), new_disk());
        let settled = qmp.settle_disk_move((&[disk_of], 0), (&old, &new), committed).await;
        let uses_new = settled.unwrap();
        let model = model.lock();
        let (device, nodes) = if uses_new { ("disk0-m1", NEW) } else { ("disk0", OLD) };
        assert_eq!(
            (model.device.as_str(), model.names(), model.status),
            (device, nodes.into(), None)
        );
        uses_new
    };
    let at = |status| {
        let mut model = Model { status, target: "disk0-m1".to_owned(), ..Model::new() };
        for node in NEW {
            model.nodes.insert(node.to_owned(), "/dev/fdset/1".to_owned());
        }
        model
    };
    for status in ["running", "ready", "pending"] {
        assert!(!settle(at(Some(status)), false).await);
    }
    assert!(settle(at(Some("pending")), true).await);
    // The exchange failed after the record was saved, or the agent ended right after it.
    assert!(!settle(Model { fails_at: Some("exchange"), ..at(Some("pending")) }, true).await);
    let exchanged = |status| Model { device: "disk0-m1".to_owned(), ..at(status) };
    assert!(settle(exchanged(Some("concluded")), true).await);
    assert!(settle(exchanged(None), true).await);
    // QEMU never knew of it.
    assert!(!settle(Model::new(), false).await);
}
