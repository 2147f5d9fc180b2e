//! Probes between two agents on one machine: measurements, refusals, and cleanup after the client
//! has gone.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "the other tests need more of it")]
mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;

use godwit_api::{
    Client, ClientError, Endpoint, ErrorCode, IncomingProbeAccepted, IncomingProbeRequest,
    ProbeEvent, ProbeEvents, ProbeRequest,
};
use godwit_host::Config;
use godwit_types::probe::{ProbeReport, ProbeStage, STREAM_COUNTS};
use rustix::mount::UnmountFlags;
use support::{TestHost, until};

/// Directories of a second agent on the host of the first.
struct Second {
    config: Config,
}

impl Second {
    /// Configures the hosts a, at 127.0.0.1, and b, at 127.0.0.2, as peers of each other.
    fn beside(host: &mut TestHost) -> Second {
        let at = host.path().join("b");
        let address = |last| IpAddr::from([127, 0, 0, last]);
        let peers =
            |name: &str, last| [(name.to_owned(), format!("http://127.0.0.{last}:7700"))].into();
        let config = Config {
            name: "b".into(),
            listen: vec![(address(2), 7700).into()],
            migration_addresses: vec![address(2)],
            peers: peers("a", 1),
            socket: at.join("agent.sock"),
            state_dir: at.join("state"),
            run_dir: at.join("run"),
            ram_dir: None,
            ..host.config.clone()
        };
        host.config.listen = vec![(address(1), 7700).into()];
        host.config.migration_addresses = vec![address(1)];
        host.config.peers = peers("b", 2);
        Second { config }
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.config.ram_dir(), UnmountFlags::DETACH);
    }
}

fn quick() -> ProbeRequest {
    ProbeRequest { seconds: 0.1, ..ProbeRequest::to("b") }
}

fn client_of(socket: PathBuf) -> Client {
    Client::new(Endpoint::Unix(socket))
}

/// Runs `test` beside both agents.
fn with_both(host: &TestHost, second: &Second, test: impl AsyncFnOnce(Client, Client)) {
    host.with_agent(async |a| {
        let b = client_of(second.config.socket.clone());
        let agent = tokio::spawn(godwit_host::run(second.config.clone()));
        until("the second agent answers", async || {
            assert!(!agent.is_finished(), "the second agent ended");
            b.host().await.is_ok()
        })
        .await;
        test(a, b).await;
    });
}

async fn to_the_end(mut events: ProbeEvents) -> (ProbeReport, Vec<ProbeStage>) {
    let mut stages = Vec::new();
    loop {
        match events.next().await.unwrap().expect("the last event is a report") {
            ProbeEvent::Progress(progress) => stages.push(progress.stage),
            ProbeEvent::Report(report) => return (*report, stages),
            ProbeEvent::Failed(error) => panic!("{error}"),
        }
    }
}

fn code(asked: Result<ProbeEvents, ClientError>) -> Option<ErrorCode> {
    let error = asked.unwrap_err();
    eprintln!("  error: {error}");
    error.code()
}

#[test]
fn every_figure_of_a_lane_is_measured() {
    let Some(mut host) = TestHost::new() else { return };
    let second = Second::beside(&mut host);
    with_both(&host, &second, async |a, _| {
        let (report, stages) = to_the_end(a.probe(&quick()).await.unwrap()).await;
        assert_eq!((report.from.as_str(), report.to.as_str(), report.encrypted), ("a", "b", false));
        let [lane] = &report.lanes[..] else { panic!("{report:#?}") };
        assert_eq!(lane.failure, None);
        assert_eq!((lane.from, lane.to.ip()), (Some([127, 0, 0, 1].into()), [127, 0, 0, 2].into()));
        assert!(lane.connect_ms.is_some() && lane.secure_ms.is_none() && lane.limit.is_some());
        assert_eq!(lane.round_trip.unwrap().count, 50);
        let mtu = lane.mtu.unwrap();
        assert_eq!((mtu.interface, mtu.passes, mtu.black_hole), (Some(65535), Some(65535), false));
        assert_eq!(
            lane.throughput.iter().map(|run| run.streams).collect::<Vec<_>>(),
            STREAM_COUNTS
        );
        assert!(lane.throughput.iter().all(|run| run.bytes_per_s > 0.0 && run.source.cores > 0));
        assert!(lane.throughput.iter().any(|run| run.destination.threads_cores > 0.0), "{lane:#?}");
        assert!(report.together.is_empty() && report.estimate.is_some());
        assert!(
            stages.contains(&ProbeStage::RoundTrip) && stages.contains(&ProbeStage::Throughput)
        );
    });
}

#[test]
fn a_failed_lane_is_reported_and_the_others_are_measured() {
    let Some(mut host) = TestHost::new() else { return };
    let mut second = Second::beside(&mut host);
    // The first host lacks the address of the second lane.
    host.config.migration_addresses.push([192, 0, 2, 1].into());
    second.config.migration_addresses.push([127, 0, 0, 3].into());
    with_both(&host, &second, async |a, _| {
        let (report, _) = to_the_end(a.probe(&quick()).await.unwrap()).await;
        let [whole, broken] = &report.lanes[..] else { panic!("{report:#?}") };
        assert!(whole.failure.is_none() && whole.throughput.len() == STREAM_COUNTS.len());
        let failure = broken.failure.as_ref().unwrap();
        assert!(failure.message.contains("127.0.0.3") && !failure.remedy.is_empty(), "{failure:?}");
        assert!(report.estimate.is_some() && report.together.is_empty());
    });
}

#[test]
fn lanes_are_also_measured_together() {
    let Some(mut host) = TestHost::new() else { return };
    let mut second = Second::beside(&mut host);
    host.config.migration_addresses.push([127, 0, 0, 4].into());
    second.config.migration_addresses.push([127, 0, 0, 3].into());
    with_both(&host, &second, async |a, _| {
        let (report, stages) = to_the_end(a.probe(&quick()).await.unwrap()).await;
        assert_eq!(report.lanes.len(), 2);
        assert!(
            !report.together.is_empty() && stages.contains(&ProbeStage::Together),
            "{report:#?}"
        );
    });
}

#[test]
fn one_probe_runs_at_a_time_and_none_outlives_its_client() {
    let Some(mut host) = TestHost::new() else { return };
    let second = Second::beside(&mut host);
    with_both(&host, &second, async |a, b| {
        let mut first = a.probe(&ProbeRequest { seconds: 30.0, ..quick() }).await.unwrap();
        assert!(matches!(first.next().await, Ok(Some(ProbeEvent::Progress(_)))));
        assert_eq!(code(a.probe(&quick()).await), Some(ErrorCode::Busy));
        // Its destination accepts no other probe either, and begins none.
        let other = IncomingProbeRequest { from: "c".into(), limit_ms: 1000 };
        let refused =
            b.post::<_, IncomingProbeAccepted>("/v1/incoming-probes", &other).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::Busy), "{refused}");
        let back = ProbeRequest { to: "a".into(), ..quick() };
        assert_eq!(code(b.probe(&back).await), Some(ErrorCode::Busy));
        drop(first);
        until("both hosts are free again", async || match a.probe(&quick()).await {
            Ok(again) => {
                to_the_end(again).await;
                true
            }
            Err(error) => {
                assert_eq!(error.code(), Some(ErrorCode::Busy), "{error}");
                false
            }
        })
        .await;
    });
}

#[test]
fn a_probe_without_a_connection_expires() {
    let Some(mut host) = TestHost::new() else { return };
    let second = Second::beside(&mut host);
    with_both(&host, &second, async |_, b| {
        let wanted = IncomingProbeRequest { from: "a".into(), limit_ms: 1 };
        let ask = async || b.post::<_, IncomingProbeAccepted>("/v1/incoming-probes", &wanted).await;
        let first = ask().await.unwrap();
        until("the probe expires", async || ask().await.is_ok()).await;
        let gone = b.delete(&format!("/v1/incoming-probes/{}", first.id)).await.unwrap_err();
        assert_eq!(gone.code(), Some(ErrorCode::NotFound));
    });
}

#[test]
fn an_impossible_probe_is_refused_with_its_reason() {
    let Some(mut host) = TestHost::new() else { return };
    let old = host.run(async { TcpListener::bind("127.0.0.1:0").unwrap() });
    host.config.peers.insert("old".into(), format!("http://{}", old.local_addr().unwrap()));
    std::thread::spawn(move || answer_like_an_old_agent(&old));
    host.with_agent(async |a| {
        let to = async |host: &str| code(a.probe(&ProbeRequest::to(host)).await);
        assert_eq!(to("a").await, Some(ErrorCode::InvalidRequest));
        assert_eq!(to("z").await, Some(ErrorCode::NotFound));
        // No agent listens there.
        assert_eq!(to("b").await, Some(ErrorCode::PeerUnreachable));
        assert_eq!(to("old").await, Some(ErrorCode::PeerVersion));
        for wrong in [
            ProbeRequest { seconds: 31.0, ..quick() },
            ProbeRequest { seconds: f64::NAN, ..quick() },
            ProbeRequest { guest_bytes: 0, ..quick() },
        ] {
            assert_eq!(code(a.probe(&wrong).await), Some(ErrorCode::InvalidRequest), "{wrong:?}");
        }
    });
}

/// Answers like a release that has no probes.
fn answer_like_an_old_agent(listener: &TcpListener) {
    let body = concat!(
        r#"{"code":"not-found","message":"the agent knows no such request","#,
        r#""remedy":"see docs/api.md"}"#
    );
    for mut stream in listener.incoming().flatten() {
        let mut request = [0; 4096];
        let _ = stream.read(&mut request);
        let head = "HTTP/1.1 404 Not Found\r\ncontent-type: application/json";
        let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    }
}
