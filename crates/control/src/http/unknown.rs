//! Requests for VMs that no report contains yet.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use godwit_qemu::VmName;

use crate::manager::Manager;

/// Asks the agents for the VM of a request, if the manager does not know it, before the request is
/// handled.
pub(crate) async fn ask_once(
    State(manager): State<Arc<Manager>>,
    request: Request,
    next: Next,
) -> Response {
    if let Some(vm) = named(request.uri().path()) {
        manager.vms.meet(&vm).await;
    }
    next.run(request).await
}

/// Returns the VM that a path names.
fn named(path: &str) -> Option<VmName> {
    let rest = path.strip_prefix("/api/v1/vms/")?;
    // Names of VMs have no characters that are encoded in a path.
    VmName::new(rest.split('/').next()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_vm() {
        let vm = |path| named(path).map(|vm| vm.to_string());
        for path in ["/api/v1/vms/web", "/api/v1/vms/web/moves", "/api/v1/vms/web/"] {
            assert_eq!(vm(path).as_deref(), Some("web"), "{path}");
        }
        for path in ["/api/v1/vms", "/api/v1/vms/", "/api/v1/hosts/a", "/api/v1/vms/%2e%2e/x"] {
            assert_eq!(vm(path), None, "{path}");
        }
    }
}
