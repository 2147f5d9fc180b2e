//! Images in work, as requests see them.

use godwit_api::{CreateVm, ErrorCode};
use godwit_qemu::{Disk, DiskFormat, VmName, VmSpec};

use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::TestHost;

#[test]
fn an_image_that_a_warm_import_writes_is_not_deleted_and_goes_to_its_vm_alone() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let path = host.path().join("web.raw");
        std::fs::write(&path, [0; 4096]).unwrap();
        let spec = |name: &str| VmSpec {
            disks: vec![Disk::new(&path, DiskFormat::Raw)],
            ..host.spec(name)
        };
        let create = |name: &str| agent.create(CreateVm::new(spec(name), false));
        let delete = || agent.delete_disk(&path);
        let place = agent.place(&path, "write").unwrap();
        let making = place.make().unwrap();
        for refused in [delete().await.unwrap_err(), create("web").await.unwrap_err()] {
            assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        }
        // After the final pass, until the VM runs.
        making.reserve_for("web");
        for refused in [delete().await.unwrap_err(), create("db").await.unwrap_err()] {
            assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        }
        create("web").await.unwrap();
        drop(making);
        assert_eq!(delete().await.unwrap_err().code, ErrorCode::WrongState);
        agent.delete(&VmName::new("web").unwrap(), false).await.unwrap();
        delete().await.unwrap();
        assert!(!path.exists());
    });
}
