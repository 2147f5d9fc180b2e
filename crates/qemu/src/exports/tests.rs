//! Tests against a model of QEMU: a server, exports, bitmaps of one image, a device with limits.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::*;
use crate::spec::{Disk, DiskFormat};

/// A QEMU with one disk.
#[derive(Default)]
struct Model {
    /// Node that the device uses, if it is not the image.
    limited: bool,
    has_server: bool,
    descriptors: usize,
    /// Bitmaps of the image, and whether they note what is written.
    bitmaps: BTreeMap<String, bool>,
    /// Bitmaps of each export.
    exports: BTreeMap<String, Vec<String>>,
    /// Exports that are being removed.
    ending: Vec<String>,
    /// The removal of an export is not reported by an event.
    is_silent: bool,
    throttle: Value,
    /// Its version.
    major: u64,
    /// Threads that serve disks.
    threads: usize,
}

impl Model {
    fn answer(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        match command {
            "query-block" => return Ok(self.blocks()),
            "query-version" => return Ok(json!({"qemu": {"major": self.major, "minor": 2}})),
            "query-iothreads" => {
                return Ok(vec![json!({"id": "scsi0-iothread"}); self.threads].into());
            }
            "query-named-block-nodes" => return Ok(self.nodes()),
            "query-block-exports" => {
                // What is asked for twice is gone at the second time.
                let exports = self.exports.keys().map(|id| json!({"id": id})).collect();
                self.ending.drain(..).for_each(|id| drop(self.exports.remove(&id)));
                return Ok(exports);
            }
            "getfd" => self.descriptors += 1,
            "closefd" => self.descriptors -= 1,
            "nbd-server-start" if self.has_server => {
                return Err("NBD server already running".to_owned());
            }
            "nbd-server-start" => {
                assert_eq!(arguments["addr"]["data"]["str"], LISTENER);
                (self.has_server, self.descriptors) = (true, self.descriptors - 1);
            }
            "block-dirty-bitmap-add" => self.add_bitmap(arguments)?,
            "block-dirty-bitmap-disable" => {
                *self.bitmaps.get_mut(&text("name")).ok_or("no such bitmap")? = false;
            }
            "block-dirty-bitmap-remove" => {
                let name = text("name");
                if self.exports.values().flatten().any(|busy| *busy == name) {
                    return Err(format!("Bitmap '{name}' is currently in use"));
                }
                self.bitmaps.remove(&name).ok_or("Dirty bitmap not found")?;
            }
            "transaction" => {
                let before = self.bitmaps.clone();
                for action in arguments["actions"].as_array().unwrap() {
                    let kind = action["type"].as_str().unwrap();
                    if let Err(why) = self.answer(kind, &action["data"]) {
                        self.bitmaps = before;
                        return Err(why);
                    }
                }
            }
            "block-export-add" => self.add_export(arguments)?,
            "block-export-del" if self.exports.contains_key(&text("id")) => {
                self.ending.push(text("id"));
            }
            "block-export-del" => return Err(format!("Export '{}' is not found", text("id"))),
            "block_set_io_throttle" => self.throttle = arguments.clone(),
            "qmp_capabilities" => {}
            _ => return Err("not now".to_owned()),
        }
        Ok(json!({}))
    }

    fn blocks(&self) -> Value {
        let top = if self.limited { "disk0-limited" } else { "disk0" };
        json!([{"device": "", "qdev": "/machine/peripheral/virtio-disk0/virtio-backend",
            "inserted": {"node-name": top, "image": {"virtual-size": 1 << 20}}}])
    }

    fn nodes(&self) -> Value {
        let bitmaps = self.bitmaps.iter();
        let bitmaps: Vec<Value> =
            bitmaps.map(|(name, is_on)| json!({"name": name, "recording": is_on})).collect();
        let mut nodes = vec![json!({"node-name": "disk0-file"}), json!({"node-name": "disk0"})];
        if !bitmaps.is_empty() {
            nodes[1]["dirty-bitmaps"] = bitmaps.into();
        }
        nodes.into()
    }

    fn add_bitmap(&mut self, arguments: &Value) -> Result<(), String> {
        if arguments["node"] != "disk0" || arguments["granularity"] != GRANULARITY_BYTES {
            return Err("no such node".to_owned());
        }
        let name = arguments["name"].as_str().unwrap().to_owned();
        match self.bitmaps.insert(name, true) {
            None => Ok(()),
            Some(_) => Err("Bitmap already exists".to_owned()),
        }
    }

    fn add_export(&mut self, arguments: &Value) -> Result<(), String> {
        let bitmaps = arguments["bitmaps"].as_array().unwrap();
        let names: Vec<String> =
            bitmaps.iter().map(|name| name.as_str().unwrap().to_owned()).collect();
        let is_enabled = |name: &String| self.bitmaps.get(name).copied().unwrap_or(true);
        if arguments["writable"] == false && names.iter().any(is_enabled) {
            return Err("Enabled bitmap incompatible with readonly export".to_owned());
        }
        assert_eq!(arguments["id"], arguments["name"]);
        self.exports.insert(arguments["id"].as_str().unwrap().to_owned(), names);
        Ok(())
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
            let text = answer_to(&mut served.lock(), &request);
            stream.write_all(text.as_bytes()).await.unwrap();
        }
    });
    (Qmp::negotiate(ours).await.unwrap(), model)
}

/// Returns the answer, and the events that follow it.
fn answer_to(model: &mut Model, request: &Value) -> String {
    let command = request["execute"].as_str().unwrap();
    let mut answer = match model.answer(command, &request["arguments"]) {
        Ok(value) => json!({"return": value}),
        Err(why) => json!({"error": {"class": "GenericError", "desc": why}}),
    };
    answer["id"] = request["id"].clone();
    let mut text = format!("{answer}\r\n");
    if !model.is_silent {
        for id in std::mem::take(&mut model.ending) {
            model.exports.remove(&id);
            let event = json!({"event": EXPORT_DELETED, "data": {"id": id}});
            text.push_str(&format!("{event}\r\n"));
        }
    }
    text
}

fn disk() -> ResolvedDisk {
    Disk::new("/srv/web.raw", DiskFormat::Raw).into()
}

fn swap(present: &str, next: &str) -> (String, String, String) {
    ("disk0".to_owned(), present.to_owned(), next.to_owned())
}

#[tokio::test]
async fn the_server_of_an_earlier_agent_is_left_as_it_is() {
    let (qmp, model) = connected(Model::default()).await;
    let file = tempfile::tempfile().unwrap();
    assert_eq!(qmp.start_nbd(file.as_fd(), 8).await, Ok(true));
    assert_eq!(qmp.start_nbd(file.as_fd(), 8).await, Ok(false));
    assert_eq!(model.lock().descriptors, 0);
}

#[tokio::test]
async fn rounds_swap_bitmaps_and_remove_what_they_have_read() {
    let (qmp, model) = connected(Model::default()).await;
    assert_eq!(qmp.bitmaps("disk0").await, Ok(Vec::new()));
    qmp.add_bitmap("disk0", "b0").await.unwrap();
    assert!(qmp.add_export("r", "disk0", &["b0"], false).await.is_err(), "it is enabled");
    qmp.swap_bitmaps(&[swap("b0", "b1")]).await.unwrap();
    assert_eq!(qmp.bitmaps("disk0").await, Ok(vec!["b0".to_owned(), "b1".to_owned()]));
    assert_eq!(qmp.bitmaps("disk7").await, Ok(Vec::new()));
    // A swap that QEMU refuses changes nothing.
    assert!(qmp.swap_bitmaps(&[swap("b1", "b2"), swap("b9", "b3")]).await.is_err());
    assert_eq!(model.lock().bitmaps, BTreeMap::from([("b0".into(), false), ("b1".into(), true)]));
    qmp.add_export("r", "disk0", &["b0"], false).await.unwrap();
    assert!(qmp.remove_bitmap("disk0", "b0").await.is_err(), "the export uses it");
    qmp.remove_export("r").await.unwrap();
    for _ in 0..2 {
        qmp.remove_bitmap("disk0", "b0").await.unwrap();
        qmp.remove_export("r").await.unwrap();
    }
    assert_eq!(qmp.bitmaps("disk0").await, Ok(vec!["b1".to_owned()]));
}

#[tokio::test]
async fn an_export_is_found_to_be_gone_without_its_event() {
    let (qmp, model) = connected(Model { is_silent: true, ..Model::default() }).await;
    qmp.add_export("r", "disk0", &[], false).await.unwrap();
    qmp.remove_export("r").await.unwrap();
    assert!(model.lock().exports.is_empty());
}

#[tokio::test]
async fn an_old_qemu_exports_no_disk_with_a_thread() {
    let threaded = ResolvedDisk { iothread: true, ..disk() };
    let scsi = ResolvedDisk { bus: DiskBus::Scsi, unit: Some(0), ..disk() };
    for (major, threads, unsound) in
        [(7, 0, [false, true, false]), (7, 1, [false, true, true]), (9, 1, [false; 3])]
    {
        let (qmp, _) = connected(Model { major, threads, ..Model::default() }).await;
        for (disk, unsound) in [disk(), threaded.clone(), scsi.clone()].iter().zip(unsound) {
            assert_eq!(qmp.export_is_unsound(disk).await, Ok(unsound), "{major} {disk:?}");
        }
    }
}

#[tokio::test]
async fn the_image_is_found_below_its_limits() {
    let limited = ResolvedDisk { iops: Some(9), ..disk() };
    let moved = limited.with_image("/b".into(), DiskFormat::Raw, None);
    let (qmp, _) = connected(Model { limited: true, ..Model::default() }).await;
    assert_eq!(qmp.image_node(&[limited], 0).await, Ok(("disk0".to_owned(), 1 << 20)));
    assert_eq!(qmp.image_node(&[moved], 0).await, Err(PlugError::OtherDisks));
    assert_eq!(qmp.image_node(&[disk()], 0).await, Err(PlugError::OtherDisks));
    assert_eq!(qmp.image_node(&[], 0).await, Err(PlugError::OtherDisks));
    let (qmp, _) = connected(Model::default()).await;
    assert_eq!(qmp.image_node(&[disk()], 0).await, Ok(("disk0".to_owned(), 1 << 20)));
}

#[tokio::test]
async fn writes_are_limited_at_the_device() {
    let (qmp, model) = connected(Model::default()).await;
    for (limit, expected) in
        [(Some(5 << 20), 5 << 20), (Some(0), 1), (Some(u64::MAX), MOST_BYTES_PER_S), (None, 0)]
    {
        qmp.limit_writes(&[disk()], 0, limit).await.unwrap();
        let throttle = model.lock().throttle.clone();
        assert_eq!(throttle["bps_wr"], expected);
        assert_eq!(throttle["id"], "/machine/peripheral/virtio-disk0/virtio-backend");
    }
    let other = ResolvedDisk { bus: DiskBus::Scsi, unit: Some(3), ..disk() };
    assert_eq!(qmp.limit_writes(&[other], 0, None).await, Err(PlugError::OtherDisks));
}

#[test]
fn only_bitmaps_that_are_known_to_be_empty_are() {
    let nodes = json!([
        {"node-name": "a", "dirty-bitmaps": [{"name": "b0", "count": 0}, {"name": "b1", "count": 1},
            {"name": "b2"}, {"count": 0}]},
        {"node-name": "b"},
        {"dirty-bitmaps": [{"name": "b0", "count": 0}]},
    ]);
    assert_eq!(empty_of(&nodes), HashSet::from([("a".to_owned(), "b0".to_owned())]));
    assert!(empty_of(&Value::Null).is_empty());
}
