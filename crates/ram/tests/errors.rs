//! Every obstacle to dirty tracking is one clear error that names the remedy.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::sync::Arc;

use godwit_ram::{DirtyTracker, PageRange, Region, TrackError};
use support::{Bench, Start, Writer};

fn attach(writer: &Writer, regions: &[Arc<Region>]) -> TrackError {
    match DirtyTracker::attach(&writer.socket, writer.pid(), regions) {
        Ok(_) => panic!("attached to what cannot be tracked"),
        Err(error) => error,
    }
}

#[test]
fn a_missing_library() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 10)];
    let how = Start { preloaded: false, ..Start::default() };
    let mut writer = Writer::start(&bench, "tracker", &[regions[0].path()], how);
    let refused = attach(&writer, &regions);
    assert!(
        matches!(&refused, TrackError::LibraryMissing { socket, .. } if *socket == writer.socket),
        "{refused}"
    );
    assert!(refused.to_string().contains("LD_PRELOAD"), "{refused}");
    writer.socket = bench.socket("absent");
    assert!(matches!(attach(&writer, &regions), TrackError::LibraryMissing { .. }));
}

#[test]
fn a_library_that_serves_another_user() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 10)];
    let how = Start { peer_uid: 12345, ..Start::default() };
    let writer = Writer::start(&bench, "tracker", &[regions[0].path()], how);
    let error = attach(&writer, &regions);
    assert!(matches!(error, TrackError::LibraryMissing { .. }), "{error}");
}

#[test]
fn memory_that_is_not_shared_or_not_there() {
    let Some(bench) = Bench::tracking() else { return };
    let (mapped, other) = (bench.region("a", 10), bench.region("b", 10));
    let how = Start { kind: "private", ..Start::default() };
    let writer = Writer::start(&bench, "tracker", &[mapped.path()], how);
    let error = attach(&writer, &[Arc::clone(&mapped)]);
    assert!(
        matches!(&error, TrackError::NotShared { path, .. } if path == mapped.path()),
        "{error}"
    );
    assert!(error.to_string().contains("share=on"), "{error}");
    let error = attach(&writer, &[Arc::clone(&other)]);
    assert!(
        matches!(&error, TrackError::NotMapped { path, .. } if path == other.path()),
        "{error}"
    );
}

#[test]
fn memory_on_a_disk() {
    let Some(bench) = Bench::tracking() else { return };
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("disk-{}", std::process::id()));
    let region = Arc::new(Region::create(&path, 40960, None).expect("a file"));
    let writer = Writer::start(&bench, "tracker", &[], Start::default());
    let error = attach(&writer, std::slice::from_ref(&region));
    std::fs::remove_file(&path).expect("ours");
    match error {
        TrackError::NotTrackable { path } => assert_eq!(path, region.path()),
        // The target directory is itself on a tmpfs.
        TrackError::NotMapped { .. } => eprintln!("skipped: no disk to try it on"),
        error => panic!("{error}"),
    }
}

#[test]
fn a_socket_of_another_process() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 10)];
    let mut writer = Writer::start(&bench, "one", &[regions[0].path()], Start::default());
    let other = Writer::start(&bench, "other", &[regions[0].path()], Start::default());
    writer.socket.clone_from(&other.socket);
    let error = attach(&writer, &regions);
    assert!(matches!(error, TrackError::WrongProcess { .. }), "{error}");
    // The attempt leaves nothing behind.
    assert!(DirtyTracker::attach(&other.socket, other.pid(), &regions).is_ok());
}

#[test]
fn a_process_that_has_ended() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 600)];
    let mut writer = Writer::start(&bench, "tracker", &[regions[0].path()], Start::default());
    let mut tracker =
        DirtyTracker::attach(&writer.socket, writer.pid(), &regions).expect("attaches");
    tracker.start().expect("starts");
    writer.run("write", 0, 0, 600);
    writer.end();
    let mut out = Vec::new();
    let taken = tracker.take_dirty(0, PageRange::new(0, 600), 1000, &mut out);
    assert!(
        matches!(taken, Err(TrackError::ProcessGone { pid }) if pid == writer.pid()),
        "no answer is better than 'nothing dirty': {taken:?}"
    );
    assert!(matches!(tracker.count_dirty(), Err(TrackError::ProcessGone { .. })));
    assert!(matches!(tracker.start(), Err(TrackError::ProcessGone { .. })));
    assert!(matches!(attach(&writer, &regions), TrackError::ProcessGone { .. }));
}
