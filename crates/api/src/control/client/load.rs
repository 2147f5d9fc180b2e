//! Requests about the load of VMs, hosts, datastores and the cluster.

use super::super::load::{LoadHistory, LoadResolution, LoadTop, TopBy};
use super::{ManagerClient, ManagerError};
use crate::client::segment;
use crate::json_name;

impl ManagerClient {
    /// Returns the load of an object (`vm:NAME`, `host:NAME`, `datastore:NAME`, `cluster`) between
    /// two times, milliseconds since 1970. Without times: the last hour; without a resolution: the
    /// finest one that reaches back so far.
    pub async fn load(
        &self,
        object: &str,
        from_unix_ms: Option<u64>,
        to_unix_ms: Option<u64>,
        resolution: Option<LoadResolution>,
    ) -> Result<LoadHistory, ManagerError> {
        let mut path = format!("/api/v1/load?object={}", segment(object));
        let times = [("from", from_unix_ms), ("to", to_unix_ms)];
        for (name, time) in times.into_iter().filter_map(|(name, time)| Some((name, time?))) {
            path.push_str(&format!("&{name}={time}"));
        }
        if let Some(resolution) = resolution {
            path.push_str(&format!("&resolution={}", json_name(&resolution)));
        }
        self.get(&path).await
    }

    /// Returns the `limit` VMs and hosts that use most at present.
    pub async fn top(&self, by: TopBy, limit: u32) -> Result<LoadTop, ManagerError> {
        self.get(&format!("/api/v1/top?by={}&limit={limit}", json_name(&by))).await
    }
}
