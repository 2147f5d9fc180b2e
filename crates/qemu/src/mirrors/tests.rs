//! Tests against a model of QEMU: one disk, one mirror.

use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::*;
use crate::spec::{Disk, DiskFormat};

const NAME: &str = "godwit-mirror0";

/// A QEMU with one disk.
#[derive(Default)]
struct Model {
    /// State of the job.
    status: Option<&'static str>,
    error: Option<&'static str>,
    /// Whether the server has no room for what is left.
    refuses: bool,
    /// Whether a write that was refused pauses the job when it is to end.
    pauses: bool,
    /// Whether the target's node exists.
    has_node: bool,
    sets: usize,
    /// Arguments of the last mirror.
    job: Value,
}

impl Model {
    fn answer(&mut self, command: &str, arguments: &Value) -> Result<Value, &'static str> {
        match (command, self.status) {
            ("query-block", _) => {
                return Ok(json!([{"inserted": {"node-name": "disk0",
                    "image": {"virtual-size": 1 << 20}}}]));
            }
            ("query-jobs", status) => {
                let job = |status| {
                    json!({"id": NAME, "status": status, "error": self.error,
                        "current-progress": 5, "total-progress": 9})
                };
                let jobs = status.map(job).into_iter().collect();
                // What ends takes until the second look.
                if status == Some("aborting") {
                    self.status = Some("concluded");
                }
                return Ok(jobs);
            }
            ("query-named-block-nodes", _) => {
                let nodes = self.has_node.then(|| json!({"node-name": NAME}));
                return Ok(nodes.into_iter().collect());
            }
            ("query-fdsets", _) => {
                let sets = (1..=self.sets)
                    .map(|set| json!({"fdset-id": set, "fds": [{"fd": 40, "opaque": NAME}]}));
                return Ok(sets.collect());
            }
            ("add-fd", _) => {
                self.sets += 1;
                return Ok(json!({"fdset-id": self.sets, "fd": 40}));
            }
            ("remove-fd", _) => self.sets -= 1,
            ("blockdev-add", _) => {
                assert_eq!(arguments["server"]["path"], "/proc/self/fd/40");
                assert_eq!(arguments["export"], "disk0");
                self.has_node = true;
            }
            ("blockdev-del", None) if self.has_node => self.has_node = false,
            ("blockdev-del", _) => return Err("in use"),
            ("blockdev-mirror", None) => {
                self.job = arguments.clone();
                self.status = Some("running");
            }
            ("job-resume", Some("standby")) => self.status = Some("ready"),
            ("block-job-cancel", Some("ready")) if std::mem::take(&mut self.pauses) => {
                self.status = Some("standby");
                return Err("it is currently paused");
            }
            ("block-job-cancel", Some("ready")) if arguments["force"] == false => {
                self.status = Some(if self.refuses { "standby" } else { "concluded" });
            }
            ("block-job-cancel", Some("running" | "standby" | "ready")) => {
                assert_eq!(arguments["force"], true);
                (self.status, self.error) = (Some("aborting"), Some("Operation canceled"));
            }
            ("job-dismiss", Some("concluded")) => (self.status, self.error) = (None, None),
            ("qmp_capabilities", _) => {}
            _ => return Err("not now"),
        }
        Ok(json!({}))
    }
}

/// Connects to a model.
async fn connected() -> (Qmp, Arc<Mutex<Model>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let model = Arc::new(Mutex::new(Model::default()));
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

fn disk() -> ResolvedDisk {
    Disk::new("/srv/web.raw", DiskFormat::Raw).into()
}

async fn begin(qmp: &Qmp, disk: &ResolvedDisk, whole: bool) {
    let file = tempfile::tempfile().unwrap();
    let mirror = Mirror { name: NAME, export: "disk0", socket: file.as_fd(), whole };
    qmp.begin_mirror((std::slice::from_ref(disk), 0), mirror).await.unwrap();
}

async fn state(qmp: &Qmp) -> MirrorState {
    qmp.mirrors(&[NAME.to_owned()]).await.unwrap().remove(0)
}

#[tokio::test]
async fn a_mirror_in_step_ends_with_everything_sent() {
    let (qmp, model) = connected().await;
    assert_eq!(state(&qmp).await, MirrorState::Missing);
    begin(&qmp, &disk(), false).await;
    assert_eq!(model.lock().job["sync"], "top");
    assert_eq!(model.lock().job["copy-mode"], "write-blocking");
    assert_eq!(model.lock().job["filter-node-name"], Value::Null);
    assert_eq!(state(&qmp).await, MirrorState::Copying { left_bytes: 4 });
    let early = qmp.end_mirror(NAME).await;
    assert!(matches!(early, Err(PlugError::Copy(_))), "{early:?}");
    model.lock().status = Some("standby");
    assert_eq!(state(&qmp).await, MirrorState::Paused { left_bytes: 4 });
    qmp.resume_mirror(NAME).await.unwrap();
    assert_eq!(state(&qmp).await, MirrorState::InStep { left_bytes: 4 });
    qmp.resume_mirror(NAME).await.unwrap();
    // The stop of the guest pauses it, and then a write that was refused.
    model.lock().status = Some("standby");
    model.lock().pauses = true;
    qmp.end_mirror(NAME).await.unwrap();
    qmp.remove_mirror(NAME).await.unwrap();
    let model = model.lock();
    assert_eq!((model.status, model.has_node, model.sets), (None, false, 0));
}

#[tokio::test]
async fn a_mirror_that_does_not_end_holds_up_a_stopped_guest_for_a_moment() {
    let (qmp, model) = connected().await;
    begin(&qmp, &disk(), false).await;
    model.lock().status = Some("ready");
    model.lock().refuses = true;
    let ended = qmp.end_mirror(NAME).await;
    let Err(PlugError::Qmp(QmpError::Timeout { limit, .. })) = &ended else { panic!("{ended:?}") };
    assert_eq!(*limit, IN_STEP_LIMIT);
    qmp.remove_mirror(NAME).await.unwrap();
    assert_eq!(state(&qmp).await, MirrorState::Missing);
}

#[tokio::test]
async fn a_mirror_is_removed_whatever_it_does() {
    for status in ["running", "standby", "ready", "concluded"] {
        let (qmp, model) = connected().await;
        begin(&qmp, &disk(), false).await;
        model.lock().status = Some(status);
        qmp.remove_mirror(NAME).await.unwrap();
        assert_eq!(state(&qmp).await, MirrorState::Missing, "{status}");
        qmp.remove_mirror(NAME).await.unwrap();
        assert!(!model.lock().has_node);
    }
}

#[tokio::test]
async fn what_backing_files_have_is_sent_on_request() {
    let layered = disk().with_image(
        "/srv/web.qcow2".into(),
        DiskFormat::Qcow2,
        Some(vec![crate::spec::BackingFile { path: "/srv/a.raw".into(), format: DiskFormat::Raw }]),
    );
    let layered = ResolvedDisk { image_generation: 0, ..layered };
    for (whole, sync) in [(true, "full"), (false, "top")] {
        let (qmp, model) = connected().await;
        begin(&qmp, &layered, whole).await;
        assert_eq!(model.lock().job["sync"], sync);
    }
}
