//! An etcd that tests share, with a prefix for each test, and etcd's own client.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use etcd_client::Client;
use godwit_store::EtcdStore;
use parking_lot::Mutex;

use crate::etcd_server::EtcdServer;

/// Connects as an operator's own client would.
pub(crate) async fn raw(server: &EtcdServer) -> Client {
    Client::connect([server.endpoint()], None).await.unwrap()
}

/// A prefix of a shared etcd, used by one test.
pub(crate) struct Prefix {
    server: Arc<EtcdServer>,
    prefix: String,
}

/// The shared etcd. It ends with the last test.
static SHARED: Mutex<Weak<EtcdServer>> = Mutex::new(Weak::new());
static PREFIXES: AtomicUsize = AtomicUsize::new(0);

impl Prefix {
    pub(crate) fn new() -> Option<Prefix> {
        let mut shared = SHARED.lock();
        let server = match shared.upgrade() {
            Some(server) => server,
            None => Arc::new(EtcdServer::start()?),
        };
        *shared = Arc::downgrade(&server);
        let prefix = format!("/test-{}", PREFIXES.fetch_add(1, Ordering::Relaxed));
        Some(Prefix { server, prefix })
    }

    pub(crate) fn open(&self) -> EtcdStore {
        EtcdStore::new(&self.server.settings(&self.prefix)).unwrap()
    }

    pub(crate) async fn remove_leader(&self) {
        let key = format!("{}/leader", self.prefix);
        raw(&self.server).await.delete(key, None).await.unwrap();
    }
}
