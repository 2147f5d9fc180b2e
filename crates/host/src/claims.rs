//! Guests that are being adopted, and the names of their VMs. A guest has several places if its
//! QEMU has several monitors. A second adoption of it would resume a guest that the first hands
//! over.

use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::VmName;
use parking_lot::Mutex;

/// Process of a QEMU, with its start.
pub(crate) type Process = (i32, u64);

/// Guests with the names of their VMs.
#[derive(Debug, Default)]
pub(crate) struct Claims(Arc<Mutex<Vec<Taken>>>);

#[derive(Debug)]
struct Taken {
    vm: VmName,
    process: Process,
}

/// A guest and a name, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    all: Arc<Mutex<Vec<Taken>>>,
    vm: VmName,
}

impl Claims {
    /// Takes a guest and the name of its VM; refuses what another adoption has.
    pub(crate) fn take(&self, vm: &VmName, process: Process) -> Result<Claim, ApiError> {
        let mut all = self.0.lock();
        if all.iter().any(|taken| taken.vm == *vm || taken.process == process) {
            let message = format!(
                "cannot adopt VM \"{vm}\": an adoption of that guest or name is in progress"
            );
            let remedy = "wait for its end, or cancel it; the agent's log has one that an earlier \
                          agent began";
            return Err(ApiError::new(ErrorCode::Busy, message, remedy));
        }
        all.push(Taken { vm: vm.clone(), process });
        Ok(Claim { all: Arc::clone(&self.0), vm: vm.clone() })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.all.lock().retain(|taken| taken.vm != self.vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_and_a_name_have_one_adoption_at_a_time() {
        let name = |name: &str| VmName::new(name).unwrap();
        let claims = Claims::default();
        let web = claims.take(&name("web"), (7, 1)).unwrap();
        // The same guest by another monitor, and another guest by the same name.
        for (vm, pid) in [("other", 7), ("web", 8)] {
            assert_eq!(claims.take(&name(vm), (pid, 1)).unwrap_err().code, ErrorCode::Busy);
        }
        let _db = claims.take(&name("db"), (8, 1)).unwrap();
        drop(web);
        claims.take(&name("web"), (7, 1)).unwrap();
    }
}
