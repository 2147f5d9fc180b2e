use std::collections::BTreeMap;

use super::*;

fn request(disks_in: Option<&str>) -> ImportVm {
    ImportVm {
        from: ImportFrom::Text(String::new()),
        name: None,
        networks: BTreeMap::new(),
        disks_in: disks_in.map(PathBuf::from),
        take_disks: false,
        warm: None,
        dry_run: false,
        start: false,
        vm_dirs_only: false,
    }
}

fn disk(source: DiskSource) -> SourceDisk {
    SourceDisk { name: "vda".to_owned(), source, format: None, bytes: None }
}

fn volume(storage: &str, name: &str) -> SourceDisk {
    disk(DiskSource::Volume { storage: storage.to_owned(), name: name.to_owned() })
}

#[test]
fn disks_are_found_where_the_caller_or_the_definition_says() {
    let found = |disk: &SourceDisk, dir: Option<&str>| {
        path_of(disk, &request(dir), Some(Path::new("/beside")))
            .map(|path| path.unwrap_or_default().display().to_string())
    };
    let plain = disk(DiskSource::Path("/var/images/a.img".into()));
    assert_eq!(found(&plain, None).unwrap(), "/var/images/a.img");
    assert_eq!(found(&plain, Some("/srv/in")).unwrap(), "/srv/in/a.img");
    let member = disk(DiskSource::Member("a.vmdk".to_owned()));
    assert_eq!(found(&member, None).unwrap(), "/beside/a.vmdk");
    assert_eq!(found(&member, Some("/srv/in")).unwrap(), "/srv/in/a.vmdk");
    let local = volume("local", "101/vm-101-disk-0.qcow2");
    assert_eq!(found(&local, None).unwrap(), "/var/lib/vz/images/101/vm-101-disk-0.qcow2");
    assert_eq!(found(&local, Some("/srv/in")).unwrap(), "/srv/in/vm-101-disk-0.qcow2");
    assert_eq!(
        found(&volume("lvm", "vm-1-disk-0"), Some("/dev/pve")).unwrap(),
        "/dev/pve/vm-1-disk-0"
    );
    assert!(found(&volume("lvm", "vm-1-disk-0"), None).unwrap_err().contains("--disks-in"));
    assert!(found(&volume("local", "../../../etc/shadow"), None).is_err());
    assert!(found(&volume("local", "101/.."), Some("/srv/in")).is_err());
}

#[test]
fn a_size_that_a_package_lies_about_is_refused() {
    let found = ImportDisk {
        name: "vda".to_owned(),
        source: None,
        format: "vmdk".to_owned(),
        bytes: 1 << 30,
    };
    let findings = |disk: SourceDisk| {
        let mut findings = Vec::new();
        check_size(&SourceDisk { bytes: Some(2 << 30), ..disk }, &found, &mut findings);
        findings.iter().map(|found| found.refuses).collect::<Vec<_>>()
    };
    assert_eq!(findings(disk(DiskSource::Member("a".to_owned()))), [true]);
    assert_eq!(findings(volume("local", "a")), [false]);
}
