//! Migration of device state between two QEMUs, with memory copied by the test.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use godwit_qemu::{
    EVENTS, LATE_BLOCK_ACTIVATE, MigrationStatus, PAUSE_BEFORE_SWITCHOVER, QemuProcess, RESUME,
    RunState, SHUTDOWN, STOP, X_IGNORE_SHARED, wait_for_event,
};

use crate::bench::{Bench, LIMIT, written};

/// Waits for a migration status.
async fn reached(
    events: &mut tokio::sync::broadcast::Receiver<godwit_qemu::QmpEvent>,
    status: &MigrationStatus,
) {
    let what = status.name();
    wait_for_event(events, &what, LIMIT, |event| {
        MigrationStatus::of_event(event).as_ref() == Some(status)
    })
    .await
    .unwrap();
}

fn copy_memory(bench: &Bench, from: &str, to: &str) {
    let bytes = std::fs::read(bench.path(&format!("{from}.0.ram"))).unwrap();
    // Into the existing file: the destination maps it already.
    let file =
        std::fs::File::options().write(true).open(bench.path(&format!("{to}.0.ram"))).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
}

fn count(ram: &Path) -> u32 {
    let mut bytes = [0; 4];
    let file = std::fs::File::open(ram).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0x8000).unwrap();
    u32::from_le_bytes(bytes)
}

async fn source(bench: &Bench) -> QemuProcess {
    let source = bench.start("a", &bench.spec(|_| {})).await.unwrap();
    source.qmp.resume().await.unwrap();
    written(&source.run_dir, 0).await;
    let capabilities = [(X_IGNORE_SHARED, true), (PAUSE_BEFORE_SWITCHOVER, true), (EVENTS, true)];
    source.qmp.migrate_set_capabilities(&capabilities).await.unwrap();
    source
}

async fn shadow(bench: &Bench) -> QemuProcess {
    let mut launch = bench.launch("b", &bench.spec(|_| {}));
    (launch.incoming, launch.paused) = (true, true);
    let shadow = bench.begin(launch).await.unwrap();
    let capabilities = [(X_IGNORE_SHARED, true), (LATE_BLOCK_ACTIVATE, true), (EVENTS, true)];
    shadow.qmp.migrate_set_capabilities(&capabilities).await.unwrap();
    shadow
}

#[tokio::test]
async fn a_guest_moves_with_its_disk() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let source = source(&bench).await;
    let shadow = shadow(&bench).await;
    let (near, far) = UnixStream::pair().unwrap();
    source.qmp.getfd("state", near.as_fd()).await.unwrap();
    shadow.qmp.getfd("state", far.as_fd()).await.unwrap();
    drop((near, far));
    let (mut at_source, mut at_shadow) = (source.qmp.events(), shadow.qmp.events());
    shadow.qmp.migrate_incoming("fd:state").await.unwrap();
    source.qmp.migrate("fd:state").await.unwrap();
    wait_for_event(&mut at_source, "STOP", LIMIT, |event| event.name == STOP).await.unwrap();
    reached(&mut at_source, &MigrationStatus::PreSwitchover).await;
    copy_memory(&bench, "a", "b");
    let count_at_stop = count(&bench.path("a.0.ram"));
    source.qmp.migrate_continue(&MigrationStatus::PreSwitchover).await.unwrap();
    reached(&mut at_source, &MigrationStatus::Completed).await;
    reached(&mut at_shadow, &MigrationStatus::Completed).await;
    assert_eq!(shadow.qmp.status().await.unwrap(), RunState::Paused);
    assert_eq!(source.qmp.status().await.unwrap(), RunState::Postmigrate);
    let info = source.qmp.query_migrate().await.unwrap();
    assert_eq!(info.status, Some(MigrationStatus::Completed));
    shadow.qmp.resume().await.unwrap();
    written(&shadow.run_dir, 0).await;
    assert!(count(&bench.path("b.0.ram")) > count_at_stop, "it continues to count");
    assert_eq!(count(&bench.path("a.0.ram")), count_at_stop);
    source.quit().await;
    shadow.quit().await;
}

#[tokio::test]
async fn a_cancelled_move_leaves_the_guest_running_with_its_disk() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let source = source(&bench).await;
    let (near, far) = UnixStream::pair().unwrap();
    source.qmp.getfd("state", near.as_fd()).await.unwrap();
    let mut events = source.qmp.events();
    source.qmp.migrate("fd:state").await.unwrap();
    reached(&mut events, &MigrationStatus::PreSwitchover).await;
    source.qmp.migrate_cancel().await.unwrap();
    reached(&mut events, &MigrationStatus::Cancelled).await;
    drop(far);
    assert_eq!(source.qmp.status().await.unwrap(), RunState::Running);
    let so_far = written(&source.run_dir, 0).await;
    written(&source.run_dir, so_far).await;
    source.quit().await;
}

#[tokio::test]
async fn the_source_can_take_the_guest_back_after_all_was_sent() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let source = source(&bench).await;
    let shadow = shadow(&bench).await;
    let (near, far) = UnixStream::pair().unwrap();
    source.qmp.getfd("state", near.as_fd()).await.unwrap();
    shadow.qmp.getfd("state", far.as_fd()).await.unwrap();
    drop((near, far));
    let (mut at_source, mut at_shadow) = (source.qmp.events(), shadow.qmp.events());
    shadow.qmp.migrate_incoming("fd:state").await.unwrap();
    source.qmp.migrate("fd:state").await.unwrap();
    reached(&mut at_source, &MigrationStatus::PreSwitchover).await;
    copy_memory(&bench, "a", "b");
    source.qmp.migrate_continue(&MigrationStatus::PreSwitchover).await.unwrap();
    reached(&mut at_source, &MigrationStatus::Completed).await;
    reached(&mut at_shadow, &MigrationStatus::Completed).await;
    // The shadow has everything but the disk's lock: no commit came, so the source resumes.
    shadow.kill().await;
    source.qmp.resume().await.unwrap();
    let so_far = written(&source.run_dir, 0).await;
    written(&source.run_dir, so_far).await;
    source.quit().await;
}

#[tokio::test]
async fn cont_before_the_state_starts_the_guest_after_the_load() {
    let Some(bench) = Bench::new().await else { return };
    bench.disk();
    let source = source(&bench).await;
    let shadow = shadow(&bench).await;
    let (from_source, mut state_out) = UnixStream::pair().unwrap();
    let (mut state_in, to_shadow) = UnixStream::pair().unwrap();
    source.qmp.getfd("state", from_source.as_fd()).await.unwrap();
    shadow.qmp.getfd("state", to_shadow.as_fd()).await.unwrap();
    drop((from_source, to_shadow));
    let (mut at_source, mut at_shadow) = (source.qmp.events(), shadow.qmp.events());
    shadow.qmp.migrate_incoming("fd:state").await.unwrap();
    let stream = tokio::task::spawn_blocking(move || {
        let mut stream = Vec::new();
        state_out.read_to_end(&mut stream).unwrap();
        stream
    });
    source.qmp.migrate("fd:state").await.unwrap();
    reached(&mut at_source, &MigrationStatus::PreSwitchover).await;
    copy_memory(&bench, "a", "b");
    // The source still holds the disk's lock: the shadow cannot take it.
    let refusal = shadow.qmp.resume().await.unwrap_err();
    assert!(refusal.to_string().contains("lock"), "{refusal}");
    source.qmp.migrate_continue(&MigrationStatus::PreSwitchover).await.unwrap();
    let stream = stream.await.unwrap();
    // The stream is complete and the disk released, as at a commit. The shadow may start as soon as
    // it has loaded.
    shadow.qmp.execute("cont", serde_json::Value::Null).await.unwrap();
    assert_eq!(shadow.qmp.status().await.unwrap(), RunState::Inmigrate);
    state_in.write_all(&stream).unwrap();
    wait_for_event(&mut at_shadow, "RESUME", LIMIT, |event| event.name == RESUME).await.unwrap();
    written(&shadow.run_dir, 0).await;
    assert_eq!(shadow.qmp.status().await.unwrap(), RunState::Running);
    source.quit().await;
    shadow.quit().await;
}

/// Checks when QEMU reports a shutdown that the guest requests right before the stop. The device
/// state does not carry it, so the destination cannot know. QEMU reports it before the completion
/// of the migration, however close the two are.
#[tokio::test]
async fn a_shutdown_before_the_stop_is_reported_before_the_migration_completes() {
    for _ in 0..5 {
        let Some(bench) = Bench::new().await else { return };
        bench.disk();
        let source = source(&bench).await;
        let (near, mut state_out) = UnixStream::pair().unwrap();
        source.qmp.getfd("state", near.as_fd()).await.unwrap();
        drop(near);
        let drain = tokio::task::spawn_blocking(move || state_out.read_to_end(&mut Vec::new()));
        let mut events = source.qmp.events();
        source.qmp.migrate("fd:state").await.unwrap();
        reached(&mut events, &MigrationStatus::PreSwitchover).await;
        // The machine's power registers: their base as set by firmware, then "off" (ICH9, PM1a
        // control).
        let monitor = |line: &str| {
            let line = serde_json::json!({ "command-line": line });
            source.qmp.execute("human-monitor-command", line)
        };
        for line in
            ["o/w 0xcf8 0x8000f840", "o/w 0xcfc 0x601", "o/w 0xcf8 0x8000f844", "o/w 0xcfc 0x80"]
        {
            monitor(line).await.unwrap();
        }
        // Both in one turn of QEMU's main loop, or nearly.
        let (_, _) = tokio::join!(
            monitor("o/h 0x604 0x2000"),
            source.qmp.migrate_continue(&MigrationStatus::PreSwitchover)
        );
        loop {
            match events.recv().await {
                Ok(event) if event.name == SHUTDOWN => break,
                Ok(event) => assert_ne!(
                    MigrationStatus::of_event(&event),
                    Some(MigrationStatus::Completed),
                    "it completes before it reports the shutdown of the guest"
                ),
                Err(error) => panic!("it does not report the shutdown of the guest: {error}"),
            }
        }
        assert!(source.qmp.guest_has_shut_down());
        assert!(source.ended().await.guest_shut_down);
        drop(drain.await.unwrap());
    }
}
