//! Tests of the load over the API.

use godwit_api::LoadSample;
use godwit_api::control::{LoadHistory, LoadMetric, LoadTop, ProblemCode, Role};
use http::Method;

use crate::agents::following::LoadSink;
use crate::http::tests::*;
use crate::rig::{host, put_host};

#[tokio::test(flavor = "multi_thread")]
async fn a_viewer_sees_the_load_of_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let managed = Managed::begin().await;
    managed.manager.state.change(|inventory| {
        put_host(inventory, host("a", None), &[], Vec::new());
        None
    });
    managed.manager.loads.keep_in(dir.path()).unwrap();
    let mut sample = LoadSample { interval_ms: 5_000, ..LoadSample::default() };
    sample.host.memory_used_bytes = 1 << 30;
    managed.manager.loads.take("a", Box::new(sample));
    let viewer = managed.token(Role::Viewer).await.token;
    let get = async |path: &str| managed.ask(Method::GET, path, Some(&viewer), None).await;
    let history: LoadHistory = get("/api/v1/load?object=host:a&resolution=1min").await.read();
    let memory = history.series.iter().find(|one| one.metric == LoadMetric::MemoryUsedBytes);
    let memory = memory.unwrap();
    assert_eq!(memory.max.iter().flatten().collect::<Vec<_>>(), [&(1_u64 << 30)]);
    assert_eq!((memory.mean.len() as u64, history.step_ms), (history.points, 60_000));
    let top: LoadTop = get("/api/v1/top?by=memory&limit=3").await.read();
    assert_eq!((top.hosts[0].host.as_str(), top.vms_total), ("a", 0));
    for (path, code) in [
        ("/api/v1/load", ProblemCode::InvalidRequest),
        ("/api/v1/load?object=vm:none", ProblemCode::NotFound),
        ("/api/v1/load?object=host:a&resolution=1s", ProblemCode::InvalidRequest),
        ("/api/v1/load?object=host:a&from=2&to=1", ProblemCode::InvalidRequest),
        ("/api/v1/top?limit=0", ProblemCode::InvalidRequest),
        ("/api/v1/top?by=name", ProblemCode::InvalidRequest),
    ] {
        assert_eq!(get(path).await.problem(), code, "{path}");
    }
}
